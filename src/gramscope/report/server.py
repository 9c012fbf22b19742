"""The live page: the report of a run that grows, on this machine only.

The server knows two addresses, ``/`` and ``/data.json``, and builds both in memory: no address is ever turned into a
path, so there is nothing outside the run, nor a file inside it, that could be asked for.
"""

import hashlib
import json
import os
import sys
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from types import TracebackType
from urllib.parse import urlsplit

from gramscope.base.errors import GramscopeError, InputError
from gramscope.report.page import FEW_RUNS, Content, fragment, gather, payload, policy, rendered
from gramscope.report.run_sources import Sources, open_all
from gramscope.store import Run, StoreError, find_runs

LOOPBACK = "127.0.0.1"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def serve(run: Sources, port: int = 0, *, every: float = 2.0, title: str = "gramscope, live") -> "ReportServer":
    """Serve the report of a run (or of several) on loopback while it grows; returns at once.

    Args:
        run: a run directory, a folder of runs (those that begin later join), a pattern, an opened run, or several.
        port: of 127.0.0.1; 0 takes a free one, see ``.url``.
        every: seconds between two questions of the page for news.
        title: of the page.

    Example:
        >>> import tempfile, urllib.request
        >>> from gramscope.store import RunWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> with RunWriter.create(folder.name + "/a") as writer:
        ...     _ = writer.append(0, {"loss": 1.0})
        >>> with serve(folder.name + "/a") as server:
        ...     urllib.request.urlopen(server.url).status
        200
        >>> folder.cleanup()
    """
    if not 0 <= port < 65536:
        raise InputError(f"port must lie in 0..65535, got {port}. Pass 0 for a free one.")
    if not every > 0:
        raise InputError(f"every must be a positive number of seconds, got {every}.")
    return ReportServer(Live(run, title, round(1000 * every)), port)


class Live:
    """The newest page of some runs, built again only when a run has grown, or has begun in a folder of runs."""

    def __init__(self, sources: Sources, title: str, every_ms: int) -> None:
        self.runs, self.title, self.every_ms = open_all(sources), title, max(100, every_ms)
        given = [sources] if isinstance(sources, str | os.PathLike | Run) else sources
        self._folders = [source for source in given if not isinstance(source, Run)]
        self._lock = threading.Lock()
        self._content: Content | None = None
        self.version = ""

    def _refreshed(self) -> Content:
        changed = [run.refresh() for run in self.runs]  # all of them: any() alone would stop at the first
        changed.append(self._joined())
        if any(changed):
            self._content = None  # forgotten first, so that an error while reading does not keep the old page for new
        if self._content is None:
            self._content = gather(self.runs)
            told = json.dumps([[view.meta, len(view.steps), list(view.steps[-1:])] for view in self._content.views])
            lines = [run.lines for run in self.runs]
            self.version = hashlib.sha256(f"{told}{lines}".encode()).hexdigest()[:16]
        return self._content

    def _joined(self) -> bool:
        """Whether runs have begun since."""
        known = {run.path for run in self.runs}
        before = len(self.runs)
        for path in (path for folder in self._folders for path in find_runs(folder)):
            if path.absolute() not in known:
                with suppress(StoreError):  # its first lines are not written yet: the next question will find it
                    self.runs.append(Run(path))
        return len(self.runs) > before

    def _status(self, content: Content) -> str:
        ends = [
            f"{view.name} at step {view.end:,}" if len(view.steps) else f"{view.name} has no step yet"
            for view in content.views
        ]
        if len(ends) > FEW_RUNS:
            return f"Following {len(ends)} runs; the longest is at step {max(view.end for view in content.views):,}."
        return f"Following: {'; '.join(ends)}."

    def page(self) -> str:
        with self._lock:
            content = self._refreshed()
            status = self._status(content)
            return rendered(content, self.title, live_ms=self.every_ms, version=self.version, status=status)

    def news(self, known: str) -> str | None:
        """The figures and words of now as JSON; None where ``known`` is the newest version."""
        with self._lock:
            content = self._refreshed()
            if known == self.version:
                return None
            told = {
                **payload(content),
                "version": self.version,
                "status": self._status(content),
                "html": fragment(content),
            }
            return json.dumps(told, allow_nan=False)


class ReportServer:
    """A running server: ``.url``, ``.wait()``, ``.close()``; as a context manager it closes itself."""

    def __init__(self, live: Live, port: int) -> None:
        class Handler(_Handler):
            pass

        Handler.live = live
        try:
            self._http = _Server((LOOPBACK, port), Handler)
        except OSError as error:
            raise InputError(
                f"port {port} of {LOOPBACK} must be free, but it cannot be opened ({error.strerror}). "
                "Pass another one, or 0 for any."
            ) from error
        self.port = int(self._http.server_address[1])
        names = [f"{name}:{self.port}" for name in (LOOPBACK, "localhost")]
        Handler.hosts = frozenset([*names, *([LOOPBACK, "localhost"] if self.port == 80 else [])])
        self._thread = threading.Thread(target=self._http.serve_forever, name="gramscope-report", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/"

    def wait(self) -> None:
        """Serve until the process is interrupted (Ctrl-C), then close."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.5)
        except KeyboardInterrupt:
            pass
        finally:
            self.close()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> "ReportServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """A tab that was closed in the middle of an answer is no error; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    live: Live
    hosts: frozenset[str]
    server_version, sys_version = "gramscope", ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # a client that never finishes its question does not keep its thread

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        if not self._asked_from_here():
            # A foreign page can make a browser come here under another name (DNS rebinding); it gets nothing.
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "This server answers only to its own address.\n", body)
            return
        path = urlsplit(self.path).path
        try:
            if path in ("/", "/index.html"):
                self._send(HTTPStatus.OK, "text/html", self.live.page(), body)
            elif path == "/data.json":
                news = self.live.news(self.headers.get("If-None-Match", "").strip().removeprefix("W/").strip('"'))
                if news is None:
                    self._send(HTTPStatus.NOT_MODIFIED, "application/json", "", False)
                else:
                    self._send(HTTPStatus.OK, "application/json", news, body)
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is only / and /data.json here.\n", body)
        except GramscopeError as error:
            # The run was moved or damaged while it was watched: the page says so and keeps asking.
            kind, text = (
                ("application/json", json.dumps({"error": str(error)}))
                if path == "/data.json"
                else ("text/plain", str(error))
            )
            self._send(HTTPStatus.OK if path == "/data.json" else HTTPStatus.INTERNAL_SERVER_ERROR, kind, text, body)

    def _asked_from_here(self) -> bool:
        hosts = self.headers.get_all("Host") or []
        origins = self.headers.get_all("Origin") or []
        return (
            len(hosts) == 1
            and hosts[0].strip().lower() in self.hosts
            and all(origin.lower() in {f"http://{host}" for host in self.hosts} for origin in origins)
        )

    def _send(self, status: HTTPStatus, kind: str, text: str, body: bool) -> None:
        data = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", f"{policy(True)}; frame-ancestors 'none'")
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal belongs to the user."""
