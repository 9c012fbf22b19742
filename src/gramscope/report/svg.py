"""The figures as SVG files, written by hand: no browser is needed, and any editor can open them."""

import base64
import math
import re
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from gramscope.report.figure import Colour, Heat, Line, Mark, Numbers, Panel, Plot
from gramscope.report.scales import Scale, log_ticks, ticks

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 640, 70, 16, 34, 46
# Those of page.css in the light theme.
COLOURS = (
    "#0969b5", "#c2410c", "#157f5b", "#8a3ab9", "#a16207", "#c0266f", "#0e7490", "#57606a",
    "#d100d1", "#69001e", "#003c00", "#2d0f96", "#9d7fae", "#1a2cff", "#4b9a00", "#f0435f",
)  # fmt: skip
DEPTHS = np.array([[158, 188, 218], [75, 110, 190], [66, 10, 104]], dtype=np.float64)
# Viridis at nine places (CC0, by van der Walt and Smith).
VIRIDIS = np.array(
    [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99]]
    + [[170, 220, 50], [253, 231, 37]],
    dtype=np.float64,
)
DASH = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "10 4"}
INK, DIM, GRID = "#1b1f24", "#57606a", "#e3e7eb"


def write_svgs(panels: Sequence[Panel], folder: Path) -> list[Path]:
    """One file for each drawing, named after its panel: ``shares-1.svg``, ``shares-2.svg``, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for panel in panels:
        position = panel.control.start if panel.control else 0
        for place, plot in enumerate((*panel.still, *panel.moving)):
            if plot.frame(position) is None and not plot.empty:
                continue
            moves = panel.control is not None and plot.at is not None
            where = (
                f" ({panel.control.label.lower()}: {panel.control.options[position]})"
                if moves and panel.control
                else ""
            )
            path = folder / f"{re.sub('[^a-z0-9-]', '-', panel.key)}-{place + 1}.svg"
            path.write_text(drawn(plot, plot.frame(position) or (), where), encoding="utf-8")
            written.append(path)
    return written


def drawn(plot: Plot, marks: Sequence[Mark], where: str = "") -> str:
    """One drawing as an SVG document."""
    heat = next((mark for mark in marks if isinstance(mark, Heat)), None)
    legend = [mark for mark in marks if isinstance(mark, Line) and mark.legend]
    beside = _legend_width(legend) if len(legend) > 1 else (70 if heat else 0)
    height = max(plot.height, TOP + BOTTOM + 16 * len(legend)) if len(legend) > 1 else plot.height
    box = (LEFT if heat is None else LEFT + 40, TOP, WIDTH - RIGHT, height - BOTTOM)
    if plot.square and heat is not None:
        side = min(box[2] - box[0], box[3] - box[1])
        box = (box[0], box[1], box[0] + side, box[1] + side)
    body = _heat(heat, box) if heat else _lines(plot, [mark for mark in marks if isinstance(mark, Line)], box)
    if len(legend) > 1:
        body += _legend(legend, WIDTH + 8)
    middle_x, middle_y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    body += [
        _text(box[0], 18, plot.caption + where, size=13, weight="600"),
        _text(middle_x, box[3] + 38, plot.x.title, anchor="middle", colour=DIM),
        f'<g transform="translate(14 {middle_y:.1f}) rotate(-90)">',
        f"{_text(0, 0, plot.y.title, anchor='middle', colour=DIM)}</g>",
    ]
    told = plot.empty if not marks else "" if any(map(_finite, marks)) else "No finite number to draw."
    if told:
        body.append(_text(middle_x, middle_y, told, anchor="middle", colour=DIM))
    label = escape(_clean(plot.caption + where), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + beside}" height="{height}" '
        f'viewBox="0 0 {WIDTH + beside} {height}" font-family="sans-serif" role="img" aria-label="{label}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(body)}</svg>\n'
    )


def _finite(mark: Mark) -> bool:
    return bool(np.isfinite(mark.z if isinstance(mark, Heat) else mark.y).any())


Box = tuple[int, int, int, int]


def _lines(plot: Plot, lines: Sequence[Line], box: Box) -> list[str]:
    shown = [(mark, *mark.points()) for mark in lines]
    floors: list[Numbers | None] = [None] * len(shown)
    base: Numbers | None = None
    for place, (mark, x, y) in enumerate(shown):
        if mark.stacked:
            base = np.zeros_like(y) if base is None else base
            floors[place] = base
            base = base + y
            shown[place] = (mark, x, base)
    xs = Scale.of([x for _, x, _ in shown], plot.x, box[0], box[2])
    ys = Scale.of([y for _, _, y in shown], plot.y, box[3], box[1])
    clip = f"c{zlib.crc32(plot.caption.encode('utf-8', 'replace')):08x}"
    body = [f'<clipPath id="{clip}"><rect {_inside(box)}/></clipPath>']
    body += _axes(xs, ys, box, whole=plot.x.steps or plot.x.whole) + [f'<g clip-path="url(#{clip})">']
    for (mark, x, y), floor in zip(shown, floors, strict=True):
        body.append(_line(mark, xs.place(x), ys.place(y), None if floor is None else ys.place(floor)))
    return [*body, "</g>"]


def _inside(box: Box) -> str:
    return f'x="{box[0]}" y="{box[1]}" width="{box[2] - box[0]}" height="{box[3] - box[1]}"'


def _line(mark: Line, x: Numbers, y: Numbers, floor: Numbers | None) -> str:
    colour = _colour(mark.colour)
    title = f"<title>{escape(_clean(mark.name))}</title>"
    if floor is not None and len(x):
        points = [*zip(x, y, strict=True), *zip(x[::-1], floor[::-1], strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        return f'<polygon points="{path}" fill="{colour}" fill-opacity=".75">{title}</polygon>'
    parts = []
    if "lines" in mark.mode:
        dash = f' stroke-dasharray="{DASH[mark.dash]}"' if DASH[mark.dash] else ""
        parts.append(f'<path d="{_path(x, y)}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}>{title}</path>')
    if "markers" in mark.mode:
        size = 1.6 if len(x) > 40 else 2.6
        keep = np.isfinite(x) & np.isfinite(y)
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{size}"/>' for a, b in zip(x[keep], y[keep], strict=True))
        parts.append(f'<g fill="{colour}">{title}{dots}</g>')
    return "".join(parts)


def _path(x: Numbers, y: Numbers) -> str:
    """A path with a gap where a point is missing."""
    pieces, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if math.isfinite(a) and math.isfinite(b):
            pieces.append(f"{pen}{a:.1f} {b:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(pieces)


def _axes(xs: Scale, ys: Scale, box: Box, whole: bool) -> list[str]:
    body = []
    for value in [tick for tick in _ticks(xs) if tick == int(tick) or not whole]:
        at = float(xs.place(np.array([value]))[0])
        body.append(f'<path d="M{at:.1f} {box[1]}V{box[3]}" stroke="{GRID}"/>')
        body.append(_text(at, box[3] + 16, f"{value:g}", anchor="middle", size=11))
    for value in _ticks(ys):
        at = float(ys.place(np.array([value]))[0])
        body.append(f'<path d="M{box[0]} {at:.1f}H{box[2]}" stroke="{GRID}"/>')
        body.append(_text(box[0] - 6, at + 4, f"{value:g}", anchor="end", size=11))
    body.append(f'<path d="M{box[0]} {box[1]}V{box[3]}H{box[2]}" fill="none" stroke="{DIM}"/>')
    return body


def _ticks(scale: Scale) -> list[float]:
    return log_ticks(scale.low, scale.high) if scale.log else ticks(scale.low, scale.high)


def _heat(heat: Heat, box: Box) -> list[str]:
    low, high = heat.scale
    shades = (heat.z / 2 - low / 2) / (high / 2 - low / 2)  # halved, so that nothing overflows
    body = [
        f'<image {_inside(box)} preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{_png(shades)}"/>'
    ]
    for names, start, end, most, across in (
        (heat.columns, box[0], box[2], 10, True),
        (heat.rows, box[1], box[3], 32, False),
    ):
        for name, middle in _groups(names, most):
            at = start + (end - start) * middle / max(1, len(names))
            text = _short(str(name))
            body.append(
                _text(at, box[3] + 16, text, anchor="middle", size=11)
                if across
                else _text(box[0] - 6, at + 4, text, anchor="end", size=11)
            )
    bar = np.linspace(1, 0, 64)[:, None]
    edge = box[2] + 12
    body.append(
        f'<image x="{edge}" y="{box[1]}" width="12" height="{box[3] - box[1]}" preserveAspectRatio="none" '
        f'href="data:image/png;base64,{_png(bar)}"/>'
    )
    return [
        *body,
        _text(edge + 16, box[1] + 10, f"{high:.3g}", size=11),
        _text(edge + 16, box[3], f"{low:.3g}", size=11),
    ]


def _groups(names: Sequence[str | float], most: int) -> list[tuple[str | float, float]]:
    """Neighbours of one name share a label in their middle; at most ``most`` labels."""
    starts = [place for place, name in enumerate(names) if place == 0 or name != names[place - 1]]
    ends = [*starts[1:], len(names)]
    every = math.ceil(len(starts) / most) or 1
    return [(names[a], (a + b) / 2) for a, b in list(zip(starts, ends, strict=True))[::every]]


def _png(shade: Numbers) -> str:
    """A PNG of a matrix of shades in [0, 1], as base64; grey where a number is missing."""
    place = np.clip(np.nan_to_num(shade), 0, 1) * (len(VIRIDIS) - 1)
    low = np.minimum(place.astype(int), len(VIRIDIS) - 2)
    rest = (place - low)[..., None]
    pixels = (VIRIDIS[low] * (1 - rest) + VIRIDIS[low + 1] * rest).round().astype(np.uint8)
    pixels[~np.isfinite(shade)] = 200
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", shade.shape[1], shade.shape[0], 8, 2, 0, 0, 0)
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(whole).decode("ascii")


def _legend(lines: Sequence[Line], x: int) -> list[str]:
    body = []
    for place, mark in enumerate(lines):
        y = TOP + 10 + 16 * place
        dash = f' stroke-dasharray="{DASH[mark.dash]}"' if DASH[mark.dash] else ""
        body.append(f'<path d="M{x} {y - 4}h22" stroke="{_colour(mark.colour)}" stroke-width="3"{dash}/>')
        body.append(_text(x + 28, y, _short(mark.name), size=11))
    return body


def _legend_width(lines: Sequence[Line]) -> int:
    return 48 + 7 * max(len(_short(mark.name)) for mark in lines)


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:14]}…{name[-12:]}"


def _colour(colour: Colour) -> str:
    if colour.depth is None:
        return COLOURS[colour.place % len(COLOURS)]
    place = min(max(colour.depth, 0.0), 1.0) * 2
    low = min(int(place), 1)
    mixed = DEPTHS[low] + (place - low) * (DEPTHS[low + 1] - DEPTHS[low])
    return "#" + "".join(f"{round(value):02x}" for value in mixed.tolist())


def _clean(text: str) -> str:
    """Without what XML cannot hold at all: control characters and half surrogates."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "�", text)


Number = int | float


def _text(
    x: Number, y: Number, text: str, *, anchor: str = "start", size: int = 12, weight: str = "400", colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}">'
        f"{escape(_clean(text))}</text>"
    )
