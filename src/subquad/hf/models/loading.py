"""Loading that either gives the saved model or an error that names the key or the file, never something in between.

transformers fills what a checkpoint lacks with random numbers and drops what it does not know, with a warning; here
only a head that the checkpoint's class did not have may be new, and only such a head may be left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ... import checks
from ...features.calibration import Calibration
from ...features.precision import Float32Buffers
from ...features.seeded import Projection

__all__ = ["CheckpointMismatch", "load_strictly", "settle", "shared_names"]

# The stack is everything but heads; the language model's head is part of nn.TransformerDecoder.
_LM_HEAD = "stack.head.weight"


class CheckpointMismatch(ValueError, RuntimeError):
    """A checkpoint that does not fit its model. Callers of transformers expect a RuntimeError here."""


def shared_names(model: nn.Module) -> dict[str, str]:
    """{name: the name that came first} for parameters and buffers that are one tensor under several names.

    >>> import subquad as sq
    >>> one = {"mechanism": "linformer", "length": 8, "rank": 2, "sharing": "layers"}
    >>> shared_names(sq.nn.TransformerEncoder(2, 1, 4, one))
    {'blocks.1.attention.mechanism.projection.keys': 'blocks.0.attention.mechanism.projection.keys'}
    """
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known != name:
            shared[name] = known
    return shared


def settle(model: nn.Module) -> None:
    """After tensors were put in from outside: float32 where it has to be, and what is read from them once, read again.

    A compiled graph cannot look into buffers, so draws and calibration are known to Python too.
    """
    for module in model.modules():
        if isinstance(module, Float32Buffers):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer.dtype != torch.float32:
                    module.register_buffer(name, buffer.float())
        reset = getattr(module, "reset_parameters", None)
        if module._non_persistent_buffers_set and reset is not None:
            reset()  # no checkpoint holds these, and transformers builds models without memory
        if isinstance(module, Projection):
            module.draw_key()
        if isinstance(module, Calibration):
            module.refresh()


def _is_head(name: str, prefix: str) -> bool:
    """Whether a key belongs to a head and not to the stack, with or without the base model's prefix."""
    bare = name.removeprefix(f"{prefix}.")
    return bare == _LM_HEAD or bare.split(".")[0] not in ("stack", "frames")


def _shape(shape: Any) -> str:
    return str(tuple(shape))


def _wrong_keys(model: Any, info: dict[str, Any], saved_as: list[str], ignore_shapes: bool) -> list[str]:
    prefix = model.base_model_prefix
    own = model.state_dict()
    same_class = type(model).__name__ in saved_as
    heads = {name for name in own if _is_head(name, prefix)}
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    # A head is new as a whole or not at all.
    new = heads if not same_class and heads <= missing else set()
    wrong = [f"{name} is missing" for name in sorted(missing - new)]
    foreign = sorted(name for name in unexpected if same_class or not _is_head(name, prefix))
    wrong += [f"{name} is unknown{checks.nearest(name, own)}" for name in foreign]
    if not ignore_shapes:
        for name, saved, expected in sorted(info["mismatched_keys"], key=lambda entry: str(entry[0])):
            wrong.append(f"{name} has shape {_shape(saved)}, expected {_shape(expected)}")
    return wrong


def _corrupt_files(folder: object) -> list[str]:
    """Weight files of a folder that cannot be read, with the reason."""
    if not isinstance(folder, (str, os.PathLike)) or not Path(folder).is_dir():
        return []
    found = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    tensors.get_slice(name)
        except (SafetensorError, OSError) as error:
            found.append(f"{file}: {error}")
    return found


def load_strictly(cls: Any, load: Callable[..., Any], path: Any, *inputs: Any, **options: Any) -> Any:
    """transformers' `load` (the inherited from_pretrained) with every difference an error.

    Returns what it returns: the model, or (model, info) with output_loading_info=True.
    """
    if options.get("use_safetensors") is False or options.get("gguf_file") is not None:
        raise ValueError(
            "use_safetensors=False (or gguf_file) is refused: loading never unpickles; save the model with "
            "save_pretrained, which writes model.safetensors"
        )
    wants_info = options.pop("output_loading_info", False)
    ignore_shapes = options.pop("ignore_mismatched_sizes", False)
    options["use_safetensors"] = True
    try:
        model, info = load(path, *inputs, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    except SafetensorError as error:
        files = _corrupt_files(path)
        raise ValueError(
            f"the weights cannot be read, nothing was loaded: {'; '.join(files) or error}. Copy or save them again"
        ) from error
    saved_as = list(getattr(model.config, "architectures", None) or [])
    wrong = _wrong_keys(model, info, saved_as, ignore_shapes)
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointMismatch(
            f"the checkpoint {path} does not fit {cls.__name__}, nothing was loaded: {'; '.join(wrong[:8])}{more}. "
            "Load it with the config that was saved beside it"
        )
    left = [name for name, x in model.state_dict().items() if isinstance(x, Tensor) and x.is_meta]
    if left and options.get("device_map") is None:
        raise ValueError(f"the checkpoint {path} left {left[:8]} without values, nothing was loaded")
    settle(model)
    return (model, info) if wants_info else model
