"""What a mask of a transformers model says, read from its values: which keys are real, and in which pattern.

A model makes its masks as it always did; a converted layer reads them. Full and causal patterns with padding, and
several sequences in one row (packed, each full or causal), are what sub-quadratic attention can take. Everything
else, also a pattern that only an odd caller builds, is refused by name. Reading costs O(L S) once per mask, not once
per layer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

__all__ = ["Visible", "segments_of", "visible_after", "visible_keys"]


class Visible(NamedTuple):
    """What a call may see.

    is_causal: each query the keys up to itself; key_mask: (B, S) bool, None = all keys are real
    segments:  (B, L) the number of the sequence that a token belongs to; None = one sequence per row
    """

    is_causal: bool
    key_mask: Tensor | None
    segments: Tensor | None = None


# The masks that were read last, with what they said: layers of one call share a mask. Dead and changed ones are not
# met.
_READ: list[tuple[weakref.ref[Tensor], tuple[object, ...], Visible]] = []
_KEPT = 4


def _real(mask: Tensor, keys: int, where: str) -> Tensor:
    """(B, L, S) bool, True = visible, from a bool or additive mask (B, 1 or H, L, S)."""
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if mask.dim() != 4:
        raise ValueError(f"{where} got a mask of shape {tuple(mask.shape)}; expected (batch, 1, queries, keys)")
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        real = mask
    elif mask.is_floating_point():
        real = mask == 0
        # A half-precision minimum is what transformers writes for "hidden"; anything between is a bias.
        if not bool((real | (mask <= -1e4)).all()):
            raise _refusal(where, "an additive bias of the scores")
    else:
        raise _refusal(where, f"a mask of {mask.dtype}")
    if real.shape[1] > 1 and not bool((real == real[:, :1]).all()):
        raise _refusal(where, "a mask that differs between heads")
    return real[:, 0]


def _lower(queries: int, keys: int, device: torch.device | None) -> Tensor:
    """(L, S) bool: the queries are the last L of S positions."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _fits(real: Tensor, expected: Tensor, key_mask: Tensor) -> bool:
    """Whether the pattern is the expected one; what padding looks at does not matter, it is nobody's query."""
    wrong = (real != expected).any(-1)
    if real.shape[1] == real.shape[2]:
        wrong = wrong & key_mask
    return not bool(wrong.any())


def _pattern(real: Tensor, where: str) -> Visible:
    queries, keys = real.shape[1:]
    key_mask = real.any(1)
    row = key_mask.unsqueeze(1)
    padding = None if bool(key_mask.all()) else key_mask
    if _fits(real, row.expand_as(real), key_mask):
        return Visible(False, padding)
    lower = _lower(queries, keys, real.device)
    if _fits(real, row & lower, key_mask):
        return Visible(queries > 1, padding)
    if queries == keys:
        # A token that does not see the one before it begins a sequence.
        first = torch.ones_like(key_mask)
        first[:, 1:] = ~torch.diagonal(real, -1, 1, 2)
        segments = first.long().cumsum(-1)
        same = segments.unsqueeze(1) == segments.unsqueeze(2)
        for causal, expected in ((True, row & same & lower), (False, row & same)):
            if _fits(real, expected, key_mask):
                return Visible(causal, padding, segments)
    raise _refusal(where, _name(real, lower))


def _name(real: Tensor, lower: Tensor) -> str:
    """What a pattern that is refused is called."""
    band = lower & ~lower.tril(real.shape[2] - real.shape[1] - int(real.sum(-1).max()))
    return "a sliding window" if bool((real == (band & real.any(1, keepdim=True))).all()) else "an arbitrary 4D mask"


def visible_keys(mask: Tensor | None, queries: int, keys: int, flag: bool, where: str) -> Visible:
    """What a mask (B, 1, L, S), bool or additive, lets a layer see; refuses by name what cannot be expressed.

    flag: whether the layer is causal where there is no mask; where: the layer, for the message

    >>> mask = torch.tensor([[True, True, False]])[:, None, None, :].expand(1, 1, 3, 3)
    >>> visible_keys(mask, 3, 3, False, "layer 0").key_mask
    tensor([[ True,  True, False]])
    >>> two = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1)).bool()
    >>> visible_keys(two[None, None], 3, 3, False, "layer 0").segments
    tensor([[1, 1, 2]])
    """
    if mask is None:
        return Visible(flag and queries > 1, None)
    if mask.dim() == 2:  # as for flash attention: the padding alone
        real = mask[:, -keys:].bool()
        return Visible(flag and queries > 1, None if bool(real.all()) else real)
    return _once(mask, ("whole", queries, keys), where)


def visible_after(mask: Tensor | None, queries: int, past: int, seen: Tensor | None, flag: bool, where: str) -> Visible:
    """`visible_keys` of the `queries` newest tokens of a call that continues after `past` others, of which the (B,)
    `seen` are real (None = all): these must be visible to every query, since a state cannot hide one again.

    >>> mask = torch.tensor([[True, True, True, False], [True, True, True, True]])[None, None]
    >>> visible_after(mask, 2, 2, None, True, "layer 0")
    Visible(is_causal=True, key_mask=None, segments=None)
    """
    if mask is None or mask.dim() == 2:
        return visible_keys(None if mask is None else mask[:, -queries:], queries, queries, flag or past > 0, where)
    visible = _once(mask[..., past : past + queries] if past else mask, ("new", queries, past), where, of=mask)
    if past:
        shown = _real(mask, past, where).sum(-1)
        before = shown.new_full(shown.shape[:1], past) if seen is None else seen
        own = torch.ones_like(shown, dtype=torch.bool) if visible.key_mask is None else visible.key_mask
        if bool(((shown != before.unsqueeze(-1)) & own).any()):
            raise _refusal(where, "a mask that hides tokens which its state has absorbed (a sliding window)")
    return visible


def _once(mask: Tensor, key: tuple[object, ...], where: str, of: Tensor | None = None) -> Visible:
    """`_pattern` of a mask, read once however many layers ask; `of` is the tensor that the mask was cut from."""
    owner = mask if of is None else of
    counted = not owner.is_inference()  # else nobody could tell whether it was changed since
    version = (*key, owner._version if counted else 0)
    for reference, known, found in _READ:
        if counted and reference() is owner and known == version:
            return found
    made = _pattern(_real(mask, mask.shape[-1] if of is not None else int(key[2]), where), where)  # type: ignore[call-overload]
    _READ[:] = [(weakref.ref(owner), version, made), *_READ[: _KEPT - 1]]
    return made


if not TYPE_CHECKING:
    # What a mask says decides which way a call takes: a compiled graph is cut there.
    _once = torch.compiler.disable(_once)


def segments_of(starts: Tensor, length: int) -> Tensor:
    """(1, L) numbers of sequences from cumulative lengths (N + 1,), as flash attention takes them.

    >>> segments_of(torch.tensor([0, 2, 5]), 5)
    tensor([[1, 1, 2, 2, 2]])
    """
    first = torch.zeros(length + 1, dtype=torch.long, device=starts.device)
    first[starts.long()] = 1
    return first[:length].cumsum(0).unsqueeze(0)


def _refusal(where: str, pattern: str) -> ValueError:
    return ValueError(
        f"{where} got {pattern}: sub-quadratic attention takes a causal or a full pattern with padding, also of "
        "several sequences in one row, nothing else. Leave this layer exact (layers=), or call the model without "
        "that mask"
    )
