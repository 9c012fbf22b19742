"""The live page: follows the run, answers only to this machine, and serves no file."""

import http.client
import json
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from gramscope.base.errors import GramscopeError, InputError
from gramscope.report import serve
from gramscope.report.run_sources import open_all
from gramscope.report.server import Live
from gramscope.store import RunWriter
from report.synthetic import HOSTILE, append, moment, write_run


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": f"127.0.0.1:{server.port}", **headers}.items():
        if value is not None:
            connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply, body


@pytest.fixture
def served(tmp_path):
    run = write_run(tmp_path / "a", steps=(0, 5))
    (tmp_path / "secret.txt").write_text("outside")
    with serve(run) as server:
        yield run, server


def test_the_page_and_its_news(served):
    run, server = served
    reply, page = ask(server)
    assert reply.status == 200
    assert 'data-live="2000"' in page
    reply, body = ask(server, "/data.json")
    news = json.loads(body)
    assert news["status"] == "Following: a at step 5."
    version = f'"{news["version"]}"'
    assert ask(server, "/data.json", If_None_Match=version)[0].status == 304
    scalars, arrays = moment(10, 10, False, ["0", "2"], np.random.default_rng(0))
    append(run, 10, scalars, arrays)
    reply, body = ask(server, "/data.json", If_None_Match=version)
    assert reply.status == 200
    assert json.loads(body)["panels"][0]["plots"][0]["frames"][0][0]["x"] == [0, 5, 10]
    assert "at step 10" in json.loads(body)["html"]


def test_loopback_only_with_its_own_name(served):
    _, server = served
    assert server._http.server_address[0] == "127.0.0.1"
    assert ask(server, Host=f"localhost:{server.port}")[0].status == 200
    for host in (
        None,
        "",
        "evil.example",
        f"evil.example:{server.port}",
        "127.0.0.1",
        f"127.0.0.1:{server.port}.evil.example",
    ):
        reply, body = ask(server, Host=host)
        assert reply.status in (400, 403), host
        assert "Following" not in body
    assert ask(server, Origin="http://evil.example")[0].status == 403
    assert ask(server, Origin=f"http://127.0.0.1:{server.port}")[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/meta.json", "/scalars.jsonl", "/arrays/step_00000000.safetensors", "/../secret.txt", "/..%2fsecret.txt",
        "/%2e%2e/secret.txt", "//etc/passwd", "/etc/passwd", "/data.json/../../secret.txt", "/\\..\\secret.txt",
        "/favicon.ico", "http://127.0.0.1/etc/passwd", "/data.json%00.html",
    ],
)  # fmt: skip
def test_no_file_is_served(served, path):
    _, server = served
    reply, body = ask(server, path)
    assert reply.status == 404
    assert body == "There is only / and /data.json here.\n"


def test_nothing_is_read_outside_the_run(tmp_path):
    run = write_run(tmp_path / "a", steps=(0, 5))
    other = write_run(tmp_path / "b", steps=(5,), seed=7)
    shutil.move(run / "arrays/step_00000005.safetensors", tmp_path / "real")
    (run / "arrays/step_00000005.safetensors").symlink_to(other / "arrays/step_00000005.safetensors")
    with serve(run) as server:
        news = json.loads(ask(server, "/data.json")[1])
    assert "The arrays of step 5 cannot be read" in news["html"]
    kernel = next(panel for panel in news["panels"] if panel["key"] == "kernel")
    assert kernel["control"]["options"] == ["0"]


def test_only_reading(served):
    _, server = served
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, "/", method)[0].status == 501
    reply, body = ask(server, "/", "HEAD")
    assert (reply.status, body) == (200, "")


def test_headers(served):
    _, server = served
    headers = dict(ask(server)[0].getheaders())
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert "Python" not in headers["Server"]


def test_names_are_escaped(tmp_path):
    run = write_run(tmp_path / "a", name=HOSTILE, steps=(0, 5), layers=[HOSTILE], notes=[HOSTILE])
    with serve(run) as server:
        page = ask(server)[1]
        news = json.loads(ask(server, "/data.json")[1])
    assert "<img" not in page.replace("'<img", "")
    assert "<img" not in news["html"]
    assert "<script" not in news["html"]


def test_a_run_that_vanishes_is_said(served):
    run, server = served
    shutil.rmtree(run)
    reply, body = ask(server, "/data.json")
    assert reply.status == 200
    assert "does not exist" in json.loads(body)["error"]
    assert ask(server)[0].status == 500


def test_many_ask_at_once(served):
    run, server = served
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(ask(server, "/data.json")[0].status)) for _ in range(12)]
    for place, thread in enumerate(threads):
        thread.start()
        if place == 5:
            append(run, 20, {"loss": 0.1})
    for thread in threads:
        thread.join()
    assert statuses == [200] * 12


def test_errors(tmp_path, served):
    run, server = served
    with pytest.raises(GramscopeError, match="does not exist"):
        serve(tmp_path / "nowhere")
    with pytest.raises(InputError, match="must be free"):
        serve(run, port=server.port)
    with pytest.raises(InputError, match="must lie in"):
        serve(run, port=70_000)
    with pytest.raises(InputError, match="positive"):
        serve(run, every=0.0)


def test_waiting_ends_with_an_interrupt(tmp_path):
    run = write_run(tmp_path / "a", steps=(0,))
    # The address is told from a thread, once the main one has been waiting for a while: an interrupt before that would
    # meet the script and not the server.
    code = """
import signal, sys, threading
from gramscope.report import serve
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
server = serve(sys.argv[1])
threading.Timer(1.0, lambda: print(server.url, flush=True)).start()
server.wait()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")


def test_an_error_while_reading_does_not_keep_the_old_page(served, monkeypatch):
    run, server = served
    before = json.loads(ask(server, "/data.json")[1])["version"]
    append(run, 20, {"loss": 0.1})

    def broken(runs):
        raise InputError("for a moment")

    with monkeypatch.context() as patched:
        patched.setattr("gramscope.report.server.gather", broken)
        assert json.loads(ask(server, "/data.json")[1]) == {"error": "for a moment"}
    assert json.loads(ask(server, "/data.json")[1])["version"] != before


def test_closed_is_closed(tmp_path):
    server = serve(write_run(tmp_path / "a", steps=(0,)))
    server.close()
    with pytest.raises(ConnectionError):
        ask(server)


def test_numbers_that_are_logged_between_records_are_news(tmp_path):
    with RunWriter.create(tmp_path / "a") as writer:
        writer.append(0, {"norm/parameters": 1.0})
        live = Live(open_all(tmp_path / "a"), "live", 2000)
        live.page()
        known = live.version
        assert live.news(known) is None
        writer.log({"loss": ([1, 2, 3], [3.0, 2.0, 1.0])})
        news = json.loads(live.news(known))
    assert news["status"] == "Following: a at step 3."
    assert "Loss 3 at step 1 → 1 at step 3" in news["html"]


def test_a_run_that_begins_in_a_served_folder_joins(tmp_path):
    write_run(tmp_path / "a", steps=(0, 10))
    live = Live(tmp_path, "live", 2000)
    live.page()
    known = live.version
    assert live.news(known) is None
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "meta.json").write_text("{")
    assert live.news(known) is None, "a run that cannot be read yet is waited for"
    write_run(tmp_path / "b", steps=(0, 10))
    news = json.loads(live.news(known))
    assert [run["name"] for run in news["runs"]] == ["a", "b"]
    assert news["status"] == "Following: a at step 10; b at step 10."


def test_many_runs_have_a_short_status(tmp_path):
    for place in range(9):
        write_run(tmp_path / f"run-{place}", steps=(0, 10 * (place + 1)))
    assert "Following 9 runs; the longest is at step 90." in Live(tmp_path, "live", 2000).page()
