"""predict_error: the closed form against draws, the baselines against theory, and what it refuses."""

import json
import math

import pytest
import torch

import subquad as sq
from subquad.features import coupling
from subquad.features.base import weigh
from subquad.planning import covariance
from subquad.planning.sampling import blocks, evenly, pick_keys, pick_rows

D = 64
FAMILIES = {
    "positive": {"features": "positive"},
    "hyperbolic": {"features": "hyperbolic"},
    "trig": {"features": "trig"},
    "oprf": {"features": "oprf"},
    "oprf antithetic": {"features": "oprf", "antithetic": True},
    "sderf": {"features": "sderf"},
    "sderf antithetic, centred": {"features": "sderf", "antithetic": True, "center": True},
    "positive, centred": {"features": "positive", "center": True},
}


def gaussian(kind, rows=48, keys=256, seed=0):
    """(1, 1, rows, D) queries and (1, 1, keys, D) keys in float64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 1, rows, D, generator=generator, dtype=torch.float64)
    k = torch.randn(1, 1, keys, D, generator=generator, dtype=torch.float64)
    if kind == "isotropic":
        return 0.3 * q, 0.3 * k
    weights = torch.arange(1, D + 1, dtype=torch.float64) ** -0.5
    if kind == "anisotropic":
        return 0.8 * weights * q, 0.8 * weights * k
    means = 0.15 * torch.randn(2, D, generator=generator, dtype=torch.float64)
    return 0.3 * q + means[0], 0.3 * k + means[1]


def attention_of(attend, q, k, scale):
    """The normalised attention matrix that a mechanism's features give."""
    query, key = attend.feature_map.queries(q, scale), attend.feature_map.keys(k, scale)
    products = weigh(query, None) @ weigh(key, None).mT
    return products / products.sum(-1, keepdim=True)


def measured(q, k, draws, v=None, **options):
    """Mean over draws of |A' - A|^2 / |A|^2 (with v: of the outputs), every draw made by the library's own features."""
    attend = sq.create("performer", D, q.shape[1], seed=5, **options)
    if attend.feature_map.calibration is not None:
        attend.calibrate(q, k)
    exact = torch.softmax(q @ k.mT / math.sqrt(D), -1)
    goal = exact if v is None else exact @ v
    total = 0.0
    for _ in range(draws):
        estimate = attention_of(attend, q, k, 1 / math.sqrt(D))
        estimate = estimate if v is None else estimate @ v
        total += float((estimate - goal).square().sum() / goal.square().sum())
        attend.redraw()
    return total / draws


@pytest.mark.parametrize("projection", ["gaussian", "orthogonal", "simplex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_within_20_percent_of_what_is_measured(family, projection):
    q, k = gaussian("isotropic")
    options = {"num_features": 256, "projection": projection, **FAMILIES[family]}
    prediction = sq.predict_error(q, k, "performer", **options)
    assert prediction.reliable
    assert prediction.reason == ""
    assert measured(q, k, 20, **options) / prediction.error == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("kind", ["anisotropic", "shifted"])
@pytest.mark.parametrize(
    ("family", "projection"),
    [("hyperbolic", "orthogonal"), ("trig", "hadamard"), ("sderf", "orthogonal"), ("sderf", "simplex"),
     ("sderf antithetic, centred", "orthogonal"), ("oprf antithetic", "orthogonal")],
)  # fmt: skip
def test_on_other_data(kind, family, projection):
    q, k = gaussian(kind)
    options = {"num_features": 256, "projection": projection, **FAMILIES[family]}
    prediction = sq.predict_error(q, k, "performer", **options)
    assert prediction.reliable
    assert measured(q, k, 20, **options) / prediction.error == pytest.approx(1.0, abs=0.25)


def test_output_error_and_many_keys():
    """With 1200 keys the closed form sees 128 of them per query, and must still say what all of them do."""
    q, k = gaussian("anisotropic", rows=24, keys=1200)
    options = {"num_features": 256, "features": "oprf", "antithetic": True}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        v = torch.randn(1, 1, 1200, 8, generator=generator, dtype=torch.float64) + 0.2
        prediction = sq.predict_error(q, k, "performer", v=v, max_keys=128, **options)
        assert prediction.keys == 128
        assert measured(q, k, 20, **options) / prediction.error == pytest.approx(1.0, abs=0.25)
        # Between different keys the values cancel: the output looks at more keys than the weights do.
        assert measured(q, k, 20, v=v, **options) / prediction.output_error == pytest.approx(1.0, abs=0.25)


def test_a_batch_of_grouped_heads_causal_and_masked():
    """Against draws on the whole: every head its own scale, so that a mixed-up head or mask shows."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([0.1, 0.2, 0.3, 0.35], dtype=torch.float64).view(1, 4, 1, 1)
    q = sizes * torch.randn(2, 4, 40, D, generator=generator, dtype=torch.float64)
    k = 0.4 * torch.randn(2, 2, 40, D, generator=generator, dtype=torch.float64)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, 30:] = False
    prediction = sq.predict_error(
        q, k, "performer", num_features=256, features="positive", is_causal=True, key_mask=mask, max_queries=80
    )
    attend = sq.create("performer", D, 4, 2, num_features=256, features="positive", seed=1)
    visible = torch.ones(40, 40, dtype=torch.bool).tril() & mask[:, None, None, :]
    keys = k.repeat_interleave(2, 1)
    exact = torch.softmax((q @ keys.mT / math.sqrt(D)).masked_fill(~visible, -math.inf), -1)
    real = mask[:, None, :, None].double()
    error = torch.zeros(4, dtype=torch.float64)
    for _ in range(60):
        estimate = attention_of(attend, q, keys, 1 / math.sqrt(D))
        estimate = (estimate * visible) / (estimate * visible).sum(-1, keepdim=True)
        size = (real * exact).square().sum((0, 2, 3))
        error += (real * (estimate - exact)).square().sum((0, 2, 3)) / size / 60
        attend.redraw()
    assert len(prediction.per_head) == 4
    for predicted, found in zip(prediction.per_head, error.tolist(), strict=True):
        assert found / predicted == pytest.approx(1.0, abs=0.25)
    assert prediction.error == pytest.approx(float(error.mean()), rel=0.35)


@pytest.mark.parametrize("dim", [2, 5, 16])
@pytest.mark.parametrize(
    ("trig", "paired", "projection", "gain"),
    [
        (False, False, "orthogonal", coupling.orthogonal_gain),
        (False, True, "orthogonal", coupling.orthogonal_gain),
        (True, True, "orthogonal", coupling.orthogonal_gain_trig),
        (False, False, "simplex", coupling.simplex_gain),
        (False, True, "simplex", lambda d, v: coupling.simplex_gain(d, v, even=True)),
        (True, True, "simplex", coupling.simplex_gain_trig),
    ],
)
def test_the_series_sums_to_the_closed_form_on_the_diagonal(dim, trig, paired, projection, gain):
    v = torch.tensor([0.0, 0.01, 0.3, 1.0, 4.0], dtype=torch.float64)
    z = torch.zeros(1, 5, dim, dtype=torch.float64)
    z[0, :, 0] = v.sqrt()
    law = covariance.Law(trig, paired, projection, torch.zeros(dim, dtype=torch.float64), None)
    series = covariance._Gain(law, z).matrix(torch.tensor([0]))[0].diagonal()
    torch.testing.assert_close(series, gain(dim, v), rtol=2e-3, atol=1e-6)


def test_the_series_off_the_diagonal():
    """Two orthogonal rows, two keys at an angle: E[f_j(w_1) f_l(w_2)] by drawing pairs of rows."""
    dim, pairs = 6, 400_000
    generator = torch.Generator().manual_seed(0)
    z = torch.tensor([[1.2, 0, 0, 0, 0, 0], [1.2, 0.7, 0, 0, 0, 0]], dtype=torch.float64)
    first, second = torch.randn(2, pairs, dim, generator=generator, dtype=torch.float64)
    unit = first / first.norm(dim=-1, keepdim=True)
    second = second - (second * unit).sum(-1, keepdim=True) * unit
    second = second / second.norm(dim=-1, keepdim=True)
    norms = torch.randn(2, pairs, dim, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    half = z.square().sum(-1) / 2
    # cosh: the even part, whose variance is smaller; the pair has no odd part.
    values = torch.cosh(norms[0] * unit @ z[0]) * torch.cosh(norms[1] * second @ z[1]) * torch.exp(-half.sum())
    law = covariance.Law(False, True, "orthogonal", torch.zeros(dim, dtype=torch.float64), None)
    gain = covariance._Gain(law, z.unsqueeze(0)).matrix(torch.tensor([0]))[0, 0, 1]
    error = float(values.std()) / math.sqrt(pairs)
    assert abs(float(values.mean()) - (1 - float(gain))) < 5 * error
    assert error < 0.2 * abs(float(gain))


def test_shift_invariance():
    """A vector added to all keys, or to all queries with the key weight it brings, changes nothing for centred maps."""
    q, k = gaussian("isotropic", rows=16, keys=100)
    shift = torch.randn(D, dtype=torch.float64)
    for options in (
        {"features": "positive", "center": True},
        {"features": "sderf", "antithetic": True, "center": True},
    ):
        plain = sq.predict_error(q, k, "performer", num_features=128, **options)
        moved = sq.predict_error(q, k + shift, "performer", num_features=128, **options)
        assert moved.error == pytest.approx(plain.error, rel=1e-4)  # calibration is kept in float32
        assert moved.baselines["hermite-2"] == pytest.approx(plain.baselines["hermite-2"], rel=1e-3)
    without = sq.predict_error(q, k + shift, "performer", num_features=128, features="positive")
    assert without.error > 2 * plain.error


def test_says_where_it_breaks():
    q, k = (3.0 * x for x in gaussian("isotropic"))
    positive = sq.predict_error(q, k, "performer", num_features=64)
    trig = sq.predict_error(q, k, "performer", num_features=64, features="trig")
    assert not positive.reliable
    assert "draws too rare" in positive.reason
    assert not trig.reliable
    assert "normaliser" in trig.reason
    huge = sq.predict_error(100 * q, 100 * k, "performer", num_features=64)
    assert 0.5 < huge.error <= 2.0  # a row of positive weights that sum to 1 cannot be further away
    assert sq.predict_error(100 * q, 100 * k, "performer", num_features=64, features="trig").error == math.inf
    assert not huge.reliable
    assert "not reliable" in str(huge)


def test_more_features_and_an_object():
    q, k = gaussian("isotropic", rows=8, keys=64)
    attend = sq.create("performer", D, 1, num_features=128, features="sderf", seed=0)
    with pytest.raises(RuntimeError, match="calibrate"):
        sq.predict_error(q, k, attend)
    attend.calibrate(q, k)
    by_object = sq.predict_error(q, k, attend)
    assert by_object.error == sq.predict_error(q, k, "performer", num_features=128, features="sderf").error
    more = sq.predict_error(q, k, "performer", num_features=1024, features="sderf")
    assert more.error == pytest.approx(by_object.error / 8, rel=1e-6)  # whole blocks: exactly 1/M
    json.dumps(more.as_dict())


def test_torch_generator_is_left_alone():
    q, k = gaussian("isotropic", rows=4, keys=16)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    sq.predict_error(q, k)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_that_are_picked_stand_for_all():
    """24 of 2000 queries: rare large ones carry the error, so an even sample would miss it."""
    generator = torch.Generator().manual_seed(6)
    q = 0.3 * torch.randn(1, 1, 2000, D, generator=generator, dtype=torch.float64)
    q *= torch.exp(0.15 * torch.randn(2000, 1, generator=generator, dtype=torch.float64))
    k = 0.25 * torch.randn(1, 1, 64, D, generator=generator, dtype=torch.float64)
    options = {"num_features": 256, "features": "oprf", "antithetic": True}
    every = sq.predict_error(q, k, **options, max_queries=256)
    few = sq.predict_error(q, k, **options, max_queries=24)
    assert few.error == pytest.approx(every.error, rel=0.2)
    assert few.baselines["uniform"] == pytest.approx(every.baselines["uniform"], rel=0.2)
    assert measured(q, k, 10, **options) / every.error == pytest.approx(1.0, abs=0.3)
    index, count = pick_rows(q[0, 0], 24)
    assert len(set(index.tolist())) == 24
    assert float(count.sum()) == pytest.approx(2000)


def test_causal_rows_that_are_picked_stand_for_all():
    """Early rows carry most of |A|^2: row i has about 1/i of it."""
    generator = torch.Generator().manual_seed(8)
    q, k = 0.4 * torch.randn(2, 1, 1, 500, D, generator=generator, dtype=torch.float64)
    options = {"num_features": 256, "features": "oprf", "antithetic": True, "is_causal": True}
    every = sq.predict_error(q, k, **options, max_queries=256)
    few = sq.predict_error(q, k, **options, max_queries=32)
    exact = torch.softmax((q @ k.mT / 8).masked_fill(~torch.ones(500, 500, dtype=torch.bool).tril(), -math.inf), -1)
    uniform = torch.ones(500, 500, dtype=torch.float64).tril() / torch.arange(1, 501).unsqueeze(-1)
    true = float((uniform - exact).square().sum() / exact.square().sum())
    assert few.baselines["uniform"] == pytest.approx(true, rel=0.2)
    assert few.error == pytest.approx(every.error, rel=0.2)
    index, count = pick_rows(q[0, 0], 32, is_causal=True)
    assert len(index) == len(set(index.tolist())) <= 32
    assert (float(count.sum()), int(index.min())) == (500.0, 0)
    assert int(index.max()) < 500


def test_keys_that_are_picked_stand_for_all():
    q, k = gaussian("anisotropic", rows=6, keys=400)
    for is_causal in (False, True):
        queries = torch.cat([q] * 67, 2)[:, :, :400] if is_causal else q
        (block,) = blocks(queries, k, None, scale=0.5, is_causal=is_causal, key_mask=None, max_queries=6)
        index, count = pick_keys(block, 64)
        assert index.shape == (6, 64)
        torch.testing.assert_close(count.sum(-1), block.visible.sum(-1).double())
        picked = (block.weights.gather(1, index) * count).sum(-1)
        assert float((picked - 1).abs().max()) < 0.05
        for row, multiples in zip(index, count, strict=True):
            assert len(set(row[multiples > 0].tolist())) == int((multiples > 0).sum())
    assert evenly(5, 2).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("mechanism", "options", "kind", "message"),
    [
        ("lsh", {}, ValueError, r"lsh has no closed form.*plan\(\)"),
        ("performer", {"features": "relu"}, ValueError, "kernel of its own"),
        ("performer", {"kernel": "gaussian"}, ValueError, "kernel='gaussian'"),
        ("performer", {"norms": "sqrt"}, ValueError, "norms='chi'"),
        ("performer", {"projection": "hadamard", "blocks": 1}, ValueError, "needs 3"),
        ("perfomer", {}, ValueError, "did you mean 'performer'"),
        ("performer", {"num_featurs": 3}, TypeError, "has no option"),
        ("performer", {"is_causal": True}, ValueError, "as many queries as keys"),
        ("performer", {"key_mask": torch.zeros(1, 20, dtype=torch.bool)}, ValueError, "no query with a key"),
        ("performer", {"max_keys": 1}, ValueError, "max_keys must be at least 2"),
    ],
)
def test_wrong_input(mechanism, options, kind, message):
    q, k = gaussian("isotropic", rows=4, keys=20)
    with pytest.raises(kind, match=message):
        sq.predict_error(q, k, mechanism, **options)


def test_wrong_tensors():
    q, k = gaussian("isotropic", rows=4, keys=20)
    with pytest.raises(ValueError, match="finite"):
        sq.predict_error(q * math.nan, k)
    with pytest.raises(ValueError, match="at least one query and one key"):
        sq.predict_error(q[:, :, :0], k)
    with pytest.raises(ValueError, match="4 dimensions"):
        sq.predict_error(q[0], k)
