"""The Triton kernels under Triton's interpreter against the definition, and their compilation for a GPU.

`make triton` runs this file, and `make test-all` through it. Triton is a download of 290 MB, so the ordinary tests do
without it, and pytest does not collect this file by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.state import State

from .native_cases import Linear, attend, empty_state, errors, make_map, reference, with_gradients

triton = Linear("triton")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton looks at this when our kernels are first imported, which the first test does."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def agree(run: Any, *inputs: Tensor, logs: float = 1.0) -> None:
    """run(backend, *inputs), forward and gradients: within twice the definition's own error, both against float64.

    `logs` is how large log weights are: whoever computes one rounds it to 24 bits, which is an error of the weight.
    """

    def results(backend: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return with_gradients(lambda *x: run(backend, *x), *(x.to(dtype) for x in inputs))

    exact = results(reference, torch.float64)
    allowed = errors(results(reference, torch.float32), exact)
    for index, (found, limit) in enumerate(zip(errors(results(triton, torch.float32), exact), allowed, strict=True)):
        limit = 2.0 * limit + 3e-7 + logs * 2.0**-24
        assert found <= limit, f"result {index}: {found:.1e}, limit {limit:.1e}"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "positive-hadamard", "oprf", "centred"])
def test_the_definition_with_masks_and_grouped_heads(kind: str, causal: bool) -> None:
    phi = make_map(kind, 12, 24, heads=2)
    q, k, v = torch.randn(2, 4, 70, 12), torch.randn(2, 2, 70, 12), torch.randn(2, 2, 70, 20)
    mask = torch.rand(2, 70) > 0.3
    mask[0, :5] = False  # rows that see nothing
    agree(lambda backend, *x: attend(backend, phi, *x, causal=causal, key_mask=mask), q, k, v)


def test_cross_attention_of_wide_heads() -> None:
    phi = make_map("hyperbolic", 80, 48, heads=1)
    q, k, v = torch.randn(1, 1, 40, 80), torch.randn(1, 1, 75, 80), torch.randn(1, 1, 75, 8)
    agree(lambda backend, *x: attend(backend, phi, *x, causal=False), 0.5 * q, 0.5 * k, v)


def test_rows_never_see_a_shift_from_their_future() -> None:
    """Large keys followed by a zero key in one chunk: with one shift for all of them every earlier row is 0 / 0."""
    phi = make_map("hyperbolic", 16, 16, heads=1)
    q, k, v = torch.randn(1, 1, 30, 16), torch.randn(1, 1, 30, 16), torch.randn(1, 1, 30, 4)
    k = 60 * k / k.norm(dim=-1, keepdim=True)
    k[:, :, -1] = 0
    agree(lambda backend, *x: attend(backend, phi, *x, causal=True), q, k, v, logs=60**2 / 8)  # |k|^2 / (2 sqrt(D))
    later = v.clone()
    later[:, :, 20:] = float("nan")
    out = attend(triton, phi, q, k, later, causal=True)
    torch.testing.assert_close(out[:, :, :20], attend(triton, phi, q, k, v, causal=True)[:, :, :20])
    assert out[:, :, 20:].isnan().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_reach_the_state_that_was_given(causal: bool) -> None:
    phi = make_map("positive", 8, 16, heads=2)
    scale = phi.default_scale(8)
    q, k, v = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    past_k, past_v = 2.0 * torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)

    def run(backend: Any, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        state: State = backend.absorb(phi, past_k, past_v, empty_state(phi, v), scale=scale)
        if not causal:
            return attend(backend, phi, q, k, v, causal=False, state=state)
        out, after = backend.causal(phi, q, k, v, state, scale=scale)
        return torch.cat([out, backend.read(phi, q, after, scale=scale)], 2)

    agree(run, q, k, v, past_k, past_v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_by_the_public_call(dtype: torch.dtype) -> None:
    attn = sq.create("performer", head_dim=16, num_features=32, seed=0)
    q, k, v = (torch.randn(1, 2, 70, 16).to(dtype) for _ in range(3))
    for is_causal in (False, True):
        exact = attn(q.double(), k.double(), v.double(), is_causal=is_causal, backend="reference")
        allowed = (attn(q, k, v, is_causal=is_causal, backend="reference").double() - exact).norm()
        out = attn(q, k, v, is_causal=is_causal, backend="triton")
        assert out.dtype == dtype
        assert (out.double() - exact).norm() <= 2.0 * allowed
    empty = torch.randn(1, 2, 0, 16).to(dtype)
    assert attn(empty, empty, empty, is_causal=True, backend="triton").shape == empty.shape


def test_one_node_in_a_compiled_graph() -> None:
    attn = sq.create("performer", head_dim=8, num_features=16, seed=0)
    q, k, v = (torch.randn(1, 1, 10, 8, requires_grad=True) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attn(q, k, v, is_causal=True, backend="triton")
        return out

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))
    found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v)))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from subquad.kernels.experimental.triton import backward as back, forward as forth
kinds = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "mask": "*i1", "exact": "*i32", "square": "fp32"}
sizes = "length heads groups slots chunks pieces span M D E weight_head bias_head tilt_head".split()
kernels = [forth.absorb_pieces, forth.scan_pieces, forth.attend_rows]
kernels += [back.pull_rows, back.pull_state, back.scan_back, back.pull_keys]
for kernel in kernels:
    for flag in (False, True):
        fixed = {"T": 16, "BM": 16, "BD": 16, "BE": 16, "MASKED": flag, "CAUSAL": flag, "KEEP": flag}
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        signature = {
            name: "constexpr" if name in fixed else "i32" if name in sizes else kinds.get(name, "*fp32")
            for name in kernel.arg_names
        }
        made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 80, 32))
        assert ".visible .entry " + kernel.__name__ in made.asm["ptx"], kernel
print("compiled", len(kernels))
"""


def test_the_kernels_compile_for_a_gpu() -> None:
    """The interpreter is more forgiving than the compiler, which needs no GPU to say so."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "compiled 7"
