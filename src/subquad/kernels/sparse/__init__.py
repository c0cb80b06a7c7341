"""Sparse attention: exact softmax over a fixed pattern. `definition.py` has the equations."""

from __future__ import annotations

from ..operator import Backend, by_name
from .chunked import Chunked
from .definition import Spec
from .native import Native
from .reference import Reference

__all__ = ["BACKENDS", "Spec"]

BACKENDS: dict[str, Backend[Spec]] = by_name(Native(), Chunked(), Reference())
