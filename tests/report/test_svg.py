"""The figures as files: well-formed, complete, and true to the numbers."""

import base64
import re
import struct
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gramscope.report import report
from gramscope.report.figure import Axis, Colour, Heat, Line, Plot
from gramscope.report.scales import Scale, log_ticks, ticks
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
        allowed = {"svg", "rect", "g", "path", "text", "title", "circle", "polygon", "image", "clipPath"}
        assert {element.tag.removeprefix(NS) for element in root.iter()} <= allowed
        assert list(root.iter(f"{NS}path")) or list(root.iter(f"{NS}image"))


def plot(mark, **axes):
    return Plot("c", axes.get("x", Axis("x")), axes.get("y", Axis("y")), [[mark]])


def test_a_line_goes_through_its_points_and_leaves_gaps():
    line = Line("l", np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, np.nan, 1.0]), 0, Colour(0))
    text = drawn(plot(line, x=Axis("x", range=(0.0, 3.0)), y=Axis("y", range=(0.0, 1.0))), [line])
    path = re.search(r'<path d="(M[^"]*)" fill="none" stroke="#0969b5"', text)[1]
    assert path.count("M") == 2
    x = [float(value) for value in re.findall(r"[ML]([\d.]+) ", path)]
    np.testing.assert_allclose((np.array(x) - x[0]) / (x[-1] - x[0]), [0, 1 / 3, 1], atol=1e-3)  # 0.1 of 554 pixels


def test_a_heat_map_has_the_right_pixels():
    heat = Heat("h", np.array([[0.0, 1.0], [0.5, np.nan]]), ["a", "b"], ["0", "1"], 0, 0.0, 1.0)
    image = re.search(r"base64,([^\"]*)", drawn(plot(heat), [heat]))[1]
    data = base64.b64decode(image)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    start = data.index(b"IDAT") + 4
    length = struct.unpack(">I", data[start - 8 : start - 4])[0]
    rows = np.frombuffer(zlib.decompress(data[start : start + length]), np.uint8).reshape(height, 1 + 3 * width)
    pixels = rows[:, 1:].reshape(height, width, 3)
    assert pixels.tolist() == [[[68, 1, 84], [253, 231, 37]], [[33, 144, 141], [200, 200, 200]]]


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
@settings(max_examples=100, deadline=None)
def test_ticks_lie_within_and_are_few(a, b):
    low, high = sorted((a, b))
    found = ticks(low, high)
    assert 1 <= len(found) <= 12
    if high - low > max(1e-300, 1e-9 * max(abs(low), abs(high))):
        air = 1e-6 * (high - low)
        assert all(low - air <= value <= high + air for value in found)
        assert len(found) >= 3


@given(st.floats(1e-300, 1e290), st.floats(1.01, 1e12))
@settings(max_examples=100, deadline=None)
def test_logarithmic_ticks(low, factor):
    found = log_ticks(low, low * factor)
    assert len(found) <= 12
    assert all(low * 0.99 <= value <= low * factor * 1.01 for value in found)
    if factor > 2.6:
        assert found


def test_a_scale_without_numbers_is_still_a_scale():
    for axis in (Axis("x"), Axis("x", log=True)):
        scale = Scale.of([np.array([np.nan, 0.0])[: 1 + axis.log]], axis, 0, 10)
        assert np.isfinite(scale.low)
        assert scale.high > scale.low


def test_steps_are_whole_numbers():
    line = Line("l", np.array([0.0, 1.0]), np.array([0.0, 1.0]), 0, Colour(0))
    text = drawn(plot(line, x=Axis("step", steps=True), y=Axis("y")), [line])
    labels = re.findall(r'text-anchor="middle" font-size="11"[^>]*>([^<]*)<', text)
    assert labels == ["0", "1"]
