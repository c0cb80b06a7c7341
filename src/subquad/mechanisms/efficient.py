"""Efficient attention: queries normalised over features, keys over tokens.

    softmax   out_i = sum_r softmax_r(q_i)_r  sum_j e^{k_jr} v_j / sum_j e^{k_jr}          rows sum to 1, rank at most D
    scaling   out_i = (1/n) sum_j (q_i.k_j) v_j,  n the number of keys

Shen et al., "Efficient Attention: Attention with Linear Complexities", 2021. It is an attention of its own, not an
estimate of softmax attention. The causal form replaces the sums over all tokens by running sums per feature.

The softmax form is the kernelised one with log features l_q = log softmax(q) - log sum_j e^{k_j} and l_k = k, whose
normaliser is 1; so it shares the state and the kernels of the others.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import checks
from ..features.base import scaled
from ..features.elementwise import ElementwiseFeatures, LogFeatures
from ..kernels import windowed_linear
from ..kernels.operator import Call, refuse_second_derivatives
from ..state import State, finite
from .kernelised import Kernelised

__all__ = ["Efficient"]


def identity(x: Tensor) -> Tensor:
    """x itself: the features of the scaling form."""
    return x


def _log_total(state: State) -> Tensor:
    """log sum_j e^{k_jr} over absorbed keys, (B, H, D); -inf where there are none."""
    assert state.far is not None
    return state.far.normaliser.log() + state.far.log_max


def _running_log_total(x: Tensor) -> Tensor:
    """log sum_{j <= i} e^{x_j}, x (..., L, D). Torch's second derivative of it is NaN."""
    (x,) = refuse_second_derivatives("a running logsumexp", x)
    return torch.logcumsumexp(x, -2)


def _running_definition(x: Tensor) -> Tensor:
    """The same with every derivative, O(L^2): from the L x L matrix of visible tokens."""
    length = x.shape[-2]
    visible = torch.ones(length, length, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
    terms = x.unsqueeze(-3).masked_fill(~visible, float("-inf"))
    shift = finite(terms.detach().amax(-2, keepdim=True))
    total = (terms - shift).exp().sum(-2)
    empty = total == 0
    return (total.masked_fill(empty, 1.0).log() + shift.squeeze(-2)).masked_fill(empty, float("-inf"))


@final
class Efficient(Kernelised):
    """Efficient attention; M = D. `scale` is 1 unless given (sqrt(scale) multiplies q and k).

    normalization: softmax (rows sum to 1) | scaling (plain products over n; rows do not sum to 1)
    """

    name = "efficient"
    equation = "softmax_features(q) (softmax_tokens(k)^T v)"
    paper = 'Shen et al., "Efficient Attention: Attention with Linear Complexities", 2021'
    complexity = "O(L D E)"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"normalization": "scaling"})

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        normalization: str = "softmax",
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_option("normalization", normalization, ("softmax", "scaling"))
        self.normalization = normalization
        if normalization == "softmax":
            self.feature_map = LogFeatures(head_dim)
        else:
            self.feature_map = ElementwiseFeatures(identity, head_dim)
            self.normalise = False

    def _log_queries(self, q: Tensor, log_total: Tensor, scale: float) -> Tensor:
        """log softmax(q) - log_total; log_total (B, H, L or 1, D) per KV head."""
        x = scaled(q.to(log_total.dtype), scale, queries=True).unflatten(1, (log_total.shape[1], -1))
        # Where no key has been seen every key feature is 0 and any finite value does.
        total = torch.where(torch.isinf(log_total), torch.zeros_like(log_total), log_total)
        return (torch.log_softmax(x, -1) - total.unsqueeze(2)).flatten(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        if is_causal:
            return self._scan(q, k, v, None, call)[0]
        return self._from(q, self._absorb(k, v, None, call), call, v.dtype)

    def _from(self, q: Tensor, state: State, call: Call, dtype: torch.dtype) -> Tensor:
        """What queries read from a state, in `dtype`."""
        if self.normalization == "softmax":
            log_q = self._log_queries(q, _log_total(state).unsqueeze(-2), call.scale)
            return windowed_linear.read(self._spec(False), call._replace(scale=1.0), log_q, state).to(dtype)
        out = windowed_linear.read(self._spec(False), call, q.to(state.weighted.dtype), state)
        return (out / state.count.clamp(min=1)[:, None, None, None]).to(dtype)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, State]:
        state = self._before(k, v, state, call.scale)
        key_mask = call.key_mask
        if self.normalization == "scaling":
            real = torch.ones_like(k[:, 0, :, 0], dtype=torch.int64) if key_mask is None else key_mask.long()
            seen = (state.count[:, None] + real.cumsum(-1)).clamp(min=1)
            wide = v.to(state.weighted.dtype)  # divide before rounding to v's dtype
            out, after = windowed_linear.scan(self._spec(True), call, q, k, wide, state)
            return (out / seen[:, None, :, None]).to(v.dtype), after
        log_k = scaled(k.to(state.weighted.dtype), call.scale, queries=False)
        hidden = log_k if key_mask is None else log_k.masked_fill(~key_mask[:, None, :, None], float("-inf"))
        before = _log_total(state).unsqueeze(-2)
        running = _running_definition if call.backend == "reference" else _running_log_total
        log_total = running(torch.cat([before, hidden], -2))[..., 1:, :]
        log_q = self._log_queries(q, log_total, call.scale)
        return windowed_linear.scan(self._spec(True), call._replace(scale=1.0), log_q, log_k, v, state)

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        return self._from(q, self._continued(state, self._origin(call.scale), q), call, q.dtype)
