"""Results in plain text: columns that stand below each other, and errors in one line."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned", "columns", "first_line"]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, the first column to the left, the others to the right, and a rule below the first row.

    >>> print("\\n".join(aligned([["mechanism", "ms"], ["linear", "1.5"]])))
    mechanism   ms
    --------------
    linear     1.5
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in rows]  # fmt: skip
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, every column to the left: for tables of words.

    >>> print("\\n".join(columns([["layer", "mechanism"], ["0", "linear"]])))
    layer  mechanism
    0      linear
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its kind where it has none.

    >>> first_line(ValueError("too long\\nand more")), first_line(KeyboardInterrupt())
    ('too long', 'KeyboardInterrupt')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
