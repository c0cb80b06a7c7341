"""The chunked backend: the underflow rule, memory of the backward, devices that cannot be looked at, long scans."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import subquad as sq
from subquad.kernels import checkpointing
from subquad.kernels.windowed_linear import WindowedLinear
from subquad.kernels.windowed_linear.chunked import linear
from subquad.state import safe_divide

MAPS = [
    {"features": "positive"},
    {"features": "hyperbolic"},
    {"features": "oprf", "antithetic": True},
    {"features": "trig"},
    {"features": "relu"},
]


def _attn(options, head_dim=16, num_features=64):
    return sq.create("performer", head_dim, num_features=num_features, seed=0, **options)


def test_rows_whose_keys_underflow_beside_a_later_one_are_exact():
    """63 keys of norm 60 and a zero key in one chunk: relative to the last key every earlier feature is 0 in
    float32.
    """
    attn = _attn({"features": "positive"}, head_dim=64, num_features=128)
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 1, 64, 64, generator=generator)
    k = 60 * k / k.norm(dim=-1, keepdim=True)
    k[:, :, -1] = 0
    out = attn(q, k, v, is_causal=True, backend="chunked")
    want = attn(q.double(), k.double(), v.double(), is_causal=True, backend="reference")
    assert out.isfinite().all()
    assert (out - want).abs().max() < 1e-3
    # The plain shared shift, without the rule, loses every row but the last: this test would catch it.
    state = WindowedLinear(attn.feature_map).empty(k, v, 0.125, "").far
    queries, keys = attn.feature_map.queries(q, 0.125), attn.feature_map.keys(k, 0.125)
    _, (numerator, normaliser, _) = linear.shared_shift(queries, keys, v, state, 1)
    assert (normaliser[..., :-1] < linear.UNDERFLOW).all()
    assert (safe_divide(numerator, normaliser)[0, 0, 0] - want[0, 0]).abs().amax(-1)[:-1].min() > 1e-3


def test_disjoint_features_stay_finite():
    """q along +30u, k along -30u: a shift shared by all features would underflow every product."""
    attn = _attn({"features": "positive"})
    u = torch.nn.functional.normalize(torch.ones(16), dim=0)
    generator = torch.Generator().manual_seed(1)
    q = 30 * u + 0.1 * torch.randn(1, 2, 300, 16, generator=generator)
    k = -30 * u + 0.1 * torch.randn(1, 2, 300, 16, generator=generator)
    v = torch.randn(1, 2, 300, 4, generator=generator)
    for is_causal in (False, True):
        out = attn(q, k, v, is_causal=is_causal)
        want = attn(q.double(), k.double(), v.double(), is_causal=is_causal, backend="reference")
        assert out.isfinite().all()
        assert (out - want).abs().max() < 1e-2


@pytest.mark.parametrize("options", MAPS, ids=lambda options: options["features"])
def test_the_exact_form_equals_the_shared_shift(options):
    """What traced code and accelerators run is the same function as what a CPU runs."""
    attn = _attn(options)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, 45, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 45, 16, generator=generator, dtype=torch.float64)
    scale = 0.25
    before = attn.absorb(k.flip(2), v, scale=scale).far
    queries = attn.feature_map.queries(q.reshape(2, 2, 90, 16), scale)
    keys = attn.feature_map.keys(k, scale)
    fast = safe_divide(*linear.shared_shift(queries, keys, v, before, 2)[1][:2])
    exact = safe_divide(*linear.exact_causal(queries, keys, v, before, 2)[:2])
    assert (fast - exact).abs().max() < 1e-8 * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("options", MAPS, ids=lambda options: options["features"])
def test_no_host_synchronisation_on_an_accelerator(options):
    """Fake CUDA tensors have no values: any look at one raises."""
    attn = _attn(options)
    with FakeTensorMode(allow_non_fake_inputs=False), torch.no_grad():
        for module in attn.modules():
            for name, x in module._buffers.items():
                module._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        q, k, v = (torch.empty(2, 4, 150, 16, device="cuda") for _ in range(3))
        mask = torch.ones(2, 150, dtype=torch.bool, device="cuda")
        for is_causal in (False, True):
            out = attn(q, k, v, is_causal=is_causal, key_mask=mask, chunk_size=64)
            assert out.device.type == "cuda"
            assert out.shape == (2, 4, 150, 16)
        out, state = attn.scan(q, k, v, chunk_size=64)
        out, state = attn.scan(*(x.narrow(2, 0, 1) for x in (q, k, v)), state)
        assert out.shape == (2, 4, 1, 16)


@pytest.mark.parametrize("options", MAPS, ids=lambda options: options["features"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_value_is_looked_at_in_the_backward(options, is_causal):
    """Meta tensors are on no CPU and have no values, but have an autograd graph."""
    attn = _attn(options).to("meta")
    q, k, v = (torch.empty(2, 4, 150, 16, device="meta", requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 150, dtype=torch.bool, device="meta")
    attn(q, k, v, is_causal=is_causal, key_mask=mask, chunk_size=64).sum().backward()
    assert all(x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_the_backward_keeps_is_linear_in_length_and_free_of_features(is_causal, saved_bytes):
    attn = _attn({"features": "positive"}, num_features=256)
    kept = {}
    for length in (1024, 2048, 4096):
        q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
        kept[length] = saved_bytes(
            lambda q=q, k=k, v=v: attn(q, k, v, is_causal=is_causal, chunk_size=256, backend="chunked")
        )
    assert kept[4096] < 2.2 * kept[2048] < 2.2 * 2.2 * kept[1024]
    features = 4096 * 2 * 256 * 4  # one side's features alone
    assert kept[4096] < features


def test_a_million_tokens_stay_finite():
    attn = sq.create("performer", 4, num_features=8, seed=0)
    generator = torch.Generator().manual_seed(0)
    state = None
    piece = 1 << 16
    with torch.no_grad():
        for i in range(16):
            q, k, v = torch.randn(3, 1, 1, piece, 4, generator=generator)
            k = k * (10.0 if i == 7 else 1.0)
            out, state = attn.scan(q, k, v, state)
            assert out.isfinite().all()
    assert state.count.item() == 16 * piece
    assert all(x.isfinite().all() for x in (state.weighted, state.normaliser, state.log_max))


def test_gradients_of_closed_over_tensors_are_not_lost():
    """A plain function may use a tensor that we cannot list; its gradient must still arrive."""
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    attn = sq.create("linear", 8, features=lambda x: torch.exp(0.1 * x @ weight.to(x.dtype)))
    q, k, v = torch.randn(3, 1, 1, 40, 8, dtype=torch.float64)
    for is_causal in (False, True):
        (got,) = torch.autograd.grad(attn(q, k, v, is_causal=is_causal, chunk_size=8).sum(), weight)
        (want,) = torch.autograd.grad(attn(q, k, v, is_causal=is_causal, backend="reference").sum(), weight)
        assert want.abs().max() > 0
        assert (got - want).abs().max() < 1e-10


def test_gradients_of_a_module_inside_the_map():
    layer = torch.nn.Linear(8, 12)
    attn = sq.create("linear", 8, features=torch.nn.Sequential(layer, torch.nn.Softplus()))
    assert len(attn.state_dict()) == 2  # registered once
    attn.double()
    q, k, v = torch.randn(3, 1, 1, 40, 8, dtype=torch.float64)
    got = torch.autograd.grad(attn(q, k, v, is_causal=True, chunk_size=8).square().sum(), list(layer.parameters()))
    want = torch.autograd.grad(
        attn(q, k, v, is_causal=True, backend="reference").square().sum(), list(layer.parameters())
    )
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
def test_second_derivatives(is_causal):
    attn = _attn({"features": "positive"})
    x = torch.randn(1, 1, 40, 16, dtype=torch.float64, requires_grad=True)

    def penalty(**call):
        # One tensor for all three: a gradient must not run twice along the ways they share.
        out = attn(x, 2 * x, x.sin(), is_causal=is_causal, **call)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    got, want = penalty(chunk_size=16, backend="chunked"), penalty(backend="reference")
    assert (got - want).abs().max() < 1e-8 * want.abs().max()


def test_checkpointed_scan_has_the_gradient_of_the_loop():
    x = torch.randn(1, 64, 4, dtype=torch.float64, requires_grad=True)
    start = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)

    def step(carry, x):
        total = carry[0] * 0.9 + x.sum(-2, keepdim=True)
        return (total,), total.sin() * x

    def gradients(total, out):
        return torch.autograd.grad(out.square().sum() + total.sum(), (x, start))

    (total,), out = checkpointing.scan_chunks(step, (start,), (x,), [], 16)
    (plain_total,), plain_out = checkpointing.scan_chunks(step, (start,), (x,), [], 16, checkpoint=False)
    assert torch.equal(out, plain_out)
    for got, want in zip(gradients(total, out), gradients(plain_total, plain_out), strict=True):
        assert (got - want).abs().max() < 1e-12
