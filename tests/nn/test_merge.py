"""Merged whole-model states: contexts encoded independently, as under a block-diagonal mask."""

import pytest
import torch
import torch.nn.functional as F

import subquad as sq


def turned(x, positions):
    """Rotary positions by complex numbers; x (H, L, D)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def dense_logits(model, ids, positions, visible, kind):
    """The decoder written out for one sequence, with any (L, L) mask."""
    x = model.embedding.weight[ids]
    for block in model.blocks:
        h = block.attention_norm(x)
        q, k, v = (
            lin(h).unflatten(-1, (2, -1)).transpose(0, 1)
            for lin in (block.attention.q, block.attention.k, block.attention.v)
        )
        q, k = turned(q, positions), turned(k, positions)
        if kind == "softmax":
            weights = torch.softmax((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, float("-inf")), -1)
        else:
            weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).masked_fill(~visible, 0.0)
            weights = weights / weights.sum(-1, keepdim=True)
        x = x + block.attention.out((weights @ v).transpose(0, 1).flatten(1))
        h = block.feed_norm(x)
        x = x + block.feed.down(F.gelu(block.feed.up(h)))
    return model.head(model.norm(x))


@pytest.mark.parametrize("kind", ["softmax", "linear"])
@pytest.mark.parametrize("continued", [False, True])
def test_merged_contexts_are_block_diagonal(kind, continued, decoder, tokens):
    model = decoder(kind)
    a, b, follow = tokens(1, 6), tokens(1, 5, seed=2), tokens(1, 4, seed=3)
    begin = 6 if continued else 0
    _, state_a = model.scan(a)
    in_b, state_b = model.scan(b, start=begin)
    got, _ = model.scan(follow, sq.merge(state_a, state_b))

    ids = torch.cat([a, b, follow], 1)[0]
    positions = torch.cat([torch.arange(6), begin + torch.arange(5), 11 + torch.arange(4)])
    visible = torch.ones(15, 15, dtype=torch.bool).tril()
    visible[6:11, :6] = False
    want = dense_logits(model, ids, positions, visible, kind)
    assert (in_b[0] - want[6:11]).abs().max() <= 1e-10
    assert (got[0] - want[11:]).abs().max() <= 1e-10
    # And that is not the same as having read both in a row.
    full = dense_logits(model, ids, torch.arange(15), visible.new_ones(15, 15).tril(), kind)
    assert (model(ids[None])[0] - full).abs().max() <= 1e-10
    assert (full[11:] - want[11:]).abs().max() > 1e-4


def test_in_one_layer_merging_is_reading_both(merging, decoder, tokens):
    """With a single layer no context can influence how another is encoded."""
    model = decoder(merging, layers=1)
    a, b, follow = tokens(2, 9), tokens(2, 7, seed=2), tokens(2, 5, seed=3)
    _, state_a = model.scan(a)
    _, state_b = model.scan(b, start=9)
    got, after = model.scan(follow, sq.merge(state_a, state_b))
    assert after.length.tolist() == [21, 21]
    assert (got - model(torch.cat([a, b, follow], 1))[:, 16:]).abs().max() <= 1e-10


def test_merging_is_associative_and_ordered(each_recurrent, decoder, tokens):
    model, follow = decoder(each_recurrent), tokens(1, 4, seed=9)
    a, b, c = (model.scan(tokens(1, n, seed=n))[1] for n in (5, 6, 8))
    left, right = sq.merge(sq.merge(a, b), c), sq.merge(a, sq.merge(b, c))
    assert (model.scan(follow, left)[0] - model.scan(follow, right)[0]).abs().max() <= 1e-10


def test_what_cannot_be_merged_is_refused(decoder, tokens):
    one, other = decoder("linear"), decoder("linear", seed=6)
    state = one.scan(tokens(1, 4))[1]
    with pytest.raises(ValueError, match="merge: the states come from different"):
        sq.merge(state, other.scan(tokens(1, 4))[1])
    with pytest.raises(ValueError, match="batch sizes 1 and 2"):
        sq.merge(state, one.scan(tokens(2, 4))[1])
    random = decoder("performer")
    before = random.scan(tokens(1, 4))[1]
    random.redraw()
    with pytest.raises(ValueError, match="draw"):
        sq.merge(before, random.scan(tokens(1, 4))[1])


def test_a_layer_scans_and_merges_on_its_own(each_recurrent):
    layer = sq.nn.MultiheadAttention(16, 2, each_recurrent, rotary=True).double()
    x = torch.randn(2, 14, 16, dtype=torch.float64)
    want = layer(x, is_causal=True)
    _, a = layer.scan(x[:, :5])
    _, b = layer.scan(x[:, 5:10], start=5)
    got, state = layer.scan(x[:, 10:], sq.merge(a, b))
    assert (got - want[:, 10:]).abs().max() <= 1e-10
    assert state.length.tolist() == [14, 14]
