"""A conversion proves itself before it changes a model: by what the model does, not by which family it belongs to.

`look` runs the exact model. Each attention layer is given queries, keys and values of known spread in the masks and
with the options of its own calls, and its own attention function is compared with softmax attention of them; whether
it is causal is found by changing the last key. What differs (a bias, a cap, sinks, another pattern) stays exact.

`disagreements` runs the model with exact attention in the converted path, which must give what the exact model gives:
forward, with padding on either side, and through the cache in one and in several tokens at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.operator import Call
from ...mechanisms import Mechanism
from ...mechanisms.softmax import Softmax
from .attachment import attach, detach
from .attending import attend_seen
from .capturing import evaluating, run, watching
from .interface import AttentionCall
from .layers import AttentionLayer
from .placement import device_of
from .torch_modules import watched
from .trials import TOKENS, Trial, run_trial

__all__ = ["StandIn", "disagreements", "look"]

# Relative differences beyond which two computations are not the same, by dtype; the second is for whole models.
_TOLERANCE = {torch.float64: (1e-8, 1e-6), torch.float32: (1e-4, 1e-3), torch.float16: (2e-2, 5e-2)}
_HALF = (6e-2, 0.15)
# The deviation of the scores that a layer is tried out with: large enough for a soft cap of 50 to show.
_SPREAD = 4.0


@dataclass
class _Look:
    """What one layer was seen to do."""

    layer: AttentionLayer
    calls: int = 0
    causal: bool = False
    cross: bool = False
    shape: tuple[int, int, int] | None = None
    obstacle: str = ""
    causal_known: bool = field(default=False)

    def result(self) -> AttentionLayer:
        """The layer as it is, not as its attributes say."""
        if not self.calls:
            reason = "the inputs of the check never reach it; pass calibration= with a batch that does"
            return replace(self.layer, obstacle=self.layer.obstacle or reason)
        assert self.shape is not None
        head_dim, heads, kv_heads = self.shape
        causal = self.causal if self.causal_known else self.layer.is_causal
        obstacle = self.layer.obstacle or self.obstacle
        return replace(
            self.layer, head_dim=head_dim, heads=heads, kv_heads=kv_heads, is_causal=causal, cross=self.cross,
            obstacle=obstacle,
        )  # fmt: skip


def _tolerance(x: Tensor) -> tuple[float, float]:
    """For one layer, and for a whole model; under autocast also a float32 result comes from products in half."""
    half = torch.is_autocast_enabled(x.device.type)
    return _TOLERANCE.get(torch.get_autocast_dtype(x.device.type) if half else x.dtype, _HALF)


def _difference(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value, where the wanted one is a number."""
    if found.shape != wanted.shape:
        return math.inf
    real = torch.isfinite(wanted)
    if not bool(real.any()):
        return 0.0
    wanted = torch.where(real, wanted, 0.0).double()
    gap = torch.where(real, found, 0.0).double() - wanted
    gap = gap.abs().max()
    return float(gap / wanted.abs().max().clamp(min=1e-6)) if bool(torch.isfinite(gap)) else math.inf


def _try(module: nn.Module, call: AttentionCall, look: _Look) -> Tensor | None:
    """One call of one layer: is it softmax attention of its queries and keys, and is it causal? Returns the mask (B, L)
    of its tokens."""
    look.calls += 1
    look.shape = (call.q.shape[3], call.q.shape[1], call.k.shape[1])
    queries, keys = call.q.shape[2], call.k.shape[2]
    look.cross = look.cross or look.layer.cross or queries != keys
    if look.obstacle:
        return None
    look.obstacle = call.refused(look.cross)
    generator = torch.Generator().manual_seed(look.layer.index)

    def drawn(x: Tensor, deviation: float) -> Tensor:
        return (deviation * torch.randn(x.shape, generator=generator)).to(x)

    if not (math.isfinite(call.scale) and call.scale != 0) or call.q.shape[1] % call.k.shape[1]:
        look.obstacle = f"its scale is {call.scale}, its heads are {call.q.shape[1]} and {call.k.shape[1]}"
    if look.obstacle or not queries or not keys:
        return None
    deviation = math.sqrt(_SPREAD / (abs(call.scale) * math.sqrt(call.q.shape[-1])))
    tried = replace(call, q=drawn(call.q, deviation), k=drawn(call.k, deviation), v=drawn(call.v, 1.0))
    try:
        seen = tried.seen(module, f"the attention layer {look.layer.name!r}", look.cross)
        own = tried.exact(module)
    except ValueError as error:
        look.obstacle = str(error).split(": sub-quadratic")[0]
        return None
    found = attend_seen(Softmax(call.q.shape[-1]), seen, look.cross).transpose(1, 2)
    mask = None if look.cross else seen.key_mask
    difference = _difference(_rows(found, mask), _rows(own, mask))
    if difference > _tolerance(call.v)[0]:
        look.obstacle = f"its attention differs by {difference:.2g} from softmax attention of its queries and keys"
        return mask
    if queries == keys > 1 and not look.cross and seen.key_mask is None and seen.segments is None:
        later = replace(tried, k=tried.k.clone(), v=tried.v.clone())
        later.k[:, :, -1], later.v[:, :, -1] = -tried.k[:, :, -1], tried.v[:, :, -1] + 1
        moved = _difference(later.exact(module)[:, :-1], own[:, :-1])
        look.causal = look.causal or moved <= 1e-6
        look.causal_known = True
    return mask


def _rows(out: Tensor, mask: Tensor | None) -> Tensor:
    return out if mask is None or mask.shape != out.shape[:2] else out[mask]


def look(
    model: nn.Module, found: Sequence[AttentionLayer], trials: Sequence[Trial]
) -> tuple[list[AttentionLayer], list[Trial]]:
    """The layers as they are seen to be in the trials without a cache, and the trials with the masks that the layers
    saw; the model is left as it was."""
    looks = {id(layer.module): _Look(layer) for layer in found}
    masks: dict[tuple[int, ...], Tensor] = {}

    def show(module: nn.Module, call: AttentionCall) -> None:
        mask = _try(module, call, looks[id(module)])
        if mask is not None:  # a padded token is one that some layer takes for padding
            known = masks.get(tuple(mask.shape))
            masks[tuple(mask.shape)] = mask if known is None else known & mask

    def show_torch(module: nn.Module, seen: Any) -> None:
        one = looks.get(id(module))
        if one is not None:
            one.calls += 1
            one.shape = (seen.q.shape[3], seen.q.shape[1], seen.k.shape[1])
            one.cross = one.cross or one.layer.cross or seen.q.shape[2] != seen.k.shape[2]
            one.causal, one.causal_known = one.causal or seen.is_causal, True

    ours = [layer.module for layer in found if not isinstance(layer.module, nn.MultiheadAttention)]
    with evaluating(model), watching(ours, show), watched(model, show_torch):
        for number, trial in enumerate(list(trials)):
            if not trial.steps:
                masks.clear()
                run(model, trial.inputs)
                trials = [*trials[:number], replace(trial, masks=tuple(masks.values())), *trials[number + 1 :]]
            if not number:
                reached = {key for key, one in looks.items() if one.calls}
    for key in reached - _reached(model, ours, trials[0]):
        one = looks[key]
        one.obstacle = one.obstacle or "a second call with the same inputs does not reach it: its output is kept"
    return [looks[id(layer.module)].result() for layer in found], list(trials)


def _reached(model: nn.Module, ours: Sequence[nn.Module], trial: Trial) -> set[int]:
    """Which layers a further call reaches: one that keeps what it gave before would go on giving it when converted."""
    reached: set[int] = set()

    def note(module: nn.Module, _: Any) -> None:
        reached.add(id(module))

    with evaluating(model), watching(ours, note), watched(model, note):
        run(model, trial.inputs)
    return reached


class StandIn(Mechanism):
    """Exact attention run through the converted code path: with it, a converted model must be the exact one."""

    name = "stand-in"
    equation = "softmax(q k^T / sqrt(D)) v"
    paper = "exact attention in the converted path"
    complexity = "O(L^2)"
    follows_autocast = True

    def __init__(self, head_dim: int, recurrent: bool = True, cross: bool = True, alone: bool = True) -> None:
        super().__init__(head_dim)
        self.inner = Softmax(head_dim)
        # Facts of the class elsewhere, here of what it stands for.
        self.cross, self.recurrent, self.each_query_alone = cross, recurrent, alone

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        return self.inner._attend(q, k, v, call, is_causal=is_causal)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        return self.inner._scan(q, k, v, state, call)

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> Any:
        return self.inner._absorb(k, v, state, call)

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        return self.inner._read(q, state, call)


def _drops_padding(mechanism: Mechanism) -> bool:
    """Whether a padded token gets 0 as its own output, where the exact model computes something."""
    return not mechanism.each_query_alone or mechanism.zero_at_padding


def _wrong(
    model: nn.Module,
    chosen: Sequence[tuple[AttentionLayer, Mechanism]],
    wanted: Sequence[tuple[Trial, dict[str, Tensor]]],
) -> str:
    """What is not as it was with exact attention in the converted path of these layers, or ""."""
    attached = []
    some_drop_padding = any(_drops_padding(mechanism) for _, mechanism in chosen)
    try:
        for layer, mechanism in chosen:
            assert layer.head_dim is not None
            facts = (mechanism.recurrent, mechanism.cross, not _drops_padding(mechanism))
            attach(model, layer, StandIn(layer.head_dim, *facts).to(device_of(layer.module)))
            attached.append(layer)
        for trial, outputs in wanted:
            if trial.steps and not any(layer.is_causal or layer.cross for layer, _ in chosen):
                continue  # a layer that sees later keys has no use for a cache
            try:
                found = run_trial(model, trial)
            except Exception as error:
                return f"with {trial.name} it raises {type(error).__name__}: {error}"
            for name, x in outputs.items():
                if some_drop_padding and "left" in trial.name and not name.endswith(TOKENS):
                    continue  # what a model makes of padding at its beginning
                difference = _difference(found[name], x) if name in found else math.inf
                if difference > _tolerance(x)[1]:
                    return f"with {trial.name} the model's output ({name}) differs by {difference:.2g}"
    finally:
        for layer in attached:
            detach(model, layer)
    return ""


def disagreements(
    model: nn.Module, chosen: Sequence[tuple[AttentionLayer, Mechanism]], trials: Sequence[Trial]
) -> dict[int, str]:
    """Layer number -> why the converted path of that layer is not what the model does; {} if all are.

    chosen: the layers and the mechanisms that they are to get. The model is left as it was.
    """
    if not chosen:
        return {}
    # A cache needs a recurrent form; without one generation says so by itself.
    stateless = any(layer.is_causal and not mechanism.recurrent for layer, mechanism in chosen)
    wanted = []
    for trial in trials:
        if trial.steps and stateless:
            continue
        try:
            wanted.append((trial, run_trial(model, trial)))
        except Exception:
            if not trial.steps:
                raise
            continue  # the exact model has no such cache
    together = _wrong(model, chosen, wanted)
    if not together:
        return {}
    alone = {layer.index: _wrong(model, [(layer, mechanism)], wanted) for layer, mechanism in chosen}
    bad = {index: reason for index, reason in alone.items() if reason}
    rest = [pair for pair in chosen if pair[0].index not in bad]
    if rest and bad:
        together = _wrong(model, rest, wanted)
    if rest and together:
        bad |= {layer.index: f"together with the other layers, {together}" for layer, _ in rest}
    return bad
