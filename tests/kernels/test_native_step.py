"""One token for a whole batch of heads: blocks of heads that share a map, and the memory that states live in."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import subquad as sq
from subquad.kernels.native import pool as state_pool
from subquad.kernels.native.pool import BlockPool

from .native_cases import chunked, empty_state, make_map, native


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("kind", "batch", "heads", "groups", "dim", "width", "features"),
    [
        ("hyperbolic", 1, 1, 1, 16, 16, 32),
        ("hyperbolic", 7, 5, 3, 17, 21, 38),  # blocks of 16 heads with a last short one; no size fills its vectors
        ("positive", 40, 1, 1, 64, 64, 256),
        ("positive-hadamard", 9, 4, 2, 64, 40, 130),
        ("oprf-hadamard", 3, 6, 1, 33, 8, 70),
        ("centred", 37, 2, 2, 20, 64, 18),  # one map per head: blocks run over the batch
        ("elu", 11, 3, 2, 20, 33, 20),
        ("arccosine", 18, 2, 1, 12, 9, 27),
        ("log", 5, 7, 1, 13, 16, 13),
        ("taylor", 6, 5, 2, 11, 20, 0),
    ],
)
def test_blocks_of_heads(kind: str, batch: int, heads: int, groups: int, dim: int, width: int, features: int) -> None:
    phi = make_map(kind, dim, features, heads=heads)
    scale = phi.default_scale(dim)
    k, v = torch.randn(batch, heads, 30, dim), torch.randn(batch, heads, 30, width)
    state = native.absorb(phi, k, v, empty_state(phi, v), scale=scale)
    for _ in range(2):  # the second step starts from a state that the first one returned
        q1, k1 = torch.randn(batch, heads * groups, 1, dim), 1.5 * torch.randn(batch, heads, 1, dim)
        v1, mask = torch.randn(batch, heads, 1, width), torch.rand(batch, 1) > 0.3
        with torch.no_grad():
            out, after = native.causal(phi, q1, k1, v1, state, scale=scale, key_mask=mask)
            want, wanted = chunked.causal(phi, q1, k1, v1, state, scale=scale, key_mask=mask)
        torch.testing.assert_close(out, want, rtol=3e-5, atol=3e-5)
        for name in ("weighted", "normaliser", "log_max", "count"):
            torch.testing.assert_close(getattr(after, name), getattr(wanted, name), rtol=3e-5, atol=3e-5)
        state = after


@pytest.mark.usefixtures("built")
def test_a_masked_key_may_hold_anything_in_any_lane() -> None:
    for kind in ("hyperbolic", "positive-hadamard"):
        phi = make_map(kind, 64, 64, heads=4)
        k, v, q = torch.randn(3, 6, 4, 1, 64)
        state, scale = empty_state(phi, v), phi.default_scale(64)
        mask = torch.tensor([True, False, True, False, False, True])[:, None]
        dirty = k.clone()
        dirty[~mask[:, 0]] = float("nan")
        with torch.no_grad():
            clean = native.causal(phi, q, k, v, state, scale=scale, key_mask=mask)[0]
            assert torch.equal(native.causal(phi, q, dirty, v, state, scale=scale, key_mask=mask)[0], clean)


@pytest.mark.usefixtures("built")
def test_states_of_steps_use_dropped_memory_again() -> None:
    phi = make_map("hyperbolic", 16, 256, heads=4)
    q, k, v = torch.randn(3, 2, 4, 1, 16)
    assert state_pool.SMALLEST <= 4 * 2 * 4 * 256 * 16
    state = empty_state(phi, v)
    places = set()
    with torch.no_grad():
        for _ in range(6):
            state = native.causal(phi, q, k, v, state, scale=0.25)[1]
            places.add(state.weighted.data_ptr())
    assert len(places) == 2  # the state before the step, and the one it returns


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("mechanism", "width", "heads"), [
    ("performer", 16, 4), ("performer", 16, 2), ("performer", 5, 4), ("hybrid", 16, 2), ("hybrid", 5, 4),
    ("local", 5, 4),
])  # fmt: skip
def test_states_that_bypass_the_caches_are_the_same(
    mechanism: str, width: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attn = sq.create(mechanism, 16, heads=4, kv_heads=heads, **({} if mechanism == "performer" else {"window": 3}))
    q = torch.randn(3, 4, 12, 16)
    k, v = torch.randn(3, heads, 12, 16), torch.randn(3, heads, 12, width)

    def steps() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        outs, state = [], None
        with torch.no_grad():
            for i in range(12):
                token = (x[:, :, i : i + 1] for x in (q, k, v))
                out, state = attn.scan(*token, state, backend="native")
                outs.append(out)
        assert state is not None
        return torch.cat(outs, 2), tuple(torch.utils._pytree.tree_leaves(state))

    want, state = steps()
    monkeypatch.setattr(state_pool, "LAST_CACHE", -1)
    assert state_pool.states_exceed_caches()
    got, after = steps()
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))


def test_a_pool_knows_what_it_has_lent() -> None:
    pool = BlockPool()
    first, second = pool.lend((1 << 16,)), pool.lend((1 << 17,))
    assert pool.lent_bytes() == 4 * (3 << 16)
    del second
    gc.collect()
    assert pool.lent_bytes() == 4 << 16 and pool.kept_bytes() == 4 << 17
    del first
    gc.collect()
    assert pool.lent_bytes() == 0


def test_a_block_is_lent_once() -> None:
    pool = BlockPool()
    shape = (64, 1024)
    first, second = pool.lend(shape)[0], pool.lend(shape)[0]
    assert first.shape == shape and first.dtype == torch.float32
    assert first.data_ptr() != second.data_ptr()
    first.fill_(1.0)
    second.fill_(2.0)
    assert (first == 1.0).all()
    view, place = first[3:, 5], first.data_ptr()
    del first
    gc.collect()
    assert pool.lend(shape)[0].data_ptr() != place  # a view still looks at it
    assert (view == 1.0).all()
    del view
    gc.collect()
    assert any(pool.lend(shape)[0].data_ptr() == place for _ in range(2))


def test_the_tensors_of_a_block_lie_side_by_side_and_keep_it_together() -> None:
    pool = BlockPool()
    shapes = [(3, 5, 2048), (3, 5), (0, 7), (2, 4096)]
    parts = pool.lend(*shapes)
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        assert part.shape == shape and part.is_contiguous() and part.data_ptr() % 64 == 0
        part.fill_(float(number))
    assert all((part == float(number)).all() for number, part in enumerate(parts))
    last = parts[-1]
    del parts, part
    gc.collect()
    assert pool.kept_bytes() == 0 and (last == 3.0).all()
    del last
    gc.collect()
    assert pool.kept_bytes() > 0


def test_the_pool_is_bounded_and_prefers_the_size_in_use() -> None:
    unit = 1 << 16  # floats
    pool = BlockPool(most=4 * 4 * unit)
    many = [pool.lend((unit,)) for _ in range(9)]
    del many
    gc.collect()
    assert pool.kept_bytes() == 4 * 4 * unit
    other = pool.lend((2 * unit,))
    del other
    gc.collect()
    assert pool.kept_bytes() == 4 * 2 * unit
    pool.clear()
    assert pool.kept_bytes() == 0
    large, small = pool.lend((5 * unit,)), pool.lend((3,))
    del large, small
    gc.collect()
    assert pool.kept_bytes() == 0


def test_threads_never_share_a_block() -> None:
    pool = BlockPool()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            (mine,) = pool.lend((1 << 15,))
            mine[::4096] = number
            if not bool((mine[::4096] == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
