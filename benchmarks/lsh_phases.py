"""Where the time of lsh goes, alone and beside a busy process: what a native kernel could win.

    python benchmarks/lsh_phases.py [--lengths 4096 16384] [--threads 2]

B1 H8 D64 float32, forward, 4 rounds, chunks of 64, length / 64 buckets. Phases by the functions that do them:

    choose    hashes, sorting by bucket, chunks
    gather    rows of queries, keys, values and tables in that order, and results back
    visible   which pairs count, inside the tiles
    weights   scores, exponentials and weighted sums of the tiles
    merge     the rounds joined by their log-sum-exps

`products` is the time of the two matrix products of all tiles alone, the least that any implementation has to do.
"""

import argparse
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

import subquad as sq
from subquad.mechanisms import lsh

HEADS, WIDTH, ROUNDS, SIZE = 8, 64, 4, 64


class Clock:
    """Time spent inside functions of the module, each without what it calls of the others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside: list[float] = []

    def wrap(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(0.0)
            start = time.perf_counter()
            out = function(*args, **kwargs)
            spent = time.perf_counter() - start
            self.seconds[phase] += spent - self.inside.pop()
            if self.inside:
                self.inside[-1] += spent
            return out

        return timed


def phases(attn: sq.Mechanism, inputs: list[torch.Tensor], causal: bool, runs: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a call, and of its phases, in the fastest of some runs."""
    best: tuple[float, dict[str, float]] = (float("inf"), {})
    names = {"take_rows": "gather", "_hidden": "visible", "scan_chunks": "weights", "_merge": "merge"}
    before = {name: getattr(lsh, name) for name in names} | {"_choose": lsh.LSH._choose}
    for _ in range(runs + 1):  # the first one warms up
        clock = Clock()
        for name, phase in names.items():
            setattr(lsh, name, clock.wrap(phase, before[name]))
        lsh.LSH._choose = clock.wrap("choose", before["_choose"])  # type: ignore[method-assign]
        start = time.perf_counter()
        attn(*inputs, is_causal=causal)
        total = time.perf_counter() - start
        best = min(best, (1e3 * total, {k: 1e3 * v for k, v in clock.seconds.items()}), key=lambda x: x[0])
    for name in names:
        setattr(lsh, name, before[name])
    lsh.LSH._choose = before["_choose"]  # type: ignore[method-assign]
    return best


def products(length: int, width: int, runs: int) -> float:
    """Milliseconds of the products of all tiles, in pieces of the same size as those of the mechanism."""
    tiles = max(1, lsh.PIECE // (width * SIZE) // SIZE)
    q, k, v = (torch.randn(tiles, n, WIDTH) for n in (SIZE, width * SIZE, width * SIZE))
    best = float("inf")
    for _ in range(runs + 1):
        start = time.perf_counter()
        for _ in range(ROUNDS * HEADS * length // SIZE // tiles):
            torch.bmm(torch.bmm(q, k.mT), v)
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for length in given.lengths:
        inputs = [torch.randn(1, HEADS, length, WIDTH) for _ in range(3)]
        for causal in (False, True):
            attn = sq.create("lsh", WIDTH, rounds=ROUNDS, buckets=length // SIZE, bucket_size=SIZE, seed=0)
            width = 3 if causal else 2
            for busy in (False, True):
                other = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
                if busy:
                    other.start()
                with torch.no_grad():
                    total, found = phases(attn, inputs, causal, given.runs)
                    least = products(length, width, given.runs)
                if busy:
                    other.kill()
                    other.join()
                rest = total - sum(found.values())
                parts = "  ".join(f"{name} {ms:7.1f}" for name, ms in {**found, "rest": rest}.items())
                form, beside = "causal" if causal else "full", "beside a busy process" if busy else "alone"
                line = f"{length:6} {form:6} {beside:21} {total:8.1f} ms:  {parts}  products {least:7.1f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
