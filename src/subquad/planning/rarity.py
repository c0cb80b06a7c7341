"""How much the error differs from one draw to the next: where a few rare draws carry its mean, the mean says little.

The error of a draw is E = sum_p w_p d_p^2 over pairs p of a query and a key, w_p their share in it and d_p the relative
error of m averaged directions with the variance G_p / m. Beyond what normal d_p would give, its relative variance is

    V = 1/m sum_pq w_p w_q cum(d_p, d_p, d_q, d_q) / (G_p G_q)

with d_p = f_p - 1 of one direction now: it is e^{4 |Z|^2}-large for one pair of large norm alone, and small where many
pairs with different directions share the error. All moments E[f_p^a f_q^b] are exponentials (`covariance.py` has the
notation), so nothing is drawn; p and q come from a sample in proportion to w.

The same moments say how far the first order reaches. With e = sum_l a_l d_l the row is a_j (d_j - e) / (1 + e): the
next order changes its squared error by 3 E[e^2] - 2 T, where

    T = sum_p w_p sum_l a_l cum(d_p, d_p, d_l) / G_p        l: the keys of p's own query; 1/m of that of one direction

is positive for exponential features: a draw that makes a weight far too large makes the row's sum too large with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sampling import pick_by_size

__all__ = ["draw_variance", "normaliser_skew"]

PAIRS = 192
SKEW_PAIRS = 48  # each of them meets all keys of its query
# cosh^a as a sum of c e^{b x}: pairs of opposite directions.
_PAIRED = {0: ((1.0, 0),), 1: ((0.5, 1), (0.5, -1)), 2: ((0.25, 2), (0.5, 0), (0.25, -2))}
_SINGLE = {a: ((1.0, a),) for a in range(3)}


def _moment(z: Tensor, a_l: Tensor, paired: bool, a: int, b: int) -> Tensor:
    """E[f_p^a f_q^b] (P, P) for Z (P, D), A_l (D,)."""
    s, u = 1 - 4 * a_l, 1 - 4 * (a + b) * a_l
    weight = ((a + b) * torch.log(s) - torch.log(u)).sum() / 2
    own = z.square().sum(-1)
    tilted = z * torch.sqrt(s / u)
    inner = tilted @ tilted.mT
    norm = inner.diagonal()
    terms = _PAIRED if paired else _SINGLE
    base = weight - (a * own.unsqueeze(1) + b * own) / 2
    total = torch.zeros_like(inner)
    for c, first in terms[a]:
        for e, second in terms[b]:
            square = first * first * norm.unsqueeze(1) + second * second * norm + 2 * first * second * inner
            total += c * e * torch.exp(base + square / 2)
    return total


def _largest(own: Tensor, rows: Tensor, keys: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Pairs in proportion to what they contribute: row, key, share (P,) and the multiple that each stands for."""
    shares = torch.nan_to_num(own, nan=0.0, posinf=1e300).clamp(min=0.0) * rows.unsqueeze(1) * keys
    index, multiples = pick_by_size(shares.flatten(), most)
    w = shares.flatten()[index] * multiples
    if not float(w.sum()) > 0:
        return None
    return index // own.shape[1], index % own.shape[1], w / w.sum(), multiples


def normaliser_skew(
    z: Tensor, own: Tensor, weights: Tensor, a_l: Tensor, *, paired: bool, rows: Tensor, keys: Tensor
) -> float:
    """T times m; arguments as of `draw_variance`, and `weights` (n, K) the exact attention weights."""
    picked = _largest(own, rows, keys, SKEW_PAIRS)
    if picked is None:
        return 0.0
    row, key, w, _ = picked
    terms = _PAIRED if paired else _SINGLE
    s = 1 - 4 * a_l
    pair, others = z[row, key], z[row]  # (P, D), (P, K, D)
    squares = others.square()
    pair_norm, other_norm = pair.square().sum(-1, keepdim=True), squares.sum(-1)

    def moment(a: int, b: int) -> Tensor:
        """E[f_p^a f_l^b] (P, K)."""
        u = 1 - 4 * (a + b) * a_l
        weight = ((a + b) * torch.log(s) - torch.log(u)).sum() / 2
        tilted = pair * (s / u)
        inner = (others @ tilted.unsqueeze(-1)).squeeze(-1)
        first_norm = (tilted * pair).sum(-1, keepdim=True)
        second_norm = squares @ (s / u)
        base = weight - (a * pair_norm + b * other_norm) / 2
        total = torch.zeros_like(inner)
        for c, first in terms[a]:
            for e, second in terms[b]:
                square = first * first * first_norm + second * second * second_norm + 2 * first * second * inner
                total += c * e * torch.exp(base + square / 2)
        return total

    second = moment(2, 0)
    third = moment(2, 1) - second - 2 * moment(1, 1) + 2
    each = ((weights * keys)[row] * third).sum(-1) / (second[:, 0] - 1).clamp(min=1e-12)
    return float((w * torch.nan_to_num(each, nan=math.inf, posinf=math.inf)).sum())


def draw_variance(z: Tensor, own: Tensor, a_l: Tensor, *, paired: bool, rows: Tensor, keys: Tensor) -> float:
    """V times m for Z (n, K, D) of n queries, `own` (n, K) >= 0 their pairs' contributions to the error of the sample.

    a_l:  (D,) A_l per direction, see `covariance.py`
    rows: (n,) queries that each stands for;  keys: (n, K) keys that each stands for. Two pairs of one sampled query
          are of one query in reality only once in that many.
    """
    picked = _largest(own, rows, keys, PAIRS)
    if picked is None:
        return 0.0
    row, key, w, multiples = picked
    z = z[row, key]

    def f(a: int, b: int) -> Tensor:
        return _moment(z, a_l, paired, a, b)

    second = f(2, 0)  # (P, P), the same in every column
    variance = second[:, 0] - 1
    both = f(1, 1)
    mixed = f(2, 1)
    central = f(2, 2) - 2 * (mixed + mixed.mT) + second + second.mT + 4 * both - 3
    gaussian = variance.unsqueeze(1) * variance + 2 * (both - 1).square()
    ratio = (central - gaussian) / (variance.unsqueeze(1) * variance).clamp(min=1e-12)
    # Almost no variance: the difference of moments is rounding, and the limit (normal squares) has cumulants of 12.
    ratio = torch.where((variance < 1e-3).unsqueeze(1) | (variance < 1e-3), 12.0, ratio)
    ratio = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf)
    same_row = row.unsqueeze(1) == row
    thinned = torch.where(same_row, 1 / rows[row].unsqueeze(1), 1.0)
    same = torch.eye(len(row), dtype=torch.bool)
    alone = 1 / (rows[row] * keys[row, key].clamp(min=1.0) * multiples)  # hidden keys weigh nothing below
    thinned = torch.where(same, alone.unsqueeze(1), thinned)
    weights = w.unsqueeze(1) * w * thinned
    return float((weights * ratio)[weights > 0].sum()) / float(weights.sum())
