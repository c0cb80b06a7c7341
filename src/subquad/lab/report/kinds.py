"""Kinds of queries and keys that the spectra and the recommendations are about: four synthetic, one real."""

from __future__ import annotations

import torch

from subquad.lab.captured import captured_inputs
from subquad.lab.inputs import Inputs, gaussian_inputs

__all__ = ["KINDS", "REAL", "sample"]

REAL = "real"
KINDS: dict[str, str] = {
    REAL: "a real model (sentence encoder)",
    "flat": "flat attention (isotropic, std 0.5)",
    "unit": "unit variance (isotropic, std 1)",
    "low-rank": "few directions (spectrum 1/i, sharp)",
    "nearby": "nearby tokens alike",
}
_LAWS = {"flat": (0.5, 0.0), "unit": (1.0, 0.0), "low-rank": (0.7, 1.0)}
_MEMORY = 0.9  # of "nearby": how much of a token is that of the one before


def sample(kind: str, length: int, *, heads: int = 2, head_dim: int = 64, seed: int = 0) -> Inputs:
    """q and k (1, heads, length, head_dim) of that kind; what was captured has a width, heads and values of its own,
    and no more than 1024 tokens.

    >>> sample("nearby", 50, heads=1, head_dim=8).q.shape, sample("real", 500).v.shape
    (torch.Size([1, 1, 50, 8]), torch.Size([1, 6, 500, 32]))
    """
    if kind == REAL:
        whole = captured_inputs()
        assert whole.v is not None
        q, k, v = (x[:, :, :length] for x in (whole.q, whole.k, whole.v))
        return Inputs(q, k, v, source=whole.source)
    if kind != "nearby":
        std, anisotropy = _LAWS[kind]
        return gaussian_inputs(length, heads=heads, head_dim=head_dim, std=std, anisotropy=anisotropy, seed=seed)
    # An autoregressive walk seen by both sides: a query looks like the keys around it and like nothing else.
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(heads, length, head_dim, generator=generator)
    walk, state = torch.empty_like(noise), noise[:, 0]
    for i in range(length):
        state = _MEMORY * state + (1.0 - _MEMORY**2) ** 0.5 * noise[:, i]
        walk[:, i] = state
    extra = 0.5 * torch.randn(2, heads, length, head_dim, generator=generator)
    q, k = 1.2 * (walk + extra).unsqueeze(1)
    return Inputs(q, k, source=KINDS[kind])
