"""Multipole attention in the native kernels (csrc/multipole/), as torch operators.

    subquad::multipole            (q, k, v, ...)                  -> out, log normaliser, order, sizes
    subquad::multipole_backward   (dout, q, k, v, out, ...)       -> dq, dk, dv

Empty tensors stand for "not there". Eager calls go to the library directly; operators are for tracers and transforms.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..native import library
from ..native.library import DTYPES, StridedTensor
from ..native.operators import check_status, narrow, widen_all
from ..native.stateless import refusal
from ..operator import Backend, Call, differentiable_once
from .definition import Choices, Inspection, Spec

__all__ = [
    "MultipolePages",
    "Native",
    "choose",
    "cluster",
    "fill_call",
    "inspect",
    "loaded",
    "options_of",
    "write_tensor",
]

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Multipole(ctypes.Structure):
    """One call; csrc/multipole/call.h says what each field means."""

    _fields_ = [
        *((name, _long) for name in "batch heads_q heads_kv length_q length_k dim width past".split()),
        *((name, _long) for name in "chunk clusters largest iterations exact_keys".split()),
        *((name, _int) for name in "causal threads forced unused".split()),
        *((name, _float) for name in "scale cap radius error".split()),
        *((name, StridedTensor) for name in ("q", "k", "v", "out")),
        ("key_mask", _pointer),
        ("mask_batch", _long),
        ("mask_token", _long),
        *((name, _pointer) for name in "starts order sizes selection log_norm estimate exact".split()),
        *((name, StridedTensor) for name in ("dout", "dq", "dk", "dv")),
    ]


class MultipolePages(ctypes.Structure):
    """Keys kept between calls; csrc/multipole/call.h says what each field means."""

    _fields_ = [
        ("call", Multipole),
        *((name, _long) for name in ("capacity", "room")),
        *((name, _pointer) for name in "pages held statistics tail_keys tail_panels tail_values".split()),
        ("jobs", _long),
        *((name, _pointer) for name in "rows memory values".split()),
    ]


# Of an operator: chunk, clusters, largest, iterations, exact_keys, past; error (-1: none), cap, radius, scale; causal.
Options = tuple[list[int], list[float], bool]
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def options_of(spec: Spec, scale: float) -> Options:
    most = -1 if spec.exact_keys is None else spec.exact_keys
    whole = [spec.chunk, spec.clusters, spec.largest, spec.iterations, most, spec.past]
    error = -1.0 if spec.error is None else spec.error
    return whole, [error, spec.cap, spec.radius, scale], spec.causal


def write_tensor(call: Multipole, name: str, x: Tensor) -> None:
    field = getattr(call, name)
    field.data, field.dtype = x.data_ptr(), DTYPES[x.dtype]
    field.stride[:] = x.stride()


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    starts: Tensor,
    order: Tensor,
    sizes: Tensor,
    options: Options,
    selection: list[Tensor] | tuple[Tensor, ...] = (),
) -> Multipole:
    """The call for the library; the caller keeps every tensor alive. `selection`: the one that is given, or nothing."""
    call = Multipole()
    fill_call(call, q, k, v, mask, starts, options)
    call.order, call.sizes = order.data_ptr(), sizes.data_ptr()
    for x in selection:
        call.selection, call.forced = x.data_ptr(), 1
    return call


def fill_call(call: Multipole, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, starts: Tensor, options: Options) -> None:
    """Shapes, options and inputs of a call."""
    whole, real, causal = options
    call.batch, call.heads_q, call.length_q, call.dim = q.shape
    call.heads_kv, call.length_k, call.width = k.shape[1], k.shape[2], v.shape[3]
    call.chunk, call.clusters, call.largest, call.iterations, call.exact_keys, call.past = whole
    call.error, call.cap, call.radius, call.scale = real
    call.causal, call.threads = causal, torch.get_num_threads()
    for name, x in (("q", q), ("k", k), ("v", v)):
        write_tensor(call, name, x)
    if mask.numel():
        call.key_mask = mask.data_ptr()
        call.mask_batch, call.mask_token = mask.stride()
    call.starts = starts.data_ptr()


def _clusters(k: Tensor, known: list[Tensor], whole: list[int]) -> tuple[Tensor, Tensor]:
    """Room for order and sizes; the clusters that are known are in it, the others are 0 and will be made."""
    chunk, clusters, largest = whole[:3]
    chunks, slots = k.shape[2] // chunk, clusters + chunk // largest
    made = tuple(torch.zeros((*k.shape[:2], chunks, n), dtype=torch.int32, device=k.device) for n in (chunk, slots))
    if known:
        for x, old in zip(made, known[:2], strict=True):
            x[:, :, : old.shape[2]] = old
    return made[0], made[1]


def _outputs(q: Tensor, k: Tensor, v: Tensor, whole: list[int], keep: bool) -> Results:
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32 if keep else v.dtype, device=v.device)
    norm = torch.empty(q.shape[:3] if keep else (0,), dtype=torch.float32, device=v.device)
    return out, norm, *_clusters(k, [], whole)


def call_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    starts: Tensor,
    known: list[Tensor],
    whole: list[int],
    real: list[float],
    causal: bool,
    keep: bool,
) -> Results:
    """The forward itself, without torch's dispatcher around it; see `multipole`."""
    out, norm, order, sizes = _outputs(q, k, v, whole, keep)
    if known:
        order, sizes = _clusters(k, known, whole)
    call = _call(q, k, v, mask, starts, order, sizes, (whole, real, causal), known[2:])
    write_tensor(call, "out", out)
    if keep:
        call.log_norm = norm.data_ptr()
    check_status(loaded().subquad_multipole_forward(ctypes.byref(call)))
    return out, norm, order, sizes


@torch.library.custom_op("subquad::multipole", mutates_args=())
def multipole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    starts: Tensor,
    known: list[Tensor],
    whole: list[int],
    real: list[float],
    causal: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multipole attention on the CPU.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E): float32, bfloat16 or float16, any strides
    mask:   (B, S) bool or empty; starts: (clusters,) int32, ranks that k-means starts from
    known:  [order, sizes] of the first chunks, or of all and the selection (B, Hq, L, n * slots) bool, or []
    whole, real, causal: `Options`
    keep:   a backward will follow: out is float32, and the log normaliser (B, Hq, L) is kept

    Returns out (B, Hq, L, E), the log normaliser or empty, order (B, H, n, chunk) and sizes (B, H, n, slots).
    """
    return call_forward(q, k, v, mask, starts, known, whole, real, causal, keep)


@multipole.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, starts: Tensor, known: list[Tensor], whole: list[int], *rest: Any
) -> Results:
    return _outputs(q, k, v, whole, rest[-1])


def call_backward(
    grad: Tensor,
    saved: list[Tensor],
    mask: Tensor,
    starts: Tensor,
    whole: list[int],
    real: list[float],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward itself; see `multipole_backward`."""
    q, k, v, out, norm, order, sizes, *selection = saved
    call = _call(q, k, v, mask, starts, order, sizes, (whole, real, causal), selection)
    # Sums over queries are formed in float32 whatever the dtype of the inputs.
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    grad = grad.contiguous()
    for name, x in (("out", out), ("dout", grad), ("dq", dq), ("dk", dk), ("dv", dv)):
        write_tensor(call, name, x)
    call.log_norm = norm.data_ptr()
    check_status(loaded().subquad_multipole_backward(ctypes.byref(call)))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@torch.library.custom_op("subquad::multipole_backward", mutates_args=())
def multipole_backward(
    grad: Tensor,
    saved: list[Tensor],
    mask: Tensor,
    starts: Tensor,
    whole: list[int],
    real: list[float],
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `multipole`: saved = [q, k, v, out, log normaliser, order, sizes], and the selection if given."""
    return call_backward(grad, saved, mask, starts, whole, real, causal)


@multipole_backward.register_fake
def _(grad: Tensor, saved: list[Tensor], *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
    return dq, dk, dv


@multipole.register_vmap
def _(info: Any, in_dims: Any, q: Any, k: Any, v: Any, mask: Any, starts: Any, known: Any, *rest: Any) -> Any:
    size = info.batch_size
    q, k, v, mask = widen_all([q, k, v, mask], in_dims[:4], size)
    return narrow(multipole(q, k, v, mask, starts, widen_all(known, in_dims[5], size), *rest), size)


@multipole_backward.register_vmap
def _(info: Any, in_dims: Any, grad: Any, saved: Any, mask: Any, starts: Any, *rest: Any) -> Any:
    size = info.batch_size
    (grad,), (mask,) = widen_all([grad], in_dims[:1], size), widen_all([mask], in_dims[2:3], size)
    return narrow(multipole_backward(grad, widen_all(saved, in_dims[1], size), mask, starts, *rest), size)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    q, k, v, mask, starts, known, whole, real, causal, _ = inputs
    ctx.save_for_backward(q, k, v, *output, *known[2:], mask, starts)
    ctx.options, ctx.known = (whole, real, causal), len(known)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *saved, mask, starts = ctx.saved_tensors
    grads = multipole_backward(grad, saved, mask, starts, *ctx.options)
    return *grads, None, None, [None] * ctx.known, None, None, None, None


multipole.register_autograd(_backward, setup_context=_save)


class _Functional(torch.autograd.Function):
    """Gradients outside of a compiled graph: the first call of an operator makes torch import its compiler."""

    generate_vmap_rule = True

    @staticmethod
    def forward(options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, starts: Tensor, *known: Tensor) -> Any:
        run: Any = multipole if tracing(q) else call_forward
        return run(q, k, v, mask, starts, list(known), *options, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        options, q, k, v, mask, starts, *known = inputs
        ctx.save_for_backward(q, k, v, *output, *known[2:], mask, starts)
        ctx.options, ctx.known = options, len(known)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @differentiable_once("backend='native'")
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        *saved, mask, starts = ctx.saved_tensors
        run: Any = multipole_backward if tracing(grad) else call_backward
        return None, *run(grad, saved, mask, starts, *ctx.options), *[None] * (2 + ctx.known)


_checked: dict[str, bool] = {}


def loaded() -> Any:
    """The library, after a look at whether its structures are ours."""
    found = library.load()
    if not _checked:
        for name in ("size", "lanes", "statistics"):
            getattr(found, f"subquad_multipole_{name}").restype = _long
        if found.subquad_multipole_size() != ctypes.sizeof(MultipolePages):
            raise RuntimeError("the native kernels were built for another version of subquad; reinstall it from source")
        for name in ("forward", "backward"):
            getattr(found, f"subquad_multipole_{name}").argtypes = [ctypes.POINTER(Multipole)]
        for name in ("statistics", "step", "cluster", "page"):
            getattr(found, f"subquad_multipole_{name}").argtypes = [ctypes.POINTER(MultipolePages)]
        found.subquad_multipole_grow.argtypes = 2 * [ctypes.POINTER(MultipolePages)]
        pointers = [ctypes.POINTER(MultipolePages), _long, *4 * [_pointer]]
        found.subquad_multipole_summarise.argtypes = pointers
        _checked["size"] = True
    return found


def _arguments(spec: Spec, call: Call) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Mask, starts and known clusters as the operators take them."""
    mask = torch.empty(0, dtype=torch.bool) if call.key_mask is None else call.key_mask
    known = [] if spec.known is None else [x.contiguous() for x in spec.known if x is not None]
    return mask, spec.starts().to(torch.int32), known


def inspect(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Inspection:
    """Expected errors and numbers of exact keys of every query, from the forward pass."""
    mask, starts, _ = _arguments(spec, call)
    options = options_of(spec, call.scale)
    order, sizes = _clusters(k, [], options[0])
    made = _call(q, k, v, mask, starts, order, sizes, options)
    estimate = torch.zeros((*q.shape[:3], 2))
    keys = torch.zeros(q.shape[:3], dtype=torch.int32)
    made.estimate, made.exact = estimate.data_ptr(), keys.data_ptr()
    check_status(loaded().subquad_multipole_forward(ctypes.byref(made)))
    limited = keys < 0
    return Inspection(estimate[..., 0], estimate[..., 1], torch.where(limited, -keys - 1, keys), limited)


def choose(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Choices:
    """The choices that a native call makes, as an explicit value."""
    mask, starts, known = _arguments(spec, call)
    options = options_of(spec, call.scale)
    q, k, v = (x.detach().to(torch.float32) for x in (q, k, v))
    order, sizes = _clusters(k, known, options[0])
    made = _call(q, k, v, mask, starts, order, sizes, options)
    selection = torch.zeros((*q.shape[:3], sizes.shape[2] * sizes.shape[3]), dtype=torch.bool)
    made.selection = selection.data_ptr()
    check_status(loaded().subquad_multipole_forward(ctypes.byref(made)))
    return Choices(order, sizes, selection)


def cluster(spec: Spec, call: Call, k: Tensor) -> Choices:
    """Clusters of the complete chunks of keys k (B, H, S, D); those of `spec.known` stay as they are."""
    k = k.detach().to(torch.float32)
    none = k.new_zeros((k.shape[0], k.shape[1], 0, k.shape[3]))
    return choose(spec, call, none, k, k)._replace(selection=None)


class Native(Backend[Spec]):
    """Fused loops on the CPU."""

    name = "native"

    def refusal(self, spec: Spec | None, call: Call, *tensors: Tensor) -> str:
        return refusal(tensors)

    def automatic(self, spec: Spec, call: Call, *tensors: Tensor) -> bool:
        return call.chunk_size is None  # who asks for blocks of a size gets the backend that has them

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        if q.shape[2] == 0 or k.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1])) + 0 * (q.sum() + k.sum() + v.sum())
        mask, starts, known = _arguments(spec, call)
        options = options_of(spec, call.scale)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        transformed = torch._C._are_functorch_transforms_active()
        if not transformed and any(tracing(x) for x in (q, k, v)):
            traced: Results = multipole(q, k, v, mask, starts, known, *options, wanted)
            return traced[0].to(v.dtype)
        if transformed or wanted:
            run: Any = _Functional.apply
            out: Tensor = run(options, q, k, v, mask, starts, *known)[0]
            return out.to(v.dtype)
        return call_forward(q, k, v, mask, starts, known, *options, False)[0]
