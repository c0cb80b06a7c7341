"""The command line: parses, calls, prints. Everything it does can be called from Python without it."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import typer

    from subquad.lab.bench import Cell

__all__ = ["main"]

_NO_CLI = "subquad: the command line needs typer and rich, which are not installed: pip install 'subquad[cli]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``subquad`` command; without the ``cli`` extra, say how to get it and exit with status 2."""
    try:
        import rich.progress  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print(_NO_CLI, file=sys.stderr)
        raise SystemExit(2) from None
    _application()(args=None if arguments is None else list(arguments), prog_name="subquad")


def _numbers(text: str) -> list[int]:
    import typer

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: expected positive numbers separated by commas, like 512,1024,4096")
    return numbers


@contextmanager
def _progress(what: str) -> Iterator["Callable[[Cell, int, int], None]"]:
    """A progress bar on a terminal, one line per result in a pipe or a log; both on stderr, the table is stdout."""
    if not sys.stderr.isatty():

        def line(cell: "Cell", done: int, total: int) -> None:
            kind = "causal" if cell.causal else "full"
            time = f"{cell.timing.best * 1e3:.2f} ms" if cell.timing else cell.status
            print(f"[{done}/{total}] {cell.mechanism} {kind} L={cell.length}: {time}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)

        def advance(cell: "Cell", done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: L={cell.length}")

        yield advance


def _application() -> "typer.Typer":
    # Built here and not at import, so that this module, like the whole library, can be imported without typer.
    import typer

    import subquad

    app = typer.Typer(help="Linear-time attention for PyTorch.", no_args_is_help=True, add_completion=False)

    @app.callback(invoke_without_command=True)
    def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
        if version:
            print(subquad.__version__)
            raise typer.Exit

    @app.command()
    def mechanisms() -> None:
        """List the mechanisms: what each computes, what it costs and what it can do."""
        from subquad.lab import mechanism_list

        print(mechanism_list())

    @app.command()
    def bench(
        names: Annotated[list[str] | None, typer.Argument(help="Mechanisms; all of them if none is named.")] = None,
        lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "512,1024,2048,4096",
        heads: Annotated[int, typer.Option(min=1)] = 8,
        head_dim: Annotated[int, typer.Option(min=1)] = 64,
        batch: Annotated[int, typer.Option(min=1)] = 1,
        runs: Annotated[int, typer.Option(min=1, help="Interleaved runs per length; the best counts.")] = 5,
        seconds: Annotated[float, typer.Option(min=0.0, help="End the runs of one length after this long.")] = 3.0,
        threads: Annotated[int | None, typer.Option(min=1, help="torch's threads; its own choice if absent.")] = None,
        seed: Annotated[int, typer.Option()] = 0,
        json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
    ) -> None:
        """Compare mechanisms with softmax attention: time and error at several lengths."""
        from subquad.lab import compare, table, write_json

        try:
            with _progress("comparing") as on_cell:
                result = compare(
                    names or None,
                    _numbers(lengths),
                    batch=batch, heads=heads, head_dim=head_dim, runs=runs, seconds=seconds,
                    threads=threads, seed=seed, on_cell=on_cell,
                )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        print(table(result))
        if json is not None:
            write_json(json, result.as_dict())
            print(f"every number: {json}", file=sys.stderr)
        if not result.complete:
            raise typer.Exit(130)
        if any(cell.status == "failed" for cell in result.cells):
            raise typer.Exit(1)

    return app
