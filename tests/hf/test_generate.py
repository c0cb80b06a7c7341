"""generate(): each step equals the whole forward, for every mechanism that scans; beams, padding, sampling, streams."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, set_seed

import subquad as sq
from subquad.mechanisms import MECHANISMS

VOCAB = 19


def choices(*, every_variant: bool, **facts: bool) -> list[dict[str, Any]]:
    """Mechanisms with these facts and their contract variants; of the performer's one per feature map."""
    made = []
    for name in sq.list_mechanisms(**facts):
        kinds = {}
        for variant in MECHANISMS[name].CONTRACT_VARIANTS:
            key = str((variant.get("features"), variant.get("center"))) if name == "performer" else str(variant)
            kinds.setdefault(key, variant)
        variants = list(kinds.values()) if every_variant else list(kinds.values())[:1]
        made += [{"mechanism": name, **variant} for variant in variants]
    return made


def label(choice: dict[str, Any]) -> str:
    rest = ",".join(f"{k}={v}" for k, v in choice.items() if k not in ("mechanism", "seed", "num_features"))
    return f"{choice['mechanism']}[{rest}]".replace(" ", "")


RECURRENT = choices(every_variant=True, causal=True, recurrent=True)
EACH = choices(every_variant=False, causal=True, recurrent=True)


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoder(mechanism: Any, **fields: Any) -> Any:
    torch.manual_seed(3)
    made = {"layers": 2, "heads": 2, "dim": 16, "vocab": VOCAB, "seed": 5, **fields}
    model = sq.hf.SubquadForCausalLM(sq.hf.SubquadConfig(mechanism=mechanism, **made)).eval()
    model.calibrate(tokens(2, 20, seed=99) % made["vocab"])
    return model


@pytest.mark.parametrize("mechanism", RECURRENT, ids=label)
def test_forward_equals_the_cache_in_any_split_and_the_steps_of_generate(mechanism):
    model, ids = decoder(mechanism), tokens(2, 13)
    if any(one.signed for one in model.model.stack.mechanisms()):
        model.double()  # a normaliser of signed weights can come close to 0 and multiplies any rounding
    with torch.no_grad():
        whole = model(ids).logits
        for sizes in ((13,), (1,) * 13, (5, 1, 7), (2, 9, 1, 1)):
            cache, parts, begin = None, [], 0
            for size in sizes:
                out = model(ids[:, begin : begin + size], past_key_values=cache, use_cache=True)
                cache, begin = out.past_key_values, begin + size
                parts.append(out.logits)
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-5)
            assert cache.get_seq_length() == 13
        made = model.generate(
            ids[:, :4], max_new_tokens=9, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
        again = model(made.sequences).logits[:, 3:-1].float()
    torch.testing.assert_close(torch.stack(made.logits, 1), again, atol=1e-5, rtol=1e-5)
    assert torch.equal(made.sequences[:, 4:], torch.stack(made.logits, 1).argmax(-1))
    assert isinstance(made.past_key_values, sq.hf.StateCache)
    assert made.past_key_values.get_seq_length() == 12


@pytest.mark.parametrize("mechanism", EACH, ids=label)
def test_a_batch_of_different_lengths_equals_each_alone(mechanism):
    model = decoder(mechanism)
    prompts = [tokens(1, n, seed=n) for n in (3, 11, 1, 7)]
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    alone = [model.generate(prompt, **options) for prompt in prompts]
    ids, mask = torch.full((4, 11), 2), torch.zeros(4, 11, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, -prompt.shape[1] :], mask[row, -prompt.shape[1] :] = prompt[0], 1
    for pieces in (None, 4):
        together = model.generate(ids, attention_mask=mask, prefill_chunk_size=pieces, **options)
        for row, one in enumerate(alone):
            assert torch.equal(together.sequences[row, 11:], one.sequences[0, prompts[row].shape[1] :])
            for step, logits in enumerate(one.logits):
                torch.testing.assert_close(together.logits[step][row], logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sq.list_mechanisms(causal=True, recurrent=False))
def test_mechanisms_that_cannot_scan_generate_without_a_cache(name):
    model, prompt = decoder({"mechanism": name, **MECHANISMS[name].CONTRACT_VARIANTS[0]}), tokens(1, 5)
    made = model.generate(prompt, max_new_tokens=6, do_sample=False)
    expected = prompt
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, expected)
    with pytest.raises(ValueError, match=f"{name}.*no recurrent form"):
        model(prompt, use_cache=True)


@pytest.mark.parametrize("mechanism", choices(every_variant=False, causal=True, constant_memory=True), ids=label)
def test_the_cache_does_not_grow_with_the_context(mechanism):
    model = decoder(mechanism)
    sizes = []
    for length in (5, 400):
        cache = model(tokens(1, length), use_cache=True, logits_to_keep=1).past_key_values
        model(tokens(1, 1), past_key_values=cache)
        assert cache.get_seq_length() == length + 1
        sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


# -- beams ----------------------------------------------------------------------------------------------------------


def log_probability(model: Any, prompt: torch.Tensor, sequence: tuple[int, ...]) -> float:
    ids = torch.cat([prompt, torch.tensor([sequence])], 1)
    log_probs = model(ids).logits.log_softmax(-1)[0, prompt.shape[1] - 1 : -1]
    return float(log_probs.gather(-1, torch.tensor(sequence)[:, None]).sum())


@pytest.mark.parametrize("mechanism", ["linear", "performer", "hybrid", "local", "softmax"])
def test_beam_search_equals_brute_force(mechanism):
    model, prompt = decoder(mechanism, vocab=4), tokens(1, 6) % 4
    with torch.no_grad():
        scores = {s: log_probability(model, prompt, s) for s in itertools.product(range(4), repeat=3)}
        # As many beams as there are sequences of two tokens: nothing is ever dropped that could win.
        made = model.generate(
            prompt, max_new_tokens=3, num_beams=16, num_return_sequences=5, do_sample=False, length_penalty=0.0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:5]
    assert [tuple(row) for row in made.sequences[:, 6:].tolist()] == best
    torch.testing.assert_close(made.sequences_scores, torch.tensor([scores[s] for s in best]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mechanism", ["linear", "performer", "hybrid", "local"])
def test_narrow_beams_equal_a_beam_search_without_a_cache(mechanism):
    model, prompt = decoder(mechanism), tokens(2, 5)
    options = {"max_new_tokens": 7, "num_beams": 3, "do_sample": False, "num_return_sequences": 2}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


# -- sampling and streaming -----------------------------------------------------------------------------------------


def test_sampling_is_reproducible():
    model, prompt = decoder("performer"), tokens(2, 5)
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.5, "top_k": 10}
    made = []
    for seed in (1, 1, 2):
        set_seed(seed)
        made.append(model.generate(prompt, **options))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def test_sampling_frequencies_are_the_models_probabilities():
    model, prompt = decoder("linear", vocab=4), torch.tensor([[1, 3, 2]])
    set_seed(0)
    drawn = model.generate(prompt.expand(4000, -1), max_new_tokens=1, do_sample=True, top_k=0)[:, -1]
    share = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(share, model(prompt).logits[0, -1].softmax(-1), atol=0.035, rtol=0)


def test_streaming_gives_the_same_text():
    torch.manual_seed(0)
    config = sq.hf.SubquadConfig(layers=1, heads=2, dim=16, vocab=256, mechanism="linear", seed=0)
    model, tokenizer = sq.hf.SubquadForCausalLM(config).eval(), sq.hf.ByteTokenizer()
    encoded = tokenizer("a prompt", return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    made = model.generate(**encoded, max_new_tokens=30, do_sample=False, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(made[0, 8:])


def test_a_prompt_can_be_cached_and_forked():
    model, prompt = decoder("performer"), tokens(1, 9)
    prefix = model(prompt, use_cache=True).past_key_values
    for end in (tokens(1, 2, seed=7), tokens(1, 3, seed=8)):
        ids = torch.cat([prompt, end], 1)
        expected = model.generate(ids, max_new_tokens=5, do_sample=False)
        made = model.generate(ids, past_key_values=copy.deepcopy(prefix), max_new_tokens=5, do_sample=False)
        assert torch.equal(made, expected)
    assert prefix.get_seq_length() == 9


# -- what cannot be done is refused ---------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused():
    model = decoder("linear")
    with pytest.raises(ValueError, match="input_ids is empty"):
        model(torch.zeros(1, 0, dtype=torch.int64))
    with pytest.raises(ValueError, match="the prompt of at least one sequence is empty"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=3)
    with pytest.raises(ValueError, match="the prompt of at least one sequence is empty"):
        model.generate(tokens(2, 2), attention_mask=torch.tensor([[1, 1], [0, 0]]), max_new_tokens=3)


def test_padding_on_the_right_is_refused():
    model = decoder("linear")
    prompt, mask = torch.tensor([[1, 2, 0], [1, 2, 3]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    with pytest.raises(ValueError, match=r"hides the last token of at least one prompt.*padding_side = 'left'"):
        model.generate(prompt, attention_mask=mask, max_new_tokens=1)
    left = model.generate(prompt.roll(1, 1), attention_mask=mask.roll(1, 1), max_new_tokens=1)
    assert left.shape == (2, 4)


def test_prompts_longer_than_learned_positions_are_refused():
    model = decoder("linear", positions="learned", max_positions=20)
    assert model.generate(tokens(1, 15), max_new_tokens=5, do_sample=False).shape == (1, 20)
    with pytest.raises(ValueError, match=r"21 positions.*max_length=20"):
        model.generate(tokens(1, 21), max_new_tokens=1)
    with pytest.raises(ValueError, match="max_length=20"):
        model.generate(tokens(1, 19), max_new_tokens=5, do_sample=False)


def test_a_state_of_another_model_is_refused():
    model, other = decoder("linear"), decoder("linear", seed=6)
    cache = other(tokens(1, 5), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"states were made by .* this model is"):
        model.generate(tokens(1, 6), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match="states hold 1 sequences, the tokens given 2"):
        other(tokens(2, 1), past_key_values=cache)


def test_caches_of_keys_are_refused():
    from transformers import DynamicCache

    model = decoder("linear")
    with pytest.raises(TypeError, match=r"StateCache.*DynamicCache, which holds keys"):
        model(tokens(1, 3), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation='static' stores keys"):
        model.generate(tokens(1, 3), cache_implementation="static", max_new_tokens=2)


SOME = [
    "softmax",
    {"mechanism": "multipole", "chunk": 8, "clusters": 3, "exact_keys": 4, "seed": 0},
    {"mechanism": "multipole", "chunk": 8, "clusters": 3, "memory": "constant", "limit": 6, "seed": 0},
    {"mechanism": "performer", "num_features": 16, "seed": 0},
    {"mechanism": "hybrid", "window": 4, "sinks": 1, "far": "linear"},
]


@pytest.mark.parametrize("mechanism", SOME, ids=lambda x: x if isinstance(x, str) else label(x))
def test_assisted_decoding_gives_the_greedy_text(mechanism):
    """Guesses of another model or from the prompt are taken back where they are wrong."""
    model, other = decoder(mechanism), decoder("linear", layers=1, seed=9)
    taken = []
    for ids in (tokens(1, 9), tokens(1, 5).repeat(1, 4)):
        greedy = {"max_new_tokens": 25, "do_sample": False}
        want = model.generate(ids, **greedy)
        for assisted in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": other}):
            cache = sq.hf.StateCache(2)
            crop = cache.crop

            def counted(n, crop=crop):
                taken.append(n)
                crop(n)

            cache.crop = counted
            assert torch.equal(model.generate(ids, **greedy, **assisted, past_key_values=cache), want)
            assert torch.equal(model.generate(ids, **greedy, **assisted), want)
    assert min(taken) < 0  # some guesses were wrong


def test_assisted_decoding_needs_a_mechanism_with_a_state():
    model = decoder("sparse")
    with pytest.raises(ValueError, match="the mechanism of this model has none"):
        model.generate(tokens(1, 9), prompt_lookup_num_tokens=2, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("mechanism", ["softmax", "linear"])
def test_assisted_decoding_of_a_converted_model(mechanism):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCAB)).eval()
    sq.hf.convert(model, mechanism, check=False)
    ids, greedy = tokens(1, 5).repeat(1, 3), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **greedy)
    cache = sq.hf.RollbackCache(config=model.config)
    got = model.generate(ids, **greedy, prompt_lookup_num_tokens=3, past_key_values=cache)
    assert torch.equal(got, want)
    assert cache.is_croppable
