"""The site: pages in their fixed form, links that lead somewhere, references that exist, notebooks that run."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import jaxtyping
import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MARKDOWN = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]


def module_of(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reading_test = module_of(ROOT / "tools" / "reading_test.py")
bibliography = module_of(DOCS / "bibliography.py")


# What can be read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reading_test.concept_pages())
def test_a_concept_page_says_in_100_words_what_it_is_and_what_to_do(name):
    assert reading_test.faults((DOCS / f"{name}.md").read_text(encoding="utf-8")) == []


def test_the_reading_test_finds_what_is_wrong():
    page = (DOCS / "dead-units.md").read_text(encoding="utf-8")
    assert any("What to do" in fault for fault in reading_test.faults(page.replace("**What to do.**", "Do:")))
    wordy = page.replace("**High or low.**", "**High or low.** " + "word " * 60)
    assert any("more than 100" in fault for fault in reading_test.faults(wordy))
    assert "no picture" in reading_test.faults(re.sub(r"!\[.*", "", page))
    assert any("Formula" in fault for fault in reading_test.faults(page.replace("## Formula", "## Other")))


def test_sentences_are_counted_without_code_and_tables():
    text = "# Title\n\nOne two `a b c d`. Three.\n\n| x | y |\n\n```python\nmany words\n```\n    z = W x\n- item one\n"
    assert reading_test.sentences(text) == ["One two code.", "Three.", "- item one"]


def test_words_are_plain():
    """Words that readers of the reports and pages stumbled over."""
    quaint = re.compile(r"\b(fore(told|saw|seen?)|dear|by heart|born with|mended|riddle|company of)\b", re.I)
    files = [*MARKDOWN, *(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.j2"), *NOTEBOOKS]
    found = [f"{path.name}: {m[0]}" for path in files for m in quaint.finditer(path.read_text(encoding="utf-8"))]
    assert found == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


# References and links -----------------------------------------------------------------------------


def test_nothing_refers_to_private_notes():
    notes = r"\btheory [1-9]\b|\b(issue|stop) \d+\b|\b(ENGINE|WORDS|STYLE|USERS)\.md|\bshared/(theory|seeds|design)"
    private = re.compile(notes, re.I)
    files = [*MARKDOWN, *(ROOT / "src").rglob("*.py"), *DOCS.rglob("*.py")]
    found = [f"{path.name}: {m[0]}" for path in files for m in private.finditer(path.read_text(encoding="utf-8"))]
    assert found == []


def test_every_cited_paper_is_in_the_list():
    works = bibliography.entries((DOCS / "references.bib").read_text(encoding="utf-8"))
    known = {work["eprint"] for work in works.values() if "eprint" in work}
    assert all(work["title"] and work["year"] for work in works.values())
    files = [*MARKDOWN, *(ROOT / "src").rglob("*.py")]
    cited = {m for path in files for m in re.findall(r"arXiv:(\d{4}\.\d{4,5})", path.read_text(encoding="utf-8"))}
    assert cited - known == set(), "add them to docs/references.bib and run make docs"


def test_the_page_of_references_is_that_of_the_list(tmp_path):
    bibliography.write_bibliography(DOCS / "references.bib", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (DOCS / "references.md").read_text(), "run make docs"


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: path.name)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    written = {"reference/index.rst"}  # by the build
    assert [t for t in targets if t and t not in written and not (page.parent / t).exists()] == []


def anchors(path: Path) -> set[str]:
    """What a link may name after ``#``: the headings of a page, as GitHub and the site write them."""
    titles = re.findall(r"^#{1,4} (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*MARKDOWN, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_to_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", text)
    assert [f"{to}#{name}" for to, name in links if name not in anchors(page.parent / to if to else page)] == []


def test_every_page_is_in_the_tree():
    listed: set[str] = set()
    for path in PAGES:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
            lines = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
            listed |= {re.sub(r".*<(.*)>", r"\1", line) for line in lines}
    wanted = {path.stem for path in PAGES} - {"index"} | {f"notebooks/{path.stem}" for path in NOTEBOOKS}
    assert wanted - listed == set()


# Notebooks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_can_be_read_as_it_is(path):
    text = path.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    kinds = [out["output_type"] for cell in code for out in cell["outputs"]]
    assert kinds, "run make notebooks"
    assert "error" not in kinds
    assert any("image/png" in out.get("data", {}) for cell in code for out in cell["outputs"])
    assert len(text) < 200_000
    assert not re.search(r"/home/|/root/|/work/|/tmp/", text)


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Runs the code of a notebook in this process: to start a kernel would take longer. `make docs` starts one."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    jaxtyping.config.update("jaxtyping_disable", True)  # readers run without the checks of the test suite

    def run(path: Path) -> dict[str, object]:
        names: dict[str, object] = {}
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), path.name, "exec"), names)
        return names

    yield run
    jaxtyping.config.update("jaxtyping_disable", False)
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != "theory-tour"], ids=lambda path: path.stem)
def test_a_notebook_runs(path, executed, capsys):
    executed(path)
    shown = json.loads(path.read_text(encoding="utf-8"))["cells"]
    streams = [out for cell in shown for out in cell.get("outputs", []) if out.get("name") == "stdout"]
    assert bool(capsys.readouterr().out) == bool(streams), "it prints if it did when it was committed"


def test_the_theory_tour_runs_and_says_what_it_said(executed, capsys):
    names = executed(DOCS / "notebooks" / "theory-tour.ipynb")
    printed = capsys.readouterr().out
    assert "Fields of 12 examples" in printed
    assert float(printed.split("relative difference ")[1].split()[0]) < 1e-2
    assert names["errors"][-1] < names["errors"][0] / 1000, "the error of a step falls as its square"


# The site in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built with warnings as errors; the notebooks as they were committed."""
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_nb")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=built_without_notebooks(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    handler = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(out)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", out
    server.shutdown()


def built_without_notebooks():
    import os

    return {**os.environ, "NOTEBOOKS": "off", "PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


FAULTS = """async width => {
  if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
  const faults = [];
  if (document.documentElement.scrollWidth > width) faults.push("scrolls sideways");
  if ([...document.querySelectorAll("article img")].some(image => image.complete && !image.naturalWidth))
    faults.push("a picture is missing");
  const equations = [...document.querySelectorAll("article .math")];
  if (equations.some(one => !one.querySelector("mjx-container") || one.querySelector("mjx-merror")))
    faults.push("an equation is not rendered");
  if (!document.querySelector("article h1")) faults.push("no heading");
  return faults;
}"""


@pytest.mark.full
@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_is_whole(site, browser, width):
    """Nothing scrolls sideways, every picture and every equation is there; of the pages of names every tenth."""
    address, out = site
    page = browser.new_page(viewport={"width": width, "height": 900})
    files = [
        p.relative_to(out) for p in (*out.glob("*.html"), *out.glob("notebooks/*.html"), *out.glob("reference/*.html"))
    ]
    names = sorted((out / "reference" / "names").glob("*.html"))[::10]
    found = {}
    for file in (*files, *(p.relative_to(out) for p in names)):
        if file.name not in ("search.html", "genindex.html", "py-modindex.html"):
            page.goto(f"{address}/{file}", wait_until="load")
            found[str(file)] = page.evaluate(FAULTS, width)
    page.goto(f"{address}/reference/index.html", wait_until="load")
    assert page.evaluate("document.documentElement.scrollHeight") < 4000, "a list of packages, not of all names"
    page.close()
    assert {file: faults for file, faults in found.items() if faults} == {}


@pytest.mark.full
def test_the_check_of_a_page_finds_what_is_wrong(browser):
    page = browser.new_page(viewport={"width": 390, "height": 900})
    page.set_content('<article><img src="data:,"><div style="width:900px">.</div><div class="math">x</div></article>')
    page.wait_for_function("document.querySelector('img').complete")
    assert page.evaluate(FAULTS, 390) == [
        "scrolls sideways",
        "a picture is missing",
        "an equation is not rendered",
        "no heading",
    ]
    page.close()


@pytest.mark.full
def test_side_bar_search_and_equations(site, browser):
    address, _ = site
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"{address}/kernel-drift.html", wait_until="load")
    links = page.locator(".bd-sidebar-primary a").all_inner_texts()
    assert {"Kernel drift", "Richness", "Dead units"} <= {text.strip() for text in links}
    page.wait_for_selector("mjx-container, .MathJax", timeout=20_000)
    assert page.locator("div.math mjx-container, div.math .MathJax").count() >= 1
    assert [url for url in requested if not url.startswith((address, "data:", "blob:"))] == [], "it works offline"
    page.goto(f"{address}/search.html?q=dead+units", wait_until="load")
    page.wait_for_selector("#search-results li a", timeout=20_000)
    assert any("dead-units" in (a.get_attribute("href") or "") for a in page.locator("#search-results li a").all())
    page.goto(f"{address}/index.html", wait_until="load")
    assert page.locator(".sd-card").count() == 4
    assert page.locator("img[src*=report]").evaluate("image => image.naturalWidth") > 600
    page.close()


@pytest.mark.full
def test_the_menu_opens_on_a_phone(site, browser):
    address, _ = site
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{address}/kernel-drift.html", wait_until="load")
    page.locator("button.primary-toggle").first.click()
    page.wait_for_selector("dialog[open] a, .bd-sidebar-primary a >> visible=true", timeout=10_000)
    assert page.get_by_role("link", name="Richness").first.is_visible()
    page.close()
