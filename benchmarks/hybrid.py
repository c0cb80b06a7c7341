"""Hybrid attention (exact window and sinks, kernelised far field) against torch's softmax and its far field alone.

    python benchmarks/hybrid.py [--quick] [--json FILE] [--threads N]

Processor time, not wall time, and one thread unless told otherwise: on a machine that others use as well, that is what
can be compared. Whatever is compared runs alternately, best of several; a ratio above 1 means hybrid is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import subquad as sq
from subquad.lab import interleave, machine, write_json

HEADS, FEATURES, SINKS = 8, 256, 4


def best(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of processor time of each call, the best of `rounds` rounds through all of them."""
    return {name: timing.best for name, timing in interleave(calls, runs=rounds, clock="cpu").items()}


def trained(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    """Forward and backward of `run`."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    cotangent = torch.randn_like(inputs[2])
    return lambda: torch.autograd.grad(run(*leaves), leaves, cotangent)


def attention(lengths: list[int], rounds: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Forward, and forward and backward, full (32 tokens on each side) and causal (64 before)."""
    for dim in (64, 32):
        for causal in (False, True):
            window = 64 if causal else 32
            far = {"mechanism": "performer", "num_features": FEATURES, "seed": 0}
            hybrid = sq.create("hybrid", dim, window=window, sinks=SINKS, far=far)
            performer = sq.create("performer", dim, num_features=FEATURES, seed=0)
            runs: dict[str, Callable[..., Tensor]] = {
                "hybrid": lambda *x, m=hybrid, c=causal: m(*x, is_causal=c),
                "sdpa": lambda *x, c=causal: F.scaled_dot_product_attention(*x, is_causal=c),
                "performer": lambda *x, m=performer, c=causal: m(*x, is_causal=c),
            }
            for length in lengths:
                x = torch.randn(3, 1, HEADS, length, dim).unbind(0)
                with torch.no_grad():
                    forward = best({name: lambda r=run: r(*x) for name, run in runs.items()}, rounds)  # noqa: B023
                both = best({name: trained(run, *x) for name, run in runs.items()}, max(2, rounds // 2))
                row: dict[str, Any] = {"dim": dim, "causal": causal, "length": length}
                for what, seconds in (("forward", forward), ("both", both)):
                    row[f"{what}_ms"] = seconds["hybrid"] * 1e3
                    row[f"{what}_sdpa_over_hybrid"] = seconds["sdpa"] / seconds["hybrid"]
                    row[f"{what}_hybrid_over_performer"] = seconds["hybrid"] / seconds["performer"]
                save(row)
                line = f"  D{dim:<3d} {'causal' if causal else 'full':6s} L{length:<6d}"
                for what in ("forward", "both"):
                    line += (
                        f" {what:>8s} {row[f'{what}_ms']:8.1f} ms {row[f'{what}_sdpa_over_hybrid']:5.2f}x SDPA,"
                        f" {row[f'{what}_hybrid_over_performer']:4.2f} of performer's time"
                    )
                print(line, flush=True)


def taylor(lengths: list[int], rounds: int, save: Callable[[dict[str, Any]], None]) -> None:
    """A Taylor far field of degree 2, causal: in the kernels, in torch, and without the window."""
    for dim in (64, 16):
        hybrid = sq.create("hybrid", dim, window=64, sinks=SINKS, far="taylor")
        alone = sq.create("taylor", dim)
        runs: dict[str, Callable[..., Tensor]] = {
            "hybrid": lambda *x, m=hybrid: m(*x, is_causal=True),
            "torch": lambda *x, m=hybrid: m(*x, is_causal=True, backend="chunked"),
            "taylor": lambda *x, m=alone: m(*x, is_causal=True),
        }
        for length in lengths:
            x = torch.randn(3, 1, HEADS, length, dim).unbind(0)
            with torch.no_grad():
                forward = best({name: lambda r=run: r(*x) for name, run in runs.items()}, rounds)  # noqa: B023
            both = best({name: trained(run, *x) for name, run in runs.items()}, max(2, rounds // 2))
            row: dict[str, Any] = {"far": "taylor", "dim": dim, "length": length, "forward": forward, "both": both}
            save(row)
            parts = [
                f" {what:>8s} {t['hybrid'] * 1e3:8.1f} ms, {t['torch'] / t['hybrid']:4.1f}x torch,"
                f" {t['hybrid'] / t['taylor']:4.2f} of taylor's time"
                for what, t in (("forward", forward), ("both", both))
            ]
            print(f"  Taylor far field, D{dim:<3d} L{length:<6d}" + "".join(parts), flush=True)


def decode(rounds: int, save: Callable[[dict[str, Any]], None]) -> None:
    """One token after 300, window 64."""
    far = {"mechanism": "performer", "num_features": FEATURES, "seed": 0}
    hybrid = sq.create("hybrid", 64, window=64, sinks=SINKS, far=far)
    performer = sq.create("performer", 64, num_features=FEATURES, seed=0)
    for batch in (1, 16):
        x = torch.randn(3, batch, HEADS, 300, 64).unbind(0)
        q, k, v = (part[:, :, :1].contiguous() for part in x)
        with torch.inference_mode():
            states = {name: m.scan(*x)[1] for name, m in (("hybrid", hybrid), ("performer", performer))}
            calls: dict[str, Callable[[], object]] = {
                "hybrid": lambda: hybrid.scan(q, k, v, states["hybrid"]),  # noqa: B023
                "torch": lambda: hybrid.scan(q, k, v, states["hybrid"], backend="chunked"),  # noqa: B023
                "performer": lambda: performer.scan(q, k, v, states["performer"]),  # noqa: B023
            }
            seconds = best(calls, rounds * 50)
        row = {"batch": batch, **{f"{name}_us": value * 1e6 for name, value in seconds.items()}}
        save(row)
        print(
            f"  decode, batch {batch:<3d} {row['hybrid_us']:7.0f} us, {seconds['torch'] / seconds['hybrid']:.1f}x the "
            f"torch step, {seconds['hybrid'] / seconds['performer']:.2f} of performer's time",
            flush=True,
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short sequences, few rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write every number there, after each line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: dict[str, Any] = {"machine": machine(), "rows": []}

    def save(row: dict[str, Any]) -> None:
        results["rows"].append(row)
        if options.json:
            write_json(options.json, results)

    print(f"hybrid, H{HEADS} M{FEATURES} sinks {SINKS}, {options.threads} threads, processor time")
    rounds = 3 if options.quick else 8
    attention([512, 1024] if options.quick else [512, 1024, 2048, 4096], rounds, save)
    taylor([512] if options.quick else [512, 2048], rounds // 2, save)
    decode(rounds, save)


if __name__ == "__main__":
    main()
