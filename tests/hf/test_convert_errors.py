"""Bad input: a clear error, and the model is what it was before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from subquad.hf import convert, revert
from subquad.hf.conversion.positions import learned_positions

from .zoo import batch, make, real_logits, text


@pytest.fixture
def model() -> Iterator[Any]:
    """A model that must come out of the test as it went in."""
    made = make("bert")
    names, config = list(made.state_dict()), made.config.to_dict()
    logits = real_logits(made, batch("bert"))
    yield made
    assert list(made.state_dict()) == names
    assert made.config.to_dict() == config and made.config._attn_implementation == "sdpa"
    assert all(not module._forward_pre_hooks for module in made.modules())
    assert torch.equal(real_logits(made, batch("bert")), logits)


def test_a_model_without_attention() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no attention layer that is known"):
        convert(nn.Sequential(nn.Linear(4, 4)), "linear")
    with pytest.raises(TypeError, match=r"model must be a torch module, got str: load it first.*from_pretrained"):
        convert("bert-base-uncased", "linear")  # type: ignore[type-var]


def test_positions_of_another_tower_limit_nothing(model: Any) -> None:
    assert learned_positions(model) == model.config.max_position_embeddings
    model.config.__class__ = type("TwoTowers", (type(model.config),), {"sub_configs": {"audio_config": None}})
    try:
        assert learned_positions(model) is None
    finally:
        model.config.__class__ = type(model.config).__mro__[1]


def test_layers(model: Any) -> None:
    with pytest.raises(ValueError, match=r"index 3 is out of range, the model has 3 attention layers, 0 to 2"):
        convert(model, "linear", layers=[0, 3])
    with pytest.raises(ValueError, match=r"did you mean 'bert.encoder.layer.1.attention.self'"):
        convert(model, "linear", layers=["bert.encoder.layer.1.attention"])
    with pytest.raises(TypeError, match=r"numbers or names of attention layers, got 1\.5"):
        convert(model, "linear", layers=[1.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"index 7 is out of range"):
        convert(model, {0: "linear", 7: "linear"})
    with pytest.raises(ValueError, match=r"a list of 2, but there are 3 layers"):
        convert(model, ["linear", "linear"])


def test_mechanisms(model: Any) -> None:
    with pytest.raises(ValueError, match=r"'performr' is not known.*did you mean 'performer'"):
        convert(model, "performr")
    with pytest.raises(TypeError, match=r"no option 'num_feature'.*did you mean 'num_features'"):
        convert(model, "performer", num_feature=3)
    with pytest.raises(TypeError, match="mechanism must be a name"):
        convert(model, 3)


def test_a_head_width_that_the_mechanism_cannot_take(model: Any) -> None:
    def narrow(layer: Any) -> Any:
        import subquad as sq

        return sq.create("linear", head_dim=8 if layer.index < 2 else 16)

    with pytest.raises(ValueError, match=r"attention layer 2 .*head width 8: the mechanism given has head_dim=16"):
        convert(model, narrow)


def test_calibration(model: Any) -> None:
    with pytest.raises(ValueError, match=r"pass calibration=, an iterable of batches"):
        convert(model, "performer", features="sderf")
    with pytest.raises(ValueError, match=r"calibration is empty"):
        convert(model, "performer", features="sderf", calibration=[])
    with pytest.raises(TypeError, match=r"got a single dict; put it into a list"):
        convert(model, "performer", features="sderf", calibration=batch("bert"))
    with pytest.raises(TypeError, match=r"calibration\[0\] must be a dict of tensors as the model takes them"):
        convert(model, "performer", features="sderf", calibration=["some text"])
    long = {"input_ids": torch.ones(1, model.config.max_position_embeddings + 1, dtype=torch.long)}
    with pytest.raises(
        ValueError, match=r"calibration\[0\] has \d+ tokens, and the model has learned \d+ positions: cut"
    ):
        convert(model, "performer", features="sderf", calibration=[long])
    padding = {**batch("bert"), "attention_mask": torch.zeros(3, 12, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"never reach attention layer 0 .*or hold padding only"):
        convert(model, "performer", features="sderf", calibration=[padding])


def test_a_failure_in_the_last_layer_leaves_the_first_alone(model: Any) -> None:
    def failing(layer: Any) -> Any:
        if layer.index == 2:
            raise ValueError("no mechanism for this one")
        return {"mechanism": "linear"}

    with pytest.raises(ValueError, match="no mechanism for this one"):
        convert(model, failing)


def test_a_model_converted_already() -> None:
    model = make("bert")
    convert(model, "linear")
    with pytest.raises(ValueError, match=r"converted already .*'linear'.*revert"):
        convert(model, "performer")
    revert(model)
    with pytest.raises(ValueError, match="is not converted: there is nothing to revert"):
        revert(model)


def test_layers_that_were_named_and_cannot_be_converted() -> None:
    with pytest.raises(ValueError, match=r"cannot be converted to 'linear': it adds a learned bias of the relative"):
        convert(make("t5"), "linear", layers=[0])
    with pytest.raises(ValueError, match=r"no layer is left to convert.*sliding window of 5 tokens"):
        convert(make("mistral"), "linear")
    with pytest.raises(ValueError, match=r"cannot be converted to 'hybrid': hybrid needs queries and keys of one seq"):
        convert(make("bart"), "hybrid", layers=[3], window=2)


def test_switching_the_implementation_later_leaves_the_mechanisms_in_place() -> None:
    model = make("bert")
    convert(model, "linear")
    wanted = real_logits(model, batch("bert"))
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        torch.testing.assert_close(real_logits(model, batch("bert")), wanted)


# -- masks --------------------------------------------------------------------------------------------------------


def test_masks_are_refused_by_name() -> None:
    model = make("llama")
    convert(model, "linear")
    ids = text()["input_ids"]
    arbitrary = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    arbitrary[:, :, 5, 2] = False
    with pytest.raises(ValueError, match=r"layer 'model.layers.0.self_attn' got an arbitrary 4D mask"):
        model(ids, attention_mask=arbitrary)
    bias = torch.zeros(3, 1, 12, 12).masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -1e9)
    bias[..., 3, 1] = -0.5
    with pytest.raises(ValueError, match="got an additive bias of the scores"):
        model(ids, attention_mask=bias)


def test_masks_that_say_causal_in_their_own_way_are_understood() -> None:
    model = make("llama")
    convert(model, "performer", num_features=16, seed=0)
    inputs = text()
    wanted = real_logits(model, inputs)
    visible = torch.ones(12, 12, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None, :]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    real = inputs["attention_mask"].bool()
    for mask in (visible, additive):
        with torch.no_grad():
            logits = model(inputs["input_ids"], attention_mask=mask).logits
        torch.testing.assert_close(logits[real], wanted, rtol=1e-4, atol=1e-4)


def test_a_full_mask_of_the_caller_makes_a_decoder_see_everything() -> None:
    """What the mask says counts, as with exact attention, not what the layer usually does."""
    model = make("llama")
    mask = torch.ones(3, 1, 12, 12)
    mask = torch.zeros_like(mask)
    with torch.no_grad():
        wanted = model(text()["input_ids"], attention_mask=mask).logits
        convert(model, "hybrid", window=12, far="taylor")
        found = model(text()["input_ids"], attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_a_bias_in_cross_attention_is_not_overlooked() -> None:
    """T5 hands zeros to its cross attention, which changes nothing; anything else would."""
    model = make("t5")
    convert(model, "linear")
    inputs = batch("t5")
    assert torch.isfinite(model(**inputs).logits).all()
    layer = model.decoder.block[0].layer[1].EncDecAttention
    hidden, memory = torch.randn(1, 3, 32), torch.randn(1, 4, 32)
    layer(hidden, key_value_states=memory, position_bias=torch.zeros(1, 4, 3, 4))
    with pytest.raises(ValueError, match="adds a learned bias of the relative position to every score"):
        layer(hidden, key_value_states=memory, position_bias=torch.ones(1, 4, 3, 4))


def test_weights_that_are_never_formed_are_not_promised() -> None:
    model = make("wav2vec2")
    convert(model, "linear")
    with pytest.raises(ValueError, match="output_attentions=True was asked for"):
        model(**batch("wav2vec2"), output_attentions=True)


def test_an_error_or_length_that_nobody_would_keep(model: Any) -> None:
    for mechanism in ("local", {"mechanism": "performer"}, ["linear"] * 3):
        with pytest.raises(ValueError, match=r"error=0\.1 applies where no mechanism is named, or to 'multipole'"):
            convert(model, mechanism, error=0.1)
    with pytest.raises(ValueError, match="length=64 is for choosing a mechanism, and 'linear' is named"):
        convert(model, "linear", length=64)


@pytest.mark.parametrize("mechanism", ["multipole", {"mechanism": "multipole", "seed": 1}])
def test_an_error_goes_to_the_mechanism_that_keeps_it(mechanism: Any) -> None:
    _, report = convert(make("bert"), mechanism, error=0.02)
    assert all(row.mechanism is not None and row.mechanism["error"] == 0.02 for row in report.layers)


@pytest.mark.parametrize("mechanism", [{"mechanism": "multipole", "chunk": 64}, "local"])
def test_classifiers_that_find_their_token_by_the_padding_token(mechanism: Any) -> None:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    exact = tf.LlamaForSequenceClassification(config).eval()
    ids = torch.randint(3, 50, (3, 12))
    ids[1, 8:] = ids[2, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    converted, report = convert(copy.deepcopy(exact), mechanism)
    assert report.converted == [0, 1]
    assert torch.allclose(converted(**inputs).logits, exact(**inputs).logits, atol=1e-4)


def test_speech_to_text_is_checked_without_a_batch() -> None:
    torch.manual_seed(0)
    config = tf.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, num_mel_bins=8,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20,
        max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    _, report = convert(tf.WhisperForConditionalGeneration(config).eval(), {"mechanism": "multipole", "chunk": 64})
    assert report.converted == [0, 1, 2]


def test_calibration_of_token_ids(model: Any) -> None:
    for given in ([[5, 6, 7]], [[[5, 6, 7]]], [(5, 6)]):
        with pytest.raises(TypeError, match=r"calibration\[0\] must be a dict of tensors.*torch.tensor\(\[ids\]\)"):
            convert(model, "linear", calibration=given)


def test_the_seed_of_hybrid_is_that_of_its_far_field() -> None:
    for calibration in (None, [batch("llama")]):
        drawn = []
        for seed in (0, 0, 1):
            one, _ = convert(make("llama"), "hybrid", window=2, sinks=1, seed=seed, calibration=calibration)
            drawn.append(real_logits(one, batch("llama")))
        assert torch.equal(drawn[0], drawn[1])
        assert calibration is not None or not torch.equal(drawn[0], drawn[2])
    far = {"mechanism": "performer", "seed": 3}
    with pytest.raises(ValueError, match="seed=0 is that of far=, which has one of its own"):
        convert(make("llama"), "hybrid", far=far, seed=0)
    convert(make("llama"), "hybrid", far="performer", seed=0)


def test_compiled_models_are_converted_and_compiled_anew() -> None:
    wanted = real_logits(convert(make("llama"), "local", window=2)[0], batch("llama"))
    exact = real_logits(make("llama"), batch("llama"))
    inside = make("llama")
    inside.compile(backend="eager")
    for compiled in (torch.compile(make("llama"), backend="eager"), inside):
        torch.testing.assert_close(real_logits(compiled, batch("llama")), exact, rtol=1e-4, atol=1e-4)
        found, report = convert(compiled, "local", window=2)
        assert found is compiled and report.converted == [0, 1, 2] and "_orig_mod" not in report.layers[0].name
        torch.testing.assert_close(real_logits(compiled, batch("llama")), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(real_logits(revert(compiled), batch("llama")), exact, rtol=1e-4, atol=1e-4)
