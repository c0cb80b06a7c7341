"""Feature maps against the kernels they stand for, calibration, and the exact invariances."""

import pytest
import torch

import subquad as sq
from subquad.features.calibration import Calibration
from subquad.features.elementwise import elu1

EXACT = [{"degree": 1}, {"degree": 2}, {"degree": 2, "center": True}]


def _kernel(attn, q, k, scale):
    """phi_q(q_i) . phi_k(k_j), (B, H, L, S)."""

    def features(f):
        values = 1.0 if f.values is None else f.values
        return values * torch.exp(f.log_scale) if f.log_scale is not None else values

    phi_q, phi_k = features(attn.feature_map.queries(q, scale)), features(attn.feature_map.keys(k, scale))
    return phi_q @ phi_k.mT


@pytest.mark.parametrize(
    "options",
    [
        {"features": "positive"},
        {"features": "hyperbolic"},
        {"features": "trig"},
        {"features": "oprf"},
        {"features": "oprf", "antithetic": True},
        {"features": "sderf", "antithetic": True},
        {"features": "sderf", "center": True},
        {"features": "positive", "center": True, "per_head": True},
        {"features": "trig", "center": True},
        {"features": "positive", "kernel": "gaussian"},
        {"features": "trig", "kernel": "gaussian", "center": True},
        {"features": "positive", "projection": "hadamard"},
        {"features": "hyperbolic", "projection": "simplex"},
    ],
    ids=str,
)
def test_random_maps_estimate_their_kernel(options):
    """Averaged over many features the product is the kernel, absolute scale included."""
    generator = torch.Generator().manual_seed(0)
    q = 0.4 * torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64) + 0.1
    k = 0.4 * torch.randn(1, 2, 6, 8, generator=generator, dtype=torch.float64) - 0.2
    attn = sq.create("performer", 8, 2, num_features=1 << 15, seed=1, **options)
    if attn.feature_map.calibration is not None:
        attn.calibrate(q, k)
    scale = 0.5
    if options.get("kernel") == "gaussian":
        exact = torch.exp(-0.5 * scale * (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1))
    else:
        exact = torch.exp(scale * q @ k.mT)
    relative = _kernel(attn, q, k, scale) / exact - 1
    assert relative.abs().max() < 0.12
    assert relative.mean().abs() < 0.02


@pytest.mark.parametrize("options", EXACT, ids=str)
def test_polynomial_maps_are_their_polynomial(options):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 7, 5, generator=generator, dtype=torch.float64)
    attn = sq.create("taylor", 5, 2, **options)
    scale = 0.3
    x, y, outer = q, k, torch.zeros(())
    if options.get("center"):
        attn.calibrate(q + 0.3, k - 0.2)
        stats = attn.feature_map.calibration
        q_mean, k_mean = stats.query_mean.double().unsqueeze(-2), stats.key_mean.double().unsqueeze(-2)
        x, y = q - q_mean, k - k_mean
        outer = scale * (y * q_mean).sum(-1).unsqueeze(-2) + scale * (q * k_mean).sum(-1).unsqueeze(-1)
    s = scale * x @ y.mT
    want = 1 + s + (s.square() / 2 if options["degree"] == 2 else 0)
    assert (_kernel(attn, q, k, scale) - want * outer.exp()).abs().max() < 1e-12


def test_hermite_constant():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 400, 4, generator=generator, dtype=torch.float64)
    attn = sq.create("taylor", 4, 1, hermite=True)
    attn.calibrate(q, k)
    stats = attn.feature_map.calibration
    scale = 0.5
    x = q - stats.query_mean.double().unsqueeze(-2)
    tau = scale**2 * ((x @ stats.key_cov.double()) * x).sum(-1)
    values = attn.feature_map.queries(q, scale).values
    assert (values[..., 0] - (1 - tau / 2)).abs().max() < 1e-6


def test_hermite_beats_taylor_on_gaussian_scores():
    """On Gaussian scores of standard deviation 1 the errors are .080 and .142 in the limit: the order must hold."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 512, 32, generator=generator, dtype=torch.float64)
    exact = sq.attention(q, k, v, "softmax")

    def error(**options):
        attn = sq.create("taylor", 32, 2, **options)
        if options:
            attn.calibrate(q, k)
        return float((attn(q, k, v) - exact).norm() / exact.norm())

    assert error(hermite=True) < 0.9 * error()


def test_centring_is_exact():
    """Shifting all keys, and all queries with the key weights, leaves exact attention alone; centred maps use that."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 60, 8, generator=generator, dtype=torch.float64)
    shift_k = torch.randn(1, 2, 1, 8, generator=generator, dtype=torch.float64)
    plain = sq.create("performer", 8, 2, num_features=64, features="positive", seed=0)
    centred = sq.create("performer", 8, 2, num_features=64, features="positive", center=True, seed=0)
    centred.calibrate(q - q.mean(2, keepdim=True), k - k.mean(2, keepdim=True))
    assert (plain(q, k, v) - centred(q, k, v)).abs().max() < 1e-5  # means of 0: the same map
    moved = sq.create("performer", 8, 2, num_features=64, features="positive", center=True, seed=0)
    moved.calibrate(q - q.mean(2, keepdim=True), k - k.mean(2, keepdim=True) + shift_k)
    # Keys shifted by their calibrated mean give what unshifted keys gave: e^{q.shift} cancels in each row.
    assert (moved(q, k + shift_k, v) - centred(q, k, v)).abs().max() < 1e-5
    assert (plain(q, k + shift_k, v) - plain(q, k, v)).abs().max() > 1e-2


def test_calibration_streams_over_batches():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 30, 5, generator=generator) + 1.0
    k = 2 * torch.randn(6, 2, 30, 5, generator=generator) - 3.0
    mask = torch.rand(6, 30, generator=generator) > 0.3
    whole, streamed = Calibration(2, 5), Calibration(2, 5)
    whole.update(q, k, mask, mask)
    for i in range(6):
        streamed.update(q[i : i + 1], k[i : i + 1], mask[i : i + 1], mask[i : i + 1])
    for name, value in whole.named_buffers():
        assert torch.allclose(value, streamed.get_buffer(name), atol=1e-5)
    rows = k[:, 0].double()[mask]
    assert torch.allclose(whole.key_mean[0].double(), rows.mean(0), atol=1e-5)
    assert torch.allclose(whole.key_cov[0].double(), torch.cov(rows.T, correction=0), atol=1e-4)
    pooled = q[:, :2].transpose(1, 2).double()[mask].reshape(-1, 5)
    assert torch.allclose(whole.query_mean[0].double(), pooled.mean(0), atol=1e-5)


@pytest.mark.parametrize("options", [{"center": True}, {"features": "oprf"}, {"features": "sderf", "center": True}])
def test_calibration_refuses_what_would_poison_it(options):
    """A running mean that took one NaN is NaN for good, and so is every output after it."""
    q, k, v = torch.randn(3, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    attn = sq.create("performer", head_dim=8, heads=2, num_features=16, seed=0, **options)
    attn.calibrate(q, k)
    before = attn(q, k, v)
    bad = k.clone()
    bad[:, 1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"calibrate: k holds NaN or infinity in 1 of 40 vectors; .* key_mask="):
        attn.calibrate(2 * q, bad)
    assert torch.equal(attn(q, k, v), before)
    attn.calibrate(q, bad, key_mask=(torch.arange(20) != 3)[None])  # padding may hold anything
    assert attn(q, k, v).isfinite().all()


def test_calibration_survives_the_state_dict():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=generator)
    attn = sq.create("performer", 8, 2, num_features=16, features="sderf", center=True, seed=0)
    attn.calibrate(q, k)
    other = sq.create("performer", 8, 2, num_features=16, features="sderf", center=True, seed=5)
    other.load_state_dict(attn.state_dict())
    assert torch.equal(attn(q, k, v), other(q, k, v))


def test_sderf_is_far_better_on_anisotropic_data():
    """Spectrum 1/l^2, score sd 2: positive features are no better than uniform attention, centred SDERF is."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, 65).double() ** -1.0
    factor = (2.0 * 8.0 / weights.pow(4).sum().sqrt()) ** 0.5
    q, k = factor * weights * torch.randn(2, 1, 1, 512, 64, generator=generator, dtype=torch.float64) + 0.1
    v = torch.randn(1, 1, 512, 64, generator=generator, dtype=torch.float64)
    exact = sq.attention(q, k, v, "softmax")

    def error(features, **options):
        attn = sq.create("performer", 64, 1, num_features=256, features=features, seed=0, **options)
        if attn.feature_map.calibration is not None:
            attn.calibrate(q, k)
        return float((attn(q, k, v) - exact).square().sum() / exact.square().sum())

    assert error("sderf", antithetic=True, center=True) < 0.6 < 0.8 < error("positive")


def test_elu1_keeps_keys_that_rounding_would_lose():
    x = torch.tensor([-50.0, -20.0, 0.0, 3.0])
    assert (elu1(x) > 0).all()
    assert torch.allclose(elu1(x), torch.tensor([-50.0, -20.0, 0.0, 4.0]).where(x > 0, x.exp()))
    assert (torch.nn.functional.elu(x) + 1)[1] == 0  # the usual form rounds to 0


def test_efficient_attention_rows_sum_to_one():
    generator = torch.Generator().manual_seed(0)
    q, k = 3 * torch.randn(2, 1, 2, 30, 6, generator=generator, dtype=torch.float64)
    ones = torch.ones(1, 2, 30, 1, dtype=torch.float64)
    attn = sq.create("efficient", 6)
    for is_causal in (False, True):
        assert (attn(q, k, ones, is_causal=is_causal) - 1).abs().max() < 1e-12
    want = torch.softmax(q, -1) @ (torch.softmax(k, -2).mT @ q)
    assert (attn(q, k, q) - want).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "options"),
    [("performer", {"num_features": 16, "features": "sderf", "seed": 0}), ("taylor", {"degree": 2, "hermite": True})],
)
def test_states_of_other_scales_are_not_merged(name, options):
    """Samples around 0 have equal means, whatever their scale."""
    x, (k, v) = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, -2.0, -3.0, -4.0]])[None, None], torch.randn(2, 1, 1, 5, 4)
    states = []
    for scale in (1.0, 1.0, 3.0):
        attn = sq.create(name, 4, 1, 1, **options)
        attn.calibrate(scale * x, scale * x)
        states.append(attn.absorb(k, v))
    sq.merge(*states[:2])
    with pytest.raises(ValueError, match="the states come from different features"):
        sq.merge(*states[1:])
