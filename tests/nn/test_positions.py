"""Positions: formulas, precision far out, and padding that takes none."""

import math

import pytest
import torch

import subquad as sq
from subquad.nn.positions import LearnedPositions, SinusoidalPositions, rotation_at, token_positions


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoidal_formula(dim):
    positions = torch.tensor([0, 1, 5, 100])
    got = SinusoidalPositions(dim)(torch.zeros(2, 4, dim, dtype=torch.float64), positions)
    for row, p in enumerate(positions.tolist()):
        for i in range(dim):
            angle = p * 10000.0 ** (-2 * (i // 2) / dim)
            assert abs(got[1, row, i] - (math.cos(angle) if i % 2 else math.sin(angle))) <= 1e-12


def test_rotary_formula():
    x = torch.randn(1, 1, 2, 6, dtype=torch.float64)
    got = rotation_at(torch.tensor([3, 70]), 6, base=50.0, dtype=torch.float64)(x)
    for row, p in enumerate((3, 70)):
        for i in range(3):
            angle = p * 50.0 ** (-2 * i / 6)
            a, b = x[0, 0, row, i], x[0, 0, row, i + 3]
            assert abs(got[0, 0, row, i] - (a * math.cos(angle) - b * math.sin(angle))) <= 1e-12
            assert abs(got[0, 0, row, i + 3] - (b * math.cos(angle) + a * math.sin(angle))) <= 1e-12


def test_the_millionth_token_is_placed_as_well_as_the_first(decoder, tokens):
    """Scores depend on distances only; angles in float32 would be off by 0.03 out there."""
    model, ids = decoder("softmax", dtype=torch.float32), tokens(1, 12)
    near, _ = model.scan(ids)
    far, states = model.scan(ids, start=1_000_003)
    assert (near - far).abs().max() <= 1e-4
    assert int(states.start + states.length) == 1_000_015


def test_padding_takes_no_position():
    mask = torch.tensor([[False, True, False, True, True], [True, True, True, False, False]])
    got = token_positions(5, mask, mask.device)
    assert got[0, mask[0]].tolist() == [0, 1, 2] and got[1, mask[1]].tolist() == [0, 1, 2]
    later = token_positions(5, mask, mask.device, torch.tensor([10, 20]))
    assert torch.equal(later[mask], (got + torch.tensor([[10], [20]]))[mask])
    assert later[0, 0] == 9 and later[1, 3:].tolist() == [22, 22]  # of the real token before
    assert token_positions(3, None, mask.device).tolist() == [0, 1, 2]


def test_learned_positions_are_looked_up():
    layer = LearnedPositions(6, 4)
    x = torch.randn(2, 3, 4)
    assert torch.equal(layer(x, torch.arange(3)), x + layer.weight[:3])
    own = torch.tensor([[0, 1, 2], [3, 4, 5]])
    assert torch.equal(layer(x, own), x + layer.weight[own])
    with pytest.raises(ValueError, match="reaches 8 positions, but only max_length=6"):
        layer(x, own + 2)


def test_padding_after_a_full_sequence_reaches_no_further_position():
    model = sq.nn.TransformerDecoder(1, 2, 8, 5, "linear", positions="learned", max_length=6, seed=0)
    ids, mask = (
        torch.tensor([[1, 2, 3, 4, 0, 1], [0, 0, 0, 0, 3, 4]]),
        torch.tensor([[True] * 6, [False] * 4 + [True] * 2]),
    )
    _, states = model.scan(ids, key_mask=mask)
    got, states = model.scan(torch.tensor([[1], [2]]), states, key_mask=torch.tensor([[False], [True]]))
    torch.testing.assert_close(got[1, 0], model(torch.tensor([[3, 4, 2]]))[0, 2])
    with pytest.raises(ValueError, match="reaches 7 positions"):
        model.scan(torch.tensor([[1], [2]]), states)


def test_learned_positions_begin_as_large_as_the_embedding():
    for tied in (False, True):
        model = sq.nn.TransformerDecoder(
            1, 2, 64, 50, "linear", positions="learned", max_length=64, tie_embeddings=tied, seed=0
        )
        ratio = model.positions.weight.detach().std() / model.embedding.weight.detach().std()
        assert 0.8 < float(ratio) < 1.2


def test_only_without_positions_the_order_is_unknown():
    x = torch.randn(1, 5, 16)
    for positions, options in (("none", {}), ("sinusoidal", {}), ("learned", {"max_length": 9}), ("rotary", {})):
        torch.manual_seed(0)
        model = sq.nn.TransformerEncoder(1, 2, 16, "softmax", positions=positions, seed=0, **options)
        moved = (model(x.flip(1)).flip(1) - model(x)).detach().abs().max()
        # Without positions attention does not know the order.
        assert (float(moved) <= 1e-5) is (positions == "none")
