"""`subquad train`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.terminal import progress, user_errors
from subquad.files import check_writable

if TYPE_CHECKING:
    from subquad.train import Run, Running

__all__ = ["train"]

_MODEL = "Model"
_TRAINING = "Training (the task's own if absent)"
_RUNNING = "Running (no influence on the result)"


def train(
    task: Annotated[
        str | None,
        typer.Argument(help="copy, images, speech, text, protein, listops or documents; not needed with --resume."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Real data: a file, a folder or hub:NAME; small built-in data if absent."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the task, name=value; repeat it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.  [default: runs/TASK-MECHANISM]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out with its own options; those given must agree.")
    ] = False,
    mechanism: Annotated[
        str | None, typer.Option(help="A name, name:option=value:..., or JSON.  [default: performer]")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the mechanism, name=value; repeat it.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Mechanisms separated by commas, each trained on the same data; curves.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)] = None,
    heads: Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)] = None,
    dim: Annotated[int | None, typer.Option(min=1, rich_help_panel=_MODEL)] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Any other field of ModelConfig, name=value.", rich_help_panel=_MODEL)
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, rich_help_panel=_TRAINING)] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per step, over all processes.", rich_help_panel=_TRAINING)
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Parts of a batch; less memory, same result.", rich_help_panel=_TRAINING)
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0.0, rich_help_panel=_TRAINING)] = None,
    warmup: Annotated[int | None, typer.Option(min=0, rich_help_panel=_TRAINING)] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0.0, rich_help_panel=_TRAINING)] = None,
    clip: Annotated[float | None, typer.Option(min=0.0, rich_help_panel=_TRAINING)] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16.", rich_help_panel=_TRAINING)] = None,
    seed: Annotated[int | None, typer.Option(min=0, rich_help_panel=_TRAINING)] = None,
    redraw_every: Annotated[
        int | None, typer.Option(min=0, help="Resample random features; 0 = never.", rich_help_panel=_TRAINING)
    ] = None,
    valid_every: Annotated[int | None, typer.Option(min=1, rich_help_panel=_TRAINING)] = None,
    valid_examples: Annotated[int | None, typer.Option(min=1, rich_help_panel=_TRAINING)] = None,
    save_every: Annotated[int, typer.Option(min=1, rich_help_panel=_RUNNING)] = 100,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay.", rich_help_panel=_RUNNING)] = 2,
    log_every: Annotated[int, typer.Option(min=1, rich_help_panel=_RUNNING)] = 10,
    workers: Annotated[int, typer.Option(min=0, help="Processes that prepare batches.", rich_help_panel=_RUNNING)] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Stay on the CPU.", rich_help_panel=_RUNNING)] = False,
    tensorboard: Annotated[bool, typer.Option(rich_help_panel=_RUNNING)] = True,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Less memory, more time.", rich_help_panel=_RUNNING)
    ] = False,
    check_memory: Annotated[
        bool, typer.Option(help="Refuse a batch that is estimated not to fit.", rich_help_panel=_RUNNING)
    ] = True,
) -> None:
    """Train a model on a task; continue a run that was stopped; compare mechanisms.

    On several processes: torchrun --nproc-per-node 2 -m subquad.cli.train TASK ..., or accelerate launch likewise.
    """
    given = {
        "steps": steps, "batch": batch, "accumulate": accumulate, "lr": lr, "warmup": warmup,
        "weight_decay": weight_decay, "clip": clip, "precision": precision, "seed": seed,
        "redraw_every": redraw_every, "valid_every": valid_every, "valid_examples": valid_examples,
    }  # fmt: skip
    shape = {"layers": layers, "heads": heads, "dim": dim}
    with user_errors():
        from subquad.train import Run, Running
        from subquad.train.checkpoint import CannotWrite
        from subquad.train.choices import label_of, parse_mechanism, parse_pairs
        from subquad.train.distributed import LostProcess

        options = parse_pairs("--set", set_ or [])
        if data is not None:
            options["data"] = data
        own = parse_pairs("--option", option or [])
        fields = {**_present(shape), **parse_pairs("--model", model or [])}
        kept = Run.read(out) if resume and out is not None and (out / "run.json").is_file() else None
        if kept is None:
            if task is None:
                raise ValueError(
                    "TASK: say what to train (copy, images, speech, text, protein, listops or documents), or continue "
                    "a run with --resume --out FOLDER"
                )
            choice = parse_mechanism(mechanism or "performer", own)
            run = Run.of(task, choice, model=fields, settings=_present(given), **options)
        else:
            choice = parse_mechanism(mechanism, own) if mechanism is not None else kept.mechanism_with(own)
            run = kept.asked_again(task, choice, model=fields, settings=_present(given), **options)
            task = run.task.name
        running = Running(
            save_every=save_every, keep=keep, log_every=log_every, workers=workers, device="cpu" if cpu else None,
            tensorboard=tensorboard, checkpoint_activations=checkpoint_activations, check_memory=check_memory,
        )  # fmt: skip
        label = "compare" if compare else label_of(choice)
        folder = out if out is not None else Path("runs") / f"{task}-{label}"
        check_writable("--out", folder, folder=True)
        try:
            if compare is not None:
                status = _compare(run, [parse_mechanism(one) for one in compare.split(",")], folder, resume, running)
            else:
                status = _train(run, folder, resume, running)
        except (LostProcess, CannotWrite) as error:
            print(f"subquad: {error}", file=sys.stderr, flush=True)
            raise typer.Exit(1) from None
    if status:
        raise typer.Exit(status)


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


_STATUS = {"finished": 0, "diverged": 1, "interrupted": 130}


def _train(run: "Run", folder: Path, resume: bool, running: "Running") -> int:
    from subquad.train import train as start
    from subquad.train.distributed import is_first_process

    with progress(run.task.name) as step:
        outcome = start(run, folder, resume=resume, running=running, on_log=step)
    if not is_first_process():
        return _STATUS[outcome.status]
    if outcome.reason:
        print(f"subquad: {outcome.reason}", file=sys.stderr)
    figures = ", ".join(f"{name} {value:.4f}" for name, value in outcome.metrics.items())
    print(f"{outcome.status} at step {outcome.step}: {figures or 'no validation yet'}; {outcome.parameters} parameters")
    for name, value in outcome.artefacts.items():
        print(f"{name}: {value}")
    print(f"every number: {folder}", file=sys.stderr)
    return _STATUS[outcome.status]


def _compare(run: "Run", mechanisms: list[Any], folder: Path, resume: bool, running: "Running") -> int:
    from subquad.train.compare import compare, comparison_table
    from subquad.train.distributed import is_first_process

    with progress(run.task.name) as step:
        result = compare(run, mechanisms, folder, resume=resume, running=running, on_log=step)
    if is_first_process():
        print(comparison_table(result))
        print(f"curves and every number: {folder}", file=sys.stderr)
    return max(_STATUS[one["status"]] for one in result["runs"].values())


if __name__ == "__main__":
    # What torchrun and accelerate launch start: a module, once per process.
    from subquad.cli import main

    main(["train", *sys.argv[1:]])
