"""What every operator shares: how it is called, what a backend must have, and which backend computes a call.

An operator is a frozen *spec* (what is computed: a feature map, a window, a number of clusters), a `Call` (how it is
called: scale, masks, backend, chunk size) and a dict of backends. A backend is a class below `Backend`; the dict lists
the backends of one operator, the fastest first. `choose_backend` takes the first that supports a call, or the one that
the caller named, which is used or refused with its reason and never replaced by another.

A new operator needs no change here:

    class Spec(NamedTuple): ...
    class Reference(ReferenceBackend[Spec]): ...
    BACKENDS = by_name(Native(), Chunked(), Reference())
    out = attend(BACKENDS, spec, call, q, k, v)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from .. import checks

__all__ = [
    "Backend",
    "Call",
    "ReferenceBackend",
    "attend",
    "by_name",
    "choose_backend",
    "differentiable_once",
    "refuse_forward_mode",
    "refuse_second_derivatives",
]


class Call(NamedTuple):
    """How an operator is called. Immutable: `call._replace(key_mask=None)` makes another one.

    scale:      multiplies q.k inside the kernel
    key_mask:   (B, S) bool, True = real, or None; masked keys have exactly zero weight
    query_mask: (B, L) bool, True = real, or None; the outputs of masked queries are not used
    backend:    a name, or None = the fastest
    chunk_size: tokens per chunk, or None = the backend's own choice
    """

    scale: float
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    backend: str | None = None
    chunk_size: int | None = None


S = TypeVar("S")


class Backend(Generic[S]):
    """One way to compute an operator with the specs S. It holds nothing: everything comes with the call.

    A backend implements those of the four methods that its operator has; shapes as in `Mechanism.forward`.
    """

    name: ClassVar[str]

    def refusal(self, spec: S, call: Call, *tensors: Tensor) -> str:
        """Why it cannot take this call, or "" if it can."""
        return ""

    def automatic(self, spec: S, call: Call, *tensors: Tensor) -> bool:
        """Whether `backend=None` may take it where it can: not the definition, nor where another one is faster."""
        return True

    def attend(self, spec: S, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) of whole sequences."""
        raise NotImplementedError

    def scan(self, spec: S, call: Call, q: Tensor, k: Tensor, v: Tensor, state: Any) -> tuple[Tensor, Any]:
        """out (B, Hq, L, E) of the tokens that follow `state`, causally, and the state after them."""
        raise NotImplementedError

    def absorb(self, spec: S, call: Call, k: Tensor, v: Tensor, state: Any) -> Any:
        """The state after further keys and values."""
        raise NotImplementedError

    def read(self, spec: S, call: Call, q: Tensor, state: Any) -> Tensor:
        """out (B, Hq, L, E): every absorbed key is visible to every query."""
        raise NotImplementedError


class ReferenceBackend(Backend[S]):
    """The definition, which the other backends are compared with; it must be asked for by name."""

    name = "reference"

    def automatic(self, spec: S, call: Call, *tensors: Tensor) -> bool:
        return False


B = TypeVar("B", bound=Backend[Any])


def by_name(*backends: B) -> dict[str, B]:
    """The backends of one operator, the fastest first, as `choose_backend` takes them."""
    return {backend.name: backend for backend in backends}


def choose_backend(backends: Mapping[str, B], spec: Any, call: Call, *tensors: Tensor) -> B:
    """Who computes this call: the backend that it names, or the first that supports it.

    >>> class Slow(Backend[int]):
    ...     name = "slow"
    >>> class Fast(Backend[int]):
    ...     name = "fast"
    ...     def refusal(self, spec, call, *tensors):
    ...         return f"it counts to 9, got {spec}" if spec > 9 else ""
    >>> backends = by_name(Fast(), Slow())
    >>> choose_backend(backends, 3, Call(scale=1.0)).name, choose_backend(backends, 12, Call(scale=1.0)).name
    ('fast', 'slow')
    >>> choose_backend(backends, 12, Call(scale=1.0, backend="fast"))
    Traceback (most recent call last):
    ValueError: backend='fast' cannot take this call: it counts to 9, got 12. Use backend=None or 'slow'
    """
    if call.backend is not None:
        checks.check_option("backend", call.backend, backends)
        named = backends[call.backend]
        reason = named.refusal(spec, call, *tensors)
        if reason:
            able = [b.name for b in backends.values() if b is not named and not b.refusal(spec, call, *tensors)]
            use = " or ".join(["backend=None", *(repr(name) for name in able[:1])])
            raise ValueError(f"backend={named.name!r} cannot take this call: {reason}. Use {use}")
        return named
    for backend in backends.values():
        if backend.automatic(spec, call, *tensors) and not backend.refusal(spec, call, *tensors):
            return backend
    reasons = "; ".join(f"{name}: {b.refusal(spec, call, *tensors)}" for name, b in backends.items())
    raise ValueError(f"no backend can take this call: {reasons}")


def attend(backends: Mapping[str, B], spec: Any, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out (B, Hq, L, E) in v's dtype, by whoever computes this call."""
    return choose_backend(backends, spec, call, q, k, v).attend(spec, call, q, k, v).to(v.dtype)


# -- second derivatives ---------------------------------------------------------------------------------------------
# Kernels have a hand-written gradient and no second one. What torch makes of that is a wrong number (the kernel counts
# as constant), no gradient at all, or an error about its internals; here it is an error that says what to do.


class _Refused(torch.autograd.Function):
    """Gradients as they are, which depend on the tensors that they are gradients for, and cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(what: str, count: int, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f'{ctx.what} has no second derivative; call the mechanism with backend="reference"')


def refuse_forward_mode(what: str) -> NoReturn:
    """What `jvp` of a kernel's autograd.Function does: torch's own message would not say what to do."""
    raise NotImplementedError(
        f"{what} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian); call the mechanism with "
        'backend="reference", or use torch.func.jacrev'
    )


def _refused(what: str, grads: tuple[Any, ...], sources: tuple[Tensor, ...]) -> tuple[Any, ...]:
    found = [g for g in grads if isinstance(g, Tensor) and g.is_floating_point()]
    run: Any = _Refused.apply
    marked = iter(run(what, len(found), *found, *sources))
    return tuple(next(marked) if isinstance(g, Tensor) and g.is_floating_point() else g for g in grads)


def differentiable_once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A `backward` of an autograd.Function whose gradients raise where they are differentiated again; see
    `refuse_second_derivatives`. It must have saved its inputs.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def wrapped(ctx: Any, *grads: Any) -> Any:
            with torch.no_grad():
                found = backward(ctx, *grads)
            if not torch.is_grad_enabled():  # create_graph=False: nobody will
                return found
            given = tuple(g for g in grads if isinstance(g, Tensor))
            return _refused(what, found, (*given, *(x for x in ctx.saved_tensors if x.is_floating_point())))

        return wrapped

    return decorate


class _Guarded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(what: str, *tensors: Tensor) -> Any:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        refuse_forward_mode(ctx.what)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return (None, *grads)
        return (None, *_refused(ctx.what, grads, ctx.saved_tensors))


def refuse_second_derivatives(what: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as they are, for code after this line that has a first derivative only.

    `what` names that code: a second derivative through it raises NotImplementedError and names backend="reference".

    >>> x = torch.ones(2, requires_grad=True)
    >>> (y,) = refuse_second_derivatives("this example", x)
    >>> (once,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    >>> once.sum().backward()
    Traceback (most recent call last):
    NotImplementedError: this example has no second derivative; call the mechanism with backend="reference"
    """
    if torch.compiler.is_compiling():  # compiled graphs refuse it themselves
        return tensors
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return tensors
    run: Any = _Guarded.apply
    guarded: tuple[Tensor, ...] = run(what, *tensors)
    return guarded
