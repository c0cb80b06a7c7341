"""The cache by itself: any state, reordered, repeated, reset, cropped; in a model that keeps keys elsewhere."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import subquad as sq
from subquad.hf.cache import RollbackCache, StateCache, StateLayer
from subquad.mechanisms import MECHANISMS

NAMES = sq.list_mechanisms(causal=True, recurrent=True)


def mechanism(name: str):
    made = sq.create(name, head_dim=8, heads=2, **MECHANISMS[name].CONTRACT_VARIANTS[0])
    x = torch.randn(2, 2, 20, 8)
    if made.uses_calibration:
        made.calibrate(x, x)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_update_and_advance_continue_any_mechanism(name):
    attn, (q, k, v) = mechanism(name), torch.randn(3, 3, 2, 12, 8)
    layer, parts = StateLayer(), []
    for piece in (slice(0, 5), slice(5, 6), slice(6, 12)):
        assert layer.get_mask_sizes(piece.stop - piece.start) == (piece.stop - piece.start, piece.start)
        new_k, new_v = layer.update(k[:, :, piece], v[:, :, piece])
        assert new_k.shape[2] == piece.stop - piece.start  # the new tokens alone
        parts.append(layer.advance(attn, q[:, :, piece], new_k, new_v))
    torch.testing.assert_close(torch.cat(parts, 2), attn(q, k, v, is_causal=True), atol=1e-5, rtol=1e-5)
    assert (layer.get_seq_length(), layer.get_max_length(), layer.batch_size) == (12, -1, 3)


@pytest.mark.parametrize("name", NAMES)
def test_reorder_repeat_select_and_reset(name):
    attn, (q, k, v) = mechanism(name), torch.randn(3, 2, 2, 6, 8)
    more_q, more_k, more_v = torch.randn(3, 2, 2, 1, 8)

    def filled() -> StateLayer:
        layer = StateLayer()
        layer.advance(attn, q, *layer.update(k, v))
        return layer

    def following(layer: StateLayer, rows: torch.Tensor) -> torch.Tensor:
        return layer.advance(attn, more_q[rows], *layer.update(more_k[rows], more_v[rows]))

    plain = following(filled(), torch.tensor([0, 1]))
    for change, rows in (
        (lambda layer: layer.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
    ):
        layer = filled()
        change(layer)
        torch.testing.assert_close(following(layer, torch.tensor(rows)), plain[rows], atol=1e-6, rtol=1e-6)
    layer = filled()
    layer.reset()
    assert (layer.state, layer.get_seq_length()) == (None, 0)
    assert not hasattr(layer, "batch_size")
    layer.offload()  # nothing to move
    layer = filled()
    layer.offload()
    layer.prefetch()
    torch.testing.assert_close(following(layer, torch.tensor([0, 1])), plain)


def test_a_refused_crop_changes_nothing():
    cache = StateCache([DynamicLayer(), StateLayer()])
    k, v = torch.randn(2, 1, 2, 5, 8)
    cache.update(k, v, 0)
    cache.update(k, v, 1)
    with pytest.raises(NotImplementedError, match=r"crop\(-2\): .*cannot be taken back.*RollbackCache"):
        cache.crop(-2)
    assert cache.layers[0].get_seq_length() == 5
    assert not cache.is_croppable


def test_a_layer_that_cannot_go_back_so_far_leaves_the_others_as_they_were():
    config = sq.hf.SubquadConfig(layers=2, heads=2, dim=8, vocab=7, mechanism=["softmax", "linear"], seed=0)
    model, ids = sq.hf.SubquadForCausalLM(config).eval(), torch.randint(0, 7, (1, 20))
    cache = StateCache(2)
    cache.activate_past_recording(4)
    model(ids, past_key_values=cache)
    states = [layer.state for layer in cache.layers]
    with pytest.raises(ValueError, match=r"crop\(10\): the state has 20 tokens and can go back to 16"):
        cache.crop(-10)
    assert all(layer.state is state for layer, state in zip(cache.layers, states, strict=True))
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]
    cache.crop(-4)
    assert (cache.get_seq_length(), cache.model_state.length.tolist()) == (16, [16])


def test_so_does_a_layer_of_another_kind_in_the_cache_of_a_converted_model():
    class Convolution(CacheLayerMixin):
        """As transformers': what it keeps stands in a dict."""

        update = lazy_initialization = get_mask_sizes = get_seq_length = get_max_cache_shape = get_max_length = None

        def crop(self, tokens_to_remove: int) -> None:
            self.kept[0] = self.kept[0][:tokens_to_remove]

    kept, last, (k, v) = Convolution(), StateLayer(), torch.randn(2, 1, 2, 5, 8)
    kept.kept = {0: "abcde"}
    cache = RollbackCache(tokens=4)
    cache.layers = [kept, DynamicLayer(), last]
    for index in (1, 2):
        cache.update(k, v, index)
    with pytest.raises(NotImplementedError, match="cannot be taken back"):
        cache.crop(-2)
    assert (kept.kept, cache.layers[1].keys.shape[2], last.length) == ({0: "abcde"}, 5, 5)


@pytest.mark.parametrize("name", ["linear", "softmax"])
def test_crop_takes_back_the_tokens_of_any_call(name):
    attn, (q, k, v) = mechanism(name), torch.randn(3, 2, 2, 30, 8)
    layer = StateLayer()
    cache = StateCache([layer])
    cache.activate_past_recording(8)

    def feed(start, end):
        part = [x[:, :, start:end] for x in (q, k, v)]
        return layer.advance(attn, part[0], *layer.update(*part[1:]))

    feed(0, 15), feed(15, 16), feed(16, 22)
    cache.crop(0)
    cache.crop(-4)
    assert cache.get_seq_length() == 18
    assert cache.is_croppable
    torch.testing.assert_close(feed(18, 30), attn(q, k, v, is_causal=True)[:, :, 18:], atol=1e-5, rtol=1e-5)
    cache.crop(24)  # as the first versions of transformers 5 say it
    assert cache.get_seq_length() == 24
    with pytest.raises(ValueError, match=r"crop\(-99\): the layer has 24 tokens"):
        cache.crop(-99)


def test_beside_layers_that_keep_keys_the_mask_is_theirs():
    attn, (q, k, v) = mechanism("linear"), torch.randn(3, 1, 2, 5, 8)
    cache = StateCache([StateLayer(), DynamicLayer()])
    new_k, new_v = cache.update(k, v, 0)
    cache.layers[0].advance(attn, q, new_k, new_v)
    cache.update(k, v, 1)
    assert cache.get_seq_length() == 5
    # The first versions of transformers 5 ask with the positions of the queries, later ones with their number.
    old = "cache_position" in inspect.signature(DynamicLayer.get_mask_sizes).parameters
    one = torch.tensor([5]) if old else 1
    assert cache.get_mask_sizes(one, 0) == cache.get_mask_sizes(one, 1) == (6, 0)
    assert StateCache(2).get_mask_sizes(4, 0) == StateCache(2).get_mask_sizes(torch.arange(4), 0) == (4, 0)
    cache.batch_repeat_interleave(3)
    assert cache.layers[0].batch_size == cache.layers[1].keys.shape[0] == 3


def test_positions_go_with_their_sequences():
    torch.manual_seed(0)
    config = sq.hf.SubquadConfig(layers=1, heads=2, dim=8, vocab=11, mechanism="linear", seed=0)
    model = sq.hf.SubquadForCausalLM(config).eval()
    ids, mask = torch.randint(0, 11, (2, 6)), torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6])
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    assert cache.model_state.length.tolist() == [3, 6]
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.model_state.length.tolist() == [6, 3]
    cache.batch_repeat_interleave(2)
    assert cache.model_state.length.tolist() == [6, 6, 3, 3]
    cache.batch_select_indices(torch.tensor([2]))
    assert cache.model_state.length.tolist() == [3]
    alone = model(ids[:1, 3:], use_cache=True).past_key_values
    more = torch.tensor([[4]])
    torch.testing.assert_close(
        model(more, past_key_values=cache).logits, model(more, past_key_values=alone).logits, atol=1e-6, rtol=1e-5
    )
    cache.reset()
    assert cache.model_state is None


def test_a_copy_shares_the_states_and_goes_its_own_way():
    class Other(StateLayer):
        pass

    attn, (q, k, v) = mechanism("linear"), torch.randn(3, 1, 2, 5, 8)
    cache = StateCache([Other(), StateLayer()])
    for layer in cache.layers:
        layer.advance(attn, q, *layer.update(k, v))
    fork = copy.deepcopy(cache)
    assert [type(layer) for layer in fork.layers] == [Other, StateLayer]
    assert fork.layers[0].state is cache.layers[0].state
    fork.layers[0].advance(attn, q, *fork.layers[0].update(k, v))
    assert (fork.layers[0].get_seq_length(), cache.layers[0].get_seq_length()) == (10, 5)
    assert int(cache.layers[0].state.count) == 5
    fork.reset()
    assert cache.layers[1].state is not None


def test_wrong_calls():
    with pytest.raises(ValueError, match="layers must be at least 1"):
        StateCache(0)
    model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear")
    with pytest.raises(ValueError, match="the cache has 2 layers, the state 1"):
        StateCache(2).store(model.scan(torch.tensor([[1]]))[1], 1)
