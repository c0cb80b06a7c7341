"""Putting mechanisms into the attention modules of a model and taking them out again, and the note about it that the
model's config keeps.

    config.subquad_conversion = {"version": 1, "layers": {module name: mechanism config}, "facts": {module name: ...}}

The names are those in the base model (without "bert." or "model." in front), so that the note also fits a model of
the same family with another head. Every transformers model inside a wrapper has a note of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...mechanisms import Mechanism
from .attending import Converted
from .interface import LayerConfig, exact_config, unhook
from .layers import AttentionLayer
from .torch_modules import convert_torch, revert_torch

__all__ = ["NOTE", "VERSION", "attach", "base_of", "detach", "outermost", "record_conversion"]

NOTE, VERSION = "subquad_conversion", 1


def attach(model: nn.Module, layer: AttentionLayer, mechanism: Mechanism) -> None:
    """Give the layer's module its mechanism, as the child `subquad`.

    An exact one is only kept there: the module goes on calling its own attention function.
    """
    if isinstance(layer.module, nn.MultiheadAttention):
        convert_torch(model, layer.module, mechanism)
        return
    layer.module.add_module("subquad", mechanism)
    if mechanism.exact:
        return
    converted = Converted(layer.name, layer.is_causal, layer.cross)
    layer.module.config = LayerConfig(layer.module.config, converted)  # type: ignore[assignment]
    layer.module.register_forward_pre_hook(converted.before, with_kwargs=True)
    layer.module.register_forward_hook(converted.after)
    for whole in outermost(model):
        if refuse_weights not in whole._forward_pre_hooks.values():
            whole.register_forward_pre_hook(refuse_weights, with_kwargs=True)


def detach(model: nn.Module, layer: AttentionLayer) -> None:
    """Undo `attach`."""
    if isinstance(layer.module, nn.MultiheadAttention):
        revert_torch(model, layer.module)
        return
    del layer.module._modules["subquad"]
    config: Any = layer.module.config
    if not isinstance(config, LayerConfig):
        return
    converted: Any = config.attend
    layer.module.config = exact_config(layer.module)
    unhook(layer.module, converted.before)
    for key, hook in list(layer.module._forward_hooks.items()):
        if hook == converted.after:
            del layer.module._forward_hooks[key]
    for whole in outermost(model):
        if not any(isinstance(getattr(module, "config", None), LayerConfig) for module in whole.modules()):
            unhook(whole, refuse_weights)


def refuse_weights(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each call of a converted model: weights that are never formed are not promised."""
    config: Any = getattr(model, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError(
            f"{type(model).__name__} has converted attention layers, and output_attentions=True was asked for: "
            "sub-quadratic attention never forms the (L, S) weights. Call the model without it"
        )


def outermost(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The transformers models in `model` that are not part of another one; the model itself where it is one."""
    if isinstance(model, PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from outermost(child)


def base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """The base model inside `model` and the prefix of its names; the model itself and "" where there is none."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else None
    return (base, f"{prefix}.") if isinstance(base, nn.Module) else (model, "")


def record_conversion(model: nn.Module, layers: Mapping[str, Any] | None, facts: Mapping[str, Any]) -> None:
    """Write the note into the config of every transformers model in `model`, or remove it (None).

    layers, facts: by the names that modules have in `model`
    """
    names = {id(module): name for name, module in model.named_modules()}
    for whole in outermost(model):
        whole.config.__dict__.pop(NOTE, None)
        if layers is None:
            continue
        start = f"{names[id(whole)]}." if names[id(whole)] else ""
        own = {name.removeprefix(start): config for name, config in layers.items() if name.startswith(start)}
        if not own:
            continue
        _, prefix = base_of(whole)
        cut = prefix if all(name.startswith(prefix) for name in own) else ""
        note = {
            "version": VERSION,
            "layers": {name.removeprefix(cut): config for name, config in own.items()},
            "facts": {name.removeprefix(cut): facts[start + name] for name in own if start + name in facts},
        }
        setattr(whole.config, NOTE, note)
