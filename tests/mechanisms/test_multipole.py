"""Multipole attention beyond the contract: its choices, its limits, the error it keeps to, and bad input."""

import math

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad.kernels.multipole import BACKENDS, native, reference
from subquad.kernels.multipole.definition import cluster_keys, rank_order, take_per_head
from subquad.kernels.native import library
from subquad.kernels.operator import Call
from subquad.kernels.padding import real_keys

needs_native = pytest.mark.skipif(bool(library.missing()), reason=library.missing())


def draw(heads=2, length=300, dim=16, width=16, seed=0, batch=1, kv_heads=None):
    g = torch.Generator().manual_seed(seed)
    kv = kv_heads or heads
    return (
        torch.randn(batch, heads, length, dim, generator=g),
        torch.randn(batch, kv, length, dim, generator=g),
        torch.randn(batch, kv, length, width, generator=g),
    )


def clustered(length=1024, centres=20, dim=16, spread=0.3, seed=0, heads=2, norm=2.5):
    """Keys and queries around a few centres, as in real heads."""
    g = torch.Generator().manual_seed(seed)
    middle = norm * torch.randn(1, heads, centres, dim, generator=g)
    index = torch.randint(centres, (2, 1, heads, length), generator=g)
    q, k = (
        take_per_head(middle, i) + spread * torch.randn(1, heads, length, dim, generator=g)
        for i in (index[0], index[1])
    )
    return q, k, torch.randn(1, heads, length, dim, generator=g)


def relative(out, exact):
    return float((out - exact).square().sum() / exact.square().sum())


def exact_attention(q, k, v, **call):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **call)


# -- choices --------------------------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("options", [{"exact_keys": 40}, {"exact_keys": 0}, {}, {"error": 0.03}])
@pytest.mark.parametrize("causal", [False, True])
def test_both_ways_to_choose_agree(options, causal):
    attn = sq.create("multipole", 16, chunk=64, clusters=8, seed=1, **options)
    q, k, v = draw(heads=4, kv_heads=2, length=333, batch=2)
    call = Call(0.25, torch.rand(2, 333, generator=torch.Generator().manual_seed(1)) > 0.2)
    spec = attn._spec(causal=causal)
    ours, theirs = native.make_choices(spec, call, q, k, v), reference.make_choices(spec, call, q, k, v)
    assert torch.equal(ours.order, theirs.order)
    assert torch.equal(ours.sizes, theirs.sizes)
    # Two clusters whose criterion differs by a rounding error may change places.
    assert (ours.selection != theirs.selection).float().mean() < 1e-4


@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_clusters_are_a_pure_function_of_the_chunk(backend):
    if backend == "native" and library.missing():
        pytest.skip(library.missing())
    make = native.cluster if backend == "native" else None
    spec = sq.create("multipole", 16, chunk=32, clusters=5, seed=3)._spec()
    _, k, _ = draw(heads=3, length=128, batch=2)

    def run(k, mask=None):
        call = Call(1.0, mask)
        if make is not None:
            return make(spec, call, k)
        real = real_keys(k, call.key_mask)
        return cluster_keys(spec, take_per_head(k, rank_order(real)[:, None].expand(-1, k.shape[1], -1)), real)

    whole = run(k)
    assert torch.equal(run(k[1:, :, :70]).order, whole.order[1:, :, :2])  # another length and batch
    assert torch.equal(run(k.flip(1)).order, whole.order.flip(1))  # another order of heads
    padded = torch.full((2, 3, 150, 16), 7.0)
    mask = torch.zeros(2, 150, dtype=torch.bool)
    mask[:, torch.randperm(150, generator=torch.Generator().manual_seed(0))[:128].sort().values] = True
    padded[mask[:, None].expand(-1, 3, -1)] = k.reshape(-1, 16)
    assert torch.equal(run(padded, mask).order, whole.order)  # padding anywhere
    assert torch.equal(run(padded, mask).sizes, whole.sizes)


def test_cluster_sizes_are_bounded_and_every_key_is_in_one():
    attn = sq.create("multipole", 8, chunk=64, clusters=4, seed=0)
    k = torch.zeros(1, 1, 128, 8)  # all equal: one cluster would take everything
    k[:, :, :3] = torch.randn(1, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    made = cluster_keys(attn._spec(), k, torch.ones(1, 128, dtype=torch.bool))
    assert made.sizes.max() <= 2 * 64 // 4
    assert (made.sizes.sum(-1) == 64).all()
    assert torch.equal(made.order.sort(-1).values, torch.arange(64, dtype=torch.int32).expand(1, 1, 2, 64))


def test_exact_keys_is_a_hard_limit():
    q, k, v = clustered()
    for most in (0, 7, 50, 100):
        attn = sq.create("multipole", 16, chunk=128, clusters=8, exact_keys=most, seed=0)
        found = attn.inspect(q, k, v)
        assert int(found.exact_keys.max()) <= most
        assert not found.limited.any()


def test_more_exact_keys_than_keys_is_softmax():
    q, k, v = draw()
    for causal in (False, True):
        attn = sq.create("multipole", 16, chunk=32, clusters=4, exact_keys=300, seed=0)
        exact = exact_attention(q, k, v, is_causal=causal)
        for backend in ("reference", "chunked", None):
            assert (attn(q, k, v, is_causal=causal, backend=backend) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_given_choices_are_kept(backend, causal):
    """Any clusters and any selection, also such as no query would choose: outputs and gradients of the definition."""
    if backend == "native" and library.missing():
        pytest.skip(library.missing())
    attn = sq.create("multipole", 16, chunk=32, clusters=4, exact_keys=8, seed=0)
    tensors = draw(heads=4, kv_heads=2, length=150)
    call, g = Call(0.25), torch.Generator().manual_seed(5)
    own = reference.make_choices(attn._spec(causal=causal), call, *tensors)
    given = own._replace(
        selection=(torch.rand(own.selection.shape, generator=g) < 0.5)
        & (own.sizes > 0).flatten(2).repeat_interleave(2, 1).unsqueeze(2)
    )
    spec = attn._spec(causal=causal, known=given)
    way = torch.randn(1, 4, 150, 16, generator=g)
    found = []
    for name in ("reference", backend):
        args = [x.double() if name == "reference" else x.clone() for x in tensors]
        args = [x.requires_grad_() for x in args]
        out = BACKENDS[name].attend(spec, call, *args)
        found.append((out, *torch.autograd.grad(out, args, way.to(out.dtype))))
    assert (found[0][0] - reference.Reference().attend(attn._spec(causal=causal), call, *tensors)).abs().max() > 1e-3
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 1e-5


def test_sharp_queries_take_twice_as_many_keys():
    q, k, v = draw(length=4096, heads=1)
    attn = sq.create("multipole", 16, chunk=256, clusters=12, seed=0)
    blunt, sharp = (attn.inspect(s * q, k, v).exact_keys.float().mean() for s in (0.5, 4.0))
    assert blunt <= 256
    assert 1.9 * blunt < sharp <= 512
    fixed = sq.create("multipole", 16, chunk=256, clusters=12, exact_keys=100, seed=0)
    assert fixed.inspect(4.0 * q, k, v).exact_keys.max() <= 100


def test_all_backends_are_listed_and_named():
    assert list(BACKENDS) == ["native", "chunked", "reference"]


# -- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_clustered_keys_are_resolved(causal):
    """Where keys have structure, a twentieth of them exact is enough; a window or the mean of v is not."""
    q, k, v = clustered(length=1024)
    exact = exact_attention(q, k, v, is_causal=causal)
    attn = sq.create("multipole", 16, chunk=256, clusters=24, exact_keys=100, seed=0)
    assert relative(attn(q, k, v, is_causal=causal), exact) < 0.02
    window = sq.create("local", 16, window=64)
    assert relative(window(q, k, v, is_causal=causal), exact) > 0.3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("error", [0.003, 0.03, 0.3])
def test_the_error_asked_for_is_kept(causal, error):
    for q, k, v in (clustered(length=700, norm=0.8), draw(length=700), draw(length=700, seed=1)):
        attn = sq.create("multipole", 16, chunk=64, clusters=12, error=error, seed=0)
        exact = exact_attention(q, k, v, is_causal=causal)
        got = (attn(q, k, v, is_causal=causal) - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
        assert (got <= 2 * error).all()
        assert (attn.estimated_error(q, k, v, causal) <= 2 * error).all()


def test_a_smaller_error_takes_more_keys():
    q, k, v = draw(length=700)
    used = []
    for error in (0.3, 0.03, 0.003, 0.0003):
        attn = sq.create("multipole", 16, chunk=64, clusters=6, error=error, seed=0)
        used.append(float(attn.inspect(q, k, v).exact_keys.float().mean()))
    assert used == sorted(used)
    assert used[-1] > used[0] + 20


def test_error_zero_is_exact_and_a_large_one_is_the_means_alone():
    q, k, v = draw()
    for causal in (False, True):
        exact = exact_attention(q, k, v, is_causal=causal)
        none_left = sq.create("multipole", 16, chunk=32, clusters=4, error=0, seed=0)
        assert (none_left(q, k, v, is_causal=causal) - exact).abs().max() < 1e-5
        loose = sq.create("multipole", 16, chunk=32, clusters=4, error=1e6, seed=0)
        none = sq.create("multipole", 16, chunk=32, clusters=4, exact_keys=0, seed=0)
        assert (loose(q, k, v, is_causal=causal) - none(q, k, v, is_causal=causal)).abs().max() < 1e-6
        assert loose.inspect(q, k, v, causal).exact_keys.max() == 0


def test_the_limit_that_was_reached_can_be_read():
    q, k, v = draw(length=500, dim=16)
    attn = sq.create("multipole", 16, chunk=64, clusters=6, error=1e-4, exact_keys=60, seed=0)
    found = attn.inspect(q, k, v)
    assert found.limited.any()
    assert int(found.exact_keys.max()) <= 60
    assert not sq.create("multipole", 16, chunk=64, clusters=6, error=1e-4, seed=0).inspect(q, k, v).limited.any()


@needs_native
@pytest.mark.parametrize("causal", [False, True])
def test_both_ways_to_inspect_agree(causal):
    q, k, v = draw(length=333)
    for options in ({"exact_keys": 30}, {"error": 0.05}, {"error": 0.001, "exact_keys": 40}):
        attn = sq.create("multipole", 16, chunk=64, clusters=8, seed=1, **options)
        ours = attn.inspect(q, k, v, causal)
        theirs = attn.inspect(q.double(), k.double(), v.double(), causal)
        same = (ours.exact_keys == theirs.exact_keys) & (ours.limited == theirs.limited)
        assert same.float().mean() > 0.999
        assert torch.allclose(ours.squared_norm, theirs.squared_norm.float(), rtol=1e-2, atol=1e-4)
        total, want = ours.squared_error.sum(), theirs.squared_error.sum()
        assert torch.allclose(total, want, rtol=0.01)


@pytest.mark.parametrize("tight", [False, True])
def test_needles_are_found(tight):
    """One key among 4096 has an exact weight above 0.99, the others are random or form tight clusters."""
    found = 0
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        dim, length = 64, 4096
        k = torch.randn(1, 1, length, dim, generator=g)
        if tight:
            k = take_per_head(k, torch.randint(64, (1, 1, length), generator=g)) + 0.02 * k
        k = math.sqrt(dim) * k / k.norm(dim=-1, keepdim=True)
        place = int(torch.randint(length, (), generator=g))
        needle = F.normalize(torch.randn(dim, generator=g), dim=-1) * math.sqrt(dim)
        k[0, 0, place] = needle
        q = needle.view(1, 1, 1, dim) * 3.0  # its score is 24, the others' have a standard deviation of 3
        v = torch.randn(1, 1, length, 16, generator=g)
        weight = torch.softmax((q @ k.mT) / 8, -1)[..., place]
        assert weight > 0.99
        out = sq.create("multipole", dim, seed=0)(q, k, v)
        found += bool((out - v[:, :, place]).norm() < 0.02 * v[:, :, place].norm())
    assert found >= 19


# -- forms ----------------------------------------------------------------------------------------------------------


def test_absorb_and_read_are_the_full_form():
    attn = sq.create("multipole", 8, chunk=8, clusters=2, exact_keys=4, seed=0)
    q, k, v = draw(length=61, dim=8, batch=2)
    mask = torch.rand(2, 61, generator=torch.Generator().manual_seed(3)) > 0.3
    want = attn(q, k, v, key_mask=mask)
    state = attn.absorb(k[:, :, :20], v[:, :, :20], key_mask=mask[:, :20])
    for a, b in ((20, 27), (27, 61)):
        state = attn.absorb(k[:, :, a:b], v[:, :, a:b], state, key_mask=mask[:, a:b])
    assert (attn.read(q, state) - want).abs().max() < 1e-5
    halves = [attn.absorb(k[:, :, a:b], v[:, :, a:b], key_mask=mask[:, a:b]) for a, b in ((0, 20), (20, 61))]
    for dtype in (torch.float32, torch.float64):
        parts = [attn.absorb(x.k.to(dtype), x.v.to(dtype), key_mask=x.mask) for x in halves]
        assert (attn.read(q.to(dtype), sq.merge(*parts)) - want).abs().max() < 1e-5


def test_clusters_of_complete_chunks_are_never_made_again():
    attn = sq.create("multipole", 8, chunk=8, clusters=2, exact_keys=4, seed=0)
    q, k, v = draw(length=40, dim=8)
    _, state = attn.scan(q[:, :, :20], k[:, :, :20], v[:, :, :20])
    marked = state.order.clone()
    marked[..., [0, 1]] = marked[..., [1, 0]]  # any other order of the members shows whether it is kept
    import dataclasses

    _, after = attn.scan(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], dataclasses.replace(state, order=marked))
    assert torch.equal(after.order[:, :, :2], marked)
    assert after.order.shape[2] == 5


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "chunked"])
@pytest.mark.parametrize("causal", [False, True])
def test_degenerate_keys(backend, causal):
    attn = sq.create("multipole", 8, chunk=16, clusters=4, exact_keys=8, seed=0)
    q, k, v = draw(length=71, dim=8)
    call = {"is_causal": causal, "backend": backend}
    equal = torch.ones_like(k)
    assert (attn(q, equal, v, **call) - exact_attention(q, equal, v, is_causal=causal)).abs().max() < 1e-5
    for length in (1, 2, 15, 16, 17):
        few = [x[:, :, :length] for x in (q, k, v)]
        if length < 16:
            assert (attn(*few, **call) - exact_attention(*few, is_causal=causal)).abs().max() < 1e-5
        assert attn(*few, **call).isfinite().all()
    huge = 1e4 * k / k.norm(dim=-1, keepdim=True)
    args = [x.clone().requires_grad_() for x in (q, huge, v)]
    out = attn(*args, **call)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in args)
    assert out.abs().max() <= v.abs().max() * 1.001  # a weighted mean of values


@pytest.mark.parametrize("options", [{"exact_keys": 4}, {"exact_keys": 20}, {"error": 0.01}])
@pytest.mark.parametrize("backend", [None, "chunked", "reference"])
def test_nan_is_seen_and_reaches_no_earlier_query(backend, options):
    attn = sq.create("multipole", 8, chunk=8, clusters=2, seed=0, **options)
    for index in (1, 2):
        inputs = list(draw(length=60, dim=8))
        inputs[index][:, :, 30] = float("nan")
        out = attn(*inputs, is_causal=True, backend=backend)
        assert out[:, :, :30].isfinite().all()
        assert out[:, :, 30].isnan().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 100, "chunk": 64}, "clusters=100 must be at most chunk=64"),
        ({"chunk": 1}, "chunk must be at least 2"),
        ({"chunk": 10**9}, "chunk must be at most 65536"),
        ({"exact_keys": -1}, "exact_keys must be at least 0"),
        ({"error": -0.1}, "error must be between 0 and inf, got -0.1"),
        ({"error": float("nan")}, "error must be between 0 and inf, got nan"),
        ({"radius": 2.0}, "radius must be between 0 and 1"),
        ({"cap": 100}, "cap must be between 0 and 40"),
        ({"limit": 64}, "limit=64 needs memory='constant'"),
        ({"sinks": 4}, "sinks=4 needs memory='constant'"),
    ],
)
def test_wrong_options_say_what_is_expected(options, message):
    with pytest.raises(ValueError, match=message):
        sq.create("multipole", 16, **options)


def test_a_number_is_a_number():
    with pytest.raises(TypeError, match="error must be a number, got 'small' of type str"):
        sq.create("multipole", 16, error="small")


def test_a_chunk_longer_than_the_input_is_exact_attention():
    q, k, v = draw(length=70)
    attn = sq.create("multipole", 16, chunk=1 << 16, seed=0)
    for backend in (None, "chunked"):
        assert (attn(q, k, v, backend=backend) - exact_attention(q, k, v)).abs().max() < 1e-5


@needs_native
@pytest.mark.parametrize("length", [1, 7, 16, 33, 70])
def test_lengths_and_chunks_that_fill_no_vector(length):
    """Panels are written whole, as wide as the vectors of the machine: a short input must have room for one."""
    q, k, v = draw(length=length)
    whole = sq.create("multipole", 16, seed=0)
    assert torch.allclose(whole(q, k, v, backend="native"), exact_attention(q, k, v), atol=1e-5)
    small = sq.create("multipole", 16, chunk=5, clusters=2, exact_keys=4, seed=0)
    assert torch.allclose(small(q, k, v, backend="native"), small(q, k, v, backend="chunked"), atol=1e-5)


def test_inspect_refuses_what_the_call_refuses():
    q, k, v = draw(length=70)
    with pytest.raises(ValueError, match="as many queries as keys, got 5 and 70"):
        sq.create("multipole", 16, seed=0).inspect(q[:, :, :5], k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1.0, 5.0, 50.0])
def test_no_error_allowed_is_exact_attention_in_every_backend(dtype, norm):
    q, k, v = (x.to(dtype) for x in draw(length=200))
    attn = sq.create("multipole", 16, chunk=32, clusters=6, error=0.0, seed=0)
    exact = sq.attention(norm * q, norm * k, v, "softmax")
    for backend in BACKENDS:
        if dtype == torch.float32 or backend != "native":
            assert relative(attn(norm * q, norm * k, v, backend=backend), exact) < 1e-8
    with pytest.raises(ValueError, match="error=0 is exact attention, which exact_keys=4 would limit"):
        sq.create("multipole", 16, error=0, exact_keys=4)


@needs_native
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", [{"error": 0.01}, {"exact_keys": 24}])
def test_inspecting_ignores_what_masked_keys_hold(options, is_causal):
    q, k, v = draw(length=300, seed=1)
    mask = torch.rand(1, 300, generator=torch.Generator().manual_seed(2)) > 0.2
    k[:, :, ~mask[0]] = float("nan")
    attn = sq.create("multipole", 16, chunk=32, clusters=6, seed=0, **options)
    fast = attn.inspect(2 * q, 2 * k, v, is_causal, key_mask=mask)
    slow = attn.inspect(*(x.double() for x in (2 * q, 2 * k, v)), is_causal, key_mask=mask)
    assert (fast.exact_keys == slow.exact_keys).float().mean() > 0.99
    for got, want in zip(fast[:2], slow[:2], strict=True):
        assert torch.allclose(got.sum(), want.sum().float(), rtol=0.01)


def test_values_without_components_are_refused():
    q, k, _ = draw(length=40)
    attn = sq.create("multipole", 16, chunk=8, clusters=2)
    for call in (attn.scan, attn.inspect, attn.estimated_error):
        with pytest.raises(ValueError, match="v must have a width of at least 1"):
            call(q, k, k[..., :0])


def test_inspect_takes_a_bool_alone():
    attn = sq.create("multipole", 8)
    with pytest.raises(TypeError, match="is_causal"):
        attn.inspect(*torch.randn(3, 1, 1, 8, 8), "yes")


@needs_native
def test_equal_clusters_are_taken_as_far_as_they_fit():
    """A context that repeats itself has clusters of equal value: not all or none of them, but the first ones."""
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 64, 16, generator=g).repeat(1, 1, 32, 1)
    q, v = torch.randn(1, 1, 50, 16, generator=g), torch.randn(1, 1, 64, 16, generator=g).repeat(1, 1, 32, 1)
    attn = sq.create("multipole", 16, chunk=64, clusters=4, exact_keys=200, seed=0)
    spec, call = attn._spec(), Call(0.25)
    ours, theirs = native.make_choices(spec, call, q, k, v), reference.make_choices(spec, call, q, k, v)
    assert torch.equal(ours.selection, theirs.selection)
    assert attn.inspect(q, k, v).exact_keys.min() > 150
    assert torch.allclose(attn(q, k, v), attn(q, k, v, backend="chunked"), atol=1e-5)


@needs_native
@pytest.mark.parametrize("later", [1e19, float("inf"), float("nan")])
def test_later_values_do_not_change_what_an_error_chooses(later):
    attn = sq.create("multipole", 16, chunk=8, clusters=3, error=0.05, seed=0)
    for seed in range(8):  # clusters of the next chunk share a vector with visible ones in some of them
        q, k, v = draw(length=40, seed=seed)
        other = v.clone()
        other[:, :, 36] = later
        found = [attn(q, k, x, is_causal=True)[:, :, :36] for x in (v, other)]
        assert torch.equal(*found)
        inspected = [attn.inspect(q, k, x, is_causal=True) for x in (v, other)]
        assert torch.equal(*(x.exact_keys[..., :36] for x in inspected))
        assert torch.equal(*(x.squared_error[..., :36] for x in inspected))


def test_the_estimate_does_not_depend_on_the_size_of_the_values():
    q, k, v = clustered(length=200)
    attn = sq.create("multipole", 16, chunk=64, clusters=4, exact_keys=16, seed=0)
    want = attn.estimated_error(q, k, v)
    assert torch.allclose(attn.estimated_error(q, k, 1e-16 * v), want, rtol=1e-3)
    assert torch.equal(attn.estimated_error(q, k, 0 * v), torch.zeros_like(want))
