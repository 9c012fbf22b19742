"""A little of everything that touches another library: every command, and a call for every dependency."""

import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gramscope as gs


def commands(folder: Path) -> None:
    """Every command of the command line, as a user types it."""
    torch.save(gs.tasks.mlp((30, 60, 20)).state_dict(), folder / "m.pt")
    (folder / "c.toml").write_text("[train]\nsteps = 4\n[watch]\nevery = 2\nprobe = 2\n[model]\nwidth = 8\ndepth = 2\n")
    run = folder / "run"
    helped = ("demo", "run", "sweep", "kernel", "report", "diagnose", "serve", "analyze", "verify", "reproduce")
    for arguments in (
        ["--help"],
        *([name, "--help"] for name in helped),
        ["analyze", folder / "m.pt", "--out", folder / "m.csv"],
        ["analyze", folder / "m.pt", "--json"],
        ["run", folder / "c.toml", "--set", f"watch.out={run}"],
        ["report", run, "-o", folder / "r.html"],
        ["diagnose", run],
        ["kernel", folder / "c.toml", "--out", folder / "K", "--examples", "20"],
        ["sweep", folder / "c.toml", "--grid", "lr=0.1,0.2", "--out", folder / "sweep"],
        ["verify"],
    ):
        call = [sys.executable, "-m", "gramscope", *map(str, arguments)]
        done = subprocess.run(call, capture_output=True, text=True)
        assert done.returncode == 0, (call, done.stdout, done.stderr)


def networks(folder: Path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double(), torch.randn(10, 4).double()
    y = torch.randn(10, 3).double()
    assert gs.ntk(net, x).isfinite().all()
    assert gs.capture(net, x).sites
    assert "share" in str(gs.explain_step(net, x, y, lr=0.1))
    gs.ntk_operator(net, x).to_scipy() @ np.ones(30)
    with gs.watch(net, probe=(x, y), out=folder / "watched", every=1, lr=0.1, loss=nn.functional.mse_loss) as scope:
        scope.step(0.5)
    run = gs.open_run(folder / "watched")
    assert len(run.scalars()) > 0
    assert run.to_dataset().sizes["step"] > 0
    run.to_csv(folder / "scalars.csv")
    gs.measures.layer_similarity(net, [x], ["0", "2"], debiased=False).to_dataframe()
    gs.measures.neural_feature_ansatz(net, x)


def libraries() -> None:
    rng = np.random.default_rng(0)
    weights = {str(seed): torch.from_numpy(rng.standard_t(1.5, (80, 80))) for seed in range(3)}
    for convention in ("gramscope", "weightwatcher"):
        assert len(gs.spectra.analyze(weights, convention=convention, workers=2)) == 3
    gs.theory.critical_point("gelu")
    str(gs.theory.ensemble(gs.theory.FiniteWidthMLP([2, 4, 1], "tanh").flow(torch.eye(2).double()), 4, 8))
    x, y = rng.standard_normal((30, 3)), rng.standard_normal(30)
    for estimator in (gs.hierarchy.KernelReLURegressor(8, max_iter=5), gs.theory.NearlyKernelRegressor()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # five steps are not enough to converge
            assert np.isfinite(estimator.fit(x, y).predict(x)).all()
    gs.tasks.digits(0)


def extras(folder: Path) -> None:
    """What the optional dependencies are for: pictures, exports, the callbacks of two trainers."""
    import lightning
    import matplotlib

    matplotlib.use("Agg")
    from transformers import Trainer, TrainingArguments

    from gramscope.record.huggingface import TrainerWatch as ForTrainer
    from gramscope.record.lightning import LightningWatch as ForLightning

    x, y = torch.randn(16, 4), torch.randn(16, 3)
    gs.kernel(nn.Linear(4, 3), x).plot()
    run = gs.open_run(folder / "watched")
    run.to_parquet(folder / "scalars.parquet")
    run.to_netcdf(folder / "run.nc")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            f = self.net(x)
            return {"logits": f} if labels is None else {"loss": (f - labels).square().mean(), "logits": f}

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch: tuple[torch.Tensor, ...], _: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    shown = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4)
    watched = ForLightning(probe=(x, y), out=folder / "lightning", module="net", every=1, overhead=None)
    lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=[watched], **dict.fromkeys(shown, False)).fit(
        Lit(), data
    )
    assert len(gs.open_run(folder / "lightning").steps) > 1
    rows = [{"x": one, "labels": other} for one, other in zip(x, y, strict=True)]
    plan = TrainingArguments(str(folder / "hf"), max_steps=3, report_to=[], use_cpu=True, save_strategy="no")
    callback = ForTrainer(probe=({"x": x}, y), out=folder / "trainer", outputs="logits", every=1, overhead=None)
    Trainer(model=Plain(), args=plan, train_dataset=rows, callbacks=[callback]).train()
    assert len(gs.open_run(folder / "trainer").steps) > 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        commands(Path(name))
        networks(Path(name))
        if "--extras" in sys.argv:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                extras(Path(name))
    libraries()
    print("smoke test passed")
