"""Choosing one candidate per head by a price on errors: the arithmetic behind a plan, without models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["picks_by_price", "search"]

# Prices of the squared error in seconds, from "never mind" to "whatever it takes".
LAMBDAS = torch.logspace(-9, 9, 145, dtype=torch.float64)

Table = tuple[Tensor, Tensor]


def _pick(errors: Tensor, seconds: Tensor, price: float, max_groups: int) -> Tensor:
    """The candidate of each head, (H,), for errors (C, H) and seconds per head (C,), at most `max_groups` kinds."""
    # The plain error breaks ties where the price makes time vanish beside it.
    value = seconds.unsqueeze(-1) / max(price, 1e-300) + errors
    allowed = torch.unique(value.argmin(0))
    while len(allowed) > max_groups:
        # Leave out the kind that the others replace at the least cost.
        without = [value[allowed[allowed != kind]].amin(0).sum() for kind in allowed]
        allowed = allowed[torch.arange(len(allowed)) != int(torch.stack(without).argmin())]
    picked: Tensor = allowed[value[allowed].argmin(0)]
    return picked


def _totals(errors: Tensor, seconds: Tensor, pick: Tensor) -> tuple[float, float]:
    return float(errors[pick, torch.arange(errors.shape[1])].sum()), float(seconds[pick].sum())


def picks_by_price(tables: Mapping[int, Table], *, max_groups: int) -> list[dict[int, Tensor]]:
    """The different choices that rising prices of errors lead to, from the fastest to the most accurate.

    tables: {layer: (errors (C, H), seconds per head (C,))}; one price for all layers

    >>> errors, seconds = torch.tensor([[0.5, 0.1], [0.1, 0.1]]), torch.tensor([1.0, 2.0])
    >>> [pick[0].tolist() for pick in picks_by_price({0: (errors, seconds)}, max_groups=2)]
    [[0, 0], [1, 0]]
    """
    found: list[dict[int, Tensor]] = []
    for price in LAMBDAS:
        pick = {i: _pick(errors, seconds, float(price), max_groups) for i, (errors, seconds) in tables.items()}
        if not found or any(not torch.equal(pick[i], found[-1][i]) for i in pick):
            found.append(pick)
    return found


def search(
    tables: Mapping[int, Table], *, target: float | None, budget: float | None, max_groups: int
) -> dict[int, Tensor]:
    """The candidate of each head of each layer.

    tables: {layer: (errors (C, H) squared and relative, seconds per head (C,))}
    target: the cheapest choice whose errors of one layer add up to at most this; the best one where none does
    budget: the choice of the least error whose seconds over all layers stay within this; the cheapest where none does

    >>> errors, seconds = torch.tensor([[0.5, 0.1], [0.1, 0.1]]), torch.tensor([1.0, 2.0])
    >>> search({0: (errors, seconds)}, target=0.25, budget=None, max_groups=2)[0].tolist()
    [1, 0]
    >>> search({0: (errors, seconds)}, target=None, budget=2.5, max_groups=2)[0].tolist()
    [0, 0]
    """
    picks = {i: [_pick(e, s, float(price), max_groups) for price in LAMBDAS] for i, (e, s) in tables.items()}
    if target is not None:
        found: dict[int, Tensor] = {}
        for i, (errors, seconds) in tables.items():
            scored = [(*_totals(errors, seconds, pick), pick) for pick in picks[i]]
            good = [row for row in scored if row[0] <= target]
            best = min(good, key=lambda row: row[1]) if good else min(scored, key=lambda row: row[0])
            found[i] = best[2]
        return found
    assert budget is not None
    best_error, chosen = float("inf"), None
    cheapest, fallback = float("inf"), None
    for step in range(len(LAMBDAS)):
        totals = [_totals(*tables[i], picks[i][step]) for i in tables]
        error, time = sum(t[0] for t in totals), sum(t[1] for t in totals)
        if time <= budget and error < best_error:
            best_error, chosen = error, step
        if time < cheapest:
            cheapest, fallback = time, step
    picked = fallback if chosen is None else chosen
    assert picked is not None
    return {i: picks[i][picked] for i in tables}
