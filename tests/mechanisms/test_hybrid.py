"""Hybrid: exact near, kernelised far, one normaliser: the definition, padding and options."""

import itertools
import json
import math

import pytest
import torch

import subquad as sq
from subquad.features.polynomial import PolynomialFeatures
from subquad.features.random import ExponentialFeatures, TrigFeatures

from .hybrid_cases import PERFORMER, hybrid, product, tokens

FARS = [
    PERFORMER,
    {**PERFORMER, "features": "sderf", "center": True},
    {**PERFORMER, "features": "trig"},
    {"mechanism": "taylor", "degree": 2, "center": True},
    {"mechanism": "taylor", "degree": 1},
    "linear",
    "hedgehog",
]


def _brute(attn, q, k, v, is_causal, mask=None, ranked=True):
    """The definition, one pair after the other; `ranked`: positions count real tokens only, else padding as well."""
    heads, length = q.shape[1], q.shape[2]
    groups = heads // k.shape[1]
    scale = attn.head_dim**-0.5
    phi = attn.far.feature_map
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b in range(q.shape[0]):
        real = [True] * length if mask is None else mask[b].tolist()
        rank = [sum(real[:i]) for i in range(length)] if ranked else list(range(length))
        for h in range(heads):
            c = 1.0 if attn.log_scale is None else attn.log_scale[h].double().exp().item()
            g = h // groups
            rows = phi.queries(q.reshape(q.shape[0], k.shape[1], groups * length, -1), scale)
            keys = phi.keys(k, scale)

            def whole(features, b, g):
                values = 1.0 if features.values is None else features.values[b, g]
                return values if features.log_scale is None else values * features.log_scale[b, g].exp()

            far = whole(rows, b, g)[h % groups * length : (h % groups + 1) * length] @ whole(keys, b, g).T
            exact = (scale * q[b, h] @ k[b, g].T).exp()
            for i in range(length):
                if not real[i]:
                    continue
                total, sum_ = torch.zeros(v.shape[-1], dtype=torch.float64), 0.0
                for j in range(length):
                    if not real[j] or (is_causal and j > i):
                        continue
                    near = abs(rank[i] - rank[j]) <= attn.window or rank[j] < attn.sinks
                    weight = exact[i, j] if near else c * far[i, j]
                    total, sum_ = total + weight * v[b, g, j], sum_ + weight
                if sum_ != 0:
                    out[b, h, i] = total / sum_
    return out.detach()


# -- the definition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("far", FARS, ids=str)
def test_equals_the_definition_pair_by_pair(far, is_causal):
    q, k, v = tokens(17, batch=2, heads=4, kv_heads=2)
    mask = torch.rand(2, 17, generator=torch.Generator().manual_seed(4)) > 0.25
    mask[1, :3] = False
    for window, sinks in ((3, 2), (0, 0), (0, 6), (5, 0), (2, 9)):
        attn = hybrid(far, window, sinks, heads=4, kv_heads=2)
        for key_mask in (None, mask):
            want = _brute(attn, q, k, v, is_causal, key_mask)
            for call in ({}, {"chunk_size": 4}, {"backend": "reference"}):
                got = attn(q, k, v, is_causal=is_causal, key_mask=key_mask, **call)
                assert (got - want).abs().max() <= 1e-9 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("far", FARS, ids=str)
def test_is_softmax_while_everything_is_near(far, is_causal):
    q, k, v = tokens(40)
    exact = sq.attention(q, k, v, "softmax", is_causal=is_causal)
    assert (hybrid(far, 39, 0)(q, k, v, is_causal=is_causal) - exact).abs().max() <= 1e-12
    assert (hybrid(far, 1000, 4)(q, k, v, is_causal=is_causal) - exact).abs().max() <= 1e-12
    assert (hybrid(far, 0, 40)(q, k, v, is_causal=is_causal) - exact).abs().max() <= 1e-12
    assert (hybrid(far, 38, 0)(q, k, v, is_causal=is_causal) - exact).abs().max() > 1e-7


def test_default_options():
    attn = sq.create("hybrid", 8, far={"mechanism": "performer", "seed": 0})
    assert (attn.window, attn.sinks, attn.far.num_features) == (64, 4, 256)
    assert sq.create("hybrid", 8).far.name == "performer"


def test_a_window_and_sinks_beat_either_field_alone():
    """Local structure plus something everyone looks at: what hybrids are for."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randn(1, 1, 400, 16, generator=generator).cumsum(2)
    walk = walk - torch.nn.functional.avg_pool1d(walk[0].mT, 41, 1, 20, count_include_pad=False).mT[None]
    q = k = 0.6 * walk
    v = torch.randn(1, 1, 400, 8, generator=generator)
    exact = sq.attention(q, k, v, "softmax", is_causal=True)

    def error(name, **options):
        return ((sq.create(name, 16, 1, **options)(q, k, v, is_causal=True) - exact).norm() / exact.norm()).item()

    far = {"num_features": 128, "seed": 0, "features": "oprf"}
    both = error("hybrid", window=16, sinks=2, far={"mechanism": "performer", **far})
    assert both < 0.7 * error("performer", **far)
    assert both < error("local", window=16, global_tokens=2)


# -- the far weights are on the scale of e^{q.k} ---------------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("features", ["positive", "hyperbolic", "oprf", "sderf", "trig"])
def test_random_maps_estimate_the_exponential_itself(features, center):
    q, k, _ = tokens(20, dim=4, norm=0.3)
    q, k = q + torch.tensor([0.6, 0.6, -0.2, -0.2]), k + torch.tensor([0.9, 0.1, 0.1, 0.9])
    options = {"center": center, "kv_heads": 2, "seed": 0}
    if features == "trig":
        phi = TrigFeatures(4, 1 << 14, kernel="softmax", **options)
    else:
        phi = ExponentialFeatures(4, 1 << 14, features=features, **options)
    phi.calibrate(q, k)
    assert phi.estimates_softmax
    ratio = product(phi, q, k, 0.7) / (0.7 * q @ k.mT).exp()
    # 2^14 features: errors of a few percent. A factor e^{x.ybar} left out would be one of 1.5 and more.
    assert (ratio - 1).abs().median() < 0.05
    assert abs(ratio.mean().item() - 1) < 0.05


@pytest.mark.parametrize("scale", [0.5, -0.5])
@pytest.mark.parametrize("degree", [1, 2])
def test_centred_taylor_estimates_the_exponential_itself(degree, scale):
    q, k, _ = tokens(30, dim=4, norm=0.05)
    q, k = q + 1.0, k - 1.5
    phi = PolynomialFeatures(4, degree=degree, center=True, kv_heads=2)
    phi.calibration.update(q, k)
    exact = (scale * q @ k.mT).exp()
    assert (product(phi, q, k, scale) / exact - 1).abs().max() < 0.02
    # Without the query's factor e^{x.ybar}, which plain attention never notices, it is off by orders of magnitude.
    rows = phi.queries(q, scale)
    without = rows.values @ (phi.keys(k, scale).values * phi.keys(k, scale).log_scale.exp()).mT
    assert (without / exact - 1).abs().min() > 0.5
    # And plain attention really does not notice.
    plain = sq.create("taylor", 4, 2, degree=degree, center=True)
    plain.calibrate(q, k)
    v = torch.randn(1, 2, 30, 3, dtype=torch.float64)
    weights = without / without.sum(-1, keepdim=True)
    assert (plain(q, k, v, scale=scale) - weights @ v).abs().max() <= 1e-12


def test_only_maps_of_another_kernel_get_a_learned_factor():
    for far in (PERFORMER, {**PERFORMER, "features": "trig"}, "taylor"):
        assert sq.create("hybrid", 4, far=far).log_scale is None
    others = ["linear", "hedgehog", {**PERFORMER, "features": "relu"}, {**PERFORMER, "kernel": "gaussian"}]
    for far in others:
        attn = sq.create("hybrid", 4, 6, 2, window=2, sinks=0, far=far)
        assert attn.log_scale.shape == (6,)
        q, k, v = tokens(20, heads=6, kv_heads=2, dtype=torch.float32)
        attn(q, k, v, is_causal=True, chunk_size=5).square().sum().backward()
        assert (attn.log_scale.grad != 0).all()
        if far != "hedgehog":
            with pytest.raises(ValueError, match="pass heads="):
                sq.create("hybrid", 4, far=far)


# -- padding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("far", FARS[:3], ids=str)
def test_padding_in_front_changes_nothing(far, is_causal):
    attn = hybrid(far, 3, 4)
    q, k, v = tokens(30)
    alone = attn(q, k, v, is_causal=is_causal)
    padded = [torch.cat([9 * torch.ones_like(x[:, :, :7]), x], 2) for x in (q, k, v)]
    mask = (torch.arange(37) >= 7)[None]
    for call in ({}, {"chunk_size": 5}, {"backend": "reference"}):
        together = attn(*padded, is_causal=is_causal, key_mask=mask, **call)
        assert (together[:, :, 7:] - alone).abs().max() <= 1e-10
    # Sinks counted from position 0 would be padding, and the real first keys would be far.
    wrong = _brute(attn, *padded, is_causal, mask, ranked=False)
    assert (wrong[:, :, 7:] - alone).abs().max() > 1e-4


def test_padding_in_front_of_a_scan_may_span_several_calls():
    attn = hybrid(PERFORMER, 3, 4)
    q, k, v = tokens(30)
    want = attn(q, k, v, is_causal=True)
    padded = [torch.cat([torch.ones_like(x[:, :, :7]), x], 2) for x in (q, k, v)]
    mask = (torch.arange(37) >= 7)[None]
    state, pieces = None, []
    for a, b in itertools.pairwise([0, 3, 5, 6, 9, 30, 37]):
        out, state = attn.scan(*(x[:, :, a:b] for x in padded), state, key_mask=mask[:, a:b])
        pieces.append(out)
    assert (torch.cat(pieces, 2)[:, :, 7:] - want).abs().max() <= 1e-10


# -- options and refusals ------------------------------------------------------------------------------------


def test_far_as_a_name_a_dict_or_an_object():
    made = sq.create("performer", 4, num_features=16, seed=1)
    attn = sq.create("hybrid", 4, window=3, far=made)
    assert attn.far is made
    same = sq.create("hybrid", 4, window=3, far={"mechanism": "performer", "num_features": 16, "seed": 1})
    q, k, v = tokens(30)
    assert torch.equal(attn(q, k, v), same(q, k, v))
    config = json.loads(json.dumps(same.config()))
    assert config["far"]["mechanism"] == "performer"
    again = sq.create(**config)
    assert again.config() == same.config()
    assert torch.equal(again(q, k, v), same(q, k, v))
    unseeded = sq.create("hybrid", 4, window=3)
    twin = sq.create(**json.loads(json.dumps(unseeded.config())))
    assert torch.equal(twin(q, k, v), unseeded(q, k, v))


def test_calibration_and_redraw_reach_the_far_field():
    attn = sq.create("hybrid", 4, 2, window=3, far={**PERFORMER, "features": "sderf"})
    q, k, v = tokens(30)
    with pytest.raises(RuntimeError, match="calibrate"):
        attn(q, k, v)
    attn.calibrate(q, k)
    first, (_, state) = attn(q, k, v), attn.scan(q, k, v)
    attn.redraw()
    assert not torch.equal(attn(q, k, v), first)
    with pytest.raises(ValueError, match="draw"):
        attn.scan(q, k, v, state)
    with pytest.raises(ValueError, match="different features"):
        sq.merge(state, attn.scan(q, k, v)[1])
    with pytest.raises(ValueError, match="uses no calibration"):
        sq.create("hybrid", 4).calibrate(q, k)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window": -1}, ValueError, "window must be at least 0"),
        ({"sinks": 1.5}, TypeError, "sinks must be an integer"),
        ({"far": "softmax"}, ValueError, "cannot be a far field"),
        ({"far": "efficient"}, ValueError, "cannot be a far field"),
        ({"far": "hybrid"}, ValueError, "cannot be a far field"),
        ({"far": "perfomer"}, ValueError, "did you mean 'performer'"),
        ({"far": {"features": "sderf"}}, ValueError, "must name its mechanism"),
        ({"far": {"mechanism": "performer", "head_dim": 9}}, ValueError, "head_dim=9"),
        ({"far": {"mechanism": "performer", "nonsense": 9}}, TypeError, "no option 'nonsense'"),
        ({"far": 3}, TypeError, "far must be"),
        ({"far": sq.create("linear", 9)}, ValueError, "head_dim=9"),
    ],
)
def test_bad_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("hybrid", 4, 2, **options)


def test_cross_attention_is_refused_with_the_reason():
    attn = hybrid(PERFORMER, 3, 1)
    q, k, v = tokens(10)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 and 10"):
        attn(q[:, :, :5], k, v)
    with pytest.raises(NotImplementedError, match="own position"):
        attn.absorb(k, v)
    with pytest.raises(NotImplementedError, match="own position"):
        attn.read(q, None)


def test_states_of_other_shapes_or_settings_are_refused():
    attn, other = hybrid(PERFORMER, 3, 1), hybrid(PERFORMER, 4, 1)
    q, k, v = tokens(10)
    _, state = attn.scan(q, k, v)
    with pytest.raises(ValueError, match="window=3"):
        other.scan(q, k, v, state)
    with pytest.raises(ValueError, match="different features"):
        sq.merge(state, other.scan(q, k, v)[1])
    with pytest.raises(ValueError, match=r"the state was made by .linear"):
        attn.scan(q, k, v, sq.create("linear", 4).scan(q, k, v)[1])
    with pytest.raises(TypeError, match="must be a State from hybrid's scan"):
        attn.scan(q, k, v, sq.create("softmax", 4).scan(q, k, v)[1])
    assert math.isfinite(attn.scan(q, k, v, state)[0].sum().item())
