"""K-means: of the queries of each sequence for clustered attention, of the keys of each chunk for multipole attention.

    hamming  b_i = sign(W x_i) in {-1, 1}^bits; centroids are majority votes, c = sign(sum of members' b); the Hamming
             distance is (bits - b.c) / 2, so the nearest centroid has the largest b.c
    lloyd    centroids are means, the distance is Euclidean: the nearest centroid has the largest x.c - |c|^2 / 2

Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", 2020, use the first; signs of random
projections keep angles (Charikar, 2002). Distances are matrix products over many tokens at once, sums over members one
pass over the tokens; nothing loops over tokens or clusters.

Centroids move on a sample, SAMPLE tokens per cluster evenly over the sequence; then every token gets the nearest one.
On the queries of an encoder that is as good as all tokens, and long sequences cost little more than one assignment.

Masked tokens have no influence: clusters start from real tokens, evenly over their ranks, and masked tokens enter no
sum. A cluster without members keeps its centroid and may win members later; with as many clusters as real tokens, or
more, every token starts as a cluster of its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..features.seeded import Projection
from .checkpointing import tracing

__all__ = ["CLUSTERINGS", "SAMPLE", "ClusterDraw", "cluster", "cluster_means", "lloyd", "rank_order"]

CLUSTERINGS = ("hamming", "lloyd")
# Tokens per cluster that centroids are computed from.
SAMPLE = 32
# Distances per piece of work, all sequences together: more would leave a core's cache, or need fresh pages every time.
PIECE = 1 << 19


class ClusterDraw(Projection):
    """What is random in the clustering: hyperplanes `matrix` (bits, dim), and `starts` (clusters,) in [0, 1).

    Cluster c of C starts at the real token of rank floor((c + starts_c) n / C) of n.

    >>> ClusterDraw(clusters=4, bits=8, dim=16, seed=0).matrix.shape
    torch.Size([8, 16])
    """

    kind: ClassVar[str] = "clusters"
    matrix: Tensor
    starts: Tensor

    def __init__(self, clusters: int, bits: int, dim: int, *, seed: int | torch.Generator | None = None) -> None:
        self.clusters = clusters  # before the base class, which draws the sample
        super().__init__(bits, dim, seed=seed)

    def _sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        starts = torch.rand(self.clusters, generator=generator, dtype=torch.float64, device="cpu")
        matrix = torch.randn(self.rows, self.dim, generator=generator, dtype=torch.float64, device="cpu")
        # Below 1 also after rounding to float32.
        return {"starts": starts.clamp(max=1 - 2**-24), "matrix": matrix}


def rank_order(mask: Tensor) -> Tensor:
    """The token of every rank: mask (X, L) -> (X, L) int64, real tokens first and in order."""
    length = mask.shape[-1]
    # Sorting distinct numbers keeps their order.
    position = torch.arange(length, device=mask.device)
    return (position + length * (~mask)).sort(-1).values % max(length, 1)


def _first_tokens(x: Tensor, mask: Tensor | None, starts: Tensor) -> Tensor:
    """The tokens that clusters start from: x (X, L, W) -> (X, C, W)."""
    _, length, width = x.shape
    clusters = starts.shape[0]
    number = torch.arange(clusters, device=x.device)
    if mask is None:
        rank = number.clamp(max=length - 1)
        if length > clusters:
            rank = ((number + starts) * (length / clusters)).long().clamp(max=length - 1)
        return x.index_select(1, rank)
    real = mask.sum(-1, keepdim=True)  # (X, 1)
    spread = ((number + starts) * (real / clusters)).long()
    rank = torch.where(real > clusters, spread, number).minimum(real - 1).clamp(min=0)
    index = rank_order(mask).gather(-1, rank).unsqueeze(-1).expand(-1, -1, width)
    return x.gather(1, index)


def _sampled(x: Tensor, mask: Tensor | None, most: int) -> tuple[Tensor, Tensor | None]:
    """At most so many real tokens of x (X, L, W), evenly over their ranks: (X, N, W), and which of them are real."""
    length = x.shape[1]
    place = torch.arange(min(most, length), device=x.device)
    if mask is None:
        return (x, None) if length <= most else (x.index_select(1, (2 * place + 1) * length // (2 * most)), None)
    real = mask.sum(-1, keepdim=True)  # (X, 1)
    rank = torch.where(real > most, (2 * place + 1) * real // (2 * most), place).minimum(real - 1).clamp(min=0)
    index = rank_order(mask).gather(-1, rank).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, index), place < real


def _sums(x: Tensor, assigned: Tensor, clusters: int) -> Tensor:
    """Sums over the members of every cluster: x (X, L, W) -> (X, C, W). One pass, whatever the number of clusters."""
    sequences = torch.arange(x.shape[0], device=x.device).unsqueeze(-1)
    table = x.new_zeros((x.shape[0] * clusters, x.shape[-1]))  # one table for all sequences: whole rows are added
    sums: Tensor = table.index_add(0, (assigned + clusters * sequences).flatten(), x.flatten(0, 1))
    return sums.view(x.shape[0], clusters, -1)


def _counts(assigned: Tensor, mask: Tensor | None, clusters: int, dtype: torch.dtype) -> Tensor:
    """Real members of every cluster, (X, C, 1)."""
    here = torch.ones_like(assigned, dtype=dtype) if mask is None else mask.to(dtype)
    return here.new_zeros((assigned.shape[0], clusters)).scatter_add(-1, assigned, here).unsqueeze(-1)


def cluster_means(x: Tensor, assigned: Tensor, mask: Tensor | None, clusters: int) -> Tensor:
    """Means over the real members of every cluster: x (X, L, W), 0 at masked tokens -> (X, C, W), 0 if it has none.

    >>> cluster_means(torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([[1, 1, 0]]), None, clusters=3).flatten()
    tensor([5., 2., 0.])
    """
    return _sums(x, assigned, clusters) / _counts(assigned, mask, clusters, x.dtype).clamp(min=1)


def cluster(x: Tensor, mask: Tensor | None, draw: ClusterDraw, *, clustering: str, iterations: int) -> Tensor:
    """The cluster of every token of x (X, L, D): int64 (X, L).

    mask (X, L) bool, True = real; what is given for masked tokens means nothing. No gradient passes through the choice.

    >>> x = torch.tensor([[[1.0, 0.0], [1.1, 0.0], [-1.0, 0.0], [-1.2, 0.0]]])
    >>> draw = ClusterDraw(clusters=2, bits=8, dim=2, seed=0)
    >>> cluster(x, None, draw, clustering="lloyd", iterations=5)
    tensor([[0, 0, 1, 1]])
    """
    x, most = x.detach(), SAMPLE * draw.starts.shape[0]
    if clustering == "hamming":
        return _hamming(x, mask, draw, iterations, most)
    # What is not a number has no place: it must not draw the means of others along. Nor may masked tokens.
    x = torch.where(x.isfinite() if mask is None else x.isfinite() & mask.unsqueeze(-1), x, 0.0)
    rows, real = _sampled(x, mask, most)
    count = rows.shape[1] if real is None else real.sum(-1)[:, None, None].clamp(min=1)
    # What all tokens have in common does not take digits from the distances.
    middle = (rows if real is None else rows * real.unsqueeze(-1)).sum(1, keepdim=True) / count
    rows = rows - middle if real is None else (rows - middle) * real.unsqueeze(-1)
    return nearest(x - middle, *lloyd_means(rows, real, _first_tokens(x, mask, draw.starts) - middle, iterations))


def _largest(weights: Tensor, x: Tensor) -> Tensor:
    """The largest entry of weights (X, C, W) @ x^T for every token of x (X, L, W): (X, L)."""
    width = weights.shape[0] * weights.shape[1]
    size = max(x.shape[1], 1) if tracing(x) else max(64, PIECE // width)
    best = [(weights @ piece.mT).amax(-2) for piece in x.split(size, 1)]
    return best[0] if len(best) == 1 else torch.cat(best, -1)


def _hamming(x: Tensor, mask: Tensor | None, draw: ClusterDraw, iterations: int, most: int) -> Tensor:
    # A token that is not a number has no direction: its bits are 0 and vote for nothing, as those of a masked token.
    bits = torch.sign(x @ draw.matrix.to(x.dtype).mT).to(torch.float32).nan_to_num(0.0)  # (X, L, bits)
    if mask is not None:
        bits = bits * mask.unsqueeze(-1)
    clusters = draw.starts.shape[0]
    centroid = _first_tokens(bits, mask, draw.starts)  # (X, C, bits)
    # b.c is an integer. Times the count of clusters, minus the number of the cluster, the candidates of a token differ
    # by at least 1: ties go to the first cluster, and the largest value alone says whose it is. One more bit that is 1
    # for every token carries that number.
    code = torch.cat([bits, torch.ones_like(bits[..., :1])], -1)
    number = torch.arange(clusters, device=x.device, dtype=code.dtype)

    def closest(code: Tensor, centroid: Tensor) -> Tensor:
        weighted = torch.cat([clusters * centroid, -number.expand(centroid.shape[:-1]).unsqueeze(-1)], -1)
        best = _largest(weighted, code)  # = clusters * (b.c) - number, exactly
        return ((best / clusters).ceil() * clusters - best).long().clamp(0, clusters - 1)

    rows, real = _sampled(code, mask, most)
    rows = rows if real is None else rows * real.unsqueeze(-1)
    for _ in range(iterations):
        votes = _sums(rows, closest(rows, centroid), clusters)[..., :-1]  # rows of a round width are summed faster
        # A tied vote, and every vote of an empty cluster, leaves the bit as it was.
        centroid = torch.where(votes == 0, centroid, votes.sign())
    return closest(code, centroid)


def nearest(x: Tensor, means: Tensor, slack: Tensor) -> Tensor:
    """The nearest of the means (X, C, D) of every token of x (X, L, D): int64 (X, L).

    Of means that are as near, but for rounding, it is the first: repeated tokens start as equal means, and which of
    them a token belongs to must not depend on the last bits.
    """
    score = means @ x.mT - 0.5 * means.square().sum(-1, keepdim=True)
    return (score >= score.amax(-2, keepdim=True) - slack).to(torch.int8).argmax(-2)


def lloyd_means(x: Tensor, mask: Tensor | None, means: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Means (X, C, D) of x (X, L, D), 0 where masked, from `means` on; and what scores may differ by in rounding."""
    clusters = means.shape[-2]
    real = x.shape[-2] if mask is None else mask.sum(-1)[:, None, None].clamp(min=1)
    slack = 1e-5 * x.square().sum((-1, -2), keepdim=True) / real
    for _ in range(iterations):
        assigned = nearest(x, means, slack)
        size = _counts(assigned, mask, clusters, x.dtype)
        means = torch.where(size == 0, means, _sums(x, assigned, clusters) / size.clamp(min=1))
    return means, slack


def lloyd(x: Tensor, mask: Tensor | None, means: Tensor, iterations: int) -> Tensor:
    """The nearest mean of every token of x (X, L, D), 0 where masked: int64 (X, L), from `means` (X, C, D) on."""
    return nearest(x, *lloyd_means(x, mask, means, iterations))
