"""Sub-quadratic attention for PyTorch that says how wrong it is.

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
import warnings
from typing import TYPE_CHECKING, Any

from ._version import __version__

with warnings.catch_warnings():
    # torch says so on import where numpy is missing; nothing that needs torch alone needs numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    from .mechanisms import Mechanism, attention, create, describe, list_mechanisms
    from .rollback import Checkpoints
    from .state import merge

if TYPE_CHECKING:
    from .planning.planner import plan
    from .planning.prediction import predict_error

__all__ = [
    "Checkpoints",
    "Mechanism",
    "__version__",
    "attention",
    "create",
    "describe",
    "list_mechanisms",
    "merge",
    "plan",
    "predict_error",
]

# Subpackages that need extras or time to load: imported on first use.
_SUBPACKAGES = ("hf", "lab", "nn", "parallel")
# Functions that most programs never call: their modules are imported on first use.
_LATER = {"plan": "planning.planner", "predict_error": "planning.prediction"}


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBPACKAGES])
