"""Sparse attention: exact softmax over a fixed pattern of about sqrt(L) keys per query.

    out_i = sum_{j in N(i)} e^{scale q_i.k_j} v_j / sum_{j in N(i)} e^{scale q_i.k_j}

    strided   N(i) = {|i - j| <= stride}  or  {(i - j) mod stride = 0}
    fixed     N(i) = {j in the block of i}  or  {j among the last `summary` tokens of a block},  blocks of `stride`
    causal    j <= i as well

Child et al., "Generating Long Sequences with Sparse Transformers", 2019. The paper gives the two halves of a pattern
to separate heads or merges them; here they are merged into one softmax over the union, in which no key counts twice. A
row has 2 stride + L / stride keys (strided) or stride + summary L / stride (fixed): O(L sqrt(L)) in all where stride
is about sqrt(L).

The stride belongs to the model and is never derived from the input: from the padded length it would change a sequence
with its batch, and from the true length it would let a causal row feel how many tokens come after it.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

from torch import Tensor

from .. import checks
from ..kernels.operator import Call, attend
from ..kernels.sparse import BACKENDS, Spec
from .base import Mechanism

__all__ = ["Sparse"]


@final
class Sparse(Mechanism):
    """Strided and fixed sparse attention; exact inside its pattern.

    pattern: strided (neighbours, and every stride-th token) | fixed (own block, and the summary tokens of all blocks)
    stride:  about the square root of the usual length; longer than the sequence is allowed (strided is then softmax
             attention, as fixed is)
    summary: fixed only: how many tokens at the end of each block are seen by everyone (the paper's c), at most stride

    A token whose key is masked is no part of its sequence: positions count real tokens only, and its own output is 0.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> sq.create("sparse", head_dim=8, stride=10)(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 100, 8])
    """

    name = "sparse"
    equation = "softmax over |i - j| <= stride or (i - j) mod stride = 0 (strided); own block or summary tokens (fixed)"
    paper = 'Child et al., "Generating Long Sequences with Sparse Transformers", 2019'
    complexity = "O(L (stride + L / stride) (D + E)), O(L sqrt(L)) at stride = sqrt(L)"
    cross = False
    each_query_alone = True
    zero_at_padding = True
    quadratic = True
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"stride": 6},
        {"stride": 1},
        {"pattern": "fixed", "stride": 8, "summary": 2},
        {"pattern": "fixed", "stride": 5, "summary": 5},
        {"pattern": "fixed", "stride": 128},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        pattern: str = "strided",
        stride: int = 128,
        summary: int = 8,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_option("pattern", pattern, ("strided", "fixed"))
        checks.check_positive("stride", stride)
        checks.check_positive("summary", summary)
        if pattern == "fixed" and summary > stride:
            raise ValueError(
                f"summary={summary} must be at most stride={stride}: a block of {stride} tokens has no more to show"
            )
        self.pattern, self.stride, self.summary = pattern, stride, summary

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"sparse needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}: in cross attention a query "
                "has no place among the keys, so no pattern is around it. Use 'softmax', 'multipole' or 'performer'"
            )
        if q.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        spec = Spec(self.stride, self.summary if self.pattern == "fixed" else 0, is_causal)
        return attend(BACKENDS, spec, call, q, k, v)
