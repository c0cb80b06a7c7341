"""Several mechanisms, one after the other, on the same data in the same order: curves as JSON, PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files import replacing, write_json
from ..lab.measure import machine
from ..plain_text import columns
from ..tasks.base import Task
from .choices import label_of
from .distributed import is_first_process
from .loop import OnLog, Outcome, train
from .records import read_records
from .run import Run, nothing_to_resume
from .settings import Running

__all__ = ["compare", "comparison_table", "draw_curves"]


def compare(
    run: Run,
    mechanisms: Sequence[Any],
    folder: str | Path,
    *,
    resume: bool = False,
    running: Running | None = None,
    on_log: OnLog | None = None,
    on_done: Callable[[str, Outcome], None] | None = None,
) -> dict[str, Any]:
    """Train `run` with each mechanism in a folder of its own under `folder`; everything else is the same.

    Settings, seed, first weights (where shapes agree) and the order of the data are shared, because they depend on the
    seed only. After each mechanism `comparison.json` and the curves are written anew, so an interrupted comparison
    keeps what it has; one that diverges is reported and does not end the others.
    """
    folder = Path(folder)
    labels = [label_of(choice) for choice in mechanisms]
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"--compare needs one or more different mechanisms, got {labels}")
    if resume and not any((folder / label / "run.json").is_file() for label in labels):
        raise ValueError(nothing_to_resume(folder))
    # All of them before the first: a wrong name in the fifth must not cost the time of four.
    runs = [replace(run, model={**run.model, "mechanism": choice}) for choice in mechanisms]
    for one in runs:
        one.build()
    result: dict[str, Any] = {"task": run.task.name, "metric": run.task.metric, "machine": machine(), "runs": {}}
    for label, one in zip(labels, runs, strict=True):
        outcome = train(
            one,
            folder / label,
            resume=resume and (folder / label / "run.json").is_file(),
            running=running,
            on_log=None if on_log is None else _labelled(on_log, label),
        )
        records = read_records(folder / label / "metrics.jsonl")
        result["runs"][label] = {
            "status": outcome.status,
            "parameters": outcome.parameters,
            "seconds": outcome.seconds,
            "metrics": outcome.metrics,
            "artefacts": outcome.artefacts,
            "valid": [record for record in records if record["kind"] == "valid"],
            "train": [record for record in records if record["kind"] == "train"],
            "run": one.to_dict(),
        }
        result["best"] = _best(result["runs"], run.task)
        if is_first_process():
            write_json(folder / "comparison.json", result)
            draw_curves(result, folder)
        if on_done is not None:
            on_done(label, outcome)
        if outcome.status == "interrupted":
            break
    return result


def _best(runs: Mapping[str, Any], task: Task) -> str | None:
    """Which run has the best value of the task's metric so far; None while none has one."""
    known = {label: one["metrics"][task.metric] for label, one in runs.items() if task.metric in one["metrics"]}
    choose = max if task.larger_is_better else min
    return choose(known, key=lambda label: known[label]) if known else None


def _labelled(on_log: OnLog, label: str) -> OnLog:
    return lambda text, done, total: on_log(f"{label}: {text}", done, total)


def draw_curves(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """The task's metric on the validation data and the training loss against steps: `curves.png` and `curves.svg`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("curves need matplotlib: pip install 'subquad[lab]'") from None
    metric = result["metric"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for axes, kind, name in ((left, "valid", metric), (right, "train", "loss")):
        for label, run in result["runs"].items():
            points = [(record["step"], record[name]) for record in run[kind] if record.get(name) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) == 1 else None)
        axes.set(xlabel="steps", ylabel=f"{name.replace('_', ' ')} ({'validation' if kind == 'valid' else 'training'})")
        axes.grid(alpha=0.3)
    if left.lines:  # none while a run has not been validated
        left.legend()
    figure.suptitle(f"{result['task']}: the same data, order and settings")
    paths = [folder / "curves.png", folder / "curves.svg"]
    for path in paths:
        with replacing(path) as draft:
            figure.savefig(draft, dpi=120, format=path.suffix[1:])
    return paths


def comparison_table(result: Mapping[str, Any]) -> str:
    """One line per mechanism: its metrics, parameters and time, in plain text."""
    names = sorted({name for run in result["runs"].values() for name in run["metrics"]})
    names = [result["metric"], *(name for name in names if name != result["metric"])]
    rows = [["mechanism", *names, "parameters", "seconds", ""]]
    for label, run in result["runs"].items():
        figures = [f"{run['metrics'][name]:.4f}" if name in run["metrics"] else "-" for name in names]
        state = "" if run["status"] == "finished" else run["status"]
        rows.append([label, *figures, str(run["parameters"]), f"{run['seconds']:.0f}", state])
    return "\n".join(columns(rows))
