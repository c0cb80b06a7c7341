"""Hybrid attention: softmax where it matters, linear attention for the rest, one normaliser.

    out_i = (sum_{j near} e^{s_ij} v_j + c sum_{j far} phi(q_i).phi(k_j) v_j) / (the same with 1 for v_j), s = scale q.k

    near i: |i - j| <= window, and the first `sinks` keys        causal: j <= i as well
    far:    every other key

The near weights are exact. The far ones come from any kernelised mechanism; where its map estimates e^{s} itself
(random features, Taylor) c = 1 and the two fit together without training, otherwise c is learned, one per head. Exact
windows beside a linear far field are used by "Based" (Arora et al., 2024) and LoLCATs (Zhang et al., 2025), sinks are
those of Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from .. import checks
from ..kernels.operator import Call
from ..kernels.windowed_linear import WindowedLinear
from .base import Mechanism
from .kernelised import Kernelised
from .windowed import Windowed

__all__ = ["Hybrid"]


def _make_far(far: object, head_dim: int, heads: int | None, kv_heads: int | None) -> Kernelised:
    """The far mechanism from a name, a dict of options with "mechanism", or an object."""
    from . import create, list_mechanisms  # the dict of names lists this file as well

    if isinstance(far, dict):
        options = dict(far)
        name = checks.named_mechanism("far", options)
        del options["mechanism"]
        for argument, value in (("head_dim", head_dim), ("heads", heads), ("kv_heads", kv_heads)):
            given = options.pop(argument, None)
            if given is not None and value is not None and given != value:
                raise ValueError(f"far was made with {argument}={given}, hybrid with {argument}={value}")
        made = create(name, head_dim, heads, kv_heads, **options)
    elif isinstance(far, str):
        checks.check_option("far", far, list_mechanisms())
        made = create(far, head_dim, heads, kv_heads)
    elif isinstance(far, Mechanism):
        made = create(far, head_dim)
    else:
        raise TypeError(f"far must be a mechanism's name, a dict of options or a Mechanism, got {type(far).__name__}")
    plain = isinstance(made, Kernelised) and made.normalise
    if not plain or type(made)._attend is not Kernelised._attend or type(made)._scan is not Kernelised._scan:
        raise ValueError(
            f"far={made.name!r} cannot be a far field: its weights must be phi(q).phi(k) of one query and one key. "
            "Choose 'performer', 'taylor', 'hedgehog' or 'linear'"
        )
    assert isinstance(made, Kernelised)
    return made


def _variants() -> tuple[dict[str, Any], ...]:
    near = {"window": 4, "sinks": 2}
    performer = {"mechanism": "performer", "num_features": 24, "seed": 3}
    return (
        {**near, "far": {**performer, "features": "hyperbolic"}},
        {**near, "far": {**performer, "features": "sderf", "antithetic": True, "center": True}},
        {"window": 7, "sinks": 0, "far": {**performer, "features": "positive"}},
        {"window": 0, "sinks": 5, "far": {**performer, "features": "oprf"}},
        {"window": 3, "sinks": 1, "far": {**performer, "features": "trig"}},
        {"window": 0, "sinks": 0, "far": {**performer, "features": "relu"}},
        {**near, "far": {**performer, "features": "positive", "kernel": "gaussian"}},
        {**near, "far": {"mechanism": "taylor", "degree": 2}},
        {**near, "far": {"mechanism": "taylor", "degree": 1, "center": True}},
        {**near, "far": {"mechanism": "taylor", "degree": 2, "hermite": True}},
        {**near, "far": "linear"},
        {**near, "far": "hedgehog"},
    )


@final
class Hybrid(Windowed):
    """Exact window and sinks, kernelised far field.

    window: tokens on each side with exact weights (causal: the last `window` tokens and the token itself)
    sinks:  the first keys, exact for everyone
    far:    a kernelised mechanism for the rest: a name, {"mechanism": name, **options}, or an object

    A token whose key is masked is no part of its sequence: it takes no place in any window, and its own output is 0.
    `scale` multiplies q.k in both fields. Far maps that estimate e^{scale q.k}
    (performer with the softmax kernel, taylor) join the exact weights as they are; the others (linear, relu, the
    Gaussian kernel, hedgehog) get a learned factor per head, which needs heads=. Signed maps (trig, Taylor degree 1,
    hermite) can make far weights negative: a row whose normaliser comes close to 0 is then unbounded.

    `scan` keeps the far state, the last `window` tokens and the sinks: constant memory. States merge in order; each
    kind of token ends where a scan over both contexts would have put it.

    >>> import torch, subquad as sq
    >>> attn = sq.create("hybrid", head_dim=16, window=32, sinks=4, far={"mechanism": "performer", "seed": 0})
    >>> q, k, v = torch.randn(3, 1, 2, 200, 16)
    >>> out = attn(q, k, v, is_causal=True)
    >>> exact = sq.attention(q, k, v, "softmax", is_causal=True)
    >>> torch.allclose(out[:, :, :33], exact[:, :, :33], atol=1e-5)   # everything is still near
    True
    >>> first, state = attn.scan(q[:, :, :150], k[:, :, :150], v[:, :, :150])
    >>> rest, state = attn.scan(q[:, :, 150:], k[:, :, 150:], v[:, :, 150:], state)
    >>> torch.allclose(torch.cat([first, rest], 2), out, atol=1e-4)
    True
    """

    name = "hybrid"
    equation = "(sum_near e^s v + c sum_far phi(q).phi(k) v) / (the same with 1 for v), s = q.k / sqrt(D)"
    paper = 'after Arora et al., "Based", 2024, and Xiao et al., "Attention Sinks", 2024'
    complexity = "O(L (M + window + sinks) (D + E)); state O(M E + (window + sinks) (D + E))"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = _variants()
    far: Kernelised

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        window: int = 64,
        sinks: int = 4,
        far: str | dict[str, Any] | Mechanism = "performer",
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        self._set_window(window, sinks)
        self.far = _make_far(far, head_dim, heads, kv_heads)
        self.signed = self.far.signed
        self.log_scale: nn.Parameter | None = None
        if not self.far.feature_map.estimates_softmax:
            self.need_heads(f"far={self.far.name!r}, whose weights are not on the scale of e^(q.k),")
            assert self.heads is not None
            self.log_scale = nn.Parameter(torch.zeros(self.heads))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, window={self.window}, sinks={self.sinks}"

    def calibrate(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> None:
        """Calibrate the far field."""
        self.far.calibrate(q, k, key_mask=key_mask, query_mask=query_mask)

    def _spec(self, is_causal: bool) -> WindowedLinear:
        return WindowedLinear(self.far.feature_map, self.window, self.sinks, self.log_scale, is_causal)

    def _origin(self, scale: float) -> str:
        return f"hybrid(window={self.window}, sinks={self.sinks}) over {self.far._origin(scale)}"

    @property
    def instead_of_cross(self) -> str:  # type: ignore[override]
        """Its far field alone."""
        return f"its far field alone, {self.far.name!r}"

    def _all_near(self, q: Tensor, v: Tensor, call: Call, is_causal: bool) -> bool:
        if self.log_scale is not None and torch.is_grad_enabled() and self.log_scale.requires_grad:
            return False  # its gradient is 0, not absent
        near = super()._all_near(q, v, call, is_causal)
        if near:
            self.far.feature_map.check_ready()
        return near

    def absorb(self, k: Tensor, v: Tensor, state: Any = None, **call: Any) -> Any:
        """Refused: what a query may see depends on where it stands, which absorb and read leave open."""
        raise NotImplementedError(
            "hybrid has no absorb/read: its window stands around a query's own position, which cross attention does "
            f"not have. Use scan(q, k, v) to build a state, and {self.far.name!r} alone for cross attention"
        )

    def read(self, q: Tensor, state: Any, **call: Any) -> Tensor:
        """Refused, see `absorb`."""
        return self.absorb(q, q, state)  # type: ignore[no-any-return]
