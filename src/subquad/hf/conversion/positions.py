"""Learned positions for texts that are longer than the table of positions.

    place_i = i (N - 1) / (n - 1)        for token i of a text of n > N tokens, N learned positions

A place between two positions gets the mean of their vectors, weighted by distance. A text of at most N tokens is not
changed, and what is in the batch beside a text does not matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["InterpolatedEmbedding", "interpolate_positions", "learned_positions", "restore_positions"]

# What models call their tables of learned positions.
_TABLES = ("position_embeddings", "wpe", "embed_positions")


class InterpolatedEmbedding(nn.Embedding):
    """An `nn.Embedding` that takes places between its rows too: floats in 0 .. N - 1.

    >>> table = nn.Embedding.from_pretrained(torch.tensor([[0.0], [10.0], [20.0]]))
    >>> table.__class__ = InterpolatedEmbedding
    >>> table(torch.tensor([0.5, 2.0])).flatten().tolist(), table(torch.tensor([1])).flatten().tolist()
    ([5.0, 20.0], [10.0])
    """

    # Tokens that were taken before; None where the model was loaded as it is.
    former_length: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Places (...,) -> (..., dim)."""
        if not input.is_floating_point():
            return super().forward(input)
        below = input.floor().clamp(0, self.num_embeddings - 1)
        above = (below + 1).clamp(max=self.num_embeddings - 1)
        weight = (input - below).unsqueeze(-1).to(self.weight.dtype)
        return torch.lerp(super().forward(below.long()), super().forward(above.long()), weight)

    def places(self, shape: Any, mask: Tensor | None, device: torch.device) -> Tensor:
        """(B, L) places of the tokens of texts whose real tokens are those of `mask` (B, L).

        >>> table = InterpolatedEmbedding(3, 1)
        >>> table.places((2, 5), torch.tensor([[1] * 5, [1] * 2 + [0] * 3]), torch.device("cpu")).tolist()
        [[0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 1.0, 1.0, 1.0, 1.0]]
        """
        real = torch.ones(tuple(shape), dtype=torch.long, device=device) if mask is None else mask.long()
        order = (real.cumsum(-1) - 1).clamp(min=0).to(torch.float64)
        count = real.sum(-1, keepdim=True).to(torch.float64)
        last = self.num_embeddings - 1
        shrink = torch.where(count > self.num_embeddings, last / (count - 1).clamp(min=1), torch.ones_like(count))
        return (order * shrink).clamp(max=last).to(torch.float32)


def learned_positions(model: nn.Module) -> int | None:
    """How many tokens the longest table of learned positions serves; None: no table, or one that is interpolated, or a
    model of several towers, whose table may not be that of the tokens."""
    if getattr(getattr(model, "config", None), "sub_configs", None):
        return None
    tables = [m for name, m in model.named_modules() if name.split(".")[-1] in _TABLES and isinstance(m, nn.Embedding)]
    if not tables or any(isinstance(table, InterpolatedEmbedding) for table in tables):
        return None
    return max(m.num_embeddings - (0 if m.padding_idx is None else m.padding_idx + 1) for m in tables)


def interpolate_positions(model: nn.Module, length: int) -> InterpolatedEmbedding:
    """Make the one learned table of positions of `model` an `InterpolatedEmbedding`; the config notes the length."""
    found = [
        m for name, m in model.named_modules() if name.endswith("position_embeddings") and isinstance(m, nn.Embedding)
    ]
    if len(found) != 1 or found[0].padding_idx is not None:
        raise ValueError(
            f"positions='interpolate' needs one learned table of positions that counts from 0 (BERT), "
            f"{type(model).__name__} "
            f"has {len(found)}; rotary and relative positions need none"
        )
    found[0].__class__ = InterpolatedEmbedding
    model.config.subquad_positions = length  # type: ignore[union-attr]
    table = found[0]
    assert isinstance(table, InterpolatedEmbedding)
    return table


def restore_positions(model: nn.Module) -> InterpolatedEmbedding | None:
    """Undo `interpolate_positions`; returns the table, None where there is none."""
    table = next((m for m in model.modules() if isinstance(m, InterpolatedEmbedding)), None)
    if table is not None:
        table.__class__ = nn.Embedding  # type: ignore[assignment]
        model.config.__dict__.pop("subquad_positions", None)
    return table
