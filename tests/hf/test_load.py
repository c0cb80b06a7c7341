"""Saved, and back again in a process that knows nothing: the same model, or an error, never a silent softmax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import subquad as sq
from subquad.hf import convert, load, revert
from subquad.hf.conversion.interface import mechanism_of
from subquad.hf.conversion.layers import find_layers

from .zoo import AUTO, VOCAB, batch, make, real_logits, text

# One mechanism per family, so that every kind of state is saved once: draws, calibration, index tables, parameters.
CHOSEN: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("performer", {"num_features": 16, "features": "sderf", "center": True}),
    "roberta": ("taylor", {"degree": 2}),
    "albert": ("hybrid", {"window": 3, "sinks": 1, "far": "hedgehog"}),
    "distilbert": ("clustered", {"clusters": 3}),
    "gpt2": ("hybrid", {"window": 3, "far": {"mechanism": "performer", "num_features": 16}}),
    "llama": ("performer", {"num_features": 16, "projection": "hadamard"}),
    "gemma3": ("linear", {}),
    "t5": ("taylor", {"degree": 2}),
    "bart": ("performer", {"num_features": 16}),
    "vit": (
        "head-groups",
        {
            "groups": [
                {"heads": [0, 3], "mechanism": "nystrom", "landmarks": 4},
                {"heads": [1, 2], "mechanism": "linear"},
            ]
        },
    ),
    "wav2vec2": ("hedgehog", {}),
}
CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, transformers
import subquad.hf
from hf.zoo import AUTO, batch, real_logits
for name in sys.argv[3:]:
    folder = f"{sys.argv[2]}/{name}"
    wanted = torch.tensor(json.load(open(f"{folder}/logits.json")))
    for how in ("load", AUTO[name]):
        model = subquad.hf.load(folder) if how == "load" else getattr(transformers, how).from_pretrained(folder)
        sides = ("right",) if name in ("vit", "wav2vec2") else ("right", "left")
        found = torch.cat([real_logits(model, batch(name, side)) for side in sides])
        print(name, how, float((found - wanted).abs().max()), flush=True)
"""


def test_every_family_in_a_fresh_process(tmp_path: Path) -> None:
    for name, (mechanism, options) in CHOSEN.items():
        model = make(name)
        convert(model, {"mechanism": mechanism, **options}, calibration=[batch(name)])
        for layer in find_layers(model):
            one = mechanism_of(layer.module)
            if one is not None:
                one.redraw()  # the second draw of the seed: the saved sample decides, not the seed alone
                for parameter in one.parameters():
                    parameter.data.add_(0.1)
        sides = ("right",) if name in ("vit", "wav2vec2") else ("right", "left")
        logits = torch.cat([real_logits(model, batch(name, side)) for side in sides])
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "logits.json").write_text(json.dumps(logits.tolist()))
    tests = str(Path(__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, tests, str(tmp_path), *CHOSEN],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line.split() for line in ran.stdout.splitlines() if line and line.split()[0] in CHOSEN]
    assert len(lines) == 2 * len(CHOSEN)
    for name, how, difference in lines:
        assert float(difference) < 1e-5, (name, how)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make("bert")
    convert(model, "performer", num_features=16, features="sderf", calibration=[batch("bert")], seed=0)
    model.save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_another_head_on_the_same_base(folder: Path) -> None:
    for kind in (transformers.BertModel, transformers.BertForSequenceClassification):
        model = kind.from_pretrained(folder)
        assert all(mechanism_of(layer.module) is not None for layer in find_layers(model))
    base = transformers.BertModel.from_pretrained(folder)
    base.save_pretrained(folder / "base")
    again = transformers.BertForMaskedLM.from_pretrained(folder / "base")
    assert all(mechanism_of(layer.module) is not None for layer in find_layers(again))


def test_in_half_precision_projections_stay_float32(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    exact = load(folder)
    for layer, other in zip(find_layers(model), find_layers(exact), strict=True):
        one, two = mechanism_of(layer.module), mechanism_of(other.module)
        assert one is not None and two is not None
        for name, buffer in one.named_buffers():
            assert torch.equal(buffer, dict(two.named_buffers())[name]), name


def test_a_loaded_model_can_be_reverted(folder: Path) -> None:
    model = revert(load(folder))
    torch.testing.assert_close(real_logits(model, batch("bert")), real_logits(make("bert"), batch("bert")))
    model.save_pretrained(folder / "exact")
    with pytest.raises(ValueError, match="was not saved from a converted model"):
        load(folder / "exact")


def test_only_some_layers(tmp_path: Path) -> None:
    model = make("gpt2")
    convert(model, {0: "linear", 2: {"mechanism": "performer", "num_features": 8}})
    wanted = real_logits(model, batch("gpt2"))
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    kinds = [mechanism_of(layer.module) for layer in find_layers(again)]
    assert [None if kind is None else kind.name for kind in kinds] == ["linear", None, "performer"]
    torch.testing.assert_close(real_logits(again, batch("gpt2")), wanted, rtol=0, atol=0)


def test_from_a_config_alone(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    assert all(mechanism_of(layer.module) is not None for layer in find_layers(model))
    with pytest.raises(RuntimeError, match="needs calibration"):
        model(**batch("bert"))


def test_other_implementations_are_overruled_not_obeyed_in_silence(folder: Path) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager")
    torch.testing.assert_close(real_logits(model, batch("bert")), real_logits(load(folder), batch("bert")))


# -- errors ---------------------------------------------------------------------------------------------------------


def test_weights_without_the_projections(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in weights.items() if "projection" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is a converted model, but its weights lack \['bert.encoder.layer.0"):
        load(folder)
    with pytest.raises(ValueError, match="its weights lack"):
        transformers.AutoModelForMaskedLM.from_pretrained(folder)


def test_a_class_without_the_layers(tmp_path: Path) -> None:
    model = make("bart")
    convert(model, "linear")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BartForCausalLM has no layer '[a-z.0-9_]*encoder"):
        transformers.BartForCausalLM.from_pretrained(tmp_path)


def test_notes_that_cannot_be_read(folder: Path) -> None:
    edit(folder, lambda config: config["subquad_conversion"].update(version=99))
    with pytest.raises(ValueError, match=r"version 1 expected, got 99"):
        load(folder)
    edit(folder, lambda config: config.update(subquad_conversion={"version": 1, "layers": {"x": {}}}))
    with pytest.raises(ValueError, match=r"has no layer 'x'"):
        load(folder)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"subquad_conversion": {}, "architectures": ["NoSuchModel"]}')
    with pytest.raises(ValueError, match=r"names the architecture \['NoSuchModel'\]"):
        load(tmp_path)


def test_a_mechanism_that_cannot_be_written_down(tmp_path: Path) -> None:
    model = make("bert")
    convert(model, lambda layer: sq.create("performer", layer.head_dim, num_features=8, features=torch.relu))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be written down.*callable"):
        load(tmp_path)
    assert set(AUTO) >= set(CHOSEN)


def test_models_of_this_library_load_too(tmp_path: Path) -> None:
    config = sq.hf.SubquadConfig(layers=1, heads=2, dim=16, vocab=VOCAB, mechanism="linear")
    model = sq.hf.SubquadForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    tokens = text()["input_ids"][:1]
    assert type(again) is sq.hf.SubquadForCausalLM
    assert torch.equal(again(tokens).logits, model(tokens).logits)
