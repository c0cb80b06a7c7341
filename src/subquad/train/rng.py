"""The state of every generator that training may draw from, as JSON data: python, numpy, torch, and the accelerator."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch

__all__ = ["restore_rng", "rng_state", "seed_all"]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def seed_all(seed: int) -> None:
    """Start all generators from `seed`."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (code of others may draw from the global one)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """All generator states, as JSON data.

    >>> import json
    >>> state = json.loads(json.dumps(rng_state()))
    >>> first = torch.rand(3)
    >>> restore_rng(state)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [name, _text(np.asarray(keys).astype("<u4").tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_available():
        state["cuda"] = [_text(one.numpy().tobytes()) for one in torch.cuda.get_rng_state_all()]
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Continue from what `rng_state` gave."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    array = np.frombuffer(base64.b64decode(keys), dtype="<u4").astype(np.uint32)
    np.random.set_state((name, array, position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_tensor(one) for one in state["cuda"]])
