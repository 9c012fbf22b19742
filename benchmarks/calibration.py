"""Lazy or rich: the thresholds of the report, fitted on runs whose regime is known, and tried on others.

    python benchmarks/calibration.py            168 runs (about ten minutes on one core), table and page
    python benchmarks/calibration.py --quick    one seed to fit, one to try: does everything run?
    python benchmarks/calibration.py --portrait fitted on the runs of ``gramscope reproduce portrait``, tried on these

An MLP learns the digits of scikit-learn. Its regime is known by construction, not by what it measures:

- ``s (f - f0)`` fitted by squared error, s from 0.1 (rich) through 1 (in between) to 100 (lazy): arXiv:1812.07956;
- only the last layer trains, or all other layers are frozen: no feature can move (lazy);
- the network linearised at its start (lazy);
- a learning rate that is far too large (diverged).

Seeds 0 to 2 fit the thresholds; the published table is of seeds 3 to 7, which the fit has not seen. The same thresholds
are then tried on other networks and with mini-batches (seeds 8 and 9).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from gramscope.diagnose import thresholds
from gramscope.report import regimes
from gramscope.report.panels.kernels import largest, moved
from gramscope.report.panels.richness import feature_change
from gramscope.report.references import lazy_richness
from gramscope.report.run_sources import views_of
from gramscope.report.view import RunView
from gramscope.tasks import Task, digits, mlp

STEPS, LR, PER_CLASS = 400, 0.2, 20
FIT_SEEDS, HELD_OUT_SEEDS, ELSEWHERE_SEEDS = (0, 1, 2), (3, 4, 5, 6, 7), (8, 9)
RESULTS = Path(__file__).parent / "results" / "calibration.json"
PAGE = Path(__file__).parents[1] / "docs" / "calibration.md"
PORTRAIT = Path(__file__).parents[1] / "experiments" / "portrait" / "result.csv"
BEGIN, END = "<!-- written by benchmarks/calibration.py -->", "<!-- end of what it wrote -->"
TRUTHS = ("rich", "in between", "lazy", "diverged")


@dataclass(frozen=True)
class Setting:
    """Network and batches; ``batch`` None takes all examples at each step."""

    name: str
    widths: tuple[int, ...]
    batch: int | None = None


FITTED = Setting("three hidden layers of 64, full batches", (64, 64, 64, 64, 10))
ELSEWHERE = (
    Setting("mini-batches of 64", FITTED.widths, 64),
    Setting("two hidden layers of 128", (64, 128, 128, 10)),
    Setting("four hidden layers of 128, mini-batches of 64", (64, 128, 128, 128, 128, 10), 64),
)


class Centred(nn.Module):
    """``s (f - f0)``: the output scale of arXiv:1812.07956, zero at the start."""

    def __init__(self, widths: tuple[int, ...], scale: float, seed: int) -> None:
        super().__init__()
        self.scale, self.net, self.start = scale, mlp(widths, seed), mlp(widths, seed).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.net(x) - self.start(x))


class Linearised(nn.Module):
    """``J (θ - θ0)`` of the ReLU network: each layer's change acts on the activations of the start."""

    def __init__(self, widths: tuple[int, ...], seed: int) -> None:
        super().__init__()
        self.start = mlp(widths, seed).requires_grad_(False)
        linear = [layer for layer in self.start if isinstance(layer, nn.Linear)]
        self.changes = nn.ModuleList(nn.Linear(layer.in_features, layer.out_features) for layer in linear)
        for change in self.changes:
            nn.init.zeros_(change.weight)
            nn.init.zeros_(change.bias)

    def forward(self, x: Tensor) -> Tensor:
        a, da = x, torch.zeros_like(x)
        changes = iter(self.changes)
        for layer in self.start:
            if isinstance(layer, nn.Linear):
                a, da = layer(a), F.linear(da, layer.weight) + next(changes)(a)
            else:
                on = a > 0
                a, da = a * on, da * on
        return da


Build = Callable[[tuple[int, ...], int], tuple[nn.Module, list[nn.Parameter]]]  # of widths and seed


@dataclass(frozen=True)
class Kind:
    """A run of known regime: ``build`` gives the model and the parameters that its optimiser holds."""

    name: str
    truth: str
    build: Build
    lr: float
    loss_divisor: float = 1.0


def scaled(scale: float, truth: str, lr: float = LR) -> Kind:
    def build(widths: tuple[int, ...], seed: int) -> tuple[nn.Module, list[nn.Parameter]]:
        model = Centred(widths, scale, seed)
        return model, list(model.net.parameters())

    # The same speed in function space for all scales.
    return Kind(f"output scale {scale:g}", truth, build, lr / max(1.0, scale**2), min(1.0, scale))


def _last_only(widths: tuple[int, ...], seed: int) -> tuple[nn.Module, list[nn.Parameter]]:
    model = Centred(widths, 1.0, seed)
    return model, list(model.net[-1].parameters())


def _frozen(widths: tuple[int, ...], seed: int) -> tuple[nn.Module, list[nn.Parameter]]:
    model, last = _last_only(widths, seed)
    model.requires_grad_(False)
    return model, [parameter.requires_grad_() for parameter in last]


def _linearised(widths: tuple[int, ...], seed: int) -> tuple[nn.Module, list[nn.Parameter]]:
    model = Linearised(widths, seed)
    return model, list(model.changes.parameters())


def kinds() -> list[Kind]:
    return [
        *(scaled(scale, "rich") for scale in (0.1, 0.3, 1.0)),
        *(scaled(scale, "in between") for scale in (2.5, 4.0)),
        *(scaled(scale, "lazy") for scale in (10.0, 30.0, 100.0)),
        Kind("last layer only", "lazy", _last_only, LR),
        Kind("frozen features", "lazy", _frozen, LR),
        Kind("linearised", "lazy", _linearised, LR / 10),
        Kind("learning rate too large", "diverged", scaled(1.0, "").build, 1000 * LR),
    ]


def train(kind: Kind, setting: Setting, seed: int, task: Task, out: Path) -> None:
    """Gradient descent with momentum under the watcher."""
    model, held = kind.build(setting.widths, seed)
    optimizer = torch.optim.SGD(held, lr=kind.lr, momentum=0.9)
    rng = torch.Generator().manual_seed(seed)

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return (f - F.one_hot(y, f.shape[1]).to(f.dtype)).square().mean() / (2 * kind.loss_divisor)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a diverged run warns at every measurement
        with gs.watch(
            model, probe=task.balanced(PER_CLASS), out=out, every=STEPS // 20, loss=loss, overhead=None,
            measures=["loss", "kernel", "richness"], config={"kind": kind.name, "seed": seed},
        ) as scope:  # fmt: skip
            for _ in range(STEPS):
                batch = torch.randint(len(task.x), (setting.batch,), generator=rng) if setting.batch else slice(None)
                optimizer.zero_grad()
                value = loss(model(task.x[batch]), task.y[batch])
                value.backward()
                optimizer.step()
                scope.step(loss=value)


@dataclass(frozen=True, eq=False)
class Row:
    """One run: what it is by construction, what was measured, and what the report says of it."""

    setting: str
    kind: str
    truth: str
    seed: int
    kernel_drift: float | None
    feature_change: float | None
    relative_richness: float | None
    final_loss: float | None
    verdict: str


def row(setting: Setting, kind: Kind, seed: int, view: RunView) -> Row:
    def known(value: float | None) -> float | None:
        return None if value is None or value != value else round(value, 4)

    features, drift, richness = feature_change(view), moved(view), view.series.get("richness")
    white = lazy_richness(view)
    loss = view.series["loss/probe"].last * kind.loss_divisor
    return Row(
        setting.name, kind.name, kind.truth, seed, known(largest(drift)[1] if drift else None),
        known(features.last if features else None), known(richness.last / white if richness and white else None),
        known(loss), regimes.regime(view),
    )  # fmt: skip


def rows(seeds: Sequence[int], setting: Setting = FITTED) -> list[Row]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            task = digits(seed)
            for place, kind in enumerate(kinds()):
                out = Path(folder) / f"{place}-{seed}"
                train(kind, setting, seed, task, out)
                found.append(row(setting, kind, seed, views_of([gs.open_run(out)])[0]))
                print(*asdict(found[-1]).values(), sep="\t", flush=True)
    return found


def fitted(found: Sequence[Row], measure: str) -> tuple[float, float]:
    """The thresholds (lazy below the first, rich above the second) that get most runs right, to two digits.

    Of equally good ones those are taken that lie in the widest gaps between two runs.
    """
    values = {row: value for row in found if (value := getattr(row, measure)) is not None}
    points = sorted({0.0, *values.values()})
    gaps = {math.sqrt((a + 1e-3) * b): math.log(b / (a + 1e-3)) for a, b in pairwise(points)}

    def quality(pair: tuple[float, float]) -> tuple[int, float]:
        right = sum(regimes.judged(value, *pair) == row.truth for row, value in values.items())
        return right, min(gaps[cut] for cut in pair)

    lazy, rich = max(((a, b) for a in gaps for b in gaps if a <= b), key=quality)
    return float(f"{lazy:.2g}"), float(f"{rich:.2g}")


def fitted_thresholds(found: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Of the feature change on all runs; of the kernel drift on those whose layers all train, as its rule says."""
    sound = [row for row in found if row.truth != "diverged"]
    whole = [row for row in sound if row.kind != "last layer only"]
    return {
        "feature_change": fitted(sound, "feature_change"),
        "kernel_drift": fitted(whole, "kernel_drift"),
        "relative_richness": fitted([turned(row) for row in sound], "relative_richness"),
    }


def turned(row: Row) -> Row:
    """With D_LR so that it rises from lazy to rich, as the others do."""
    return replace(
        row, relative_richness=None if row.relative_richness is None else max(0.0, 1 - row.relative_richness)
    )


def confusion(found: Sequence[Row], say: Callable[[Row], str]) -> dict[str, dict[str, int]]:
    """How many runs of each true regime got each verdict."""
    counts = Counter((row.truth, say(row)) for row in found)
    return {truth: {said: counts[truth, said] for said in TRUTHS} for truth in TRUTHS}


def by_one(measure: str, pair: tuple[float, float]) -> Callable[[Row], str]:
    """The verdict of one measure alone; divergence is seen by the loss."""

    def say(row: Row) -> str:
        value = getattr(turned(row) if measure == "relative_richness" else row, measure)
        return row.verdict if row.verdict == "diverged" or value is None else regimes.judged(value, *pair)

    return say


def table(counts: dict[str, dict[str, int]]) -> list[str]:
    head = ["| truth | runs | " + " | ".join(f"said {said}" for said in TRUTHS) + " |", "|---" * 6 + "|"]
    return head + [
        f"| {truth} | {sum(row.values())} | " + " | ".join(str(row[said] or "") for said in TRUTHS) + " |"
        for truth, row in counts.items()
    ]


def span(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    low, high = (f"{float(f'{value:.2g}'):g}" for value in (min(known), max(known))) if known else ("", "")
    return f"{low} to {high}" if known else "not defined"


def page_part(fit: dict[str, tuple[float, float]], found: Sequence[Row], elsewhere: Sequence[Row]) -> str:
    """The tables of docs/calibration.md."""
    right = sum(row.verdict == row.truth for row in found)
    lines = [f"The verdict of the report on {len(found)} runs that the fit has not seen: {right} are right.", ""]
    lines += [*table(confusion(found, lambda row: row.verdict)), ""]
    lines += ["| measure alone | lazy | rich | runs right |", "|---|---|---|---|"]
    for name, (lazy, rich) in fit.items():
        counts = confusion(found, by_one(name, (lazy, rich)))
        own = f"{sum(counts[truth][truth] for truth in TRUTHS)} of {len(found)}"
        if name == "relative_richness":  # turned back
            lines.append(f"| D_LR, divided by 1 − √(C/p) | above {1 - lazy:.2g} | below {1 - rich:.2g} | {own} |")
        else:
            lines.append(f"| {name.replace('_', ' ')} | below {lazy:g} | above {rich:g} | {own} |")
    lines += ["", "| run | truth | feature change | kernel drift | D_LR / (1 − √(C/p)) | verdicts |", "|---" * 6 + "|"]
    for kind in dict.fromkeys(row.kind for row in found):
        own = [row for row in found if row.kind == kind]
        said = ", ".join(f"{count} {name}" for name, count in Counter(row.verdict for row in own).items())
        spans = [span([getattr(row, key) for row in own]) for key in list(fit)]
        lines.append(f"| {kind} | {own[0].truth} | {' | '.join(spans)} | {said} |")
    return "\n".join([*lines, "", *elsewhere_part(elsewhere)])


def elsewhere_part(found: Sequence[Row]) -> list[str]:
    """The same thresholds where nothing was fitted: other networks and batches."""
    lines = ["| elsewhere | runs right | wrong verdicts |", "|---|---|---|"]
    for setting in dict.fromkeys(row.setting for row in found):
        own = [row for row in found if row.setting == setting]
        wrong = Counter((row.kind, row.truth, row.verdict) for row in own if row.verdict != row.truth)
        told = "; ".join(f"{kind} ({truth}): {count} {said}" for (kind, truth, said), count in wrong.items())
        lines.append(f"| {setting} | {len(own) - wrong.total()} of {len(own)} | {told} |")
    return lines


def written(
    fit: dict[str, tuple[float, float]], fit_rows: Sequence[Row], found: Sequence[Row], elsewhere: Sequence[Row]
) -> None:
    results = {
        "command": "python benchmarks/calibration.py",
        "thresholds": {name: list(pair) for name, pair in fit.items()},
        "confusion": confusion(found, lambda row: row.verdict),
        "fitted_on": [asdict(row) for row in fit_rows],
        "held_out": [asdict(row) for row in found],
        "elsewhere": [asdict(row) for row in elsewhere],
    }
    lines = json.dumps(results, indent=1)
    RESULTS.write_text(re.sub(r"\n {3,}|\n {2}(?=[\]}])", " ", lines) + "\n", encoding="utf-8")  # one run a line
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{page_part(fit, found, elsewhere)}\n{END}{after}", encoding="utf-8")


def portrait_rows() -> list[Row]:
    """The runs of known regime of ``gramscope reproduce portrait``, from its committed table."""
    table = pd.read_csv(PORTRAIT, keep_default_na=False, na_values=["", "nan"])
    known = table[table["truth"].isin(TRUTHS)]
    columns = zip(known["kind"], known["truth"], known["seed"], known["largest_drift"],
                  1 - known["richness/initial_similarity"], strict=True)  # fmt: skip
    return [
        Row("portrait", kind, truth, seed, drift, change if change == change else None, None, None, "")
        for kind, truth, seed, drift, change in columns
    ]


def other_way_round() -> None:
    """Thresholds fitted on the portrait's runs, tried on all runs of the calibration."""
    found = portrait_rows()
    sound = [row for row in found if row.truth != "diverged"]
    features = fitted(sound, "feature_change")
    kernel = fitted([row for row in sound if row.kind != "last layer only"], "kernel_drift")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    runs = [Row(**row) for part in ("fitted_on", "held_out", "elsewhere") for row in results[part]]

    def said(row: Row) -> str:
        if row.verdict == "diverged" or row.kernel_drift is None:
            return row.verdict
        still = row.feature_change is not None and row.feature_change < features[0]
        return "lazy" if still else regimes.judged(row.kernel_drift, *kernel)

    same = sum(said(row) == row.verdict for row in runs)
    print(f"Fitted on {len(found)} runs of the portrait: feature change {features}, kernel drift {kernel}.")
    print(f"With these the verdict on {same} of {len(runs)} runs of the calibration is the same as the report's.")


def check(fit: dict[str, tuple[float, float]]) -> None:
    """The report must use what was fitted."""
    used = {
        "feature_change": (thresholds.LAZY_FEATURES, thresholds.RICH_FEATURES),
        "kernel_drift": (thresholds.LAZY_KERNEL, thresholds.RICH_KERNEL),
    }
    differ = {name: pair for name, pair in used.items() if pair != fit[name]}
    if differ:
        raise SystemExit(
            f"gramscope/diagnose/thresholds.py has {differ}, the fit gives {fit}: write it there, run again."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed to fit and one to try; nothing is written")
    parser.add_argument("--portrait", action="store_true", help="fit on the portrait's runs instead; nothing is run")
    options = parser.parse_args()
    if options.portrait:
        other_way_round()
        return
    quick = options.quick
    fit_rows = rows(FIT_SEEDS[:1] if quick else FIT_SEEDS)
    fit = fitted_thresholds(fit_rows)
    print(fit)
    if not quick:
        check(fit)
    found = rows(HELD_OUT_SEEDS[:1] if quick else HELD_OUT_SEEDS)
    elsewhere = [
        row for setting in ELSEWHERE for row in rows(ELSEWHERE_SEEDS[:1] if quick else ELSEWHERE_SEEDS, setting)
    ]
    print(page_part(fit, found, elsewhere))
    if not quick:
        written(fit, fit_rows, found, elsewhere)


if __name__ == "__main__":
    main()
