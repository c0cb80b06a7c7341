"""Backends for GPUs where there is no GPU: refused with the reason, never chosen, and what we hand to fla is right."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels import windowed_linear
from subquad.kernels.operator import Call, choose_backend
from subquad.kernels.windowed_linear import WindowedLinear

from .native_cases import Linear, attend, empty_state, errors, make_map, reference, with_gradients

triton, fla = Linear("triton"), Linear("fla")


def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """chunk_linear_attn as documented: (B, T, H, K), (B, T, H, V), state (B, H, K, V)."""
    assert not normalize  # its normaliser adds 1e-10, which is not ours
    return gla(q, k, v, torch.zeros_like(k), scale, initial_state, output_final_state)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """chunk_gla as documented: S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T, o_t = scale q_t S_t."""
    assert q.shape == k.shape == g.shape and v.shape[:3] == q.shape[:3]
    assert (g <= 0).all()
    assert initial_state is None or initial_state.dtype == torch.float32
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    state = q.new_zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3])) if initial_state is None else initial_state
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        rows.append(factor * (q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(rows, 1), state if output_final_state else None


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla, as far as we use it, in plain torch; the variable says that its kernels may run on a CPU."""
    for name, parts in {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gla": {"chunk_gla": gla},
        "fla.ops.linear_attn": {"chunk_linear_attn": linear_attn},
    }.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
        for key, value in parts.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "centred", "arccosine", "elu", "square"])
@pytest.mark.parametrize("groups", [1, 2])
def test_fla_gets_what_makes_its_kernels_ours(stand_in: None, kind: str, groups: int) -> None:
    phi = make_map(kind, 8, 16, heads=2)
    q, k, v = torch.randn(2, 2 * groups, 40, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 5)
    mask = torch.rand(2, 40) > 0.3
    mask[0, :7] = False  # rows that see nothing
    k[0, 0, :3] = 1e38  # garbage under the mask

    def run(backend: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        def call(*x: Tensor) -> Tensor:
            return attend(backend, phi, *x, causal=True, key_mask=mask)

        return with_gradients(call, *(x.to(dtype) for x in (q, k, v)))

    exact, found = run(reference, torch.float64), run(fla, torch.float32)
    for name, error in zip(("out", "dq", "dk", "dv"), errors(found, exact), strict=True):
        assert error < 1e-5, name


def test_fla_continues_a_state_and_survives_keys_of_very_different_size(stand_in: None) -> None:
    phi = make_map("hyperbolic", 16, 32, heads=1)
    q, k, v = torch.randn(1, 1, 30, 16), torch.randn(1, 1, 30, 16), torch.randn(1, 1, 30, 4)
    k = 60 * k / k.norm(dim=-1, keepdim=True)
    k[:, :, -1] = 0  # with one shift for all keys every earlier row would be 0 / 0
    scale = phi.default_scale(16)
    want, after = reference.causal(phi, q, k, v, empty_state(phi, v), scale=scale)
    first, state = fla.causal(phi, q[:, :, :11], k[:, :, :11], v[:, :, :11], empty_state(phi, v), scale=scale)
    second, state = fla.causal(phi, q[:, :, 11:], k[:, :, 11:], v[:, :, 11:], state, scale=scale)
    torch.testing.assert_close(torch.cat([first, second], 2), want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state.log_max, after.log_max, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(state.weighted, after.weighted, rtol=1e-3, atol=1e-4)
    assert state.count.tolist() == [30]


def test_fla_through_the_public_call(stand_in: None) -> None:
    attn = sq.create("linear", head_dim=8)
    x = torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(attn(x, x, x, is_causal=True, backend="fla"), attn(x, x, x, is_causal=True))
    with pytest.raises(ValueError, match=r"are causal: no is_causal=False.*backend=None"):
        attn(x, x, x, backend="fla")
    with pytest.raises(ValueError, match="no absorb"):
        attn.absorb(x, x, backend="fla")
    with pytest.raises(ValueError, match="one scale per token"):
        sq.create("performer", head_dim=8, num_features=8, features="trig", seed=0)(
            x, x, x, is_causal=True, backend="fla"
        )


@pytest.mark.parametrize(("backend", "package"), [("triton", "triton"), ("fla", "flash-linear-attention")])
def test_what_is_missing_is_named(backend: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    absent = {"triton", "fla"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    attn = sq.create("performer", head_dim=8, num_features=16, seed=0)
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(
        ValueError, match=rf"backend='{backend}' .* not installed \(pip install {package}\).*backend=None"
    ):
        attn(x, x, x, is_causal=True, backend=backend)
    absent.clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleType)
    with pytest.raises(ValueError, match=r"run on a GPU, got a tensor on cpu"):
        attn(x, x, x, is_causal=True, backend=backend)


def test_triton_says_what_it_cannot_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleType)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = torch.randn(1, 1, 4, 8)
    phi = make_map("positive", 8, 16, heads=1)
    assert triton.refusal(phi, x) == ""
    assert "float64" in triton.refusal(phi, x.double())
    assert "up to 256, got 300" in triton.refusal(phi, torch.randn(1, 1, 4, 300))
    assert "got ElementwiseFeatures" in triton.refusal(make_map("elu", 8, 8, heads=1), x)
    assert "normalise" in triton.refusal(phi, x, normalise=False)


def test_neither_is_ever_chosen_unnamed(stand_in: None) -> None:
    x = torch.randn(1, 1, 4, 8)
    for kind in ("positive", "elu", "square", "log"):
        phi = make_map(kind, 8, 16, heads=1)
        for device in ("cpu", "meta"):
            for size in (None, 4):
                call = Call(1.0, chunk_size=size)
                chosen = choose_backend(windowed_linear.BACKENDS, WindowedLinear(phi), call, x.to(device))
                assert chosen.name in ("chunked", "native")
