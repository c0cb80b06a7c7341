"""Nystrom attention: softmax with all landmarks, segments of the true length, and iterations that regularise."""

import pytest
import torch

import subquad as sq
from subquad.mechanisms.nystrom import iterative_pinv, segment_means


def _inputs(length, batch=2, heads=2, width=8, norm=1.0):
    generator = torch.Generator().manual_seed(0)
    return (norm * torch.randn(3, batch, heads, length, width, generator=generator, dtype=torch.float64)).unbind()


@pytest.mark.parametrize("landmarks", [24, 100])
def test_a_landmark_for_every_token_and_the_exact_inverse_give_softmax_attention(landmarks):
    q, k, v = _inputs(24, width=16, norm=1.5)
    got = sq.attention(q, k, v, "nystrom", landmarks=landmarks, pinv="exact")
    assert (got - sq.attention(q, k, v, "softmax")).abs().max() <= 1e-10
    few = sq.attention(q, k, v, "nystrom", landmarks=12, pinv="exact")
    assert (few - sq.attention(q, k, v, "softmax")).abs().max() > 1e-2


def _relative_errors(**options):
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 4, 256, 64, generator=generator, dtype=torch.float64)
    identity = torch.eye(256, dtype=torch.float64).expand(1, 4, -1, -1)
    want = sq.attention(q, k, identity, "softmax")
    got = sq.attention(q, k, identity, "nystrom", **options) if options else torch.full_like(want, 1 / 256)
    return ((got - want).square().sum() / want.square().sum()).item()


def test_six_iterations_regularise_and_more_are_worse():
    six, twelve = (_relative_errors(landmarks=64, iterations=n) for n in (6, 12))
    exact, uniform = _relative_errors(landmarks=64, pinv="exact"), _relative_errors()
    assert six < uniform < exact
    assert six < twelve < exact
    assert 0.3 < six < 0.45
    assert exact > 5


def test_the_iteration_converges_to_the_pseudo_inverse():
    a = torch.softmax(torch.randn(3, 2, 6, 6, dtype=torch.float64), -1)
    assert (iterative_pinv(a, 40) - torch.linalg.pinv(a)).abs().max() <= 1e-6
    wide = torch.softmax(torch.randn(2, 3, 7, dtype=torch.float64), -1)
    assert (iterative_pinv(wide, 40) - torch.linalg.pinv(wide)).abs().max() <= 1e-8
    # Landmarks that do not exist are rows and columns of zeros: the rest is as if they were left out.
    padded = torch.zeros(3, 2, 8, 9, dtype=torch.float64)
    padded[..., :6, :6] = a
    got = iterative_pinv(padded, 6)
    assert (got[..., :6, :6] - iterative_pinv(a, 6)).abs().max() <= 1e-12
    assert got.abs().sum() == got[..., :6, :6].abs().sum()
    assert (iterative_pinv(torch.zeros(2, 3), 6) == 0).all()


def test_the_start_of_the_iteration_belongs_to_each_sequence_and_head():
    # The published code divides by a maximum over the whole batch.
    a = torch.softmax(3 * torch.randn(4, 2, 6, 6, dtype=torch.float64), -1)
    together = iterative_pinv(a, 6)
    alone = torch.stack([torch.stack([iterative_pinv(head, 6) for head in sequence]) for sequence in a])
    assert (together - alone).abs().max() <= 1e-12
    z = a.mT / (a.sum(-2).max() * a.sum(-1).max())
    eye = torch.eye(6, dtype=torch.float64)
    for _ in range(6):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    assert (z - alone).abs().max() > 1e-3


@pytest.mark.parametrize("landmarks", [1, 3, 5, 12, 40])
def test_segments_are_those_of_the_true_length(landmarks):
    x = torch.randn(4, 2, 12, 3, dtype=torch.float64)
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[0, :], mask[1, :7], mask[2, 4:], mask[3, ::3] = True, True, True, True
    means, exist = segment_means(x, landmarks, mask)
    for i in range(4):
        tokens = x[i][:, mask[i]]
        count = min(landmarks, tokens.shape[1])
        assert exist[i].sum() == count
        sizes = torch.bincount(torch.arange(tokens.shape[1]) * count // tokens.shape[1])
        assert sizes.max() - sizes.min() <= 1
        parts = tokens.split(sizes.tolist(), 1)
        for j, part in enumerate(parts):
            assert (means[i, :, j] - part.mean(1)).abs().max() <= 1e-12
    plain, exist = segment_means(x, landmarks, None)
    full, _ = segment_means(x, landmarks, torch.ones(4, 12, dtype=torch.bool))
    assert exist.all()
    assert (plain - full).abs().max() <= 1e-12


def test_segments_of_the_padded_length_would_be_wrong():
    q, k, v = _inputs(40)
    attn = sq.create("nystrom", 8, landmarks=8)
    mask = (torch.arange(40) < 11).expand(2, -1)
    alone = attn(*(x[:, :, :11] for x in (q, k, v)))
    together = attn(q, k, v, key_mask=mask, query_mask=mask)
    assert (together[:, :, :11] - alone).abs().max() <= 1e-12
    zeroed = [x * mask[:, None, :, None] for x in (q, k)]
    padded = segment_means(zeroed[0], 8, None)[0]
    assert (padded[:, :, :3] - segment_means(q, 8, mask)[0][:, :, :3]).abs().max() > 1e-2


@pytest.mark.parametrize("pinv", ["iterative", "exact"])
def test_a_sequence_shorter_than_the_landmarks_in_a_batch_of_longer_ones(pinv):
    q, k, v = _inputs(30, batch=3)
    attn = sq.create("nystrom", 8, landmarks=6, pinv=pinv)
    lengths = [30, 4, 1]
    mask = torch.arange(30) < torch.tensor(lengths)[:, None]
    together = attn(q, k, v, key_mask=mask, query_mask=mask)
    for i, length in enumerate(lengths):
        alone = attn(*(x[i : i + 1, :, :length] for x in (q, k, v)))
        assert (together[i : i + 1, :, :length] - alone).abs().max() <= 1e-8
    if pinv == "exact":  # a landmark for every token
        short = [x[1:2, :, :4] for x in (q, k, v)]
        assert (together[1:2, :, :4] - sq.attention(*short, "softmax")).abs().max() <= 1e-8


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"landmarks": 0}, ValueError, "landmarks must be at least 1"),
        ({"iterations": -1}, ValueError, "iterations must be at least 0"),
        ({"pinv": "iterativ"}, ValueError, "did you mean 'iterative'"),
        ({"landmark": 3}, TypeError, "did you mean 'landmarks'"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("nystrom", 8, **options)
