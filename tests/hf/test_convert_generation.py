"""generate() of converted decoders: the cache of constant size gives what recomputing everything gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from subquad.hf import convert
from subquad.hf.conversion.attending import ConvertedLayer, CrossLayer

from .zoo import DECODERS, SEQ2SEQ, Oracle, make, text

FAR = {"mechanism": "performer", "num_features": 16, "seed": 1}
MECHANISMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "performer": ("performer", {"num_features": 32, "seed": 0}),
    "linear": ("linear", {}),
    "hybrid": ("hybrid", {"window": 3, "sinks": 1, "far": FAR}),
    "local": ("local", {"window": 4, "global_tokens": 1}),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beam": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
}


def generated(model: Any, mode: str, tokens: int = 10, **options: Any) -> Any:
    torch.manual_seed(0)
    return model.generate(
        **text("left"), **MODES[mode], max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip


def layers_of(cache: Any) -> list[Any]:
    if hasattr(cache, "self_attention_cache"):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_softmax_generates_the_same_tokens(name: str, mode: str) -> None:
    model = make(name)
    wanted = generated(model, mode)
    convert(model, "softmax")
    found = generated(model, mode)
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, wanted.logits, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])
def test_the_state_path_generates_what_the_exact_model_generates(name: str, mode: str) -> None:
    model = make(name)
    wanted = generated(model, mode)
    convert(model, Oracle)
    found = generated(model, mode)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", [*DECODERS, "bart"])
def test_the_cache_changes_nothing(name: str, mechanism: str) -> None:
    chosen, options = MECHANISMS[mechanism]
    model = make(name)
    convert(model, chosen, **options)
    for mode in ("greedy", "beam"):
        cached, recomputed = generated(model, mode, 6), generated(model, mode, 6, use_cache=False)
        torch.testing.assert_close(torch.stack(cached.logits), torch.stack(recomputed.logits), rtol=1e-3, atol=1e-3)
        assert torch.equal(cached.sequences, recomputed.sequences)


@pytest.mark.parametrize("name", [*DECODERS, "bart"])
def test_the_cache_does_not_grow(name: str) -> None:
    model = make(name)
    convert(model, "performer", num_features=16, seed=0)

    def size(tokens: int) -> int:
        cache = generated(model, "greedy", tokens).past_key_values
        assert {type(layer) for layer in layers_of(cache)} <= {ConvertedLayer, CrossLayer}
        states = [layer.state for layer in layers_of(cache)]
        return sum(x.numel() for state in states for x in torch.utils._pytree.tree_leaves(state))

    assert size(3) == size(30) > 0


@pytest.mark.parametrize("layers", [[0], [1], [0, 2]])
@pytest.mark.parametrize("name", DECODERS)
def test_exact_and_converted_layers_share_one_cache(name: str, layers: list[int]) -> None:
    model = make(name)
    wanted = generated(model, "greedy")
    convert(model, Oracle, layers=layers)
    found = generated(model, "greedy")
    kinds = [isinstance(layer, ConvertedLayer) for layer in found.past_key_values.layers]
    assert kinds == [index in layers for index in range(3)]
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)


def test_full_layers_of_a_model_with_sliding_windows() -> None:
    model = make("gemma3")
    wanted = generated(model, "greedy")
    convert(model, Oracle)
    found = generated(model, "greedy")
    assert [type(layer).__name__ for layer in found.past_key_values.layers][1] == "ConvertedLayer"
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_may_come_in_pieces(name: str) -> None:
    model = make(name)
    convert(model, "hybrid", window=3, sinks=1, far=FAR)
    ids = text()["input_ids"][:1]
    with torch.no_grad():
        whole = model(ids).logits
        cache, pieces = DynamicCache(config=model.config), []
        for piece in ids.split([5, 1, 6], 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 12


def test_caches_that_a_state_cannot_continue_are_refused() -> None:
    exact, model = make("llama"), make("llama")
    convert(model, "linear")
    ids = text()["input_ids"]
    with torch.no_grad():
        cache = exact(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="holds the keys of 12 tokens from an exact model"):
            model(ids, past_key_values=cache)
        static = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(ValueError, match="StaticLayer; leave cache_implementation at its default"):
            model(ids, past_key_values=static)


def test_a_mechanism_without_a_recurrent_form_generates_without_a_cache_only() -> None:
    model = make("llama")
    convert(model, "lsh", buckets=4, rounds=1, seed=0)
    assert torch.isfinite(model(text()["input_ids"]).logits).all()
    assert generated(model, "greedy", 3, use_cache=False).sequences.shape == (3, 15)
    with pytest.raises(ValueError, match=r"no recurrent form.*use_cache=False"):
        generated(model, "greedy", 3)
