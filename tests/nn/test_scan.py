"""A whole model token by token: in any split, forked, padded, merged, it is the model on whole sequences."""

import pytest
import torch
from torch.utils import _pytree as pytree

import subquad as sq

SPLITS = ([24], [1] * 24, [5, 1, 7, 11], [23, 1])


def scanned(model, tokens, split, states=None):
    parts = []
    for piece in tokens.split(split, 1):
        logits, states = model.scan(piece, states)
        parts.append(logits)
    return torch.cat(parts, 1), states


def test_forward_equals_scan_in_any_split(recurrent, decoder, tokens):
    model, ids = decoder(recurrent), tokens(2, 24)
    want = model(ids)
    for split in SPLITS:
        got, states = scanned(model, ids, split)
        assert (got - want).abs().max() <= 1e-10
        assert states.length.tolist() == [24, 24]


@pytest.mark.parametrize("positions", ["none", "sinusoidal", "learned", "rotary"])
def test_forward_equals_scan_in_float32_for_all_positions(positions, each_recurrent, decoder, tokens):
    limit = {"max_length": 24} if positions == "learned" else {}
    model = decoder(each_recurrent, dtype=torch.float32, positions=positions, **limit)
    ids = tokens(2, 24)
    got, _ = scanned(model, ids, [9, 1, 14])
    assert (got - model(ids)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "post", "activation": "relu"},
        {"normalization": "rms", "activation": "swiglu", "bias": False, "kv_heads": 1},
        {"reversible": True},
        {"tie_embeddings": True, "activation": "gelu_tanh", "head_dim": 6},
        {"final_norm": False, "hidden": 10},
    ],
)
def test_every_kind_of_block_scans(options, decoder, tokens):
    model = decoder(["performer", "linear"], **options)
    ids = tokens(2, 24)
    assert (scanned(model, ids, [9, 1, 14])[0] - model(ids)).abs().max() <= 1e-10


def test_positions_matter_and_are_continued(decoder, tokens):
    ids = tokens(1, 1).expand(1, 6)
    for positions, limit in (("sinusoidal", {}), ("learned", {"max_length": 6})):
        model = decoder("softmax", positions=positions, **limit)
        logits, _ = scanned(model, ids, [1] * 6)
        assert (logits[:, 1:] - logits[:, :-1]).abs().amax(-1).min() > 1e-4
    # Relative positions cannot tell equal tokens apart; different ones they can.
    model, ids = decoder("softmax", positions="rotary"), tokens(1, 6)
    _, states = model.scan(ids)
    one, _ = model.scan(ids[:, :1], states)
    _, swapped = model.scan(ids[:, [1, 0, 2, 3, 4, 5]])
    other, _ = model.scan(ids[:, :1], swapped)
    assert (one - other).abs().max() > 1e-4


def test_a_state_can_be_forked(each_recurrent, decoder, tokens):
    model, ids = decoder(each_recurrent), tokens(2, 10)
    _, states = model.scan(ids)
    before = [leaf.clone() for leaf in pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]
    for seed in (7, 8):
        more = tokens(2, 6, seed=seed)
        got, _ = model.scan(more, states)
        assert (got - model(torch.cat([ids, more], 1))[:, 10:]).abs().max() <= 1e-10
    after = [leaf for leaf in pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]
    assert len(before) > 2 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_padded_batch_scans_as_each_alone(side, each_recurrent, decoder, tokens):
    model, lengths, width = decoder(each_recurrent), (12, 7, 1), 12
    rows = [tokens(1, n, seed=20 + n) for n in lengths]
    mask = torch.zeros(3, width, dtype=torch.bool)
    ids = tokens(3, width, seed=3)  # any tokens may stand in the padding
    for i, row in enumerate(rows):
        n = row.shape[1]
        places = {"left": range(width - n, width), "right": range(n), "middle": torch.randperm(width)[:n].sort()[0]}
        mask[i, list(places[side])] = True
        ids[i, mask[i]] = row[0]
    logits, states = model.scan(ids, key_mask=mask)
    last, _ = model.scan(ids, key_mask=mask, last_only=True)
    assert states.length.tolist() == list(lengths)
    forward = model(ids, key_mask=mask)
    follow = tokens(3, 5, seed=4)
    more, _ = scanned(model, follow, [1, 1, 3], states)
    for i, row in enumerate(rows):
        alone, state = model.scan(row)
        assert (logits[i, mask[i]] - alone[0]).abs().max() <= 1e-10
        assert (forward[i, mask[i]] - alone[0]).abs().max() <= 1e-10
        assert (last[i, 0] - alone[0, -1]).abs().max() <= 1e-10
        want, _ = model.scan(follow[i : i + 1], state)
        assert (more[i] - want[0]).abs().max() <= 1e-10


def test_padding_in_a_later_piece(decoder, tokens):
    model, ids, follow = decoder(["linear", "local"]), tokens(2, 8), tokens(2, 6, seed=2)
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, False]])
    _, states = model.scan(ids)
    got, states = model.scan(follow, states, key_mask=mask)
    assert states.length.tolist() == [14, 11]
    row = torch.cat([ids[1], follow[1, mask[1]]]).unsqueeze(0)
    assert (got[1, mask[1]] - model(row)[0, 8:]).abs().max() <= 1e-10


def test_selecting_sequences_of_a_state(each_recurrent, decoder, tokens):
    model, ids, more = decoder(each_recurrent), tokens(3, 9), tokens(4, 3, seed=6)
    index = torch.tensor([2, 0, 2, 1])
    _, states = model.scan(ids)
    got, _ = model.scan(more, states.select(index))
    assert (got - model(torch.cat([ids[index], more], 1))[:, 9:]).abs().max() <= 1e-10


def test_the_size_of_a_state_does_not_depend_on_the_context(each_recurrent, decoder, tokens):
    model = decoder(each_recurrent)

    def size(length):
        _, states = model.scan(tokens(1, length))
        return sum(leaf.nbytes for leaf in pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor))

    constant = each_recurrent["mechanism"] in sq.list_mechanisms(constant_memory=True)
    assert (size(40) == size(10)) is constant


def test_gradients_flow_through_a_scan(decoder, tokens):
    model, ids = decoder(["linear", "performer"]), tokens(2, 12)

    def gradients(logits):
        logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    want = gradients(model(ids))
    model.zero_grad()
    got = gradients(scanned(model, ids, [5, 7])[0])
    assert len(got) == len(want) > 10
    assert all((a - b).abs().max() <= 1e-9 for a, b in zip(got, want, strict=True))
    _, states = model.scan(ids)
    assert any(x.requires_grad for x in pytree.tree_leaves(states) if isinstance(x, torch.Tensor))
    assert not any(x.requires_grad for x in pytree.tree_leaves(states.detach()) if isinstance(x, torch.Tensor))


def test_an_encoder_scans_causally(each_recurrent):
    model = sq.nn.TransformerEncoder(layers=2, heads=2, dim=16, mechanism=each_recurrent, seed=1).double()
    x = torch.randn(2, 15, 16, dtype=torch.float64)
    first, states = model.scan(x[:, :9])
    rest, _ = model.scan(x[:, 9:], states)
    assert (torch.cat([first, rest], 1) - model(x, is_causal=True)).abs().max() <= 1e-10
    assert (model(x) - model(x, is_causal=True)).abs().max() > 1e-4


def test_per_layer_mechanisms_and_seeds(decoder):
    model = decoder(["performer", {"mechanism": "taylor", "degree": 1}], layers=2)
    assert [m.name for m in model.mechanisms()] == ["performer", "taylor"]
    same = [m.seed for m in decoder("performer", layers=3).mechanisms()]
    assert len(set(same)) == 3 and same == [m.seed for m in decoder("performer", layers=3).mechanisms()]
    assert same != [m.seed for m in decoder("performer", layers=3, seed=6).mechanisms()]
    shared = {"mechanism": "hybrid", "far": {"mechanism": "performer", "seed": 3}}
    far = [m.far.seed for m in decoder(shared, layers=3).mechanisms()]
    assert len(set(far)) == 3
    listed = decoder([{"mechanism": "performer", "seed": 8}] * 2)
    assert [m.seed for m in listed.mechanisms()] == [8, 8]
    # Building a model takes nothing from torch's generator for its mechanisms when it has a seed of its own.
    torch.manual_seed(3)
    a = decoder("linear").head.weight
    torch.manual_seed(3)
    assert torch.equal(a, decoder("performer").head.weight)


def test_an_object_is_accepted_and_copied_per_layer(decoder, tokens):
    given = sq.create("performer", head_dim=8, num_features=16, seed=2)
    model = decoder(given)
    first, second = model.mechanisms()
    assert first is given and second is not given and second.seed == 2
    model.redraw()
    assert [m.feature_map.projection.draw_key()[1] for m in model.mechanisms()] == [1, 1]
    far = sq.create("performer", head_dim=8, num_features=16, seed=2)
    hybrids = decoder({"mechanism": "hybrid", "far": far}).mechanisms()
    assert hybrids[0].far is far and hybrids[1].far is not far
    assert model(tokens(1, 5)).shape == (1, 5, 19)


def test_a_state_moved_to_half_precision_keeps_its_sums_and_numbers(decoder, tokens):
    k = torch.randn(1, 1, 70000, 8) + 1
    state = sq.create("linear", 8).absorb(k, k)
    moved = state.to(torch.float16)
    assert torch.equal(moved.weighted, state.weighted) and torch.equal(moved.count, state.count)
    model, ids = decoder(["linear", "softmax"], dtype=torch.float32), tokens(1, 12)
    _, states = model.scan(torch.cat([ids] * 200, 1))
    moved = states.to("cpu", torch.bfloat16)
    assert torch.equal(moved.length, states.length) and moved.start.dtype == torch.int64
    assert torch.equal(moved.layers[0].weighted, states.layers[0].weighted)
    assert moved.layers[1].k.dtype == torch.bfloat16 and moved.layers[1].mask.dtype == torch.bool  # tokens as they came
    model.to(torch.bfloat16)
    assert model.scan(ids, moved)[0].isfinite().all()
    constant = sq.create("multipole", 8, memory="constant").absorb(k[:, :, :900], k[:, :, :900])
    assert constant.to(torch.float16).mean.dtype == torch.float32
