"""Experimental products of bfloat16 pairs: by their emulation, and by the instruction where the CPU has it."""

from __future__ import annotations

import pytest

from .native_cases import PRESENT, run_with

pytestmark = pytest.mark.usefixtures("built")

SCRIPT = """
import sys
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


@pytest.mark.parametrize("isa", [isa for isa in PRESENT if "bf16" in isa])
def test_as_good_as_the_contract_asks(isa: str) -> None:
    done = run_with(isa, SCRIPT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa, "right"]


def test_never_chosen_by_itself() -> None:
    done = run_with("", "from subquad.kernels.native import library; print(library.load().subquad_isa().decode())")
    assert done.stdout.strip() in ("baseline", "avx2", "avx512")
