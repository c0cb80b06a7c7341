"""Contract 6: low precision is as good as the definition in that precision, and always finite."""

import pytest
import torch

import subquad as sq


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_within_twice_that_of_the_definition(case, dtype):
    attn, (q, k, v) = case.make(), case.inputs(length=96, dtype=dtype)
    for is_causal in case.causal_modes:
        exact = attn(q.double(), k.double(), v.double(), is_causal=is_causal, backend="reference")
        error = (attn(q, k, v, is_causal=is_causal).double() - exact).norm()
        allowed = (attn(q, k, v, is_causal=is_causal, backend="reference").double() - exact).norm()
        assert error <= 2 * allowed + 1e-6 * exact.norm()


def _assert_finite(case, dtype, norm):
    attn, (q, k, v) = case.make(), case.inputs(length=40, dtype=dtype, norm=norm)
    for is_causal in case.causal_modes:
        q1, k1, v1 = (x.clone().requires_grad_() for x in (q, k, v))
        out = attn(q1, k1, v1, is_causal=is_causal)
        assert out.dtype == dtype
        assert out.isfinite().all()
        out.float().square().mean().backward()
        for x in (q1, v1, *([k1] if attn.uses_keys else [])):
            assert x.grad is not None
            assert x.grad.isfinite().all()


# Width 8: norm 10 gives vectors of length about 28; 30 and beyond for one of them.
@pytest.mark.parametrize("norm", [1.0, 10.0])
def test_finite_at_large_norms(case, norm):
    _assert_finite(case, torch.float32, norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_finite_at_large_norms_in_low_precision(unsigned_case, dtype):
    """A signed normaliser near 0 would make the true output larger than a float16 can hold."""
    _assert_finite(unsigned_case, dtype, 10.0)


def test_autocast_does_not_lower_the_features(approximate_case):
    attn, (q, k, v) = approximate_case.make(), approximate_case.inputs(dtype=torch.float32)
    for is_causal in approximate_case.causal_modes:
        want = attn(q, k, v, is_causal=is_causal)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = attn(q, k, v, is_causal=is_causal)
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_inputs_in_another_half_precision_than_autocast(case, dtypes):
    attn, (q, k, v) = case.make(), case.inputs(dtype=dtypes[0])
    with torch.autocast("cpu", dtype=dtypes[1]):
        for is_causal in case.causal_modes:
            assert attn(q, k, v, is_causal=is_causal).dtype == dtypes[0]
        if case.cls.recurrent:
            first, last = ([x[:, :, part] for x in (q, k, v)] for part in (slice(0, 7), slice(7, None)))
            _, state = attn.scan(*first)
            assert attn.scan(*last, state)[0].dtype == dtypes[0]
            assert attn.scan(q, k, v, sq.Checkpoints(2))[0].dtype == dtypes[0]
            if attn.merges:
                sq.merge(state, attn.scan(*last)[1])
        if case.cls.recurrent and attn.absorbs:
            assert attn.read(q, attn.absorb(k, v, attn.absorb(k, v))).dtype == dtypes[0]


def test_states_are_never_below_float32(kernelised_case):
    attn, (q, k, v) = kernelised_case.make(), kernelised_case.inputs(dtype=torch.bfloat16)
    out, state = attn.scan(q, k, v)
    assert out.dtype == torch.bfloat16
    assert state.weighted.dtype == state.normaliser.dtype == torch.float32
    assert attn.absorb(k, v).weighted.dtype == torch.float32


def test_buffers_keep_their_precision(buffered_case):
    attn = buffered_case.make()
    before = {name: buffer.clone() for name, buffer in attn.named_buffers() if buffer.is_floating_point()}
    for cast in (attn.half, attn.bfloat16, attn.double, attn.float):
        cast()
        buffers = dict(attn.named_buffers())
        for name, kept in before.items():
            assert buffers[name].dtype == torch.float32
            assert torch.equal(buffers[name], kept)


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def other_default(request):
    """Called, it makes torch's default dtype another one until the test ends."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_changes_nothing(case, other_default):
    attn, (q, k, v) = case.make(), case.inputs(length=96, dtype=torch.float32)
    calls = [lambda causal=causal: attn(q, k, v, is_causal=causal) for causal in case.causal_modes]
    if case.cls.recurrent:
        calls += [lambda: attn.scan(q, k, v)[0], lambda: attn.scan(q[:, :, :1], k[:, :, :1], v[:, :, :1])[0]]
    want = [call() for call in calls]
    other_default()
    for call, expected in zip(calls, want, strict=True):
        assert torch.equal(call(), expected)


def test_buffers_are_float32_whatever_the_default(buffered_case, other_default):
    other_default()
    made = sq.create(buffered_case.name, 8, 2, **buffered_case.options)
    assert {x.dtype for x in made.buffers() if x.is_floating_point()} == {torch.float32}
