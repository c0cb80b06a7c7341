"""Multi-head attention around any mechanism: projections, heads, positions.

    out = concat_h( attention(x W_q^h, c W_k^h, c W_v^h) ) W_o,      c = x (self) or another sequence (cross)

Vaswani et al., "Attention Is All You Need", 2017; with fewer key heads than query heads it is the grouped-query form of
Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..mechanisms import Mechanism
from ..state import Movable, check_same, merge, register_state
from .config import LayerMechanism
from .layer_mechanisms import make_mechanism
from .modes import evaluation_mode
from .positions import Rotation, SequenceStart, checked_start, rotation_at, token_positions

__all__ = ["AttentionState", "MultiheadAttention", "calibrating", "check_sequence", "reset_linear"]


@dataclass(frozen=True)
class AttentionState(Movable):
    """What a layer remembers: the mechanism's state, and where the next token stands. Immutable.

    start, length: (B,) int64: the position of the first token, and the number of real tokens since
    """

    inner: Any
    start: Tensor
    length: Tensor

    @property
    def origin(self) -> str:
        """Which mechanism made it."""
        return str(getattr(self.inner, "origin", ""))

    def merge(self, later: AttentionState) -> AttentionState:
        """This context followed by `later`'s, each encoded on its own; the next token stands after both."""
        check_same(self, later)
        return replace(self, inner=merge(self.inner, later.inner), length=self.length + later.length)


register_state(AttentionState, static=())


def check_sequence(argument: str, x: object, dim: int) -> None:
    """Refuse anything but floats (batch, length, dim)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument} must be a tensor of shape (batch, length, {dim}), got {type(x).__name__}")
    if x.dim() == 2 and not x.is_floating_point():
        raise TypeError(
            f"{argument} must be floats of shape (batch, length, {dim}), got token ids ({checks.describe_shape(x)} of "
            f"{x.dtype}); build the model with vocab=, or embed them first"
        )
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(
            f"{argument} must have shape (batch, length, {dim}), got {checks.describe_shape(x)}; add the batch with "
            f"{argument}.unsqueeze(0), or build the layer for another dim"
        )
    if not x.is_floating_point():
        raise TypeError(f"{argument} must be floating-point, got {x.dtype}; embed token ids first (vocab= does it)")


def reset_linear(*linears: nn.Linear | None) -> None:
    """Xavier-uniform weights and zero biases, the start of every linear map here."""
    for linear in linears:
        if linear is not None:
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class MultiheadAttention(nn.Module):
    """Attention with projections; (B, L, dim) -> (B, L, dim).

    dim, heads:   model width and query heads
    mechanism:    a name with `options`, {"mechanism": name, **options}, or an object
    kv_heads:     key and value heads, a divisor of heads (grouped-query heads); None = heads
    head_dim:     None = dim / heads
    context_dim:  width of the other sequence in cross attention; None = dim
    bias:         of the four linear maps
    dropout:      on the output. There is none on the attention weights: sub-quadratic attention never
                  forms them, and dropping features or values instead would not be the same
    rotary:       turn q and k by their positions (self attention only), with base `rotary_base`

    Mechanisms that make their keys from the queries (LSH with shared_qk) get no key projection.

    >>> import subquad as sq
    >>> layer = sq.nn.MultiheadAttention(32, 4, "performer", num_features=16, seed=0, kv_heads=2, rotary=True)
    >>> x = torch.randn(2, 10, 32)
    >>> out = layer(x, is_causal=True)
    >>> first, state = layer.scan(x[:, :7])
    >>> rest, state = layer.scan(x[:, 7:], state)
    >>> torch.allclose(torch.cat([first, rest], 1), out, atol=1e-5)
    True
    """

    sequence_start: SequenceStart | None = None

    def __init__(
        self,
        dim: int,
        heads: int,
        mechanism: LayerMechanism = "multipole",
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        rotary_base: float = 10000.0,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.check_positive("dim", dim)
        checks.check_positive("heads", heads)
        checks.check_head_dim(dim, heads, head_dim)
        for argument, count in (("kv_heads", kv_heads), ("head_dim", head_dim), ("context_dim", context_dim)):
            if count is not None:
                checks.check_positive(argument, count)
        checks.check_flag("bias", bias)
        checks.check_flag("rotary", rotary)
        checks.check_number("dropout", dropout, 0, 1, closed=True)
        checks.check_number("rotary_base", rotary_base, 0)
        width = dim // heads if head_dim is None else head_dim
        self.mechanism: Mechanism = make_mechanism(mechanism, width, heads, kv_heads, **options)
        self.dim, self.heads, self.head_dim = dim, heads, width
        self.kv_heads = heads if kv_heads is None else kv_heads
        checks.check_head_counts(heads, self.kv_heads)
        if not self.mechanism.uses_keys and self.kv_heads != heads:
            raise ValueError(
                f"kv_heads={kv_heads}: {self.mechanism.name} makes its keys from the {heads} heads of queries, so "
                "values need as many; leave kv_heads out"
            )
        if rotary and width % 2:
            raise ValueError(f"rotary=True turns pairs, so head_dim={width} must be even")
        self.rotary, self.rotary_base = rotary, rotary_base
        self.context_dim = dim if context_dim is None else context_dim
        self.q = nn.Linear(dim, heads * width, bias=bias)
        self.k = nn.Linear(self.context_dim, self.kv_heads * width, bias=bias) if self.mechanism.uses_keys else None
        self.v = nn.Linear(self.context_dim, self.kv_heads * width, bias=bias)
        self.out = nn.Linear(heads * width, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)
        # Set by `calibrating`: hand q and k to the mechanism's statistics before attending.
        self.calibrating = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, zero biases; the mechanism is left alone."""
        reset_linear(self.q, self.k, self.v, self.out)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, rotary={self.rotary}"

    # -- heads ------------------------------------------------------------------------------------------------------

    def _split(self, x: Tensor, heads: int) -> Tensor:
        split: Tensor = x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # (B, H, L, D)
        return split

    def _queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        q = self._split(self.q(x), self.heads)
        return q if rotation is None else rotation(q)

    def _keys_values(self, context: Tensor, q: Tensor | None, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        v = self._split(self.v(context), self.kv_heads)
        if self.k is None:
            if q is None:
                raise ValueError(
                    f"{self.mechanism.name} makes its keys from the queries, so it has no memory to absorb"
                )
            return q, v
        k = self._split(self.k(context), self.kv_heads)
        return (k if rotation is None else rotation(k)), v

    def _joined(self, out: Tensor) -> Tensor:
        joined: Tensor = self.dropout(self.out(out.transpose(1, 2).flatten(2)))
        return joined

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
        return rotation_at(positions, self.head_dim, self.rotary_base, dtype) if self.rotary else None

    # -- whole sequences --------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """x (B, L, dim), context (B, S, context_dim) or None for self attention -> (B, L, dim).

        key_mask (B, S), query_mask (B, L): bool, True = real; in self attention query_mask is key_mask unless given.
        rotation: cos and sin shared by several layers; None = from this layer's own `rotary` setting.
        """
        check_sequence("x", x, self.dim)
        if context is None:
            checks.check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
            query_mask = key_mask if query_mask is None else query_mask
            if rotation is None and self.rotary:
                start = None if self.sequence_start is None else self.sequence_start(x, key_mask)
                rotation = self._rotation(token_positions(x.shape[1], key_mask, x.device, start), x.dtype)
        else:
            check_sequence("context", context, self.context_dim)
            rotation = None
        q = self._queries(x, rotation)
        k, v = self._keys_values(x if context is None else context, q, rotation)
        if self.calibrating and self.mechanism.uses_calibration:
            self.mechanism.calibrate(q, k, key_mask=key_mask, query_mask=query_mask)
        return self._joined(self.mechanism(q, k, v, is_causal=is_causal, key_mask=key_mask, query_mask=query_mask))

    # -- token by token ---------------------------------------------------------------------------------------------

    def scan(
        self,
        x: Tensor,
        state: AttentionState | None = None,
        *,
        key_mask: Tensor | None = None,
        start: int | Tensor = 0,
    ) -> tuple[Tensor, AttentionState]:
        """Consume x (B, L, dim) causally after the tokens of `state`; returns (out, new state).

        Positions continue from the state; where there is none they begin at `start` (an integer or (B,) int64).
        """
        check_sequence("x", x, self.dim)
        checks.check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
        if state is None:
            begin = checked_start(start, x.shape[0], x.device)
            assert begin is not None
            state = AttentionState(None, begin, torch.zeros_like(begin))
        elif not isinstance(state, AttentionState):
            raise TypeError(f"state must be an AttentionState from this layer's scan(), got {type(state).__name__}")
        elif state.length.shape[0] != x.shape[0]:
            raise ValueError(f"the state has batch size {state.length.shape[0]}, x has {x.shape[0]}")
        positions = token_positions(x.shape[1], key_mask, x.device, state.start + state.length)
        out, inner = self.advance(x, state.inner, key_mask, self._rotation(positions, x.dtype))
        real = x.shape[1] if key_mask is None else key_mask.sum(-1)
        return out, replace(state, inner=inner, length=state.length + real)

    def advance(self, x: Tensor, inner: Any, key_mask: Tensor | None, rotation: Rotation | None) -> tuple[Tensor, Any]:
        """`scan` for callers that keep positions themselves: takes and returns the mechanism's own state."""
        q = self._queries(x, rotation)
        k, v = self._keys_values(x, q, rotation)
        out, inner = self.mechanism.scan(q, k, v, inner, key_mask=key_mask)
        return self._joined(out), inner

    def absorb(self, context: Tensor, state: Any = None, *, key_mask: Tensor | None = None) -> Any:
        """The mechanism's state after another sequence (B, S, context_dim), to be read by later queries."""
        check_sequence("context", context, self.context_dim)
        return self.mechanism.absorb(*self._keys_values(context, None, None), state, key_mask=key_mask)

    def read(self, x: Tensor, state: Any) -> Tensor:
        """Queries x (B, L, dim) over everything absorbed -> (B, L, dim)."""
        check_sequence("x", x, self.dim)
        return self._joined(self.mechanism.read(self._queries(x, None), state))


@contextmanager
def calibrating(model: nn.Module) -> Iterator[None]:
    """Inside, every attention layer of `model` hands the queries and keys it sees to its mechanism's statistics.

    Without gradients and in evaluation mode; mechanisms that use no statistics are left alone.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    try:
        for layer in layers:
            layer.calibrating = True
        with evaluation_mode(model), torch.no_grad():
            yield
    finally:
        for layer in layers:
            layer.calibrating = False
