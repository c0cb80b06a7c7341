"""What people do with models of transformers: other dtypes, shards, device maps, adapters, tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import subquad as sq

TINY: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 16, "vocab": 256, "seed": 1}
CENTERED = {"mechanism": "performer", "center": True}  # has a projection and a calibration


def ids() -> torch.Tensor:
    return torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))


def model(mechanism: Any = CENTERED) -> sq.hf.SubquadForCausalLM:
    torch.manual_seed(0)
    made = sq.hf.SubquadForCausalLM(sq.hf.SubquadConfig(**TINY, mechanism=mechanism)).eval()
    made.calibrate(ids())
    return made


def assert_same_buffers(loaded: Any, saved: Any) -> None:
    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == saved.get_buffer(name).dtype, name
        assert torch.equal(buffer, saved.get_buffer(name)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float32])
def test_projections_and_calibration_survive_every_dtype(tmp_path, dtype):
    saved = model()
    saved.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert_same_buffers(loaded, saved)
    # Saved in that dtype and loaded as it is.
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert_same_buffers(again, saved)


def test_a_model_built_in_bfloat16_keeps_float32_buffers():
    made = AutoModelForCausalLM.from_config(sq.hf.SubquadConfig(**TINY, mechanism=CENTERED), dtype=torch.bfloat16)
    assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
    assert all(b.dtype in (torch.float32, torch.int64) for b in made.buffers())


def test_shards_and_device_maps(tmp_path):
    saved = model()
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(Path(tmp_path).glob("*.safetensors"))
    assert len(shards) > 1
    for options in ({}, {"device_map": "cpu"}):
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path, **options)(ids()).logits, saved(ids()).logits)
    shards[1].write_bytes(shards[1].read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"nothing was loaded: .*{shards[1].name}"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_load_gives_the_class_that_was_saved(tmp_path):
    saved = model("linear")
    saved.save_pretrained(tmp_path)
    loaded = sq.hf.load(tmp_path)
    assert type(loaded) is sq.hf.SubquadForCausalLM
    assert torch.equal(loaded(ids()).logits, saved(ids()).logits)


def test_a_compiled_graph_knows_the_draw_that_was_loaded(tmp_path):
    saved = model()
    saved.redraw()
    saved.save_pretrained(tmp_path)
    loaded = sq.hf.SubquadForCausalLM.from_pretrained(tmp_path)
    attention = loaded.model.stack.blocks[0].attention.mechanism
    # What a graph uses without looking into a buffer.
    assert attention.feature_map.projection._key[1] == 1
    assert attention.feature_map.calibration._known_ready


def test_adapters_train_and_generate():
    base = model("linear")
    before = base.generate(ids(), max_new_tokens=5, do_sample=False)
    adapted = get_peft_model(base, LoraConfig(target_modules=["q", "v"], task_type="CAUSAL_LM", r=4))
    assert torch.equal(adapted.generate(input_ids=ids(), max_new_tokens=5, do_sample=False), before)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    adapted.train()
    losses = []
    for _ in range(10):
        loss = adapted(input_ids=ids(), labels=ids()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_generate_from_embeddings():
    made = model("linear")
    embedded = made.get_input_embeddings()(ids())
    expected = made.generate(ids(), max_new_tokens=4, do_sample=False)[:, 9:]
    assert torch.equal(made.generate(inputs_embeds=embedded, max_new_tokens=4, do_sample=False), expected)


def test_byte_tokenizer(tmp_path):
    tokenizer = sq.hf.ByteTokenizer(eos_token="<eos>", mask_token="<mask>")
    text = "naïve ☃ \x00\n"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == 258
    assert tokenizer(f"a{tokenizer.eos_token}").input_ids == [97, tokenizer.eos_token_id]
    assert {tokenizer.eos_token_id, tokenizer.mask_token_id} == {256, 257}
    assert tokenizer.decode([226, 152]) == "�"
    batch = tokenizer(["ab", "c"], padding=True)
    assert batch.input_ids == [[97, 98], [0, 99]]
    assert batch.attention_mask == [[1, 1], [0, 1]]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is sq.hf.ByteTokenizer
    assert again.get_vocab() == tokenizer.get_vocab()
