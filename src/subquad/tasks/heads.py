"""The three model heads that several tasks share: next token, masked token, one label per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.models import TransformerDecoder, TransformerEncoder
from ..nn.pooling import pool
from .base import IGNORED, Batch, TaskModel

__all__ = [
    "CausalModel",
    "Classifier",
    "MaskedModel",
    "mask_tokens",
    "perplexity",
    "with_positions",
]


def _token_sums(logits: Tensor, targets: Tensor, *, training: bool) -> Batch:
    """logits (B, L, vocab), targets (B, L) -> sum of -log p over the targets that count, and how many are right."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    if training:
        return {"loss": loss}
    right = (logits.argmax(-1) == targets).sum()  # never at an ignored one: no token has a negative id
    return {"loss": loss, "right": right.float()}


class CausalModel(TaskModel):
    """Next-token prediction: batch `tokens` (B, L), `targets` (B, L), optionally `key_mask` (B, L)."""

    def __init__(self, vocab: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = TransformerDecoder(vocab=vocab, **model)

    def forward(self, batch: Batch) -> Batch:
        """Sums of loss and right tokens over the targets that count."""
        return self.sums(self.backbone(batch["tokens"], key_mask=batch.get("key_mask")), batch["targets"])

    def sums(self, logits: Tensor, targets: Tensor) -> Batch:
        """The same from logits (B, L, vocab)."""
        return _token_sums(logits, targets, training=self.training)


class MaskedModel(TaskModel):
    """Masked-token prediction by an encoder that sees both sides; same batch as `CausalModel`."""

    def __init__(self, vocab: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = TransformerEncoder(vocab=vocab, **model)
        self.head = nn.Linear(self.backbone.config.dim, vocab)

    def forward(self, batch: Batch) -> Batch:
        """Sums of loss and right tokens over the masked places."""
        targets = batch["targets"]
        hidden = self.backbone(batch["tokens"], key_mask=batch.get("key_mask"))
        # The head at the masked places only: it is the widest layer, and most places have no target.
        places = (targets != IGNORED).flatten().nonzero().squeeze(-1)
        logits = self.head(hidden.flatten(0, 1)[places])
        return _token_sums(logits.unsqueeze(0), targets.flatten()[places].unsqueeze(0), training=self.training)


class Classifier(TaskModel):
    """A label per sequence, from the mean of an encoder's outputs: batch `tokens`, `key_mask` (B, L), `label` (B,)."""

    def __init__(self, vocab: int, classes: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = TransformerEncoder(vocab=vocab, **model)
        self.head = nn.Linear(self.backbone.config.dim, classes)

    def forward(self, batch: Batch) -> Batch:
        """Sums of loss and right labels."""
        hidden = self.backbone(batch["tokens"], key_mask=batch["key_mask"])
        mean = pool(hidden, batch["key_mask"], "mean")
        return _token_sums(self.head(mean).unsqueeze(0), batch["label"].unsqueeze(0), training=self.training)


def mask_tokens(tokens: Tensor, mask_id: int, replacements: int, generator: torch.Generator) -> Batch:
    """BERT's masking of tokens (L,), as an example: tokens as the model sees them, targets that are IGNORED elsewhere.

    15 % of the places are chosen, at least one; of these 80 % become `mask_id`, 10 % a random id below `replacements`,
    10 % stay (Devlin et al., 2019).

    >>> example = mask_tokens(torch.arange(8), 99, 8, torch.Generator().manual_seed(0))
    >>> kept = example["targets"] == IGNORED
    >>> torch.equal(example["tokens"][kept], torch.arange(8)[kept]), bool(example["weight"] == (~kept).sum())
    (True, True)
    """
    chosen = torch.rand(tokens.shape, generator=generator) < 0.15
    chosen[torch.randint(len(tokens), (), generator=generator)] = True
    fate = torch.rand(tokens.shape, generator=generator)
    random = torch.randint(replacements, tokens.shape, generator=generator)
    seen = torch.where(chosen & (fate < 0.8), mask_id, tokens)
    seen = torch.where(chosen & (fate >= 0.9), random, seen)
    return {"tokens": seen, "targets": torch.where(chosen, tokens, IGNORED), "weight": chosen.sum().float()}


def with_positions(model: Mapping[str, Any], length: int) -> dict[str, Any]:
    """`model`; learned positions, where it names no number of them, get as many as a sequence has.

    >>> with_positions({"positions": "learned"}, 64)
    {'max_length': 64, 'positions': 'learned'}
    """
    return {"max_length": length, **model} if model.get("positions") == "learned" else dict(model)


def perplexity(loss: float) -> float:
    """exp of the mean loss in nats; finite, however large the loss is that a run has lost control of.

    >>> perplexity(0.0), perplexity(1e6) < float("inf")
    (1.0, True)
    """
    return math.exp(min(loss, 700.0))
