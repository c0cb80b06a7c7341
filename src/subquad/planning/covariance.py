"""The error of a row of attention made with random features, from the covariance of its kernel estimates.

For one query x with exact weights a_j, Z_j = x + y_j (trigonometric: x - y_j) and the relative errors d_j of the
kernel estimates, the normalised row is a_j (1 + d_j) / sum_l a_l (1 + d_l), so with C_jl = E[d_j d_l], to first order,

    E |dA_i|^2 = sum_j a_j^2 [C_jj - 2 (C a)_j + a^T C a]
    E |dO_i|^2 = sum_jl a_j a_l C_jl (v_j - O_i).(v_l - O_i)

C = G / m_w - c g, with m_w directions, G the covariance of one direction and g what dependent rows take off it
(`features/coupling.py` has c and the diagonal of g). Everything exponential is one formula: with A_l <= 0 per
direction (0: positive features; one value: OPRF), s = 1 - 4A, t = 1 - 8A and the product over directions l,

    1 + G_jl = prod_l s t^{-1/2} exp(s (Z_j + Z_l)^2 / (2 t) - (Z_j^2 + Z_l^2) / 2)

and pairs of a direction with its opposite (hyperbolic, antithetic, and trigonometric with A = 0) average it over +-Z_l.

What dependent rows change is exact as a series. The mean of a feature over the norm of its direction is a function on
the sphere around Z_j / |Z_j|; in Gegenbauer polynomials P_l (P_l(1) = 1) of dimension d, N_l their multiplicity, two
directions at the cosine kappa (orthogonal: 0, simplex: -1/(d-1)) give

    g_jl = - sum_{l >= 1} N_l P_l(kappa) b_l(|Z_j|^2) b_l(|Z_l|^2) P_l(cos(Z_j, Z_l))       paired features: even l only
    b_l(n) = (n/2)^{l/2} e^{-n/2} Gamma(a)/Gamma(b) 1F1(a; b; n/2),  a = (d + l)/2, b = d/2 + l       exponential
    b_l(n) = (-1)^{l/2} (n/2)^{l/2} Gamma(a)/Gamma(b) 1F1(l/2; b; n/2)                                trigonometric

by the plane-wave expansion of e^{z t} and the moments of chi(d); on the diagonal it sums to the closed form of
`features/coupling.py`. The weight of OPRF depends on the norm alone and changes nothing here. With one A per direction
it tilts the direction to N(s^{-1/2} Z, 1/s): then Z' = s^{-1/2} Z sqrt(d / sum_l 1/s_l) in place of Z is right up to
terms of one of the two keys alone, which the normaliser removes, and to leading order in the spread of s.
Both sums are linear in C, so one pass over the keys gives the error at every number of features.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..features.coupling import poisson_mean, poisson_terms
from ..features.hadamard import next_power_of_two
from ..features.variance import block_coefficient

__all__ = ["Law", "RowSums", "own_errors", "row_sums"]

NODES = 512
DEGREES = 12
NEGLIGIBLE = 1e-5  # of the largest term: a degree that is left out
NORM_CAP = 600.0  # beyond it e^{|Z|^2} overflows and with it any prediction; what rows share no longer matters
ELEMENTS = 1 << 18  # of one batch of covariances: 2 MB, which a cache holds


@dataclass(frozen=True)
class Law:
    """What the closed form needs to know of a random feature map, for one head.

    trig: cos and sin instead of exp;  paired: two features per direction (hyperbolic, antithetic, trig)
    a: (D,) A_l <= 0 per direction;  basis: (D, D) columns are the directions, None for the axes
    """

    trig: bool
    paired: bool
    projection: str
    a: Tensor
    basis: Tensor | None

    @property
    def width(self) -> int:
        """The size of a block of dependent rows."""
        dim = len(self.a)
        return next_power_of_two(dim) if self.projection == "hadamard" else dim

    def coefficient(self, num_features: int) -> tuple[float, float]:
        """1 / m_w and c for this number of features."""
        directions = num_features // 2 if self.paired else num_features
        coupled = self.projection != "gaussian" and self.width > 1
        return 1.0 / directions, block_coefficient(directions, self.width) if coupled else 0.0


@dataclass(frozen=True)
class RowSums:
    """Per query (n,): what G and g contribute to the error of the weights and of the outputs, and what bounds it.

    normaliser, normaliser_gain: what they contribute to a^T C a, the relative variance of the row's sum
    multiples: queries that each stands for;  exact: of these, those among the rows that were computed exactly

    Positive features give a row of positive weights that sum to 1, so |dA_i|^2 <= 1 + |a_i|^2 and
    |dO_i| <= max_j |v_j - O_i| whatever the variance: a single query of huge norm cannot own the whole prediction.
    """

    single: Tensor
    gain: Tensor
    single_out: Tensor
    gain_out: Tensor
    most: Tensor
    most_out: Tensor
    normaliser: Tensor
    normaliser_gain: Tensor
    multiples: Tensor
    exact: Tensor

    def __add__(self, other: RowSums) -> RowSums:
        return RowSums(*(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self)))

    def error(self, law: Law, num_features: int) -> tuple[float, float]:
        """E |dA|^2 and E |dO|^2 at this number of features; infinite where the formula overflows and nothing bounds."""
        weights, out = self.rows(law, num_features)
        return float((weights * self.multiples).sum()), float((out * self.multiples).sum())

    def rows(self, law: Law, num_features: int) -> tuple[Tensor, Tensor]:
        """The same of every query (n,)."""
        one, c = law.coefficient(num_features)

        def each(single: Tensor, gain: Tensor, most: Tensor) -> Tensor:
            return torch.minimum(torch.nan_to_num(one * single - c * gain, nan=math.inf, posinf=math.inf), most)

        return each(self.single, self.gain, self.most), each(self.single_out, self.gain_out, self.most_out)


def _gegenbauer(dim: int) -> Tensor:
    """Coefficients (degree, power) of P_0 .. P_DEGREES of dimension `dim`, normalised to P_l(1) = 1."""
    table = torch.zeros(DEGREES + 1, DEGREES + 1, dtype=torch.float64)
    table[0, 0] = table[1, 1] = 1.0
    for degree in range(1, DEGREES):
        up = table[degree].roll(1)  # times t; the highest power is still empty
        table[degree + 1] = ((2 * degree + dim - 2) * up - degree * table[degree - 1]) / (degree + dim - 2)
    return table


def _multiplicity(dim: int, degree: int) -> float:
    """N_l: the number of spherical harmonics of this degree in this dimension."""
    if dim == 2:
        return 2.0
    return (2 * degree + dim - 2) / (dim - 2) * math.comb(degree + dim - 3, degree)


def _radial(law: Law, degree: int, n: Tensor) -> Tensor:
    """b_l(n): interpolated from a table of b_l / (n/2)^{l/2}, which is smooth."""
    low, high = (law.width + degree) / 2, law.width / 2 + degree
    y = float(n.max()) / 2 * torch.linspace(0, 1, NODES, dtype=torch.float64) ** 2
    if law.trig:
        k = torch.arange(poisson_terms(y), dtype=torch.float64)
        # 1F1(l/2; b; y) as e^y times a Poisson mean of (l/2)_k / (b)_k.
        log = torch.lgamma(k + degree / 2) - math.lgamma(degree / 2) - torch.lgamma(k + high) + math.lgamma(high)
        table = poisson_mean(y, log.exp()) * torch.exp(y + math.lgamma(low) - math.lgamma(high))
        table = table if degree % 4 == 0 else -table
    else:
        k = torch.arange(poisson_terms(y), dtype=torch.float64)
        table = poisson_mean(y, torch.exp(torch.lgamma(k + low) - torch.lgamma(k + high)))
    place = torch.sqrt(n / 2 / y[-1].clamp(min=1e-300)).clamp_(max=1.0).mul_(NODES - 1)
    below = place.to(torch.int64).clamp_(max=NODES - 2)
    return (table[below] + torch.diff(table)[below] * (place - below)) * (n / 2) ** (degree / 2)


class _Gain:
    """g of a law between all keys of a row: a polynomial in the cosine whose coefficients have low rank."""

    def __init__(self, law: Law, z: Tensor) -> None:
        dim = law.width
        simplex = law.projection == "simplex"
        cosine = -1.0 / (dim - 1) if simplex else 0.0
        table = _gegenbauer(dim)
        at_cosine = (table * cosine ** torch.arange(DEGREES + 1)).sum(-1)
        norms = z.square().sum(-1).clamp(max=NORM_CAP)  # (n, K)
        self.unit = z / torch.sqrt(norms).clamp(min=1e-150).unsqueeze(-1)
        # Odd degrees meet only where the cosine is not 0 and features are not paired.
        self.step = 1 if simplex and not law.paired else 2
        degrees = range(self.step, DEGREES + 1, self.step)
        radial = torch.stack([_radial(law, degree, norms) for degree in degrees], -1)  # (n, K, degrees)
        factor = torch.tensor([-_multiplicity(dim, n) * float(at_cosine[n]) for n in degrees], dtype=torch.float64)
        size = factor.abs() * radial.square().amax((0, 1))
        kept = int((size > NEGLIGIBLE * size.max()).nonzero().max()) + 1 if bool(size.max() > 0) else 1
        self.radial = radial[..., :kept].contiguous()
        self.powers = factor[:kept, None] * table[list(degrees)[:kept], :][:, :: self.step]  # (degree, power / step)
        self.top = kept

    def matrix(self, rows: Tensor) -> Tensor:
        """g (rows, K, K), by Horner's rule in cos (or its square)."""
        unit, b = self.unit[rows], self.radial[rows]
        t = unit @ unit.mT
        t = t.square_() if self.step == 2 else t
        total = (b * self.powers[:, self.top]) @ b.mT
        for power in range(self.top - 1, -1, -1):
            total = torch.baddbmm(total.mul_(t), b * self.powers[:, power], b.mT)
        return total


def _quadratic(matrix: Tensor, a: Tensor, count: Tensor, gram: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Both sums and a^T C a per query (n,) for C = `matrix` (n, K, K), where key j stands for `count_j` keys like it.

    A pair of different keys stands for count_j count_l pairs, a key with itself for count_j, not its square.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    counted = a * count
    product = (matrix @ counted.unsqueeze(-1)).squeeze(-1)
    excess = count * (count - 1)
    squares = (count * a * a).sum(-1)
    own = (count * a * a * diagonal).sum(-1)
    cross = (counted * a * product).sum(-1) - (excess * a**3 * diagonal).sum(-1)
    whole = (counted * product).sum(-1) - (excess * a * a * diagonal).sum(-1)
    weights = own - 2 * cross + squares * whole
    if gram is None:
        return weights, torch.zeros_like(weights), whole
    pairs = counted.unsqueeze(-1) * counted.unsqueeze(-2) * matrix * gram
    out = pairs.sum((-2, -1)) - (excess * a * a * diagonal * gram.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return weights, out, whole


def own_errors(law: Law, x: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """a_j^2 G_jj (n, S) of all keys: the part of the error that needs no pairs, so that it can be had for every row.

    x (n, D), y (S, D): centred where the map centres
    """
    if law.basis is not None:
        x, y = x @ law.basis, y @ law.basis
    y = -y if law.trig else y
    s, t = 1 - 4 * law.a, 1 - 8 * law.a

    def norms(stretch: Tensor) -> Tensor:
        u, w = x * stretch, y * stretch
        return u.square().sum(-1, keepdim=True) + w.square().sum(-1) + 2 * (u @ w.mT)

    ones = torch.ones_like(s)
    tilted, plain = norms(torch.sqrt(s / t)), norms(ones)
    shift = tilted - plain + (torch.log(s) - torch.log(t) / 2).sum()
    single = torch.expm1(tilted + shift)
    if law.paired:
        single = (single + torch.expm1(shift - tilted)) / 2
    return torch.nan_to_num(a.square() * single, nan=0.0, posinf=1e300)


def row_sums(
    law: Law, x: Tensor, y: Tensor, a: Tensor, count: Tensor, residual: Tensor | None, multiples: Tensor, exact: Tensor
) -> RowSums:
    """E |dA|^2 and E |dO|^2 of n queries, apart from the number of features.

    x (n, D), y (n, K, D): centred where the map centres;  a (n, K): exact weights;  count (n, K): keys that each stands
    for;  residual (n, K, E): v_j - O_i, or None;  multiples, exact (n,): see RowSums
    """
    most = torch.full_like(multiples, math.inf) if law.trig else 1.0 + (count * a * a).sum(-1)
    most_out = torch.full_like(multiples, math.inf)
    if residual is not None and not law.trig:
        most_out = (residual.square().sum(-1) * (count > 0)).amax(-1)
    parts: list[RowSums] = []
    if law.basis is not None:
        x, y = x @ law.basis, y @ law.basis
    s, t = 1 - 4 * law.a, 1 - 8 * law.a
    log_weight = (torch.log(s) - torch.log(t) / 2).sum()
    width = law.width
    spread = (1 / s).sum() + width - len(law.a)  # padded directions have A = 0
    stretch = torch.sqrt(width / (spread * s))
    shared = None
    if law.projection != "gaussian" and width > 1:
        shared = _Gain(law, (x.unsqueeze(1) + (-y if law.trig else y)) * stretch)
    for rows in torch.arange(len(x)).split(max(1, ELEMENTS // y.shape[1] ** 2)):
        z = x[rows].unsqueeze(1) + (-y[rows] if law.trig else y[rows])
        tilted = z * torch.sqrt(s / t)
        own = (tilted.square().sum(-1) - z.square().sum(-1) + log_weight) / 2
        inner = tilted @ tilted.mT
        shift = own.unsqueeze(-1) + own.unsqueeze(-2)
        single = torch.expm1(inner + shift)
        if law.paired:
            single = (single + torch.expm1(shift - inner)) / 2
        gram = None if residual is None else residual[rows] @ residual[rows].mT
        sums = _quadratic(single, a[rows], count[rows], gram)
        gains = (torch.zeros_like(sums[0]),) * 3
        if shared is not None:
            gains = _quadratic(shared.matrix(rows), a[rows], count[rows], gram)
        bounds = (most[rows], most_out[rows], sums[2], gains[2], multiples[rows], exact[rows])
        parts.append(RowSums(sums[0], gains[0], sums[1], gains[1], *bounds))
    return functools.reduce(RowSums.__add__, parts)
