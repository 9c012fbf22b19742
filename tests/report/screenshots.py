"""The pictures of the page in docs/images, taken by hand from real runs:

python tests/report/screenshots.py gramscope-demo/runs runs-of-a-sweep
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from gramscope.report import report

# For the README and the first page: the verdicts and two panels, without advice, tables and buttons.
VERDICTS_AND_PANELS = """
  nav, footer, fieldset, button, header label, #table, .advice, .diagnosis, .warning, #summary ul, #summary > p, .save,
  .words, .notes, .panel:not(#panel-shares, #panel-kernel-moves) { display: none !important; }
"""
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def small(png: bytes, path: Path, width: int) -> None:
    """At most ``width`` wide and in 96 colours: a page of text and lines needs no more, and stays small."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(96, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


def main(demo: str, sweep: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = report(demo, Path(folder) / "report.html")
        tab = opened(browser, page, 900, "light")
        tab.add_style_tag(content=VERDICTS_AND_PANELS)
        tab.wait_for_timeout(1500)
        small(tab.screenshot(full_page=True), IMAGES / "report.png", 1000)
        for scheme, name in (("light", "report-words.png"), ("dark", "report-dark.png")):
            tab = opened(browser, page, 1320 if scheme == "light" else 900, scheme)
            if scheme == "dark":
                tab.evaluate("document.getElementById('panel-kernel').scrollIntoView({behavior: 'instant'})")
            tab.wait_for_timeout(1500)
            small(tab.screenshot(), IMAGES / name, 900)
        tab = opened(browser, report(sweep, Path(folder) / "runs.html"), 900, "light")
        tab.locator("#against-x").select_option("output scale")
        tab.locator("#against-y").select_option("kernel/drift")
        tab.wait_for_timeout(1500)
        small(tab.screenshot(full_page=True), IMAGES / "report-runs.png", 900)
        browser.close()


def opened(browser: Browser, page: Path, height: int, scheme: str) -> Page:
    tab = browser.new_page(viewport={"width": 1180, "height": height}, color_scheme=scheme)
    tab.goto(f"file://{page}")
    tab.wait_for_selector("html[data-ready=yes]")
    return tab


if __name__ == "__main__":
    main(*sys.argv[1:])
