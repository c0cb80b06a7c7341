"""What each attention layer of a model sees: the queries, keys and values of real inputs.

The model runs as it is, without gradients and dropout; its attention function is replaced for the time of the call by
one that takes notes and then computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...nn.modes import evaluation_mode
from ...nn.packing import run_packed
from .attending import joined, unjoined
from .interface import Attend, AttentionCall, LayerConfig, Seen, exact_config
from .layers import AttentionLayer, known_layers
from .placement import device_of
from .torch_modules import watched

__all__ = ["LayerSample", "by_sequence", "capture", "decodes_apart", "evaluating", "run", "select_layers", "watching"]


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
    device = device_of(model)

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        arguments = {name: moved(x) for name, x in batch.items()}
        names = list(inspect.signature(model.forward).parameters)
        if names and names[0] in ("input", "features") and names[0] not in arguments:
            return model(arguments)  # sentence-transformers and their modules take the whole dict
        if "use_cache" in names:
            arguments.setdefault("use_cache", False)
        return model(**arguments)
    if isinstance(batch, Tensor):
        return model(moved(batch))
    if isinstance(batch, (tuple, list)):
        return model(*(moved(x) for x in batch))
    raise TypeError(
        f"a batch must be a dict of tensors as the model takes them, a tuple or a tensor, got {type(batch).__name__}"
    )


def decodes_apart(model: nn.Module) -> bool:
    """Whether what it gives belongs to the tokens of a decoder beside an encoder, which have a mask of their own."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _real_tokens(model: nn.Module, batch: Any) -> Tensor | None:
    """(B, L) bool: the mask of the sequence that the output of `model` belongs to, as the batch has it."""
    names = inspect.signature(model.forward).parameters
    if not isinstance(batch, Mapping):
        batch = dict(zip(names, batch if isinstance(batch, (tuple, list)) else [batch], strict=False))
    real = batch.get("decoder_attention_mask" if decodes_apart(model) else "attention_mask")
    if isinstance(real, Tensor):
        return real.bool()
    # torch's modules have one of padding: True, or -inf.
    own = ("tgt_key_padding_mask",) if "tgt_key_padding_mask" in names else ("src_key_padding_mask", "key_padding_mask")
    padding = next((batch[name] for name in own if isinstance(batch.get(name), Tensor)), None)
    return None if padding is None else padding == 0


def by_sequence(model: nn.Module, batch: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A model's output x (B, L, width), and which rows of it are of real tokens, (B, L) bool; None: all, or no row is a
    token. Where torch's modules give x (L, B, width) and there is a mask, x is turned.

    >>> model, padding = nn.TransformerEncoderLayer(8, 2), torch.tensor([[False, False, True]])
    >>> x, mask = by_sequence(model, {"src_key_padding_mask": padding}, torch.zeros(3, 1, 8))
    >>> x.shape, mask
    (torch.Size([1, 3, 8]), tensor([[ True,  True, False]]))
    """
    real = _real_tokens(model, batch)
    if real is None or x.dim() != 3:
        return x, None
    # The shapes decide, and where they are alike what the attention modules say.
    batch_first = all(part.batch_first for part in model.modules() if isinstance(part, nn.MultiheadAttention))
    for y in (x, x.transpose(0, 1)) if batch_first else (x.transpose(0, 1), x):
        if y.shape[:2] == real.shape:
            return y, real.to(y.device)
    return x, None


class _Watch:
    """Shows a call to somebody, then lets the module attend as before."""

    def __init__(self, show: Callable[[nn.Module, AttentionCall], None], inner: Attend | None) -> None:
        self.show, self.inner = show, inner

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        self.show(module, call)
        return call.exact(module) if self.inner is None else self.inner(module, call)


@contextmanager
def watching(modules: Iterable[nn.Module], show: Callable[[nn.Module, AttentionCall], None]) -> Iterator[None]:
    """Show every attention call of these modules of transformers to `show` first."""
    before: list[tuple[Any, Any]] = [(module, module.config) for module in modules]
    for module, config in before:
        inner = config.attend if isinstance(config, LayerConfig) else None
        module.config = LayerConfig(exact_config(module), _Watch(show, inner))
    try:
        yield
    finally:
        for module, config in before:
            module.config = config


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; each module is in its own mode again afterwards."""
    with evaluation_mode(model), torch.no_grad():
        yield


def capture(
    model: nn.Module,
    batches: Iterable[Any],
    layers: Iterable[int | str] | None = None,
    max_tokens: int | None = None,
) -> list[LayerSample]:
    """Run `model` on `batches` and return what its attention layers saw, in the order of the layers.

    batches:    dicts of tensors as the model takes them (input_ids, attention_mask, pixel_values, ...), or tensors
    layers:     numbers or names of the layers wanted; None = all that a mechanism could stand in for
    max_tokens: stop after the batch that brings every layer to this many real tokens

    The model is left as it was. A layer whose mask no mechanism can express raises, naming the mask.

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
    layer_of = {id(layer.module): layer for layer in wanted}
    count = dict.fromkeys(notes, 0)

    def record(module: nn.Module, seen: Seen) -> None:
        if id(module) not in layer_of:
            return
        index = layer_of[id(module)].index
        for one in _unpacked(seen):
            notes[index].append(replace(one, q=one.q.detach(), k=one.k.detach(), v=one.v.detach()))
            count[index] += one.k.shape[0] * one.k.shape[2] if one.key_mask is None else int(one.key_mask.sum())

    def show(module: nn.Module, call: AttentionCall) -> None:
        layer = layer_of[id(module)]
        record(module, call.seen(module, f"the attention layer {layer.name!r}", layer.cross))

    ours = [layer.module for layer in wanted if not isinstance(layer.module, nn.MultiheadAttention)]
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(watching(ours, show))
        stack.enter_context(watched(model, record))
        for batch in batches:
            run(model, batch)
            if max_tokens is not None and min(count.values()) >= max_tokens:
                break
    return [_sample(layer, notes[layer.index]) for layer in wanted]


def _unpacked(seen: Seen) -> list[Seen]:
    """Several sequences in one row as a padded batch of them."""
    if seen.segments is None:
        return [seen]
    found: list[Seen] = []

    def run_one(tokens: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in unjoined(tokens, seen))
        found.append(Seen(q, k, v, mask, seen.is_causal, seen.scale))
        return tokens

    run_packed(run_one, joined(seen), seen.segments.expand(seen.q.shape[0], -1), seen.key_mask)
    return found


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
    cross = layer.cross or any(call.q.shape[2] != call.k.shape[2] for call in calls)
    scale = calls[0].scale if calls else 1.0
    return LayerSample(layer.index, layer.name, **lists, is_causal=causal, cross=cross, scale=scale)
