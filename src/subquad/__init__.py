"""Linear-time attention for PyTorch that says how wrong it is.

>>> import torch, subquad as sq
>>> attn = sq.create("performer", head_dim=64, num_features=256, seed=0)
>>> q, k, v = torch.randn(3, 1, 8, 100, 64)
>>> out = attn(q, k, v, is_causal=True)
>>> prefix, state = attn.scan(q[:, :, :99], k[:, :, :99], v[:, :, :99])
>>> last, state = attn.scan(q[:, :, 99:], k[:, :, 99:], v[:, :, 99:], state)
>>> torch.allclose(out[:, :, 99:], last, atol=1e-4)
True
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__
from .mechanisms import Mechanism, attention, create, describe, list_mechanisms
from .state import merge

__all__ = [
    "Mechanism",
    "__version__",
    "attention",
    "create",
    "describe",
    "list_mechanisms",
    "merge",
]

# Rooms that need extras or time to load: imported on first use.
_ROOMS = ("lab", "nn")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
