"""What dependent rows change: the pair ratio P = E[f(omega_1) f(omega_2)] / SM^2 of two rows of one block, and 1 - P.

Two rows of norms r_1, r_2 iid chi(d) at the cosine kappa have |omega_1 + omega_2|^2 = R^2 (1 + kappa sin(psi)) with
R^2 ~ chi^2(2d), and their sum has a uniform direction. For orthogonal rows, kappa = 0, this gives

    P(v) = exp(-v) 1F1(d; d/2; v/2)   positive, hyperbolic, OPRF;  v = |x + y|^2
    P(w) = exp( w) 1F1(d; d/2; -w/2)  trigonometric;               w = |x - y|^2

A ratio of a hypergeometric series to an exponential one is a mean over a Poisson variable, P = E[rho_k] with
k ~ Poisson(v) and rho_k = prod_{j<k} (d + j)/(d + 2j) between 0 and 1: computed that way nothing overflows and
nothing cancels. Derived here. The simplex, kappa = -1/(d-1), is that of Reid et al., "Simplex Random Features", 2023.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from .. import checks

__all__ = [
    "Real",
    "float64",
    "kummer_ratio",
    "kummer_ratio_trig",
    "least_dim",
    "orthogonal_gain",
    "orthogonal_gain_trig",
    "poisson_mean",
    "poisson_terms",
    "simplex_gain",
    "simplex_gain_trig",
]

Real: TypeAlias = float | Tensor


def float64(value: Real) -> Tensor:
    """A float64 tensor of `value`, a number on the CPU: the default device may be 'meta', where nothing has a value."""
    if isinstance(value, Tensor):
        return value.to(torch.float64)
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def least_dim(dim: int, least: int = 1) -> int:
    """`dim` if it is at least `least`, else an error."""
    checks.check_positive("dim", dim, least)
    return dim


def poisson_terms(mean: Tensor, growth: float = 1.0) -> int:
    """How many terms a Poisson mean needs: beyond `growth` times the mean by twelve deviations, at least 60."""
    top = float(mean.max()) * growth if mean.numel() else 0.0
    return math.ceil(top + 12.0 * math.sqrt(top)) + 60


def poisson_mean(mean: Tensor, values: Tensor) -> Tensor:
    """E[values[k]], k ~ Poisson(mean), the tail beyond the table left out. One term at a time: memory of one result."""
    total = torch.zeros_like(mean)
    for k, value in enumerate(values.tolist()):
        if value != 0.0:
            order = torch.tensor(float(k), dtype=torch.float64, device=mean.device)
            total += value * torch.exp(torch.xlogy(order, mean) - mean - math.lgamma(k + 1.0))
    return total


def _log_rho(dim: int, terms: int) -> Tensor:
    """log of (d)_k / ((d/2)_k 2^k) = prod_{j<k} (d + j) / (d + 2j): the weight of a pair of orthogonal rows."""
    j = torch.arange(terms - 1, dtype=torch.float64, device="cpu")
    return torch.cat((torch.zeros(1, dtype=torch.float64, device="cpu"), -torch.log1p(j / (dim + j)).cumsum(0)))


def _capped(dim: int, v: Real) -> Tensor:
    v = float64(v)
    if bool((v < 0).any()):
        raise ValueError(f"a squared distance must not be negative, got a least value of {float(v.min())}.")
    # Beyond this the ratio is below 1e-150 at any dim (it falls as exp(-v/2), and is about exp(-1.3 dim) at v = 4 dim):
    # no gain can tell it from 0, and the number of terms stays bounded.
    return v.clamp(max=max(1500.0, 4.0 * dim))


def kummer_ratio(dim: int, v: Real) -> Tensor:
    """exp(-v) 1F1(d; d/2; v/2), the pair ratio P of orthogonal rows for positive, hyperbolic and OPRF features.

    >>> round(float(kummer_ratio(16, 1.0)), 6)
    0.975008
    """
    v = _capped(dim, v)
    return poisson_mean(v, _log_rho(least_dim(dim), poisson_terms(v)).exp())


def orthogonal_gain(dim: int, v: Real) -> Tensor:
    """gamma = 1 - kummer_ratio, in [0, 1]: what c times orthogonal rows take off the variance. Small v: v^2/(2(d+2)).

    >>> bool(torch.isclose(orthogonal_gain(16, 1e-6), torch.tensor(1e-12 / 36, dtype=torch.float64, device="cpu")))
    True
    """
    v = _capped(dim, v)
    return poisson_mean(v, -torch.expm1(_log_rho(least_dim(dim), poisson_terms(v))))


def _bessel_mean(dim: int, w: Tensor) -> Tensor:
    """1F1(d; d/2; -w/2) = exp(-w/2) 1F1(-d/2; d/2; w/2), a Poisson mean of (-d/2)_k/(d/2)_k: alternating, |.| <= 1."""
    j = torch.arange(poisson_terms(w / 2) - 1, dtype=torch.float64, device="cpu")
    table = torch.cat((torch.ones(1, dtype=torch.float64, device="cpu"), ((j - dim / 2) / (j + dim / 2)).cumprod(0)))
    return poisson_mean(w / 2, table)


def kummer_ratio_trig(dim: int, w: Real) -> Tensor:
    """exp(w) 1F1(d; d/2; -w/2), the pair ratio of orthogonal rows for trigonometric features; its error is 1e-16 e^w.

    >>> round(float(kummer_ratio_trig(16, 1.0)), 6)
    0.969505
    """
    w = float64(w)
    return torch.exp(w) * _bessel_mean(least_dim(dim), w)


def orthogonal_gain_trig(dim: int, w: Real) -> Tensor:
    """gamma^t = 1 - kummer_ratio_trig; may be negative (dim 16: at w = 12), where orthogonal rows do harm.

    >>> float(orthogonal_gain_trig(16, 12.0)) < 0
    True
    """
    w = float64(w)
    # Near 0 the difference from 1 cancels: sum the series of the difference, e^w sum_k (1 - rho_k) (-w)^k / k!.
    low = w.clamp(max=1.0)
    series = torch.zeros_like(low)
    for k, value in enumerate((-torch.expm1(_log_rho(least_dim(dim), 30))).tolist()):
        series += value * (-low) ** k / math.gamma(k + 1.0)
    return torch.where(w <= 1.0, torch.exp(low) * series, 1.0 - kummer_ratio_trig(dim, w))


def _angle_nodes(dim: int, nodes: int = 64) -> tuple[Tensor, Tensor]:
    """Quadrature for E over (r_1, r_2) iid chi(d), as 2 r_1 r_2 / (r_1^2 + r_2^2) = sin(psi), density sin^{d-1}(psi).

    Gauss-Legendre on the part of [0, pi] that carries the mass; its nodes by Golub and Welsch.
    """
    k = torch.arange(1, nodes, dtype=torch.float64, device="cpu")
    off = k / torch.sqrt(4 * k * k - 1)
    points, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    psi = math.pi / 2 + min(math.pi / 2, 12.0 / math.sqrt(dim)) * points
    weights = 2 * vectors[0] ** 2 * torch.exp((dim - 1) * torch.log(torch.sin(psi)))
    return torch.sin(psi), weights / weights.sum()


def simplex_gain(dim: int, v: Real, *, even: bool = False) -> Tensor:
    """1 - P for the rows of a simplex, at the cosine -1/(d-1) to each other: positive features and OPRF.

    With `even` for hyperbolic and antithetic features, whose pairs meet at both signs of the cosine; the gain is then
    below the orthogonal one. |omega_1 + omega_2|^2 = R^2 (1 - sin(psi)/(d-1)), R^2 ~ chi^2(2d), psi as in the density
    sin^{d-1}: the k-th weight of the orthogonal pair is multiplied by E[(1 - sin(psi)/(d-1))^k].

    >>> bool(simplex_gain(16, 0.5) > orthogonal_gain(16, 0.5) > simplex_gain(16, 0.5, even=True))
    True
    """
    least_dim(dim, least=2)
    v = _capped(dim, v)
    terms = poisson_terms(v, growth=1.0 + 1.0 / (dim - 1))
    sine, weights = _angle_nodes(dim)
    k = torch.arange(terms, dtype=torch.float64, device="cpu").unsqueeze(-1)
    log_rho = _log_rho(dim, terms).unsqueeze(-1)
    total = torch.zeros(terms, dtype=torch.float64, device="cpu")
    signs = (-1.0, 1.0) if even else (-1.0,)
    for sign in signs:
        total += -(torch.expm1(log_rho + k * torch.log1p(sign * sine / (dim - 1))) @ weights) / len(signs)
    return poisson_mean(v, total)


def simplex_gain_trig(dim: int, w: Real) -> Tensor:
    """1 - P for the rows of a simplex and trigonometric features.

    >>> bool(simplex_gain_trig(16, 0.5) < orthogonal_gain_trig(16, 0.5))
    True
    """
    least_dim(dim, least=2)
    w = float64(w)
    sine, weights = _angle_nodes(dim, nodes=32)
    total = torch.zeros_like(w)
    for s, weight in zip(sine.tolist(), weights.tolist(), strict=True):
        for sign in (-1.0, 1.0):
            total += 0.5 * weight * torch.exp(w) * _bessel_mean(dim, w * (1.0 + sign * s / (dim - 1)))
    return 1.0 - total
