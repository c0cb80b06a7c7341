"""The native kernels against csrc/scalar.cpp, the definition in scalar C++: forward, backward and step."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq

pytestmark = pytest.mark.usefixtures("built")
SOURCE = Path(__file__).parents[2] / "csrc" / "scalar.cpp"
# (window, sinks, causal, whether something is far)
SPECS = [(-1, 0, 0, 1), (-1, 0, 1, 1), (3, 0, 1, 1), (4, 2, 0, 1), (5, 3, 1, 0), (2, 0, 0, 0)]


class Scalar(ctypes.Structure):
    """As in csrc/scalar.cpp."""

    _fields_ = [
        *((name, ctypes.c_long) for name in "L D E M window sinks causal".split()),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in "q k v a p".split()),
    ]


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The compiled definition."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("scalar") / "scalar.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return ctypes.CDLL(str(library))


def _mechanism(window: int, sinks: int, far: int) -> Any:
    if window < 0:
        return sq.create("linear", 8)
    if not far:
        return sq.create("local", 8, window=window, sinks=sinks)
    made = sq.create("hybrid", 8, 1, window=window, sinks=sinks, far="linear")
    assert made.log_scale is not None
    return made.requires_grad_(False)


def _call(q: Tensor, k: Tensor, v: Tensor, phi: tuple[Tensor, Tensor], spec: tuple[int, ...], scale: float) -> Any:
    window, sinks, causal, _ = spec
    tensors = [x.detach().double().contiguous() for x in (q, k, v, *phi)]
    length, width = v.shape
    call = Scalar(length, q.shape[1], width, phi[0].shape[1], window, sinks, causal, scale)
    call.q, call.k, call.v, call.a, call.p = (x.data_ptr() for x in tensors)
    return call, tensors  # the tensors have to live as long as the call


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_kernels_are_the_scalar_definition(scalar: Any, spec: tuple[int, ...]) -> None:
    window, sinks, causal, far = spec
    attn = _mechanism(window, sinks, far)
    scale = attn.resolve_scale(None)
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(60, 8, generator=generator, requires_grad=True) for _ in range(2))
    v = torch.randn(60, 5, generator=generator, requires_grad=True)
    root = scale**0.5
    phi = tuple(torch.nn.functional.elu(root * x) + 1 if far else x[:, :0] for x in (q, k))
    call, _kept = _call(q, k, v, (phi[0], phi[1]), spec, scale)
    want = torch.zeros(60, 5, dtype=torch.float64)
    scalar.scalar_forward(ctypes.byref(call), ctypes.c_void_p(want.data_ptr()))
    batched = [x[None, None] for x in (q, k, v)]
    out = attn(*batched, is_causal=bool(causal), backend="native")[0, 0]
    assert (out - want).abs().max() < 1e-5

    cotangent = torch.randn(60, 5, generator=generator)
    got = torch.autograd.grad(out, (q, k, v), cotangent)
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v, *phi)]
    cotangents = cotangent.double()
    addresses = [ctypes.c_void_p(x.data_ptr()) for x in (want, cotangents, *grads)]
    scalar.scalar_backward(ctypes.byref(call), *addresses)
    chained = [torch.zeros_like(q), torch.zeros_like(k)]
    if far:
        chained = list(torch.autograd.grad(phi, (q, k), [x.float() for x in grads[3:]]))
    for mine, near, through in zip(got, grads, [*chained, 0.0], strict=False):
        assert (mine - near - through).abs().max() < 3e-5


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec[2]], ids=str)
def test_steps_are_the_scalar_step(scalar: Any, spec: tuple[int, ...]) -> None:
    window, sinks, _, far = spec
    attn = _mechanism(window, sinks, far)
    scale = attn.resolve_scale(None)
    q, k, v = torch.randn(30, 8), torch.randn(30, 8), torch.randn(30, 5)
    root = scale**0.5
    phi = [torch.nn.functional.elu(root * x) + 1 if far else x[:, :0] for x in (q, k)]
    call, _kept = _call(q, k, v, (phi[0], phi[1]), spec, scale)
    features = phi[0].shape[1]
    sums, totals = torch.zeros(features, 5, dtype=torch.float64), torch.zeros(features, dtype=torch.float64)
    state = None
    with torch.no_grad():
        for t in range(30):
            want = torch.zeros(5, dtype=torch.float64)
            addresses = [ctypes.c_void_p(x.data_ptr()) for x in (sums, totals, want)]
            scalar.scalar_step(ctypes.byref(call), ctypes.c_long(t), *addresses)
            token = [x[None, None, t : t + 1] for x in (q, k, v)]
            out, state = attn.scan(*token, state, backend="native")
            assert (out.flatten() - want).abs().max() < 1e-5
