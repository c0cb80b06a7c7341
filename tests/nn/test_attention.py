"""The attention layer against torch's own, grouped heads, cross attention, masks; the encoder-decoder."""

import copy

import pytest
import torch

import subquad as sq


def layer_pair(**options):
    ours = sq.nn.MultiheadAttention(16, 2, "softmax", **options).double()
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True, bias=options.get("bias", True)).double()
    with torch.no_grad():
        if ours.q.bias is not None:
            for linear in (ours.q, ours.k, ours.v, ours.out):
                linear.bias.normal_()
            theirs.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.k.bias, ours.v.bias]))
            theirs.out_proj.bias.copy_(ours.out.bias)
        theirs.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
        theirs.out_proj.weight.copy_(ours.out.weight)
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_torchs_attention_with_softmax(bias):
    ours, theirs = layer_pair(bias=bias)
    x, context = torch.randn(2, 7, 16).double(), torch.randn(2, 5, 16).double()
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    assert (ours(x) - theirs(x, x, x)[0]).abs().max() <= 1e-12
    want = theirs(x, context, context, key_padding_mask=~mask)[0]
    assert (ours(x, context, key_mask=mask) - want).abs().max() <= 1e-12
    assert (ours.read(x, ours.absorb(context, key_mask=mask)) - want).abs().max() <= 1e-12


def test_grouped_heads_repeat_keys_and_values():
    grouped = sq.nn.MultiheadAttention(16, 4, "softmax", kv_heads=2, rotary=True).double()
    full = sq.nn.MultiheadAttention(16, 4, "softmax", rotary=True).double()
    state = grouped.state_dict()
    for name in ("k.weight", "k.bias", "v.weight", "v.bias"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 7, 16).double()
    assert (grouped(x, is_causal=True) - full(x, is_causal=True)).abs().max() <= 1e-12
    assert grouped.scan(x)[1].inner.k.shape[1] == 2


def test_rotary_scores_depend_on_distances_only():
    layer = sq.nn.MultiheadAttention(16, 2, "softmax", rotary=True).double()
    x = torch.randn(1, 9, 16).double()
    early, _ = layer.scan(x)
    late, _ = layer.scan(x, start=1000)
    assert (early - late).abs().max() <= 1e-10
    plain = sq.nn.MultiheadAttention(16, 2, "softmax").double()
    plain.load_state_dict(layer.state_dict())
    assert (plain.scan(x)[0] - early).abs().max() > 1e-3


def test_context_of_another_width_and_head_dim():
    layer = sq.nn.MultiheadAttention(16, 2, "linear", context_dim=10, head_dim=5)
    assert layer(torch.randn(2, 3, 16), torch.randn(2, 8, 10)).shape == (2, 3, 16)
    with pytest.raises(ValueError, match=r"context must have shape \(batch, length, 10\)"):
        layer(torch.randn(2, 3, 16), torch.randn(2, 8, 16))


def test_masked_queries_and_dropout():
    layer = sq.nn.MultiheadAttention(16, 2, "softmax", bias=False, dropout=0.5)
    x, mask = torch.randn(1, 6, 16), torch.tensor([[True] * 4 + [False] * 2])
    assert not torch.equal(layer(x), layer(x))
    out = layer.eval()(x, key_mask=mask)
    assert torch.equal(out, layer(x, key_mask=mask)) and out[0, 4:].abs().max() == 0
    only = layer(x, query_mask=mask)
    assert only[0, 4:].abs().max() == 0 and (only - layer(x))[0, :4].abs().max() == 0


def test_shared_keys_have_no_projection():
    options = {"rounds": 2, "buckets": 4, "bucket_size": 8, "shared_qk": True, "seed": 0}
    layer = sq.nn.MultiheadAttention(16, 2, "lsh", **options)
    assert layer.k is None and "k.weight" not in layer.state_dict()
    x = torch.randn(1, 12, 16, requires_grad=True)
    layer(x, is_causal=True).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="dim=15 must be a multiple of heads=2"):
        sq.nn.MultiheadAttention(15, 2)
    with pytest.raises(ValueError, match="heads=4 must be a multiple of kv_heads=3"):
        sq.nn.MultiheadAttention(16, 4, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=3 must be even"):
        sq.nn.MultiheadAttention(6, 2, rotary=True)
    with pytest.raises(ValueError, match="head_dim=4"):
        sq.nn.MultiheadAttention(16, 2, sq.create("linear", head_dim=4))
    layer = sq.nn.MultiheadAttention(16, 2, "linear")
    with pytest.raises(TypeError, match="state must be an AttentionState"):
        layer.scan(torch.randn(1, 2, 16), sq.create("linear", head_dim=8).absorb(*torch.randn(2, 1, 2, 3, 8)))
    _, state = layer.scan(torch.randn(1, 2, 16))
    with pytest.raises(ValueError, match="batch size 1, x has 2"):
        layer.scan(torch.randn(2, 2, 16), state)


@pytest.mark.parametrize("cross", ["softmax", "linear", "performer", "efficient", "taylor", "hedgehog"])
def test_an_encoder_decoder_scans(cross, tokens):
    model = sq.nn.EncoderDecoder(
        layers=2,
        heads=2,
        dim=16,
        vocab=19,
        mechanism="local",
        encoder_mechanism="nystrom",
        cross_mechanism=cross,
        decoder_layers=3,
        seed=0,
    ).double()
    source, target = torch.randn(2, 9, 16).double(), tokens(2, 8)
    source_mask = torch.arange(9) < torch.tensor([[9], [6]])
    target_mask = torch.arange(8) < torch.tensor([[8], [5]])
    want = model(source, target, source_mask=source_mask, target_mask=target_mask)
    first, states = model.scan(target[:, :3], model.encode(source, source_mask=source_mask))
    rest, states = model.scan(target[:, 3:], states, key_mask=target_mask[:, 3:])
    assert (torch.cat([first, rest], 1) - want)[target_mask].abs().max() <= 1e-10
    alone = model(source[1:, :6], target[1:, :5])
    assert (want[1, :5] - alone[0]).abs().max() <= 1e-10
    assert (model(source.flip(0), target) - model(source, target)).abs().max() > 1e-4
    seeds = [m.seed for m in model.mechanisms() if m.name == "performer"]
    assert len(seeds) == len(set(seeds))


def test_linformer_projections_are_tied_over_layers():
    choice = {"mechanism": "linformer", "length": 20, "rank": 4, "sharing": "layers"}
    model = sq.nn.TransformerEncoder(3, 2, 16, choice)
    first, second, third = (m.projection for m in model.mechanisms())
    assert first.keys is second.keys is third.keys


def test_padding_of_the_target_is_in_no_statistics(tokens):
    centred = {"mechanism": "taylor", "degree": 1, "center": True}
    model = sq.nn.EncoderDecoder(layers=1, heads=2, dim=16, vocab=19, mechanism=centred, source_vocab=19, seed=0)
    mask, found = torch.tensor([[True] * 6 + [False] * 4, [True] * 10]), []
    for seed in (1, 2):
        again = copy.deepcopy(model)
        target = torch.where(mask, tokens(2, 10), tokens(2, 10, seed=seed))
        again.calibrate(tokens(2, 7), target, target_mask=mask)
        found.append({name: x for name, x in again.state_dict().items() if "calibration" in name})
    assert any("cross" in name for name in found[0])
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name
