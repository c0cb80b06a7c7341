"""The error of attention made with random features, in closed form: no draw, no run.

For one query x with exact weights a_j, Z_j = x + y_j (trigonometric: x - y_j) and the relative errors d_j of the
kernel estimates, the normalised row is a_j (1 + d_j) / sum_l a_l (1 + d_l), so with C_jl = E[d_j d_l], to first order,

    E |dA_i|^2 = sum_j a_j^2 [C_jj - 2 (C a)_j + a^T C a]

C = G / m_w - c g, with m_w directions, G the covariance of one direction and g what orthogonal rows take off it:

    1 + G_jl = s^d t^{-d/2} exp(s |Z_j + Z_l|^2 / (2 t) - (|Z_j|^2 + |Z_l|^2) / 2),   s = 1 - 4A, t = 1 - 8A
    g_jl     = - sum_{l = 2, 4, ...} N_l P_l(0) b_l(|Z_j|^2) b_l(|Z_l|^2) P_l(cos(Z_j, Z_l))
    b_l(n)   = (n/2)^{l/2} e^{-n/2} Gamma(a)/Gamma(b) 1F1(a; b; n/2),  a = (d + l)/2, b = d/2 + l       exponential
    b_l(n)   = (-1)^{l/2} (n/2)^{l/2} Gamma(a)/Gamma(b) 1F1(l/2; b; n/2)                                trigonometric

(A = 0: positive features; pairs of a direction with its opposite, as in hyperbolic and trigonometric features, average
G over +-Z_l.) g is exact: the mean of a feature over the norm of its direction is a function on the sphere, here in
Gegenbauer polynomials P_l of dimension d with P_l(1) = 1 and their multiplicities N_l; on the diagonal it sums to the
closed form of `features/coupling.py`.

It is the first order of an expansion. Where it says at most `RELIABLE`, and no draws too rare to be met carry it, the
mean over many draws is within 20 % of it; elsewhere the error is better measured. The square of an exponential feature
has the relative variance e^{4 |Z|^2}, that of a mean over m_w of them e^{4 |Z|^2} / m_w: RARE is the most of it, with
|Z|^2 as the keys contribute to the error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..features.coupling import poisson_mean, poisson_terms
from ..features.hadamard import next_power_of_two
from ..features.random import ExponentialFeatures, TrigFeatures
from ..features.variance import block_coefficient
from ..mechanisms.base import Mechanism
from ..mechanisms.performer import Performer
from .piece import Piece, pick_rows

__all__ = ["RELIABLE", "closed_form", "refusal"]

RELIABLE = 0.03
MOST_ROWS = 24  # per head of a sequence; the rest is like them
MOST_KEYS = 512  # pairs of keys are summed: more of them take longer than a run
NODES = 256  # of the tables of b_l
DEGREES = 10
NORM_CAP = 200.0  # of |Z|^2: beyond it the error is far from what the first order can say, whatever rows share
RARE = 4.0
STEADY = 0.02  # variance of a trigonometric normaliser that keeps 0 seven deviations away


def refusal(attend: Mechanism, piece: Piece) -> str | None:
    """Why there is no closed form for this mechanism on this input, or None where there is one."""
    if not isinstance(attend, Performer):
        return f"{attend.name} has no closed form"
    phi = attend.feature_map
    if not isinstance(phi, ExponentialFeatures | TrigFeatures) or attend.kernel != "softmax":
        return "it estimates another kernel than softmax"
    if getattr(phi, "features", "") == "sderf":
        return "SDERF has one scale per direction"
    if attend.norms != "chi":
        return f"norms={attend.norms!r} is biased, and the closed form is of unbiased rows"
    if attend.projection == "simplex" or (attend.projection == "hadamard" and (attend.blocks or 3) < 3):
        return f"projection={attend.projection!r} as it is here is far from orthogonal rows"
    if piece.tokens > MOST_KEYS:
        return f"{piece.tokens} keys make too many pairs (at most {MOST_KEYS})"
    if piece.sequences < piece.given or piece.sequences * piece.tokens > 2 * MOST_KEYS:
        return f"{piece.given} sequences of {piece.tokens} keys are more than it looks at"
    return None


def _multiplicity(dim: int, degree: int) -> float:
    """N_l: the number of spherical harmonics of this degree in this dimension."""
    if dim == 2:
        return 2.0
    return (2 * degree + dim - 2) / (dim - 2) * math.comb(degree + dim - 3, degree)


class _Gain:
    """g between the keys of a row, for rows whose |Z|^2 are at most `top`."""

    def __init__(self, width: int, trig: bool, top: float) -> None:
        self.width, self.top = width, max(top, 1e-12)
        y = self.top / 2 * torch.linspace(0, 1, NODES, dtype=torch.float64) ** 2
        k = torch.arange(poisson_terms(y), dtype=torch.float64)
        self.tables: dict[int, Tensor] = {}  # b_l / (n/2)^{l/2}, which is smooth, by degree
        for degree in range(2, DEGREES + 1, 2):
            low, high = (width + degree) / 2, width / 2 + degree
            if trig:  # 1F1(l/2; b; y) as e^y times a Poisson mean of (l/2)_k / (b)_k
                log = (
                    torch.lgamma(k + degree / 2) - math.lgamma(degree / 2) - torch.lgamma(k + high) + math.lgamma(high)
                )
                table = poisson_mean(y, log.exp()) * torch.exp(y + math.lgamma(low) - math.lgamma(high))
                self.tables[degree] = table if degree % 4 == 0 else -table
            else:
                self.tables[degree] = poisson_mean(y, torch.exp(torch.lgamma(k + low) - torch.lgamma(k + high)))

    def matrix(self, inner: Tensor, norms: Tensor) -> Tensor:
        """g (K, K) from the products Z_j.Z_l (K, K) and |Z_j|^2 (K,)."""
        root = norms.clamp(min=1e-300).sqrt()
        cosine = inner / (root.unsqueeze(1) * root)
        place = (norms / self.top).sqrt().clamp(max=1.0) * (NODES - 1)
        below = place.long().clamp(max=NODES - 2)
        total = torch.zeros_like(inner)
        dim = self.width
        before, now = torch.ones_like(inner), cosine
        zero_before, zero = 1.0, 0.0  # the same polynomials at 0
        for degree in range(2, DEGREES + 1):
            up, down = 2 * degree + dim - 4, degree - 1
            before, now = now, (up * cosine * now - down * before) / (degree + dim - 3)
            zero_before, zero = zero, -down * zero_before / (degree + dim - 3)
            if degree % 2 == 0:
                table = self.tables[degree]
                b = (table[below] + torch.diff(table)[below] * (place - below)) * (norms / 2) ** (degree / 2)
                total -= _multiplicity(dim, degree) * zero * (b.unsqueeze(1) * b) * now
        return total


def closed_form(attend: Performer, piece: Piece) -> tuple[float, tuple[float, ...], bool]:
    """|A' - A|^2 / |A|^2 over all heads, of each head, and whether it holds; what `refusal` names is not for it."""
    phi = attend.feature_map
    trig = isinstance(phi, TrigFeatures)
    paired = trig or bool(getattr(phi, "antithetic", False))
    dim = attend.head_dim
    width = next_power_of_two(dim) if attend.projection == "hadamard" else dim
    directions = attend.num_features // 2 if paired else attend.num_features
    coefficient = 0.0 if attend.projection == "gaussian" or width == 1 else block_coefficient(directions, width)
    scale, is_causal, mask = piece.scale, piece.call["is_causal"], piece.call["key_mask"]
    root = math.sqrt(abs(scale))
    heads = piece.q.shape[1]
    group = heads // piece.k.shape[1]
    wrong, whole = torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, dtype=torch.float64)
    steady = True
    carried = norms_carried = 0.0
    for item in range(piece.sequences):
        real = piece.tokens if mask is None else int(mask[item].sum())
        for head in range(heads):
            kv = head // group
            queries = piece.q[item, head] if piece.cross else piece.q[item, head, :real]
            rows, stands = pick_rows(queries, MOST_ROWS, is_causal=is_causal)
            x = math.copysign(root, scale) * queries[rows].double()
            y = root * piece.k[item, kv, :real].double()
            scores = x @ y.mT
            if is_causal:
                scores.masked_fill_(torch.arange(real) > rows.unsqueeze(1), -math.inf)
            a = torch.softmax(scores, -1)
            if getattr(attend, "center", False):
                means = phi.calibration
                assert means is not None
                x = x - math.copysign(root, scale) * means.query_mean[kv].cpu().double()
                y = y - root * means.key_mean[kv].cpu().double()
            stretch = torch.zeros((), dtype=torch.float64)
            if getattr(phi, "features", "") == "oprf":
                stored = torch.as_tensor(phi.a).detach().cpu().double()
                stretch = stored[kv if len(stored) > 1 else 0].flatten()[0]
            s, t = 1 - 4 * stretch, 1 - 8 * stretch
            weight = dim * (torch.log(s) - torch.log(t) / 2)
            largest = float((x.norm(dim=-1).max() + y.norm(dim=-1).max()) ** 2)
            gain = None if not coefficient or largest > NORM_CAP else _Gain(width, trig, largest)
            for i in range(len(x)):
                z = x[i] + (-y if trig else y)
                inner, norms = z @ z.mT, z.square().sum(-1)
                own = (s / t - 1) / 2 * norms + weight / 2
                both = own.unsqueeze(1) + own
                single = torch.expm1(s / t * inner + both)
                if paired:
                    single = (single + torch.expm1(both - s / t * inner)) / 2
                c = single / directions
                if gain is not None:
                    c = c - coefficient * gain.matrix(inner, norms)
                row = a[i]
                product = c @ row
                total = row @ product
                wrong_row = (row.square() * (c.diagonal() - 2 * product + total)).sum()
                # Positive features give rows of positive weights that sum to 1, whatever their variance.
                most = math.inf if trig else 1.0 + float(row.square().sum())
                wrong[head] += stands[i] * min(float(torch.nan_to_num(wrong_row, nan=math.inf)), most)
                whole[head] += stands[i] * row.square().sum()
                own_part = float(stands[i]) * row.square() * c.diagonal().clamp(min=0.0)
                carried += float(own_part.sum())
                norms_carried += float((own_part * norms).sum() * s / t)
                steady = steady and (not trig or bool(total <= STEADY))
    error = float(wrong.sum() / whole.sum())
    usual = trig or norms_carried <= carried * math.log(RARE * directions) / 4
    holds = steady and usual and 0 <= error <= RELIABLE
    return error, tuple((wrong / whole.clamp(min=1e-300)).tolist()), holds
