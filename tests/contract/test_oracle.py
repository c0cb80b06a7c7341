"""Contract 1: every mechanism equals its O(L^2) definition, forward and gradient."""

import pytest
import torch

import subquad as sq


def _forward_and_gradient(attn, q, k, v, **call):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attn(q, k, v, **call)
    weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    return out.detach(), torch.autograd.grad((out * weights).sum(), (q, k, v), allow_unused=True)


def _assert_close(got, want, tolerance):
    if got is None or want is None:
        assert got is None or got.abs().max() == 0
        assert want is None or want.abs().max() == 0
        return
    assert (got - want).abs().max() <= tolerance * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("masked", [False, True])
def test_equals_its_definition(case, masked):
    attn, (q, k, v) = case.make(), case.inputs()
    call = {}
    if masked:
        call["key_mask"] = torch.rand(q.shape[0], q.shape[2], generator=torch.Generator().manual_seed(1)) > 0.3
        call["key_mask"][0, :3] = False
    for is_causal in case.causal_modes:
        out, grads = _forward_and_gradient(attn, q, k, v, is_causal=is_causal, **call)
        want, want_grads = _forward_and_gradient(attn, q, k, v, is_causal=is_causal, backend="reference", **call)
        _assert_close(out, want, case.tolerance)
        for got_grad, want_grad in zip(grads, want_grads, strict=True):
            _assert_close(got_grad, want_grad, case.tolerance)


@pytest.mark.parametrize(("chunk_size", "length"), [(1, 9), (13, 70), (64, 70)])
def test_chunk_size_does_not_change_the_result(chunked_case, chunk_size, length):
    attn, (q, k, v) = chunked_case.make(), chunked_case.inputs(length=length)
    for is_causal in chunked_case.causal_modes:
        out, grads = _forward_and_gradient(attn, q, k, v, is_causal=is_causal, chunk_size=chunk_size)
        want, want_grads = _forward_and_gradient(attn, q, k, v, is_causal=is_causal, backend="reference")
        _assert_close(out, want, chunked_case.tolerance)
        for got_grad, want_grad in zip(grads, want_grads, strict=True):
            _assert_close(got_grad, want_grad, chunked_case.tolerance)


def test_parameters_get_their_gradient(learned_case):
    attn, (q, k, v) = learned_case.make(), learned_case.inputs()
    parameters = [p for p in attn.parameters() if p.requires_grad]
    for is_causal in learned_case.causal_modes:
        got, want = (
            torch.autograd.grad(attn(q, k, v, is_causal=is_causal, **call).square().sum(), parameters)
            for call in ({"chunk_size": 16}, {"backend": "reference"})
        )
        for a, b in zip(got, want, strict=True):
            _assert_close(a, b, 1e-5 if a.dtype == torch.float32 else learned_case.tolerance)


def test_every_option_appears_in_a_variant(first_case):
    declared = set(first_case.cls.options())
    shown = {option for variant in first_case.cls.CONTRACT_VARIANTS for option in variant}
    # The default of an option counts when some variant leaves it out, but a second value must be there as well.
    assert declared <= shown | {"seed"}, f"{first_case.name}: no variant sets {sorted(declared - shown)}"


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(first_case, scale):
    """torch's own causal attention has NaN there."""
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=17)
    for is_causal in first_case.causal_modes:
        out = attn(q, k, v, is_causal=is_causal, scale=scale)
        want = attn(q, k, v, is_causal=is_causal, scale=scale, backend="reference")
        assert (out - want).abs().max() <= first_case.tolerance


def test_the_definition_has_a_gradient_where_weights_are_zero():
    """Of a key projection that begins at 0."""
    attn = sq.create("efficient", 4, normalization="scaling")
    q, k, v = torch.randn(1, 1, 5, 4), torch.zeros(1, 1, 5, 4, requires_grad=True), torch.randn(1, 1, 5, 3)
    grads = [torch.autograd.grad(attn(q, k, v, backend=name).sum(), k)[0] for name in ("reference", "chunked")]
    assert grads[0].abs().max() > 0
    assert torch.allclose(*grads, atol=1e-6)
