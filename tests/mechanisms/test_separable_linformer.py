"""Separable Linformer: rows sum to one where the printed form's do not, and no projection size in the cost."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq


def _inputs(length, heads=2, width=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, heads, length, width, generator=generator, dtype=torch.float64).unbind()


PROJECTED = {"projected": True, "length": 64, "rank": 16}


def test_rows_sum_to_one_and_those_of_the_printed_form_do_not():
    q, k, _ = _inputs(64)
    ones = torch.ones_like(q[..., :1])
    assert (sq.attention(q, k, ones, "separable-linformer") - 1).abs().max() <= 1e-12
    # Segment means keep a constant a constant, so what is left are the weights on the projected tokens.
    assert (sq.attention(q, k, ones, "separable-linformer", **PROJECTED) - 1).abs().max() <= 1e-6
    printed = torch.softmax(q, -2) @ torch.softmax(k, -1).mT  # column sums for both
    assert (printed.sum(-1) - 1).abs().max() > 0.05


def test_the_papers_delta_makes_the_softmax_uniform():
    assert torch.tensor(2.0) ** -150 == 0
    assert torch.tensor(2.0, dtype=torch.float64) ** -1075 == 0
    e = torch.randn(16, 200) * torch.tensor(2.0) ** -200
    k = torch.randn(200, 8)
    assert (torch.softmax(e @ k, 0) == 1 / 16).all()


@pytest.mark.parametrize("masked", [False, True])
def test_without_projections_it_is_efficient_attention(masked):
    q, k, v = _inputs(40)
    mask = torch.rand(2, 40) > 0.3 if masked else None
    got = sq.attention(q, k, v, "separable-linformer", key_mask=mask)
    assert torch.equal(got, sq.attention(q, k, v, "efficient", key_mask=mask))


def test_the_projected_form_is_its_equation():
    q, k, v = _inputs(50)
    attn = sq.create("separable-linformer", 8, 2, **{**PROJECTED, "sharing": "none", "init": "jl"}).double()
    with torch.no_grad():
        attn.projection.values.normal_()
    e, f = attn.projection.keys[..., :50], attn.projection.values[..., :50]
    want = torch.softmax(q, -1) @ (torch.softmax(e @ k, -2).mT @ (f @ v))
    assert (attn(q, k, v) - want).abs().max() <= 1e-12
    halved = torch.softmax(0.5 * q, -1) @ (torch.softmax(0.5 * e @ k, -2).mT @ (f @ v))
    assert (attn(q, k, v, scale=0.25) - halved).abs().max() <= 1e-12


def _flops(tokens, **options):
    attn = sq.create("separable-linformer", 8, **options)
    q, k, v = torch.randn(3, 1, 1, tokens, 8)
    with FlopCounterMode(display=False) as counter:
        attn(q, k, v, chunk_size=4096)  # the counter cannot look into the native kernels, which choose their own
    return counter.get_total_flops()


def test_the_cost_has_no_projection_size_in_it_unless_projected():
    plain = [_flops(512, length=512, rank=rank) for rank in (16, 64, 256)]
    assert plain[0] == plain[1] == plain[2] > 0
    assert not list(sq.create("separable-linformer", 8).parameters())
    projected = [_flops(512, projected=True, length=512, rank=rank) for rank in (16, 64, 256)]
    assert projected[1] - projected[0] >= 2 * 48 * 512 * 16  # E k and F v
    assert projected[2] - projected[1] == 4 * (projected[1] - projected[0])
    # From the right: linear in the length, both ways.
    assert _flops(1024) == 2 * plain[0]
    assert _flops(1024, projected=True, length=1024, rank=16) < 2.1 * projected[0]


def test_tying_needs_projections():
    shared = {**PROJECTED, "sharing": "layers"}
    first, second = (sq.create("separable-linformer", 8, **shared) for _ in range(2))
    second.tie(first)
    assert second.projection.keys is first.projection.keys
    with pytest.raises(ValueError, match="no projections to share"):
        sq.create("separable-linformer", 8).tie(first)
    with pytest.raises(TypeError, match="expected another separable-linformer"):
        first.tie(sq.create("separable-linformer", 8))


def test_wrong_input():
    q, k, v = _inputs(65)
    with pytest.raises(ValueError, match=r"65 tokens .* length=64"):
        sq.attention(q, k, v, "separable-linformer", **PROJECTED)
    with pytest.raises(TypeError, match="projected must be True or False"):
        sq.create("separable-linformer", 8, projected="yes")
    with pytest.raises(ValueError, match="'efficient', which has a causal form"):
        sq.attention(q, k, v, "separable-linformer", is_causal=True)
