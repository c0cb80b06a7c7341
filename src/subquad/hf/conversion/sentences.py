"""Sentence encoders of sentence-transformers: converted, saved and loaded as what they are, also for long texts.

A converted encoder's first module is a `ConvertedTransformer`. sentence-transformers writes the name of a module's
class into the folder, so loading it imports this file, and with it everything that rebuilds a converted model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from .capturing import evaluating, run
from .positions import InterpolatedEmbedding, interpolate_positions, restore_positions

__all__ = [
    "ConvertedTransformer",
    "allow_longer_texts",
    "mark_converted",
    "mark_exact",
    "restore_length",
    "sentence_cosine",
]


class ConvertedTransformer(Transformer):
    """sentence-transformers' module around a transformers model, whose attention is converted. Made by `convert`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        length = getattr(self.model.config, "subquad_positions", None)
        if length is not None:
            interpolate_positions(self.model, length)
            self.max_seq_length = length

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """As sentence-transformers'; a text with more tokens than learned positions has them interpolated."""
        table = next((m for m in self.model.modules() if isinstance(m, InterpolatedEmbedding)), None)
        ids = features.get("input_ids")
        if table is not None and isinstance(ids, Tensor) and ids.shape[1] > table.num_embeddings:
            mask = features.get("attention_mask")
            features = {**features, "position_ids": table.places(ids.shape, mask, ids.device)}
            features.setdefault("token_type_ids", torch.zeros_like(ids))
        out: dict[str, Any] = super().forward(features, **kwargs)
        return out


def mark_converted(model: nn.Module) -> None:
    """Let every such module of `model` be saved as a converted one."""
    for module in model.modules():
        if type(module) is Transformer:
            module.__class__ = ConvertedTransformer


def mark_exact(model: nn.Module) -> None:
    """Undo `mark_converted`."""
    for module in model.modules():
        if type(module) is ConvertedTransformer:
            module.__class__ = Transformer


def allow_longer_texts(model: Any, length: int) -> str:
    """Let `encode` take texts of up to `length` tokens, positions interpolated; returns what was done."""
    table = None
    for module in model.modules():
        if isinstance(module, Transformer):
            table = interpolate_positions(module.model, length)
            table.former_length = module.max_seq_length
            module.max_seq_length = length
    if table is None:
        raise ValueError("positions='interpolate': no sentence-transformers module with a transformers model was found")
    model.max_seq_length = length
    mark_converted(model)
    return f"texts of up to {length} tokens are taken; beyond {table.num_embeddings}, positions are interpolated"


def restore_length(model: Any) -> None:
    """Undo `allow_longer_texts`, if it was done."""
    for module in model.modules():
        table = restore_positions(module.model) if isinstance(module, Transformer) else None
        if table is not None:
            module.max_seq_length = model.max_seq_length = table.former_length or table.num_embeddings
    mark_exact(model)


def sentence_cosine(model: nn.Module, exact: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
    """Mean cosine between what two sentence encoders make of tokenized texts, by their own pooling."""
    found = []
    for batch in batches:
        with evaluating(model), evaluating(exact):
            one, other = (run(encoder, batch)["sentence_embedding"] for encoder in (model, exact))
        found.append(F.cosine_similarity(one, other, dim=-1).cpu())
    return float(torch.cat(found).mean())
