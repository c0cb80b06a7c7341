"""What every candidate costs and how wrong it is in every head of a model: the tables that plans are made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...features.seeded import Projection
from ...mechanisms import MECHANISMS, create
from ...mechanisms.head_groups import HeadGroups
from ...mechanisms.softmax import Softmax
from ...planning.baselines import uniform_attention
from ...planning.cost import attention_costs
from ..conversion.capturing import LayerSample, capture
from ..conversion.layers import AttentionLayer, known_layers
from ..conversion.output_projections import output_weight
from .candidates import EXACT, default_candidates, seeded, tokens_to_judge, with_causal_form
from .resume_file import ResumeFile
from .statistics import LayerStatistics, gather

__all__ = ["LayerTable", "Survey", "drawn_matrix", "in_two", "survey_layers"]


@dataclass(frozen=True)
class LayerTable:
    """One layer: errors (C, H) of each candidate in each KV head, squared and relative to the layer's output; seconds
    per KV head (C, lengths); exact_seconds of the whole layer."""

    layer: AttentionLayer
    choices: list[dict[str, Any]]
    errors: Tensor
    seconds: Tensor
    exact_seconds: list[float]
    uniform: float

    def error(self, pick: Tensor) -> float:
        """|W (out - exact)|^2 / |W exact|^2 with candidate pick[h] in head h."""
        return float(self.errors[pick, torch.arange(self.errors.shape[1])].sum())


@dataclass(frozen=True)
class Survey:
    """The tables of all layers that were reached, and what is needed to build what is chosen from them."""

    layers: dict[int, LayerTable]
    lengths: list[int]
    length: int
    statistics: dict[int, LayerStatistics] = field(repr=False)
    shapes: dict[int, tuple[int, int, int]] = field(repr=False)
    matrices: dict[tuple[int, int], Tensor] = field(repr=False)
    balance: bool
    seed: int
    # The longest input that errors are measured on, where it is shorter than `length` (else 0); of layers where
    # candidates were left out for it, the fewest tokens that would judge one of them.
    too_short: int = 0
    left_out: dict[int, int] = field(default_factory=dict)

    def tables(self) -> dict[int, tuple[Tensor, Tensor]]:
        """What `search` takes: errors and seconds at the length that is planned for."""
        at = self.lengths.index(self.length)
        return {index: (row.errors, row.seconds[:, at]) for index, row in self.layers.items()}


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


def in_two(batches: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Batches for the statistics, and those for the errors: others, where there are two."""
    given = list(batches)
    if not given:
        raise ValueError("batches is empty: at least one is needed, a dict of tensors as the model takes them")
    half = max(1, len(given) // 2)
    return (given[:half], given[half:]) if len(given) > 1 else (given, given)


@torch.no_grad()
def survey_layers(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    found: Sequence[AttentionLayer] | None = None,
    layers: Iterable[int | str] | None = None,
    candidates: Sequence[Mapping[str, Any]] | None = None,
    length: int = 2048,
    lengths: Sequence[int] = (512, 2048, 8192, 32768),
    balance: bool = True,
    draws: int = 1,
    seed: int = 0,
    judged: int | None = None,
    kept: ResumeFile | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Survey:
    """Run every candidate on what the layers of `model` see; see `plan_layers` for the arguments.

    found: the layers as they are known, `known_layers(model)` unless given
    judged: tokens of the longest input that errors are measured on, unless it is one of these batches. Where `length`
        is more, candidates that need more than that to be judged are left out
    kept:  where errors and times are kept
    """
    lengths = sorted({length, *lengths})
    wanted = None if layers is None else list(layers)
    first, rest = in_two(batches)
    statistics: dict[int, LayerStatistics] = {}
    for batch in first:
        statistics = gather(capture(model, [batch], layers=wanted), statistics)
    for stats in statistics.values():
        if not stats.calibration.ready:
            raise ValueError(
                f"the calibration batches hold padding only where attention layer {stats.layer} ({stats.name}) sees "
                "them; give batches with real tokens"
            )
    seen: dict[int, list[LayerSample]] = {}
    for sample in capture(model, rest, layers=wanted):
        if len(sample) and sample.layer in statistics:
            seen.setdefault(sample.layer, []).append(sample)
    tables: dict[int, LayerTable] = {}
    shapes: dict[int, tuple[int, int, int]] = {}
    costs: dict[str, tuple[Tensor, list[float]]] = {}
    left_out: dict[int, int] = {}
    widths = {index: max(k.shape[2] for sample in samples for k in sample.k) for index, samples in seen.items()}
    matrices: dict[tuple[int, int], Tensor] = {}
    judged = max(widths.values(), default=0) if judged is None else judged
    too_short = judged if length > judged else 0
    for layer in known_layers(model) if found is None else found:
        if layer.index not in seen or layer.obstacle:
            continue
        q, k, *_ = next(seen[layer.index][0].calls())
        shape = (q.shape[-1], q.shape[1], k.shape[1])
        cross, causal = seen[layer.index][0].cross, seen[layer.index][0].is_causal
        choices = [dict(c) for c in candidates] if candidates is not None else default_candidates(cross=cross)
        if causal:
            choices = with_causal_form(choices, shape, layer.name)
        if cross:
            choices = [c for c in choices if MECHANISMS[c["mechanism"]].cross]
        if too_short:
            # Some layers see less than the input: a decoder beside an encoder.
            tokens = too_short if widths[layer.index] == max(widths.values()) else widths[layer.index]
            needed = [tokens_to_judge(c, causal, length) for c in choices]
            choices = [c for c, least in zip(choices, needed, strict=True) if least <= tokens] or [EXACT]
            if max(needed) > tokens:
                left_out[layer.index] = min(least for least in needed if least > tokens)
        shapes[layer.index] = shape
        if progress is not None:
            progress(f"layer {layer.index}: {len(choices)} candidates", len(tables), len(seen))

        def measure(layer: AttentionLayer = layer, shape: Any = shape, choices: Any = choices) -> dict[str, Any]:
            samples = seen[layer.index]
            one = _Layer(layer, samples, output_weight(model, layer, shape[1], samples[0].v[0].shape[-1]))
            rows = [_best_draws(one, c, shape, statistics[layer.index], balance, seed, draws) for c in choices]
            uniform = float(one.errors(_uniform, shape[2]).sum())
            return {"errors": torch.stack([r[0] for r in rows]), "matrices": [r[1] for r in rows], "uniform": uniform}

        result = measure() if kept is None else kept.get(f"errors of layer {layer.index}", measure)
        matrices |= {(layer.index, n): x for n, x in enumerate(result["matrices"]) if x is not None}
        asked = repr((choices, shape, causal))
        if asked not in costs:

            def times(choices: Any = choices, shape: Any = shape, causal: bool = causal) -> Any:
                return _layer_times(choices, shape, causal, lengths)

            costs[asked] = times() if kept is None else kept.get(f"seconds of {asked}", times)
        tables[layer.index] = LayerTable(layer, choices, result["errors"], *costs[asked], result["uniform"])
    if not tables:
        raise ValueError("no attention layer of the model was reached by the batches; nothing can be planned")
    return Survey(tables, lengths, length, statistics, shapes, matrices, balance, seed, too_short, left_out)


def drawn_matrix(part: nn.Module) -> Tensor | None:
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
    drawn = drawn_matrix(attend)
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


def _layer_times(
    choices: Sequence[Mapping[str, Any]], shape: tuple[int, int, int], causal: bool, lengths: Sequence[int]
) -> tuple[Tensor, list[float]]:
    """Seconds per KV head, (candidates, lengths), and of the whole layer with exact attention."""
    head_dim, heads, kv_heads = shape
    made = []
    for c in choices:
        options = seeded(c, 0, 0, 0)
        made.append(create(options.pop("mechanism"), *shape, **options))
    *costs, exact = attention_costs([*made, Softmax(head_dim)], heads=heads, kv_heads=kv_heads, is_causal=causal)
    table = torch.tensor([[cost.at(n).seconds / kv_heads for n in lengths] for cost in costs], dtype=torch.float64)
    return table, [exact.at(n).seconds for n in lengths]
