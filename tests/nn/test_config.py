"""The config: what a model is, through JSON and back, and what it refuses."""

import json

import pytest
import torch

import subquad as sq
from subquad.mechanisms import Mechanism
from subquad.nn import ModelConfig


def test_every_field_survives_json():
    config = ModelConfig(
        kind="encoder-decoder",
        layers=2,
        heads=4,
        dim=16,
        vocab=11,
        mechanism=["softmax", {"mechanism": "performer", "num_features": 16, "seed": 3}, "linear"],
        kv_heads=2,
        head_dim=6,
        hidden=20,
        norm="post",
        normalization="rms",
        norm_eps=1e-6,
        final_norm=True,
        final_norm_eps=1e-4,
        activation="swiglu",
        positions="learned",
        max_length=50,
        rotary_base=500.0,
        dropout=0.1,
        bias=False,
        tie_embeddings=True,
        seed=2**62,
        cross_mechanism={"mechanism": "taylor", "degree": 1},
        source_vocab=13,
        encoder_mechanism=["nystrom", "linear"],
        decoder_layers=3,
    )
    defaults = ModelConfig(layers=1, heads=1, dim=8, vocab=5)
    changed = [name for name, value in config.to_dict().items() if value != defaults.to_dict()[name]]
    assert set(changed) == set(config.to_dict()) - {"version", "reversible"}
    again = ModelConfig.from_json(config.to_json())
    assert again == config
    model = sq.nn.EncoderDecoder.from_config(again)
    assert [m.name for m in model.encoder.mechanisms()] == ["nystrom", "linear"]
    assert [b.attention.mechanism.name for b in model.decoder.blocks] == ["softmax", "performer", "linear"]
    assert model.config == config


def test_a_config_and_a_state_dict_make_the_model_again(each_causal, decoder, tokens):
    model = decoder(each_causal)
    again = sq.nn.TransformerDecoder.from_config(ModelConfig.from_json(model.config.to_json())).double().eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(tokens(2, 9)), model(tokens(2, 9)))


def test_an_object_is_written_as_its_config():
    given = sq.create("performer", head_dim=8, heads=2, num_features=16, seed=4)
    model = sq.nn.TransformerDecoder(2, 2, 16, 5, given)
    again = sq.nn.TransformerDecoder.from_config(ModelConfig.from_json(model.config.to_json()))
    assert again.mechanisms()[0].num_features == 16
    far = sq.create("hybrid", head_dim=8, far={"mechanism": "performer", "num_features": 16, "seed": 1})
    data = json.loads(sq.nn.TransformerDecoder(2, 2, 16, 5, far).config.to_json())
    assert data["mechanism"]["far"]["num_features"] == 16
    assert sq.nn.TransformerDecoder.from_config(ModelConfig.from_dict(data)).mechanisms()[1].far.num_features == 16


class Outside(Mechanism):
    name = "outside"


def test_code_has_no_json_form():
    for mechanism in ({"mechanism": "performer", "features": torch.relu}, Outside(8)):
        config = ModelConfig(layers=1, heads=2, dim=16, vocab=5, mechanism=mechanism)
        with pytest.raises(TypeError, match="no JSON form"):
            config.to_json()
    given = sq.create("performer", head_dim=8, features=torch.relu)
    with pytest.raises(TypeError, match="features"):
        ModelConfig(layers=1, heads=2, dim=16, vocab=5, mechanism=given).to_json()


def test_what_was_written_by_another_version():
    data = ModelConfig(layers=1, heads=2, dim=16, vocab=5).to_dict()
    with pytest.raises(ValueError, match=r"version=2, this subquad reads up to version=1.*newer"):
        ModelConfig.from_dict({**data, "version": 2})
    with pytest.raises(ValueError, match=r"unknown fields \['head'\]; did you mean 'heads'"):
        ModelConfig.from_dict({**data, "head": 2})
    with pytest.raises(ValueError, match="'version' of a model config must be an integer, got None"):
        ModelConfig.from_dict({k: v for k, v in data.items() if k != "version"})
    with pytest.raises(ValueError, match=r"lacks the fields \['dim'\]"):
        ModelConfig.from_dict({k: v for k, v in data.items() if k != "dim"})
    with pytest.raises(ValueError, match="not JSON"):
        ModelConfig.from_json("{")
    with pytest.raises(TypeError, match="must be a JSON object, got list"):
        ModelConfig.from_json("[]")


def test_a_config_cannot_be_changed_from_outside():
    options = {"mechanism": "linear"}
    config = ModelConfig(layers=1, heads=2, dim=16, vocab=5, mechanism=options)
    options["mechanism"] = "softmax"
    assert config.mechanism == {"mechanism": "linear"}
    with pytest.raises(AttributeError):
        config.layers = 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "transformer"}, "kind='transformer' is not known"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"dim": 15}, "dim=15 must be a multiple of heads=2"),
        ({"dim": 6}, "head_dim=3 must be even"),
        ({"heads": 4, "kv_heads": 3}, "must be a multiple of kv_heads=3"),
        ({"positions": "learned"}, "needs max_length="),
        ({"max_length": 9}, "belongs to positions='learned'"),
        ({"positions": "absolute"}, "positions='absolute' is not known"),
        ({"reversible": True, "norm": "post"}, "needs norm='pre'"),
        ({"dropout": 1.0}, r"dropout must be a number at least 0 and below 1"),
        ({"vocab": None}, "vocab is needed"),
        ({"mechanism": "perfomer"}, "did you mean 'performer'"),
        ({"mechanism": {"num_features": 3}}, "must name its mechanism"),
        ({"mechanism": ["linear"]}, "lists 1 mechanisms for 2 layers"),
        ({"mechanism": 3}, "must be a mechanism's name"),
        ({"norm_eps": 0.0}, "norm_eps must be a number above 0"),
        ({"seed": 1.5}, "seed must be an integer or None"),
        ({"bias": 1}, "bias must be True or False"),
        ({"source_vocab": 4}, "belongs to kind='encoder-decoder'"),
        ({"kind": "encoder", "tie_embeddings": True}, "belongs to models with an output layer"),
        ({"kind": "encoder", "cross_mechanism": "linear"}, "cross_mechanism belongs to decoders"),
        ({"kind": "encoder-decoder", "decoder_layers": 3, "mechanism": ["linear"] * 2}, "give encoder_mechanism="),
    ],
)
def test_wrong_fields_are_refused(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ModelConfig(**{"layers": 2, "heads": 2, "dim": 16, "vocab": 5, **wrong})


def test_wrong_constructor_arguments_are_refused():
    with pytest.raises(TypeError, match="has no option 'dropuot'; did you mean 'dropout'"):
        sq.nn.TransformerDecoder(2, 2, 16, 5, "linear", dropuot=0.1)
    with pytest.raises(TypeError, match="has no option 'num_feature'"):
        sq.nn.TransformerDecoder(2, 2, 16, 5, {"mechanism": "performer", "num_feature": 8})
    with pytest.raises(ValueError, match="linformer cannot be causal"):
        sq.nn.TransformerDecoder(2, 2, 16, 5, "linformer")
    with pytest.raises(ValueError, match="needs kind='encoder'"):
        sq.nn.TransformerEncoder.from_config(ModelConfig(layers=2, heads=2, dim=16, vocab=5))
