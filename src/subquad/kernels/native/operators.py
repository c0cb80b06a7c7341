"""The native kernels as torch operators: one attention, its gradient, and the shapes of both for tracers.

    subquad::attention            (q, k, v, ...)             -> out, S, z, c, stats, checkpoints
    subquad::attention_backward   (gradients, saved tensors) -> dq, dk, dv, dsinks, dfar, dS_in, dz_in, dgain

Registered with fake and autograd implementations, so `torch.compile(fullgraph=True)` keeps them as one node each. Empty
tensors stand for "not there" (no mask, no state, no projection): a traced graph then has one signature.

`attention` says what the arguments are. The same list of them goes through every entrance: the plain call
(`call_forward`), the operator (tracers), and the autograd function (`functional_attention`). Eager training takes that
one, because the first call of an operator makes torch import its compiler (two seconds, some 800 modules).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..operator import differentiable_once
from . import library
from .library import DTYPES, FUNCTIONS, SEGMENT, Call, Map

__all__ = [
    "NOWHERE",
    "PACKED_SIZE",
    "Results",
    "attention",
    "attention_backward",
    "call_forward",
    "check_status",
    "functional_attention",
    "make_call",
    "narrow",
    "pack_maps",
    "widen_all",
    "write",
]

# The place of a sink that is not there.
NOWHERE = 1 << 40

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# Filling ctypes fields one by one costs more than a decode step; these write whole runs of them.
_HEADER = struct.Struct("11q8if3i")
_TENSOR = struct.Struct("P4q2i")
_TENSORS = "q k v out dout dq dk dv near_q near_k sink_k sink_v near_dq near_dk sink_dk sink_dv token_k token_v".split()
_PLACES = {name: getattr(Call, name).offset for name in _TENSORS}
_MAPS = Call.map_q.offset
PACKED_SIZE = ctypes.sizeof(Map) * 2


def pack_maps(arrays: list[Tensor], square: float) -> bytes:
    """The two maps as the library sees them; valid as long as `arrays` live.

    An eighth array is the queries' own tilt (h, D) or empty, and says that their scale matters (beside near keys).
    """
    weight, query_offset, key_offset, bias, tilt, signs, norms, *own = arrays
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in arrays)
    maps = (Map * 2)()
    nothing = query_offset.new_empty(0)
    for side, offset, leaning in zip(maps, (query_offset, key_offset), (*(own or [nothing]), tilt), strict=True):
        named = {"weight": weight, "offset": offset, "bias": bias, "signs": signs, "norms": norms, "tilt": leaning}
        for name, array in named.items():
            if array.numel():
                setattr(side, name, array.data_ptr())
                setattr(side, f"{name}_head", array.stride(0) if array.shape[0] > 1 else 0)
    maps[0].square, maps[1].square = square if own else 0.0, square
    return bytes(maps)


def write(call: Call, name: str, x: Tensor) -> None:
    """`x` (B, H, L, width) as the library sees it; the caller keeps `x` alive."""
    _TENSOR.pack_into(call, _PLACES[name], x.data_ptr(), *x.stride(), DTYPES[x.dtype], 0)


def _rows(q: Tensor, weight: Tensor, norms: Tensor, function: str) -> int:
    """Rows of the projection; q as the far map takes it."""
    if function == "none":
        return 0
    if function == "taylor":
        return int(1 + q.shape[-1] * (q.shape[-1] + 3) // 2)
    return int(weight.shape[-2] if weight.numel() else norms.shape[-1] if norms.numel() else q.shape[-1])


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    normalise: bool,
    tail: bool,
    *,
    maps: bytes | None = None,
) -> Call:
    """The call for the library; the caller keeps every tensor alive, and has made states, masks and gain contiguous.

    maps: `pack_maps(arrays, square)`, where the caller keeps it.
    """
    near = window >= 0
    far_q, far_k = far or (q, k)
    weight, signs, norms = arrays[0], arrays[5], arrays[6]
    rows = _rows(far_q, weight, norms, function)
    projection = 0 if weight.numel() else 1 if norms.numel() else 2
    batch, heads_q, length, dim = far_q.shape
    heads, stored = k.shape[1], k.shape[2]
    call = Call()
    _HEADER.pack_into(
        call,
        0,
        *(batch, heads_q, heads, length, length + tail if near else stored, dim, v.shape[3]),
        *(rows * 2 if antithetic else rows, rows, past - window - 1 if near else 0, stored),
        *(FUNCTIONS[function], projection, antithetic, near or causal, signs.shape[-2] if projection == 1 else 0),
        *(normalise, torch.get_num_threads(), 0, epsilon, 0, 0, near),
    )
    write(call, "q", far_q)
    write(call, "k", far_k)
    write(call, "v", v)
    memoryview(call).cast("B")[_MAPS : _MAPS + PACKED_SIZE] = pack_maps(arrays, square) if maps is None else maps
    far_mask, near_mask, places = masks
    if far_mask.numel():
        call.key_mask = far_mask.data_ptr()
        call.mask_batch, call.mask_token = far_mask.stride()
    if state:
        call.s_in, call.z_in, call.c_in = (x.data_ptr() for x in state)
    if not near:
        return call
    write(call, "near_q", q)
    write(call, "near_k", k)
    if near_mask.numel():
        call.near_mask = near_mask.data_ptr()
        call.near_batch, call.near_token = near_mask.stride()
    if sinks:
        write(call, "sink_k", sinks[0])
        write(call, "sink_v", sinks[1])
        call.sinks, call.sink_place = sinks[0].shape[2], places.data_ptr()
    if gain.numel():
        call.gain = gain.data_ptr()
    call.near_dim, call.window, call.past = q.shape[3], window, past
    call.both_sides, call.scale = not causal, scale
    return call


def check_status(status: int) -> None:
    """Raise what a call of the library reports."""
    if status:
        raise MemoryError("the native kernels could not allocate their working memory")


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, features: int, near: bool, causal: bool, tail: bool, keep: bool
) -> Results:
    batch, heads, width = q.shape[0], k.shape[1], v.shape[3]
    # The backward takes sum(dout * out) of every row, so a rounded output would be an error of every gradient.
    out = torch.empty((*q.shape[:3], width), dtype=torch.float32 if keep else v.dtype, device=v.device)
    stats, sums, totals, maxima, kept = (  # the results of an operator must not be one tensor
        torch.empty(0, dtype=torch.float32, device=v.device) for _ in range(5)
    )
    if near:
        stats = stats.new_empty((*q.shape[:3], 2))
    # The backward of full attention reads the state that every query has read.
    if tail or (keep and not near):
        sums = stats.new_empty((batch, heads, features, width))
        totals = stats.new_empty((batch, heads, features))
        maxima = torch.empty_like(totals)
    tokens = q.shape[2] + tail if near else k.shape[2]
    if keep and (near or causal):
        # One run of checkpoints per walk: along the sequence and, near without a causal mask, from its end.
        segments = (tokens + SEGMENT - 1) // SEGMENT * (2 if near and not causal else 1)
        kept = stats.new_empty((batch, heads, segments, features * (width + 2)))
    return out, sums, totals, maxima, stats, kept


def _options(arguments: Sequence[Any]) -> dict[str, Any]:
    """What follows `arrays` in the arguments of `attention`, by name."""
    names = "square function antithetic epsilon scale window past causal normalise tail".split()
    return dict(zip(names, arguments, strict=True))


def call_forward(*arguments: Any, keep: bool, maps: bytes | None = None) -> Results:
    """The forward itself, without torch's dispatcher around it; the arguments are those of `attention` up to `tail`."""
    q, k, v, sinks, far, state, masks, gain, arrays, *options = arguments
    window, causal, tail = options[5], options[7], options[9]
    state, masks = ([x.contiguous() for x in some] for some in (state, masks))  # a tracer may have changed the strides
    call = make_call(q, k, v, sinks, far, state, masks, gain.contiguous(), arrays, *options, maps=maps)
    results = _outputs(q, k, v, call.features, window >= 0, causal, tail, keep)
    out, sums, totals, maxima, stats, kept = results
    write(call, "out", out)
    if sums.numel() or totals.numel():
        call.s_out, call.z_out, call.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
    call.stats = stats.data_ptr() or None
    call.checkpoints = kept.data_ptr() or None
    call.differentiable = keep
    kernels = library.load()
    single = window < 0 and causal and tail and not keep and q.shape[2] == k.shape[2] == 1
    check_status((kernels.subquad_step if single else kernels.subquad_forward)(ctypes.byref(call)))
    return results


@torch.library.custom_op("subquad::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    normalise: bool,
    tail: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Windowed linear attention on the CPU.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E): float32, bfloat16 or float16, any strides
            with a window S = past + L: k and v hold `past` tokens before the first query's own
    sinks:  [k (B, H, N, D), v (B, H, N, E)] or []
    far:    [q, k] as the far map takes them, or [] where these are q and k themselves
    state:  [S (B, H, M, E), z (B, H, M), c (B, H, M)] of the far keys before k, contiguous float32, or []
    masks:  far keys (B, S) bool, near keys (B, S) bool, each empty for all, and the token at which each sink stands
            (B, N) int64: NOWHERE if it is not there, negative if it stands before k
    gain:   (Hq,) float32, added to the logarithm of the far weights, or empty
    arrays: weight (h, R, D), query_offset, key_offset, bias (h, R), tilt (h, D), signs (h, n, k, D'), norms (h, R);
            contiguous float32 with h = 1 or H; empty where not used. With a window an eighth: the queries' own tilt
    function: of the far map; "none": nothing is far
    scale:  of the exact scores;  window: -1: nothing is near
    tail:   also return the far state: of all keys; with a window, of those that have left it after the last query
    keep:   store what the backward needs

    Returns out (B, Hq, L, E) in v's dtype (float32 with `keep`), the far state or empty tensors, row statistics, and
    states along the sequence.
    """
    return call_forward(
        *(q, k, v, sinks, far, state, masks, gain, arrays, square, function, antithetic, epsilon),
        *(scale, window, past, causal, normalise, tail),
        keep=keep,
    )


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    *options: Any,
) -> Results:
    *given, keep = options
    named = _options(given)
    rows = _rows(far[0] if far else q, arrays[0], arrays[6], named["function"])
    features = rows * (2 if named["antithetic"] else 1)
    return _outputs(q, k, v, features, named["window"] >= 0, named["causal"], named["tail"], keep)


@torch.library.custom_op("subquad::attention_backward", mutates_args=())
def attention_backward(
    grads: list[Tensor],
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    square: float,
    function: str,
    antithetic: bool,
    epsilon: float,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    normalise: bool,
    tail: bool,
) -> list[Tensor]:
    """Gradients of `attention`: grads = [dout, dS, dz], saved = [q, k, v, *results of `attention`].

    Returns [dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, dS_in, dz_in, dgain (B, Hq)], empty where there is no input.
    """
    return call_backward(
        *(grads, saved, sinks, far, state, masks, gain, arrays, square, function, antithetic, epsilon),
        *(scale, window, past, causal, normalise, tail),
    )


def call_backward(grads: list[Tensor], saved: list[Tensor], *arguments: Any) -> list[Tensor]:
    """The backward itself, without torch's dispatcher around it; the arguments are those of `attention_backward`."""
    sinks, far, state, masks, gain, arrays, *options = arguments
    near = options[5] >= 0
    q, k, v, out, sums, totals, maxima, stats, kept = saved
    state, masks, grads = ([x.contiguous() for x in some] for some in (state, masks, grads))
    gain, stats, kept, sums, totals, maxima = (x.contiguous() for x in (gain, stats, kept, sums, totals, maxima))
    call = make_call(q, k, v, sinks, far, state, masks, gain, arrays, *options)
    results = _gradients(saved, sinks, far, state, gain, summed=near)
    dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, ds_in, dz_in, dgain = results
    for name, tensor in (("out", out), ("dout", grads[0]), ("dv", dv)):
        write(call, name, tensor)
    write(call, "dq", dfar_q if far else dq)
    write(call, "dk", dfar_k if far else dk)
    if near:
        write(call, "near_dq", dq)
        write(call, "near_dk", dk)
        if sinks:
            write(call, "sink_dk", dsink_k)
            write(call, "sink_dv", dsink_v)
        call.accumulate = 1
        if gain.numel():
            call.gain_grad = dgain.data_ptr()
    call.stats, call.checkpoints = stats.data_ptr() or None, kept.data_ptr() or None
    if totals.numel():
        call.s_out, call.z_out, call.c_out = sums.data_ptr(), totals.data_ptr(), maxima.data_ptr()
        call.ds_out, call.dz_out = grads[1].data_ptr(), grads[2].data_ptr()
    if state:
        call.ds_in, call.dz_in = ds_in.data_ptr(), dz_in.data_ptr()
    check_status(library.load().subquad_backward(ctypes.byref(call)))
    if not near:
        return results
    like = _gradients(saved, sinks, far, state, gain, summed=False, device=torch.device("meta"))
    return [x.to(y.dtype) for x, y in zip(results, like, strict=True)]


def _gradients(
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    gain: Tensor,
    summed: bool,
    device: torch.device | None = None,
) -> list[Tensor]:
    """Zeros for what is `summed` in float32, or tensors of the shapes and dtypes that are handed back."""
    q = saved[0]
    none = q.new_empty(0)
    inputs = [*saved[:3], *(sinks or [none, none]), *(far or [none, none]), *(state[:2] or [none, none])]
    make = torch.zeros if summed else torch.empty
    device = q.device if device is None else device
    made = [make(x.shape, dtype=torch.float32 if summed else x.dtype, device=device) for x in inputs]
    per_batch = (q.shape[0], gain.shape[0]) if gain.numel() else (0,)
    return [*made, make(per_batch, dtype=torch.float32, device=device)]


@attention_backward.register_fake
def _(
    grads: list[Tensor],
    saved: list[Tensor],
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    *options: Any,
) -> list[Tensor]:
    return _gradients(saved, sinks, far, state, gain, summed=False)


# -- gradients ------------------------------------------------------------------------------------------------------


def _split(tensors: list[Tensor], sizes: tuple[int, ...]) -> list[list[Tensor]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(tensors[start : start + size])
        start += size
    return parts


def _differentiate(saved: list[Tensor], sizes: tuple[int, ...], options: Any, grads: Any) -> tuple[Any, ...]:
    """(dq, dk, dv, dsinks, dfar, dstate, dgain) for the gradients of out, S and z."""
    core, rest = saved[:9], saved[9:]
    sinks, far, state, masks, (gain,), arrays = _split(rest, sizes)
    given = [
        torch.zeros_like(like) if grad is None else grad.contiguous()
        for grad, like in zip(grads, core[3:6], strict=True)
    ]
    run: Any = attention_backward if tracing(given[0]) else call_backward
    found = run(given, core, sinks, far, state, masks, gain, arrays, *options)
    dq, dk, dv, dsink_k, dsink_v, dfar_q, dfar_k, ds, dz, dgain = found
    return (
        *(dq, dk, dv),
        [dsink_k, dsink_v] if sinks else [],
        [dfar_q, dfar_k] if far else [],
        [ds, dz, None] if state else [],
        dgain.sum(0) if gain.numel() else None,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, sinks, far, state, masks, gain, arrays, *options, _ = inputs
    lists = [sinks, far, state, masks, [gain], arrays]
    ctx.save_for_backward(q, k, v, *output, *(x for part in lists for x in part))
    ctx.options, ctx.sizes = options, tuple(len(part) for part in lists)


def _backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> tuple[Any, ...]:
    saved = list(ctx.saved_tensors)
    *given, dgain = _differentiate(saved, ctx.sizes, ctx.options, (dout, dsums, dtotals))
    masks, arrays = ctx.sizes[3], ctx.sizes[5]
    return (*given, [None] * masks, dgain, [None] * arrays, *[None] * (len(ctx.options) + 1))


attention.register_autograd(_backward, setup_context=_save)


class _Functional(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        sizes: tuple[int, ...],
        options: tuple[Any, ...],
        maps: bytes | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *rest: Tensor,
    ) -> Results:
        sinks, far, state, masks, (gain,), arrays = _split(list(rest), sizes)
        run: Any = attention if tracing(q) else partial(call_forward, maps=maps)
        result: Results = run(q, k, v, sinks, far, state, masks, gain, arrays, *options, keep=True)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        sizes, options, _, q, k, v, *rest = inputs
        ctx.sizes, ctx.options = sizes, options
        ctx.save_for_backward(q, k, v, *output, *rest)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    @differentiable_once("backend='native'")
    def backward(ctx: Any, dout: Tensor, dsums: Tensor, dtotals: Tensor, *_: Any) -> Any:
        saved = list(ctx.saved_tensors)
        dq, dk, dv, dsinks, dfar, dstate, dgain = _differentiate(saved, ctx.sizes, ctx.options, (dout, dsums, dtotals))
        masks, arrays = ctx.sizes[3], ctx.sizes[5]
        return None, None, None, dq, dk, dv, *dsinks, *dfar, *dstate, *[None] * masks, dgain, *[None] * arrays


def functional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    arrays: list[Tensor],
    *options: Any,
    maps: bytes | None = None,
) -> Results:
    """`attention` with gradients, eagerly or inside torch.func transforms."""
    lists = [sinks, far, state, masks, [gain], arrays]
    run: Any = _Functional.apply
    sizes = tuple(len(part) for part in lists)
    result: Results = run(sizes, options, maps, q, k, v, *(x for part in lists for x in part))
    return result


# -- vmap: a mapped axis becomes part of the batch axis, since every (batch, head) is computed on its own -------------


def _widen(x: Tensor, dim: int | None, size: int) -> Tensor:
    """(B, ...) with a mapped axis at `dim`, or none -> (size * B, ...); empty placeholders stay as they are."""
    if dim is None:
        if x.numel() == 0 and x.dim() == 1:
            return x
        x = x.unsqueeze(0).expand(size, *x.shape)
    else:
        x = x.movedim(dim, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if x.dim() > 1 else x


def widen_all(tensors: Sequence[Tensor], dims: Any, size: int) -> list[Tensor]:
    dims = [None] * len(tensors) if dims is None else dims
    return [_widen(x, dim, size) for x, dim in zip(tensors, dims, strict=True)]


def narrow(results: Sequence[Tensor], size: int) -> tuple[Any, Any]:
    """The results of a widened call with their mapped axis in front, and where that axis is."""
    dims = tuple(None if x.dim() == 1 else 0 for x in results)
    split = tuple(x if x.dim() == 1 else x.unflatten(0, (size, x.shape[0] // size)) for x in results)
    return split, dims


def _refuse_mapped(dims: Any) -> None:
    """What the heads of one call share (projections, gains) cannot be mapped over."""
    found = dims if isinstance(dims, (list, tuple)) else [dims]
    if any(dim is not None for dim in found):
        raise NotImplementedError("vmap over projections is not possible with backend='native'; use backend='chunked'")


@attention.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    _refuse_mapped(in_dims[7])
    _refuse_mapped(in_dims[8])
    q, k, v = widen_all(args[:3], in_dims[:3], size)
    lists = [widen_all(x, dims, size) for x, dims in zip(args[3:7], in_dims[3:7], strict=True)]
    return narrow(attention(q, k, v, *lists, *args[7:]), size)


@attention_backward.register_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    _refuse_mapped(in_dims[6])
    _refuse_mapped(in_dims[7])
    lists = [widen_all(x, dims, size) for x, dims in zip(args[:6], in_dims[:6], strict=True)]
    lists[0] = [x.contiguous() for x in lists[0]]
    results, dims = narrow(attention_backward(*lists, *args[6:]), size)
    return list(results), list(dims)
