"""Separable Linformer: the softmax split into one over the features of a query and one over tokens.

    out = softmax_features(q) (softmax_tokens(E k)^T (F v)),     every row of weights sums to 1

The form of "Revisiting Linformer with a modified self-attention with linear complexity" (Verma, 2020), with the axes
that make every row a distribution, and computed from the right: first the D x E matrix of the tokens, then the
queries.

Where the paper's printed form differs:

- it divides by column sums for both factors. For q that normalises over tokens and for k over features, and rows of the
  product then sum to anything from 0.91 to 1.10 on Gaussian inputs. Here q is normalised over features, k over tokens.
- it lets the projections shrink by delta = 2^-n. That is 0 in float32 from n = 150 and in float64 from n = 1075, which
  makes the softmax over the projected tokens uniform whatever k is. Here E and F are ordinary learned matrices.

E and F are not needed: without them (`projected=False`, the default) this is efficient attention (Shen et al., 2021)
and is computed by it, O(L D E) with no projection size in it; with them the cost contains rank S D as well. Either way
it is an attention of its own of rank D, not an estimate of softmax attention.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import checks
from ..features.base import scaled
from ..features.precision import compute_dtype
from ..kernels.operator import Call
from ..kernels.padding import real_keys
from .base import Mechanism, check_call
from .efficient import Efficient
from .linformer import SequenceProjection, check_projection, tie

__all__ = ["SeparableLinformer"]


@final
class SeparableLinformer(Mechanism):
    """softmax over features times softmax over tokens; `scale` is 1 unless given (sqrt(scale) multiplies q and k).

    projected: mix the keys and values to `rank` rows first, by learned E and F as in 'linformer'
    length, rank, sharing, init: as in 'linformer'; nothing is made of them without `projected`

    Without projections it is 'efficient', which has a causal and a recurrent form under that name.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 60, 8)
    >>> out = sq.create("separable-linformer", head_dim=8)(q, k, v)
    >>> torch.allclose(out, torch.softmax(q, -1) @ (torch.softmax(k, -2).mT @ v), atol=1e-6)
    True
    """

    name = "separable-linformer"
    equation = "softmax_features(q) (softmax_tokens(E k)^T (F v)); E = F = identity unless projected"
    paper = 'Verma, "Revisiting Linformer with a modified self-attention with linear complexity", 2020'
    complexity = "O((L + S) D E); with projections O(L D E + S rank (D + E))"
    each_query_alone = True
    causal = False
    causal_refusal = "its projections mix all positions; without them it is 'efficient', which has a causal form"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"projected": True, "length": 100, "rank": 6, "sharing": "none"},
        {"projected": True, "length": 96, "rank": 5, "sharing": "heads", "init": "jl"},
        {"projected": True, "length": 100, "rank": 6, "sharing": "layers"},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        projected: bool = False,
        length: int = 512,
        rank: int = 128,
        sharing: str = "heads",
        init: str = "segments",
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_flag("projected", projected)
        check_projection(length, rank, sharing, init)
        self.projected, self.length, self.rank, self.sharing, self.init = projected, length, rank, sharing, init
        self.projection: SequenceProjection | None = None
        if projected:
            per_head = self.need_heads("sharing='none'") if sharing == "none" else 1
            self.projection = SequenceProjection(length, rank, per_head, sharing=sharing, init=init)
        self.efficient = Efficient(head_dim)

    def resolve_scale(self, scale: float | None) -> float:
        return self.efficient.resolve_scale(scale)

    def tie(self, other: SeparableLinformer) -> None:
        """Use `other`'s E from now on, the same parameter and not a copy; both need sharing='layers'."""
        if self.projection is None:
            raise ValueError(
                "tie: there are no projections to share; create both with projected=True, sharing='layers'"
            )
        self.projection = tie(self.projection, other, self.name)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        dtype = compute_dtype(v)
        wide_q, wide_k, wide_v = (x.to(dtype) for x in (q, k, v))
        if call.backend == "reference":
            return self._dense(wide_q, wide_k, wide_v, call.scale, call.key_mask).to(v.dtype)
        key_mask = call.key_mask
        if self.projection is not None:
            wide_k, wide_v = self.projection(wide_k, wide_v, key_mask)
            key_mask = None
        made = call._replace(key_mask=key_mask, query_mask=None)
        return self.efficient._attend(wide_q, wide_k, wide_v, made, is_causal=False).to(v.dtype)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> Tensor:
        """The definition, as an L x S matrix of weights on tokens."""
        groups = q.shape[1] // k.shape[1]
        real = real_keys(k, key_mask)
        hidden = ~real[:, None, :, None]
        k, v = scaled(k, scale, queries=False).masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        if self.projection is not None:
            e, f = self.projection.dense(k, key_mask)
            tokens = torch.softmax(e @ k, -2).mT @ f  # (B, H, D, S)
        else:
            empty = ~real.any(-1)[:, None, None, None]
            scores = k.masked_fill(hidden & ~empty, float("-inf"))
            tokens = torch.softmax(scores, -2).masked_fill(hidden, 0.0).mT
        features = torch.softmax(scaled(q, scale, queries=True), -1)
        weights = features @ tokens.repeat_interleave(groups, 1)
        return weights @ v.repeat_interleave(groups, 1)
