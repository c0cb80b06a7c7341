"""The state of attention: what remains of the past, in constant memory. A window, sinks, and sums for the rest:

    S = sum_j phi(k_j) v_j^T,     z = sum_j phi(k_j),     out(q) = (phi(q)^T S) / (phi(q)^T z)

kept as S e^{-c}, z e^{-c} with c the running maximum of the keys' log scale, one per feature: large and small features
each keep their own exponent, so nothing overflows or underflows however long the sequence is. When c grows the sums are
rescaled by e^{c_old - c_new}, exactly; c itself is a constant for gradients, because no output depends on it.

A state is immutable: `absorb` and `merge` return a new one. States merge associatively and in order, so a prefix can be
cached once and a sequence can be cut over machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .checks import describe_shape
from .features.base import FeatureMap, Features, exp_, weigh
from .features.precision import compute_dtype

__all__ = [
    "Partial",
    "State",
    "Sums",
    "Tokens",
    "check_continues",
    "check_crop",
    "check_fits",
    "check_same",
    "check_tokens_join",
    "finite",
    "join",
    "masked",
    "merge",
    "register_state",
    "row_weights",
    "safe_divide",
    "take",
]


def finite(shift: Tensor) -> Tensor:
    """`shift` with its infinities replaced by 0: -inf - (-inf) is NaN, and where nothing was seen any shift will do."""
    return torch.where(torch.isinf(shift), torch.zeros_like(shift), shift)


def safe_divide(numerator: Tensor, normaliser: Tensor) -> Tensor:
    """numerator / normaliser, (..., L, E) by (..., L), and 0 where the normaliser is 0 (no key is visible).

    The gradient there is 0 as well, not NaN. NaN in the normaliser reaches the output.
    """
    empty = normaliser == 0
    divided = numerator / torch.where(empty, torch.ones_like(normaliser), normaliser).unsqueeze(-1)
    return divided.masked_fill(empty.unsqueeze(-1), 0.0)


def row_weights(queries: Features, log_max: Tensor) -> tuple[Tensor, Tensor]:
    """Query features (..., L, M) against keys kept relative to `log_max`, and the log shift (..., L) of each row.

    a = exp(l_q + c - shift),     shift = max_r (l_q + c)_r,     -inf where no key was seen
    """
    log_max = log_max.unsqueeze(-2)
    if queries.log_scale is None and log_max.shape[-1] == 1:
        assert queries.values is not None
        return queries.values, log_max.squeeze(-1).expand(queries.values.shape[:-1])
    shifted = log_max + (0.0 if queries.log_scale is None else queries.log_scale)
    row_max = shifted.detach().amax(-1, keepdim=True)
    weights = exp_(shifted.sub_(finite(row_max)))
    return weights if queries.values is None else queries.values * weights, row_max.squeeze(-1)


class Partial(NamedTuple):
    """Attention of some rows over some keys, before it is normalised.

    numerator:  (..., L, E)  sum_j A_ij v_j e^{-shift_i}
    normaliser: (..., L)     sum_j A_ij e^{-shift_i}
    shift:      (..., L)     about the largest log weight of the row, -inf where there is none; a constant for gradients
    """

    numerator: Tensor
    normaliser: Tensor
    shift: Tensor

    def finish(self) -> Tensor:
        """numerator / normaliser, and 0 where no key is visible."""
        return safe_divide(self.numerator, self.normaliser)


def join(a: Partial, b: Partial) -> Partial:
    """The same rows over the keys of `a` and of `b`, which must not overlap.

    >>> one = Partial(torch.tensor([[2.0]]), torch.tensor([1.0]), torch.tensor([0.0]))
    >>> other = Partial(torch.tensor([[4.0]]), torch.tensor([1.0]), torch.tensor([0.0]))
    >>> join(one, other).finish()
    tensor([[3.]])
    """
    shift = torch.maximum(a.shift, b.shift)
    mine, theirs = torch.exp(a.shift - finite(shift)), torch.exp(b.shift - finite(shift))
    return Partial(
        a.numerator * mine.unsqueeze(-1) + b.numerator * theirs.unsqueeze(-1),
        a.normaliser * mine + b.normaliser * theirs,
        shift,
    )


class Sums(NamedTuple):
    """The far part of a state: what remains of keys that are known by their features only.

    weighted:   (B, H, M, E)  S e^{-c}
    normaliser: (B, H, M)     z e^{-c}
    log_max:    (B, H, M) or (B, H, 1)   c; -inf before the first key
    """

    weighted: Tensor
    normaliser: Tensor
    log_max: Tensor

    @staticmethod
    def empty(batch: int, heads: int, features: int, width: int, like: Tensor, *, per_key_scale: str) -> Sums:
        """Sums of nothing, on `like`'s device, in `like`'s dtype but never below float32."""
        dtype = compute_dtype(like)
        columns = features if per_key_scale == "feature" else 1
        # Maps without a log scale never shift: their c is 0 from the start.
        start = 0.0 if per_key_scale == "none" else float("-inf")
        return Sums(
            weighted=like.new_zeros((batch, heads, features, width), dtype=dtype),
            normaliser=like.new_zeros((batch, heads, features), dtype=dtype),
            log_max=like.new_full((batch, heads, columns), start, dtype=dtype),
        )

    def absorb(self, keys: Features, v: Tensor) -> Sums:
        """With further tokens: keys (B, H, L, M), v (B, H, L, E). Masked keys have features of weight 0."""
        if keys.log_scale is None:
            weights, rho = weigh(keys, None), None
            log_max = self.log_max
        else:
            log_max = torch.maximum(self.log_max, keys.log_scale.detach().amax(-2))
            weights = weigh(keys, -finite(log_max).unsqueeze(-2))
            rho = torch.exp(self.log_max - finite(log_max))
        weighted = weights.transpose(-1, -2) @ v
        normaliser = weights.sum(-2)
        if rho is None:
            weighted, normaliser = self.weighted + weighted, self.normaliser + normaliser
        else:
            weighted = torch.addcmul(weighted, self.weighted, rho.unsqueeze(-1))
            normaliser = torch.addcmul(normaliser, self.normaliser, rho)
        return Sums(weighted, normaliser, log_max)

    def partial(self, queries: Features) -> Partial:
        """Numerator (B,H,L,E), normaliser (B,H,L) and the log shift (B,H,L) both were divided by, per query."""
        weights, shift = row_weights(queries, self.log_max)
        numerator = weights @ self.weighted
        # A product and a sum: matrix-vector products in batches are several times slower.
        normaliser = (weights * self.normaliser.unsqueeze(-2)).sum(-1)
        return Partial(numerator, normaliser, shift)

    def merge(self, later: Sums) -> Sums:
        """The sums of both."""
        log_max = torch.maximum(self.log_max, later.log_max)
        mine, theirs = torch.exp(self.log_max - finite(log_max)), torch.exp(later.log_max - finite(log_max))
        return Sums(
            self.weighted * mine.unsqueeze(-1) + later.weighted * theirs.unsqueeze(-1),
            self.normaliser * mine + later.normaliser * theirs,
            log_max,
        )


class Tokens(NamedTuple):
    """Keys (B, H, N, D) and values (B, H, N, E) that a state holds as they are."""

    k: Tensor
    v: Tensor

    def take(self, index: Tensor) -> Tokens:
        """The tokens at the places index (B, M)."""
        return Tokens(take(self.k, index), take(self.v, index))

    def followed_by(self, k: Tensor, v: Tensor) -> Tokens:
        """These, then the given ones in the same dtype."""
        return Tokens(torch.cat([self.k, k.to(self.k.dtype)], 2), torch.cat([self.v, v.to(self.v.dtype)], 2))


def take(x: Tensor, index: Tensor) -> Tensor:
    """x (B, H, N, C) at the places index (B, M), or (1, M) for all sequences alike -> (B, H, M, C)."""
    return x.gather(2, index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[-1]))


@dataclass(frozen=True)
class State:
    """What attention remembers in constant memory. Make one with `mechanism.scan` or `mechanism.absorb`; immutable.

    count:  (B,) int64, real tokens so far; the rank of a token is how many real ones came before it
    far:    Sums of the tokens that are known by their features only, or None
    window: the newest W tokens, the last one in the last place, or None. Rank count - W + i stands in place i: places
            of negative rank are empty
    sinks:  the first N tokens, place i empty unless i < count, or None
    origin: which mechanism, draw and scale made it
    feature_map, scale: phi of the far part, where a merge has to turn window tokens into features

    A token enters the window when it is seen, also if it is one of the sinks; it joins the far sums when it leaves the
    window, unless it is a sink. So a token has one weight: as a sink, in the window, or far.
    """

    count: Tensor
    far: Sums | None = None
    window: Tokens | None = None
    sinks: Tokens | None = None
    origin: str = ""
    feature_map: FeatureMap | None = field(default=None, repr=False, compare=False)
    scale: float = 1.0

    @property
    def weighted(self) -> Tensor:
        """(B, H, M, E): the far sums of values."""
        assert self.far is not None
        return self.far.weighted

    @property
    def normaliser(self) -> Tensor:
        """(B, H, M): the far sums of features."""
        assert self.far is not None
        return self.far.normaliser

    @property
    def log_max(self) -> Tensor:
        """(B, H, M) or (B, H, 1): the shift of both."""
        assert self.far is not None
        return self.far.log_max

    def holds(self) -> Tensor:
        """A tensor (B, H, ., E) that shows the batch, KV heads, value width and dtype of the state."""
        if self.far is not None:
            return self.far.weighted
        assert self.window is not None
        return self.window.v

    def ranks(self, tokens: int) -> Tensor:
        """(B, W + tokens): the ranks of the places in the window and of the tokens that follow it."""
        assert self.window is not None
        window = self.window.k.shape[2]
        return self.count[:, None] + torch.arange(-window, tokens, device=self.count.device)

    def extend(self, k: Tensor, v: Tensor, new: Tensor | int) -> State:
        """Window, sinks and count after tokens k (B, H, L, D), v (B, H, L, E), of which the first `new` (B,) are real.

        The far sums are left as they are: whoever computes adds the tokens that leave the window.
        """
        count = self.count + new
        window, sinks, length = self.window, self.sinks, k.shape[2]
        if sinks is not None and sinks.k.shape[2]:
            # Places of [sinks so far | new tokens]; those beyond the last token are empty, whatever is put there.
            number = sinks.k.shape[2]
            place = torch.arange(number, device=k.device)
            first = torch.where(place < self.count[:, None], place, number + place - self.count[:, None])
            first = first.clamp(max=number + min(number, length) - 1)
            sinks = sinks.followed_by(k[:, :, :number], v[:, :, :number]).take(first)
        if window is not None and window.k.shape[2]:
            size = window.k.shape[2]
            if isinstance(new, int) and new == length:
                # New storage of the size of the window: a slice would keep all tokens of a long prefill alive.
                old = Tokens(*(x[:, :, min(length, size) :] for x in window))
                window = old.followed_by(*(x[:, :, max(length - size, 0) :] for x in (k, v)))
            else:
                newest = torch.as_tensor(new, device=k.device).view(-1, 1) + torch.arange(size, device=k.device)
                window = window.followed_by(k, v).take(newest)
        return replace(self, count=count, window=window, sinks=sinks)

    def merge(self, later: State) -> State:
        """This context followed by `later`'s: the newest W and the first N tokens of both, and the rest far."""
        check_same(self, later)
        count = self.count + later.count
        far = self.far if later.far is None or self.far is None else self.far.merge(later.far)
        if self.window is None or later.window is None or self.sinks is None or later.sinks is None:
            return replace(self, count=count, far=far)
        window, number = self.window.k.shape[2], self.sinks.k.shape[2]
        mine, theirs = self.count[:, None], later.count[:, None]
        place, first = (torch.arange(n, device=count.device) for n in (window, number))
        # `later` fills its own places from the right; what it leaves empty is shifted in from here.
        newest = torch.where(place + theirs >= window, window + place, place + theirs)
        sinks = torch.where(first < mine, first, number + first - mine)
        if far is not None and window + number:
            # Who becomes far: this window's oldest tokens, and those of `later`'s sinks that are no longer the first.
            assert self.feature_map is not None
            rank = mine - window + place
            gone = (rank >= number) & (place < theirs)
            displaced = (first + mine >= number) & (first < theirs - window)
            tokens = self.window.followed_by(*later.sinks)
            hidden = torch.cat([gone, displaced], 1).logical_not()[:, None, :, None]
            keys = masked(self.feature_map.keys(tokens.k, self.scale), hidden)
            far = far.absorb(keys, tokens.v.masked_fill(hidden, 0.0))
        return replace(
            self,
            count=count,
            far=far,
            window=self.window.followed_by(*later.window).take(newest),
            sinks=self.sinks.followed_by(*later.sinks).take(sinks),
        )

    def _changed(self, change: Callable[[Tensor], Tensor]) -> State:
        parts: dict[str, Any] = {"count": change(self.count)}
        for name in ("far", "window", "sinks"):
            part = getattr(self, name)
            parts[name] = None if part is None else type(part)(*(change(x) for x in part))
        return replace(self, **parts)

    def to(self, *args: Any, **kwargs: Any) -> State:
        """The same state on another device; floats are kept at float32 or above."""

        def moved(x: Tensor) -> Tensor:
            y = x.to(*args, **kwargs)
            return y.to(compute_dtype(y)) if x.is_floating_point() else y.to(x.dtype)

        return self._changed(moved)

    def detach(self) -> State:
        """The same state, cut off from the graph: truncated back-propagation through time."""
        return self._changed(Tensor.detach)


def masked(features: Features, hidden: Tensor | None) -> Features:
    """Features with weight 0 where `hidden` (broadcast over their last dimension)."""
    if hidden is None:
        return features
    values = None if features.values is None else features.values.masked_fill(hidden, 0.0)
    log_scale = None if features.log_scale is None else features.log_scale.masked_fill(hidden, float("-inf"))
    return Features(values, log_scale)


def check_continues(state: Any, kind: type[Any], origin: str, made_by: str) -> None:
    """Refuse a state that what has this `origin` cannot go on from: another kind of state, mechanism, draw or scale."""
    if not isinstance(state, kind):
        raise TypeError(f"state must be a {kind.__name__} from {made_by}, got {type(state).__name__}")
    if state.origin != origin:
        raise ValueError(
            f"the state was made by {state.origin!r}, this call is {origin!r}; "
            "a state can only be continued by the mechanism, draw and scale that made it"
        )


def check_fits(held: Tensor, tokens: Tensor, heads: int | None, width: int | None, *, exactly: bool = False) -> None:
    """Refuse tokens (B, ., L, D) that a state which holds `held` (B, H, ., E) has no place for.

    heads, width: KV heads and value width of the tokens; None = whatever the state has
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


def check_same(earlier: Any, later: Any) -> None:
    """Refuse to merge states that do not continue each other: another kind, draw, or shape."""
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
    if isinstance(earlier, State) and earlier.holds().shape != later.holds().shape:
        mine, theirs = (describe_shape(x.holds()) for x in (earlier, later))
        raise ValueError(f"merge: the states differ in batch, heads or value width: {mine} and {theirs}")


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

    >>> import subquad as sq
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


register_state(State, static=("origin", "feature_map", "scale"))
