"""The fastest conversion of a model whose output stays within an error: what `convert` does when no mechanism is named.

1. every candidate in every head: its error on what the layer sees, its time on this machine (survey.py); exact
   attention is one of them;
2. for a price of errors in seconds each head takes the candidate of the least cost; a higher price buys accuracy;
3. the lowest price is searched for at which the *model* stays within the error, measured on batches that gave neither
   statistics nor draws. Errors of layers are not added up: what they do to each other is part of the measurement;
4. where the whole model is not faster by it, nothing is converted.

    error = 1 - mean cosine of the last hidden states of real tokens, or of logits the larger of
            |logits - exact|^2 / |exact|^2, less their means, and 3 KL(exact || converted), mean over tokens

The divergence is what a perplexity grows by: at an error of 0.01, by a third of a percent. Logits alone do not tell: of
many that hardly matter, a few decide. Where batches have labels, tokens labelled -100 do not count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ... import checks
from ...mechanisms import Mechanism
from ...planning.cost import clock
from ...state import state_bytes
from ..conversion.attachment import attach, detach
from ..conversion.capturing import by_sequence, capture, decodes_apart, evaluating, run
from ..conversion.layers import AttentionLayer
from ..conversion.placement import device_of
from .candidates import AUTOMATIC, EXACT, checked_candidates
from .layer_plan import LayerPlan, make_plan
from .resume_file import ResumeFile
from .search import picks_by_price
from .survey import Survey, in_two, survey_layers

__all__ = ["Chosen", "choose_mechanisms", "output_error", "outputs"]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# A choice may use up this share of the error on the batches that decide, since on others it is a little larger, and has
# to stay within it by so many standard errors: a few sequences that go wrong may be among none of those.
MARGIN, DEVIATIONS = 0.8, 2.0
# Errors that one nat of divergence counts for.
DIVERGENCE = 3.0
# The label of tokens that a loss leaves out, as in torch.nn.functional.cross_entropy.
UNLABELLED = -100
# How much faster the whole model must be for a conversion to be worth its error.
GAIN = 1.05
# What each of two models is timed for at least: the best of a few short runs is luck on a busy machine.
RUNS, SECONDS = 3, 0.05


@dataclass(frozen=True)
class Chosen:
    """What was chosen: a mechanism per layer number (None: exact), and what is known of it.

    error:             of the model's output on held-out batches; without_far: the same with windows alone
    times:             [{"length", "exact_seconds", "seconds"}], attention and the rest of the model measured here
    cache_bytes:       of one sequence of `length` tokens in a decoder, exact and converted; None for encoders
    """

    mechanisms: dict[int, Mechanism | None] = field(repr=False)
    plan: LayerPlan = field(repr=False)
    length: int
    error: float
    without_far: float | None
    times: tuple[dict[str, float], ...]
    cache_bytes: tuple[int, int] | None
    verdict: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "length": self.length, "error": self.error, "without_far": self.without_far, "times": list(self.times),
            "cache_bytes": self.cache_bytes, "verdict": self.verdict, "plan": self.plan.as_dict(),
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"error of the model's output {self.error:.4f}"]
        if self.without_far is not None:
            lines[0] += f"; with windows alone, nothing far away, {self.without_far:.4f}"
        lines += [
            f"{row['length']:>6.0f} tokens: exact {row['exact_seconds']:.3g} s, converted {row['seconds']:.3g} s"
            for row in self.times
        ]
        if self.cache_bytes is not None:
            exact, ours = self.cache_bytes
            lines.append(f"cache at {self.length} tokens: exact {exact / 1e6:.2f} MB, converted {ours / 1e6:.2f} MB")
        return "\n".join([*lines, self.verdict])


def outputs(model: nn.Module, batches: Sequence[Any]) -> list[tuple[str, Tensor, Tensor | None]]:
    """(kind, tensor, mask) of each batch: logits where the model has them, else its last hidden state. The mask has the
    tokens that count: real ones, and of logits those with a label where the batch has labels."""
    found: list[tuple[str, Tensor, Tensor | None]] = []
    generates: Any = getattr(model, "can_generate", None)
    predicts = generates is not None and generates() and not decodes_apart(model)
    with evaluating(model):
        for batch in batches:
            out = run(model, batch)
            kind, x = "hidden", out
            if isinstance(out, Mapping):
                names = ("logits", "start_logits", "last_hidden_state", "token_embeddings", "sentence_embedding")
                name = next((n for n in names if isinstance(out.get(n), Tensor)), None)
                if name is None:
                    towers = [y for n, y in out.items() if n.endswith("_embeds") and isinstance(y, Tensor)]
                    if not towers:
                        given = f"{type(model).__name__} gives {list(out)}"
                        raise TypeError(f"{given}: neither logits, nor embeddings, nor a last hidden state")
                    found += [("hidden", y.float(), None) for y in towers]
                    continue
                kind, x = ("logits" if "logits" in name else "hidden"), out[name]
                if name == "start_logits":  # of answers to questions: two distributions over the tokens
                    x = torch.stack([x, out["end_logits"]], 1)
            elif not isinstance(out, Tensor):
                x = out[0]
            x, real = by_sequence(model, batch, x)
            found.append((kind, x.float(), _counted(real, batch, kind, x, predicts)))
    return found


def _counted(real: Tensor | None, batch: Any, kind: str, x: Tensor, next_token: bool = False) -> Tensor | None:
    """Which rows of x (B, L, ...) are judged, (B, L); None: all.

    Of a masked language model those are the hidden tokens, which the labels tell: the others it repeats, and seven of
    them beside each hidden one would make any error look small. next_token: row i predicts label i + 1.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) and x.dim() == 3 else None
    if isinstance(labels, Tensor) and labels.shape == x.shape[:2] and kind == "logits":
        asked = labels != UNLABELLED
        if bool(asked.any()):
            return F.pad(asked[:, 1:], (0, 1)) if next_token else asked
    return real


def output_error(found: Sequence[Any], wanted: Sequence[Any], deviations: float = 0.0) -> float:
    """How far a model's outputs are from the exact ones, see the top of this file; with `deviations` so many standard
    errors above that, as the sequences differ among each other.

    >>> x = torch.randn(2, 5, 8)
    >>> output_error([("hidden", -x, None)], [("hidden", x, None)])
    2.0
    """
    rows = torch.cat([_sums(kind, x, y, mask) for (kind, x, mask), (_, y, _) in zip(found, wanted, strict=True)])
    count, value = len(rows), 0.0
    for wrong, size in (rows[:, :2].unbind(-1), rows[:, 2:].unbind(-1)):
        total = float(size.sum().clamp(min=1e-300))
        ratio = float(wrong.sum()) / total
        # The deviation of a ratio of two sums over sequences; one sequence alone tells nothing about it.
        spread = math.sqrt(float((wrong - ratio * size).square().sum()) * count / max(count - 1, 1)) / total
        value = max(value, ratio + (deviations * spread if count > 1 else 0.0)) if ratio == ratio else math.inf
    return round(value, 9) if math.isfinite(value) else math.inf


def _sums(kind: str, x: Tensor, exact: Tensor, mask: Tensor | None) -> Tensor:
    """(B, 4) of each sequence: squared differences or 1 - cosine, what these are relative to; DIVERGENCE KL, tokens."""
    x, exact = x.double(), exact.double()
    counted = torch.ones(x.shape[:-1], dtype=x.dtype, device=x.device) if mask is None else mask.to(x)
    if kind == "logits":
        logs = exact.log_softmax(-1)
        divergence = DIVERGENCE * (logs.exp() * (logs - x.log_softmax(-1))).nan_to_num(0.0).sum(-1)
        x, exact = (y - y.mean(-1, keepdim=True) for y in (x, exact))
        wrong, size = (x - exact).square().sum(-1), exact.square().sum(-1)
    else:
        wrong = 1 - F.cosine_similarity(x, exact, dim=-1)
        size, divergence = torch.ones_like(wrong), torch.zeros_like(wrong)
    # Not a product: what is left out may be anything, infinities included.
    parts = [torch.where(counted > 0, y, 0.0) for y in (wrong, size, divergence, torch.ones_like(wrong))]
    return torch.stack([y.flatten(1).sum(-1) if y.dim() > 1 else y for y in parts], -1)


@contextmanager
def _attached(
    model: nn.Module, layers: Mapping[int, AttentionLayer], chosen: Mapping[int, Mechanism | None]
) -> Iterator[None]:
    """The model with these mechanisms in place; it is left as it was."""
    done = []
    try:
        for index, mechanism in chosen.items():
            if mechanism is not None:
                attach(model, layers[index], mechanism.to(device_of(layers[index].module)))
                done.append(layers[index])
        yield
    finally:
        for layer in done:
            detach(model, layer)


def _windows_alone(plan: LayerPlan, layers: Mapping[int, AttentionLayer]) -> LayerPlan | None:
    """The plan with the far part of every group left out; None where no group has a window."""
    rows, windows = [], False
    for choice in plan.choices:
        if layers[choice.layer].cross:  # nothing is near
            rows.append(choice)
            continue
        groups = []
        for group in choice.groups:
            window = group.get("window")
            windows = windows or window is not None
            near = {"mechanism": "local", "window": window or 32, "sinks": group.get("sinks", 4)}
            groups.append(dict(group) if group["mechanism"] == "softmax" else {"heads": group["heads"], **near})
        rows.append(replace(choice, groups=tuple(groups)))
    return replace(plan, choices=tuple(rows)) if windows else None


def _element_size(model: nn.Module) -> int:
    """Bytes of a number as the model computes: its keys and values are kept like that."""
    return next((x.element_size() for x in model.parameters() if x.is_floating_point()), 4)


def _cache_bytes(
    layers: Mapping[int, AttentionLayer],
    plan: LayerPlan,
    mechanisms: Mapping[int, Mechanism | None],
    length: int,
    element: int,
) -> tuple[int, int]:
    """Of one sequence, exact and converted: every layer of the decoder counts, also those that stay exact."""
    exact = ours = 0
    shapes = {**{x.index: (x.head_dim, x.heads, x.kv_heads) for x in layers.values() if x.is_causal}, **plan.shapes}
    for index, (head_dim, heads, kv_heads) in shapes.items():
        if head_dim is None or heads is None or kv_heads is None:
            continue
        keys = 2 * element * kv_heads * head_dim * length
        exact += keys
        mechanism = mechanisms.get(index)
        if mechanism is None or not mechanism.recurrent:
            ours += keys
            continue
        mechanism = mechanism.to("cpu")
        short, long = (state_bytes(_state_after(mechanism, head_dim, heads, kv_heads, n)) for n in (1024, 2048))
        grown = 0 if mechanism.constant_memory else (long - short) * (length - 2048) // 1024
        ours += long + grown
    return exact, ours


def _state_after(mechanism: Mechanism, head_dim: int, heads: int, kv_heads: int, tokens: int) -> Any:
    q, k = torch.zeros(1, heads, tokens, head_dim), torch.zeros(1, kv_heads, tokens, head_dim)
    with torch.no_grad():
        return mechanism.scan(q, k, k)[1]


def _verdict(
    times: Sequence[Mapping[str, float]],
    length: int,
    converted: bool,
    error: float,
    budget: float,
    survey: Survey,
) -> str:
    left_out, tokens = survey.left_out.values(), survey.too_short
    if left_out and all(len(table.choices) == 1 for table in survey.layers.values()):
        why = f"inputs of {tokens} tokens are too short to judge any candidate for {length}"
        return f"nothing was converted: {why}; calibrate with inputs of at least {min(left_out)} tokens"
    rest = f"; candidates that {tokens} tokens are too few to judge were left out" if left_out else ""
    here = next(row for row in times if row["length"] == length)
    gain = here["exact_seconds"] / max(here["seconds"], 1e-12)
    if not converted:
        best = f"the fastest choice within an error of {budget:g} is {gain:.2f} times as fast as exact attention"
        return f"nothing was converted: at {length} tokens {best}; longer inputs or a larger error may allow more{rest}"
    start = min(row["length"] for row in times if row["seconds"] < row["exact_seconds"])
    below = "" if start <= times[0]["length"] else f"below {start:.0f} tokens leave it as it is; "
    seen = f" on inputs of {tokens} tokens: calibrate with longer ones to know more" if tokens else ""
    return f"{below}at {length} tokens {gain:.1f} times as fast as exact, error {error:.4f}{seen}{rest}"


@torch.no_grad()
def choose_mechanisms(
    model: nn.Module,
    found: Sequence[AttentionLayer],
    batches: Sequence[Any],
    *,
    error: float = 0.01,
    length: int | None = None,
    candidates: Sequence[Mapping[str, Any]] | None = None,
    max_groups: int = 3,
    draws: int = 2,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Chosen:
    """The fastest mechanisms for the layers of `model` at `length` tokens whose output error is at most `error`.

    found:    the layers as they are (`checking.look`); those with an obstacle stay exact
    batches:  as the model takes them; every fourth is held out for the error of the model (one alone serves for all)
    length:   None = that of the longest batch
    resume:   a file that keeps every layer and choice that was measured: a call that was interrupted goes on from there
    progress: called with (what, how many are done, of how many)
    """
    if not (isinstance(error, int | float) and 0 < error < 1):
        raise ValueError(f"error must be between 0 and 1, got {error!r}")
    for argument, number in (("length", length), ("draws", draws), ("max_groups", max_groups)):
        if number is not None:
            checks.check_positive(argument, number)
    held = list(batches[3::4]) or list(in_two(batches)[1])
    survey_batches = [b for b in batches if not any(b is one for one in held)] or list(batches)
    open_layers = [layer.index for layer in found if not layer.obstacle]
    if not open_layers:
        reasons = "; ".join(dict.fromkeys(layer.obstacle for layer in found[:4]))
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {reasons}")
    longest = _longest(model, batches, open_layers[0]) if length is None else length
    judged = _longest(model, held, open_layers[0])
    options = [dict(one) for one in AUTOMATIC] if candidates is None else [EXACT, *checked_candidates(candidates)]
    known = [(x.index, x.name, x.is_causal, x.cross, x.obstacle) for x in found]
    asked = (options, longest, max_groups, draws, seed, known)
    kept = ResumeFile(resume, model, batches, asked)
    tell = progress if progress is not None else _silent
    survey = survey_layers(
        model, survey_batches, found=found, layers=open_layers, candidates=options, length=longest, lengths=LENGTHS,
        draws=draws, seed=seed, judged=judged, kept=kept, progress=tell,
    )  # fmt: skip
    layers = {layer.index: layer for layer in found}
    exact = outputs(model, held)
    if not any(mask is None or bool(mask.any()) for _, _, mask in exact):
        raise ValueError(
            "every fourth batch of calibration= is held out for the error of the model's output, and these have no "
            "token that counts: they hold padding only"
        )
    picks = picks_by_price(survey.tables(), max_groups=max_groups)
    # What is exact on the short inputs of a survey ties with exact attention, at any price, and costs less.
    picks.append({index: torch.zeros_like(numbers) for index, numbers in picks[-1].items()})

    def plan_of(pick: Mapping[int, Tensor]) -> LayerPlan:
        reasons = {
            index: "exact attention is the fastest within the error"
            for index, numbers in pick.items()
            if all(survey.layers[index].choices[int(n)]["mechanism"] == "softmax" for n in numbers)
        }
        return make_plan(survey, pick, reasons, f"an output error of at most {error:g}")

    def measured(made: LayerPlan) -> list[float]:
        """The error, and the one that it may be on other batches."""
        with _attached(model, layers, made.mechanisms()):
            found = outputs(model, held)
        return [output_error(found, exact), output_error(found, exact, DEVIATIONS)]

    low, high = 0, len(picks) - 1  # the last one is exact attention, which is always within the error
    rounds = max(1, high).bit_length()
    for turn in range(rounds + 1):
        if low >= high:
            break
        middle = (low + high) // 2
        tell(f"the model with plan {middle + 1} of {len(picks)} on held-out batches", turn, rounds)
        pick = picks[middle]
        name = f"error of { {index: pick[index].tolist() for index in sorted(pick)} }"
        wrong, most = kept.get(name, lambda pick=pick: measured(plan_of(pick)))  # type: ignore[misc]
        if wrong <= MARGIN * error and most <= error:
            high = middle
        else:
            low = middle + 1
    plan = plan_of(picks[high])
    mechanisms = plan.mechanisms()
    # Kept as well: other times could make another choice of a call that goes on.
    times = tuple(kept.get(f"times of {plan.as_dict()}", lambda: list(_model_times(model, layers, plan, held))))
    here = next(row for row in times if row["length"] == longest)
    converted = any(mechanisms.values()) and here["exact_seconds"] >= GAIN * here["seconds"]
    if not converted:
        mechanisms = dict.fromkeys(mechanisms)
    value = measured(plan)[0] if converted else 0.0
    near = _windows_alone(plan, layers) if converted else None
    causal = any(layers[index].is_causal for index in survey.layers)
    return Chosen(
        mechanisms, plan, longest, value, None if near is None else measured(near)[0], times,
        _cache_bytes(layers, plan, mechanisms, longest, _element_size(model)) if causal else None,
        _verdict(times, longest, converted, value, error, survey),
    )  # fmt: skip


def _silent(what: str, done: int, total: int) -> None:
    return None


def _longest(model: nn.Module, batches: Sequence[Any], layer: int) -> int:
    """Tokens of the longest input: of texts their ids; of images and sounds what this attention layer sees."""
    sizes = []
    for batch in batches:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor):
            sizes.append(ids.shape[1])
        else:
            sizes += [k.shape[2] for sample in capture(model, [batch], layers=[layer]) for k in sample.k]
    return max(sizes, default=512)


def _model_times(
    model: nn.Module, layers: Mapping[int, AttentionLayer], plan: LayerPlan, held: Sequence[Any]
) -> tuple[dict[str, float], ...]:
    """Seconds of one sequence at every length, exact and as planned: the attention as it was measured (of layers that
    were not, exact attention as it takes others of their width) and the rest in proportion to the length; at the length
    of the first held-out batch those of the whole model."""
    first = held[0]
    tensor = next(x for x in pytree.tree_leaves(first) if isinstance(x, Tensor))
    rows, tokens = int(tensor.shape[0]), _longest(model, [first], plan.choices[0].layer)
    runs: list[list[float]] = [[], []]
    sides: list[Mapping[int, Mechanism | None]] = [{}, plan.mechanisms()]
    with evaluating(model):
        while any(len(side) <= RUNS or sum(side[1:]) < SECONDS for side in runs):
            for side, mechanisms in zip(runs, sides, strict=True):  # in turn: a busy moment of the machine meets both
                with _attached(model, layers, mechanisms):
                    start = clock()
                    run(model, first)
                    side.append(clock() - start)
    exact_best, best = (min(side[1:]) / rows for side in runs)  # the first run of each warms up
    lengths = sorted(plan.choices[0].seconds)
    exact = {n: sum(choice.exact_seconds[n] for choice in plan.choices) for n in lengths}
    width = sum(heads * head_dim for head_dim, heads, _ in plan.shapes.values())
    others = [x for x in layers.values() if x.index not in plan.shapes and not x.cross]
    share = sum((x.heads or 0) * (x.head_dim or 0) for x in others) / max(width, 1)
    beside = {n: share * exact[n] for n in lengths}
    near = min(lengths, key=lambda n: abs(n - tokens))
    inside = (exact[near] + beside[near]) * (tokens / near) ** (2 if tokens > near else 1)
    rest = max(exact_best - inside, 0.1 * exact_best) / tokens
    found = {n: (exact[n] + beside[n] + rest * n, plan.seconds(n) + beside[n] + rest * n) for n in lengths}
    if tokens in found:
        found[tokens] = (exact_best, best)
    return tuple({"length": n, "exact_seconds": a, "seconds": b} for n, (a, b) in found.items())
