"""The model classes as transformers' citizens: inputs, losses, packing, checkpointing, compile, pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    pipeline,
)

import subquad as sq
from subquad.hf import (
    ByteTokenizer,
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForCTC,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
    SubquadModel,
)
from subquad.nn.pooling import pool

TINY: dict[str, Any] = {"layers": 2, "heads": 2, "dim": 16, "mechanism": "performer", "seed": 0}
VOCAB = 19


def config(kind: str = "encoder", **fields: Any) -> SubquadConfig:
    return SubquadConfig(**{**TINY, "kind": kind, "vocab": VOCAB, **fields})


def frames(**fields: Any) -> SubquadConfig:
    return SubquadConfig(**{**TINY, "kind": "encoder", "frame_width": 5, "num_labels": 7, **fields})


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


# -- one family -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto", "kind", "made"),
    [
        (AutoModel, SubquadModel, config()),
        (AutoModelForCausalLM, SubquadForCausalLM, config("decoder")),
        (AutoModelForMaskedLM, SubquadForMaskedLM, config()),
        (AutoModelForSequenceClassification, SubquadForSequenceClassification, config()),
        (AutoModelForTokenClassification, SubquadForTokenClassification, config()),
        (AutoModelForCTC, SubquadForCTC, frames()),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_auto_classes_know_the_models(auto, kind, made):
    assert type(auto.from_config(made)) is kind
    assert isinstance(AutoConfig.for_model("subquad", **TINY, vocab=5), SubquadConfig)


def test_the_model_is_the_one_of_nn():
    inner = sq.nn.TransformerDecoder(**TINY, vocab=VOCAB).eval()
    outer = SubquadForCausalLM.from_nn(inner)
    ids, mask = tokens(2, 9), torch.tensor([[1] * 6 + [0] * 3, [1] * 9])
    assert torch.equal(outer(ids).logits, inner(ids))
    assert torch.equal(outer(ids, attention_mask=mask, use_cache=False).logits, inner(ids, key_mask=mask.bool()))
    assert outer.config.architecture() == inner.config
    encoder = sq.nn.TransformerEncoder(**TINY, vocab=VOCAB).eval()
    assert torch.equal(SubquadModel.from_nn(encoder)(ids).last_hidden_state, encoder(ids))


def test_the_config_says_what_a_call_does_not():
    model = SubquadForCausalLM(config(mechanism="linear", kind="decoder")).eval()
    ids, mask = tokens(2, 9), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    assert model(ids).past_key_values is not None and model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None
    model.config.output_hidden_states = True
    states = [model(ids, attention_mask=mask, use_cache=cached).hidden_states for cached in (False, True)]
    assert len(states[0]) == len(states[1]) == model.config.layers + 1
    for plain, cached in zip(*states, strict=True):
        torch.testing.assert_close(plain[mask.bool()], cached[mask.bool()], atol=1e-5, rtol=1e-5)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(states[0][0][mask.bool()], embedded[mask.bool()])  # in the caller's order, padding or not
    model.config.return_dict = False
    assert isinstance(model(ids), tuple) and isinstance(model.model(ids), tuple)
    assert model(ids, return_dict=True).logits.shape == (2, 9, VOCAB)


@pytest.mark.parametrize("name", sq.list_mechanisms())
def test_every_mechanism_works_in_an_encoder_and_ignores_padding(name):
    from subquad.mechanisms import MECHANISMS

    options = {"mechanism": name, **MECHANISMS[name].CONTRACT_VARIANTS[0]}
    model = SubquadForTokenClassification(config(mechanism=options, num_labels=3)).eval()
    ids = tokens(2, 12)
    model.calibrate(ids)
    padded = torch.cat([ids, tokens(2, 4, seed=5)], 1)
    mask = torch.tensor([[1] * 12 + [0] * 4] * 2)
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, :12], model(ids).logits, atol=1e-5, rtol=1e-5
    )


def test_inputs_embeds_hidden_states_tuples_and_packing():
    model = SubquadForCausalLM(config("decoder")).eval()
    ids = tokens(2, 9)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), output_hidden_states=True)
    plain = model(ids)
    assert torch.equal(embedded.logits, plain.logits)
    assert len(embedded.hidden_states) == 3
    assert torch.equal(model.model.stack.logits(embedded.hidden_states[-1]), plain.logits)
    assert torch.equal(embedded.hidden_states[0], model.get_input_embeddings()(ids))
    assert torch.equal(model(ids, return_dict=False)[0], plain.logits)
    assert torch.equal(model(ids, logits_to_keep=2).logits, plain.logits[:, -2:])
    packed = model(ids.reshape(1, 18), segment_ids=torch.tensor([[0] * 9 + [1] * 9])).logits
    torch.testing.assert_close(packed.reshape(2, 9, -1), plain.logits, atol=1e-6, rtol=1e-5)


# -- losses ---------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_their_definitions():
    ids, labels = tokens(2, 9), tokens(2, 9, seed=2)
    labels[0, :4] = -100
    causal = SubquadForCausalLM(config("decoder"))
    out = causal(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(out.loss, expected)
    for model in (SubquadForMaskedLM(config()), SubquadForTokenClassification(config(num_labels=VOCAB))):
        out = model(ids, labels=labels)
        torch.testing.assert_close(out.loss, F.cross_entropy(out.logits.reshape(-1, VOCAB), labels.reshape(-1)))
    classes = torch.tensor([2, 0])
    out = SubquadForSequenceClassification(config(num_labels=3))(ids, labels=classes)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, classes))
    out = SubquadForSequenceClassification(config(num_labels=1))(ids, labels=torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(out.loss, F.mse_loss(out.logits.squeeze(), torch.tensor([0.5, 2.0])))


def test_nothing_is_predicted_across_segments():
    model, ids = SubquadForCausalLM(config("decoder")).eval(), tokens(2, 9)
    alone = model(ids, labels=ids).loss
    packed, segments = ids.reshape(1, 18), torch.tensor([[0] * 9 + [1] * 9])
    torch.testing.assert_close(model(packed, labels=packed, segment_ids=segments).loss, alone)
    # Padding before, between and behind, whatever its segment is called.
    for gap in (0, 1, 2):
        blank = tokens(1, 3, seed=5)
        padded = torch.cat([blank, ids[:1], blank, ids[1:], blank], 1)
        segments = torch.tensor([[0] * 12 + [gap] * 3 + [1] * 12])
        mask = torch.tensor([[0] * 3 + [1] * 9 + [0] * 3 + [1] * 9 + [0] * 3])
        labels = padded.masked_fill(mask == 0, -100)
        out = model(padded, attention_mask=mask, segment_ids=segments, labels=labels)
        torch.testing.assert_close(out.loss, alone)


def test_ctc_sums_over_all_alignments():
    torch.manual_seed(0)
    model = SubquadForCTC(frames(num_labels=3)).eval()
    x, labels = torch.randn(1, 4, 5), torch.tensor([[1, 2, -100]])
    out = model(x, labels=labels)
    probabilities = out.logits[0].softmax(-1)
    total = torch.zeros(())
    for path in torch.cartesian_prod(*[torch.arange(3)] * 4):
        collapsed = [int(a) for a, b in zip(path, [None, *path[:-1].tolist()], strict=True) if int(a) != b and a != 0]
        if collapsed == [1, 2]:
            total = total + probabilities[torch.arange(4), path].prod()
    torch.testing.assert_close(out.loss, -total.log() / 2)


def test_ctc_leaves_padding_of_labels_out_wherever_it_stands():
    model, x = SubquadForCTC(frames()).eval(), torch.randn(2, 9, 5)
    rows = ([3, 4, -100], [-100, 3, 4], [3, -100, 4])
    losses = [model(x, labels=torch.tensor([row, [1, 2, 5]])).loss for row in rows]
    assert losses[0] == losses[1] == losses[2]
    alone = torch.stack(
        [model(x[:1], labels=torch.tensor([[3, 4]])).loss, model(x[1:], labels=torch.tensor([[1, 2, 5]])).loss]
    )
    torch.testing.assert_close(losses[0], alone.mean())
    assert model(x, labels=torch.full((2, 3), -100)).loss.isfinite()


@pytest.mark.parametrize("stack", [1, 3])
def test_ctc_of_a_padded_batch_equals_each_alone(stack):
    torch.manual_seed(0)
    model = SubquadForCTC(frames(frame_stack=stack)).eval()
    lengths, labels = (14, 9, 12), torch.tensor([[1, 2, 3], [4, -100, -100], [5, 6, -100]])
    x = torch.randn(3, 14, 5)
    mask = torch.arange(14) < torch.tensor(lengths)[:, None]
    together = model(x, attention_mask=mask.long(), labels=labels)
    losses = []
    for row, length in enumerate(lengths):
        alone = model(x[row : row + 1, :length], labels=labels[row : row + 1])
        kept = alone.logits.shape[1]
        torch.testing.assert_close(together.logits[row, :kept], alone.logits[0], atol=1e-5, rtol=1e-5)
        losses.append(alone.loss)
    torch.testing.assert_close(together.loss, torch.stack(losses).mean())


@pytest.mark.parametrize("how", ["mean", "first", "last", None])
def test_pooling_sees_real_tokens_only(how):
    for kind in ("encoder", "decoder"):
        model = SubquadForSequenceClassification(config(kind, pooling=how, num_labels=3)).eval()
        ids = tokens(1, 6)
        left, right = torch.cat([tokens(1, 3), ids], 1), torch.cat([ids, tokens(1, 3)], 1)
        alone = model(ids).logits
        for padded, mask in ((left, [[0] * 3 + [1] * 6]), (right, [[1] * 6 + [0] * 3])):
            torch.testing.assert_close(
                model(padded, attention_mask=torch.tensor(mask)).logits, alone, atol=1e-5, rtol=1e-5
            )


def test_means_of_many_tokens_in_half_precision():
    mask = torch.arange(20001) < 20000
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        pooled = pool(torch.full((1, 20001, 2), 8.0, dtype=dtype), mask[None], "mean")
        assert torch.equal(pooled, torch.full((1, 2), 8.0, dtype=dtype))


# -- training and compiling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reversible", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reversible):
    model = SubquadForCausalLM(config("decoder", dropout=0.1, reversible=reversible)).train()
    ids, grads = tokens(2, 9), []
    for enabled in (False, True):
        (model.gradient_checkpointing_enable if enabled else model.gradient_checkpointing_disable)()
        assert model.is_gradient_checkpointing is enabled
        model.zero_grad()
        torch.manual_seed(7)
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, recomputed)


SLOW_TO_TRACE = [pytest.param(name, marks=pytest.mark.deep) for name in ("linear", "hybrid", "local", "softmax")]


@pytest.mark.parametrize("mechanism", ["performer", *SLOW_TO_TRACE])
def test_the_whole_model_compiles_in_one_graph(mechanism):
    model = SubquadForCausalLM(config("decoder", layers=1, mechanism=mechanism)).eval()
    ids = tokens(2, 12)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    grad = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for mine, plain in zip(grad, (p.grad for p in model.parameters()), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["performer", "linear", "hybrid", "local", "softmax", "taylor"])
def test_bfloat16_autocast_and_weights(mechanism):
    model, ids = SubquadForCausalLM(config("decoder", mechanism=mechanism)), tokens(2, 40)
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, labels=ids)
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    # Eight bits of mantissa through two layers.
    assert (out.logits.float() - exact).abs().max() < 0.05 * exact.abs().max()
    cast = model.to(torch.bfloat16).eval()
    made = cast.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    assert made.shape == (2, 9)
    assert all(b.dtype != torch.bfloat16 for b in cast.buffers())


def test_resized_embeddings_reach_the_output_layer():
    model = SubquadForCausalLM(config("decoder")).eval()
    before = model(tokens(1, 5)).logits
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    ids = torch.full((1, 5), VOCAB + 3)
    assert model(ids).logits.shape == (1, 5, VOCAB + 4)
    assert torch.equal(model(tokens(1, 5)).logits[..., :VOCAB], before)
    assert model.config.vocab_size == VOCAB + 4


# -- pipelines ------------------------------------------------------------------------------------------------------


def test_pipelines():
    byte = {**TINY, "vocab": 257}
    tokenizer = ByteTokenizer(mask_token="<mask>")
    causal = SubquadForCausalLM(SubquadConfig(**byte)).eval()
    text = pipeline("text-generation", model=causal, tokenizer=tokenizer)
    prompts = ["hello", "a longer prompt"]
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    together = text(prompts, batch_size=2, **options)
    assert together == [text([one], **options)[0] for one in prompts]
    assert len(text("hello", num_beams=2, **options)) == 1

    encoder = {**byte, "kind": "encoder"}
    fill = pipeline("fill-mask", model=SubquadForMaskedLM(SubquadConfig(**encoder)).eval(), tokenizer=tokenizer)
    found = fill("hel<mask>o", top_k=2)
    assert len(found) == 2
    assert found[0]["score"] >= found[1]["score"]

    labels = {0: "bad", 1: "good"}
    model = SubquadForSequenceClassification(SubquadConfig(**encoder, id2label=labels, label2id={"bad": 0, "good": 1}))
    kinds = pipeline("text-classification", model=model.eval(), tokenizer=tokenizer)
    assert {one["label"] for one in kinds(["nice", "a much longer text"], batch_size=2)} <= {"bad", "good"}


# -- what cannot be done is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"position_ids": torch.arange(5)[None]}, "position_ids is not taken.*number of real tokens"),
        ({"output_attentions": True}, "output_attentions=True is not possible: mechanisms need not form"),
        ({"token_type_ids": torch.ones(1, 5, dtype=torch.int64)}, "forward.. got token_type_ids="),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, r"attention_mask must have shape \(batch, length\)"),
        ({"attention_mask": torch.ones(1, 4)}, r"attention_mask must have shape .*\(1, 5\), got shape \(1, 4\)"),
        ({"inputs_embeds": torch.ones(1, 5, 16)}, "exactly one of input_ids, inputs_embeds"),
        ({"segment_ids": torch.zeros(1, 5, dtype=torch.int64), "use_cache": True}, "segment_ids cannot be combined"),
        ({"head_mask": torch.ones(2)}, "forward.. got head_mask="),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_calls(call, message):
    model = SubquadForCausalLM(config("decoder"))
    with pytest.raises((ValueError, TypeError), match=message):
        model(tokens(1, 5), **call)


def test_wrong_kinds():
    with pytest.raises(ValueError, match="SubquadForCausalLM needs kind='decoder'"):
        SubquadForCausalLM(config())
    with pytest.raises(ValueError, match="SubquadForMaskedLM needs a config of kind='encoder'"):
        SubquadForMaskedLM(config("decoder"))
    with pytest.raises(ValueError, match="SubquadForCTC needs frame_width="):
        SubquadForCTC(config())
    with pytest.raises(ValueError, match="takes input_features"):
        SubquadForCTC(frames()).model(tokens(1, 4))
    with pytest.raises(ValueError, match="without the blank 0"):
        SubquadForCTC(frames())(torch.randn(1, 6, 5), labels=torch.tensor([[0, 1]]))
    with pytest.raises(ValueError, match="an encoder has no next token"):
        SubquadModel(config())(tokens(1, 4), use_cache=True)
    with pytest.raises(ValueError, match="linformer cannot be causal"):
        SubquadForCausalLM(config("decoder", mechanism={"mechanism": "linformer", "length": 8, "rank": 2}))
