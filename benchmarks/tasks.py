"""The tasks, mechanism against mechanism: one command per table of docs/experiments.md.

    python benchmarks/tasks.py copy                       accuracy per symbol: length 32, one layer, one head
    python benchmarks/tasks.py features                   accuracy against the number of features
    python benchmarks/tasks.py images --data MNIST        bits per dimension at equal steps, 14 x 14 (--size 28: whole)
    python benchmarks/tasks.py generation                 images value by value: recurrent, KV cache, recomputed
    python benchmarks/tasks.py speech --data WAVS         word error rates at equal parameters, and the time of a step
    python benchmarks/tasks.py speech-steps --data WAVS   the time of a step alone
    python benchmarks/tasks.py text --data FILE           bits per byte, causal
    python benchmarks/tasks.py masked --data FILE         bits per byte, masked
    python benchmarks/tasks.py protein --data FASTA       perplexity, both directions and left to right
    python benchmarks/tasks.py listops, documents         accuracy of a label for a long sequence

Every table trains in `--out` (default results/tasks/NAME), resumes there when it is started again, and writes
comparison.json and curves; it is printed in the form of docs/experiments.md. Without --data the built-in data are
used. The models are small, so that the defaults take minutes on one core; --steps, --seeds and the other options
change that.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from tasks_speed import generation, step_times

from subquad.lab import machine, write_json
from subquad.lab.measure import CLOCKS
from subquad.tasks.base import generator_for
from subquad.train import Run, Running
from subquad.train.choices import label_of, parse_mechanism
from subquad.train.collection import comparison_table
from subquad.train.compare import compare

NEAR_AND_FAR = '{"mechanism": "hybrid", "window": 12, "sinks": 0, "far": {"mechanism": "linear"}}'
HYBRID = '{"mechanism": "hybrid", "window": 64, "sinks": 4, "far": {"mechanism": "linear"}}'

# Minutes of one core per mechanism; heads of width 32, which is also how many features 'linear' has.
SMALL = {"layers": 2, "heads": 2, "dim": 64}
SPEECH_MODEL = {**SMALL, "layers": 3}


def parsed(*texts: str) -> list[Any]:
    return [parse_mechanism(text) for text in texts]


def log(text: str, done: int, total: int) -> None:
    print(f"[{done}/{total}] {text}", file=sys.stderr, flush=True)


def begun(folder: Path) -> bool:
    """Whether an earlier call has trained something there."""
    return (folder / "comparison.json").is_file()


def stop_if_interrupted(result: dict[str, Any]) -> None:
    """Ctrl-C ends one run after its step; what would follow must end as well."""
    if any(one["status"] == "interrupted" for runs in result["runs"].values() for one in runs):
        raise SystemExit(130)


def table(run: Run, mechanisms: list[Any], out: Path, seeds: int = 1) -> dict[str, Any]:
    """Train all with each seed, or go on where an earlier call stopped; print and return what came of it."""
    running = Running(log_every=100, save_every=200, tensorboard=False, keep=1)
    result = compare(run, mechanisms, out, seeds=seeds, resume=begun(out), running=running, on_log=log)
    print(comparison_table(result), flush=True)
    stop_if_interrupted(result)
    print(markdown(run, result), flush=True)
    return result


def markdown(run: Run, result: dict[str, Any]) -> str:
    """The metric at every validation, the mean over seeds and how far they lie apart, as a table of the docs."""
    metric, settings, runs = run.task.metric, run.settings, result["runs"]
    first = next(iter(runs.values()))
    steps = [record["step"] for record in first[0]["valid"]]
    sizes = sorted({one["parameters"] for group in runs.values() for one in group})
    counts = " to ".join(f"{size:,}" for size in dict.fromkeys((sizes[0], sizes[-1])))
    effort = f"batch {settings.batch}, learning rate {settings.lr:g}, {len(first)} seed(s)"
    lines = [
        f"{counts} parameters, {effort}, {settings.valid_examples} validation examples.",
        "",
        f"| {metric.replace('_', ' ')} after steps | " + " | ".join(map(str, steps)) + " |",
        "|---" * (len(steps) + 1) + "|",
    ]
    for label, group in runs.items():
        cells = []
        for step in steps:
            values = [record[metric] for one in group for record in one["valid"] if record["step"] == step]
            spread = f" ± {(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
            # A run that diverged has no figure for the later steps.
            cells.append(f"{sum(values) / len(values):.3f}{spread}" if len(values) == len(group) else "-")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_of(task: str, args: argparse.Namespace, model: dict[str, Any], settings: dict[str, Any], **options: Any) -> Run:
    given = {"steps": args.steps, "batch": args.batch, "seed": args.seed, "valid_every": args.valid_every}
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
        args.seeds,
    )


def features(args: argparse.Namespace) -> None:
    """Accuracy of linear and performer by M, the least M of each with 99 %, and softmax with a head of 16."""
    counts = args.counts
    # The features of 'linear' are the width of its head; performer keeps a head of 16 and draws more features.
    plan = [("linear", count, "linear", count) for count in counts]
    plan += [("performer", count, {"mechanism": "performer", "num_features": count}, 16) for count in counts]
    plan += [("softmax", 16, "softmax", 16)] if 16 in counts else []
    rows: dict[str, dict[int, float]] = {}
    running = Running(log_every=500, save_every=500, tensorboard=False, keep=1)
    for name, count, choice, width in sorted(plan, key=lambda one: one[1]):
        run = run_of("copy", args, {"head_dim": width}, {"steps": 2000, "batch": 32, "valid_every": 500})
        folder = args.out / f"{name}-{count}"
        result = compare(run, [choice], folder, resume=begun(folder), on_log=log, running=running)
        stop_if_interrupted(result)
        ((only,),) = result["runs"].values()
        rows.setdefault(name, {})[count] = only["metrics"]["accuracy"]
        print(f"{name} M={count}: accuracy {rows[name][count]:.4f}", file=sys.stderr, flush=True)
        write_json(args.out / "features.json", {"accuracy": rows, "machine": machine()})
    print(f"{run.settings.steps} steps of batch {run.settings.batch}, {run.settings.valid_examples} unseen sequences\n")
    print("| accuracy with M features | " + " | ".join(map(str, counts)) + " | 99 % from |")
    print("|---" * (len(counts) + 2) + "|")
    for name, row in rows.items():
        cells = [f"{row[count]:.3f}" if count in row else "" for count in counts]
        enough = [count for count, accuracy in row.items() if accuracy >= 0.99]
        print(f"| {name} | " + " | ".join([*cells, f"M = {min(enough)}" if enough else "not reached"]) + " |")


def images(args: argparse.Namespace) -> None:
    settings = {"steps": 600, "batch": 16, "valid_every": 200, "valid_examples": 256}
    # A bucket the size of the default would hold half of a small image, and hashing would decide nothing.
    lsh = "lsh:rounds={}:buckets=16:bucket_size=16"
    run = run_of("images", args, SMALL, settings, size=args.size, samples=0)
    mechanisms = parsed("softmax", "linear", "performer:num_features=64", lsh.format(1), lsh.format(4))
    print(f"| values counted by the one before, no model | {counted(run):.3f} |", flush=True)
    table(run, mechanisms, args.out, args.seeds)


def counted(run: Run, images: int = 10_000) -> float:
    """Bits per dimension of P(value | the one before) as counted in training images: what needs no attention.

    A pair that was rarely seen leans on how frequent its value is alone (one imagined observation).
    """

    def values(split: str, count: int) -> torch.Tensor:
        examples = run.task.examples(split)
        return torch.stack(
            [examples.item(i, generator_for(split, 0, i))["values"] for i in range(min(count, len(examples)))]
        )

    pairs, single = torch.zeros(256 * 256, dtype=torch.float64), torch.ones(256, dtype=torch.float64)
    seen = values("train", images)
    pairs += torch.bincount((256 * seen[:, :-1] + seen[:, 1:]).flatten(), minlength=256 * 256)
    single += torch.bincount(seen.flatten(), minlength=256)
    single /= single.sum()
    table = pairs.view(256, 256)
    table = (table + single) / (table.sum(-1, keepdim=True) + 1)
    new = values("valid", run.settings.valid_examples)
    bits = -torch.cat([single[new[:, :1]], table[new[:, :-1], new[:, 1:]]], 1).log2()
    return float(bits.mean())


def speech_mechanisms() -> list[Any]:
    return parsed("softmax", "linear", "performer:num_features=64", NEAR_AND_FAR, "bilstm")


def speech(args: argparse.Namespace) -> None:
    """Each mechanism with each of the learning rates; the best of each counts."""
    mechanisms = speech_mechanisms()
    best: dict[str, tuple[float, float]] = {}
    for rate in args.rates:
        settings = {"steps": 400, "batch": 8, "valid_every": 200, "valid_examples": 128, "lr": rate}
        run = run_of("speech", args, SPEECH_MODEL, settings)
        result = table(run, mechanisms, args.out / f"lr-{rate:g}")
        for label, (one,) in result["runs"].items():
            best[label] = min(best.get(label, (math.inf, rate)), (one["metrics"]["word_error_rate"], rate))
    print("| word error rate | best of the learning rates | at | relative to softmax |\n|---|---|---|---|")
    for label, (error, rate) in best.items():
        print(f"| {label} | {error:.3f} | {rate:g} | {error / best['softmax'][0]:.2f} |", flush=True)
    # Timed apart from the runs, whose seconds met different neighbours.
    timings = step_times(run, dict(zip(result["runs"], mechanisms, strict=True)), args)
    result["step"] = {label: timing.as_dict() for label, timing in timings.items()}
    write_json(args.out / "comparison.json", result)


def speech_steps(args: argparse.Namespace) -> None:
    """Only the time of a step, nothing trained."""
    run = run_of("speech", args, SPEECH_MODEL, {"batch": 8})
    timings = step_times(run, {label_of(choice): choice for choice in speech_mechanisms()}, args)
    data = {"machine": machine(), "clock": args.clock, "step": {k: timing.as_dict() for k, timing in timings.items()}}
    write_json(args.out / "steps.json", data)


def text(args: argparse.Namespace) -> None:
    settings = {"steps": 1000, "batch": 8, "lr": 2e-3, "valid_every": 250, "valid_examples": 128}
    mechanisms = parsed("softmax", "linear", "performer:num_features=64", HYBRID)
    table(run_of("text", args, SMALL, settings), mechanisms, args.out / "fixed")
    table(
        run_of("text", args, SMALL, {**settings, "redraw_every": 100}),
        parsed("performer:num_features=64"),
        args.out / "redrawn",
    )


def masked(args: argparse.Namespace) -> None:
    settings = {"steps": 1000, "batch": 8, "lr": 2e-3, "valid_every": 250, "valid_examples": 128}
    run = run_of("text", args, SMALL, settings, masked=True)
    mechanisms = parsed("softmax", "performer:num_features=64", "linformer:length=256:rank=64", "lsh")
    table(run, mechanisms, args.out)


def protein(args: argparse.Namespace) -> None:
    mechanisms = parsed("softmax", "performer:num_features=64:features=relu", "performer:num_features=64")
    settings = {"steps": 600, "batch": 8, "lr": 2e-3, "valid_every": 200, "valid_examples": 64}
    for causal in (False, True):
        print("causal" if causal else "masked", flush=True)
        run = run_of("protein", args, SMALL, settings, causal=causal, length=512)
        table(run, mechanisms, args.out / ("causal" if causal else "masked"))


def listops(args: argparse.Namespace) -> None:
    labels(args, "listops", {"steps": 1000, "batch": 16, "valid_every": 250, "valid_examples": 512}, length=128)


def documents(args: argparse.Namespace) -> None:
    labels(args, "documents", {"valid_every": 100})


def labels(args: argparse.Namespace, task: str, settings: dict[str, Any], **options: Any) -> None:
    run = run_of(task, args, SMALL, settings, **options)
    table(run, parsed("softmax", "linear", "performer:num_features=64"), args.out, args.seeds)


COMMANDS = {
    f.__name__.replace("_", "-"): f
    for f in (copy, features, images, generation, speech, speech_steps, text, masked, protein, listops, documents)
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--data", help="real data; the built-in ones if absent")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many seeds, from --seed on")
    parser.add_argument("--valid-every", type=int)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="learning rates (speech)")
    parser.add_argument("--counts", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128], help="features (features)")
    parser.add_argument("--size", type=int, default=14, help="side of an image (images)")
    parser.add_argument("--values", type=int, nargs="+", default=[784], help="values of an image (generation)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="of generation and speech-steps")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.out = args.out or Path("results/tasks") / args.command
    COMMANDS[args.command](args)
    print(json.dumps(machine()), file=sys.stderr)


if __name__ == "__main__":
    main()
