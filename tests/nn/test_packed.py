"""Packed batches and padded batches: every sequence as if it were alone, for every mechanism."""

import pytest
import torch

import subquad as sq
from subquad.nn.packing import run_packed

LENGTHS = ((5, 1, 9), (15,), (2, 7, 3))


def packed():
    ids = torch.full((3, 15), 99)
    for number, (i, begin, end) in enumerate(segments()):
        ids[i, begin:end] = 7 * number
    mask = torch.tensor([[j < sum(row) for j in range(15)] for row in LENGTHS])
    return ids, mask


def segments():
    for i, row in enumerate(LENGTHS):
        begin = 0
        for n in row:
            yield i, begin, begin + n
            begin += n


def encoder(mechanism, **options):
    model = sq.nn.TransformerEncoder(layers=2, heads=2, dim=16, mechanism=mechanism, seed=1, **options).double().eval()
    model.calibrate(torch.randn(2, 20, 16, dtype=torch.float64))
    return model


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
def test_an_encoder_on_packed_rows(positions, each_mechanism):
    model = encoder(each_mechanism, positions=positions)
    x = torch.randn(3, 15, 16, dtype=torch.float64)
    ids, mask = packed()
    out = model(x, segment_ids=ids, key_mask=mask)
    for i, begin, end in segments():
        assert (out[i, begin:end] - model(x[i : i + 1, begin:end])[0]).abs().max() <= 1e-10
    assert out[~mask].abs().max() == 0


def test_a_decoder_on_packed_rows(each_causal, decoder, tokens):
    model, x = decoder(each_causal), tokens(3, 15)
    ids, mask = packed()
    out = model(x, segment_ids=ids, key_mask=mask)
    for i, begin, end in segments():
        assert (out[i, begin:end] - model(x[i : i + 1, begin:end])[0]).abs().max() <= 1e-10
    # Without the segments the sequences of a row would see each other.
    assert (model(x, key_mask=mask)[0, 6:] - out[0, 6:]).abs().max() > 1e-4


def test_gradients_of_packed_rows(decoder, tokens):
    model, x = decoder(["linear", "softmax"]), tokens(3, 15)
    ids, mask = packed()

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    got = gradients(model(x, segment_ids=ids, key_mask=mask)[mask].square().sum())
    want = gradients(sum(model(x[i : i + 1, a:b]).square().sum() for i, a, b in segments()))
    assert len(got) == len(want) > 10
    assert all((a - b).abs().max() <= 1e-9 for a, b in zip(got, want, strict=True))


def test_segments_without_padding_and_one_that_fills_a_row(decoder, tokens):
    model, x = decoder("softmax"), tokens(2, 6)
    out = model(x, segment_ids=torch.tensor([[3, 3, 1, 1, 1, 1], [0] * 6]))
    assert (out[0, 2:] - model(x[:1, 2:])[0]).abs().max() <= 1e-10
    assert (out[1] - model(x[1:])[0]).abs().max() <= 1e-10


def test_uneven_segments_are_not_padded_to_the_longest():
    lengths = [40] + [1] * 30 + [2] * 5
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    work = []

    def run(x, mask):
        work.append(mask.numel())
        return x

    x = torch.arange(ids.numel()).view(1, -1)
    assert torch.equal(run_packed(run, x, ids, None), x)
    assert sum(work) <= 2 * ids.numel()


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_padded_batch_equals_each_alone(side, each_mechanism):
    model, width = encoder(each_mechanism), 14
    x = torch.randn(3, width, 16, dtype=torch.float64)
    mask = torch.zeros(3, width, dtype=torch.bool)
    for i, n in enumerate((14, 6, 9)):
        places = {"left": slice(width - n, width), "right": slice(n), "middle": torch.randperm(width)[:n]}
        mask[i, places[side]] = True
    out = model(x, key_mask=mask)
    for i in range(3):
        assert (out[i, mask[i]] - model(x[i : i + 1, mask[i]])[0]).abs().max() <= 1e-10


def test_wrong_segments_are_refused(decoder, tokens):
    model, x = decoder("linear"), tokens(1, 4)
    with pytest.raises(ValueError, match="segment_ids: in row 0 a number appears again"):
        model(x, segment_ids=torch.tensor([[0, 1, 0, 0]]))
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(batch, length\) = \(1, 4\)"):
        model(x, segment_ids=torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match="segment_ids must be an integer tensor"):
        model(x, segment_ids=torch.zeros(1, 4))
    # Nothing but padding is no error: there is nothing to give back.
    nothing = model(x, segment_ids=torch.zeros_like(x), key_mask=torch.zeros(1, 4, dtype=torch.bool))
    assert nothing.shape == (1, 4, 19) and nothing.abs().max() == 0


def test_padding_inside_a_segment():
    model = encoder("softmax")
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    ids, mask = (torch.arange(12) >= 6).long().expand(2, 12), torch.ones(2, 12, dtype=torch.bool)
    mask[0, 2] = mask[1, 6] = mask[1, 11] = False
    out = model(x, segment_ids=ids, key_mask=mask)
    for row in range(2):
        for number in range(2):
            there = (ids[row] == number) & mask[row]
            assert torch.allclose(out[row, there], model(x[row : row + 1, there])[0])
    assert not out[~mask].any()
