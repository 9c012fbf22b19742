"""``gramscope kernel``: from a config file or a callable to a folder, and again."""

import json

import torch
from typer.testing import CliRunner

import gramscope as gs
from gramscope.cli import kernel_command
from gramscope.cli.main import app
from gramscope.scale.kernel_job import KernelJob
from gramscope.scale.tile_costs import tile_cost

CALLABLE = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout()), torch.eye(3)
"""


def call(*arguments):
    return CliRunner().invoke(app, ["kernel", *map(str, arguments)])


def test_a_config_and_a_checkpoint(tmp_path):
    config, out = tmp_path / "c.toml", tmp_path / "K"
    config.write_text("[model]\nwidth = 4\ndepth = 1\n")
    options = [config, "--out", out, "--examples", 12, "--tile", 7, "--memory", "1GB"]
    first = call(*options)
    assert first.exit_code == 0, first.output
    assert "3 tiles of 7 x 7 examples to compute" in first.output
    x = gs.tasks.digits().x[:12]
    model = gs.tasks.mlp((64, 4, 10), 0)
    torch.testing.assert_close(gs.open_kernel(out).to_tensor(), gs.ntk(model, x, reduce="trace"))
    again = call(*options, "--json")
    assert json.loads(again.output) == {"kernel": str(out), "shape": [12, 12], "tiles": 3, "bytes": 4 * 4 * 49}
    torch.save({"model": {name: 2 * value for name, value in model.state_dict().items()}}, tmp_path / "trained.pt")
    refused = call(*options, "--weights", tmp_path / "trained.pt")
    assert refused.exit_code == 2
    assert "another model (other weights)" in refused.output
    assert (
        call(*options[:1], "--out", tmp_path / "L", *options[3:], "--weights", tmp_path / "trained.pt").exit_code == 0
    )
    wide = call(*options[:1], "--out", tmp_path / "M", "--set", "model.width=5", "--weights", tmp_path / "trained.pt")
    assert wide.exit_code == 2
    assert "weights that fit the model" in wide.output


def test_a_plan_for_a_gpu_says_what_moving_activations_would_take(monkeypatch):
    """On this machine there is none: the sentence is made for one, of 1e12 operations a second."""
    monkeypatch.setattr(kernel_command, "product_rate", lambda device, dtype, tf32: 1e12)
    monkeypatch.setattr(KernelJob, "device", torch.device("cpu"))
    job = KernelJob(gs.tasks.mlp((4, 600, 600, 1), 0), torch.randn(40, 4), None, "trace")
    plan = job.plan("400kB", tile=20)
    cost = tile_cost(job, plan)
    assert cost.again > 1
    assert "Moving" not in kernel_command._told_cost(job, plan)
    monkeypatch.setattr(kernel_command, "tile_cost", lambda job, plan: cost)
    monkeypatch.setattr(KernelJob, "device", torch.device("cuda"))
    told = kernel_command._told_cost(job, plan)
    assert f"Computing activations again takes {cost.repeated / 1e12:,.3g} s of that." in told
    assert f"would take at least {cost.moved / 50e9:,.3g} s and {cost.away / 1e3:.3g} kB of the CPU's memory." in told


def test_a_callable_and_bad_input(tmp_path):
    (tmp_path / "mine.py").write_text(CALLABLE)
    target = f"{tmp_path / 'mine.py'}:build"
    done = call(target, "--out", tmp_path / "K", "--reduce", "none")
    assert done.exit_code == 0, done.output
    assert gs.open_kernel(tmp_path / "K").shape == (3, 2, 3, 2), "measured in evaluation mode"
    for arguments, told in [
        ([target, "--out", tmp_path / "L", "--reduce", "sum"], "--reduce must be"),
        ([target, "--out", tmp_path / "L", "--precision", "int8"], "--precision must be"),
        ([target, "--out", tmp_path / "L", "--examples", 9], "--examples must be at most 3"),
        ([target, "--out", tmp_path / "L", "--device", "moon"], "--device must be a device"),
        ([target, "--out", tmp_path / "L", "--set", "model.width=3"], "--set changes keys of a TOML file"),
        ([tmp_path / "none.toml", "--out", tmp_path / "L"], "there is no such file"),
    ]:
        refused = call(*arguments)
        assert refused.exit_code == 2, refused.output
        assert told in refused.output
