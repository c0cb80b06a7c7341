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
many that hardly matter, a few decide.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...mechanisms import Mechanism
from ..conversion.attachment import attach, detach
from ..conversion.capturing import evaluating, run
from ..conversion.layers import AttentionLayer
from .candidates import EXACT, automatic_candidates
from .kept import Kept
from .layer_plan import LayerPlan, planned
from .search import picks_by_price
from .survey import in_two, survey_layers

__all__ = ["Chosen", "choose", "output_error", "outputs"]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# The share of the error that a choice may use up on the batches that decide: on others it is a little larger.
MARGIN = 0.8
# Errors that one nat of divergence counts for.
DIVERGENCE = 3.0
# How much faster the whole model must be for a conversion to be worth its error.
GAIN = 1.05


@dataclass(frozen=True)
class Chosen:
    """What was chosen: a mechanism per layer number (None: exact), and what is known of it.

    error:             of the model's output on held-out batches; without_far: the same with windows alone
    times:             [{"length", "exact_seconds", "seconds"}], attention measured here and the rest of the model
    beside it cache_bytes:       of one sequence of `length` tokens in a decoder, exact and converted; None for encoders
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
    """(kind, tensor, mask) of each batch: logits where the model has them, else its last hidden state."""
    found = []
    with evaluating(model):
        for batch in batches:
            out = run(model, batch)
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            kind, x = "hidden", out
            if isinstance(out, Mapping):
                names = ("logits", "last_hidden_state", "token_embeddings", "sentence_embedding")
                name = next((n for n in names if isinstance(out.get(n), Tensor)), None)
                if name is None:
                    raise TypeError(f"{type(model).__name__} gives {list(out)}: neither logits nor a last hidden state")
                kind, x = ("logits" if name == "logits" else "hidden"), out[name]
            elif not isinstance(out, Tensor):
                x = out[0]
            found.append((kind, x.float(), mask if mask is None or x.shape[:2] != mask.shape else mask.bool()))
    return found


def output_error(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """How far a model's outputs are from the exact ones, see the top of this file.

    >>> x = torch.randn(2, 5, 8)
    >>> output_error([("hidden", -x, None)], [("hidden", x, None)])
    2.0
    """
    wrong = total = divergence = tokens = 0.0
    for (kind, x, mask), (_, exact, _) in zip(found, wanted, strict=True):
        if mask is not None:
            x, exact = x[mask.to(x.device)], exact[mask.to(x.device)]
        x, exact = x.double(), exact.double()
        if kind == "logits":
            logs = exact.log_softmax(-1)
            divergence += float((logs.exp() * (logs - x.log_softmax(-1))).nan_to_num(0.0).sum())
            tokens += exact.shape[:-1].numel()
            x, exact = (y - y.mean(-1, keepdim=True) for y in (x, exact))
            wrong += float((x - exact).square().sum())
            total += float(exact.square().sum())
        else:
            cosines = F.cosine_similarity(x, exact, dim=-1)
            wrong += float((1 - cosines).sum())
            total += cosines.numel()
    value = max(wrong / max(total, 1e-300), DIVERGENCE * divergence / max(tokens, 1.0))
    return round(value, 9) if math.isfinite(value) else math.inf


@contextmanager
def _attached(
    model: nn.Module, layers: Mapping[int, AttentionLayer], chosen: Mapping[int, Mechanism | None]
) -> Iterator[None]:
    """The model with these mechanisms in place; it is left as it was."""
    done = []
    try:
        for index, mechanism in chosen.items():
            if mechanism is not None:
                parameter = next(layers[index].module.parameters(), None)
                attach(model, layers[index], mechanism if parameter is None else mechanism.to(parameter.device))
                done.append(layers[index])
        yield
    finally:
        for layer in done:
            detach(model, layer)


def _windows_alone(plan: LayerPlan) -> LayerPlan | None:
    """The plan with the far part of every group left out; None where no group has a window."""
    rows, windows = [], False
    for choice in plan.choices:
        groups = []
        for group in choice.groups:
            window = group.get("window")
            windows = windows or window is not None
            near = {"mechanism": "local", "window": window or 32, "global_tokens": group.get("sinks", 4)}
            groups.append(dict(group) if group["mechanism"] == "softmax" else {"heads": group["heads"], **near})
        rows.append(replace(choice, groups=tuple(groups)))
    return replace(plan, choices=tuple(rows), matrices={}) if windows else None


def _cache_bytes(plan: LayerPlan, mechanisms: Mapping[int, Mechanism | None], length: int) -> tuple[int, int]:
    exact = ours = 0
    for index, (head_dim, heads, kv_heads) in plan.shapes.items():
        keys = 2 * 4 * kv_heads * head_dim * length
        exact += keys
        mechanism = mechanisms.get(index)
        if mechanism is None or not mechanism.recurrent:
            ours += keys
            continue
        q, k = torch.zeros(1, heads, 256, head_dim), torch.zeros(1, kv_heads, 256, head_dim)
        state = mechanism.to("cpu").scan(q, k, k)[1]
        ours += sum(x.nbytes for x in pytree.tree_leaves(state) if isinstance(x, Tensor))
    return exact, ours


def _verdict(
    times: Sequence[Mapping[str, float]], length: int, tokens: int, converted: bool, error: float, budget: float
) -> str:
    here = next(row for row in times if row["length"] == length)
    gain = here["exact_seconds"] / max(here["seconds"], 1e-12)
    if not converted:
        best = f"the fastest choice within an error of {budget:g} is {gain:.2f} times as fast as exact attention"
        return f"nothing was converted: at {length} tokens {best}; ask again with a larger length= or error="
    start = min(row["length"] for row in times if row["seconds"] < row["exact_seconds"])
    below = "" if start <= times[0]["length"] else f"below {start:.0f} tokens leave it as it is; "
    seen = "" if tokens >= length else f" on inputs of {tokens} tokens: calibrate with longer ones to know more"
    return f"{below}at {length} tokens {gain:.1f} times as fast as exact, error {error:.4f}{seen}"


@torch.no_grad()
def choose(
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
    held = list(batches[3::4]) or list(in_two(batches)[1])
    lessons = [b for b in batches if not any(b is one for one in held)] or list(batches)
    open_layers = [layer.index for layer in found if not layer.obstacle]
    if not open_layers:
        reasons = "; ".join(dict.fromkeys(layer.obstacle for layer in found[:4]))
        raise ValueError(f"no layer of {type(model).__name__} can be converted: {reasons}")
    longest = _longest(batches) if length is None else length
    options = automatic_candidates() if candidates is None else [EXACT, *candidates]
    asked = (options, longest, max_groups, draws, seed)
    kept = Kept(resume, model, batches, asked)
    tell = progress if progress is not None else _silent
    survey = survey_layers(
        model, lessons, found=found, layers=open_layers, candidates=options, length=longest, lengths=LENGTHS,
        draws=draws, seed=seed, kept=kept, progress=tell,
    )  # fmt: skip
    layers = {layer.index: layer for layer in found}
    exact = outputs(model, held)
    ladder = picks_by_price(survey.tables(), max_groups=max_groups)

    def plan_of(pick: Mapping[int, Tensor]) -> LayerPlan:
        reasons = {
            index: "exact attention is the fastest within the error"
            for index, numbers in pick.items()
            if all(survey.layers[index].choices[int(n)]["mechanism"] == "softmax" for n in numbers)
        }
        return planned(survey, pick, reasons, f"an output error of at most {error:g}")

    def measured(made: LayerPlan) -> float:
        with _attached(model, layers, made.mechanisms()):
            return output_error(outputs(model, held), exact)

    low, high = 0, len(ladder) - 1  # the last one is exact attention, which is always within the error
    rounds = max(1, high).bit_length()
    for turn in range(rounds + 1):
        if low >= high:
            break
        middle = (low + high) // 2
        tell(f"the model with choice {middle + 1} of {len(ladder)}", turn, rounds)
        pick = ladder[middle]
        name = f"error of {[pick[index].tolist() for index in sorted(pick)]}"
        wrong = kept.get(name, lambda pick=pick: measured(plan_of(pick)))  # type: ignore[misc]
        if wrong <= MARGIN * error:
            high = middle
        else:
            low = middle + 1
    plan = plan_of(ladder[high])
    mechanisms = plan.mechanisms()
    times, tokens = _times(model, layers, plan, held)
    here = next(row for row in times if row["length"] == longest)
    converted = any(mechanisms.values()) and here["exact_seconds"] >= GAIN * here["seconds"]
    if not converted:
        mechanisms = dict.fromkeys(mechanisms)
    value = measured(plan) if converted else 0.0
    near = _windows_alone(plan) if converted else None
    causal = any(layers[index].is_causal for index in survey.layers)
    return Chosen(
        mechanisms, plan, longest, value, None if near is None else measured(near), times,
        _cache_bytes(plan, mechanisms, longest) if causal else None,
        _verdict(times, longest, tokens, converted, value, error),
    )  # fmt: skip


def _silent(what: str, done: int, total: int) -> None:
    return None


def _longest(batches: Sequence[Any]) -> int:
    """Tokens of the longest input."""
    sizes = []
    for batch in batches:
        tensors = list(batch.values()) if isinstance(batch, Mapping) else [batch]
        sizes += [x.shape[1] for x in tensors if isinstance(x, Tensor) and x.dim() in (2, 3)]
    return max(sizes, default=512)


def _times(
    model: nn.Module, layers: Mapping[int, AttentionLayer], plan: LayerPlan, held: Sequence[Any]
) -> tuple[tuple[dict[str, float], ...], int]:
    """Seconds of one sequence at every length, exact and as planned: the attention as it was measured and the rest in
    proportion to the length; at the length of the held-out batch, which is returned as well, those of the whole model.
    """
    first = held[0]
    tensor = next(iter(first.values())) if isinstance(first, Mapping) else first
    rows, tokens = int(tensor.shape[0]), _longest([first])
    exact_best = best = math.inf
    made = plan.mechanisms()
    with evaluating(model):
        for _ in range(3):  # in turn: a busy moment of the machine meets both
            exact_best = min(exact_best, _seconds(model, first) / rows)
            with _attached(model, layers, made):
                best = min(best, _seconds(model, first) / rows)
    lengths = sorted(plan.choices[0].seconds)
    exact = {n: sum(choice.exact_seconds[n] for choice in plan.choices) for n in lengths}
    near = min(lengths, key=lambda n: abs(n - tokens))
    inside = exact[near] * (tokens / near) ** (2 if tokens > near else 1)
    rest = max(exact_best - inside, 0.1 * exact_best) / tokens
    found = {n: (exact[n] + rest * n, plan.seconds(n) + rest * n) for n in lengths}
    if tokens in found:
        found[tokens] = (exact_best, best)
    return tuple({"length": n, "exact_seconds": a, "seconds": b} for n, (a, b) in found.items()), tokens


def _seconds(model: nn.Module, batch: Any) -> float:
    start = time.perf_counter()
    run(model, batch)
    return time.perf_counter() - start
