"""Every projection: shapes, seeds, redraws, precision, copies, and what is refused."""

import copy
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from subquad.features.projections import (
    PROJECTIONS,
    GaussianProjection,
    OrthogonalProjection,
    SimplexProjection,
    haar,
    make_projection,
)
from subquad.features.seeded import mix

KINDS = list(PROJECTIONS)


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "dim"), [(1, 2), (5, 5), (16, 4), (13, 6), (3, 7)])
@pytest.mark.parametrize("norms", ["chi", "sqrt"])
def test_any_rows_and_any_width_shared_or_per_head(kind: str, rows: int, dim: int, norms: str) -> None:
    shared = make_projection(kind, rows, dim, norms=norms, seed=0)
    assert shared.as_matrix().shape == (rows, dim)
    assert shared.as_matrix().dtype == torch.float32
    x = torch.randn(2, 3, 4, dim, dtype=torch.float64)
    torch.testing.assert_close(shared(x), x @ shared.as_matrix(torch.float64).mT, rtol=0, atol=1e-10)
    assert shared(x[0, 0].float()).shape == (4, rows)
    heads = make_projection(kind, rows, dim, norms=norms, heads=3, seed=0)
    matrix = heads.as_matrix(torch.float64)
    assert matrix.shape == (3, rows, dim)
    out = heads(x)
    assert out.shape == (2, 3, 4, rows)
    for h in range(3):
        torch.testing.assert_close(out[:, h], x[:, h] @ matrix[h].mT, rtol=0, atol=1e-10)
    if rows > 1:  # one row of two signs may well be the same
        assert not torch.equal(matrix[0], matrix[1])


@pytest.mark.parametrize("kind", KINDS)
def test_sqrt_norms_are_constant(kind: str) -> None:
    norms = make_projection(kind, 40, 16, norms="sqrt", seed=0).as_matrix().norm(dim=-1)
    torch.testing.assert_close(norms, torch.full((40,), 4.0))
    assert float(make_projection(kind, 40, 16, seed=0).as_matrix().norm(dim=-1).std()) > 0.3


def test_blocks_are_orthogonal_also_the_partial_one() -> None:
    w = OrthogonalProjection(20, 8, heads=2, norms="sqrt", seed=3).as_matrix(torch.float64) / math.sqrt(8)
    for start, stop in ((0, 8), (8, 16), (16, 20)):
        block = w[:, start:stop]
        defect = block @ block.mT - torch.eye(stop - start, dtype=torch.float64)
        assert float(defect.abs().max()) < 1e-6  # stored in float32
    assert float((w[:, :8] @ w[:, 8:16].mT).abs().max()) > 0.1


def test_simplex_rows_meet_at_one_angle() -> None:
    w = SimplexProjection(14, 8, norms="sqrt", seed=3).as_matrix(torch.float64) / math.sqrt(8)
    for block in (w[:8], w[8:]):
        n = len(block)
        expected = torch.full((n, n), -1 / 7, dtype=torch.float64).fill_diagonal_(1.0)
        torch.testing.assert_close(block @ block.mT, expected, rtol=0, atol=1e-6)


def test_haar_matrices_are_orthogonal_in_float64() -> None:
    q = haar(5, 32, torch.Generator().manual_seed(0))
    assert float((q @ q.mT - torch.eye(32, dtype=torch.float64)).abs().max()) < 1e-12


# Seeds and draws


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bits_and_other_seeds_other_bits(kind: str) -> None:
    a, b = (make_projection(kind, 10, 4, heads=2, seed=7) for _ in range(2))
    assert same(a, b)
    other = make_projection(kind, 10, 4, heads=2, seed=8)
    assert not torch.equal(a.as_matrix(), other.as_matrix())


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_threads_default_dtype_or_global_seed(kind: str) -> None:
    a = make_projection(kind, 300, 64, seed=7)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        torch.set_default_dtype(torch.float64)
        before = torch.get_rng_state()
        b = make_projection(kind, 300, 64, seed=7)
        assert torch.equal(before, torch.get_rng_state())  # an integer seed takes nothing from torch's generator
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
    assert same(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_redraw_is_explicit_in_place_and_the_same_everywhere(kind: str) -> None:
    a, b = (make_projection(kind, 10, 4, seed=7) for _ in range(2))
    buffers = {name: (buffer, buffer.clone()) for name, buffer in a.named_buffers()}
    a.train()
    a.eval()
    a(torch.ones(2, 4))
    assert same(a, b)  # nothing but redraw() resamples
    a.redraw()
    assert a.draw_key() == (7, 1)
    for name, (buffer, before) in buffers.items():
        assert a.get_buffer(name) is buffer
        assert torch.equal(before, buffer) == (name == "seed")
    assert not torch.equal(a.as_matrix(), b.as_matrix())
    b.redraw()
    assert same(a, b)
    a.redraw()
    assert not torch.equal(a.as_matrix(), b.as_matrix())
    assert not torch.equal(a.as_matrix(), make_projection(kind, 10, 4, seed=8).as_matrix())


def test_draws_of_neighbouring_seeds_do_not_meet() -> None:
    keys = {mix(seed, draws) & 0xFFFFFFFF for seed in range(-20, 20) for draws in range(40)}
    assert len(keys) == 1600  # torch seeds with the low 32 bits
    naive = {(seed + draws) & 0xFFFFFFFF for seed in range(-20, 20) for draws in range(40)}
    assert len(naive) < 100


def test_seed_from_a_generator_or_from_torch() -> None:
    def drawn(generator: torch.Generator) -> list[int]:
        return [GaussianProjection(2, 2, seed=generator).draw_key()[0] for _ in range(2)]

    first, second = (drawn(torch.Generator().manual_seed(5)) for _ in range(2))
    assert first == second
    assert first[0] != first[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        a, b = GaussianProjection(2, 2), GaussianProjection(2, 2)
        torch.manual_seed(1)
        c = GaussianProjection(2, 2)
    assert same(a, c)
    assert not same(a, b)
    again = GaussianProjection(2, 2, seed=a.draw_key()[0])
    assert same(a, again)


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_the_whole_range_of_int64_is_a_seed(seed: int) -> None:
    w = GaussianProjection(2, 2, seed=seed)
    assert w.draw_key() == (seed, 0)
    assert int(w.seed) == seed


@contextmanager
def readings() -> Iterator[list[Any]]:
    """Every value read from a tensor to Python: on a GPU each would wait for the device."""
    found: list[Any] = []

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                found.append(func)
            return func(*args, **(kwargs or {}))

    with Count():  # type: ignore[no-untyped-call]
        yield found


def test_draw_key_reads_the_buffers_only_after_they_change() -> None:
    w = GaussianProjection(2, 2, seed=3)
    other = GaussianProjection(2, 2, seed=4)
    other.redraw()
    w.draw_key()
    with readings() as found:
        for _ in range(3):
            assert w.draw_key() == (3, 0)
            w(torch.ones(1, 2))
    assert not found
    w.redraw()
    assert w.draw_key() == (3, 1)
    w.load_state_dict(other.state_dict())
    assert w.draw_key() == (4, 1)
    w.draws.fill_(9)  # what a broadcast of buffers does
    assert w.draw_key() == (4, 9)
    w.register_buffer("draws", torch.tensor(2))
    assert w.draw_key() == (4, 2)
    with torch.inference_mode():
        inference = GaussianProjection(2, 2, seed=5)
    assert inference.draw_key() == (5, 0)


# Modules: state_dict, copies, casts, devices, transforms


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_round_trip_wins_over_the_seed(kind: str) -> None:
    a = make_projection(kind, 10, 4, heads=2, seed=1)
    a.redraw()
    b = make_projection(kind, 10, 4, heads=2, seed=2)
    b.load_state_dict(a.state_dict())
    assert same(a, b)
    assert b.draw_key() == (1, 1)
    a.redraw()
    b.redraw()
    assert same(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_equal_and_independent(kind: str) -> None:
    a = make_projection(kind, 10, 4, seed=1)
    a.draw_key()
    for b in (copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        assert same(a, b)
        b.redraw()
        assert not same(a, b)
        assert (a.draw_key(), b.draw_key()) == ((1, 0), (1, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_casts_change_no_bit(kind: str) -> None:
    a, b = (make_projection(kind, 10, 4, seed=1) for _ in range(2))
    for cast in (a.half, a.bfloat16, a.double, a.float):
        cast()
        assert same(a, b)
    a.to(torch.float16)
    assert same(a, b)
    assert a.draw_key() == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_round_the_projection(kind: str) -> None:
    w = make_projection(kind, 10, 4, seed=1)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = w(x)
    assert torch.equal(out, w(x))


@pytest.mark.parametrize("kind", KINDS)
def test_built_on_meta_then_loaded_or_reset(kind: str) -> None:
    real = make_projection(kind, 10, 4, heads=2, seed=1)
    with torch.device("meta"):
        loaded, reset = (make_projection(kind, 10, 4, heads=2, seed=1) for _ in range(2))
        unseeded = make_projection(kind, 10, 4)
    assert all(buffer.is_meta for buffer in unseeded.buffers())
    assert loaded.draw_key() == (1, 0)
    assert copy.deepcopy(loaded).half().as_matrix().shape == (2, 10, 4)
    loaded.load_state_dict(real.state_dict(), assign=True)
    reset.to_empty(device="cpu")
    reset.reset_parameters()
    assert same(loaded, real)
    assert same(reset, real)


@pytest.mark.parametrize("kind", KINDS)
def test_compile_vmap_and_gradients(kind: str) -> None:
    w = make_projection(kind, 6, 3, heads=2, seed=1)
    x = torch.randn(4, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(lambda t: (w(t), w.draw_key()), backend="aot_eager", fullgraph=True)
    out, key = compiled(x)
    torch.testing.assert_close(out, w(x))
    assert key == (1, 0)
    w.redraw()
    out, key = compiled(x)
    torch.testing.assert_close(out, w(x))
    assert key == (1, 1)
    torch.testing.assert_close(torch.func.vmap(w, in_dims=0)(x), w(x))
    assert torch.autograd.gradcheck(w, (x,))
    torch.compiler.reset()


def test_repr_says_what_it_is() -> None:
    assert (
        repr(make_projection("orthogonal", 8, 4, seed=0))
        == "OrthogonalProjection(rows=8, dim=4, heads=None, norms='chi')"
    )


# Refusals


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rows": 0}, ValueError, "rows must be at least 1, got 0"),
        ({"dim": 0}, ValueError, "dim must be at least 1, got 0"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"rows": 2.0}, TypeError, r"rows must be an integer of at least 1, got 2\.0 \(float\)"),
        ({"rows": True}, TypeError, "rows must be an integer of at least 1, got True"),
        ({"norms": "chii"}, ValueError, r"norms='chii' is not known; expected one of \['chi', 'sqrt'\]; did you mean"),
        ({"seed": "0"}, TypeError, "seed must be an int, a torch.Generator or None, got '0'"),
        ({"seed": 2**63}, ValueError, "seed must fit into a signed 64-bit integer"),
        ({"sede": 1}, TypeError, "projection '.*' has no option 'sede'; did you mean 'seed'"),
    ],
)
def test_wrong_arguments_are_refused(kind: str, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_projection(kind, **({"rows": 4, "dim": 4} | arguments))


def test_wrong_kinds_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"projection='orthogonl' is not known; .*; did you mean 'orthogonal'"):
        make_projection("orthogonl", 4, 4)
    for kind in ("orthogonal", "gaussian", "simplex"):
        with pytest.raises(ValueError, match="blocks=2 is an option of projection='hadamard' only"):
            make_projection(kind, 4, 4, blocks=2)
        assert make_projection(kind, 4, 4, blocks=None).rows == 4
    with pytest.raises(ValueError, match="dim must be at least 2 for a simplex"):
        make_projection("simplex", 4, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_inputs_are_refused(kind: str) -> None:
    w, heads = make_projection(kind, 6, 4), make_projection(kind, 6, 4, heads=3)
    cases: list[tuple[Any, Tensor, type[Exception], str]] = [
        (w, torch.ones(2, 5), ValueError, r"x must have shape \(..., L, 4\), got \(2, 5\)"),
        (w, torch.ones(4), ValueError, r"x must have shape \(..., L, 4\), got \(4,\)"),
        (heads, torch.ones(2, 4), ValueError, r"x must have shape \(..., 3, L, 4\), got \(2, 4\)"),
        (heads, torch.ones(2, 5, 4), ValueError, "x has 2 heads in shape .* drawn for 3"),
        (w, torch.ones(2, 4).half(), TypeError, "x must be float32 or float64, got torch.float16"),
        (w, torch.ones(2, 4).long(), TypeError, "x must be float32 or float64, got torch.int64"),
    ]
    for projection, x, error, message in cases:
        with pytest.raises(error, match=message):
            projection(x)
