"""Generation: the tokens that repeated forwards would give, whatever the padding, and reproducible."""

import pytest
import torch

import subquad as sq
from subquad.nn import generate, sample, stream


def test_greedy_equals_repeated_forwards(each_recurrent, decoder, tokens):
    model, ids = decoder(each_recurrent), tokens(2, 6)
    want = ids
    for _ in range(8):
        want = torch.cat([want, model(want)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(ids, 8, temperature=0), want[:, 6:])
    assert torch.equal(model.generate(ids, 8, temperature=0, prefill_size=4), want[:, 6:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_different_lengths(side, each_recurrent, decoder, tokens):
    model, lengths = decoder(each_recurrent), (7, 3, 5)
    rows = [tokens(1, n, seed=n) for n in lengths]
    ids, mask = torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3, 7, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(0, lengths[i]) if side == "right" else slice(7 - lengths[i], 7)
        ids[i, place], mask[i, place] = row[0], True
    for size in (None, 2):
        got = model.generate(ids, 6, temperature=0, key_mask=mask, prefill_size=size)
        for i, row in enumerate(rows):
            assert torch.equal(got[i], model.generate(row, 6, temperature=0)[0])


def test_the_same_generator_gives_the_same_tokens(decoder, tokens):
    model, ids = decoder("linear"), tokens(3, 5)

    def run(seed):
        return model.generate(ids, 12, top_k=8, top_p=0.95, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(40000, 4)
    generator = torch.Generator().manual_seed(0)

    def frequency(**options):
        return torch.bincount(sample(logits, generator=generator, **options), minlength=4) / 40000

    want = torch.softmax(logits[0] / 0.7, 0)
    assert (frequency(temperature=0.7) - want).abs().max() < 0.015
    top = frequency(top_k=2)
    assert top[[0, 3]].max() == 0 and abs(top[2] - torch.sigmoid(torch.tensor(1.0))) < 0.015
    # Probabilities 0.64, 0.24, 0.09, 0.03: the second one reaches 0.7 and is the last to be kept.
    nucleus = frequency(top_p=0.7)
    assert nucleus[[0, 3]].max() == 0 and nucleus[1] > 0.2
    assert frequency(top_p=0.6)[2] == 1.0 and frequency(top_k=1)[2] == 1.0
    tied = sample(torch.zeros(500, 6), top_k=2, generator=generator)
    assert tied.unique().numel() == 2


def test_end_tokens(decoder, tokens):
    model, ids = decoder("linear"), tokens(2, 5)
    free = model.generate(ids, 10, temperature=0)
    end = int(free[0, 3])
    got = model.generate(ids, 10, temperature=0, end_token=end)
    for row, other in zip(got, free, strict=True):
        where = (other == end).nonzero()
        stop = int(where[0]) + 1 if where.numel() else 10
        assert torch.equal(row[:stop], other[:stop]) and bool((row[stop:] == end).all())
    alone = model.generate(ids[:1], 10, temperature=0, end_token=end)
    assert alone.shape[1] == int((free[0] == end).nonzero()[0]) + 1


def test_continuing_from_states_and_streaming(decoder, tokens):
    model, ids = decoder("performer"), tokens(1, 9)
    want = model.generate(ids, 7, temperature=0)
    _, states = model.scan(ids[:, :6])
    assert torch.equal(model.generate(ids[:, 6:], 7, temperature=0, states=states), want)
    model.train()
    steps = stream(model, ids, 7, temperature=0)
    first = next(steps)
    assert torch.equal(first, want[:, 0])
    # A generator must not leak its own modes into the caller's code.
    assert torch.is_grad_enabled() and model.training
    assert torch.equal(torch.stack([first, *steps], 1), want) and model.training


def test_streams_of_one_model_side_by_side(tokens):
    model = sq.nn.TransformerDecoder(1, 2, 16, 19, "linear", dropout=0.5, seed=0)
    ids = tokens(1, 6)
    want = model.generate(ids, 9, temperature=0)
    short, long = (stream(model, ids, n, temperature=0) for n in (3, 9))
    got = [*(next(long) for _ in short), *long]
    assert torch.equal(torch.stack(got, 1), want) and all(part.training for part in model.modules())


def test_an_encoder_decoder_generates(tokens):
    model = (
        sq.nn.EncoderDecoder(layers=2, heads=2, dim=16, vocab=19, mechanism="linear", source_vocab=19).double().eval()
    )
    source, ids = tokens(2, 8), tokens(2, 1, seed=3)
    mask = torch.arange(8) < torch.tensor([[8], [5]])
    want = ids
    for _ in range(6):
        want = torch.cat([want, model(source, want, source_mask=mask)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(source, ids, 6, source_mask=mask, temperature=0), want[:, 1:])


def test_bad_input(decoder, tokens):
    model, ids = decoder("linear"), tokens(2, 4)
    with pytest.raises(ValueError, match="prompt is empty"):
        generate(model, ids[:, :0], 3)
    with pytest.raises(ValueError, match="row 1 is all padding"):
        generate(model, ids, 3, key_mask=torch.tensor([[True] * 4, [False] * 4]))
    with pytest.raises(ValueError, match="temperature must be"):
        generate(model, ids, 3, temperature=-1.0)
    with pytest.raises(ValueError, match="top_p must be"):
        generate(model, ids, 3, top_p=0.0)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        generate(model, ids, 3, top_k=0)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1"):
        generate(model, ids, 0)
    with pytest.raises(ValueError, match=r"tokens must be an integer tensor of shape \(batch, length\)"):
        generate(model, ids[0], 3)
    with pytest.raises(NotImplementedError, match="no recurrent form"):
        generate(decoder("lsh"), ids, 3)
    with pytest.raises(TypeError, match=r"generate has no option 'temprature'; did you mean 'temperature'"):
        generate(model, ids, 3, temprature=0)
    with pytest.raises(TypeError, match=r"generator must be a torch.Generator or None, got 5; for a seed use"):
        generate(model, ids, 3, generator=5)


def test_extreme_sampling_input():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    for temperature in (1e-45, 1e-46, 5e-324):
        assert sample(logits, temperature=temperature).item() == 1
    with pytest.raises(ValueError, match="NaN"):
        sample(torch.full((1, 4), float("nan")), temperature=0)


def test_modules_keep_their_modes(decoder, tokens):
    model = decoder("linear").train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    model.generate(tokens(2, 6), 2)
    assert [module.training for module in model.modules()] == before
    model.calibrate(tokens(2, 6))
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("row", [[-torch.inf, -torch.inf], [torch.inf, 0.0]])
def test_logits_without_a_finite_largest_are_refused(row):
    with pytest.raises(ValueError, match="the largest logit of a row is infinite"):
        sq.nn.sample(torch.tensor([[0.0, 1.0], row]))
