"""How time and peak memory grow with length: the slope of a straight line through log(cost) against log(length).

    python benchmarks/scaling.py core          performer, causal, forward + backward, 1k to 64k; a scan of 1,000,000
    tokens python benchmarks/scaling.py mechanisms    every sub-quadratic mechanism, forward, 1k to 32k

B1 H8 D64 float32. Times are the best of interleaved runs, memory is measured in a fresh process for each length. Slope
1 is linear, 2 is quadratic.
"""

import argparse
import math
import time
from typing import Any

import torch

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.lab.memory import peak_memory

H, D, M = 8, 64, 256
MIB = 1 << 20
# Settings that keep the work per token constant, and fit every length measured.
MECHANISMS: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 25, "seed": 0},
    "efficient": {},
    "hedgehog": {},
    "hybrid": {"window": 64, "sinks": 4, "far": {"mechanism": "performer", "num_features": M, "seed": 0}},
    "improved-clustered": {"clusters": 25, "seed": 0},
    "linear": {},
    "linformer": {"length": 32768, "rank": 256},
    "local": {"window": 64},
    "lsh": {"seed": 0},
    "nystrom": {},
    "performer": {"num_features": M, "seed": 0},
    "separable-linformer": {},
    "sparse": {},
    "taylor": {"degree": 1},
}


def slope(lengths: list[int], costs: list[float]) -> float:
    """Least-squares slope of log cost against log length."""
    x = torch.tensor(lengths, dtype=torch.float64).log2()
    y = torch.tensor(costs, dtype=torch.float64).log2()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def seconds(attend: Any, length: int, *, is_causal: bool, backward: bool, runs: int) -> float:
    generator = torch.Generator().manual_seed(0)
    inputs = [0.5 * torch.randn(1, H, length, D, generator=generator) for _ in range(3)]
    inputs = [x.requires_grad_(backward) for x in inputs]

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = attend(*inputs, is_causal=is_causal)
            if backward:
                out.backward(torch.ones_like(out))
                for x in inputs:
                    x.grad = None

    return interleave({"call": call}, runs=runs, seconds=20.0)["call"].best


def growth(
    name: str, options: dict[str, Any], lengths: list[int], *, is_causal: bool, backward: bool, runs: int = 3
) -> dict[str, Any]:
    """Times, memory and both slopes of one mechanism."""
    attend = sq.create(name, D, H, **options)
    times, memory, tensors = [], [], []
    for length in lengths:
        times.append(seconds(attend, length, is_causal=is_causal, backward=backward, runs=runs))
        peak = peak_memory(name, length, options=options, is_causal=is_causal, backward=backward)
        if "error" in peak:
            raise RuntimeError(f"{name} at {length}: {peak['error']}")
        memory.append(peak["extra_bytes"])
        tensors.append(peak["tensor_bytes"])
    row = {
        "mechanism": name,
        "options": options,
        "is_causal": is_causal,
        "backward": backward,
        "lengths": lengths,
        "milliseconds": [1e3 * t for t in times],
        "extra_bytes": memory,
        "tensor_bytes": tensors,
        "time_slope": slope(lengths, times),
        "memory_slope": slope(lengths, [float(max(m, 1)) for m in memory]),
        "memory_over_tensors": [m / t for m, t in zip(memory, tensors, strict=True)],
    }
    print(
        f"{name:20s} time slope {row['time_slope']:.2f}  memory slope {row['memory_slope']:.2f}  "
        + "  ".join(f"{n}: {1e3 * t:.0f} ms {m / MIB:.0f} MiB" for n, t, m in zip(lengths, times, memory, strict=True)),
        flush=True,
    )
    return row


def million(piece: int = 8192) -> dict[str, Any]:
    """A scan over 1,000,000 tokens in pieces: resident memory, finiteness, and the prefix against the parallel form."""
    from subquad.lab.memory import _resident

    attend = sq.create("performer", D, num_features=M, seed=0)
    generator = torch.Generator().manual_seed(0)
    state, resident, done = None, [], 0
    prefix: list[tuple[torch.Tensor, ...]] = []
    start = time.perf_counter()
    with torch.no_grad():
        while done < 1_000_000:
            size = min(piece, 1_000_000 - done)
            q, k, v = 0.5 * torch.randn(3, 1, 1, size, D, generator=generator)
            out, state = attend.scan(q, k, v, state)
            if len(prefix) < 4:
                prefix.append((q, k, v, out))
            if not bool(out.isfinite().all()):
                raise RuntimeError(f"not finite after {done} tokens")
            done += size
            resident.append(_resident() / MIB)
    took = time.perf_counter() - start
    q, k, v, pieces = (torch.cat(x, 2) for x in zip(*prefix, strict=True))
    with torch.no_grad():
        gap = float((attend(q, k, v, is_causal=True, backend="chunked") - pieces).abs().max())
    row = {
        "tokens": done,
        "seconds": took,
        "resident_mib_after_first_tenth": resident[len(resident) // 10],
        "resident_mib_at_the_end": resident[-1],
        "prefix_gap": gap,
    }
    print("scan of 1,000,000 tokens, one head:", ", ".join(f"{k} {v:.6g}" for k, v in row.items()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["core", "mechanisms"])
    parser.add_argument("--json", default=None)
    parser.add_argument("--longest", type=int, default=None)
    parser.add_argument("--only", default=None, help="comma-separated mechanisms")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "rows": []}
    longest = arguments.longest or (65536 if arguments.part == "core" else 32768)
    lengths = [1024 * 2**i for i in range(int(math.log2(longest // 1024)) + 1)]
    if arguments.part == "core":
        for backward in (False, True):
            record["rows"].append(
                growth("performer", {"num_features": M, "seed": 0}, lengths, is_causal=True, backward=backward)
            )
        record["million"] = million()
    else:
        for name, options in MECHANISMS.items():
            if arguments.only and name not in arguments.only.split(","):
                continue
            record["rows"].append(growth(name, options, lengths, is_causal=False, backward=False))
            if arguments.json:
                write_json(arguments.json, record)
    if arguments.json:
        write_json(arguments.json, record)


if __name__ == "__main__":
    main()
