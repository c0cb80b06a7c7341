"""The state of kernelised attention: what remains of the past, in constant memory.

    S = sum_j phi(k_j) v_j^T,     z = sum_j phi(k_j),     out(q) = (phi(q)^T S) / (phi(q)^T z)

kept as S e^{-c}, z e^{-c} with c the running maximum of the keys' log scale, one per feature: large and small features
each keep their own exponent, so nothing overflows or underflows however long the sequence is. When c grows the sums are
rescaled by e^{c_old - c_new}, exactly; c itself is a constant for gradients, because no output depends on it.

A state is immutable: `absorb` and `merge` return a new one. States merge associatively and in order, so a prefix can be
cached once and a sequence can be cut over machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .checks import describe_shape
from .features.base import Features, exp_, weigh
from .features.precision import compute_dtype

__all__ = [
    "LinearState",
    "Partial",
    "check_continues",
    "check_fits",
    "check_same",
    "finite",
    "join",
    "merge",
    "register_state",
    "row_weights",
    "safe_divide",
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


@dataclass(frozen=True)
class LinearState:
    """What a kernelised mechanism remembers. Make one with `mechanism.scan` or `mechanism.absorb`.

    weighted:   (B, H, M, E)  S e^{-c}
    normaliser: (B, H, M)     z e^{-c}
    log_max:    (B, H, M) or (B, H, 1)   c; -inf before the first key
    count:      (B,) int64    how many real keys were absorbed
    origin:     which mechanism, draw and scale the features came from
    """

    weighted: Tensor
    normaliser: Tensor
    log_max: Tensor
    count: Tensor
    origin: str = ""

    @staticmethod
    def empty(
        batch: int, heads: int, features: int, width: int, like: Tensor, *, per_key_scale: str, origin: str = ""
    ) -> LinearState:
        """A state that has seen nothing, on `like`'s device, in `like`'s dtype but never below float32."""
        dtype = compute_dtype(like)
        columns = features if per_key_scale == "feature" else 1
        # Maps without a log scale never shift: their c is 0 from the start.
        start = 0.0 if per_key_scale == "none" else float("-inf")
        return LinearState(
            weighted=like.new_zeros((batch, heads, features, width), dtype=dtype),
            normaliser=like.new_zeros((batch, heads, features), dtype=dtype),
            log_max=like.new_full((batch, heads, columns), start, dtype=dtype),
            count=like.new_zeros((batch,), dtype=torch.int64),
            origin=origin,
        )

    @staticmethod
    def of(tensors: Sequence[Tensor], origin: str) -> LinearState:
        """The state whose `tensors` these are."""
        weighted, normaliser, log_max, count = tensors
        return LinearState(weighted, normaliser, log_max, count, origin)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """weighted, normaliser, log_max, count."""
        return self.weighted, self.normaliser, self.log_max, self.count

    def absorb(self, keys: Features, v: Tensor, count: Tensor | int) -> LinearState:
        """The state after further tokens: keys (B, H, L, M), v (B, H, L, E). Masked keys have features of weight 0."""
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
        return LinearState(weighted, normaliser, log_max, self.count + count, self.origin)

    def partial(self, queries: Features) -> Partial:
        """Numerator (B,H,L,E), normaliser (B,H,L) and the log shift (B,H,L) both were divided by, per query."""
        weights, shift = row_weights(queries, self.log_max)
        numerator = weights @ self.weighted
        # A product and a sum: matrix-vector products in batches are several times slower.
        normaliser = (weights * self.normaliser.unsqueeze(-2)).sum(-1)
        return Partial(numerator, normaliser, shift)

    def read(self, queries: Features) -> Tensor:
        """out (B, H, L, E) for query features (B, H, L, M): every absorbed key is visible to every query."""
        return self.partial(queries).finish()

    def merge(self, later: LinearState) -> LinearState:
        """The state of this context followed by `later`'s."""
        check_same(self, later)
        log_max = torch.maximum(self.log_max, later.log_max)
        mine, theirs = torch.exp(self.log_max - finite(log_max)), torch.exp(later.log_max - finite(log_max))
        return LinearState(
            self.weighted * mine.unsqueeze(-1) + later.weighted * theirs.unsqueeze(-1),
            self.normaliser * mine + later.normaliser * theirs,
            log_max,
            self.count + later.count,
            self.origin,
        )

    def to(self, *args: Any, **kwargs: Any) -> LinearState:
        """The same state on another device; the dtype of the sums is kept at float32 or above."""
        moved = [tensor.to(*args, **kwargs) if tensor.is_floating_point() else tensor for tensor in self.tensors]
        least = compute_dtype(moved[0])
        moved = [tensor.to(moved[0].device, least if tensor.is_floating_point() else None) for tensor in moved]
        return LinearState.of(moved, self.origin)

    def detach(self) -> LinearState:
        """The same state, cut off from the graph: truncated back-propagation through time."""
        return LinearState.of([tensor.detach() for tensor in self.tensors], self.origin)


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


def check_same(earlier: Any, later: Any, same_shape: tuple[str, ...] = ("weighted", "log_max")) -> None:
    """Refuse to merge states that do not continue each other: another kind, draw, or shape of these fields."""
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
    for name in same_shape:
        mine, theirs = getattr(earlier, name, None), getattr(later, name, None)
        if mine is not None and theirs is not None and mine.shape != theirs.shape:
            raise ValueError(f"merge: {name} differs in shape: {describe_shape(mine)} and {describe_shape(theirs)}")


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

    `static` fields are not tensors: they stay with the structure.
    """
    names = [field.name for field in fields(cls) if field.name not in static]

    def flatten(state: Any) -> tuple[list[Any], Any]:
        return [getattr(state, name) for name in names], tuple(getattr(state, name) for name in static)

    def unflatten(leaves: Any, context: Any) -> Any:
        return cls(**dict(zip(names, leaves, strict=True)), **dict(zip(static, context, strict=True)))

    def flatten_with_keys(state: Any) -> tuple[list[Any], Any]:
        return [(pytree.GetAttrKey(name), getattr(state, name)) for name in names], flatten(state)[1]

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"subquad.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


register_state(LinearState)
