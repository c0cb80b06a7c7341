"""`subquad bench`."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.terminal import numbers, progress, user_errors
from subquad.files import check_writable

if TYPE_CHECKING:
    from subquad.lab.bench import Cell, Comparison

__all__ = ["bench"]


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
    backward: Annotated[bool, typer.Option("--backward", help="Time forward and backward together.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Also peak memory, each in a fresh process.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Also other libraries that are installed here.")] = False,
    save: Annotated[
        str | None,
        typer.Option(
            help="Keep the run as subquad-bench/NAME.json; the same again continues it if it was interrupted."
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two saved runs: names of --save, or files of --json.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
) -> None:
    """Compare mechanisms with softmax attention: time and error at several lengths.

    With --compare, put two saved runs side by side.
    """
    from subquad.lab import compare as compare_mechanisms
    from subquad.lab import read_comparison, table, write_json

    if compare is not None:
        _ratios(compare, json)
        return
    with user_errors(), progress("comparing") as step:
        where = None
        if save is not None:
            from subquad.lab.compare_runs import saved_path

            where = saved_path(save)
            check_writable("--save", where)
        if json is not None:
            check_writable("--json", json)
        earlier = read_comparison(where) if where is not None and where.is_file() else None
        left = f"--save {save}: {where} was left as it is; give another name, or delete the file to measure again"
        if earlier is not None and earlier.complete:
            raise ValueError(f"{left} (it holds a complete run)")
        skipped: set[tuple[int, bool]] = set()

        def on_cell(cell: "Cell", done: int, total: int) -> None:
            if earlier is not None and done == 1:  # by now its settings are known to be the same
                step(f"{where}: continuing an interrupted run, {len(earlier.cells)} results are kept", 0, None)
            kind = "causal" if cell.causal else "full"
            if cell.status == "skipped":
                if (cell.length, cell.causal) not in skipped:
                    skipped.add((cell.length, cell.causal))
                    step(f"{kind} L={cell.length}: skipped: {cell.reason}", done, total)
                return
            time = f"{cell.timing.best * 1e3:.2f} ms" if cell.timing else cell.status
            step(f"{cell.mechanism} {kind} L={cell.length}: {time}", done, total)

        unwritten: dict[Path, OSError] = {}

        def keep(comparison: "Comparison") -> None:
            unwritten.clear()
            for path in (json, where):
                if path is not None:
                    try:
                        write_json(path, comparison.as_dict())
                    except OSError as error:  # a full disk must not end the measuring: the table is still to be had
                        unwritten[path] = error

        if peers:
            from subquad.lab.peers import PEERS, installed_peers

            if not installed_peers():
                known = ", ".join(sorted({peer.package for peer in PEERS}))
                print(f"--peers: none of {known} is installed here", file=sys.stderr)
        try:
            result = compare_mechanisms(
                names or None, numbers(lengths),
                batch=batch, heads=heads, head_dim=head_dim, runs=runs, seconds=seconds, threads=threads, seed=seed,
                backward=backward, memory=memory, peers=peers, resume=earlier, on_cell=on_cell, on_length=keep,
            )  # fmt: skip
        except ValueError as error:
            if earlier is None or not str(error).startswith("resume"):
                raise
            raise ValueError(f"{left} ({error})") from None
        keep(result)
    print(table(result))
    for path in (json, where):
        if path is not None and path not in unwritten:
            print(f"every number: {path}", file=sys.stderr)
    if unwritten:
        with user_errors():
            raise next(iter(unwritten.values()))
    if not result.complete:
        if where is not None:
            print("the same command continues it", file=sys.stderr)
        raise typer.Exit(130)
    if any(cell.status == "failed" for cell in result.cells):
        raise typer.Exit(1)


def _ratios(sides: tuple[str, str], json: Path | None) -> None:
    """Two saved runs side by side."""
    from subquad.lab import read_comparison, write_json
    from subquad.lab.compare_runs import compare_saved, saved_path

    def file(name: str) -> Path:
        places = [Path(name)]
        with suppress(ValueError):  # no name: a path that --json wrote to
            places.insert(0, saved_path(name))
        if (found := next((path for path in places if path.is_file()), None)) is None:
            raise ValueError(
                f"--compare {name}: not a saved run, there is no file {' or '.join(map(str, places))}; expected a name "
                "given to --save or a file of --json"
            )
        return found

    with user_errors():
        if json is not None:
            check_writable("--json", json)
        first, second = (read_comparison(file(name)) for name in sides)
        result = compare_saved(first, second, sides)
        if json is not None:
            write_json(json, result.as_dict())
    print(result)
