"""Linformer: keys and values projected from S tokens to `rank` learned mixtures of tokens.

    out = softmax(scale q (E k)^T) (F v),        E, F of rank x length, learned

Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020. O(L rank). Every row of E k mixes all positions,
so there is no causal form: a mask over tokens does not survive the projection.

The paper's proof is about another object, P R^T R v with P the exact softmax matrix and R random with N(0, 1 / rank)
entries. It is unbiased and its mean square error is

    E |P R^T R v - P v|^2 = (|P|^2 |v|^2 + |P v|^2) / rank        (Frobenius norms; see `jl_error`)

Since |P|^2 |v|^2 is usually many times |P v|^2, that error exceeds the signal unless rank is a multiple of the length:
at 256 tokens with Gaussian inputs the relative error is 13.7, 3.4 and 0.86 for ranks 16, 64 and 256. Put into the
formula above, where the softmax comes after the projection, random E and F are worse than uniform attention. Linformer
works because E and F are trained; `init="jl"` is where the theorem starts, not a way to leave training out.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from .. import checks
from ..features.precision import compute_dtype
from ..kernels.operator import Call
from ..kernels.padding import Order, real_keys
from .base import Mechanism, check_call
from .softmax import Softmax

__all__ = ["Linformer", "SequenceProjection", "check_projection", "jl_error", "tie"]

SHARING = ("none", "heads", "kv", "layers")
INITS = ("segments", "jl")


def jl_error(p: Tensor, v: Tensor, rank: int) -> Tensor:
    """E |p R^T R v - p v|^2 for R (rank, S) with independent N(0, 1 / rank) entries; p (..., L, S), v (..., S, E).

    >>> jl_error(torch.eye(2), torch.eye(2), rank=3)
    tensor(2.)
    """

    def square(x: Tensor) -> Tensor:
        return x.square().sum((-2, -1))

    return (square(p) * square(v) + square(p @ v)) / rank


class SequenceProjection(nn.Module):
    """E and F: (1 or H, rank, length), one pair per head or shared. A sequence of S tokens uses the first S columns.

    sharing: none (E and F per KV head) | heads (one E, one F) | kv (one matrix for both) | layers (as kv, to be tied)
    init:    segments (row r averages the r-th of `rank` equal segments) | jl (E = F = R, entries N(0, 1 / rank))

    >>> project = SequenceProjection(100, 4, 1, sharing="heads", init="segments")
    >>> k, v = project(*torch.ones(2, 1, 2, 30, 8), None)
    >>> k.shape, [round(x, 3) for x in k[0, 0, :, 0].tolist()]
    (torch.Size([1, 2, 4, 8]), [1.0, 0.2, 0.0, 0.0])
    """

    def __init__(self, length: int, rank: int, heads: int, *, sharing: str, init: str) -> None:
        super().__init__()
        self.length, self.rank, self.sharing, self.init = length, rank, sharing, init
        shape = (heads if sharing == "none" else 1, rank, length)
        self.keys = nn.Parameter(torch.empty(shape))
        if sharing in ("none", "heads"):
            self.values = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start again: from segment means, or from torch's generator for jl."""
        with torch.no_grad():
            if self.init == "jl":
                self.keys.normal_(std=self.rank**-0.5)
            else:
                segment = torch.arange(self.length, device=self.keys.device) * self.rank // self.length
                member = (segment == torch.arange(self.rank, device=self.keys.device)[:, None]).to(self.keys.dtype)
                # More rows than tokens leave some rows without any.
                self.keys.copy_(member / member.sum(-1, keepdim=True).clamp(min=1.0))
            if self.separate:
                self.values.copy_(self.keys)

    @property
    def separate(self) -> bool:
        """Whether F is another matrix than E."""
        return self.sharing in ("none", "heads")

    def matrices(self, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The columns of E and F that a sequence of `tokens` tokens uses."""
        if tokens > self.length:
            raise ValueError(
                f"the sequence has {tokens} tokens (padding included), the projections were built for at most "
                f"length={self.length}; create the mechanism with length={tokens} or more, or cut the input"
            )
        e = self.keys[..., :tokens].to(dtype)
        return e, self.values[..., :tokens].to(dtype) if self.separate else e

    def forward(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """E k (B, H, rank, D) and F v (B, H, rank, E): the i-th real token of a sequence meets the i-th column."""
        e, f = self.matrices(k.shape[2], k.dtype)
        order = Order(key_mask, k.shape[2], k.device)
        k, v = order.front(k), order.front(v)
        if key_mask is not None:
            hidden = ~order.real[:, None, :, None]
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        return e @ k, f @ v

    def dense(self, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """E and F as they act on the tokens where they stand, (B, H or 1, rank, S), 0 at masked ones."""
        e, f = self.matrices(k.shape[2], k.dtype)
        real = real_keys(k, key_mask)
        column = (real.cumsum(-1) - 1).clamp(min=0)
        e, f = (torch.stack([x[..., places] for places in column]) for x in (e, f))
        hidden = ~real[:, None, None, :]
        return e.masked_fill(hidden, 0.0), f.masked_fill(hidden, 0.0)

    def extra_repr(self) -> str:
        return f"length={self.length}, rank={self.rank}, sharing={self.sharing!r}, init={self.init!r}"


def check_projection(length: int, rank: int, sharing: str, init: str) -> None:
    """Refuse options that no projection can be made from."""
    checks.check_positive("length", length)
    checks.check_positive("rank", rank)
    checks.check_option("sharing", sharing, SHARING)
    checks.check_option("init", init, INITS)


def tie(mine: SequenceProjection, other: object, name: str) -> SequenceProjection:
    """`other`'s projection, if a mechanism with `mine` can use it."""
    theirs = getattr(other, "projection", None)
    if not isinstance(theirs, SequenceProjection):
        raise TypeError(f"tie: expected another {name} with projections, got {type(other).__name__}")
    if mine.sharing != "layers":
        raise ValueError(f"tie: sharing={mine.sharing!r} keeps its own projections; create both with sharing='layers'")
    if str(mine) != str(theirs):
        raise ValueError(f"tie: the projections differ: {mine} and {theirs}")
    return theirs


@final
class Linformer(Mechanism):
    """Attention over `rank` learned mixtures of the keys.

    length:  the most tokens (padding included) a sequence may have; shorter ones use the first columns of E and F
    rank:    k, the number of mixtures
    sharing: none (E, F per KV head; needs heads) | heads (one E, one F for all heads) | kv (E = F, all heads) |
             layers (as kv, and one matrix for all layers: call `layer.tie(first_layer)` for every later layer)
    init:    segments (means of equal segments) | jl (random, see the module's text for its error); both are trained

    More tokens than `length` are refused. Masked keys contribute nothing: the i-th real token meets the i-th column,
    wherever padding stands.

    >>> import torch, subquad as sq
    >>> attn = sq.create("linformer", head_dim=8, heads=2, length=100, rank=16)
    >>> attn(*torch.randn(3, 1, 2, 60, 8)).shape
    torch.Size([1, 2, 60, 8])
    >>> first, second = (sq.create("linformer", head_dim=8, length=100, rank=16, sharing="layers") for _ in range(2))
    >>> second.tie(first)
    >>> second.projection.keys is first.projection.keys
    True
    """

    name = "linformer"
    equation = "softmax(q (E k)^T / sqrt(D)) (F v)"
    paper = 'Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020'
    complexity = "O((L + S) rank (D + E)); parameters 2 H rank length, fewer when shared"
    each_query_alone = True
    causal = False
    causal_refusal = "every row of E k mixes all positions, so each output would see the future"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"length": 100, "rank": 6, "sharing": "none"},
        {"length": 100, "rank": 6, "sharing": "heads", "init": "jl"},
        {"length": 96, "rank": 5, "sharing": "kv", "init": "jl"},
        {"length": 100, "rank": 6, "sharing": "layers"},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        length: int = 512,
        rank: int = 128,
        sharing: str = "heads",
        init: str = "segments",
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        check_projection(length, rank, sharing, init)
        self.length, self.rank, self.sharing, self.init = length, rank, sharing, init
        per_head = self.need_heads("sharing='none'") if sharing == "none" else 1
        self.projection = SequenceProjection(length, rank, per_head, sharing=sharing, init=init)
        self.exact_attention = Softmax(head_dim)

    def tie(self, other: Linformer) -> None:
        """Use `other`'s E from now on, the same parameter and not a copy; both need sharing='layers'."""
        self.projection = tie(self.projection, other, self.name)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        dtype = compute_dtype(v)
        wide_q, wide_k, wide_v = (x.to(dtype) for x in (q, k, v))
        if call.backend == "reference":
            return self._dense(wide_q, wide_k, wide_v, call.scale, call.key_mask).to(v.dtype)
        mixed_k, mixed_v = self.projection(wide_k, wide_v, call.key_mask)
        out: Tensor = self.exact_attention(wide_q, mixed_k, mixed_v, scale=call.scale)
        return out.to(v.dtype)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> Tensor:
        """The definition, as an L x S matrix softmax(q (E k)^T) F of weights on tokens."""
        e, f = self.projection.dense(k, key_mask)
        if key_mask is not None:
            k, v = (x.masked_fill(~key_mask[:, None, :, None], 0.0) for x in (k, v))
        groups = q.shape[1] // k.shape[1]
        mixed, f = ((x.expand(-1, k.shape[1], -1, -1)).repeat_interleave(groups, 1) for x in (e @ k, f))
        weights = torch.softmax(scale * q @ mixed.mT, -1) @ f
        return weights @ v.repeat_interleave(groups, 1)
