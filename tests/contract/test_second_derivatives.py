"""Contract 11: a second derivative is right, or refused with the backend that has it; never wrong, never None."""

import pytest
import torch

import subquad as sq


def _product(attn, inputs, directions, **call):
    """The Hessian of a linear function of the output, times `directions`: one tensor per input."""
    args = [x.clone().requires_grad_() for x in inputs]
    out = attn(*args, **call)
    weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    # The function is linear: a kernel whose gradient counted as constant would be found out by nothing else.
    first = torch.autograd.grad((out * weights).sum(), args, create_graph=True, allow_unused=True)
    total = sum((g * d).sum() for g, d in zip(first, directions, strict=True) if g is not None)
    found = torch.autograd.grad(total, args, allow_unused=True) if total.requires_grad else [None] * 3
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, args, strict=True)]


def _directions(inputs):
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in inputs]


def _unless_refused(run):
    """What `run` gives, or None where it is refused in the right words."""
    try:
        return run()
    except NotImplementedError as error:
        assert 'backend="reference"' in str(error)
    return None


def _assert_equal(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 10 * tolerance * max(1.0, b.abs().max().item())


def test_second_derivatives_are_right_or_refused(case):
    attn, inputs = case.make(), case.inputs(batch=1, length=14)
    directions = _directions(inputs)
    for is_causal in case.causal_modes:
        want = _product(attn, inputs, directions, is_causal=is_causal, backend="reference")
        for chunk_size in (None, 5):
            got = _unless_refused(
                lambda c=is_causal, n=chunk_size: _product(attn, inputs, directions, is_causal=c, chunk_size=n)
            )
            if got is not None:
                _assert_equal(got, want, case.tolerance)


def test_the_definition_has_the_second_derivative(float64_case):
    """Against the difference of two gradients of the definition, which test_oracle holds to be right."""
    attn, inputs = float64_case.make(), float64_case.inputs(batch=1, length=7)
    directions, step = _directions(inputs), 1e-5

    def gradient(sign, is_causal):
        args = [(x + sign * step * d).requires_grad_() for x, d in zip(inputs, directions, strict=True)]
        out = attn(*args, is_causal=is_causal, backend="reference")
        weights = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        found = torch.autograd.grad((out * weights).sum(), args, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, args, strict=True)]

    for is_causal in float64_case.causal_modes:
        got = _product(attn, inputs, directions, is_causal=is_causal, backend="reference")
        up, down = gradient(1, is_causal), gradient(-1, is_causal)
        for a, u, d in zip(got, up, down, strict=True):
            want = (u - d) / (2 * step)
            assert (a - want).abs().max() <= 1e-6 * max(1.0, want.abs().max().item())


def test_under_functorch_too(case):
    attn, (q, k, v) = case.make(), case.inputs(batch=1, length=6)

    def gradient(q, backend):
        return torch.func.grad(lambda q: attn(q, k, v, backend=backend)[0, 0, :, 0].sum())(q)

    def product(backend):
        return torch.func.grad(lambda q: (gradient(q, backend) * torch.cos(q)).sum())(q)

    got = _unless_refused(lambda: product(None))
    if got is not None:
        _assert_equal([got], [product("reference")], case.tolerance)


def test_a_state_keeps_the_refusal(recurrent_case):
    """Keys that are only in the state count as well."""
    attn, inputs = recurrent_case.make(), recurrent_case.inputs(batch=1, length=12)

    def product(backend):
        args = [x.clone().requires_grad_() for x in inputs]
        _, state = attn.scan(*(x[:, :, :8] for x in args), backend=backend)
        out, _ = attn.scan(*(x[:, :, 8:] for x in args), state, backend=backend)
        first = torch.autograd.grad(out[0, 0, :, 0].sum(), args[1], create_graph=True)[0]
        found = torch.autograd.grad((first * torch.cos(args[1])).sum(), args, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, args, strict=True)]

    got = _unless_refused(lambda: product(None))
    if got is not None:
        _assert_equal(got, product("reference"), recurrent_case.tolerance)


@pytest.mark.parametrize("name", ["softmax", "performer"])
def test_the_refusal_says_what_to_do(name):
    q, k, v = torch.randn(3, 1, 2, 9, 8, requires_grad=True)
    out = sq.create(name, 8)(q, k, v)
    first = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r'has no second derivative; .*backend="reference"'):
        first.sum().backward()
