"""What the native kernels must survive: underflow, NaN, garbage under masks, and tokens that come later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from subquad.features.base import FeatureMap

from .native_cases import attend, chunked, compare, empty_state, make_map, native, with_gradients

pytestmark = pytest.mark.usefixtures("built")


def far_keys(dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """63 keys of norm 60 followed by a zero key: with one shift for all of them every earlier row underflows."""
    q, k, v = torch.randn(1, 1, 64, dim), torch.randn(1, 1, 64, dim), torch.randn(1, 1, 64, dim)
    k = 60 * k / k.norm(dim=-1, keepdim=True)
    k[:, :, -1] = 0
    return q, k, v


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "positive-hadamard"])
@pytest.mark.parametrize("lead", [0, 33])
def test_rows_never_see_a_shift_from_their_future(kind: str, lead: int) -> None:
    phi = make_map(kind, 64, 128, heads=1)
    q, k, v = far_keys(64)
    if lead:  # the same trap away from the start of a chunk
        q, k, v = (torch.cat([x[:, :, :lead], x], 2) for x in (q, k, v))
    compare(phi, q, k, v, causal=True)


def test_rows_do_not_move_when_a_later_key_changes() -> None:
    phi = make_map("hyperbolic", 32, 64, heads=1)
    q, k, v = torch.randn(1, 1, 200, 32), torch.randn(1, 1, 200, 32), torch.randn(1, 1, 200, 32)
    out = attend(native, phi, q, k, v, causal=True)
    for at in (199, 100, 48, 1):
        later_k, later_v, later_q = k.clone(), v.clone(), q.clone()
        later_k[:, :, at:] *= 9.0
        later_v[:, :, at:] = -5.0
        later_q[:, :, at:] *= 9.0
        moved = attend(native, phi, later_q, later_k, later_v, causal=True)
        assert (moved - out)[:, :, :at].abs().max() < 1e-5
        assert (moved - out)[:, :, at:].abs().max() > 1e-2


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_reaches_the_rows_that_see_it_and_no_other(what: str, value: float) -> None:
    for kind in ("hyperbolic", "elu"):
        phi = make_map(kind, 16, 32, heads=1)
        inputs = {name: torch.randn(1, 1, 120, 16) for name in "qkv"}
        clean = attend(native, phi, **inputs, causal=True)
        inputs[what][0, 0, 70, 3] = value
        out = attend(native, phi, **inputs, causal=True)
        torch.testing.assert_close(out[:, :, :70], clean[:, :, :70], rtol=1e-5, atol=1e-5)
        if what == "q":
            torch.testing.assert_close(out[:, :, 71:], clean[:, :, 71:], rtol=1e-5, atol=1e-5)
        if value != value:
            rows = out[0, 0, 70] if what == "q" else out[0, 0, 70:, 3] if what == "v" else out[0, 0, 70:]
            assert rows.isnan().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("garbage", [1e38, -1e38, float("nan"), float("inf")])
def test_masked_keys_have_no_weight_at_all(causal: bool, garbage: float) -> None:
    for kind in ("hyperbolic", "elu"):
        phi = make_map(kind, 16, 32, heads=1)
        q, k, v = torch.randn(3, 2, 1, 100, 16)
        mask = torch.rand(2, 100) > 0.4
        mask[0, :60] = False

        def run(k: Tensor, v: Tensor, phi: FeatureMap = phi, q: Tensor = q, mask: Tensor = mask) -> tuple[Tensor, ...]:
            return with_gradients(lambda *x: attend(native, phi, *x, causal=causal, key_mask=mask), q, k, v)

        hidden = ~mask[:, None, :, None]
        clean = run(k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0))
        dirty = run(k.masked_fill(hidden, garbage), v.masked_fill(hidden, garbage))
        for a, b in zip(clean, dirty, strict=True):
            assert torch.equal(a, b)
        if causal:
            assert torch.equal(clean[0][0, :, :60], torch.zeros_like(clean[0][0, :, :60]))
        assert not clean[2].masked_select(hidden.expand_as(k)).any()


def test_all_keys_masked_gives_zero() -> None:
    phi = make_map("hyperbolic", 16, 32, heads=1)
    q, k, v = torch.randn(3, 1, 1, 130, 16)
    for causal in (False, True):
        mask = torch.zeros(1, 130, dtype=torch.bool)
        results = with_gradients(lambda *x, c=causal, m=mask: attend(native, phi, *x, causal=c, key_mask=m), q, k, v)
        for x in results:
            assert torch.equal(x, torch.zeros_like(x))


def test_disjoint_features_in_float32() -> None:
    """q = 30 u, k = -30 u: every single feature underflows against a shift that the features share."""
    phi = make_map("positive", 16, 64, heads=1)
    direction = torch.nn.functional.normalize(torch.randn(16), dim=0)
    q = 30 * direction + 0.1 * torch.randn(1, 1, 300, 16)
    k = -30 * direction + 0.1 * torch.randn(1, 1, 300, 16)
    v = torch.randn(1, 1, 300, 16)
    for causal in (False, True):
        compare(phi, q, k, v, causal=causal)


def test_rising_norms() -> None:
    """Every key lifts the maxima, so every chunk rescales the state and the gradient."""
    phi = make_map("hyperbolic", 16, 64, heads=1)
    q, k, v = (torch.randn(1, 1, 250, 16) for _ in range(3))
    k = k * torch.linspace(0.0, 6.0, 250)[:, None]
    for causal in (False, True):
        compare(phi, q, k, v, causal=causal)
        compare(phi, q, k.flip(2), v, causal=causal)


def test_a_long_scan_stays_finite() -> None:
    phi = make_map("hyperbolic", 8, 16, heads=1)
    v = torch.randn(1, 1, 20_000, 4)
    q, k = torch.randn(2, 1, 1, 20_000, 8)
    state = empty_state(phi, v)
    for _ in range(50):  # a million tokens
        out, state = native.causal(phi, q, k, v, state, scale=0.35)
    assert out.isfinite().all() and state.weighted.isfinite().all()
    assert int(state.count) == 1_000_000


def test_exponential_is_accurate_to_a_few_units() -> None:
    """phi = e^x with a single feature and value 1: the state is the sum of exponentials itself."""
    phi = make_map("log", 1, 1, heads=1)
    x = torch.linspace(-86.0, 0.0, 2001)
    k = torch.stack([torch.zeros_like(x), x], -1).reshape(2001, 1, 2, 1)  # the first key fixes the shift at 0
    v = torch.tensor([0.0, 1.0]).reshape(1, 1, 2, 1).expand(2001, 1, 2, 1)
    state = native.absorb(phi, k, v, empty_state(phi, v), scale=1.0)
    exact = torch.exp(x.double())
    assert ((state.weighted.flatten().double() - exact) / exact).abs().max() < 4e-7
    low = native.absorb(phi, k - 200 * (k < 0), v, empty_state(phi, v), scale=1.0).weighted.flatten()
    assert torch.equal(low[:-1], torch.zeros(2000))


def test_chunked_and_native_states_are_interchangeable() -> None:
    phi = make_map("oprf", 16, 32, heads=2)
    q, k, v = torch.randn(3, 1, 2, 60, 16)
    scale = phi.default_scale(16)
    mine = native.absorb(phi, k, v, empty_state(phi, v), scale=scale)
    theirs = chunked.absorb(phi, k, v, empty_state(phi, v), scale=scale)
    torch.testing.assert_close(chunked.read(phi, q, mine, scale=scale), native.read(phi, q, theirs, scale=scale))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "oprf"])
@pytest.mark.parametrize("norm", [1e4, 1e5, 1e7])
def test_enormous_tokens_stay_finite(kind: str, norm: float, causal: bool) -> None:
    """Log features of -1e9 and more: their rounding alone is beyond the range of e^x."""
    phi = make_map(kind, 16, 32, heads=1)
    q, k, v = torch.randn(3, 1, 1, 130, 16)
    results = with_gradients(lambda *x: attend(native, phi, *x, causal=causal), norm * q, norm * k, v)
    assert all(x.isfinite().all() for x in results)
    assert results[0].abs().max() <= v.abs().max() * 1.001 and (results[0] != 0).any(-1).all()
