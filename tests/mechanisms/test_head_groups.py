"""Mechanisms per head: each head's output is that of its own mechanism, and balancing changes no score."""

import copy
import json

import pytest
import torch

import subquad as sq
from subquad.features.calibration import balancing_map, whitening_map
from subquad.hf.conversion.restoring import rebuild
from subquad.mechanisms.head_groups import HeadGroups, HeadGroupsState

D, H = 8, 4
SDERF = {
    "mechanism": "performer",
    "features": "sderf",
    "center": True,
    "antithetic": True,
    "num_features": 32,
    "seed": 3,
}
GROUPS = [
    {"heads": [2, 0], "mechanism": "hybrid", "window": 3, "sinks": 1, "far": {"mechanism": "taylor", "degree": 2}},
    {"heads": [1], "mechanism": "taylor", "degree": 2},
    {"heads": [3], "mechanism": "local", "window": 4},
]


def inputs(heads=H, kv_heads=None, length=20, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, length, D, generator=generator, dtype=dtype)
    k, v = torch.randn(2, 2, kv_heads or heads, length, D, generator=generator, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("is_causal", [False, True])
def test_each_head_is_computed_by_its_own_mechanism(is_causal):
    q, k, v = inputs()
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, 15:] = False
    out = HeadGroups(D, H, groups=GROUPS)(q, k, v, is_causal=is_causal, key_mask=mask, query_mask=mask)
    for group in GROUPS:
        options = {name: value for name, value in group.items() if name not in ("heads", "mechanism")}
        heads = group["heads"]
        alone = sq.create(group["mechanism"], D, len(heads), **options)(
            q[:, heads], k[:, heads], v[:, heads], is_causal=is_causal, key_mask=mask, query_mask=mask
        )
        torch.testing.assert_close(out[:, heads], alone, rtol=1e-12, atol=1e-12)


def test_grouped_queries_follow_their_keys():
    q, k, v = inputs(heads=6, kv_heads=3)
    groups = [{"heads": [2, 0], "mechanism": "taylor"}, {"heads": [1], "mechanism": "local", "window": 2}]
    out = HeadGroups(D, 6, 3, groups=groups)(q, k, v)
    exact = sq.attention(q, k, v, "taylor")
    torch.testing.assert_close(out[:, [0, 1, 4, 5]], exact[:, [0, 1, 4, 5]])
    near = sq.attention(q, k, v, "local", window=2)
    torch.testing.assert_close(out[:, 2:4], near[:, 2:4])


def test_scan_equals_the_causal_form_in_any_split_and_after_a_merge():
    q, k, v = inputs()
    attn = HeadGroups(D, H, groups=GROUPS)
    whole = attn(q, k, v, is_causal=True)
    state, outs = None, []
    for start, end in ((0, 7), (7, 8), (8, 20)):
        out, state = attn.scan(q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-9, atol=1e-9)
    assert isinstance(state, HeadGroupsState)
    _, first = attn.scan(q[:, :, :9], k[:, :, :9], v[:, :, :9])
    _, second = attn.scan(q[:, :, 9:15], k[:, :, 9:15], v[:, :, 9:15])
    rest, _ = attn.scan(q[:, :, 15:], k[:, :, 15:], v[:, :, 15:], sq.merge(first, second))
    torch.testing.assert_close(rest, whole[:, :, 15:], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="the state was made by"):
        HeadGroups(D, H, groups=[{"heads": [0, 1, 2, 3], "mechanism": "taylor"}]).scan(q, k, v, state)


def test_absorb_and_read_for_cross_attention():
    q, k, v = inputs()
    groups = [{"heads": [3, 1], "mechanism": "taylor"}, {"heads": [0, 2], "mechanism": "linear"}]
    attn = HeadGroups(D, H, groups=groups)
    assert attn.cross and attn.recurrent
    torch.testing.assert_close(attn.read(q, attn.absorb(k, v)), attn(q, k, v), rtol=1e-9, atol=1e-9)


def test_a_named_backend_is_used_by_every_part_or_refused():
    q, k, v = inputs(dtype=torch.float32)
    groups = [{"heads": [0, 1], "mechanism": "taylor"}, {"heads": [2, 3], "mechanism": "linear"}]
    mechanism = HeadGroups(D, H, groups=groups)
    torch.testing.assert_close(mechanism(q, k, v, backend="chunked"), mechanism(q, k, v), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="backend='triton' cannot take this call"):
        mechanism.absorb(k, v, backend="triton")


def test_balancing_map_equalises_covariances_and_keeps_every_score():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 500, D, generator=generator, dtype=torch.float64) * torch.linspace(1, 4, D)
    y = torch.randn(3, 500, D, generator=generator, dtype=torch.float64) * torch.linspace(3, 0.5, D)
    cov_x, cov_y = x.mT @ x / 500, y.mT @ y / 500
    there, back = balancing_map(cov_x, cov_y)
    torch.testing.assert_close((x @ there.mT) @ (y @ back.mT).mT, x @ y.mT, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(there @ cov_x @ there.mT, back @ cov_y @ back.mT, rtol=0.05, atol=0.02)
    before = (cov_x + cov_y).diagonal(dim1=-2, dim2=-1).sum(-1)
    after = (there @ cov_x @ there.mT + back @ cov_y @ back.mT).diagonal(dim1=-2, dim2=-1).sum(-1)
    assert (after < 0.7 * before).all()


def test_balancing_map_survives_directions_that_are_never_used():
    flat = torch.zeros(1, D, D)
    flat[0, 0, 0] = 1.0
    for pair in ((flat, torch.eye(D)[None]), (torch.zeros(1, D, D), flat)):
        there, back = balancing_map(*pair)
        assert torch.isfinite(there).all() and torch.isfinite(back).all()


def test_balance_leaves_exact_parts_alone_and_makes_features_better():
    generator = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 4, H, 200, D, generator=generator)
    q, k = q * torch.logspace(-1, 0.6, D), k * torch.logspace(0.6, -1, D)  # the same scores as even ones
    exact = sq.attention(q, k, v, "softmax")

    def error(balance):
        attn = HeadGroups(D, H, groups=[{"heads": [0, 1, 2, 3], **SDERF}], balance=balance)
        attn.calibrate(q, k)
        return float((attn(q, k, v) - exact).norm() / exact.norm())

    assert error(True) < 0.8 * error(False)
    near = HeadGroups(D, H, groups=[{"heads": [0, 1, 2, 3], "mechanism": "local", "window": 5}], balance=True)
    near.calibrate(q, k)
    torch.testing.assert_close(near(q, k, v), sq.attention(q, k, v, "local", window=5), rtol=1e-3, atol=1e-4)


def test_whitening_map_makes_distances_of_keys_those_of_their_scores():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4000, D, generator=generator, dtype=torch.float64) * torch.linspace(1, 4, D) + 3
    y = torch.randn(2, 30, D, generator=generator, dtype=torch.float64)
    mean = x.mean(1)
    there, back = whitening_map(mean, (x - mean[:, None]).mT @ (x - mean[:, None]) / 4000)
    torch.testing.assert_close((x @ there.mT) @ (y @ back.mT).mT, x @ y.mT, rtol=1e-9, atol=1e-9)
    gap = y[:, :1] - y[:, 1:]
    distance = (gap @ back.mT).square().sum(-1)
    torch.testing.assert_close(distance, (x @ gap.mT).square().mean(1), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("name", ["multipole", "improved-clustered"])
def test_balance_makes_clusters_better(name):
    options = {
        "multipole": {"chunk": 64, "clusters": 8, "exact_keys": 8, "seed": 0},
        "improved-clustered": {"clusters": 8, "topk": 4, "clustering": "lloyd", "seed": 0},
    }[name]
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 2, H, 256, D, generator=generator)
    # One side is spread widely where the other one does not look.
    looks = torch.where(torch.arange(D) < 2, 1.5, 0.02)
    spread = torch.where(torch.arange(D) < 2, 1.0, 5.0)
    q, k = (q * looks, k * spread) if name == "multipole" else (q * spread, k * looks)
    exact = sq.attention(q, k, v, "softmax")

    def error(balance):
        attn = HeadGroups(D, H, groups=[{"heads": [0, 1, 2, 3], "mechanism": name, **options}], balance=balance)
        if balance:
            attn.calibrate(q, k)
        return float((attn(q, k, v) - exact).norm() / exact.norm())

    assert error(True) < 0.6 * error(False)


def test_groups_have_coordinates_of_their_own():
    q, k, _ = inputs(dtype=torch.float32)
    q = q + 2.0
    groups = [
        {"heads": [1], **SDERF},
        {"heads": [3], "mechanism": "multipole", "chunk": 8, "clusters": 2, "seed": 0},
        {"heads": [0, 2], "mechanism": "local", "window": 3},
    ]
    attn = HeadGroups(D, H, groups=groups, balance=True)
    attn.calibrate(q, k)
    maps, stats = attn.balancing.query_map, attn.balancing.calibration
    eye = torch.eye(D)
    assert torch.equal(maps[0], eye) and torch.equal(maps[2], eye)  # a window needs none
    torch.testing.assert_close(maps[1], balancing_map(stats.query_cov, stats.key_cov)[0][1].float())
    torch.testing.assert_close(maps[3], whitening_map(stats.query_mean, stats.query_cov)[0][3].float())
    scores = (q @ maps.mT) @ (k @ attn.balancing.key_map.mT).mT
    torch.testing.assert_close(scores, q @ k.mT, rtol=1e-3, atol=1e-3)


def test_calibration_in_batches_equals_calibration_at_once():
    q, k, v = inputs(dtype=torch.float32)
    groups = [{"heads": [1, 3], **SDERF}, {"heads": [0, 2], "mechanism": "taylor", "degree": 1, "center": True}]
    for balance in (False, True):
        one, two = (HeadGroups(D, H, groups=groups, balance=balance) for _ in range(2))
        one.calibrate(q, k)
        for i in range(2):
            two.calibrate(q[i : i + 1], k[i : i + 1])
        torch.testing.assert_close(one(q, k, v), two(q, k, v), rtol=1e-3, atol=1e-4)


def test_config_and_state_dict_make_it_again():
    q, k, v = inputs(dtype=torch.float32)
    groups = [{"heads": [1, 3], **SDERF}, {"heads": [0, 2], "mechanism": "local", "window": 3}]
    attn = HeadGroups(D, H, groups=groups, balance=True)
    attn.calibrate(q, k)
    again = rebuild(json.loads(json.dumps(attn.config())))
    again.load_state_dict(attn.state_dict())
    assert again.config() == attn.config()
    assert torch.equal(again(q, k, v), attn(q, k, v))
    assert torch.equal(copy.deepcopy(attn)(q, k, v), attn(q, k, v))


def test_facts_are_those_of_the_parts():
    attn = HeadGroups(D, 2, groups=[{"heads": [0], "mechanism": "nystrom"}, {"heads": [1], "mechanism": "taylor"}])
    assert not attn.causal and not attn.recurrent
    q, k, v = inputs(heads=2)
    with pytest.raises(ValueError, match="cannot be causal"):
        attn(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"heads": [0, 1], "mechanism": "taylor"}], "exactly once"),
        ([{"heads": [0, 0, 1, 2, 3], "mechanism": "taylor"}], "exactly once"),
        ([{"mechanism": "taylor"}], "must list its KV heads"),
        ([{"heads": [0, 1, 2, 3]}], "must name its mechanism"),
    ],
)
def test_wrong_groups_are_refused(groups, message):
    with pytest.raises(ValueError, match=message):
        HeadGroups(D, H, groups=groups)


def test_uncalibrated_balance_says_what_to_do():
    attn = HeadGroups(D, H, groups=[{"heads": [0, 1, 2, 3], "mechanism": "performer", "seed": 0}], balance=True)
    with pytest.raises(RuntimeError, match="calibrate"):
        attn(*inputs())


@pytest.mark.parametrize("constant", ["queries", "keys", "shifted keys"])
@pytest.mark.parametrize(
    "mechanism",
    [
        {"mechanism": "multipole", "chunk": 8, "clusters": 2},
        {"mechanism": "performer", "num_features": 32, "seed": 3},
        {"mechanism": "clustered", "clusters": 3, "seed": 3},
        SDERF,
    ],
    ids=["multipole", "performer", "clustered", "sderf"],
)
def test_a_head_that_is_constant_in_the_calibration_data(mechanism, constant):
    q, k, v = inputs(heads=2, dtype=torch.float32)
    (q if constant == "queries" else k)[:, 1] = 3.0 if constant == "shifted keys" else 0.0
    attn = sq.create("head-groups", D, 2, groups=[{"heads": [0, 1], **mechanism}], balance=True)
    attn.calibrate(q, k)
    exact = sq.attention(q, k, v, "softmax")[:, 1]
    assert (attn(q, k, v)[:, 1] - exact).abs().max() < (0.2 if constant == "queries" else 1e-4)


def test_states_of_any_mechanism_move_and_detach():
    groups = [{"heads": [i], "mechanism": name} for i, name in enumerate(("softmax", "linear", "multipole"))]
    attn = sq.create("head-groups", D, 3, groups=groups)
    q, k, v = (x.requires_grad_() for x in inputs(heads=3))
    _, state = attn.scan(q, k, v)
    for made in (state.detach(), state.to("cpu")):
        out, _ = attn.scan(q, k, v, made)
        assert torch.allclose(out, attn.scan(q, k, v, state)[0])
    assert not any(x.requires_grad for x in torch.utils._pytree.tree_leaves(state.detach()))


def test_without_a_scale_each_mechanism_has_its_own():
    q, k, v = inputs(heads=2)
    attn = HeadGroups(D, 2, groups=[{"heads": [0], "mechanism": "linear"}, {"heads": [1], "mechanism": "taylor"}])
    for given in ({}, {"scale": 0.2}):
        want = [sq.attention(*(x[:, i : i + 1] for x in (q, k, v)), name, is_causal=True, **given)
                for i, name in enumerate(("linear", "taylor"))]  # fmt: skip
        torch.testing.assert_close(attn(q, k, v, is_causal=True, **given), torch.cat(want, 1))
        torch.testing.assert_close(attn.scan(q, k, v, **given)[0], torch.cat(want, 1))
    assert sq.predict_error(q.float(), k.float(), attn).error > 0


def test_described_objects_have_facts_of_their_own():
    attn = HeadGroups(D, 2, groups=[{"heads": [0, 1], "mechanism": "nystrom"}])
    known = sq.describe(attn)
    assert not known["causal"] and not known["recurrent"] and not known["constant_memory"]


def test_models_take_it():
    groups = [{"heads": [0], "mechanism": "local", "window": 4}, {"heads": [1], "mechanism": "taylor"}]
    choice = {"mechanism": "head-groups", "groups": groups}
    model = sq.nn.TransformerEncoder(layers=1, heads=2, dim=16, mechanism=choice)
    again = sq.nn.ModelConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))
    assert again.to_dict() == model.config.to_dict()
    assert model(torch.randn(2, 10, 16)).shape == (2, 10, 16)


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "lsh", "rounds": 1, "buckets": 2, "bucket_size": 64, "shared_qk": True},
        {"mechanism": "performer", "kernel": "gaussian", "num_features": 32},
        {"mechanism": "performer", "features": "relu", "num_features": 32},
        {"mechanism": "hybrid", "window": 2, "far": {"mechanism": "performer", "features": "relu", "num_features": 32}},
    ],
)
def test_weights_that_are_no_function_of_the_score_are_not_balanced(options):
    q, k, v = inputs(heads=2)
    q = q @ torch.randn(D, D, generator=torch.Generator().manual_seed(2), dtype=q.dtype)
    group = [{"heads": [0, 1], "seed": 1, **options}]
    if options["mechanism"] == "hybrid":
        group = [{"heads": [0, 1], **options, "far": {**options["far"], "seed": 1}}]
    plain, balanced = (sq.create("head-groups", D, 2, groups=group, balance=balance) for balance in (False, True))
    balanced.calibrate(q, k)
    assert torch.equal(balanced(q, k, v), plain(q, k, v))


def test_heads_are_integers():
    for heads in ([0.7, 1], [True, False]):
        with pytest.raises(TypeError, match="must be numbers of KV heads"):
            sq.create("head-groups", D, 2, groups=[{"heads": heads, "mechanism": "linear"}])
