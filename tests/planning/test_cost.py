"""What things cost: measured points, the curve through them, and how far to trust it."""

import json

import pytest

import subquad as sq
from subquad.planning import cost, tables
from subquad.planning.cost import LENGTHS, CostModel, TimeEstimate, predict_time

pytestmark = pytest.mark.usefixtures("own_cache", "short_measurements")


@pytest.mark.parametrize(
    ("form", "law"),
    [
        ("linear", lambda n: 2e-3 + 3e-6 * n),
        ("quadratic", lambda n: 1e-6 * n + 4e-9 * n * n),
        ("power", lambda n: 1e-6 * n**1.5),
    ],
)
def test_cost_models_find_their_law(form, law):
    model = CostModel(form, {n: (law(n), 1.02 * law(n), 1.05 * law(n)) for n in (256, 512, 1024, 2048, 4096)})
    for length in (512, 4096, 16384, 100_000):
        found = model.at(length)
        assert found.seconds == pytest.approx(law(length), rel=1e-3)
        assert found.low <= law(length) <= found.high
        assert found.high / found.low < 1.15


def test_cost_uncertainty_grows_with_noise_and_distance():
    noisy = CostModel("linear", {256: (0.003, 0.004), 1024: (0.009, 0.014), 4096: (0.05, 0.06)})
    near, far = noisy.at(4096), noisy.at(1_000_000)
    assert far.high / far.low > near.high / near.low > 1.2
    assert CostModel("linear", {1000: (0.01,)}).at(4000).seconds == pytest.approx(0.04)
    # Between two points the points speak, whatever the curve says.
    assert noisy.at(1024).seconds == 0.009


@pytest.mark.parametrize("form", ["linear", "quadratic", "power"])
def test_short_inputs_take_no_less_than_their_overhead(form):
    model = CostModel(form, {256: (0.001, 0.0011), 1024: (0.002, 0.0022), 4096: (0.03, 0.033)})
    found = model.at(1)
    assert found.seconds == 0.001
    assert 0.0 < found.low < found.seconds < found.high < 0.0012


def test_short_lengths_are_interpolated_and_leave_the_curve_alone():
    assert {32, 64, 128} <= set(LENGTHS)
    overhead = {32: (0.004, 0.0041), 64: (0.005, 0.0051), 128: (0.006, 0.0061)}
    model = CostModel("linear", {**overhead, **{n: (1e-4 * n, 1.02e-4 * n) for n in (256, 512, 1024)}})
    assert model.at(64).seconds == 0.005
    assert 0.004 < model.at(48).low < model.at(48).seconds < model.at(48).high < 0.005
    assert model.at(100_000).seconds == pytest.approx(10.0)
    # Of a mechanism that is slow from the start there are no others.
    assert CostModel("linear", {32: (0.2,), 64: (0.4,)}).at(128).seconds == pytest.approx(0.8)


def test_no_negative_coefficients():
    """Times that fall with length (noise) must not extrapolate below zero."""
    model = CostModel("linear", {256: (0.010,), 512: (0.009,), 1024: (0.008,)})
    assert model.at(10**6).seconds > 0


def test_predict_time_adds_up_and_is_kept(monkeypatch):
    calls = []

    def run(call, inputs, training):
        calls.append(inputs[0].shape)
        length = inputs[0].shape[-2]
        return 1e-6 * length if inputs[0].dim() == 3 else 2e-6 * length

    monkeypatch.setattr(cost, "seconds_of", run)
    once = predict_time("linear", 4096, layers=3, heads=2, head_dim=8, batch=2)
    assert once.seconds == pytest.approx(6 * 3e-6 * 4096)
    measured = len(calls)
    attention = predict_time("linear", 4096, heads=2, head_dim=8, rest_per_token=0.0)
    assert attention.seconds == pytest.approx(2e-6 * 4096)
    assert len(calls) == measured
    assert predict_time("linear", 4096, heads=2, head_dim=8, rest_per_token=1e-3).seconds == pytest.approx(
        4096 * (1e-3 + 2e-6)
    )
    with pytest.raises(ValueError, match="rest_per_token"):
        predict_time("linear", 4096, rest_per_token=-1.0)
    assert str(TimeEstimate(0.5, 0.4, 0.6)) == "500 ms (400 to 600)"


def test_really_times_and_survives_a_broken_table():
    attend = sq.create("linear", 8)
    (model,) = cost.attention_costs([attend], heads=1, is_causal=True, training=True)
    assert sorted(model.points) == [128, 256, 512]
    path = tables.table_path(cost.FILE)
    table = json.loads(path.read_text())
    path.write_text(json.dumps({key: {"128": "soon"} for key in table}))
    (again,) = cost.attention_costs([attend], heads=1, is_causal=True, training=True)
    assert sorted(again.points) == [128, 256, 512]
    # As an earlier version left it: without the short lengths.
    path.write_text(json.dumps({key: {"256": [1.0], "512": [2.0]} for key in table}))
    (again,) = cost.attention_costs([attend], heads=1, is_causal=True, training=True)
    assert sorted(again.points) == [128, 256, 512]


def test_times_of_a_busy_hour_are_scaled_by_softmax(monkeypatch):
    """Everything takes four times as long when the second mechanism is added: the table must not hold it against it."""
    monkeypatch.setattr(cost, "seconds_of", lambda call, inputs, training: 1e-6 * inputs[0].shape[-2])
    softmax, first, second = (sq.create(name, 8) for name in ("softmax", "linear", "efficient"))
    before = cost.attention_costs([first, softmax], heads=1)
    # At one length softmax alone meets a moment that is busier still.
    monkeypatch.setattr(
        cost,
        "seconds_of",
        lambda call, inputs, training: (
            (60.0 if call.__defaults__[0].name == "softmax" and inputs[0].shape[-2] == 256 else 4.0)
            * 1e-6
            * inputs[0].shape[-2]
        ),
    )
    after = cost.attention_costs([second, softmax], heads=1)
    assert after[1].points == before[1].points
    assert after[0].at(512).seconds == pytest.approx(before[0].at(512).seconds)


def test_draws_are_not_in_the_key():
    keys = {tables.measurement_key(sq.create("hybrid", 8, 2).config(), 2, True, False) for _ in range(3)}
    assert len(keys) == 1
    other = tables.measurement_key(sq.create("hybrid", 8, 2).config(), 2, True, False, kv_heads=1)
    assert other not in keys and "heads 2 on 1" in other


def test_forms_are_facts_of_the_mechanisms():
    forms = {name: cost._form(sq.create(name, 8, 2)) for name in ("softmax", "sparse", "multipole", "linear", "local")}
    assert forms == {"softmax": "quadratic", "sparse": "quadratic", "multipole": "quadratic", "linear": "linear",
                     "local": "linear"}  # fmt: skip
    assert cost._form(sq.create("multipole", 8, memory="constant")) == "linear"
    groups = [{"heads": [0], "mechanism": "multipole"}, {"heads": [1], "mechanism": "linear"}]
    assert cost._form(sq.create("head-groups", 8, 2, groups=groups)) == "quadratic"


def test_grouped_heads_are_timed_as_such():
    costs = cost.attention_costs([sq.create("local", 8, 4, 2, window=8)], heads=4, kv_heads=2)
    assert costs[0].at(512).seconds > 0


@pytest.mark.parametrize(("queries", "shapes"), [(0.25, {(32, 128), (64, 256), (128, 512)}),
                                                 (4.0, {(128, 32), (256, 64), (512, 128)})])  # fmt: skip
def test_cross_attention_is_timed_as_such(queries, shapes, monkeypatch):
    seen = []
    monkeypatch.setattr(
        cost, "seconds_of", lambda call, x, training: seen.append((x[0].shape[2], x[1].shape[2])) or 1e-6
    )
    attend = sq.create("linear", 8)
    cost.attention_costs([attend], heads=1)
    seen.clear()
    cost.attention_costs([attend], heads=1, queries=queries)
    assert set(seen) == shapes
