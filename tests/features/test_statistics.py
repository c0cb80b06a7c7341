"""Statistical acceptance: are the estimators unbiased, and is their variance the closed one?

A z-test divides by the *closed-form* standard error of independent rows; rows that depend on each other in a block only
lower it. It passes iff |z| <= 6: a normal tail of 2e-9, at most 1e-8 with the skewness of these estimators at 262,144
rows. Every fault found in public code is written out here and has to fail the check that the library passes.
"""

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from subquad.features.hadamard import HadamardProjection, fwht
from subquad.features.projections import PROJECTIONS, make_projection
from subquad.features.random import ExponentialFeatures, RandomFeatures, TrigFeatures
from subquad.features.seeded import Projection, chi
from subquad.features.variance import kernel_variance, oprf_optimal_a, relative_variance, sqrt_norm_bias

D = 16
BLOCKS = 16384
ROWS = D * BLOCKS
LIMIT = 6.0
FAMILIES = ("positive", "hyperbolic", "trig", "oprf", "oprf-antithetic")
A = float(oprf_optimal_a(D, 1.0))


@cache
def projection(kind: str, dim: int = D, **options: object) -> Projection:
    return make_projection(kind, ROWS, dim, seed=2024, **options)


def pair(direction: Tensor, v: float, w: float) -> Tensor:
    """x, y with x + y along `direction`, |x + y|^2 = v, |x - y|^2 = w: (2, dim)."""
    z = direction / direction.norm() * math.sqrt(v)
    u = torch.randn(z.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    u = u - (u @ z) / (z @ z) * z
    u = u / u.norm() * math.sqrt(w)
    return torch.stack((z + u, z - u)) / 2


def generic(dim: int = D) -> Tensor:
    # Towards (1, ..., 1), along which a wrong sign convention shows: it is invisible in some directions.
    return torch.randn(dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5


def spike(dim: int = D) -> Tensor:
    return torch.eye(dim, dtype=torch.float64)[0]


def feature_map(family: str, w: Projection) -> RandomFeatures:
    """The library's map of this family, on the projection given."""
    name = family.removesuffix("-antithetic")
    if family == "trig":
        phi: RandomFeatures = TrigFeatures(w.dim, 2, seed=0)
    else:
        phi = ExponentialFeatures(w.dim, 2, features=name, antithetic=name != family, seed=0)
    if name == "oprf":
        phi.get_buffer("a").fill_(A)
    # Built small and then handed the large projection, which is drawn once for all families.
    phi.projection = w
    phi.num_features = w.rows * (2 if family in ("hyperbolic", "trig", "oprf-antithetic") else 1)
    return phi


def row_estimates(family: str, w: Projection, *pairs: Tensor) -> Tensor:
    """The kernel estimate of every row over e^{x.y}, from the library's features: (pairs, rows), mean 1 if unbiased."""
    x, y = torch.stack(pairs, 1).float().unsqueeze(1).unbind(0)  # (1, pairs, dim) each
    phi = feature_map(family, w)
    q, k = phi.queries(x, 1.0), phi.keys(y, 1.0)
    assert q.log_scale is not None
    assert k.log_scale is not None
    product = torch.exp(q.log_scale + k.log_scale - (x * y).sum(-1, keepdim=True))
    if q.values is not None and k.values is not None:
        product = product * q.values * k.values
    product = product[0].double() * w.rows
    return product if product.shape[1] == w.rows else product[:, : w.rows] + product[:, w.rows :]


def standard_error(family: str, w: Projection) -> float:
    """Of the mean over all rows at v = w = 1, taken as independent."""
    return math.sqrt(float(relative_variance(family, 1.0, dim=w.dim, a=A)) / w.rows)


def kernel_z(family: str, w: Projection, direction: Tensor) -> float:
    return (float(row_estimates(family, w, pair(direction, 1.0, 1.0)).mean()) - 1) / standard_error(family, w)


def block_ratio(family: str, estimates: Tensor, kind: str) -> float:
    """Measured variance of the mean of one block of 16 rows at v = w = 1/4, over the closed form."""
    exact = kernel_variance(family, 0.25, dim=D, directions=D, projection=kind, a=A)
    return float((estimates.view(-1, D).mean(-1) - 1).square().mean() / exact)


@cache
def measured(kind: str, family: str) -> dict[str, float]:
    """The three measurements of one projection and one family, from one pass over its rows."""
    w = projection(kind)
    pairs = pair(generic(), 1.0, 1.0), pair(spike(), 1.0, 1.0), pair(generic(), 0.25, 0.25)
    plain, sparse, near = row_estimates(family, w, *pairs)
    error = standard_error(family, w)
    return {
        "generic z": (float(plain.mean()) - 1) / error,
        "sparse z": (float(sparse.mean()) - 1) / error,
        "block ratio": block_ratio(family, near, kind),
    }


class Given(Projection):
    """A projection with a matrix of our own, to pass the wrong ones through the library's feature maps."""

    def __init__(self, matrix: Tensor) -> None:
        self._given = matrix
        super().__init__(*matrix.shape, seed=0)

    def _sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"matrix": self._given}

    def as_matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.get_buffer("matrix").to(dtype)


# The faults, each as its public code has it


def gaussian_blocks(dim: int, seed: int = 1) -> tuple[Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS // dim, dim, dim, generator=g, dtype=torch.float64), g


@cache
def unsigned_qr(dim: int = D) -> Tensor:
    """google-research, and performer-pytorch by default: LAPACK's Q as it comes."""
    blocks, g = gaussian_blocks(dim)
    q: Tensor = torch.linalg.qr(blocks)[0]
    return q.flatten(0, 1) * chi((ROWS,), dim, g).unsqueeze(-1)


def reused_norms(dim: int) -> Tensor:
    """fast-transformers: the row norms of the very Gaussian block that Q was made from."""
    blocks, _ = gaussian_blocks(dim)
    factors: tuple[Tensor, Tensor] = torch.linalg.qr(blocks)
    q = factors[0] * factors[1].diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # only the fault that is meant
    norms = torch.sqrt(blocks.square().sum(-1))
    return (q * norms.unsqueeze(-2)).mT.flatten(0, 1)


def short_rows() -> Tensor:
    """Hadamard-Rademacher report: unit rows over sqrt(m/d), a norm of sqrt(d/m) that tends to 0."""
    return unit_rows() * math.sqrt(D / ROWS)


def unit_rows() -> Tensor:
    return projection("orthogonal", norms="sqrt").as_matrix(torch.float64) / math.sqrt(D)


def summed_factors(with_norms: bool) -> Tensor:
    """Hadamard-Rademacher report: `SD += H D_i` where the product of the factors is meant."""
    g = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (BLOCKS, 3, 1, D), generator=g).double() * 2 - 1
    h = fwht(torch.eye(D, dtype=torch.float64), orthonormal=True)
    rows = (h * signs).sum(1).flatten(0, 1)
    return rows * chi((ROWS,), D, g).unsqueeze(-1) if with_norms else rows


def stray_two_pi() -> Tensor:
    return projection("orthogonal").as_matrix(torch.float64) * (2 * math.pi)


# Unbiasedness


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", list(PROJECTIONS))
def test_kernel_is_unbiased_and_its_variance_the_closed_form(kind: str, family: str) -> None:
    found = measured(kind, family)
    assert abs(found["generic z"]) <= LIMIT
    assert 0.85 < found["block ratio"] < 1.15


@pytest.mark.parametrize("family", ["positive", "hyperbolic"])
@pytest.mark.parametrize("kind", list(PROJECTIONS))
def test_kernel_is_unbiased_on_a_sparse_direction(kind: str, family: str) -> None:
    assert abs(measured(kind, family)["sparse z"]) <= LIMIT


@pytest.mark.parametrize("kind", ["orthogonal", "simplex"])
def test_kernel_is_unbiased_in_few_dimensions(kind: str) -> None:
    w = projection(kind, 4)
    for family in ("positive", "hyperbolic"):
        assert abs(kernel_z(family, w, spike(4))) <= LIMIT


EVERY = ("positive", "hyperbolic", "trig")
FAULTS: list[tuple[str, Callable[[], Tensor], Tensor, tuple[str, ...]]] = [
    ("sum of factors", lambda: summed_factors(False), generic(), EVERY),
    ("sum of factors with chi norms", lambda: summed_factors(True), generic(), EVERY),
    ("rows of norm sqrt(d/m)", short_rows, generic(), EVERY),
    ("unit rows", unit_rows, generic(), EVERY),
    ("QR without the sign fix", unsigned_qr, generic(), ("positive",)),
    ("QR without the sign fix, sparse", unsigned_qr, spike(), ("positive",)),
    ("norms of the same Gaussian block", lambda: reused_norms(4), spike(4), ("positive", "hyperbolic")),
    ("stray 2 pi", stray_two_pi, generic(), EVERY),
]


@pytest.mark.parametrize(("make", "direction", "families"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_published_faults_fail_the_kernel_test(
    make: Callable[[], Tensor], direction: Tensor, families: tuple[str, ...]
) -> None:
    wrong = Given(make())
    for family in families:
        assert abs(kernel_z(family, wrong, direction)) > LIMIT, family


@pytest.mark.parametrize("family", ["positive", "hyperbolic"])
def test_one_hadamard_factor_fails_on_a_sparse_direction(family: str) -> None:
    assert abs(kernel_z(family, projection("hadamard", blocks=1), spike())) > LIMIT


@pytest.mark.parametrize("kind", ["orthogonal", "gaussian", "simplex"])
def test_constant_norms_have_the_closed_bias(kind: str) -> None:
    w = projection(kind, norms="sqrt")
    for family in ("hyperbolic", "trig"):
        assert abs(kernel_z(family, w, generic())) > LIMIT
    # Without the heavy tail of chi the variance is smaller: the closed form remains an upper bound.
    z = float(sqrt_norm_bias(D, 1.0)) / standard_error("hyperbolic", w)
    assert abs(kernel_z("hyperbolic", w, generic()) - z) <= LIMIT


# Marginals


def norm_z(matrix: Tensor) -> tuple[float, float]:
    """z of the mean and of the variance of |omega|^2, a chi^2(d): mean d, variance 2d, fourth moment 12d^2 + 48d."""
    dim, n = matrix.shape[1], matrix.shape[0]
    squares = matrix.square().sum(-1)
    mean = (float(squares.mean()) - dim) / math.sqrt(2 * dim / n)
    variance = (float((squares - dim).square().mean()) - 2 * dim) / math.sqrt((8 * dim**2 + 48 * dim) / n)
    return mean, variance


@pytest.mark.parametrize("kind", list(PROJECTIONS))
def test_norms_are_chi(kind: str) -> None:
    assert max(map(abs, norm_z(projection(kind).as_matrix(torch.float64)))) <= LIMIT


@pytest.mark.parametrize(
    "make",
    [short_rows, unit_rows, lambda: summed_factors(True), lambda: projection("orthogonal", norms="sqrt").as_matrix()],
    ids=["sqrt(d/m)", "unit", "sum of factors", "sqrt(d)"],
)
def test_wrong_norms_fail_the_norm_test(make: Callable[[], Tensor]) -> None:
    assert max(map(abs, norm_z(make().double()))) > LIMIT


def mean_z(matrix: Tensor) -> float:
    return float(matrix.sum(-1).mean()) / math.sqrt(matrix.shape[1]) * math.sqrt(matrix.shape[0])


@pytest.mark.parametrize("kind", list(PROJECTIONS))
def test_rows_have_mean_zero(kind: str) -> None:
    assert abs(mean_z(projection(kind).as_matrix(torch.float64))) <= LIMIT


def test_qr_without_the_sign_fix_fails_the_mean_test() -> None:
    assert abs(mean_z(unsigned_qr())) > LIMIT


@pytest.mark.parametrize("family", ["hyperbolic", "trig", "oprf-antithetic"])
def test_rows_that_are_not_orthogonal_fail_the_variance_test(family: str) -> None:
    for wrong in (projection("gaussian"), Given(summed_factors(True))):
        estimates = row_estimates(family, wrong, pair(generic(), 0.25, 0.25))[0]
        assert block_ratio(family, estimates, "orthogonal") > 1.15


# Padding to a power of two


def padding_bias(w: Projection) -> float:
    return float(row_estimates("hyperbolic", w, pair(generic(20), 2.0, 1.0)).mean()) - 1


def test_padding_is_unbiased_with_the_norms_of_the_padded_width() -> None:
    w = HadamardProjection(320_000, 20, seed=8)  # 10,000 blocks of 32
    assert abs(padding_bias(w)) < 0.012  # 6.7 standard errors
    short = w.as_matrix(torch.float64) / w.lengths.double().unsqueeze(-1)
    short = short * chi((320_000,), 20, torch.Generator().manual_seed(1)).unsqueeze(-1)
    assert padding_bias(Given(short)) < -0.1
