"""What each attention layer of a model sees: the queries, keys and values of real inputs.

The model runs as it is, without gradients and dropout; its attention function is replaced for the time of the call by
one that takes notes and then computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from .interface import IMPLEMENTATION, Seen, recording
from .layers import AttentionLayer, known_layers
from .torch_modules import watched

__all__ = ["LayerSample", "capture", "run", "select_layers", "through_interface"]


@dataclass(frozen=True)
class LayerSample:
    """What one attention layer saw: one entry of each list per call of the layer.

    q: (B, Hq, L, D), k: (B, H, S, D), v: (B, H, S, E), key_mask: (B, S) bool or None where every key is real.
    Rotary and other position codes of q and k are applied already. `scale` multiplies q.k; a layer that is called
    several times per input (ALBERT shares one) has several entries per batch.

    >>> len(LayerSample(0, "layers.0.self_attn", scale=0.5).q)
    0
    """

    layer: int
    name: str
    q: list[Tensor] = field(default_factory=list, repr=False)
    k: list[Tensor] = field(default_factory=list, repr=False)
    v: list[Tensor] = field(default_factory=list, repr=False)
    key_mask: list[Tensor | None] = field(default_factory=list, repr=False)
    is_causal: bool = False
    cross: bool = False
    scale: float = 1.0

    def __len__(self) -> int:
        """Number of calls."""
        return len(self.q)

    def calls(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """(q, k, v, key_mask) of each call."""
        yield from zip(self.q, self.k, self.v, self.key_mask, strict=True)

    def query_mask(self, key_mask: Tensor | None) -> Tensor | None:
        """(B, L), real queries of a call with this mask: padding among the keys is padding among the queries, unless
        these are of another sequence."""
        return None if self.cross else key_mask

    def arguments(self, key_mask: Tensor | None) -> dict[str, Any]:
        """What a mechanism takes besides q, k and v to do what the layer did in a call with this mask."""
        return {
            "is_causal": self.is_causal,
            "scale": self.scale,
            "key_mask": key_mask,
            "query_mask": self.query_mask(key_mask),
        }

    @property
    def tokens(self) -> int:
        """Real keys over all calls."""
        return sum(
            k.shape[0] * k.shape[2] if m is None else int(m.sum()) for k, m in zip(self.k, self.key_mask, strict=True)
        )


def select_layers(found: Sequence[AttentionLayer], layers: Iterable[int | str] | None) -> list[AttentionLayer]:
    """The layers with these numbers (negative ones count from the end) or names; None = all."""
    if layers is None:
        return list(found)
    if isinstance(layers, (int, str)):
        layers = [layers]
    names = {layer.name: layer for layer in found}
    chosen: dict[int, AttentionLayer] = {}
    for key in layers:
        if isinstance(key, str):
            if key not in names:
                raise ValueError(
                    f"layers: there is no attention layer {key!r}{checks.nearest(key, names)}; they are {list(names)}"
                )
            layer = names[key]
        elif isinstance(key, int) and not isinstance(key, bool):
            if not -len(found) <= key < len(found):
                raise ValueError(
                    f"layers: index {key} is out of range, the model has {len(found)} attention layers, "
                    f"0 to {len(found) - 1}"
                )
            layer = found[key]
        else:
            raise TypeError(f"layers must hold numbers or names of attention layers, got {key!r}")
        chosen[layer.index] = layer
    return [chosen[index] for index in sorted(chosen)]


def run(model: nn.Module, batch: Any) -> Any:
    """One forward pass of `model` on a batch as it takes it: a dict of arguments, a tuple of them, or one tensor."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        arguments = {name: moved(x) for name, x in batch.items()}
        if "use_cache" in inspect.signature(model.forward).parameters:
            arguments.setdefault("use_cache", False)
        return model(**arguments)
    if isinstance(batch, Tensor):
        return model(moved(batch))
    if isinstance(batch, (tuple, list)):
        return model(*(moved(x) for x in batch))
    raise TypeError(
        f"a batch must be a dict of tensors as the model takes them, a tuple or a tensor, got {type(batch).__name__}"
    )


@contextmanager
def through_interface(model: nn.Module) -> Iterator[None]:
    """Let every attention layer of transformers in `model` call our function for a while."""
    every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in every if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = IMPLEMENTATION
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def capture(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Iterable[int | str] | None = None,
    max_tokens: int | None = None,
) -> list[LayerSample]:
    """Run `model` on `batches` and return what its attention layers saw, in the order of the layers.

    batches:    dicts of tensors as the model takes them (input_ids, attention_mask, pixel_values, ...), or tensors
    layers:     numbers or names of the layers wanted; None = all that linear-time attention could stand in for
    max_tokens: stop after the batch that brings every layer to this many real tokens

    The model is left as it was. A layer whose mask linear-time attention cannot express raises, naming the mask.

    >>> import torch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
    >>> samples = capture(model, [torch.randn(2, 10, 32)])
    >>> [(s.layer, tuple(s.q[0].shape), round(s.scale, 3)) for s in samples]
    [(0, (2, 4, 10, 8), 0.354), (1, (2, 4, 10, 8), 0.354)]
    """
    found = known_layers(model)
    if max_tokens is not None:
        checks.check_positive("max_tokens", max_tokens)
    wanted = select_layers(found, layers) if layers is not None else [one for one in found if not one.obstacle]
    notes: dict[int, list[Seen]] = {layer.index: [] for layer in wanted}
    index_of = {id(layer.module): layer.index for layer in wanted}
    count = dict.fromkeys(notes, 0)

    def recorder(module: nn.Module, see: Callable[[], Seen]) -> None:
        index = index_of.get(id(module))
        if index is None:
            return
        seen = see()
        kept = Seen(seen.q.detach(), seen.k.detach(), seen.v.detach(), *seen[3:])
        notes[index].append(kept)
        count[index] += seen.k.shape[0] * seen.k.shape[2] if seen.key_mask is None else int(seen.key_mask.sum())

    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        stack.enter_context(through_interface(model))
        stack.enter_context(watched(model))
        stack.enter_context(recording(recorder))
        for batch in batches:
            run(model, batch)
            if max_tokens is not None and min(count.values()) >= max_tokens:
                break
    return [_sample(layer, notes[layer.index]) for layer in wanted]


def _sample(layer: AttentionLayer, calls: list[Seen]) -> LayerSample:
    columns: dict[str, Callable[[Seen], Any]] = {
        "q": lambda s: s.q,
        "k": lambda s: s.k,
        "v": lambda s: s.v,
        "key_mask": lambda s: s.key_mask,
    }
    lists = {name: [get(call) for call in calls] for name, get in columns.items()}
    # A causal call of one token sees no more than a full one, and does not say that it is causal.
    causal = any(call.is_causal for call in calls) if calls else layer.is_causal
    scale = calls[0].scale if calls else 1.0
    return LayerSample(layer.index, layer.name, **lists, is_causal=causal, cross=layer.cross, scale=scale)
