"""What the tests of the native kernels share: maps, inputs, and a comparison with float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.features.base import FeatureMap
from subquad.features.elementwise import ElementwiseFeatures, LogFeatures
from subquad.features.polynomial import PolynomialFeatures
from subquad.features.random import ExponentialFeatures, GeneralisedFeatures
from subquad.kernels import windowed_linear
from subquad.kernels.operator import Backend, Call
from subquad.kernels.windowed_linear import WindowedLinear
from subquad.state import State

Result = tuple[Tensor, ...]


def make_map(kind: str, dim: int, features: int, heads: int) -> FeatureMap:
    """A feature map by a name that tells features, projection and options apart."""
    name, _, projection = kind.partition("-")
    options: dict[str, Any] = {"projection": projection or "orthogonal", "seed": 5, "kv_heads": heads}
    if name in ("elu", "relu"):
        return ElementwiseFeatures(name, dim)
    if name == "square":
        return ElementwiseFeatures(torch.square, dim)
    if name == "taylor":
        return PolynomialFeatures(dim)
    if name == "log":
        return LogFeatures(dim)
    if name == "arccosine":
        return GeneralisedFeatures(dim, features, torch.nn.functional.relu, kernel_eps=1e-3, **options)
    if name == "centred":
        name, options["center"], options["per_head"] = "sderf", True, True
    phi = ExponentialFeatures(dim, features, features=name, **options)
    if name in ("sderf", "oprf"):
        generator = torch.Generator().manual_seed(7)
        q, k = (torch.randn(2, heads, 64, dim, generator=generator) + 0.3 for _ in range(2))
        phi.calibrate(q, k)
    return phi


MAPS = [
    "positive",
    "positive-hadamard",
    "hyperbolic",
    "hyperbolic-hadamard",
    "oprf",
    "oprf-hadamard",
    "sderf",
    "centred",
    "arccosine",
    "elu",
    "relu",
    "square",
    "taylor",
    "log",
]


def empty_state(phi: FeatureMap, v: Tensor) -> State:
    """A state that has seen nothing."""
    return WindowedLinear(phi).empty(v, v, 1.0, "")


class Linear:
    """Linear attention by one backend: everything is far."""

    def __init__(self, name: str) -> None:
        self.backend: Backend[WindowedLinear] = windowed_linear.BACKENDS[name]

    def refusal(self, phi: FeatureMap, *tensors: Tensor, normalise: bool = True) -> str:
        return self.backend.refusal(WindowedLinear(phi, causal=True, normalise=normalise), Call(1.0), *tensors)

    def full(
        self, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, *, scale: float, key_mask: Tensor | None = None
    ) -> Tensor:
        return self.backend.attend(WindowedLinear(phi), Call(scale, key_mask), q, k, v)

    def causal(
        self,
        phi: FeatureMap,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State,
        *,
        scale: float,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        found: tuple[Tensor, State] = self.backend.scan(
            WindowedLinear(phi, causal=True), Call(scale, key_mask), q, k, v, state
        )
        return found

    def absorb(
        self, phi: FeatureMap, k: Tensor, v: Tensor, state: State, *, scale: float, key_mask: Tensor | None = None
    ) -> State:
        after: State = self.backend.absorb(WindowedLinear(phi), Call(scale, key_mask), k, v, state)
        return after

    def read(self, phi: FeatureMap, q: Tensor, state: State, *, scale: float) -> Tensor:
        return self.backend.read(WindowedLinear(phi), Call(scale), q, state)


native, chunked, reference = Linear("native"), Linear("chunked"), Linear("reference")


def attend(
    backend: Any,
    phi: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None = None,
    state: State | None = None,
) -> Tensor:
    """One call of a backend's full or causal attention, without its state."""
    scale = phi.default_scale(q.shape[-1])
    out: Tensor
    if causal:
        before = empty_state(phi, v) if state is None else state
        out = backend.causal(phi, q, k, v, before, scale=scale, key_mask=key_mask)[0]
    elif state is None:
        out = backend.full(phi, q, k, v, scale=scale, key_mask=key_mask)
    else:
        out = backend.read(phi, q, backend.absorb(phi, k, v, state, scale=scale, key_mask=key_mask), scale=scale)
    return out


def with_gradients(run: Callable[..., Tensor], *inputs: Tensor) -> Result:
    """run(*inputs) and its gradients for a fixed, uneven cotangent."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = run(*leaves)
    weights = torch.linspace(-1.0, 1.5, max(1, out.numel()), dtype=torch.float64).reshape(-1)[: out.numel()]
    grads = torch.autograd.grad((out.double() * torch.sin(37.0 * weights).view_as(out)).sum(), leaves)
    return (out.detach(), *grads)


def errors(results: Result, exact: Result) -> list[float]:
    """Relative errors in the Frobenius norm; what vanishes is measured by out.

    With a single key no gradient reaches q or k: it is g.(v - out) times the derivative of log phi, of order 1.
    The rounding of out alone, half a unit in the last place, makes that eps |g| |out| / 2 instead of 0, so out is the
    scale of what can be asked for: relative to anything smaller, two such residues would be compared with each other.
    """
    out = exact[0].norm().item()
    sizes = [want.norm().item() for want in exact]
    return [
        (got.double() - want).norm().item() / max(size if size > 1e-3 * out else out, 1e-30)
        for got, want, size in zip(results, exact, sizes, strict=True)
    ]


def compare(phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None) -> None:
    """The native result is within twice the error that torch's float32 makes itself, both against float64."""

    def run(backend: Any, dtype: torch.dtype) -> Result:
        def call(*x: Tensor) -> Tensor:
            return attend(backend, phi, *x, causal=causal, key_mask=key_mask)

        return with_gradients(call, *(x.to(dtype) for x in (q, k, v)))

    exact = run(chunked, torch.float64)
    allowed = errors(run(chunked, torch.float32), exact)
    for name, found, limit in zip(
        ("out", "dq", "dk", "dv"), errors(run(native, torch.float32), exact), allowed, strict=True
    ):
        assert math.isfinite(found), name
        assert found <= 2.0 * limit + 3e-7, f"{name}: {found:.1e}, torch's own float32 error {limit:.1e}"


def _cpu_flags() -> set[str] | None:
    """What the CPU says it has; None where the system does not tell."""
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else None


_FLAGS = _cpu_flags()
_NEEDED = {"avx2": "avx2", "avx512": "avx512vl", "avx512bf16": "avx512_bf16"}
PRESENT = ["baseline", "bf16-emulated", *(isa for isa, flag in _NEEDED.items() if flag in (_FLAGS or ()))]
ABSENT = ["mmx", *(isa for isa, flag in _NEEDED.items() if _FLAGS is not None and flag not in _FLAGS)]


def run_with(isa: str, script: str) -> subprocess.CompletedProcess[str]:
    """`script`, where {folder} stands for that of all tests, in a process whose kernels use this instruction set."""
    script = script.format(folder=str(Path(__file__).parent.parent))
    environment = {**os.environ, "SUBQUAD_NATIVE_ISA": isa, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
