"""create, describe, list_mechanisms, attention: names, options and their errors."""

import json

import numpy as np
import pytest
import torch

import subquad as sq
from subquad.mechanisms import MECHANISMS
from subquad.mechanisms.linear import LinearAttention


@pytest.mark.parametrize(
    ("name", "options", "kind", "message"),
    [
        ("performr", {}, ValueError, "did you mean 'performer'"),
        (3, {}, TypeError, "mechanism must be a name"),
        (sq.Mechanism, {}, TypeError, "got the base class Mechanism"),
        ("performer", {"num_features": np.int64(8)}, TypeError, r"use int\(\.\.\.\)"),
        ("performer", {"num_feature": 3}, TypeError, r"did you mean 'num_features'\? Valid options: \['antithetic'"),
        ("linear", {"causal": True}, TypeError, r"argument of the call: attn\(q, k, v, is_causal=\.\.\.\)"),
        ("linear", {"backend": "native"}, TypeError, "backend is an argument of the call"),
        ("performer", {"num_features": 0}, ValueError, "num_features must be at least 1"),
        ("performer", {"num_features": -2}, ValueError, "num_features must be at least 1"),
        ("performer", {"num_features": 2.0}, TypeError, "num_features must be an integer"),
        ("performer", {"num_features": 7}, ValueError, "must be even"),
        ("performer", {"num_features": 7, "features": "trig"}, ValueError, "must be even"),
        ("performer", {"features": "postive"}, ValueError, "did you mean 'positive'"),
        ("performer", {"projection": "hadamar"}, ValueError, "did you mean 'hadamard'"),
        ("performer", {"projection": "hadamard", "blocks": 0}, ValueError, "blocks must be at least 1"),
        ("performer", {"blocks": 2}, ValueError, "option of projection='hadamard' only"),
        ("performer", {"norms": "ch"}, ValueError, "norms='ch' is not known; expected one of"),
        ("performer", {"kernel": "laplace"}, ValueError, "kernel='laplace' is not known"),
        ("performer", {"features": "relu", "kernel": "gaussian"}, ValueError, "a kernel of its own"),
        ("performer", {"features": "relu", "antithetic": True}, ValueError, "antithetic"),
        ("performer", {"kernel_eps": 1e-4}, ValueError, "uniform attention"),
        ("performer", {"features": "sderf"}, ValueError, "pass heads="),
        ("performer", {"center": True}, ValueError, "pass heads="),
        ("performer", {"per_head": True}, ValueError, "pass heads="),
        ("performer", {"seed": "x"}, TypeError, "seed must be"),
        ("taylor", {"degree": 3}, ValueError, "degree must be 1 or 2"),
        ("taylor", {"degree": 1, "hermite": True}, ValueError, "use degree=2"),
        ("taylor", {"hermite": True}, ValueError, "pass heads="),
        ("linear", {"features": "gelu"}, ValueError, "features='gelu' is not known"),
        ("linear", {"features": 3}, TypeError, "a callable"),
        ("linear", {"features": lambda x: x.sum()}, ValueError, "one token at a time"),
        ("efficient", {"normalization": "soft"}, ValueError, "did you mean 'softmax'"),
    ],
)
def test_wrong_names_and_options(name, options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create(name, 16, **options)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, TypeError, "needs head_dim="),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"head_dim": 8, "heads": 0}, ValueError, "heads must be at least 1"),
        ({"head_dim": 8, "heads": 6, "kv_heads": 4}, ValueError, "must be a multiple of kv_heads=4"),
    ],
)
def test_wrong_shapes(arguments, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("linear", **arguments)


@pytest.mark.parametrize("options", [{"features": "sderf"}, {"center": True}])
def test_uncalibrated_maps_name_calibrate(options):
    attn = sq.create("performer", 8, 2, num_features=16, **options)
    q, k, v = torch.randn(3, 1, 2, 10, 8)
    with pytest.raises(RuntimeError, match=r"calibrate\(q, k\)"):
        attn(q, k, v)
    attn.calibrate(q, k)
    assert attn(q, k, v).isfinite().all()


def test_calibrating_what_needs_none_says_so():
    q = torch.randn(1, 2, 10, 8)
    with pytest.raises(ValueError, match="uses no calibration"):
        sq.create("linear", 8).calibrate(q, q)


def test_objects_and_classes_are_accepted_where_names_are():
    q, k, v = torch.randn(3, 1, 2, 10, 8)
    attn = sq.create("performer", 8, num_features=16, seed=0)
    assert sq.create(attn) is attn
    assert torch.equal(sq.attention(q, k, v, attn), attn(q, k, v))
    assert isinstance(sq.create(LinearAttention, 8), LinearAttention)
    with pytest.raises(TypeError, match="cannot be changed"):
        sq.create(attn, num_features=8)
    with pytest.raises(ValueError, match="head_dim=8"):
        sq.create(attn, 16)


def test_a_callable_is_refused_by_json_with_the_reason():
    attn = sq.create("performer", 8, num_features=16, features=torch.nn.functional.softplus)
    with pytest.raises(TypeError, match="is a callable, which has no JSON form"):
        attn.config()
    assert "softplus" in repr(attn)


def test_seed_none_takes_one_integer_from_torch():
    torch.manual_seed(7)
    a = sq.create("performer", 8, num_features=16)
    torch.manual_seed(7)
    b = sq.create("performer", 8, num_features=16)
    c = sq.create("performer", 8, num_features=16)
    assert a.seed == b.seed != c.seed
    q, k, v = torch.randn(3, 1, 2, 10, 8)
    assert torch.equal(a(q, k, v), b(q, k, v))
    assert json.loads(json.dumps(a.config()))["seed"] == a.seed


def test_a_generator_seeds_too():
    a = sq.create("performer", 8, num_features=16, seed=torch.Generator().manual_seed(3))
    b = sq.create("performer", 8, num_features=16, seed=torch.Generator().manual_seed(3))
    assert a.seed == b.seed


def test_describe_and_list():
    for name in sq.list_mechanisms():
        facts = sq.describe(name)
        assert facts["name"] == name
        assert all(facts[key] for key in ("equation", "paper", "complexity"))
        assert set(facts["options"]) == set(MECHANISMS[name].options())
    assert sq.list_mechanisms(exact=True) == ["softmax"]
    assert "efficient" in sq.list_mechanisms(causal=True, kernelised=True)
    assert set(sq.list_mechanisms(causal=True)) | set(sq.list_mechanisms(causal=False)) == set(MECHANISMS)
    with pytest.raises(ValueError, match="is not known"):
        sq.describe("nothing")


def test_a_property_is_true_or_false():
    with pytest.raises(TypeError, match="causal must be True or False, got 'yes'"):
        sq.list_mechanisms(causal="yes")


def test_attention_checks_before_it_builds():
    q = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        sq.attention(q, q, q, "linear")
    with pytest.raises(TypeError, match="q must be a tensor"):
        sq.attention(None, q, q, "linear")


def test_the_mechanism_of_an_outsider_needs_no_fork():
    class Mean(sq.Mechanism):
        name, equation, paper, complexity = "mean", "mean of v", "none", "O(L)"
        causal = False
        causal_refusal = "a mean sees everything"

        def _attend(self, q, k, v, call, *, is_causal):
            return v.mean(-2, keepdim=True).expand(*q.shape[:3], -1)

    q, k, v = torch.randn(3, 1, 2, 10, 8)
    assert torch.equal(sq.attention(q, k, v, Mean), v.mean(-2, keepdim=True).expand_as(v))
    assert sq.describe(Mean)["equation"] == "mean of v"


def test_an_object_of_another_shape_is_refused():
    attn = sq.create("performer", 8, 4, num_features=16)
    with pytest.raises(ValueError, match="heads=4, here 2"):
        sq.create(attn, heads=2)


@pytest.mark.parametrize(("option", "value"), [("antithetic", True), ("norms", "sqrt"), ("kernel", "gaussian")])
def test_states_of_features_with_other_options_are_refused(option, value):
    tokens = torch.randn(3, 1, 2, 5, 8)
    here = sq.create("performer", 8, 2, num_features=16, features="positive", seed=0)
    there = sq.create("performer", 8, 2, num_features=16, features="positive", seed=0, **{option: value})
    with pytest.raises(ValueError, match="state"):
        there.scan(*tokens, here.scan(*tokens)[1])


def test_states_of_relu_features_with_another_epsilon_are_refused():
    tokens = torch.randn(3, 1, 2, 5, 8)
    here, there = (
        sq.create("performer", 8, num_features=16, features="relu", seed=0, kernel_eps=e) for e in (0.1, 0.2)
    )
    with pytest.raises(ValueError, match="state"):
        there.scan(*tokens, here.scan(*tokens)[1])


def test_an_unknown_backend_is_refused_by_read():
    attn, (q, k, v) = sq.create("softmax", 8), torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ValueError, match="backend"):
        attn.read(q, attn.absorb(k, v), backend="nonsense")


def test_a_map_of_ones_own_may_be_signed():
    assert sq.create("linear", 8, features=torch.tanh).signed and not sq.create("linear", 8).signed
