"""``subquad bench``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.terminal import numbers, progress, user_errors

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
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
) -> None:
    """Compare mechanisms with softmax attention: time and error at several lengths."""
    from subquad.lab import compare, table, write_json
    from subquad.lab.bench import Cell

    with user_errors(), progress("comparing") as step:

        def on_cell(cell: Cell, done: int, total: int) -> None:
            kind = "causal" if cell.causal else "full"
            time = f"{cell.timing.best * 1e3:.2f} ms" if cell.timing else cell.status
            step(f"{cell.mechanism} {kind} L={cell.length}: {time}", done, total)

        result = compare(
            names or None,
            numbers(lengths),
            batch=batch, heads=heads, head_dim=head_dim, runs=runs, seconds=seconds,
            threads=threads, seed=seed, on_cell=on_cell,
        )  # fmt: skip
    print(table(result))
    if json is not None:
        write_json(json, result.as_dict())
        print(f"every number: {json}", file=sys.stderr)
    if not result.complete:
        raise typer.Exit(130)
    if any(cell.status == "failed" for cell in result.cells):
        raise typer.Exit(1)
