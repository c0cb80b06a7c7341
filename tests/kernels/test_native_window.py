"""Windows in the native kernels equal the torch form: in every shape and direction, for every far map and for none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels.windowed_linear import native

from .native_cases import errors, with_gradients

pytestmark = pytest.mark.usefixtures("built")

PERFORMER = {"mechanism": "performer", "num_features": 24, "seed": 3}
FAR = [
    {**PERFORMER, "features": "hyperbolic"},
    {**PERFORMER, "features": "positive", "projection": "hadamard"},
    {**PERFORMER, "features": "positive", "kernel": "gaussian", "center": True},
    {**PERFORMER, "features": "sderf", "antithetic": True, "center": True},
    {**PERFORMER, "features": "oprf"},
    {**PERFORMER, "features": "relu"},
    {"mechanism": "taylor", "degree": 2},
    "linear",
    "hedgehog",
    None,  # nothing is far: local attention
]


def make(far: Any, dim: int, heads: int, kv_heads: int, window: int, sinks: int) -> Any:
    """A hybrid with a calibrated far field and, where it is learned, an uneven gain; `local` without one."""
    if far is None:
        return sq.create("local", dim, heads, kv_heads, window=window, sinks=sinks)
    made = sq.create("hybrid", dim, heads, kv_heads, window=window, sinks=sinks, far=far)
    generator = torch.Generator().manual_seed(2)
    sample = [torch.randn(2, n, 60, dim, generator=generator) + 0.2 for n in (heads, kv_heads)]
    if made.uses_calibration:
        made.calibrate(*sample)
    if made.log_scale is not None:
        with torch.no_grad():
            made.log_scale.copy_(torch.linspace(-0.7, 0.9, heads))
    return made


def draw(batch: int, heads: int, kv_heads: int, length: int, dim: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(batch, heads, length, dim, generator=generator)
    k = torch.randn(batch, kv_heads, length, dim, generator=generator)
    return q, k, torch.randn(batch, kv_heads, length, width, generator=generator)


def compare(attn: Any, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_mask: Tensor | None = None) -> None:
    """Native results and gradients within twice the error that torch's float32 makes itself, both against float64."""

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        def call(*x: Tensor) -> Tensor:
            out: Tensor = attn(*x[:3], is_causal=is_causal, key_mask=key_mask, backend=backend)
            return out

        leaves = [x.to(dtype) for x in (q, k, v)]
        found = with_gradients(call, *leaves)
        if getattr(attn, "log_scale", None) is not None:
            out = call(*leaves)
            gain = torch.autograd.grad((out * torch.sin(torch.arange(out.numel())).view_as(out)).sum(), attn.log_scale)
            found = (*found, *gain)
        with torch.no_grad():  # another path of the kernels: no states are kept
            return (*found, call(*leaves))

    exact = run("chunked", torch.float64)
    allowed = errors(run("chunked", torch.float32), exact)
    names = [
        "out",
        "dq",
        "dk",
        "dv",
        *(["dgain"] if getattr(attn, "log_scale", None) is not None else []),
        "out without a gradient",
    ]
    for name, found, limit in zip(names, errors(run("native", torch.float32), exact), allowed, strict=True):
        assert math.isfinite(found), name
        assert found <= 2.0 * limit + 1e-6, f"{name}: {found:.1e}, torch's own float32 error {limit:.1e}"


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("far", FAR, ids=str)
def test_every_far_map(far: Any, is_causal: bool) -> None:
    attn = make(far, 8, 4, 2, window=5, sinks=2)
    key_mask = torch.rand(2, 107, generator=torch.Generator().manual_seed(0)) > 0.3
    key_mask[0, :4] = key_mask[0, 5] = False  # a sink's place may be padding
    key_mask[0, 4] = True
    compare(attn, *draw(2, 4, 2, 107, 8, 6), is_causal=is_causal, key_mask=key_mask)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("window", "sinks", "length", "dim", "width"),
    [
        (0, 0, 50, 4, 3),
        (0, 5, 130, 16, 16),
        (1, 1, 49, 17, 33),
        (32, 4, 200, 64, 64),
        (48, 0, 97, 3, 1),
        (64, 70, 193, 20, 24),
        (300, 3, 120, 8, 8),
    ],
)
@pytest.mark.parametrize("far", [FAR[0], None], ids=["hybrid", "local"])
def test_any_size(far: Any, window: int, sinks: int, length: int, dim: int, width: int, is_causal: bool) -> None:
    attn = make(far, dim, 1, 1, window, sinks)
    compare(attn, *draw(1, 1, 1, length, dim, width), is_causal=is_causal)


def test_longer_than_what_is_kept_of_the_right_hand_side() -> None:
    """Beyond 8192 tokens the far field of both sides takes two walks."""
    attn = make({**FAR[0], "num_features": 8}, 4, 1, 1, window=3, sinks=1)
    q, k, v = draw(1, 1, 1, 8200, 4, 2)
    with torch.no_grad():
        got, want = attn(q, k, v, backend="native"), attn(q, k, v, backend="chunked")
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("far", [FAR[0], FAR[3], FAR[5], "linear", None], ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (0, 3), (4, 0)])
def test_scans_continue_each_other(far: Any, window: int, sinks: int) -> None:
    """Tokens one by one, in pieces, and mixed with the torch form; padding in front, between and at the end."""
    attn = make(far, 8, 4, 2, window, sinks)
    q, k, v = draw(2, 4, 2, 60, 8, 6)
    key_mask = torch.ones(2, 60, dtype=torch.bool)
    key_mask[1, :9] = key_mask[0, 20:24] = key_mask[1, 55:] = False
    with torch.no_grad():
        want, last = attn.scan(*(x.double() for x in (q, k, v)), key_mask=key_mask, backend="chunked")
        for cuts in ([1] * 60, [10, 1, 1, 20, 1, 27], [59, 1]):
            state, outs, start = None, [], 0
            for i, size in enumerate(cuts):
                part = slice(start, start + size)
                backend = "chunked" if i % 5 == 3 else "native"
                out, state = attn.scan(
                    *(x[:, :, part] for x in (q, k, v)), state, key_mask=key_mask[:, part], backend=backend
                )
                outs.append(out)
                start += size
            assert (torch.cat(outs, 2) - want).norm() < 3e-6 * want.norm()
            assert torch.equal(state.count, last.count)
            places = state.ranks(0)[:, None, :, None] >= 0
            first = torch.arange(sinks)[:, None] < state.count[:, None, None, None]
            for got, there, real in zip(
                (*state.window, *state.sinks), (*last.window, *last.sinks), (places, places, first, first), strict=True
            ):
                assert torch.equal(got * real, there.float() * real)
            if far is not None:
                torch.testing.assert_close(state.log_max, last.log_max.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("far", [FAR[0], FAR[5], None], ids=str)
def test_pieces_of_a_sequence_on_several_threads(far: Any, is_causal: bool, four_threads: None) -> None:
    """One head, several workers: each takes a piece, and starts from the far keys around it. Padding at the end."""
    attn = make(far, 8, 2, 1, window=20, sinks=3)
    compare(attn, *draw(1, 2, 1, 2300, 8, 6), is_causal=is_causal, key_mask=torch.arange(2300)[None] < 2200)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_keys_far_apart_in_size_in_pieces(is_causal: bool, four_threads: None) -> None:
    """The pieces that hold the large keys cut their chunks, and their states reach the others."""
    attn = make({**PERFORMER, "features": "positive", "num_features": 32}, 4, 1, 1, window=3, sinks=1)
    q, k, v = draw(1, 1, 1, 1600, 4, 3)
    k[:, :, 590:600] *= 60 / k[:, :, 590:600].norm(dim=-1, keepdim=True)
    q[:, :, 590:] *= -1
    compare(attn, q, k, v, is_causal=is_causal)


@pytest.mark.parametrize("far", [FAR[0], FAR[5], None], ids=str)
def test_pieces_continue_a_state(far: Any, four_threads: None) -> None:
    attn = make(far, 8, 2, 1, window=20, sinks=3)
    inputs = draw(1, 2, 1, 2300, 8, 6)
    key_mask = torch.arange(2300)[None] < 2200
    with torch.no_grad():
        _, state = attn.scan(*(x[:, :, :100] for x in inputs), backend="chunked")
        rest = [x[:, :, 100:] for x in inputs]
        (out, after), (want, wanted) = (
            attn.scan(*rest, state, key_mask=key_mask[:, 100:], backend=backend) for backend in ("native", "chunked")
        )
    assert (out - want).norm() <= 1e-5 * want.norm()
    for mine, theirs in zip(*(torch.utils._pytree.tree_leaves(x) for x in (after, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("far", [FAR[0], None], ids=["hybrid", "local"])
def test_threads_do_not_change_whole_heads_and_windows(far: Any, is_causal: bool, four_threads: None) -> None:
    """The same bits: of local attention always, of hybrid where every thread has a head."""
    heads = 1 if far is None else 4
    attn = make(far, 8, heads, heads, window=20, sinks=3)
    inputs = draw(1, heads, heads, 1300, 8, 6)
    four = with_gradients(lambda *x: attn(*x, is_causal=is_causal, backend="native"), *inputs)
    torch.set_num_threads(1)
    one = with_gradients(lambda *x: attn(*x, is_causal=is_causal, backend="native"), *inputs)
    for a, b in zip(four, one, strict=True):
        assert torch.equal(a, b)


def test_a_step_leaves_the_state_it_was_given_alone() -> None:
    attn = make(FAR[0], 8, 2, 2, window=3, sinks=2)
    q, k, v = draw(1, 2, 2, 12, 8, 6)
    with torch.no_grad():
        _, state = attn.scan(*(x[:, :, :4] for x in (q, k, v)))
        kept = [x.clone() for x in torch.utils._pytree.tree_leaves(state)]
        first, _ = attn.scan(*(x[:, :, 4:5] for x in (q, k, v)), state)
        again, _ = attn.scan(*(x[:, :, 4:5] for x in (q, k, v)), state)
    assert torch.equal(first, again)
    for old, now in zip(kept, torch.utils._pytree.tree_leaves(state), strict=True):
        assert torch.equal(old, now)


def test_gradient_flows_through_states() -> None:
    attn = make(FAR[0], 8, 2, 1, window=4, sinks=2)
    q, k, v = draw(1, 2, 1, 70, 8, 5)

    def pieces(backend: str, *x: Tensor) -> Tensor:
        state, outs = None, []
        for part in (slice(0, 30), slice(30, 31), slice(31, 70)):
            out, state = attn.scan(*(t[:, :, part] for t in x), state, backend=backend)
            outs.append(out)
        return torch.cat([*outs, state.normaliser.sum(-1)[..., None, None].expand(1, 2, 1, 5)], 2)

    exact = with_gradients(lambda *x: pieces("chunked", *x), *(t.double() for t in (q, k, v)))
    allowed = errors(with_gradients(lambda *x: pieces("chunked", *x), q, k, v), exact)
    found = errors(with_gradients(lambda *x: pieces("native", *x), q, k, v), exact)
    assert all(a <= 2 * b + 1e-6 for a, b in zip(found, allowed, strict=True))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_keys_far_apart_in_size(is_causal: bool) -> None:
    """A shift that the chunk shares would lose the small keys: the kernels have to cut it."""
    attn = make({**PERFORMER, "features": "positive", "num_features": 32}, 4, 1, 1, window=3, sinks=1)
    q, k, v = draw(1, 1, 1, 150, 4, 3)
    k[:, :, 40:50] *= 60 / k[:, :, 40:50].norm(dim=-1, keepdim=True)
    k[:, :, 100] *= 80 / k[:, :, 100].norm(dim=-1, keepdim=True)
    q[:, :, :40] = 0
    q[:, :, 40:] *= -1
    want = attn(*(x.double() for x in (q, k, v)), is_causal=is_causal, backend="reference")
    results = with_gradients(lambda *x: attn(*x, is_causal=is_causal, backend="native"), q, k, v)
    exact = with_gradients(
        lambda *x: attn(*x, is_causal=is_causal, backend="chunked"), q.double(), k.double(), v.double()
    )
    with torch.no_grad():
        plain = attn(q, k, v, is_causal=is_causal, backend="native")
    for got in (results[0], plain):
        assert (got - want).abs().max() < 1e-3
    assert all(found < 1e-3 for found in errors(results, exact))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_values_that_are_not_finite_stay_where_they_are_seen(is_causal: bool) -> None:
    attn = make(FAR[0], 8, 1, 1, window=4, sinks=0)
    q, k, v = draw(1, 1, 1, 100, 8, 3)
    v[:, :, 60] = float("inf")
    with torch.no_grad():
        got = attn(q, k, v, is_causal=is_causal, backend="native")
    finite = got.isfinite().all(-1).flatten()
    assert not finite[60:].any()
    if is_causal:
        want = attn(q[:, :, :60], k[:, :, :60], v[:, :, :60], is_causal=True, backend="chunked")
        assert finite[:60].all() and (got[:, :, :60] - want).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs(dtype: torch.dtype) -> None:
    attn = make(FAR[0], 16, 2, 2, window=6, sinks=2)
    q, k, v = (x.to(dtype) for x in draw(1, 2, 2, 120, 16, 16))
    for is_causal in (False, True):
        low = with_gradients(lambda *x, c=is_causal: attn(*x, is_causal=c, backend="native"), q, k, v)
        assert {x.dtype for x in low} == {dtype}
        exact = with_gradients(
            lambda *x, c=is_causal: attn(*x, is_causal=c, backend="chunked"), *(x.double() for x in (q, k, v))
        )
        assert all(found < torch.finfo(dtype).eps for found in errors(low, exact))


def test_any_strides() -> None:
    attn = make(FAR[0], 8, 2, 2, window=6, sinks=2)
    q = torch.randn(8, 70, 2, 1).permute(3, 2, 1, 0)
    k = torch.randn(1, 70, 2, 16).transpose(1, 2)[..., ::2]
    v = torch.randn(1, 1, 70, 6).expand(1, 2, 70, 6)
    for is_causal in (False, True):
        assert torch.equal(
            attn(q, k, v, is_causal=is_causal, backend="native"),
            attn(q.contiguous(), k.contiguous(), v.contiguous(), is_causal=is_causal, backend="native"),
        )


def test_function_transforms() -> None:
    attn = make(FAR[5], 8, 2, 2, window=5, sinks=2)
    q, k, v = draw(3, 2, 2, 40, 8, 6)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attn(q[None], k[None], v[None], is_causal=True, backend="native")
        return out.square().sum()

    each = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_() for x in (q, k, v)]
        for got, want in zip((x[i] for x in each), torch.autograd.grad(loss(*leaves), leaves), strict=True):
            assert torch.allclose(got, want, atol=1e-5)
    whole = torch.vmap(lambda *x: attn(*(t[None] for t in x), backend="native")[0])(q, k, v)
    assert torch.allclose(whole, attn(q, k, v, backend="native"), atol=1e-6)


def test_operators_are_registered_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = make(FAR[0], 4, 1, 1, window=2, sinks=1)
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 1, 20, 4, 3))
    calls: list[tuple[Any, ...]] = []
    run = native.attention
    monkeypatch.setattr(native, "attention", lambda *a: (calls.append(a), run(*a))[1])
    attn(q, k, v, is_causal=True, backend="native")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (*map(list, calls[0][:-1]), True)
    torch.library.opcheck(torch.ops.subquad.attention.default, arguments, test_utils=checks)


@pytest.mark.parametrize(("far", "native_is_taken"), [
    ("hedgehog", True), ({"mechanism": "taylor", "degree": 1}, True),
    ({"mechanism": "taylor", "degree": 2}, True),  # many, but the kernels form them
    ({"mechanism": "performer", "features": torch.square, "num_features": 65}, False),
])  # fmt: skip
def test_features_that_torch_computes_are_stored_if_they_are_few(
    far: Any, native_is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attn = sq.create("hybrid", 16, 1, window=4, sinks=1, far=far)
    q, k, v = draw(1, 1, 1, 30, 16, 6)
    used = []
    run = native.attention
    monkeypatch.setattr(native, "attention", lambda *a: (used.append(1), run(*a))[1])
    with torch.no_grad():
        out = attn(q, k, v, is_causal=True)
    assert bool(used) is native_is_taken
    assert torch.allclose(out, attn(q, k, v, is_causal=True, backend="reference"), atol=1e-5)


def test_the_fastest_backend_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = make(FAR[0], 8, 1, 1, window=4, sinks=1)
    q, k, v = draw(1, 1, 1, 30, 8, 6)
    used = []
    run = native.attention
    monkeypatch.setattr(native, "attention", lambda *a: (used.append(1), run(*a))[1])
    attn(q, k, v)
    assert len(used) == 1
    attn(q, k, v, chunk_size=8)
    attn(q.double(), k.double(), v.double())
    attn(q[:, :, :5], k[:, :, :5], v[:, :, :5])  # every key is near: torch's softmax
    assert len(used) == 1
    with pytest.raises(ValueError, match="float64"):
        attn(q.double(), k.double(), v.double(), backend="native")
