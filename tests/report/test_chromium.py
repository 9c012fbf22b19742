"""The page in a real browser: everything drawn, nothing asked for, controls that work, names that stay text.

Needs Debian's ``chromium`` (or another one named by ``GRAMSCOPE_CHROMIUM``) and playwright; skipped without.
"""

import csv
import io
import json
import os
import shutil
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from gramscope.report import report, serve
from report.synthetic import HOSTILE, append, moment, write_meta, write_run

CHROMIUM = os.environ.get("GRAMSCOPE_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="drives Chromium: pip install playwright")

DRAWN = """() => JSON.parse(document.getElementById("gramscope-data").textContent).panels.flatMap(panel =>
  [...document.querySelectorAll(`[data-panel="${panel.key}"] .plot`)].map((box, i) => ({
    panel: panel.key, caption: panel.plots[i].caption,
    wanted: panel.plots[i].frames[panel.plots[i].at ? panel.plots[i].at[panel.control.start] : 0].map(m => m.kind),
    lines: box.querySelectorAll(".scatterlayer .trace").length,
    inked: [...box.querySelectorAll(".scatterlayer .trace")].filter(t => t.querySelector("path")).length,
    heats: box.querySelectorAll(".heatmaplayer image").length, width: box.clientWidth, height: box.clientHeight })))"""


DRAWN_SO_FAR = (
    "[...document.querySelectorAll('.panel .fold[open] figure:not([hidden]) .plot')]"
    ".every(box => box.classList.contains('js-plotly-plot'))"
)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


class Watched:
    """A tab, and all that went wrong in it or was asked for by it."""

    def __init__(self, browser, **options):
        self.tab = browser.new_page(**{"viewport": {"width": 1240, "height": 900}, **options})
        self.wrong, self.asked = [], []
        self.tab.on("console", lambda m: m.type in ("error", "warning") and self.wrong.append(m.text))
        self.tab.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.tab.on("dialog", lambda dialog: (self.wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.tab.on("request", lambda request: self.asked.append(request.url))

    def open(self, url, unfold=True):
        self.tab.goto(str(url) if str(url).startswith("http") else f"file://{url}")
        self.ready()
        return self.unfold() if unfold else self.tab

    def unfold(self):
        """Open all panels, which are drawn when they are open."""
        self.tab.locator("#unfold").click()
        return self.until(DRAWN_SO_FAR)

    def until(self, expression):
        """Wait until it is true; asked from outside, because the page's policy forbids eval inside."""
        for _ in range(200):
            if self.tab.evaluate(f"() => {expression}"):
                return self.ready()
            self.tab.wait_for_timeout(50)
        pytest.fail(f"never true: {expression}; {self.tab.locator('#status').inner_text()}; {self.wrong}")

    def ready(self):
        self.tab.wait_for_selector("html[data-ready=yes]", timeout=30_000)
        return self.tab


@pytest.fixture
def watched(browser):
    opened = []

    def make(**options):
        opened.append(Watched(browser, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.tab.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    runs = [write_run(folder / "rich"), write_run(folder / "lazy", lazy=True, seed=1)]
    append(runs[0], 500, {"wobble/1": 0.5, "wobble/2": 0.7}, {"picture": np.eye(3)})
    return report(runs, folder / "report.html")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return report(write_run(folder / "rich", steps=(0, 10, 20)), folder / "report.html")


@pytest.fixture(scope="module")
def shared(browser, page):
    """One tab for the tests that leave it as they found it: drawing all panels takes seconds."""
    seen = Watched(browser)
    seen.open(page)
    yield seen
    seen.tab.close()


def assert_all_drawn(tab):
    found = tab.evaluate(DRAWN)
    assert found
    for plot in found:
        assert plot["lines"] == plot["inked"] == plot["wanted"].count("line"), plot
        assert plot["heats"] == plot["wanted"].count("heat"), plot
        assert plot["width"] > 200, plot
        assert plot["height"] > 150, plot
    return found


def test_everything_is_drawn_and_nothing_asked_for(shared, page):
    found = assert_all_drawn(shared.tab)
    assert len({plot["panel"] for plot in found}) == 14
    assert shared.wrong == []
    assert shared.asked == [f"file://{page}"]


def test_the_report_of_the_demo(watched, tmp_path):
    """What a stranger sees first: the real runs of ``gramscope demo``, all panels of the default measures."""
    from gramscope.cli.demo import run

    path = run(tmp_path, steps=20, width=16, seed=0, as_json=True)
    page = watched()
    tab = page.open(path)
    assert page.wrong == []
    assert page.asked == [f"file://{path}"]
    assert len({plot["panel"] for plot in assert_all_drawn(tab)}) >= 10


def test_the_check_would_see_it(watched, small, tmp_path):
    text = small.read_text(encoding="utf-8")
    bad = tmp_path / "bad.html"
    bad.write_text(
        text.replace("</body>", "<img src='http://127.0.0.1:9/x.png' onerror='alert(1)'></body>"), encoding="utf-8"
    )
    seen = watched()
    tab = seen.open(bad)
    assert [line for line in seen.wrong if "Content Security Policy" in line]
    assert not [line for line in seen.wrong if line.startswith("dialog")]
    tab.evaluate("document.querySelector('.scatterlayer .trace').remove()")
    with pytest.raises(AssertionError):
        assert_all_drawn(tab)


def test_slider_list_and_toggles(shared):
    seen, tab = shared, shared.tab
    kernel = "document.querySelector('[data-panel=kernel] .plot').data[0].z[0][1]"
    before, slider = tab.evaluate(kernel), tab.locator("#control-kernel")
    slider.focus()
    tab.keyboard.press("Home")
    assert tab.locator("[data-panel=kernel] output").inner_text() == "0"
    assert slider.get_attribute("aria-valuetext") == "step 0"
    assert tab.evaluate(kernel) != before
    tab.keyboard.press("ArrowRight")
    assert tab.locator("[data-panel=kernel] output").inner_text() != "0"
    spectrum = "document.querySelector('[data-panel=spectra] .plot').data[0].y[0]"
    before = tab.evaluate(spectrum)
    tab.locator("#control-spectra").select_option(label="4.weight")
    assert tab.evaluate(spectrum) != before

    visible = "document.querySelector('[data-panel=training] .plot').data.map(trace => trace.visible)"
    assert tab.evaluate(visible) == [True] * 4
    tab.locator("#runs input").nth(0).uncheck()
    seen.ready()
    assert tab.evaluate(visible) == [False, False, True, True]
    assert tab.locator("[data-panel=shares] figure:visible").count() == 1
    assert tab.locator("article[data-of-run='0']").is_hidden()
    tab.locator("#runs input").nth(0).check()
    seen.ready()
    assert tab.evaluate(visible) == [True] * 4
    assert tab.locator("[data-panel=shares] figure:visible").count() == 2
    tab.locator("#log-steps").check()
    seen.ready()
    assert tab.evaluate("document.querySelector('[data-panel=training] .plot').layout.xaxis.type") == "log"
    assert tab.evaluate("document.querySelector('[data-panel=training] .plot').data[0].x[0]") == 12.5
    tab.locator("#log-steps").uncheck()
    seen.ready()
    assert seen.wrong == []


def test_tables_and_files(shared):
    tab = shared.tab
    tab.locator("[data-panel=training] .save summary").click()
    rows = tab.locator("[data-panel=training] table").first.locator("tbody tr")
    assert rows.count() == 17
    assert rows.nth(0).locator("th").inner_text() == "0"
    data = json.loads(tab.locator("#gramscope-data").text_content())

    def saved(kind, panel="kernel"):
        with tab.expect_download() as download:
            tab.locator(f"[data-panel={panel}] [data-save={kind}]").click()
        return open(download.value.path(), encoding="utf-8", newline="").read()

    lines = list(csv.DictReader(io.StringIO(saved("csv", "training"))))
    drawn = data["panels"][0]["plots"][0]["frames"][0][0]
    own = [line for line in lines if (line["figure"], line["series"]) == ("Loss", drawn["name"])]
    assert [float(line["y"]) for line in own] == drawn["y"]
    kernel = json.loads(saved("json"))
    assert np.array(kernel["plots"][0]["frames"][0][0]["z"]).shape == (40, 40)
    assert len(list(csv.DictReader(io.StringIO(saved("csv"))))) == 2 * 12 * 1600
    assert ElementTree.fromstring(saved("svg", "flips")).tag.endswith("svg")


def test_the_first_panels_are_open_and_the_others_open_when_they_are_asked_for(watched, small):
    seen = watched()
    tab = seen.open(small, unfold=False)
    folds = tab.locator(".panel > .fold")
    is_open = "[...document.querySelectorAll('.panel > .fold')].map(fold => fold.open)"
    opened = tab.evaluate(is_open)
    assert opened == [True] * 5 + [False] * (folds.count() - 5)
    assert folds.count() > 9
    drawn = "document.querySelectorAll('[data-panel=flips] .js-plotly-plot').length"
    assert tab.evaluate(drawn) == 0
    assert tab.locator("[data-panel=flips] h2").is_visible(), "its title stays"
    height = tab.evaluate("document.documentElement.scrollHeight")
    tab.locator("nav").get_by_role("link", name="Mask flips").click()
    seen.until(DRAWN_SO_FAR)
    assert tab.evaluate(drawn) == 1
    box = tab.locator("[data-panel=flips] .main-svg").first.bounding_box()
    assert box["width"] > 300, "measured when it had a place"
    tab.locator("[data-panel=flips] .fold > summary").click()
    assert tab.evaluate(is_open) == opened
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    seen.until(DRAWN_SO_FAR)
    assert all(tab.evaluate(is_open)), "printed whole"
    tab.wait_for_timeout(200)  # a dialogue is open for a while
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    tab.wait_for_timeout(200)
    assert tab.evaluate(is_open) == opened, "and left as it was"
    seen.unfold()
    assert tab.evaluate("document.documentElement.scrollHeight") > 1.5 * height
    assert_all_drawn(tab)
    assert seen.wrong == []


def test_dark_and_light(watched, small):
    tab = watched(color_scheme="dark").open(small)
    back = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(back) == "rgb(18, 22, 28)"
    tab.locator("#theme").press("Enter")
    tab.wait_for_selector("html[data-ready=yes]")
    assert tab.evaluate(back) == "rgb(255, 255, 255)"
    assert tab.locator("#theme").get_attribute("aria-pressed") == "false"


def test_narrow_print_and_no_script(watched, small):
    seen = watched(viewport={"width": 375, "height": 700})
    tab = seen.open(small, unfold=False)
    assert tab.evaluate("document.scrollingElement.scrollWidth") <= 375
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    assert len(tab.pdf()) > 100_000
    seen.unfold()
    tab.emulate_media(media="print")
    assert tab.locator(".tools").is_hidden()
    assert tab.locator("[data-panel=kernel] .plot").first.is_visible()
    assert seen.wrong == []
    bare = watched(java_script_enabled=False)
    bare.tab.goto(f"file://{small}")
    assert "The run is rich" in bare.tab.locator("#summary").inner_text()


def test_hostile_names_stay_text(watched, tmp_path):
    layers = [HOSTILE, "<b>bold</b>", "%{x}", "$x$", "<a href='javascript:alert(3)'>"]
    run = write_run(tmp_path / "a", name=HOSTILE, steps=(0, 1), layers=layers, notes=[HOSTILE])
    append(run, 2, {f"{HOSTILE}/{HOSTILE}": 1.0}, {HOSTILE: np.ones((2, 2))}, failures={HOSTILE: HOSTILE})
    seen = watched()
    tab = seen.open(report([run, run], tmp_path / "r.html", title=HOSTILE))
    assert_all_drawn(tab)
    for summary in tab.locator(".panel .save summary").all():
        summary.click()
    legend = tab.locator("[data-panel=shares] .legendtext").all_text_contents()
    assert "<b>bold</b>" in legend
    assert "%{x}" in legend
    assert "$x$" in legend
    assert tab.locator("h1").inner_text() == HOSTILE
    tab.locator("[data-panel=kernel] .plot").first.hover()
    tab.locator("[data-panel=linearity] .plot").first.hover()
    assert tab.locator("img, a[href^=javascript]").count() == 0
    assert tab.evaluate("document.querySelectorAll('svg a').length") == 0
    assert seen.wrong == []


def test_no_toolbar_stands_over_the_data_where_nothing_hovers(watched, small):
    """Plotly shows it for good on a touch screen, dark, at the top right."""
    touched = watched(has_touch=True, is_mobile=True, viewport={"width": 480, "height": 900}).open(small)
    assert touched.evaluate("matchMedia('(hover: none)').matches")
    assert touched.locator(".modebar-btn").count() > 5
    assert not any(bar.is_visible() for bar in touched.locator(".modebar-btn").all())


TICKS = """(key) => [...document.querySelector(`[data-panel=${key}] .plot`).querySelectorAll(".xtick text")]
  .map(t => t.textContent)"""


def test_short_runs_and_constants_have_sensible_axes(watched, tmp_path):
    write_meta(tmp_path / "a", "a")
    for step in (0, 1, 2):
        append(tmp_path / "a", step, {"loss": 2.0 - step / 2, "lr": 3e-4})
    seen = watched()
    tab = seen.open(report(tmp_path / "a", tmp_path / "r.html"))
    assert tab.evaluate(TICKS, "training") == ["0", "1", "2"]
    low, high = tab.evaluate("document.querySelector('[data-panel=upkeep] .plot').layout.yaxis.range")
    assert (low, high) == pytest.approx((1.5e-4, 4.5e-4)), "a constant lies in the middle of an axis of its own size"
    tab.locator("#log-steps").check()
    seen.until("document.querySelector('[data-panel=training] .plot').layout.xaxis.type === 'log'")
    assert tab.evaluate(TICKS, "training") == ["0", "1", "2"]
    assert seen.wrong == []


def test_step_0_of_a_logarithmic_axis_is_one_place(watched, tmp_path):
    """Lines that begin at 0 begin together, however far away their next point is: a level has two points alone."""
    write_meta(tmp_path / "a", "a")
    for step in (0, 1, 2, 5, 10, 66):
        append(tmp_path / "a", step, {"kernel/drift": step / 2.0})
    seen = watched()
    tab = seen.open(report(tmp_path / "a", tmp_path / "r.html"))
    tab.locator("#log-steps").check()
    seen.until("document.querySelector('[data-panel=kernel-moves] .plot').layout.xaxis.type === 'log'")
    begins = tab.evaluate("document.querySelector('[data-panel=kernel-moves] .plot').data.map(t => t.x[0])")
    assert begins == [0.5] * 3, "the run and the two levels of the verdict"
    assert seen.wrong == []


LABELS = """([key, place, axis]) => [...document.querySelectorAll(`[data-panel=${key}] .plot`)[place]
  .querySelectorAll(`.${axis}tick text`)].map(t => [t.textContent, t.getBoundingClientRect().toJSON()])"""


def labels(tab, key, axis, place=0):
    """The labels of an axis; none stands on another."""
    found = tab.evaluate(LABELS, [key, place, axis])
    start, end = ("left", "right") if axis == "x" else ("top", "bottom")
    boxes = sorted((box for _, box in found), key=lambda box: box[start])
    assert all(a[end] <= b[start] + 1 for a, b in pairwise(boxes)), [name for name, _ in found]
    return [name for name, _ in found]


def test_step_0_is_named_and_long_names_of_layers_stay_apart(watched, tmp_path):
    write_meta(tmp_path / "a", "a")
    layers = [f"bert.encoder.layer.{place}.attention.self.query" for place in (0, 1)]
    for step in (0, 1, 2, 3, 4, 6, 9, 15, 30, 60):
        append(tmp_path / "a", step, {"loss": 1.0} | {f"gradient_norm/{name}": 1.0 + step for name in layers})
    tab = watched().open(report(tmp_path / "a", tmp_path / "r.html"))
    tab.locator("#log-steps").check()
    assert labels(tab, "health", "x")[:3] == ["0", "1", "2"], "not 0.5, where step 0 stands"
    shown = tab.locator("[data-panel=health] .legendtext").all_text_contents()
    assert shown == ["ber.enc.lay.0.att.self.query", "ber.enc.lay.1.att.self.query"]


def test_a_page_of_one_run_has_no_box_to_hide_it_and_plain_numbers_at_its_axes(watched, tmp_path):
    write_meta(tmp_path / "a", "a")
    for step in (0, 1, 10, 100, 1000, 20_000):
        append(tmp_path / "a", step, {"loss": 10.0 ** (-step / 5000), "dead_units/2": 0.0, "kernel/drift": step / 50})
    seen = watched()
    tab = seen.open(report(tmp_path / "a", tmp_path / "r.html"))
    assert not tab.locator("#runs").is_visible()
    assert "a: Sequential, 6 records" in tab.locator("header").inner_text()
    assert "10,000" in labels(tab, "training", "x")
    assert "0.001" in labels(tab, "training", "y")
    assert labels(tab, "health", "y") == ["0", "0.2", "0.4", "0.6", "0.8", "1"], "a share, not -1 to 1"
    layout = "document.querySelector('[data-panel=kernel-moves] .plot').layout.yaxis.type"
    assert tab.evaluate(layout) == "log", "drift of 400 beside thresholds of 0.33 and 2.6"
    assert seen.wrong == []


@pytest.mark.parametrize(
    ("low", "wanted"), [(0.03, {"1", "0.5", "0.1", "0.05"}), (0.002, {"1", "0.1", "0.01"}), (1e-9, {"1", "0.01"})]
)
def test_labels_of_a_logarithmic_axis_stand_apart(watched, tmp_path, low, wanted):
    write_meta(tmp_path / "a", "a")
    for step in range(0, 101, 10):
        append(tmp_path / "a", step, {"loss": 1.6 * (low / 1.6) ** (step / 100)})
    seen = watched()
    assert wanted <= set(labels(seen.open(report(tmp_path / "a", tmp_path / "r.html")), "training", "y"))
    assert seen.wrong == []


def test_a_run_of_one_weight_with_one_eigenvalue(watched, tmp_path):
    """Its rank is a point, and no tail can be fitted."""
    write_meta(tmp_path / "a", "a", layers=["weight"])
    for step in range(0, 31, 10):
        scalars = {"alpha/weight": float("nan"), "alpha_null/weight": float("nan"), "alpha/other": 2.0}
        append(tmp_path / "a", step, scalars, {"spectrum/weight": np.array([0.3 + step / 100])})
    seen = watched()
    tab = seen.open(report(tmp_path / "a", tmp_path / "r.html", svg_dir=tmp_path / "svg"))
    assert labels(tab, "spectra", "x") == ["1"]
    assert tab.locator("[data-panel=spectra] .plot").first.locator(".point").count() == 4
    assert tab.locator("[data-panel=spectra] .none").inner_text() == "α is not defined here; see below."
    assert "α of weight is not defined at any step" in tab.locator("[data-panel=spectra]").inner_text()
    assert "α is not defined here" in (tmp_path / "svg" / "spectra-2.svg").read_text()
    assert seen.wrong == []


def test_numbers_that_cannot_be_drawn_are_said(watched, tmp_path):
    write_meta(tmp_path / "a", "a")
    for step in range(0, 31, 10):
        scalars = {"norm/parameters": 1e308, "kernel/drift": 1e300 * step, "mine": float("nan")}
        append(tmp_path / "a", step, scalars, {"kernel": np.full((3, 3), 1e200) + np.eye(3) * 1e200})
    seen = watched()
    tab = seen.open(report(tmp_path / "a", tmp_path / "r.html"))
    assert "beyond 1e300" in tab.locator("[data-panel=upkeep] .none").inner_text()
    assert "beyond 1e300" in tab.locator("[data-panel=kernel-moves] .lacks, [data-panel] .lacks").first.inner_text()
    assert tab.locator("[data-panel=others] .none").inner_text() == "No finite number to draw."
    assert labels(tab, "others", "y") == []
    assert tab.evaluate("document.querySelector('[data-panel=kernel] .plot').data[0].z[0]") == [2e200, 1e200, 1e200]
    assert seen.wrong == []


def test_the_live_page_follows(watched, tmp_path):
    path = tmp_path / "a"
    write_meta(path, "a")
    append(path, 0, {"loss": 1.0})
    with serve(path, every=0.2) as server:
        seen = watched()
        tab = seen.open(server.url)
        assert tab.locator(".panel").count() == 1
        x = "document.querySelector('[data-panel=training] .plot').data[0].x"
        append(path, 5, {"loss": 0.5})
        seen.until(f"{x}.length === 2")
        assert "0.5 at step 5" in tab.locator("#summary").inner_text()
        scalars, arrays = moment(10, 20, False, ["0", "2"], np.random.default_rng(0))
        append(path, 10, scalars, arrays)
        seen.until("document.querySelector('[data-panel=kernel]')")
        tab.locator("[data-panel=kernel] .fold > summary").click()
        tab.wait_for_selector("[data-panel=kernel] .heatmaplayer image", state="attached")
        seen.ready()
        append(path, 20, *moment(20, 20, False, ["0", "2"], np.random.default_rng(1)))
        seen.until("document.querySelector('[data-panel=kernel] output').textContent === '20'")
        tab.locator("#control-kernel").press("Home")
        append(path, 30, *moment(20, 20, False, ["0", "2"], np.random.default_rng(2)))
        seen.until(f"{x}.length === 5")
        assert tab.locator("[data-panel=kernel] output").inner_text() == "10"
        assert tab.locator("#control-kernel").get_attribute("max") == "2"
        assert "step 30" in tab.locator("#status").inner_text()
        shutil.rmtree(path)
        seen.until("document.getElementById('status').textContent.includes('No answer')")
        assert seen.wrong == []
        assert all(url.startswith(server.url) for url in seen.asked)


def test_the_runs_of_a_page_are_told_apart_by_colour_and_symbol(browser, tmp_path):
    runs = []
    for place in range(8):
        runs.append(tmp_path / f"r{place}")
        write_meta(runs[-1], f"r{place}")
        for step in (0, 20_000):
            append(runs[-1], step, {"loss": 1.0 + place}, {"kernel": np.eye(3)} if place == 0 else None)
    seen = Watched(browser)
    tab = seen.open(report(runs, tmp_path / "r.html"))
    looks = tab.evaluate(
        "document.querySelector('[data-panel=training] .plot').data.map(t => [t.line.color, t.marker.symbol])"
    )
    assert len({colour for colour, _ in looks}) == 8
    assert len({tuple(look) for look in looks}) == 8
    assert tab.locator("[data-panel=kernel] output").inner_text() == "20,000"
    assert not seen.wrong
    tab.close()


@pytest.fixture(scope="module", params=[20, 200])
def sweep(request, tmp_path_factory):
    """Runs of four learning rates, every third lazy, the last diverged."""
    folder = tmp_path_factory.mktemp(f"sweep{request.param}")
    for place in range(request.param):
        config = {"lr": [0.01, 0.03, 0.1, 0.3][place % 4], "seed": place // 4, "model": {"width": 64}}
        steps = tuple(range(0, 401, 50))
        write_run(folder / f"run-{place}", lazy=place % 3 == 0, seed=place, steps=steps, config=config)
    append(folder / f"run-{request.param - 1}", 430, {"loss": 1e9})
    append(folder / f"run-{request.param - 1}", 450, {"loss": float("nan")})
    append(folder / f"run-{request.param - 1}", 500, {"loss": float("nan")})
    return request.param, report(folder, folder / "report.html")


CELLS = """(key) => { const all = (selector) => [...document.querySelectorAll(`#runs-table ${selector}`)];
  const place = all("thead button").map(button => button.textContent.replace(/ [↓↑]$/, "")).indexOf(key);
  return all("tbody tr").map(row => row.children[place].innerText.trim()); }"""


def test_many_runs_sort_filter_and_draw(watched, sweep):
    count, path = sweep
    seen = watched()
    tab = seen.open(path)
    assert tab.evaluate("document.documentElement.scrollHeight") < 3500 + 20 * count, "no card for each run"
    assert tab.evaluate(CELLS, "run") == [f"run-{place}" for place in range(count)]
    assert tab.evaluate(CELLS, "verdict")[-1] == "diverged"
    assert tab.locator("#small-multiples figure").count() == count
    assert tab.locator("#small-multiples svg path[d^=M]").count() == count
    heights = "[...document.querySelectorAll('#small-multiples path')].map(path => path.getBBox().height)"
    assert tab.evaluate(heights)[0] > 20, "a run that diverged leaves the others their height"
    assert "runs that diverged are cut off" in tab.locator("#small-multiples").inner_text()
    drawing = tab.locator("[data-panel=all-runs] figure:visible .main-svg").first.bounding_box()
    assert drawing["width"] > 0.8 * tab.evaluate("document.querySelector('main').clientWidth")
    assert set(tab.evaluate(CELLS, "diagnosis")) >= {"nothing wrong", "lr too large"}
    drawn = tab.evaluate("document.getElementById('against-plot').data.map(trace => [trace.name, trace.x.length])")
    assert sum(points for name, points in drawn if name != "mean") == count - 1
    assert dict(drawn)["mean"] == 4, "a line through the means of each learning rate"
    assert tab.locator("#against-lacks").inner_text() == "1 run lacks one of the two."

    tab.get_by_role("button", name="final loss").click()
    *losses, diverged = tab.evaluate(CELLS, "final loss")
    assert diverged == "", "a run without the number comes last, up or down"
    assert [float(text) for text in losses] == sorted(map(float, losses), reverse=True)
    tab.get_by_role("button", name="final loss").click()
    assert tab.evaluate(CELLS, "final loss") == [*losses[::-1], ""]
    assert tab.locator("#runs-table th[aria-sort=ascending]").inner_text().startswith("final loss")

    tab.locator("#filter").fill("verdict=lazy lr>0.02")
    seen.ready()
    lazy = [place for place in range(count - 1) if place % 3 == 0 and place % 4]
    assert sorted(tab.evaluate(CELLS, "run")) == sorted(f"run-{place}" for place in lazy)
    assert tab.locator("#matching").inner_text() == f"{len(lazy)} of {count} runs"
    assert tab.locator("#small-multiples figure").count() == len(lazy)
    visible = (
        "document.querySelector('[data-panel=all-runs] figure:not([hidden]) .plot').data.filter(t => t.visible).length"
    )
    assert tab.evaluate(visible) == len(lazy)
    tab.locator("#filter").fill("nothing-of-the-kind")
    seen.ready()
    assert tab.locator("#runs-table tbody tr").count() == 0
    tab.locator("#filter").fill("")
    seen.ready()
    assert tab.locator("#runs-table tbody tr").count() == count
    assert seen.wrong == []


def test_of_many_runs_one_is_told_when_it_is_asked_for(watched, sweep):
    count, path = sweep
    seen = watched()
    tab = seen.open(path)
    assert tab.locator("article:visible").count() == 0
    tab.get_by_role("button", name=f"run-{count - 1}", exact=True).click()
    assert "The run diverged at step" in tab.locator("article:visible .lead").inner_text()
    tab.get_by_role("button", name=f"run-{count - 1}", exact=True).click()
    assert tab.locator("article:visible").count() == 0
    before = tab.locator("#small-multiples path").first.get_attribute("d")
    tab.locator("#control-all-runs").select_option(label="kernel/drift")
    seen.ready()
    assert tab.locator("#small-multiples path").first.get_attribute("d") != before
    assert tab.locator("[data-panel=all-runs] figure:visible .plot").count() == 1
    tab.locator("#against-x").select_option("seed")
    tab.locator("#against-y").select_option("kernel/drift")
    assert tab.evaluate("document.getElementById('against-plot').layout.xaxis.title.text") == "seed"
    few = tab.locator("#runs-table thead th").count()
    tab.locator("#all-columns").check()
    assert tab.locator("#runs-table thead th").count() > few + 20
    with tab.expect_download() as download:
        tab.locator("#save-table").click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == count + 1
    assert rows[0][:4] == ["run", "verdict", "diagnosis", "lr"]
    assert seen.wrong == []


@pytest.mark.parametrize("width", [1240, 390])
def test_nothing_is_wider_than_the_screen(watched, sweep, page, width):
    _, path = sweep
    for shown in (path, page):
        tab = watched(viewport={"width": width, "height": 900}).open(shown)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, shown
