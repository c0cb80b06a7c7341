"""What was measured on this machine, kept between runs: readable JSON files that may be edited or deleted.

Each table is one file in $SUBQUAD_CACHE (default: $XDG_CACHE_HOME/subquad or ~/.cache/subquad). A key says everything
that a time depends on: the mechanism's config, heads, form, machine, threads and versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..files import write_json

__all__ = ["measurement_key", "read_json_table", "table_path", "write_json_table"]


def table_path(file: str) -> Path:
    """Where the table of this file name is kept."""
    folder = os.environ.get("SUBQUAD_CACHE")
    if folder is None:
        folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join(Path.home(), ".cache"), "subquad")
    return Path(folder) / file


def read_json_table(file: str) -> dict[str, Any]:
    """All that was measured so far, by key; an unreadable file counts as empty, since it can be measured again."""
    try:
        table = json.loads(table_path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def write_json_table(file: str, table: dict[str, Any]) -> None:
    """Replace the table in one step: several processes may measure at the same time."""
    with contextlib.suppress(OSError):  # a read-only home: the value is measured again next time
        write_json(table_path(file), dict(sorted(table.items())))


def _shown(config: dict[str, Any]) -> dict[str, Any]:
    """What the time depends on; a far field has a config of its own inside."""
    kept = {name: value for name, value in config.items() if name not in ("heads", "kv_heads", "seed")}
    return {name: _shown(value) if isinstance(value, dict) else value for name, value in kept.items()}


def measurement_key(
    config: dict[str, Any],
    heads: int,
    is_causal: bool,
    training: bool,
    kv_heads: int | None = None,
    queries: float = 1.0,
) -> str:
    """One line that names a measurement: what ran, in which form, where."""
    machine = f"{platform.machine()} {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, subquad {__version__}"
    shared = "" if kv_heads in (None, heads) else f" on {kv_heads}"
    form = f"{'causal' if is_causal else 'full'} {'training' if training else 'forward'}"
    form += "" if queries == 1 else f", {queries:.3g} queries per key"
    return f"{json.dumps(_shown(config), sort_keys=True)} heads {heads}{shared}, {form}; {machine}; {versions}"
