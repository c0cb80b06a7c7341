"""Windows of a stream of documents that is too large to store: read in blocks, of which two are in memory at most.

The documents, one after the other, are a sequence of tokens; it is cut into windows, windows into blocks. Example i is
a window of block i // BLOCK, in an order of the block's own. So an example is a function of its number alone, and
a run that is resumed sees what it would have seen; `position` and `seek` only save reading everything before again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..features.seeded import mix
from .base import UNLIMITED, DataError, split_of
from .hub import HubName, choose_column, open_splits

__all__ = ["BLOCK", "TokenStream"]

# Windows of a block: what is shuffled together, and what a resumed run reads again at most.
BLOCK = 1024
BETWEEN = b"\n\n"


@dataclass(frozen=True)
class _Place:
    """Where a block begins: `offset` tokens into the document that a stream in the state `source` gives next.

    source: state of the stream, None = its beginning.   document: its number in this pass.   turn: passes before
    """

    source: dict[str, Any] | None = None
    document: int = 0
    offset: int = 0
    turn: int = 0


@dataclass(frozen=True)
class _Block:
    number: int
    tokens: np.ndarray
    begin: _Place
    end: _Place


class TokenStream:
    """Examples of a stream: `window(index)` gives length + 1 tokens. One thread reads the next block ahead.

    hub: what to read.   split: 'train' goes round without end, 'valid' is the first block.   length: tokens per window
    vocab: None = the column holds text, read as bytes; else lists of token ids below it
    """

    def __init__(self, hub: HubName, split: str, length: int, vocab: int | None, block: int = BLOCK) -> None:
        self.hub, self.split, self.length, self.vocab, self.block = hub, split, length, vocab, block
        train, valid = open_splits(hub, streaming=True)
        source = train if split == "train" or valid is None else valid
        self._source = source if hasattr(source, "load_state_dict") else source.to_iterable_dataset()
        self._beginning: dict[str, Any] = self._source.state_dict()
        self._apart = valid is not None
        self._column = choose_column(hub, source, hub.column, "column", ("text", "content", "input_ids"))
        self._places: dict[int, _Place] = {0: _Place()}
        self._current: _Block | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: Future[_Block] | None = None
        self._stop = Event()
        if split == "valid":
            self._current = self._read(0, _Place())

    def __len__(self) -> int:
        """Windows for validation; training goes round without end."""
        if self.split == "train" or self._current is None:
            return UNLIMITED
        return max(len(self._current.tokens) - 1, 0) // self.length

    # -- reading ------------------------------------------------------------------------------------------------------

    def _encode(self, value: Any, document: int) -> np.ndarray:
        if self.vocab is None:
            if not isinstance(value, str):
                raise DataError(
                    f"{self.hub}: document {document} has {type(value).__name__} in column {self._column!r}; expected "
                    "text, or lists of token ids together with vocab= (--set vocab=)"
                )
            return np.frombuffer(value.encode("utf-8") + BETWEEN, dtype=np.uint8)
        ids = np.asarray(value)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{self.hub}: document {document} has {value!r:.60} in column {self._column!r}; expected a list of "
                f"token ids, as vocab={self.vocab} says"
            )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.vocab):
            raise DataError(
                f"{self.hub}: document {document} holds ids from {int(ids.min())} to {int(ids.max())}, outside of "
                f"0..vocab-1 = {self.vocab - 1}; give the vocabulary it was made with"
            )
        return ids.astype(np.int32)

    def _documents(self, place: _Place) -> Iterator[tuple[_Place, np.ndarray]]:
        """(where it begins, tokens) of the documents of this split, from a place to the end of the pass."""
        if place.source is None:
            place = _Place(self._beginning, place.document, place.offset, place.turn)
        self._source.load_state_dict(place.source)
        number, offset = place.document, place.offset
        before = place.source
        for row in self._source:
            if self._apart or split_of(number) == self.split:
                yield _Place(before, number, offset, place.turn), self._encode(row[self._column], number)[offset:]
            before, number, offset = self._source.state_dict(), number + 1, 0
            if self._stop.is_set():
                raise RuntimeError(f"{self.hub}: reading was stopped")

    def _read(self, number: int, begin: _Place) -> _Block:
        """The block that begins there; it ends where a window would, one token before the last one read."""
        wanted = self.block * self.length + 1
        parts: list[np.ndarray] = []
        total, place = 0, begin
        while True:
            found = total
            for at, tokens in self._documents(place):
                used = tokens[: wanted - total]
                parts.append(used)
                total += len(used)
                if total == wanted:
                    end = _Place(at.source, at.document, at.offset + len(used) - 1, at.turn)
                    return _Block(number, np.concatenate(parts), begin, end)
            if self.split == "valid":
                return _Block(number, np.concatenate(parts) if parts else np.zeros(0, np.uint8), begin, place)
            if total == found and place.document == 0 and not place.offset:
                raise DataError(f"{self.hub} holds no text in column {self._column!r} to train on")
            place = _Place(turn=place.turn + 1)

    def _advance(self, number: int) -> _Block:
        """Block `number`, from the nearest place known before it."""
        known = max(place for place in self._places if place <= number)
        block = self._current
        for at in range(known, number + 1):
            ahead, self._ahead = self._ahead, None
            block = ahead.result() if ahead is not None else None
            if block is None or block.number != at:
                block = self._read(at, self._places[at])
            self._places = {0: _Place(), at: block.begin, at + 1: block.end}
        assert block is not None  # known <= number: the loop ran
        if self.split == "train":
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="subquad-stream")
            self._ahead = self._thread.submit(self._read, number + 1, block.end)
        return block

    # -- what the loop uses -------------------------------------------------------------------------------------------

    def window(self, index: int) -> Tensor:
        """Tokens (length + 1,) int64 of example `index`."""
        number, place = divmod(index, self.block)
        if self._current is None or self._current.number != number:
            self._current = self._advance(number)
        if self.split == "train":
            order = torch.Generator().manual_seed(mix(0x73747265, number) >> 1)
            place = int(torch.randperm(self.block, generator=order)[place])
        begin = place * self.length
        return torch.from_numpy(self._current.tokens[begin : begin + self.length + 1].astype(np.int64))

    def position(self, index: int) -> dict[str, Any]:
        """JSON data from which `seek` finds example `index` without reading what is before its block."""
        number = max(place for place in self._places if place <= index // self.block)
        return {"block": number, "place": dict(self._places[number].__dict__)}

    def seek(self, position: Mapping[str, Any]) -> None:
        """Take over what `position` gave, in another process perhaps."""
        self.close()
        self._current = None
        self._places = {0: _Place(), int(position["block"]): _Place(**position["place"])}

    def close(self) -> None:
        """End the thread that reads ahead; the next `window` starts another."""
        self._stop.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._ahead = None
        self._stop.clear()
