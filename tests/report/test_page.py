"""The page is one file that asks for nothing, says what it knows, and drops nothing."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gramscope.base.errors import GramscopeError, InputError
from gramscope.diagnose.finding import Diagnosis, Evidence, Finding
from gramscope.report import report
from gramscope.report.figure import pooled, thinned
from gramscope.report.page import FEW_RUNS, OPEN_PANELS, fragment, gather, payload, script_json
from gramscope.report.run_sources import open_all
from gramscope.report.svg import COLOURS, write_svgs
from gramscope.store import Disk, RunWriter, open_run
from report.synthetic import HOSTILE, append, write_meta, write_run


class Elements(HTMLParser):
    """All start tags of a page, and the text of its data block."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.data, self.words = [], None, "", []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id", tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside == "gramscope-data":
            self.data += data
        elif self.inside is None:
            self.words.append(data)


def refuse(word):
    pytest.fail(f"{word} is no strict JSON")


def opened(path):
    text = path.read_text(encoding="utf-8")
    elements = Elements(text)
    return text, elements, json.loads(elements.data, parse_constant=refuse)


def all_names(data):
    marks = [m for p in data["panels"] for plot in p["plots"] for frame in plot["frames"] for m in frame]
    rows = {row for mark in marks if mark["kind"] == "heat" for row in mark["rows"]}
    captions = {plot["caption"] for p in data["panels"] for plot in p["plots"]}
    options = {option for p in data["panels"] if p["control"] for option in p["control"]["options"]}
    return {mark["name"] for mark in marks} | rows | captions | options


def keys(data):
    return [panel["key"] for panel in data["panels"]]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "rich"), write_run(folder / "lazy", lazy=True, seed=1)


def test_all_panels_of_two_runs(two, tmp_path):
    _, elements, data = opened(report(two, tmp_path / "r.html"))
    assert keys(data) == [
        "training", "shares", "kernel-moves", "richness", "health", "linearity", "gram", "spectra", "flips", "steps",
        "kernel", "upkeep",
    ]  # fmt: skip
    assert "Left out" not in elements.words
    text = " ".join(elements.words)
    assert "The run is rich" in text
    assert "The run is lazy" in text
    assert "Largest kernel drift: rich" in text
    for panel in data["panels"]:
        assert sum(tag == "section" and a.get("data-panel") == panel["key"] for tag, a in elements.tags) == 1


def test_numbers_on_the_page_are_those_of_the_run(two, tmp_path):
    _, _, data = opened(report(two[0], tmp_path / "r.html"))
    loss = data["panels"][0]["plots"][0]["frames"][0][0]
    frame = open_run(two[0]).scalars()["loss"]
    assert loss["x"] == frame.index.tolist()
    np.testing.assert_allclose(loss["y"], frame, rtol=1e-5)  # six digits are written
    kernel = next(panel for panel in data["panels"] if panel["key"] == "kernel")
    heat = kernel["plots"][0]["frames"][-1][0]
    import base64

    values = np.frombuffer(base64.b64decode(heat["z"]["base64"]), "<f4").reshape(heat["z"]["shape"])
    np.testing.assert_array_equal(values, open_run(two[0]).array("kernel", 400))


def test_the_page_asks_for_nothing(two, tmp_path):
    text, elements, _ = opened(report(two, tmp_path / "r.html"))
    for tag, attributes in elements.tags:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        assert "src" not in attributes
        if "href" in attributes:
            assert attributes["href"].startswith(("#", "data:,"))
        assert not [name for name in attributes if name.startswith("on")]
    policy = next(a["content"] for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "connect-src" not in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_landmarks_and_labels(two, tmp_path):
    _, elements, _ = opened(report(two, tmp_path / "r.html"))
    tags = [tag for tag, _ in elements.tags]
    assert [tags.count(tag) for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    ids = [attributes["id"] for _, attributes in elements.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in elements.tags:
        for name in ("aria-labelledby", "for"):
            assert attributes.get(name, ids[0]) in ids
        if tag in ("input", "select") and attributes.get("type") != "checkbox":
            assert any(t == "label" and a.get("for") == attributes["id"] for t, a in elements.tags)
        if attributes.get("role") == "img":
            assert len(attributes["aria-label"]) > 20


def test_torch_is_not_imported(two, tmp_path):
    code = """
import sys, gramscope
from gramscope.report import report, serve
gramscope.report(sys.argv[1], sys.argv[2])
print([name for name in sys.modules if name.split('.')[0] in ('torch', 'plotly', 'sklearn')])
try:  # here, because the tests' own type checks would be first
    report([3], sys.argv[2])
except gramscope.report.page.InputError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(two[0]), str(tmp_path / "r.html")], capture_output=True, text=True
    )
    heavy, refused = run.stdout.splitlines()
    assert heavy == "[]", run.stderr
    assert refused == "runs must be directories or opened runs, got int. Pass a path, e.g. 'runs/a'."


def test_absent_panels_are_listed(tmp_path):
    write_meta(tmp_path / "a", "a")
    append(tmp_path / "a", 0, {"loss": 1.0})
    append(tmp_path / "a", 5, {"loss": 0.5})
    page, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert keys(data) == ["training"]
    text = " ".join(elements.words)
    assert "Left out" in text
    assert "needs the measure step: scope.use(optimizer), and in a short run overhead=None." in text
    assert page.count("</strong> needs ") == 10


def test_unknown_names_are_shown(tmp_path):
    write_meta(tmp_path / "a", "a", facts={"wobble": {"how_to_read": "Low is calm."}})
    for step in (0, 1):
        scalars = {"wobble/3": 0.1 * step, "kernel/oddity": 2.0, "loss": 1.0, "delta_gram/0": 3.0, "nothing": 1.0}
        arrays = {
            "cube": np.ones((2, 3, 4)),
            "line": np.arange(5.0),
            "step/predicted": np.ones(4),
            "flag": np.array(True),
        }
        append(tmp_path / "a", step, scalars, arrays)
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert keys(data) == ["training", "others", "other-arrays"]
    captions = {plot["caption"] for panel in data["panels"] for plot in panel["plots"]}
    assert captions == {"Loss", "wobble", "kernel", "delta_gram", "nothing", "cube", "line", "step/predicted", "flag"}
    assert "Low is calm." in " ".join(elements.words)


def test_a_kernel_that_is_no_matrix_is_still_shown(tmp_path):
    write_meta(tmp_path / "a", "a")
    append(tmp_path / "a", 0, {"loss": 1.0}, {"kernel": np.ones(3), "richness/quality": np.ones((2, 2))})
    _, _, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert {plot["caption"] for plot in data["panels"][-1]["plots"]} == {"kernel", "richness/quality"}


def test_not_finite_numbers_and_failures_are_named(tmp_path):
    write_meta(tmp_path / "a", "a", notes=["the optimiser was restarted"])
    append(tmp_path / "a", 0, {"loss": 1.0, "share/0": 1.0})
    append(tmp_path / "a", 5, {"loss": float("nan"), "share/0": float("inf")}, failures={"richness": "out of memory"})
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert data["panels"][0]["plots"][0]["frames"][0][0]["y"] == [1, None]
    text = " ".join(elements.words)
    for words in (
        "loss and share/0 are not finite numbers at step 5",
        "richness failed at step 5: out of memory",
        "restarted",
    ):
        assert words in text


def test_the_newest_attempt_is_shown(tmp_path):
    write_meta(tmp_path / "a", "a")
    for step, attempt, loss in ((0, 0, 3.0), (10, 0, 2.0), (20, 0, 1.0), (10, 1, 9.0)):
        append(tmp_path / "a", step, {"loss": loss}, attempt=attempt)
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    line = data["panels"][0]["plots"][0]["frames"][0][0]
    assert (line["x"], line["y"]) == ([0, 10], [3, 9])
    assert "2 records were superseded" in " ".join(elements.words)


def test_a_damaged_array_file_costs_one_frame(tmp_path):
    path = write_run(tmp_path / "a", steps=(0, 5, 10))
    (path / "arrays/step_00000005.safetensors").write_bytes(b"rubbish")
    _, elements, data = opened(report(path, tmp_path / "r.html"))
    kernel = next(panel for panel in data["panels"] if panel["key"] == "kernel")
    assert kernel["control"]["options"] == ["0", "10"]
    assert "The arrays of step 5 cannot be read" in " ".join(elements.words)


@pytest.mark.filterwarnings("ignore:line 2")
def test_a_damaged_line_and_a_torn_tail_are_survived(tmp_path):
    path = write_run(tmp_path / "a", steps=(0, 5, 10))
    lines = (path / "scalars.jsonl").read_text().splitlines()
    (path / "scalars.jsonl").write_text("\n".join([lines[0], "{broken", lines[2], lines[1][:40]]))
    _, elements, data = opened(report(path, tmp_path / "r.html"))
    assert data["panels"][0]["plots"][0]["frames"][0][0]["x"] == [0, 10]
    assert "Damaged lines of scalars.jsonl are left out: 2" in " ".join(elements.words)


def test_no_step_yet(tmp_path):
    write_meta(tmp_path / "a", "a")
    (tmp_path / "a" / "scalars.jsonl").touch()
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert data["panels"] == []
    assert "No step has been committed yet." in elements.words


@pytest.mark.parametrize("make", ["missing", "file", "empty folder", "damaged meta", "newer schema"])
def test_errors_say_what_to_do(tmp_path, make):
    path = tmp_path / "run"
    if make == "file":
        path.write_text("x")
    elif make != "missing":
        path.mkdir()
    if make == "damaged meta":
        (path / "meta.json").write_text("{")
    if make == "newer schema":
        write_meta(path, "a", schema=99)
    with pytest.raises(GramscopeError, match=r"run"):
        report(path, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_wrong_arguments(two, tmp_path):
    with pytest.raises(InputError, match="at least one run"):
        report([], tmp_path / "r.html")
    with pytest.raises(InputError, match="must be a file"):
        report(two[0], tmp_path)


def test_written_whole_or_not_at_all(two, tmp_path, monkeypatch):
    target = tmp_path / "deep" / "r.html"
    report(two[0], target)
    before = target.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(GramscopeError, match="disk is full"):
        report(two[1], target)
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["r.html"]


@pytest.mark.parametrize("name", ["scalars.jsonl", "meta.json", "writer.lock", "arrays/step_00000000.safetensors"])
@pytest.mark.parametrize("other", [False, True])
def test_the_files_of_a_run_are_not_written_over(two, tmp_path, name, other):
    run = write_run(tmp_path / "a", steps=(0, 1))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(run)
    for folder in (run, tmp_path / "link"):
        with pytest.raises(InputError, match=r"out must not be a file of a run, but .* is one"):
            report(two[0] if other else run, folder / name)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert report(run, run / "report.html").is_file(), "beside them it may lie"
    assert report(run, tmp_path / "elsewhere" / name).is_file()


def test_figures_that_cannot_be_written_cost_the_page_too(two, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"svg_dir must be a folder, but .*file is a file"):
        report(two[0], tmp_path / "r.html", svg_dir=tmp_path / "file")
    with pytest.raises(GramscopeError, match=r"writing the figures into .*file/svg failed"):
        report(two[0], tmp_path / "r.html", svg_dir=tmp_path / "file" / "svg")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def kernel_panel(data):
    return next(panel for panel in data["panels"] if panel["key"] == "kernel")


def test_a_kernel_without_labels_is_not_called_sorted(tmp_path):
    for name in "ab":
        write_meta(tmp_path / name, name)
        labels = {"kernel/labels": np.array([1, 0, 1])} if name == "b" else {}
        append(tmp_path / name, 0, {"loss": 1.0}, {"kernel": np.diag([1.0, 2.0, 3.0]), **labels})
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    said = " ".join(elements.words)
    (plot,) = kernel_panel(data)["plots"]
    assert plot["x"]["title"] == plot["y"]["title"] == "example, in its own order"
    assert "sorted by class" not in said
    assert "A bright cell is a pair of examples" in said
    assert "no labels beside the kernel" in said
    _, elements, data = opened(report([tmp_path / "a", tmp_path / "b"], tmp_path / "r.html"))
    titles = [plot["x"]["title"] for plot in kernel_panel(data)["plots"]]
    assert titles == ["example, in its own order", "example, by class"]
    assert "Where examples are sorted by class, bright blocks" in " ".join(elements.words)
    _, elements, _ = opened(report(tmp_path / "b", tmp_path / "r.html"))
    assert "Examples are sorted by class: bright blocks" in " ".join(elements.words)


def heats(data, key):
    panel = next(panel for panel in data["panels"] if panel["key"] == key)
    return [mark for plot in panel["plots"] for frame in plot["frames"] for mark in frame if mark["kind"] == "heat"]


def test_maps_of_several_runs_have_one_scale(tmp_path):
    many = [f"layer{place}" for place in range(30)]
    runs = [write_run(tmp_path / n, lazy=n == "b", steps=(0, 5, 10), layers=many, seed=len(n)) for n in "ab"]
    _, _, data = opened(report(runs, tmp_path / "r.html"))
    for key in ("linearity", "shares", "gram"):
        assert len(heats(data, key)) == 2
        assert len({(heat["low"], heat["high"]) for heat in heats(data, key)}) == 1, key


@pytest.mark.parametrize(("value", "scale"), [(1.0, (0.0, 1.0)), (-2.0, (-2.0, 0.0)), (0.0, (0.0, 1.0))])
def test_a_map_of_one_number_has_a_scale_one_can_read(tmp_path, value, scale):
    write_meta(tmp_path / "a", "a")
    for step in (0, 1, 2):
        linearity = {f"target_linearity/{layer}": value * (1 - step * 2e-16) for layer in range(25)}
        append(tmp_path / "a", step, linearity, {"kernel": np.full((3, 3), value), "box": np.full((2, 2), value)})
    _, _, data = opened(report(tmp_path / "a", tmp_path / "r.html", svg_dir=tmp_path / "svg"))
    for key in ("linearity", "kernel", "other-arrays"):
        assert {(heat["low"], heat["high"]) for heat in heats(data, key)} == {scale}
    assert f">{scale[1]:g}</text>" in (tmp_path / "svg" / "linearity-1.svg").read_text()


def test_many_runs_have_colours_of_their_own(tmp_path):
    runs = [write_run(tmp_path / f"r{place}", steps=(0, 1), seed=place) for place in range(8)]
    text, elements, _ = opened(report(runs, tmp_path / "r.html", svg_dir=tmp_path / "svg"))
    swatches = [a["class"] for tag, a in elements.tags if "swatch " in a.get("class", "")]
    assert len(set(swatches)) == 8
    for theme in (0, 1):
        colours = [re.findall(rf"--c{place}: (#\w+);", text)[theme] for place in range(16)]
        assert len(set(colours)) == 16
        if theme == 0:
            assert tuple(colours) == COLOURS, "the files have the colours of the page"
    drawn = (tmp_path / "svg" / "kernel-moves-1.svg").read_text()
    assert len({colour for colour in COLOURS if f"stroke: {colour}" in drawn}) == 8


def test_large_counts_are_written_like_large_steps(tmp_path):
    write_meta(tmp_path / "a", "a")
    lines = (json.dumps({"step": s, "time": 0.0, "attempt": 0, "scalars": {"loss": 1.0}}) for s in range(2_345))
    (tmp_path / "a" / "scalars.jsonl").write_text("\n".join(lines) + "\n")
    _, elements, _ = opened(report(tmp_path / "a", tmp_path / "r.html"))
    said = " ".join(elements.words)
    assert "(2,345 records)." in said
    assert "2,345 records, " in said
    assert "2345" not in said


def test_runs_of_one_name_are_told_apart(tmp_path):
    a, b = write_run(tmp_path / "x/a", steps=(0, 1)), write_run(tmp_path / "y/a", steps=(0, 1))
    _, _, data = opened(report([a, open_run(b)], tmp_path / "r.html"))
    assert [run["name"] for run in data["runs"]] == [str(a), str(b)]


def test_hostile_names_stay_text(tmp_path):
    layers = [HOSTILE, '"><svg onload=alert(2)>', "%{x}", "$x$", "=cmd()", "{{ 7 * 7 }}"]
    path = write_run(tmp_path / "a", name=HOSTILE, steps=(0, 1), layers=layers, model=HOSTILE, notes=[HOSTILE])
    append(path, 2, {f"{HOSTILE}/{HOSTILE}": 1.0}, {HOSTILE: np.ones((2, 2))}, failures={HOSTILE: HOSTILE})
    text, elements, data = opened(report([path, path], tmp_path / "r.html", title=HOSTILE))
    assert {tag for tag, _ in elements.tags}.isdisjoint({"img", "svg"})
    assert sum(tag == "script" for tag, _ in elements.tags) == 4
    assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
    assert "<img" not in text.replace("'<img", "")  # Plotly's own code builds none from names
    assert "{{ 7 * 7 }}" in " ".join(elements.words)
    assert any(HOSTILE in name for name in all_names(data))


def test_script_json_cannot_be_left():
    assert json.loads(script_json({"a": HOSTILE + "\u2028&"})) == {"a": HOSTILE + "\u2028&"}
    assert "<" not in script_json(HOSTILE)
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_long_and_wide_runs_stay_small(tmp_path):
    write_meta(tmp_path / "a", "a")
    record = {"time": 0.0, "attempt": 0, "arrays": None, "failures": {}}
    lines = [
        json.dumps({**record, "step": step, "scalars": {"loss": 1.0 / (1 + step), "share/0": 0.4, "share/1": 0.6}})
        for step in range(20_000)
    ]
    (tmp_path / "a" / "scalars.jsonl").write_text("\n".join(lines) + "\n")
    append(tmp_path / "a", 20_000, {"loss": 0.0}, {"kernel": np.eye(900), "kernel/labels": np.arange(900) // 300})
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert (tmp_path / "r.html").stat().st_size < 2_500_000
    bands = data["panels"][1]["plots"][0]["frames"][0]
    assert bands[0]["x"] == bands[1]["x"]
    text = " ".join(elements.words)
    assert "are thinned" in text
    assert "means over blocks of 6 × 6" in text


def test_pooling_is_the_mean_of_blocks():
    z = np.random.default_rng(0).standard_normal((7, 5))
    small, block = pooled(z, most=3)
    assert block == 3
    by_hand = [[z[r : r + 3, c : c + 3].mean() for c in (0, 3)] for r in (0, 3, 6)]
    np.testing.assert_allclose(small, by_hand, rtol=1e-12)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=300), st.integers(4, 60))
@settings(max_examples=60, deadline=None)
def test_thinning_keeps_ends_and_extremes(values, most):
    y = np.array(values)
    x, kept = thinned(np.arange(float(len(y))), y, most)
    assert len(x) <= max(most, 3 * (most // 2) + 2)
    assert (x[0], x[-1]) == (0, len(y) - 1)
    assert (np.diff(x) > 0).all()
    finite = y[np.isfinite(y)]
    if len(finite):
        assert kept[np.isfinite(kept)].max() == finite.max()
        assert kept[np.isfinite(kept)].min() == finite.min()
    assert np.isfinite(y).all() == np.isfinite(kept).all()


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
# With several parts a legend says the part, with one the run; these have words of their own.
DRAWN_UNDER_ANOTHER_NAME = {"kernel", "kernel/labels", "spectrum/0"}
OVERLAID = {"train"}
prefixes = st.sampled_from(
    ["", "share/", "loss/", "target_linearity/", "kernel/", "richness/", "alpha/", "flips/", "step/"]
)
shapes = st.sampled_from([(), (0,), (3,), (2, 2), (1, 4), (2, 1, 3)])


@given(
    st.lists(st.dictionaries(st.builds(str.__add__, prefixes, names), st.floats(), max_size=5), min_size=1, max_size=4),
    st.dictionaries(
        st.one_of(names, st.sampled_from(["kernel", "kernel/labels", "spectrum/0", "step/true"])), shapes, max_size=3
    ),
    names,
)
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_whatever_a_run_holds_there_is_a_page_with_all_its_names(tmp_path_factory, rows, arrays, name):
    folder = tmp_path_factory.mktemp("any")
    write_meta(folder / "a", name)
    arrays.pop("__metadata__", None)
    for step, scalars in enumerate(rows):
        append(folder / "a", step, scalars, {key: np.full(shape, 0.5 * step) for key, shape in arrays.items()})
    content = gather(open_all(folder / "a"))
    data = json.loads(script_json(payload(content)), parse_constant=refuse)
    fragment(content)
    for path in write_svgs(content.panels, folder / "svg"):
        ElementTree.parse(path)
    shown = all_names(data)
    for full in {key for row in rows for key in row}:
        prefix, _, part = full.partition("/")
        assert part in shown or prefix in shown or part in OVERLAID, full
    for full in arrays:
        told = " ".join([*shown, *(note for panel in content.panels for note in panel.notes)])
        assert full in told or full in DRAWN_UNDER_ANOTHER_NAME, full


def test_two_hundred_layers_are_rows_of_colours(tmp_path):
    names = [f"block.{place}" for place in range(200)]
    write_meta(tmp_path / "a", "a", layers=names)
    for step in (0, 1, 2):
        scalars = {f"{kind}/{name}": 0.005 for kind in ("share", "flips", "mine") for name in names}
        scalars |= {f"gram_vc_correlation/{name}": 1 - 1e-9 * place for place, name in enumerate(names)}
        scalars |= {
            f"{kind}/{name}": 0.1 + place for kind in ("delta_gram", "delta_vc") for place, name in enumerate(names)
        }
        append(tmp_path / "a", step, scalars)
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    marks = [
        (plot["caption"], frame) for panel in data["panels"] for plot in panel["plots"] for frame in plot["frames"]
    ]
    for caption, frame in marks:
        assert sum(mark.get("legend", False) for mark in frame) <= 24, caption
    heats = {caption: frame[0] for caption, frame in marks if frame[0]["kind"] == "heat"}
    assert set(heats) == {"shares", "mask flips", "correlation of the two changes", "mine"}
    assert all(heat["rows"] == names and heat["columns"] == ["0", "1", "2"] for heat in heats.values())
    sizes = next(frame for caption, frame in marks if caption == "sizes of the two changes")
    assert {mark["name"] for mark in sizes if mark["legend"]} > {"block.0", "block.199"}
    text = " ".join(elements.words)
    assert "the correlation at the end is 1 in all 200 layers." in text
    assert "lies between 1 " not in text
    assert "The brightness of a band is the layer's share" in text


def test_one_leading_layer_does_not_darken_the_others(tmp_path):
    names = [f"block.{place}" for place in range(100)]
    write_meta(tmp_path / "a", "a", layers=names)
    append(tmp_path / "a", 0, {f"share/{name}": 0.9 if place == 99 else 0.1 / 99 for place, name in enumerate(names)})
    append(
        tmp_path / "a", 1, {f"share/{name}": 0.9 if place == 99 else 1e-4 * place for place, name in enumerate(names)}
    )
    _, _, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert data["panels"][0]["plots"][0]["frames"][0][0]["high"] < 0.1


def test_a_parent_folder_and_a_pattern_are_their_runs(tmp_path):
    for name in ("run-10", "run-2", "other"):
        write_run(tmp_path / "runs" / name, steps=(0, 1, 2))
    for source in (tmp_path / "runs", str(tmp_path / "runs" / "*"), [tmp_path / "runs"]):
        _, _, data = opened(report(source, tmp_path / "r.html"))
        assert [run["name"] for run in data["runs"]] == ["other", "run-2", "run-10"]
    _, _, data = opened(report(str(tmp_path / "runs" / "run-*"), tmp_path / "r.html"))
    assert [run["name"] for run in data["runs"]] == ["run-2", "run-10"]


def test_the_table_has_settings_results_and_every_measure(tmp_path):
    for place, name in enumerate(("a", "b")):
        config = {"lr": 0.1 * (place + 1), "model": {"width": 64, "kind": "mlp"}, "tag": ["x"] * place}
        write_run(tmp_path / name, lazy=place == 0, steps=(0, 10, 20), config=config)
    append(tmp_path / "b", 30, {"only/b": 5.0, "ends/nan": float("nan"), "skipped": 2.0})
    _, elements, data = opened(report(tmp_path, tmp_path / "r.html"))
    columns = {column["key"]: column for column in data["table"]["columns"]}
    assert columns["run"]["cells"] == ["a", "b"]
    assert columns["verdict"]["cells"] == ["lazy", "rich"]
    assert columns["lr"]["cells"] == [0.1, 0.2]
    assert columns["lr"]["group"] == "setting"
    assert columns["tag"]["cells"] == ["[]", "['x']"]
    assert data["table"]["same"] == {"model.width": 64, "model.kind": "mlp"}
    assert columns["only/b"]["cells"] == [None, 5.0]
    assert not columns["only/b"]["first"]
    assert columns["ends/nan"]["cells"] == [None, None], "of a number that ends not finite none is told"
    assert "skipped" not in columns
    assert columns["last step"]["cells"] == [20, 30]
    runs = [open_run(tmp_path / name) for name in "ab"]
    assert columns["lr (measure)"]["cells"] == [0.1, 0.1], "a setting and a measure of one name"
    for name in set(runs[0].scalars()) - {"lr"}:
        ends = [run.scalars()[name].dropna().iloc[-1] for run in runs]
        np.testing.assert_allclose(columns[name]["cells"], ends, rtol=1e-5)
    assert "The same in all runs: model.width 64, model.kind mlp." in elements.words


def test_many_runs_are_one_table_and_no_cards(tmp_path):
    for place in range(FEW_RUNS + 1):
        write_run(tmp_path / f"run-{place}", lazy=place % 2 == 0, steps=(0, 10, 20), seed=place)
    _, elements, data = opened(report(tmp_path, tmp_path / "r.html", svg_dir=tmp_path / "svg"))
    assert [panel["key"] for panel in data["panels"]] == ["all-runs"]
    assert all("hidden" in attributes for tag, attributes in elements.tags if tag == "article")
    control = data["panels"][0]["control"]
    names = {name for run in tmp_path.glob("run-*") for name in open_run(run).scalars()}
    assert set(control["options"]) == names
    assert control["options"][0] == "loss"
    for place, name in enumerate(control["options"]):
        plots = [plot for plot in data["panels"][0]["plots"] if plot["at"][place] is not None]
        assert len(plots) == 1, "each measure is drawn once"
        marks = plots[0]["frames"][plots[0]["at"][place]]
        assert [mark["run"] for mark in marks] == list(range(FEW_RUNS + 1)), name
    assert len(list((tmp_path / "svg").iterdir())) == 1


def test_a_long_run_is_drawn_with_its_extremes(tmp_path):
    with RunWriter.create(tmp_path / "a", disk=Disk(fsync=False)) as writer:
        for step in range(30_000):
            writer.append(step, {"loss/probe": 9.0 if step == 12_345 else 1.0, "share/0": 0.4, "share/2": 0.6})
    _, _, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    line = data["panels"][0]["plots"][0]["frames"][0][0]
    assert len(line["x"]) <= 1002
    assert max(line["y"]) == 9
    assert (line["x"][0], line["x"][-1]) == (0, 29_999)


def test_the_watchers_own_count_is_not_drawn(tmp_path):
    write_meta(tmp_path / "a", "a")
    append(tmp_path / "a", 0, {"skipped": 3.0, "mine": 1.0}, {"start/kernel": np.eye(2)})
    _, _, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert [plot["caption"] for panel in data["panels"] for plot in panel["plots"]] == ["mine"]


def test_gradients_and_units_have_a_panel(tmp_path):
    write_meta(tmp_path / "a", "a", facts={"dead_units": {"how_to_read": "Share of units that are off."}})
    for step in (0, 10, 20):
        layers = {f"{name}/{layer}": 0.1 * layer for name in ("gradient_norm", "dead_units") for layer in (1, 2)}
        append(tmp_path / "a", step, {**layers, "gradient_norm": 0.3, "sharpness": 5.0, "mine": 1.0})
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    panels = {panel["key"]: panel for panel in data["panels"]}
    drawn = {plot["caption"]: [mark["name"] for mark in plot["frames"][0]] for plot in panels["health"]["plots"]}
    assert list(drawn.values()) == [["1", "2", "all"], ["1", "2"], ["a"]]
    assert next(iter(drawn)) == "Gradient norm"
    assert "a: layer 2 has most dead units, 20 % at step 20." in elements.words
    assert "dead_units: Share of units that are off." in elements.words
    assert [plot["caption"] for plot in panels["others"]["plots"]] == ["mine"]


@pytest.mark.parametrize("adaptive", [0.0, 1.0])
def test_sharpness_is_drawn_beside_what_is_stable(tmp_path, adaptive):
    write_meta(tmp_path / "a", "a")
    for step in (0, 10, 20):
        sizes = {"sharpness": 5.0 + step, "sharpness/error": 0.1, "optimizer/lr": 0.1 / (1 + step)}
        append(tmp_path / "a", step, {**sizes, "optimizer/momentum": 0.5, "optimizer/adaptive": adaptive})
    _, elements, data = opened(report(tmp_path / "a", tmp_path / "r.html"))
    (drawn,) = next(panel for panel in data["panels"] if panel["key"] == "health")["plots"]
    lines = {mark["name"]: mark["y"] for mark in drawn["frames"][0]}
    assert lines["a"] == [5, 15, 25]
    assert lines.get("stable below") == (None if adaptive else [30, 330, 630])
    assert "a: an eigenvalue lies within 0.1 of each sharpness drawn." in elements.words


def test_series_are_explained_by_the_measure_that_they_are_of(tmp_path):
    write_meta(tmp_path / "a", "a", facts={"update": {"how_to_read": "Size of the step."}})
    append(tmp_path / "a", 0, {"update_size": 1.0, "effective_lr/0": 0.1})
    _, elements, _ = opened(report(tmp_path / "a", tmp_path / "r.html"))
    assert "update_size, effective_lr: Size of the step." in elements.words


def test_causes_are_read_at_once_and_what_follows_from_them_is_folded(tmp_path, monkeypatch):
    number = (Evidence("update_ratio", 0.9, "above", 0.3),)
    cause = Finding("lr_too_large", "The steps are too long.", number, "The rate.", "Lower it.")
    follows = Finding("dead_units", "All units are dead.", number, "x", "y", follows_from="lr_too_large")
    found = Diagnosis("a", (cause, follows), {}, 20.0)
    monkeypatch.setattr("gramscope.report.page.diagnose", lambda run: found)
    text = fragment(gather(open_all(write_run(tmp_path / "a", steps=(0, 10, 20)))))
    read, _, folded = text.partition("<summary>What follows (1)</summary>")
    assert "The steps are too long." in read
    assert "Lower it." in read
    assert "All units are dead." not in read
    assert "All units are dead." in folded.partition("</details>")[0]
    assert "This follows from lr too large." in folded


def test_a_table_and_cards_come_before_the_panels(tmp_path):
    runs = [write_run(tmp_path / name, steps=(0, 10, 20)) for name in "ab"]
    text = fragment(gather(open_all(runs)))
    order = [text.index(f'id="{name}"') for name in ("table", "summary", "panel-training")]
    assert order == sorted(order)
    assert text.count('<details class="fold" open>') == OPEN_PANELS
    assert text.count('<details class="fold">') > OPEN_PANELS
