"""Putting mechanisms into the attention modules of a model and taking them out again, and the note about it that the
model's config keeps.

    config.subquad_conversion = {"version": 1, "layers": {module name: mechanism config}}

The names are those in the base model (without "bert." or "model." in front), so that the note also fits a model of
the same family with another head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...mechanisms import Mechanism
from .interface import IMPLEMENTATION, gate, unhook
from .layers import AttentionLayer
from .torch_modules import convert_torch, revert_torch

__all__ = ["NOTE", "VERSION", "attach", "base_of", "detach", "implementations", "record_conversion"]

NOTE, VERSION = "subquad_conversion", 1
# What a config said before, kept beside it and not in it, since a config writes everything it has to its file.
_BEFORE = "_subquad_attn_implementations"


def attach(model: nn.Module, layer: AttentionLayer, mechanism: Mechanism) -> None:
    """Give the layer's module its mechanism, as the child `subquad`."""
    if isinstance(layer.module, nn.MultiheadAttention):
        convert_torch(model, layer.module, mechanism)
        return
    layer.module.add_module("subquad", mechanism)
    object.__setattr__(layer.module, "subquad_cross", layer.cross)
    layer.module.register_forward_pre_hook(gate, with_kwargs=True)


def detach(model: nn.Module, layer: AttentionLayer) -> None:
    """Undo `attach`."""
    if isinstance(layer.module, nn.MultiheadAttention):
        revert_torch(model, layer.module)
        return
    del layer.module._modules["subquad"]
    layer.module.__dict__.pop("subquad_cross", None)
    unhook(layer.module, gate)


def implementations(model: nn.Module, *, converted: bool) -> None:
    """Let every config of `model` name our attention function, or again what it named before."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "_attn_implementation"):
            continue
        if converted and config._attn_implementation != IMPLEMENTATION:
            object.__setattr__(module, _BEFORE, config._attn_implementation)
            config._attn_implementation_internal = IMPLEMENTATION
        elif not converted and config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation_internal = module.__dict__.pop(_BEFORE, None) or "sdpa"


def base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """The base model inside `model` and the prefix of its names; the model itself and "" where there is none."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    return (base, f"{prefix}.") if isinstance(base, nn.Module) else (model, "")


def record_conversion(model: nn.Module, layers: Mapping[str, Any] | None) -> None:
    """Write the note into the model's config, or remove it (None)."""
    if not isinstance(model, PreTrainedModel):
        return
    if layers is None:
        model.config.__dict__.pop(NOTE, None)
        return
    _, prefix = base_of(model)
    if all(name.startswith(prefix) for name in layers):
        layers = {name[len(prefix) :]: config for name, config in layers.items()}
    setattr(model.config, NOTE, {"version": VERSION, "layers": dict(layers)})
