"""Where a token stands: added to its embedding (sinusoidal, learned) or turned into its queries and keys (rotary).

    sinusoidal  x_p + [sin(p w_0), cos(p w_0), sin(p w_1), ...],   w_i = 10000^{-2i/dim}       Vaswani et al., 2017
    learned     x_p + E_p
    rotary      (x_i, x_{i + D/2}) turned by the angle p b^{-2i/D}                             Su et al., RoFormer, 2021

A position is the number of real tokens before a token, so padding takes none, wherever it stands. Nothing here is a
buffer except what is learned: angles are computed for the positions at hand, in float64, so that the millionth token
is placed as well as the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..features.precision import compute_dtype
from ..kernels.checkpointing import tracing

__all__ = [
    "LearnedPositions",
    "Rotation",
    "SequenceStart",
    "SinusoidalPositions",
    "checked_start",
    "rotation_at",
    "token_positions",
]


# Where the tokens x (B, L, ...) with the padding key_mask (B, L) begin, (B,): of a sequence that is cut over processes.
SequenceStart = Callable[[Tensor, Tensor | None], Tensor]


def token_positions(length: int, key_mask: Tensor | None, device: torch.device, start: Tensor | None = None) -> Tensor:
    """Positions (L,), or (B, L) where sequences differ: the number of real tokens before each, from `start` (B,) on.
    Padding is given that of the real token before it: none that no real token has.

    >>> token_positions(3, torch.tensor([[False, True, True], [True, True, False]]), torch.device("cpu")).tolist()
    [[0, 0, 1], [0, 1, 1]]
    """
    positions = torch.arange(length, device=device) if key_mask is None else key_mask.cumsum(-1) - 1
    if start is not None:
        positions = start[:, None] + positions
    return positions if key_mask is None else positions.clamp(min=0)


def checked_start(start: object, batch: int, device: torch.device) -> Tensor | None:
    """Where sequences begin, (batch,) int64, from None, an integer or such a tensor; anything else is refused.

    >>> checked_start(5, 2, torch.device("cpu")).tolist()
    [5, 5]
    """
    if start is None:
        return None
    if isinstance(start, int) and not isinstance(start, bool):
        start = torch.full((batch,), start, device=device)
    if not isinstance(start, Tensor) or start.dtype not in (torch.int32, torch.int64):
        kind = start.dtype if isinstance(start, Tensor) else f"{start!r} ({type(start).__name__})"
        raise TypeError(f"start must be an integer or an int64 tensor of shape ({batch},), got {kind}")
    if tuple(start.shape) != (batch,):
        raise ValueError(f"start must have one position per sequence, shape ({batch},), got {tuple(start.shape)}")
    # Looking is free on a CPU; elsewhere it would make every call wait.
    if start.device.type == "cpu" and not tracing(start) and bool((start < 0).any()):
        raise ValueError(f"start must be 0 or more, got {start.tolist()}")
    return start.long()


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _angles(positions: Tensor, pairs: int, width: int, base: float) -> Tensor:
    """positions (...) -> (..., pairs): p base^{-2i/width}."""
    exponent = torch.arange(pairs, device=positions.device, dtype=_wide(positions.device)) * (-2.0 / width)
    return positions.unsqueeze(-1).to(exponent.dtype) * torch.pow(base, exponent)


class Rotation(NamedTuple):
    """cos and sin of the angles, (L, D/2) or (B, 1, L, D/2).

    >>> x = torch.randn(1, 2, 5, 8)
    >>> turned = rotation_at(torch.arange(5), 8)(x)
    >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    True
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, H, L, D) with each pair (i, i + D/2) turned; computed in float32 or above, returned in x's dtype."""
        dtype = compute_dtype(x)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        first, second = x.to(dtype).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotation_at(positions: Tensor, head_dim: int, base: float = 10000.0, dtype: torch.dtype | None = None) -> Rotation:
    """The rotation for positions (L,) or (B, L) and heads of (even) width `head_dim`.

    q and k turned by it have scores that depend on the distance of their positions only:

    >>> q, k = torch.randn(2, 1, 1, 1, 8)
    >>> near = [rotation_at(torch.tensor([p]), 8) for p in (3, 5)]
    >>> far = [rotation_at(torch.tensor([p]), 8) for p in (103, 105)]
    >>> torch.allclose((near[0](q) * near[1](k)).sum(), (far[0](q) * far[1](k)).sum(), atol=1e-5)
    True
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs, so head_dim={head_dim} must be even")
    angles = _angles(positions, head_dim // 2, head_dim, base)
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)
    least = torch.float32 if dtype is None else torch.promote_types(dtype, torch.float32)
    return Rotation(angles.cos().to(least), angles.sin().to(least))


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines; any length.

    >>> SinusoidalPositions(4)(torch.zeros(1, 2, 4), torch.arange(2))[0, 0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, L, dim) plus the encoding of positions (L,) or (B, L)."""
        angles = _angles(positions, (self.dim + 1) // 2, self.dim, 10000.0)
        encoding = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., : self.dim]
        return x + encoding.to(x.dtype)


class LearnedPositions(nn.Module):
    """One learned vector per position, for at most `max_length` of them.

    std: of the first vectors, as large as those of the embedding that they are added to: from much smaller ones a model
    takes long to learn where to look

    >>> LearnedPositions(4, 8)(torch.zeros(1, 9, 8), torch.arange(9))
    Traceback (most recent call last):
        ...
    ValueError: the sequence reaches 9 positions, but only max_length=4 are learned; ...
    """

    def __init__(self, max_length: int, dim: int, std: float = 1.0) -> None:
        super().__init__()
        self.max_length = max_length
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, L, dim) plus the vectors of positions (L,) or (B, L)."""
        self._check(positions)
        return x + nn.functional.embedding(positions, self.weight)

    def _check(self, positions: Tensor) -> None:
        # Without padding or a start the shape decides; otherwise the values have to be looked at.
        if positions.dim() == 1:
            needed = positions.shape[0]
        elif tracing(positions) or positions.is_meta:
            return
        else:
            needed = int(positions.max()) + 1
        if needed > self.max_length:
            raise ValueError(
                f"the sequence reaches {needed} positions, but only max_length={self.max_length} are learned; shorten "
                "the prompt, build the model with a larger max_length, or use positions='rotary' or 'sinusoidal', "
                "which have no limit"
            )
