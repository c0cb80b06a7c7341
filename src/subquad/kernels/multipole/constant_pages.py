"""The memory of `constant.py` in the layout of the native kernels: clusters as one set of statistics, and a tail."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..native.library import check_status
from ..native.stateless import empty_floats, zero_floats
from ..native.torch_operator import NO_MASK
from ..operator import Call
from .constant import Bounded, Far, Memory, empty
from .definition import Choices, Spec
from .native import Constant, MultipolePages, load_library
from .pages import Pages, Store, empty_tail, fill_tail

__all__ = ["ConstantPages", "begin_constant"]


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
        assert self.far is not None
        held = tuple(0 if b in rows else n for b, n in enumerate(self.held))
        chunks = tuple(n + (b in rows) for b, n in enumerate(self.chunks))
        far = Far(*(x.clone() for x in self.far))
        statistics = self._write("absorb", far, self.store.statistics.clone(), rows)
        tail = self._tail(self.tail.capacity, held, held)
        return replace(self, far=far, store=_store(statistics), chunks=chunks, held=held, tail=tail)

    def _write(self, what: str, far: Far, statistics: Tensor, rows: list[int]) -> Tensor:
        """Statistics, written: of `far` as it is ("summarise"), or after the tails of `rows` have joined ("absorb")."""
        assert self.bounded is not None and self.far is not None
        none = empty_floats(len(self.held), self.heads, 0, 1)
        call = Constant()
        call.pages, alive = self._call(self.spec, none, none, none, NO_MASK)
        call.sinks, call.limit, call.clusters = self.bounded.sinks, self.bounded.limit, self.bounded.spec.clusters
        for field, clusters in ((call.before, self.far), (call.after, far)):
            field.size, field.mean, field.variance, field.mean_value = (x.data_ptr() for x in clusters)
        jobs = (ctypes.c_int64 * len(rows))(*rows)
        call.pages.jobs, call.pages.rows = len(rows), ctypes.addressof(jobs)
        if not statistics.numel():
            size = load_library().subquad_multipole_statistics(ctypes.byref(call.pages))
            statistics = zero_floats(len(self.held), self.heads, size)
        call.pages.statistics = statistics.data_ptr()
        check_status(getattr(load_library(), f"subquad_multipole_{what}")(ctypes.byref(call)))
        del alive
        return statistics

    def plain(self) -> dict[str, Tensor]:
        """The tensors of `ConstantState`."""
        assert self.far is not None
        held = torch.tensor(self.held)
        there = (torch.arange(self.tail.capacity) < held[:, None])[:, None, :, None]
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
    far = Far(*(x.detach().float().contiguous() for x in far))
    held = (0,) * batch if memory is None else tuple(memory.held().tolist())
    chunks = held if memory is None else tuple(memory.absorbed().tolist())
    capacity = min(spec.chunk, max(64, *held)) if held else spec.chunk
    tail = empty_tail(batch, heads, dim, width, capacity)
    if memory is not None:
        for b, n in enumerate(held):
            fill_tail(tail, b, n, memory.k[b, :, :n].detach().float(), memory.v[b, :, :n].detach().float())
        tail.filled = held
    made = ConstantPages(
        *(layout, call.scale, spec.starts().to(torch.int32), heads, dim, width, torch.float32),
        *(_store(empty_floats(0)), chunks, tail, held),
        bounded=bounded,
        far=far,
    )
    return replace(made, store=_store(made._write("summarise", far, empty_floats(0), [])))


def _store(statistics: Tensor) -> Store:
    """The one page that the clusters stand for."""
    return Store(statistics, 1, [[] for _ in range(len(statistics))])
