"""Queries and keys to study: Gaussian ones, or the user's own from a safetensors file.

    q, k ~ std * N(0, diag(w^2)),   w_i proportional to i^-anisotropy,   mean of w_i^2 = 1

The error of an approximation is a property of its input, so every study says which law it used. `std` is the root mean
square of the entries whatever the anisotropy: norms stay the same, and the more anisotropic, the sharper the attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Inputs", "gaussian_inputs", "read_inputs"]


@dataclass(frozen=True)
class Inputs:
    """q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E) or None, key_mask (B, S) or None, and where they are from."""

    q: Tensor
    k: Tensor
    v: Tensor | None = None
    key_mask: Tensor | None = None
    source: str = ""


def gaussian_inputs(
    length: int,
    *,
    heads: int = 2,
    head_dim: int = 64,
    batch: int = 1,
    std: float = 0.5,
    anisotropy: float = 0.0,
    seed: int = 0,
) -> Inputs:
    """q and k (batch, heads, length, head_dim), Gaussian with the spectrum of this module's formula.

    >>> inputs = gaussian_inputs(1000, head_dim=16, std=0.5, anisotropy=1.0)
    >>> inputs.q.shape, round(float(inputs.q.square().mean().sqrt()), 1)
    (torch.Size([1, 2, 1000, 16]), 0.5)
    """
    for name, value in (("length", length), ("heads", heads), ("head_dim", head_dim), ("batch", batch)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: a positive whole number is expected")
    if not math.isfinite(std) or std <= 0:
        raise ValueError(f"std={std!r}: a positive standard deviation of the entries of q and k is expected")
    if not math.isfinite(anisotropy) or anisotropy < 0:
        raise ValueError(f"anisotropy={anisotropy!r}: 0 (isotropic) or the power of a falling spectrum is expected")
    weights = torch.arange(1, head_dim + 1, dtype=torch.float64) ** -anisotropy
    weights = (std * weights / weights.square().mean().sqrt()).float()
    generator = torch.Generator().manual_seed(seed)
    q, k = (weights * torch.randn(batch, heads, length, head_dim, generator=generator) for _ in range(2))
    kind = "isotropic" if anisotropy == 0 else f"spectrum i^-{anisotropy:g}"
    return Inputs(q, k, source=f"Gaussian q and k of std {std:g}, {kind}, B{batch} H{heads} L{length} D{head_dim}")


def _tensor(stored: dict[str, Any], name: str, path: Path) -> Tensor:
    x: Tensor = stored[name]
    if x.dim() == 3:
        x = x.unsqueeze(0)
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(
            f"{path}: {name!r} is {tuple(stored[name].shape)} {stored[name].dtype}; floating-point "
            "(batch, heads, length, width) or (heads, length, width) is expected"
        )
    return x.float()


def read_inputs(path: str | Path, prefix: str = "") -> Inputs:
    """The tensors q, k and, if there are any, v and key_mask of a safetensors file; `prefix` stands before each name.

    A file of several layers names its tensors `layer0.q`, `layer0.k`, ...: then `prefix="layer0"`.
    """
    path = Path(path)
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"reading {path} needs safetensors, which is not installed: pip install 'subquad[hf]'"
        ) from None
    if not path.is_file():
        found = "this is a folder" if path.is_dir() else "there is no such file"
        raise ValueError(f"{path}: {found}; a safetensors file with tensors q and k is expected")
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from None
    if prefix and prefix + "q" not in stored and f"{prefix}.q" in stored:
        prefix += "."
    if missing := [prefix + name for name in ("q", "k") if prefix + name not in stored]:
        there = ", ".join(sorted(stored)[:12]) + (", ..." if len(stored) > 12 else "")
        raise ValueError(
            f"{path}: no tensor {' and '.join(map(repr, missing))}; the file has {there or 'no tensors'}. "
            "Name them q and k, or give what stands before these names as the prefix, like layer0. for layer0.q"
        )
    q, k = _tensor(stored, prefix + "q", path), _tensor(stored, prefix + "k", path)
    v = _tensor(stored, prefix + "v", path) if prefix + "v" in stored else None
    mask = stored.get(prefix + "key_mask")
    if mask is not None and mask.dtype != torch.bool:
        mask = mask != 0
    shape = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    return Inputs(q, k, v, mask, source=f"{path}{f' ({prefix}*)' if prefix else ''}, {shape}")
