"""Decoding with multipole: states are values although they share memory, and a step needs none of the old keys."""

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import _pytree as pytree

import subquad as sq
from subquad.kernels.native import library

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=library.missing())

OPTIONS = {"chunk": 8, "clusters": 3, "seed": 1}
KINDS = [{"exact_keys": 6}, {"error": 0.05}, {"error": 0.0}, {"memory": "constant", "limit": 6, "sinks": 2}]


def draw(length, batch=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, length, 8, generator=g)
    k, v = torch.randn(2, batch, 2, length, 8, generator=g)
    return q, k, v[..., :6]


def step(attn, tokens, at, state):
    return attn.scan(*(x[:, :, at : at + 1] for x in tokens), state)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_rows_reach_their_borders_at_different_tokens(kind, masked):
    attn, tokens = sq.create("multipole", 8, **OPTIONS, **kind), draw(70, batch=3)
    mask = None
    if masked:
        mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(2)) > torch.tensor([[0.0], [0.3], [0.7]])
        mask[1, :9] = False
    want = attn(*tokens, is_causal=True, key_mask=mask)
    for sizes in ([1] * 70, [33, 1, 0, 2, 34]):
        state, pieces = None, []
        for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
            part = None if mask is None else mask[:, a:b]
            out, state = attn.scan(*(x[:, :, a:b] for x in tokens), state, key_mask=part)
            pieces.append(out)
        assert state.pages is not None
        assert (torch.cat(pieces, 2) - want).abs().max() < 1e-5
        assert state.count.tolist() == ([70] * 3 if mask is None else mask.sum(-1).tolist())
    assert (attn.read(tokens[0], state) - attn(*tokens, key_mask=mask)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_can_be_continued_any_number_of_times_in_any_order(kind):
    attn, tokens, other = sq.create("multipole", 8, **OPTIONS, **kind), draw(40), draw(40, seed=5)
    states = [None]
    for i in range(24):
        states.append(step(attn, tokens, i, states[-1])[1])
    # Others go on from every state, over borders too, and then the first line is walked again.
    for at in (7, 8, 9, 23, 3, 24):
        state = states[at]
        for i in range(12):
            _, state = step(attn, other, i, state)
    want = attn(*tokens, is_causal=True)
    for at in (0, 5, 8, 16, 17, 24):
        state = states[at]
        for i in range(at, 40):
            out, state = step(attn, tokens, i, state)
            assert (out - want[:, :, i : i + 1]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_state_go_on_alike(kind):
    attn, tokens = sq.create("multipole", 8, **OPTIONS, **kind), draw(30)
    _, state = attn.scan(*(x[:, :, :21] for x in tokens))
    rest = [x[:, :, 21:] for x in tokens]
    want, _ = attn.scan(*rest, state)
    leaves, spec = pytree.tree_flatten(state)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), pytree.tree_unflatten(leaves, spec)):
        assert (attn.scan(*rest, other)[0] - want).abs().max() < 1e-6
    second = pytree.tree_map(lambda x: x.index_select(0, torch.tensor([1, 0])), state)
    swapped, _ = attn.scan(*(x.flip(0) for x in rest), second)
    assert (swapped.flip(0) - want).abs().max() < 1e-6


def test_threads_that_continue_one_state_do_not_meet():
    attn, tokens = sq.create("multipole", 8, **OPTIONS, exact_keys=6), draw(60)
    _, state = attn.scan(*(x[:, :, :20] for x in tokens))

    def go(seed):
        out, after = [], state
        for i in range(20):
            one, after = step(attn, draw(20, seed=seed), i, after)
            out.append(one)
        return torch.cat(out, 2)

    alone = [go(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(go, range(8)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_crop_takes_tokens_back(dtype):
    attn, tokens = sq.create("multipole", 8, **OPTIONS, exact_keys=6), [x.to(dtype) for x in draw(60)]
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(2)) > 0.2
    want = attn(*tokens, is_causal=True, key_mask=mask)
    _, state = attn.scan(*(x[:, :, :50] for x in tokens), key_mask=mask[:, :50])
    assert (state.pages is None) == (dtype == torch.float64)
    for length in (50, 47, 33, 16, 3, 0):
        shorter = state.crop(length)
        assert shorter.count.tolist() == mask[:, :length].sum(-1).tolist()
        out, _ = attn.scan(*(x[:, :, length:] for x in tokens), shorter, key_mask=mask[:, length:])
        assert (out - want[:, :, length:]).abs().max() < 1e-5
    for wrong in (-1, 51):
        with pytest.raises(ValueError, match=r"crop: length must be between 0 and the 50 tokens"):
            state.crop(wrong)


def test_an_empty_batch_is_scanned_and_inspected():
    attn, (q, k, v) = sq.create("multipole", 4, 2, seed=0), torch.randn(3, 0, 2, 5, 4)
    out, state = attn.scan(q, k, v)
    assert out.shape == (0, 2, 5, 4) and attn.read(q, attn.absorb(k, v, state)).shape == (0, 2, 5, 4)
    assert attn.inspect(q, k, v).exact_keys.shape == (0, 2, 5)


def test_a_compiled_step_goes_on_from_a_state_of_the_native_kernels():
    attn = sq.create("multipole", 4, 2, chunk=8, clusters=2, seed=0, memory="constant", limit=8, sinks=1)
    q, k, v = torch.randn(3, 1, 2, 21, 4)
    step = torch.compile(lambda q, k, v, s: attn.scan(q, k, v, s)[0], backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        before = attn.scan(q[:, :, :20], k[:, :, :20], v[:, :, :20])[1]
        assert before.pages is not None
        last = [x[:, :, 20:] for x in (q, k, v)]
        assert torch.allclose(step(*last, before), attn.scan(*last, before)[0], atol=1e-5)


def test_a_step_writes_behind_what_is_there():
    attn, tokens = sq.create("multipole", 8, **OPTIONS, exact_keys=6), draw(60)
    _, state = attn.scan(*(x[:, :, :50] for x in tokens))
    kept = [page.memory.clone() for row in state.pages.store.pages for page in row]
    _, after = step(attn, tokens, 50, state)
    assert after.pages.tail is state.pages.tail
    for i in range(51, 60):
        _, after = step(attn, tokens, i, after)
    assert after.pages.store is state.pages.store or after.pages.store.capacity > state.pages.store.capacity
    pages = [page.memory for row, n in zip(after.pages.store.pages, (6, 6), strict=True) for page in row[:n]]
    assert all(torch.equal(a, b) for a, b in zip(kept, pages, strict=True))


# -- one query ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"exact_keys": 12}, {"exact_keys": 0}, {"error": 0.05}])
@pytest.mark.parametrize("large", [1.0, 1e6, 1e12, float("inf")])
def test_a_step_reads_every_value_that_can_be_seen(kind, large):
    """A weight of e^-20 and less counts where its value is large; weights that cannot be seen are not read at all."""
    attn, (q, k, v) = sq.create("multipole", 8, **OPTIONS, **kind), draw(64, batch=1)
    q, k = 6 * q, 2 * k
    v[:, :, ::7, 0] *= large
    want = attn(q, k, v, is_causal=True)
    _, state = attn.scan(*(x[:, :, :40] for x in (q, k, v)))
    for i in range(40, 64):
        out, state = step(attn, (q, k, v), i, state)
        torch.testing.assert_close(out[:, :, 0], want[:, :, i], rtol=2e-5, atol=2e-5, equal_nan=True)


# -- constant memory --------------------------------------------------------------------------------------------------


def dense_constant(attn, q, k, v, scale):
    """The definition, query by query, with clusters that are kept as lists of keys."""
    chunk, outs = attn.chunk, []
    clusters = []  # of (keys, values), the sinks first
    for i in range(q.shape[0]):
        own = i // chunk
        if i % chunk == 0 and i:
            clusters = absorbed(attn, clusters, k[i - chunk : i], v[i - chunk : i], own == 1)
        x = scale * q[i]
        logits = [x @ k[j] for j in range(own * chunk, i + 1)]
        values = [v[j] for j in range(own * chunk, i + 1)]
        for keys, members in clusters:
            spread = (keys - keys.mean(0)).square().mean()
            second = (0.5 * x.square().sum() * spread).clamp(max=attn.cap)
            logits.append(x @ keys.mean(0) + second + torch.tensor(len(keys), dtype=x.dtype).log())
            values.append(members.mean(0))
        outs.append(torch.softmax(torch.stack(logits), 0) @ torch.stack(values))
    return torch.stack(outs)


def absorbed(attn, clusters, k, v, first):
    from subquad.kernels.kmeans import lloyd

    spec = attn._spec()
    rows = (k - k.mean(0)).float().unsqueeze(0)
    kind = lloyd(rows, None, rows.index_select(1, spec.starts()), spec.iterations)[0]
    sinks = attn.sinks if first else 0
    fixed = [(k[i : i + 1], v[i : i + 1]) for i in range(sinks)] if first else clusters[: attn.sinks]
    pool = list(clusters[0 if first else attn.sinks :])
    for c in range(attn.clusters):
        member = (kind == c) & (torch.arange(attn.chunk) >= sinks)
        if member.any():
            pool.append((k[member], v[member]))
    while len(pool) > attn.limit:
        cost = {
            (a, b): len(pool[a][0]) * len(pool[b][0]) / (len(pool[a][0]) + len(pool[b][0]))
            * float((pool[a][0].mean(0) - pool[b][0].mean(0)).square().sum())
            for a in range(len(pool)) for b in range(a + 1, len(pool))
        }  # fmt: skip
        a, b = min(cost, key=cost.get)
        pool[a] = (torch.cat([pool[a][0], pool[b][0]]), torch.cat([pool[a][1], pool[b][1]]))
        del pool[b]
    return fixed + pool


def test_constant_memory_equals_its_definition():
    """With a limit that one merge at a time reaches, the closest pair is the one that the definition merges."""
    attn = sq.create("multipole", 8, chunk=8, clusters=2, limit=3, sinks=2, memory="constant", seed=1)
    q, k, v = (x[:1, :1].double() for x in draw(50))
    want = dense_constant(attn, q[0, 0], k[0, 0], v[0, 0], 8**-0.5)
    assert (attn(q, k, v, is_causal=True)[0, 0] - want).abs().max() < 1e-9


@pytest.mark.parametrize("kinds", ["drawn", "repeated", "one"])
def test_the_native_merge_is_the_merge_of_the_definition(kinds):
    """Clusters after many borders, one row ahead of the other; with repeated tokens most distances are ties at 0."""
    options = {"chunk": 32, "clusters": 7, "limit": 20, "sinks": 3, "memory": "constant", "seed": 1}
    attn, (q, k, v) = sq.create("multipole", 8, **options), draw(500)
    if kinds != "drawn":
        which = torch.randint(12 if kinds == "repeated" else 1, (500,), generator=torch.Generator().manual_seed(3))
        k = k[:, :, which] + 100.0  # and a large common part
    mask = torch.ones(2, 500, dtype=torch.bool)
    mask[1, :40] = False
    state, plain = None, None
    for a in range(0, 500, 50):
        part = tuple(x[:, :, a : a + 50] for x in (q, k, v))
        out, state = attn.scan(*part, state, key_mask=mask[:, a : a + 50])
        want, plain = attn.scan(*part, plain, key_mask=mask[:, a : a + 50], backend="chunked")
        assert state.pages is not None and plain.pages is None
        assert (out - want).abs().max() < 2e-5
        assert torch.equal(state.size, plain.size)
        for name in ("mean", "variance", "mean_value"):
            torch.testing.assert_close(getattr(state, name), getattr(plain, name), rtol=1e-4, atol=1e-4)


def test_a_border_survives_keys_that_are_not_finite():
    attn, (q, k, v) = sq.create("multipole", 8, **OPTIONS, memory="constant", limit=4, sinks=1), draw(60)
    k[:, :, 5] = float("nan")
    k[:, :, 21] = float("inf")
    k[:, :, 22] = -1e30
    _, state = attn.scan(q, k, v)
    assert (state.size.sum(-1) + state.memory().held()[:, None] == 60).all()


def test_constant_memory_is_constant_and_counts_every_key():
    attn = sq.create("multipole", 8, **OPTIONS, memory="constant", limit=6, sinks=2)
    state, sizes = None, []
    for i in range(400):
        out, state = step(attn, draw(1, seed=i), 0, state)
        sizes.append(state.nbytes)
    assert len(set(sizes[16:])) == 1
    assert out.isfinite().all()
    assert (state.size.sum(-1) + state.memory().held()[:, None] == 400).all()
    assert (state.size[:, :, :2] == 1).all()
    assert sq.describe(attn)["constant_memory"]
    assert not sq.describe("multipole")["constant_memory"]


def test_constant_memory_refuses_what_it_cannot_do():
    attn, tokens = sq.create("multipole", 8, **OPTIONS, memory="constant"), draw(20)
    _, state = attn.scan(*tokens)
    with pytest.raises(ValueError, match=r"merge: .*keeps no keys of clustered chunks"):
        sq.merge(state, state)
    with pytest.raises(ValueError, match=r"crop\(3\): .*keeps no keys of clustered chunks"):
        state.crop(3)
    with pytest.raises(ValueError, match="nothing to inspect"):
        attn.inspect(*tokens)
    for wrong in ({"exact_keys": 3}, {"error": 0.1}, {"sinks": 9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sq.create("multipole", 8, **OPTIONS, memory="constant", **wrong)
    with pytest.raises(ValueError, match="memory"):
        sq.create("multipole", 8, memory="some")


def test_merging_loses_little_of_what_means_give():
    """A quarter of the clusters is nearly as good as all of them, and better than a window of the same size."""
    g = torch.Generator().manual_seed(0)
    middle = 2.5 * torch.randn(1, 2, 20, 16, generator=g)
    index = torch.randint(20, (2, 1024), generator=g)
    q, k = (middle[:, :, i] + 0.3 * torch.randn(1, 2, 1024, 16, generator=g) for i in index)
    v = torch.randn(1, 2, 1024, 16, generator=g)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def error(attn):
        return float((attn(q, k, v, is_causal=True) - exact).square().sum() / exact.square().sum())

    ours = error(sq.create("multipole", 16, chunk=64, clusters=16, limit=64, memory="constant", seed=0))
    assert ours < 1.05 * error(sq.create("multipole", 16, chunk=64, clusters=16, exact_keys=0, seed=0))
    assert ours < 0.5 * error(sq.create("local", 16, window=128, sinks=4))
