"""The memory of `constant.py` in the layout of the native kernels: clusters as one set of statistics, and a tail."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..native.operators import check_status
from ..operator import Call
from .constant import Bounded, Far, Memory, absorb_chunk, empty
from .definition import Choices, Spec
from .native import MultipolePages, loaded
from .pages import Pages, Store, empty_tail, fill_tail

__all__ = ["ConstantPages", "begin_constant"]

_NONE = torch.empty(0, dtype=torch.bool)


@dataclass(frozen=True)
class ConstantPages(Pages):
    """Pages whose complete chunks are all in the clusters `far`, and gone; see `Pages` for the rest."""

    bounded: Bounded | None = None
    far: Far | None = None

    def _call(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[MultipolePages, list[Any]]:
        # However many chunks there were, their clusters stand where those of one page would.
        seen = replace(self, chunks=tuple(min(n, 1) for n in self.chunks))
        return Pages._call(seen, spec, q, k, v, mask)

    @property
    def nbytes(self) -> int:
        """Bytes of clusters, statistics and tail."""
        assert self.far is not None
        return sum(x.nbytes for x in (*self.far, self.store.statistics, *self.tail.arrays()))

    def _joined(self, mask: Tensor | None, length: int) -> Tensor | None:
        return None  # nothing that grows with the context

    def _paged(self, rows: list[int], known: Choices | None = None) -> ConstantPages:
        if not rows:
            return self
        assert self.bounded is not None and self.far is not None
        index = torch.tensor(rows)
        keys, values = self.tail.keys[index, ..., : self.dim], self.tail.values[index, ..., : self.width]
        first = torch.tensor([self.chunks[b] == 0 for b in rows])
        with torch.no_grad():
            grown = absorb_chunk(self.bounded, Far(*(x[index] for x in self.far)), keys, values, first)
        far = Far(*(x.index_copy(0, index, y) for x, y in zip(self.far, grown, strict=True)))
        held = tuple(0 if b in rows else n for b, n in enumerate(self.held))
        chunks = tuple(n + (b in rows) for b, n in enumerate(self.chunks))
        tail = self._tail(self.tail.room, held, held)
        return replace(self, far=far, chunks=chunks, held=held, tail=tail)._with_statistics()

    def _with_statistics(self) -> ConstantPages:
        """The same with the statistics of its clusters laid out."""
        assert self.far is not None
        size, mean, variance, mean_value = (x.contiguous() for x in self.far)
        batch, heads = size.shape[:2]
        none = torch.empty(batch, heads, 0, 1)
        made = replace(self, store=Store(torch.empty(0), 1, [[] for _ in range(batch)]))
        call, alive = made._call(self.spec, none, none, none, _NONE)
        statistics = torch.zeros(batch, heads, loaded().subquad_multipole_statistics(ctypes.byref(call)))
        call.statistics = statistics.data_ptr()
        given = [x.data_ptr() for x in (size, mean, variance, mean_value)]
        check_status(loaded().subquad_multipole_summarise(ctypes.byref(call), size.shape[2], *given))
        del alive
        made.store.statistics = statistics
        return made

    def plain(self) -> dict[str, Tensor]:
        """The tensors of `ConstantState`."""
        assert self.far is not None
        held = torch.tensor(self.held)
        there = (torch.arange(self.tail.room) < held[:, None])[:, None, :, None]
        parts = (self.tail.keys[..., : self.dim], self.tail.values[..., : self.width])
        k, v = (
            torch.nn.functional.pad(x.masked_fill(~there, 0.0), (0, 0, 0, self.spec.chunk - x.shape[2])) for x in parts
        )
        return {"count": torch.tensor(self.counts()), "k": k, "v": v, **self.far._asdict()}


def begin_constant(bounded: Bounded, call: Call, k: Tensor, v: Tensor, memory: Memory | None = None) -> ConstantPages:
    """No keys yet, or those of `memory`, for keys and values like k (B, H, ., D), v (B, H, ., E)."""
    batch, heads, _, dim = k.shape
    width, spec = v.shape[3], bounded.spec
    # One set of clusters in place of those of a page; none is taken key by key.
    layout = spec._replace(clusters=bounded.sinks + bounded.limit, largest=spec.chunk, exact_keys=0, error=None)
    far = empty(bounded, k[:, :, :0].float(), v[:, :, :0].float()).far if memory is None else memory.far
    far = Far(*(x.detach().float() for x in far))
    held = (0,) * batch if memory is None else tuple(memory.held().tolist())
    chunks = held if memory is None else tuple(memory.absorbed().tolist())
    room = min(spec.chunk, max(64, *held)) if held else spec.chunk
    tail = empty_tail(batch, heads, dim, width, room)
    if memory is not None:
        for b, n in enumerate(held):
            fill_tail(tail, b, n, memory.k[b, :, :n].detach().float(), memory.v[b, :, :n].detach().float())
        tail.filled = held
    made = ConstantPages(
        *(layout, call.scale, spec.starts().to(torch.int32), heads, dim, width, torch.float32),
        *(Store(torch.empty(0), 1, []), chunks, tail, held),
        bounded=bounded,
        far=far,
    )
    return made._with_statistics()
