"""Taking tokens back from states that keep none.

    checkpoints at l_1 < l_2 < ... <= l,   crop(n): from the last l_i <= n, scan the tokens l_i .. n again

States are never changed, so a checkpoint is a reference and costs nothing but the memory it keeps alive. Kept are the
checkpoints and copies of the tokens that the last `every` tokens need. Speculative decoding takes back what it guessed
wrongly: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import checks
from .state import check_crop, merge

__all__ = ["Checkpoints", "unused"]

Piece = tuple[Tensor, Tensor, Tensor | None]  # k (B, H, L, D), v (B, H, L, E), key_mask (B, L) of one call


@dataclass(frozen=True)
class Checkpoints:
    """A state of any mechanism whose last `every` tokens, or more, can be taken back with `crop`.

    Give it to `scan` in place of None, or of the state to go on from; `scan` returns one. Mechanisms whose own states
    crop (`softmax`, `multipole`) return these.

    every:  how far back one can go at least, and after how many tokens there is a new checkpoint
    state:  the mechanism's own state, after `length` tokens (padding included)

    >>> import subquad as sq
    >>> attn = sq.create("performer", head_dim=8, num_features=16, seed=0)
    >>> q, k, v = torch.randn(3, 1, 2, 20, 8)
    >>> _, state = attn.scan(q, k, v, sq.Checkpoints(every=4))
    >>> back = state.crop(17)
    >>> _, want = attn.scan(q[:, :, :17], k[:, :, :17], v[:, :, :17])
    >>> back.length, torch.allclose(back.state.weighted, want.weighted, atol=1e-6)
    (17, True)
    """

    crops: ClassVar[bool] = True

    every: int
    state: Any = None
    length: int = 0
    marks: tuple[tuple[int, Any], ...] = ()  # (length, state), the oldest first
    tokens: tuple[Piece, ...] = field(default=(), repr=False)  # since the first mark, call by call
    # What scans them again.
    mechanism: Any = field(default=None, repr=False, compare=False)
    heads: int = field(default=0, repr=False)
    scale: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        checks.check_positive("every", self.every)

    @property
    def origin(self) -> str:
        """Which mechanism made it."""
        return str(getattr(self.state, "origin", ""))

    def scan(self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Any]:
        """`mechanism.scan`, remembering what a crop needs."""
        if mechanism.crops:
            out, after = mechanism.scan(q, k, v, self.state, **call)
            return out, after
        checks.check_attention(q, k, v, head_dim=mechanism.head_dim, heads=mechanism.heads, kv_heads=mechanism.kv_heads)
        checks.check_mask("key_mask", call.get("key_mask"), k.shape[0], k.shape[2], k.device)
        length, mask = k.shape[2], call.pop("key_mask", None)
        cut = length - self.every
        if cut > 0:  # of a long prompt only the end is kept
            first = None if mask is None else mask[:, :cut]
            last = None if mask is None else mask[:, cut:]
            begin, past = mechanism.scan(*(x[:, :, :cut] for x in (q, k, v)), self.state, key_mask=first, **call)
            start = Checkpoints(self.every, past, self.length + cut)
            end, after = start.scan(mechanism, *(x[:, :, cut:] for x in (q, k, v)), key_mask=last, **call)
            return torch.cat([begin, end], 2), after
        marks, tokens = self.marks, self.tokens
        if not marks or self.length - marks[-1][0] >= self.every:
            marks = (*marks, (self.length, self.state))
        out, after = mechanism.scan(q, k, v, self.state, key_mask=mask, **call)
        # Copies: the caller may use the memory again, and a view would keep all of a long prompt.
        tokens, now = (*tokens, (k.clone(), v.clone(), None if mask is None else mask.clone())), self.length + length
        while len(marks) > 1 and now - marks[1][0] >= self.every:
            gone = marks[1][0] - marks[0][0]
            while gone > 0:
                gone -= tokens[0][0].shape[2]
                tokens = tokens[1:]
            marks = marks[1:]
        return out, Checkpoints(self.every, after, now, marks, tokens, mechanism, q.shape[1], call.get("scale"))

    def crop(self, length: int) -> Checkpoints:
        """The state after its first `length` tokens, padding included."""
        check_crop(length, self.length)
        if length == self.length:
            return self
        oldest = self.marks[0][0] if self.marks else self.length
        if length < oldest:
            more = self.length - length
            hint = f"; Checkpoints(every={more}) would keep more" if more > self.every else ""
            raise ValueError(
                f"crop({length}): the state has {self.length} tokens and can go back to {oldest}: what came before was "
                f"cropped, merged or is more than every={self.every} tokens ago{hint}"
            )
        marks = tuple(mark for mark in self.marks if mark[0] <= length)
        (at, state), done, kept = marks[-1], oldest, []
        for k, v, mask in self.tokens:
            if done >= length:
                break
            some = min(length - done, k.shape[2])
            piece: Piece = (k[:, :, :some], v[:, :, :some], None if mask is None else mask[:, :some])
            if done >= at:
                # Queries have no part in a state: any will do.
                none = k.new_zeros((k.shape[0], self.heads, some, k.shape[3]))
                state = self.mechanism.scan(none, *piece[:2], state, key_mask=piece[2], scale=self.scale)[1]
            kept.append(piece)
            done += some
        return replace(self, state=state, length=length, marks=marks, tokens=tuple(kept))

    def merge(self, later: Checkpoints) -> Checkpoints:
        """This context followed by `later`'s, with a checkpoint behind both."""
        return Checkpoints(self.every, merge(self.state, later.state), self.length + later.length)


def unused(state: Any) -> bool:
    """Whether nothing has been scanned into a state yet."""
    return state is None or (isinstance(state, Checkpoints) and state.state is None)


def _flatten(x: Checkpoints) -> tuple[list[Any], Any]:
    parts = [x.state, *(state for _, state in x.marks), *(y for piece in x.tokens for y in piece)]
    there = tuple(part is not None for part in parts)
    context = (x.every, x.length, tuple(at for at, _ in x.marks), (x.mechanism, x.heads, x.scale), there)
    return [part for part in parts if part is not None], context


def _unflatten(leaves: Any, context: Any) -> Checkpoints:
    every, length, places, scanned_by, there = context
    given = iter(leaves)
    state, *parts = [next(given) if one else None for one in there]
    marks, tokens = parts[: len(places)], iter(parts[len(places) :])
    pieces: Any = tuple(zip(tokens, tokens, tokens, strict=True))  # k, v, mask of each call
    return Checkpoints(every, state, length, tuple(zip(places, marks, strict=True)), pieces, *scanned_by)


pytree.register_pytree_node(Checkpoints, _flatten, _unflatten, serialized_type_name="subquad.Checkpoints")
