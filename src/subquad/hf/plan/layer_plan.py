"""Which mechanism for which head: the cheapest mix whose error stays below a target, or the best one within a time.

1. statistics of every layer (statistics.py), from the first batches;
2. every candidate is built, calibrated and run on what the layers saw in the other batches: squared error of each head,
   weighed by the output projection, relative to the layer's own output;
3. every candidate is timed on this machine, per head and token;
4. with e_hc and t_hc the errors and times of head h with candidate c, each head takes the c of the least
   t_hc + lambda e_hc; lambda is the smallest that meets the target (per layer) or the largest within the budget (all
   layers together);
5. a layer gets at most `max_groups` different mechanisms, the ones whose absence would cost most.

A layer where even the best mix misses the target stays exact, and the plan says what that costs at each length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...mechanisms import Mechanism
from ...mechanisms.head_groups import HeadGroups
from ..conversion.report import in_brief
from .candidates import EXACT, checked_candidates, seeded
from .search import search
from .statistics import LayerStatistics
from .survey import Survey, drawn_matrix, survey_layers

__all__ = ["LayerChoice", "LayerPlan", "make_plan", "plan_layers"]


@dataclass(frozen=True)
class LayerChoice:
    """One layer of a plan.

    groups: [{"heads": [KV heads], "mechanism": ..., ...}]; empty where the layer stays exact, for `reason`
    error:  relative to the exact output, |W (out - exact)|^2 / |W exact|^2; beside it those of uniform attention and of
            the best mix of all candidates
    seconds, exact_seconds: {length: time of one sequence}, as planned and with exact attention
    kinds:  the number of each group's mechanism among the candidates
    """

    layer: int
    name: str
    groups: tuple[dict[str, Any], ...]
    error: float
    uniform: float
    best_error: float
    seconds: dict[int, float]
    exact_seconds: dict[int, float]
    reason: str = ""
    kinds: tuple[int, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the layer stays as it is."""
        return not self.groups


@dataclass(frozen=True)
class LayerPlan:
    """What `plan_layers` found; `mechanisms()` is what `convert` takes, `str(plan)` a table, `as_dict()` plain data."""

    choices: tuple[LayerChoice, ...]
    criterion: str
    length: int
    statistics: dict[int, LayerStatistics] = field(repr=False)
    shapes: dict[int, tuple[int, int, int]] = field(repr=False)
    matrices: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)
    balance: bool = True
    seed: int = 0

    def mechanisms(self) -> dict[int, Mechanism | None]:
        """A calibrated mechanism per layer number, None for layers that stay exact: `convert(model, this)`."""
        made: dict[int, Mechanism | None] = {}
        for choice in self.choices:
            head_dim, heads, kv_heads = self.shapes[choice.layer]
            made[choice.layer] = None
            if choice.groups:
                attend = HeadGroups(
                    head_dim,
                    heads,
                    kv_heads,
                    groups=[seeded(group, self.seed, choice.layer, i) for i, group in enumerate(choice.groups)],
                    balance=self.balance,
                )
                for number, (group, part) in enumerate(zip(choice.groups, attend.parts(), strict=True)):
                    matrix = self.matrices.get((choice.layer, choice.kinds[number]))
                    drawn = drawn_matrix(part)
                    if matrix is not None and drawn is not None:
                        drawn.copy_(matrix[group["heads"]])
                made[choice.layer] = self.statistics[choice.layer].calibrate(attend)
        return made

    @property
    def left_exact(self) -> list[int]:
        """Numbers of the layers that stay exact."""
        return [choice.layer for choice in self.choices if choice.exact]

    def seconds(self, length: int) -> float:
        """Attention of all layers at one of the planned lengths, as planned."""
        return sum(choice.seconds[length] for choice in self.choices)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [
            {**vars(c), "groups": [dict(g) for g in c.groups], "seconds": _text(c.seconds),
             "exact_seconds": _text(c.exact_seconds)}
            for c in self.choices
        ]  # fmt: skip
        return {"criterion": self.criterion, "length": self.length, "layers": rows, "left_exact": self.left_exact}

    def __str__(self) -> str:
        lines = [f"plan for {self.criterion}", "layer  error   best    uniform  time/exact  heads: mechanism"]
        for c in self.choices:
            what = "; ".join(f"{len(g['heads'])}: {in_brief(g)}" for g in c.groups) or f"exact: {c.reason}"
            ratio = c.seconds[self.length] / max(c.exact_seconds[self.length], 1e-12)
            lines.append(f"{c.layer:5d}  {c.error:.4f}  {c.best_error:.4f}  {c.uniform:.4f}   {ratio:9.2f}  {what}")
        for length in sorted(self.choices[0].seconds) if self.choices else ():
            exact = sum(c.exact_seconds[length] for c in self.choices)
            kept = sum(c.exact_seconds[length] for c in self.choices if c.exact)
            line = f"length {length}: attention {1e3 * self.seconds(length):.1f} ms, exact {1e3 * exact:.1f} ms"
            lines.append(line + (f", of which layers left exact {1e3 * kept:.1f} ms" if kept else ""))
        return "\n".join(lines)


def _text(times: Mapping[int, float]) -> dict[str, float]:
    return {str(length): seconds for length, seconds in times.items()}


@torch.no_grad()
def plan_layers(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target_error: float | None = None,
    budget: float | None = None,
    layers: Iterable[int | str] | None = None,
    candidates: Iterable[Mapping[str, Any]] | None = None,
    length: int = 2048,
    lengths: Sequence[int] = (512, 2048, 8192, 32768),
    max_groups: int = 3,
    balance: bool = True,
    keep_exact: bool = True,
    draws: int = 1,
    seed: int = 0,
) -> LayerPlan:
    """A mechanism for every head of every layer of `model`.

    batches:      as the model takes them; the first half gives the statistics, the rest the errors
    target_error: largest |W (out - exact)|^2 / |W exact|^2 of a layer; the cheapest mix that meets it is taken
    budget:       seconds of all attention layers for one sequence of `length` tokens; the best mix within it is taken
    length:       tokens to plan for. If the batches are shorter, candidates that see most of them exactly (windows,
                  say) are left out: their error there says nothing about longer inputs
    candidates:   options to choose from (`default_candidates()` unless given); causal layers choose among those that
                  have a causal form
    lengths:      where the report says what it costs
    max_groups:   different mechanisms within one layer
    balance:      bring queries and keys to the same covariance first (exact, see `HeadGroups`)
    draws:        projections tried for each head, of which it keeps the one with the least error on the batches
    keep_exact:   let layers that miss the target stay exact; False takes their best mix instead

    >>> import torch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1).eval()
    >>> plan = plan_layers(model, [torch.randn(2, 40, 16) for _ in range(2)], target_error=0.25, length=256,
    ...                    lengths=(256,), candidates=[{"mechanism": "taylor", "degree": 1, "center": True}])
    >>> plan.choices[0].error < 0.25, [g["mechanism"] for g in plan.choices[0].groups]
    (True, ['taylor'])
    """
    if (target_error is None) == (budget is None):
        raise ValueError(f"give either target_error= or budget=, got {target_error=} and {budget=}")
    for argument, value in (("target_error", target_error), ("budget", budget)):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{argument} must be a positive number, got {value!r}")
    for argument, number in (("max_groups", max_groups), ("length", length), ("draws", draws)):
        checks.check_positive(argument, number)
    options = None if candidates is None else checked_candidates(list(candidates))
    found = survey_layers(
        model, batches, layers=layers, candidates=options, length=length, lengths=lengths, balance=balance, draws=draws,
        seed=seed,
    )  # fmt: skip
    picked = search(found.tables(), target=target_error, budget=budget, max_groups=max_groups)
    reasons = {}
    for index, row in found.layers.items():
        error, best = row.error(picked[index]), float(row.errors.amin(0).sum())
        if target_error is not None and error > target_error and keep_exact:
            reasons[index] = f"the best mix has an error of {best:.3f}, above the target {target_error:g}"
        if index in found.left_out and row.choices == [EXACT]:
            why = f"inputs of {found.too_short} tokens are too short to judge any candidate for {length}"
            reasons[index] = f"{why}; give batches of at least {found.left_out[index]} tokens"
    criterion = f"an error of at most {target_error:g}" if budget is None else f"{1e3 * budget:.1f} ms at {length}"
    return make_plan(found, picked, reasons, criterion)


def make_plan(found: Survey, picked: Mapping[int, Tensor], reasons: Mapping[int, str], criterion: str) -> LayerPlan:
    """The plan that gives each head of each layer the candidate with its number; layers in `reasons` stay exact."""
    rows = []
    for index, row in found.layers.items():
        pick, reason = picked[index], reasons.get(index, "")
        kv_heads = row.errors.shape[1]
        best = float(row.errors.amin(0).sum())
        groups: tuple[dict[str, Any], ...] = ()
        kinds: list[int] = []
        exact = dict(zip(found.lengths, row.exact_seconds, strict=True))
        times = exact
        if not reason:
            kinds = sorted(set(pick.tolist()))
            groups = tuple({"heads": [h for h in range(kv_heads) if pick[h] == c], **row.choices[c]} for c in kinds)
            times = {n: float(row.seconds[pick, i].sum()) for i, n in enumerate(found.lengths)}
        error = 0.0 if reason else row.error(pick)
        rows.append(
            LayerChoice(
                *(index, row.layer.name, groups, error, row.uniform, best, times),
                exact_seconds=exact,
                reason=reason,
                kinds=tuple(kinds),
            )
        )
    return LayerPlan(
        tuple(rows), criterion, found.length, found.statistics, found.shapes, found.matrices, found.balance, found.seed
    )
