"""Hedgehog: a learned feature map that mimics softmax weights.

    out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j),     phi(x) = [softmax(W x), softmax(-W x)]

Zhang et al., "The Hedgehog and the Porcupine: Expressive Linear Attentions with Softmax Mimicry", 2024. W is learned
per head, with the model or by `fit(q, k)` alone; untrained it is a kernel of its own, no estimate of softmax
attention.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

from torch import Tensor

from .. import checks
from ..features.learned import HedgehogFeatures, fit, mean_divergence
from .kernelised import Kernelised

__all__ = ["Hedgehog"]


@final
class Hedgehog(Kernelised):
    """Learned linear attention; M = 2 D. Needs heads=, because W is per KV head.

    activation: softmax | exp, the function around W x
    shared:     one W for queries and keys instead of one each

    >>> import torch, subquad as sq
    >>> attn = sq.create("hedgehog", head_dim=8, heads=2)
    >>> q, k = 2 * torch.randn(2, 4, 2, 32, 8)
    >>> losses = attn.fit(q, k, steps=40)          # mean KL to the softmax rows, per step
    >>> losses[-1] < losses[0]
    True
    """

    name = "hedgehog"
    equation = "phi(q)^T S / phi(q)^T z, phi(x) = [softmax(W x), softmax(-W x)]"
    paper = 'Zhang et al., "The Hedgehog and the Porcupine", 2024'
    complexity = "O(L D (D + E))"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {},
        {"activation": "exp"},
        {"activation": "softmax", "shared": True},
    )
    feature_map: HedgehogFeatures

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        activation: str = "softmax",
        shared: bool = False,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_option("activation", activation, ("softmax", "exp"))
        checks.check_flag("shared", shared)
        self.activation, self.shared = activation, shared
        self.feature_map = HedgehogFeatures(
            head_dim, kv_heads=self.need_heads("learned features"), activation=activation, shared=shared
        )

    def fit(
        self,
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        steps: int = 200,
        lr: float = 1e-2,
        rows: int | None = 256,
        seed: int = 0,
    ) -> list[float]:
        """Train W so that the weights match softmax attention on samples q (B, Hq, L, D), k (B, H, S, D).

        steps, lr: of Adam;  rows: query positions per step (None = all), drawn from `seed`
        Returns the loss of every step, the mean KL(softmax row || own row) in nats.
        """
        self._check_sample(q, k, is_causal, key_mask, query_mask)
        checks.check_positive("steps", steps)
        checks.check_number("lr", lr, 0)
        if rows is not None:
            checks.check_positive("rows", rows)
        return fit(
            self.feature_map,
            q,
            k,
            scale=self.resolve_scale(scale),
            is_causal=is_causal,
            key_mask=key_mask,
            query_mask=query_mask,
            steps=steps,
            lr=lr,
            rows=rows,
            seed=seed,
        )

    def divergence(
        self,
        q: Tensor,
        k: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> float:
        """Mean KL(softmax row || own row) in nats, dense: O(L S)."""
        self._check_sample(q, k, is_causal, key_mask, query_mask)
        return mean_divergence(
            self.feature_map,
            q,
            k,
            scale=self.resolve_scale(scale),
            is_causal=is_causal,
            key_mask=key_mask,
            query_mask=query_mask,
        )

    def _check_sample(
        self, q: Tensor, k: Tensor, is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None
    ) -> None:
        checks.check_attention(q, k, k, head_dim=self.head_dim, heads=self.heads, kv_heads=self.kv_heads)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        checks.check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q.device)
        if q.shape[2] == 0 or k.shape[2] == 0:
            raise ValueError(f"q and k: sample tokens are needed, got {q.shape[2]} queries and {k.shape[2]} keys")
        checks.check_flag("is_causal", is_causal)
        if is_causal:
            checks.check_causal_lengths(q, k)
