"""LSH attention in the native kernels (csrc/lsh/). Buckets and chunks are chosen by the code of the other backends."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..native.library import StridedTensor
from ..native.stateless import NativeBackend, StatelessOperator
from ..native.torch_operator import Tensors
from ..operator import Call
from .definition import Spec, choose_chunks

__all__ = ["Native"]

_long, _int = ctypes.c_int64, ctypes.c_int32
# What becomes of a token's own key.
ANY, ALWAYS, ALONE = 0, 1, 2


class Lsh(ctypes.Structure):
    """One call; csrc/lsh/call.h says what each field means."""

    _fields_ = [
        *((name, _long) for name in "batch heads_q heads_kv length_q length_k dim width rounds chunks".split()),
        *((name, _int) for name in ("causal", "own", "threads")),
        ("scale", ctypes.c_float),
        *((name, StridedTensor) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("query_chunk", "key_chunk", "log_norm")),
        *((name, StridedTensor) for name in ("dout", "dq", "dk", "dv")),
    ]


def _results(q: Tensor, k: Tensor, v: Tensor, ints: Sequence[int], keep: bool) -> list[Tensor]:
    """out, and the log normaliser (B, Hq, L)."""
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32 if keep else v.dtype, device=v.device)
    return [out, torch.empty(q.shape[:3], dtype=torch.float32, device=v.device)]


def _fill(
    call: Any,
    chunks: Tensors,
    shared: Tensors,
    ints: Sequence[int],
    floats: Sequence[float],
    results: Tensors,
) -> None:
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in chunks)
    call.rounds, call.chunks, call.causal, call.own = ints
    (call.scale,) = floats
    call.query_chunk, call.key_chunk = (x.data_ptr() for x in chunks)
    call.log_norm = results[1].data_ptr()


_operator = StatelessOperator("lsh", Lsh, _results, _fill)


class Native(NativeBackend[Spec]):
    """Queries of one chunk against the keys that they see, on the CPU."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        batch, heads = q.shape[:2]
        if spec.shared:  # every query head has keys of its own
            k = F.normalize(q.float(), dim=-1)
            v = v.repeat_interleave(heads // v.shape[1], 1)
        masks = (None if x is None else x.repeat_interleave(heads, 0) for x in (call.key_mask, call.query_mask))
        chunks = choose_chunks(spec, q.float().flatten(0, 1), k.float().flatten(0, 1), *masks)
        numbers = [x.to(torch.int32).unflatten(0, (batch, heads)).contiguous() for x in (chunks.query, chunks.key)]
        own = ALONE if spec.shared else ALWAYS if spec.causal else ANY
        return _operator.attend(q, k, v, numbers, [], [spec.rounds, chunks.limit, int(spec.causal), own], [call.scale])
