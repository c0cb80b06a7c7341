"""Converted models come back converted: `load`, and what plain `from_pretrained` needs to do the same.

transformers drops the attention implementation when it saves a model and chooses SDPA when it loads one. Importing this
module makes `save_pretrained` put notes about the conversion into config.json (attachment.py), makes every transformers
model that is built from a config with such a note put its mechanisms in before the weights arrive, and makes
`from_pretrained` raise where that was not possible: a model saved with linear attention never comes back as an exact
one.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...files import read_object
from ...mechanisms import Mechanism, create
from ..models.loading import settle
from .attachment import NOTE, VERSION, attach, base_of, forget, inner_configs, noted
from .interface import mechanism_of
from .layers import find_layers

__all__ = ["is_converted", "load", "read_config", "rebuild", "saved_class"]


def rebuild(config: dict[str, Any]) -> Mechanism:
    """The mechanism of one layer from the note: in float32 and on the CPU, whatever the defaults of the moment are."""
    if "unsaveable" in config:
        raise ValueError(
            f"a layer was converted to a mechanism that cannot be written down ({config['unsaveable']}); convert the "
            "exact model again in code"
        )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return create(str(config.get("mechanism")), **{k: v for k, v in config.items() if k != "mechanism"})
    finally:
        torch.set_default_dtype(before)


def _note(model: Any) -> dict[str, Any] | None:
    note = getattr(model.config, "__dict__", {}).get(NOTE)
    if note is None:
        return None
    if not isinstance(note, dict) or note.get("version") != VERSION or not isinstance(note.get("layers"), dict):
        raise ValueError(
            f"the config's {NOTE} is not one that this version of subquad can read (version {VERSION} expected, got "
            f"{note.get('version') if isinstance(note, dict) else note!r}); use the subquad that saved the model"
        )
    layers, facts = note["layers"], note.get("facts", {})
    by_layer = isinstance(facts, dict) and all(isinstance(x, dict) for x in (*layers.values(), *facts.values()))
    if not layers or not by_layer:
        raise ValueError(f"the config's {NOTE} is damaged: layers and facts must be objects by layer, got {note!r}")
    return note


def _restore(model: PreTrainedModel) -> None:
    """Put the mechanisms of the config's note into `model`, if it holds all of the layers that the note names."""
    note = _note(model)
    if note is None:
        return
    _, prefix = base_of(model)
    layers = {layer.name: layer for layer in find_layers(model)}
    wanted = {prefix + name if prefix + name in layers else name: config for name, config in note["layers"].items()}
    if not wanted.keys() <= layers.keys():
        return  # a part of the whole model, or a stranger; from_pretrained tells them apart
    facts = note.get("facts", {})
    for name, config in wanted.items():
        layer = layers[name]
        if mechanism_of(layer.module) is None:
            known = facts.get(name, facts.get(name.removeprefix(prefix), {}))
            layer = replace(
                layer, is_causal=known.get("causal", layer.is_causal), cross=known.get("cross", layer.cross)
            )
            attach(model, layer, rebuild(config))


def _absent(model: PreTrainedModel, note: dict[str, Any]) -> str | None:
    """The first layer of the note that `model` does not have or that is exact in it; None where it has all of them."""
    _, prefix = base_of(model)
    layers = {layer.name: layer.module for layer in find_layers(model)}
    for name in note["layers"]:
        module = layers.get(prefix + name, layers.get(name))
        if module is None or mechanism_of(module) is None:
            return str(name)
    return None


def _outermost_with(note: dict[str, Any], config: Any) -> int:
    """How many configs have this note, those inside one that has it left out: they are about the same layers."""
    if vars(config).get(NOTE) == note:
        return 1
    return sum(_outermost_with(note, inner) for inner in inner_configs(config))


def _refuse_exact(model: PreTrainedModel, where: object) -> bool:
    """After loading: every layer of every note is there and has its mechanism, or an error. Whether there are notes."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and _note(part) is not None]
    checked: list[dict[str, Any]] = []
    for part in parts:
        note = _note(part)
        assert note is not None
        if note in checked:  # the same config, or a copy that a part of the model was given
            continue
        checked.append(note)
        # A model of another class may hold the one that the note is about: exactly one then. Two towers that are alike
        # have a note each.
        holders = [one for one in parts if _note(one) == note and _absent(one, note) is None]
        inner = {id(module) for one in holders for module in one.modules() if module is not one}
        count = sum(id(one) not in inner for one in holders)
        if count != max(1, _outermost_with(note, model.config)):
            name = _absent(part, note) or next(iter(note["layers"]), "")
            has = f"{type(model).__name__} has {count} parts with a" if count else f"{type(part).__name__} has no"
            raise ValueError(
                f"{where} was saved with converted attention, and {has} layer {name!r} to put it into; load it with "
                f"the class that saved it, {model.config.architectures}, or subquad.hf.load"
            )
    return bool(parts)


def _levels(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A config.json and the configs inside it."""
    yield config
    for name, value in config.items():
        if name != NOTE and isinstance(value, dict):
            yield from _levels(value)


def _names(config: dict[str, Any]) -> list[str]:
    note = config.get(NOTE)
    return list(note.get("layers", {})) if isinstance(note, dict) else []


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _refuse_unnoted(model: PreTrainedModel, where: Any, options: dict[str, Any], unexpected: Any) -> None:
    """After loading without a note: refuse if layers of the model were converted all the same.

    The note may be that of a whole whose parts have none (older versions of subquad wrote no others), or in the saved
    config and not in one that was passed; or there may be weights of mechanisms and no note at all.
    """
    kind, name = model.config.model_type, type(model).__name__
    layers, prefix = [layer.name for layer in find_layers(model)], base_of(model)[1]
    for level in _levels(_saved_config(where, options)):
        inner = list(_levels(level))[1:]
        if level.get("model_type") == kind:
            names, how = _names(level), "leave config= out"
        elif any(one.get("model_type") == kind for one in inner):
            known = [one for part in inner for one in _names(part)]
            names = [one for one in _names(level) if not any(_ends(one, other) for other in known)]
            how = f"load the whole with subquad.hf.load and save it again, which writes a note for {name} too"
        else:
            continue
        lost = [layer for layer in layers if any(_ends(one, layer.removeprefix(prefix)) for one in names)]
        if lost:
            break
    else:
        lost = [layer for layer in layers if any(key.startswith(f"{layer}.subquad.") for key in unexpected)]
        how = "save the converted model with its save_pretrained, which writes the note"
    if lost:
        raise ValueError(
            f"{where} was saved with converted attention, and {name} was given a config without the note that says "
            f"how ({NOTE!r}), so that its layer {lost[0]!r} would be exact; {how}"
        )


def _saved_config(where: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The config.json that was just read, {} where there is none."""
    known = {name: options[name] for name in ("cache_dir", "revision", "subfolder") if options.get(name) is not None}
    try:
        config, _ = PreTrainedConfig.get_config_dict(where, local_files_only=True, **known)
    except (OSError, ValueError, TypeError):
        return {}
    return dict(config)


def _refuse_missing(model: PreTrainedModel, info: dict[str, Any], where: object) -> None:
    lost = sorted(key for key in info["missing_keys"] if ".subquad." in f".{key}")
    odd = sorted(str(entry[0]) for entry in info["mismatched_keys"] if ".subquad." in f".{entry[0]}")
    layers = [layer.name for layer in find_layers(model)]  # of a part of the whole, the others' weights are no matter
    unused = sorted(key for key in info["unexpected_keys"] if any(key.startswith(f"{x}.subquad.") for x in layers))
    if unused:
        raise ValueError(
            f"{where} holds weights of mechanisms that its config does not name, {unused[:4]}: the note {NOTE!r} in "
            "config.json is not the one that it was saved with"
        )
    if lost or odd:
        raise ValueError(
            f"{where} is a converted model, but its weights lack {(lost or odd)[:4]} or hold them in another shape: "
            "projections and calibration must be those it was saved with"
        )


def _settle(model: nn.Module) -> None:
    """What transformers leaves undone in mechanisms: tables that are not saved, and what Python knows of the buffers.

    Such tables follow from the options; loading leaves them uninitialised.
    """
    for module in model.modules():
        mechanism = mechanism_of(module)
        if mechanism is None:
            continue
        fresh, saved = dict(rebuild(mechanism.config()).named_buffers()), mechanism.state_dict().keys()
        for name, buffer in mechanism.named_buffers():
            if name not in saved:
                buffer.copy_(fresh[name])
        settle(mechanism)


def _install() -> None:
    """Wrap the methods of transformers through which every model is built, loaded and saved."""
    every: Any = PreTrainedModel
    post_init, save_pretrained = every.post_init, every.save_pretrained
    from_pretrained = every.from_pretrained.__func__
    if hasattr(post_init, "subquad"):
        return  # this module was imported twice, as a reload does

    @functools.wraps(post_init)
    def post_init_converted(self: PreTrainedModel) -> None:
        post_init(self)
        _restore(self)

    @functools.wraps(from_pretrained)
    def from_pretrained_converted(cls: Any, path: Any, *inputs: Any, **options: Any) -> Any:
        wants_info = options.pop("output_loading_info", False)
        model, info = from_pretrained(cls, path, *inputs, output_loading_info=True, **options)
        if isinstance(model, PreTrainedModel):
            if _refuse_exact(model, path):
                _refuse_missing(model, info, path)
                _settle(model)
                forget(model)
            else:
                _refuse_unnoted(model, path, options, info["unexpected_keys"])
        return (model, info) if wants_info else model

    @functools.wraps(save_pretrained)
    def save_pretrained_noted(self: PreTrainedModel, *inputs: Any, **options: Any) -> Any:
        with noted(self):
            return save_pretrained(self, *inputs, **options)

    post_init_converted.subquad = True  # type: ignore[attr-defined]
    every.post_init = post_init_converted
    every.from_pretrained = classmethod(from_pretrained_converted)
    every.save_pretrained = save_pretrained_noted


_install()


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json of a folder that `save_pretrained` wrote, as plain data; says what is wrong where it is not."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json; expected a folder written by save_pretrained")
    return read_object(path)


def is_converted(folder: str | os.PathLike[str]) -> bool:
    """Whether a converted model was saved to this folder, which has a config.json."""
    return any(NOTE in level for level in _levels(read_config(folder)))


def saved_class(folder: str | os.PathLike[str]) -> Any:
    """The model class that wrote a folder, from transformers or from here."""
    config = read_config(folder)
    names = config.get("architectures") or []
    ours = config.get("model_type") == "subquad"
    source = importlib.import_module("subquad.hf") if ours else transformers
    kind = getattr(source, names[0], None) if names else None
    if kind is None:
        raise ValueError(
            f"{folder} names the architecture {names}, which this transformers {transformers.__version__} does not "
            "have; load it with its own class's from_pretrained after `import subquad.hf`"
        )
    return kind


def load(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The converted model that `save_pretrained` wrote to `folder`, in the class that wrote it, in any process.

    options: those of `from_pretrained` (dtype, device_map, ...)

    A folder that a converted SentenceTransformer was saved to gives one again, as
    SentenceTransformer(folder, trust_remote_code=True) does: the code that it is asked to trust is this library's.

    Plain `AutoModel...from_pretrained(folder)` gives the same after `import subquad.hf`. Weights are safetensors and
    the mechanisms are plain options in config.json: nothing is unpickled.
    """
    converted = is_converted(folder)
    if converted and (Path(folder) / "modules.json").is_file():
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(folder), trust_remote_code=True, **options)
    if not converted and read_config(folder).get("model_type") != "subquad":
        raise ValueError(
            f"{folder} was not saved from a converted model (its config.json has no {NOTE!r}); load it with "
            "transformers' AutoModel and call subquad.hf.convert"
        )
    loaded: PreTrainedModel = saved_class(folder).from_pretrained(folder, **{"use_safetensors": True, **options})
    return loaded
