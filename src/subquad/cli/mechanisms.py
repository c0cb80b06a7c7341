"""`subquad mechanisms`."""

import shutil
from typing import Annotated

import typer

from subquad.cli.terminal import user_errors

__all__ = ["mechanisms"]


def mechanisms(names: Annotated[list[str] | None, typer.Argument(help="Those to list; all if absent.")] = None) -> None:
    """List the mechanisms: what each computes, what it costs and what it can do."""
    from subquad.lab import mechanism_list

    # A terminal's own width where it is narrower than what reads well; a pipe has none.
    width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
    with user_errors():
        shown = mechanism_list(width, names or None)
    print(shown)
