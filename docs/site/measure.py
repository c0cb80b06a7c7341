"""Error and time of every mechanism for its page: docs/data/mechanisms.json.

    python docs/site/measure.py

B1 H8 D64 float32, not causal, against exact attention on two kinds of input: *flat* (isotropic, scores of standard
deviation 0.5) and *sharp* (spectrum falling as 1/l^2, scores of standard deviation 2.5). Errors are relative squared
errors of the output. Time is the best of interleaved runs of all mechanisms.
"""

import datetime
from pathlib import Path
from typing import Any

import torch

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.planning.baselines import uniform_attention

TARGET = Path(__file__).parent.parent / "data" / "mechanisms.json"
LENGTHS = (1024, 4096)
H, D = 8, 64
KINDS = {"flat": (0.5, False), "sharp": (2.5, True)}
OPTIONS: dict[str, dict[str, Any]] = {
    "linformer": {"length": max(LENGTHS), "rank": 128},
    "taylor": {"degree": 1, "center": True},
    "performer": {"num_features": 256, "center": True, "seed": 0},
    **{name: {"seed": 0} for name in ("lsh", "clustered", "improved-clustered", "multipole")},
}


def inputs(length: int, deviation: float, anisotropic: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, H, length, D, generator=generator) for _ in range(3))
    if anisotropic:
        spectrum = 1.0 / torch.arange(1, D + 1)
        q, k = q * spectrum, k * spectrum
    # Scores q.k / sqrt(D) of the standard deviation asked for.
    size = (deviation / ((q @ k.mT) / D**0.5).std()).sqrt()
    return q * size, k * size, v


def relative_squared_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out - exact).square().sum() / exact.square().sum())


def main() -> None:
    record: dict[str, Any] = {
        "date": datetime.date.today().isoformat(), "machine": machine(), "kinds": list(KINDS), "rows": [],
    }  # fmt: skip
    for length in LENGTHS:
        data = {kind: inputs(length, *about) for kind, about in KINDS.items()}
        made: dict[str, dict[str, Any]] = {}
        for name in sq.list_mechanisms():
            made[name] = {}
            for kind, (q, k, _) in data.items():
                torch.manual_seed(0)
                made[name][kind] = sq.create(name, D, H, **OPTIONS.get(name, {}))
                if made[name][kind].uses_calibration:
                    made[name][kind].calibrate(q, k)
        with torch.no_grad():
            calls = {name: (lambda a=made[name]["flat"], x=data["flat"]: a(*x)) for name in made}
            timings = interleave(calls, runs=7)
            for name in made:
                errors = {}
                for kind, (q, k, v) in data.items():
                    exact = sq.attention(q, k, v, "softmax")
                    outputs = {"error": made[name][kind](q, k, v), "uniform": uniform_attention(q, k, v)}
                    errors[kind] = {key: relative_squared_error(out, exact) for key, out in outputs.items()}
                record["rows"].append({
                    "mechanism": name, "length": length, "options": OPTIONS.get(name, {}), "errors": errors,
                    "ms": timings[name].best * 1e3, "softmax_ms": timings["softmax"].best * 1e3,
                })  # fmt: skip
    write_json(TARGET, record)
    print(TARGET)


if __name__ == "__main__":
    main()
