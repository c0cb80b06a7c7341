"""Contract 4: parallel = chunked = recurrent = merged, in any split."""

import itertools

import pytest
import torch

import subquad as sq


def _close(a, b, tolerance):
    return (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("sizes", [[37], [1] * 37, [5, 1, 0, 30, 1]])
def test_scan_in_any_split_equals_the_parallel_form(recurrent_case, sizes):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs()
    want = attn(q, k, v, is_causal=True)
    state, pieces = None, []
    for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        out, state = attn.scan(*(x[:, :, start:end] for x in (q, k, v)), state)
        pieces.append(out)
    assert _close(torch.cat(pieces, 2), want, recurrent_case.tolerance)


def test_scan_honours_masks(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs()
    mask = torch.rand(2, 37, generator=torch.Generator().manual_seed(3)) > 0.3
    want = attn(q, k, v, is_causal=True, key_mask=mask)
    first, state = attn.scan(*(x[:, :, :20] for x in (q, k, v)), key_mask=mask[:, :20])
    second, _ = attn.scan(*(x[:, :, 20:] for x in (q, k, v)), state, key_mask=mask[:, 20:])
    assert _close(torch.cat([first, second], 2), want, recurrent_case.tolerance)


def test_merged_states_continue_the_sequence(merging_case):
    attn, (q, k, v) = merging_case.make(), merging_case.inputs()
    want = attn(q, k, v, is_causal=True)
    cuts = [0, 9, 10, 30]
    states = [attn.scan(*(x[:, :, a:b] for x in (q, k, v)))[1] for a, b in itertools.pairwise(cuts)]
    left = sq.merge(sq.merge(states[0], states[1]), states[2])
    right = sq.merge(states[0], sq.merge(states[1], states[2]))
    for state in (left, right):
        out, _ = attn.scan(*(x[:, :, 30:] for x in (q, k, v)), state)
        assert _close(out, want[:, :, 30:], merging_case.tolerance)


def test_a_merged_state_can_be_cropped(cropping_case):
    attn, (q, k, v) = cropping_case.make(), cropping_case.inputs()
    want = attn(q, k, v, is_causal=True)
    for cut in (3, 11, 20):
        states = [attn.scan(*(x[:, :, a:b] for x in (q, k, v)))[1] for a, b in ((0, cut), (cut, 37))]
        back = sq.merge(*states).crop(26)
        out, _ = attn.scan(*(x[:, :, 26:] for x in (q, k, v)), back)
        assert _close(out, want[:, :, 26:], cropping_case.tolerance)


def test_a_state_is_not_continued_after_another_calibration(calibrated_case):
    attn, (q, k, v) = calibrated_case.make(), calibrated_case.inputs()
    _, state = attn.scan(*(x[:, :, :20] for x in (q, k, v)))
    rest = [x[:, :, 20:] for x in (q, k, v)]
    attn.scan(*rest, state)
    attn.calibrate(3 * q + 1, 2 * k - 1)
    with pytest.raises(ValueError, match="can only be continued by the mechanism, draw, calibration and scale"):
        attn.scan(*rest, state)


def test_the_state_that_goes_in_is_not_changed(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs()
    _, state = attn.scan(*(x[:, :, :20] for x in (q, k, v)))
    leaves = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(state)]
    once, _ = attn.scan(*(x[:, :, 20:21] for x in (q, k, v)), state)
    again, _ = attn.scan(*(x[:, :, 20:21] for x in (q, k, v)), state)
    assert torch.equal(once, again)
    assert all(torch.equal(a, b) for a, b in zip(leaves, torch.utils._pytree.tree_leaves(state), strict=True))


def test_gradient_flows_through_the_state(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs(length=24)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attn(*whole, is_causal=True).square().sum(), whole)
    parts = [x.clone().requires_grad_() for x in (q, k, v)]
    a, state = attn.scan(*(x[:, :, :10] for x in parts))
    b, _ = attn.scan(*(x[:, :, 10:] for x in parts), state)
    got = torch.autograd.grad(torch.cat([a, b], 2).square().sum(), parts)
    assert all(_close(x, y, recurrent_case.tolerance) for x, y in zip(got, want, strict=True))


def test_absorb_and_read_are_cross_attention(kernelised_case):
    attn, (q, k, v) = kernelised_case.make(), kernelised_case.inputs(length=7, keys=31)
    mask = torch.rand(2, 31, generator=torch.Generator().manual_seed(3)) > 0.3
    want = attn(q, k, v, key_mask=mask)
    state = attn.absorb(k[:, :, :12], v[:, :, :12], key_mask=mask[:, :12])
    state = attn.absorb(k[:, :, 12:], v[:, :, 12:], state, key_mask=mask[:, 12:])
    assert _close(attn.read(q, state), want, kernelised_case.tolerance)
    merged = sq.merge(
        attn.absorb(k[:, :, :12], v[:, :, :12], key_mask=mask[:, :12]),
        attn.absorb(k[:, :, 12:], v[:, :, 12:], key_mask=mask[:, 12:]),
    )
    assert _close(attn.read(q, merged), want, kernelised_case.tolerance)
    assert merged.count.tolist() == mask.sum(1).tolist()


def test_states_survive_flattening(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs(length=12)
    _, state = attn.scan(q, k, v)
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert torch.equal(attn.scan(q, k, v, again)[0], attn.scan(q, k, v, state)[0])


def test_what_cannot_scan_says_so(parallel_case):
    attn, (q, k, v) = parallel_case.make(), parallel_case.inputs(length=5)
    with pytest.raises(NotImplementedError, match="recurrent=True"):
        attn.scan(q, k, v)
