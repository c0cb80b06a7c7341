"""The native kernels compute what the definition says: against float64, in every shape, for every map."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.features.elementwise import ElementwiseFeatures
from subquad.features.random import TrigFeatures
from subquad.kernels.native import library as native_library
from subquad.kernels.operator import Call, choose_backend
from subquad.kernels.windowed_linear import BACKENDS, WindowedLinear, map_arrays
from subquad.kernels.windowed_linear.native.maps import multiplied

from .native_cases import (
    MAPS,
    attend,
    chunked,
    compare,
    empty_state,
    errors,
    make_map,
    native,
    reference,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", MAPS)
def test_every_map(kind: str, causal: bool) -> None:
    phi = make_map(kind, 40, 48, heads=2)
    q, k, v = torch.randn(2, 4, 107, 40), torch.randn(2, 2, 107, 40), torch.randn(2, 2, 107, 21)
    compare(phi, q, k, v, causal=causal, key_mask=torch.rand(2, 107) > 0.3)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("length", "dim", "width", "features"),
    [
        (1, 16, 16, 32),
        (2, 3, 1, 5),
        (15, 17, 33, 7),
        (48, 64, 64, 130),
        (49, 96, 5, 64),
        (193, 256, 128, 66),
        (401, 20, 24, 40),
    ],
)
def test_any_size(length: int, dim: int, width: int, features: int, causal: bool) -> None:
    phi = make_map("positive", dim, features, heads=1)
    q, k, v = torch.randn(1, 2, length, dim), torch.randn(1, 1, length, dim), torch.randn(1, 1, length, width)
    compare(phi, q, k, v, causal=causal)


@pytest.mark.parametrize("dim", [1, 2, 5, 16, 33, 64, 100, 128, 256])
@pytest.mark.parametrize("blocks", [1, 3])
def test_butterflies_equal_the_matrix(dim: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_arrays, "_butterflies_win", lambda projection: True)  # narrow heads would take the matrix
    phi = make_map("hyperbolic-hadamard", dim, 2 * dim + 6, heads=1)
    phi.projection = type(phi.projection)(dim + 3, dim, blocks=blocks, seed=3)  # a last block that is not full
    found = map_arrays.map_arrays(phi, dim**-0.5)
    assert found is not None and found.arrays.weight.numel() == 0 and found.arrays.signs.numel()
    q, k, v = torch.randn(1, 1, 60, dim), torch.randn(1, 1, 60, dim), torch.randn(1, 1, 60, 8)
    compare(phi, q, k, v, causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [1, 3, 16, 64])
def test_taylor_products(dim: int, causal: bool) -> None:
    phi = make_map("taylor", dim, 0, heads=2)
    assert multiplied(phi)
    assert choose_backend(BACKENDS, WindowedLinear(phi), Call(1.0), torch.randn(1, 1, 1, dim)).name == "native"
    q, k, v = torch.randn(1, 4, 75, dim), torch.randn(1, 2, 75, dim), torch.randn(1, 2, 75, 19)
    compare(phi, q, k, v, causal=causal, key_mask=torch.rand(1, 75) > 0.2)


def test_cross_attention_and_empty_sides() -> None:
    phi = make_map("hyperbolic", 16, 32, heads=2)
    q, k, v = torch.randn(2, 4, 30, 16), torch.randn(2, 2, 700, 16), torch.randn(2, 2, 700, 16)
    compare(phi, q, k, v, causal=False)
    assert attend(native, phi, q[:, :, :0], k, v, causal=False).shape == (2, 4, 0, 16)
    nothing = attend(native, phi, q, k[:, :, :0], v[:, :, :0], causal=False)
    assert torch.equal(nothing, torch.zeros_like(nothing))
    assert attend(native, phi, q[:, :, :0], k[:, :, :0], v[:, :, :0], causal=True).shape == (2, 4, 0, 16)


def test_any_strides() -> None:
    phi = make_map("positive", 24, 40, heads=2)
    q = torch.randn(24, 65, 4, 2).permute(3, 2, 1, 0)
    k = torch.randn(2, 65, 2, 48).transpose(1, 2)[..., ::2]
    v = torch.randn(2, 1, 65, 12).expand(2, 2, 65, 12)
    for causal in (False, True):
        strided = with_gradients(lambda *x, c=causal: attend(native, phi, *x, causal=c), q, k, v)
        packed = with_gradients(
            lambda *x, c=causal: attend(native, phi, *x, causal=c), *(x.contiguous() for x in (q, k, v))
        )
        for a, b in zip(strided, packed, strict=True):
            assert torch.equal(a, b)
    # Leaves of with_gradients are copies; this is the call on the strided tensors themselves.
    assert torch.equal(
        attend(native, phi, q, k, v, causal=True),
        attend(native, phi, q.contiguous(), k.contiguous(), v.contiguous(), causal=True),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_low_precision_inputs_have_float32_sums(dtype: torch.dtype, causal: bool) -> None:
    phi = make_map("hyperbolic", 32, 64, heads=2)
    q, k, v = (torch.randn(1, 2, 300, 32).to(dtype) for _ in range(3))
    low = with_gradients(lambda *x: attend(native, phi, *x, causal=causal), q, k, v)
    assert {x.dtype for x in low} == {dtype}
    exact = with_gradients(lambda *x: attend(chunked, phi, *x, causal=causal), q.double(), k.double(), v.double())
    unit = torch.finfo(dtype).eps
    for found in errors(low, exact):
        assert found < unit


@pytest.mark.parametrize("mechanism", ["performer", "linear", "hybrid"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_of_low_precision_inputs_are_rounded_once(mechanism: str, causal: bool) -> None:
    """As torch's float32 computation on the same inputs: the backward must not start from a rounded output."""
    attn = sq.create(mechanism, head_dim=32, heads=2)
    # Values that lie far from zero: their mean cancels in the gradient of q and k, and its rounding would not.
    q, k, v = (torch.randn(1, 2, 300, 32) + shift for shift in (0, 0, 4))
    leaves = [x.bfloat16() for x in (q, k, v)]

    def attend_by(backend: str) -> Callable[..., Tensor]:
        return lambda *x: attn(*x, is_causal=causal, backend=backend)

    exact = with_gradients(attend_by("chunked"), *(x.double() for x in leaves))
    allowed = errors(with_gradients(attend_by("chunked"), *leaves), exact)
    found = errors(with_gradients(attend_by("native"), *leaves), exact)
    for name, ours, theirs in zip(["out", "dq", "dk", "dv"], found, allowed, strict=True):
        assert ours < 2 * theirs, f"{name}: {ours:.1e}, torch {theirs:.1e}"


def test_low_precision_at_large_norms_is_finite() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        phi = make_map("hyperbolic", 16, 32, heads=1)
        q, k, v = (torch.randn(1, 1, 130, 16) for _ in range(3))
        q, k = (30 * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        results = with_gradients(
            lambda *x, p=phi: attend(native, p, *x, causal=True), *(x.to(dtype) for x in (q, k, v))
        )
        assert all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("kind", ["hyperbolic", "elu", "log"])
def test_states_continue_each_other(kind: str) -> None:
    phi = make_map(kind, 16, 32, heads=2)
    q, k, v = torch.randn(2, 4, 130, 16), torch.randn(2, 2, 130, 16), torch.randn(2, 2, 130, 9)
    scale = phi.default_scale(16)
    mask = torch.rand(2, 130) > 0.2
    whole, after = native.causal(phi, q, k, v, empty_state(phi, v), scale=scale, key_mask=mask)
    state, parts = empty_state(phi, v), []
    for cut in (slice(0, 1), slice(1, 50), slice(50, 51), slice(51, 51), slice(51, 130)):
        out, state = native.causal(
            phi, q[:, :, cut], k[:, :, cut], v[:, :, cut], state, scale=scale, key_mask=mask[:, cut]
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(state.weighted, after.weighted, rtol=2e-5, atol=2e-5)
    assert torch.equal(state.count, after.count) and torch.equal(after.count, mask.sum(-1))
    there = reference.absorb(phi, k, v, empty_state(phi, v), scale=scale, key_mask=mask)
    torch.testing.assert_close(after.log_max, there.log_max, rtol=1e-5, atol=1e-5)
    absorbed = native.absorb(phi, k, v, empty_state(phi, v), scale=scale, key_mask=mask)
    torch.testing.assert_close(absorbed.normaliser, there.normaliser, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(
        native.read(phi, q, absorbed, scale=scale), reference.read(phi, q, there, scale=scale), rtol=2e-5, atol=2e-5
    )


def test_gradient_flows_through_states() -> None:
    phi = make_map("hyperbolic", 16, 32, heads=1)
    q, k, v = (torch.randn(1, 1, 90, 16) for _ in range(3))
    scale = phi.default_scale(16)

    def pieces(backend: object, *x: torch.Tensor) -> torch.Tensor:
        q, k, v = x
        state, outs = empty_state(phi, v), []
        for cut in (slice(0, 40), slice(40, 41), slice(41, 90)):
            out, state = backend.causal(phi, q[:, :, cut], k[:, :, cut], v[:, :, cut], state, scale=scale)  # type: ignore[attr-defined]
            outs.append(out)
        state = backend.absorb(phi, k[:, :, :30] * 0.5, v[:, :, :30], state, scale=scale)  # type: ignore[attr-defined]
        outs.append(backend.read(phi, q[:, :, :20], state, scale=scale))  # type: ignore[attr-defined]
        return torch.cat(outs, 2)

    exact = with_gradients(lambda *x: pieces(chunked, *x), q.double(), k.double(), v.double())
    allowed = errors(with_gradients(lambda *x: pieces(chunked, *x), q, k, v), exact)
    for found, limit in zip(
        errors(with_gradients(lambda *x: pieces(native, *x), q, k, v), exact), allowed, strict=True
    ):
        assert found <= 2 * limit + 3e-7


def test_one_token_for_many_heads() -> None:
    for kind in ("hyperbolic", "positive-hadamard", "centred", "elu", "arccosine", "square"):
        phi = make_map(kind, 48, 64, heads=3)
        k, v = torch.randn(4, 3, 40, 48), torch.randn(4, 3, 40, 19)
        scale = phi.default_scale(48)
        state = native.absorb(phi, k, v, empty_state(phi, v), scale=scale)
        before = [state.weighted.clone(), state.normaliser.clone(), state.log_max.clone()]
        q1, k1, v1 = torch.randn(4, 6, 1, 48), torch.randn(4, 3, 1, 48), torch.randn(4, 3, 1, 19)
        mask = torch.tensor([[True], [False], [True], [True]])
        with torch.no_grad():
            out, after = native.causal(phi, q1, k1, v1, state, scale=scale, key_mask=mask)
            want, wanted = chunked.causal(phi, q1, k1, v1, state, scale=scale, key_mask=mask)
        torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(after.weighted, wanted.weighted, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(after.log_max, wanted.log_max, rtol=1e-5, atol=1e-5)
        for old, kept in zip((state.weighted, state.normaliser, state.log_max), before, strict=True):
            assert torch.equal(old, kept)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_without_normaliser(causal: bool) -> None:
    spec = WindowedLinear(ElementwiseFeatures("elu", 16), causal=causal, normalise=False)
    q, k, v = torch.randn(3, 2, 2, 70, 16)
    got, want = (BACKENDS[name].attend(spec, Call(1.0), q, k, v) for name in ("native", "chunked"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_refusals_say_why() -> None:
    phi = make_map("positive", 16, 32, heads=1)
    q = torch.randn(1, 1, 4, 16)
    assert native.refusal(phi, q) == ""
    assert "float64" in native.refusal(phi, q.double())
    assert "meta" in native.refusal(phi, q.to("meta"))
    assert "token" in native.refusal(TrigFeatures(16, 32), q)
    assert "normalise" in native.refusal(phi, q, normalise=False)


def test_a_missing_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBQUAD_NATIVE_LIBRARY", "/nowhere/libsubquad_native.so")
    monkeypatch.setattr(native_library, "_found", {})
    with pytest.raises(RuntimeError, match="nowhere"):
        native_library.load()
    assert "nowhere" in native.refusal(make_map("elu", 4, 4, heads=1), torch.zeros(1, 1, 1, 4))
    monkeypatch.delenv("SUBQUAD_NATIVE_LIBRARY")
    monkeypatch.setattr(native_library, "_found", {})
    monkeypatch.setattr(native_library, "_candidates", list)
    with pytest.raises(RuntimeError, match="compiler"):
        native_library.load()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiny_elu_features_are_kept(is_causal):
    """e^-95 is subnormal in float32: flushed to 0, every key would lose its weight and the output would be 0."""
    attn = sq.create("linear", 4)
    q, k = torch.full((1, 1, 6, 4), -95.0), torch.zeros(1, 1, 6, 4)
    v = torch.randn(1, 1, 6, 4)
    got = attn(q, k, v, is_causal=is_causal, backend="native")
    assert (got - attn(q.double(), k.double(), v.double(), is_causal=is_causal)).abs().max() < 1e-2
