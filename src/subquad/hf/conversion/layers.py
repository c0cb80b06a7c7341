"""Which attention layers a model has, and what each of them looks like, whatever family it belongs to.

A layer of transformers is recognised by what its code does, not by its name: it hands q, k and v to transformers'
attention interface. `torch.nn.MultiheadAttention` is recognised by its class. The layers are numbered in the order of
`named_modules()`: an encoder-decoder's encoder first, then self and cross attention of each decoder block in turn. A
layer that is called several times (ALBERT shares one) is one layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from .interface import interface_method, mechanism_of

__all__ = ["AttentionLayer", "find_layers", "known_layers"]

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_DIM = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_WIDTH = ("embed_dim", "hidden_size", "all_head_size", "dim", "d_model")
_CROSS = (
    "crossattention",
    "crossattn",
    "cross_attn",
    "cross_attention",
    "encoder_attn",
    "encdecattention",
    "multihead_attn",
)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a model.

    index, name:  its number, and its name in `model.named_modules()`
    module:       the module itself
    head_dim, heads, kv_heads: D and the numbers of query and key heads; None where the module does not say
    is_causal:    a decoder's self attention
    cross:        its keys come from another sequence
    obstacle:     why it cannot be approximated ("" = it can): its weights depend on more than one query and one key

    What attributes say is a first guess; `convert` and `capture` look at what a layer does (checking.py).
    """

    index: int
    name: str
    module: nn.Module = field(repr=False, compare=False)
    head_dim: int | None
    heads: int | None
    kv_heads: int | None
    is_causal: bool
    cross: bool
    obstacle: str = ""


def _first(module: nn.Module, names: tuple[str, ...], *, config: bool = True) -> int | None:
    """The first of these attributes that is an integer, on the module or else in its config."""
    places = [module, getattr(module, "config", None)] if config else [module]
    for place in places:
        for name in names:
            value = getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _geometry(module: nn.Module) -> tuple[int | None, int | None, int | None]:
    """(head_dim, heads, kv_heads) as the module's own attributes say."""
    heads = _first(module, _HEADS)
    head_dim = _first(module, _HEAD_DIM, config=False)
    if head_dim is None and heads is not None:
        width = _first(module, _WIDTH)
        head_dim = None if width is None or width % heads else width // heads
    kv_heads = _first(module, _KV_HEADS, config=False)
    if kv_heads is None and heads is not None:
        groups = _first(module, ("num_key_value_groups",), config=False)
        kv_heads = heads // groups if groups else heads
    return head_dim, heads, kv_heads


def _is_cross(name: str, module: nn.Module) -> bool:
    known = getattr(module, "is_cross_attention", None)
    if isinstance(known, bool):
        return known
    lowered = name.lower()
    return "crossattention" in type(module).__name__.lower() or any(part in lowered for part in _CROSS)


def _kind(module: nn.Module) -> str | None:
    """What the module or its config calls this layer ("full_attention", "sliding_attention", ...); None: nothing."""
    kinds, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    listed = kinds[index] if kinds and isinstance(index, int) else None
    found = getattr(module, "layer_type", None) or listed
    return found if isinstance(found, str) else None


def _sliding_window(module: nn.Module) -> int | None:
    """The width of this layer's sliding window, None for one that sees everything."""
    window = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window") and _kind(module) in (None, "sliding_attention"):
        window = getattr(getattr(module, "config", None), "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def _obstacle(module: nn.Module, cross: bool) -> str:
    """What this layer adds to its scores, or hides, that no product of one query's and one key's features can give."""
    if window := _sliding_window(module):
        return f"its sliding window of {window} tokens makes it linear in the length already"
    if _kind(module) == "chunked_attention" or getattr(module, "is_chunked", False) is True:
        return "its chunked attention is linear in the length already"
    if hasattr(module, "has_relative_attention_bias") and not cross:
        return "it adds a learned bias of the relative position to every score, which no feature map expresses"
    if getattr(module, "sinks", None) is not None:
        return "it has a learned sink in its normaliser"
    if getattr(getattr(module, "config", None), "num_kv_shared_layers", 0):
        # With a cache, a converted layer hands on the keys of the call alone.
        if getattr(module, "is_kv_shared_layer", False):
            return "it takes the keys and values of an earlier layer"
        if getattr(module, "store_full_length_kv", False):
            return "later layers take its keys and values"
    softcap = getattr(module, "attn_logit_softcapping", None)
    if softcap:
        return f"it caps its scores softly at {softcap}"
    return ""


def _torch_obstacle(module: nn.MultiheadAttention) -> str:
    if type(module) is not nn.MultiheadAttention and mechanism_of(module) is None:
        return (
            f"its class {type(module).__name__} may compute more than torch.nn.MultiheadAttention, whose place is taken"
        )
    if module.bias_k is not None or module.add_zero_attn:
        return "it was made with add_bias_kv or add_zero_attn, which append keys of no position"
    return ""


def find_layers(model: nn.Module) -> list[AttentionLayer]:
    """Every attention layer of `model` that is known, in the order of `named_modules()`; [] where there is none.

    >>> import torch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, batch_first=True), 2)
    >>> [(layer.index, layer.name, layer.heads, layer.head_dim) for layer in find_layers(model)]
    [(0, 'layers.0.self_attn', 4, 8), (1, 'layers.1.self_attn', 4, 8)]
    """
    found: list[AttentionLayer] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            # Whether it is causal is an argument of each call.
            shape = (module.head_dim, module.num_heads, module.num_heads)
            cross = _is_cross(name, module)
            found.append(AttentionLayer(len(found), name, module, *shape, False, cross, _torch_obstacle(module)))
        elif interface_method(module.__class__) is not None and hasattr(module, "config"):
            cross = _is_cross(name, module)
            causal = bool(getattr(module, "is_causal", False)) and not cross
            shape = _geometry(module)
            found.append(AttentionLayer(len(found), name, module, *shape, causal, cross, _obstacle(module, cross)))
    return found


def known_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers of `model`, or an error that says what is looked for."""
    found = find_layers(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that is known: neither one that calls transformers' "
            "attention interface nor a torch.nn.MultiheadAttention"
        )
    return found
