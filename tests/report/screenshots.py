"""The pictures of the page in docs/images, taken by hand from real runs:

python tests/report/screenshots.py gramscope-demo/runs/rich gramscope-demo/runs/lazy
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from gramscope.report import report

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def small(png: bytes, path: Path, width: int) -> None:
    """At most ``width`` wide and in 96 colours: a page of text and lines needs no more, and stays under 150 kB."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


def main(runs: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = report(runs, Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            tab = browser.new_page(viewport={"width": 1180, "height": 1320}, color_scheme=scheme)
            tab.goto(f"file://{page}")
            tab.wait_for_selector("html[data-ready=yes]")
            if scheme == "dark":
                tab.set_viewport_size({"width": 1180, "height": 900})
                tab.locator("#panel-kernel").scroll_into_view_if_needed()
                tab.evaluate("document.getElementById('panel-kernel').scrollIntoView({behavior: 'instant'})")
            tab.wait_for_timeout(1500)
            small(tab.screenshot(), IMAGES / name, 900)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
