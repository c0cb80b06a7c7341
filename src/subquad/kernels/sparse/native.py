"""Sparse attention in the native kernels (csrc/sparse/)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..native.library import StridedTensor
from ..native.stateless import Mask, NativeBackend, StatelessOperator, write_mask
from ..native.torch_operator import NO_MASK, Tensors
from ..operator import Call
from .definition import Spec

__all__ = ["Native"]

_long, _int = ctypes.c_int64, ctypes.c_int32


class Sparse(ctypes.Structure):
    """One call; csrc/sparse/call.h says what each field means."""

    _fields_ = [
        *((name, _long) for name in "batch heads_q heads_kv length_q length_k dim width stride summary".split()),
        *((name, _int) for name in ("causal", "threads")),
        ("scale", ctypes.c_float),
        ("unused", _int),
        *((name, StridedTensor) for name in ("q", "k", "v", "out")),
        ("key_mask", Mask),
        ("log_norm", ctypes.c_void_p),
        *((name, StridedTensor) for name in ("dout", "dq", "dk", "dv")),
    ]


def _results(q: Tensor, k: Tensor, v: Tensor, ints: Sequence[int], keep: bool) -> list[Tensor]:
    """out, and the log normaliser (B, Hq, L). Tokens that are not real keep their 0."""
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=torch.float32 if keep else v.dtype, device=v.device)
    return [out, torch.zeros(q.shape[:3], dtype=torch.float32, device=v.device)]


def _fill(
    call: Any,
    masks: Tensors,
    shared: Tensors,
    ints: Sequence[int],
    floats: Sequence[float],
    results: Tensors,
) -> None:
    call.stride, call.summary, call.causal = ints
    (call.scale,) = floats
    write_mask(call.key_mask, masks[0])
    call.log_norm = results[1].data_ptr()


_operator = StatelessOperator("sparse", Sparse, _results, _fill)


class Native(NativeBackend[Spec]):
    """Tiles of queries against tiles of keys, on the CPU."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        masks = [NO_MASK if call.key_mask is None else call.key_mask]
        return _operator.attend(q, k, v, masks, [], [spec.stride, spec.summary, int(spec.causal)], [call.scale])
