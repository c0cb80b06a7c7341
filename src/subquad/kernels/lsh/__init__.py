"""LSH attention: softmax over the keys that hash to the same place. `definition.py` has the equations."""

from __future__ import annotations

from ..operator import Backend, by_name
from .chunked import Chunked
from .definition import Spec
from .native import Native
from .reference import Reference

__all__ = ["BACKENDS", "Spec"]

BACKENDS: dict[str, Backend[Spec]] = by_name(Native(), Chunked(), Reference())
