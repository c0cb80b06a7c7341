"""Contract 8: torch.compile without graph breaks, torch.func, export, gradcheck."""

import pytest
import torch

from subquad.mechanisms import COMBINED, MECHANISMS

from .conftest import CASES


def test_compiles_without_graph_breaks(traced_case):
    attn, (q, k, v) = traced_case.make(), traced_case.inputs(length=20)
    for is_causal in traced_case.causal_modes:
        torch._dynamo.reset()
        compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
        args = [x.clone().requires_grad_() for x in (q, k, v)]
        want_args = [x.clone().requires_grad_() for x in (q, k, v)]
        got, want = compiled(*args, is_causal=is_causal), attn(*want_args, is_causal=is_causal)
        assert (got - want).abs().max() <= traced_case.tolerance
        got.square().sum().backward()
        want.square().sum().backward()
        for a, b in zip(args, want_args, strict=True):
            if b.grad is not None:
                assert (a.grad - b.grad).abs().max() <= traced_case.tolerance


def test_func_grad_and_vmap(case):
    attn, (q, k, v) = case.make(), case.inputs(length=12)
    for is_causal in case.causal_modes:

        def loss(q, k, v, is_causal=is_causal):
            return attn(q, k, v, is_causal=is_causal).square().sum()

        args = [x.clone().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(loss(*args), args, allow_unused=True)
        got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
        for a, b in zip(got, want, strict=True):
            assert (a - (torch.zeros_like(a) if b is None else b)).abs().max() <= case.tolerance
        stacked = [torch.stack([x, 2 * x, -x]) for x in (q, k, v)]
        mapped = torch.func.vmap(lambda q, k, v: attn(q, k, v, is_causal=is_causal))(*stacked)  # noqa: B023
        for i in range(3):
            assert (mapped[i] - attn(*(x[i] for x in stacked), is_causal=is_causal)).abs().max() <= case.tolerance


def test_vmap_over_one_argument(first_case):
    attn, inputs = first_case.make(), first_case.inputs(length=12)
    for place in range(3):
        several = torch.stack([inputs[place], 2 * inputs[place]])

        def run(x, place=place):
            return attn(*inputs[:place], x, *inputs[place + 1 :])

        mapped = torch.func.vmap(run)(several)
        for got, x in zip(mapped, several, strict=True):
            assert (got - run(x)).abs().max() <= first_case.tolerance


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
def test_forward_mode_is_right_or_names_the_backend_that_has_it(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=12)
    direction = torch.ones_like(v)
    try:
        _, got = torch.func.jvp(lambda v: attn(q, k, v), (v,), (direction,))
    except NotImplementedError as error:
        assert 'backend="reference"' in str(error)
        return
    assert (got - (attn(q, k, v + 1e-3 * direction) - attn(q, k, v)) / 1e-3).abs().max() < 1e-4


def test_gradcheck(float64_case):
    attn, (q, k, v) = float64_case.make(head_dim=4), float64_case.inputs(batch=1, length=6, head_dim=4, width=3)
    for is_causal in float64_case.causal_modes:
        args = [x.requires_grad_() for x in (q, k, v)]
        assert torch.autograd.gradcheck(
            lambda q, k, v: attn(q, k, v, is_causal=is_causal, chunk_size=4),  # noqa: B023
            args,
            atol=1e-6,
            fast_mode=True,  # along random directions: the full Jacobian takes a minute for some mechanisms
        )


def test_exports(traced_mode):
    traced_case, is_causal = traced_mode
    attn, (q, k, v) = traced_case.make(), traced_case.inputs(length=16, dtype=torch.float32)

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attn

        def forward(self, q, k, v):
            return self.attn(q, k, v, is_causal=is_causal)

    program = torch.export.export(Wrapped(), (q, k, v))
    assert (program.module()(q, k, v) - attn(q, k, v, is_causal=is_causal)).abs().max() <= 1e-5


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own use of TorchScript
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiles_with_inductor(first_case, dtype):
    """The real compiler: needs a C++ compiler and half a minute each."""
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=20, dtype=dtype)
    for is_causal in first_case.causal_modes:
        torch._dynamo.reset()
        compiled = torch.compile(attn, fullgraph=True)
        got, want = compiled(q, k, v, is_causal=is_causal), attn(q, k, v, is_causal=is_causal)
        exact = dtype == torch.float64 and first_case.backend is None  # the native kernels compute in float32
        assert (got - want).abs().max() <= (1e-10 if exact else 1e-5)


# Those that ask torch for exact attention, or write their options into a state; the rest in depth.
DYNAMIC = ("softmax", "multipole")


@pytest.mark.parametrize(
    "name", [n if n in DYNAMIC else pytest.param(n, marks=pytest.mark.deep) for n in (*MECHANISMS, *COMBINED)]
)
def test_compiles_with_dynamic_shapes(name):
    case = next(case for case in CASES if case.name == name and case.backend is None)
    attn, (q, k, v) = case.make(), case.inputs(length=20)
    calls = [lambda *x, is_causal=is_causal: attn(*x, is_causal=is_causal) for is_causal in case.causal_modes]
    if attn.recurrent:
        calls.append(lambda *x: attn.scan(*x)[0])
    for call in calls:
        torch._dynamo.reset()
        got = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)(q, k, v)
        assert (got - call(q, k, v)).abs().max() <= case.tolerance
