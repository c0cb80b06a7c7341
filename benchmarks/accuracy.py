"""Relative squared error of every mechanism at settings that take the same time, with uniform attention beside it.

    python benchmarks/accuracy.py --json results/accuracy.json

B1 H4 D64 float32, not causal, L = 2048 and 8192. The time budget is that of performer with 256 features at that
length; each mechanism is tried with several settings and shown at the largest one within 1.15 of the budget (or
its smallest setting, with its time, where none fits). Times are taken once per length, on flat isotropic inputs.

Inputs: isotropic Gaussian, or a spectrum falling as 1/l^2; flat (scores of standard deviation 0.5) or sharp (2.5).
Values are N(0, 1). Error is |out - exact|^2 / |exact|^2, the mean over `--seeds` draws of inputs, projections and
calibration samples together: 0 is exact, uniform attention is what a mechanism must beat. `kernel of its own` marks
mechanisms that do not estimate softmax attention (or, untrained, cannot): their error says what swapping them in
without training does, nothing about training. The last output are the tables of docs/accuracy.md. With --clock cpu time
is that of the process on all its threads: use it, with --threads 1, where other processes share the machine.
"""

import argparse
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.lab.measure import CLOCKS
from subquad.planning.baselines import uniform_attention

H, D = 4, 64
SLACK = 1.15


def settings(name: str, option: str, values: list[Any], **fixed: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {option: value, **fixed}) for value in values]


POWERS = [32, 64, 128, 256, 512, 1024]
SETTINGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "performer positive": settings("performer", "num_features", POWERS, features="positive", seed=0),
    "performer hyperbolic": settings("performer", "num_features", POWERS, seed=0),
    "performer oprf, antithetic": settings(
        "performer", "num_features", POWERS, features="oprf", antithetic=True, seed=0
    ),
    "performer sderf, centred": settings(
        "performer", "num_features", POWERS, features="sderf", antithetic=True, center=True, seed=0
    ),
    "taylor, centred": [("taylor", {"degree": 1, "center": True}), ("taylor", {"degree": 2, "hermite": True})],
    "local": settings("local", "window", [8, 16, 32, 64, 128, 256]),
    "sparse": settings("sparse", "stride", [16, 32, 64, 128]),
    "lsh": settings("lsh", "rounds", [1, 2, 4, 8], shared_qk=False, seed=0),
    "clustered": settings("clustered", "clusters", [8, 16, 25, 50, 100, 200], seed=0),
    "improved-clustered": settings("improved-clustered", "clusters", [8, 16, 25, 50, 100, 200], seed=0),
    "multipole": [
        ("multipole", {"chunk": chunk, "clusters": clusters, "exact_keys": exact, "seed": 0})
        for chunk, clusters, exact in (
            *((2048, 16, 32), (2048, 16, 64), (2048, 24, 64), (2048, 32, 128)),
            *((1024, 24, 64), (1024, 24, 128), (512, 24, 128), (512, 24, 256)),
        )
    ],
    "multipole, default options": [("multipole", {"seed": 0})],
    "nystrom": settings("nystrom", "landmarks", [8, 16, 32, 64, 128]),
    "hybrid, sderf far": [
        ("hybrid", {"window": window, "sinks": 4, "far": far})
        for window in (16, 32, 64)
        for far in [
            {"mechanism": "performer", "features": "sderf", "center": True, "num_features": 4 * window, "seed": 0}
        ]
    ],
    "hybrid, degree-1 far": [
        ("hybrid", {"window": window, "sinks": 4, "far": {"mechanism": "taylor", "degree": 1, "center": True}})
        for window in (16, 32, 64, 128)
    ],
    "linear (kernel of its own)": [("linear", {})],
    "efficient (kernel of its own)": [("efficient", {})],
    "separable-linformer (kernel of its own)": [("separable-linformer", {})],
    "linformer, untrained (kernel of its own)": settings("linformer", "rank", [32, 64, 128, 256], length=8192),
    "hedgehog, untrained (kernel of its own)": [("hedgehog", {})],
}


def inputs(length: int, spectrum: str, sharpness: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k with scores q.k / sqrt(D) of standard deviation `sharpness`; v ~ N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, H, length, D, generator=generator)
    if spectrum == "anisotropic":
        weights = torch.arange(1, D + 1).float() ** -1.0  # variances fall as 1/l^2
        q, k = q * weights, k * weights
        spread = weights.pow(4).sum().sqrt()
    else:
        spread = torch.tensor(float(D)).sqrt()
    factor = (sharpness * D**0.5 / spread) ** 0.5
    return factor * q, factor * k, v


def seeded(options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same options with another seed, also in a far field."""
    changed = {key: seeded(value, seed) if isinstance(value, dict) else value for key, value in options.items()}
    return changed | ({"seed": seed} if "seed" in options else {})


def made(name: str, options: dict[str, Any], q: Tensor, k: Tensor, seed: int) -> Any:
    attend = sq.create(name, D, H, **seeded(options, seed))
    if attend.uses_calibration:
        attend.calibrate(q, k)
    return attend


def choose(length: int, runs: int, clock: str) -> tuple[dict[str, int], dict[str, float], float]:
    """The largest setting of every mechanism that fits the budget, its time in budgets, and that of softmax."""
    q, k, v = inputs(length, "isotropic", 0.5, seed=1)
    sample = inputs(1024, "isotropic", 0.5, seed=2)[:2]
    calls: dict[str, Any] = {"softmax": lambda: sq.attention(q, k, v, "softmax")}
    for label, steps in SETTINGS.items():
        for i, (name, options) in enumerate(steps):
            attend = made(name, options, *sample, seed=0)
            calls[f"{label}|{i}"] = lambda attend=attend: attend(q, k, v)
    timings = interleave(calls, runs=runs, seconds=90.0, clock=clock)
    budget = timings[f"performer hyperbolic|{POWERS.index(256)}"].best
    chosen = {
        label: max((i for i in range(len(steps)) if timings[f"{label}|{i}"].best <= SLACK * budget), default=0)
        for label, steps in SETTINGS.items()
    }
    over = {label: timings[f"{label}|{i}"].best / budget for label, i in chosen.items()}
    softmax = timings["softmax"].best / budget
    print(f"L={length}: budget {1e3 * budget:.1f} ms, softmax {softmax:.1f} x budget", flush=True)
    return chosen, over, softmax


def errors(length: int, spectrum: str, sharpness: float, seed: int, chosen: dict[str, int]) -> dict[str, float]:
    """Error of every mechanism on one draw."""
    q, k, v = inputs(length, spectrum, sharpness, seed=1000 + seed)
    sample = inputs(1024, spectrum, sharpness, seed=2000 + seed)[:2]
    exact = sq.attention(q, k, v, "softmax")

    def error(out: Tensor) -> float:
        return float((out - exact).square().sum() / exact.square().sum())

    found = {"uniform attention": error(uniform_attention(q, k, v))}
    for label, i in chosen.items():
        name, options = SETTINGS[label][i]
        found[label] = error(made(name, options, *sample, seed=seed)(q, k, v))
    return found


def measure(length: int, runs: int, seeds: int, clock: str) -> list[dict[str, Any]]:
    chosen, over, softmax = choose(length, runs, clock)
    rows = []
    for spectrum in ("isotropic", "anisotropic"):
        for sharpness in (0.5, 2.5):
            draws = [errors(length, spectrum, sharpness, seed, chosen) for seed in range(seeds)]
            print(f"\nL={length}, {spectrum}, score sd {sharpness}, {seeds} draws")
            for label in draws[0]:
                every = [draw[label] for draw in draws]
                setting = SETTINGS[label][chosen[label]][1] if label in chosen else {}
                row = {
                    "length": length,
                    "spectrum": spectrum,
                    "score_sd": sharpness,
                    "label": label,
                    "setting": setting,
                    "time_over_budget": over.get(label, 0.0),
                    "softmax_over_budget": softmax,
                    "error": statistics.mean(every),
                    "error_sd": statistics.stdev(every) if seeds > 1 else 0.0,
                    "errors": every,
                }
                rows.append(row)
                words = ", ".join(f"{key}={value}" for key, value in setting.items() if key not in ("seed", "far"))
                print(
                    f"  {label:42s} error {row['error']:7.3f} +- {row['error_sd']:.3f}  (largest over smallest "
                    f"{max(every) / min(every):.2f})  time {row['time_over_budget']:5.2f}   {words}",
                    flush=True,
                )
    return rows


def _two_digits(error: float) -> str:
    return f"{error:.0f}" if error >= 9.5 else f"{error:#.2g}"


def tables(rows: list[dict[str, Any]]) -> str:
    """A Markdown table per length: a line per mechanism, a column per kind of input, and the time in budgets."""
    parts = []
    for length in dict.fromkeys(row["length"] for row in rows):
        here = [row for row in rows if row["length"] == length]
        kinds = list(dict.fromkeys((row["spectrum"], row["score_sd"]) for row in here))
        names = [f"{'flat' if sd < 1 else 'sharp'}, {spectrum}" for spectrum, sd in kinds]
        lines = [f"| {length} tokens | time | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
        for label in dict.fromkeys(row["label"] for row in here):
            found = {(row["spectrum"], row["score_sd"]): row for row in here if row["label"] == label}
            time = next(iter(found.values()))["time_over_budget"]
            cells = [_two_digits(found[kind]["error"]) for kind in kinds]
            lines.append(f"| {label} | {f'{time:.1f}' if time else ''} | " + " | ".join(cells) + " |")
        lines.append(f"| softmax | {here[0]['softmax_over_budget']:.1f} | " + " | ".join("0" for _ in kinds) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="at most 8192")
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs; the best counts")
    parser.add_argument("--seeds", type=int, default=4, help="draws that errors are averaged over")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: expected 1 or more")
    torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {"machine": machine(), "clock": arguments.clock, "seeds": arguments.seeds, "rows": []}
    try:
        with torch.no_grad():
            for length in arguments.lengths:
                record["rows"] += measure(length, arguments.runs, arguments.seeds, arguments.clock)
                if arguments.json:
                    write_json(arguments.json, record)
    except KeyboardInterrupt:
        print("interrupted: the lengths that were finished are kept", file=sys.stderr)
        return 130
    print("\n" + tables(record["rows"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
