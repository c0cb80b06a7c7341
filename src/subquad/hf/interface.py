"""The attention function that transformers calls in converted models, and the cache layers it works with.

Registered as "subquad" with `AttentionInterface` and `AttentionMaskInterface`. A layer whose module has a mechanism as
its child `subquad` is computed by that; every other layer, and one whose mechanism is exact, is computed by
transformers' own SDPA function with the mask it would have had, so that it gives the same bits.

`gate` is a forward pre-hook of each converted module. It puts a constant-size cache layer where transformers has put
an empty one that would grow, whoever made the cache, and refuses to run if somebody has switched the attention
implementation: the model would be an exact one without saying so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..mechanisms import Mechanism
from .cache import StateLayer, layer_of
from .masks import dense_mask, subquad_mask, visible_keys

__all__ = [
    "IMPLEMENTATION",
    "ConvertedLayer",
    "CrossLayer",
    "Recorder",
    "Seen",
    "active_recorder",
    "gate",
    "mechanism_of",
    "recording",
    "subquad_attention",
    "unhook",
]

IMPLEMENTATION = "subquad"
# Arguments through which transformers hands a layer the sequence that its keys come from.
_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")
# Arguments that change the scores or the normaliser, and what they are called in a message.
_REFUSED = {
    "softcap": "a soft cap of the scores",
    "s_aux": "learned sinks in the normaliser",
    "cu_seq_lens_q": "packed sequences",
    "block_table": "a paged cache",
}


class Seen(NamedTuple):
    """What one call of an attention layer sees: q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E), key_mask (B, S)."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    is_causal: bool
    scale: float


class Recorder(Protocol):
    """Called at each attention call while `recording`; `see` says what the call sees, or refuses its mask."""

    def __call__(self, module: nn.Module, see: Callable[[], Seen]) -> None: ...


_RECORDER: ContextVar[Recorder | None] = ContextVar("subquad_recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Show every attention call to `recorder` before it is computed."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def active_recorder() -> Recorder | None:
    """The recorder of the innermost `recording`, or None."""
    return _RECORDER.get()


def mechanism_of(module: nn.Module) -> Mechanism | None:
    """The mechanism of a converted attention module, None for one that is exact."""
    found = module._modules.get("subquad")
    return found if isinstance(found, Mechanism) else None


class ConvertedLayer(StateLayer):
    """The state of one converted layer in a cache whose other layers may keep keys.

    Its mask covers all tokens so far, as for layers that keep keys: one mask serves both kinds, whichever comes first.
    """

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(tokens so far and new, 0)."""
        new, before = super().get_mask_sizes(query_length)
        return before + new, 0


class CrossLayer(StateLayer):
    """The state of a cross attention: the encoder's keys are absorbed once, at the first token, and not kept.

    `keys` and `values` are what a model fetches for every later token: views of length 0 that lead back to this layer.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep no token: returns k (B, H, S, D) and v (B, H, S, E) for the attention function to absorb."""
        self.state = None
        found = super().update(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        super().update(self.keys, self.values)
        return found

    def read(self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        """Absorb k and v if this is the first call, then read the state: (B, Hq, L, E)."""
        if self.state is None:
            self.state = mechanism.absorb(k, v, scale=scale, key_mask=mask)
        return mechanism.read(q, self.state, scale=scale)


def _can_absorb(mechanism: Mechanism) -> bool:
    return mechanism.absorbs and mechanism.cross


def gate(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each call of a converted module: see the top of this file."""
    mechanism = mechanism_of(module)
    if mechanism is None:
        return
    chosen = module.config._attn_implementation  # type: ignore[union-attr]
    if chosen != IMPLEMENTATION:
        raise RuntimeError(
            f"this model was converted to {mechanism.name!r} attention, but its attention implementation was set to "
            f"{chosen!r} since, which would silently compute exact attention. Call subquad.hf.revert(model) to undo "
            f"the conversion, or model.set_attn_implementation({IMPLEMENTATION!r})"
        )
    if mechanism.exact:
        return
    if not module.subquad_cross and any(kwargs.get(name) is not None for name in _OTHER_SEQUENCE):
        object.__setattr__(module, "subquad_cross", True)  # a layer whose name did not tell
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    if caches:
        _place(module, mechanism, caches[0])


def unhook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a forward pre-hook by what it is: a copy of a model has its hooks, but not the handles of the original."""
    for key, one in list(module._forward_pre_hooks.items()):
        if one is hook:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _place(module: nn.Module, mechanism: Mechanism, cache: Cache) -> None:
    """Put our layer into the cache where there is an empty one of transformers."""
    cross = bool(getattr(module, "subquad_cross", False))
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.cross_attention_cache if cross else cache.self_attention_cache
    elif cross:
        return
    if not (_can_absorb(mechanism) if cross else mechanism.recurrent):
        return
    index: int = module.layer_idx  # type: ignore[assignment]
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return
    if type(layer) is not DynamicLayer:
        raise ValueError(
            f"layer {index} is converted to {mechanism.name!r}, whose cache is a state of constant size, and got a "
            f"{type(layer).__name__}; leave cache_implementation at its default"
        )
    if layer.get_seq_length():
        raise ValueError(
            f"layer {index} is converted to {mechanism.name!r} and got a cache that holds the keys of "
            f"{layer.get_seq_length()} tokens from an exact model; begin with an empty cache"
        )
    cache.layers[index] = CrossLayer() if cross else ConvertedLayer()


def _check_call(where: str, kwargs: dict[str, Any], cross: bool) -> None:
    for argument, what in _REFUSED.items():
        if kwargs.get(argument) is not None:
            raise ValueError(f"{where} is converted and got {argument}=, {what}: no feature map expresses it")
    bias = kwargs.get("position_bias")
    # T5 hands a bias of zeros to its cross attention.
    if bias is not None and not (cross and not bool(bias.any())):
        raise ValueError(f"{where} is converted and got position_bias=, a bias of every score: leave this layer exact")
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"{where} is converted and output_attentions=True was asked for: linear-time attention never forms the "
            "(L, S) weights. Call the model without it"
        )


def subquad_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E) -> ((B, L, Hq, E), None), as transformers' attention functions.

    Dropout of the weights is not applied in converted layers, which never form them.
    """
    flag = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    mechanism, cross = mechanism_of(module), bool(getattr(module, "subquad_cross", False))
    flag = flag and not cross
    where = f"the attention layer {getattr(module, 'layer_idx', None)} ({type(module).__name__})"
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    length, keys = query.shape[2], key.shape[2]
    layer = layer_of(key)
    recorder = _RECORDER.get()
    if recorder is not None and layer is None:

        def see() -> Seen:
            visible = visible_keys(attention_mask, length, keys, flag, where)
            return Seen(query, key, value, visible.key_mask, visible.is_causal, scale)

        recorder(module, see)
    if mechanism is None or mechanism.exact:
        dense = dense_mask(attention_mask, length, keys, flag, query.device)
        out, _ = sdpa_attention_forward(
            module, query, key, value, dense, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out, None
    _check_call(where, kwargs, cross)
    if isinstance(layer, CrossLayer):
        mask = None if keys == 0 else visible_keys(attention_mask, length, keys, False, where).key_mask
        out = layer.read(mechanism, query, key, value, scale, mask)
    elif layer is not None:
        mask = visible_keys(_newest(attention_mask, length), length, length, True, where).key_mask
        out = layer.advance(mechanism, query, key, value, scale=scale, key_mask=mask)
    else:
        causal, key_mask = visible_keys(attention_mask, length, keys, flag, where)
        if (causal and length != keys) or (flag and not cross and length < keys):
            raise ValueError(
                f"{where} is converted to {mechanism.name!r}, which has no recurrent form and so no cache to continue "
                "from; call generate(..., use_cache=False), or choose one of list_mechanisms(recurrent=True)"
            )
        query_mask = key_mask if not cross and length == keys else None
        out = mechanism(query, key, value, is_causal=causal, scale=scale, key_mask=key_mask, query_mask=query_mask)
    return out.transpose(1, 2).contiguous(), None


def _newest(mask: Tensor | None, length: int) -> Tensor | None:
    """The columns of the newest `length` tokens, keeping what the mask says of itself."""
    if mask is None or mask.shape[-1] == length:
        return mask
    if mask.dtype == torch.bool and (mask.shape[2] == 1 or mask.stride(2) == 0):
        return mask[:, :, :1, -length:].expand(-1, -1, length, -1)
    return mask[..., -length:]


AttentionInterface.register(IMPLEMENTATION, subquad_attention)
AttentionMaskInterface.register(IMPLEMENTATION, subquad_mask)
