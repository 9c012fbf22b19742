"""Objects in a notebook: a small table in plain HTML, every name escaped."""

from collections.abc import Sequence
from html import escape

MAX_ROWS = 40


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> str:
    """A titled table; of very many rows the first are shown, and how many more there are.

    >>> html_table("<two>", ["name", "value"], [["a", 1]])
    '<div><strong>&lt;two&gt;</strong><table><tr><th>name</th><th>value</th></tr><tr><td>a</td><td>1</td></tr></table></div>'
    """
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows[:MAX_ROWS])
    table = f"<table><tr>{top}</tr>{body}</table>" if rows else ""
    told = [*notes, *([f"… and {len(rows) - MAX_ROWS:,} more rows"] if len(rows) > MAX_ROWS else [])]
    lines = "".join(f"<div>{escape(note)}</div>" for note in told)
    return f"<div><strong>{escape(title)}</strong>{table}{lines}</div>"
