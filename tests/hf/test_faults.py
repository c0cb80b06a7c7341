"""Conversions that used to be wrong without saying so: each family broke one assumption about how models attend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import subquad as sq
from subquad.hf import convert, load
from subquad.hf.conversion.attending import Converted, ConvertedLayer
from subquad.hf.conversion.interface import mechanism_of
from subquad.hf.conversion.layers import find_layers

from .zoo import Oracle, batch, make, real_logits, text

SIZE: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}


def built(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


def deepseek() -> Any:
    config = tf.DeepseekV3Config(
        **SIZE, **MLA, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, first_k_dense_replace=2,
    )  # fmt: skip
    return built(tf.DeepseekV3ForCausalLM, config)


def diffllama() -> Any:
    return built(tf.DiffLlamaForCausalLM, tf.DiffLlamaConfig(**SIZE, num_key_value_heads=2))


def jetmoe() -> Any:
    config = tf.JetMoeConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8, intermediate_size=32,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return built(tf.JetMoeForCausalLM, config)


# -- 1. keys that are rebuilt between the cache and the attention --


@pytest.mark.parametrize("family", [deepseek, jetmoe])
def test_keys_that_a_model_rebuilds_after_its_cache_keep_their_state(family: Any) -> None:
    exact, model = family(), family()
    _, report = convert(model, Oracle)
    assert report.converted == [0, 1]
    inputs = text("left")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    out = [m.generate(**inputs, **options, return_dict_in_generate=True) for m in (exact, model)]
    assert isinstance(out[1].past_key_values.layers[0], ConvertedLayer)
    torch.testing.assert_close(torch.stack(out[1].logits), torch.stack(out[0].logits), rtol=1e-3, atol=1e-3)


def test_a_layer_that_attends_twice_to_one_update_stays_exact() -> None:
    model = diffllama()
    with pytest.raises(ValueError, match=r"no layer is left to convert: .*with a cache it raises ValueError"):
        convert(model, "linear")


def test_tokens_that_were_counted_and_never_attended_to_are_an_error() -> None:
    module = make("llama").model.layers[0].self_attn
    module.add_module("subquad", sq.create("linear", 8))
    converted, cache = Converted("layer 0", True, False), tf.DynamicCache()
    converted.before(module, (), {"past_key_values": cache})
    cache.update(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), 0)
    with pytest.raises(RuntimeError, match=r"'layer 0' counted 3 tokens in its cache and never attended"):
        converted.after(module, (), None)


# -- 2. causality is what a layer does, not an attribute --


def splinter() -> Any:
    return built(tf.SplinterModel, tf.SplinterConfig(**SIZE))


def clap_text() -> Any:
    config = tf.ClapTextConfig(**{k: v for k, v in SIZE.items() if k != "initializer_range"}, projection_dim=8)
    return built(tf.ClapTextModel, config)


@pytest.mark.parametrize("family", [splinter, clap_text])
def test_layers_without_is_causal_see_later_tokens(family: Any) -> None:
    model = family()
    inputs = text()
    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state
        _, report = convert(model, Oracle)
        found = model(**inputs).last_hidden_state
    assert report.converted == [0, 1]
    assert not any(find.is_causal for find in looked(family()))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[real], wanted[real], rtol=1e-4, atol=1e-4)


def looked(model: Any) -> list[Any]:
    from subquad.hf.conversion.checking import look
    from subquad.hf.conversion.trials import make_trials

    return look(model, find_layers(model), make_trials(model, []))[0]


def test_a_decoder_is_found_to_be_causal_by_changing_tokens() -> None:
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
             (("layers", 1), ("attention_heads", 4), ("ffn_dim", 40))}  # fmt: skip
    config = tf.PegasusXConfig(vocab_size=50, d_model=32, block_size=4, num_global_tokens=2, init_std=0.3, **sides)
    model = built(tf.PegasusXModel, config)
    kinds = {layer.name: (layer.is_causal, layer.cross) for layer in looked(model)}
    assert kinds["decoder.layers.0.self_attn"] == (True, False)
    assert kinds["decoder.layers.0.encoder_attn"] == (False, True)
    assert [layer.is_causal for layer in looked(make("bert"))] == [False] * 3
    assert [layer.is_causal for layer in looked(make("gpt2"))] == [True] * 3


# -- 3, 10, 11. what softmax attention of q and k is not stays exact --


def gpt_oss() -> Any:
    config = tf.GptOssConfig(
        **SIZE, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention", "full_attention"],
    )  # fmt: skip
    model = built(tf.GptOssForCausalLM, config)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    return model


def gemma2() -> Any:
    config = tf.Gemma2Config(
        **SIZE, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2, query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
    )  # fmt: skip
    return built(tf.Gemma2ForCausalLM, config)


def swin() -> Any:
    config = tf.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)
    model = built(tf.SwinModel, config)
    for name, parameter in model.named_parameters():
        if "relative_position_bias" in name:
            parameter.data.normal_()
    return model


@pytest.mark.parametrize(
    ("family", "reason"), [(gpt_oss, "sink"), (gemma2, "caps its scores|soft cap"), (swin, "bias")]
)
def test_layers_with_more_than_queries_and_keys_are_refused_at_once(family: Any, reason: str) -> None:
    model = family()
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if family is swin else text()
    with torch.no_grad():
        wanted = model(**inputs)[0]
        with pytest.raises(ValueError, match=rf"no layer is left to convert: .*({reason})"):
            convert(model, "linear")
        assert torch.equal(model(**inputs)[0], wanted)
        _, report = convert(model, "softmax")
        assert report.converted == list(range(len(report.layers)))
        assert torch.equal(model(**inputs)[0], wanted)


def test_sinks_are_seen_even_where_no_attribute_tells() -> None:
    model = gpt_oss()
    hidden = [replace(layer, obstacle="") for layer in find_layers(model)]
    from subquad.hf.conversion.checking import look
    from subquad.hf.conversion.trials import make_trials

    seen, _ = look(model, hidden, make_trials(model, []))
    assert all("sinks" in layer.obstacle or "differs by" in layer.obstacle for layer in seen)


def test_learned_queries_of_one_row_meet_keys_of_many() -> None:
    config = tf.Blip2QFormerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40, encoder_hidden_size=24,
        cross_attention_frequency=1, initializer_range=0.3,
    )  # fmt: skip
    exact, model = (built(tf.Blip2QFormerModel, config) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "query_embeds": torch.randn(1, 6, 32, generator=generator),
        "encoder_hidden_states": torch.randn(3, 20, 24, generator=generator),
    }
    _, report = convert(model, Oracle, calibration=[inputs])
    assert len(report.converted) == 4
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs)[0], exact(**inputs)[0], rtol=1e-4, atol=1e-4)


def test_a_config_without_a_padding_token() -> None:
    config = tf.Aimv2TextConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=64, eos_token_id=49,
    )  # fmt: skip
    assert not hasattr(config, "pad_token_id")
    exact, model = built(tf.Aimv2TextModel, config), built(tf.Aimv2TextModel, config)
    _, report = convert(model, Oracle)
    assert report.converted == [0, 1]
    with torch.no_grad():
        torch.testing.assert_close(model(**text())[0], exact(**text())[0], rtol=1e-4, atol=1e-4)


def gemma3n() -> Any:
    config = tf.Gemma3nTextConfig(
        vocab_size=50, vocab_size_per_layer_input=50, hidden_size=32, intermediate_size=[40] * 4, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 4,
        num_kv_shared_layers=2, hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    return built(tf.Gemma3nForCausalLM, config)


def gemma4(shared: int = 2) -> Any:
    config = tf.Gemma4TextConfig(
        vocab_size=50, vocab_size_per_layer_input=50, hidden_size=32, intermediate_size=40, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8,
        layer_types=["full_attention"] * 4, num_kv_shared_layers=shared, hidden_size_per_layer_input=8,
    )  # fmt: skip
    return built(tf.Gemma4ForCausalLM, config)


@pytest.mark.parametrize(
    ("family", "converted"), [(gemma3n, [0]), (gemma4, [0]), (lambda: gemma4(shared=0), [0, 1, 2, 3])]
)
def test_layers_that_share_keys_stay_exact(family: Any, converted: list[int]) -> None:
    exact, model = family(), family()
    _, report = convert(model, Oracle)
    assert report.converted == converted
    if converted == [0]:
        assert "later layers take its keys and values" in str(report)
        assert "it takes the keys and values of an earlier layer" in str(report)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    out = [m.generate(**text("left"), **options, return_dict_in_generate=True) for m in (exact, model)]
    torch.testing.assert_close(torch.stack(out[1].logits), torch.stack(out[0].logits), rtol=1e-3, atol=1e-3)


# -- 4, 5. masks --


def test_a_prompt_whose_tokens_all_see_each_other_keeps_its_mask_with_a_cache() -> None:
    """As PaliGemma's prefix; the mask comes written out, and as a view that repeats one row."""
    ids = text()["input_ids"]
    written = torch.zeros(3, 1, 12, 12)
    view = torch.ones(3, 1, 1, 12, dtype=torch.bool).expand(3, 1, 12, 12)
    for mask in (written, view):
        exact, model = make("llama"), make("llama")
        convert(model, Oracle)
        for options in ({"use_cache": False}, {"use_cache": True}):
            with torch.no_grad():
                out = [m(ids, attention_mask=mask, **options) for m in (exact, model)]
            torch.testing.assert_close(out[1].logits, out[0].logits, rtol=1e-3, atol=1e-3)
        after = torch.zeros(3, 1, 1, 13)
        with torch.no_grad():
            one = [m(ids[:, :1], attention_mask=after, past_key_values=o.past_key_values).logits
                   for m, o in zip((exact, model), out, strict=True)]  # fmt: skip
        torch.testing.assert_close(one[1], one[0], rtol=1e-3, atol=1e-3)


def test_a_mask_that_hides_what_the_state_has_absorbed_is_refused() -> None:
    model = make("llama")
    convert(model, "linear")
    ids = text()["input_ids"]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        mask = torch.zeros(3, 1, 1, 13)
        mask[..., :4] = torch.finfo(torch.float32).min
        with pytest.raises(ValueError, match=r"'model.layers.0.self_attn' got a mask that hides tokens"):
            model(ids[:, :1], attention_mask=mask, past_key_values=cache)


def test_layers_that_are_not_converted_keep_their_own_masks() -> None:
    sizes = {k: v for k, v in SIZE.items() if k != "max_position_embeddings"}
    config = tf.GitConfig(
        **sizes, max_position_embeddings=64,
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 8, "patch_size": 4},
    )  # fmt: skip
    exact, model = built(tf.GitForCausalLM, config), built(tf.GitForCausalLM, config)
    inputs = {**text(), "pixel_values": torch.randn(3, 3, 8, 8)}
    try:
        convert(model, Oracle, calibration=[inputs])
    except ValueError as error:
        assert "no layer is left to convert" in str(error)  # GIT's prefix mask is none that a mechanism can take
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, exact(**inputs).logits, rtol=1e-3, atol=1e-3)


# -- 6, 7. autocast and compile --


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_autocast(name: str) -> None:
    exact, model = make(name), make(name)
    convert(model, Oracle)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted, found = (m(**text()).logits for m in (exact, model))
        again = model.generate(**text("left"), max_new_tokens=3, do_sample=False, pad_token_id=0)
    real = text()["attention_mask"].bool()
    assert found.dtype == wanted.dtype and again.shape == (3, 15)
    torch.testing.assert_close(
        found[real].float(), wanted[real].float(), rtol=0.1, atol=0.1 * float(wanted.abs().max())
    )


def test_a_decoder_compiles_with_its_default_cache() -> None:
    model = make("llama")
    model.model.layers = model.model.layers[:1]  # tracing takes seconds per layer
    model.config.num_hidden_layers = 1
    convert(model, "performer", num_features=16, seed=0)
    ids = text()["input_ids"]
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        out, wanted = compiled(ids), model(ids)
        step = compiled(ids[:, :1], past_key_values=out.past_key_values).logits
        right = model(ids[:, :1], past_key_values=wanted.past_key_values).logits
    torch.testing.assert_close(out.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step, right, rtol=1e-4, atol=1e-4)


# -- 8. wrappers --


class Wrapper(nn.Module):
    """A module around a transformers model, as sentence encoders are."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(**features).logits
        return out


def test_a_model_inside_a_wrapper_is_saved_as_what_it_is(tmp_path: Path) -> None:
    wrapper = Wrapper(make("bert"))
    _, report = convert(wrapper, "performer", calibration=[batch("bert")], num_features=16, seed=0)
    assert report.converted == [0, 1, 2]
    wanted = real_logits(wrapper.inner, batch("bert"))
    wrapper.inner.save_pretrained(tmp_path)
    again = load(tmp_path)
    torch.testing.assert_close(real_logits(again, batch("bert")), wanted, rtol=0, atol=0)
    sq.hf.revert(wrapper)
    assert "subquad_conversion" not in wrapper.inner.config.to_dict()


# -- 9. reports of layers with other numbers of queries than keys --


@pytest.mark.parametrize("name", ["segformer", "siglip"])
def test_calibration_where_queries_and_keys_differ_in_number(name: str) -> None:
    if name == "segformer":
        config = tf.SegformerConfig(
            num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
            patch_sizes=[3, 3], strides=[2, 2], decoder_hidden_size=8, mlp_ratios=[1, 1],
        )  # fmt: skip
        model = built(tf.SegformerModel, config)
    else:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = built(tf.SiglipVisionModel, tf.SiglipVisionConfig(**vision, image_size=16, patch_size=4))
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16)}
    _, report = convert(model, "performer", calibration=[pixels], num_features=16, seed=0)
    assert report.converted
    assert all(layer.error is not None for layer in report.layers if layer.mechanism is not None)


# -- 12. names --


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_weights_that_are_never_formed_are_not_returned_as_nothing(name: str) -> None:
    model = make(name)
    convert(model, "linear")
    with pytest.raises(ValueError, match="never forms the"):
        model(**batch(name), output_attentions=True)
    sq.hf.revert(model)
    model.set_attn_implementation("eager")
    assert len(model(**batch(name), output_attentions=True).attentions) == len(find_layers(model))


def test_messages_name_the_layer() -> None:
    model = make("vit")
    convert(model, "linear")
    layer = find_layers(model)[0]
    mechanism = mechanism_of(layer.module)
    assert mechanism is not None
    with pytest.raises(ValueError, match=rf"the attention layer '{layer.name}' got an additive bias"):
        attend(model, layer, torch.full((2, 1, 17, 17), -0.5))


def attend(model: Any, layer: Any, mask: Tensor) -> Tensor:
    from subquad.hf.conversion.interface import AttentionCall

    q, k, v = torch.randn(3, 2, 4, 17, 8)
    out: Tensor = layer.module.config.attend(layer.module, AttentionCall(q, k, v, mask, {}))
    return out
