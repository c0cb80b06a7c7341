"""Sums over keys, kept relative to their largest weight:

    S = sum_j phi(k_j) v_j^T,     z = sum_j phi(k_j),     out(q) = (phi(q)^T S) / (phi(q)^T z)

kept as S e^{-c}, z e^{-c} with c the running maximum of the keys' log scale, one per feature: large and small features
each keep their own exponent, so nothing overflows or underflows however long the sequence is. When c grows the sums are
rescaled by e^{c_old - c_new}, exactly; c itself is a constant for gradients, because no output depends on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..features.base import Features, exp_, weigh
from ..features.precision import compute_dtype

__all__ = ["Partial", "Sums", "finite", "join", "masked", "row_weights", "safe_divide"]


def finite(shift: Tensor) -> Tensor:
    """`shift` with its infinities replaced by 0: -inf - (-inf) is NaN, and where nothing was seen any shift will do."""
    return torch.where(torch.isinf(shift), torch.zeros_like(shift), shift)


def safe_divide(numerator: Tensor, normaliser: Tensor) -> Tensor:
    """numerator / normaliser, (..., L, E) by (..., L), and 0 where the normaliser is 0 (no key is visible).

    The gradient there is 0 as well, not NaN. NaN in the normaliser reaches the output.
    """
    empty = normaliser == 0
    divided = numerator / torch.where(empty, torch.ones_like(normaliser), normaliser).unsqueeze(-1)
    return divided.masked_fill(empty.unsqueeze(-1), 0.0)


def row_weights(queries: Features, log_max: Tensor) -> tuple[Tensor, Tensor]:
    """Query features (..., L, M) against keys kept relative to `log_max`, and the log shift (..., L) of each row.

    a = exp(l_q + c - shift),     shift = max_r (l_q + c)_r,     -inf where no key was seen
    """
    log_max = log_max.unsqueeze(-2)
    if queries.log_scale is None and log_max.shape[-1] == 1:
        assert queries.values is not None
        return queries.values, log_max.squeeze(-1).expand(queries.values.shape[:-1])
    shifted = log_max + (0.0 if queries.log_scale is None else queries.log_scale)
    row_max = shifted.detach().amax(-1, keepdim=True)
    weights = exp_(shifted.sub_(finite(row_max)))
    return weights if queries.values is None else queries.values * weights, row_max.squeeze(-1)


class Partial(NamedTuple):
    """Attention of some rows over some keys, before it is normalised.

    numerator:  (..., L, E)  sum_j A_ij v_j e^{-shift_i}
    normaliser: (..., L)     sum_j A_ij e^{-shift_i}
    shift:      (..., L)     about the largest log weight of the row, -inf where there is none; a constant for gradients
    """

    numerator: Tensor
    normaliser: Tensor
    shift: Tensor

    def finish(self) -> Tensor:
        """numerator / normaliser, and 0 where no key is visible."""
        return safe_divide(self.numerator, self.normaliser)


def join(a: Partial, b: Partial) -> Partial:
    """The same rows over the keys of `a` and of `b`, which must not overlap.

    >>> one = Partial(torch.tensor([[2.0]]), torch.tensor([1.0]), torch.tensor([0.0]))
    >>> other = Partial(torch.tensor([[4.0]]), torch.tensor([1.0]), torch.tensor([0.0]))
    >>> join(one, other).finish()
    tensor([[3.]])
    """
    shift = torch.maximum(a.shift, b.shift)
    mine, theirs = torch.exp(a.shift - finite(shift)), torch.exp(b.shift - finite(shift))
    return Partial(
        a.numerator * mine.unsqueeze(-1) + b.numerator * theirs.unsqueeze(-1),
        a.normaliser * mine + b.normaliser * theirs,
        shift,
    )


class Sums(NamedTuple):
    """The far part of a state: what remains of keys that are known by their features only.

    weighted:   (B, H, M, E)  S e^{-c}
    normaliser: (B, H, M)     z e^{-c}
    log_max:    (B, H, M) or (B, H, 1)   c; -inf before the first key
    """

    weighted: Tensor
    normaliser: Tensor
    log_max: Tensor

    @staticmethod
    def empty(batch: int, heads: int, features: int, width: int, like: Tensor, *, per_key_scale: str) -> Sums:
        """Sums of nothing, on `like`'s device, in `like`'s dtype but never below float32."""
        dtype = compute_dtype(like)
        columns = features if per_key_scale == "feature" else 1
        # Maps without a log scale never shift: their c is 0 from the start.
        start = 0.0 if per_key_scale == "none" else float("-inf")
        return Sums(
            weighted=like.new_zeros((batch, heads, features, width), dtype=dtype),
            normaliser=like.new_zeros((batch, heads, features), dtype=dtype),
            log_max=like.new_full((batch, heads, columns), start, dtype=dtype),
        )

    def absorb(self, keys: Features, v: Tensor) -> Sums:
        """With further tokens: keys (B, H, L, M), v (B, H, L, E). Masked keys have features of weight 0."""
        if keys.log_scale is None:
            weights, rho = weigh(keys, None), None
            log_max = self.log_max
        else:
            log_max = torch.maximum(self.log_max, keys.log_scale.detach().amax(-2))
            weights = weigh(keys, -finite(log_max).unsqueeze(-2))
            rho = torch.exp(self.log_max - finite(log_max))
        weighted = weights.transpose(-1, -2) @ v
        normaliser = weights.sum(-2)
        if rho is None:
            weighted, normaliser = self.weighted + weighted, self.normaliser + normaliser
        else:
            weighted = torch.addcmul(weighted, self.weighted, rho.unsqueeze(-1))
            normaliser = torch.addcmul(normaliser, self.normaliser, rho)
        return Sums(weighted, normaliser, log_max)

    def partial(self, queries: Features) -> Partial:
        """Numerator (B,H,L,E), normaliser (B,H,L) and the log shift (B,H,L) both were divided by, per query."""
        weights, shift = row_weights(queries, self.log_max)
        numerator = weights @ self.weighted
        # A product and a sum: matrix-vector products in batches are several times slower.
        normaliser = (weights * self.normaliser.unsqueeze(-2)).sum(-1)
        return Partial(numerator, normaliser, shift)

    def merge(self, later: Sums) -> Sums:
        """The sums of both."""
        log_max = torch.maximum(self.log_max, later.log_max)
        mine, theirs = torch.exp(self.log_max - finite(log_max)), torch.exp(later.log_max - finite(log_max))
        return Sums(
            self.weighted * mine.unsqueeze(-1) + later.weighted * theirs.unsqueeze(-1),
            self.normaliser * mine + later.normaliser * theirs,
            log_max,
        )


def masked(features: Features, hidden: Tensor | None) -> Features:
    """Features with weight 0 where `hidden` (broadcast over their last dimension)."""
    if hidden is None:
        return features
    values = None if features.values is None else features.values.masked_fill(hidden, 0.0)
    log_scale = None if features.log_scale is None else features.log_scale.masked_fill(hidden, float("-inf"))
    return Features(values, log_scale)
