"""From which length a mechanism is faster than softmax attention, measured once on this machine.

`create("auto", length=...)` asks this table: softmax below the crossover, the chosen mechanism above it, resolved once
to a concrete mechanism. The result does not change with the machine once it is created: what was chosen is an ordinary
mechanism with a config of its own.

The table is a JSON file, `crossovers.json` in $SUBQUAD_CACHE (default: $XDG_CACHE_HOME/subquad or ~/.cache/subquad).
It may be read, edited to override a value, or deleted to measure again; `crossover=` overrides it for one call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import checks
from ..mechanisms import MECHANISMS, Mechanism, create
from .cost import seconds_of
from .tables import measurement_key, read_json_table, table_path, write_json_table

__all__ = ["cache_path", "crossover_length", "faster_from", "read_table", "resolve_auto"]

FILE = "crossovers.json"
LENGTHS = tuple(128 << i for i in range(8))  # 128 ... 16384
ROUNDS = 3


def cache_path() -> Path:
    """Where the measured crossovers are kept."""
    return table_path(FILE)


def read_table() -> dict[str, Any]:
    """All crossovers measured so far, by key."""
    return read_json_table(FILE)


def faster_from(mine: Mapping[int, float], softmax: Mapping[int, float]) -> float | None:
    """The length from which `mine` stays below `softmax`, between measured lengths on a log scale; None = nowhere.

    mine, softmax: {length: time}

    >>> round(faster_from({256: 2.0, 1024: 8.0}, {256: 1.0, 1024: 16.0}))
    512
    >>> faster_from({256: 2.0}, {256: 1.0}) is None, faster_from({256: 0.5}, {256: 1.0})
    (True, 256.0)
    """
    both = sorted(set(mine) & set(softmax))
    ratios = [math.log(mine[n] / softmax[n]) for n in both]
    if not both or ratios[-1] > 0:
        return None
    slower = [i for i, ratio in enumerate(ratios) if ratio > 0]
    if not slower:
        return float(both[0])
    i = slower[-1]
    return both[i] * math.pow(both[i + 1] / both[i], ratios[i] / (ratios[i] - ratios[i + 1]))


def _seconds(attend: Mechanism, length: int, heads: int, is_causal: bool, training: bool) -> float:
    generator = torch.Generator().manual_seed(0)
    inputs = 0.5 * torch.randn(3, 1, heads, length, attend.head_dim, generator=generator)
    return seconds_of(lambda x: attend(*x, is_causal=is_causal), list(inputs), training)


def _measure(attend: Mechanism, softmax: Mechanism, heads: int, is_causal: bool, training: bool) -> int | None:
    """The first length, between the measured ones on a log scale, at which `attend` takes less time than `softmax`."""
    mine: dict[int, float] = {}
    exact: dict[int, float] = {}
    for length in LENGTHS:
        for turn in range(ROUNDS + 1):
            for mechanism, best in ((attend, mine), (softmax, exact)):
                seconds = _seconds(mechanism, length, heads, is_causal, training)
                if turn:  # the first round warms up
                    best[length] = min(best.get(length, math.inf), seconds)
        found = faster_from(mine, exact)
        if found is not None:
            return round(found)
    return None


def crossover_length(
    mechanism: Mechanism, *, heads: int = 8, is_causal: bool = False, training: bool = False, measure: bool = True
) -> int | None:
    """The length from which `mechanism` (an object from `create`) is faster than softmax here; None = not up to 16384.

    Measured on the CPU at the first call for a mechanism, shape and machine, then read from the table.
    """
    key = measurement_key(mechanism.config(), heads, is_causal, training)
    table = read_table()
    if key not in table:
        if not measure:
            raise KeyError(f"no crossover measured for {key}")
        softmax = create("softmax", mechanism.head_dim)
        table = {**read_table(), key: _measure(mechanism, softmax, heads, is_causal, training)}
        write_json_table(FILE, table)
    value = table[key]
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{cache_path()}: the crossover for {key!r} must be a positive integer or null, got {value!r}")
    return value


def resolve_auto(
    head_dim: int,
    heads: int | None,
    kv_heads: int | None,
    *,
    length: int,
    above: str = "multipole",
    is_causal: bool = False,
    training: bool = False,
    crossover: int | None = None,
    **options: Any,
) -> Mechanism:
    """softmax for `length` below the crossover, else `above` with `options`.

    length:    the length to decide for
    above:     the mechanism to use where it pays
    is_causal, training: which form is timed: causal or not, forward alone or with its backward
    crossover: a length to use instead of the measured one
    """
    checks.check_positive("length", length)
    if above == "auto":
        raise ValueError("above='auto': name the mechanism that is to be used where it pays")
    checks.check_flag("is_causal", is_causal)
    checks.check_flag("training", training)
    if crossover is not None:
        checks.check_positive("crossover", crossover)
    if above in MECHANISMS and "length" in MECHANISMS[above].options():
        options["length"] = length  # of Linformer's projections
    chosen = create(above, head_dim, heads, kv_heads, **options)
    if is_causal and not chosen.causal:
        checks.refuse_causal(chosen.name, chosen.causal_refusal)
    if crossover is None:
        timed = create(above, head_dim, heads or 8, **options) if heads is None else chosen
        timed = timed if kv_heads in (None, heads) else create(above, head_dim, heads, **options)
        crossover = crossover_length(timed, heads=heads or 8, is_causal=is_causal, training=training)
    if crossover is None or length < crossover:
        return create("softmax", head_dim, heads, kv_heads)
    return chosen
