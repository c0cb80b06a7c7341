"""Closed forms: how far a random-feature estimate of the softmax kernel lies from it, without drawing anything.

Notation: x = q / d^{1/4}, y = k / d^{1/4}, so that the kernel is SM = exp(x.y); v = |x + y|^2, w = |x - y|^2; omega is
a row of the projection, N(0, I_d). A variance here is relative, Var(estimate) / SM^2, of the mean over m_w rows:

    Var = Var_omega / m_w - c (1 - P),   c = sum_b n_b (n_b - 1) / m_w^2  over the blocks of n_b dependent rows

with Var_omega the variance of one row and P the ratio of a pair (`coupling.py`), 1 for independent rows. Features, per
omega:

    positive    exp(omega.x - |x|^2/2)                                   exp(v) - 1
    hyperbolic  exp(-|x|^2/2) [exp(omega.x), exp(-omega.x)] / sqrt 2     cosh(v) - 1
    trig        exp( |x|^2/2) [cos(omega.x), sin(omega.x)]               cosh(w) - 1
    oprf        (1-4A)^{d/4} exp(A |omega|^2 + sqrt(1-4A) omega.x - |x|^2/2)   R - 1

All functions take floats or tensors, broadcast, and return float64 tensors.
Sources: Choromanski et al., "Rethinking Attention with Performers", 2021 (features, bound); Likhosherstov et al.,
"Chefs' Random Tables", 2022 (OPRF) and "FAVOR#", 2023 (SDERF); Cho and Saul, "Kernel Methods for Deep Learning", 2009
(arc-cosine kernels).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import checks
from .coupling import (
    Real,
    float64,
    least_dim,
    orthogonal_gain,
    orthogonal_gain_trig,
    poisson_mean,
    poisson_terms,
    simplex_gain,
    simplex_gain_trig,
)
from .hadamard import next_power_of_two

__all__ = [
    "COUPLINGS",
    "FAMILIES",
    "abs_kernel",
    "block_coefficient",
    "hadamard_kurtosis",
    "hermite_error",
    "kernel_variance",
    "oprf_optimal_a",
    "oprf_second_moment",
    "performer_bound",
    "relative_variance",
    "relu_kernel",
    "sderf_a",
    "sqrt_norm_bias",
    "taylor_error",
]

FAMILIES = ("positive", "hyperbolic", "trig", "oprf", "oprf-antithetic")
COUPLINGS = ("gaussian", "orthogonal", "hadamard", "simplex")


def block_coefficient(directions: int, dim: int) -> float:
    """c = sum_b n_b (n_b - 1) / m_w^2 for m_w directions in blocks of `dim`, the last one partial: (d-1)/m_w if full.

    >>> block_coefficient(32, 16) == 15 / 32
    True
    """
    checks.check_positive("directions", directions)
    full, rest = divmod(directions, least_dim(dim))
    return (full * dim * (dim - 1) + rest * (rest - 1)) / directions**2


def _log_oprf(dim: int, v: Tensor, a: Real) -> tuple[Tensor, Tensor]:
    """log of E[f^2] and of E[f(omega) f(-omega)] for one OPRF row, both over SM^2."""
    a = float64(a)
    if bool((a > 0).any()):
        raise ValueError(f"a must not be positive, got a greatest value of {float(a.max())}; see oprf_optimal_a.")
    weight = dim * torch.log1p(-4 * a) - dim / 2 * torch.log1p(-8 * a)
    return weight + v / (1 - 8 * a), weight - v


def oprf_second_moment(dim: int, v: Real, a: Real) -> Tensor:
    """R = (1-4A)^d (1-8A)^{-d/2} exp(v / (1-8A)), the second moment of one OPRF row over SM^2; A <= 0.

    >>> round(float(oprf_second_moment(16, 1.0, 0.0)), 6)
    2.718282
    """
    return torch.exp(_log_oprf(least_dim(dim), float64(v), a)[0])


def sderf_a(eigenvalues: Real) -> Tensor:
    """A_l per direction of SDERF from the eigenvalues lam_l of E[z z^T], z = x + y: (1 - t)/8, at most 0.

        t = [(1 + 2 lam) + sqrt((1 + 2 lam)^2 + 8 lam)] / 2   minimises  log((1 + t)/2) - log(t)/2 + lam/t

    >>> [round(a, 4) for a in sderf_a(torch.tensor([0.25, 1.0])).tolist()]
    [-0.0976, -0.3202]
    """
    lam = float64(eigenvalues)
    b = 1 + 2 * lam
    # (1 - t)/8 with the subtraction done by hand: t - 1 = [b - 1 + (b^2 + 8 lam - 1)/(sqrt(.) + 1)] / 2.
    return -(2 * lam + (b * b - 1 + 8 * lam) / (torch.sqrt(b * b + 8 * lam) + 1)) / 16


def oprf_optimal_a(dim: int, mean_v: Real) -> Tensor:
    """The A that minimises R at v = mean_v = E|x|^2 + E|y|^2 + 2 E[x].E[y]: that of SDERF with equal eigenvalues.

    >>> round(float(oprf_optimal_a(16, 4.0)), 4)
    -0.0976
    """
    return sderf_a(float64(mean_v) / least_dim(dim))


def relative_variance(family: str, distance: Real, *, dim: int | None = None, a: Real | None = None) -> Tensor:
    """Var_omega: the relative variance of one row. `distance` is v, for "trig" w; OPRF needs `dim` and `a`.

    >>> [round(float(relative_variance(f, 1.0)), 4) for f in ("positive", "hyperbolic", "trig")]
    [1.7183, 0.5431, 0.5431]
    """
    checks.check_option("family", family, FAMILIES)
    distance = float64(distance)
    if family == "positive":
        return torch.expm1(distance)
    if family in ("hyperbolic", "trig"):
        return 2 * torch.sinh(distance / 2) ** 2  # cosh - 1 without the cancellation
    if dim is None or a is None:
        raise ValueError(f"family={family!r} needs dim and a, got dim={dim}, a={a}; see oprf_optimal_a.")
    same, opposite = _log_oprf(least_dim(dim), distance, a)
    if family == "oprf":
        return torch.expm1(same)
    return (torch.expm1(same) + torch.expm1(opposite)) / 2


def kernel_variance(
    family: str,
    distance: Real,
    *,
    dim: int,
    directions: int,
    projection: str = "orthogonal",
    a: Real | None = None,
) -> Tensor:
    """Var(SM^) / SM^2 of the estimate with m_w = `directions` rows, chi norms: exact but for "hadamard".

    "hadamard" is taken as orthogonal at the padded width, the limit of many factors. Hyperbolic, antithetic and trig
    maps have two features per direction.

    >>> f"{float(kernel_variance('positive', 0.5, dim=16, directions=16, projection='simplex')):.4f}"
    '0.0055'
    """
    checks.check_option("projection", projection, COUPLINGS)
    single = relative_variance(family, distance, dim=dim, a=a)
    width = next_power_of_two(dim) if projection == "hadamard" else dim
    c = block_coefficient(directions, width)
    if projection == "gaussian":
        return single / directions
    if projection == "simplex":
        gain = (
            simplex_gain_trig(width, distance)
            if family == "trig"
            else simplex_gain(width, distance, even=family in ("hyperbolic", "oprf-antithetic"))
        )
    else:
        gain = orthogonal_gain_trig(width, distance) if family == "trig" else orthogonal_gain(width, distance)
    # Both parts overflow together far from 0, where only one answer makes sense.
    return torch.where(torch.isinf(single), single, single / directions - c * gain)


def performer_bound(dim: int, v: Real, directions: int) -> Tensor:
    """Lower bound on what orthogonal rows take off the relative variance: c 2/(d+2) (1 - exp(-v/2))^2 (Performer).

    >>> bool(performer_bound(16, 1.0, 16) <= block_coefficient(16, 16) * orthogonal_gain(16, 1.0))
    True
    """
    return block_coefficient(directions, dim) * 2 / (dim + 2) * torch.expm1(-float64(v) / 2) ** 2


def sqrt_norm_bias(dim: int, v: Real) -> Tensor:
    """Relative bias of rows of the constant norm sqrt(d): exp(-v/2) 0F1(; d/2; d v/4) - 1, about -v^2 / (4 (d+2)).

    >>> round(float(sqrt_norm_bias(16, 4.0)), 3)
    -0.163
    """
    mean = float64(v) / 2
    j = torch.arange(poisson_terms(mean) - 1, dtype=torch.float64, device="cpu")
    table = torch.cat(
        (torch.zeros(1, dtype=torch.float64, device="cpu"), -torch.log1p(2 * j / least_dim(dim)).cumsum(0))
    )
    return poisson_mean(mean, torch.expm1(table))


def hadamard_kurtosis(dim: int, blocks: int, fourth_moment: Real) -> Tensor:
    """E(omega.z)^4 of k = `blocks` Hadamard factors for a unit z with S = sum_j z_j^4; a Gaussian row has 3.

        kappa = 3 - 2 (1 + 2/d) (-2/d)^{k-1} (S - 3/(d+2))

    >>> [float(hadamard_kurtosis(8, k, 1.0)) for k in (1, 2, 3)]
    [1.25, 3.4375, 2.890625]
    """
    checks.check_positive("blocks", blocks)
    return 3 - 2 * (1 + 2 / dim) * (-2 / dim) ** (blocks - 1) * (float64(fourth_moment) - 3 / (least_dim(dim) + 2))


def _partial_exp(x: Tensor, degree: int) -> Tensor:
    total = term = torch.ones_like(x)
    for j in range(1, degree + 1):
        term = term * x / j
        total = total + term
    return total


def hermite_error(degree: int, tau: Real) -> Tensor:
    """Squared error over |A|^2 of the best polynomial of this degree for Gaussian row scores s ~ N(0, tau^2).

        1 - exp(-tau^2) sum_{j <= n} tau^{2j} / j!

    Degree 0 is uniform attention: an approximation above hermite_error(0, tau) is worse than that.

    >>> [round(float(hermite_error(n, 1.0)), 3) for n in range(4)]
    [0.632, 0.264, 0.08, 0.019]
    """
    return taylor_error(degree, tau, hermite=True)


def taylor_error(degree: int, tau: Real, *, hermite: bool = False) -> Tensor:
    """The same for the Taylor polynomial of exp, after normalising the row.

    In Hermite polynomials the normalised polynomial has the coefficients of the best one times
    g_j = e_{(n-j)//2}(tau^2/2) / e_{n//2}(tau^2/2), e_p the exponential series up to x^p, so the error is
    hermite_error + exp(-tau^2) sum_{j <= n} tau^{2j}/j! (1 - g_j)^2.

    >>> round(float(taylor_error(2, 1.0)), 3)
    0.142
    """
    checks.check_positive("degree", degree, least=0)
    x = float64(tau) ** 2
    # The missing terms themselves: 1 minus the present ones would cancel for small tau.
    missing = poisson_mean(
        x, torch.tensor([0.0] * (degree + 1) + [1.0] * poisson_terms(x), dtype=torch.float64, device="cpu")
    )
    if hermite:
        return missing
    whole = _partial_exp(x / 2, degree // 2)
    for j in range(degree + 1):
        g = _partial_exp(x / 2, (degree - j) // 2) / whole
        missing = missing + torch.exp(torch.xlogy(float64(j), x) - x - math.lgamma(j + 1.0)) * (1 - g) ** 2
    return missing


def relu_kernel(x_norm: Real, y_norm: Real, angle: Real) -> Tensor:
    """E[relu(omega.x) relu(omega.y)] = |x||y| / (2 pi) (sin t + (pi - t) cos t), the arc-cosine kernel of degree 1.

    >>> float(relu_kernel(2.0, 3.0, 0.0))
    3.0
    """
    t = float64(angle)
    return float64(x_norm) * float64(y_norm) / (2 * math.pi) * (torch.sin(t) + (math.pi - t) * torch.cos(t))


def abs_kernel(x_norm: Real, y_norm: Real, angle: Real) -> Tensor:
    """E[|omega.x| |omega.y|] = 2 |x||y| / pi (sin t + (pi/2 - t) cos t), 0 <= t <= pi/2; beyond, that of pi - t.

    >>> round(float(abs_kernel(2.0, 3.0, 0.0)), 12)
    6.0
    """
    t = float64(angle)
    t = torch.minimum(t, math.pi - t)
    return 2 * float64(x_norm) * float64(y_norm) / math.pi * (torch.sin(t) + (math.pi / 2 - t) * torch.cos(t))
