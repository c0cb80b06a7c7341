"""Statistics of layers and heads: real tokens only, no digits lost, the same whichever way they reach a mechanism."""

import copy
import math

import pytest
import torch

import subquad as sq
from subquad.features.calibration import Calibration
from subquad.hf.conversion.capturing import capture
from subquad.hf.plan.statistics import calibrate_layers
from subquad.mechanisms.head_groups import HeadGroups

from . import zoo
from .zoo import padded_batches

SDERF = {"features": "sderf", "center": True, "antithetic": True, "num_features": 32, "seed": 0}


@pytest.fixture
def bert():
    return zoo.encoder()


def test_statistics_are_those_of_the_real_tokens(bert):
    given = padded_batches()
    found = calibrate_layers(bert, given)
    assert sorted(found) == [0, 1]
    for sample in capture(bert, given):
        stats = found[sample.layer]
        assert stats.tokens == sum(int(b["attention_mask"].sum()) for b in given)
        keys = torch.cat([k.transpose(1, 2)[m] for _, k, _, m in sample.calls()]).double()  # (tokens, H, D)
        torch.testing.assert_close(stats.calibration.key_mean.double(), keys.mean(0), rtol=1e-4, atol=1e-5)
        cov = torch.einsum("nhd,nhe->hde", keys - keys.mean(0), keys - keys.mean(0)) / len(keys)
        torch.testing.assert_close(stats.calibration.key_cov.double(), cov, rtol=1e-3, atol=1e-4)
        assert all((share >= 0).all() and (share <= 1 + 1e-9).all() for share in stats.locality.values())
        assert (stats.locality[128] > 1 - 1e-9).all()  # every token is within 128 of every other


def test_padding_changes_no_statistic(bert):
    given = padded_batches(1)
    garbage = copy.deepcopy(given)
    garbage[0]["input_ids"][1, -9:] = 7
    one, two = (calibrate_layers(bert, b)[1] for b in (given, garbage))
    torch.testing.assert_close(one.calibration.query_cov, two.calibration.query_cov, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.score_deviation, two.score_deviation, rtol=1e-6, atol=1e-9)


def test_means_far_from_zero_lose_no_digits():
    generator = torch.Generator().manual_seed(0)
    x = 1e4 + torch.randn(1, 1, 4000, 4, generator=generator, dtype=torch.float64)
    calibration = Calibration(1, 4)
    for part in x.split(500, 2):
        calibration.update(part, part)
    assert abs(float(calibration.key_cov[0, 0, 0]) - float(x[..., 0].var())) < 0.05


def test_values_that_are_not_finite_are_refused_by_layer(bert):
    with torch.no_grad():
        bert.encoder.layer[1].attention.self.key.bias[0] = math.inf
    with pytest.raises(ValueError, match=r"layer 1 .*keys that are not finite"):
        calibrate_layers(bert, padded_batches(1))


def test_statistics_stand_in_for_batches(bert):
    given = padded_batches()
    stats = calibrate_layers(bert, given)[0]
    sample = capture(bert, given, layers=[0])[0]
    q, k, v, mask = next(sample.calls())
    for make in (
        lambda: sq.create("performer", 8, 4, **SDERF),
        lambda: sq.create("hybrid", 8, 4, window=2, far={"mechanism": "taylor", "degree": 1, "center": True}),
        lambda: HeadGroups(8, 4, groups=[{"heads": [0, 1, 2, 3], "mechanism": "performer", **SDERF}], balance=True),
        lambda: HeadGroups(8, 4, groups=[{"heads": [3, 2, 1, 0], "mechanism": "performer", **SDERF}]),
    ):
        one, two = stats.calibrate(make()), make()
        for x, y, _, real in sample.calls():
            two.calibrate(x, y, key_mask=real, query_mask=real)
        torch.testing.assert_close(one(q, k, v, key_mask=mask), two(q, k, v, key_mask=mask), rtol=1e-3, atol=1e-4)


def test_statistics_of_other_heads_are_refused(bert):
    stats = calibrate_layers(bert, padded_batches(1))[0]
    with pytest.raises(ValueError, match="statistics of 2 KV heads, those given are of 4"):
        stats.calibrate(sq.create("taylor", 8, 2, degree=1, center=True))


def test_sharp_and_local_heads_are_seen_as_such():
    from subquad.hf.conversion.capturing import LayerSample
    from subquad.hf.plan.statistics import LayerStatistics

    angle = torch.arange(200)[:, None] * torch.tensor([0.05, 0.21, 0.4, 0.9])
    path = 4 * torch.cat([angle.cos(), angle.sin()], -1)
    q = torch.stack([path, torch.zeros(200, 8)])[None]
    stats = LayerStatistics(0, "a", Calibration(2, 8))
    stats.add(LayerSample(0, "a", [q], [q], [q], [None], scale=1.0))
    local, flat = stats.locality[16]
    assert local > 0.99 and flat < 0.2  # one follows its neighbours, the other looks everywhere
    assert stats.score_deviation[0] > 3 and stats.score_deviation[1] == 0
    assert stats.as_dict()["tokens"] == 200


def test_no_batches_are_refused(bert):
    with pytest.raises(ValueError, match="at least one"):
        calibrate_layers(bert, [])
