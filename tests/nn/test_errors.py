"""Bad input to models: the argument, what was given, what to do; and nothing is half-done."""

import pytest
import torch

import subquad as sq


def test_start(decoder, tokens):
    model = decoder("linear")
    ids = tokens(2, 5)
    assert torch.equal(model(ids, start=3), model(ids, start=torch.tensor([3, 3])))
    for call in (model, model.scan):
        for start in (1.5, True, "0", torch.tensor([1.0, 2.0])):
            with pytest.raises(TypeError, match=r"start must be an integer or an int64 tensor of shape \(2,\), got"):
                call(ids, start=start)
        with pytest.raises(ValueError, match=r"one position per sequence, shape \(2,\), got \(1,\)"):
            call(ids, start=torch.tensor([1]))
        with pytest.raises(ValueError, match=r"start must be 0 or more, got \[-1, -1\]"):
            call(ids, start=-1)


def test_tokens(decoder, tokens):
    model = decoder("linear")
    for call in (model, model.scan):
        with pytest.raises(ValueError, match=r"tokens is empty .*give at least one token"):
            call(torch.zeros(1, 0, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"tokens holds the id 19, but ids go from 0 to vocab-1 = 18"):
            call(torch.tensor([[3, 19]]))
        with pytest.raises(ValueError, match="tokens holds the id -1"):
            call(torch.tensor([[3, -1]]))
        with pytest.raises(TypeError, match=r"int64 or int32, got torch\.float32"):
            call(torch.zeros(1, 4))
        with pytest.raises(ValueError, match=r"tokens.unsqueeze\(0\)"):
            call(torch.zeros(4, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"torch.tensor\(tokens\)"):
            call([[1, 2]])
        with pytest.raises(TypeError, match="key_mask must be bool"):
            call(tokens(1, 3), key_mask=torch.ones(1, 3))
        with pytest.raises(ValueError, match=r"key_mask must have shape \(batch, length\) = \(1, 3\)"):
            call(tokens(1, 3), key_mask=torch.ones(1, 4, dtype=torch.bool))
        call(tokens(1, 3).int())


def test_floats_where_there_is_no_vocabulary():
    model = sq.nn.TransformerEncoder(1, 2, 16, "linear")
    with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 16\), got shape \(1, 3, 8\)"):
        model(torch.randn(1, 3, 8))
    with pytest.raises(TypeError, match=r"x must be floating-point, got torch\.int64; embed token ids first"):
        model(torch.zeros(1, 3, 16, dtype=torch.int64))
    with pytest.raises(ValueError, match="x is empty"):
        model(torch.randn(1, 0, 16))
    with pytest.raises(
        TypeError, match=r"got token ids \(shape \(1, 3\) of torch\.int64\); build the model with vocab="
    ):
        model(torch.zeros(1, 3, dtype=torch.int64))


def test_options_of_a_layer():
    for options, message in (
        ({"context_dim": -1}, "context_dim must be at least 1"),
        ({"dropout": "x"}, "dropout must be a number at least 0 and below 1, got 'x'"),
        ({"rotary": True, "rotary_base": "x"}, "rotary_base must be a number above 0, got 'x'"),
        ({"rotary": "no"}, "rotary must be True or False"),
        ({"bias": "no"}, "bias must be True or False"),
        ({"mechanism": "lsh", "shared_qk": True, "kv_heads": 2}, "kv_heads=2: lsh makes its keys from the 4 heads"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sq.nn.MultiheadAttention(16, 4, **options)


def test_more_positions_than_were_learned(decoder, tokens):
    model = decoder("linear", positions="learned", max_length=6)
    message = r"the sequence reaches 7 positions, but only max_length=6 are learned"
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 7))
    with pytest.raises(ValueError, match=message):
        model.scan(tokens(1, 7))
    _, states = model.scan(tokens(1, 6))
    with pytest.raises(ValueError, match=message):
        model.scan(tokens(1, 1), states)
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, 4), 4)
    # Padding takes no position.
    model(tokens(1, 9), key_mask=torch.arange(9)[None] >= 3)


def test_states_of_another_model(decoder, tokens):
    model, ids = decoder("linear"), tokens(2, 4)
    _, states = model.scan(ids)
    for other in (
        decoder("linear", seed=6),
        decoder("linear", dim=32),
        decoder("softmax"),
        decoder("linear", layers=1),
    ):
        with pytest.raises(ValueError, match=r"states were made by .* only be continued by the model that made it"):
            other.scan(ids, states)
    with pytest.raises(TypeError, match=r"states must be a ModelState .* got list"):
        model.scan(ids, [states])
    with pytest.raises(ValueError, match=r"states hold 2 sequences, the tokens given 1; use states.select"):
        model.scan(ids[:1], states)
    with pytest.raises(ValueError, match="start=3 is where a new sequence begins"):
        model.scan(ids, states, start=3)
    random = decoder("performer")
    _, states = random.scan(ids)
    random.redraw()
    with pytest.raises(ValueError, match="can only be continued by the mechanism, draw, calibration and scale"):
        random.scan(ids, states)


def test_selecting_sequences_that_are_not_there(decoder, tokens):
    _, states = decoder("linear").scan(tokens(2, 4))
    with pytest.raises(TypeError, match=r"index must be an integer tensor of shape \(sequences,\), got \[0\]"):
        states.select([0])
    with pytest.raises(TypeError, match=r"got shape \(2,\) of torch\.bool"):
        states.select(torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"index=\[0, 2\] must be among the sequences of these states, 0\.\.1"):
        states.select(torch.tensor([0, 2]))
    assert states.select(torch.tensor([], dtype=torch.int64)).batch == 0


def test_models_without_a_recurrent_form_say_so(decoder, tokens):
    with pytest.raises(NotImplementedError, match="lsh has no recurrent form"):
        decoder(["linear", "lsh"]).scan(tokens(1, 4))
    with pytest.raises(ValueError, match="linformer cannot be causal"):
        sq.nn.TransformerEncoder(1, 2, 16, "linformer")(torch.randn(1, 4, 16), is_causal=True)


def test_memory(decoder, tokens):
    model, crossed = decoder("linear"), sq.nn.TransformerDecoder(1, 2, 16, 19, "linear", cross_mechanism="linear")
    with pytest.raises(ValueError, match="memory was given, but the model has no attention to one"):
        model(tokens(1, 3), memory=torch.randn(1, 4, 16))
    with pytest.raises(ValueError, match="memory is needed"):
        crossed(tokens(1, 3))
    with pytest.raises(ValueError, match="begin with absorb_memory"):
        crossed.scan(tokens(1, 3))
    with pytest.raises(ValueError, match="build it with cross_mechanism="):
        model.absorb_memory(torch.randn(1, 4, 16))
    with pytest.raises(ValueError, match="segment_ids and memory cannot be combined"):
        crossed(tokens(1, 3), memory=torch.randn(1, 4, 16), segment_ids=torch.zeros(1, 3, dtype=torch.int64))
    for name in ("nystrom", "local", "clustered"):
        with pytest.raises(ValueError, match=f"cross_mechanism='{name}' cannot read a memory token by token"):
            sq.nn.TransformerDecoder(1, 2, 16, 19, "linear", cross_mechanism=name)


def test_a_checkpoint_that_does_not_fit_changes_nothing(decoder):
    model = decoder("performer")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    other = {name: x + 1 for name, x in before.items()}
    missing = {name: x for name, x in other.items() if name != "head.weight"}
    for wrong, message in (
        ({**other, "head.weigth": torch.zeros(1)}, r"head\.weigth is unknown; did you mean 'head\.weight'"),
        (missing, r"head\.weight is missing"),
        ({**other, "head.weight": torch.zeros(3, 2)}, r"head\.weight has shape \(3, 2\), expected shape \(19, 16\)"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(wrong)
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    with pytest.raises(RuntimeError, match="nothing was loaded"):
        model.load_state_dict({"head.weight": torch.zeros(3, 2)}, strict=False)
    model.load_state_dict(missing, strict=False)
    assert torch.equal(model.embedding.weight, other["embedding.weight"])
    assert torch.equal(model.head.weight, before["head.weight"])


@pytest.mark.parametrize("start", [0.5, -3, True, torch.zeros(1, 1, dtype=torch.int64)])
def test_a_layer_takes_no_start_that_is_no_position(start):
    layer = sq.nn.MultiheadAttention(8, 2, "linear", rotary=True)
    with pytest.raises((TypeError, ValueError), match="start must"):
        layer.scan(torch.randn(1, 3, 8), start=start)
