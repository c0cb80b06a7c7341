"""Putting mechanisms into the attention modules of a model and taking them out again, and the note about it that a
saved config has.

    config.subquad_conversion = {"version": 1, "layers": {module name: mechanism config}, "facts": {module name: ...}}

The names are those in the base model (without "bert." or "model." in front), so that the note also fits a model of
the same family with another head. The note is made from what the model holds when it is saved, and is in its config
only meanwhile: several models may hold one config. The configs of its parts get notes too, since transformers loads a
part (a tower, the text model) from the config of that part alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...mechanisms import Mechanism
from .attending import Converted
from .interface import LayerConfig, exact_config, mechanism_of, unhook
from .layers import AttentionLayer, find_layers
from .torch_modules import convert_torch, revert_torch

__all__ = [
    "NOTE",
    "VERSION",
    "attach",
    "base_of",
    "detach",
    "forget",
    "inner_configs",
    "noted",
    "outermost",
    "saved_config",
]

NOTE, VERSION = "subquad_conversion", 1
# Modules that FSDP, activation checkpointing and torch.compile put in between; a loaded model does not have them.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


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
    # The layer too: not every call goes through a model that is seen from here, as where a list of layers is converted.
    for part in (layer.module, *_models_around(model, layer.module)):
        if refuse_weights not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(refuse_weights, with_kwargs=True)


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
    for part in (layer.module, *_models_around(model, layer.module)):
        if not _attends_converted(part):
            unhook(part, refuse_weights)


def _models_around(model: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The transformers models in `model` that contain `module`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in parts if any(inner is module for inner in part.modules())]


def _attends_converted(model: nn.Module) -> bool:
    return any(isinstance(getattr(module, "config", None), LayerConfig) for module in model.modules())


def refuse_weights(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before each call of a converted model: weights that are never formed are not promised."""
    config: Any = getattr(model, "config", None)
    asked = kwargs.get("output_attentions") or getattr(config, "output_attentions", False)
    if asked and _attends_converted(model):  # its layers may have been reverted by themselves
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


def saved_config(mechanism: Mechanism) -> dict[str, Any]:
    """The mechanism's config, or why it has none: a callable inside cannot be written down."""
    try:
        return mechanism.config()
    except TypeError as error:
        return {"mechanism": mechanism.name, "unsaveable": str(error)}


def inner_configs(config: Any) -> list[Any]:
    """The configs that are attributes of this one, which are saved with it."""
    return [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]


def _all_configs(config: Any) -> list[Any]:
    """A config, those inside it, and those inside these."""
    return [config, *(one for value in inner_configs(config) for one in _all_configs(value))]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _parts(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """By name, the transformers model that each config saved with `model` describes.

    Names in a note are those in that model. A config that two separate parts hold gets no note: the note of the whole
    has their layers.
    """
    saved = {id(config) for config in _all_configs(model.config)}
    tops: dict[int, list[tuple[str, PreTrainedModel]]] = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and id(part.config) in saved:
            known = tops.setdefault(id(part.config), [])
            if not any(part is inner for _, top in known for inner in top.modules()):
                known.append((_plain(name), part))
    return dict(known[0] for known in tops.values() if len(known) == 1)


def _notes(model: PreTrainedModel) -> list[tuple[Any, dict[str, Any]]]:
    """(config, note) of `model` and of its parts that have converted layers."""
    converted, facts = {}, {}
    for layer in find_layers(model):
        mechanism, name = mechanism_of(layer.module), _plain(layer.name)
        if mechanism is not None:
            converted[name] = saved_config(mechanism)
            attend: Any = getattr(getattr(layer.module, "config", None), "attend", None)
            if isinstance(attend, Converted):
                facts[name] = {"causal": attend.causal, "cross": attend.cross}
    notes = []
    for name, part in _parts(model).items():
        start = f"{name}." if name else ""
        own = [layer for layer in converted if layer.startswith(start)]
        prefix = start + base_of(part)[1]
        cut = prefix if all(layer.startswith(prefix) for layer in own) else start
        note = {
            "version": VERSION,
            "layers": {layer.removeprefix(cut): converted[layer] for layer in own},
            "facts": {layer.removeprefix(cut): facts[layer] for layer in own if layer in facts},
        }
        if own:
            notes.append((part.config, note))
    return notes


@contextmanager
def noted(model: PreTrainedModel) -> Iterator[None]:
    """The notes of what `model` holds, and no other ones, are in its configs."""
    before = [(config, config.__dict__.pop(NOTE, None)) for config in _all_configs(model.config)]
    try:
        for config, note in _notes(model):
            setattr(config, NOTE, note)
        yield
    finally:
        for config, note in before:
            config.__dict__.pop(NOTE, None)
            if note is not None:
                setattr(config, NOTE, note)


def forget(model: nn.Module) -> None:
    """Remove the notes that configs in `model` were read with."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            for config in _all_configs(part.config):
                config.__dict__.pop(NOTE, None)
