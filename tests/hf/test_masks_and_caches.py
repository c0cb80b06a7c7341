"""Masks and caches that a converted layer must refuse, beside the ordinary ones that look much like them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from subquad.hf import RollbackCache, convert
from subquad.hf.conversion import masks
from subquad.hf.conversion.attending import ConvertedLayer
from subquad.hf.conversion.masks import absorbed, same_tokens, visible_after, visible_keys

from .zoo import Oracle, make

IMPLEMENTATIONS = ("sdpa", "eager")
IDS = torch.randint(3, 50, (3, 10), generator=torch.Generator().manual_seed(0))
LOWER = torch.ones(10, 10, dtype=torch.bool).tril()


def pair(name: str = "llama", implementation: str = "sdpa") -> tuple[Any, Any]:
    """A model and the same one converted to exact attention in the converted path."""
    exact = make(name)
    exact.set_attn_implementation(implementation)
    model = copy.deepcopy(exact)
    convert(model, Oracle)
    return exact, model


def as_given(visible: Tensor, implementation: str) -> Tensor:
    """A mask (B, L, S) in the form of an attention implementation."""
    visible = visible.unsqueeze(1)
    return visible if implementation == "sdpa" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)


def padding(side: str, length: int = 10) -> Tensor:
    """(3, length) int64: 0, 3 and 5 padded tokens."""
    place = torch.arange(length).expand(3, -1)
    count = torch.tensor([[0], [3], [5]])
    return (place >= count if side == "left" else place < length - count).long()


def close(found: Tensor, wanted: Tensor, real: Tensor | None = None) -> None:
    rows = slice(None) if real is None else real.bool()
    torch.testing.assert_close(found[rows], wanted[rows], rtol=1e-3, atol=1e-3)


# -- continuous batching, and masks of other keys than there are --


@pytest.mark.parametrize("option", ["cache", "block_table"])
def test_a_paged_cache_is_refused_by_name(option: str) -> None:
    _, model = pair()
    with pytest.raises(ValueError, match=r"continuous batching \(generate_batch\).*Call model.generate"):
        model(IDS, use_cache=False, **{option: object()})


@pytest.mark.skipif(not hasattr(tf, "ContinuousBatchingConfig"), reason="an earlier transformers")
def test_generate_batch_gives_no_text() -> None:
    _, model = pair()
    found = model.generate_batch(
        [IDS[0].tolist()],
        generation_config=tf.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1),
        continuous_batching_config=tf.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    )
    for one in found.values():
        assert not one.generated_tokens
        assert "continuous batching (generate_batch)" in one.error


@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (1, 1, 1, 3), (1, 1, 3, 4), (1, 7), (1, 3), (4,)])
def test_a_mask_of_other_queries_or_keys_is_refused(shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"layer 0 got a mask of shape .*expected \(batch, "):
        visible_keys(mask, 2, 4, True, "layer 0")
    with pytest.raises(ValueError, match=r"layer 0 got a mask of shape .*expected \(batch, "):
        visible_after(mask, 2, 2, None, True, "layer 0")


@pytest.mark.parametrize("options", [{"use_cache": False}, {"use_cache": True}])
def test_a_mask_that_is_no_tensor_is_refused_by_name(options: dict[str, bool]) -> None:
    _, model = pair()
    block = create_block_mask(lambda b, h, q, k: q >= k, 3, None, 10, 10, device="cpu")
    with pytest.raises(ValueError, match=r"mask of type BlockMask.*set_attn_implementation\('sdpa'\)"):
        model(IDS, attention_mask=block, **options)


# -- tokens that nobody sees --


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_a_token_that_nobody_sees_is_no_padding_if_it_sees_others(implementation: str, use_cache: bool) -> None:
    _, model = pair("llama", implementation)
    visible = LOWER.clone()
    visible[:, 9] = visible[9] = False
    visible[9, 3:6] = True
    mask = as_given(visible.expand(3, -1, -1), implementation)
    with pytest.raises(ValueError, match="an arbitrary 4D mask"):
        model(IDS, attention_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize("past", [range(2, 4), range(4)])
def test_nor_after_a_cache(past: range) -> None:
    """The last of the new tokens sees part of the past, or all of it and none of the new ones."""
    visible = LOWER[4:].clone()
    visible[:, 9] = visible[5] = False
    visible[5, list(past)] = True
    with pytest.raises(ValueError, match=r"an arbitrary 4D mask|hides tokens which its state has absorbed"):
        visible_after(visible[None, None], 6, 4, None, True, "layer 0")


def test_in_cross_attention_query_i_is_not_key_i() -> None:
    torch.manual_seed(0)
    exact = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    model, _ = convert(copy.deepcopy(exact), Oracle)
    q, k = torch.randn(2, 1, 12, 16)
    visible = torch.ones(12, 12, dtype=torch.bool)
    visible[:, 8:] = False
    close(model(q, k, k, attn_mask=~visible)[0], exact(q, k, k, attn_mask=~visible)[0])
    visible[8:, 3:] = False
    with pytest.raises(ValueError, match="an arbitrary 4D mask"):
        model(q, k, k, attn_mask=~visible)
    # Two documents, each with its own keys, of which some are hidden: no query is padding.
    blocks = torch.block_diag(torch.ones(6, 6), torch.ones(6, 6)).bool()
    close(model(q, k, k, attn_mask=~blocks)[0], exact(q, k, k, attn_mask=~blocks)[0])
    hidden = torch.arange(12).unsqueeze(0) >= 10
    given = {"attn_mask": ~blocks, "key_padding_mask": hidden}
    close(model(q, k, k, **given)[0], exact(q, k, k, **given)[0])
    blocks[:, 10:] = blocks[:, 6] = False
    close(model(q, k, k, attn_mask=~blocks)[0], exact(q, k, k, attn_mask=~blocks)[0])


def test_rows_that_see_nothing_are_padding_only_in_self_attention() -> None:
    real = padding("right")[1:2].bool()
    mask = (real.unsqueeze(1) & real.unsqueeze(2)).unsqueeze(1)
    found = visible_keys(mask, 10, 10, False, "layer 0", own=True)
    assert found.key_mask is not None and torch.equal(found.key_mask, real) and not found.is_causal
    with pytest.raises(ValueError, match="an arbitrary 4D mask"):
        visible_keys(mask, 10, 10, False, "layer 0")
    # A query that sees nothing while its key is seen is not padding.
    mask = torch.ones(1, 1, 10, 10, dtype=torch.bool)
    mask[..., 4, :] = False
    with pytest.raises(ValueError, match="an arbitrary 4D mask"):
        visible_keys(mask, 10, 10, False, "layer 0", own=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_padding_goes_on_working(name: str, side: str, implementation: str) -> None:
    """As transformers writes it, and as models do that hide the padding's own rows."""
    exact, model = pair(name, implementation)
    given = padding(side)
    real = given.bool()
    empty = real.unsqueeze(1) & real.unsqueeze(2) & (LOWER if name == "llama" else torch.ones_like(LOWER))
    for mask in (given, as_given(empty, implementation)):
        for options in ({"use_cache": False}, {"use_cache": True}) if name == "llama" else ({},):
            with torch.no_grad():
                wanted, found = (m(IDS, attention_mask=mask, **options).logits for m in (exact, model))
            close(found, wanted, real)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("joins", [False, True])
def test_packed_rows_with_padding_at_the_end(implementation: str, joins: bool) -> None:
    """The padding may count as part of the last sequence, which it then sees, or as one of its own."""
    exact, model = pair("llama", implementation)
    segments = (
        torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]) if joins else torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]])
    )
    real = (torch.arange(10) < 7).expand(3, -1)
    visible = (segments.unsqueeze(1) == segments.unsqueeze(2)) & LOWER & real.unsqueeze(1)
    with torch.no_grad():
        call = {"attention_mask": as_given(visible, implementation), "use_cache": False}
        wanted, found = (m(IDS, **call).logits for m in (exact, model))
    close(found, wanted, real)


# -- what a state has absorbed --


def continued(model: Any, first: Tensor, second: Tensor | None, new: int = 1) -> Tensor:
    """Logits of the tokens after the first eight, with a cache."""
    places = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        cache = model(IDS[:, :8], attention_mask=first, position_ids=places[:, :8], use_cache=True).past_key_values
        call = {"attention_mask": second, "position_ids": places[:, 8 : 8 + new], "past_key_values": cache}
        logits: Tensor = model(IDS[:, 8 : 8 + new], **call).logits
    return logits


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("new", [1, 2])
def test_a_later_mask_must_hide_the_same_tokens(implementation: str, new: int) -> None:
    exact, model = pair("llama", implementation)
    first, later = torch.ones(3, 8, dtype=torch.long), torch.ones(3, 8 + new, dtype=torch.long)
    first[:, :3] = 0
    with pytest.raises(ValueError, match=r"self_attn' got .*tokens that were padding before.*Pass the attention_mask"):
        continued(model, first, None, new)
    with pytest.raises(ValueError, match="tokens that were padding before"):
        continued(model, first, later, new)
    later[:, 4:7] = 0  # as many others
    with pytest.raises(ValueError, match="hides tokens which its state has absorbed"):
        continued(model, first, later, new)
    later[:, :8] = first
    close(continued(model, first, later, new), continued(exact, first, later, new))


def test_a_padding_mask_of_flash_attention_is_held_to_the_same() -> None:
    seen, mask = torch.tensor([[False, True]]), torch.tensor([[0, 1, 1, 1, 0]])
    found = visible_after(mask, 2, 3, seen, True, "layer 0")
    assert found.is_causal and found.key_mask is not None and found.key_mask.tolist() == [[True, False]]
    for other in (torch.tensor([[1, 1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 1, 0]]), None):
        with pytest.raises(ValueError, match=r"padding (than )?before"):
            visible_after(other, 2, 3, seen, True, "layer 0")


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_in_pieces(side: str) -> None:
    """Some pieces are nothing but padding in some rows."""
    exact, model = pair()
    mask = torch.cat([padding(side), torch.ones(3, 2, dtype=torch.long)], 1)
    ids = torch.cat([IDS, IDS[:, :2]], 1)
    caches: list[Any] = [None, None]
    for end, begin in ((4, 0), (8, 4), (10, 8), (11, 10), (12, 11)):
        outs = []
        for i, one in enumerate((exact, model)):
            call = {"past_key_values": caches[i], "position_ids": torch.arange(begin, end).unsqueeze(0)}
            with torch.no_grad():
                out = one(ids[:, begin:end], attention_mask=mask[:, :end], use_cache=True, **call)
            caches[i] = out.past_key_values
            outs.append(out.logits)
        close(outs[1], outs[0], mask[:, begin:end])


def test_rows_are_chosen_together_with_what_they_absorbed() -> None:
    exact, model = pair()
    mask, chosen = padding("left"), torch.tensor([2, 0])
    later = torch.cat([mask[chosen], torch.ones(2, 1, dtype=torch.long)], 1)
    outs = []
    for one in (exact, model):
        with torch.no_grad():
            cache = one(IDS, attention_mask=mask, use_cache=True).past_key_values
            cache.batch_select_indices(chosen)
            outs.append(one(IDS[:2, :1], attention_mask=later, past_key_values=cache).logits)
            # The row that is left has no padding, so that a call without a mask says the same.
            cache.batch_select_indices(torch.tensor([1]))
            outs.append(one(IDS[:1, :1], past_key_values=cache).logits)
    close(outs[2], outs[0])
    close(outs[3], outs[1])


def test_tokens_that_are_taken_back_are_no_longer_compared() -> None:
    model = make("llama")
    convert(model, "linear")
    mask = padding("left")
    ones = torch.ones(3, 1, dtype=torch.long)
    with torch.no_grad():
        cache = RollbackCache(config=model.config)
        model(IDS, attention_mask=mask, past_key_values=cache)
        wanted = model(
            IDS[:, :1], attention_mask=torch.cat([mask, ones], 1), past_key_values=copy.deepcopy(cache)
        ).logits
        after = torch.cat([mask, ones, 0 * ones], 1)  # the second one is hidden
        model(IDS[:, 3:5], attention_mask=after, past_key_values=cache)
        cache.crop(-2)
        close(model(IDS[:, :1], attention_mask=torch.cat([mask, ones], 1), past_key_values=cache).logits, wanted)


def test_a_state_keeps_no_more_than_the_mask_of_its_padding() -> None:
    _, model = pair()

    def kept(mask: Tensor) -> Tensor | None:
        with torch.no_grad():
            cache = model(IDS, attention_mask=mask, use_cache=True).past_key_values
            for _ in range(3):
                mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
                cache = model(IDS[:, :1], attention_mask=mask, past_key_values=cache).past_key_values
        layer = cache.layers[0]
        assert isinstance(layer, ConvertedLayer)
        return layer.absorbed

    assert kept(torch.ones(3, 10, dtype=torch.long)) is None
    found = kept(padding("left"))
    assert found is not None and torch.equal(found, padding("left")[:, :5].bool())


def test_what_is_absorbed_is_compared_by_token() -> None:
    one = absorbed(None, 2, torch.tensor([[True, False, True]]))
    assert one is not None and one.tolist() == [[True, True, True, False]]
    two = absorbed(one, 5, torch.tensor([[False]]))
    assert two is not None and two.tolist() == [[True, True, True, False, True, False]]
    assert absorbed(one, 5, None) is one
    assert same_tokens(one, torch.tensor([[True, True, True, False, True]]))
    assert not same_tokens(one, two) and not same_tokens(one, None) and not same_tokens(None, two)
    assert same_tokens(None, None) and same_tokens(None, torch.tensor([[True]]))


def test_the_padding_of_an_encoder_may_not_change_while_a_cache_goes_on() -> None:
    exact, model = pair("bart")
    mask = padding("right")
    other = mask.flip(1)  # as many others
    with torch.no_grad():
        outs, after = [], []
        for one in (exact, model):
            hidden = one.get_encoder()(IDS, attention_mask=mask)
            call = {"encoder_outputs": hidden, "use_cache": True}
            cache = one(attention_mask=mask, decoder_input_ids=IDS[:, :2], **call).past_key_values
            call.update(past_key_values=cache, decoder_input_ids=IDS[:, 2:3])
            outs.append(one(attention_mask=mask, **call).logits)
            after.append(call)
        close(outs[1], outs[0])
        for wrong in (other, None):
            with pytest.raises(ValueError, match="absorbed its keys under another mask"):
                model(
                    attention_mask=wrong, **{**after[1], "past_key_values": copy.deepcopy(after[1]["past_key_values"])}
                )


# -- what is read once, and what is not --


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_is_read_once_per_call_and_again_when_it_has_changed(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, model = pair("bert")
    read, true = [], masks._pattern
    monkeypatch.setattr(masks, "_pattern", lambda *given: read.append(1) or true(*given))
    with mode():
        mask = as_given(padding("right").bool()[:, None].expand(-1, 10, -1), "sdpa").clone()
        for count in (1, 2):
            real = mask[:, 0, 0].clone()
            close(model(IDS, attention_mask=mask).logits, exact(IDS, attention_mask=mask).logits, real)
            assert len(read) == count  # for three layers
            mask[:, :, :, 1] = False


def test_sequences_in_one_row_beside_a_cache_are_refused() -> None:
    _, model = pair()
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    call = {"position_ids": positions, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    with torch.no_grad():
        apart = [model(piece, use_cache=False).logits for piece in IDS[:1].split([4, 6], 1)]
        close(model(IDS[:1], **call, use_cache=False).logits, torch.cat(apart, 1))
        with pytest.raises(ValueError, match=r"several sequences in one row together with a cache; call with use_cac"):
            model(IDS[:1], **call)
        one = torch.tensor([0, 10], dtype=torch.int32)
        close(model(IDS[:1], cu_seq_lens_q=one, cu_seq_lens_k=one).logits, model(IDS[:1]).logits)
