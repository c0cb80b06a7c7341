"""The Triton kernels as torch operators: one attention, its gradient, and the shapes of both for tracers.

    subquad::triton_attention            (q, k, v, ...)             -> out, S, z, c, log normalisers, exact chunks
    subquad::triton_attention_backward   (gradients, saved tensors) -> dq, dk, dv, dS_in, dz_in

The backward computes the states along the sequence again: they would take L M E / T floats until then. Importing this
file needs Triton; `TRITON_INTERPRET=1` in the environment before that runs the kernels on a CPU, slowly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backward as pull
from . import forward as push

__all__ = ["attention", "attention_backward"]

# Full attention is cut into this many pieces per head, whose states are then merged: enough to fill a GPU.
PIECES = 16


class _Sizes(NamedTuple):
    """Shapes of one call, and how the kernels cut them."""

    batch: int
    heads: int
    groups: int
    length_q: int
    length_k: int
    features: int
    dim: int
    width: int
    tokens: int  # per chunk
    rows: int  # features per block

    @property
    def blocks(self) -> dict[str, int]:
        return {"T": self.tokens, "BM": self.rows, "BD": _power(self.dim), "BE": _power(self.width)}

    def chunks(self, length: int) -> int:
        return -(-length // self.tokens)

    @property
    def feature_blocks(self) -> int:
        return -(-self.features // self.rows)


def _power(width: int) -> int:
    """The next power of two, and at least what a matrix instruction takes."""
    return max(16, 1 << (width - 1).bit_length())


def _sizes(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> _Sizes:
    batch, heads = k.shape[:2]
    wide = max(_power(q.shape[3]), _power(v.shape[3])) > 64
    return _Sizes(
        *(batch, heads, q.shape[1] // heads, q.shape[2], k.shape[2], weight.shape[1], q.shape[3], v.shape[3]),
        tokens=32 if wide else 64,
        rows=32 if wide else 64,
    )


def _maps(weight: Tensor, bias: Tensor, tilt: Tensor) -> tuple[int, ...]:
    """Strides between heads; 0 where the heads share."""
    return tuple(x.stride(0) if x.shape[0] > 1 else 0 for x in (weight, bias, tilt))


def _states(
    sizes: _Sizes, k: Tensor, v: Tensor, key_mask: Tensor, state: list[Tensor], maps: list[Tensor], square: float,
    causal: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """States before each chunk (causal; else the last one alone) and the state after all keys."""
    chunks = sizes.chunks(sizes.length_k)
    span = 1 if causal else max(1, -(-chunks // PIECES))
    pieces = -(-chunks // span)
    pairs = sizes.batch * sizes.heads
    slots = (pairs, pieces, sizes.features)
    sums, totals, maxima = (
        torch.empty(shape, dtype=torch.float32, device=k.device) for shape in ((*slots, sizes.width), slots, slots)
    )
    after = [torch.empty_like(x) for x in state]
    mask = key_mask if key_mask.numel() else k
    counts = (sizes.features, sizes.dim, sizes.width, *_maps(*maps), square)
    if pieces:
        push.absorb_pieces[(pieces, sizes.feature_blocks, pairs)](
            *(k, v, mask, *maps, sums, totals, maxima, sizes.length_k, sizes.heads, pieces, span, *counts),
            **sizes.blocks,
            MASKED=bool(key_mask.numel()),
        )
    push.scan_pieces[(sizes.feature_blocks, pairs)](
        *(sums, totals, maxima, *state, *after, pieces, sizes.features, sizes.width),
        BM=sizes.rows,
        BE=_power(sizes.width),
        KEEP=causal,
    )
    return ([sums, totals, maxima] if causal else after), after


@torch.library.custom_op("subquad::triton_attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: list[Tensor],
    maps: list[Tensor],
    square: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Kernelised attention with exponential features.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E): float32, bfloat16 or float16
    key_mask: (B, S) bool, or empty
    state:    [S (B, H, M, E), z (B, H, M), c (B, H, M)] float32
    maps:     weight (h, M, D), bias (h, M), tilt (h, D) float32, h = 1 or H

    Returns out (B, Hq, L, E) float32, the state after the keys, log normalisers (B, Hq, L), and which chunks took the
    exact form.
    """
    q, k, v, key_mask = (x.contiguous() for x in (q, k, v, key_mask))
    state, maps = [x.contiguous() for x in state], [x.contiguous() for x in maps]
    sizes = _sizes(q, k, v, maps[0])
    starts, after = _states(sizes, k, v, key_mask, state, maps, square, causal)
    out, norms, exact = _outputs(q, v, sizes)
    chunks = sizes.chunks(sizes.length_q)
    if chunks:
        push.attend_rows[(chunks, q.shape[0] * q.shape[1])](
            *(q, k, v, key_mask if key_mask.numel() else k, *maps, *starts, out, norms, exact),
            *(sizes.length_q, sizes.heads, sizes.groups, chunks if causal else 1, chunks),
            *(sizes.features, sizes.dim, sizes.width, *_maps(*maps), square),
            **sizes.blocks,
            MASKED=bool(key_mask.numel()),
            CAUSAL=causal,
        )
    return out, after[0], after[1], after[2], norms, exact


def _outputs(q: Tensor, v: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    out = torch.empty((*shape, v.shape[3]), dtype=torch.float32, device=q.device)
    norms = torch.empty(shape, dtype=torch.float32, device=q.device)
    return out, norms, torch.zeros((*shape[:2], sizes.chunks(shape[2])), dtype=torch.int32, device=q.device)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor,
    state: list[Tensor],
    maps: list[Tensor],
    square: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out, norms, exact = _outputs(q, v, _sizes(q, k, v, maps[0]))
    s, z, c = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in state)
    return out, s, z, c, norms, exact


@torch.library.custom_op("subquad::triton_attention_backward", mutates_args=())
def attention_backward(
    grads: list[Tensor], saved: list[Tensor], state: list[Tensor], maps: list[Tensor], square: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention`: grads = [dout, dS, dz], saved = [q, k, v, key_mask, out, log normalisers, exact]."""
    q, k, v, key_mask, out, norms, exact = (x.contiguous() for x in saved)
    dout, ds_out, dz_out = (x.contiguous() for x in grads)
    state, maps = [x.contiguous() for x in state], [x.contiguous() for x in maps]
    sizes = _sizes(q, k, v, maps[0])
    starts, after = _states(sizes, k, v, key_mask, state, maps, square, causal)
    delta = (dout * out).sum(-1)
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
    pairs, rows = sizes.batch * sizes.heads, q.shape[0] * q.shape[1]
    chunks_q, chunks_k = sizes.chunks(sizes.length_q), sizes.chunks(sizes.length_k)
    mask = key_mask if key_mask.numel() else k
    of_rows = (dout, delta, norms)
    counts = (sizes.features, sizes.dim, sizes.width, *_maps(*maps))
    masked = {"MASKED": bool(key_mask.numel()), "CAUSAL": causal}
    if chunks_q:
        pull.pull_rows[(chunks_q, rows)](
            *(q, k, v, mask, *maps, *starts, *of_rows, exact, dq),
            *(sizes.length_q, sizes.heads, sizes.groups, chunks_q if causal else 1, chunks_q, *counts, square),
            **sizes.blocks,
            **masked,
        )
    span = 1 if causal else max(1, -(-chunks_q // PIECES))
    pieces = -(-chunks_q // span)
    slots = (pairs, pieces, sizes.features)
    dsums, dtotals = (
        torch.empty(shape, dtype=torch.float32, device=q.device) for shape in ((*slots, sizes.width), slots)
    )
    if pieces:
        pull.pull_state[(pieces, sizes.feature_blocks, pairs)](
            *(q, maps[0], maps[1], starts[2], *of_rows, dsums, dtotals),
            *(sizes.length_q, sizes.heads, sizes.groups, pieces if causal else 1, pieces, span, *counts[:5]),
            **sizes.blocks,
            CAUSAL=causal,
        )
    if causal:
        maxima = starts[2]
        last = after[2].view(pairs, 1, sizes.features)
        following = torch.cat([maxima[:, 1:], last], 1).contiguous() if chunks_k else last
        ds_in, dz_in = torch.empty_like(state[0]), torch.empty_like(state[1])
        pull.scan_back[(sizes.feature_blocks, pairs)](
            *(dsums, dtotals, maxima, following, ds_out, dz_out, ds_in, dz_in, pieces, sizes.features, sizes.width),
            BM=sizes.rows,
            BE=_power(sizes.width),
        )
    else:
        following = after[2]
        dsums = dsums.sum(1).view_as(ds_out) + ds_out
        dtotals = dtotals.sum(1).view_as(dz_out) + dz_out
        # The state given was rescaled from its own maxima to the last ones.
        rho = torch.exp(state[2] - torch.where(after[2] == -torch.inf, 0.0, after[2]))
        ds_in, dz_in = dsums * rho.unsqueeze(-1), dtotals * rho
    if chunks_k:
        pull.pull_keys[(chunks_k, pairs)](
            *(q, k, v, mask, *maps, dsums, dtotals, following, *of_rows, exact, dk, dv),
            *(sizes.length_k, sizes.heads, sizes.groups, chunks_k if causal else 1, chunks_k, *counts, square),
            **sizes.blocks,
            **masked,
        )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ds_in, dz_in


@attention_backward.register_fake
def _(
    grads: list[Tensor], saved: list[Tensor], state: list[Tensor], maps: list[Tensor], square: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, s, z = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*saved[:3], state[0], state[1])
    )
    return q, k, v, s, z


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, state, maps, square, causal = inputs
    out, _, _, _, norms, exact = output
    ctx.save_for_backward(q, k, v, key_mask, out, norms, exact, *state, *maps)
    ctx.options = (square, causal)


def _backward(ctx: Any, dout: Tensor | None, ds: Tensor | None, dz: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    state, maps = saved[7:10], saved[10:]
    grads = [
        torch.zeros_like(like) if grad is None else grad
        for grad, like in zip((dout, ds, dz), (saved[4], *state[:2]), strict=True)
    ]
    dq, dk, dv, ds_in, dz_in = attention_backward(grads, saved[:7], state, maps, *ctx.options)
    return dq, dk, dv, None, [ds_in, dz_in, None], [None] * len(maps), None, None


attention.register_autograd(_backward, setup_context=_save)
