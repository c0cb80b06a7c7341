"""Token files of any size: mapped into memory, never read whole, so they may be larger than it.

Two kinds. Any file is a sequence of bytes, tokens 0..255. A `.npy` file holds a one-dimensional array of unsigned or
signed integers (numpy's own format, opened without pickle), whose ids must lie below a stated vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .base import DataError

__all__ = ["TokenFile"]


class TokenFile:
    """Tokens of a file by position; `vocab` is needed for `.npy` and 256 for all others.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "a.txt"
    ...     _ = path.write_bytes(b"abc")
    ...     TokenFile(path).window(1, 2)
    tensor([98, 99])
    """

    def __init__(self, path: str | Path, vocab: int | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            kind = "is a folder" if self.path.is_dir() else "does not exist"
            raise DataError(f"data={str(path)!r} {kind}; expected a file: text, any other bytes, or integers in .npy")
        if self.path.stat().st_size == 0:
            raise DataError(f"data={str(path)!r} is empty; expected text or tokens")
        if self.path.suffix == ".npy":
            self.tokens = self._array()
            if vocab is None:
                raise DataError(
                    f"data={str(path)!r} holds token ids; say how many there are with vocab= (--set vocab=)"
                )
            self.vocab = vocab
        else:
            if vocab not in (None, 256):
                raise DataError(
                    f"vocab={vocab} belongs to .npy files; {str(path)!r} is read as bytes, of which 256 exist"
                )
            self.tokens, self.vocab = np.memmap(self.path, dtype=np.uint8, mode="r"), 256

    def _array(self) -> np.ndarray:
        try:
            array: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(
                f"data={str(self.path)!r} cannot be read as a .npy array ({error}); the file is truncated or of "
                "another type. Expected a one-dimensional array of integers, as numpy.save writes it"
            ) from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"data={str(self.path)!r} holds an array of shape {array.shape} and type {array.dtype}; expected one "
                "dimension of integers"
            )
        return array

    def __len__(self) -> int:
        return len(self.tokens)

    # Workers that are started afresh receive the path, never a copy of the mapped bytes.
    def __reduce__(self) -> tuple[type[TokenFile], tuple[Path, int | None]]:
        return TokenFile, (self.path, self.vocab)

    def window(self, begin: int, length: int) -> Tensor:
        """`length` tokens (int64) from position `begin` on."""
        window = torch.from_numpy(np.array(self.tokens[begin : begin + length], dtype=np.int64))
        if self.path.suffix == ".npy" and len(window):
            least, most = int(window.min()), int(window.max())
            if least < 0 or most >= self.vocab:
                wrong = least if least < 0 else most
                raise DataError(
                    f"data={str(self.path)!r} holds the id {wrong} between positions {begin} and {begin + length}, "
                    f"outside of 0..vocab-1 = {self.vocab - 1}; give the vocabulary it was made with"
                )
        return window
