"""Images generated value by value: a recurrent state, a key-value cache, and everything computed again for each value.

    python benchmarks/experiments/generation.py --threads 1 --values 784 3072

Nothing is trained: 784 values take less than three minutes of one quiet core, 3072 some twenty. It prints the table of
docs/experiments.md, and writes generation.json and generation.svg to `--out`. `--clock cpu --threads 1` reads the time
of the process in place of the wall's, the only one worth reading where others use the machine.
"""

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.files import replacing
from subquad.lab import machine, write_json
from subquad.lab.measure import CLOCKS
from subquad.tasks.images import ImageModel, Images

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
    count = args.batch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, nargs="+", default=[784], help="values of an image")
    parser.add_argument("--batch", type=int, default=16, help="images at a time, for the throughput")
    parser.add_argument("--out", type=Path, default=Path("results/generation"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    generation(args)


if __name__ == "__main__":
    main()
