"""Every entry point under a default device and a default dtype of the user's.

"meta" stands for a GPU: a tensor that is made on the default device by mistake holds no numbers, and the call fails.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.kernels.kernel_velocity import dntk, dntk_velocity, dntk_velocity_operator, output_curvature

torch.manual_seed(0)
MLP = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
X, Y = torch.randn(12, 8), torch.randint(0, 4, (12,))
F = MLP(X).detach()
TANH = nn.Sequential(nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 1))
CNN = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)).eval()
IMAGES = torch.randn(12, 1, 8, 8)
ENCODER, SEQUENCES = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(5, 4, 8)
GRU, TRIALS = nn.GRU(3, 4, batch_first=True), torch.randn(5, 6, 3)
WEIGHTS = [torch.randn(6, 8).double(), torch.randn(5, 6).double()]


SCANS = nn.Sequential(gs.propagators.S4D(3, 1), gs.propagators.SelectiveSSM(3, 1))
ODE = gs.propagators.NeuralODE(gs.propagators.Autonomous(nn.Linear(3, 3)), torch.linspace(0, 1, 3))
SEVERAL = gs.tasks.recurrent("rnn", 7, 4, 3)


def several_tasks():
    task = gs.tasks.battery(("go_anti", "n_back"), trials=1)
    gs.propagators.task_interference(SEVERAL, task, products=3)
    gs.propagators.blocked_components(SEVERAL, task, products=3)
    gs.tasks.battery(trials=1)


def watched(folder):
    optimizer = torch.optim.SGD(MLP.parameters(), 0.0)
    with gs.watch(MLP, probe=(X, Y), out=folder / "a", every=1, overhead=None) as scope:
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(MLP(X), Y)
            loss.backward()
            optimizer.step()
            scope.step(loss=loss.item())
    assert not len(gs.open_run(folder / "a").failures())
    gs.report([folder / "a"], out=folder / "report.html")


CALLS = {
    "capture": lambda _: gs.capture(MLP, X),
    "capture encoder": lambda _: gs.capture(ENCODER, SEQUENCES),
    "ntk": lambda _: gs.ntk(MLP, X),
    "ntk trace": lambda _: gs.ntk(MLP, X, reduce="trace"),
    "ntk in blocks": lambda _: gs.ntk(MLP, X, memory="100kB"),
    "ntk by site": lambda _: gs.ntk(CNN, IMAGES, by_site=True),
    "ntk of two sets": lambda _: gs.ntk(CNN, IMAGES, IMAGES[:3]),
    "ntk encoder": lambda _: gs.ntk(ENCODER, SEQUENCES),
    "ntk recurrent": lambda _: gs.ntk(GRU, TRIALS),
    "ntk float64": lambda _: gs.ntk(MLP, X, precision="float64"),
    "kernel": lambda _: gs.kernel(MLP, X).spectrum(),
    "operator": lambda _: gs.ntk_operator(CNN, IMAGES).dense(),
    "eigenvalues": lambda _: gs.linalg.eigenvalues_top(gs.ntk_operator(MLP, X), 3),
    "trace": lambda _: gs.linalg.xtrace(gs.ntk_operator(MLP, X), 12, seed=0),
    "explain_step": lambda _: str(gs.explain_step(CNN, IMAGES, Y, lr=0.1, loss="cross_entropy", optimizer="adam")),
    "dntk_velocity": lambda _: dntk_velocity(MLP, X, F),
    "dntk_velocity_operator": lambda _: dntk_velocity_operator(MLP, X, F).dense(),
    "output_curvature": lambda _: output_curvature(MLP, X, F),
    "dntk": lambda _: dntk(MLP, X[:2]),
    "ddntk": lambda _: gs.kernels.DDNTK(TANH, X[:2]).dense(),
    "truncated training": lambda _: gs.kernels.train_truncated(TANH, X[:2], F[:2, :1], lr=0.01, steps=2),
    "residual": lambda _: gs.theory.FiniteWidthMLP([8, 16, 16, 1], "sin", skip=1.0).flow(X.double()[:2]),
    "convolution": lambda _: gs.theory.FiniteWidthConv1d([1, 4, 1], activation="sin").flow(X.double()[:1, None, :3]),
    "fields": lambda _: gs.hierarchy.Fields(WEIGHTS, X.double()).pullback(1).dense(),
    "trajectory": lambda _: gs.hierarchy.predict_trajectory(gs.hierarchy.Fields.from_module(MLP, X), F, 0.01, 3),
    "pullback": lambda _: gs.hierarchy.NetworkPullback(MLP, X, "0").dense(),
    "transport": lambda _: gs.hierarchy.Transport(MLP, X, "0", "2").dense(),
    "kernel regressor": lambda _: gs.hierarchy.KernelReLURegressor().fit(X.numpy(), F[:, 0].numpy()),
    "flow relu": lambda _: gs.theory.FiniteWidthMLP([8, 16, 16, 1], activation="relu").flow(X.double()[:4]),
    "flow tanh": lambda _: gs.theory.FiniteWidthMLP([8, 16, 16, 1], activation="tanh").flow(X.double()[:3]),
    "global kernel": lambda _: gs.propagators.GlobalNTK(GRU, TRIALS).operator.dense(),
    "global kernel of a network": lambda _: gs.propagators.GlobalNTK(MLP, X).operator.dense(),
    "global kernel of scans": lambda _: gs.propagators.GlobalNTK(SCANS, TRIALS[:1, :2]).operator.dense(),
    "global kernel of an ODE": lambda _: gs.propagators.GlobalNTK(ODE, X[:2, :3]).operator.dense(),
    "tasks in one network": lambda _: several_tasks(),
    "collapse beyond the task": lambda _: gs.propagators.collapse_beyond_task(GRU, TRIALS, TRIALS, products=3),
    "richness": lambda _: gs.measures.richness(MLP[0](X).detach(), F),
    "target_linearity": lambda _: gs.measures.layer_target_linearity(MLP, X, F),
    "cka": lambda _: gs.measures.cka(X, F),
    "neural_collapse": lambda _: gs.measures.neural_collapse(F, Y % 3),
    "agop": lambda _: gs.measures.agop(MLP, X),
    "agop_operator": lambda _: gs.measures.agop_operator(MLP, X).dense(),
    "analyze": lambda _: gs.spectra.analyze(MLP),
    "fit_tail": lambda _: gs.spectra.fit_tail(np.random.default_rng(0).pareto(2, 300)),
    "tasks": lambda _: [gs.tasks.memory_pro(), gs.tasks.swiss_roll(20), gs.tasks.flip_flop(), gs.tasks.digits()],
    "watch": watched,
}


@pytest.fixture(params=["meta", "float64", "bfloat16"])
def default(request):
    before = torch.get_default_dtype()
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", CALLS)
def test_every_entry_point(name, default, tmp_path):
    CALLS[name](tmp_path)


FACTORIES = {
    "zeros", "ones", "eye", "arange", "randn", "rand", "randint", "empty", "full", "linspace", "logspace", "tensor",
    "randperm", "triu_indices", "tril_indices", "normal", "as_tensor",
}  # fmt: skip


def test_every_tensor_says_where_it_lies():
    """But for weights of our own models, which follow the default device as torch's do."""
    silent = []
    for path in Path(gs.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            made = (
                isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.func.attr in FACTORIES
            )
            known = any(keyword.arg in ("device", None) for keyword in node.keywords)
            if made and not known and "nn.Parameter(" not in text.splitlines()[node.lineno - 1]:
                silent.append(f"{path.name}:{node.lineno}")
    assert not silent
