"""Attention of whole sequences in the native kernels, as torch operators: what operators without a state share.

    subquad::NAME            (q, k, v, batched, shared, ...)  -> out, further results
    subquad::NAME_backward   (dout, saved, ...)               -> dq, dk, dv

An operator is three functions (`Operator`). Eager calls go to the library directly, since the first call of a torch
operator makes torch import its compiler; operators are for tracers and transforms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..operator import Backend, Call, differentiable_once, refuse_forward_mode
from ..padding import empty_output
from . import library
from .library import DTYPES, check_status
from .operators import narrow, widen_all

__all__ = [
    "Mask",
    "NativeBackend",
    "Operator",
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


class Operator:
    """One operator of the library.

    name:     the library has subquad_NAME_size, subquad_NAME_forward and subquad_NAME_backward
    kind:     its structure
    results:  (q, k, v, ints, keep) -> the tensors that a forward fills, out first; keep: a backward will follow
    fill:     (call, batched, shared, ints, floats, results) writes the rest of a call into its structure; a backward
              has its dout there already

    batched are tensors (B, ...) beside q, k, v, such as masks, shared ones have no batch axis; ints and floats are
    options. None of them gets a gradient.
    """

    def __init__(
        self,
        name: str,
        kind: type[ctypes.Structure],
        results: Callable[[Tensor, Tensor, Tensor, list[int], bool], list[Tensor]],
        fill: Callable[[Any, list[Tensor], list[Tensor], list[int], list[float], list[Tensor]], None],
    ) -> None:
        self.name, self.kind, self.results, self.fill = name, kind, results, fill
        self._checked: dict[str, bool] = {}
        self._forward, self._backward = _register(self)
        self._function = _functional(self)

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
        inputs: tuple[Tensor, ...],
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
        results: list[Tensor],
        **gradients: Tensor,
    ) -> Any:
        """The structure of a call on q, k, v; the caller keeps every tensor alive."""
        call: Any = self.kind()
        write_shape(call, *inputs)
        write_tensors(call, out=results[0], **gradients)
        self.fill(call, batched, shared, ints, floats, results)
        return call

    def call_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
        keep: bool,
    ) -> list[Tensor]:
        """The forward itself, without torch's dispatcher around it."""
        results = self.results(q, k, v, ints, keep)
        call = self.structure((q, k, v), batched, shared, ints, floats, results)
        check_status(getattr(self.library(), f"subquad_{self.name}_forward")(ctypes.byref(call)))
        return results

    def call_backward(
        self,
        grad: Tensor,
        saved: list[Tensor],
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
    ) -> list[Tensor]:
        """(dq, dk, dv); saved = [q, k, v, *results of the forward]."""
        q, k, v, *results = saved
        # Sums over queries are formed in float32 whatever the dtype of the inputs.
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
        grad = grad.contiguous()
        call = self.structure((q, k, v), batched, shared, ints, floats, results, dout=grad, dq=dq, dk=dk, dv=dv)
        check_status(getattr(self.library(), f"subquad_{self.name}_backward")(ctypes.byref(call)))
        return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
    ) -> Tensor:
        """out (B, Hq, L, E) in v's dtype."""
        if q.shape[2] == 0 or k.shape[2] == 0:
            return empty_output(q, k, v)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        transformed = torch._C._are_functorch_transforms_active()
        if not transformed and any(tracing(x) for x in (q, k, v)):
            traced: Tensor = self._forward(q, k, v, batched, shared, ints, floats, wanted)[0]
            return traced.to(v.dtype)
        if transformed or wanted:
            sizes = len(batched), len(shared)
            out: Tensor = self._function.apply(sizes, ints, floats, q, k, v, *batched, *shared)[0]
            return out.to(v.dtype)
        return self.call_forward(q, k, v, batched, shared, ints, floats, False)[0]


def _register(op: Operator) -> tuple[Any, Any]:
    """The torch operators of `op`: shapes for tracers, gradients, and mapping over a batch axis."""

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
        keep: bool,
    ) -> list[Tensor]:
        return op.call_forward(q, k, v, batched, shared, ints, floats, keep)

    def backward(
        grad: Tensor,
        saved: list[Tensor],
        batched: list[Tensor],
        shared: list[Tensor],
        ints: list[int],
        floats: list[float],
    ) -> list[Tensor]:
        return op.call_backward(grad, saved, batched, shared, ints, floats)

    run = torch.library.custom_op(f"subquad::{op.name}", forward, mutates_args=())
    back = torch.library.custom_op(f"subquad::{op.name}_backward", backward, mutates_args=())

    @run.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, batched: Any, shared: Any, ints: list[int], floats: Any, keep: bool) -> Any:
        return op.results(q, k, v, ints, keep)

    @back.register_fake
    def _(grad: Tensor, saved: list[Tensor], *rest: Any) -> Any:
        return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3]]

    @run.register_vmap
    def _(info: Any, in_dims: Any, q: Any, k: Any, v: Any, batched: Any, *rest: Any) -> Any:
        size = info.batch_size
        q, k, v = widen_all([q, k, v], in_dims[:3], size)
        # Repeated along the mapped axis they are views, and the kernels walk over them.
        batched = [x.contiguous() for x in widen_all(batched, in_dims[3], size)]
        results, dims = narrow(run(q, k, v, batched, *rest), size)
        return list(results), list(dims)

    @back.register_vmap
    def _(info: Any, in_dims: Any, grad: Any, saved: Any, batched: Any, *rest: Any) -> Any:
        size = info.batch_size
        saved, batched = (widen_all(x, dims, size) for x, dims in zip((saved, batched), in_dims[1:3], strict=True))
        batched = [x.contiguous() for x in batched]
        results, dims = narrow(back(*widen_all([grad], in_dims[:1], size), saved, batched, *rest), size)
        return list(results), list(dims)

    def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        q, k, v, batched, shared, ints, floats, _ = inputs
        ctx.save_for_backward(q, k, v, *output, *batched, *shared)
        ctx.rest = len(batched), len(shared), ints, floats

    def differentiate(ctx: Any, grads: Any) -> tuple[Any, ...]:
        batched, shared, ints, floats = ctx.rest
        found = back(grads[0], *_parts(list(ctx.saved_tensors), batched, shared), ints, floats)
        return *found, [None] * batched, [None] * shared, None, None, None

    run.register_autograd(differentiate, setup_context=save)
    return run, back


def _parts(tensors: list[Tensor], batched: int, shared: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """[*saved, *batched, *shared] apart."""
    end = len(tensors) - shared
    return tensors[: end - batched], tensors[end - batched : end], tensors[end:]


def _functional(op: Operator) -> Any:
    """Gradients outside of a compiled graph."""

    class Functional(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(sizes: tuple[int, int], ints: Any, floats: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
            run: Any = op._forward if tracing(q) else op.call_forward
            return tuple(run(q, k, v, list(rest[: sizes[0]]), list(rest[sizes[0] :]), ints, floats, True))

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.sizes, ctx.ints, ctx.floats, q, k, v, *rest = inputs
            ctx.save_for_backward(q, k, v, *output, *rest)
            ctx.mark_non_differentiable(*output[1:])

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            refuse_forward_mode("backend='native'")

        @staticmethod
        @differentiable_once("backend='native'")
        def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
            run: Any = op._backward if tracing(grad) else op.call_backward
            found = run(grad, *_parts(list(ctx.saved_tensors), *ctx.sizes), ctx.ints, ctx.floats)
            return None, None, None, *found, *[None] * sum(ctx.sizes)

    return Functional
