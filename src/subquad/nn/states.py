"""The state of a whole model: one mechanism state per layer, and where the next token stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import checks
from ..state import Movable, check_same, merge, register_state

__all__ = ["ModelState"]


@dataclass(frozen=True)
class ModelState(Movable):
    """What a model remembers after a `scan`. It is never changed in place, so it can be kept and continued many times.

    layers: one state per layer, the mechanism's own (None before the first token)
    memory: one state per layer of the attention to a memory; empty for models without one
    start:  (B,) int64, the position of the first token
    length: (B,) int64, real tokens so far; the next one stands at start + length
    origin: which model made it
    """

    layers: tuple[Any, ...]
    memory: tuple[Any, ...]
    start: Tensor
    length: Tensor
    origin: str = ""

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return int(self.length.shape[0])

    def merge(self, later: ModelState) -> ModelState:
        """Both contexts, each encoded on its own: no token of one has seen the other, as under a block-diagonal mask.

        The next token sees both and stands after them. With rotary positions the keys of `later` stand where they were
        encoded: scan it with `start=` the length of this one for positions that continue.
        """
        check_same(self, later)
        if self.batch != later.batch:
            raise ValueError(f"merge: the states have batch sizes {self.batch} and {later.batch}; they must be equal")

        def both(mine: Any, theirs: Any) -> Any:
            if mine is None or theirs is None:
                return theirs if mine is None else mine
            return merge(mine, theirs)

        return replace(
            self,
            layers=tuple(both(a, b) for a, b in zip(self.layers, later.layers, strict=True)),
            memory=tuple(both(a, b) for a, b in zip(self.memory, later.memory, strict=True)),
            length=self.length + later.length,
        )

    def select(self, index: Tensor) -> ModelState:
        """The states of sequences `index` (N,) int64: to reorder, repeat or drop sequences of a batch.

        >>> import subquad as sq
        >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear")
        >>> _, state = model.scan(torch.tensor([[1, 2], [3, 4]]))
        >>> state.select(torch.tensor([1, 1, 0])).batch
        3
        """
        if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype not in (torch.int64, torch.int32):
            given = f"{checks.describe_shape(index)} of {index.dtype}" if isinstance(index, Tensor) else f"{index!r}"
            raise TypeError(
                f"index must be an integer tensor of shape (sequences,), got {given}; for example torch.tensor([1, 0])"
            )
        try:
            chosen: ModelState = pytree.tree_map_only(Tensor, lambda x: x.index_select(0, index.to(x.device)), self)
            return chosen
        except IndexError:
            # Asked afterwards: looking at the numbers first would make every call wait for the device.
            raise ValueError(
                f"index={index.tolist()} must be among the sequences of these states, 0..{self.batch - 1}"
            ) from None


register_state(ModelState)
