"""Keys kept between calls of multipole attention, in the layout that the native kernels read (csrc/multipole/step.h).

    page        a complete chunk of one row: keys and values by cluster, written once, shared by all states that see it
    statistics  sizes, means, variances of the clusters of all pages; new ones are written behind the last
    tail        the real keys after the last page, at most a chunk; new ones are written behind the last

`Pages` is a value: how many pages and tail keys of shared, append-only memory belong to it. Whoever continues the
newest value writes behind it; whoever continues an older one copies the tail first (and the statistics, if a page is
added). So a step costs clusters, chosen keys and tail, and copies nothing that is complete.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..native.library import check_status
from ..native.stateless import empty_floats, write_shape, write_tensors, zero_floats
from ..native.torch_operator import NO_MASK
from ..operator import Call
from .definition import Choices, Spec
from .native import MultipolePages, load_library, options_of, write_options

__all__ = ["Pages", "Store", "Tail", "begin", "empty_tail", "fill_tail"]

_lock = threading.Lock()


class Page(NamedTuple):
    """One chunk of one row: packed floats, where each head's panels and values begin, and its clusters."""

    memory: Tensor
    panels: list[int]
    values: list[int]
    order: Tensor  # (H, chunk) int32, see `Choices`
    sizes: Tensor  # (H, slots) int32


class Store:
    """Pages and statistics (B, H, floats) with room for `capacity` pages of a row; `filled`: how many there are."""

    def __init__(self, statistics: Tensor, capacity: int, pages: list[list[Page]]) -> None:
        self.statistics, self.capacity, self.pages = statistics, capacity, pages

    def filled(self) -> tuple[int, ...]:
        return tuple(len(row) for row in self.pages)


class Tail:
    """Keys and values (B, H, capacity, .), the keys again in panels (B, H, .); `filled`: how many of each row."""

    def __init__(self, shape: tuple[int, int], capacity: int, widths: tuple[int, int, int], panel: int) -> None:
        dim, ldk, lde = widths
        self.capacity, self.filled = capacity, (0,) * shape[0]
        self.keys, self.values = empty_floats(*shape, capacity, ldk), empty_floats(*shape, capacity, lde)
        self.panels = empty_floats(*shape, -(-capacity // panel) * panel * dim)

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.panels, self.values


@dataclass(frozen=True)
class Pages:
    """The context of one mechanism: immutable for whoever holds it.

    spec, scale, starts: of the mechanism; heads, dim, width, dtype: of its keys and values
    store, chunks: pages, and how many of each row are seen;  tail, held: keys after them, and how many are seen
    tokens: in all, padding included;  mask: (B, tokens) which of them are real, None = all
    """

    spec: Spec
    scale: float
    starts: Tensor
    heads: int
    dim: int
    width: int
    dtype: torch.dtype
    store: Store
    chunks: tuple[int, ...]
    tail: Tail
    held: tuple[int, ...]
    tokens: int = 0
    mask: Tensor | None = None

    # -- sizes ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of pages, statistics and tail."""
        pages = [page for row, n in zip(self.store.pages, self.chunks, strict=True) for page in row[:n]]
        arrays = [x for page in pages for x in (page.memory, page.order, page.sizes)]
        return sum(x.nbytes for x in (*arrays, self.store.statistics, *self.tail.arrays()))

    def counts(self) -> list[int]:
        """Real keys of each row."""
        return [n * self.spec.chunk + m for n, m in zip(self.chunks, self.held, strict=True)]

    def example(self) -> Tensor:
        """An empty tensor (B, H, 0, E) of the dtype of the keys."""
        return torch.empty(len(self.held), self.heads, 0, self.width, dtype=self.dtype)

    def real(self) -> Tensor:
        """(B, tokens) bool."""
        if self.mask is not None:
            return self.mask
        return torch.ones(len(self.held), self.tokens, dtype=torch.bool)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, spec: Spec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[MultipolePages, list[Any]]:
        """The call for the library, and what must live as long."""
        call, batch = MultipolePages(), len(self.held)
        write_shape(call.call, q, k, v)
        write_options(call.call, mask, self.starts, *options_of(spec, self.scale))
        call.call.batch, call.call.heads_kv, call.call.dim, call.call.width = batch, self.heads, self.dim, self.width
        numbers = (ctypes.c_int64 * (2 * batch))(*self.chunks, *self.held)
        place = ctypes.addressof(numbers)
        call.pages, call.held = place, place + 8 * batch
        call.capacity, call.statistics = self.store.capacity, self.store.statistics.data_ptr()
        call.tail_capacity = self.tail.capacity
        call.tail_keys, call.tail_panels, call.tail_values = (x.data_ptr() for x in self.tail.arrays())
        return call, [numbers, mask]

    def scan(
        self, q: Tensor | None, k: Tensor, v: Tensor, mask: Tensor | None, known: Choices | None = None
    ) -> tuple[Tensor | None, Pages]:
        """Queries q (B, Hq, L, D), or None, over all keys until their own, and the pages with the L new keys.

        mask:  (B, L) bool, which of the keys are real; None = all
        known: clusters of a row's first chunks, where they have been made
        """
        length, batch = k.shape[2], k.shape[0]
        after = replace(self, tokens=self.tokens + length, mask=self._joined(mask, length))
        if mask is None:
            first = {self.spec.chunk - held for held in self.held}  # keys until a tail is full
            borders = {x for start in first for x in range(start, length, self.spec.chunk)}
        else:
            before = torch.tensor(self.held)[:, None] + mask.cumsum(-1) - 1
            # In front of a key that finds its row's tail full a page is made.
            found = (mask & (before > 0) & (before % self.spec.chunk == 0)).any(0)
            borders = set(found.nonzero().flatten().tolist())
        out = None if q is None else torch.empty((batch, q.shape[1], length, v.shape[3]), dtype=v.dtype)
        cuts = sorted({0, length} | borders)
        for start, end in pairwise(cuts):
            here = None if mask is None else mask[:, start:end]
            new = [end - start] * batch if here is None else here.sum(-1).tolist()
            full = [b for b, n in enumerate(after.held) if n == self.spec.chunk and new[b]]
            after = after._paged(full, known)._with_space(new)
            call, alive = after._call(
                self.spec._replace(causal=True),
                k[:, :, :0] if q is None else q[:, :, start:end],
                k[:, :, start:end],
                v[:, :, start:end],
                NO_MASK if here is None else here,
            )
            if out is not None:
                write_tensors(call.call, out=out[:, :, start:end])
            check_status(load_library().subquad_multipole_step(ctypes.byref(call)))
            del alive
            after = replace(after, held=tuple(n + m for n, m in zip(after.held, new, strict=True)))
        return out, after

    def read(self, q: Tensor) -> Tensor:
        """Queries q (B, Hq, L, D) over all keys."""
        full = [b for b, n in enumerate(self.held) if n == self.spec.chunk]
        seen = self._paged(full)
        none = torch.empty(q.shape[0], self.heads, 0, max(self.dim, self.width), dtype=self.dtype)
        out = torch.empty((*q.shape[:3], self.width), dtype=self.dtype)
        call, alive = seen._call(self.spec._replace(causal=False), q, none, none, NO_MASK)
        write_tensors(call.call, out=out)
        check_status(load_library().subquad_multipole_step(ctypes.byref(call)))
        del alive
        return out

    # -- growing ----------------------------------------------------------------------------------------------------

    def _joined(self, mask: Tensor | None, length: int) -> Tensor | None:
        if mask is None and self.mask is None:
            return None
        new = torch.ones(len(self.held), length, dtype=torch.bool) if mask is None else mask
        return torch.cat([self.real(), new], 1)

    def _with_space(self, new: list[int]) -> Pages:
        """The same with a tail that takes `new` keys of each row, claimed for whoever asked."""
        tail, after = self.tail, tuple(n + m for n, m in zip(self.held, new, strict=True))
        most = max(after, default=0)
        with _lock:
            if tail.filled == self.held and most <= tail.capacity:
                tail.filled = after
                return self
        capacity = tail.capacity
        while capacity < most:
            capacity = min(2 * capacity, max(self.spec.chunk, most))
        return replace(self, tail=self._tail(capacity, self.held, after))

    def _tail(self, capacity: int, held: tuple[int, ...], filled: tuple[int, ...]) -> Tail:
        """Another tail with the first `held` keys of this one."""
        old, most = self.tail, max(held, default=0)
        made = empty_tail(len(held), self.heads, self.dim, self.width, capacity)
        lanes = 2 * _lanes()
        made.keys[:, :, :most] = old.keys[:, :, :most]
        made.values[:, :, :most] = old.values[:, :, :most]
        floats = -(-most // lanes) * lanes * self.dim
        made.panels[:, :, :floats] = old.panels[:, :, :floats]
        made.filled = filled
        return made

    def _paged(self, rows: list[int], known: Choices | None = None) -> Pages:
        """The same with the full tails of `rows` made pages."""
        if not rows:
            return self
        spec, heads, lanes = self.spec, self.heads, _lanes()
        order = torch.empty(len(rows), heads, spec.chunk, dtype=torch.int32)
        sizes = torch.zeros(len(rows), heads, spec.slots, dtype=torch.int32)
        none = empty_floats(len(self.held), heads, 0, 1)
        call, alive = self._call(spec, none, none, none, NO_MASK)
        jobs = (ctypes.c_int64 * len(rows))(*rows)
        call.jobs, call.rows = len(rows), ctypes.addressof(jobs)
        call.call.order, call.call.sizes = order.data_ptr(), sizes.data_ptr()
        check_status(load_library().subquad_multipole_cluster(ctypes.byref(call)))
        for i, b in enumerate(rows):
            n = self.chunks[b]
            if known is not None and n < known.order.shape[2] and known.sizes[b, :, n].any():
                order[i], sizes[i] = known.order[b, :, n], known.sizes[b, :, n]

        width = -(-self.width // lanes) * lanes
        keys = ((sizes.long() + lanes - 1) // lanes * lanes).sum(-1) * self.dim
        keys = (keys + 15) // 16 * 16  # (jobs, H)
        ends = (keys + spec.chunk * width).cumsum(-1)
        first = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
        memory = [empty_floats(int(n)) for n in ends[:, -1]]
        places = torch.tensor([x.data_ptr() for x in memory])[:, None] + 4 * first
        call.memory, call.values = places.data_ptr(), keys.data_ptr()
        made = [
            Page(x, a, b, o, s)
            for x, a, b, o, s in zip(memory, first.tolist(), (first + keys).tolist(), order, sizes, strict=True)
        ]
        store = self._store_for(rows, call, made)
        call.capacity, call.statistics = store.capacity, store.statistics.data_ptr()
        check_status(load_library().subquad_multipole_page(ctypes.byref(call)))
        del alive
        left = tuple(0 if b in rows else n for b, n in enumerate(self.held))
        chunks = tuple(n + (b in rows) for b, n in enumerate(self.chunks))
        capacity = spec.chunk if self.tail.capacity >= spec.chunk else self.tail.capacity
        return replace(self, store=store, chunks=chunks, tail=self._tail(capacity, left, left), held=left)

    def _store_for(self, rows: list[int], call: MultipolePages, made: list[Page]) -> Store:
        """A store in which the next page of each of `rows` is claimed: the same one if it has room and none newer."""
        old, most = self.store, max(self.chunks[b] for b in rows) + 1
        with _lock:
            if old.filled() == self.chunks and most <= old.capacity:
                for b, page in zip(rows, made, strict=True):
                    old.pages[b].append(page)
                return old
            pages = [row[:n] for row, n in zip(old.pages, self.chunks, strict=True)]
        capacity = old.capacity if most <= old.capacity else 2 * old.capacity
        grown = MultipolePages.from_buffer_copy(call)
        grown.capacity = capacity
        size = load_library().subquad_multipole_statistics(ctypes.byref(grown))
        statistics = zero_floats(*old.statistics.shape[:2], size)
        grown.statistics = statistics.data_ptr()
        check_status(load_library().subquad_multipole_grow(ctypes.byref(call), ctypes.byref(grown)))
        for b, page in zip(rows, made, strict=True):
            pages[b].append(page)
        return Store(statistics, capacity, pages)

    # -- as plain tensors -------------------------------------------------------------------------------------------

    def _page_rows(self, page: Page) -> tuple[Tensor, Tensor]:
        """Keys (H, chunk, D) and values (H, chunk, E) of a page in order of rank."""
        lanes, chunk = _lanes(), self.spec.chunk
        width = -(-self.width // lanes) * lanes
        keys, values = empty_floats(self.heads, chunk, self.dim), empty_floats(self.heads, chunk, self.width)
        padded = (page.sizes.long() + lanes - 1) // lanes * lanes
        for h in range(self.heads):
            total = int(padded[h].sum())
            first = padded[h].cumsum(0) - padded[h]
            inside = torch.arange(chunk) - (page.sizes[h].long().cumsum(0) - page.sizes[h]).repeat_interleave(
                page.sizes[h]
            )
            place = first.repeat_interleave(page.sizes[h]) + inside
            panels = page.memory[page.panels[h] :][: total * self.dim].view(-1, self.dim, lanes)
            keys[h, page.order[h].long()] = panels.mT.reshape(-1, self.dim)[place]
            rows = page.memory[page.values[h] :][: chunk * width].view(chunk, width)
            values[h, page.order[h].long()] = rows[:, : self.width]
        return keys, values

    def plain(self) -> dict[str, Tensor]:
        """k, v, mask, order, sizes as `MultipoleState` has them: everything is copied."""
        spec, batch, mask = self.spec, len(self.held), self.real()
        n = self.tokens // spec.chunk
        k, v = (zero_floats(batch, self.heads, self.tokens, w) for w in (self.dim, self.width))
        order, sizes = (torch.zeros(batch, self.heads, n, w, dtype=torch.int32) for w in (spec.chunk, spec.slots))
        for b, (chunks, held) in enumerate(zip(self.chunks, self.held, strict=True)):
            parts = [self._page_rows(page) for page in self.store.pages[b][:chunks]]
            parts.append((self.tail.keys[b, :, :held, : self.dim], self.tail.values[b, :, :held, : self.width]))
            k[b, :, mask[b]], v[b, :, mask[b]] = (torch.cat(x, 1) for x in zip(*parts, strict=True))
            for i, page in enumerate(self.store.pages[b][:chunks]):
                order[b, :, i], sizes[b, :, i] = page.order, page.sizes
        return {"k": k.to(self.dtype), "v": v.to(self.dtype), "mask": mask, "order": order, "sizes": sizes}

    def crop(self, tokens: int) -> Pages:
        """The first `tokens` of these; complete pages are shared, at most a tail is copied."""
        mask = None if self.mask is None else self.mask[:, :tokens]
        counts = [tokens] * len(self.held) if mask is None else mask.sum(-1).tolist()
        # A tail may be full: a page is made in front of the key after it.
        chunks = tuple(min(n, max(c - 1, 0) // self.spec.chunk) for c, n in zip(counts, self.chunks, strict=True))
        held = tuple(c - n * self.spec.chunk for c, n in zip(counts, chunks, strict=True))
        cropped = replace(self, chunks=chunks, held=held, tokens=tokens, mask=mask)
        if chunks == self.chunks:
            return cropped
        kept = [h if n == m else 0 for h, n, m in zip(held, chunks, self.chunks, strict=True)]
        tail = cropped._tail(self.tail.capacity, tuple(kept), held)
        for b, (n, m) in enumerate(zip(chunks, self.chunks, strict=True)):
            if n != m:
                fill_tail(tail, b, held[b], *self._page_rows(self.store.pages[b][n]))
        return replace(cropped, tail=tail)


def _lanes() -> int:
    return int(load_library().subquad_multipole_lanes())


def fill_tail(tail: Tail, b: int, held: int, keys: Tensor, values: Tensor) -> None:
    """Row b of a tail from its first `held` keys (H, ., D) and values (H, ., E)."""
    lanes, dim = 2 * _lanes(), keys.shape[-1]
    tail.keys[b], tail.values[b] = 0, 0
    tail.keys[b, :, :held, :dim], tail.values[b, :, :held, : values.shape[-1]] = keys[:, :held], values[:, :held]
    whole = -(-tail.capacity // lanes) * lanes
    padded = zero_floats(keys.shape[0], whole, dim)
    padded[:, :held] = keys[:, :held]
    tail.panels[b] = padded.view(keys.shape[0], -1, lanes, dim).mT.reshape(keys.shape[0], -1)


def empty_tail(batch: int, heads: int, dim: int, width: int, capacity: int) -> Tail:
    """Space for so many keys (B, H, capacity, D) and values (B, H, capacity, E)."""
    lanes = _lanes()
    ldk, lde = (-(-n // lanes) * lanes for n in (dim, width))
    return Tail((batch, heads), capacity, (dim, ldk, lde), 2 * lanes)


def begin(spec: Spec, call: Call, k: Tensor, v: Tensor) -> Pages:
    """No keys yet, for keys and values like k (B, H, ., D), v (B, H, ., E)."""
    batch, heads, _, dim = k.shape
    width = v.shape[3]
    spec = spec._replace(known=None, past=0, causal=True)
    tail = empty_tail(batch, heads, dim, width, min(spec.chunk, 64))
    made = Pages(
        *(
            spec,
            call.scale,
            spec.starts().to(torch.int32),
            heads,
            dim,
            width,
            v.dtype,
            Store(empty_floats(0), 4, [[] for _ in range(batch)]),
        ),
        *((0,) * batch, tail, (0,) * batch),
    )
    size, alive = made._call(spec, k[:, :, :0], k[:, :, :0], v[:, :, :0], NO_MASK)
    made.store.statistics = zero_floats(batch, heads, load_library().subquad_multipole_statistics(ctypes.byref(size)))
    del alive
    return made
