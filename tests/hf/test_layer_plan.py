"""Plans: statistics of real tokens only, the arithmetic of the search, and what a plan makes of a model."""

import copy
import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import subquad as sq
from subquad.hf.plan.candidates import default_candidates
from subquad.hf.plan.layer_plan import plan_layers
from subquad.hf.plan.search import search

from . import zoo
from .zoo import padded_batches

DEGREE1 = {"mechanism": "taylor", "degree": 1, "center": True}
SDERF = {"mechanism": "performer", "features": "sderf", "center": True, "antithetic": True, "num_features": 32}


@pytest.fixture(autouse=True)
def _short_measurements(own_cache, monkeypatch):
    monkeypatch.setattr("subquad.planning.cost.LENGTHS", (64, 128))


@pytest.fixture
def bert():
    return zoo.encoder()


def test_search_takes_the_cheapest_that_meets_the_target():
    errors = torch.tensor([[0.9, 0.0, 0.3], [0.1, 0.0, 0.2], [0.0, 0.0, 0.0]]).double()
    seconds = torch.tensor([1.0, 2.0, 5.0]).double()

    def found(**aim):
        return search({0: (errors, seconds)}, max_groups=3, **aim)[0].tolist()

    assert found(target=0.45, budget=None) == [1, 0, 0]
    assert found(target=0.05, budget=None) == [2, 0, 2]
    assert found(target=2.0, budget=None) == [0, 0, 0]
    assert found(target=None, budget=4.0) == [1, 0, 0]
    assert found(target=None, budget=100.0) == [2, 0, 2]
    assert found(target=None, budget=0.1) == [0, 0, 0]


def test_search_keeps_the_number_of_groups():
    errors = torch.eye(4).double().neg().add(1.0)
    picked = search({0: (errors, torch.ones(4).double())}, target=1e-9, budget=None, max_groups=2)[0]
    assert len(set(picked.tolist())) <= 2


def test_a_plan_converts_and_its_errors_are_those_of_the_conversion(bert):
    given = padded_batches(4)
    plan = plan_layers(
        bert, given, target_error=0.36, length=64, lengths=(64,), draws=2,
        candidates=[DEGREE1, SDERF, {"mechanism": "local", "window": 16, "global_tokens": 1}],
    )  # fmt: skip
    json.dumps(plan.as_dict())
    assert "layer" in str(plan)
    exact = copy.deepcopy(bert)
    model, report = sq.hf.convert(bert, plan.mechanisms(), calibration=given[2:])
    for choice, layer in zip(plan.choices, report.layers, strict=True):
        assert choice.error <= 0.36 and not choice.exact
        assert choice.error < choice.uniform
        # The report does not weigh by the output projection, so the two agree in size only.
        assert 0.16 < layer.error / choice.error < 6.25
    with torch.no_grad():
        wanted = exact(**given[0]).last_hidden_state
        difference = model(**given[0]).last_hidden_state - wanted
    assert 0 < float(difference.norm() / wanted.norm()) < 0.6


def test_layers_that_miss_the_target_stay_exact_and_say_what_that_costs(bert):
    plan = plan_layers(bert, padded_batches(), target_error=1e-18, length=64, lengths=(64, 128), candidates=[DEGREE1])
    assert plan.left_exact == [0, 1]
    assert all("above the target" in choice.reason for choice in plan.choices)
    assert plan.mechanisms() == {0: None, 1: None}
    assert plan.seconds(128) == pytest.approx(sum(choice.exact_seconds[128] for choice in plan.choices))
    assert "left exact" in str(plan)
    insisting = plan_layers(
        bert, padded_batches(), target_error=1e-18, length=64, lengths=(64,), candidates=[DEGREE1], keep_exact=False
    )
    assert not insisting.left_exact


def test_short_inputs_do_not_judge_what_is_exact_on_them(bert):
    window = {"mechanism": "local", "window": 64}
    call = {"target_error": 0.9, "lengths": (256,)}
    alone = plan_layers(bert, padded_batches(), length=256, candidates=[window], **call)
    assert alone.left_exact == [0, 1] and alone.mechanisms() == {0: None, 1: None}
    assert all("too short to judge any candidate for 256" in choice.reason for choice in alone.choices)
    beside = plan_layers(bert, padded_batches(), length=256, candidates=[window, DEGREE1], keep_exact=False, **call)
    assert {group["mechanism"] for choice in beside.choices for group in choice.groups} == {"taylor"}


def test_a_budget_buys_accuracy(bert, monkeypatch):
    candidates = [DEGREE1, {"mechanism": "local", "window": 40}]
    # Made-up times: real ones of such small inputs depend on what else the machine does.
    times = (torch.tensor([[1.0], [2.0]]).double(), [8.0])
    monkeypatch.setattr("subquad.hf.plan.survey._layer_times", lambda *args: times)
    call = {"length": 64, "lengths": (64,), "candidates": candidates, "max_groups": 2}
    poor, middle, rich = (plan_layers(bert, padded_batches(), budget=budget, **call) for budget in (1.0, 12.0, 100.0))
    assert poor.seconds(64) == 8.0  # the cheapest there is: 2 layers of 4 heads
    assert 8.0 < middle.seconds(64) <= 12.0
    errors = [sum(c.error for c in plan.choices) for plan in (poor, middle, rich)]
    assert errors[0] > errors[1] > errors[2]


def test_clusters_serve_sharp_and_far_attention_and_come_back_after_saving(bert, tmp_path):
    given = padded_batches()
    # As many clusters as tokens: exact, so the plan must find nothing better, and the model must not change.
    candidates = default_candidates(windows=(2,), features=(16,), clusters=64, topk=48, multipole=False)
    plan = plan_layers(bert, given, target_error=1e-8, length=48, lengths=(48,), candidates=candidates)
    assert [g["mechanism"] for choice in plan.choices for g in choice.groups] == ["improved-clustered"] * 2
    with torch.no_grad():
        wanted = bert(**given[0]).last_hidden_state
        sq.hf.convert(bert, plan.mechanisms())
        real = given[0]["attention_mask"].bool()
        torch.testing.assert_close(bert(**given[0]).last_hidden_state[real], wanted[real], rtol=1e-3, atol=1e-3)
        bert.save_pretrained(tmp_path / "model")
        again = sq.hf.load(tmp_path / "model")
        torch.testing.assert_close(again(**given[0]).last_hidden_state, bert(**given[0]).last_hidden_state)


def test_causal_layers_choose_among_causal_candidates(llama):
    clustered = {"mechanism": "improved-clustered", "clusters": 4, "topk": 8}
    call = {"target_error": 0.81, "length": 64, "lengths": (64,)}
    plan = plan_layers(llama, padded_batches(), candidates=[clustered, {"mechanism": "local", "window": 8}], **call)
    assert [group["mechanism"] for group in plan.choices[0].groups] == ["local"]
    with pytest.raises(ValueError, match=r"improved-clustered.*causal form"):
        plan_layers(llama, padded_batches(), candidates=[clustered], **call)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_grouped_heads_and_causal_models(llama):
    model = llama
    given = padded_batches()
    plan = plan_layers(
        model, given, target_error=0.81, length=64, lengths=(64,),
        candidates=default_candidates(windows=(8,), features=(16,)),
    )  # fmt: skip
    with torch.no_grad():
        exact = model(**given[0]).logits
    assert sum(len(group["heads"]) for group in plan.choices[0].groups) == 2
    sq.hf.convert(model, plan.mechanisms())
    with torch.no_grad():
        logits = model(**given[0]).logits
    changed = dict(given[0], input_ids=given[0]["input_ids"].clone())
    changed["input_ids"][:, -1] = 3
    with torch.no_grad():
        later = model(**changed).logits
    torch.testing.assert_close(later[0, :-1], logits[0, :-1], rtol=1e-4, atol=1e-4)
    assert float((logits - exact)[0].norm() / exact[0].norm()) < 0.5
    tokens = model.generate(given[0]["input_ids"][:1, :10], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert tokens.shape == (1, 14)


@pytest.mark.parametrize(
    "aim", [{}, {"target_error": 0.1, "budget": 1.0}, {"target_error": -1.0}, {"budget": math.nan}]
)
def test_a_plan_needs_one_sensible_aim(bert, aim):
    with pytest.raises(ValueError, match=r"target_error|budget"):
        plan_layers(bert, padded_batches(1), **aim)


def test_a_plan_needs_batches(bert):
    with pytest.raises(ValueError, match="at least one"):
        plan_layers(bert, [], target_error=0.1)
