"""What multipole attention remembers: all keys, or a fixed number of clusters.

Each state is a few plain tensors. Where the native kernels made it, it holds their memory (`Pages`) instead, and the
tensors are copied from it when somebody asks: a merge, a pytree, a pickle, another device or precision.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor

from ...features.precision import full_precision
from ...state import Movable, check_crop, check_same, check_tokens_join, register_state
from .constant import Far, Memory
from .pages import Pages

__all__ = ["ConstantState", "MultipoleState"]

Kind = TypeVar("Kind", bound="_Paged")


class _Paged(Movable):
    """Tensors that are copied from `pages` when they are asked for."""

    origin: str
    tensors: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls: type[Kind], pages: Any, origin: str) -> Kind:
        """The state whose keys are in `pages`."""
        made = cls.__new__(cls)
        made.__dict__.update(pages=pages, origin=origin)
        return made

    def __getattr__(self, name: str) -> Any:
        pages = self.__dict__.get("pages")
        if pages is None or name not in self.tensors:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.__dict__.update(pages.plain())
        return self.__dict__[name]

    def __reduce__(self) -> Any:
        return type(self), (*(getattr(self, x) for x in self.tensors), self.origin)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.pages is not None:  # never changed for whoever holds it
            return self
        made: Any = type(self)
        return made(*(deepcopy(getattr(self, x), memo) for x in self.tensors), self.origin)

    @property
    def pages(self) -> Any:
        """The keys as the native kernels keep them, if these made the state; or None."""
        return self.__dict__.get("pages")

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        if self.pages is not None:
            return int(self.pages.nbytes)
        return sum(getattr(self, x).nbytes for x in self.tensors)

    def example(self) -> Tensor:
        """A tensor (B, H, ., E) that shows the batch, KV heads, value width and dtype of the state."""
        held: Tensor = self.v if self.pages is None else self.pages.example()
        return held


@dataclass(frozen=True)
class MultipoleState(_Paged):
    """All keys and values so far, and the clusters of complete chunks, which are never made again.

    k (B, H, S, D), v (B, H, S, E), mask (B, S); order (B, H, n, chunk) and sizes (B, H, n, slots): see `Choices`
    """

    crops: ClassVar[bool] = True
    tensors = ("k", "v", "mask", "order", "sizes")

    k: Tensor
    v: Tensor
    mask: Tensor
    order: Tensor
    sizes: Tensor
    origin: str = ""

    @property
    def count(self) -> Tensor:
        """(B,) int64: how many real keys there are."""
        return self.mask.sum(-1) if self.pages is None else torch.tensor(self.pages.counts())

    def complete(self) -> int:
        """How many chunks every row has complete: their clusters stay as they are whatever follows."""
        return min(int(self.count.min()) // self.order.shape[-1], self.order.shape[2]) if len(self.mask) else 0

    def merge(self, later: MultipoleState) -> MultipoleState:
        """This context followed by `later`'s, whose chunks are cut anew: they are counted from the first key of all."""
        check_same(self, later)
        check_tokens_join(self, later)
        done = self.complete()
        with full_precision(self.k):  # autocast to one half precision refuses to join tensors of the other
            k, v = torch.cat([self.k, later.k], -2), torch.cat([self.v, later.v], -2)
        mask = torch.cat([self.mask, later.mask], -1)
        return replace(self, order=self.order[:, :, :done], sizes=self.sizes[:, :, :done], k=k, v=v, mask=mask)

    def crop(self, length: int) -> MultipoleState:
        """The state after its first `length` tokens, padding included; pages that stay complete are shared.

        >>> import subquad as sq
        >>> attn = sq.create("multipole", head_dim=8, chunk=8, clusters=2, exact_keys=4, seed=0)
        >>> k, v = torch.randn(2, 1, 2, 50, 8)
        >>> attn.absorb(k, v).crop(19).count
        tensor([19])
        """
        pages: Pages | None = self.pages
        check_crop(length, self.mask.shape[1] if pages is None else pages.tokens)
        if pages is not None:
            return MultipoleState.of(pages.crop(length), self.origin)
        mask, size = self.mask[:, :length], self.order.shape[-1]
        # A chunk of which a key was taken back is clustered again when it is complete. A merged state has clusters of
        # its first chunks only.
        known = min(length // size, self.order.shape[2])
        whole = torch.arange(1, known + 1, device=mask.device) * size <= mask.sum(-1, keepdim=True)
        order, sizes = (x[:, :, :known] * whole[:, None, :, None] for x in (self.order, self.sizes))
        return MultipoleState(self.k[:, :, :length], self.v[:, :, :length], mask, order, sizes, self.origin)


@dataclass(frozen=True)
class ConstantState(_Paged):
    """Clusters of the past and the keys since the last absorbed chunk: its size does not depend on the context.

    count (B,); k (B, H, chunk, D), v (B, H, chunk, E); size, variance (B, H, N), mean (B, H, N, D),
    mean_value (B, H, N, E): see `Memory` and `Far`
    """

    tensors = ("count", "k", "v", "size", "mean", "variance", "mean_value")

    count: Tensor
    k: Tensor
    v: Tensor
    size: Tensor
    mean: Tensor
    variance: Tensor
    mean_value: Tensor
    origin: str = ""

    @staticmethod
    def from_memory(memory: Memory, origin: str) -> ConstantState:
        """The state that holds `memory`."""
        return ConstantState(memory.total, memory.k, memory.v, *memory.far, origin)

    def memory(self) -> Memory:
        """Its tensors."""
        return Memory(self.count, self.k, self.v, Far(self.size, self.mean, self.variance, self.mean_value))

    def merge(self, later: ConstantState) -> NoReturn:
        """Refused: `later` was cut into chunks from its own first key, and what it has clustered has no keys left."""
        raise ValueError(
            "merge: multipole with memory='constant' keeps no keys of clustered chunks, so a later context cannot be "
            "cut into chunks again behind an earlier one; scan it after this state, or use memory='all'"
        )

    def crop(self, length: int) -> NoReturn:
        """Refused: keys that have joined clusters cannot be taken out of them again."""
        raise ValueError(
            f"crop({length}): multipole with memory='constant' keeps no keys of clustered chunks, so tokens cannot be "
            "taken back; keep the state from before them, which costs nothing, or use memory='all'"
        )


register_state(MultipoleState)
register_state(ConstantState)
