"""Nystrom attention: the softmax matrix rebuilt from a few landmark queries and keys.

    out = softmax(scale q k~^T) Z softmax(scale q~ k^T) v,        Z ~ pinv(A),   A = softmax(scale q~ k~^T)

with q~, k~ the means of `landmarks` segments of the sequence. Xiong et al., "Nystromformer: A Nystrom-based algorithm
for approximating self-attention", 2021; their layer adds a depthwise convolution of v, which is a layer's business and
not attention. Z comes from the paper's iteration

    Z_0 = A^T / (|A|_1 |A|_inf),       Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4

with both norms taken per (batch, head): a maximum over the whole batch would couple its sequences.

Six iterations are a regulariser, not an unfinished computation. A is nearly singular on ordinary inputs, and its true
pseudo-inverse blows up what the landmarks miss: 256 tokens and 64 Gaussian landmarks gave a relative error of 0.35
after 6 iterations, 0.87 after 12, and 9.8 with the exact pseudo-inverse (178 with 32 landmarks), where uniform
attention has 0.64. `pinv="exact"` is there for the identity it satisfies: with a landmark for every token it is
softmax attention.

A segment mean sees tokens after most of its own, so there is no causal form.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype
from ..kernels.operator import Call
from .base import Mechanism, check_call
from .softmax import Softmax

__all__ = ["Nystrom", "iterative_pinv", "segment_means"]


def segment_means(x: Tensor, landmarks: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Means of `landmarks` equal segments of the real tokens: x (B, H, L, D) -> (B, H, M, D), and which exist (B, M).

    A sequence of n real tokens has min(landmarks, n) segments, whose sizes differ by at most one; where it stands in a
    padded batch and how long the others are does not matter. M = min(landmarks, L).

    >>> means, exist = segment_means(torch.arange(5.0).view(1, 1, 5, 1), 2, torch.tensor([[True] * 4 + [False]]))
    >>> means.flatten().tolist(), exist.tolist()
    ([0.5, 2.5], [[True, True]])
    """
    batch, _, length, _ = x.shape
    most = min(landmarks, length)
    number = torch.arange(most, device=x.device)
    if mask is None:
        exist = number.new_ones((batch, most), dtype=torch.bool)
        if length % most == 0:
            return x.unflatten(2, (most, length // most)).mean(3), exist
        mask = exist.new_ones((1, length))
    else:
        exist = number < mask.sum(-1, keepdim=True)
        x = x.masked_fill(~mask[:, None, :, None], 0.0)
    count = mask.sum(-1, keepdim=True)
    segments = count.clamp(max=landmarks)
    segment = torch.div((mask.cumsum(-1) - 1) * segments, count.clamp(min=1), rounding_mode="floor")
    member = ((segment[:, None, :] == number[:, None]) & mask[:, None, :]).to(x.dtype)  # (B or 1, M, L)
    share = member / member.sum(-1, keepdim=True).clamp(min=1.0)
    return share.unsqueeze(1) @ x, exist


def iterative_pinv(a: Tensor, iterations: int) -> Tensor:
    """The paper's approach to the pseudo-inverse of a (..., M, N), rows summing to 1 or 0, from its own norms.

    >>> a = torch.softmax(3 * torch.eye(4, dtype=torch.float64), -1)
    >>> bool((iterative_pinv(a, 12) - torch.linalg.pinv(a)).abs().max() < 1e-9)
    True
    """
    norms = a.sum(-1).amax(-1) * a.sum(-2).amax(-1)  # entries are not negative
    z = a.mT / torch.where(norms == 0, torch.ones_like(norms), norms)[..., None, None]
    eye = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


@final
class Nystrom(Mechanism):
    """Attention through landmarks.

    landmarks:  segments per sequence, of its true length; a sequence with fewer tokens makes each token a landmark
    pinv:       iterative (the paper's, `iterations` steps: a regulariser) | exact (badly conditioned; for identities)
    iterations: steps of the iteration; more is usually worse

    Padded queries must be named by `query_mask`, or they would enter the landmarks.

    >>> import torch, subquad as sq
    >>> attn = sq.create("nystrom", head_dim=8, landmarks=16)
    >>> attn(*torch.randn(3, 1, 2, 100, 8)).shape
    torch.Size([1, 2, 100, 8])
    """

    name = "nystrom"
    equation = "softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v, q~ and k~ segment means"
    paper = 'Xiong et al., "Nystromformer: A Nystrom-based algorithm for approximating self-attention", 2021'
    complexity = "O((L + S) landmarks (D + E) + landmarks^3)"
    causal = False
    causal_refusal = "a landmark is the mean of a segment, so it holds tokens that come after others of its segment"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"landmarks": 8},
        {"landmarks": 5, "iterations": 4},
        {"landmarks": 4, "pinv": "exact"},
        {"landmarks": 64},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        landmarks: int = 64,
        pinv: str = "iterative",
        iterations: int = 6,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_positive("landmarks", landmarks)
        checks.check_option("pinv", pinv, ("iterative", "exact"))
        checks.check_positive("iterations", iterations, least=0)
        self.landmarks, self.pinv, self.iterations = landmarks, pinv, iterations
        self.exact_attention = Softmax(head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        if q.shape[2] == 0 or k.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        dtype, groups = compute_dtype(v), q.shape[1] // k.shape[1]
        wide_q, wide_k, wide_v = (x.to(dtype) for x in (q, k, v))
        mean_q, have_q = segment_means(wide_q, self.landmarks, call.query_mask)
        mean_k, have_k = segment_means(wide_k, self.landmarks, call.key_mask)
        mean_k = mean_k.repeat_interleave(groups, 1)
        inverse = self._inverse(mean_q, mean_k, have_q, have_k, call.scale)
        if call.backend == "reference":
            left = _softmax(wide_q, mean_k, have_k, call.scale)
            right = _softmax(mean_q, wide_k.repeat_interleave(groups, 1), call.key_mask, call.scale)
            if call.key_mask is not None:
                wide_v = wide_v.masked_fill(~call.key_mask[:, None, :, None], 0.0)
            return ((left @ inverse @ right) @ wide_v.repeat_interleave(groups, 1)).to(v.dtype)
        # A mask only where there can be something to hide: without one torch's fastest kernel applies.
        seen: Tensor = self.exact_attention(mean_q, wide_k, wide_v, scale=call.scale, key_mask=call.key_mask)
        landmarks = None if call.key_mask is None else have_k
        out: Tensor = self.exact_attention(wide_q, mean_k, inverse @ seen, scale=call.scale, key_mask=landmarks)
        return out.to(v.dtype)

    def _inverse(self, mean_q: Tensor, mean_k: Tensor, have_q: Tensor, have_k: Tensor, scale: float) -> Tensor:
        """Z (B, Hq, landmarks of k, landmarks of q); rows and columns of landmarks that do not exist are 0."""
        a = _softmax(mean_q, mean_k, have_k, scale).masked_fill(~have_q[:, None, :, None], 0.0)
        if self.pinv == "iterative":
            return iterative_pinv(a, self.iterations)
        # The decomposition raises where it meets a NaN; here a NaN is passed on to the outputs it belongs to.
        broken = ~a.isfinite().all((-2, -1), keepdim=True)
        inverse: Tensor = torch.linalg.pinv(a.masked_fill(broken, 0.0))
        return inverse.masked_fill(broken, float("nan"))


def _softmax(q: Tensor, k: Tensor, key_mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T) as a matrix, 0 at masked keys and in rows without any key."""
    scores = scale * q @ k.mT
    if key_mask is None:
        return torch.softmax(scores, -1)
    hidden = ~key_mask[:, None, None, :]
    empty = hidden.all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(hidden & ~empty, float("-inf")), -1).masked_fill(hidden, 0.0)
