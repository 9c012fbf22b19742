"""The figures as files: well-formed, complete, and true to the numbers."""

import base64
import re
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from gramscope.report import report
from gramscope.report.figure import Axis, Colour, Heat, Line, Plot
from gramscope.report.svg import drawn
from report.synthetic import HOSTILE, write_run

NS = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["plain", HOSTILE, "\x00\x1b\ud7ff&<>\"'"])
def test_every_drawing_is_a_file(tmp_path, name):
    layers = [name, name + "2"]
    run = write_run(tmp_path / "a", name=name, steps=(0, 5, 10), layers=layers)
    report([run, run], tmp_path / "r.html", svg_dir=tmp_path / "svg")
    files = sorted((tmp_path / "svg").iterdir())
    assert len(files) == 33
    for file in files:
        root = ElementTree.parse(file).getroot()
        assert root.attrib["role"] == "img"
        allowed = {"svg", "rect", "g", "path", "text", "image", "clipPath", "defs", "style", "use", "metadata", "tspan"}
        assert {element.tag.removeprefix(NS) for element in root.iter() if NS in element.tag} <= allowed
        assert list(root.iter(f"{NS}path")) or list(root.iter(f"{NS}image"))


def plot(mark, **axes):
    return Plot("c", axes.get("x", Axis("x")), axes.get("y", Axis("y")), [[mark]])


def test_a_line_goes_through_its_points_and_leaves_gaps():
    line = Line("l", np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, np.nan, 1.0]), 0, Colour(0))
    text = drawn(plot(line, x=Axis("x", range=(0.0, 3.0)), y=Axis("y", range=(0.0, 1.0))), [line])
    path = re.search(r'<path d="(M[^"]*)"[^>]*stroke: #0969b5', text)[1]
    assert path.count("M") == 2
    x = [float(value) for value in re.findall(r"[ML] ([\d.]+) ", path)]
    np.testing.assert_allclose((np.array(x) - x[0]) / (x[-1] - x[0]), [0, 1 / 3, 1], atol=1e-3)  # 0.1 of 554 pixels


def test_a_heat_map_has_the_right_pixels():
    heat = Heat("h", np.array([[0.0, 1.0], [0.5, np.nan]]), ["a", "b"], ["0", "1"], 0, 0.0, 1.0)
    image = re.search(r"base64,([^\"]*)", drawn(plot(heat), [heat]))[1]
    pixels = (255 * imread(BytesIO(base64.b64decode(image)))).round().astype(int)[:, :, :3]
    viridis = [[[68, 1, 84], [253, 231, 37]], [[33, 145, 140], [200, 200, 200]]]
    np.testing.assert_allclose(pixels, viridis, atol=1)  # rounded up or down


@pytest.mark.parametrize(
    "values", [(1e308, -1e308), (1e300, 1e191), (1e299, 1e-300), (5e-324, 0.0), (np.nan, np.inf), (0.0, 0.0), ()]
)
@pytest.mark.parametrize("log", [False, True])
def test_numbers_that_no_axis_holds_are_drawn_all_the_same(values, log):
    line = Line("_$x$", np.arange(len(values), dtype=float), np.array(values), 0, Colour(0))
    marks = [line, Line("other", line.y, line.x, 0, Colour(depth=0.3))]
    ElementTree.fromstring(drawn(plot(line, x=Axis("x", log=log), y=Axis("y", log=log)), marks))
    if values:
        heat = Heat("h", np.array([values]), ["a"], ["0", "1"], 0)
        ElementTree.fromstring(drawn(plot(heat), [heat]))


def test_names_stand_in_the_legend_as_they_are():
    lines = [Line(name, np.arange(3.0), np.arange(3.0), 0, Colour(0)) for name in ("_hidden", "$x$", "<a>")]
    text = drawn(Plot("c", Axis("x"), Axis("y"), [lines]), lines)
    shown = [element.text for element in ElementTree.fromstring(text).iter(f"{NS}text")]
    assert {"\u200b_hidden", "$x$", "<a>"} <= set(shown)


def test_steps_are_whole_numbers():
    line = Line("l", np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0, Colour(0))
    text = drawn(plot(line, x=Axis("step", steps=True), y=Axis("y")), [line])
    labels = re.findall(r'text-anchor: middle"[^>]*>([^<]*)<', text)
    assert labels[:2] == ["0", "1"]
