"""Clustered attention: one softmax row per cluster of queries. `definition.py` has the equations."""

from __future__ import annotations

from ..operator import Backend, by_name
from .chunked import Chunked
from .definition import Choices, Spec
from .native import Native
from .reference import Reference

__all__ = ["BACKENDS", "Choices", "Spec"]

BACKENDS: dict[str, Backend[Spec]] = by_name(Native(), Chunked(), Reference())
