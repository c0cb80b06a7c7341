"""What every kind of state shares: refusing what does not continue it, merging, and being a pytree."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor
from torch.utils import _pytree as pytree

from ..checks import describe_shape
from ..features.precision import compute_dtype

__all__ = [
    "Movable",
    "check_continues",
    "check_crop",
    "check_fits",
    "check_same",
    "check_tokens_join",
    "merge",
    "register_state",
    "state_bytes",
]


class Movable:
    """What a state that is a pytree of tensors can do besides being continued.

    crops: whether it holds all tokens, as they came
    """

    crops: ClassVar[bool] = False

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The same state on another device, or in another dtype, with the arguments of `Tensor.to`. Integers stay what
        they are, and floats at float32 or above where they are more than tokens: sums overflow in half precision."""

        def moved(x: Any) -> Any:
            if isinstance(x, Movable):
                return x.to(*args, **kwargs)
            if not isinstance(x, Tensor):
                return x
            asked = x.new_empty(0).to(*args, **kwargs)
            dtype = asked.dtype if self.crops else compute_dtype(asked)
            return x.to(asked.device, dtype if x.is_floating_point() else x.dtype, kwargs.get("non_blocking", False))

        return pytree.tree_map(moved, self, is_leaf=lambda x: isinstance(x, Movable) and x is not self)

    def detach(self) -> Any:
        """The same state, cut off from the graph: truncated back-propagation through time."""
        return pytree.tree_map_only(Tensor, Tensor.detach, self)


def check_continues(state: Any, kind: type[Any], origin: str, made_by: str) -> None:
    """Refuse a state that what has this `origin` cannot go on from: another kind of state, mechanism, draw or scale."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__} from {made_by}, got {type(state).__name__}")
    if state.origin != origin:
        raise ValueError(
            f"the state was made by {state.origin!r}, this call is {origin!r}; "
            "a state can only be continued by the mechanism, draw, calibration and scale that made it"
        )


def check_fits(held: Tensor, tokens: Tensor, heads: int | None, width: int | None, *, exactly: bool = False) -> None:
    """Refuse tokens (B, ., L, D) that a state which holds `held` (B, H, ., E) has no place for.

    heads, width: KV heads and value width of the tokens; None = whatever the state has: the tokens are queries
    exactly:      the state holds the tokens themselves, so that they must have its dtype; else half precision may
                  continue a float32 state
    """
    have = (held.shape[0], held.shape[1], held.shape[3])
    want = (tokens.shape[0], have[1] if heads is None else heads, have[2] if width is None else width)
    if held.device != tokens.device:
        raise ValueError(f"the state is on {held.device}, the tokens are on {tokens.device}; move one of them")
    dtype = tokens.dtype if exactly else compute_dtype(tokens)
    if held.dtype != dtype:
        raise ValueError(
            f"the state is {held.dtype}, tokens of {tokens.dtype} need one of {dtype}; begin a new state, or bring the "
            "tokens into the dtype that it was made with"
        )
    if have != want:
        raise ValueError(
            f"the state has (batch, heads, value width) {have}, the tokens given need {want}; begin a new state, or "
            "bring the tokens into that shape"
        )
    if heads is None and tokens.shape[1] % have[1]:
        raise ValueError(f"q has {tokens.shape[1]} heads, not a multiple of the state's {have[1]}")


def check_same(earlier: Any, later: Any) -> None:
    """Refuse to merge states that do not continue each other: another kind or draw."""
    if type(earlier) is not type(later):
        raise TypeError(
            f"merge: got a {type(earlier).__name__} and a {type(later).__name__}; "
            "both states must come from the same mechanism"
        )
    if earlier.origin != later.origin:
        raise ValueError(
            f"merge: the states come from different features: {earlier.origin!r} and {later.origin!r}. "
            "Only states of one mechanism with the same seed, number of redraws and scale can be merged; "
            "absorb the tokens again with one of the two"
        )
    mine, theirs = ({x.dtype for x in _floats(state)} for state in (earlier, later))
    if mine and theirs and not mine & theirs:
        raise ValueError(
            f"merge: the states are of {', '.join(map(str, mine))} and {', '.join(map(str, theirs))}; absorb the "
            "tokens of one of them again in the dtype of the other"
        )


def _floats(state: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor) and x.is_floating_point()]


def check_crop(length: Any, have: int) -> None:
    """Refuse to take back what is not there: a state of `have` tokens has a beginning of 0 to `have` of them."""
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"crop: length must be an int, got {length!r} of type {type(length).__name__}")
    if not 0 <= length <= have:
        raise ValueError(f"crop: length must be between 0 and the {have} tokens of the state, got {length}")


def check_tokens_join(earlier: Any, later: Any) -> None:
    """Refuse to merge states that hold tokens, k (B, H, ., D) and v (B, H, ., E), of another batch, heads or width."""
    for name in ("k", "v"):
        mine, theirs = getattr(earlier, name), getattr(later, name)
        if mine.shape[:2] != theirs.shape[:2] or mine.shape[-1] != theirs.shape[-1]:
            raise ValueError(
                f"merge: {name} differs in batch, heads or width: {describe_shape(mine)} and {describe_shape(theirs)}"
            )


def merge(earlier: Any, later: Any) -> Any:
    """The state of `earlier`'s tokens followed by `later`'s. Ordered and associative; neither argument changes.

    >>> import torch, subquad as sq
    >>> attn = sq.create("linear", head_dim=8)
    >>> k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    >>> whole = attn.absorb(k, v)
    >>> halves = sq.merge(attn.absorb(k[:, :, :3], v[:, :, :3]), attn.absorb(k[:, :, 3:], v[:, :, 3:]))
    >>> torch.allclose(whole.weighted, halves.weighted, atol=1e-6)
    True
    """
    if not hasattr(earlier, "merge"):
        raise TypeError(f"merge: expected two states from scan() or absorb(), got {type(earlier).__name__}")
    check_same(earlier, later)
    return earlier.merge(later)


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state, or in several.

    >>> import torch
    >>> state_bytes([torch.zeros(3), {"k": torch.zeros(2, 2)}])
    28
    """
    # States of multipole know it themselves: taking them apart would copy their pages.
    leaves = pytree.tree_leaves(state, is_leaf=lambda x: hasattr(x, "nbytes"))
    return sum(int(x.nbytes) for x in leaves if hasattr(x, "nbytes"))


def register_state(cls: type, static: tuple[str, ...] = ("origin",)) -> None:
    """Make a state class a pytree, so that `vmap`, `torch.compile` and `torch.export` take it apart and rebuild it.

    `static` fields are not tensors: they stay with the structure, and so do fields that are None.
    """
    names = [f.name for f in fields(cls) if f.name not in static]

    def present(state: Any) -> list[str]:
        return [name for name in names if getattr(state, name) is not None]

    def flatten(state: Any) -> tuple[list[Any], Any]:
        there = present(state)
        kept = tuple(getattr(state, name) for name in static)
        return [getattr(state, name) for name in there], (tuple(there), kept)

    def unflatten(leaves: Any, context: Any) -> Any:
        there, kept = context
        return cls(**dict(zip(there, leaves, strict=True)), **dict(zip(static, kept, strict=True)))

    def flatten_with_keys(state: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(state)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"subquad.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
