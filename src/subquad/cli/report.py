"""`subquad report`."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.terminal import numbers, progress, user_errors

__all__ = ["report"]


def report(
    out: Annotated[Path, typer.Option(help="Folder for the page, its figures and the JSON file.")] = Path(
        "results/report"
    ),
    lengths: Annotated[
        str | None, typer.Option(help="Sequence lengths, separated by commas; 256 to 16384 if absent.")
    ] = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="Mechanisms, separated by commas; all of them if absent.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths, draws and inputs: half a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="More draws, settings, lengths: 15 minutes.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what the folder's JSON file already holds.")] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="For all measurements; 162 if absent, 30 with --quick, 900 with --full."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a pretrained transformers model: plans for its layers, not for the shipped heads."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text for --model to read; a built-in page if absent.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    head_dim: Annotated[int, typer.Option(min=2)] = 64,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Which attention, from which length, with what error: measured here, as a page, figures and a table."""
    from subquad.lab.report import Settings, captured
    from subquad.lab.report import full as fuller
    from subquad.lab.report import quick as quicker
    from subquad.lab.report import report as write

    with user_errors(), progress("measuring") as step:
        settings = Settings(heads=heads, head_dim=head_dim, seed=seed)
        if lengths is not None:
            settings = dataclasses.replace(settings, lengths=tuple(numbers(lengths)))
        if mechanisms is not None:
            settings = dataclasses.replace(settings, mechanisms=tuple(name.strip() for name in mechanisms.split(",")))
        if resume and not out.is_dir():
            raise ValueError(f"--resume: there is no folder {out}; leave --resume out to begin a report there")
        if quick and full:
            raise ValueError("--quick and --full: one of them at most is expected")
        if quick or full:
            settings = (quicker if quick else fuller)(settings)
        if seconds is not None:
            settings = dataclasses.replace(settings, seconds=seconds)
        if text is not None and model is None:
            raise ValueError(f"--text {text}: it is read by a model; say which with --model")
        seen = None if model is None else captured(model, text)
        outcome = write(out, settings, resume=resume, seen=seen, on_step=step)
    print(outcome.table)
    print(f"\npage: {outcome.page.resolve()}\nevery number: {outcome.json.resolve()}", file=sys.stderr)
    if outcome.interrupted:
        print("Interrupted: the page says what is missing; --resume goes on from here.", file=sys.stderr)
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)
