"""Attention of whole sequences in the native kernels: what operators without a state share."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..operator import Backend, Call
from ..padding import empty_output
from . import library
from .library import DTYPES, check_status
from .torch_operator import Tensors, TorchOperator

__all__ = [
    "Mask",
    "NativeBackend",
    "StatelessOperator",
    "empty_floats",
    "write_mask",
    "write_shape",
    "write_tensors",
    "zero_floats",
]

S = TypeVar("S")


def empty_floats(*shape: int) -> Tensor:
    """Memory that the library writes, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def zero_floats(*shape: int) -> Tensor:
    """The same, zeros."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


class Mask(ctypes.Structure):
    """(batch, token) bool with free strides; no data = all real."""

    _fields_ = [("data", ctypes.c_void_p), ("batch", ctypes.c_int64), ("token", ctypes.c_int64)]


class NativeBackend(Backend[S]):
    """An operator in the library."""

    name = "native"

    def refusal(self, spec: S | None, call: Call, *tensors: Tensor) -> str:
        return library.refusal(tensors)

    def automatic(self, spec: S, call: Call, *tensors: Tensor) -> bool:
        return call.chunk_size is None  # who asks for blocks of a size gets the backend that has them


def write_tensors(call: ctypes.Structure, **tensors: Tensor) -> None:
    """(B, H, tokens, width) tensors into fields of their names; the caller keeps them alive."""
    for name, x in tensors.items():
        field = getattr(call, name)
        field.data, field.dtype = x.data_ptr(), DTYPES[x.dtype]
        field.stride[:] = x.stride()


def write_shape(call: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Sizes, threads, and the three tensors themselves."""
    call.batch, call.heads_q, call.length_q, call.dim = q.shape
    call.heads_kv, call.length_k, call.width = k.shape[1], k.shape[2], v.shape[3]
    call.threads = torch.get_num_threads()
    write_tensors(call, q=q, k=k, v=v)


def write_mask(field: Any, mask: Tensor) -> None:
    """A mask (B, tokens), or an empty tensor for none."""
    if mask.numel():
        field.data = mask.data_ptr()
        field.batch, field.token = mask.stride()


class StatelessOperator(TorchOperator):
    """Attention of whole sequences, which the library has as subquad_NAME_forward and subquad_NAME_backward.

    kind: its structure; subquad_NAME_size has the library's size of it
    make: (q, k, v, ints, keep) -> the tensors that a forward fills, out first
    fill: (call, batched, shared, ints, floats, results) writes the rest of a call into its structure; a backward has
          its dout there already
    """

    def __init__(
        self,
        name: str,
        kind: type[ctypes.Structure],
        make: Callable[[Tensor, Tensor, Tensor, Sequence[int], bool], list[Tensor]],
        fill: Callable[[Any, Tensors, Tensors, Sequence[int], Sequence[float], Tensors], None],
    ) -> None:
        self.kind, self.make, self.fill = kind, make, fill
        self._checked: dict[str, bool] = {}
        super().__init__(name)

    def library(self) -> Any:
        """The library, once its structure is known to be this one."""
        loaded = library.load()
        if not self._checked:
            size = getattr(loaded, f"subquad_{self.name}_size")
            size.restype = ctypes.c_int64
            if size() != ctypes.sizeof(self.kind):
                raise RuntimeError("the native kernels were built for another version of subquad; reinstall it")
            for way in ("forward", "backward"):
                getattr(loaded, f"subquad_{self.name}_{way}").argtypes = [ctypes.POINTER(self.kind)]
            self._checked["size"] = True
        return loaded

    def structure(
        self,
        inputs: Tensors,
        batched: Tensors,
        shared: Tensors,
        ints: Sequence[int],
        floats: Sequence[float],
        results: Tensors,
        **gradients: Tensor,
    ) -> Any:
        """The structure of a call on q, k, v; the caller keeps every tensor alive."""
        call: Any = self.kind()
        write_shape(call, *inputs)
        write_tensors(call, out=results[0], **gradients)
        self.fill(call, batched, shared, ints, floats, results)
        return call

    def results(self, inputs: Any, shared: Any, ints: Any, keep: bool) -> list[Tensor]:
        q, k, v = inputs
        return self.make(q, k, v, ints, keep)

    def forward(
        self, inputs: Any, batched: Any, shared: Any, ints: Any, floats: Any, keep: bool, packed: Any = None
    ) -> list[Tensor]:
        results = self.results(inputs, shared, ints, keep)
        call = self.structure(inputs, batched, shared, ints, floats, results)
        check_status(getattr(self.library(), f"subquad_{self.name}_forward")(ctypes.byref(call)))
        return results

    def backward(
        self, grads: Any, inputs: Any, results: Any, batched: Any, shared: Any, ints: Any, floats: Any
    ) -> list[Tensor]:
        # Sums over queries are formed in float32 whatever the dtype of the inputs.
        dq, dk, dv = sums = [torch.zeros(x.shape, dtype=torch.float32) for x in inputs]
        dout = grads[0].contiguous()
        call = self.structure(inputs, batched, shared, ints, floats, results, dout=dout, dq=dq, dk=dk, dv=dv)
        check_status(getattr(self.library(), f"subquad_{self.name}_backward")(ctypes.byref(call)))
        return [total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batched: Tensors,
        shared: Tensors,
        ints: Sequence[int],
        floats: Sequence[float],
    ) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        if q.shape[2] == 0 or k.shape[2] == 0:
            return empty_output(q, k, v)
        return self([q, k, v], batched, shared, ints, floats)[0].to(v.dtype)
