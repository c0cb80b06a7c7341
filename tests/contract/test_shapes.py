"""Contract 9: cross attention, empty and single tokens, other value widths, strides, grouped-query heads."""

import pytest
import torch


def test_more_keys_than_queries_and_the_reverse(cross_case):
    for length, keys in ((5, 31), (31, 5)):
        attn, (q, k, v) = cross_case.make(), cross_case.inputs(length=length, keys=keys)
        out = attn(q, k, v)
        want = attn(q, k, v, backend="reference")
        assert out.shape == (2, 2, length, 6)
        assert (out - want).abs().max() <= cross_case.tolerance


def test_other_lengths_are_refused_where_tokens_have_places(self_case):
    for length, keys in ((5, 31), (31, 5)):
        attn, (q, k, v) = self_case.make(), self_case.inputs(length=length, keys=keys)
        with pytest.raises(ValueError, match=r"cross|same length|as many"):
            attn(q, k, v)


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_tiny_lengths(case, length):
    attn, (q, k, v) = case.make(), case.inputs(length=length)
    for is_causal in case.causal_modes:
        out = attn(q, k, v, is_causal=is_causal)
        assert out.shape == (2, 2, length, 6)
        assert out.isfinite().all()
        assert (out - attn(q, k, v, is_causal=is_causal, backend="reference")).abs().sum() <= case.tolerance


def test_an_empty_batch(first_case):
    attn, inputs = first_case.make(), first_case.inputs(batch=0, length=5)
    for is_causal in first_case.causal_modes:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attn(q, k, v, is_causal=is_causal)
        assert out.shape == (0, 2, 5, 6)
        out.sum().backward()
        assert all(x.grad.shape == x.shape for x in (q, k, v))


def test_scanning_an_empty_batch(recurrent_case):
    attn, inputs = recurrent_case.make(), recurrent_case.inputs(batch=0, length=20)
    for dtype in {inputs[0].dtype, torch.float32}:  # states of their own, in some mechanisms
        q, k, v = (x.to(dtype) for x in inputs)
        out, state = attn.scan(q, k, v)
        more, _ = attn.scan(q[:, :, :1], k[:, :, :1], v[:, :, :1], state)
        assert out.shape == (0, 2, 20, 6) and more.shape == (0, 2, 1, 6)


def test_scanning_values_of_no_width_is_refused(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs(length=5)
    with pytest.raises(ValueError, match="v must have a width of at least 1"):
        attn.scan(q, k, v[..., :0])


def test_no_heads_are_refused(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=5)
    with pytest.raises(ValueError, match="q has no heads"):
        attn(q[:, :0], k[:, :0], v[:, :0])


def test_no_tokens_are_a_part_of_the_graph(first_case):
    for is_causal in first_case.causal_modes:
        q, k, v = (x.clone().requires_grad_() for x in first_case.inputs(length=0))
        first_case.make()(q, k, v, is_causal=is_causal).sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


def test_values_of_no_width(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=5)
    for is_causal in first_case.causal_modes:
        assert attn(q, k, v[..., :0], is_causal=is_causal).shape == (2, 2, 5, 0)


def test_no_keys_give_zero(cross_case):
    attn, (q, k, v) = cross_case.make(), cross_case.inputs(length=4, keys=0)
    out = attn(q, k, v)
    assert out.shape == (2, 2, 4, 6)
    assert (out == 0).all()


def test_grouped_query_heads_equal_repeated_keys(case):
    attn, (q, k, v) = case.make(heads=6, kv_heads=2), case.inputs(heads=6, kv_heads=2)
    for is_causal in case.causal_modes:
        out = attn(q, k, v, is_causal=is_causal)
        want = attn(q, k, v, is_causal=is_causal, backend="reference")
        assert out.shape == (2, 6, 37, 6)
        assert (out - want).abs().max() <= case.tolerance
        # Query head h reads key head h // 3, and no other.
        k2, v2 = k.clone(), v.clone()
        k2[:, 1], v2[:, 1] = k2[:, 1] + 1, v2[:, 1] + 1
        moved = (attn(q, k2, v2, is_causal=is_causal) - out).abs().amax((0, 2, 3))
        assert (moved[:3] <= case.rounding).all()
        assert (moved[3:] > 1e-3).all()


def test_strides_do_not_matter(case):
    attn, (q, k, v) = case.make(), case.inputs()
    for is_causal in case.causal_modes:
        want = attn(q, k, v, is_causal=is_causal)
        laid = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert (attn(*laid, is_causal=is_causal) - want).abs().max() <= case.rounding
        wide = [torch.cat([x, x], -1)[..., ::2].clone() for x in (q, k, v)]
        scattered = [torch.stack([x, torch.full_like(x, 9.0)], -1)[..., 0] for x in wide]
        assert not scattered[0].is_contiguous()
        assert (attn(*scattered, is_causal=is_causal) - attn(*wide, is_causal=is_causal)).abs().max() <= case.rounding


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_scale_is_the_same_as_scaling_the_inputs(scalable_case, scale):
    attn, (q, k, v) = scalable_case.make(), scalable_case.inputs()
    root = scale**0.5
    for is_causal in scalable_case.causal_modes:
        a = attn(q, k, v, is_causal=is_causal, scale=scale)
        b = attn(root * q, root * k, v, is_causal=is_causal, scale=1.0)
        assert (a - b).abs().max() <= scalable_case.tolerance


def test_the_meta_device_gives_the_shape(first_torch_case):
    """Planning memory and shapes of a large model needs no memory: every mechanism runs on tensors without data."""
    case = first_torch_case
    attn = case.make().to("meta")
    q, k, v = (x.to("meta") for x in case.inputs(dtype=torch.float32))
    mask = torch.ones(2, 37, dtype=torch.bool, device="meta")
    for is_causal in case.causal_modes:
        out = attn(q, k, v, is_causal=is_causal, key_mask=mask)
        assert out.is_meta
        assert out.shape == (2, 2, 37, 6)


def test_lazily_negated_tensors(first_case):
    """`z.conj().imag` is a view with a negative bit: its memory holds the opposite numbers."""
    attn, inputs = first_case.make(), first_case.inputs(length=20)
    lazy = [torch.complex(x, x).conj().imag for x in (y.float() for y in inputs)]
    assert all(x.is_neg() for x in lazy)
    stored = [x.resolve_neg().clone() for x in lazy]
    for is_causal in first_case.causal_modes:
        assert torch.equal(attn(*lazy, is_causal=is_causal), attn(*stored, is_causal=is_causal))
    leaves = [x.clone().requires_grad_() for x in stored]
    out = attn(*leaves)
    grad = torch.complex(out.detach(), out.detach()).conj().imag
    found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    wanted = torch.autograd.grad(out, leaves, grad.resolve_neg().clone())
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
