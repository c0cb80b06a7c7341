"""Closed forms against scipy, against quadrature, and against the published bounds and tables."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, special

from subquad.features import coupling
from subquad.features import variance as var

DIMS = [1, 2, 3, 16, 17, 64, 128]
GRID = torch.tensor([0.0, 1e-3, 0.1, 0.5, 1.0, 4.0, 8.0, 20.0, 50.0, 100.0, 200.0], dtype=torch.float64)


@pytest.mark.parametrize("dim", DIMS)
def test_pair_ratio_is_kummers_function(dim: int) -> None:
    exact = np.exp(-GRID.numpy()) * special.hyp1f1(dim, dim / 2, GRID.numpy() / 2)
    np.testing.assert_allclose(coupling.kummer_ratio(dim, GRID).numpy(), exact, rtol=1e-12)
    np.testing.assert_allclose(coupling.orthogonal_gain(dim, GRID).numpy(), 1 - exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dim", DIMS)
def test_trig_pair_ratio_is_kummers_function(dim: int) -> None:
    w = GRID.numpy()
    # scipy loses all digits at 1F1(d; d/2; -w/2); its Kummer transform is a polynomial for even d and accurate.
    exact = np.exp(w / 2) * special.hyp1f1(-dim / 2, dim / 2, w / 2)
    for got, want in (
        (coupling.kummer_ratio_trig(dim, GRID), exact),
        (coupling.orthogonal_gain_trig(dim, GRID), 1 - exact),
    ):
        assert np.max(np.abs(got.numpy() - want) / np.exp(w)) < 2e-15


def test_gains_do_not_cancel_near_zero_nor_overflow_far_away() -> None:
    v = torch.tensor([1e-9, 1e-5], dtype=torch.float64)
    for gain in (coupling.orthogonal_gain, coupling.orthogonal_gain_trig):
        torch.testing.assert_close(gain(16, v), v**2 / 36, rtol=1e-4, atol=0.0)
    far = torch.tensor([1e3, 1e4, 1e6], dtype=torch.float64)
    torch.testing.assert_close(
        coupling.orthogonal_gain(64, far), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12
    )
    for family in ("positive", "hyperbolic", "trig"):
        for projection in var.COUPLINGS:
            got = var.kernel_variance(family, torch.tensor([700.0, 5e3]), dim=16, directions=16, projection=projection)
            assert bool((got > 1e200).all()), (family, projection, got)


def test_gain_of_trig_features_can_be_negative_and_that_of_positive_ones_cannot() -> None:
    assert float(coupling.orthogonal_gain_trig(16, 12.0)) < 0
    v = torch.linspace(0, 60, 200)
    for dim in DIMS:
        assert bool((coupling.orthogonal_gain(dim, v) >= 0).all())


def test_gain_is_never_below_performers_bound_and_tight_at_zero() -> None:
    v = torch.logspace(-2, 1.5, 20, dtype=torch.float64)
    for dim in (2, 4, 16, 64):
        for directions in (dim, dim - 1, 1):
            gain = var.block_coefficient(directions, dim) * coupling.orthogonal_gain(dim, v)
            bound = var.performer_bound(dim, v, directions)
            assert bool((gain >= bound * (1 - 1e-12)).all())
    torch.testing.assert_close(
        var.performer_bound(16, 1e-4, 16),
        var.block_coefficient(16, 16) * coupling.orthogonal_gain(16, 1e-4),
        rtol=1e-3,
        atol=0,
    )


def _pair_by_quadrature(dim: int, cosine: float, mgf: Callable[[float], float]) -> float:
    """E[mgf(|omega_1 + omega_2|^2)] straight from the two chi densities, without the polar form of the source."""

    def density(r: float) -> float:
        return math.exp((dim - 1) * math.log(r) - r * r / 2 - math.lgamma(dim / 2) - (dim / 2 - 1) * math.log(2))

    def integrand(r: float, s: float) -> float:
        return density(r) * density(s) * mgf(r * r + s * s + 2 * cosine * r * s)

    top = math.sqrt(dim) + 9.0
    value, _ = integrate.dblquad(integrand, 1e-12, top, 1e-12, top, epsabs=1e-9, epsrel=1e-9)
    return float(value)


@pytest.mark.parametrize(("dim", "distance"), [(2, 0.7), (5, 1.5), (16, 0.5)])
def test_simplex_gain_is_the_expectation_over_both_norms(dim: int, distance: float) -> None:
    def exponential(square: float) -> float:
        return float(special.hyp0f1(dim / 2, distance * square / 4))

    def cosine(square: float) -> float:
        return float(special.hyp0f1(dim / 2, -distance * square / 4))

    kappa = 1 / (dim - 1)
    minus, plus = (math.exp(-distance) * _pair_by_quadrature(dim, k, exponential) for k in (-kappa, kappa))
    assert float(coupling.simplex_gain(dim, distance)) == pytest.approx(1 - minus, abs=1e-7)
    assert float(coupling.simplex_gain(dim, distance, even=True)) == pytest.approx(1 - (minus + plus) / 2, abs=1e-7)
    trig = math.exp(distance) * sum(_pair_by_quadrature(dim, k, cosine) for k in (-kappa, kappa)) / 2
    assert float(coupling.simplex_gain_trig(dim, distance)) == pytest.approx(1 - trig, abs=1e-7)


def test_published_variances_of_one_block() -> None:
    def positive(projection: str, directions: int = 16, family: str = "positive") -> float:
        return float(var.kernel_variance(family, 0.5, dim=16, directions=directions, projection=projection))

    assert positive("gaussian") == pytest.approx(0.0405, abs=1e-4)
    assert positive("orthogonal") == pytest.approx(0.0344, abs=1e-4)
    assert positive("simplex") == pytest.approx(0.0055, abs=1e-4)
    assert positive("orthogonal", 8, "hyperbolic") == pytest.approx(0.0102, abs=1e-4)
    # Equal numbers of features: from two blocks on, antithetic orthogonal rows beat the simplex.
    assert positive("orthogonal", 16, "hyperbolic") < positive("simplex", 32)


def test_full_blocks_leave_three_over_d_plus_two_of_a_small_hyperbolic_variance() -> None:
    for dim in (8, 64):
        for family in ("hyperbolic", "trig"):
            orthogonal, iid = (
                var.kernel_variance(family, 1e-4, dim=dim, directions=4 * dim, projection=p)
                for p in ("orthogonal", "gaussian")
            )
            assert float(orthogonal / iid) == pytest.approx(3 / (dim + 2), rel=1e-3)


def test_hyperbolic_variance_is_that_of_positive_features_times_one_minus_exp() -> None:
    v = GRID[1:8]
    at_equal_features = var.relative_variance("hyperbolic", v) * 2
    torch.testing.assert_close(at_equal_features, var.relative_variance("positive", v) * -torch.expm1(-v))
    w = GRID[1:8]
    torch.testing.assert_close(var.relative_variance("trig", w), w.exp() * torch.expm1(-w) ** 2 / 2)


def test_variance_vanishes_for_no_distance() -> None:
    for family in ("positive", "hyperbolic", "trig"):
        assert float(var.kernel_variance(family, 0.0, dim=8, directions=20)) == 0.0
    for family in ("oprf", "oprf-antithetic"):
        assert float(var.kernel_variance(family, 0.0, dim=8, directions=20, a=0.0)) == 0.0


@pytest.mark.parametrize("directions", [1, 5, 16, 17, 40, 64])
def test_block_coefficient_counts_the_pairs_of_each_block(directions: int) -> None:
    block = np.arange(directions) // 16
    pairs = (block[:, None] == block[None, :]).sum() - directions
    assert var.block_coefficient(directions, 16) == pytest.approx(pairs / directions**2, rel=1e-15)


@pytest.mark.parametrize(("dim", "v"), [(4, 0.3), (16, 1.0), (16, 8.0), (64, 4.0)])
def test_oprf_optimum_is_the_grid_minimum(dim: int, v: float) -> None:
    a = float(var.oprf_optimal_a(dim, v))
    grid = torch.linspace(-1.5, 0.0, 150001, dtype=torch.float64)
    best = grid[var.oprf_second_moment(dim, v, grid).argmin()]
    assert a == pytest.approx(float(best), abs=2e-5)


def test_oprf_contains_positive_and_hyperbolic_and_improves_on_them() -> None:
    v = torch.tensor([1.0, 4.0, 8.0], dtype=torch.float64)
    for plain, general in (("positive", "oprf"), ("hyperbolic", "oprf-antithetic")):
        torch.testing.assert_close(
            var.relative_variance(general, v, dim=16, a=0.0), var.relative_variance(plain, v), rtol=1e-12, atol=0
        )
    reduction = var.relative_variance("positive", v) / var.relative_variance(
        "oprf", v, dim=16, a=var.oprf_optimal_a(16, v)
    )
    torch.testing.assert_close(reduction, torch.tensor([1.18, 3.1, 24.0], dtype=torch.float64), rtol=0.02, atol=0)


def test_sderf_minimises_each_direction_and_equals_oprf_on_isotropic_data() -> None:
    lam = torch.tensor([0.0, 1e-9, 0.1, 1.0, 30.0], dtype=torch.float64)
    a = var.sderf_a(lam)
    assert float(a[0]) == 0.0
    assert float(a[1]) == pytest.approx(-4e-9 / 8, rel=1e-6)  # t = 1 + 4 lam: kept although 1 - t cancels

    def loss(a: torch.Tensor) -> torch.Tensor:
        t = 1 - 8 * a
        return torch.log((1 + t) / 2) - torch.log(t) / 2 + lam / t

    for step in (-1e-3, 1e-3):
        assert bool((loss(a + step)[2:] > loss(a)[2:]).all())
    assert float(var.oprf_optimal_a(8, 8.0)) == pytest.approx(float(a[3]), rel=1e-14)


@pytest.mark.parametrize(("dim", "biases"), [(16, (-0.013, -0.163, -0.453)), (64, (-0.004, -0.055, -0.190))])
def test_bias_of_constant_norms(dim: int, biases: tuple[float, ...]) -> None:
    v = torch.tensor([1.0, 4.0, 8.0], dtype=torch.float64)
    got = var.sqrt_norm_bias(dim, v).numpy()
    exact = np.exp(-v.numpy() / 2) * special.hyp0f1(dim / 2, dim * v.numpy() / 4) - 1
    np.testing.assert_allclose(got, exact, rtol=1e-11)
    np.testing.assert_allclose(got, biases, atol=6e-4)
    assert float(var.sqrt_norm_bias(dim, 1e-3)) == pytest.approx(-1e-6 / (4 * (dim + 2)), rel=1e-2)


def _row_error(tau: float, polynomial: Callable[[Any], Any]) -> float:
    """|A^ - A|^2 / |A|^2 of normalised rows with scores tau g, g ~ N(0, 1), by Gauss-Hermite quadrature."""
    nodes, weights = special.roots_hermitenorm(120)
    weights = weights / weights.sum()
    exact, approximate = np.exp(tau * nodes), polynomial(tau * nodes)
    exact, approximate = exact / (weights @ exact), approximate / (weights @ approximate)
    return float(weights @ (exact - approximate) ** 2 / (weights @ exact**2))


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0, 1.5])
def test_polynomial_errors_of_gaussian_rows(tau: float) -> None:
    for degree in range(4):
        coefficients = [1 / math.factorial(j) for j in range(degree, -1, -1)]
        taylor = _row_error(tau, partial(np.polyval, coefficients))
        assert float(var.taylor_error(degree, tau)) == pytest.approx(taylor, rel=1e-9)
    hermite = _row_error(tau, lambda s: 1 - tau**2 / 2 + s + s**2 / 2)
    assert float(var.hermite_error(2, tau)) == pytest.approx(hermite, rel=1e-9)
    assert float(var.hermite_error(0, tau)) == pytest.approx(_row_error(tau, np.ones_like), rel=1e-12)


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.2, math.pi / 2, 2.5, math.pi])
def test_arc_cosine_kernels(angle: float) -> None:
    # omega in the plane of x and y: radius^2 has mean 2 and is independent of the direction.
    theta = np.linspace(0, 2 * math.pi, 200_001)[:-1]
    a, b = np.cos(theta), np.cos(theta - angle)
    relu = 2 * np.mean(np.maximum(a, 0) * np.maximum(b, 0))
    assert float(var.relu_kernel(2.0, 1.5, angle)) == pytest.approx(3 * relu, abs=1e-8)
    assert float(var.abs_kernel(2.0, 1.5, angle)) == pytest.approx(3 * 2 * np.mean(np.abs(a * b)), abs=1e-8)


def test_everything_broadcasts_and_returns_float64() -> None:
    v = torch.rand(3, 1, 4)
    for projection in var.COUPLINGS:
        for family in var.FAMILIES:
            got = var.kernel_variance(family, v, dim=6, directions=9, projection=projection, a=torch.full((5, 1), -0.1))
            assert got.dtype == torch.float64
            assert got.shape == ((3, 5, 4) if family.startswith("oprf") else (3, 1, 4))
    assert var.kernel_variance("positive", torch.empty(0), dim=4, directions=4).shape == (0,)


def test_closed_forms_have_values_under_a_meta_default_device() -> None:
    with torch.device("meta"):  # models are built there, and OPRF maps compute their A while they are
        assert float(var.oprf_optimal_a(16, 4.0)) < 0
        assert float(var.kernel_variance("trig", 0.5, dim=16, directions=16, projection="simplex")) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: var.relative_variance("positiv", 1.0),
            r"family='positiv' is not known; expected one of .*; did you mean 'positive'",
        ),
        (lambda: var.relative_variance("oprf", 1.0), "needs dim and a"),
        (lambda: var.relative_variance("oprf", 1.0, dim=4, a=0.1), "a must not be positive"),
        (
            lambda: var.kernel_variance("trig", 1.0, dim=4, directions=4, projection="ortho"),
            "did you mean 'orthogonal'",
        ),
        (lambda: var.kernel_variance("trig", 1.0, dim=4, directions=0), "directions must be at least 1, got 0"),
        (lambda: var.kernel_variance("trig", 1.0, dim=4, directions=0, projection="gaussian"), "directions must be"),
        (lambda: coupling.orthogonal_gain(0, 1.0), "dim must be at least 1, got 0"),
        (lambda: coupling.orthogonal_gain(4, -1.0), "squared distance must not be negative"),
        (lambda: coupling.simplex_gain(1, 1.0), "dim must be at least 2, got 1"),
        (lambda: var.hadamard_kurtosis(8, 0, 1.0), "blocks must be at least 1, got 0"),
        (lambda: var.taylor_error(-1, 1.0), "degree must be at least 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
