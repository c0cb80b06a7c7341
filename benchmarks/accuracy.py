"""Relative output error of every mechanism at settings that take the same time, with uniform attention beside it.

    python benchmarks/accuracy.py --json results/accuracy.json

B1 H4 D64 float32, not causal, L = 2048 and 8192. The time budget is that of performer with 256 features at that
length; each mechanism climbs its own ladder of settings and is shown at the largest one within 1.15 of the budget (or
its smallest setting, with its time, where none fits). Inputs: isotropic Gaussian, or a spectrum falling as 1/l^2; flat
(scores of standard deviation 0.5) or sharp (2.5). Values are N(0, 1). Error is |out - exact| / |exact| in the
Frobenius norm: 0 is exact, uniform attention is what a mechanism must beat. `kernel of its own` marks mechanisms that
do not estimate softmax attention (or, untrained, cannot): their error says what swapping them in without training
does, nothing about training.
"""

import argparse
import contextlib
from typing import Any

import torch
from torch import Tensor

import subquad as sq
from subquad.lab import interleave, machine, write_json

H, D = 4, 64
SLACK = 1.15


def ladder(name: str, option: str, values: list[Any], **fixed: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(name, {option: value, **fixed}) for value in values]


POWERS = [32, 64, 128, 256, 512, 1024]
LADDERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "performer positive": ladder("performer", "num_features", POWERS, features="positive", seed=0),
    "performer hyperbolic": ladder("performer", "num_features", POWERS, seed=0),
    "performer oprf, antithetic": ladder("performer", "num_features", POWERS, features="oprf", antithetic=True, seed=0),
    "performer sderf, centred": ladder(
        "performer", "num_features", POWERS, features="sderf", antithetic=True, center=True, seed=0
    ),
    "taylor, centred": [("taylor", {"degree": 1, "center": True}), ("taylor", {"degree": 2, "hermite": True})],
    "local": ladder("local", "window", [8, 16, 32, 64, 128, 256]),
    "sparse": ladder("sparse", "stride", [16, 32, 64, 128]),
    "lsh": ladder("lsh", "rounds", [1, 2, 4, 8], shared_qk=False, seed=0),
    "clustered": ladder("clustered", "clusters", [8, 16, 25, 50, 100, 200], seed=0),
    "improved-clustered": ladder("improved-clustered", "clusters", [8, 16, 25, 50, 100, 200], seed=0),
    "nystrom": ladder("nystrom", "landmarks", [8, 16, 32, 64, 128]),
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
    "linformer, untrained (kernel of its own)": ladder("linformer", "rank", [32, 64, 128, 256], length=8192),
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


def made(name: str, options: dict[str, Any], q: Tensor, k: Tensor) -> Any:
    attend = sq.create(name, D, H, **options)
    with contextlib.suppress(ValueError):
        attend.calibrate(q, k)
    return attend


def measure(length: int, spectrum: str, sharpness: float, runs: int) -> list[dict[str, Any]]:
    q, k, v = inputs(length, spectrum, sharpness, seed=1)
    q_sample, k_sample, _ = inputs(1024, spectrum, sharpness, seed=2)
    exact = sq.attention(q.double(), k.double(), v.double(), "softmax").float()
    every = {
        (label, i): made(name, options, q_sample, k_sample)
        for label, steps in LADDERS.items()
        for i, (name, options) in enumerate(steps)
    }
    calls = {f"{label}|{i}": (lambda attend=attend: attend(q, k, v)) for (label, i), attend in every.items()}
    with torch.no_grad():
        timings = interleave({**calls, "softmax": lambda: sq.attention(q, k, v, "softmax")}, runs=runs, seconds=90.0)
        budget = timings[f"performer hyperbolic|{POWERS.index(256)}"].best
        uniform = v.mean(-2, keepdim=True).expand_as(v)
        error = float((uniform - exact).norm() / exact.norm())
        rows = [{"label": "uniform attention", "setting": {}, "time_over_budget": 0.0, "error": error}]
        for label, steps in LADDERS.items():
            fitting = [i for i in range(len(steps)) if timings[f"{label}|{i}"].best <= SLACK * budget]
            chosen = max(fitting, default=0)
            out = every[label, chosen](q, k, v)
            rows.append(
                {
                    "label": label,
                    "setting": steps[chosen][1],
                    "time_over_budget": timings[f"{label}|{chosen}"].best / budget,
                    "error": float((out - exact).norm() / exact.norm()),
                }
            )
    softmax = timings["softmax"].best
    title = f"L={length}, {spectrum}, score sd {sharpness}"
    print(f"\n{title}: budget {1e3 * budget:.1f} ms, softmax {softmax / budget:.1f} x budget")
    for row in rows:
        setting = ", ".join(f"{key}={value}" for key, value in row["setting"].items() if key not in ("seed", "far"))
        print(f"  {row['label']:42s} error {row['error']:8.3f}   time {row['time_over_budget']:5.2f}   {setting}")
    return [
        {"length": length, "spectrum": spectrum, "score_sd": sharpness, "softmax_over_budget": softmax / budget, **row}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "rows": []}
    for length in map(int, arguments.lengths.split(",")):
        for spectrum in ("isotropic", "anisotropic"):
            for sharpness in (0.5, 2.5):
                record["rows"] += measure(length, spectrum, sharpness, arguments.runs)
                if arguments.json:
                    write_json(arguments.json, record)


if __name__ == "__main__":
    main()
