"""The weights of transformers' GPT-2 and Llama in our own model, with any mechanism.

With `softmax` it is the same function: equal logits, equal generations. With another mechanism it is a starting point
for training; `subquad.hf.convert` does the same inside their own classes and for many more of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...nn.config import MechanismChoice
from .causal import SubquadForCausalLM
from .configuration import SubquadConfig

__all__ = ["from_transformers"]

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _refuse(config: Any, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if getattr(config, name, value) != value:
            raise ValueError(
                f"{name}={getattr(config, name)!r} of {config.model_type!r} has no counterpart here, expected {value!r}"
            )


def _gpt2(config: Any) -> dict[str, Any]:
    _refuse(
        config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    )
    _refuse(config, {"activation_function": "gelu_new"})
    return {
        "layers": config.n_layer,
        "heads": config.n_head,
        "dim": config.n_embd,
        "hidden": config.n_inner,
        "norm_eps": config.layer_norm_epsilon,
        "activation": "gelu_tanh",
        "positions": "learned",
        "max_positions": config.n_positions,
    }


def _gpt2_weights(theirs: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    made = {
        "embedding.weight": theirs["transformer.wte.weight"],
        "positions.weight": theirs["transformer.wpe.weight"],
        "norm.weight": theirs["transformer.ln_f.weight"],
        "norm.bias": theirs["transformer.ln_f.bias"],
        "head.weight": theirs["lm_head.weight"],
    }
    for i in range(layers):
        block, here = f"transformer.h.{i}", f"blocks.{i}"
        # Their linear maps are stored as (in, out), and q, k, v as one.
        for part in ("weight", "bias"):
            made[f"{here}.attention_norm.{part}"] = theirs[f"{block}.ln_1.{part}"]
            made[f"{here}.feed_norm.{part}"] = theirs[f"{block}.ln_2.{part}"]
            for x, y in zip("qkv", theirs[f"{block}.attn.c_attn.{part}"].chunk(3, -1), strict=True):
                made[f"{here}.attention.{x}.{part}"] = y.mT if y.dim() == 2 else y
            for x, name in (("attention.out", "attn.c_proj"), ("feed.up", "mlp.c_fc"), ("feed.down", "mlp.c_proj")):
                y = theirs[f"{block}.{name}.{part}"]
                made[f"{here}.{x}.{part}"] = y.mT if y.dim() == 2 else y
    return made


def _llama(config: Any) -> dict[str, Any]:
    _refuse(config, {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type={rope['rope_type']!r} has no counterpart here, expected 'default'")
    return {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "dim": config.hidden_size,
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "hidden": config.intermediate_size,
        "normalization": "rms",
        "norm_eps": config.rms_norm_eps,
        "activation": "swiglu",
        "positions": "rotary",
        "rotary_base": float(rope.get("rope_theta", 10000.0)),
        "bias": False,
    }


def _llama_weights(theirs: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    made = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    names = {
        "attention_norm": "input_layernorm",
        "attention.q": "self_attn.q_proj",
        "attention.k": "self_attn.k_proj",
        "attention.v": "self_attn.v_proj",
        "attention.out": "self_attn.o_proj",
        "feed_norm": "post_attention_layernorm",
        "feed.gate": "mlp.gate_proj",
        "feed.up": "mlp.up_proj",
        "feed.down": "mlp.down_proj",
    }
    for i in range(layers):
        for here, there in names.items():
            made[f"blocks.{i}.{here}.weight"] = theirs[f"model.layers.{i}.{there}.weight"]
    return made


_FAMILIES = {"gpt2": (_gpt2, _gpt2_weights), "llama": (_llama, _llama_weights)}


def from_transformers(model: Any, mechanism: MechanismChoice = "softmax", **fields: Any) -> SubquadForCausalLM:
    """Our causal language model with a copy of the weights of a `GPT2LMHeadModel` or `LlamaForCausalLM`.

    mechanism: of all layers, or a list with one per layer; "softmax" gives the same logits
    fields:    further fields of `SubquadConfig`, for example seed or dropout

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> theirs = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, bos_token_id=1, eos_token_id=2)).eval()
    >>> tokens = torch.randint(0, 50, (1, 12))
    >>> torch.allclose(from_transformers(theirs)(tokens).logits, theirs(tokens).logits, atol=1e-5)
    True
    """
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in _FAMILIES or not hasattr(model, "lm_head"):
        raise TypeError(
            f"from_transformers takes a GPT2LMHeadModel or a LlamaForCausalLM, got {type(model).__name__}; "
            "subquad.hf.convert takes most other models"
        )
    assert config is not None
    read, rename = _FAMILIES[family]
    known = {name: getattr(config, name, None) for name in _IDS}
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    ours = SubquadConfig(
        **{
            "kind": "decoder",
            "vocab": config.vocab_size,
            "mechanism": mechanism,
            "tie_embeddings": tied,
            **known,
            **read(config),
            **fields,
        }
    )
    made = SubquadForCausalLM(ours)
    made.to(next(model.parameters()).dtype)
    stack = made.model.stack
    weights = rename(model.state_dict(), ours.layers)
    if tied:
        weights.pop("head.weight")
    own = stack.state_dict()
    with torch.no_grad():
        # What mechanisms own (projections, seeds) has no counterpart and stays as it was drawn.
        stack.load_state_dict({**{name: x for name, x in own.items() if ".mechanism." in name}, **weights})
    made.train(model.training)
    return made
