"""What a converted attention module does: the mechanism in place of its attention function, with or without a cache.

A step of cached generation, for one converted module:

    before   (forward pre-hook)   finds the module's layer in the cache that was passed, puts a state of constant size
                                  there if it is an empty one of transformers, and remembers it until the module is done
    update   (called by the model) counts the new tokens and gives their keys and values back alone, whatever the model
                                  makes of them afterwards
    attend   (through LayerConfig) mechanism.scan(q, k, v, state)
    after    (forward hook)       raises if new tokens were counted and no state has taken them in
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from ...mechanisms import Mechanism
from ...nn.packing import run_packed
from ..cache import StateLayer
from .interface import AttentionCall, Seen, mechanism_of
from .masks import absorbed, same_tokens, visible_after, visible_keys

__all__ = ["Converted", "ConvertedLayer", "CrossLayer", "attend_seen", "joined", "unjoined"]

# Arguments through which transformers hands a layer the sequence that its keys come from.
_OTHER_SEQUENCE = ("key_value_states", "encoder_hidden_states")


class ConvertedLayer(StateLayer):
    """The state of one converted layer in a cache whose other layers may keep keys.

    Its mask covers all tokens so far, as for layers that keep keys: one mask serves both kinds, whichever comes first.
    `absorbed` says which tokens so far are no padding, see `masks.absorbed`; None while nothing was masked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.absorbed: Tensor | None = None
        self.waiting = 0
        # Whether a converted module is at work: to any other one a state would look like a cache of no past tokens.
        self.expected = False

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(tokens so far and new, 0)."""
        new, before = super().get_mask_sizes(query_length)
        return before + new, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count new tokens k (B, H, L, D), v (B, H, L, E) and return them alone; they wait for `absorb`."""
        if not self.expected:
            raise ValueError(
                f"the cache holds the state of a converted layer after {self.length} tokens, and a layer that is not "
                "converted goes on with it: states have no keys for it. Begin with an empty cache"
            )
        self.waiting += key_states.shape[-2]
        return super().update(key_states, value_states)

    def step(self, mechanism: Mechanism, module: nn.Module, call: AttentionCall, where: str) -> Tensor:
        """The state goes on over the tokens that wait: (B, Hq, L, E)."""
        length, past = call.q.shape[2], self.length - self.waiting
        if call.k.shape[2] != self.waiting or length != self.waiting:
            raise ValueError(
                f"{where} was given {self.waiting} new tokens and attends with {length} queries to {call.k.shape[2]} "
                "keys: it has keys that are in no cache. Leave it exact"
            )
        visible = visible_after(call.mask, length, past, self.absorbed, call.flag(module), where)
        if visible.segments is not None or call.starts is not None:
            raise ValueError(
                f"{where} got several sequences in one row together with a cache; call with use_cache=False"
            )
        key_mask = visible.key_mask
        if length > 1 and not visible.is_causal and past:
            raise ValueError(f"{where} got a full mask of new tokens after {past} others, which no state can continue")
        options: dict[str, Any] = {"scale": call.scale, "key_mask": key_mask}
        q, k, v = call.tensors
        full = length > 1 and not visible.is_causal
        out = self.advance(mechanism, q, k, v, **options)
        if full:  # a prompt whose tokens all see each other; what is generated after it sees all of it
            own = None if mechanism.each_query_alone else key_mask
            out = mechanism(q, k, v, query_mask=own, **options)
        self.absorbed = absorbed(self.absorbed, past, key_mask)
        self.waiting = 0
        return out.to(call.v.dtype)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, which must be real ones; see `StateLayer.crop`."""
        super().crop(tokens_to_remove)
        self.absorbed = None if self.absorbed is None else self.absorbed[:, : self.length]

    def _change(self, change: Any) -> None:
        super()._change(change)
        self.absorbed = None if self.absorbed is None else change(self.absorbed)

    def reset(self) -> None:
        """Forget everything; the next token is the first one."""
        super().reset()
        self.absorbed, self.waiting = None, 0


class CrossLayer(ConvertedLayer):
    """The state of a cross attention: the encoder's keys are absorbed once, at the first token, and not kept.

    `keys` and `values` are what a model fetches for every later token: views of length 0.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep no token: returns k (B, H, S, D) and v (B, H, S, E) for the attention function to absorb."""
        self.state, self.length, self.waiting = None, 0, 0
        found = super().update(key_states, value_states)
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        return found

    def step(self, mechanism: Mechanism, module: nn.Module, call: AttentionCall, where: str) -> Tensor:
        """Absorb k and v if this is the first call, then read the state: (B, Hq, L, E)."""
        size = self.length
        mask = visible_keys(call.mask, call.q.shape[2], size, False, where).key_mask
        q, k, v = call.tensors
        if self.waiting:
            self.state, self.absorbed = mechanism.absorb(k, v, scale=call.scale, key_mask=mask), mask
            self.waiting = 0
        elif not same_tokens(mask, self.absorbed):
            raise ValueError(f"{where} absorbed its keys under another mask than that of this call")
        return mechanism.read(q, self.state, scale=call.scale).to(call.v.dtype)


def attend_seen(mechanism: Mechanism, seen: Seen, cross: bool) -> Tensor:
    """(B, Hq, L, E): a mechanism on what a call without a cache sees, also of several sequences in one row."""
    if seen.segments is not None:
        return _packed(mechanism, seen, cross)
    # Mechanisms that choose for several queries at once must be told which are padding, and give 0 there.
    own = None
    if not cross and seen.q.shape[2] == seen.k.shape[2] and not mechanism.each_query_alone:
        own = seen.key_mask
    out: Tensor = mechanism(
        seen.q, seen.k, seen.v, is_causal=seen.is_causal, scale=seen.scale, key_mask=seen.key_mask, query_mask=own
    )
    return out


def joined(seen: Seen) -> Tensor:
    """q, k and v of each token as one row: (B, L, Hq D + H D + H E)."""
    return torch.cat([x.transpose(1, 2).flatten(2) for x in (seen.q, seen.k, seen.v)], -1)


def unjoined(tokens: Tensor, like: Seen) -> list[Tensor]:
    """q, k and v (N, L, heads, width) of such rows."""
    shapes = [(x.shape[1], x.shape[3]) for x in (like.q, like.k, like.v)]
    parts = tokens.split([heads * width for heads, width in shapes], -1)
    return [x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True)]


def _packed(mechanism: Mechanism, seen: Seen, cross: bool) -> Tensor:
    assert seen.segments is not None
    segments, tokens, real = seen.segments.expand(seen.q.shape[0], -1), joined(seen), seen.key_mask
    # Query i stays where key i is hidden, if it is another token; what is hidden then goes along as a last column.
    apart = cross and real is not None
    if apart:
        assert real is not None
        tokens, real = torch.cat([tokens, real.unsqueeze(-1).to(tokens.dtype)], -1), None

    def run(tokens: Tensor, mask: Tensor) -> Tensor:
        key_mask = mask & tokens[..., -1].bool() if apart else mask
        q, k, v = (x.transpose(1, 2) for x in unjoined(tokens[..., :-1] if apart else tokens, seen))
        call = {"is_causal": seen.is_causal, "scale": seen.scale, "key_mask": key_mask, "query_mask": mask}
        out: Tensor = mechanism(q, k, v, **call)
        return out.transpose(1, 2)

    return run_packed(run, tokens, segments, real).transpose(1, 2)


class Converted:
    """What stands behind one converted module: `before` and `after` its forward, and `__call__` where it attends.

    name:   the module's, for messages
    causal: whether its queries see no later key; cross: whether its keys come from another sequence
    """

    def __init__(self, name: str, causal: bool, cross: bool) -> None:
        self.name, self.causal, self.cross = name, causal, cross
        # The cache layer of the call that is under way, by thread: one model may serve several.
        self._current: dict[int, ConvertedLayer] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        made = Converted(self.name, self.causal, self.cross)
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current": {}}

    @property
    def where(self) -> str:
        """The layer, for messages."""
        return f"the attention layer {self.name!r}"

    # -- around the module's forward --------------------------------------------------------------------------------

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find this module's layer in the cache, if one was passed."""
        thread = _thread()
        self._current.pop(thread, None)
        mechanism = mechanism_of(module)
        if mechanism is None:
            return
        if not self.cross and any(kwargs.get(name) is not None for name in _OTHER_SEQUENCE):
            self.cross = True  # a layer whose name did not tell
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                layer = self._place(module, mechanism, value)
                if layer is not None:
                    layer.expected = True
                    self._current[thread] = layer
                return

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Every token that was counted has been taken in."""
        layer = self._current.pop(_thread(), None)
        if layer is None:
            return
        layer.expected = False
        if layer.waiting:
            raise RuntimeError(
                f"{self.where} counted {layer.waiting} tokens in its cache and never attended to them: the state would "
                "be wrong from here on. Leave this layer exact (layers=)"
            )

    def _place(self, module: nn.Module, mechanism: Mechanism, cache: Cache) -> ConvertedLayer | None:
        """Our layer in the cache: the one that is there, or a new one in place of an empty one of transformers."""
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.cross_attention_cache if self.cross else cache.self_attention_cache
        elif self.cross:
            return None
        index = getattr(module, "layer_idx", None)
        if not (_can_absorb(mechanism) if self.cross else mechanism.recurrent) or not isinstance(index, int):
            return None
        if cache.layer_class_to_replicate is not None:
            while len(cache.layers) <= index:
                cache.layers.append(cache.layer_class_to_replicate())
        if index >= len(cache.layers):
            raise ValueError(f"{self.where} has no layer of its own in the cache: it takes the keys of another one")
        layer = cache.layers[index]
        if isinstance(layer, ConvertedLayer):
            return layer
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"{self.where} is converted to {mechanism.name!r}, whose cache is a state, and got a "
                f"{type(layer).__name__}; leave cache_implementation at its default"
            )
        if layer.get_seq_length():
            raise ValueError(
                f"{self.where} is converted to {mechanism.name!r} and got a cache that holds the keys of "
                f"{layer.get_seq_length()} tokens from an exact model; begin with an empty cache"
            )
        made = CrossLayer() if self.cross else ConvertedLayer()
        made.rollback = getattr(cache, "rollback", 0)
        cache.layers[index] = made
        return made

    # -- in place of the attention function --------------------------------------------------------------------------

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """(B, L, Hq, E). Dropout of the weights is not applied: they are never formed."""
        mechanism = mechanism_of(module)
        assert mechanism is not None
        if call.paged:
            raise ValueError(
                f"{self.where} is converted to {mechanism.name!r} and was called by continuous batching "
                "(generate_batch), whose paged cache holds keys; a converted layer has a state instead. Call "
                "model.generate(...) with a padded batch, or go back with subquad.hf.revert(model)"
            )
        refused = call.refused(self.cross)
        if refused:
            raise ValueError(
                f"{self.where} is converted to {mechanism.name!r}, and {refused}: leave it exact (layers=)"
            )
        layer = self._current.get(_thread())
        if layer is not None:
            if not layer.waiting and not isinstance(layer, CrossLayer):
                raise ValueError(
                    f"{self.where} got a cache that it did not update: its keys are those of another layer. Leave "
                    "it exact"
                )
            out = layer.step(mechanism, module, call, self.where)
        else:
            out = self._without_cache(mechanism, module, call)
        return out.transpose(1, 2).contiguous()

    def _without_cache(self, mechanism: Mechanism, module: nn.Module, call: AttentionCall) -> Tensor:
        """A call that sees all of its keys at once."""
        queries, keys = call.q.shape[2], call.k.shape[2]
        seen = call.seen(module, self.where, self.cross)
        if not self.cross and queries != keys and (seen.is_causal or self.causal):
            raise ValueError(
                f"{self.where} is converted to {mechanism.name!r}, which has no recurrent form and so no cache to "
                "continue from; call generate(..., use_cache=False), or choose one of list_mechanisms(recurrent=True)"
            )
        return attend_seen(mechanism, seen, self.cross).to(call.v.dtype)


def _can_absorb(mechanism: Mechanism) -> bool:
    return mechanism.absorbs and mechanism.cross


def _thread() -> int:
    # A compiled graph cannot ask, and is not shared between threads while it is traced.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
