"""Which mechanism for which head: the cheapest mix whose error stays below a target, or the best one within a time.

1. statistics of every layer (calibration.py), from the first batches;
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..features.seeded import Projection
from ..mechanisms import Mechanism, create
from ..mechanisms.head_groups import HeadGroups
from ..mechanisms.softmax import Softmax
from ..planning.baselines import uniform_attention
from ..planning.cost import attention_costs
from .calibration import LayerStatistics, gather
from .capturing import LayerSample, capture
from .conversion_report import in_brief
from .families import AttentionLayer, known_layers
from .output_projections import output_weight
from .plan_candidates import default_candidates, seeded, with_causal_form
from .plan_search import search

__all__ = ["LayerChoice", "LayerPlan", "plan_layers"]


@dataclass(frozen=True)
class LayerChoice:
    """One layer of a plan.

    groups: [{"heads": [KV heads], "mechanism": ..., ...}]; empty where the layer stays exact, for `reason`
    error:  relative to the exact output, |W (out - exact)| / |W exact|; beside it those of uniform attention and of the
            best mix of all candidates
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
                    drawn = _drawn_matrix(part)
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


class _Layer:
    """One layer's errors: (candidates, KV heads), as shares of the squared norm of its exact output."""

    def __init__(self, layer: AttentionLayer, samples: Sequence[LayerSample], weight: Tensor | None) -> None:
        self.layer, self.samples, self.weight = layer, samples, weight
        self.exact: list[Tensor] = []
        self.norm = 0.0
        for sample in samples:
            for q, k, v, mask in sample.calls():
                out = Softmax(q.shape[-1])(q, k, v, **sample.arguments(mask))
                self.norm += float(self._mixed(out, sample, mask).sum(1).double().square().sum())
                self.exact.append(out)

    def _mixed(self, out: Tensor, sample: LayerSample, mask: Tensor | None) -> Tensor:
        """What each head adds to the layer's output: (B, Hq, L, out), real queries only."""
        if self.weight is not None:
            out = out @ self.weight.to(out.dtype).mT
        own = sample.query_mask(mask)
        return out if own is None else out * own[:, None, :, None]

    def errors(self, attend: Callable[..., Tensor], kv_heads: int) -> Tensor:
        """Squared errors per KV head over the layer's squared norm."""
        total = torch.zeros(kv_heads, dtype=torch.float64)
        calls = [(sample, call) for sample in self.samples for call in sample.calls()]
        for (sample, (q, k, v, mask)), exact in zip(calls, self.exact, strict=True):
            out = attend(q, k, v, **sample.arguments(mask))
            squares = self._mixed(out - exact, sample, mask).double().square().sum((0, 2, 3))
            total += squares.view(kv_heads, -1).sum(-1).cpu()
        return (total / max(self.norm, 1e-300)).nan_to_num(math.inf)


def _uniform(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None, **_: Any) -> Tensor:
    return uniform_attention(q, k, v, is_causal=is_causal, key_mask=key_mask)


def _parts(batches: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Batches for the statistics, and those for the errors: others, where there are two."""
    given = list(batches)
    if not given:
        raise ValueError("batches is empty: at least one is needed, a dict of tensors as the model takes them")
    half = max(1, len(given) // 2)
    return (given[:half], given[half:]) if len(given) > 1 else (given, given)


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
    target_error: largest |W (out - exact)| / |W exact| of a layer; the cheapest mix that meets it is taken
    budget:       seconds of all attention layers for one sequence of `length` tokens; the best mix within it is taken
    candidates:   options to choose from (`default_candidates()` unless given); causal layers choose among those that
                  have a causal form
    lengths:      where the report says what it costs
    max_groups:   different mechanisms within one layer
    balance:      bring queries and keys to the same covariance first (exact, see `HeadGroups`)
    draws:        projections tried for each head, of which it keeps the one with the least error on the batches
    keep_exact:   let layers that miss the target stay exact; False takes their best mix instead

    >>> import torch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1).eval()
    >>> plan = plan_layers(model, [torch.randn(2, 40, 16) for _ in range(2)], target_error=0.5, length=256,
    ...                    lengths=(256,), candidates=[{"mechanism": "taylor", "degree": 1, "center": True}])
    >>> plan.choices[0].error < 0.5, [g["mechanism"] for g in plan.choices[0].groups]
    (True, ['taylor'])
    """
    if (target_error is None) == (budget is None):
        raise ValueError(f"give either target_error= or budget=, got {target_error=} and {budget=}")
    for argument, value in (("target_error", target_error), ("budget", budget)):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"{argument} must be a positive number, got {value!r}")
    for argument, number in (("max_groups", max_groups), ("length", length), ("draws", draws)):
        checks.check_positive(argument, number)
    lengths = sorted({length, *lengths})
    wanted = None if layers is None else list(layers)
    first, rest = _parts(batches)
    statistics: dict[int, LayerStatistics] = {}
    for batch in first:
        statistics = gather(capture(model, [batch], layers=wanted), statistics)
    seen: dict[int, list[LayerSample]] = {}
    for sample in capture(model, rest, layers=wanted):
        if len(sample) and sample.layer in statistics:
            seen.setdefault(sample.layer, []).append(sample)
    options = None if candidates is None else [dict(c) for c in candidates]
    found, shapes, costs = {}, {}, {}
    matrices: dict[tuple[int, int], Tensor] = {}
    for layer in known_layers(model):
        if layer.index not in seen or layer.obstacle:
            continue
        q, k, v, _ = next(seen[layer.index][0].calls())
        shape = (q.shape[-1], q.shape[1], k.shape[1])
        choices = options if options is not None else default_candidates(cross=layer.cross)
        causal = seen[layer.index][0].is_causal
        if causal:
            choices = with_causal_form(choices, shape, layer.name)
        shapes[layer.index] = shape
        one = _Layer(layer, seen[layer.index], output_weight(model, layer, q.shape[1], v.shape[-1]))
        rows_of_errors = []
        for number, choice in enumerate(choices):
            row, matrix = _best_draws(one, choice, shape, statistics[layer.index], balance, seed, draws)
            rows_of_errors.append(row)
            if matrix is not None:
                matrices[layer.index, number] = matrix
        errors = torch.stack(rows_of_errors)
        if (shape, causal, layer.cross) not in costs:
            costs[shape, causal, layer.cross] = _times(choices, shape, causal, lengths)
        found[layer.index] = (layer, one, choices, errors, *costs[shape, causal, layer.cross])
    if not found:
        raise ValueError("no attention layer of the model was reached by the batches; nothing can be planned")
    picked = search(
        {i: (row[3], row[4][:, lengths.index(length)]) for i, row in found.items()},
        target=None if target_error is None else target_error**2,
        budget=budget,
        max_groups=max_groups,
    )
    rows = []
    for index, (layer, one, choices, errors, seconds, exact) in found.items():
        pick = picked[index]
        kv_heads = errors.shape[1]
        error = math.sqrt(float(errors[pick, torch.arange(kv_heads)].sum()))
        best = math.sqrt(float(errors.amin(0).sum()))
        uniform = math.sqrt(float(one.errors(_uniform, kv_heads).sum()))
        reason = ""
        if target_error is not None and error > target_error and keep_exact:
            reason = f"the best mix has an error of {best:.3f}, above the target {target_error:g}"
        groups: tuple[dict[str, Any], ...] = ()
        kinds: list[int] = []
        times = dict(zip(lengths, exact, strict=True))
        if not reason:
            kinds = sorted(set(pick.tolist()))
            groups = tuple({"heads": [h for h in range(kv_heads) if pick[h] == c], **choices[c]} for c in kinds)
            times = {n: float(seconds[pick, i].sum()) for i, n in enumerate(lengths)}
        rows.append(
            LayerChoice(
                *(index, layer.name, groups, 0.0 if reason else error, uniform, best, times),
                exact_seconds=dict(zip(lengths, exact, strict=True)),
                reason=reason,
                kinds=tuple(kinds),
            )
        )
    criterion = f"an error of at most {target_error:g}" if budget is None else f"{1e3 * budget:.1f} ms at {length}"
    return LayerPlan(tuple(rows), criterion, length, statistics, shapes, matrices, balance, seed)


def _drawn_matrix(part: nn.Module) -> Tensor | None:
    """The projection (H, R, D) of a mechanism or of its far field, the buffer itself; None where it has none."""
    drawn = (module._buffers.get("matrix") for module in part.modules() if isinstance(module, Projection))
    return next((matrix for matrix in drawn if matrix is not None and matrix.dim() == 3), None)


def _best_draws(
    one: _Layer,
    options: Mapping[str, Any],
    shape: tuple[int, int, int],
    stats: LayerStatistics,
    balance: bool,
    seed: int,
    draws: int,
) -> tuple[Tensor, Tensor | None]:
    """Errors of one candidate with all heads, (H,), and the projection (H, R, D) that gave them where there is one."""
    group = {"heads": list(range(shape[2])), **seeded(options, seed, stats.layer, 0)}
    attend = stats.calibrate(HeadGroups(*shape, groups=[group], balance=balance))
    errors = one.errors(attend, shape[2])
    drawn = _drawn_matrix(attend)
    if drawn is None:
        return errors, None
    matrix = drawn.clone()
    for _ in range(draws - 1):
        attend.redraw()
        found = one.errors(attend, shape[2])
        better = found < errors
        errors = torch.where(better, found, errors)
        matrix[better] = drawn[better]  # redrawn in place
    return errors, matrix


def _times(
    choices: Sequence[Mapping[str, Any]], shape: tuple[int, int, int], causal: bool, lengths: Sequence[int]
) -> tuple[Tensor, list[float]]:
    """Seconds per KV head, (candidates, lengths), and of the whole layer with exact attention."""
    head_dim, heads, kv_heads = shape
    made = []
    for c in choices:
        options = seeded(c, 0, 0, 0)
        made.append(create(options.pop("mechanism"), head_dim, heads, **options))
    *costs, exact = attention_costs([*made, Softmax(head_dim)], heads=heads, is_causal=causal)
    table = torch.tensor([[cost.at(n).seconds / kv_heads for n in lengths] for cost in costs], dtype=torch.float64)
    return table, [exact.at(n).seconds for n in lengths]
