"""The mechanisms that choose keys, here and in the libraries that compute them on a CPU, in one interleaved run.

    python benchmarks/peers_choices.py --json results/peers_choices.json        (or: make peers)

B1 H8 D64 float32; forward, and forward + backward where the other library has one. Pairs, each only if it is installed:

* lsh against reformer-pytorch's LSHAttention: shared queries and keys, 4 rounds, chunks of 64, as many buckets as
  chunks, causal and not. By default reformer-pytorch lets a pair that meets in several rounds count several times,
  which is cheaper and another result; "once" is its way of counting it once, which is what lsh always computes;
* clustered and improved-clustered against pytorch-fast-transformers (C++): 25 and 100 clusters by signs (theirs has no
  other clustering), 31 bits, 10 iterations of K-means, the 32 best keys.

`ratio` is the other library's time over ours: above 1 ours is faster. A pair where ours is slower by more than the
tolerance makes the exit status 1. With `--clock cpu` time is that of the process on all its threads: use it, with one
thread, where other processes share the machine.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import versions
from torch import Tensor

import subquad
from subquad.lab import Timing, interleave, machine, write_json
from subquad.lab.measure import CLOCKS

Call = Callable[[], object]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
B, H, D = 1, 8, 64
ROUNDS, BUCKET_SIZE, BITS, ITERATIONS, TOPK = 4, 64, 31, 10, 32
# A pair this close is even: two runs of the same code differ by as much.
TOLERANCE = 1.05


def lsh_pairs(length: int, causal: bool) -> dict[str, Attend]:
    """lsh and LSHAttention; the latter takes (B H, L, D), made once, outside the measured time."""
    options = {"rounds": ROUNDS, "buckets": length // BUCKET_SIZE, "bucket_size": BUCKET_SIZE, "shared_qk": True}
    attends: dict[str, Attend] = {}
    for chunking in ("rank", "sorted") if causal else ("sorted",):
        attend = subquad.create("lsh", D, chunking=chunking, seed=0, **options)
        attends[f"subquad {chunking}"] = lambda q, k, v, attend=attend: attend(q, q, v, is_causal=causal)
    try:
        from reformer_pytorch import LSHAttention
    except ImportError:
        return attends
    for label, duplicates in (("reformer-pytorch", True), ("reformer-pytorch once", False)):
        other = LSHAttention(
            bucket_size=BUCKET_SIZE, n_hashes=ROUNDS, causal=causal, allow_duplicate_attention=duplicates
        ).eval()
        attends[label] = lambda q, k, v, other=other: other(q.flatten(0, 1), v.flatten(0, 1))[0]
    return attends


def clustered_pairs(name: str, length: int, clusters: int) -> dict[str, Attend]:
    """(improved-)clustered in both libraries; fast-transformers works on (B, L, H, D) and gets views of that."""
    options: dict[str, Any] = {"clusters": clusters, "bits": BITS, "iterations": ITERATIONS}
    if name == "improved-clustered":
        options["topk"] = TOPK
    attends: dict[str, Attend] = {"subquad": subquad.create(name, D, seed=0, clustering="hamming", **options)}
    try:
        from fast_transformers.attention import ClusteredAttention, ImprovedClusteredAttention
        from fast_transformers.masking import FullMask, LengthMask
    except ImportError:
        return attends
    kind = ClusteredAttention if name == "clustered" else ImprovedClusteredAttention
    other = kind(**options, attention_dropout=0.0).eval()
    mask, lengths = FullMask(length), LengthMask(torch.full((B,), length))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return other(q, k, v, mask, lengths, lengths).transpose(1, 2)

    return attends | {"fast-transformers": call}


def settings(length: int) -> dict[str, dict[str, Attend]]:
    """What is compared at one length: competitors by setting, ours first."""
    found = {f"lsh {form}": lsh_pairs(length, form == "causal") for form in ("full", "causal")}
    for name in ("clustered", "improved-clustered"):
        for clusters in (25, 100):
            found[f"{name} C={clusters}"] = clustered_pairs(name, length, clusters)
    return found


def as_call(attend: Attend, inputs: list[Tensor], backward: bool) -> Call:
    """Forward alone, or with the gradients of q, k and v for a gradient of ones."""

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = attend(*inputs)
            if backward:
                out.backward(torch.ones_like(out))
                for x in inputs:
                    x.grad = None

    return call


def one_setting(
    title: str, attends: dict[str, Attend], length: int, backward: bool, runs: int, clock: str
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(B, H, length, D, generator=generator).requires_grad_(backward) for _ in range(3)]
    calls = {name: as_call(attend, inputs, backward) for name, attend in attends.items()}
    timings = interleave(calls, runs=runs, seconds=30.0, clock=clock)
    form = "forward + backward" if backward else "forward"
    print(f"\n{title}, L={length}, {form}")
    rows = []
    for name, timing in timings.items():
        peer = not name.startswith("subquad")
        # Every form of ours has to hold against every form of theirs.
        slowest = max((timings[n] for n in timings if n.startswith("subquad")), key=lambda t: t.best)
        ratio = timing.best / slowest.best if peer else None
        rows.append({"name": name, **timing.as_dict(), "ratio": ratio})
        print(row_text(name, timing, ratio), flush=True)
    return {"setting": title, "length": length, "form": form, "competitors": rows}


def row_text(name: str, timing: Timing, ratio: float | None) -> str:
    line = f"  {name:24s} {1e3 * timing.best:9.1f} ms  spread {timing.spread:4.0%}"
    if ratio is None:
        return line
    return line + f"  ratio {ratio:5.2f}" + ("  ours is SLOWER" if ratio * TOLERANCE < 1 else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], help="multiples of 128")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs; the best counts")
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path, help="write every number to this file, after each setting")
    arguments = parser.parse_args()
    for length in arguments.lengths:
        if length < 128 or length % 128:  # reformer-pytorch takes pairs of whole chunks only
            parser.error(f"--lengths {length}: expected a multiple of {2 * BUCKET_SIZE}")
    torch.set_num_threads(arguments.threads)
    # Warnings of libraries that are years old say nothing about this comparison.
    warnings.filterwarnings("ignore", module="fast_transformers|reformer_pytorch|local_attention|axial|product_key")
    result: dict[str, Any] = {
        "shape": {"B": B, "H": H, "D": D, "dtype": "float32"},
        "choices": {"rounds": ROUNDS, "bucket_size": BUCKET_SIZE, "bits": BITS, "iterations": ITERATIONS, "topk": TOPK},
        "machine": machine(), "versions": versions(), "clock": arguments.clock, "complete": False, "settings": [],
    }  # fmt: skip
    try:
        for length in arguments.lengths:
            for title, attends in settings(length).items():
                if arguments.only not in title:
                    continue
                for backward in (False, True):
                    result["settings"].append(
                        one_setting(title, attends, length, backward, arguments.runs, arguments.clock)
                    )
                    if arguments.json:
                        write_json(arguments.json, result)
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    result["complete"] = True
    if arguments.json:
        write_json(arguments.json, result)
    ratios = [row["ratio"] for setting in result["settings"] for row in setting["competitors"]]
    slower = sum(1 for ratio in ratios if ratio is not None and ratio * TOLERANCE < 1)
    print(f"\n{slower} of {sum(r is not None for r in ratios)} pairs slower than the other library")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
