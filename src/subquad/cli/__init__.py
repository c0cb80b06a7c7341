"""The command line: parses, calls, prints. Everything it does can be called from Python without it.

One file per command, named like it; each is imported only when the command line runs, so that this package, like the
whole library, can be imported without typer.
"""

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

__all__ = ["main"]

# The order of `subquad --help`. Each name is a module of this package with a function of that name.
_COMMANDS = ("report", "mechanisms", "plan", "error", "bench", "train", "generate", "convert")

_NO_CLI = 'subquad: the command line needs typer and rich, which are not installed: pip install "subquad[cli]"'


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `subquad` command; without the `cli` extra, say how to get it and exit with status 2."""
    try:
        import rich.progress  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print(_NO_CLI, file=sys.stderr)
        raise SystemExit(2) from None
    _application()(args=None if arguments is None else list(arguments), prog_name="subquad")


def _application() -> "typer.Typer":
    import typer

    import subquad

    app = typer.Typer(help="Sub-quadratic attention for PyTorch.", no_args_is_help=True, add_completion=False)

    @app.callback(invoke_without_command=True)
    def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
        if version:
            print(subquad.__version__)
            raise typer.Exit

    for name in _COMMANDS:
        command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        app.command(name, help=_flowing(inspect.getdoc(command) or ""))(command)
    return app


def _flowing(text: str) -> str:
    """Paragraphs without line ends of their own: the help page breaks them where the terminal ends.

    >>> _flowing("One line\\nand another.\\n\\nNext.")
    'One line and another.\\n\\nNext.'
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
