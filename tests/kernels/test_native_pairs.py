"""Products of bfloat16 pairs, through their emulation where the CPU has no instruction for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.kernels.native import library as native_library

from .native_cases import run_with

pytestmark = pytest.mark.usefixtures("built")

SCRIPT = """
import importlib, sys
sys.path.insert(0, {folder!r})
import torch
from subquad.kernels.native import library as native_library
from kernels.native_cases import attend, chunked, compare, make_map, native
print(native_library.load().subquad_isa().decode())
torch.manual_seed(0)
used = False
for kind, features in (("positive", 31), ("hyperbolic", 256), ("positive-hadamard", 64), ("elu", 0)):
    for dim, width, groups, length in ((64, 64, 1, 200), (20, 13, 2, 107)):
        phi = make_map(kind, dim, features, heads=2)
        for norm in (0.7, 3.0):
            q, k = norm * torch.randn(1, 2 * groups, length, dim), norm * torch.randn(1, 2, length, dim)
            v = torch.randn(1, 2, length, width)
            q, k, v = (x.bfloat16() for x in (q, k, v))
            mask = torch.rand(1, length) > 0.2
            v[:, :, ~mask[0]] = float("nan")
            for causal in (False, True):
                def run(backend, *x):
                    return attend(backend, phi, *x, causal=causal, key_mask=mask)
                exact = run(chunked, q.double(), k.double(), v.double())
                allowed = (run(chunked, q, k, v).bfloat16().double() - exact).norm()
                got = run(native, q, k, v)
                assert got.dtype == torch.bfloat16
                error = (got.double() - exact).norm()
                assert error <= 2.0 * allowed, (kind, dim, norm, causal, error / allowed)
                # With a gradient behind it the same call stays in float32.
                plain = run(native, q.requires_grad_(), k, v).detach()
                q = q.detach()
                used = used or not torch.equal(plain, got)
                assert (plain.double() - exact).norm() <= 1.05 * allowed
assert used
# A value that is not finite reaches the rows that see it and no other.
phi = make_map("hyperbolic", 16, 32, heads=1)
q, k, v = (torch.randn(1, 1, 120, 16).bfloat16() for _ in range(3))
clean = attend(native, phi, q, k, v, causal=True)
v[0, 0, 70, 3] = float("nan")
out = attend(native, phi, q, k, v, causal=True)
assert out[0, 0, 70:, 3].isnan().all() and out[:, :, :70].isfinite().all() and out[..., :3].isfinite().all()
assert (out[:, :, :70] - clean[:, :, :70]).abs().max() < 0.05
# float32 inputs never meet them.
compare(phi, q.float(), k.float(), v.nan_to_num(0.0).float(), causal=True)
print("right")
"""

# Which instruction set the library takes, or why it takes none, without the seconds that importing torch costs.
ASK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.subquad_isa.restype = library.subquad_error.restype = ctypes.c_char_p
print((library.subquad_isa() or library.subquad_error()).decode())
"""


def test_the_emulation_is_as_good_as_the_contract_asks() -> None:
    done = run_with("bf16-emulated", SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bf16-emulated", "right"]


def test_the_instruction_where_the_cpu_has_it() -> None:
    environment = {**os.environ, "SUBQUAD_NATIVE_ISA": "avx512bf16"}
    library = native_library.load()._name
    asked = subprocess.run(
        [sys.executable, "-c", ASK, library], env=environment, capture_output=True, text=True, check=True
    )
    if asked.stdout.strip() == "avx512bf16":
        done = run_with("avx512bf16", SCRIPT)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["avx512bf16", "right"]
        return
    # Only a CPU without it, or a compiler that does not know it, may refuse.
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    unknown = "SUBQUAD_NATIVE_ISA=avx512bf16 is not an instruction set of this build" in asked.stdout
    assert unknown or " avx512_bf16 " not in flags, asked.stdout
    assert "SUBQUAD_NATIVE_ISA=avx512bf16" in asked.stdout


def test_the_emulation_is_never_chosen_by_itself() -> None:
    if not os.environ.get("SUBQUAD_NATIVE_ISA"):
        assert native_library.load().subquad_isa().decode() in ("baseline", "avx2", "avx512", "avx512bf16")
