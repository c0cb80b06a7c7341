"""From what the caller asks for to one mechanism per attention layer of a model, or the reason why a layer stays exact.

A choice for one layer is a mechanism's name, {"mechanism": name, **options}, a `Mechanism` object or class, a function
of the layer that returns one of these, or None for "leave it exact". For a whole model it is one of these for all
layers, a list with one per layer, or a mapping from layer numbers or names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from ...features.calibration import Calibration
from ...mechanisms import Mechanism
from ...mechanisms.base import SHAPE
from ...mechanisms.softmax import Softmax
from ...nn.layer_mechanisms import make_mechanism, per_layer
from .capturing import LayerSample, select_layers
from .layers import AttentionLayer

__all__ = ["Assignment", "assign", "leave_exact", "needs_calibration", "with_sample"]


@dataclass(frozen=True)
class Assignment:
    """One layer and its mechanism; None with the reason where it stays exact. asked: the caller named this layer."""

    layer: AttentionLayer
    mechanism: Mechanism | None
    reason: str = ""
    asked: bool = False


def with_sample(layer: AttentionLayer, sample: LayerSample | None) -> AttentionLayer:
    """The layer with the head width and numbers of heads that its tensors have, where some were captured."""
    if sample is None or not len(sample):
        return layer
    q, k = sample.q[0], sample.k[0]
    causal = sample.is_causal or layer.is_causal
    return replace(layer, head_dim=q.shape[-1], heads=q.shape[1], kv_heads=k.shape[1], is_causal=causal)


def needs_calibration(mechanism: Mechanism) -> bool:
    """Whether some part of it has statistics to gather and none yet."""
    return any(isinstance(part, Calibration) and not part.ready for part in mechanism.modules())


def _where(layer: AttentionLayer) -> str:
    return f"attention layer {layer.index} ({layer.name})"


def _build(choice: Any, layer: AttentionLayer, options: Mapping[str, Any], alone: bool) -> Mechanism | None:
    """The mechanism of one layer. `alone`: the choice was made for this layer only, so it is taken as it is."""
    if choice is None:
        return None
    if callable(choice) and not isinstance(choice, (Mechanism, type)):
        choice, alone = choice(layer), True
        if choice is None:
            return None
    if layer.head_dim is None or layer.heads is None or layer.kv_heads is None:
        if choice == Softmax.name or choice is Softmax:
            return Softmax(1)  # the module goes on with its own attention function, whatever its shape
        raise ValueError(
            f"{_where(layer)}: {type(layer.module).__name__} does not say its head width or number of heads; pass "
            "calibration= with at least one batch, from which they can be seen"
        )
    if isinstance(choice, Mechanism) and not alone:
        # One object stands for all layers: each gets one of its kind with a draw of its own.
        choice = choice.config()
    given = dict(options)
    if isinstance(choice, Mapping):
        given = {**{k: v for k, v in choice.items() if k not in ("mechanism", *SHAPE)}, **given}
        choice = choice.get("mechanism")
    if not alone:
        given = per_layer(given, layer.index)
    try:
        return make_mechanism(choice, layer.head_dim, layer.heads, layer.kv_heads, **given)
    except ValueError as error:
        raise ValueError(f"{_where(layer)}, head width {layer.head_dim}: {error}") from error


def _obstacle(layer: AttentionLayer, mechanism: Mechanism | None) -> str:
    """Why this mechanism cannot stand in this layer, or ""."""
    if mechanism is None or mechanism.exact:
        return ""
    if layer.obstacle:
        return layer.obstacle
    if layer.cross and not mechanism.cross:
        return f"{mechanism.name} needs queries and keys of one sequence, and this is cross attention"
    if layer.is_causal and not mechanism.causal:
        return f"{mechanism.name} cannot be causal: {mechanism.causal_refusal}"
    return ""


def _choices(mechanism: Any, found: Sequence[AttentionLayer], wanted: Sequence[AttentionLayer]) -> dict[int, Any]:
    """Layer number -> choice, for a list or a mapping."""
    if isinstance(mechanism, Mapping):
        chosen: dict[int, Any] = {}
        for key, choice in mechanism.items():
            (layer,) = select_layers(found, [key])
            if layer.index in chosen:
                raise ValueError(f"mechanism: {_where(layer)} is given twice, by number and by name")
            chosen[layer.index] = choice
        return chosen
    if len(mechanism) != len(wanted):
        raise ValueError(f"mechanism is a list of {len(mechanism)}, but there are {len(wanted)} layers to convert")
    return {layer.index: choice for layer, choice in zip(wanted, mechanism, strict=True)}


def assign(
    found: Sequence[AttentionLayer], mechanism: Any, layers: Any, options: Mapping[str, Any]
) -> list[Assignment]:
    """One `Assignment` per layer of `found`. Nothing is changed in the model.

    A layer that was named, or for which a choice of its own was made, and that cannot take it raises; one that was
    only swept up by "all layers" stays exact with the reason.
    """
    wanted = select_layers(found, layers)
    whole = not isinstance(mechanism, (str, Mechanism, type)) and (
        isinstance(mechanism, Sequence) or (isinstance(mechanism, Mapping) and "mechanism" not in mechanism)
    )
    chosen = _choices(mechanism, found, wanted) if whole else {layer.index: mechanism for layer in wanted}
    inside = {layer.index for layer in wanted}
    made: list[Assignment] = []
    for layer in found:
        if layer.index not in inside or layer.index not in chosen:
            made.append(Assignment(layer, None, "not asked for"))
            continue
        alone = whole or len(chosen) == 1
        choice = chosen[layer.index]
        if isinstance(choice, Mechanism) and any(choice is a.mechanism for a in made):
            choice = deepcopy(choice)  # one module in two layers could not be saved
        one = _build(choice, layer, options, alone)
        if one is None:
            made.append(Assignment(layer, None, "chosen to stay exact"))
            continue
        made.append(Assignment(layer, one, asked=whole or layers is not None))
    return leave_exact({a.layer.index: reason for a in made if (reason := _obstacle(a.layer, a.mechanism))}, made)


def leave_exact(reasons: Mapping[int, str], made: Sequence[Assignment]) -> list[Assignment]:
    """The assignments with the layers of `reasons` left exact; raises where one was asked for, or none is left."""
    found = []
    for a in made:
        reason = reasons.get(a.layer.index, "")
        if reason and a.asked:
            assert a.mechanism is not None
            name = a.mechanism.name
            raise ValueError(f"{_where(a.layer)} cannot be converted to {name!r}: {reason}. Leave it out of layers=")
        found.append(Assignment(a.layer, None, reason) if reason else a)
    if not any(assignment.mechanism is not None for assignment in found):
        layers: dict[str, list[str]] = {}
        for a in found:
            layers.setdefault(a.reason, []).append(str(a.layer.index))
        given = "; ".join(f"layers {', '.join(numbers)}: {reason}" for reason, numbers in layers.items())
        raise ValueError(f"no layer is left to convert: {given}")
    return found
