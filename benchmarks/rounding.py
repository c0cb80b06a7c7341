"""Which products of attention may be formed from bfloat16 numbers: their error over that of rounding the output.

    python benchmarks/rounding.py [--length 1024] [--seeds 4] [--json results/rounding.json]

Inputs are bfloat16, so every backend rounds its output to that. Each column rounds something more (the projection; key
features; query features and state; all of these but the projection, and causal scores), in float32 otherwise, and gives
the largest error over all draws as a multiple of the error of the output's rounding alone; the contract allows 2.
`native` is the native backend, whatever it runs on here (SUBQUAD_NATIVE_ISA=bf16-emulated: csrc/pairs.h).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad.features.random import ExponentialFeatures
from subquad.kernels.native import library
from subquad.kernels.operator import Call
from subquad.kernels.windowed_linear import BACKENDS, WindowedLinear
from subquad.lab import machine, write_json


class Rounded(NamedTuple):
    """What is rounded to bfloat16 besides inputs and output."""

    weight: bool = False
    keys: bool = False
    read: bool = False
    scores: bool = False


CASES = {
    "projection": Rounded(weight=True),
    "phi V": Rounded(keys=True),
    "a S": Rounded(read=True),
    "phi V, a S, scores V": Rounded(keys=True, read=True, scores=True),
}


def low(x: Tensor, wanted: bool) -> Tensor:
    """x, rounded to bfloat16 where that is wanted."""
    return x.bfloat16().to(x.dtype) if wanted else x


def attend(phi: ExponentialFeatures, q: Tensor, k: Tensor, v: Tensor, causal: bool, rounded: Rounded) -> Tensor:
    """Attention of one head (L, D), (L, D), (L, E) in the dtype of q, normalised by what was not rounded."""
    form = phi.linear_form(q.shape[-1] ** -0.5)
    assert form is not None
    weight, bias = low(form.weight.to(q.dtype), rounded.weight)[0], form.bias.to(q.dtype)[0]
    if form.antithetic:
        weight, bias = torch.cat([weight, -weight]), torch.cat([bias, bias])
    keys = k @ weight.mT + bias + form.quadratic * (k * k).sum(-1, keepdim=True)
    top = keys.amax(-2, keepdim=True)
    phi_k, rows = torch.exp(keys - top), q @ weight.mT + bias + top
    phi_q = torch.exp(rows - rows.amax(-1, keepdim=True))
    if causal:
        scores = (phi_q @ phi_k.mT).tril()
        rough = (low(phi_q, rounded.read) @ low(phi_k, rounded.keys).mT).tril()
        return low(rough, rounded.scores) @ v / scores.sum(-1, keepdim=True)
    state = low(phi_k, rounded.keys).mT @ v
    return low(phi_q, rounded.read) @ low(state, rounded.read) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))


def by_native(phi: ExponentialFeatures, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The same by the native backend, from bfloat16 inputs."""
    q, k, v = (x[None, None] for x in (q, k, v))
    spec = WindowedLinear(phi, causal=causal)
    return BACKENDS["native"].attend(spec, Call(q.shape[-1] ** -0.5), q, k, v)[0, 0]


def measure(length: int, seeds: int) -> list[dict[str, Any]]:
    """Rows {norm, features, causal, case: ratio}: norm is the standard deviation of q and k, D = E = 64, M = 256."""
    found = []
    for norm in (0.5, 1.0, 2.0, 4.0):
        for features in ("hyperbolic", "positive"):
            for causal in (False, True):
                row: dict[str, Any] = {"norm": norm, "features": features, "causal": causal}
                for seed in range(seeds):
                    generator = torch.Generator().manual_seed(seed)
                    q, k, v = (torch.randn(length, 64, generator=generator) for _ in range(3))
                    q, k, v = (x.bfloat16() for x in (norm * q, norm * k, v))
                    phi = ExponentialFeatures(64, 256, features=features, projection="orthogonal", seed=seed)
                    exact = attend(phi, q.double(), k.double(), v.double(), causal, Rounded())

                    def error(out: Tensor, exact: Tensor = exact) -> float:
                        return float((out.bfloat16().double() - exact).norm())

                    floats = (q.float(), k.float(), v.float(), causal)
                    own = error(attend(phi, *floats, Rounded()))
                    ratios = {name: error(attend(phi, *floats, rounded)) / own for name, rounded in CASES.items()}
                    if not library.missing():
                        ratios["native"] = error(by_native(phi, q, k, v, causal)) / own
                    for name, ratio in ratios.items():
                        row[name] = max(ratio, row.get(name, 0.0))
                found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows = measure(options.length, options.seeds)
    names = [name for name in rows[0] if name not in ("norm", "features", "causal")]
    isa = None if library.missing() else library.load().subquad_isa().decode()
    print(f"{'norm, features, form':28}" + "".join(f"{name:>22}" for name in names) + f"   ({isa})")
    for row in rows:
        title = f"{row['norm']}, {row['features']}, {'causal' if row['causal'] else 'full'}"
        print(f"{title:28}" + "".join(f"{row[name]:22.2f}" for name in names))
    if options.json:
        write_json(options.json, {"machine": machine(), "instruction_set": isa, "rows": rows})


if __name__ == "__main__":
    main()
