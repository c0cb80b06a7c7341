"""Queries, keys and values of a real model, shipped with the library: what a head sees that is not a Gaussian.

`captured.bin` holds q, k and v (6, 1024, 32) of six heads, rounded to 8 bits with one scale per head and coordinate;
`captured.json` holds their shape, their scales and where they are from (`benchmarks/capture_heads.py` made both).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from subquad.lab.inputs import Inputs

__all__ = ["FOLDER", "captured_inputs", "origin"]

FOLDER = Path(__file__).parent


@functools.cache
def origin() -> dict[str, Any]:
    """Model, licence, text, layers and heads.

    >>> origin()["licence"]
    'Apache-2.0'
    """
    data: dict[str, Any] = json.loads((FOLDER / "captured.json").read_text(encoding="utf-8"))
    return {name: value for name, value in data.items() if name not in ("scales", "shape")}


def captured_inputs() -> Inputs:
    """q, k, v (1, 6, 1024, 32): one head of median sharpness from each layer of a sentence encoder.

    >>> captured_inputs().q.shape
    torch.Size([1, 6, 1024, 32])
    """
    data = json.loads((FOLDER / "captured.json").read_text(encoding="utf-8"))
    raw = bytearray((FOLDER / "captured.bin").read_bytes())
    numbers = torch.frombuffer(raw, dtype=torch.int8).view(data["shape"])  # (3, heads, length, width)
    q, k, v = (numbers * torch.tensor(data["scales"]).unsqueeze(-2)).unsqueeze(1)
    return Inputs(q, k, v, source=f"{data['model']}, {data['text']}, {data['shape'][2]} tokens")
