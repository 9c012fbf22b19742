"""The three sabotaged runs of docs/my-run-does-not-learn.md: prints their diagnoses and takes the pictures, by hand.

python tests/report/guide_runs.py
"""

import io
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from torch import Tensor
from torch.nn.functional import cross_entropy

import gramscope as gs
from gramscope.report.panels.others import CAPTIONS
from gramscope.tasks import digits, mlp

sys.path.insert(0, str(Path(__file__).parent))
from screenshots import IMAGES, opened, small

FIGURES = {  # of each page, below its findings
    "zero": tuple(CAPTIONS[name] for name in ("gradient_given", "gradient_overlap")),
    "large": tuple(CAPTIONS[name] for name in ("update_ratio", "dead_units")),
    "order": ("Loss", CAPTIONS["class_predicted"]),
}
WIDTH = 900


def train(out: Path, lr: float = 0.1, zero: bool = True, order: Tensor | None = None, steps: int = 250) -> None:
    torch.manual_seed(0)
    task, model = digits(), mlp((64, 32, 32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order = torch.randperm(len(task.y)) if order is None else order
    with gs.watch(model, probe=(task.x_test[:160], task.y_test[:160]), out=out) as scope:
        scope.use(optimizer)
        for step in range(steps):
            batch = order[5 * step : 5 * step + 64]
            if zero:
                optimizer.zero_grad()
            loss = cross_entropy(model(task.x[batch]), task.y[batch])
            loss.backward()
            optimizer.step()
            scope.step(loss=loss)
    found = gs.open_run(out).scalars()["loss/probe"].dropna()
    print(f"{out.name}: loss on the probe {found.iloc[0]:.2f} to {found.iloc[-1]:.2f}")
    print(gs.diagnose(out))


def picture(browser: Browser, run: Path) -> None:
    """The findings at the top of the page, and below them the two drawings that the guide speaks of."""
    tab = opened(browser, gs.report(run, run.parent / f"{run.name}.html"), 900, "light")
    figures = [tab.locator("figure", has=tab.get_by_text(name, exact=True)).first for name in FIGURES[run.name]]
    parts = []
    for place, found in enumerate([tab.locator(".diagnosis").first, *figures]):
        found.scroll_into_view_if_needed()
        tab.wait_for_timeout(1200)  # drawings are made when they come into view
        image = Image.open(io.BytesIO(found.screenshot())).convert("RGB")
        width = WIDTH if place == 0 else WIDTH // 2
        parts.append(image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS))
    words, left, right = parts
    whole = Image.new("RGB", (WIDTH, words.height + max(left.height, right.height)), "white")
    for part, corner in ((words, (0, 0)), (left, (0, words.height)), (right, (WIDTH // 2, words.height))):
        whole.paste(part, corner)
    png = io.BytesIO()
    whole.save(png, "png")
    small(png.getvalue(), IMAGES / f"guide-{run.name}.png", WIDTH)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = Path(folder)
        train(runs / "zero", zero=False)
        train(runs / "large", lr=6.0)
        train(runs / "order", order=digits().y.argsort())
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name in FIGURES:
            picture(browser, runs / name)
        browser.close()


if __name__ == "__main__":
    main()
