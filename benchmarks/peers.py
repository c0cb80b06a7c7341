"""FAVOR+ here against the other libraries that compute it on a CPU, in one interleaved run.

    python benchmarks/peers.py --json results/peers.json        (or: make peers)

B1 H8 D64 M256 float32, forward, causal and not. Competitors, each only if it is installed:

* subquad, features="positive" (the features that the others compute) and its default, per backend;
* pytorch-fast-transformers: its Favor feature map in LinearAttention / CausalLinearAttention (C++);
* performer-pytorch: FastAttention; causal on a CPU is its causal_linear_attention_noncuda.

`share` is the rate of a competitor, counting 2[2MD + 2M(E+1)] operations per token and head, over the best matrix
product of the same run (2048^3, or a batch of tall ones). Ratios are what counts; milliseconds are this machine's.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import subquad
from subquad.lab import Timing, interleave, machine, write_json
from subquad.lab.peers import PEERS, installed_peers
from subquad.plain_text import first_line

Call = Callable[[], Tensor]
B, H, D, E, M = 1, 8, 64, 64, 256
OPERATIONS_PER_TOKEN = H * 2 * (2 * M * D + 2 * M * (E + 1))
FAVOR = ("fast-transformers favor", "performer-pytorch")
# One run of this takes about a minute at 16k tokens, and its best of five would be the same number.
SLOW = {("performer-pytorch", True, 16384)}


def ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Call]:
    """subquad by backend; a backend that this build does not have refuses, and is left out."""
    calls: dict[str, Call] = {}
    for label, options in {"positive": {"features": "positive"}, "default": {}}.items():
        attend = subquad.create("performer", head_dim=D, num_features=M, seed=0, **options).eval()
        for backend in ("chunked", "native"):

            def call(attend: Any = attend, backend: str = backend) -> Tensor:
                return attend(q, k, v, is_causal=causal, backend=backend)

            try:
                call()
            except (ValueError, RuntimeError) as error:
                if label == "positive" and q.shape[2] <= 1024:  # once per form is enough
                    print(f"subquad {backend}: left out: {first_line(error)}", file=sys.stderr)
            else:
                calls[f"subquad {label} {backend}"] = call
    return calls


def theirs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Call]:
    """FAVOR+ of the other libraries that are installed; what they need before a call is not part of its time."""
    return {peer.name: peer.prepare(q, k, v, causal, M) for peer in installed_peers() if peer.name in FAVOR}


def matrix_products() -> dict[str, tuple[Call, float]]:
    """The yardstick: a large square product, and a batch of the tall ones that attention consists of."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    tall, wide = torch.randn(H, 16384, D), torch.randn(H, D, M)
    return {
        "matmul 2048^3": (lambda: a @ b, 2.0 * 2048**3),
        "bmm 8x16384x64x256": (lambda: torch.bmm(tall, wide), 2.0 * H * 16384 * D * M),
    }


def one_setting(length: int, causal: bool, runs: int, seconds: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    q, k = (0.5 * torch.randn(B, H, length, D, generator=generator) for _ in range(2))
    v = torch.randn(B, H, length, E, generator=generator)
    calls: dict[str, Call] = {"softmax (torch)": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)}
    for family in (ours, theirs):
        calls |= family(q, k, v, causal)
    products = matrix_products()
    errors = {}
    if length <= 1024:  # that every competitor approximates softmax attention needs showing once
        exact = calls["softmax (torch)"]()
        errors = {name: float((call() - exact).norm() / exact.norm()) for name, call in calls.items()}
    once = frozenset(name for name in calls if (name, causal, length) in SLOW)
    every = calls | {name: call for name, (call, _) in products.items()}
    timings = interleave(every, runs=runs, seconds=seconds, once=once)
    gemm = max(flop / timings[name].best for name, (_, flop) in products.items())
    # Like against like: the ratio is to our fastest backend with the features that the others compute.
    fastest = min((n for n in calls if n.startswith("subquad positive")), key=lambda n: timings[n].best, default=None)
    print(f"\n{'causal' if causal else 'full'}, L={length}; matrix products {gemm / 1e9:.0f} GFLOP/s")
    rows = []
    for name in calls:
        row = describe(name, timings[name], length, gemm, timings[fastest].best if fastest else None)
        rows.append(row | ({"relative_error": errors[name]} if name in errors else {}))
        print(
            f"  {name:28s} {row['best_ms']:10.2f} ms  spread {row['spread']:5.0%}"
            + (f"  share {row['share_of_gemm']:4.0%}" if row["share_of_gemm"] is not None else " " * 12)
            + (f"  {row['times_ours']:7.2f}x ours" if fastest else "")
            + (f"  error {errors[name]:.2g}" if name in errors else ""),
            flush=True,
        )
    return {"length": length, "causal": causal, "gemm_gflops": gemm / 1e9, "competitors": rows,
            "products": {name: timings[name].as_dict() for name in products}}  # fmt: skip


def describe(name: str, timing: Timing, length: int, gemm: float, our_best: float | None) -> dict[str, Any]:
    linear = not name.startswith("softmax")
    return {
        "name": name,
        **timing.as_dict(),
        "share_of_gemm": OPERATIONS_PER_TOKEN * length / timing.best / gemm if linear else None,
        "times_ours": timing.best / our_best if our_best else None,
    }


def versions() -> dict[str, str | None]:
    return {
        "torch": torch.__version__,
        **{peer.package: peer.version for peer in PEERS},
        "subquad": subquad.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7, help="interleaved runs; the best counts")
    parser.add_argument("--seconds", type=float, default=60.0, help="end the runs of one setting after this long")
    parser.add_argument("--json", type=Path, help="write every number to this file, after each setting")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # Warnings of libraries that are years old say nothing about this comparison.
    warnings.filterwarnings("ignore", module="fast_transformers|performer_pytorch")
    load = machine()["load_1min"]
    if load is not None and load > 0.5:
        # Small parallel operations wait for the slowest thread: a neighbour on one core changes ratios, not only times.
        print(f"warning: load {load:.1f} before the start; on a busy machine these numbers are noise", file=sys.stderr)
    result: dict[str, Any] = {
        "shape": {"B": B, "H": H, "D": D, "E": E, "M": M, "dtype": "float32"},
        "machine": machine(), "versions": versions(), "complete": False, "settings": [],
    }  # fmt: skip
    try:
        with torch.no_grad():
            for causal in (False, True):
                for length in arguments.lengths:
                    result["settings"].append(one_setting(length, causal, arguments.runs, arguments.seconds))
                    if arguments.json:
                        write_json(arguments.json, result)
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    result["complete"] = True
    if arguments.json:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
