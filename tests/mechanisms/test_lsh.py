"""LSH attention: choices against a plain loop, the union of rounds, causality of the choices, masks."""

import math

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad.kernels.blocks import slots
from subquad.kernels.lsh import choices as rules
from subquad.kernels.lsh.definition import choose_chunks
from subquad.kernels.native import library

D = 8


def tokens(length, keys=None, batch=2, heads=2, seed=0, width=6):
    generator = torch.Generator().manual_seed(seed)

    def draw(n, d):
        return torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64)

    keys = length if keys is None else keys
    return draw(length, D), draw(keys, D), draw(keys, width)


def visible(attn, q, k, is_causal, **masks):
    """Which keys each query sees, read off the weights: values are unit vectors."""
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return attn(q, k, eye, is_causal=is_causal, **masks) > 0


def loop_hash(attn, x):
    """h(x) = argmax [xR, -xR], one token and one round after the other: [b][h][round][token]."""
    matrix = attn.projection.as_matrix(torch.float64).view(attn.rounds, attn.buckets // 2, D)
    return [
        [[[int(torch.cat([r @ t, -(r @ t)]).argmax()) for t in head] for r in matrix] for head in sequence]
        for sequence in x
    ]


def loop_rank_chunks(query_buckets, key_buckets, size, real):
    """Visible pairs of one round, causal by rank inside a bucket, by the definition."""
    seen = set()
    for i, bucket in enumerate(query_buckets):
        past = [j for j in range(i + 1) if key_buckets[j] == bucket and real[j]]
        own = max(len(past) - 1, 0) // size
        seen |= {(i, j) for rank, j in enumerate(past) if own - rank // size in (0, 1)}
    return seen


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("buckets", "size"), [(2, 5), (4, 3), (6, 16), (4, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_causal_choices_are_those_of_a_plain_loop(shared, buckets, size, masked):
    attn = sq.create("lsh", D, 2, rounds=2, buckets=buckets, bucket_size=size, shared_qk=shared, seed=1)
    q, k, _ = tokens(41)
    real = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > (0.3 if masked else -1.0)
    got = visible(attn, q, k, True, key_mask=real)
    queries, keys = loop_hash(attn, q), loop_hash(attn, q if shared else k)
    for b in range(2):
        for h in range(2):
            want = torch.zeros(41, 41, dtype=torch.bool)
            for r in range(2):
                for i, j in loop_rank_chunks(queries[b][h][r], keys[b][h][r], size, real[b].tolist()):
                    want[i, j] = True
            for i in range(41):
                want[i, i] = bool(real[b, i]) and not (shared and want[i, :i].any())
            if shared:
                want[~real[b]] = False
            assert torch.equal(got[b, h], want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_sorted_choices_are_those_of_a_plain_loop(is_causal):
    attn = sq.create("lsh", D, 2, rounds=2, buckets=4, bucket_size=6, shared_qk=True, chunking="sorted", seed=1)
    q, k, _ = tokens(41)
    got = visible(attn, q, k, is_causal)
    hashes = loop_hash(attn, q)
    for b in range(2):
        for h in range(2):
            want = torch.zeros(41, 41, dtype=torch.bool)
            for r in range(2):
                order = sorted(range(41), key=lambda t: (hashes[b][h][r][t], t))
                for place, i in enumerate(order):
                    start = max(place // 6 - 1, 0) * 6
                    for j in order[start : (place // 6 + 1) * 6]:
                        want[i, j] |= j < i if is_causal else j != i
            for i in range(41):
                want[i, i] = not want[i].any()
            assert torch.equal(got[b, h], want)


def dense_rounds(attn, q, k, is_causal):
    """Scores, and visibility per round, of the fast way's own choices: (X, L, S) and (R, X, L, S)."""
    unit = F.normalize(q, dim=-1) if attn.shared_qk else k
    x, y = q.flatten(0, 1), unit.flatten(0, 1)
    chunks = choose_chunks(attn._spec(x.dtype, is_causal), x, y, None, None)
    offset = chunks.query.unsqueeze(-1) - chunks.key.unsqueeze(-2)
    seen = ((offset == 0) | (offset == 1)).transpose(0, 1)
    seen = seen.tril(-1) if is_causal else seen & ~torch.eye(q.shape[2], dtype=torch.bool)
    return D**-0.5 * x @ y.mT, seen


@pytest.mark.parametrize("is_causal", [False, True])
def test_merging_rounds_with_the_count_is_the_softmax_on_the_union(is_causal):
    attn = sq.create("lsh", D, 2, rounds=4, buckets=4, bucket_size=8, shared_qk=True, seed=2)
    q, k, v = tokens(64)
    out = attn(q, k, v, is_causal=is_causal).flatten(0, 1)
    scores, seen = dense_rounds(attn, q, k, is_causal)
    some = seen.any(0).any(-1)  # rows that see another token
    count = seen.sum(0)
    assert (count > 1).any()  # otherwise this would show nothing

    def merged(per_round):
        """Softmax in each round, then rounds weighted by their log-sum-exps."""
        per_round = per_round.masked_fill(~seen, float("-inf"))
        totals = per_round.logsumexp(-1)
        weights = torch.softmax(totals.masked_fill(~some, 0.0), 0)
        inside = torch.softmax(per_round, -1).nan_to_num(0.0)
        return (weights.unsqueeze(-1) * inside).sum(0) @ v.flatten(0, 1)

    paper = merged((scores - count.clamp(min=1).double().log()).expand(4, -1, -1, -1))
    assert (paper - out)[some].abs().max() < 1e-12
    # What published code does by default: a key seen twice counts twice.
    assert (merged(scores.expand(4, -1, -1, -1)) - out)[some].abs().max() > 0.05
    # And plain averaging of rounds.
    inside = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    assert (inside.mean(0) @ v.flatten(0, 1) - out)[some].abs().max() > 0.05


def test_everything_in_one_chunk_is_exact_softmax():
    q, k, v = tokens(30)
    attn = sq.create("lsh", D, 2, rounds=3, buckets=2, bucket_size=30, seed=0)
    assert (attn(q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12


def test_sorted_chunks_leak_by_selection_and_rank_chunks_do_not():
    q, k, v = tokens(96, batch=1)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, -1] = -3 * x[:, :, -1]
    moved = {}
    for chunking in ("sorted", "rank"):
        for shared in (False, True):
            attn = sq.create(
                "lsh", D, 2, rounds=2, buckets=4, bucket_size=8, shared_qk=shared, chunking=chunking, seed=0
            )
            assert attn.leaks_by_selection == (chunking == "sorted")
            difference = attn(q, k, v, is_causal=True) - attn(*changed, is_causal=True)
            moved[chunking, shared] = difference[:, :, :-1].abs().max().item()
    assert moved["sorted", False] > 0.05
    assert moved["sorted", True] > 0.05
    assert moved["rank", False] < 1e-14
    assert moved["rank", True] < 1e-14


@pytest.mark.parametrize("shared", [False, True])
def test_a_prefix_alone_is_the_prefix_of_the_whole(shared):
    attn = sq.create("lsh", D, 2, rounds=2, buckets=4, bucket_size=8, shared_qk=shared, seed=0)
    q, k, v = tokens(90)
    whole = attn(q, k, v, is_causal=True)
    for length in (1, 8, 57):
        alone = attn(*(x[:, :, :length] for x in (q, k, v)), is_causal=True)
        assert (whole[:, :, :length] - alone).abs().max() < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_padding_on_either_side_changes_nothing(is_causal, shared, left):
    attn = sq.create("lsh", D, 2, rounds=2, buckets=4, bucket_size=8, shared_qk=shared, seed=0)
    q, k, v = tokens(50)
    pad = (0, 0, 23, 0) if left else (0, 0, 0, 23)
    padded = [F.pad(x, pad, value=7.0) for x in (q, k, v)]
    mask = F.pad(torch.ones(2, 50, dtype=torch.bool), pad[2:], value=False)
    out = attn(*padded, is_causal=is_causal, key_mask=mask, query_mask=mask)
    real = out[:, :, 23:] if left else out[:, :, :50]
    assert (real - attn(q, k, v, is_causal=is_causal)).abs().max() < 1e-12


def test_shared_queries_read_no_keys_and_see_themselves_last():
    attn = sq.create("lsh", D, 2, rounds=1, buckets=64, bucket_size=4, shared_qk=True, seed=0)
    assert not attn.uses_keys
    q, k, v = tokens(12)
    out = attn(q, k, v, is_causal=True)
    assert torch.equal(out, attn(q, torch.zeros_like(k), v, is_causal=True))
    assert torch.equal(out[:, :, 0], v[:, :, 0])  # the first token has nothing but itself
    seen = visible(attn, q, k, True)
    itself = seen.diagonal(dim1=-2, dim2=-1)
    assert (seen.sum(-1)[itself] == 1).all()
    assert itself.any()
    assert not itself.all()
    # The norm of a key does not count: the last query sees the same when earlier tokens are made longer.
    longer = q.clone()
    longer[:, :, :-1] *= 5
    assert (attn(longer, k, v, is_causal=True)[:, :, -1] - out[:, :, -1]).abs().max() < 1e-12


@pytest.mark.parametrize("is_causal", [False, True])
def test_large_numbers_of_buckets_use_wider_integers(is_causal):
    attn = sq.create("lsh", D, 2, rounds=2, buckets=20000, bucket_size=4, seed=0)
    q, k, v = tokens(40)
    q[:, :, 20:], k[:, :, 20:] = q[:, :, :20], q[:, :, :20]  # equal vectors meet even in many buckets
    out = attn(q, k, v, is_causal=is_causal)
    assert (out - attn(q, k, v, is_causal=is_causal, backend="reference")).abs().max() < 1e-12
    assert (visible(attn, q, k, is_causal).sum(-1) > 1).any()


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_equal_and_nearly_equal_tokens(shared):
    # Scores that differ by less than their weights can show: whose is the largest must not decide who gets a gradient.
    attn = sq.create("lsh", D, 2, rounds=3, buckets=6, bucket_size=8, shared_qk=shared, seed=0)
    q, k, v = (x[:, :, torch.arange(60) % 7] for x in tokens(60))
    noise = torch.randn(60, D, dtype=q.dtype, generator=torch.Generator().manual_seed(0))
    grads = []
    for backend in (None, "reference"):
        inputs = [x.clone().requires_grad_() for x in (0.1 * q + 1e-16 * noise, 0.1 * k + 1e-16 * noise, v)]
        attn(*inputs, is_causal=True, backend=backend).square().sum().backward()
        grads.append([x.grad for x in inputs if x.grad is not None])
    for got, want in zip(*grads, strict=True):
        assert (got - want).abs().max() < 1e-10


def test_every_query_sees_a_key_in_cross_attention():
    for length, keys in ((1, 50), (50, 1), (7, 64), (64, 7), (33, 32)):
        attn = sq.create("lsh", D, 2, rounds=1, buckets=8, bucket_size=4, seed=0)
        q, k, _ = tokens(length, keys)
        assert visible(attn, q, k, False).any(-1).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_mask_that_empties_buckets(is_causal, shared):
    attn = sq.create("lsh", D, 2, rounds=1, buckets=4, bucket_size=4, shared_qk=shared, seed=0)
    q, k, v = tokens(40)
    bucket = rules.hash_buckets(k.flatten(0, 1), attn.projection.as_matrix(k.dtype), 1).view(2, 2, 40)
    keep = bucket[:, 0] != bucket[:, 0, :1]  # a whole bucket of head 0 is gone
    call = {"is_causal": is_causal, "key_mask": keep}
    out = attn(q, k, v, **call)
    assert out.isfinite().all()
    assert (out - attn(q, k, v, backend="reference", **call)).abs().max() < 1e-12
    assert not (visible(attn, q, k, is_causal, key_mask=keep) & ~keep[:, None, None, :]).any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("length", [1, 3, 31, 33, 64])
def test_more_buckets_and_longer_chunks_than_tokens(is_causal, shared, length):
    # No length has to divide anything; a chunk longer than the sequence holds all of it that shares a bucket.
    attn = sq.create("lsh", D, 2, rounds=2, buckets=100, bucket_size=32, shared_qk=shared, seed=0)
    q, k, v = tokens(length)
    out = attn(q, k, v, is_causal=is_causal)
    assert (out - attn(q, k, v, is_causal=is_causal, backend="reference")).abs().max() < 1e-12
    if length <= 32 and not is_causal and not shared:  # one chunk of the whole order
        assert (out - sq.attention(q, k, v, "softmax")).abs().max() < 1e-12


def test_similar_tokens_share_buckets_as_often_as_the_angle_says():
    # Collision probabilities of 16 buckets at D = 32 and angles .2, .5, 1, 1.5, from an independent simulation.
    rounds, dim = 20000, 32
    matrix = torch.randn(rounds * 8, dim, generator=torch.Generator().manual_seed(0))
    for angle, want in ((0.2, 0.81), (0.5, 0.57), (1.0, 0.26), (1.5, 0.08)):
        x = torch.zeros(1, 2, dim)
        x[0, 0, 0] = 1.0
        x[0, 1, 0], x[0, 1, 1] = math.cos(angle), math.sin(angle)
        bucket = rules.hash_buckets(x, matrix, rounds)[0]
        # 20000 rounds: standard error at most .0036; the reference values are rounded to .005.
        assert abs((bucket[:, 0] == bucket[:, 1]).float().mean().item() - want) < 0.025


@pytest.mark.parametrize("groups", [1, 3, 7])
def test_slots_hold_every_row_once_in_blocks_of_one_group(groups):
    group = torch.randint(0, groups, (4, 29), generator=torch.Generator().manual_seed(groups))
    slot, row, block = slots(group, groups, 4)
    for x in range(4):
        used = row[x][row[x] < 29]
        assert sorted(used.tolist()) == list(range(29))
        assert torch.equal(row[x][slot[x]], torch.arange(29))
        assert torch.equal(block[x][slot[x] // 4], group[x])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"shared_qk": True}, {"chunking": "sorted"}], ids=["separate", "shared", "sorted"]
)
@pytest.mark.parametrize(("length", "heads", "size"), [(1500, 1, 20), (700, 4, 300)])
def test_native_tiles_of_all_sizes(is_causal, options, length, heads, size):
    # More queries than a task has, more of a chunk than a tile has rows, more keys than it has columns; one head for
    # several threads, and several query heads for a key head.
    if library.missing():
        pytest.skip(library.missing())
    attn = sq.create("lsh", D, heads, max(heads // 2, 1), rounds=3, buckets=6, bucket_size=size, seed=0, **options)
    q, k, v = (x.float() for x in tokens(length, batch=2, heads=heads))
    k, v = k[:, : attn.kv_heads], v[:, : attn.kv_heads]
    real = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.1
    found = {}
    for backend in ("native", "chunked"):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attn(*given, is_causal=is_causal, key_mask=real, backend=backend)
        out.backward(torch.cos(out.detach() * 7))
        found[backend] = [out.detach(), *(x.grad for x in given)]
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), found["native"], found["chunked"], strict=True):
        if theirs is None:  # keys that are not read
            continue
        assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1), name


def test_memory_of_the_backward_grows_with_the_length_only(saved_bytes):
    def kept(length):
        attn = sq.create("lsh", D, 1, rounds=2, buckets=8, bucket_size=16, seed=0)
        q, k, v = (x.float().requires_grad_() for x in tokens(length, batch=1, heads=1, width=D))
        return saved_bytes(lambda: attn(q, k, v, is_causal=True))

    assert kept(4096) < 2.3 * kept(2048)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"buckets": 7}, ValueError, "buckets=7 must be even.*use 8"),
        ({"buckets": 0}, ValueError, "buckets must be at least 2"),
        ({"rounds": 0}, ValueError, "rounds must be at least 1"),
        ({"bucket_size": 2.5}, TypeError, "bucket_size must be an integer"),
        ({"shared_qk": "no"}, TypeError, "shared_qk must be"),
        ({"chunking": "sort"}, ValueError, "chunking='sort' is not known.*did you mean 'sorted'"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("lsh", D, **options)


def test_shared_queries_refuse_cross_attention():
    attn = sq.create("lsh", D, shared_qk=True)
    with pytest.raises(ValueError, match=r"same length, got 5 and 9.*shared_qk=False"):
        attn(*tokens(5, 9))
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        attn(*tokens(5), chunk_size=0)
