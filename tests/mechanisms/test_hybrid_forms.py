"""Hybrid: its numerics, each with the wrong version beside it, and its states."""

import copy
import functools
import itertools
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import subquad as sq
from subquad.kernels.windowed_linear.chunked import windowed
from subquad.state import join

from .hybrid_cases import PERFORMER, hybrid, product, tokens

# -- numerics: each with the wrong version beside it ---------------------------------------------------------


def test_a_far_field_made_by_subtraction_would_lose_it():
    """One near key with huge features: total minus near leaves only rounding errors of the far field."""
    attn = hybrid({"mechanism": "taylor", "degree": 2}, 4, 0)
    q, k, v = tokens(60, dtype=torch.float32)
    q[..., 0] += 2
    k[:, :, 30] = torch.tensor([-1e4, 0, 0, 0])  # scores of about -1e4: 1 + s + s^2/2 = 5e7, but e^s = 0
    want = attn(*(x.double() for x in (q, k, v)), backend="reference")[:, :, 26:35]
    got = attn(q, k, v)[:, :, 26:35]
    assert (got - want).abs().max() < 1e-5
    near = torch.ones(60, 60, dtype=torch.bool).tril(4).triu(-4)
    weights = product(attn.far.feature_map, q, k, 0.5)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    far = weights @ values - (weights * near) @ values
    both = far + ((0.5 * q @ k.mT).exp() * near) @ values
    wrong = (both[..., :-1] / both[..., -1:])[:, :, 26:35]
    assert (wrong - want).abs().max() > 1e-2


@pytest.mark.parametrize("is_causal", [False, True])
def test_huge_keys_do_not_hide_small_ones(is_causal, monkeypatch):
    """Keys of norm 60 enter the far field in the middle of a chunk; rows that cannot see them keep their small keys."""
    attn = hybrid({**PERFORMER, "features": "positive", "num_features": 32}, 3, 1)
    q, k, v = tokens(90, dtype=torch.float32)
    k[:, :, 40:50] *= 60 / k[:, :, 40:50].norm(dim=-1, keepdim=True)
    q[:, :, :40] = 0  # their near scores are small as well
    q[:, :, 40:] *= -1
    want = attn(*(x.double() for x in (q, k, v)), is_causal=is_causal, backend="reference")
    got = attn(q, k, v, is_causal=is_causal)
    assert (got - want).abs().max() < 1e-3
    before = attn(q[:, :, :44], k[:, :, :44], v[:, :, :44], is_causal=True)
    if is_causal:
        assert (got[:, :, :44] - before).abs().max() <= 1e-5


def test_the_exact_form_is_needed_and_taken(monkeypatch):
    """All scores are -1800, near and far, until keys of norm 0 set the shift of the chunk: no row may see it."""
    attn = hybrid({**PERFORMER, "features": "positive", "num_features": 32}, 0, 0)
    q, k, v = (0.01 * x for x in tokens(64, dtype=torch.float32))
    q[..., 0], k[..., 0] = -60, 60
    k[:, :, 60:] = 0
    want = attn(*(x.double() for x in (q, k, v)), is_causal=True, backend="reference")
    got = attn(q, k, v, is_causal=True)
    assert (got - want).abs().max() < 1e-2 * want.abs().max()
    monkeypatch.setattr(windowed, "sound", lambda *_: True)
    assert (attn(q, k, v, is_causal=True, backend="chunked") - want)[:, :, :60].abs().max() > 0.5 * want.abs().max()


def test_joining_by_shift_alone_would_lose_the_near_field(monkeypatch):
    """A far field without weight (relu, or no far key yet) has shift 0: near scores of -200 must not vanish beside."""
    attn = sq.create("hybrid", 4, 2, window=3, sinks=0, far={**PERFORMER, "features": "relu", "kernel_eps": 0.0})
    q, k, v = tokens(4, dtype=torch.float32)
    q, k = 20 + q, -20 + k
    exact = sq.attention(q, k, v, "softmax", is_causal=True)
    assert (attn(q, k, v, is_causal=True) - exact).abs().max() < 1e-4
    monkeypatch.setattr(windowed, "combine", lambda parts: functools.reduce(join, parts))
    assert (attn(q, k, v, is_causal=True, backend="chunked") - exact).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_inputs_are_computed_in_float32(dtype):
    attn = hybrid(PERFORMER, 4, 2)
    q, k, v = tokens(50, dtype=dtype)
    out, state = attn.scan(q, k, v)
    assert out.dtype == dtype
    assert {x.dtype for x in (*state.window, *state.sinks, state.weighted)} == {torch.float32}
    want = attn(q.float(), k.float(), v.float(), is_causal=True)
    assert torch.equal(out, want.to(dtype))


# -- states --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_any_split_and_any_merge_is_the_parallel_form(data):
    window, sinks = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 5))
    far = data.draw(st.sampled_from([PERFORMER, {"mechanism": "taylor", "degree": 2}, "linear"]))
    attn = hybrid(far, window, sinks)
    q, k, v = tokens(24, batch=2)
    bits = data.draw(st.lists(st.booleans(), min_size=48, max_size=48))
    mask = torch.tensor(bits).view(2, 24) if data.draw(st.booleans()) else torch.ones(2, 24, dtype=torch.bool)
    mask[0, : data.draw(st.integers(0, 20))] = False
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=5)))]
    want = attn(q, k, v, is_causal=True, key_mask=mask)
    states, state, pieces = [], None, []
    for a, b in itertools.pairwise([*cuts, 24]):
        part = [x[:, :, a:b] for x in (q, k, v)]
        out, state = attn.scan(*part, state, key_mask=mask[:, a:b])
        pieces.append(out)
        states.append(attn.scan(*part, key_mask=mask[:, a:b])[1])
    assert (torch.cat(pieces, 2) - want).abs().max() <= 1e-10
    rest = [x[:, :, cuts[-1] :] for x in (q, k, v)]
    from_left = functools.reduce(sq.merge, states[:-1])
    from_right = functools.reduce(lambda later, earlier: sq.merge(earlier, later), states[-2::-1])
    for merged in (from_left, from_right):
        out, _ = attn.scan(*rest, merged, key_mask=mask[:, cuts[-1] :])
        assert (out - want[:, :, cuts[-1] :]).abs().sum() <= 1e-9


def test_merged_windows_and_sinks_are_those_of_one_scan():
    attn = hybrid(PERFORMER, 5, 3)
    q, k, v = tokens(20)
    whole = attn.scan(q, k, v)[1]
    parts = [attn.scan(*(x[:, :, a:b] for x in (q, k, v)))[1] for a, b in ((0, 2), (2, 4), (4, 20))]
    merged = functools.reduce(sq.merge, parts)
    assert torch.equal(merged.count, whole.count) and whole.count.item() == 20
    for mine, theirs in zip((*merged.window, *merged.sinks), (*whole.window, *whole.sinks), strict=True):
        assert torch.equal(mine, theirs)


def test_the_state_does_not_grow():
    attn = hybrid(PERFORMER, 6, 2)
    q, k, v = tokens(200)
    sizes, state = [], None
    for i in range(0, 200, 10):
        _, state = attn.scan(*(x[:, :, i : i + 10] for x in (q, k, v)), state)
        sizes.append(sum(leaf.numel() for leaf in torch.utils._pytree.tree_leaves(state)))
    assert len(set(sizes)) == 1
    moved = state.to(torch.float16).detach()
    assert moved.weighted.dtype == moved.window.k.dtype == torch.float32
    assert moved.count.dtype == torch.int64


def test_states_can_be_copied_and_pickled():
    attn = hybrid(PERFORMER, 4, 2)
    q, k, v = tokens(30)
    want = attn(q, k, v, is_causal=True)[:, :, 20:]
    states = [attn.scan(*(x[:, :, a:b] for x in (q, k, v)))[1] for a, b in ((0, 10), (10, 20))]
    for again in (copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
        merged = sq.merge(*map(again, states))
        assert (attn.scan(*(x[:, :, 20:] for x in (q, k, v)), merged)[0] - want).abs().max() <= 1e-10


def test_reference_and_fast_states_continue_each_other():
    attn = hybrid(PERFORMER, 4, 3)
    q, k, v = tokens(30)
    want = attn(q, k, v, is_causal=True)
    state = None
    for a, b, backend in ((0, 5, "reference"), (5, 16, None), (16, 23, "reference"), (23, 30, "chunked")):
        out, state = attn.scan(*(x[:, :, a:b] for x in (q, k, v)), state, backend=backend)
        assert (out - want[:, :, a:b]).abs().max() <= 1e-10


@pytest.mark.parametrize("is_causal", [False, True])
def test_backward_keeps_linear_memory(is_causal, saved_bytes):
    attn = hybrid({**PERFORMER, "num_features": 64}, 16, 2)
    kept = []
    for length in (256, 1024):
        x = [x.requires_grad_() for x in tokens(length, dtype=torch.float32)]
        kept.append(saved_bytes(lambda x=x: attn(*x, is_causal=is_causal, chunk_size=64)))
    assert kept[1] < 4.5 * kept[0]
    # Features alone would be 2 * 64 floats per token and head for each of several operations.
    assert kept[1] < 1024 * 2 * 4 * 120
