"""How fast the tasks' models run: images value by value, and a training step of speech.

Started by benchmarks/tasks.py (`generation`, `speech-steps`); nothing is trained, so each takes less than three minutes
of one quiet core (images of 3072 values some twenty). They print tables of docs/experiments.md. `--clock cpu --threads
1` reads the time of the process in place of the wall's, the only one worth reading where others use the machine.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.files import replacing
from subquad.lab import interleave, machine, write_json
from subquad.lab.measure import CLOCKS, Timing
from subquad.tasks.images import ImageModel, Images
from subquad.train import Run
from subquad.train.data import validation_batches

GENERATING = {"layers": 8, "heads": 8, "dim": 256}
RECOMPUTED = "recomputed"
FORMS = (
    ("linear", "recurrent"),
    ("performer", "recurrent"),
    ("multipole", "all keys"),
    ("softmax", "KV cache"),
    ("linear", RECOMPUTED),
    ("softmax", RECOMPUTED),
)
# A pass over n values costs a + b n + c n^2: eight lengths in the middle of eight equal parts add up to the whole.
PARTS = 8


def generation(args: argparse.Namespace) -> None:
    """Images value by value: seconds per image one at a time, and values per second in a batch, for every length."""
    count = args.batch or 16
    rows: dict[str, Any] = {"machine": machine(), "batch": count, "clock": args.clock, "lengths": {}}
    for length in args.values:
        figures: dict[str, dict[str, float]] = {}
        for name, form in FORMS:
            torch.manual_seed(0)
            fields = {**Images.model, **GENERATING, "mechanism": name, "seed": 0}
            model = ImageModel(10, fields).eval()
            model.complete(
                torch.zeros(count, 0, dtype=torch.int64), 2, recompute=form == RECOMPUTED
            )  # threads, kernels
            one, many = (_image_seconds(args, model, batch, length, form) for batch in (1, count))
            figures[f"{name}, {form}"] = {"seconds_per_image": one, "values_per_second": count * length / many}
            rows["lengths"][str(length)] = figures
            write_json(args.out / "generation.json", rows)
        slowest = figures[f"softmax, {RECOMPUTED}"]
        print(f"\n{length} values, {_how(args)}; batches of {count} for the throughput\n")
        print("| | values/s | relative to softmax recomputed | seconds per image, one at a time |\n|---|---|---|---|")
        for label, figure in figures.items():
            rate, seconds = figure["values_per_second"], figure["seconds_per_image"]
            relative = _figure(rate / slowest["values_per_second"])
            print(f"| {label} | {_figure(rate)} | {relative}x | {seconds:.2f} |", flush=True)
    draw_generation(rows, args.out)


def _image_seconds(args: argparse.Namespace, model: ImageModel, count: int, length: int, form: str) -> float:
    """Seconds for `count` images of `length` values."""
    if form == RECOMPUTED:
        prefixes = [(2 * part + 1) * length // (2 * PARTS) for part in range(PARTS)]
        return sum(_seconds(args, partial(_recomputed, model, count, prefix)) for prefix in prefixes) * length / PARTS
    return _seconds(args, partial(model.complete, torch.zeros(count, 0, dtype=torch.int64), length))


def draw_generation(rows: Mapping[str, Any], folder: Path) -> None:
    """Throughput and latency by form, a group of bars per length: generation.svg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    names = [f"{name}, {form}" for name, form in FORMS]
    for axes, key, title in zip(
        figure.subplots(1, 2),
        ("values_per_second", "seconds_per_image"),
        (f"values per second, {rows['batch']} images at a time", "seconds per image, one at a time"),
        strict=True,
    ):
        groups = rows["lengths"]
        for number, (length, figures) in enumerate(groups.items()):
            places = [place + number * 0.8 / len(groups) for place in range(len(names))]
            axes.barh(places, [figures[name][key] for name in names], 0.8 / len(groups), label=f"{length} values")
        axes.set_yticks([place + 0.4 - 0.4 / len(groups) for place in range(len(names))], names)
        axes.invert_yaxis()
        axes.set(xscale="log", title=title)
        axes.grid(axis="x", alpha=0.3)
    axes.legend()
    with replacing(folder / "generation.svg") as draft:
        figure.savefig(draft, format="svg", metadata={"Date": None})


def _how(args: argparse.Namespace) -> str:
    return f"float32, {torch.get_num_threads()} thread(s), {args.clock} time"


def _figure(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}"


def _seconds(args: argparse.Namespace, call: Callable[[], object]) -> float:
    now = CLOCKS[args.clock]
    begin = now()
    call()
    return now() - begin


def _recomputed(model: ImageModel, count: int, prefix: int) -> None:
    """One value after `prefix` others; which they are does not change what it costs."""
    model.complete(torch.randint(0, 256, (count, prefix)), prefix + 1, recompute=True)


def step_times(run: Run, mechanisms: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Timing]:
    """Forward and backward of a batch of 8 utterances of speech with each mechanism, interleaved; prints the table."""
    batch, _ = next(validation_batches(run.task, run.task.examples("valid"), count=8, share=8, process=0, processes=1))
    calls: dict[str, Callable[[], object]] = {}
    for label, choice in mechanisms.items():
        torch.manual_seed(0)
        model = replace(run, model={**run.model, "mechanism": choice}).build()
        calls[label] = lambda model=model: model(batch)["loss"].backward()  # type: ignore[misc]
    timings = interleave(calls, runs=10, warmup=2, clock=args.clock)
    frames = batch["frames"].shape[1] // run.task.stride  # type: ignore[attr-defined]
    print(f"8 utterances of up to {frames} frames, best of 10, {_how(args)}\n")
    print("| | ms per step | relative to softmax | spread |\n|---|---|---|---|")
    for label, timing in timings.items():
        relative = timing.best / timings["softmax"].best
        print(f"| {label} | {timing.best * 1e3:.0f} | {relative:.2f} | {timing.spread:.0%} |", flush=True)
    return timings
