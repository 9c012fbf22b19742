"""The frame of analyze: every NaN with its reason, seeds, workers, sources, and a model left as it was."""

import logging
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gramscope as gs
from fresh import run_after_torch
from gramscope.base.errors import InputError
from gramscope.linalg import Dense, Diagonal, LowRank
from gramscope.spectra import alternatives, analyze, esd, esds, fit_marchenko_pastur, fit_tail, p_value, ranks, skipped


def assert_every_nan_has_a_reason(frame: pd.DataFrame) -> None:
    for row in frame.to_dict("records"):
        missing = [key for key, value in row.items() if isinstance(value, float) and math.isnan(value)]
        assert isinstance(row["reason"], str)
        assert bool(missing) == bool(row["reason"]), (row["name"], missing, row["reason"])


def test_the_check_above_can_fail():
    frame = pd.DataFrame([{"name": "w", "alpha": math.nan, "reason": ""}])
    with pytest.raises(AssertionError, match="alpha"):
        assert_every_nan_has_a_reason(frame)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))


def test_a_row_holds_what_the_functions_say():
    model = small_model()
    frame = analyze(model, seed=3, shuffles=2).set_index("name")
    values = esd(model[0].weight)
    row, fit = frame.loc["0.weight"], fit_tail(values)
    assert (row["alpha"], row["D"], row["xmin"], row["n_tail"]) == (fit.alpha, fit.D, fit.xmin, fit.n_tail)
    assert row["sigma"] == fit.sigma
    assert row["alpha_hat"] == pytest.approx(fit.alpha_hat, rel=1e-12)
    assert row["log_alpha_norm"] == pytest.approx(math.log10(float((values**fit.alpha).sum())), abs=1e-9)
    assert row["exponential_ratio"] == alternatives(values, fit)["exponential"].ratio
    assert row["stable_rank"] == pytest.approx(float(values.sum() / values.max()), rel=1e-12)
    assert row["entropy"] == ranks(values, size=60).entropy
    noise = fit_marchenko_pastur(values, (60, 40))
    assert (row["spikes"], row["soft_rank"], row["mp_sigma"]) == (noise.spikes, noise.soft_rank, noise.sigma)
    assert row["Q"] == 1.5
    assert 0 < row["p_value"] <= 1
    assert row["shuffled_distance"] < 0.2
    assert abs(row["p_value"] - p_value(values, replicates=300)) < 0.25
    assert frame.attrs["convention"] == "gramscope"
    assert_every_nan_has_a_reason(frame.reset_index())


def test_seeds_and_workers():
    model = small_model()
    first = analyze(model, shuffles=2, seed=1)
    pd.testing.assert_frame_equal(first, analyze(model, shuffles=2, seed=1))
    # One BLAS thread or several may round λ differently.
    pd.testing.assert_frame_equal(first, analyze(model, shuffles=2, seed=1, workers=3), rtol=1e-8)
    other = analyze(model, shuffles=2, seed=2)
    assert (first["p_value"] != other["p_value"]).any()
    assert (first["shuffled_lambda_max"] != other["shuffled_lambda_max"]).all()
    # A weight's streams hang on its name, not on what else there is.
    alone = analyze(model, shuffles=2, seed=1, include="2.weight")
    pd.testing.assert_series_equal(alone.iloc[0], first.iloc[1], check_names=False)


@pytest.mark.parametrize("convention", ["gramscope", "weightwatcher"])
@pytest.mark.parametrize("conv", ["slices", "unfold"])
def test_tiny_and_degenerate_weights(convention, conv):
    tensors = {
        "one": torch.ones(1, 1),
        "row": torch.randn(1, 9),
        "column": torch.randn(9, 1),
        "pair": torch.randn(2, 2),
        "zero": torch.zeros(12, 20),
        "zero_one": torch.zeros(1, 1),
        "identity": torch.eye(16),
        "rank_one": torch.outer(torch.arange(1.0, 13.0), torch.ones(15)),
        "half": torch.block_diag(torch.randn(10, 10), torch.zeros(10, 10)),
        "constant": torch.full((10, 10), 0.5),
        "tiny": 1e-30 * torch.randn(20, 20),
        "huge": 1e30 * torch.randn(20, 20),
        "subnormal": torch.full((9, 9), 1e-42),
        "depthwise.weight": torch.randn(6, 1, 3, 3),
        "pointwise.weight": torch.randn(8, 4, 1, 1),
        "nan": torch.full((4, 4), math.nan),
        "inf": torch.eye(4) * math.inf,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a frame names its reasons in the rows, and nothing divides by zero
        frame = analyze(tensors, convention=convention, conv=conv, bootstrap=9, shuffles=1)
    assert len(frame) == len(tensors)
    assert_every_nan_has_a_reason(frame)
    rows = frame.set_index("name")
    assert rows.loc["nan", "reason"] == (
        "nan must be finite, but 16 of 16 entries are NaN or infinite. Find the step that made them so."
    )
    assert "inf must be finite" in rows.loc["inf", "reason"]
    assert rows.loc["zero", "lambda_max"] == 0
    assert rows.loc["zero", "rank"] == 0
    assert "all eigenvalues are zero" in rows.loc["zero", "reason"]
    assert "all equal" in rows.loc["identity", "reason"]
    assert rows.loc["rank_one", "rank"] == 1 or convention == "weightwatcher"
    assert set(rows.loc[["one", "row", "column", "zero", "identity", "nan"], "verdict"]) == {"undefined"}
    if convention == "gramscope":
        assert rows.loc["tiny", "n_tail"] > 2
        assert rows.loc["huge", "n_tail"] > 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_dtypes(dtype):
    weight = torch.randn(50, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = analyze({"w": weight})
    exact = analyze({"w": weight.double()})
    pd.testing.assert_frame_equal(found, exact, rtol=1e-9)


def test_operators_and_matrices_as_sources():
    W = torch.randn(30, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(30) % 3 > 0).double()
    dense = Dense(W)
    metric = dense.T @ Diagonal(mask) @ dense  # Wᵀ P W, a pullback metric
    frame = analyze({"metric": metric, "kernel": LowRank(W), "masked": mask[:, None] * W}, shuffles=1).set_index("name")
    assert frame.loc["metric", "alpha"] == pytest.approx(frame.loc["masked", "alpha"], rel=1e-9)
    assert frame.loc["kernel", "rank"] == 20
    assert "shape" in frame.loc["metric", "reason"]
    assert_every_nan_has_a_reason(frame.reset_index())
    assert analyze(W)["name"].tolist() == ["weight"]
    assert analyze(W.numpy())["alpha"][0] == analyze(W)["alpha"][0]
    assert analyze(metric)["kind"].tolist() == ["operator"]
    indefinite = analyze(Diagonal(torch.tensor([-1.0, 2.0, 3.0])))
    assert "eigenvalues >= 0" in indefinite["reason"][0]


def test_checkpoints(tmp_path):
    model = small_model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    expected = analyze(model)
    for loaded in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt", weights_only=True)):
        frame = analyze(loaded)
        pd.testing.assert_frame_equal(frame.drop(columns="kind"), expected.drop(columns="kind"))
        assert "3.num_batches_tracked" in set(skipped(frame)["name"])


def test_the_model_is_left_as_it_was():
    model = small_model().train()
    model(torch.randn(4, 40)).sum().backward()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    random, numpy_random = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    filters, level = list(warnings.filters), logging.getLogger().level
    analyze(model, shuffles=2, workers=2)
    esds(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    pairs = zip(gradients, model.parameters(), strict=True)
    assert all(torch.equal(before, parameter.grad) for before, parameter in pairs)
    assert torch.equal(torch.get_rng_state(), random)
    assert (np.random.get_state()[1] == numpy_random).all()  # noqa: NPY002
    assert warnings.filters == filters
    assert logging.getLogger().level == level
    assert model.training


def test_import_changes_nothing():
    code = """
import logging, warnings, numpy as np, torch, pandas, scipy.special
root = logging.getLogger()
before = list(warnings.filters), root.level, list(root.handlers), torch.get_default_dtype()
streams = torch.get_rng_state(), np.random.get_state()[1].copy()
import gramscope.spectra
after = list(warnings.filters), root.level, list(root.handlers), torch.get_default_dtype()
assert before == after, (before, after)
assert torch.equal(streams[0], torch.get_rng_state()) and (streams[1] == np.random.get_state()[1]).all()
"""
    run_after_torch(code)


def test_an_empty_choice_is_an_empty_frame():
    frame = analyze(nn.LayerNorm(4))
    assert len(frame) == 0
    assert skipped(frame)["name"].tolist() == ["weight", "bias"]
    assert "LayerNorm" in skipped(frame)["reason"][0]


def test_options_are_checked():
    model = nn.Linear(3, 3)
    for options in ({"bootstrap": -1}, {"shuffles": -2}, {"workers": 0}, {"max_size": 0}):
        with pytest.raises(InputError, match=next(iter(options))):
            analyze(model, **options)
    with pytest.raises(InputError, match="must come from analyze"):
        skipped(pd.DataFrame())


@pytest.mark.parametrize("shape", [(1, 50), (50, 1)])
def test_shuffling_one_row_changes_nothing(shape):
    """Its one eigenvalue is the sum of squares in any order; rounding must not split the tie."""
    for seed in range(5):
        weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        null = gs.spectra.shuffled_null(weight, shuffles=5)
        assert null.distance == 0
        assert null.p == 1
