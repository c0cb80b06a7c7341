"""Masks of transformers models in the form that linear-time attention can take: which keys are real.

`subquad_mask` is registered with `AttentionMaskInterface`. For causal and for full attention with padding it returns
the padding alone, as a bool view (B, 1, L, S) that repeats one row: memory O(B S), never L x S, and a valid mask for
torch's attention where the attention is full. Whether a call is causal is known to the layer, as for flash attention.
Every other pattern (sliding windows, packed sequences, overlays) is returned written out: exact layers need it, and a
converted layer refuses it by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

__all__ = ["Visible", "dense_mask", "subquad_mask", "visible_keys"]

# Where a mask carries the name of its pattern, and the mask written out once an exact layer has needed it.
_PATTERN, _DENSE = "_subquad_pattern", "_subquad_dense"
_NAMES = {
    "packed_sequence_mask_function": "packed sequences",
    "sliding_window_overlay": "a sliding window",
    "sliding_window_bidirectional_overlay": "a sliding window",
    "chunked_overlay": "chunked attention",
    "blockwise_overlay": "blocks of tokens that see each other",
}


class Visible(NamedTuple):
    """What a call may see: is_causal, and key_mask (B, S) bool or None = all keys."""

    is_causal: bool
    key_mask: Tensor | None


def _parts(function: Callable[..., Any]) -> list[str]:
    """The names of the mask functions that one was put together from."""
    names = [function.__qualname__.split(".")[0]]
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        for part in inner if isinstance(inner, (tuple, list)) else (inner,):
            if callable(part) and hasattr(part, "__qualname__"):
                names += _parts(part)
    return names


def _pattern(function: Callable[..., Any]) -> str:
    if function is causal_mask_function:
        return "causal"
    if function is bidirectional_mask_function:
        return "full"
    named = [_NAMES[part] for part in _parts(function) if part in _NAMES]
    return " and ".join(dict.fromkeys(named)) or "a pattern of its own"


def subquad_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for one call, with the arguments of transformers' mask functions; see the top of this file."""
    pattern = _pattern(mask_function)
    if pattern == "a sliding window" and local_size is not None and kv_length <= local_size:
        # No key is as far away as the window is wide.
        pattern = "causal" if "causal_mask_function" in _parts(mask_function) else "full"
    ends = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if pattern not in ("causal", "full") or (pattern == "causal" and not ends):
        # The second case is a static cache, whose keys include places that are still empty.
        written: dict[str, Any] = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        written |= {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
        written |= {"attention_mask": attention_mask, "local_size": local_size}
        dense = sdpa_mask(batch_size, q_length, kv_length, **written)
        assert dense is not None  # both ways of leaving it out are forbidden above
        setattr(dense, _PATTERN, pattern if pattern not in ("causal", "full") else "a static cache")
        return dense
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    if not torch.compiler.is_compiling() and bool(padding.all()):
        return None
    view = padding[:, None, None, :].expand(batch_size, 1, q_length, kv_length)
    setattr(view, _PATTERN, pattern)
    return view


def _repeats_one_row(mask: Tensor, length: int) -> bool:
    return mask.shape[2] == 1 or (mask.shape[2] == length and mask.stride(2) == 0)


def _is_causal(mask: Tensor | None, length: int, flag: bool) -> bool:
    """Whether a call is causal: `flag` where the mask is ours or absent, what the mask says where it is not."""
    if mask is None:
        return flag and length > 1
    pattern = getattr(mask, _PATTERN, None)
    if pattern is not None:
        return bool(pattern == "causal") and length > 1
    # A copy of our own mask (a model may slice it) has lost its name, not its form.
    return flag and length > 1 and mask.dtype == torch.bool and mask.shape[2] == length and mask.stride(2) == 0


def visible_keys(mask: Tensor | None, q_length: int, kv_length: int, flag: bool, where: str) -> Visible:
    """What a mask (B, 1, L, S), bool or additive, lets a layer see; refuses by name what no key mask expresses.

    flag: whether the layer is causal by itself; where: the layer, for the message

    >>> mask = torch.tensor([[True, True, False]])[:, None, None, :].expand(1, 1, 3, 3)
    >>> visible_keys(mask, 3, 3, False, "layer 0").key_mask
    tensor([[ True,  True, False]])
    """
    causal = _is_causal(mask, q_length, flag)
    if mask is None:
        return Visible(causal, None)
    if mask.dim() != 4:
        raise ValueError(f"{where} got a mask of shape {tuple(mask.shape)}; expected (batch, 1, queries, keys)")
    pattern = getattr(mask, _PATTERN, "an arbitrary 4D mask")
    real = mask
    if mask.dtype != torch.bool:
        real = mask == 0
        # A half-precision minimum is what transformers writes for "hidden"; anything between is a bias.
        if not bool((real | (mask <= -1e4)).all()):
            raise _refusal(where, "an additive bias of the scores")
    if mask.shape[-1] != kv_length:
        real = real[..., -kv_length:]
    if _repeats_one_row(real, q_length) and pattern in ("causal", "full", "an arbitrary 4D mask"):
        if real.shape[1] > 1 and not bool((real == real[:, :1]).all()):
            raise _refusal(where, "a mask that differs between heads")
        return Visible(causal, real[:, 0, 0])
    key_mask = real.flatten(1, 2).any(1)
    row = key_mask[:, None, None, :]
    if bool((real == row).all()):
        return Visible(False, key_mask)
    if bool((real == (row & _lower(q_length, kv_length, real.device))).all()):
        return Visible(q_length > 1, key_mask)
    raise _refusal(where, pattern)


def _lower(q_length: int, kv_length: int, device: torch.device | None) -> Tensor:
    """(L, S) bool: the queries are the last L of S positions."""
    return torch.ones(q_length, kv_length, dtype=torch.bool, device=device).tril(kv_length - q_length)


def _refusal(where: str, pattern: str) -> ValueError:
    return ValueError(
        f"{where} got {pattern}: linear-time attention takes a causal or a full pattern with padding "
        "(attention_mask of shape (batch, length)), nothing else. Leave this layer exact (layers=), or call the model "
        "without that mask"
    )


def dense_mask(
    mask: Tensor | None, q_length: int, kv_length: int, flag: bool, device: torch.device | None = None
) -> Tensor | None:
    """The mask as torch's attention takes it: ours for causal attention holds the padding alone, which is not enough.

    >>> mask = torch.tensor([[True, True, False]])[:, None, None, :].expand(1, 1, 3, 3)
    >>> dense_mask(mask, 3, 3, True)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 0]], dtype=torch.int32)
    """
    if mask is None:
        # torch aligns its own causal mask with the first key; the queries are the last ones.
        shifted = flag and 1 < q_length < kv_length
        return _lower(q_length, kv_length, device)[None, None] if shifted else None
    if not _is_causal(mask, q_length, flag):
        return mask
    known: Tensor | None = getattr(mask, _DENSE, None)
    if known is None or known.shape[-2:] != (q_length, kv_length):
        known = mask & _lower(q_length, kv_length, mask.device)
        setattr(mask, _DENSE, known)
    return known
