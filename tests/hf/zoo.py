"""Tiny randomly initialised models of every family, batches for them, and an oracle that takes the converted path."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import Tensor

from subquad.kernels.operator import Call
from subquad.mechanisms import Mechanism
from subquad.mechanisms.softmax import Softmax

VOCAB, LENGTH, LENGTHS = 50, 12, (12, 7, 4)
_SIZE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
# Weights large enough for attention to be far from uniform, so that a wrong mask or scale shows.
_TEXT = {**_SIZE, "intermediate_size": 40, "initializer_range": 0.3}

TEXT = ("bert", "roberta", "albert", "distilbert", "gpt2", "llama", "gemma3", "mistral")
DECODERS = ("gpt2", "llama")
SEQ2SEQ = ("t5", "bart")
FAMILIES = (*TEXT, *SEQ2SEQ, "vit", "wav2vec2")
AUTO = {
    "bert": "AutoModelForMaskedLM",
    "roberta": "AutoModelForMaskedLM",
    "albert": "AutoModelForMaskedLM",
    "distilbert": "AutoModelForMaskedLM",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "gemma3": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
    "wav2vec2": "AutoModelForCTC",
}


class Oracle(Mechanism):
    """Exact attention that does not say so: conversion treats it like any approximation, and must change nothing."""

    name = "oracle"
    equation = "softmax(q k^T) v"
    paper = "none"
    complexity = "O(L^2)"
    recurrent = True

    def __init__(self, head_dim: int, heads: int | None = None, kv_heads: int | None = None) -> None:
        super().__init__(head_dim, heads, kv_heads)
        self.inner = Softmax(head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        return self.inner._attend(q, k, v, call, is_causal=is_causal)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        return self.inner._scan(q, k, v, state, call)

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> Any:
        return self.inner._absorb(k, v, state, call)

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        return self.inner._read(q, state, call)


def make(name: str) -> Any:
    """A model of this family, always the same weights."""
    torch.manual_seed(0)
    config: Any
    if name == "bert":
        model: Any = tf.BertForMaskedLM(tf.BertConfig(**_TEXT))
    elif name == "roberta":
        model = tf.RobertaForMaskedLM(tf.RobertaConfig(**_TEXT))
    elif name == "albert":
        model = tf.AlbertForMaskedLM(tf.AlbertConfig(**_TEXT, embedding_size=16))
    elif name == "distilbert":
        config = tf.DistilBertConfig(
            vocab_size=VOCAB, dim=32, n_layers=3, n_heads=4, hidden_dim=40, initializer_range=0.3
        )
        model = tf.DistilBertForMaskedLM(config)
    elif name == "gpt2":
        config = tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3)
        config.bos_token_id, config.eos_token_id = 1, 2
        model = tf.GPT2LMHeadModel(config)
    elif name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**_TEXT, num_key_value_heads=2))
    elif name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = tf.Gemma3TextConfig(
            **_TEXT, num_key_value_heads=2, head_dim=8, sliding_window=5, layer_types=kinds, query_pre_attn_scalar=8
        )
        model = tf.Gemma3ForCausalLM(config)
    elif name == "mistral":
        model = tf.MistralForCausalLM(tf.MistralConfig(**_TEXT, num_key_value_heads=2, sliding_window=5))
    elif name == "t5":
        config = tf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
        config.decoder_start_token_id = 0
        model = tf.T5ForConditionalGeneration(config)
    elif name == "bart":
        sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
                 (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))}  # fmt: skip
        config = tf.BartConfig(vocab_size=VOCAB, d_model=32, max_position_embeddings=64, init_std=0.3, **sides)
        model = tf.BartForConditionalGeneration(config)
    elif name == "vit":
        size = {key: value for key, value in _TEXT.items() if key not in ("vocab_size", "num_hidden_layers")}
        model = tf.ViTForImageClassification(tf.ViTConfig(**size, num_hidden_layers=2, image_size=16, patch_size=4))
    elif name == "wav2vec2":
        convolutions = {"conv_dim": (16, 16), "conv_stride": (4, 4), "conv_kernel": (8, 8)}
        config = tf.Wav2Vec2Config(
            **{**_TEXT, "num_hidden_layers": 2}, **convolutions, num_feat_extract_layers=2,
            num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, feat_extract_norm="layer",
            do_stable_layer_norm=True,
        )  # fmt: skip
        model = tf.Wav2Vec2ForCTC(config)
    else:
        raise KeyError(name)
    return model.eval()


def text(side: str = "right", seed: int = 0, padding: int = 0) -> dict[str, Tensor]:
    """Three sequences of different lengths, padded on one side with the token `padding`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (len(LENGTHS), LENGTH), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    if side == "left":
        mask = mask.flip(1)
    return {"input_ids": torch.where(mask.bool(), ids, padding), "attention_mask": mask}


def batch(name: str, side: str = "right", seed: int = 0) -> dict[str, Tensor]:
    """A padded batch as this family takes it."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if name == "wav2vec2":
        mask = torch.ones(2, 400, dtype=torch.long)
        mask[1, 250:] = 0
        return {"input_values": torch.randn(2, 400, generator=generator), "attention_mask": mask}
    inputs = text(side, seed)
    if name in SEQ2SEQ:
        inputs["decoder_input_ids"] = torch.randint(5, VOCAB, (len(LENGTHS), 7), generator=generator)
    return inputs


def real_logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits of real tokens only, as rows."""
    with torch.no_grad():
        logits: Tensor = model(**inputs).logits
    mask = inputs.get("attention_mask")
    if mask is not None and "input_values" in inputs:
        frames = model._get_feat_extract_output_lengths(mask.sum(1))
        mask = (torch.arange(logits.shape[1]) < frames[:, None]).long()
    if logits.dim() == 3 and mask is not None and mask.shape == logits.shape[:2]:
        return logits[mask.bool()]
    return logits.flatten(0, -2)


def encoder() -> Any:
    """A BERT of two layers without a pooler, for statistics and plans."""
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        initializer_range=0.3, max_position_embeddings=128,
    )  # fmt: skip
    return tf.BertModel(config, add_pooling_layer=False).eval()


def padded_batches(count: int = 2, length: int = 48, vocab: int = 40) -> list[dict[str, Tensor]]:
    """Batches of three sequences, the second of which ends with padding."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        mask = torch.ones(3, length, dtype=torch.long)
        mask[1, length - 9 :] = 0
        made.append({"input_ids": torch.randint(0, vocab, (3, length), generator=generator), "attention_mask": mask})
    return made
