"""The windowed block: equals its definition, has one normaliser, never forms L x S, lets no hidden value through."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.kernels.padding import Order
from subquad.kernels.windowed_linear.chunked.windowed import sweep
from subquad.kernels.windowed_linear.chunked.windows import (
    banded,
    dense_partial,
    packed,
    unpacked,
    window_attention,
    window_partial,
)
from subquad.state import join


def _dense(q, k, v, visible, scale):
    """Row i over slots i .. i + span, from the definition."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    band = banded(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], q.device)
    allowed = band & visible.mT
    scores = (scale * q @ k.mT).masked_fill(~allowed, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ v


def _inputs(length, span, heads=4, kv_heads=2, batch=2):
    q = torch.randn(batch, heads, length, 8, dtype=torch.float64)
    k = torch.randn(batch, kv_heads, length + span, 8, dtype=torch.float64)
    return q, k, torch.randn(batch, kv_heads, length + span, 5, dtype=torch.float64)


def test_the_band_is_the_window():
    assert banded(2, 4, 2, torch.device("cpu")).tolist() == [[True, True, True, False], [False, True, True, True]]


@pytest.mark.parametrize(("length", "span"), [(1, 0), (1, 9), (5, 0), (70, 3), (130, 64), (200, 130), (150, 400)])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_blocks_equal_the_definition_forward_and_backward(length, span, per_sequence):
    q, k, v = _inputs(length, span)
    visible = torch.rand(2 if per_sequence else 1, 1, length + span, 1) > 0.2
    weights = torch.randn(2, 4, length, 5, dtype=torch.float64)
    results = []
    for attend in (
        _dense,
        lambda *args: window_partial(*args).finish(),
        window_attention,
        lambda *args: sweep(*args)[0],
        lambda *args: sweep(*args, chunk_size=7)[0],
    ):
        args = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*args, visible, 0.3)
        results.append([out.detach(), *torch.autograd.grad((out * weights).sum(), args)])
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert (a - b).abs().max() <= 1e-12


def test_joined_parts_are_one_softmax():
    q, k, v = _inputs(6, 3)
    want = dense_partial(q, k, v, None, 0.7)
    parts = [dense_partial(q, k[:, :, part], v[:, :, part], None, 0.7) for part in (slice(0, 4), slice(4, 9))]
    for a, b in (parts, parts[::-1]):
        joined = join(a, unpacked(packed(b)))
        assert (joined.finish() - want.finish()).abs().max() <= 1e-14
        # The log of the whole normaliser, whatever the shifts were.
        assert (joined.shift + joined.normaliser.log() - want.shift - want.normaliser.log()).abs().max() <= 1e-12
    # Averaging two softmaxes is another thing.
    assert ((parts[0].finish() + parts[1].finish()) / 2 - want.finish()).abs().max() > 1e-2


def test_joining_with_nothing_changes_nothing():
    q, k, v = _inputs(6, 3)
    part = dense_partial(q, k, v, None, 0.7)
    nothing = dense_partial(q, k, v, torch.zeros(1, 6, 9, dtype=torch.bool), 0.7)
    assert (nothing.finish() == 0).all()
    assert torch.equal(join(part, nothing).finish(), part.finish())
    assert (join(nothing, nothing).finish() == 0).all()


def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other():
    q, k, v = _inputs(150, 20)
    visible = torch.ones(1, 1, 170, 1, dtype=torch.bool)
    visible[:, :, 90] = False
    v[0, 0, 60, 1] = torch.nan  # seen by rows 40 .. 60
    v[0, 0, 90, 1] = torch.inf  # hidden
    for out in (window_attention(q, k, v, visible, 1.0), window_partial(q, k, v, visible, 1.0).finish()):
        assert out[0, 0].isnan().any(-1).nonzero().flatten().tolist() == list(range(40, 61))
        assert out[1].isfinite().all()
        assert out[0, 2:].isfinite().all()  # the query heads of the other key head
    # 0 times NaN is NaN: a plain product of masked weights and values spoils every row of the block.
    scores = (q[:, ::2] @ k.mT).masked_fill(~banded(150, 170, 20, q.device), -torch.inf)
    assert (scores.softmax(-1) @ v)[0, 0].isnan().any(-1).all()


def test_large_scores_do_not_overflow():
    q, k, v = (x.float() for x in _inputs(90, 10))
    out = window_partial(100 * q, 100 * k, v, torch.ones(1, 1, 100, 1, dtype=torch.bool), 1.0).finish()
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["none", "right", "left", "holes", "empty"])
def test_order_moves_real_tokens_to_the_front_and_back(kind):
    mask = {
        "none": None,
        "right": torch.arange(9) < torch.tensor([[4], [9]]),
        "left": torch.arange(9) >= torch.tensor([[4], [0]]),
        "holes": torch.rand(2, 9) > 0.5,
        "empty": torch.zeros(2, 9, dtype=torch.bool),
    }[kind]
    x = torch.randn(2, 3, 9, 2)
    order = Order(mask, 9, x.device)
    real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask
    front = order.front(x)
    for i in range(2):
        count = int(real[i].sum())
        assert torch.equal(front[i, :, :count], x[i][:, real[i]])
        assert order.count.expand(2, 1)[i] == count
        assert order.real.expand(2, 9)[i].tolist() == [j < count for j in range(9)]
    assert torch.equal(order.back(front), x.masked_fill(~real[:, None, :, None], 0.0))


class _Largest(TorchDispatchMode):
    """The number of elements of the largest tensor any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "options", "is_causal"),
    [
        *(
            (name, options, is_causal)
            for is_causal in (False, True)
            for name, options in (
                ("local", {"window": 16}),
                ("local", {"window": 16, "sinks": 3}),
                ("sparse", {"stride": 64}),
                ("sparse", {"pattern": "fixed", "stride": 64, "summary": 2}),
            )
        ),
        ("linformer", {"length": 1024, "rank": 16}, False),
        ("separable-linformer", {}, False),
        ("separable-linformer", {"projected": True, "length": 1024, "rank": 16}, False),
        ("nystrom", {"landmarks": 16}, False),
    ],
)
def test_nothing_of_length_squared_is_ever_made(name, options, is_causal, masked):
    length = 1024
    attn = sq.create(name, 4, 1, **options)
    q, k, v = (torch.randn(1, 1, length, 4).requires_grad_() for _ in range(3))
    mask = torch.rand(1, length) > 0.1 if masked else None
    torch_form = {"backend": "chunked"} if name == "sparse" else {}  # the memory of native kernels is not torch's
    with _Largest() as largest:
        attn(q, k, v, is_causal=is_causal, key_mask=mask, **torch_form).sum().backward()
    # sparse has stride + L / stride = 128 keys per row, the others fewer.
    assert largest.numel <= length * 128 * 2
    with _Largest() as dense, torch.no_grad():
        attn(q, k, v, is_causal=is_causal, key_mask=mask, backend="reference")
    assert dense.numel >= length * length  # the measure does see one
