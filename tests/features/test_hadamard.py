"""The fast transform against Sylvester's matrix, and the projection made of it against its definition."""

import math

import pytest
import torch
from torch import Tensor

from subquad.features.hadamard import HadamardProjection, fwht, next_power_of_two
from subquad.features.variance import hadamard_kurtosis


def sylvester(n: int) -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64, 256])
def test_transform_is_sylvesters_matrix_and_an_involution(n: int) -> None:
    x = torch.randn(3, 5, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    assert float((fwht(x) - x @ sylvester(n)).abs().max()) < 1e-10
    assert float((fwht(fwht(x)) - n * x).abs().max()) < 1e-10
    assert float((fwht(fwht(x, orthonormal=True), orthonormal=True) - x).abs().max()) < 1e-10


def test_transform_of_integers_is_exact() -> None:
    x = torch.arange(-8, 8)
    assert torch.equal(fwht(x), (x.double() @ sylvester(16)).long())


def test_check_catches_the_published_recursion() -> None:
    """The Hadamard-Rademacher report transforms both halves and then combines the halves it was given."""

    def published(v: Tensor) -> Tensor:
        if v.shape[-1] == 1:
            return v
        v0, v1 = v.chunk(2, -1)
        published(v0), published(v1)
        return torch.cat((v0 + v1, v0 - v1), -1)

    def twice(v: Tensor) -> Tensor:
        if v.shape[-1] == 1:
            return v
        y0, y1 = (twice(h) for h in v.chunk(2, -1))
        return fwht(torch.cat((y0 + y1, y0 - y1), -1))

    x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for wrong in (published, twice):
        assert float((wrong(x) - x @ sylvester(8)).abs().max()) > 1.0


def test_transform_is_differentiable_batched_and_compiled() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fwht, (x,))
    assert torch.equal(torch.func.vmap(fwht, in_dims=1, out_dims=1)(x), fwht(x))
    assert torch.equal(torch.compile(fwht, backend="aot_eager", fullgraph=True)(x), fwht(x))
    strided = torch.randn(8, 4, dtype=torch.float64).mT
    assert torch.equal(fwht(strided), fwht(strided.contiguous()))


@pytest.mark.parametrize("shape", [(3,), (2, 12), (4, 0), ()])
def test_transform_refuses_other_lengths(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="power of two, got shape"):
        fwht(torch.zeros(shape))


def gram_defect(matrix: Tensor) -> float:
    """How far the rows of one block, norm sqrt(d), are from orthonormal after division by sqrt(d)."""
    gram = matrix @ matrix.mT / matrix.shape[-1]
    return float((gram - torch.eye(matrix.shape[-2], dtype=matrix.dtype)).abs().max())


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [1, 2, 16, 64])
def test_rows_of_a_block_are_orthogonal(dim: int, blocks: int) -> None:
    w = HadamardProjection(dim, dim, blocks=blocks, norms="sqrt", seed=1)
    # sqrt(dim) itself is stored in float32; divide by what is stored.
    matrix = w.as_matrix(torch.float64) * (math.sqrt(dim) / w.lengths.double().unsqueeze(-1))
    assert gram_defect(matrix) < 1e-12


def test_check_catches_the_sum_of_factors() -> None:
    """The report's code adds H' D_i where it should multiply: rows neither of norm sqrt(d) nor orthogonal."""
    signs = torch.randint(0, 2, (3, 16), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    h = sylvester(16) / 4
    product, total = torch.eye(16, dtype=torch.float64), torch.zeros(16, 16, dtype=torch.float64)
    for s in signs:
        product = h @ torch.diag(s) @ product
        total += h @ torch.diag(s)
    assert gram_defect(product * 4) < 1e-12
    assert gram_defect(total * 4) > 0.5


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize(("rows", "dim"), [(8, 8), (20, 8), (3, 8), (40, 20), (7, 1), (5, 3)])
def test_forward_is_the_product_of_its_factors(rows: int, dim: int, heads: int | None) -> None:
    w = HadamardProjection(rows, dim, blocks=3, heads=heads, seed=4)
    width = next_power_of_two(dim)
    signs = w.signs.double().reshape(heads or 1, -1, 3, width)
    expected = []
    for head in signs:
        stack = []
        for block in head:
            m = torch.eye(width, dtype=torch.float64)
            for s in block:
                m = sylvester(width) / math.sqrt(width) @ torch.diag(s) @ m
            stack.append(m)
        expected.append(torch.cat(stack)[:rows, :dim])
    matrix = torch.stack(expected) * w.lengths.double().reshape(heads or 1, rows, 1)
    matrix = matrix[0] if heads is None else matrix
    torch.testing.assert_close(w.as_matrix(torch.float64), matrix, rtol=0, atol=1e-12)
    x = torch.randn(2, heads or 1, 6, dim, dtype=torch.float64)
    torch.testing.assert_close(w(x), x @ matrix.mT, rtol=0, atol=1e-10)
    torch.testing.assert_close(w(x.float()), (x @ matrix.mT).float(), rtol=1e-4, atol=1e-4)


def test_only_signs_and_norms_are_stored() -> None:
    w = HadamardProjection(256, 64, seed=0)
    assert {name: (b.dtype, tuple(b.shape)) for name, b in w.named_buffers()} == {
        "seed": (torch.int64, ()),
        "draws": (torch.int64, ()),
        "signs": (torch.int8, (4, 3, 64)),
        "lengths": (torch.float32, (256,)),
    }
    assert w.half().lengths.dtype == torch.float32
    assert set(w.signs.flatten().tolist()) == {-1, 1}


def test_norms_after_padding_are_those_of_the_padded_width() -> None:
    w = HadamardProjection(200_000, 20, seed=0)
    squares = w.lengths.double() ** 2
    assert abs(float(squares.mean()) - 32) < 6 * math.sqrt(2 * 32 / 200_000)
    assert float(HadamardProjection(4, 20, norms="sqrt", seed=0).lengths[0]) == pytest.approx(math.sqrt(32))


def test_gradients_reach_the_input() -> None:
    w = HadamardProjection(6, 3, seed=0)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(w, (x,))


def fourth_moment(blocks: int, direction: Tensor, count: int = 20_000) -> float:
    w = HadamardProjection(8 * count, 8, blocks=blocks, seed=11)
    return float((w.as_matrix(torch.float64) @ direction).pow(4).mean())


SPIKE = torch.eye(8, dtype=torch.float64)[0]
FLAT = torch.full((8,), 8**-0.5, dtype=torch.float64)


@pytest.mark.parametrize(("blocks", "kurtosis"), [(1, 1.25), (2, 3.4375), (3, 2.890625)])
def test_kurtosis_on_a_spike_is_the_closed_form(blocks: int, kurtosis: float) -> None:
    assert float(hadamard_kurtosis(8, blocks, 1.0)) == kurtosis
    measured = fourth_moment(blocks, SPIKE)
    assert abs(measured - kurtosis) < 0.07  # six deviations of 160,000 rows
    # The same check tells the numbers of factors apart: neighbours differ by at least 0.5.
    others = [float(hadamard_kurtosis(8, k, 1.0)) for k in (1, 2, 3) if k != blocks]
    assert all(abs(measured - other) > 0.07 for other in others)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_kurtosis_on_a_flat_direction_is_the_closed_form(blocks: int) -> None:
    expected = float(hadamard_kurtosis(8, blocks, float(FLAT.pow(4).sum())))
    # A fourth moment of 160,000 rows, at least Gaussian tails: sd at most sqrt(E g^8 / n) = sqrt(105 * 1.6 / 160,000).
    assert abs(fourth_moment(blocks, FLAT) - expected) < 6 * math.sqrt(105 * 1.6 / 160_000)


@pytest.mark.parametrize("blocks", [0, -1])
def test_no_factors_are_refused(blocks: int) -> None:
    with pytest.raises(ValueError, match=f"blocks must be at least 1, got {blocks}"):
        HadamardProjection(4, 4, blocks=blocks)
    with pytest.raises(TypeError, match=r"blocks must be an integer of at least 1, got 1\.5"):
        HadamardProjection(4, 4, blocks=1.5)  # type: ignore[arg-type]
