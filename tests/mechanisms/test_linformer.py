"""Linformer: exact with identity projections, the theorem's error, correct columns, sharing and refusals."""

import copy

import pytest
import torch

import subquad as sq
from subquad.mechanisms.linformer import SequenceProjection, jl_error


def _inputs(length, batch=2, heads=2, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, heads, length, width, generator=generator, dtype=dtype).unbind()


def test_identity_projections_give_softmax_attention():
    attn = sq.create("linformer", 8, length=20, rank=20).double()
    with torch.no_grad():
        attn.projection.keys.copy_(torch.eye(20))
        attn.projection.values.copy_(torch.eye(20))
    q, k, v = _inputs(20)
    assert (attn(q, k, v) - sq.attention(q, k, v, "softmax")).abs().max() <= 1e-12


def test_as_many_segments_as_tokens_start_at_softmax_attention():
    q, k, v = _inputs(20)
    got = sq.attention(q, k, v, "linformer", length=20, rank=20)
    assert (got - sq.attention(q, k, v, "softmax")).abs().max() <= 1e-12


def _jl_z(draw, p, v, rank, draws=3000):
    """How many standard errors the measured mean square error lies from the formula, and the largest z of the mean."""
    want = p @ v
    errors, total, square = [], torch.zeros_like(want), torch.zeros_like(want)
    for _ in range(draws):
        r = draw()
        found = (p @ r.mT) @ (r @ v)
        errors.append((found - want).square().sum())
        total, square = total + found, square + found.square()
    errors = torch.stack(errors)
    mean = total / draws
    deviation = (square / draws - mean.square()).sqrt() / draws**0.5
    return (
        ((errors.mean() - jl_error(p, v, rank)) / (errors.std() / draws**0.5)).item(),
        ((mean - want) / deviation).abs().max().item(),
    )


def test_the_random_start_has_the_error_of_the_theorem():
    length, rank = 32, 8
    p = torch.softmax(torch.randn(6, length, dtype=torch.float64), -1)
    v = torch.randn(length, 3, dtype=torch.float64)
    project = SequenceProjection(length, rank, 1, sharing="kv", init="jl").double()

    def draw(scale=1.0):
        project.reset_parameters()
        return scale * project.keys.detach()[0]

    error, bias = _jl_z(draw, p, v, rank)
    assert abs(error) <= 6
    assert bias <= 6
    # Entries of variance 1 / length give rows of norm 1, and an estimate that is too small by rank / length.
    error, bias = _jl_z(lambda: draw((rank / length) ** 0.5), p, v, rank)
    assert max(abs(error), bias) > 20


def test_random_projections_are_worse_than_uniform_attention():
    # What the module says about init="jl": the theorem does not carry over to the softmax after the projection.
    q, k, v = torch.randn(3, 1, 4, 256, 64)
    want = sq.attention(q, k, v, "softmax")

    def error(out):
        return ((out - want).square().sum() / want.square().sum()).item()

    uniform = error(v.mean(2, keepdim=True))
    assert error(sq.attention(q, k, v, "linformer", length=256, rank=64, init="jl")) > 3 * uniform
    assert error(sq.attention(q, k, v, "linformer", length=256, rank=64)) < uniform


@pytest.mark.parametrize(("sharing", "matrices"), [("none", 2 * 3), ("heads", 2), ("kv", 1), ("layers", 1)])
def test_sharing_counts_matrices(sharing, matrices):
    attn = sq.create("linformer", 8, 6, 3, length=50, rank=4, sharing=sharing)
    assert sum(p.numel() for p in attn.parameters()) == matrices * 4 * 50
    q, k, v = torch.randn(2, 6, 20, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    attn(q, k, v).square().sum().backward()
    for p in attn.parameters():
        assert p.grad[..., :20].abs().max() > 0
        assert p.grad[..., 20:].abs().max() == 0  # columns that no token met


def test_shared_and_separate_matrices_are_what_they_say():
    q, k, v = _inputs(20)
    for sharing in ("none", "heads", "kv"):
        attn = sq.create("linformer", 8, 2, length=20, rank=4, sharing=sharing, init="jl").double()
        e = attn.projection.keys.detach().clone()
        f = getattr(attn.projection, "values", attn.projection.keys).detach().clone()
        with torch.no_grad():
            attn.projection.keys.mul_(2.0)
        e2, f2 = 2 * e, 2 * f if sharing == "kv" else f
        want = torch.softmax(q @ (e2 @ k).mT * 8**-0.5, -1) @ (f2 @ v)
        assert (attn(q, k, v) - want).abs().max() <= 1e-12


def test_tied_layers_train_one_matrix():
    layers = torch.nn.ModuleList(
        sq.create("linformer", 8, length=30, rank=4, sharing="layers", init="jl") for _ in range(3)
    )
    q, k, v = torch.randn(3, 1, 2, 30, 8)
    assert len(list(layers.parameters())) == 3
    for layer in layers[1:]:
        layer.tie(layers[0])
    assert len(list(layers.parameters())) == 1
    sum(layer(q, k, v).square().sum() for layer in layers).backward()
    alone = sq.create("linformer", 8, length=30, rank=4, sharing="layers")
    alone.load_state_dict(layers[0].state_dict())
    alone(q, k, v).square().sum().backward()
    assert torch.allclose(layers[0].projection.keys.grad, 3 * alone.projection.keys.grad, rtol=1e-4)
    copied = copy.deepcopy(layers)
    assert copied[2].projection.keys is copied[0].projection.keys
    assert copied[0].projection.keys is not layers[0].projection.keys
    copied.load_state_dict(layers.state_dict())


def test_what_cannot_be_tied_is_refused():
    make = {"length": 30, "rank": 4}
    shared = sq.create("linformer", 8, sharing="layers", **make)
    with pytest.raises(ValueError, match="create both with sharing='layers'"):
        sq.create("linformer", 8, sharing="kv", **make).tie(shared)
    with pytest.raises(ValueError, match="the projections differ"):
        shared.tie(sq.create("linformer", 8, sharing="layers", length=31, rank=4))
    with pytest.raises(TypeError, match="expected another linformer"):
        shared.tie(sq.create("softmax", 8))


@pytest.mark.parametrize("at", [0, 9, 20])
def test_the_ith_real_token_meets_the_ith_column(at):
    attn = sq.create("linformer", 8, length=40, rank=4, init="jl").double()
    q, k, v = _inputs(20)
    padded = [torch.cat([x[:, :, :at], torch.full_like(x[:, :, :5], 7.0), x[:, :, at:]], 2) for x in (k, v)]
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[:, at : at + 5] = False
    want = attn(q, k, v)
    assert (attn(q, *padded, key_mask=mask) - want).abs().max() <= 1e-12
    # Zeroing the padding and leaving it in its place gives its columns to nobody and shifts all later ones.
    zeroed = [x * mask[:, None, :, None] for x in padded]
    assert ((attn(q, *zeroed) - want).abs().max() > 1e-3) == (at < 20)


def test_more_tokens_than_it_was_built_for_is_an_error():
    attn = sq.create("linformer", 8, length=20, rank=4)
    q, k, v = _inputs(21)
    for backend in (None, "reference"):
        with pytest.raises(ValueError, match=r"21 tokens .* at most length=20; create the mechanism with length=21"):
            attn(q, k, v, backend=backend)
    assert attn(q, k[:, :, :20], v[:, :, :20]).shape == q.shape  # queries are not limited


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"length": 0}, ValueError, "length must be at least 1"),
        ({"rank": 1.5}, TypeError, "rank must be an integer"),
        ({"sharing": "head"}, ValueError, "did you mean 'heads'"),
        ({"init": "random"}, ValueError, "init='random' is not known"),
        ({"sharing": "none"}, ValueError, "pass heads="),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("linformer", 8, **options)
