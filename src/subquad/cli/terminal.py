"""What every command shares: progress on stderr, numbers from text, and errors of the user without a traceback."""

import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from subquad import checks
from subquad.plain_text import first_line

__all__ = ["given", "numbers", "progress", "refuse_description", "user_errors"]


def given(context: typer.Context) -> set[str]:
    """The names of the options that are on the command line."""
    # By name: typer brings its own copy of click, whose enumeration is not click's.
    return {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}


def refuse_description(context: typer.Context, *names: str) -> None:
    """Refuse options that describe synthetic inputs beside --file."""
    if extra := sorted(given(context) & set(names)):
        option = f"--{extra[0].replace('_', '-')}"
        raise ValueError(f"{option} describes synthetic inputs, but --file gives the inputs; leave out one of the two")


def numbers(text: str) -> list[int]:
    """Positive integers separated by commas.

    >>> numbers("512,1024")
    [512, 1024]
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise typer.BadParameter(f"{text!r}: expected positive numbers separated by commas, like 512,1024,4096")
    return values


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn ValueError and the like (bad names, unreadable files, missing extras) into a message and exit status 2.

    The library's own messages already say what was given and what is expected; a traceback would only bury them.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        message = str(error)
        # Imports at the top of a module fail with Python's own words, which name no extra.
        if isinstance(error, ModuleNotFoundError) and error.name and "subquad[" not in message:
            package = error.name.partition(".")[0]
            if (extra := _extra_of(package)) is not None:
                message = str(checks.missing_package("this command", package, extra))
        raise typer.BadParameter(message) from None
    except (MemoryError, RuntimeError) as error:
        # torch says so in its own words, of the allocator or of a size that is no number any more.
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in ("allocate memory", "overflow")):
            raise
        raise typer.BadParameter(
            f"there is not enough memory for sizes like these ({first_line(error)}); ask for fewer tokens, heads or "
            "features"
        ) from None


def _extra_of(package: str) -> str | None:
    """The extra that brings a package; None where no extra does.

    >>> _extra_of("psutil"), _extra_of("torch")
    ('lab', None)
    """
    for line in importlib.metadata.requires("subquad") or []:
        found = re.fullmatch(rf"{re.escape(package)}\b.*extra == ['\"](\w+)['\"]", line)
        if found and found[1] != "all":
            return found[1]
    return None


@contextmanager
def progress(what: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """A function `step(line, done, total)`: a bar on a terminal, one line per step in a pipe or a log.

    Both go to stderr; stdout holds the result alone. A line with total=None is a note: printed once, above the bar, and
    it stays there.
    """
    if not sys.stderr.isatty():

        def line(text: str, done: int, total: int | None) -> None:
            print(text if total is None else f"[{done}/{total}] {text}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(text: str, done: int, total: int | None) -> None:
            if total is None:
                print(text, file=sys.stderr)  # rich puts it above the bar
            else:
                bar.update(task, completed=done, total=total, description=f"{what}: {text}")

        yield advance
