"""Sparse attention: exact softmax over a fixed pattern of keys.

    out_i = sum_{j in N(i)} e^{scale q_i.k_j} v_j / sum_{j in N(i)} e^{scale q_i.k_j}

    strided   N(i) = {|i - j| <= stride}  or  {(i - j) mod stride = 0}
    fixed     N(i) = {j in the block of i}  or  {j among the last `summary` tokens of a block},  blocks of `stride`
    causal    j <= i as well

i and j are ranks among the real tokens; a token that is not real is seen by nobody, and its output is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Spec", "visible"]


class Spec(NamedTuple):
    """stride, and what every block shows to all: 0 for the strided pattern."""

    stride: int
    summary: int
    causal: bool


def visible(spec: Spec, real: Tensor) -> Tensor:
    """N(i) as a mask (B, L, L), from which tokens are real (B, L)."""
    rank = real.cumsum(-1) - 1
    row, column = rank[:, :, None], rank[:, None, :]
    if spec.summary:
        shown = column % spec.stride >= spec.stride - spec.summary
        seen = (row // spec.stride == column // spec.stride) | shown
    else:
        seen = ((row - column).abs() <= spec.stride) | ((row - column) % spec.stride == 0)
    if spec.causal:
        seen = seen & (column <= row)
    return seen & real[:, :, None] & real[:, None, :]
