"""The tasks, mechanism against mechanism: one command per table of docs/tasks.md.

    python benchmarks/tasks.py copy                       accuracy per symbol: length 32, one layer, one head
    python benchmarks/tasks.py features                   accuracy against the number of features
    python benchmarks/tasks.py images --data MNIST        bits per dimension at equal steps, 14 x 14 (--size 28: whole)
    python benchmarks/tasks.py generation                 values per second at 28 x 28: recurrent, KV cache, recomputed
    python benchmarks/tasks.py speech --data WAVS         word error rates at equal parameters, and the time of a step
    python benchmarks/tasks.py text --data FILE           bits per byte, causal
    python benchmarks/tasks.py masked --data FILE         bits per byte, masked
    python benchmarks/tasks.py protein --data FASTA       perplexity, both directions and left to right

Every table trains in `--out` (default results/tasks/NAME), resumes there when it is started again, and writes
comparison.json and curves. Without --data the built-in data are used. The defaults take minutes on two cores; --steps
and the other options change that.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from subquad.lab import interleave, machine, write_json
from subquad.tasks.images import Images
from subquad.train import Run, Running
from subquad.train.choices import parse_mechanism
from subquad.train.compare import compare, comparison_table
from subquad.train.data import validation_batches

HYBRID = '{"mechanism": "hybrid", "window": 64, "sinks": 4, "far": {"mechanism": "linear"}}'


def parsed(*texts: str) -> list[Any]:
    return [parse_mechanism(text) for text in texts]


def log(text: str, done: int, total: int) -> None:
    print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)


def stop_if_interrupted(result: dict[str, Any]) -> None:
    """Ctrl-C ends one run after its step; what would follow must end as well."""
    if any(one["status"] == "interrupted" for one in result["runs"].values()):
        raise SystemExit(130)


def table(run: Run, mechanisms: list[Any], out: Path) -> dict[str, Any]:
    """Train all, or go on where an earlier call stopped, and print the table."""
    running = Running(log_every=100, save_every=200, tensorboard=False, keep=1)
    result = compare(run, mechanisms, out, resume=True, running=running, on_log=log)
    print(comparison_table(result), flush=True)
    stop_if_interrupted(result)
    return result


def run_of(task: str, args: argparse.Namespace, model: dict[str, Any], settings: dict[str, Any], **options: Any) -> Run:
    given = {"steps": args.steps, "batch": args.batch, "seed": args.seed}
    settings = {**settings, **{name: value for name, value in given.items() if value is not None}}
    if args.data is not None and task != "copy":
        options["data"] = args.data
    return Run.of(task, "softmax", model=model, settings=settings, **options)


def copy(args: argparse.Namespace) -> None:
    run = run_of("copy", args, {}, {"steps": 2000, "valid_every": 250})
    table(
        run,
        parsed("softmax", "linear", "performer:num_features=16", "performer:num_features=16:features=relu"),
        args.out,
    )


def features(args: argparse.Namespace) -> None:
    """Accuracy of linear and performer by M, and the least M of each with 99 %."""
    rows: dict[str, dict[int, float]] = {"linear": {}, "performer": {}}
    for count in (4, 8, 16, 32, 64, 128):
        # The features of 'linear' are the width of its head; performer keeps a head of 16 and draws more features.
        for name, choice, width in (
            ("linear", "linear", count),
            ("performer", {"mechanism": "performer", "num_features": count}, 16),
        ):
            run = run_of("copy", args, {"head_dim": width}, {"steps": 2000, "valid_every": 500})
            result = compare(run, [choice], args.out / f"{name}-{count}", resume=True, on_log=log,
                             running=Running(log_every=500, save_every=500, tensorboard=False, keep=1))  # fmt: skip
            stop_if_interrupted(result)
            (only,) = result["runs"].values()
            rows[name][count] = only["metrics"]["accuracy"]
            print(f"{name} M={count}: accuracy {rows[name][count]:.4f}", flush=True)
            write_json(args.out / "features.json", {"accuracy": rows, "machine": machine()})
    for name, row in rows.items():
        enough = [count for count, accuracy in row.items() if accuracy >= 0.99]
        print(f"{name}: 99 % at M = {min(enough)}" if enough else f"{name}: 99 % is not reached up to M = {max(row)}")


def images(args: argparse.Namespace) -> None:
    settings = {"steps": 600, "batch": 16, "valid_every": 100, "valid_examples": 256}
    # A bucket the size of the default would hold half of a small image, and hashing would decide nothing.
    lsh = "lsh:rounds={}:buckets=16:bucket_size=16"
    run = run_of("images", args, {}, settings, size=args.size)
    table(run, parsed("softmax", "linear", "performer:num_features=32", lsh.format(1), lsh.format(4)), args.out)


def generation(args: argparse.Namespace) -> None:
    """Values per second at size x size: the recurrent form against softmax with its cache and without."""
    length = args.size**2
    models = {}
    for name in ("linear", "performer", "softmax"):
        torch.manual_seed(0)
        task = Images(size=args.size)
        models[name] = task.build(
            {**task.model, "layers": 8, "heads": 8, "dim": 256, "mechanism": name, "seed": 0}
        ).eval()
    nothing = torch.zeros(args.batch or 16, 0, dtype=torch.int64)
    rows: dict[str, Any] = {"machine": machine(), "batch": len(nothing), "size": args.size, "values_per_second": {}}
    for name, label, recompute in (
        ("linear", "linear, recurrent", False),
        ("performer", "performer, recurrent", False),
        ("softmax", "softmax, KV cache", False),
        ("softmax", "softmax, recomputed", True),
        ("linear", "linear, recomputed", True),
    ):
        begin = time.perf_counter()
        if recompute:
            # A pass over n values costs the same whichever they are: sixteen lengths, weighted, give the whole.
            seconds = 0.0
            step = max(length // 16, 1)
            for prefix in range(step // 2, length, step):
                values = torch.randint(0, 256, (len(nothing), prefix))
                begin = time.perf_counter()
                models[name].complete(values, prefix + 1, recompute=True)
                seconds += step * (time.perf_counter() - begin)
        else:
            models[name].complete(nothing, length, generator=torch.Generator().manual_seed(0))
            seconds = time.perf_counter() - begin
        rows["values_per_second"][label] = len(nothing) * length / seconds
        print(
            f"{label}: {rows['values_per_second'][label]:.1f} values/s ({seconds:.1f} s for {len(nothing)} images)",
            flush=True,
        )
        write_json(args.out / "generation.json", rows)
    ratio = rows["values_per_second"]["linear, recurrent"] / rows["values_per_second"]["softmax, recomputed"]
    print(f"linear recurrent / softmax recomputed: {ratio:.1f}x")


def speech(args: argparse.Namespace) -> None:
    run = run_of("speech", args, {}, {"steps": 800, "batch": 16, "valid_every": 200})
    mechanisms = parsed("softmax", "linear", "performer:num_features=64", "bilstm")
    result = table(run, mechanisms, args.out)
    # The time of a step at the lengths used, interleaved: the seconds of the runs met different neighbours.
    batch, _ = next(validation_batches(run.task, run.task.examples("valid"), count=8, share=8, process=0, processes=1))
    calls = {}
    for label, choice in zip(result["runs"], mechanisms, strict=True):
        model = replace(run, model={**run.model, "mechanism": choice}).build()
        calls[label] = lambda model=model: model(batch)["loss"].backward()
    timings = interleave(calls, runs=5)
    result["step"] = {label: timing.as_dict() for label, timing in timings.items()}
    write_json(args.out / "comparison.json", result)
    frames = batch["frames"].shape[1] // run.task.stride  # type: ignore[attr-defined]
    for label, timing in timings.items():
        relative = timing.best / timings["softmax"].best
        print(
            f"{label}: {timing.best * 1e3:.0f} ms for 8 utterances of up to {frames} frames, {relative:.2f} of softmax"
        )


def text(args: argparse.Namespace) -> None:
    settings = {"steps": 800, "batch": 16, "valid_every": 100, "valid_examples": 64}
    mechanisms = parsed("softmax", "linear", "performer:num_features=64", HYBRID)
    table(run_of("text", args, {}, settings), mechanisms, args.out / "fixed")
    table(
        run_of("text", args, {}, {**settings, "redraw_every": 100}),
        parsed("performer:num_features=64"),
        args.out / "redrawn",
    )


def masked(args: argparse.Namespace) -> None:
    settings = {"steps": 800, "batch": 16, "valid_every": 100, "valid_examples": 64}
    run = run_of("text", args, {}, settings, masked=True)
    mechanisms = parsed("softmax", "performer:num_features=64", "linformer:length=256:rank=64", "lsh")
    table(run, mechanisms, args.out)


def protein(args: argparse.Namespace) -> None:
    mechanisms = parsed("softmax", "performer:num_features=64:features=relu", "performer:num_features=64")
    settings = {"steps": 600, "batch": 16, "valid_every": 100, "valid_examples": 64}
    for causal in (False, True):
        print("causal" if causal else "masked", flush=True)
        run = run_of("protein", args, {}, settings, causal=causal)
        table(run, mechanisms, args.out / ("causal" if causal else "masked"))


COMMANDS = {f.__name__: f for f in (copy, features, images, generation, speech, text, masked, protein)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--data", help="real data; the built-in ones if absent")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="side of an image (images: 14, generation: 28)")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out = args.out or Path("results/tasks") / args.command
    args.size = args.size or {"generation": 28}.get(args.command, 14)
    COMMANDS[args.command](args)
    print(json.dumps(machine()), file=sys.stderr)


if __name__ == "__main__":
    main()
