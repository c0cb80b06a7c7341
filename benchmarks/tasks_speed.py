"""How fast the tasks' models run: images value by value, and a training step of speech.

Started by benchmarks/tasks.py (`generation`, `speech-steps`); nothing is trained, so each takes less than three minutes
of one quiet core. They print tables of docs/tasks.md. `--clock cpu --threads 1` reads the time of the process in place
of the wall's, the only one worth reading where others use the machine.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from subquad.lab import interleave, machine, write_json
from subquad.lab.measure import CLOCKS, Timing
from subquad.tasks.images import ImageModel, Images
from subquad.train import Run
from subquad.train.data import validation_batches

GENERATING = {"layers": 8, "heads": 8, "dim": 256}
# A pass over n values costs a + b n + c n^2: eight lengths in the middle of eight equal parts add up to the whole.
PARTS = 8


def generation(args: argparse.Namespace) -> None:
    """Values per second at size x size: the recurrent form against softmax with its cache and without."""
    length, count = args.size**2, args.batch or 16
    models: dict[str, ImageModel] = {}
    for name in ("linear", "performer", "softmax"):
        torch.manual_seed(0)
        task = Images(size=args.size)
        models[name] = task.build({**task.model, **GENERATING, "mechanism": name, "seed": 0}).eval()
    nothing = torch.zeros(count, 0, dtype=torch.int64)
    rows: dict[str, Any] = {"machine": machine(), "batch": count, "size": args.size, "clock": args.clock}
    rates: dict[str, float] = {}
    for name, form in (
        ("linear", "recurrent"),
        ("performer", "recurrent"),
        ("softmax", "KV cache"),
        ("linear", "recomputed"),
        ("softmax", "recomputed"),
    ):
        model = models[name]
        model.complete(nothing, 2, recompute=form == "recomputed")  # threads, native kernels
        if form == "recomputed":
            prefixes = [(2 * part + 1) * length // (2 * PARTS) for part in range(PARTS)]
            passes = [_seconds(args, partial(_recomputed, model, count, prefix)) for prefix in prefixes]
            seconds = sum(passes) * length / PARTS
        else:
            seconds = _seconds(args, partial(model.complete, nothing, length))
        rates[f"{name}, {form}"] = count * length / seconds
        write_json(args.out / "generation.json", {**rows, "values_per_second": rates})
    slowest = rates["softmax, recomputed"]
    print(f"{count} images of {args.size} x {args.size} at a time, {_how(args)}\n")
    print("| | values/s | relative to softmax recomputed |\n|---|---|---|")
    for label, rate in rates.items():
        print(f"| {label} | {_figure(rate)} | {_figure(rate / slowest)}x |")


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
