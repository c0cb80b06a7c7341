"""Saved parts, wholes with converted parts, shared configs: each comes back as what was saved, or an error does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import subquad as sq
from subquad.hf import convert, load, revert
from subquad.hf.conversion.attachment import NOTE, refuse_weights
from subquad.hf.conversion.interface import mechanism_of
from subquad.hf.conversion.layers import find_layers

_SIZE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
_TEXT: dict[str, Any] = {**_SIZE, "vocab_size": 64, "num_key_value_heads": 2, "initializer_range": 0.3}
IDS = torch.randint(3, 60, (2, 14), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
# One without anything in the weights, one with projections that must arrive.
MECHANISMS = [{"mechanism": "local", "window": 2}, {"mechanism": "performer", "num_features": 8, "seed": 0}]


def llama(config: Any = None) -> Any:
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(config or tf.LlamaConfig(**_TEXT)).eval()


def clip() -> Any:
    torch.manual_seed(0)
    text = {**_SIZE, "vocab_size": 64, "max_position_embeddings": 40}
    return tf.CLIPModel(
        tf.CLIPConfig(
            text_config={**text, "initializer_factor": 5.0},
            vision_config={**_SIZE, "image_size": 16, "patch_size": 4, "initializer_factor": 5.0},
        )
    ).eval()


def llava() -> Any:
    torch.manual_seed(0)
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**_TEXT),
        vision_config=tf.CLIPVisionConfig(**_SIZE, image_size=16, patch_size=8),
        image_token_index=63, vision_feature_layer=-1,
    )  # fmt: skip
    return tf.LlavaForConditionalGeneration(config).eval()


def logits(model: Any) -> Tensor:
    """Of tokens, and of an image in between where the model takes one."""
    inputs = {"input_ids": IDS.clone()}
    if "pixel_values" in type(model).forward.__code__.co_varnames:
        inputs["input_ids"][:, 2:6] = 63
        inputs["pixel_values"] = PIXELS
    with torch.no_grad():
        out: Tensor = model(**inputs).logits
    return out


def vision(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(PIXELS).last_hidden_state
    return out


def text(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=IDS).last_hidden_state
    return out


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


def far(found: Tensor, other: Tensor) -> bool:
    return bool((found - other).abs().max() > 1e-2)


def converted(model: nn.Module) -> list[bool]:
    return [mechanism_of(layer.module) is not None for layer in find_layers(model)]


# -- parts of a converted whole ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_tower_of_a_converted_folder(tmp_path: Path, mechanism: dict[str, Any]) -> None:
    model = clip()
    exact = vision(model.vision_model)
    convert(model, mechanism)
    seen, read = vision(model.vision_model), text(model.text_model)
    assert far(seen, exact)
    model.save_pretrained(tmp_path / "whole")
    model.vision_model.save_pretrained(tmp_path / "tower")
    for folder in ("whole", "tower"):
        same(vision(tf.CLIPVisionModel.from_pretrained(tmp_path / folder).eval()), seen)
    same(text(tf.CLIPTextModel.from_pretrained(tmp_path / "whole").eval()), read)
    projected = tf.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "whole").eval()
    same(vision(projected.vision_model), seen)
    same(vision(load(tmp_path / "tower").eval()), seen)
    again = load(tmp_path / "whole").eval()
    same(vision(again.vision_model), seen)
    same(text(again.text_model), read)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_tower_that_stayed_exact_loads_from_a_converted_folder(tmp_path: Path, mechanism: dict[str, Any]) -> None:
    model = clip()
    convert(model.text_model, mechanism)
    wanted = vision(model.vision_model)
    model.save_pretrained(tmp_path)
    tower = tf.CLIPVisionModel.from_pretrained(tmp_path).eval()
    assert not any(converted(tower))
    same(vision(tower), wanted)
    same(text(tf.CLIPTextModel.from_pretrained(tmp_path).eval()), text(model.text_model))


def test_the_text_part_and_the_tower_of_a_gemma(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tf.Gemma3Config(
        text_config=tf.Gemma3TextConfig(**_TEXT, head_dim=16, layer_types=["full_attention"] * 2),
        vision_config=tf.SiglipVisionConfig(**_SIZE, image_size=16, patch_size=4),
        mm_tokens_per_image=4,
    )
    model = tf.Gemma3ForConditionalGeneration(config).eval()
    for mechanism in MECHANISMS:
        convert(model, mechanism, check=False)
        model.save_pretrained(tmp_path)
        assert converted(load(tmp_path)) == converted(model)
        for kind in (tf.Gemma3ForCausalLM, tf.SiglipVisionModel):
            # transformers does not find the weights of these parts in the whole's, exact or not.
            if mechanism is MECHANISMS[1]:
                with pytest.raises(ValueError, match="its weights lack"):
                    kind.from_pretrained(tmp_path)
            else:
                assert all(converted(kind.from_pretrained(tmp_path)))
        revert(model)


def test_a_list_of_layers(tmp_path: Path) -> None:
    model = llama()
    exact = logits(model)
    convert(model.model.layers, "local", window=2, check=False)
    wanted = logits(model)
    assert far(wanted, exact)
    model.save_pretrained(tmp_path)
    for again in (load(tmp_path), tf.LlamaForCausalLM.from_pretrained(tmp_path)):
        same(logits(again.eval()), wanted)
    revert(model.model.layers)
    model.save_pretrained(tmp_path / "exact")
    same(logits(tf.LlamaForCausalLM.from_pretrained(tmp_path / "exact").eval()), exact)


def test_modules_that_training_puts_in_between_are_not_in_the_names(tmp_path: Path) -> None:
    model = llama()
    convert(model, MECHANISMS[1])
    wanted = logits(model)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    model.save_pretrained(tmp_path)
    same(logits(load(tmp_path).eval()), wanted)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_parts_whose_config_is_a_copy_or_the_whole_s(tmp_path: Path, mechanism: dict[str, Any]) -> None:
    torch.manual_seed(0)
    bart: Any = tf.BartModel(
        tf.BartConfig(
            vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, init_std=0.3,
        )
    ).eval()  # fmt: skip
    convert(bart.encoder, mechanism)
    bart.save_pretrained(tmp_path / "bart")
    again = load(tmp_path / "bart").eval()
    assert converted(again) == converted(bart) and sum(converted(again)) == 2
    same(text(again), text(bart))
    bart.encoder.save_pretrained(tmp_path / "encoder")
    # The layers of the encoder have the names of the decoder's, and one config describes both.
    with pytest.raises(ValueError, match=r"BartModel has 2 parts with a layer 'layers.0.self_attn'"):
        tf.BartModel.from_pretrained(tmp_path / "encoder")
    t5 = tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    ).eval()
    convert(t5, {"mechanism": "linear"})
    t5.save_pretrained(tmp_path / "t5")
    assert converted(load(tmp_path / "t5")) == converted(t5)
    t5.decoder.save_pretrained(tmp_path / "decoder")
    written = json.loads((tmp_path / "decoder" / "config.json").read_text())
    assert all(name.startswith("block.") for name in written[NOTE]["layers"])


# -- parts that were converted by themselves --------------------------------------------------------------------------


def test_reverting_the_whole_after_converting_a_part(tmp_path: Path) -> None:
    model = llava()
    exact = logits(model)
    convert(model.model.language_model, "local", window=2)
    wanted = logits(model)
    assert far(wanted, exact)
    model.save_pretrained(tmp_path / "converted")
    for again in (load(tmp_path / "converted"), type(model).from_pretrained(tmp_path / "converted")):
        same(logits(again.eval()), wanted)
    revert(again)
    for one in (model, again):
        if one is model:
            revert(one)
        same(logits(one), exact)
        assert NOTE not in json.dumps(one.config.to_dict())
        one.save_pretrained(tmp_path / "exact")
        same(logits(type(model).from_pretrained(tmp_path / "exact").eval()), exact)
        with pytest.raises(ValueError, match="was not saved from a converted model"):
            load(tmp_path / "exact")


def test_projections_of_a_part_must_be_there(tmp_path: Path) -> None:
    model = llava()
    convert(model.model.language_model, MECHANISMS[1])
    model.save_pretrained(tmp_path)
    weights = {name: x for name, x in model.state_dict().items() if ".subquad." not in name}
    note = json.loads((tmp_path / "config.json").read_text())
    assert note.pop(NOTE) and note["text_config"][NOTE]  # as versions wrote it that noted the part alone
    (tmp_path / "config.json").write_text(json.dumps(note))
    same(logits(load(tmp_path).eval()), logits(model))
    revert(model)
    model.save_pretrained(tmp_path / "exact")
    (tmp_path / "exact" / "config.json").write_text(json.dumps(note))
    assert weights.keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="its weights lack"):
        load(tmp_path / "exact")


def hooks(model: nn.Module) -> int:
    return sum(refuse_weights in module._forward_pre_hooks.values() for module in model.modules())


def test_no_hook_is_left_and_none_refuses_without_a_reason() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    wanted = model(IDS, output_attentions=True).attentions
    for whole, part in ((model.model, model), (model, model.model), (model.model.layers, model)):
        convert(whole, "local", window=2, check=False)
        with pytest.raises(ValueError, match="output_attentions=True was asked for"):
            model(IDS, output_attentions=True)
        revert(part)
        found = model(IDS, output_attentions=True).attentions
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    revert(convert(model, "local", window=2)[0])
    assert hooks(model) == 0


# -- one config of two models -----------------------------------------------------------------------------------------


def test_a_config_that_another_model_holds_is_not_marked(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**_TEXT)
    teacher, student = llama(config), llama(config)
    convert(student, "local", window=2)
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(tmp_path / name)
        assert NOTE not in config.to_dict()
        same(logits(tf.LlamaForCausalLM.from_pretrained(tmp_path / name).eval()), logits(model))
    assert far(logits(teacher), logits(student))
    assert not any(converted(llama(config)))
    loaded = load(tmp_path / "student")
    assert not any(converted(llama(loaded.config))) and all(converted(copy.deepcopy(loaded)))
    loaded.save_pretrained(tmp_path / "again")
    same(logits(load(tmp_path / "again").eval()), logits(student))


# -- what cannot be restored ------------------------------------------------------------------------------------------


def edited(folder: Path, name: str, change: Any) -> None:
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_towers_of_folders_with_a_note_of_the_whole_alone(tmp_path: Path, mechanism: dict[str, Any]) -> None:
    model = clip()
    convert(model, mechanism)
    model.save_pretrained(tmp_path)

    def older(config: dict[str, Any]) -> None:
        del config["text_config"][NOTE], config["vision_config"][NOTE]

    edited(tmp_path, "config.json", older)
    same(vision(load(tmp_path).eval().vision_model), vision(model.vision_model))
    with pytest.raises(ValueError, match=r"CLIPVisionModel was given a config without the note.*save it again"):
        tf.CLIPVisionModel.from_pretrained(tmp_path)
    load(tmp_path).save_pretrained(tmp_path)
    same(vision(tf.CLIPVisionModel.from_pretrained(tmp_path).eval()), vision(model.vision_model))


def test_a_config_without_the_note(tmp_path: Path) -> None:
    model = llama()
    convert(model, MECHANISMS[1])
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"was given a config without the note.*'model.layers.0.self_attn'.*leave config= out"
    ):
        tf.LlamaForCausalLM.from_pretrained(tmp_path, config=tf.LlamaConfig(**_TEXT))
    model.config.save_pretrained(tmp_path)  # not the way to save a model: the note is lost
    with pytest.raises(ValueError, match=r"was given a config without the note.*its save_pretrained"):
        tf.LlamaForCausalLM.from_pretrained(tmp_path)


# -- weights of attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, [0]])
def test_weights_are_refused_by_every_model_around_a_converted_layer(layers: Any) -> None:
    model = llama()
    model.set_attn_implementation("eager")
    convert(model, "local", window=2, layers=layers)
    for one in (model, model.model):
        with pytest.raises(ValueError, match="output_attentions=True was asked for"):
            one(IDS, output_attentions=True)


def test_weights_of_a_part_that_is_exact_are_given() -> None:
    model = llava()
    model.set_attn_implementation("eager")
    names = [layer.name for layer in find_layers(model) if "vision" in layer.name]
    convert(model, "local", window=2, layers=names, check=False)
    with pytest.raises(ValueError, match="CLIPVisionModel has converted attention layers"):
        model.model.vision_tower(PIXELS, output_attentions=True)
    assert len(model.model.language_model(IDS, output_attentions=True).attentions) == 2
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration has converted"):
        model(IDS, output_attentions=True)
    assert sq.hf.revert(model) is model and hooks(model) == 0


def test_two_towers_that_are_alike(tmp_path: Path) -> None:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text, image = {**size, "vocab_size": 64}, {**size, "image_size": 32, "patch_size": 8}
    model = tf.SiglipModel(tf.SiglipConfig(text_config=text, vision_config=image)).eval()
    converted, _ = convert(model, "local", window=2)
    pixels = torch.randn(2, 3, 32, 32)
    want = converted.vision_model(pixels).last_hidden_state
    converted.save_pretrained(tmp_path)
    for loaded in (tf.SiglipModel.from_pretrained(tmp_path), load(tmp_path)):
        assert torch.allclose(loaded.eval().vision_model(pixels).last_hidden_state, want, atol=1e-5)


def test_a_whole_whose_base_model_is_a_part_with_a_config_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inner = tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", "head_dim": 16, **_TEXT},
        vision_config={"model_type": "siglip_vision_model", **_SIZE, "image_size": 16, "patch_size": 8},
        projection_dim=32, image_token_index=63,
    )  # fmt: skip
    model = tf.ColPaliForRetrieval(tf.ColPaliConfig(vlm_config=inner, embedding_dim=16)).eval()
    convert(model, "local", window=2)
    want = model(IDS).embeddings
    model.save_pretrained(tmp_path)
    for loaded in (tf.ColPaliForRetrieval.from_pretrained(tmp_path).eval(), load(tmp_path)):
        assert converted(loaded) == converted(model)
        same(loaded(IDS).embeddings, want)


def test_an_adapter_on_a_saved_converted_base_comes_back_on_it(tmp_path: Path) -> None:
    """It names the folder of its base: one that was converted after it was loaded would come back exact."""
    peft = pytest.importorskip("peft")
    convert(model := llama(), MECHANISMS[1])
    model.save_pretrained(tmp_path / "base")
    base = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        same(again(input_ids=IDS).logits, adapted(input_ids=IDS).logits)
        assert far(adapted(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert all(converted(again))


@pytest.mark.parametrize("damage", ["one layer", "no layer", "another mechanism", "facts", "a layer"])
def test_a_note_that_does_not_fit_the_weights_is_refused(tmp_path: Path, damage: str) -> None:
    model, _ = convert(llama(), "performer", num_features=8, seed=0)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    note, first = config[NOTE], next(iter(config[NOTE]["layers"]))
    if damage == "one layer":
        del note["layers"][first]
    elif damage == "no layer":
        note["layers"] = {}
    elif damage == "another mechanism":
        note["layers"] = {name: {"mechanism": "local", "head_dim": 16, "window": 4} for name in note["layers"]}
    elif damage == "facts":
        note["facts"] = "x"
    else:
        note["layers"][first] = "performer"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"not the one that it was saved with|is damaged"):
        load(tmp_path)
