"""The check of a conversion finds what is wrong with it, and packed sequences are each alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import subquad as sq
from subquad.hf import convert
from subquad.hf.conversion.attending import Converted
from subquad.hf.conversion.interface import AttentionCall
from subquad.hf.conversion.layers import find_layers
from subquad.hf.conversion.trials import make_trials

from .zoo import Oracle, batch, make, real_logits, text


def test_a_conversion_that_would_be_wrong_is_left_exact_with_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason: here the converted path of one layer forgets its scale."""
    model = make("bert")
    wanted = real_logits(model, batch("bert"))
    true = Converted._without_cache

    def wrong(self: Converted, mechanism: Any, module: nn.Module, call: Any) -> Tensor:
        if "layer.1." in self.name:
            call = replace(call, options={**call.options, "scaling": 1.0})
        return true(self, mechanism, module, call)

    monkeypatch.setattr(Converted, "_without_cache", wrong)
    with pytest.raises(
        ValueError, match=r"attention layer 1 .* cannot be converted to 'linear': with forward the model"
    ):
        convert(model, "linear", layers=[1])
    assert torch.equal(real_logits(model, batch("bert")), wanted)
    _, report = convert(model, "linear")
    assert report.converted == [0, 2] and "differs by" in report.layers[1].reason
    sq.hf.revert(model)
    _, report = convert(model, "linear", check=False)
    assert report.converted == [0, 1, 2]


def test_a_layer_whose_output_the_model_keeps_between_calls_stays_exact() -> None:
    """What it gave with exact attention before would be given again (OmDet-Turbo keeps embeddings of texts)."""
    model = make("bert")
    block, kept = model.bert.encoder.layer[1], {}
    inner = block.forward

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        key = tuple(hidden_states.shape)
        kept[key] = kept[key] if key in kept else inner(hidden_states, *args, **kwargs)
        return kept[key]

    block.forward = forward
    _, report = convert(model, "linear", calibration=[{"inputs_embeds": torch.randn(2, 9, 32)}])
    assert report.converted == [0, 2] and "a second call with the same inputs" in report.layers[1].reason


def test_a_cache_is_tried_with_inputs_that_tell_something() -> None:
    model = make("llama")
    assert [trial.name for trial in make_trials(model, [])][-1] == "a cache"
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert [trial.name for trial in make_trials(model, [])][-1] == "padding on the right"


def test_packed_sequences_are_each_alone() -> None:
    exact, model = make("llama"), make("llama")
    convert(model, "performer", num_features=16, seed=0)
    ids = text()["input_ids"][:1]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        pieces = [model(piece, use_cache=False).logits for piece in ids.split([5, 4, 3], 1)]
        torch.testing.assert_close(packed, torch.cat(pieces, 1), rtol=1e-4, atol=1e-4)
        convert(exact, Oracle)
        wanted = make("llama")(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(
            exact(ids, position_ids=positions, use_cache=False).logits, wanted, rtol=1e-3, atol=1e-3
        )
    bert = make("bert")
    convert(bert, "performer", num_features=16, seed=0)
    blocks = torch.block_diag(*(torch.ones(n, n) for n in (5, 4, 3))).bool()[None, None]
    with torch.no_grad():
        assert torch.isfinite(bert(ids, attention_mask=blocks).logits).all()
    q, k, v = torch.randn(3, 1, 4, 12, 8)
    layer = find_layers(bert)[0]
    starts = torch.tensor([0, 5, 9, 12], dtype=torch.int32)
    calls = [
        AttentionCall(q, k, v, blocks, {}),
        AttentionCall(q, k, v, None, {"cu_seq_lens_q": starts, "is_causal": False}),
    ]
    one, other = (layer.module.config.attend(layer.module, call) for call in calls)
    torch.testing.assert_close(one, other)


_SIZE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip


def test_encoders_in_the_code_of_decoders_need_no_cache() -> None:
    torch.manual_seed(0)
    config = tf.Gemma3TextConfig(
        **_SIZE, layer_types=["full_attention"] * 2, use_bidirectional_attention=True, sliding_window=64
    )
    exact = tf.Gemma3TextModel(config).eval()
    ids = torch.randint(3, 60, (2, 20))
    model, report = convert(tf.Gemma3TextModel(config).eval(), "multipole")
    assert report.converted == [0, 1] and not find_layers(model)[0].module.config.attend.causal
    model.load_state_dict(exact.state_dict(), strict=False)  # its mechanisms have buffers of their own
    with torch.no_grad():
        torch.testing.assert_close(model(ids).last_hidden_state, exact(ids).last_hidden_state, rtol=1e-3, atol=1e-3)


def test_layers_that_their_config_calls_chunked_stay_exact() -> None:
    """Also on inputs within one chunk, where they do what the others do."""
    config = tf.Llama4TextConfig(
        **_SIZE, attention_chunk_size=128, layer_types=["chunked_attention", "full_attention"], num_local_experts=2,
        intermediate_size_mlp=32,
    )  # fmt: skip
    layers = find_layers(tf.Llama4ForCausalLM(config))
    assert "chunked attention is linear" in layers[0].obstacle and not layers[1].obstacle


def test_a_choice_is_about_the_layers_that_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check leaves exact is left out before anything is chosen, and the verdict is of the model returned."""
    from subquad.hf.plan.automatic import output_error, outputs

    true = Converted._without_cache

    def wrong(self: Converted, mechanism: Any, module: nn.Module, call: Any) -> Tensor:
        if "layers.1." in self.name:
            call = replace(call, options={**call.options, "scaling": 1.0})
        return true(self, mechanism, module, call)

    monkeypatch.setattr(Converted, "_without_cache", wrong)

    def times(choices: Any, shape: Any, causal: bool, lengths: Any) -> Any:
        rows = [[1e-2 * n * n if c["mechanism"] == "softmax" else 1e-3 * n for n in lengths] for c in choices]
        return torch.tensor(rows, dtype=torch.float64), [shape[2] * 1e-2 * n * n for n in lengths]

    monkeypatch.setattr("subquad.hf.plan.survey._layer_times", times)
    batches = [text(seed=seed) for seed in range(4)]
    window = [{"mechanism": "local", "window": 8}]  # the batches have 12 tokens, enough to judge it for 20
    model, report = convert(make("llama"), calibration=batches, error=0.9, length=20, candidates=window)
    assert report.choice is not None and report.converted == [0, 2] and "differs by" in report.layers[1].reason
    assert [index for index, one in report.choice.mechanisms.items() if one is not None] == [0, 2]
    found = output_error(outputs(model, batches[3:]), outputs(make("llama"), batches[3:]))
    assert found == pytest.approx(report.choice.error, abs=1e-6)


def test_a_model_that_reads_padding_is_not_given_a_mechanism_that_leaves_it_out() -> None:
    """SigLIP pools the last token, also where it is padding, whose own output a window has as 0."""
    torch.manual_seed(0)
    config = tf.SiglipTextConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    model = tf.SiglipTextModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = [text()]
    for name, options in (("local", {"window": 500}), ("hybrid", {"window": 500}), ("sparse", {"stride": 500})):
        with pytest.raises(ValueError, match=r"no layer is left to convert: .*\(pooler_output\) differs"):
            convert(model, name, calibration=inputs, **options)
    converted, report = convert(model, "multipole", calibration=inputs)
    assert report.converted == [0]
    sq.hf.revert(converted)


def test_one_object_in_two_layers_is_two_mechanisms(tmp_path: Path) -> None:
    model = make("bert")
    one = sq.create("performer", 8, 4, num_features=16, seed=0)
    convert(model, [one, one, one])
    model.save_pretrained(tmp_path)
    assert torch.equal(real_logits(sq.hf.load(tmp_path), text()), real_logits(model, text()))
