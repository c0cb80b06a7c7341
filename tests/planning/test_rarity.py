"""Which predictions are trusted: the spread between draws, and the rows that a prediction looks at."""

import math

import pytest
import torch

import subquad as sq
from subquad.planning.measuring import Piece
from subquad.planning.rarity import draw_variance, normaliser_skew
from subquad.planning.sampling import blocks, pick_by_size, pick_keys

ONE = torch.ones(1, dtype=torch.float64)


def spread(z, a=None, *, paired=False, own=None, rows=None):
    """V of Z (n, K, D) with equal shares."""
    z = torch.as_tensor(z, dtype=torch.float64)
    n, keys, dim = z.shape
    a = torch.zeros(dim, dtype=torch.float64) if a is None else a
    own = torch.ones(n, keys, dtype=torch.float64) if own is None else own
    rows = torch.ones(n, dtype=torch.float64) if rows is None else rows
    return draw_variance(z, own, a, paired=paired, rows=rows, keys=torch.ones(n, keys, dtype=torch.float64))


@pytest.mark.parametrize("n", [0.1, 0.7, 2.0])
def test_one_pair_has_the_kurtosis_of_a_log_normal_variable(n):
    expected = math.exp(4 * n) + 2 * math.exp(3 * n) + 3 * math.exp(2 * n) - 6
    assert spread([[[math.sqrt(n), 0.0, 0.0]]]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("a", "paired"), [(0.0, True), (-0.05, False), (-0.05, True)])
def test_two_pairs_against_draws(a, paired):
    """The relative variance of the mean of two squares of single directions, less what normal variables would have."""
    z = torch.tensor([[0.6, 0.0], [0.3, 0.4]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4_000_000, 2, generator=generator, dtype=torch.float64)
    s = 1 - 4 * a

    def feature(x):
        return s * torch.exp(2 * a * x.square().sum(-1, keepdim=True) + math.sqrt(s) * x @ z.T - z.square().sum(-1) / 2)

    f = (feature(w) + feature(-w)) / 2 if paired else feature(w)
    d = f - 1
    variance = d.square().mean(0)
    scaled = (d.square() / variance).mean(-1)
    covariance = (d[:, :1] * d).mean(0)
    normal = (2 + 2 * covariance[1] ** 2 / (variance[0] * variance[1])) / 2  # of the mean of two normal squares
    found = spread(z.unsqueeze(1), torch.full((2,), a, dtype=torch.float64), paired=paired)
    assert found == pytest.approx(float(scaled.var() - normal), rel=0.1)


@pytest.mark.parametrize(("a", "paired"), [(0.0, False), (0.0, True), (-0.05, True)])
def test_the_skew_of_the_normaliser_against_draws(a, paired):
    """One query, three keys: E[d_j^2 e] of single directions over the variance of the pair that carries the error."""
    z = torch.tensor([[0.6, 0.0], [0.3, 0.4], [-0.2, 0.5]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    w = torch.randn(1_000_000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    s = 1 - 4 * a

    def feature(x):
        return s * torch.exp(2 * a * x.square().sum(-1, keepdim=True) + math.sqrt(s) * x @ z.T - z.square().sum(-1) / 2)

    d = ((feature(w) + feature(-w)) / 2 if paired else feature(w)) - 1
    expected = float((d[:, 0].square() * (d @ weights[0])).mean() / d[:, 0].square().mean())
    own = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    ones = torch.ones(1, 3, dtype=torch.float64)
    tilt = torch.full((2,), a, dtype=torch.float64)
    found = normaliser_skew(z.unsqueeze(0), own, weights, tilt, paired=paired, rows=ONE, keys=ones)
    assert found == pytest.approx(expected, rel=0.1)


def test_the_next_order_says_what_the_first_misses():
    """What the formula is off by falls as 1/M: no rare draws here, and still 16 features are too few for it."""
    generator = torch.Generator().manual_seed(4)
    q, k = 0.4 * torch.randn(2, 1, 1, 256, 16, generator=generator)
    options = {"features": "oprf", "antithetic": True}
    few, many = (sq.predict_error(q, k, "performer", num_features=m, **options) for m in (16, 512))
    assert not few.reliable
    assert "too few features" in few.reason
    assert many.reliable


def test_many_directions_share_what_one_would_carry_alone():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(40, 10, 64, generator=generator, dtype=torch.float64)
    z = 1.5 * z / z.norm(dim=-1, keepdim=True)
    alone = spread(z[:1, :1])
    many = spread(z, rows=torch.full((40,), 50.0, dtype=torch.float64))
    assert many < alone / 100
    # A pair that owns the error is alone again, whatever stands beside it.
    own = torch.full((40, 10), 1e-9, dtype=torch.float64)
    own[3, 4] = 1.0
    assert spread(z, own=own) == pytest.approx(alone, rel=0.01)
    assert spread(z, own=0 * own) == 0.0


def test_sizes_are_summed_exactly_and_large_ones_taken_for_sure():
    generator = torch.Generator().manual_seed(0)
    size = torch.rand(1000, generator=generator).double()
    size[[3, 700]] = 500.0
    index, multiples = pick_by_size(size, 30)
    assert len(index) <= 30
    assert {3, 700} <= set(index.tolist())
    assert multiples[index == 3].tolist() == [1.0]
    assert float((size[index] * multiples).sum()) == pytest.approx(float(size.sum()), rel=0.05)
    assert float((multiples * size[index] ** 0).sum()) == pytest.approx(1000, rel=0.3)  # also of what is not the size
    assert pick_by_size(size[:5], 30)[0].tolist() == [0, 1, 2, 3, 4]
    assert len(pick_by_size(torch.zeros(100), 7)[0]) == 7


def test_keys_with_large_errors_are_looked_at():
    """A key of small weight and huge norm carries the error of a row; by weight alone it would be sampled at best."""
    generator = torch.Generator().manual_seed(1)
    q, k = 0.3 * torch.randn(2, 1, 1, 400, 16, generator=generator, dtype=torch.float64)
    (block,) = blocks(q, k, None, scale=0.25, is_causal=False, key_mask=None, max_queries=3)
    sizes = torch.zeros_like(block.weights)
    small = block.weights.argmin(-1)
    sizes[torch.arange(3), small] = 1.0
    index, count = pick_keys(block, 64, sizes)
    for row in range(3):
        place = (index[row] == small[row]).nonzero().flatten()
        assert len(place) == 1
        assert float(count[row, place]) == 1.0
        assert len(set(index[row].tolist())) == 64
    torch.testing.assert_close(count.sum(-1), torch.full((3,), 400.0, dtype=torch.float64))


def test_a_few_huge_tokens_are_not_trusted():
    """Three tokens of 700 carry the expected error with draws that hardly ever come: the flag must say so."""
    generator = torch.Generator().manual_seed(2)
    q, k = 0.25 * torch.randn(2, 1, 1, 700, 32, generator=generator)
    calm = sq.predict_error(q, k, "performer", num_features=512)
    q[:, :, [10, 300, 555]] *= 7
    k[:, :, [10, 300, 555]] *= 7
    wild = sq.predict_error(q, k, "performer", num_features=512)
    assert calm.reliable
    assert not wild.reliable
    piece = Piece(q, k, None, tokens=700, is_causal=False, scale=None, key_mask=None, seed=0)
    found = piece.error(sq.create("performer", 32, num_features=512, seed=0), draws=8)
    assert not 1 / 1.2 < found / wild.error < 1.2


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_that_carry_the_error_are_found(is_causal):
    """Norms that differ by a factor of five: 16 rows of 600 give what all of them give."""
    generator = torch.Generator().manual_seed(3)
    q, k = 0.25 * torch.randn(2, 1, 1, 600, 16, generator=generator, dtype=torch.float64)
    q *= torch.exp(0.4 * torch.randn(600, 1, generator=generator, dtype=torch.float64))
    options = {"num_features": 256, "features": "oprf", "antithetic": True, "is_causal": is_causal, "max_keys": 128}
    few = sq.predict_error(q, k, max_queries=16, **options)
    many = sq.predict_error(q, k, max_queries=200, **options)
    assert few.error == pytest.approx(many.error, rel=0.1)
