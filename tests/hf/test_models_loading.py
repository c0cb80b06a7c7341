"""Saving and loading: exact, strict, from safetensors alone; a config says what a model is."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import subquad as sq
from subquad.hf import (
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadModel,
    versions,
)
from subquad.mechanisms import MECHANISMS
from subquad.nn.config import CONFIG_VERSION

TINY: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 16, "vocab": 19, "seed": 0}


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(1))


def decoder(mechanism: Any = "performer", **fields: Any) -> SubquadForCausalLM:
    return SubquadForCausalLM(SubquadConfig(**{**TINY, "mechanism": mechanism, **fields})).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    decoder().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, edit: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# -- exact ----------------------------------------------------------------------------------------------------------

VARIANTS = [
    {"mechanism": name, **variant}
    for name in sq.list_mechanisms()
    for variant in (MECHANISMS[name].CONTRACT_VARIANTS if name in ("performer", "taylor") else
                    MECHANISMS[name].CONTRACT_VARIANTS[:1])
]  # fmt: skip


@pytest.mark.parametrize("mechanism", VARIANTS, ids=lambda choice: "-".join(str(x) for x in choice.values()))
def test_a_round_trip_is_exact_and_float32_buffers_survive_bfloat16(mechanism, tmp_path):
    torch.manual_seed(0)
    model = SubquadForMaskedLM(SubquadConfig(**TINY, kind="encoder", mechanism=mechanism)).eval()
    model.calibrate(tokens())
    model.redraw()
    model.save_pretrained(tmp_path)
    torch.manual_seed(1)  # nothing may come from the generator
    again = SubquadForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert not again.training
    half = SubquadForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, buffer in half.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
        assert buffer.dtype == model.get_buffer(name).dtype, name
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(tokens()).logits.dtype == torch.bfloat16


def test_draws_continue_after_loading(tmp_path):
    model = decoder()
    model.redraw()
    model.redraw()
    model.save_pretrained(tmp_path)
    again = SubquadForCausalLM.from_pretrained(tmp_path)
    again.redraw()
    model.redraw()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    projection = again.model.stack.blocks[0].attention.mechanism.feature_map.projection
    assert projection.draw_key()[1] == 3


def test_shared_parameters_are_saved_once_and_stay_shared(tmp_path):
    one = {"mechanism": "linformer", "length": 16, "rank": 4, "sharing": "layers"}
    model = SubquadModel(SubquadConfig(**TINY, kind="encoder", mechanism=one)).eval()
    model.save_pretrained(tmp_path)
    again = SubquadModel.from_pretrained(tmp_path)
    assert torch.equal(again(tokens()).last_hidden_state, model(tokens()).last_hidden_state)
    first, second = (block.attention.mechanism.projection for block in again.stack.blocks)
    assert first is second


def test_tied_embeddings(tmp_path):
    model = decoder("linear", tie_embeddings=True)
    model.save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "head" in name]
    assert torch.equal(SubquadForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)


def test_only_safetensors_are_written_and_read(folder):
    assert sorted(file.suffix for file in folder.iterdir()) == [".json", ".json", ".safetensors"]
    with pytest.raises(ValueError, match=r"use_safetensors=False.*never unpickles"):
        SubquadForCausalLM.from_pretrained(folder, use_safetensors=False)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        SubquadForCausalLM.from_pretrained(folder)


def test_a_classifier_starts_from_a_language_model(folder):
    trained = SubquadForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    classifier = SubquadForSequenceClassification.from_pretrained(folder, num_labels=3)
    hidden = trained.model(tokens()).last_hidden_state
    assert torch.equal(classifier.model(tokens()).last_hidden_state, hidden)
    assert classifier.classifier.weight.shape == (3, 16)
    assert 0 < classifier.classifier.weight.std() < 1
    assert classifier.classifier.bias.eq(0).all()
    assert torch.equal(SubquadModel.from_pretrained(folder)(tokens()).last_hidden_state, hidden)


# -- strict ---------------------------------------------------------------------------------------------------------

WEIGHT = "model.stack.blocks.1.feed.up.weight"
PROJECTION = "model.stack.blocks.0.attention.mechanism.feature_map.projection.seed"


@pytest.mark.parametrize("name", [WEIGHT, PROJECTION, "model.stack.head.weight"])
def test_a_missing_key_is_named(folder, name):
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"nothing was loaded: {name} is missing"):
        SubquadForCausalLM.from_pretrained(folder)


def test_an_unknown_key_is_named(folder):
    change(folder, lambda tensors: tensors.update({WEIGHT.replace("up", "upp"): torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"blocks.1.feed.upp.weight is unknown; did you mean '.*feed.up.weight'"):
        SubquadForCausalLM.from_pretrained(folder)


def test_a_wrong_shape_is_named(folder):
    change(folder, lambda tensors: tensors.update({WEIGHT: torch.zeros(3, 16)}))
    with pytest.raises(ValueError, match=rf"{WEIGHT} has shape \(3, 16\), expected \(64, 16\)"):
        SubquadForCausalLM.from_pretrained(folder)


def test_half_a_head_is_not_a_new_head(tmp_path):
    model = SubquadForSequenceClassification(SubquadConfig(**TINY, mechanism="linear", num_labels=3))
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop("classifier.bias"))
    with pytest.raises(ValueError, match=r"classifier.bias is missing"):
        SubquadForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "header", "empty"])
def test_a_corrupt_file_is_named(folder, damage):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"truncated": data[:-100], "header": b"\xff" * 16 + data[16:], "empty": b""}[damage])
    with pytest.raises(ValueError, match=f"nothing was loaded: .*{file.name}"):
        SubquadForCausalLM.from_pretrained(folder)


def test_a_corrupt_config_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json"):
        SubquadForCausalLM.from_pretrained(folder)


# -- the config -----------------------------------------------------------------------------------------------------


def rewrite(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    data = json.loads(file.read_text())
    for name, value in fields.items():
        if value is None:
            data.pop(name)
        else:
            data[name] = value
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config_version": CONFIG_VERSION + 1}, f"config_version={CONFIG_VERSION + 1}.*newer one: upgrade subquad"),
        ({"config_version": "1"}, "'config_version' of a model config must be an integer, got '1'"),
        ({"headds": 3}, r"no fields \['headds'\]; did you mean 'heads'"),
        ({"layers": None}, r"lacks the fields \['layers'\]"),
        ({"mechanism": "preformer"}, "mechanism='preformer' is not known.*did you mean 'performer'"),
        ({"dim": 15}, "dim=15 must be a multiple of heads=2"),
        ({"max_length": 5}, "no field 'max_length'.*max_positions="),
        ({"kind": "encoder-decoder"}, "kind='encoder-decoder' is no part"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_a_config_that_is_newer_unknown_or_wrong_is_refused_by_name(folder, fields, message):
    rewrite(folder, **fields)
    for load in (SubquadConfig.from_pretrained, SubquadForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_a_config_goes_through_json_and_back(tmp_path):
    per_layer = ["softmax", {"mechanism": "hybrid", "window": 4, "far": {"mechanism": "linear"}}]
    config = SubquadConfig(
        **TINY, mechanism=per_layer, kv_heads=1, positions="learned", max_positions=40, norm_eps=1e-6, eos_token_id=3
    )
    config.save_pretrained(tmp_path)
    again = SubquadConfig.from_pretrained(tmp_path)
    assert again == config
    assert again.architecture() == config.architecture()
    assert again != SubquadConfig(**{**TINY, "layers": 3})
    assert (again.hidden_size, again.num_key_value_heads, again.max_position_embeddings) == (16, 1, 40)
    # Every field is written, so that a later default changes no saved model.
    assert json.loads((tmp_path / "config.json").read_text())["rotary_base"] == 10000.0
    assert SubquadConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2).dim == 32


def test_mechanism_objects_are_written_down_as_options_and_code_is_refused():
    made = sq.create("performer", head_dim=8, num_features=32, seed=4)
    config = SubquadConfig(**TINY, mechanism=made)
    assert config.mechanism["mechanism"] == "performer"
    assert config.mechanism["num_features"] == 32
    with pytest.raises(TypeError, match="callable"):
        SubquadConfig(**TINY, mechanism=sq.create("linear", head_dim=8, features=torch.exp))


def test_a_seed_is_drawn_once_and_saved(tmp_path):
    model = SubquadForCausalLM(SubquadConfig(**{**TINY, "seed": None}, mechanism="performer")).eval()
    assert isinstance(model.config.seed, int)
    model.save_pretrained(tmp_path)
    again = SubquadForCausalLM.from_pretrained(tmp_path)
    assert again.config.seed == model.config.seed
    # So that a cache made by one can be continued by the other.
    cache = model(tokens(), use_cache=True).past_key_values
    more = torch.tensor([[1], [2]])
    torch.testing.assert_close(again(more, past_key_values=cache).logits.shape, torch.Size([2, 1, 19]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling": "max"}, "pooling='max' is not known"),
        ({"frame_width": 80, "vocab": 19}, "frame_width=80 means the input is frames"),
        ({"frame_stack": 0}, "frame_stack must be at least 1"),
        ({"ctc_blank": -1}, "ctc_blank must be at least 0"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        SubquadConfig(**{**TINY, "kind": "encoder", **fields})


# -- versions -------------------------------------------------------------------------------------------------------


def test_without_transformers_or_with_another_major_version_the_extra_is_named(monkeypatch):
    # transformers imports itself a second time while it loads, so the module of this file may not be the present one.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"transformers >=5.0,<6, found 4.57.6.*subquad\[hf\]"):
        importlib.reload(versions)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install 'subquad\[hf\]'"):
        importlib.reload(versions)
