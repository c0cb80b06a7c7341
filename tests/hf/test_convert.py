"""Conversion of every family: exact where it must be, masks that reach the mechanism, and the way back."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers.models.bart.modeling_bart import BartDecoderLayer

import subquad as sq
from subquad.hf import convert, revert
from subquad.hf.conversion.interface import mechanism_of
from subquad.hf.conversion.layers import find_layers

from .zoo import FAMILIES, SEQ2SEQ, TEXT, Oracle, batch, make, real_logits, text

# What there is to convert: Mistral's layers all have a sliding window, two of Gemma 3's, T5's self attention a bias.
CONVERTED = {"mistral": [], "gemma3": [1], "t5": [3, 5], "albert": [0], "bart": list(range(6)), "vit": [0, 1]}


def sides(name: str) -> tuple[str, ...]:
    return ("right",) if name in ("vit", "wav2vec2") else ("right", "left")


@pytest.mark.parametrize("name", FAMILIES)
def test_softmax_gives_the_same_bits_and_revert_the_same_model(name: str) -> None:
    model = make(name)
    before = {side: model(**batch(name, side)).logits for side in sides(name)}
    names = list(model.state_dict())
    converted, report = convert(model, "softmax")
    assert converted is model
    assert report.converted == [layer.index for layer in find_layers(model)]
    for side, logits in before.items():
        assert torch.equal(model(**batch(name, side)).logits, logits)
    revert(model)
    assert list(model.state_dict()) == names
    assert model.config._attn_implementation == "sdpa"
    assert "subquad" not in json.dumps(model.config.to_dict())
    for side, logits in before.items():
        assert torch.equal(model(**batch(name, side)).logits, logits)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mistral"])
def test_the_converted_path_sees_what_the_exact_one_sees(name: str) -> None:
    """An exact mechanism in disguise goes through masks, scales, grouped heads and layouts like any other."""
    model = make(name)
    wanted = {side: real_logits(model, batch(name, side)) for side in sides(name)}
    _, report = convert(model, Oracle)
    assert report.converted == CONVERTED.get(name, list(range(len(report.layers))))
    for side, logits in wanted.items():
        torch.testing.assert_close(real_logits(model, batch(name, side)), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mistral"])
def test_an_approximation_changes_the_output_and_trains(name: str) -> None:
    model = make(name)
    exact = real_logits(model, batch(name))
    convert(model, "performer", num_features=32, seed=0)
    found = real_logits(model, batch(name))
    assert torch.isfinite(found).all()
    assert (found - exact).abs().max() > 1e-3
    model(**batch(name)).logits.square().mean().backward()
    gradients = [p.grad for n, p in model.named_parameters() if p.grad is not None and "norm" not in n]
    assert gradients and all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", [name for name in TEXT if name not in ("mistral", "roberta")])
def test_padding_has_no_weight(name: str, side: str) -> None:
    """Other tokens in the padding change nothing (RoBERTa counts its positions by them, so it is left out)."""
    model = make(name)
    convert(model, "performer", num_features=32, seed=0)
    first, second = (real_logits(model, text(side, padding=token)) for token in (0, 17))
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama", "bart"])
def test_a_padded_sequence_is_the_sequence_alone(name: str) -> None:
    model = make(name)
    convert(model, "performer", num_features=32, seed=0)
    together = batch(name)
    with torch.no_grad():
        logits = model(**together).logits
        for row, length in enumerate(together["attention_mask"].sum(1).tolist()):
            alone = {key: x[row : row + 1] for key, x in together.items()}
            for key in ("input_ids", "attention_mask"):
                alone[key] = alone[key][:, :length]
            if name in SEQ2SEQ:
                torch.testing.assert_close(model(**alone).logits[0], logits[row], rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(model(**alone).logits[0], logits[row, :length], rtol=1e-4, atol=1e-4)


def test_calibration_is_gathered_from_real_tokens_only() -> None:
    model = make("bert")
    convert(model, "performer", calibration=[batch("bert")], num_features=32, features="sderf", center=True, seed=0)
    alone = make("bert")
    pieces = []
    for row, length in enumerate(batch("bert")["attention_mask"].sum(1).tolist()):
        pieces.append({key: x[row : row + 1, :length] for key, x in batch("bert").items()})
    convert(alone, "performer", calibration=pieces, num_features=32, features="sderf", center=True, seed=0)
    for padded, single in zip(find_layers(model), find_layers(alone), strict=True):
        one, other = mechanism_of(padded.module), mechanism_of(single.module)
        assert one is not None and other is not None
        statistics = one.feature_map.calibration
        assert statistics.counts.tolist() == [23, 23]
        torch.testing.assert_close(statistics.key_cov, other.feature_map.calibration.key_cov, rtol=1e-3, atol=1e-4)


def test_the_report_measures_each_layer_beside_uniform_and_window_only() -> None:
    model = make("bert")
    _, report = convert(model, "hybrid", layers=[0, 2], calibration=[batch("bert")], window=2, sinks=1, far="taylor")
    assert report.converted == [0, 2] and report.left_exact == [1]
    first, second, _ = report.layers
    assert second.reason == "not asked for" and second.error is None
    assert first.error is not None and first.uniform is not None and first.window_only is not None
    assert 0 < first.error < first.uniform
    assert report.calibration_tokens == 23
    table = str(report)
    assert "window only" in table and "2 of 3 attention layers converted" in table
    assert json.loads(json.dumps(report.as_dict()))["converted"] == [0, 2]


def test_the_reported_error_is_that_of_the_layer() -> None:
    model = make("gpt2")
    samples = sq.hf.capture(model, [batch("gpt2")])
    _, report = convert(model, "performer", calibration=[batch("gpt2")], num_features=32, seed=0)
    sample = samples[1]
    mechanism = mechanism_of(find_layers(model)[1].module)
    assert mechanism is not None
    q, k, v, mask = next(sample.calls())
    call = {"is_causal": True, "scale": sample.scale, "key_mask": mask, "query_mask": mask}
    exact, found = sq.create("softmax", 8)(q, k, v, **call), mechanism(q, k, v, **call)
    error = float((found - exact).square().sum() / exact.square().sum())
    assert report.layers[1].error == pytest.approx(error, rel=1e-4)


def test_seeds_differ_between_layers_and_repeat() -> None:
    seeds = []
    for _ in range(2):
        model = make("bert")
        convert(model, {"mechanism": "performer", "num_features": 16, "seed": 5})
        seeds.append([mechanism_of(layer.module).seed for layer in find_layers(model)])  # type: ignore[union-attr]
    assert len(set(seeds[0])) == 3 and seeds[0] == seeds[1]
    model = make("bert")
    convert(model, sq.create("performer", 8, 4, num_features=16, seed=5))
    assert [mechanism_of(layer.module).seed for layer in find_layers(model)] == seeds[0]  # type: ignore[union-attr]


def test_one_choice_per_layer() -> None:
    own = sq.create("linear", head_dim=8)
    model = make("bert")
    _, report = convert(model, {0: "taylor", "bert.encoder.layer.2.attention.self": own})
    assert report.converted == [0, 2]
    assert mechanism_of(find_layers(model)[2].module) is own
    model = make("bert")
    _, report = convert(model, [None, {"mechanism": "performer", "num_features": 8}, "linear"])
    assert report.converted == [1, 2] and report.layers[0].reason == "chosen to stay exact"
    model = make("bert")
    _, report = convert(model, lambda layer: None if layer.index == 0 else sq.create("local", layer.head_dim, window=2))
    assert report.converted == [1, 2]


def test_layers_that_cannot_take_it_stay_exact_and_say_why() -> None:
    _, report = convert(make("t5"), "performer", num_features=8)
    assert "relative position" in report.layers[0].reason
    _, report = convert(make("bart"), "hybrid", window=2)
    assert report.left_exact == [3, 5] and "cross attention" in report.layers[3].reason
    _, report = convert(make("bart"), "nystrom", landmarks=4)
    assert 2 in report.left_exact and "causal" in report.layers[2].reason


def test_copies_are_converted_models_of_their_own() -> None:
    model = make("bert")
    exact = real_logits(model, batch("bert"))
    convert(model, "performer", num_features=32, seed=0)
    found = real_logits(model, batch("bert"))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(real_logits(twin, batch("bert")), found, rtol=0, atol=0)
    revert(twin)
    torch.testing.assert_close(real_logits(twin, batch("bert")), exact, rtol=0, atol=0)
    torch.testing.assert_close(real_logits(model, batch("bert")), found, rtol=0, atol=0)


def test_half_precision_keeps_projections_in_float32() -> None:
    model = make("llama").to(torch.bfloat16)
    convert(model, "performer", num_features=32, seed=0)
    model.to(torch.float16).to(torch.bfloat16)
    mechanism = mechanism_of(find_layers(model)[0].module)
    assert mechanism is not None
    assert {b.dtype for b in mechanism.buffers() if b.is_floating_point()} == {torch.float32}
    logits = real_logits(model, batch("llama"))
    assert logits.dtype == torch.bfloat16 and torch.isfinite(logits).all()


def test_cross_attention_is_known_by_its_call_where_its_name_does_not_tell() -> None:
    """As many queries as keys and padding in the encoder: the keys' mask is not that of the queries."""
    model = make("bart")
    inputs = batch("bart")
    inputs["decoder_input_ids"] = inputs["input_ids"].flip(1).clamp(min=5)
    wanted = model(**inputs).logits
    for layer in model.model.decoder.layers:
        layer.__class__ = _Renamed
        layer.reader = layer.__dict__["_modules"].pop("encoder_attn")
    _, report = convert(model, Oracle)
    assert {row.name.rsplit(".", 1)[-1] for row in report.layers} == {"self_attn", "reader"}
    torch.testing.assert_close(model(**inputs).logits, wanted, rtol=1e-4, atol=1e-4)


class _Renamed(BartDecoderLayer):
    """BART's decoder layer with a cross attention of another name."""

    @property
    def encoder_attn(self) -> torch.nn.Module:
        reader = self._modules["reader"]
        assert reader is not None
        return reader
