"""Inputs on which a model is tried out: the caller's, or some made from its config, and how they are run.

forward        the batch as it is
left, right    the same tokens with padding on one side
cached         a prompt with padding on the left, one token, several, one again, through the model's cache
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .attachment import outermost
from .capturing import evaluating, run
from .placement import device_of

__all__ = ["TOKENS", "Trial", "make_trials", "run_trial"]

# Tokens of a text on which a model is tried out, and those of a decoder beside an encoder.
_ROWS, _TOKENS, _TARGETS = 2, 11, 9
_TEXT = {
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "decoder_input_ids",
    "decoder_attention_mask",
}  # fmt: skip
# After a name: the output has one row per token.
TOKENS = " of tokens"


@dataclass(frozen=True)
class Trial:
    """One way of running a model: its inputs, in how many tokens at a time where it goes through the cache ((0,): as
    `generate` does), and masks (B, L) of the tokens that it made of its inputs."""

    name: str
    inputs: Any
    steps: tuple[int, ...] = ()
    masks: tuple[Tensor, ...] = ()


def _core(model: nn.Module) -> Any:
    return next(outermost(model), None)


def _parameters(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _ordinary_tokens(config: Any) -> Tensor:
    """Token ids that mean nothing special: neither padding, beginnings, ends, nor places for images."""
    size = int(config.get_text_config().vocab_size)
    special: set[int] = set()
    for one in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in vars(one).items():
            if name.endswith(("_token_id", "_token_index", "_token_ids")):
                special |= {x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int)}
    return torch.tensor([x for x in range(min(size, 4096)) if x not in special] or [0])


def _tokens(config: Any, rows: int, length: int, generator: torch.Generator) -> Tensor:
    known = _ordinary_tokens(config)
    return known[torch.randint(0, len(known), (rows, length), generator=generator)]


def _sizes(config: Any, names: Sequence[str], default: int) -> list[int]:
    """The first of these numbers that the config or one of its parts has, as (height, width)."""
    parts = [
        config,
        *(getattr(config, n, None) for n in ("vision_config", "audio_config", "encoder", "backbone_config")),
    ]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, int):
                return [value, value]
            if isinstance(value, (list, tuple)) and value and all(isinstance(x, int) for x in value):
                return [*value, *value][:2]
    return [default, default]


def _made(core: Any) -> Iterator[dict[str, Tensor]]:
    """Batches that a model of this kind may take, the likeliest first."""
    config, names, generator = core.config, _parameters(core), torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in core.parameters() if p.is_floating_point()), torch.float32)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    text: dict[str, Tensor] = {}
    targets: dict[str, Tensor] = {}
    if isinstance(getattr(config.get_text_config(), "vocab_size", None), int):
        text = {"input_ids": _tokens(config, _ROWS, _TOKENS, generator)} if "input_ids" in names else {}
        if "decoder_input_ids" in names:
            targets = {"decoder_input_ids": _tokens(config, _ROWS, _TARGETS, generator)}
        text = {**text, **targets} if text else {}
    height, width = _sizes(config, ("image_size",), 32)
    channels = _sizes(config, ("num_channels", "in_channels"), 3)[0]
    other: list[dict[str, Tensor]] = []
    if "pixel_values" in names:
        other.append({"pixel_values": noise(_ROWS, channels, height, width), **targets})
    if "input_values" in names:
        other += [{"input_values": noise(_ROWS, n), **targets} for n in (2000, 16000)]
    if "input_features" in names:
        bands = _sizes(config, ("num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim"), 80)[0]
        frames = 2 * _sizes(config, ("max_source_positions",), 50)[0]
        other += [{"input_features": noise(_ROWS, *shape), **targets} for shape in ((bands, frames), (64, bands))]
    main = getattr(core, "main_input_name", "input_ids")
    if main == "input_ids" and text:
        yield text
    yield from other
    yield from ({**text, **one} for one in other if text)
    if main != "input_ids" and text:
        yield text


def _sliced(batch: Any) -> Any:
    """A text of the caller's cut to a few rows and tokens; anything else as it is."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or not set(batch) <= _TEXT:
        return batch
    if not all(isinstance(x, Tensor) and x.dim() == 2 for x in batch.values()):
        return batch
    cut = {name: x[:_ROWS, :48] for name, x in batch.items()}
    cut.pop("labels", None)
    mask = cut.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.bool().any(-1).all()):
        return batch
    return cut


def _with_padding(model: nn.Module, batch: Mapping[str, Tensor], side: str) -> dict[str, Tensor] | None:
    """The tokens again, those at one end of the last row hidden; None where the model takes no such mask.

    In their places stands the padding token, if there is one: some models (classifiers that read the last token) find
    padding by it, not by the mask.
    """
    core: Any = _core(model) or model
    names = _parameters(core)
    if "attention_mask" not in names or not set(batch) <= _TEXT or "input_ids" not in batch:
        return None
    ids = batch["input_ids"]
    if ids.dim() != 2 or ids.shape[0] < 2 or ids.shape[1] < 6:
        return None
    mask = torch.ones_like(ids)
    mask[-1, slice(None, 3) if side == "left" else slice(-3, None)] = 0
    config = core.config.get_text_config() if hasattr(core, "config") else None
    padding = getattr(config, "pad_token_id", None)
    if isinstance(padding, int):
        ids = ids.masked_fill(mask == 0, padding)
    kept = {name: x for name, x in batch.items() if name not in ("attention_mask", "position_ids")}
    return {**kept, "input_ids": ids, "attention_mask": mask}


def make_trials(model: nn.Module, given: Sequence[Any]) -> list[Trial]:
    """How `model` is tried out: on the first batch of `given`, or on one made from its config; [] where none can be."""
    core = _core(model)
    if given:
        batch: Any = _sliced(given[0])
        if batch is not given[0] and not _runs(model, batch):
            batch = given[0]  # rows that belong together
    else:
        batch = None if core is None else next((one for one in _made(core) if _runs(model, one)), None)
        if batch is None:
            return []
    found = [Trial("forward", batch)]
    if not isinstance(batch, Mapping) or core is None:
        return found
    for side in ("left", "right"):
        padded = _with_padding(model, batch, side)
        if padded is not None and _runs(model, padded):
            found.append(Trial(f"padding on the {side}", padded))
    if core is model and "past_key_values" in _parameters(core):
        found += _through_cache(model, found[1].inputs if len(found) > 1 else batch)
    return found


def _varies(x: torch.Tensor) -> bool:
    """Whether x has two different entries.

    >>> _varies(torch.zeros(2, 0)), _varies(torch.zeros(2, 1)), _varies(torch.arange(2))
    (False, False, True)
    """
    return bool((x.flatten()[1:] != x.flatten()[:-1]).any())


def _through_cache(model: nn.Module, batch: Mapping[str, Any]) -> list[Trial]:
    """The trial with a cache: by steps where the exact model takes them, else as `generate` goes; [] without one."""
    tokens = batch.get("decoder_input_ids", batch.get("input_ids"))
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] < 2:
        return []
    length = tokens.shape[1]
    steps = (length - 4, 1, 2, 1) if length >= 6 else (length - 1, 1)
    text = {name: x for name, x in batch.items() if name in _TEXT}
    for trial in (Trial("a cache", batch, steps), Trial("generation", batch, (0,)), Trial("generation", text, (0,))):
        try:
            found = run_trial(model, trial)
        except Exception:
            continue  # not a way of this model
        if found and all(_varies(x) for x in found.values()):  # else it tells nothing apart
            return [trial]
    return []


def _runs(model: nn.Module, batch: Any) -> bool:
    try:
        with evaluating(model):
            run(model, batch)
    except Exception:
        # Whatever a model raises for an input that is not for it.
        return False
    return True


def _tensors(out: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of a model's output, by name."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield "", out
    elif isinstance(out, Mapping):
        for name, value in out.items():
            if name not in ("past_key_values", "loss"):
                yield from ((f"{name} {inner}".strip(), x) for inner, x in _tensors(value))
    elif isinstance(out, (list, tuple)):
        for number, value in enumerate(out):
            yield from ((f"{number} {inner}".strip(), x) for inner, x in _tensors(value))


def _real(name: str, tensor: Tensor, masks: Sequence[Any]) -> tuple[str, Tensor]:
    """Name and rows of real tokens, where the tensor has one per token of one of these masks (B, L)."""
    fitting = [m for m in masks if isinstance(m, Tensor) and tensor.dim() >= 2 and tensor.shape[:2] == m.shape]
    if not fitting:
        return name, tensor
    return name + TOKENS, tensor[torch.stack([mask.to(tensor.device).bool() for mask in fitting]).all(0)]


def run_trial(model: nn.Module, trial: Trial) -> dict[str, Tensor]:
    """What a model gives, by name; of real tokens only."""
    mask = trial.inputs.get("attention_mask") if isinstance(trial.inputs, Mapping) else None
    with evaluating(model):
        if not trial.steps:
            return dict(_real(name, x, (mask, *trial.masks)) for name, x in _tensors(run(model, trial.inputs)))
        if trial.steps == (0,):
            return _by_generating(model, trial)
        return _in_steps(model, trial, mask)


def _in_steps(model: nn.Module, trial: Trial, mask: Any) -> dict[str, Tensor]:
    inputs = dict(trial.inputs)
    device = device_of(model)
    names = ("input_ids", "token_type_ids", "attention_mask", "decoder_input_ids", "pixel_values", "input_features")
    inputs = {name: inputs[name].to(device) for name in names if inputs.get(name) is not None}
    seq2seq = "decoder_input_ids" in inputs
    which = "decoder_input_ids" if seq2seq else "input_ids"
    tokens, cache, end = inputs.pop(which), None, 0
    found: dict[str, Tensor] = {}
    for number, step in enumerate(trial.steps):
        begin, end = end, end + step
        call = dict(inputs)
        if not seq2seq:
            for name in ("attention_mask", "token_type_ids"):
                if name in call:
                    call[name] = call[name][:, (0 if name == "attention_mask" else begin) : end]
        out = model(**{which: tokens[:, begin:end]}, **call, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        if cache is None:
            return {}
        shown = None if seq2seq or mask is None else mask[:, begin:end]
        for name, x in _tensors(out):
            if not name.startswith("encoder_"):
                found.update([_real(f"step {number} {name}", x, (shown,))])
    return found


def _by_generating(model: Any, trial: Trial) -> dict[str, Tensor]:
    device = device_of(model)
    given = {name: x for name, x in trial.inputs.items() if x is not None and name not in ("labels", "position_ids")}
    inputs = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": 3, "min_new_tokens": 3, "output_logits": True}
    out = model.generate(**inputs, **options, return_dict_in_generate=True)
    return {f"step {number} logits": x for number, x in enumerate(out.logits)}
