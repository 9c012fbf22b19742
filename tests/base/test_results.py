"""Results say their main numbers, give a table and a picture, all in one way."""

import typing
from dataclasses import dataclass, is_dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

import gramscope as gs
from gramscope.base.charts import agreement_chart, heat_map, line_chart
from gramscope.base.results import Result, TableResult, in_short
from gramscope.linalg import Diagonal, conjugate_gradient, eigenvalues_top, hutchinson
from gramscope.measures.influence import Influence
from test_arguments import public_callables

F64 = torch.float64
OP = Diagonal(torch.tensor([4.0, 2.0, 1.0], dtype=F64))


@dataclass(frozen=True, repr=False)
class Found(TableResult):
    shown: ClassVar[tuple[str, ...]] = ("half", "name", "note")
    columns: ClassVar[tuple[str, ...]] = ("a", "b", "c")

    name: str
    a: torch.Tensor
    b: list[int]
    c: torch.Tensor | None = None
    note: str | None = None

    @property
    def half(self) -> float:
        return float(self.a.sum()) / 2


def test_a_result_shows_what_it_names() -> None:
    found = Found("<x>", torch.tensor([1.0, 1 / 3]), [3, 4])
    assert repr(found) == "Found(half=0.6667, name='<x>')"
    frame = found.to_dataframe()
    assert frame.columns.tolist() == ["a", "b"]
    assert frame["b"].tolist() == [3, 4]
    assert frame["a"].to_numpy() == pytest.approx([1.0, 1 / 3])
    page = found._repr_html_()
    assert "&lt;x&gt;" in page
    assert "<td>0.3333</td>" in page


def test_all_fields_are_shown_where_none_is_named() -> None:
    @dataclass(frozen=True, repr=False)
    class Plain(Result):
        value: float
        matrix: np.ndarray
        parts: dict[str, float]

    found = Plain(2 / 3, np.zeros((2, 3)), {"a": 1.0})
    assert repr(found) == "Plain(value=0.6667, matrix=(2, 3) float64, parts={a: 1})"
    assert "(2, 3) float64" in found._repr_html_()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"),
        (np.float32(0.5), "0.5"),
        (torch.tensor(2.5), "2.5"),
        ((1, 2.0), "[1, 2]"),
        ("a", "'a'"),
        (7, "7"),
    ],
)
def test_values_in_short(value: object, text: str) -> None:
    assert in_short(value) == text


@pytest.mark.parametrize(
    ("found", "main"),
    [
        (eigenvalues_top(OP, 2), "4, 2; 2 of 2 converged"),
        (conjugate_gradient(OP, torch.ones(3, dtype=F64)), "all_converged=True"),
        (hutchinson(OP, 4), "value=7"),
        (gs.spectra.fit_tail([1.0, 2.0, 4.0, 8.0]), "alpha="),
        (gs.spectra.ranks([1.0, 2.0]), "stable_rank=1.5"),
        (Influence(torch.eye(2, dtype=F64), 3), "2 training on 2 test examples, 3 checkpoints"),
    ],
)
def test_the_main_thing_is_said(found: Result, main: str) -> None:
    assert main in repr(found)
    assert type(found).__name__ in found._repr_html_()


def test_tables_hold_the_numbers() -> None:
    pairs = eigenvalues_top(OP, 2).to_dataframe()
    assert pairs["values"].tolist() == pytest.approx([4.0, 2.0])
    assert pairs["converged"].all()
    scan = gs.spectra.scan_tail([1.0, 2.0, 4.0, 8.0])
    assert scan.to_dataframe()["n_tail"].tolist() == [4, 3, 2]
    assert Influence(torch.eye(2, dtype=F64), 1).to_dataframe().to_numpy().tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_pictures_draw_what_they_are_given() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    axes = heat_map(matrix, "title", "row", "column").axes[0]
    assert axes.images[0].get_array().tolist() == matrix.tolist()
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("title", "column", "row")
    axes = line_chart([1, 2, 3], {"a": torch.tensor([1.0, 2.0, 4.0]), "b": [5.0]}, "t", "x", yscale="log").axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[1.0, 2.0, 4.0], [5.0]]
    assert axes.get_yscale() == "log"
    axes = agreement_chart(matrix, matrix + 1, "t").axes[0]
    assert axes.lines[0].get_ydata().tolist() == [1, 2, 3, 4, 5, 6]
    assert list(axes.lines[1].get_xdata()) == [0, 6]


def test_results_draw_themselves() -> None:
    assert gs.spectra.scan_tail([1.0, 2.0, 4.0, 8.0]).plot().axes[0].lines
    assert Influence(torch.eye(2, dtype=F64), 1).plot().axes[0].images
    mlp = gs.theory.FiniteWidthMLP([2, 8, 1], "relu")
    assert len(mlp.infinite_width(torch.eye(2)).plot().axes) == 4
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    assert gs.kernels.projected_trace(model, torch.randn(4, 2)).plot().axes[0].images


@dataclass(frozen=True, repr=False)
class Part(Result):
    name: str
    size: float


@dataclass(frozen=True, repr=False)
class Parts(TableResult):
    shown: ClassVar[tuple[str, ...]] = ("total",)
    rows_from: ClassVar[str] = "parts"

    parts: tuple[Part, ...]

    def total(self) -> float:
        return sum(part.size for part in self.parts)


def test_rows_of_dataclasses_are_a_table_and_a_picture() -> None:
    found = Parts((Part("a", 1.5), Part("b", 2.0)))
    assert repr(found) == "Parts(total=3.5)"
    assert found.to_dataframe().to_dict("list") == {"name": ["a", "b"], "size": [1.5, 2.0]}
    (line,) = found.plot().axes[0].lines
    assert line.get_ydata().tolist() == [1.5, 2.0]
    assert "b&#x27;</td><td>2</td>" in found._repr_html_()


# No results: data that a run is described by, settings, and what is a result of nothing yet.
NO_RESULTS = {
    "Activation", "Alert", "CubicModel", "Damage", "Evidence", "Facts", "Fields", "Finding",
    "Fingerprints", "KernelJob", "LookupSite", "OuterSite", "Projection", "QuadraticModel", "Reader", "Reading",
    "Record", "ReducedState", "RowSite", "Rule", "Site", "Snapshot", "TilePlan",
    "LoggedScalars", "MeasuredValues", "Rates", "Row",
}  # fmt: skip
PACKAGES = (
    "diagnose",
    "hierarchy",
    "kernels",
    "linalg",
    "measures",
    "propagators",
    "scale",
    "spectra",
    "tasks",
    "theory",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_result_shows_itself(package: str) -> None:
    module = getattr(gs, package)
    public = {name: getattr(module, name) for name in module.__all__}
    results = [found for found in public.values() if isinstance(found, type) and is_dataclass(found)]
    dumb = [c.__name__ for c in results if c.__name__ not in NO_RESULTS and not hasattr(c, "_repr_html_")]
    assert not dumb
    tables = [c.__name__ for c in results if hasattr(c, "to_dataframe") and not hasattr(c, "plot")]
    assert not tables


def classes_in(annotation: object) -> set[type]:
    """gramscope's classes in a type, however deep."""
    outer = typing.get_origin(annotation) or annotation
    found = {outer} if isinstance(outer, type) and outer.__module__.startswith("gramscope.") else set()
    return found.union(*map(classes_in, typing.get_args(annotation)))


def test_what_public_calls_return_shows_itself() -> None:
    """Also where the class itself is not public: `layer_agop` returns a `LayerAGOPs`."""
    returned: dict[type, str] = {}
    for name, call in public_callables().items():
        try:
            annotation = typing.get_type_hints(call).get("return")
        except NameError:  # a class that is imported for type checkers alone: a frame, a figure
            continue
        state = name.endswith((".update", ".merge", ".merged"))
        returned |= {} if state else dict.fromkeys(classes_in(annotation), name)
    dumb = {c.__name__: call for c, call in returned.items() if is_dataclass(c) and not hasattr(c, "_repr_html_")}
    assert not {name: call for name, call in dumb.items() if name not in NO_RESULTS}
    assert len(returned) > 100, "annotations are no longer read"


def test_results_by_layer_are_a_table_and_a_picture() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2
    found = gs.measures.layer_target_linearity(model, x, y, ["1", "2"])
    frame = found.to_dataframe()
    assert frame.index.tolist() == list(found) == ["(input)", "1", "2"]
    assert frame["value"].tolist() == [float(value) for value in found.values()]
    assert frame.loc["1", "null"] == found["1"].null
    axes = found.plot().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(found)
    changes = gs.measures.feature_learning(model, x, lambda f: f.square().sum())
    assert "residual=" in repr(changes["0.weight"])
    assert changes.to_dataframe()["residual"].max() == changes.residual
