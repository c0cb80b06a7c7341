"""Clustered attention: K-means against plain loops, row sums, error bounds, masks, and empty clusters."""

import pytest
import torch
import torch.nn.functional as F

import subquad as sq
from subquad.kernels.clustered import definition, native
from subquad.kernels.clustered.definition import top_keys
from subquad.kernels.kmeans import ClusterDraw, cluster, cluster_means, lloyd
from subquad.kernels.native import library
from subquad.kernels.operator import Call

D = 8
NAMES = ("clustered", "improved-clustered")
needs_native = pytest.mark.skipif(bool(library.missing()), reason=library.missing())


def tokens(length, keys=None, batch=2, heads=2, seed=0, width=6, norm=1.0):
    generator = torch.Generator().manual_seed(seed)

    def draw(n, d):
        return norm * torch.randn(batch, heads, n, d, generator=generator, dtype=torch.float64)

    keys = length if keys is None else keys
    return draw(length, D), draw(keys, D), draw(keys, width)


def weights(attn, q, k, **call):
    """The attention matrix (B, Hq, L, S), read off with unit vectors as values."""
    return attn(q, k, torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1), **call)


def exact(q, k):
    return torch.softmax(D**-0.5 * q @ k.mT, -1)


def loop_hamming(x, draw, iterations, starts):
    """K-means in Hamming distance of one sequence, one token at a time; ties go to the first cluster."""
    codes = [[1 if bit >= 0 else -1 for bit in row] for row in (x @ draw.matrix.to(x.dtype).mT).tolist()]
    centroids = [codes[start] for start in starts]

    def nearest(code):
        distance = [sum(a != b for a, b in zip(code, centroid, strict=True)) for centroid in centroids]
        return distance.index(min(distance))

    for _ in range(iterations):
        assigned = [nearest(code) for code in codes]
        for c, centroid in enumerate(centroids):
            votes = [sum(code[i] for code, a in zip(codes, assigned, strict=True) if a == c) for i in range(draw.rows)]
            centroids[c] = [(1 if vote > 0 else -1) if vote else old for vote, old in zip(votes, centroid, strict=True)]
    return [nearest(code) for code in codes]


def test_hamming_is_that_of_a_plain_loop():
    draw = ClusterDraw(clusters=5, bits=9, dim=D, seed=0)
    x = tokens(60)[0].flatten(0, 1)
    assigned = cluster(x, None, draw, clustering="hamming", iterations=4)
    starts = [int((c + u) * 60 / 5) for c, u in enumerate(draw.starts.tolist())]
    for sequence, got in zip(x, assigned, strict=True):
        assert got.tolist() == loop_hamming(sequence, draw, 4, starts)


def test_lloyd_lowers_the_distortion_and_ends_at_means():
    draw = ClusterDraw(clusters=6, bits=1, dim=D, seed=0)
    x = tokens(190)[0].flatten(0, 1)  # few enough that the sample is all of them
    before = float("inf")
    for iterations in (0, 1, 3, 60):
        assigned = cluster(x, None, draw, clustering="lloyd", iterations=iterations)
        member = F.one_hot(assigned, 6).mT.to(x.dtype)
        mean = member @ x / member.sum(-1, keepdim=True)
        distortion = (x - member.mT @ mean).square().sum().item()
        assert distortion < before
        before = distortion
    # Converged: every token is with its nearest mean.
    assert torch.equal(torch.cdist(x, mean).argmin(-1), assigned)


def test_lloyd_finds_separate_clouds():
    centres = 20 * torch.eye(4, D, dtype=torch.float64)
    label = torch.arange(80) % 4
    x = (centres[label] + torch.randn(80, D, dtype=torch.float64)).expand(3, -1, -1)
    # Clouds in blocks, so that every stretch of the sequence starts one cluster.
    order = label.argsort(stable=True)
    for clustering in ("lloyd", "hamming"):
        draw = ClusterDraw(clusters=4, bits=63, dim=D, seed=0)
        assigned = cluster(x[:, order], None, draw, clustering=clustering, iterations=10)
        assert torch.equal(assigned[0], torch.arange(4).repeat_interleave(20))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clustering", ["hamming", "lloyd"])
def test_rows_sum_to_one(name, clustering):
    attn = sq.create(name, D, 2, clusters=7, clustering=clustering, seed=0)
    q, k, _ = tokens(90, 70, norm=2.0)
    mask = torch.rand(2, 70, generator=torch.Generator().manual_seed(0)) > 0.5
    assert (weights(attn, q, k).sum(-1) - 1).abs().max() < 1e-12
    masked = weights(attn, q, k, key_mask=mask)
    assert (masked.sum(-1) - 1).abs().max() < 1e-12
    assert (masked >= 0).all()
    assert (masked.masked_select(~mask[:, None, None, :]) == 0).all()


@pytest.mark.parametrize("norm", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("group_size", [1, 4])
def test_improved_is_never_further_from_exact_than_clustered(norm, group_size):
    violations = rows = 0
    for seed in range(4):
        q, k, _ = tokens(96, seed=seed, norm=norm)
        options = {"clusters": 8, "seed": seed}
        plain = weights(sq.create("clustered", D, 2, **options), q, k)
        attn = sq.create("improved-clustered", D, 2, topk=16, group_size=group_size, **options)
        improved = weights(attn, q, k)
        want = exact(q, k)
        a, b = ((x - want).abs().sum(-1) for x in (improved, plain))
        violations += int((a > b + 1e-12).sum())
        rows += a.numel()
        assert a.mean() < 0.98 * b.mean()  # and really better
    assert rows == 1536
    assert violations == 0


def test_without_the_mass_rows_would_not_be_improved():
    # Replacing the top weights by the exact softmax on them, without the cluster's mass, breaks row sums and the bound.
    q, k, _ = tokens(96, norm=2.0)
    attn = sq.create("improved-clustered", D, 2, clusters=8, topk=16, seed=0)
    plain = weights(sq.create("clustered", D, 2, clusters=8, seed=0), q, k)
    chosen = torch.zeros_like(plain).scatter(-1, plain.topk(16).indices, 1.0).bool()
    inside = torch.softmax((D**-0.5 * q @ k.mT).masked_fill(~chosen, float("-inf")), -1)
    wrong = torch.where(chosen, inside, plain)
    assert (wrong.sum(-1) - 1).abs().max() > 0.05
    right = torch.where(chosen, inside * (plain * chosen).sum(-1, keepdim=True), plain)
    assert (weights(attn, q, k) - right).abs().max() < 1e-12


def test_error_of_clustered_is_within_its_bound():
    # ||A^c_j - A_i||_2 <= scale |q_i - c_j| ||K||_2 / 2: the Jacobian diag(p) - p p^T of a softmax has norm <= 1/2.
    for norm in (0.3, 1.0, 4.0):
        q, k, _ = tokens(80, norm=norm)
        attn = sq.create("clustered", D, 2, clusters=6, clustering="lloyd", seed=0)
        assigned = cluster(q.flatten(0, 1), None, attn.draw, clustering="lloyd", iterations=attn.iterations)
        member = F.one_hot(assigned, 6).mT.to(q.dtype)
        centroid = member @ q.flatten(0, 1) / member.sum(-1, keepdim=True).clamp(min=1)
        distance = (q.flatten(0, 1) - member.mT @ centroid).norm(dim=-1).view(2, 2, 80)
        error = (weights(attn, q, k) - exact(q, k)).norm(dim=-1)
        bound = D**-0.5 * distance * torch.linalg.matrix_norm(k, 2).unsqueeze(-1) / 2
        assert (error <= bound + 1e-12).all()
    # The constant cannot be lowered: two keys, queries around the point where both weigh the same.
    k = torch.tensor([[[[1.0], [-1.0]]]], dtype=torch.float64)
    q = torch.tensor([[[[1e-4], [-1e-4]]]], dtype=torch.float64)
    attn = sq.create("clustered", 1, 1, clusters=1, seed=0)
    error = (weights(attn, q, k, scale=1.0) - torch.softmax(q @ k.mT, -1)).norm(dim=-1)
    assert (error / (1e-4 * 2**0.5 / 2) > 0.999).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clustering", ["hamming", "lloyd"])
@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_a_cluster_per_query_is_exact_softmax(name, clustering, length):
    # Fewer tokens than clusters: the others stay empty.
    attn = sq.create(name, D, 2, clusters=20, bits=63, clustering=clustering, seed=0)
    q, k, v = tokens(length, 30)
    assert (attn(q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12


def test_all_keys_chosen_is_exact_softmax():
    q, k, v = tokens(60, 32)
    for options in ({"topk": 32}, {"topk": 64}, {"topk": 35, "group_size": 7}):
        attn = sq.create("improved-clustered", D, 2, clusters=3, seed=0, **options)
        assert (attn(q, k, v) - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_equal_queries_leave_clusters_empty(name):
    q, k, v = tokens(40)
    q = q[:, :, :1].expand_as(q).clone().requires_grad_()
    out = sq.create(name, D, 2, clusters=9, seed=0)(q, k, v)
    assert (out - F.scaled_dot_product_attention(q, k, v)).abs().max() < 1e-12
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clustering", ["hamming", "lloyd"])
def test_a_mask_that_empties_a_cluster(name, clustering):
    attn = sq.create(name, D, 2, clusters=4, clustering=clustering, seed=0)
    q, k, v = tokens(60)
    assigned = cluster(q.flatten(0, 1), None, attn.draw, clustering=clustering, iterations=attn.iterations).view(
        2, 2, 60
    )
    keep = assigned[:, 0] != 1  # the queries of one cluster of head 0 are gone
    out = attn(q, k, v, query_mask=keep)
    assert out.isfinite().all()
    assert (out.masked_select(~keep[:, None, :, None]) == 0).all()
    for b in range(2):
        alone = attn(q[b : b + 1, :, keep[b]], k[b : b + 1], v[b : b + 1])
        assert (out[b : b + 1, :, keep[b]] - alone).abs().max() < 1e-12


@pytest.mark.parametrize("clustering", ["hamming", "lloyd"])
def test_a_mask_that_leaves_nothing(clustering):
    # No real query, and no real key, in one sequence of the batch: zeros there, the other as it is alone.
    for name in NAMES:
        attn = sq.create(name, D, 2, clusters=4, clustering=clustering, seed=0)
        q, k, v = tokens(30)
        mask = torch.tensor([[False], [True]]).expand(2, 30)
        for masks in ({"key_mask": mask}, {"query_mask": mask}, {"key_mask": mask, "query_mask": mask}):
            out = attn(q, k, v, **masks)
            assert (out[0] == 0).all()
            assert (out[1:] - attn(q[1:], k[1:], v[1:])).abs().max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clustering", ["hamming", "lloyd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_query_that_is_not_a_number_reaches_its_own_cluster_only(name, clustering, dtype):
    attn = sq.create(name, D, 1, clusters=6, clustering=clustering, iterations=10, seed=0)
    q, k, v = (x.to(dtype) for x in tokens(60, batch=1, heads=1))
    q[0, 0, 7] = float("nan")
    out = attn(q, k, v)[0, 0]
    assert out[7].isnan().all()
    lost = out.isnan().any(-1)
    assigned = cluster(q.flatten(0, 1), None, attn.draw, clustering=clustering, iterations=10)[0]
    assert torch.equal(lost, assigned == assigned[7])
    assert lost.sum() < 40


def test_distances_in_pieces_change_no_choice(monkeypatch):
    import subquad.kernels.kmeans as kmeans

    draw = ClusterDraw(clusters=9, bits=20, dim=D, seed=0)
    x = tokens(300)[0].flatten(0, 1)
    whole = cluster(x, None, draw, clustering="hamming", iterations=5)
    monkeypatch.setattr(kmeans, "PIECE", 1)  # 64 tokens at a time
    assert torch.equal(cluster(x, None, draw, clustering="hamming", iterations=5), whole)


@pytest.mark.parametrize("name", NAMES)
def test_masked_queries_have_no_influence(name):
    attn = sq.create(name, D, 2, clusters=4, seed=0)
    q, k, v = tokens(50)
    mask = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) > 0.4
    garbage = torch.where(mask[:, None, :, None], q, 1e3 * torch.randn_like(q))
    want = attn(q, k, v, query_mask=mask)
    assert torch.equal(attn(garbage, k, v, query_mask=mask), want)
    # Without the mask they move the centroids of the others.
    moved = (attn(garbage, k, v) - want).masked_select(mask[:, None, :, None])
    assert moved.abs().max() > 0.01


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("left", [False, True])
def test_padding_on_either_side_changes_nothing(name, group_size, left):
    options = {"topk": 8, "group_size": group_size} if name == "improved-clustered" else {}
    attn = sq.create(name, D, 2, clusters=4, seed=0, **options)
    q, k, v = tokens(50)
    pad = (0, 0, 23, 0) if left else (0, 0, 0, 23)
    padded = [F.pad(x, pad, value=7.0) for x in (q, k, v)]
    mask = F.pad(torch.ones(2, 50, dtype=torch.bool), pad[2:], value=False)
    out = attn(*padded, key_mask=mask, query_mask=mask)
    real = out[:, :, 23:] if left else out[:, :, :50]
    assert (real - attn(q, k, v)).abs().max() < 1e-12


def test_masks_come_before_the_choice_of_keys():
    # A masked key with the largest score must not take a place among the top keys.
    attn = sq.create("improved-clustered", D, 1, clusters=1, topk=2, seed=0)
    q, k, v = tokens(6, 12, batch=1, heads=1)
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, :4] = False
    k[:, :, :4] = 10 * q.mean(-2, keepdim=True)
    got = attn(q, k, v, key_mask=mask)
    assert (got - attn(q, k[:, :, 4:], v[:, :, 4:])).abs().max() < 1e-12
    scores = q.mean(-2, keepdim=True) @ k.mT
    late = scores.topk(2).indices  # what choosing first would recompute: masked keys only
    assert not mask[0, late.flatten()].any()


def test_groups_are_chosen_by_their_joint_mass_also_where_it_underflows():
    level = torch.tensor([0.9, 0.9, -9.0, -9.0, 1.0, -9.0, -500.0, -600.0, -400.0, -700.0])
    scores, call = level[None, None, None], Call(1.0)
    for topk, want in ((2, [0, 1]), (8, [0, 1, 2, 3, 4, 5, 8, 9])):
        # e^.9 + e^.9 > e^1 + e^-9, though key 4 is the largest. Of groups whose mass underflows to 0 the one with the
        # larger key is taken, not just any.
        spec = sq.create("improved-clustered", D, 1, clusters=1, topk=topk, group_size=2, seed=0)._spec()
        chosen, hidden = top_keys(spec, call, scores)
        assert sorted(chosen.flatten().tolist()) == want
        assert not hidden.any()


# -- the native kernels -----------------------------------------------------------------------------------------------


def single(length, **changes):
    return [x.float() for x in tokens(length, **changes)]


@needs_native
@pytest.mark.parametrize("clustering", ["hamming", "lloyd"])
@pytest.mark.parametrize("group_size", [1, 4])
def test_both_ways_to_choose_agree(clustering, group_size):
    # 300 queries in 6 clusters: k-means sees a sample of them.
    options = {"clusters": 6, "topk": 12, "group_size": group_size, "clustering": clustering, "seed": 1}
    spec = sq.create("improved-clustered", D, 2, **options)._spec()
    q, k, _ = single(300, keys=90)
    masks = (torch.rand(2, n, generator=torch.Generator().manual_seed(1)) > 0.2 for n in (90, 300))
    for call in (Call(0.4), Call(0.4, *masks)):
        ours, theirs = native.make_choices(spec, call, q, k), definition.make_choices(spec, call, q, k)
        assert torch.equal(ours.assigned, theirs.assigned)
        used = torch.zeros(2, 2, 6, dtype=torch.bool).scatter(-1, ours.assigned, True)  # the others choose nothing
        assert torch.equal(ours.top.sort(-1).values[used], theirs.top.sort(-1).values[used])
        assert (ours.top[~used] == -1).all()


@needs_native
def test_a_call_says_which_keys_it_took():
    attn = sq.create("improved-clustered", D, 2, clusters=4, topk=5, seed=0)
    q, k, _ = single(70)
    plain = weights(sq.create("clustered", D, 2, clusters=4, seed=0), q, k)
    assigned, top = native.make_choices(attn._spec(), Call(D**-0.5), q, k)
    for query in (0, 31, 69):
        mine = top[0, 1, assigned[0, 1, query]]
        assert sorted(mine.tolist()) == sorted(plain[0, 1, query].topk(5).indices.tolist())


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_neither_threads_nor_neighbours_change_a_bit(name):
    attn = sq.create(name, D, 2, clusters=30, seed=0)
    q, k, v = single(700, batch=3)
    before, want = torch.get_num_threads(), attn(q, k, v)
    try:
        torch.set_num_threads(3)
        assert torch.equal(attn(q, k, v), want)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(attn(q[1:2], k[1:2], v[1:2]), want[1:2])
    mask = torch.rand(3, 700, generator=torch.Generator().manual_seed(0)) > 0.3
    alone = attn(q[:1, :, mask[0]], k[:1, :, mask[0]], v[:1, :, mask[0]])
    assert torch.equal(attn(q, k, v, key_mask=mask, query_mask=mask)[:1, :, mask[0]], alone)


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_a_key_head_in_parts_has_the_same_gradient(name):
    attn = sq.create(name, D, 4, 1, clusters=60, seed=0)
    inputs = [x[:, :n].clone().requires_grad_() for x, n in zip(single(300, batch=1, heads=4), (4, 1, 1), strict=True)]
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(torch.autograd.grad(attn(*inputs).square().sum(), inputs))
    torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_queries_with_a_large_common_part_are_told_apart(name):
    q, k, _ = single(90)
    spec, call = sq.create(name, D, 2, clusters=5, seed=0)._spec(), Call(1.0)
    for choose in (definition.make_choices, *([] if library.missing() else [native.make_choices])):
        assert torch.equal(choose(spec, call, q + 300.0, k).assigned, choose(spec, call, q, k).assigned)


def test_a_sample_moves_the_means_as_well_as_all_tokens():
    centres = torch.randn(40, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    label = torch.arange(6000) * 7 % 40
    x = (3 * centres[label] + 0.5 * tokens(6000, batch=1, heads=1)[0][0, 0]).unsqueeze(0)
    draw = ClusterDraw(clusters=20, bits=1, dim=D, seed=0)

    def distortion(assigned):
        mean = cluster_means(x, assigned, None, 20)
        return (x - mean[0, assigned]).square().sum()

    sampled = distortion(cluster(x, None, draw, clustering="lloyd", iterations=5))
    start = x[:, ((torch.arange(20) + draw.starts) * 300).long()]
    assert sampled < 1.1 * distortion(lloyd(x, None, start, 5))
    assert sampled < 0.8 * distortion(lloyd(x, None, start, 0))


@pytest.mark.parametrize("name", NAMES)
def test_causal_is_refused_because_centroids_see_the_future(name):
    attn = sq.create(name, D, 2, clusters=4, seed=0)
    q, k, v = tokens(40)
    with pytest.raises(ValueError, match="cannot be causal: a centroid is a mean over queries of the whole sequence"):
        attn(q, k, v, is_causal=True)
    # It does: a later query changes an earlier row although keys and values stay the same.
    later = q.clone()
    later[:, :, -8:] += 2
    assert (attn(q, k, v) - attn(later, k, v))[:, :, :-8].abs().max() > 1e-3
    assert name not in sq.list_mechanisms(causal=True)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"clusters": 0}, ValueError, "clusters must be at least 1"),
        ({"clusters": 2.0}, TypeError, "clusters must be an integer"),
        ({"bits": 0}, ValueError, "bits must be at least 1"),
        ({"iterations": -1}, ValueError, "iterations must be at least 0"),
        ({"clustering": "loyd"}, ValueError, "clustering='loyd' is not known.*did you mean 'lloyd'"),
        ({"topk": 0}, ValueError, "topk must be at least 1"),
        ({"topk": 10, "group_size": 4}, ValueError, "topk=10 must be a multiple of group_size=4; use topk=12"),
        ({"clusters": 1 << 20, "bits": 63}, ValueError, r"must be below 2\*\*24"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("improved-clustered", D, **options)


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_wide_queries_in_half_precision_beside_few_narrow_values(name):
    """Their rows are converted one by one, in memory of their own (the sanitizers' build tells)."""
    attn = sq.create(name, 1024, clusters=200, seed=0)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, n, 1024, generator=generator).half() for n in (400, 2))
    v = torch.randn(1, 1, 2, 8, generator=generator).half()
    want = attn(q.float(), k.float(), v.float())
    for _ in range(20):
        assert torch.allclose(attn(q, k, v).float(), want, atol=2e-2)
