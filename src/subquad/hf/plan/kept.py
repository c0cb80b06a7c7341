"""What a long choice has measured, in one file, so that a run that was interrupted goes on where it was.

    key = SHA-256 of the weights, the batches and what was asked for

A file with another key is begun anew. It is replaced as a whole after every result, so none is ever half there.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._version import __version__
from ...files import replacing

__all__ = ["Kept", "fingerprint"]

T = TypeVar("T")


def fingerprint(*parts: Any) -> str:
    """SHA-256 of tensors, plain values, and lists and mappings of them; of anything else its type alone counts.

    >>> one, other = ([{"input_ids": torch.tensor([[1, x]])}] for x in (2, 3))
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    digest = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, Tensor):
            flat = (x.int_repr() if x.is_quantized else x).detach().cpu().contiguous()
            digest.update(f"{x.dtype} {tuple(flat.shape)}".encode())
            digest.update(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(x, Mapping | list | tuple):
            digest.update(f"{len(x)} in one;".encode())
            for one in x.items() if isinstance(x, Mapping) else x:
                add(one)
        else:
            plain = x is None or isinstance(x, str | int | float)
            digest.update(f"{x!r};".encode() if plain else f"{type(x).__name__};".encode())

    add(parts)
    return digest.hexdigest()


class Kept:
    """Results by name. Without a path nothing is kept.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for _ in range(2):
    ...         kept = Kept(Path(folder) / "results", torch.nn.Identity(), [], "what was asked")
    ...         found = kept.get("answer", lambda: print("computed") or 42)
    computed
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, model: nn.Module, batches: Sequence[Any], asked: Any
    ) -> None:
        self.path = None if path is None else Path(path)
        self.found: dict[str, Any] = {}
        self.key = ""
        if self.path is not None:
            self.key = fingerprint(__version__, torch.__version__, model.state_dict(), batches, asked)
        if self.path is not None and self.path.exists():
            try:
                known = torch.load(self.path, weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise ValueError(f"resume={str(self.path)!r} is no file of an interrupted choice: {error}") from error
            if isinstance(known, dict) and known.get("key") == self.key:
                self.found = known["found"]

    def get(self, name: str, make: Callable[[], T]) -> T:
        """What was kept under this name, or make(), which is kept: numbers and tensors, lists and dicts of them."""
        if name not in self.found:
            self.found[name] = make()
            if self.path is not None:
                with replacing(self.path) as draft:
                    torch.save({"key": self.key, "found": self.found}, draft)
        found: T = self.found[name]
        return found
