"""LSH attention: the native kernel beside the torch code, alone and beside a busy process.

    python benchmarks/lsh.py [--lengths 4096 16384] [--threads 2] [--runs 3]

B1 H8 D64 float32, 4 rounds, chunks of 64, length / 64 buckets; best of interleaved runs. `choose` is what both have in
common: hashes, sorting, chunk numbers.
"""

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

import subquad as sq
from subquad.kernels.lsh.definition import choose_chunks
from subquad.lab import interleave

HEADS, WIDTH, ROUNDS, SIZE = 8, 64, 4, 64


def spin(parent: int) -> None:
    while os.getppid() == parent:  # also where the benchmark is killed
        pass


@contextmanager
def busy(wanted: bool) -> Iterator[None]:
    """Another process that never rests."""
    other = multiprocessing.get_context("spawn").Process(target=spin, args=(os.getpid(),), daemon=True)
    if wanted:
        other.start()
    try:
        yield
    finally:
        if wanted:
            other.kill()
            other.join()


def calls(length: int, causal: bool) -> dict[str, Callable[[], None]]:
    attn = sq.create("lsh", WIDTH, rounds=ROUNDS, buckets=length // SIZE, bucket_size=SIZE, seed=0)
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))

    def forward(backend: str) -> None:
        with torch.no_grad():
            attn(q, k, v, is_causal=causal, backend=backend)

    def both(backend: str) -> None:
        attn(q, k, v, is_causal=causal, backend=backend).sum().backward()

    def choose() -> None:
        choose_chunks(attn._spec(q.dtype, causal), q[0].detach(), k[0].detach(), None, None)

    ways = {"forward": forward, "both": both}
    pairs = [(name, way) for way in ways for name in ("native", "chunked")]
    return {"choose": choose, **{f"{name} {way}": partial(ways[way], name) for name, way in pairs}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print("ms: choose | forward native, chunked, ratio | forward and backward native, chunked, ratio")
    for length in given.lengths:
        for causal in (False, True):
            for beside in (False, True):
                with busy(beside):
                    found = interleave(calls(length, causal), runs=given.runs, warmup=1)
                ms = {name: 1e3 * timing.best for name, timing in found.items()}
                print(
                    f"{length:6} {'causal' if causal else 'full':6} {'busy' if beside else 'alone':5} "
                    f"{ms['choose']:6.0f} | "
                    + " | ".join(
                        f"{ms[f'native {way}']:6.0f} {ms[f'chunked {way}']:6.0f} "
                        f"{ms[f'chunked {way}'] / ms[f'native {way}']:5.1f}x"
                        for way in ("forward", "both")
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
