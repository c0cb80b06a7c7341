"""How time and peak memory grow with length: the slope of a straight line through log(cost) against log(length).

    python benchmarks/scaling.py core          performer, causal, forward + backward, 1k to 64k; a million-token scan
    python benchmarks/scaling.py mechanisms    every sub-quadratic mechanism, forward, 1k to 32k
    python benchmarks/scaling.py rank          separable-linformer with and without E and F, 16k, against their size

B1 H8 D64 float32. Times are the best of interleaved runs, memory is measured in a fresh process for each length. Slope
1 is linear, 2 is quadratic. The options of a mechanism are the same at every length, except for the stride of sparse
attention, which is about sqrt(L), as its paper has it. The exit status is 1 where a slope is above its limit: 1.15;
1.25 for lsh, whose sort is O(L log L); 1.6 for sparse, which is O(L sqrt(L)).

With --json every row is saved as soon as it is measured; --resume keeps the rows of an interrupted run. With --clock
cpu time is that of the process on all its threads: use it, with --threads 1, where other processes share the machine.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.lab.measure import CLOCKS
from subquad.lab.peak_memory import peak_memory, resident_memory

H, D, M = 8, 64, 256
MIB = 1 << 20
LIMITS = {"lsh": 1.25, "sparse": 1.6}
LIMIT = 1.15
FAR = {"mechanism": "performer", "num_features": M, "seed": 0}


class Case(NamedTuple):
    """One line of the table; `stride` is chosen per length where it is None in the options."""

    mechanism: str
    options: dict[str, Any]
    is_causal: bool = False
    backward: bool = False

    @property
    def label(self) -> str:
        kind = self.options.get("pattern")
        words = (self.mechanism, kind, "causal" if self.is_causal else None)
        return " ".join(word for word in words if word)

    def at(self, length: int) -> dict[str, Any]:
        """The options at this length."""
        stride = {"stride": math.isqrt(length - 1) + 1} if "stride" in self.options else {}
        return self.options | stride

    @property
    def limit(self) -> float:
        return LIMITS.get(self.mechanism, LIMIT)


# Settings that keep the work per token constant, and fit every length measured.
CASES = (
    Case("clustered", {"clusters": 25, "seed": 0}),
    Case("efficient", {}),
    Case("hedgehog", {}),
    Case("hybrid", {"window": 64, "sinks": 4, "far": FAR}),
    Case("hybrid", {"window": 64, "sinks": 4, "far": FAR}, is_causal=True),
    Case("improved-clustered", {"clusters": 25, "seed": 0}),
    Case("linear", {}),
    Case("linformer", {"length": 32768, "rank": 256}),
    Case("local", {"window": 64}),
    Case("lsh", {"rounds": 4, "buckets": 64, "bucket_size": 64, "seed": 0}),
    Case("lsh", {"rounds": 4, "buckets": 64, "bucket_size": 64, "seed": 0}, is_causal=True),
    Case("nystrom", {"landmarks": 64}),
    Case("performer", {"num_features": M, "seed": 0}),
    Case("separable-linformer", {}),
    Case("sparse", {"pattern": "strided", "stride": None}),
    Case("sparse", {"pattern": "strided", "stride": None}, is_causal=True),
    Case("sparse", {"pattern": "fixed", "stride": None, "summary": 1}),
    Case("sparse", {"pattern": "fixed", "stride": None, "summary": 1}, is_causal=True),
    Case("taylor", {"degree": 1}),
)


def slope(lengths: list[int], costs: list[float]) -> float:
    """Least-squares slope of log cost against log length."""
    x = torch.tensor(lengths, dtype=torch.float64).log2()
    y = torch.tensor(costs, dtype=torch.float64).log2()
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


def call_at(case: Case, length: int) -> Any:
    """The call whose time is taken."""
    attend = sq.create(case.mechanism, D, H, **case.at(length))
    generator = torch.Generator().manual_seed(0)
    inputs = [0.5 * torch.randn(1, H, length, D, generator=generator) for _ in range(3)]
    inputs = [x.requires_grad_(case.backward) for x in inputs]

    def call() -> None:
        with torch.set_grad_enabled(case.backward):
            out = attend(*inputs, is_causal=case.is_causal)
            if case.backward:
                out.backward(torch.ones_like(out))
                for x in inputs:
                    x.grad = None

    return call


def growth(case: Case, lengths: list[int], clock: str, runs: int = 3) -> dict[str, Any]:
    """Times, memory and both slopes of one mechanism. Memory skips lengths in between: each costs a process."""
    # All lengths in one interleaved run, so that a neighbour who wakes up does not bend the line.
    timings = interleave({str(n): call_at(case, n) for n in lengths}, runs=runs, seconds=15.0, clock=clock)
    times = [timings[str(n)].best for n in lengths]
    weighed = [n for i, n in enumerate(lengths) if i % 2 == 0 or n == lengths[-1]]
    memory, tensors = [], []
    for length in weighed:
        peak = peak_memory(
            case.mechanism,
            length,
            options=case.at(length),
            is_causal=case.is_causal,
            backward=case.backward,
            threads=torch.get_num_threads(),
        )
        if "error" in peak:
            raise RuntimeError(f"{case.label} at {length}: {peak['error']}")
        memory.append(peak["extra_bytes"])
        tensors.append(peak["tensor_bytes"])
    row = {
        "label": case.label,
        **case._asdict(),
        "lengths": lengths,
        "milliseconds": [1e3 * t for t in times],
        "memory_lengths": weighed,
        "extra_bytes": memory,
        "tensor_bytes": tensors,
        "time_slope": slope(lengths, times),
        "memory_slope": slope(weighed, [float(max(m, 1)) for m in memory]),
        "memory_over_tensors": [m / t for m, t in zip(memory, tensors, strict=True)],
        "limit": case.limit,
    }
    show(row)
    return row


def broken(row: dict[str, Any]) -> bool:
    return max(row["time_slope"], row["memory_slope"]) > row["limit"]


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['label']:24s} time {row['time_slope']:5.2f}  memory {row['memory_slope']:5.2f}  limit {row['limit']:.2f}"
        f"{'  BROKEN' if broken(row) else ''}   "
        + " ".join(f"{t:.0f}" for t in row["milliseconds"])
        + " ms   "
        + " ".join(f"{m / MIB:.0f}" for m in row["extra_bytes"])
        + " MiB",
        flush=True,
    )


def million(piece: int = 8192) -> dict[str, Any]:
    """A scan over 1,000,000 tokens in pieces: resident memory, finiteness, and the prefix against the parallel form."""
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
            resident.append(resident_memory() / MIB)
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


def projection_size(
    clock: str, length: int = 16384, ranks: tuple[int, ...] = (64, 128, 256, 512)
) -> list[dict[str, Any]]:
    """Time against the size of the projections. Without them the cost has no such size in it: slope 0."""
    calls, shown = {}, {"without E and F": False, "with E and F": True}
    for label, projected in shown.items():
        for rank in ranks:
            options = {"projected": projected, "length": length, "rank": rank}
            calls[f"{label} {rank}"] = call_at(Case("separable-linformer", options), length)
    timings = interleave(calls, runs=5, seconds=60.0, clock=clock)
    rows = []
    for label in shown:
        times = [timings[f"{label} {rank}"].best for rank in ranks]
        row = {"label": label, "length": length, "ranks": list(ranks), "milliseconds": [1e3 * t for t in times]}
        rows.append(row | {"slope_in_rank": slope(list(ranks), times)})
        print(
            f"separable-linformer {label:16s} slope in rank {rows[-1]['slope_in_rank']:5.2f}   "
            + "  ".join(f"{rank}: {1e3 * t:.1f} ms" for rank, t in zip(ranks, times, strict=True))
        )
    return rows


def kept_rows(path: str | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of an earlier run with the same settings, for --resume."""
    if path is None or not Path(path).exists():
        return []
    earlier = json.loads(Path(path).read_text(encoding="utf-8"))
    if earlier.get("settings") != settings:
        print(f"--resume: {path} was measured with other settings; starting anew", file=sys.stderr)
        return []
    return list(earlier["rows"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["core", "mechanisms", "rank"])
    parser.add_argument("--json", default=None)
    parser.add_argument("--longest", type=int, default=None, help="1024 times a power of two")
    parser.add_argument("--only", default=None, help="comma-separated mechanisms")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --json already has")
    arguments = parser.parse_args()
    if arguments.resume and not arguments.json:
        parser.error("--resume needs --json, the file to go on with")
    torch.set_num_threads(arguments.threads)
    longest = arguments.longest or (65536 if arguments.part == "core" else 32768)
    if longest < 2048:
        parser.error(f"--longest {longest}: expected 2048 or more, a slope needs two lengths")
    lengths = [1024 * 2**i for i in range(int(math.log2(longest // 1024)) + 1)]
    settings = {"part": arguments.part, "lengths": lengths, "threads": arguments.threads, "clock": arguments.clock}
    rows = kept_rows(arguments.json, settings) if arguments.resume else []
    record: dict[str, Any] = {"machine": machine(), "settings": settings, "complete": False, "rows": rows}

    def save() -> None:
        if arguments.json:
            write_json(arguments.json, record)

    if arguments.part == "rank":
        record["rows"] = projection_size(arguments.clock)
        record["complete"] = True
        save()
        return 1 if record["rows"][0]["slope_in_rank"] > 0.1 else 0
    if arguments.part == "core":
        cases = [Case("performer", {"num_features": M, "seed": 0}, True, backward) for backward in (False, True)]
    else:
        names = set(arguments.only.split(",")) if arguments.only else {case.mechanism for case in CASES}
        if unknown := names - {case.mechanism for case in CASES}:
            parser.error(
                f"--only {','.join(sorted(unknown))}: expected names among {sorted({c.mechanism for c in CASES})}"
            )
        cases = [case for case in CASES if case.mechanism in names]
    try:
        for case in cases:
            known = json.loads(json.dumps(case._asdict()))
            if earlier := [row for row in rows if all(row[key] == value for key, value in known.items())]:
                show(earlier[0])
                continue
            rows.append(growth(case, lengths, arguments.clock))
            save()
        if arguments.part == "core":
            record["million"] = million()
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept; --resume goes on from there", file=sys.stderr)
        return 130
    record["complete"] = True
    save()
    too_steep = [row["label"] for row in rows if broken(row)]
    if too_steep:
        print(f"steeper than allowed: {', '.join(too_steep)}", file=sys.stderr)
    return 1 if too_steep else 0


if __name__ == "__main__":
    sys.exit(main())
