"""The pictures of the page in docs/images, taken by hand from real runs:

python tests/report/screenshots.py gramscope-demo/runs
"""

import io
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from torch.nn.functional import cross_entropy

import gramscope as gs
from gramscope.report import report

# For the README and the first page: the verdicts and two panels beside each other, low enough to leave the code of the
# README on the first screen.
VERDICTS_AND_PANELS = """
  nav, footer, fieldset, button, header, #table, .advice, .diagnosis, .warning, #summary ul, #summary > p, .save,
  #summary h2, .words, .notes, .panel:not(#panel-shares, #panel-kernel-moves),
  #panel-kernel-moves figure:not(:first-child) { display: none !important; }
  main { display: grid; grid-template-columns: 2fr 1fr; gap: 0 2rem; }
  #summary { grid-column: 1 / -1; border: 0; padding-bottom: 0; }
  #summary > div { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1rem; }
  .fold > summary { list-style: none; }
  .panel { border: 0; padding: .5rem 0 0; } #panel-kernel-moves .how { font-size: .8rem; } .lead { font-size: 1rem; }
  #panel-shares .plots { grid-template-columns: 1fr 1fr; } #panel-kernel-moves .plots { grid-template-columns: 1fr; }
"""
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def small(png: bytes, path: Path, width: int) -> None:
    """At most ``width`` wide and in 96 colours: a page of text and lines needs no more, and stays small."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    image.quantize(96, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, path.stat().st_size)


def sweep(out: Path) -> Path:
    """Twenty runs of 60 steps: five learning rates, four output scales."""
    task = gs.tasks.digits()
    settings = [(scale, lr) for scale in (0.3, 1.0, 3.0, 10.0) for lr in (0.01, 0.02, 0.05, 0.1, 0.2)]
    for place, (scale, lr) in enumerate(settings):
        model = gs.tasks.mlp((64, 32, 32, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scaled = torch.nn.Sequential(model, Times(scale))
        config = {"lr": lr, "output scale": scale, "width": 32}
        folder = out / f"run-{place}"
        with gs.watch(scaled, probe=task.balanced(8), out=folder, config=config, overhead=None).use(optimizer) as scope:
            for start in range(0, 60 * 20, 20):
                loss = cross_entropy(scaled(task.x[start : start + 20]), task.y[start : start + 20])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scope.step(loss=loss)
    return out


class Times(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * x


def main(demo: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = report(demo, Path(folder) / "report.html")
        tab = opened(browser, page, 900, "light")
        tab.add_style_tag(content=VERDICTS_AND_PANELS)
        tab.evaluate("window.dispatchEvent(new Event('resize'))")  # Plotly measures the new places
        tab.wait_for_timeout(1500)
        small(tab.locator("main").screenshot(), IMAGES / "report.png", 1100)
        for scheme, name in (("light", "report-words.png"), ("dark", "report-dark.png")):
            tab = opened(browser, page, 1320 if scheme == "light" else 900, scheme, scheme == "dark")
            if scheme == "dark":
                tab.evaluate("document.getElementById('panel-kernel').scrollIntoView({behavior: 'instant'})")
            tab.wait_for_timeout(1500)
            small(tab.screenshot(), IMAGES / name, 900)
        tab = opened(browser, report(sweep(Path(folder) / "sweep"), Path(folder) / "runs.html"), 900, "light")
        tab.locator("#against-x").select_option("output scale")
        tab.locator("#against-y").select_option("kernel/drift")
        tab.wait_for_timeout(1500)
        small(tab.screenshot(full_page=True), IMAGES / "report-runs.png", 900)
        browser.close()


def opened(browser: Browser, page: Path, height: int, scheme: str, unfolded: bool = True) -> Page:
    tab = browser.new_page(viewport={"width": 1180, "height": height}, color_scheme=scheme)
    tab.goto(f"file://{page}")
    tab.wait_for_selector("html[data-ready=yes]")
    if unfolded:
        tab.locator("#unfold").click()
        tab.wait_for_timeout(3000)
    return tab


if __name__ == "__main__":
    main(*sys.argv[1:])
