"""What a long choice has measured, in one file, so that a run that was interrupted goes on where it was.

    key = SHA-256 of the model (classes, configs, weights), the batches and what was asked for

A file with another key is begun anew. It is replaced as a whole after every result, so none is ever half there.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..._version import __version__
from ...files import fingerprint, replacing

__all__ = ["ResumeFile"]

T = TypeVar("T")


class ResumeFile:
    """Results by name. Without a path nothing is kept.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for _ in range(2):
    ...         kept = ResumeFile(Path(folder) / "results", torch.nn.Identity(), [], "what was asked")
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
            # Weights alone do not say what is computed: two configs may scale the same attention differently.
            parts = [(type(module).__qualname__, _config_text(module)) for module in model.modules()]
            self.key = fingerprint(__version__, torch.__version__, parts, model.state_dict(), batches, asked)
        if self.path is not None and self.path.exists():
            try:
                known = torch.load(self.path, weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise ValueError(f"resume={str(self.path)!r} is not a resume file: {error}") from error
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


def _config_text(module: nn.Module) -> str:
    """The config of a transformers model as text, "" for other modules."""
    config: Any = getattr(module, "config", None)
    return str(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else ""
