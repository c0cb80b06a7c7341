"""Multipole attention in the native kernels (csrc/multipole/)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..native.library import StridedTensor, check_status
from ..native.stateless import Mask, NativeBackend, StatelessOperator, write_mask
from ..native.torch_operator import NO_MASK, Tensors
from ..operator import Call
from .definition import Choices, Inspection, Spec

__all__ = [
    "Constant",
    "MultipolePages",
    "Native",
    "cluster",
    "inspect",
    "load_library",
    "make_choices",
    "options_of",
    "write_options",
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
        ("key_mask", Mask),
        *((name, _pointer) for name in "starts order sizes selection log_norm estimate exact".split()),
        *((name, StridedTensor) for name in ("dout", "dq", "dk", "dv")),
    ]


class MultipolePages(ctypes.Structure):
    """Keys kept between calls; csrc/multipole/call.h says what each field means."""

    _fields_ = [
        ("call", Multipole),
        *((name, _long) for name in ("capacity", "tail_capacity")),
        *((name, _pointer) for name in "pages held statistics tail_keys tail_panels tail_values".split()),
        ("jobs", _long),
        *((name, _pointer) for name in "rows memory values".split()),
    ]


class Clusters(ctypes.Structure):
    """Clusters of constant memory, float32 and contiguous."""

    _fields_ = [(name, _pointer) for name in ("size", "mean", "variance", "mean_value")]


class Constant(ctypes.Structure):
    """Full tails that join clusters; csrc/multipole/call.h says what each field means."""

    _fields_ = [
        ("pages", MultipolePages),
        *((name, _long) for name in ("sinks", "limit", "clusters")),
        *((name, Clusters) for name in ("before", "after")),
    ]


def options_of(spec: Spec, scale: float) -> tuple[list[int], list[float]]:
    """The ints and the floats of a call."""
    most = -1 if spec.exact_keys is None else spec.exact_keys
    error = -1.0 if spec.error is None else spec.error
    ints = [spec.chunk, spec.clusters, spec.largest, spec.iterations, most, spec.past, int(spec.causal)]
    return ints, [error, spec.cap, spec.radius, scale]


def write_options(call: Any, mask: Tensor, starts: Tensor, ints: Sequence[int], floats: Sequence[float]) -> None:
    """Key mask (B, S) or empty, ranks (clusters,) int32 that k-means starts from, and `options_of`."""
    call.chunk, call.clusters, call.largest, call.iterations, call.exact_keys, call.past, call.causal = ints
    call.error, call.cap, call.radius, call.scale = floats
    write_mask(call.key_mask, mask)
    call.starts = starts.data_ptr()


def _results(q: Tensor, k: Tensor, v: Tensor, ints: Sequence[int], keep: bool) -> list[Tensor]:
    """out, the log normaliser (B, Hq, L) or empty, order (B, H, n, chunk) and sizes (B, H, n, slots), see `Choices`."""
    chunk, clusters, largest = ints[:3]
    chunks, slots = k.shape[2] // chunk, clusters + chunk // largest
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32 if keep else v.dtype, device=v.device)
    norm = torch.empty(q.shape[:3] if keep else (0,), dtype=torch.float32, device=v.device)
    made = (torch.zeros((*k.shape[:2], chunks, n), dtype=torch.int32, device=k.device) for n in (chunk, slots))
    return [out, norm, *made]


def _fill(
    call: Any,
    batched: Tensors,
    shared: Tensors,
    ints: Sequence[int],
    floats: Sequence[float],
    results: Tensors,
) -> None:
    """batched: the mask, and if known order and sizes of the first chunks, or of all and the selection among them."""
    mask, *known = batched
    _, norm, order, sizes = results
    write_options(call, mask, shared[0], ints, floats)
    if call.dout.data is None:  # a backward takes the clusters of its forward
        for x, old in zip((order, sizes), known, strict=False):
            x[:, :, : old.shape[2]] = old
    call.order, call.sizes, call.log_norm = order.data_ptr(), sizes.data_ptr(), norm.data_ptr()
    for x in known[2:]:
        call.selection, call.forced = x.data_ptr(), 1


_operator = StatelessOperator("multipole", Multipole, _results, _fill)

_checked: dict[str, bool] = {}


def load_library() -> Any:
    """The library, after a look at whether its structures are ours."""
    found = _operator.library()
    if not _checked:
        for name in ("constant_size", "lanes", "statistics"):
            getattr(found, f"subquad_multipole_{name}").restype = _long
        if found.subquad_multipole_constant_size() != ctypes.sizeof(Constant):
            raise RuntimeError("the native kernels were built for another version of subquad; reinstall it")
        for name in ("statistics", "step", "cluster", "page"):
            getattr(found, f"subquad_multipole_{name}").argtypes = [ctypes.POINTER(MultipolePages)]
        found.subquad_multipole_grow.argtypes = 2 * [ctypes.POINTER(MultipolePages)]
        for name in ("absorb", "summarise"):
            getattr(found, f"subquad_multipole_{name}").argtypes = [ctypes.POINTER(Constant)]
        _checked["size"] = True
    return found


def _arguments(spec: Spec, call: Call) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
    """Batched and shared tensors, ints and floats as the operator takes them."""
    mask = NO_MASK if call.key_mask is None else call.key_mask
    known = [] if spec.known is None else [x.contiguous() for x in spec.known if x is not None]
    return [mask, *known], [spec.starts().to(torch.int32)], *options_of(spec, call.scale)


def _run(call: Any) -> None:
    if call.batch:  # of nothing there is nothing to allocate, which the library would take for a failure
        check_status(load_library().subquad_multipole_forward(ctypes.byref(call)))


def inspect(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Inspection:
    """Expected errors and numbers of exact keys of every query, from the forward pass."""
    given = _arguments(spec._replace(known=None), call)
    results = _results(q, k, v, given[2], False)
    made = _operator.structure((q, k, v), *given, results)
    estimate = torch.zeros((*q.shape[:3], 2), dtype=torch.float32)
    keys = torch.zeros(q.shape[:3], dtype=torch.int32)
    made.estimate, made.exact = estimate.data_ptr(), keys.data_ptr()
    _run(made)
    limited = keys < 0
    return Inspection(estimate[..., 0], estimate[..., 1], torch.where(limited, -keys - 1, keys), limited)


def make_choices(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Choices:
    """The choices that a native call makes, as an explicit value."""
    given = _arguments(spec, call)
    q, k, v = (x.detach().to(torch.float32) for x in (q, k, v))
    results = _results(q, k, v, given[2], False)
    made = _operator.structure((q, k, v), *given, results)
    order, sizes = results[2:]
    selection = torch.zeros((*q.shape[:3], sizes.shape[2] * sizes.shape[3]), dtype=torch.bool)
    made.selection, made.forced = selection.data_ptr(), 0
    _run(made)
    return Choices(order, sizes, selection)


def cluster(spec: Spec, call: Call, k: Tensor) -> Choices:
    """Clusters of the complete chunks of keys k (B, H, S, D); those of `spec.known` stay as they are."""
    k = k.detach().to(torch.float32)
    none = k.new_zeros((k.shape[0], k.shape[1], 0, k.shape[3]))
    return make_choices(spec, call, none, k, k)._replace(selection=None)


class Native(NativeBackend[Spec]):
    """Fused loops on the CPU."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        return _operator.attend(q, k, v, *_arguments(spec, call))
