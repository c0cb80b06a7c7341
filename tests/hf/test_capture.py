"""What capture records is what the attention layers see, and the model does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from subquad.hf import capture, convert

from .zoo import FAMILIES, batch, make, real_logits


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_attention_reproduces_the_layer(name: str) -> None:
    """Exact attention over the recorded q, k, v is what the module computes (its output projection aside)."""
    model = make(name)
    names, before = list(model.state_dict()), real_logits(model, batch(name))
    samples = capture(model, [batch(name), batch(name, seed=1)])
    assert bool(samples) == (name != "mistral")
    for sample in samples:
        assert len(sample) == (6 if name == "albert" else 2)
        q, k, v, mask = next(sample.calls())
        assert q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] == 8 and v.shape[:3] == k.shape[:3]
        assert (q.shape[1], k.shape[1]) == ((4, 2) if name in ("llama", "gemma3") else (4, 4))
        assert sample.is_causal == (name in ("gpt2", "llama", "gemma3") or (name == "bart" and sample.layer in (2, 4)))
        assert mask is None or mask.shape == (k.shape[0], k.shape[2])
        assert sample.cross == (q.shape[2] != k.shape[2])
    assert list(model.state_dict()) == names
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(real_logits(model, batch(name)), before)


def test_values_and_masks_are_those_of_the_layer() -> None:
    model = make("bert")
    (sample,) = capture(model, [batch("bert", "left")], layers=[1])
    seen = {}
    hook = model.bert.encoder.layer[1].attention.self.register_forward_hook(
        lambda module, args, kwargs, out: seen.update(x=args[0] if args else kwargs["hidden_states"], out=out[0]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model(**batch("bert", "left"))
    hook.remove()
    layer = model.bert.encoder.layer[1].attention.self
    q = layer.query(seen["x"]).unflatten(-1, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(sample.q[0], q, rtol=1e-5, atol=1e-5)
    mask = batch("bert", "left")["attention_mask"].bool()
    assert sample.key_mask[0] is not None and torch.equal(sample.key_mask[0], mask)
    out = torch.nn.functional.scaled_dot_product_attention(
        sample.q[0], sample.k[0], sample.v[0], attn_mask=mask[:, None, None], scale=sample.scale
    )
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), seen["out"], rtol=1e-4, atol=1e-5)
    assert sample.tokens == 23


def test_max_tokens_stops_early() -> None:
    model = make("bert")
    many = [batch("bert", seed=seed) for seed in range(5)]
    taken = []

    def batches() -> object:
        for one in many:
            taken.append(one)
            yield one

    samples = capture(model, batches(), max_tokens=30)  # type: ignore[arg-type]
    assert len(taken) == 2 and [sample.tokens for sample in samples] == [46, 46, 46]


def test_training_mode_comes_back() -> None:
    model = make("bert").train()
    model.bert.encoder.layer[0].eval()
    modes = [module.training for module in model.modules()]
    assert capture(model, [batch("bert")])[0].q[0].requires_grad is False
    assert [module.training for module in model.modules()] == modes


def test_a_converted_model_can_be_watched_too() -> None:
    model = make("bert")
    exact = capture(model, [batch("bert")])
    convert(model, "linear")
    converted = capture(model, [batch("bert")])
    assert torch.equal(exact[0].q[0], converted[0].q[0])
    assert not torch.equal(exact[1].q[0], converted[1].q[0])
    assert model.config._attn_implementation == "sdpa"


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = make("bert")
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        capture(model, [{"input_idz": torch.zeros(1, 3)}])
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="no attention layer that is known"):
        capture(nn.Linear(2, 2), [])
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        capture(model, [], max_tokens=0)
    with pytest.raises(ValueError, match="got a sliding window"):
        capture(make("mistral"), [batch("mistral")], layers=[0])
