"""Contract 2: changing a later token leaves every earlier output unchanged."""

import pytest
import torch


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("change", ["scaled last key", "huge later tokens", "other later tokens"])
def test_the_future_is_not_seen(blind_case, dtype, tolerance, change):
    attn, (q, k, v) = blind_case.make(), blind_case.inputs(length=80, dtype=dtype)
    q2, k2, v2 = q.clone(), k.clone(), v.clone()
    first = 50
    if change == "scaled last key":
        first = 79
        k2[:, :, -1] *= 3
    elif change == "huge later tokens":
        for x in (q2, k2, v2):
            x[:, :, first:] *= 100
    else:
        for x in (q2, k2, v2):
            x[:, :, first:] = x[:, :, first:].flip(-1) + 1
    before, after = attn(q, k, v, is_causal=True), attn(q2, k2, v2, is_causal=True)
    assert (before - after)[:, :, :first].abs().max() <= max(tolerance, blind_case.rounding) * max(
        1.0, before[:, :, :first].abs().max().item()
    )
    if change != "scaled last key" or attn.uses_keys:
        assert (before - after)[:, :, first:].abs().max() > 1e-3


def test_nan_reaches_later_outputs_and_no_earlier_one(kernelised_case):
    attn, (q, k, v) = kernelised_case.make(), kernelised_case.inputs(length=40)
    for index in (1, 2):
        inputs = [q, k.clone(), v.clone()]
        inputs[index][:, :, 30] = float("nan")
        out = attn(*inputs, is_causal=True)
        assert out[:, :, :30].isfinite().all()
        assert out[:, :, 30].isnan().any()


def test_causal_needs_as_many_queries_as_keys(causal_case):
    attn, (q, k, v) = causal_case.make(), causal_case.inputs(length=10, keys=12)
    with pytest.raises(ValueError, match="scan"):
        attn(q, k, v, is_causal=True)


def test_what_leaks_says_so(leaking_case):
    assert "leak" in (leaking_case.cls.__doc__ or "")  # its own tests measure how much


def test_what_can_be_causal_has_no_reason_not_to_be(causal_case):
    assert not causal_case.cls.causal_refusal


def test_what_cannot_be_causal_says_why(noncausal_case):
    attn, (q, k, v) = noncausal_case.make(), noncausal_case.inputs(length=10)
    with pytest.raises(ValueError, match="cannot be causal") as raised:
        attn(q, k, v, is_causal=True)
    assert noncausal_case.cls.causal_refusal
    assert noncausal_case.cls.causal_refusal in str(raised.value)
