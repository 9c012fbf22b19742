"""convention="weightwatcher" against what WeightWatcher 0.7.7 printed: analyze(mp_fit=True, randomize=False)."""

import numpy as np
import pytest
import torch

from gramscope.spectra import analyze

# Its names in ours.
NAMES = {
    "n_tail": "num_pl_spikes",
    "alpha_hat": "alpha_weighted",
    "rank": "matrix_rank",
    "mp_sigma": "sigma_mp",
    "mp_edge": "bulk_max",
    "spikes": "num_spikes",
    "soft_rank": "mp_softrank",
    "n_eigenvalues": "num_evals",
}
SAME = ("alpha", "D", "xmin", "sigma", "log_alpha_norm", "log_norm", "stable_rank", "entropy", "lambda_max")

PRINTED = {
    "student": {
        "alpha": 4.458143524, "D": 0.05608375044, "xmin": 7.129051623, "num_pl_spikes": 22, "sigma": 0.7372786765,
        "alpha_weighted": 6.000482265, "log_alpha_norm": 6.25750452, "log_norm": 2.799286492,
        "stable_rank": 28.40054181, "entropy": 0.9194998804, "matrix_rank": 200, "lambda_max": 22.17991447,
        "sigma_mp": 0.997963819, "bulk_max": 10.35035532, "num_spikes": 5, "mp_softrank": 0.4666544287,
        "num_evals": 200,
    },
    "square": {
        "alpha": 4.502257222, "D": 0.09472001657, "xmin": 2.436638749, "num_pl_spikes": 12, "sigma": 1.011014575,
        "alpha_weighted": 4.616144771, "log_alpha_norm": 4.63538136, "log_norm": 1.998769919,
        "stable_rank": 9.407500783, "entropy": 0.8645543099, "matrix_rank": 96, "lambda_max": 10.59975082,
        "sigma_mp": 1.002326595, "bulk_max": 4.174237787, "num_spikes": 1, "mp_softrank": 0.393805275,
        "num_evals": 96,
    },
    "convolution": {
        "alpha": 14.05310379, "D": 0.1358047566, "xmin": 0.3047721852, "num_pl_spikes": 5, "sigma": 5.837525476,
        "alpha_weighted": -6.049571703, "log_alpha_norm": -5.828130298, "log_norm": 1.120163397,
        "stable_rank": 35.53389362, "entropy": 0.9432357455, "matrix_rank": 108, "lambda_max": 0.3711253317,
        "sigma_mp": 1.005902038, "bulk_max": 0.3600579396, "num_spikes": 0, "mp_softrank": 0.9701788287,
        "num_evals": 108,
    },
    "few": {
        "alpha": 1.942236465, "D": 0.1623781236, "xmin": 0.3651819424, "num_pl_spikes": 8, "sigma": 0.3331308971,
        "alpha_weighted": 0.723109981, "log_alpha_norm": 1.097068753, "log_norm": 0.951654458,
        "stable_rank": 3.796177907, "entropy": 0.8993672424, "matrix_rank": 9, "lambda_max": 2.356719529,
        "sigma_mp": 0.8719925662, "bulk_max": 2.453820744, "num_spikes": 0, "mp_softrank": 1.041201854,
        "num_evals": 9,
    },
}  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    square = 0.1 * np.random.default_rng(8).standard_normal((96, 96))
    square[0] += 0.3
    arrays = {
        "student": 0.05 * np.random.default_rng(7).standard_t(2.5, (200, 300)),
        "square": square,
        "convolution.weight": 0.1 * np.random.default_rng(9).standard_normal((12, 24, 3, 3)),
        "few": 0.3 * np.random.default_rng(10).standard_normal((9, 14)),
    }
    # WeightWatcher reads weights as float32.
    return {name: torch.from_numpy(array).float() for name, array in arrays.items()}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    frame = analyze(weights(), convention="weightwatcher", bootstrap=0)
    return {str(row["name"]).removesuffix(".weight"): row for row in frame.to_dict("records")}


@pytest.mark.parametrize("weight", PRINTED)
def test_the_printed_numbers(weight, rows):
    printed = {ours: PRINTED[weight][theirs] for ours, theirs in NAMES.items()}
    printed |= {name: PRINTED[weight][name] for name in SAME}
    found = {name: float(rows[weight][name]) for name in printed}
    # Ten digits were printed.
    assert found == pytest.approx(printed, rel=1e-8)


def test_our_convention_differs_where_it_says_so():
    """Convolutions keep their λ, and few eigenvalues are fitted like many."""
    frame = analyze(weights(), bootstrap=0).set_index("name")
    assert frame.loc["convolution.weight", "lambda_max"] == pytest.approx(2 * PRINTED["convolution"]["lambda_max"])
    assert frame.loc["few", "alpha"] != pytest.approx(PRINTED["few"]["alpha"], rel=1e-3)
    assert frame.loc["student", "alpha"] == pytest.approx(PRINTED["student"]["alpha"], rel=1e-8)
