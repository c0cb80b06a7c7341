"""What any approximation must beat: uniform attention (the mean of the values), and polynomials of the scores.

    uniform     1/n                                                    no features at all
    degree-1    (1 + s) e^{xbar.(y - ybar)}                            1 + D features
    hermite-2   (1 - tau^2/2 + s + s^2/2) e^{xbar.(y - ybar)}          1 + D + D(D+1)/2 features
    taylor-2    1 + x.y + (x.y)^2/2                                    the same without calibration

with s = (x - xbar).(y - ybar), tau_i^2 = (x_i - xbar)^T Cov(y) (x_i - xbar). They have no randomness. An error curve of
random features without these beside it says little: on flat attention all of them are better than any number of random
features, and on sharp attention a random-feature map can be worse than the mean of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mechanisms import create
from .candidates import calibrated
from .piece import Piece

__all__ = ["BASELINES", "baseline_errors", "uniform_attention", "uniform_error"]

BASELINES = ("uniform", "degree-1", "hermite-2", "taylor-2")


def uniform_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """The mean of the visible values, whatever q and k are; 0 where nothing is visible.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E), key_mask (B, S) bool -> (B, Hq, L, E), of v's dtype

    >>> q, k = torch.randn(2, 1, 1, 3, 2)
    >>> v = torch.tensor([0.0, 2.0, 7.0]).view(1, 1, 3, 1)
    >>> uniform_attention(q, k, v).flatten().tolist(), uniform_attention(q, k, v, is_causal=True).flatten().tolist()
    ([3.0, 3.0, 3.0], [0.0, 1.0, 3.0])
    """
    # Whole numbers and sums in at least float32: half precision cannot count to a few thousand.
    values = v.to(torch.promote_types(v.dtype, torch.float32))
    visible = torch.ones(v.shape[2], dtype=torch.bool, device=v.device) if key_mask is None else key_mask.unsqueeze(1)
    if key_mask is not None:
        values = values.masked_fill(~visible.unsqueeze(-1), 0.0)
    if is_causal:
        total, count = values.cumsum(2), visible.cumsum(-1)
    else:
        total, count = values.sum(2, keepdim=True), visible.sum(-1, keepdim=True)
    mean = (total / count.clamp(min=1).unsqueeze(-1)).to(v.dtype)
    return mean.repeat_interleave(q.shape[1] // k.shape[1], 1).expand(*q.shape[:3], v.shape[-1])


def uniform_error(piece: Piece) -> float:
    """The error of the mean of the values: what is not below it is of no use."""
    return piece.error(lambda q, k, v, scale, query_mask, **call: uniform_attention(q, k, v, **call))


def baseline_errors(piece: Piece, q: Tensor, k: Tensor, key_mask: Tensor | None = None) -> dict[str, float]:
    """Errors of every one of BASELINES on the piece; q and k are what the calibrated ones may see."""
    polynomials = {
        "degree-1": {"degree": 1, "center": True},
        "hermite-2": {"degree": 2, "hermite": True},
        "taylor-2": {"degree": 2},
    }
    found = {"uniform": uniform_error(piece)}
    for name, options in polynomials.items():
        attend = create("taylor", q.shape[-1], q.shape[1], k.shape[1], **options)
        found[name] = piece.error(calibrated(attend, q, k, key_mask))
    return found
