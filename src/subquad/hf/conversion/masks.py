"""What a mask of a transformers model says, read from its values: which keys are real, and in which pattern.

A model makes its masks as it always did; a converted layer reads them. Full and causal patterns with padding, and
several sequences in one row (packed, each full or causal), are what sub-quadratic attention can take. Everything
else, also a pattern that only an odd caller builds, is refused by name. Reading costs O(L S) once per mask, not once
per layer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Visible", "absorbed", "same_tokens", "segments_of", "visible_after", "visible_keys"]

_HIDES = "a mask that hides tokens which its state has absorbed (a sliding window, or other padding than before)"


class Visible(NamedTuple):
    """What a call may see.

    is_causal: each query the keys up to itself; key_mask: (B, S) bool, None = all keys are real
    segments:  (B, L) the number of the sequence that a token belongs to; None = one sequence per row
    """

    is_causal: bool
    key_mask: Tensor | None
    segments: Tensor | None = None


# What was read of a mask: what the new tokens see of each other, and which of the past ones they see (`_trimmed`).
_Read = tuple[Visible, Tensor | None]
# The masks that were read last, with what they said and to which layers: those of one call share a mask. Dead and
# changed ones are not met.
_READ: list[tuple[weakref.ref[Tensor], tuple[object, ...], _Read, set[str]]] = []
_KEPT = 4


def _real(mask: Tensor, queries: int, keys: int, where: str) -> Tensor:
    """(B, L, S) bool, True = visible, from a bool or additive mask (B, 1 or H, L, S); L may be 1, for all queries."""
    shape = tuple(mask.shape)
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if mask.dim() != 4 or mask.shape[2] not in (1, queries) or mask.shape[3] != keys:
        raise _wrong_shape(where, shape, f"(batch, 1, {queries}, {keys})")
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


def _pattern(real: Tensor, past: int, own: bool, where: str) -> _Read:
    """What (B, L, past + S) bool says of the past and of the S new keys; own: whether query i is key past + i."""
    new = real[..., past:]
    queries, keys = new.shape[1:]
    own = own and queries == keys
    key_mask = new.any(1)
    # Padding of a model that masks its queries too. Any other token that no query sees must fit the pattern: it may be
    # one that is read out.
    blank = ~(real.any(-1) | key_mask) if own else torch.zeros_like(new[..., 0])

    def fits(found: Tensor, expected: Tensor) -> bool:
        return not bool(((found != expected).any(-1) & ~blank).any())

    before = None
    if past:
        shown = real[..., :past].any(1)
        if not fits(real[..., :past], shown.unsqueeze(1)):
            raise _refusal(where, _HIDES)
        before = _trimmed(shown)
    row = key_mask.unsqueeze(1)
    padding = None if bool(key_mask.all()) else key_mask
    lower = _lower(queries, keys, real.device)
    causal = fits(new, row & lower)
    # Where padding leaves one real token it is both; only a causal one goes on after others.
    if fits(new, row) and not (past and causal):
        return Visible(False, padding), before
    if causal:
        return Visible(queries > 1, padding), before
    if queries == keys:
        # The tokens of a sequence see the same first one; padding that sees nothing goes with the sequence before it.
        segments = new.byte().argmax(-1).cummax(-1).values
        same = segments.unsqueeze(1) == segments.unsqueeze(2)
        for causal, expected in ((True, row & same & lower), (False, row & same)):
            if fits(new, expected):
                return Visible(causal, padding, segments), before
    raise _refusal(where, _name(new, lower))


def _name(real: Tensor, lower: Tensor) -> str:
    """What a pattern that is refused is called."""
    band = lower & ~lower.tril(real.shape[2] - real.shape[1] - int(real.sum(-1).max()))
    return "a sliding window" if bool((real == (band & real.any(1, keepdim=True))).all()) else "an arbitrary 4D mask"


def visible_keys(mask: Any, queries: int, keys: int, flag: bool, where: str, own: bool = False) -> Visible:
    """What a mask (B, 1, L, S), bool or additive, lets a layer see; refuses by name what cannot be expressed.

    flag: whether the layer is causal where there is no mask; where: the layer, for the message
    own:  whether query i is the token of key i where there are as many (self attention), so that both may be padding

    >>> mask = torch.tensor([[True, True, False]])[:, None, None, :].expand(1, 1, 3, 3)
    >>> visible_keys(mask, 3, 3, False, "layer 0").key_mask
    tensor([[ True,  True, False]])
    >>> two = torch.block_diag(torch.ones(2, 2), torch.ones(1, 1)).bool()
    >>> visible_keys(two[None, None], 3, 3, False, "layer 0").segments
    tensor([[0, 0, 2]])
    """
    if mask is None:
        return Visible(flag and queries > 1, None)
    mask = _tensor(mask, where)
    if mask.dim() == 2:  # as for flash attention: the padding alone
        if mask.shape[1] != keys:
            raise _wrong_shape(where, tuple(mask.shape), f"(batch, {keys})")
        real = mask.bool()
        return Visible(flag and queries > 1, None if bool(real.all()) else real)
    return _once(mask, queries, keys, 0, own, where)[0]


def visible_after(mask: Any, queries: int, past: int, seen: Tensor | None, flag: bool, where: str) -> Visible:
    """`visible_keys` of the `queries` newest tokens of a call that continues after `past` others.

    seen: which of these a state absorbed, see `absorbed`. Every query must see them and no other: a state can neither
          hide a token again nor show one that it never took in

    >>> mask = torch.tensor([[True, True, True, False], [True, True, True, True]])[None, None]
    >>> visible_after(mask, 2, 2, None, True, "layer 0")
    Visible(is_causal=True, key_mask=None, segments=None)
    """
    before = None
    if mask is None:
        visible = visible_keys(None, queries, queries, flag or past > 0, where)
    elif _tensor(mask, where).dim() == 2:
        visible = visible_keys(mask, queries, past + queries, flag or past > 0, where)
        if visible.key_mask is not None:
            before = _trimmed(visible.key_mask[:, :past])
            new = visible.key_mask[:, past:]
            visible = visible._replace(key_mask=None if bool(new.all()) else new)
    else:
        visible, before = _once(mask, queries, past + queries, past, True, where)
    if same_tokens(before, seen):
        return visible
    if seen is None or (before is not None and bool((_wide(seen, before) & ~_wide(before, seen)).any())):
        raise _refusal(where, _HIDES)
    raise ValueError(
        f"{where} got {'no mask' if mask is None else 'a mask'} in a call that continues a cache, and so would see "
        "tokens that were padding before: a state that did not absorb a token cannot show it later. Pass the "
        "attention_mask of all tokens so far, with 0 for the same ones as before, or begin with an empty cache"
    )


def absorbed(before: Tensor | None, past: int, key_mask: Tensor | None) -> Tensor | None:
    """Which tokens a state has absorbed, after new ones of the (B, L) `key_mask`: (B, P) bool of the first P tokens, of
    which some are hidden; all later ones are absorbed. None = all of them.

    >>> absorbed(None, 1, torch.tensor([[False, True]]))
    tensor([[ True, False]])
    """
    if key_mask is None:
        return before
    known = key_mask.new_ones(len(key_mask), past)
    if before is not None:
        known[:, : before.shape[1]] = before
    return _trimmed(torch.cat([known, key_mask], 1))


def same_tokens(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two masks (B, P) hide the same tokens; they may differ in P, what comes later is not hidden."""
    if one is None or other is None:
        known = other if one is None else one
        return known is None or bool(known.all())
    return bool((_wide(one, other) == _wide(other, one)).all())


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    """A mask (B, P) as wide as `like`, if that is wider."""
    return F.pad(mask, (0, max(0, like.shape[1] - mask.shape[1])), value=True)


def _trimmed(shown: Tensor) -> Tensor | None:
    """A mask (B, P) up to the last token that is hidden; None where none is."""
    hidden = (~shown).any(0).nonzero()
    return shown[:, : int(hidden[-1]) + 1] if len(hidden) else None


def _tensor(mask: Any, where: str) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"{where} got a mask of type {type(mask).__name__}, expected a tensor; use the sdpa or eager "
            "implementation: model.set_attn_implementation('sdpa')"
        )
    return mask


def _once(mask: Tensor, queries: int, keys: int, past: int, own: bool, where: str) -> _Read:
    """`_pattern` of a mask, read once however many layers ask.

    In inference mode nobody can tell whether a mask was changed since. A layer that asks again is in another call then,
    and it is read again.
    """
    counted = not mask.is_inference()
    version = (queries, keys, past, own, mask._version if counted else 0)
    for reference, known, found, layers in _READ:
        if reference() is mask and known == version and (counted or where not in layers):
            layers.add(where)
            return found
    made = _pattern(_real(mask, queries, keys, where), past, own, where)
    others = [one for one in _READ if counted or one[0]() is not mask]
    _READ[:] = [(weakref.ref(mask), version, made, {where}), *others[: _KEPT - 1]]
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


def _wrong_shape(where: str, shape: tuple[int, ...], expected: str) -> ValueError:
    return ValueError(
        f"{where} got a mask of shape {shape}; expected {expected}, a column for each of its keys and no others. Pass "
        "the attention_mask of all tokens so far, or leave this layer exact (layers=)"
    )
