"""The conversion without a named mechanism: within its error, and nothing where nothing pays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BatchEncoding,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
)

import subquad as sq
from subquad.hf import convert, revert
from subquad.hf.plan import automatic
from subquad.hf.plan.automatic import output_error, outputs

from .zoo import batch as make_batch
from .zoo import encoder, make, padded_batches, text

# Seconds of one head per token, by mechanism: what a machine would say, without measuring.
COST = {"softmax": 0.0, "local": 2e-6, "hybrid": 4e-6, "improved-clustered": 6e-6, "performer": 3e-6, "multipole": 5e-6,
        "taylor": 3e-6}  # fmt: skip


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(choices: Any, shape: Any, causal: bool, lengths: Any) -> Any:
        exact = [1e-8 * n * n for n in lengths]
        rows = [exact if c["mechanism"] == "softmax" else [COST[c["mechanism"]] * n for n in lengths] for c in choices]
        return torch.tensor(rows, dtype=torch.float64), [shape[2] * x for x in exact]

    monkeypatch.setattr("subquad.hf.plan.survey._layer_times", times)


CANDIDATES = [
    {"mechanism": "local", "window": 4, "global_tokens": 1},
    {"mechanism": "local", "window": 16, "global_tokens": 1},
    {"mechanism": "performer", "num_features": 32},
]
NARROW = {"mechanism": "local", "window": 1, "global_tokens": 1}  # a dozen tokens are enough to judge it


@pytest.mark.parametrize("error", [0.3, 0.02])
def test_the_output_stays_within_the_error(known_times: None, error: float) -> None:
    model, batches = encoder(), padded_batches(5)
    exact = outputs(model, batches[3::4])
    converted, report = convert(model, calibration=batches, error=error, length=8192, candidates=CANDIDATES)
    assert converted is model and report.choice is not None
    found = output_error(outputs(model, batches[3::4]), exact)
    assert found <= error and found == pytest.approx(report.choice.error, abs=1e-6)
    if report.converted:
        assert found > 0 and report.choice.times[-1]["seconds"] < report.choice.times[-1]["exact_seconds"]
        assert "times as fast as exact" in report.verdict
        revert(model)
    assert json.loads(json.dumps(report.as_dict()))["choice"]["error"] == report.choice.error
    assert output_error(outputs(model, batches[3::4]), exact) == 0


def test_a_larger_error_is_never_slower(known_times: None) -> None:
    seconds = []
    for error in (0.01, 0.1, 0.5):
        _, report = convert(encoder(), calibration=padded_batches(5), error=error, length=8192, candidates=CANDIDATES)
        assert report.choice is not None
        seconds.append(report.choice.plan.seconds(8192))
    assert seconds[0] >= seconds[1] >= seconds[2] and seconds[0] > seconds[2]


def test_nothing_is_converted_where_nothing_pays(known_times: None) -> None:
    model, batches = encoder(), padded_batches(5)
    exact = outputs(model, batches)
    _, report = convert(model, calibration=batches, length=16, candidates=CANDIDATES)
    assert report.converted == [] and report.verdict.startswith("nothing was converted: at 16 tokens")
    assert output_error(outputs(model, batches), exact) == 0
    assert "subquad_conversion" not in model.config.to_dict()


def test_decoders_have_a_cache_that_does_not_grow(known_times: None) -> None:
    model = make("llama")
    batches = [text(seed=seed) for seed in range(5)]
    _, report = convert(model, calibration=batches, error=0.9, length=8192, candidates=[*CANDIDATES, NARROW])
    assert report.choice is not None and report.choice.cache_bytes is not None
    assert report.converted and report.choice.cache_bytes[1] < report.choice.cache_bytes[0]
    new = model.generate(**text("left"), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert new.shape == (3, 16)


def test_caches_of_keys_grow_with_the_length() -> None:
    groups = [{"heads": [0], "mechanism": "multipole"}, {"heads": [1], "mechanism": "local", "window": 8}]
    mixed = sq.create("head-groups", 8, 4, 2, groups=groups)
    plan: Any = SimpleNamespace(shapes={0: (8, 4, 2)})
    sizes = [automatic._cache_bytes({}, plan, {0: mixed}, length, 4) for length in (4096, 16384)]
    for exact, ours in sizes:
        assert exact / 2 < ours < 2 * exact
    assert 3.5 < sizes[1][1] / sizes[0][1] < 4.1
    fixed = [automatic._cache_bytes({}, plan, {0: sq.create("linear", 8, 4, 2)}, n, 4)[1] for n in (4096, 16384)]
    assert fixed[0] == fixed[1]


def test_times_of_batches_that_are_no_dicts(known_times: None) -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1).eval()
    batches = [(torch.randn(2, 40, 16),) for _ in range(5)]
    _, report = convert(model, calibration=batches, error=0.5, length=4096, candidates=CANDIDATES)
    assert report.choice is not None and len(report.choice.times) > 1


def test_logits_that_decide_count_however_many_do_not() -> None:
    exact, found = torch.tensor([[[5.0, 5.0, -40.0, -40.0]]]), torch.tensor([[[6.0, 4.0, -40.0, -40.0]]])
    divergence = torch.nn.functional.kl_div(found.log_softmax(-1), exact.softmax(-1), reduction="sum")
    assert output_error([("logits", found, None)], [("logits", exact, None)]) == pytest.approx(3 * float(divergence))
    assert (found - exact).square().sum() / (exact + 17.5).square().sum() < 0.001


def test_labelled_tokens_alone_count() -> None:
    model = make("bert")
    batch = text(seed=0)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 2:4] = 5
    ((_, logits, counted),) = outputs(model, [{**batch, "labels": labels}])
    assert counted is not None and torch.equal(counted, labels != -100)
    wrong = logits.clone()
    wrong[:, 5:] += torch.randn_like(wrong[:, 5:])
    assert output_error([("logits", wrong, counted)], [("logits", logits, counted)]) == 0
    wrong = logits.clone()
    wrong[:, 2:4] += torch.randn_like(wrong[:, 2:4])
    found = output_error([("logits", wrong, counted)], [("logits", logits, counted)])
    assert found > 2 * output_error([("logits", wrong, None)], [("logits", logits, None)]) > 0
    nobody = {**batch, "labels": torch.full_like(labels, -100)}
    ((_, _, counted),) = outputs(model, [nobody])
    assert counted is None or torch.equal(counted, batch["attention_mask"].bool())
    ((_, _, counted),) = outputs(make("gpt2"), [{**batch, "labels": labels}])  # row i predicts token i + 1
    assert counted is not None and counted[:, 1:3].all() and counted.sum() == (labels != -100).sum()


def test_answers_to_questions_are_logits(known_times: None) -> None:
    config = BertConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = BertForQuestionAnswering(config).eval()
    ((kind, x, _),) = outputs(model, [text(seed=0)])
    assert kind == "logits" and x.shape[1] == 2
    _, report = convert(model, calibration=[text(seed=s) for s in range(4)], length=8192, candidates=CANDIDATES)
    assert report.choice is not None and report.choice.error <= 0.01


def test_windows_beside_cross_attention(known_times: None) -> None:
    candidates = [CANDIDATES[0], {"mechanism": "performer", "num_features": 2}]
    batches = [{**one, "decoder_input_ids": one["input_ids"]} for one in padded_batches(4)]
    _, report = convert(make("bart"), calibration=batches, error=0.9, length=8192, candidates=candidates)
    assert report.choice is not None and report.choice.without_far is not None
    names = {row.name: str(row.mechanism) for row in report.layers if row.mechanism is not None}
    assert any("local" in what for name, what in names.items() if "encoder_attn" not in name)
    assert not any("local" in what for name, what in names.items() if "encoder_attn" in name)


def test_two_towers_are_judged_by_both_embeddings() -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**size, "vocab_size": 40, "max_position_embeddings": 16},
        vision_config={**size, "image_size": 16, "patch_size": 4}, projection_dim=8,
    )  # fmt: skip
    batch = {"input_ids": torch.randint(3, 40, (2, 9)), "pixel_values": torch.randn(2, 3, 16, 16)}
    found = outputs(CLIPModel(config).eval(), [batch])
    assert [(kind, tuple(x.shape)) for kind, x, _ in found] == 2 * [("hidden", (2, 8))]


def test_the_length_of_images_is_their_patches(known_times: None) -> None:
    batches = [make_batch("vit", seed=seed) for seed in range(2)]
    _, report = convert(make("vit"), calibration=batches, candidates=CANDIDATES)
    assert report.choice is not None and report.choice.length == 17


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="pass calibration=, a few batches"):
        convert(encoder())
    with pytest.raises(ValueError, match="error must be between 0 and 1, got 2"):
        convert(encoder(), calibration=padded_batches(2), error=2)


def test_what_short_inputs_cannot_judge_is_not_chosen(known_times: None) -> None:
    """A window of 60 is exact on 48 tokens, one of 12 sees half of them: both are far from it on 8192."""
    model, batches = encoder(), padded_batches(5)
    window = {"mechanism": "local", "window": 60, "global_tokens": 1}
    for one in (window, {**window, "window": 12}):
        _, report = convert(model, calibration=batches, length=8192, candidates=[one])
        assert not report.converted and "48 tokens are too short" in report.verdict
    _, report = convert(model, calibration=batches, length=8192, candidates=[window])
    assert "inputs of 48 tokens are too short to judge any candidate for 8192" in report.verdict
    assert report.verdict.endswith("calibrate with inputs of at least 480 tokens")
    _, report = convert(model, calibration=batches, error=0.3, length=8192, candidates=[window, *CANDIDATES])
    assert report.converted and "window': 60" not in str(report.as_dict())
    assert "candidates that 48 tokens are too few to judge were left out" in report.verdict
    revert(model)
    _, report = convert(model, calibration=batches, length=48, candidates=[window])  # exact there, and asked for there
    assert "nothing about" not in report.verdict


@pytest.mark.parametrize("short", [0, 1])
def test_batches_of_different_lengths_are_no_way_around_the_error(known_times: None, short: int) -> None:
    """Whether the survey's or the held-out ones are within the window, where it looks like exact attention."""
    model = encoder()
    batches = [padded_batches(1, length=5 if (number == 3) == bool(short) else 48)[0] for number in range(4)]
    exact = outputs(model, batches)
    window = {"mechanism": "local", "window": 4, "global_tokens": 1}
    _, report = convert(model, calibration=batches, error=1e-5, length=8192, candidates=[window])
    assert not report.converted and output_error(outputs(model, batches), exact) == 0


@pytest.mark.parametrize("causal", [False, True])
def test_candidates_are_exact_up_to_their_reach(causal: bool) -> None:
    from subquad.hf.plan.candidates import exact_reach

    torch.manual_seed(0)
    for options in (
        {"mechanism": "local", "window": 9, "global_tokens": 3},
        {"mechanism": "hybrid", "window": 9, "sinks": 3 if causal else 0},
        {"mechanism": "multipole", "chunk": 16, "clusters": 2},
        {"mechanism": "multipole", "chunk": 8, "clusters": 2, "exact_keys": 19},
        *([] if causal else [{"mechanism": "improved-clustered", "clusters": 3, "topk": 15}]),
    ):
        reach = exact_reach(options, causal)
        attend = sq.create(options["mechanism"], 8, 2, **{k: x for k, x in options.items() if k != "mechanism"})
        for tokens, exact in ((reach, True), (2 * reach, False)):
            q, k, v = 2 * torch.randn(3, 1, 2, tokens, 8)
            gap = attend(q, k, v, is_causal=causal) - sq.attention(q, k, v, "softmax", is_causal=causal)
            assert bool(gap.abs().max() < 1e-4) == exact, (options, tokens)


def test_whole_models_are_timed_for_long_enough(known_times: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now, runs = [0.0], []
    true = automatic.run

    def run(model: Any, batch: Any) -> Any:
        runs.append(1)
        now[0] += 0.004
        return true(model, batch)

    monkeypatch.setattr(automatic, "clock", lambda: now[0])
    monkeypatch.setattr(automatic, "run", run)
    _, report = convert(encoder(), calibration=padded_batches(5), length=48, candidates=CANDIDATES)
    assert report.choice is not None
    here = next(row for row in report.choice.times if row["length"] == 48)
    assert here["exact_seconds"] == pytest.approx(0.004 / 3) and here["seconds"] == pytest.approx(0.004 / 3)
    assert sum(runs) >= 2 * (0.05 / 0.004)


def test_every_candidate_can_be_made() -> None:
    from subquad.hf.plan.candidates import AUTOMATIC, seeded

    names = []
    for number, one in enumerate(AUTOMATIC):
        options = seeded(one, 0, 0, number)
        names.append(options["mechanism"])
        sq.create(options.pop("mechanism"), 8, 2, **options)
    assert names[0] == "softmax" and "hybrid" in names and "improved-clustered" in names
    assert automatic.LENGTHS[0] == 512


def test_hybrid_by_name_has_the_best_far_field_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    _, report = convert(model, "hybrid", window=4, sinks=1, calibration=padded_batches(2))
    for row in report.layers:
        assert row.mechanism is not None and row.error is not None and row.window_only is not None
        assert row.error <= row.window_only
        assert row.mechanism["mechanism"] == "local" or row.mechanism["far"]["features"] == "sderf"
    revert(model)
    monkeypatch.setattr("subquad.hf.conversion.converting._far_is_worse", lambda row: row.layer == 1)
    _, report = convert(model, "hybrid", window=4, sinks=1, calibration=padded_batches(2))
    assert [row.mechanism["mechanism"] for row in report.layers if row.mechanism] == ["hybrid", "local"]
    assert "layers [1]: their far field is worse than none" in str(report)
    grouped = make("llama")  # four heads on two of keys
    _, report = convert(grouped, "hybrid", window=4, sinks=1, calibration=[text()])
    assert [row.mechanism["mechanism"] for row in report.layers if row.mechanism][1] == "local"


def decoder() -> tuple[Any, list[Any]]:
    """A model whose attention matters little, so that an approximation of it is within an error, and batches for it."""
    model = make("llama")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.01)
    return model, [{"input_ids": text(seed=s)["input_ids"]} for s in range(4)]


def test_a_resume_file_is_for_the_same_layers_and_config(known_times: None, tmp_path: Path) -> None:
    """Layer 0 within the error says nothing of layer 1, nor of the same weights with another scale."""
    model, batches, file = *decoder(), tmp_path / "file"
    call: dict[str, Any] = {"calibration": batches, "candidates": [NARROW], "error": 0.9, "length": 8192}
    _, first = convert(model, layers=[0], resume=file, **call)
    revert(model)
    _, fresh = convert(model, layers=[1], **call)
    revert(model)
    _, resumed = convert(model, layers=[1], resume=file, **call)
    assert first.choice is not None and fresh.choice is not None and resumed.choice is not None
    assert resumed.choice.error == fresh.choice.error != first.choice.error
    revert(model)
    again, _ = convert(model, layers=[1], resume=file, **call)
    key = torch.load(file, weights_only=True)["key"]
    revert(again)
    model.config.rms_norm_eps *= 2
    convert(model, layers=[1], resume=file, **call)
    assert torch.load(file, weights_only=True)["key"] != key


def test_layers_that_stay_exact_count_in_times_and_cache(known_times: None) -> None:
    model, batches = decoder()
    call: dict[str, Any] = {"calibration": batches, "candidates": [NARROW], "error": 0.9, "length": 8192}
    _, some = convert(model, layers=[0], **call)
    revert(model)
    _, every = convert(model, **call)
    assert some.choice is not None and every.choice is not None
    assert some.choice.cache_bytes is not None and every.choice.cache_bytes is not None
    exact = 3 * 2 * 4 * 2 * 8 * 8192  # layers, keys and values, bytes, heads, width, tokens
    assert some.choice.cache_bytes[0] == every.choice.cache_bytes[0] == exact
    assert every.choice.cache_bytes[1] < exact / 3 < 2 * exact / 3 < some.choice.cache_bytes[1]
    gains = [c.choice.times[-1]["exact_seconds"] / c.choice.times[-1]["seconds"] for c in (some, every)]  # type: ignore[union-attr]
    assert gains[0] < 1.6 < gains[1]  # a third of the layers cannot make it twice as fast
    revert(model)
    _, half = convert(model.to(torch.bfloat16), **call)
    assert half.choice is not None and half.choice.cache_bytes is not None
    assert half.choice.cache_bytes[0] == exact // 2


def test_held_out_batches_without_a_token_are_refused() -> None:
    batches = padded_batches(4)
    batches[3]["attention_mask"] = torch.zeros_like(batches[3]["attention_mask"])
    with pytest.raises(ValueError, match=r"held out .* padding only"):
        convert(encoder(), calibration=batches, candidates=[NARROW], error=0.5, length=8192)


def test_what_a_tokenizer_gives_is_a_batch(known_times: None) -> None:
    batches = [BatchEncoding(one) for one in padded_batches(4)]
    _, report = convert(encoder(), calibration=batches, candidates=[NARROW], error=0.9, length=8192)
    assert report.choice is not None


def test_a_decoder_beside_an_encoder_is_judged_on_its_own_tokens() -> None:
    inputs = make_batch("bart")
    inputs["decoder_input_ids"] = inputs["input_ids"]  # as long as the encoder's, which a mask could be taken for
    ((_, _, every),) = outputs(make("bart"), [inputs])
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 3:] = 0
    ((_, _, some),) = outputs(make("bart"), [{**inputs, "decoder_attention_mask": mask}])
    assert every is None and some is not None and torch.equal(some, mask.bool())


def test_as_many_labels_as_tokens_are_no_tokens() -> None:
    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, num_labels=48
    )
    model = BertForSequenceClassification(config)
    ((_, x, mask),) = outputs(model.eval(), padded_batches(1))
    assert x.shape == (3, 48) and mask is None


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_of_torchs_modules_is_not_judged(batch_first):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=batch_first)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    padding = torch.arange(5) >= torch.tensor([[5], [3], [4]])
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    kind, out, mask = outputs(model, [{"src": x, "src_key_padding_mask": padding}])[0]
    assert (kind, out.shape) == ("hidden", (3, 5, 8)) and torch.equal(mask, ~padding)
