"""`subquad train`."""

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.terminal import given, progress, user_errors
from subquad.files import check_writable

if TYPE_CHECKING:
    from subquad.train import Run, Running

__all__ = ["train"]

_MODEL = "Model"
_TRAINING = "Training (the task's own if absent)"
_RUNNING = "Running (no influence on the result)"


def train(
    context: typer.Context,
    task: Annotated[
        str | None,
        typer.Argument(
            help="copy, recall, images, speech, text, protein, listops or documents; not needed with --resume --out."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Real data: a file, a folder or hub:NAME; small built-in data if absent."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the task, name=value; repeat it.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/TASK-MECHANISM")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what is in --out with the options it was started with.")
    ] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Start with the weights of another run; its mechanism may differ.")
    ] = None,
    draw: Annotated[
        str | None, typer.Option(help="Train nothing: draw the runs in these folders, separated by commas, into --out.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="A name, name:option=value:..., or JSON.", show_default="multipole")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the mechanism, name=value; repeat it.")] = None,
    compare: Annotated[
        str | None, typer.Option(help="Mechanisms separated by commas, each trained on the same data; curves.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="With --compare: so many seeds of each, drawn as bands.", show_default="1"),
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
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam, radam, nadam, lion or sgd.", rich_help_panel=_TRAINING)
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
    valid_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="Also validate every so many seconds of steps.", rich_help_panel=_RUNNING),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, help="End after so long, all starts together.", rich_help_panel=_RUNNING)
    ] = None,
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
    settings = {
        "steps": steps, "batch": batch, "accumulate": accumulate, "optimizer": optimizer, "lr": lr, "warmup": warmup,
        "weight_decay": weight_decay, "clip": clip, "precision": precision, "seed": seed,
        "redraw_every": redraw_every, "valid_every": valid_every, "valid_examples": valid_examples,
    }  # fmt: skip
    shape = {"layers": layers, "heads": heads, "dim": dim}
    with user_errors():
        from subquad.tasks import TASKS
        from subquad.train import Run, Running
        from subquad.train.checkpoint import DiskError
        from subquad.train.choices import label_of, parse_mechanism, parse_pairs, split_mechanisms
        from subquad.train.compare import read_plan
        from subquad.train.distributed import LostProcess
        from subquad.train.run import nothing_to_resume

        no_task = f"the TASK is missing; expected one of {sorted(TASKS)}"
        if draw is not None:
            _draw(context, draw, out)
            return
        if compare is not None and (mechanism is not None or option):
            raise ValueError(
                "--compare names the mechanisms, so --mechanism and --option have no meaning; write options into it, "
                "for example --compare lsh:rounds=4,softmax"
            )
        options = _task_options(task, data, set_ or [])
        own = parse_pairs("--option", option or [])
        choice = None if mechanism is None else parse_mechanism(mechanism, own)
        taken = parse_mechanism("multipole", own) if choice is None else choice
        chosen = {"model": _model_fields(shape, model or []), "settings": _present(settings)}
        others = None if compare is None else [parse_mechanism(one) for one in split_mechanisms(compare)]
        if out is None:
            if task is None:
                raise ValueError("--resume needs --out FOLDER, or the TASK of the run" if resume else no_task)
            named = label_of(taken)
            out = Path("runs") / f"{task}-{'compare' if compare else named}"
        check_writable("--out", out, folder=True)
        plan = read_plan(out) if resume else None
        if resume and (plan is not None or (out / "run.json").is_file()):
            run = plan[0] if plan is not None else Run.read(out)
            if task not in (None, run.task.name):
                raise ValueError(f"{str(out)!r} holds a run of task {run.task.name!r}, not of {task!r}")
            if plan and (choice is not None or own):
                raise ValueError(f"{str(out)!r} holds a comparison, so --mechanism and --option have no meaning")
            asked = {} if plan else {"mechanism": choice, "mechanism_options": own}
            run = run.changed(start=from_, **asked, **chosen, **options)
            if plan is not None:
                others, seeds = others or plan[1], seeds or plan[2]
        else:
            if task is None:
                raise ValueError(nothing_to_resume(out) if resume else no_task)
            run = Run.of(task, taken, start=from_, **chosen, **options)
        if seeds is not None and others is None:
            raise ValueError("--seeds belongs to --compare; one run has one --seed")
        running = Running(
            save_every=save_every, keep=keep, log_every=log_every, valid_seconds=valid_seconds, hours=hours,
            workers=workers, device="cpu" if cpu else None, tensorboard=tensorboard,
            checkpoint_activations=checkpoint_activations, check_memory=check_memory,
        )  # fmt: skip
        if resume and (before := Running.read(out)) is not None:
            # --hours is not kept: a run that ended by it can then go on.
            new = {"hours", *("device" if name == "cpu" else name for name in given(context))}
            running = replace(before, **{n: x for n, x in vars(running).items() if n in new})
        try:
            if others is not None:
                status = _compare(run, others, out, resume, seeds or 1, running)
            else:
                status = _train(run, out, resume, running)
        except (LostProcess, DiskError) as error:
            print(f"subquad: {error}", file=sys.stderr, flush=True)
            raise typer.Exit(1) from None
    if status:
        raise typer.Exit(status)


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _task_options(task: str | None, data: str | None, pairs: list[str]) -> dict[str, Any]:
    from subquad.tasks import TASKS, get_task
    from subquad.train.choices import parse_pairs

    options = parse_pairs("--set", pairs)
    if data is not None:
        if task in TASKS and "data" not in {field.name for field in fields(get_task(task))}:
            raise ValueError(f"--data {data}: the task {task!r} makes its own data; leave it out")
        if "data" in options:
            raise ValueError(f"--data {data} and --set data={options['data']} name the same; give one of them")
        options["data"] = data
    return options


def _model_fields(shape: dict[str, Any], pairs: list[str]) -> dict[str, Any]:
    from subquad.train.choices import parse_pairs

    named, more = _present(shape), parse_pairs("--model", pairs)
    if twice := sorted(named.keys() & more.keys()):
        raise ValueError(f"--model {twice[0]}={more[twice[0]]}: --{twice[0]} says it already; give it once")
    return {**named, **more}


_STATUS = {"finished": 0, "stopped": 0, "diverged": 1, "interrupted": 130}


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
    print(
        f"{outcome.status} at step {outcome.step}: {figures or 'no validation yet'}; {outcome.parameters} parameters, "
        f"{outcome.tokens_per_second:.0f} tokens/s"
    )
    for name, value in outcome.artefacts.items():
        print(f"{name}: {value}")
    print(f"every number: {folder}", file=sys.stderr)
    return _STATUS[outcome.status]


def _compare(run: "Run", mechanisms: list[Any], folder: Path, resume: bool, seeds: int, running: "Running") -> int:
    from subquad.train.collection import comparison_table
    from subquad.train.compare import compare
    from subquad.train.distributed import is_first_process

    with progress(run.task.name) as step:
        result = compare(run, mechanisms, folder, seeds=seeds, resume=resume, running=running, on_log=step)
    if is_first_process():
        print(comparison_table(result))
        print(f"curves and every number: {folder / 'index.html'}", file=sys.stderr)
    if result["interrupted"]:
        return _STATUS["interrupted"]
    return max(_STATUS[one["status"]] for runs in result["runs"].values() for one in runs)


def _draw(context: typer.Context, draw: str, out: Path | None) -> None:
    from subquad.files import write_json
    from subquad.train.collection import collect, comparison_table
    from subquad.train.compare import read_plan
    from subquad.train.curves import draw_page

    if out is None:
        raise ValueError("--draw needs --out, a folder for the page")
    if extra := sorted(given(context) - {"draw", "out"}):
        raise ValueError(f"--draw trains nothing, so --{extra[0].strip('_').replace('_', '-')} has no meaning")
    if read_plan(out) is not None or (out / "run.json").is_file():
        raise ValueError(f"--out {out} holds a run or a comparison; give a folder of its own for the page")
    if out.is_dir() and any(out.iterdir()) and not (out / "comparison.json").is_file():
        raise ValueError(f"--out {out} holds other files, nothing was changed; give a folder of its own for the page")
    folders = [folder.strip() for folder in draw.split(",")]
    if "" in folders:
        raise ValueError(f"--draw {draw!r}: an entry is empty; expected folders separated by commas")
    check_writable("--out", out, folder=True)
    result = collect(folders)
    write_json(out / "comparison.json", result)
    draw_page(result, out)
    print(comparison_table(result))
    print(f"curves and every number: {out / 'index.html'}", file=sys.stderr)


if __name__ == "__main__":
    # What torchrun and accelerate launch start: a module, once per process.
    from subquad.cli import main

    main(["train", *sys.argv[1:]])
