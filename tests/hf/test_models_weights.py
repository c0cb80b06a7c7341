"""With softmax our decoder is GPT-2 and Llama: the same weights give the same logits and the same generations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import subquad as sq
from subquad.hf import from_transformers


def gpt2(**fields: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=37, n_positions=48, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.3, **fields,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def llama(**fields: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3, **fields,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


THEIRS = [
    pytest.param(gpt2, {}, id="gpt2"),
    pytest.param(gpt2, {"n_inner": 40, "tie_word_embeddings": False}, id="gpt2-untied"),
    pytest.param(llama, {}, id="llama"),
    pytest.param(llama, {"head_dim": 10, "rms_norm_eps": 1e-3, "tie_word_embeddings": True}, id="llama-tied"),
    pytest.param(llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, id="llama-rope"),
]


@pytest.mark.parametrize(("make", "fields"), THEIRS)
def test_equal_logits_and_equal_generations(make, fields):
    theirs = make(**fields)
    ours = from_transformers(theirs)
    ids = torch.randint(3, 37, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(ours(ids).logits, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
    mask = torch.tensor([[0] * 7 + [1] * 13, [1] * 20])
    for options in (
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "temperature": 0.7, "top_k": 8},
    ):
        made = []
        for model in (theirs, ours):
            torch.manual_seed(5)
            made.append(model.generate(ids, attention_mask=mask, max_new_tokens=15, **options))
        assert torch.equal(*made), options
    labels = ids.clone()
    torch.testing.assert_close(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss, atol=1e-5, rtol=1e-5)


def test_other_mechanisms_take_the_same_weights():
    theirs = llama()
    ours = from_transformers(theirs, ["softmax", "performer", "linear"], seed=3)
    assert [m.name for m in ours.model.stack.mechanisms()] == ["softmax", "performer", "linear"]
    assert torch.equal(ours.model.stack.blocks[1].attention.k.weight, theirs.model.layers[1].self_attn.k_proj.weight)
    # A window longer than the text is softmax.
    exact = from_transformers(theirs, {"mechanism": "local", "window": 64})
    ids = torch.randint(3, 37, (1, 20))
    torch.testing.assert_close(exact(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)


def test_what_has_no_counterpart_is_refused():
    with pytest.raises(TypeError, match="GPT2LMHeadModel or a LlamaForCausalLM, got Linear"):
        from_transformers(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="activation_function='relu' of 'gpt2' has no counterpart"):
        from_transformers(gpt2(activation_function="relu"))
    with pytest.raises(ValueError, match="attention_bias=True of 'llama'"):
        from_transformers(llama(attention_bias=True))
    with pytest.raises(ValueError, match="rope_type='linear'"):
        from_transformers(llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    assert sq.hf.from_transformers is from_transformers
