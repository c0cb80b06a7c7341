"""Mechanisms as they are measured: with their defaults, seeded, built for the length, calibrated on other data."""

from __future__ import annotations

from typing import Any

import torch

import subquad

__all__ = ["INPUT_STD", "make_calibrated", "options_for"]

# Standard deviation of the queries and keys that times are measured on.
INPUT_STD = 0.5


def options_for(name: str, *, seed: int, length: int) -> dict[str, Any]:
    """What `create` is given besides the shape: what is random is seeded, what is built for a length gets it.

    >>> [options_for(name, seed=3, length=64) for name in ("linformer", "lsh", "linear")]
    [{'length': 64}, {'seed': 3}, {}]
    """
    known = subquad.describe(name)["options"]
    return {option: value for option, value in (("seed", seed), ("length", length)) if option in known}


def make_calibrated(name: str, head_dim: int, heads: int, length: int, seed: int, **options: Any) -> subquad.Mechanism:
    """The mechanism with these options beside `options_for`, calibrated on data of its own where it must be."""
    attend = subquad.create(name, head_dim, heads, **(options_for(name, seed=seed, length=length) | options)).eval()
    if attend.uses_calibration:
        generator = torch.Generator().manual_seed(seed + 1)
        attend.calibrate(*(INPUT_STD * torch.randn(2, 1, heads, 4 * head_dim, head_dim, generator=generator)))
    return attend
