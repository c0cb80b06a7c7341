"""How an attention module of transformers is made to call somebody else: the one place where conversion enters a model.

An attention module looks its function up by `self.config._attn_implementation`. `LayerConfig` is what such a module
sees as its config while somebody else attends: everything is its model's config, except that name, "subquad", under
which `_dispatch` is registered, and `attend`, to which that hands the call. Nothing else of the model changes: its
config, its masks and all other layers are what they were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...mechanisms import Mechanism
from .masks import Visible, segments_of, visible_keys

__all__ = [
    "IMPLEMENTATION",
    "Attend",
    "AttentionCall",
    "LayerConfig",
    "Seen",
    "exact_config",
    "interface_method",
    "mechanism_of",
    "unhook",
]

IMPLEMENTATION = "subquad"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Arguments that change the scores or the normaliser, and what they are called in a message.
_REFUSED = {
    "softcap": "a soft cap of its scores",
    "s_aux": "learned sinks in its normaliser",
    "block_indices": "a choice of its own of which keys to see",
}


@dataclass(frozen=True)
class Seen:
    """What one call of an attention layer sees.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E); key_mask (B, S) bool; segments (B, L), see `Visible`
    """

    q: Tensor
    k: Tensor
    v: Tensor
    key_mask: Tensor | None
    is_causal: bool
    scale: float
    segments: Tensor | None = None


class Attend(Protocol):
    """Who attends for a module."""

    def __call__(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """(B, L, Hq, E), as transformers' attention functions return it."""


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of an attention function: q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E), a mask and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        """What q.k is multiplied by."""
        scaling = self.options.get("scaling")
        return float(scaling) if scaling is not None else float(self.q.shape[-1] ** -0.5)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v in one dtype: under autocast rotary positions leave q and k in float32 beside values in half."""
        given = (self.q, self.k, self.v)
        if len({x.dtype for x in given}) == 1:
            return given
        dtype = torch.promote_types(torch.promote_types(self.q.dtype, self.k.dtype), self.v.dtype)
        return self.q.to(dtype), self.k.to(dtype), self.v.to(dtype)

    def exact(self, module: nn.Module) -> Tensor:
        """What the module's own attention function makes of it."""
        function, options = _exact_function(module), dict(self.options)
        out: Tensor = function(module, self.q, self.k, self.v, self.mask, **options)[0]
        return out

    def flag(self, module: nn.Module) -> bool:
        """Whether the module's own function is causal without a mask: the eager ones only ever add their mask."""
        name = exact_config(module)._attn_implementation
        if name is None or name.startswith("eager"):
            return False
        given = self.options.get("is_causal")
        return bool(getattr(module, "is_causal", True) if given is None else given)

    def refused(self, cross: bool = False) -> str:
        """What this call asks for that no feature map expresses, or ""."""
        for argument, what in _REFUSED.items():
            if self.options.get(argument) is not None:
                return f"it has {what} ({argument}=)"
        bias = self.options.get("position_bias")
        # T5 hands a bias of zeros to its cross attention.
        if bias is not None and not (cross and not bool(bias.any())):
            return "it adds a learned bias of the relative position to every score (position_bias=)"
        return ""

    @property
    def paged(self) -> bool:
        """Whether continuous batching calls: its cache comes as an option and is no `Cache`."""
        return any(self.options.get(name) is not None for name in ("cache", "block_table"))

    @property
    def starts(self) -> Tensor | None:
        """Where the sequences of one row begin and end, (N + 1,), as the caller says; None for a single one."""
        given = self.options.get("cu_seq_lens_q")
        return given if isinstance(given, Tensor) and given.numel() > 2 else None

    def visible(self, module: nn.Module, where: str, cross: bool = False) -> Visible:
        """Which keys are seen, as the module's own function would; ValueError where that cannot be expressed."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        if self.mask is None and self.starts is not None and queries == keys and self.q.shape[0] == 1:
            return Visible(self.flag(module) and queries > 1, None, segments_of(self.starts, queries))
        return visible_keys(self.mask, queries, keys, self.flag(module), where, own=not cross)

    def seen(self, module: nn.Module, where: str, cross: bool = False) -> Seen:
        """All of it in the terms of a mechanism; cross: whether the keys come from another sequence."""
        visible = self.visible(module, where, cross)
        return Seen(*self.tensors, visible.key_mask, visible.is_causal, self.scale, visible.segments)


class LayerConfig:
    """The config that one attention module sees; `exact` is that of its model, `attend` who attends."""

    _attn_implementation = IMPLEMENTATION

    def __init__(self, config: Any, attend: Attend) -> None:
        self.__dict__.update(exact=config, attend=attend)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("exact", "attend"):  # being copied or unpickled
            raise AttributeError(name)
        return getattr(self.exact, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.exact, name, value)


def exact_config(module: nn.Module) -> Any:
    """The config of the model, whoever attends for this module."""
    config: Any = module.config
    return config.exact if isinstance(config, LayerConfig) else config


def _dispatch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' attention function "subquad"."""
    config: Any = module.config
    if query.shape[0] == 1 < key.shape[0]:  # learned queries, the same for every row
        query = query.expand(key.shape[0], -1, -1, -1)
    return config.attend(module, AttentionCall(query, key, value, attention_mask, options)), None


AttentionInterface.register(IMPLEMENTATION, _dispatch)


@functools.cache
def interface_method(kind: type) -> Callable[..., Any] | None:
    """The method of this class that looks an attention function up in transformers' registry, None where none does."""
    for base in kind.__mro__:
        # The base class of all models handles the registry too, without attending.
        if base in (nn.Module, object) or base.__module__ == "transformers.modeling_utils":
            continue
        for member in vars(base).values():
            if inspect.isfunction(member):
                method: Callable[..., Any] = inspect.unwrap(member)
                code = getattr(method, "__code__", None)
                if code is not None and _INTERFACE in code.co_names:
                    return method
    return None


def _exact_function(module: nn.Module) -> Callable[..., Any]:
    """The function that the module would call: of the registry that its file uses, or the eager one of its file."""
    kind: Any = type(module)
    method: Any = interface_method(kind)
    known = method.__globals__
    eager = next((known[n] for n in method.__code__.co_names if "eager" in n and callable(known.get(n))), None)
    name = exact_config(module)._attn_implementation
    if eager is None and (name is None or name == "eager"):
        raise ValueError(f"{type(module).__name__} has no eager attention function that could be found")
    function: Callable[..., Any] = known[_INTERFACE].get_interface(name, eager)
    return function


def mechanism_of(module: nn.Module) -> Mechanism | None:
    """The mechanism of a converted attention module, None for one that is exact."""
    found = module._modules.get("subquad")
    return found if isinstance(found, Mechanism) else None


def unhook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Remove a forward pre-hook by what it is: a copy of a model has its hooks, but not the handles of the original."""
    for key, one in list(module._forward_pre_hooks.items()):
        if one == hook:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
