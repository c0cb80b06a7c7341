"""Checkpoints: the last tokens can be taken back from the state of any mechanism that scans."""

import pickle

import pytest
import torch
from torch.utils import _pytree as pytree

import subquad as sq
from subquad.mechanisms import MECHANISMS

CASES = [(name, MECHANISMS[name].CONTRACT_VARIANTS[0]) for name in sq.list_mechanisms(recurrent=True)]
CASES.append(("multipole", {"memory": "constant", "chunk": 8, "clusters": 3, "limit": 5, "sinks": 2, "seed": 3}))


def tokens(length, batch=2):
    return torch.randn(3, batch, 2, length, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES[:-1]] + ["multipole constant"])
def test_a_cropped_state_goes_on_as_if_the_tokens_had_never_been(name, options):
    attn, (q, k, v) = sq.create(name, 8, 2, **options), tokens(40)
    if attn.uses_calibration:
        attn.calibrate(q, k)
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) > 0.2
    for key_mask in (None, mask):

        def part(a, b, key_mask=key_mask):
            return [x[:, :, a:b] for x in (q, k, v)], {"key_mask": None if key_mask is None else key_mask[:, a:b]}

        want = attn(q, k, v, is_causal=True, key_mask=key_mask)
        state, at = sq.Checkpoints(every=6), 0
        for size, back in ((13, 6), (1, 0), (0, 0), (1, 0), (1, 0), (5, 5), (3, 0), (1, 4), (6, 2), (10, 6)):
            args, call = part(at, at + size)
            out, state = attn.scan(*args, state, **call)
            assert (out - want[:, :, at : at + size]).abs().sum() < 1e-8
            at += size - back
            state = state.crop(at)
        args, call = part(at, 40)
        assert (attn.scan(*args, state, **call)[0] - want[:, :, at:]).abs().max() < 1e-9


def test_no_more_is_kept_than_the_last_tokens_need():
    attn, (q, k, v) = sq.create("linear", 8), tokens(300)
    _, state = attn.scan(q[:, :, :200], k[:, :, :200], v[:, :, :200], sq.Checkpoints(every=10))
    for i in range(200, 300):
        one = [x[:, :, i : i + 1] for x in (q, k, v)]
        _, state = attn.scan(*one, state)
        assert len(state.marks) <= 3
        assert state.length - state.marks[0][0] == sum(x[0].shape[2] for x in state.tokens) <= 30
        assert state.crop(i - 9).length == i - 9
    with pytest.raises(ValueError, match=r"crop\(100\): the state has 300 tokens and can go back to"):
        state.crop(100)
    with pytest.raises(TypeError, match="length must be an int"):
        state.crop(2.0)


def test_checkpoints_are_pytrees_and_merge():
    attn, (q, k, v) = sq.create("linear", 8), tokens(30)
    half = [x[:, :, :15] for x in (q, k, v)], [x[:, :, 15:] for x in (q, k, v)]
    _, state = attn.scan(*half[0], sq.Checkpoints(every=4))
    swapped = pytree.tree_map(lambda x: x.flip(0), state)
    want = attn.scan(*(x.flip(0) for x in half[1]), swapped.crop(13))[0].flip(0)
    assert torch.allclose(attn.scan(*half[1], state.crop(13))[0], want)
    _, later = attn.scan(*half[1], sq.Checkpoints(every=4))
    both = sq.merge(state, later)
    assert both.length == 30
    assert torch.allclose(attn.scan(*half[0], both)[0], attn.scan(*half[0], attn.scan(q, k, v)[1])[0])


@pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES[:-1]] + ["multipole constant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_that_the_caller_uses_again_changes_no_state(name, options, dtype):
    attn, (q, k, v) = sq.create(name, 8, 2, **options), tokens(12).to(dtype)
    if attn.uses_calibration:
        attn.calibrate(q, k)
    mask, more = torch.ones(2, 12, dtype=torch.bool), tokens(3).to(dtype)
    for state in (None, sq.Checkpoints(every=4)):
        given = [x.clone() for x in (q, k, v, mask)]
        _, after = attn.scan(*given[:3], state, key_mask=given[3])
        for x in given:
            x.zero_()
        if state is not None:
            after = after.crop(9)
        length = 12 if state is None else 9
        _, want = attn.scan(*(x[:, :, :length] for x in (q, k, v)))
        torch.testing.assert_close(attn.scan(*more, after)[0], attn.scan(*more, want)[0])


def test_of_a_long_prompt_only_the_end_is_kept_alive():
    attn, (q, k, v) = sq.create("linear", 8), tokens(300)
    _, state = attn.scan(q, k, v, sq.Checkpoints(every=4))
    assert sum(x.untyped_storage().nbytes() for k, v, _ in state.tokens for x in (k, v)) == 2 * 2 * 2 * 4 * 8 * 8


def test_wrong_input_is_refused_by_name():
    attn, (q, k, v) = sq.create("linear", 8, 2), tokens(20)
    with pytest.raises(TypeError, match="k must be a tensor"):
        attn.scan(q, None, v, sq.Checkpoints(every=4))
    with pytest.raises(TypeError, match="key_mask must be a bool tensor"):
        attn.scan(q, k, v, sq.Checkpoints(every=4), key_mask=[True])
    state = attn.scan(q, k, v, sq.Checkpoints(every=4))[1]
    with pytest.raises(ValueError, match=r"more than every=4 tokens ago; Checkpoints\(every=10\) would keep more"):
        state.crop(10)
    with pytest.raises(ValueError, match=r"can go back to 16: what came before was cropped.* every=4 tokens ago$"):
        state.crop(17).crop(14)


def test_checkpoints_are_pickled():
    attn, (q, k, v) = sq.create("performer", 8, num_features=16, seed=0), tokens(20)
    _, state = attn.scan(q, k, v, sq.Checkpoints(every=4))
    again = pickle.loads(pickle.dumps(state)).crop(17)
    assert torch.equal(again.state.weighted, state.crop(17).state.weighted)
