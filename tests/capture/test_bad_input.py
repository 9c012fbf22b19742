"""What cannot be measured is refused: what must hold, what was got, what to do; and nothing is changed."""

import jaxtyping
import pytest
import torch
from torch import nn

import gramscope as gs
from gramscope.base.errors import InputError
from references.fingerprint import assert_same_fingerprint, fingerprint
from references.jacobian import assert_kernel_close, reference_ntk
from zoo.case import Call


@pytest.fixture(autouse=True)
def _as_users_run_it():
    # The runtime type checker of the test suite would answer first; users run without it.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def x(n=3, d=4):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1))


def assert_refused(call, *patterns):
    """Raise unless `call` raises a gramscope ValueError or TypeError whose message holds every pattern."""
    try:
        result = call()
    except (ValueError, TypeError) as error:
        message = str(error)
        if not any(kind.__module__.split(".")[0] == "gramscope" for kind in type(error).__mro__):
            raise AssertionError(f"must be an error of gramscope's own, got {type(error)}: {message}") from error
        for pattern in patterns:
            if not any(word in message.lower() for word in pattern.lower().split("|")):
                raise AssertionError(f"the message must mention {pattern!r}, got: {message}") from error
        if len(message.split()) < 8:
            raise AssertionError(
                f"the message must say what holds, what was got, what to do; got: {message}"
            ) from error
        return
    except Exception as error:
        raise AssertionError(f"must be a ValueError or TypeError, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"must be refused, but returned {type(result).__name__}")


ENTRANCES = {"ntk": gs.ntk, "capture": gs.capture}


@pytest.fixture(params=ENTRANCES)
def measure(request):
    return ENTRANCES[request.param]


def assert_refused_unchanged(measure, model, inputs, *patterns, **options):
    before = fingerprint(model, inputs)
    assert_refused(lambda: measure(model, inputs, **options), *patterns)
    assert_same_fingerprint(before, fingerprint(model, inputs))


# --- inputs


@pytest.mark.parametrize(
    ("inputs", "patterns"),
    [
        (lambda: x().double(), ["float64", "float32", "dtype|cast|.to(|convert"]),
        (lambda: x().half(), ["float16", "float32", "dtype|cast|.to(|convert"]),
        (lambda: torch.ones(3, 4, dtype=torch.long), ["int64", "float32", "dtype|cast|.to(|convert"]),
        (lambda: x(3, 5), ["shape", "5"]),
        (lambda: x()[0], ["shape|axis"]),
        (lambda: torch.tensor(1.0), ["shape|axis|0-d|scalar"]),
        (lambda: x(0), ["0|empty|no example", "example"]),
        (lambda: torch.complex(x(), x()), ["complex"]),
        (lambda: x().to_sparse(), ["sparse", "dense"]),
        (lambda: x().to("meta"), ["meta"]),
        (lambda: torch.quantize_per_tensor(x(), 0.1, 0, torch.qint8), ["quanti"]),
        (lambda: x().where(x() > 0, torch.nan), ["nan|finite"]),
        (lambda: x().where(x() > 0, torch.inf), ["inf|finite"]),
        (lambda: x().numpy(), ["tensor", "ndarray|numpy"]),
        (lambda: x().tolist(), ["tensor", "list"]),
        (lambda: None, ["tensor", "none"]),
        (tuple, ["tensor"]),
        (dict, ["tensor"]),
        (lambda: (3, 4), ["tensor"]),
    ],
    ids=[
        "float64",
        "float16",
        "integers",
        "wrong width",
        "no batch axis",
        "no axis",
        "no examples",
        "complex",
        "sparse",
        "meta",
        "quantised",
        "nan",
        "inf",
        "numpy",
        "list",
        "none",
        "empty tuple",
        "empty dict",
        "no tensor inside",
    ],
)
def test_inputs(measure, inputs, patterns):
    assert_refused_unchanged(measure, mlp(), inputs(), *patterns)


def test_inputs_that_all_examples_share_may_have_any_length():
    """Prototypes, a mask: an example's output depends on no other example, so there is nothing to refuse."""
    torch.manual_seed(0)
    prototypes = Call(lambda m, a, b: m.net(a) * m.net(b).sum(), net=mlp()).double()
    normed = Call(lambda m, a, b: m.net(a) @ b, net=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))).double()
    first, second = x(3).double(), x(2).double()
    for model, inputs in (
        (prototypes, (first, second)),
        (prototypes, {"a": first, "b": second}),
        (normed.eval(), (first, second)),
    ):
        assert_kernel_close(gs.ntk(model, inputs), reference_ntk(model, inputs), 1e-12)
    coupled = Call(lambda m, a, b: m.net(a) * m.net(a).sum() + b.sum(), net=mlp())
    assert_refused_unchanged(gs.ntk, coupled, (x(3), x(2)), "3", "2", "example|axis 0|first axis")


@pytest.mark.parametrize(
    ("second", "patterns"),
    [
        (lambda: x(2, 5), ["shape"]),
        (lambda: x(2).double(), ["float64", "float32"]),
        (lambda: x(0), ["0|empty|no example"]),
        (lambda: (x(2), x(2)), ["x2|tuple|argument"]),
    ],
    ids=["wrong width", "float64", "no examples", "another structure"],
)
def test_second_inputs(second, patterns):
    model = mlp()
    before = fingerprint(model)
    assert_refused(lambda: gs.ntk(model, x(), second()), *patterns)
    assert_same_fingerprint(before, fingerprint(model))


# --- parameters


def with_weight(value):
    model = mlp()
    model[2].weight = nn.Parameter(value(model[2].weight.detach()))
    return model


@pytest.mark.parametrize(
    ("model", "patterns"),
    [
        (lambda: mlp().requires_grad_(False), ["requires_grad|frozen", "parameter"]),
        (lambda: nn.Sequential(nn.Flatten(), nn.Tanh()), ["parameter"]),
        (lambda: with_weight(lambda w: w.where(w > 0, torch.nan)), ["2.weight", "nan|finite"]),
        (lambda: with_weight(lambda w: w.where(w > 0, torch.inf)), ["2.weight", "inf|finite"]),
        (
            lambda: Call(lambda m, x: torch.sparse.mm(m.s, x.T).T, s=nn.Parameter(torch.eye(4).to_sparse())),
            ["sparse", "s"],
        ),
        (lambda: mlp().to("meta"), ["meta", "0.weight"]),
        (
            lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)),
            ["lazy|uninitialised|uninitialized", "0.weight"],
        ),
        (lambda: nn.Sequential(mlp()[0].double(), nn.Linear(5, 2)), ["dtype|float64", "float32"]),
    ],
    ids=["all frozen", "none", "nan", "inf", "sparse", "meta", "lazy", "mixed dtypes"],
)
def test_parameters(measure, model, patterns):
    model = model()
    inputs = x()
    lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters())
    if lazy:
        assert_refused(lambda: measure(model, inputs), *patterns)
        assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)
    else:
        assert_refused_unchanged(measure, model, inputs, *patterns)


def test_all_frozen_is_measured_when_asked():
    assert gs.ntk(mlp().requires_grad_(False), x(), frozen=True).shape == (3, 2, 3, 2)


@pytest.mark.parametrize(
    "model",
    [lambda x: x, mlp().forward, None, "mlp", nn.Linear],
    ids=["function", "method", "none", "name", "class"],
)
def test_what_is_not_a_model(measure, model):
    assert_refused(lambda: measure(model, x()), "module")


# --- outputs of the model


def gradient_free(m, x):
    with torch.no_grad():
        return m.net(x)


@pytest.mark.parametrize(
    ("run", "patterns"),
    [
        (lambda m, x: None, ["tensor", "none"]),
        (lambda m, x: "done", ["tensor", "str"]),
        (lambda m, x: m.net(x).sum().item(), ["tensor", "float"]),
        (lambda m, x: {"count": 3}, ["tensor"]),
        (lambda m, x: {"ids": torch.arange(len(x))}, ["float", "tensor"]),
        (lambda m, x: (), ["tensor"]),
        (lambda m, x: m.net(x).mean(), ["axis|shape", "example|n"]),
        (lambda m, x: m.net(x).mean(0), ["axis|shape", "example|n", "2", "3"]),
        (lambda m, x: m.net(x).T, ["axis|shape", "example|n", "2", "3"]),
        (lambda m, x: m.net(x)[:0], ["axis|shape", "0"]),
        (lambda m, x: m.net(x)[:, :0], ["output|shape", "0"]),
        (lambda m, x: m.net(x).argmax(1), ["int64|integer|float"]),
        (lambda m, x: m.net(x) > 0, ["bool|float"]),
        (lambda m, x: torch.complex(m.net(x), m.net(x)), ["complex"]),
        (gradient_free, ["no_grad|grad|detach"]),
        (lambda m, x: m.net(x).detach(), ["no_grad|grad|detach"]),
        (lambda m, x: m.net(x).log() * torch.nan, ["nan|finite"]),
    ],
    ids=[
        "none",
        "string",
        "number",
        "dict without tensors",
        "dict of integers",
        "empty tuple",
        "scalar",
        "batch mean",
        "transposed",
        "empty",
        "no outputs",
        "classes",
        "booleans",
        "complex",
        "no_grad",
        "detached",
        "nan",
    ],
)
def test_model_outputs(measure, run, patterns):
    assert_refused_unchanged(measure, Call(run, net=mlp()), x(), *patterns)


# --- options


@pytest.mark.parametrize(
    ("options", "patterns"),
    [
        ({"reduce": "sum"}, ["reduce", "trace", "none", "sum"]),
        ({"precision": "float16"}, ["precision", "float64", "float16"]),
        ({"coupled": "yes"}, ["coupled", "refuse", "exact", "yes"]),
        ({"memory": 0}, ["memory", "byte"]),
        ({"memory": -5}, ["memory", "byte", "-5"]),
        ({"memory": "two gigabytes"}, ["memory", "byte", "two gigabytes"]),
        ({"outputs": 2}, ["outputs", "2"]),
        ({"outputs": -3}, ["outputs", "-3"]),
        ({"outputs": [0, 7]}, ["outputs", "7"]),
        ({"outputs": []}, ["outputs"]),
        ({"outputs": slice(5, None)}, ["outputs"]),
        ({"outputs": "logits"}, ["outputs"]),
        ({"outputs": 0.5}, ["outputs"]),
        ({"outputs": lambda model, x: None}, ["outputs", "tensor"]),
        ({"outputs": lambda model, x: model(x).sum()}, ["outputs|axis|shape"]),
        ({"outputs": lambda model, x: model(x).detach()}, ["outputs|grad"]),
        ({"outputs": lambda model, x: model(x).T}, ["axis|shape"]),
    ],
    ids=[
        "reduce",
        "precision",
        "coupled",
        "no memory",
        "negative memory",
        "memory in words",
        "output too large",
        "output too small",
        "one output too large",
        "no output",
        "empty slice",
        "output by name",
        "output by a fraction",
        "function of nothing",
        "function of a sum",
        "function without gradient",
        "function transposed",
    ],
)
def test_options(options, patterns):
    assert_refused_unchanged(gs.ntk, mlp(), x(), *patterns, **options)


# --- a wrong answer for the checker


def refuse(kind, message):
    raise kind(message)


def test_the_checker_raises():
    own = type("OwnError", (ValueError,), {"__module__": "gramscope.base.errors"})
    good = "x must have shape (n, 4) to match the first layer, got (4,). Add a batch axis."
    assert_refused(lambda: refuse(own, good), "shape", "batch|example")
    wrong = {
        "must be refused": lambda: 1,
        "must be an error of gramscope": lambda: refuse(ValueError, good),
        "must be a ValueError or TypeError": lambda: refuse(RuntimeError, good),
        "must mention 'meta'": lambda: refuse(own, good),
        "must say what holds": lambda: refuse(own, "bad meta"),
    }
    for message, call in wrong.items():
        with pytest.raises(AssertionError, match=message):
            assert_refused(call, "meta")


def test_a_nested_tensor_inside_the_model(measure):
    def ragged(m, x):
        rows = torch.nested.nested_tensor([row[: 1 + i] for i, row in enumerate(x)], layout=torch.jagged)
        return torch.stack([part.mean(0) for part in m.layer(rows).unbind()])

    inputs = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(1))
    assert_refused_unchanged(measure, Call(ragged, layer=nn.Linear(4, 2)), inputs, "dense", "nested", "pad")


def test_an_error_that_explains_itself_is_not_explained_again():
    def outputs(model, x):
        raise InputError("the shape must be another one; choose it.")

    with pytest.raises(InputError, match=r"^the shape must be another one; choose it\.$"):
        gs.ntk(mlp(), x(), outputs=outputs)
