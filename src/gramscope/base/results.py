"""How results show themselves: one line in a terminal, a table in a notebook, a pandas frame."""

from dataclasses import asdict, fields
from inspect import ismethod
from typing import TYPE_CHECKING, Any, ClassVar

from gramscope.base.html import html_table
from gramscope.base.pyplot import Axes, Figure

if TYPE_CHECKING:
    from pandas import DataFrame

MAX_ITEMS = 4  # of a list, a tuple or a dict that are written out


class Result:
    """Mixin of result dataclasses (made with ``repr=False``): their main numbers, four digits each.

    ``class Found(Result, shown=("value", "error"))`` names the fields, properties and methods to show, the main one
    first; all fields if empty. Tensors and arrays are shown by shape and dtype.
    """

    shown: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, shown: tuple[str, ...] = (), **options: object) -> None:
        super().__init_subclass__(**options)
        cls.shown = shown or cls.shown

    def _shown_values(self) -> dict[str, object]:
        names = self.shown or tuple(field.name for field in fields(self) if field.repr)  # type: ignore[arg-type]
        values = {name: value() if ismethod(value := getattr(self, name)) else value for name in names}
        return {
            name: value
            for name, value in values.items()
            if value is not None and not (isinstance(value, tuple) and not value)
        }

    def __repr__(self) -> str:
        told = [f"{name}={in_short(value)}" for name, value in self._shown_values().items()]
        return f"{type(self).__name__}({', '.join(told)})"

    def _repr_html_(self) -> str:
        rows = [[name, in_short(value)] for name, value in self._shown_values().items()]
        return html_table(type(self).__name__, ["", "value"], rows)


class TableResult(Result):
    """Mixin of results that are a table: ``columns`` names fields of one length, a column each.

    Or ``rows_from`` names a field of dataclasses, a row each. ``plotted``: the columns of the picture; all numbers if
    empty.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    rows_from: ClassVar[str] = ""
    plotted: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, columns: tuple[str, ...] = (), **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.columns = columns or cls.columns

    def to_dataframe(self) -> "DataFrame":
        """The table as a pandas frame."""
        from pandas import DataFrame

        data, index = self._table()
        return DataFrame(data, index=index)

    def _table(self) -> tuple[Any, Any]:
        """Rows or columns for a frame, and its index (None: 0, 1, ...)."""
        if self.rows_from:
            return [asdict(row) for row in getattr(self, self.rows_from)], None
        given = {name: getattr(self, name) for name in self.columns}
        return {name: as_column(value) for name, value in given.items() if value is not None}, None

    def plot(self, *, axes: Axes | None = None) -> Figure:
        """The columns as lines over the rows."""
        from gramscope.base.charts import line_chart

        frame = self.to_dataframe()
        names = self.plotted or tuple(frame.select_dtypes("number").columns)
        lines = {name: frame[name].to_numpy() for name in names}
        figure = line_chart(range(len(frame)), lines, type(self).__name__, "row", axes=axes)
        if frame.index.inferred_type == "string":
            drawn = axes or figure.axes[0]
            drawn.set_xticks(range(len(frame)), list(frame.index), rotation=90)
            drawn.set_xlabel("")
        return figure

    def _repr_html_(self) -> str:
        frame = self.to_dataframe()
        rows = [[str(name), *map(in_short, values)] for name, *values in frame.itertuples(index=True)]
        return html_table(repr(self), ["", *map(str, frame.columns)], rows)


def in_short(value: Any) -> str:
    """A value in a few characters.

    >>> in_short(1 / 3), in_short([1, 2]), in_short(list(range(9)))
    ('0.3333', '[1, 2]', '9 items')
    """
    if isinstance(value, bool | str) or value is None:
        return repr(value) if isinstance(value, str) else str(value)
    if hasattr(value, "dtype") and getattr(value, "shape", ()) != ():
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple | dict):
        if len(value) > MAX_ITEMS:
            return f"{len(value)} items"
        items = [f"{key}: {in_short(item)}" for key, item in value.items()] if isinstance(value, dict) else []
        inside = ", ".join(items or [in_short(item) for item in value])
        return f"{{{inside}}}" if isinstance(value, dict) else f"[{inside}]"
    if isinstance(value, float) or hasattr(value, "dtype"):
        return f"{float(value):.4g}"
    return repr(value)


def as_column(value: Any) -> Any:
    """A tensor as the array that pandas takes; anything else as it is."""
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()  # numpy has no bfloat16
