"""How much the error differs from one draw to the next: where a few rare draws carry its mean, the mean says little.

The error of a draw is E = sum_p w_p d_p^2 over pairs p of a query and a key, w_p their share in it and d_p the relative
error of m averaged directions with the variance G_p / m. Beyond what normal d_p would give, its relative variance is

    V = 1/m sum_pq w_p w_q cum(d_p, d_p, d_q, d_q) / (G_p G_q)

with d_p = f_p - 1 of one direction now: it is e^{4 |Z|^2}-large for one pair of large norm alone, and small where many
pairs with different directions share the error. All moments E[f_p^a f_q^b] are exponentials (`covariance.py` has the
notation), so nothing is drawn; p and q come from a sample in proportion to w.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .sampling import pick_by_size

__all__ = ["draw_variance"]

PAIRS = 192
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


def draw_variance(z: Tensor, own: Tensor, a_l: Tensor, *, paired: bool, rows: Tensor, keys: Tensor) -> float:
    """V times m for Z (n, K, D) of n queries, `own` (n, K) >= 0 their pairs' contributions to the error of the sample.

    a_l:  (D,) A_l per direction, see `covariance.py`
    rows: (n,) queries that each stands for;  keys: (n, K) keys that each stands for. Two pairs of one sampled query
          are of one query in reality only once in that many.
    """
    count = z.shape[1]
    shares = torch.nan_to_num(own, nan=0.0, posinf=1e300).clamp(min=0.0) * rows.unsqueeze(1) * keys
    index, multiples = pick_by_size(shares.flatten(), PAIRS)
    row, key = index // count, index % count
    w = shares.flatten()[index] * multiples
    if not float(w.sum()) > 0:
        return 0.0
    w = w / w.sum()
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
    same = torch.eye(len(index), dtype=torch.bool)
    alone = 1 / (rows[row] * keys[row, key].clamp(min=1.0) * multiples)  # hidden keys weigh nothing below
    thinned = torch.where(same, alone.unsqueeze(1), thinned)
    weights = w.unsqueeze(1) * w * thinned
    return float((weights * ratio)[weights > 0].sum()) / float(weights.sum())
