"""``gramscope verify``: every number has a witness, on the user's own model."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import gramscope as gs
from gramscope.base.errors import GramscopeError, InputError
from gramscope.base.memory_budget import free_memory
from gramscope.base.nested import ModelInput
from gramscope.base.progress_bar import progress
from gramscope.base.rng import seeded
from gramscope.capture.network import count_examples, evaluate, in_dtype, prepare_input, slice_examples, unwrap
from gramscope.capture.side_effects import checked_gradients, plain_execution, untouched
from gramscope.kernels.gradients import gradient_gram

# Code that stands between us and the user's own, or is called by it.
LIBRARIES = [Path(gs.__file__).parent, *(Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib"))]
MOST_OUTPUTS = 32  # of each example: kernels over all outputs of a language model would not fit any machine


@dataclass(frozen=True)
class IdentityCheck:
    """One identity: its error, what is allowed, or why it could not be tried."""

    name: str
    error: float | None
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error is None or self.error <= self.allowed


@dataclass(frozen=True, eq=False)
class Witness:
    """The model in float64 and evaluation mode, a few examples, and the Jacobian row by row from plain autograd."""

    model: nn.Module
    x: ModelInput
    jacobian: Tensor  # (n, C, P)
    f: Tensor

    @property
    def kernel(self) -> Tensor:
        return torch.einsum("ncp,mdp->ncmd", self.jacobian, self.jacobian)


def load(target: str) -> tuple[nn.Module, ModelInput]:
    """``module:callable`` or ``file.py:callable``; the callable returns (model, x) or (model, x, y)."""
    place, _, name = target.partition(":")
    if not name:
        raise InputError(f"target must be module:callable or file.py:callable, got {target!r}.")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("_gramscope_target", place)
        if spec is None or spec.loader is None or not Path(place).exists():
            raise InputError(f"{place} must be a Python file, but it cannot be read.")
        module = importlib.util.module_from_spec(spec)
        with _told(f"{place} must be a Python file that can be run"):
            spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        with _told(f"{place} must be importable from here"):
            module = importlib.import_module(place)
    made = getattr(module, name, None)
    if not callable(made):
        raise InputError(f"{place} must have a callable {name!r} that returns (model, x).")
    _check_no_arguments(made, target)
    with _told(f"{target} must return (model, x)"):
        found = made()
    if not isinstance(found, tuple) or len(found) < 2 or not isinstance(found[0], nn.Module):
        raise InputError(f"{target} must return (model, x) or (model, x, y), got {type(found).__name__}.")
    return found[0], found[1]


@contextmanager
def _told(must: str) -> Iterator[None]:
    """What the user's own code raises, as one line that says where."""
    try:
        yield
    except GramscopeError:
        raise
    except SystemExit as error:
        raise InputError(f"{must}, but it called sys.exit({error.code!r}){_where(error)}.") from error
    except Exception as error:
        text = error.msg if isinstance(error, SyntaxError) else (str(error).splitlines() or [""])[0]
        raise InputError(f"{must}, but it raised {type(error).__name__}: {text}{_where(error)}.") from error


def _where(error: BaseException) -> str:
    """The deepest line of the user's own code; of code that cannot be parsed, the line that is wrong."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({Path(error.filename).name}, line {error.lineno})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if not frame.filename.startswith("<") and not any(map(path.is_relative_to, LIBRARIES)):
            return f" ({path.name}, line {frame.lineno})"
    return ""


def _check_no_arguments(made: Callable[..., object], target: str) -> None:
    try:
        inspect.signature(made).bind()
    except TypeError as error:
        raise InputError(
            f"{target} must be callable without arguments and return (model, x), but it needs some: {error}. "
            "Write a function around it."
        ) from error
    except ValueError:  # some callables of C have no signature
        return


def default_target() -> tuple[nn.Module, Tensor]:
    """A small network with a convolution, a norm, an attention block and shared weights."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 4, 3, padding=1)
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.norm, self.shared, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.conv(x)).mT
            x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
            x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
            return self.head(x.mean(1))

    with seeded(0):
        return Mixed(), torch.randn(6, 2, 5, device="cpu")


def verify(
    model: nn.Module, x: ModelInput, examples: int = 4, tell: Callable[[str], None] | None = None
) -> list[IdentityCheck]:
    """Try all identities; nothing of the model is changed. ``tell`` gets a line when each is done."""
    begun = time.perf_counter()

    def told(number: int, name: str) -> None:
        if tell is not None:
            tell(f"[{number}/{len(CHECKS)}] {time.perf_counter() - begun:5.1f} s  {name}")

    witness, note = _witness(model, x, examples)
    told(0, f"gradients of {witness.f.numel()} outputs by plain autograd")
    findings = []
    for number, (name, (check, allowed)) in enumerate(CHECKS.items(), 1):
        try:
            findings.append(IdentityCheck(name, check(witness), allowed, note))
        except GramscopeError as refused:
            findings.append(IdentityCheck(name, None, allowed, f"not defined here: {refused}"))
        told(number, name)
    return findings


class Some(nn.Module):
    """Some of the outputs of a model, which is what it is checked on where it has very many."""

    def __init__(self, model: nn.Module, count: int, width: int, kept: int) -> None:
        super().__init__()
        self.model, self.count = model, count
        self.chosen = torch.linspace(0, width - 1, kept, device="cpu").round().long().tolist()

    def forward(self, *arguments: object, **named: object) -> Tensor:
        x = named or (arguments if len(arguments) > 1 else arguments[0])
        return evaluate(self.model, x, self.count, None)[:, self.chosen]


def _witness(model: nn.Module, x: ModelInput, examples: int) -> tuple[Witness, str]:
    """The witness, and what it does not see: the Jacobian has a row for each output, found by a pass of its own."""
    model = in_dtype(unwrap(model), torch.float64).eval()
    n = count_examples(x)
    few = prepare_input(slice_examples(x, n, slice(0, min(n, examples))), torch.float64)
    count, note = min(n, examples), ""
    with untouched(model), plain_execution(), torch.no_grad():
        width = evaluate(model, few, count, None).shape[1]
    parameters = [p for p in model.parameters() if p.requires_grad]
    kept = _affordable_outputs(parameters, count)
    if width > kept:
        model = Some(model, count, width, kept).eval()
        note = f"Checked on {kept} of the {width:,} outputs, evenly from the first to the last."
    with untouched(model), plain_execution():
        f = evaluate(model, few, count, None)
        rows = []
        with progress("gradients by plain autograd", f.numel()) as done:
            for value in f.flatten():
                found = checked_gradients(value, parameters, retain_graph=True)
                rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                                       for g, p in zip(found, parameters, strict=True)]))  # fmt: skip
                done()
    return Witness(model, few, torch.stack(rows).reshape(*f.shape, -1), f.detach()), note


def _affordable_outputs(parameters: list[nn.Parameter], count: int) -> int:
    """As many outputs as leave room for the whole Jacobian in a quarter of the free memory, 32 at most."""
    row = 8 * max(1, sum(p.numel() for p in parameters))
    device = parameters[0].device if parameters else torch.device("cpu")
    affordable = free_memory(device) // (4 * row * count)
    if affordable < 1:
        raise InputError(
            f"the gradients of {count} examples must fit into a quarter of the free memory, but take "
            f"{count * row / 1e9:.1f} GB. Pass --examples 2, a smaller model of the same kind, or free memory."
        )
    return min(MOST_OUTPUTS, affordable)


def print_checks(checks: Sequence[IdentityCheck]) -> None:
    table = Table(title="Identities on this model, in float64", title_justify="left")
    for heading in ("identity", "error", "allowed", ""):
        table.add_column(heading, justify="left" if heading in ("identity", "") else "right")
    for c in checks:
        verdict = "[green]holds[/green]" if c.passed else "[red]FAILS[/red]"
        told = ("", "[yellow]skipped[/yellow]") if c.error is None else (f"{c.error:.1e}", verdict)
        table.add_row(c.name, told[0], f"{c.allowed:.0e}", told[1])
    console = Console()
    console.print(table)
    for note in dict.fromkeys(f"{c.name}: {c.note}" if c.error is None else c.note for c in checks if c.note):
        console.print(note, style="dim", markup=False)


def _relative(got: Tensor, wanted: Tensor) -> float:
    scale = float(wanted.norm())
    return float((got - wanted).norm()) / (scale if scale else 1.0)


def _kernel(w: Witness) -> float:
    return _relative(gs.ntk(w.model, w.x), w.kernel)


def _symmetry(w: Witness) -> float:
    kernel = gs.ntk(w.model, w.x).flatten(2).flatten(0, 1)
    least = float(torch.linalg.eigvalsh(kernel).min()) / float(kernel.norm())
    return max(_relative(kernel, kernel.T), -least, 0.0)


def _sites(w: Witness) -> float:
    sites = gs.ntk(w.model, w.x, by_site=True)
    return _relative(torch.stack(list(sites.values())).sum(0), w.kernel)


def _product(w: Witness) -> float:
    v = torch.linspace(-1, 1, w.f.numel(), dtype=torch.float64, device="cpu")
    return _relative(gs.ntk_operator(w.model, w.x) @ v, w.kernel.flatten(2).flatten(0, 1) @ v)


def _residual(w: Witness) -> Tensor:
    return torch.linspace(-1, 1, w.f.numel(), dtype=torch.float64, device="cpu").reshape(w.f.shape)


def _gradients(w: Witness) -> float:
    e = _residual(w)
    wanted = torch.einsum("nc,ncmd,md->nm", e, w.kernel, e)
    return _relative(torch.stack(list(gradient_gram(w.model, w.x, e).values())).sum(0), wanted)


def _first_order(w: Witness) -> float:
    e = _residual(w)
    step = gs.explain_step(w.model, w.x, (w.f - e).reshape(w.f.shape), lr=1e-6, loss=_half_squared)
    return _relative(step.predicted, -1e-6 * torch.einsum("ncmd,md->nc", w.kernel, e))


def _second_order(w: Witness) -> float:
    """Halving a small step must quarter what first order misses (masks held)."""
    e = _residual(w)
    size = float(torch.einsum("nc,ncmd,md->", e, w.kernel, e)) ** 0.5
    missed = []
    for lr in (1e-3 / size, 5e-4 / size):
        step = gs.explain_step(w.model, w.x, w.f - e, lr=lr, loss=_half_squared)
        if step.second_order is None:
            raise InputError(" ".join(step.notes))
        missed.append(float(step.second_order.norm()))
    if missed[1] < 1e-13:
        return 0.0
    return abs(missed[0] / missed[1] - 4.0)


def _feature_learning(w: Witness) -> float:
    e = _residual(w)
    found = gs.measures.feature_learning(w.model, w.x, lambda f: (f * e).sum())
    return max((weight.residual for weight in found.values()), default=0.0)


def _states(w: Witness) -> float:
    operator = gs.propagators.GlobalNTK(w.model, w.x).output
    return _relative(operator.dense(), w.kernel.flatten(2).flatten(0, 1))


def _watching(w: Witness) -> float:
    before = {name: value.clone() for name, value in w.model.state_dict().items()}
    stream = torch.get_rng_state()
    y = w.f - _residual(w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gs.record.WatchWarning)  # what it can measure here is not the question
        gs.watch(w.model, probe=(w.x, y), lr=1e-3).close()
    after = w.model.state_dict()
    same = all(torch.equal(value, after[name]) for name, value in before.items())
    return 0.0 if same and torch.equal(stream, torch.get_rng_state()) else 1.0


def _half_squared(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f.reshape(y.shape) - y).square().sum()


CHECKS: dict[str, tuple[Callable[[Witness], float], float]] = {
    "tangent kernel = J Jᵀ by plain autograd": (_kernel, 1e-10),
    "the kernel is symmetric and positive": (_symmetry, 1e-10),
    "kernels of the parameters sum to it": (_sites, 1e-10),
    "matrix-free product = kernel times vector": (_product, 1e-10),
    "Gram matrix of loss gradients = eᵀ K e": (_gradients, 1e-10),
    "first order of a step = -η K e": (_first_order, 1e-8),
    "its error falls as η² (ratio 4, masks held)": (_second_order, 0.2),
    "Feature Learning Equation": (_feature_learning, 1e-10),
    "global tangent kernel C P K P* C* = J Jᵀ": (_states, 1e-10),
    "watching changes nothing": (_watching, 0.0),
}
