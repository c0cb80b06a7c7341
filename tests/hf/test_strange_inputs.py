"""What strangers hand to `convert`: each is taken as it is meant, or refused by name with the model as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, DynamicCache

from subquad.hf import convert

from .zoo import encoder, make, padded_batches, real_logits, text

WINDOW = [{"mechanism": "local", "window": 4, "global_tokens": 1}]
IDS = torch.randint(1, 40, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"input_ids": IDS.tolist()}, TypeError, r"calibration\[1\]\['input_ids'\] must be a tensor, got list"),
        ({"input_ids": IDS.numpy()}, TypeError, r"must be a tensor, got ndarray.*return_tensors"),
        ({"input_ids": IDS[0]}, ValueError, r"must have shape \(batch, length\), got \(20,\)"),
        ("a text", TypeError, r"calibration\[1\] must be a dict of tensors .* got str; texts are tokenized first"),
    ],
)
def test_batches_that_are_none(batch: Any, error: type[Exception], message: str) -> None:
    model = encoder()
    for mechanism in ("linear", None):
        with pytest.raises(error, match=message):
            convert(model, mechanism, calibration=[{"input_ids": IDS}, batch])
    assert "subquad_conversion" not in model.config.to_dict()


def test_batches_of_padding_only() -> None:
    batch = {"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}
    with pytest.raises(ValueError, match="hold padding only"):
        convert(encoder(), calibration=[batch] * 2, length=4096, candidates=WINDOW)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"length": 0}, ValueError, "length must be"),
        ({"length": -5}, ValueError, "length must be"),
        ({"length": 1.5}, (TypeError, ValueError), "length must be"),
        ({"draws": 0}, ValueError, "draws must be"),
        ({"max_groups": 0}, ValueError, "max_groups must be"),
        ({"error": float("nan")}, ValueError, "error must be between 0 and 1, got nan"),
        ({"candidates": ["local"]}, TypeError, r"candidates\[0\] must be a dict"),
        ({"candidates": [{"window": 4}]}, ValueError, r"candidates\[0\].* must name its mechanism"),
        ({"lenght": 5}, TypeError, "lenght"),
    ],
)
def test_options_of_the_choice_that_are_none(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        convert(encoder(), calibration=padded_batches(2), **{"length": 4096, "candidates": WINDOW, **options})


def test_a_cache_of_states_in_an_exact_model() -> None:
    model, ids = make("llama"), text(seed=0)["input_ids"]
    exact = copy.deepcopy(model)
    convert(model, "local", window=4)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="the state of a converted layer after 6 tokens"):
            exact(ids[:, 6:7], past_key_values=cache, use_cache=True)


def test_weights_that_wait_elsewhere(tmp_path: Path) -> None:
    model, batch = make("gpt2"), text(seed=0)
    model.save_pretrained(tmp_path / "model")
    parts = {"transformer.wte": "cpu", "transformer.wpe": "cpu", "transformer.ln_f": "cpu", "lm_head": "cpu"}
    parts |= {f"transformer.h.{i}": "disk" if i else "cpu" for i in range(3)}
    waiting = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=parts, offload_folder=tmp_path / "disk"
    )
    assert any(x.device.type == "meta" for x in waiting.parameters())
    everything = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    for one in (model, waiting, everything):
        convert(one, "performer", num_features=16, seed=0)
    wanted = real_logits(model, batch)
    torch.testing.assert_close(real_logits(waiting, batch), wanted)
    torch.testing.assert_close(real_logits(everything, batch), wanted)


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    with pytest.raises(ValueError, match="weights without values"):
        convert(model, "linear")
