"""The experiments of arXiv:2410.04264 in small, run by the functions of the gallery script that makes the table."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import gramscope as gs
from gramscope.tasks.idx import data_folder

SCRIPT = Path(__file__).parents[2] / "docs" / "gallery" / "richness_experiments.py"
needs_mnist = pytest.mark.skipif(
    data_folder("mnist") is None, reason="MNIST lies in neither $GRAMSCOPE_DATA nor ../shared/data"
)


@pytest.fixture(scope="module")
def experiments():
    spec = importlib.util.spec_from_file_location("richness_experiments", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_grokking_goes_from_lazy_to_rich(experiments):
    """Addition mod 23. Seeds 0 to 3: D_LR .71-.76 once the training pairs are fitted, .011-.022 at the end."""
    run = experiments.grokking(1, p=23, width=128, rate=5e-3, share=0.7, steps=3200, every=200)
    fitted = run.train_accuracy.index(1.0)
    assert run.richness[fitted] > 0.5
    assert run.test_accuracy[fitted] < 0.1
    assert run.richness[-1] < 0.1
    assert run.test_richness[-1] < 0.1
    assert run.test_accuracy[-1] > 0.95
    half = next(i for i, value in enumerate(run.test_accuracy) if value > 0.5)
    assert run.richness[half] < run.richness[fitted] - 0.1  # the features move before the test pairs are right


class TestNystrom:
    p, n = 60, 600

    @pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("k", [1, 7, 30])
    def test_curves_against_the_exact_eigenfunctions(self, experiments, exponent, k):
        """An evaluation set with ΦᵀΦ/m = diag(ρ) to rounding has the inner products of the whole distribution."""
        rng = torch.Generator().manual_seed(3)
        train, rho = experiments.gaussian_features(self.n, self.p, exponent, rng)
        q = torch.linalg.qr(torch.randn(90, self.p, generator=rng, dtype=torch.float64)).Q
        found = gs.measures.richness_curves(train, q * rho.sqrt() * 90**0.5, q[:, :k])
        _, exact = experiments.nystrom(self.p, self.n, exponent, seed=3)
        assert 1 - float(found.quality[k - 1]) == pytest.approx(float(exact[k - 1]), abs=1e-10)

    def test_curves_on_a_sample(self, experiments):
        """A second sample of n = 10 p examples instead: the inner products are off by 1/√n."""
        _, exact = experiments.nystrom(self.p, self.n, 0.5, seed=3)
        sampled = experiments.nystrom_curve(self.p, self.n, 0.5, k=20, seed=3)
        assert sampled == pytest.approx(float(exact[19]), abs=self.n**-0.5)

    @pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
    def test_the_error_stays_below_a_quarter(self, experiments, exponent):
        """Figure 23c, with n = 10 p as there; and a sample of n = p is not enough for the slowest decay."""
        assert all(float(error.max()) < 0.25 for error in experiments.nystrom(100, 1000, exponent))
        assert float(experiments.nystrom(100, 100, 0.5)[0].max()) > 0.25

    def test_the_error_by_hand(self, experiments):
        turned = torch.tensor([[0.6, -0.8, 0.0], [0.8, 0.6, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
        assert experiments.subspace_error(turned).tolist() == pytest.approx([0.64, 0.0, 0.0], abs=1e-15)


@needs_mnist
def test_labels_are_true_in_training_and_random_in_the_test_set():
    task = gs.tasks.mnist(train=50, test=2000)
    coded = gs.tasks.label_encoded(task)
    assert torch.equal(coded.x[:, :10].argmax(1), task.y)
    assert torch.equal(coded.y_test, task.y_test)
    agreement = float((coded.x_test[:, :10].argmax(1) == task.y_test).double().mean())
    assert 0.05 < agreement < 0.15
    assert (float(coded.x.min()), float(coded.x.max())) == (0.0, 1.0)


@needs_mnist
def test_label_encoded_mnist(experiments):
    """Ten thousand images, width 256. Seeds 0 to 2: rich .043-.049 and 16 %, lazy .45-.47 and 69-71 %."""
    task = gs.tasks.mnist(train=10_000, test=2000)
    rich = experiments.encoded(task, lazy=False, width=256, epochs=12, every=12)
    lazy = experiments.encoded(task, lazy=True, width=256, epochs=8, every=8)
    assert rich.richness[0] == lazy.richness[0] > 0.4  # the same network at the start
    assert rich.richness[-1] < 0.1 < 0.35 < lazy.richness[-1]
    assert rich.accuracy[-1] < 0.3 < 0.6 < lazy.accuracy[-1]
    assert rich.train_accuracy > 0.99
    assert float(lazy.curves.utilisation[9]) < 0.7 < 0.9 < float(rich.curves.utilisation[9])
    assert rich.curves.effective_dimension < lazy.curves.effective_dimension


@needs_mnist
def test_target_downscaling(experiments):
    """400 images, width 128: D_LR and NC1 rise with α; the ridge of 1e-4 turns the order of NC1 round."""
    task = gs.tasks.mnist(train=400, test=1000)
    low, middle, high = (experiments.downscaled(task, a, images=400, epochs=60, width=128) for a in (0.2, 2.0, 20.0))
    assert low["D_LR"] < middle["D_LR"] - 0.1 < high["D_LR"] - 0.2
    assert low["NC1"] < middle["NC1"] / 2 < high["NC1"] / 4
    assert low["NC1, ridge 1e-4"] > 2 * middle["NC1, ridge 1e-4"] > 4 * high["NC1, ridge 1e-4"]
    assert low["test accuracy"] > high["test accuracy"]


def test_without_data_the_script_says_so(experiments, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(experiments, "data_folder", lambda name: None)
    monkeypatch.setattr(
        sys, "argv", ["richness_experiments.py", "--only", "downscaling", "--out", str(tmp_path / "x.svg")]
    )
    experiments.main()
    assert "skipped: MNIST lies in neither" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
