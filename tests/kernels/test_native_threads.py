"""Threads, processes, instruction sets, and torch's transforms around the native kernels."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from subquad.features.base import FeatureMap
from subquad.kernels.native import library as native_library
from subquad.kernels.windowed_linear.native.maps import map_inputs
from subquad.kernels.windowed_linear.native.operator import Batched, Inputs, Options

from .native_cases import ABSENT, PRESENT, attend, chunked, compare, make_map, native, run_with, with_gradients

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_one_head_is_cut_into_pieces(causal: bool, four_threads: None) -> None:
    phi = make_map("hyperbolic", 16, 32, heads=1)
    q, k, v = torch.randn(1, 2, 2500, 16), torch.randn(1, 1, 2500, 16), torch.randn(1, 1, 2500, 16)
    compare(phi, q, k, v, causal=causal, key_mask=torch.rand(1, 2500) > 0.1)


def test_threads_do_not_change_full_attention(four_threads: None) -> None:
    phi = make_map("positive", 16, 32, heads=2)
    q, k, v = torch.randn(3, 2, 2, 1500, 16)
    two = with_gradients(lambda *x: attend(native, phi, *x, causal=False), q, k, v)
    torch.set_num_threads(1)
    one = with_gradients(lambda *x: attend(native, phi, *x, causal=False), q, k, v)
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


def test_calls_from_several_threads(four_threads: None) -> None:
    phi = make_map("hyperbolic", 16, 32, heads=2)
    inputs = [torch.randn(3, 1, 2, 700, 16) for _ in range(4)]
    wanted = [attend(native, phi, *x, causal=True) for x in inputs]
    found: list[Tensor | None] = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            found[i] = attend(native, phi, *inputs[i], causal=True)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for got, want in zip(found, wanted, strict=True):
        assert got is not None and torch.equal(got, want)


def _child(pipe: Connection, phi: FeatureMap, inputs: Tensor) -> None:
    # Small tensors only: torch's own parallel operators hang here, their OpenMP workers did not survive the fork.
    pipe.send(attend(native, phi, *inputs, causal=True).tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn about fork itself
def test_a_forked_child_can_call(four_threads: None) -> None:
    inputs = torch.randn(3, 1, 4, 300, 8)
    phi = make_map("positive", 8, 16, heads=4)
    want = attend(native, phi, *inputs, causal=True)  # starts the workers
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_child, args=(there, phi, inputs))
    child.start()
    arrived = here.poll(60)
    if not arrived:
        child.kill()
    child.join()
    assert arrived, "the child hangs"
    assert torch.equal(torch.tensor(here.recv()), want)


SCRIPT = """
import torch, warnings
from subquad.kernels.native import library as native_library
library = native_library.load()
print(library.subquad_isa().decode())
import sys; sys.path.insert(0, {folder!r})
from kernels.native_cases import compare, make_map
torch.manual_seed(0)
for kind in ("hyperbolic", "positive-hadamard", "elu"):
    phi = make_map(kind, 40, 48, heads=2)
    q, k, v = torch.randn(2, 4, 107, 40), torch.randn(2, 2, 107, 40), torch.randn(2, 2, 107, 21)
    for causal in (False, True):
        compare(phi, q, k, v, causal=causal, key_mask=torch.rand(2, 107) > 0.3)
print("right")
"""


@pytest.mark.parametrize("isa", [isa for isa in PRESENT if "bf16" not in isa])
def test_every_instruction_set_of_this_machine(isa: str) -> None:
    done = run_with(isa, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa, "right"]


@pytest.mark.parametrize("isa", ABSENT)
def test_an_instruction_set_that_is_not_there_is_refused(isa: str) -> None:
    done = run_with(isa, SCRIPT)
    assert done.returncode != 0 and f"SUBQUAD_NATIVE_ISA={isa}" in done.stderr


def test_no_second_openmp_runtime() -> None:
    native_library.load()
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    script = """
import torch, subquad.kernels.native.library as native_library
def runtimes():
    files = {line.split()[-1] for line in open("/proc/self/maps")}
    return {name for name in files if "omp" in name.rpartition("/")[2]}
torch.ones(4) @ torch.ones(4)
before = runtimes()
native_library.load()
assert runtimes() == before, runtimes() - before
print(len(before))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1


def test_the_first_training_step_compiles_nothing() -> None:
    script = """
import sys, torch, subquad as sq
for name in ("performer", "hybrid"):
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 200, 16))
    sq.create(name, 16, heads=2)(q, k, v, is_causal=True, backend="native").sum().backward()
    assert q.grad.isfinite().all()
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_compiles_into_one_graph(causal: bool) -> None:
    phi = make_map("hyperbolic", 16, 32, heads=2)
    q, k, v = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(native, phi, q, k, v, causal=causal)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, q, k, v), with_gradients(run, q, k, v), strict=True):
        torch.testing.assert_close(a, b)


def test_torch_func_transforms() -> None:
    phi = make_map("hyperbolic", 16, 32, heads=2)
    q, k, v = torch.randn(3, 5, 2, 40, 16)

    def loss(q: Tensor, k: Tensor, v: Tensor, backend: object = native) -> Tensor:
        return attend(backend, phi, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), causal=True).square().sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    exact = torch.func.grad(lambda *x: attend(chunked, phi, *x, causal=True).square().sum(), argnums=(0, 1, 2))(q, k, v)
    for a, b in zip(mapped, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    shared = torch.vmap(lambda q: attend(native, phi, q.unsqueeze(0), k[:1], v[:1], causal=False)[0])(q)
    want = attend(native, phi, q, k[:1].expand_as(k), v[:1].expand_as(v), causal=False)
    torch.testing.assert_close(shared, want)


def test_operators_pass_torchs_own_checks() -> None:
    phi = make_map("hyperbolic", 8, 16, heads=1)
    q, k, v = (torch.randn(1, 1, 9, 8, requires_grad=True) for _ in range(3))
    found, _, _ = map_inputs(phi, q, k, 0.3)
    options = Options(*found.options, 1.0, -1, 0, causal=True, normalise=True, tail=True)
    batched = list(Batched(far_mask=torch.ones(1, 9, dtype=torch.bool)))
    arguments = (list(Inputs(q, k, v)), batched, list(found.map.arrays), *options.encoded(), True)
    torch.library.opcheck(
        torch.ops.subquad.attention.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
