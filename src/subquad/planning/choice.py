"""What should I use: mechanisms and settings ranked for given queries and keys, on this machine.

1. errors of uniform attention, degree 1 and Hermite degree 2 on a sample: what must be beaten;
2. the error of everything that might do, measured on the input (`study.py`): in each ladder the cheapest step that
   meets the target;
3. what meets the target is timed, and ranked by its time at the length asked for. Softmax attention is always there.

Nothing that is worse than the mean of the values is recommended, whatever the target: then the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from .. import checks
from ..mechanisms import create
from ..mechanisms.base import Mechanism
from .candidates import ladders
from .cost import attention_costs
from .judging import fewer_heads, with_seed
from .prediction import check_inputs
from .recommendation import Choice, Plan
from .study import Study

__all__ = ["plan"]


def _timed(choices: list[Choice], study: Study, heads: int, length: int, is_causal: bool) -> list[Choice]:
    """Those choices with their times, measured together."""
    mechanisms = [
        choice.given
        or create(choice.mechanism, study.q.shape[-1], heads, **with_seed(choice.mechanism, choice.options, 0))
        for choice in choices
    ]
    costs = attention_costs(mechanisms, heads=heads, is_causal=is_causal)
    return [replace(choice, time=cost.at(length)) for choice, cost in zip(choices, costs, strict=True)]


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    target_error: float = 0.05,
    length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    mechanisms: Iterable[str | Mechanism] | None = None,
    time_budget: float | None = None,
    redraws: bool = False,
    seed: int = 0,
    on_step: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Which mechanism to use for q (B, Hq, L, D), k (B, H, S, D) so that the error stays below `target_error`.

    v:            (B, H, S, E): judge the relative squared error of these outputs; without it that of the attention
                  matrix, which is the same for values of mean 0
    length:       tokens to rank times for; None = the keys given
    mechanisms:   names to choose from, or objects of your own; None = everything that estimates softmax attention
    time_budget:  seconds for one sequence with all heads; what takes longer is not recommended
    redraws:      False: a choice is one draw, named by the seed in its options, and its error is that of this draw;
                  True: the mean over draws is judged, for a mechanism that is drawn again, as some do in training
    seed:         of everything that is drawn; the draws to choose from have this seed and those after it
    on_step:      called with what was just judged, how many steps are done and how many there will be

    Takes seconds, more the first time on a machine: times are measured once and kept.

    >>> import torch, subquad as sq
    >>> q, k = 0.4 * torch.randn(2, 1, 2, 300, 16)
    >>> answer = sq.plan(q, k, target_error=0.05, length=100_000, mechanisms=["taylor"])
    >>> answer.best.mechanism, answer.best.error < 0.05
    ('taylor', True)
    """
    check_inputs(q, k, v, is_causal=is_causal, key_mask=key_mask)
    for argument, value in (("target_error", target_error), ("time_budget", time_budget)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{argument} must be a positive number, got {value!r}")
    length = k.shape[2] if length is None else length
    checks.check_positive("length", length)
    if mechanisms is not None and not isinstance(mechanisms, str | Mechanism):
        mechanisms = list(mechanisms)
    candidates = ladders(mechanisms, is_causal=is_causal, cross=q.shape[2] != k.shape[2])
    heads = q.shape[1]
    fixed = any(ladder.given is not None and ladder.given.heads is not None for ladder in candidates)
    mask = None if key_mask is None else key_mask.cpu()
    study = Study(
        *fewer_heads(q, k, v, length=length, keep_all=fixed),
        *(target_error, length, seed),
        is_causal=is_causal,
        scale=scale,
        key_mask=mask,
        redraws=redraws,
    )
    steps = len(candidates) + 1
    choices: list[Choice] = []

    def told(name: str, found: Choice | None) -> None:
        told_so_far.append(name)
        if found is not None:
            choices.append(found)
        if on_step:
            on_step(name if found is None else f"{found.label}: error {found.error:.2g}", len(told_so_far), steps)

    told_so_far: list[str] = []
    for each in candidates:
        if not each.random_features:
            told(each.mechanism, study.climb(each))
    for found in study.features([each for each in candidates if each.random_features]):
        told(found.mechanism, found)
    good = [choice for choice in choices if choice.meets(study.target)]
    rest = [choice for choice in choices if not choice.meets(study.target)]
    *good, exact = _timed([*good, Choice("softmax", {}, predicted_error=0.0)], study, heads, length, is_causal)
    if on_step:
        on_step("times", steps, steps)
    return Plan(
        choices=tuple(sorted([*good, exact], key=lambda c: c.seconds)) + tuple(sorted(rest, key=lambda c: c.error)),
        exact=exact,
        target_error=target_error,
        length=length,
        heads=heads,
        time_budget=time_budget,
        is_causal=is_causal,
        baselines=study.baselines,
        criterion="output" if v is not None else "attention matrix",
        measured_tokens=study.piece.tokens,
        measured_heads=study.q.shape[1],
        measured_rows=study.piece.count.shape[2],
        measured_parts=study.parts,
        redraws=redraws,
    )
