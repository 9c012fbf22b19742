"""Every entry point leaves torch's, numpy's and Python's random streams where they were; the user's code draws."""

import random
import warnings

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import gramscope as gs
from fresh import run_after_torch
from gramscope.base.streams import streams_put_back
from gramscope.kernels import (
    TangentKernels,
    dntk,
    dntk_velocity,
    dntk_velocity_operator,
    gradient_gram,
    kink_crossings,
    ntk_step,
    output_curvature,
)

m = gs.measures


@pytest.fixture(autouse=True)
def _as_users_run_it():
    # The runtime type checker of the test suite draws from Python's random stream; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def draw():
    """From every global stream; what is drawn is thrown away, so that results do not depend on it."""
    torch.rand(1)
    np.random.rand()  # noqa: NPY002
    random.random()
    if torch.cuda.is_available():
        torch.rand(1, device="cuda")


class Drawing(nn.Module):
    def forward(self, x):
        draw()
        return x


class DrawingData(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        draw()  # an augmentation
        return self.x[index], self.y[index]


class DrawingSGD(torch.optim.SGD):
    def step(self, closure=None):
        draw()  # Langevin noise
        return super().step(closure)


def model_of():
    net = nn.Sequential(nn.Linear(4, 5), Drawing(), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))
    parametrize.register_parametrization(net[3], "weight", Drawing())
    return net


def drawing(function):
    def wrapped(*args):
        draw()
        return function(*args)

    return wrapped


def loss(f, y=None):
    draw()
    return f.square().mean()


def loader(x, y):
    return torch.utils.data.DataLoader(DrawingData(x, y), batch_size=4, shuffle=True)


@drawing
def first_outputs(model, x):
    return model(x)[:, :2]


metric = drawing(lambda name, parameter: 0.5)
pooled = drawing(lambda h: h.flatten(1))


LAYERS = ["0", "3", "5"]
EYE = gs.linalg.Identity(6, dtype=torch.float64)


def states():
    """A network through time, for the propagators."""
    net = nn.RNN(3, 4, batch_first=True)
    net.register_forward_pre_hook(lambda *_: draw())
    return net, torch.ones(2, 5, 3)


STATES = states()


def watched(net, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it can measure here is not the question
        optimizer = DrawingSGD(net.parameters(), lr=1e-3)
        scope = gs.watch(net, probe=(x, y), every=1, overhead=None, lr=1e-3, loss=loss, forward=None)
        scope.attach(optimizer)
        scope.step(0)
        scope.close()


CALLS = {
    "capture": lambda net, x, y: gs.capture(net, x, outputs=first_outputs),
    "capture directions": lambda net, x, y: gs.capture(net, x, directions=loss),
    "ntk": lambda net, x, y: gs.ntk(net, x, outputs=first_outputs),
    "ntk in parts": lambda net, x, y: gs.ntk(net, x, reduce="trace", memory=20_000),
    "ntk float64": lambda net, x, y: gs.ntk(net, x, precision="float64"),
    "kernel": lambda net, x, y: gs.kernel(net, x).target_alignment(y),
    "ntk_operator": lambda net, x, y: gs.ntk_operator(net, x, outputs=first_outputs, metric=metric).dense(),
    "explain_step": lambda net, x, y: gs.explain_step(
        net, x, y, loss=loss, lr=1e-3, optimizer=lambda p: DrawingSGD(p, lr=1e-3), outputs=first_outputs
    ),
    "gradient_gram": lambda net, x, y: gradient_gram(net, x, torch.ones(len(x), 3)),
    "dntk": lambda net, x, y: dntk(net, x[:2], metric=metric),
    "dntk_velocity": lambda net, x, y: dntk_velocity(net, x, loss),
    "dntk_velocity_operator": lambda net, x, y: dntk_velocity_operator(net, x, loss).dense(),
    "ntk_step": lambda net, x, y: ntk_step(net, x, loss, 1e-3),
    "output_curvature": lambda net, x, y: output_curvature(net, x, loss),
    "kink_crossings": lambda net, x, y: kink_crossings(net, x, loss, 1e-3),
    "TangentKernels": lambda net, x, y: TangentKernels(net)(x.numpy()),
    "NetworkPullback": lambda net, x, y: gs.hierarchy.NetworkPullback(net, x, "0").dense(),
    "Transport": lambda net, x, y: gs.hierarchy.Transport(net, x, "0", "3").dense(),
    "analyze": lambda net, x, y: gs.spectra.analyze(net, shuffles=2),
    "esds": lambda net, x, y: gs.spectra.esds(net),
    "shuffled_null": lambda net, x, y: gs.spectra.shuffled_null(net[0].weight, shuffles=2),
    "p_value": lambda net, x, y: gs.spectra.p_value(np.arange(1.0, 40.0)),
    "features": lambda net, x, y: m.features(net, x, LAYERS, reduce=pooled),
    "last_layer": lambda net, x, y: m.last_layer(net, x),
    "network_richness": lambda net, x, y: m.network_richness(net, loader(x, y)),
    "layer_similarity": lambda net, x, y: m.layer_similarity(net, loader(x, y), LAYERS),
    "layer_target_linearity": lambda net, x, y: m.layer_target_linearity(net, x, y, LAYERS, permutations=3),
    "held_out_target_linearity": lambda net, x, y: m.held_out_target_linearity(x, y),
    "feature_learning": lambda net, x, y: m.feature_learning(net, x, loss),
    "stationarity": lambda net, x, y: m.stationarity(net, x, loss, 1e-2),
    "agop": lambda net, x, y: m.agop(net, x, outputs=first_outputs),
    "layer_agop": lambda net, x, y: m.layer_agop(net, x),
    "agop_operator": lambda net, x, y: m.agop_operator(net, x).dense(),
    "neural_feature_ansatz": lambda net, x, y: m.neural_feature_ansatz(net, x),
    "weight_forms": lambda net, x, y: m.weight_forms(net),
    "kernel_cka": lambda net, x, y: m.kernel_cka(x, 2 * x, kernel=drawing(lambda a: a @ a.T)),
    "GlobalNTK": lambda net, x, y: gs.propagators.GlobalNTK(*STATES).operator.dense(),
    "predict_states": lambda net, x, y: gs.propagators.predict_states(*STATES, loss, 1e-3),
    "self_referential_bias": lambda net, x, y: gs.propagators.self_referential_bias(
        gs.propagators.GlobalNTK(*STATES), k=2
    ),
    "hutchinson": lambda net, x, y: gs.linalg.hutchinson(EYE, 8).interval(),
    "eigenvalues_top": lambda net, x, y: gs.linalg.eigenvalues_top(EYE, 2),
    "moments": lambda net, x, y: gs.theory.gaussian_moments(drawing(torch.tanh), torch.eye(2)),
    "critical_point": lambda net, x, y: gs.theory.critical_point(drawing(torch.tanh)),
    "ensemble": lambda net, x, y: gs.theory.ensemble(
        gs.theory.FiniteWidthMLP([2, 4, 1], "tanh").flow(x[:2, :2].double()), 4, 8
    ),
    "regressor": lambda net, x, y: gs.hierarchy.KernelReLURegressor(8, max_iter=3).fit(x.numpy(), y.numpy()),
    "nearly kernel": lambda net, x, y: gs.theory.NearlyKernelRegressor().fit(x.numpy(), y.numpy()).predict(x.numpy()),
    "watch": watched,
    "digits": lambda net, x, y: gs.tasks.digits(0),
    "made-up data": lambda net, x, y: (gs.tasks.flip_flop(seed=1), gs.tasks.modular(5), gs.tasks.parity(4)),
    "models": lambda net, x, y: (
        gs.tasks.causal_transformer(gs.tasks.modular_equations(5), width=8),
        gs.tasks.cnn(1, 2),
        gs.tasks.mlp((2, 3)),
    ),
}


def streams():
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002
    found = {"torch": torch.get_rng_state().tolist(), "numpy": (keys.tolist(), place), "python": random.getstate()}
    if torch.cuda.is_initialized():
        found["cuda"] = [state.tolist() for state in torch.cuda.get_rng_state_all()]
    return found


def assert_streams_kept(call):
    if torch.cuda.is_available():
        torch.cuda.init()
    before = streams()
    call()
    moved = [name for name, state in streams().items() if state != before[name]]
    assert not moved, f"moved: {moved}"


@pytest.mark.parametrize("name", CALLS)
def test_the_streams_are_left_alone(name):
    torch.manual_seed(0)
    net, x, y = model_of(), torch.randn(12, 4), torch.randn(12, 3)
    assert_streams_kept(lambda: CALLS[name](net, x, y))


def test_the_check_above_sees_every_stream():
    for one in (lambda: torch.rand(1), lambda: np.random.rand(), lambda: random.random()):  # noqa: NPY002
        with pytest.raises(AssertionError, match="moved"):
            assert_streams_kept(one)


def test_streams_are_put_back_through_an_error():
    @streams_put_back()
    def failing():
        draw()
        raise ValueError("halfway")

    def called():
        with pytest.raises(ValueError, match="halfway"):
            failing()

    assert_streams_kept(called)


FIRST_USE = """
import random, sys
import numpy as np, torch
from torch import nn
import gramscope as gs
from gramscope.base.progress_bar import progress
net, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.ones(6, 4)
sys.stderr.isatty = lambda: True  # so that progress bars are drawn
python, arrays, tensors = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
{call}
moved = random.getstate() != python, str(np.random.get_state()) != arrays, (torch.get_rng_state() != tensors).any()
print("moved:", [bool(one) for one in moved])
"""


@pytest.mark.parametrize(
    "call",
    [
        "with progress('work', 9) as step: step()",
        "str(gs.explain_step(net, x, torch.zeros(6, 3), lr=0.1))",
        "str(gs.theory.ensemble(gs.theory.FiniteWidthMLP([2, 4, 1]).flow(torch.eye(2).double()), 4, 8))",
        "gs.spectra.analyze(net)",
        "gs.tasks.digits(0)",
        "gs.hierarchy.KernelReLURegressor(8, max_iter=3).fit(x.numpy(), np.arange(6.0))",
        "gs.theory.NearlyKernelRegressor().fit(x.numpy() * np.arange(6)[:, None], np.arange(6.0))",
        "gs.kernels.TangentKernels(net)(x.numpy())",
        "gs.watch(net, probe=(x, torch.zeros(6, 3)), overhead=None, lr=0.1, loss=nn.functional.mse_loss).close()",
    ],
)
def test_what_a_first_use_imports_draws_nothing(call):
    """Importing rich and parts of scikit-learn draws from Python's stream; here neither is imported before."""
    said, _ = run_after_torch(FIRST_USE.format(call=call))
    assert said.strip().splitlines()[-1] == "moved: [False, False, False]"
