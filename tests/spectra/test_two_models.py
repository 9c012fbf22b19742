"""One dict a model, the change between two models, LoRA adapters, and the picture of a spectrum."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from gramscope.base.errors import InputError
from gramscope.spectra import analyze, deltas, distances, esd, fit_tail, lora_deltas, plot_esd, summary, training_label

F64 = torch.float64


def networks() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(12, 9), nn.Conv1d(4, 3, 2), nn.MultiheadAttention(6, 2)).double()
    tuned = deepcopy(base)
    change = torch.randn(9, 2, dtype=F64) @ torch.randn(2, 12, dtype=F64)
    with torch.no_grad():
        tuned[0].weight += change
        tuned[2].in_proj_weight[6:12] *= 1.5
    return base, tuned, change


def test_distances_are_those_of_the_matrices() -> None:
    base, tuned, change = networks()
    frame = distances(base, tuned).set_index("name")
    linear = frame.loc["0.weight"]
    before, after = base[0].weight.detach(), tuned[0].weight.detach()
    singular = torch.linalg.svdvals(change)
    wanted = {
        "norm": before.norm(),
        "distance": change.norm(),
        "relative": change.norm() / before.norm(),
        "spectral": singular[0],
        "stable_rank": change.norm() ** 2 / singular[0] ** 2,
        "rank": 2,
        "cosine": (before * after).sum() / before.norm() / after.norm(),
    }
    for name, value in wanted.items():
        assert float(linear[name]) == pytest.approx(float(value), rel=1e-12), name
    # k alone was scaled; a change of zero has no stable rank.
    assert frame.loc["2.in_proj_weight[k]", "relative"] == pytest.approx(0.5, rel=1e-14)
    assert frame.loc["2.in_proj_weight[q]", "distance"] == 0
    assert math.isnan(frame.loc["2.in_proj_weight[q]", "stable_rank"])
    flat = torch.cat([(b - a).flatten() for a, b in zip(base.parameters(), tuned.parameters(), strict=True)])
    whole = torch.cat([a.flatten() for a in base.parameters()])
    flat, whole = flat.detach(), whole.detach()
    assert distances(base, tuned).attrs["relative"] == pytest.approx(float(flat.norm() / whole.norm()), rel=1e-12)


def test_spectra_of_a_change_are_those_of_the_difference() -> None:
    base, tuned, change = networks()
    row = analyze(deltas(base, tuned.state_dict(), include="0.weight"), bootstrap=0).iloc[0]
    assert row["lambda_max"] == pytest.approx(float(torch.linalg.svdvals(change)[0]) ** 2, rel=1e-12)
    assert row["rank"] == 2
    single = distances(base.float(), tuned.float()).set_index("name")
    assert single.loc["0.weight", "rank"] == 2
    half = deltas({"w": torch.ones(2, 2, dtype=torch.bfloat16)}, {"w": torch.zeros(2, 2, dtype=torch.bfloat16)})
    assert half["w"].dtype == torch.float32


def test_models_that_do_not_match_are_named() -> None:
    with pytest.raises(InputError, match=r"only one has \['b'\]"):
        deltas({"a": torch.ones(2, 2)}, {"a": torch.ones(2, 2), "b": torch.ones(1)})
    with pytest.raises(InputError, match=r"shapes differ in \['a'\]"):
        deltas({"a": torch.ones(2, 2)}, {"a": torch.ones(3, 2)})
    with pytest.raises(InputError, match="no name matches"):
        deltas({"a": torch.ones(2, 2)}, {"a": torch.ones(2, 2)}, include="z*")


class Adapted(nn.Module):
    """A layer as peft builds it: adapters by name, each with its own scaling."""

    def __init__(self, adapters: dict[str, float]) -> None:
        super().__init__()
        self.base_layer = nn.Linear(5, 4)
        self.lora_A = nn.ModuleDict({name: nn.Linear(5, 2, bias=False) for name in adapters})
        self.lora_B = nn.ModuleDict({name: nn.Linear(2, 4, bias=False) for name in adapters})
        self.scaling = adapters


def test_adapters_of_modules_and_of_files() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Adapted({"default": 4.0}), Adapted({"one": 1.0, "two": 0.5}))
    found = lora_deltas(model)
    assert list(found) == ["0.weight", "1.weight[one]", "1.weight[two]"]
    layer = model[0]
    wanted = 4.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(found["0.weight"], wanted.detach())
    assert analyze(found, bootstrap=0).set_index("name").loc["0.weight", "rank"] == 2
    saved = {key: value for key, value in model[:1].state_dict().items() if "lora" in key}
    torch.testing.assert_close(lora_deltas(saved, scaling=4.0)["0.weight"], wanted.detach())
    # loralib holds the factors as parameters; a convolution's factors are flattened.
    bare = nn.Conv2d(3, 4, 3)
    bare.lora_A, bare.lora_B, bare.scaling = nn.Parameter(torch.randn(2, 27)), nn.Parameter(torch.randn(4, 2)), 0.25
    torch.testing.assert_close(lora_deltas(bare)[".weight"], (0.25 * bare.lora_B @ bare.lora_A).detach())
    with pytest.raises(InputError, match="no LoRA adapter"):
        lora_deltas(nn.Linear(2, 2))


def test_summary_is_the_mean_of_the_frame() -> None:
    rng = np.random.default_rng(0)
    heavy = torch.from_numpy(np.diag(np.sqrt(1 + rng.pareto(0.6, 90))))
    model = {"a": torch.from_numpy(rng.standard_normal((90, 60))), "b": heavy, "zero": torch.zeros(8, 8)}
    frame = analyze(model, convention="weightwatcher", bootstrap=0)
    found = summary(model, convention="weightwatcher", bootstrap=0)
    assert found["weights"] == 3
    for name in ("alpha", "alpha_hat", "log_alpha_norm", "log_norm", "log_spectral_norm", "stable_rank"):
        assert found[name] == pytest.approx(np.nanmean(frame[name].to_numpy()), rel=1e-14)  # type: ignore[literal-required]
    assert found["without_alpha"] == ["zero"]
    assert sum(found["verdicts"].values()) == 3
    by_name = frame.set_index("name")
    assert found["over_trained"] == [name for name in by_name.index if by_name.loc[name, "alpha"] < 2]
    assert found["under_trained"] == [name for name in by_name.index if by_name.loc[name, "alpha"] > 6]
    assert "b" in found["over_trained"]
    assert by_name.loc["b", "warning"] == "over-trained"
    assert "warning" not in analyze(model, bootstrap=0).columns
    with pytest.raises(InputError, match="analysed already"):
        summary(frame, bootstrap=0)
    with pytest.raises(InputError, match="columns"):
        summary(frame.drop(columns="alpha"))


@pytest.mark.parametrize(("alpha", "label"), [(1.99, "over-trained"), (2.0, ""), (6.0, ""), (6.01, "under-trained")])
def test_labels_of_weightwatcher(alpha: float, label: str) -> None:
    assert training_label(alpha) == label
    assert training_label(math.nan) == ""


def test_picture_draws_the_fit() -> None:
    weight = np.random.default_rng(1).standard_t(2, (120, 80))
    values = esd(weight)
    fit = fit_tail(values)
    for figure in (plot_esd(weight), plot_esd(values)):
        axes = figure.axes[0]
        line = axes.lines[0]
        x, y = line.get_xdata(), line.get_ydata()
        assert x[0] == pytest.approx(fit.xmin)
        assert np.log(y[-1] / y[0]) / np.log(x[-1] / x[0]) == pytest.approx(-fit.alpha)
        # The area under the drawn law is the tail's share of the eigenvalues, up to what lies beyond the last one.
        area = np.trapezoid(y, x) / (1 - (x[-1] / x[0]) ** (1 - fit.alpha))
        assert area == pytest.approx(fit.n_tail / 80, rel=0.01)
    with pytest.raises(InputError, match="positive eigenvalue"):
        plot_esd(np.zeros(4))


def test_adapters_that_do_not_fit_together_are_named():
    adapter = {"fc.lora_A.weight": torch.ones(1, 3), "fc.lora_B.weight": torch.ones(2, 2)}
    with pytest.raises(InputError, match="'fc' must be of one rank"):
        lora_deltas(adapter)
    with pytest.raises(InputError, match="scaling must be"):
        lora_deltas(adapter, scaling=math.nan)
