"""Kinds of queries and keys that the spectra and the recommendations are about, from flat attention to sharp."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.lab.inputs import gaussian_inputs

__all__ = ["KINDS", "sample"]

KINDS: dict[str, str] = {
    "flat": "flat attention (isotropic, std 0.5)",
    "unit": "unit variance (isotropic, std 1)",
    "low-rank": "few directions (spectrum 1/i, sharp)",
    "nearby": "nearby tokens alike",
    "sharp": "sharp and isotropic (std 1.5)",
}
_LAWS = {"flat": (0.5, 0.0), "unit": (1.0, 0.0), "low-rank": (0.7, 1.0), "sharp": (1.5, 0.0)}
_MEMORY = 0.9  # of "nearby": how much of a token is that of the one before


def sample(kind: str, length: int, *, heads: int = 2, head_dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """q and k (1, heads, length, head_dim) of that kind.

    >>> q, k = sample("nearby", 50, heads=1, head_dim=8)
    >>> q.shape
    torch.Size([1, 1, 50, 8])
    """
    if kind != "nearby":
        std, anisotropy = _LAWS[kind]
        inputs = gaussian_inputs(length, heads=heads, head_dim=head_dim, std=std, anisotropy=anisotropy, seed=seed)
        return inputs.q, inputs.k
    # An autoregressive walk seen by both sides: a query looks like the keys around it and like nothing else.
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(heads, length, head_dim, generator=generator)
    walk, state = torch.empty_like(noise), noise[:, 0]
    for i in range(length):
        state = _MEMORY * state + (1.0 - _MEMORY**2) ** 0.5 * noise[:, i]
        walk[:, i] = state
    extra = 0.5 * torch.randn(2, heads, length, head_dim, generator=generator)
    q, k = 1.2 * (walk + extra).unsqueeze(1)
    return q, k
