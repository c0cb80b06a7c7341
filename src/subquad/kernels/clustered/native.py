"""Clustered attention in the native kernels (csrc/clustered/)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kmeans import SAMPLE
from ..native.library import StridedTensor
from ..native.stateless import Mask, NativeBackend, StatelessOperator, write_mask
from ..native.torch_operator import NO_MASK, Tensors
from ..operator import Call
from .definition import Choices, Spec

__all__ = ["Native", "make_choices"]

_pointer, _long, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Clustered(ctypes.Structure):
    """One call; csrc/clustered/call.h says what each field means."""

    _fields_ = [
        *((name, _long) for name in "batch heads_q heads_kv length_q length_k dim width".split()),
        *((name, _long) for name in "clusters iterations sample bits topk group_size chosen".split()),
        *((name, _int) for name in ("threads", "given")),
        ("scale", ctypes.c_float),
        ("unused", _int),
        *((name, StridedTensor) for name in ("q", "k", "v", "out")),
        *((name, Mask) for name in ("key_mask", "query_mask")),
        *((name, _pointer) for name in ("starts", "matrix", "assigned", "top")),
        *((name, StridedTensor) for name in ("dout", "dq", "dk", "dv")),
    ]


def _results(q: Tensor, k: Tensor, v: Tensor, ints: Sequence[int], keep: bool) -> list[Tensor]:
    """out, and the choices: clusters (B, Hq, L), keys of T (B, Hq, C, chosen)."""
    clusters, _, _, _, topk, size = ints
    chosen = min(topk, -(-k.shape[2] // size) * size)
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=v.dtype, device=v.device)
    assigned = torch.empty(q.shape[:3], dtype=torch.int32, device=v.device)
    # Clusters without members choose nothing.
    return [out, assigned, torch.full((*q.shape[:2], clusters, chosen), -1, dtype=torch.int32, device=v.device)]


def _fill(
    call: Any, masks: Tensors, draw: Tensors, ints: Sequence[int], floats: Sequence[float], results: Tensors
) -> None:
    call.clusters, call.iterations, call.sample, call.bits, call.topk, call.group_size = ints
    call.chosen, (call.scale,) = results[2].shape[3], floats
    call.given = call.dout.data is not None  # a backward takes the choices of its forward
    write_mask(call.key_mask, masks[0])
    write_mask(call.query_mask, masks[1])
    call.starts, call.matrix = (x.data_ptr() for x in draw)
    call.assigned, call.top = (x.data_ptr() for x in results[1:])


_operator = StatelessOperator("clustered", Clustered, _results, _fill)


def _arguments(spec: Spec, call: Call) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
    masks = [NO_MASK if x is None else x for x in (call.key_mask, call.query_mask)]
    bits = spec.draw.rows if spec.clustering == "hamming" else 0
    ints = [spec.clusters, spec.iterations, SAMPLE * spec.clusters, bits, spec.topk, spec.group_size]
    return masks, [spec.draw.starts, spec.draw.matrix], ints, [call.scale]


def make_choices(spec: Spec, call: Call, q: Tensor, k: Tensor) -> Choices:
    """The choices that a native call makes, as an explicit value."""
    q, k = (x.detach().to(torch.float32) for x in (q, k))
    _, assigned, top = _operator.forward([q, k, k], *_arguments(spec, call), False)
    return Choices(assigned.long(), top.long())


class Native(NativeBackend[Spec]):
    """Fused loops on the CPU: choices and attention in one call."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        return _operator.attend(q, k, v, *_arguments(spec, call))
