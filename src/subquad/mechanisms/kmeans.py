"""K-means of the queries of each sequence, for clustered attention.

    hamming  b_i = sign(W x_i) in {-1, 1}^bits; centroids are majority votes, c = sign(sum of members' b); the Hamming
             distance is (bits - b.c) / 2, so the nearest centroid has the largest b.c
    lloyd    centroids are means, the distance is Euclidean: the nearest centroid has the largest x.c - |c|^2 / 2

Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", 2020, use the first; signs of random
projections keep angles (Charikar, 2002). Both are matrix products over all tokens at once; nothing loops over tokens
or clusters.

Masked tokens have no influence: clusters start from real tokens, evenly over their ranks, and masked tokens enter no
sum. A cluster without members keeps its centroid and may win members later; with as many clusters as real tokens, or
more, every token starts as a cluster of its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..features.seeded import Projection

__all__ = ["CLUSTERINGS", "ClusterDraw", "cluster"]

CLUSTERINGS = ("hamming", "lloyd")


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
    # The position of each rank: real tokens first, in order. Sorting distinct numbers keeps that order.
    position = torch.arange(length, device=x.device)
    order = (position + length * (~mask)).sort(-1).values % length
    index = order.gather(-1, rank).unsqueeze(-1).expand(-1, -1, width)
    return x.gather(1, index)


def cluster(x: Tensor, mask: Tensor | None, draw: ClusterDraw, *, clustering: str, iterations: int) -> Tensor:
    """Memberships (X, C, L) of x (X, L, D), in x's dtype: 1 where token l belongs to cluster c, else 0.

    mask (X, L) bool, True = real; masked tokens belong to no cluster. No gradient passes through the choice.

    >>> x = torch.tensor([[[1.0, 0.0], [1.1, 0.0], [-1.0, 0.0], [-1.2, 0.0]]])
    >>> draw = ClusterDraw(clusters=2, bits=8, dim=2, seed=0)
    >>> cluster(x, None, draw, clustering="lloyd", iterations=5)
    tensor([[[1., 1., 0., 0.],
             [0., 0., 1., 1.]]])
    """
    x = x.detach()
    member = _hamming(x, mask, draw, iterations) if clustering == "hamming" else _lloyd(x, mask, draw, iterations)
    return member if mask is None else member * mask.unsqueeze(-2)


def _hamming(x: Tensor, mask: Tensor | None, draw: ClusterDraw, iterations: int) -> Tensor:
    bits = torch.sign(draw.matrix.to(x.dtype) @ x.mT).to(torch.float32)  # (X, bits, L)
    # One more row that is 1 for real tokens. A masked token is a column of zeros, which votes for nothing.
    here = torch.ones_like(bits[:, :1]) if mask is None else mask.unsqueeze(1).to(bits.dtype)
    code = torch.cat([bits * here if mask is not None else bits, here], 1)
    clusters = draw.starts.shape[0]
    centroid = _first_tokens(code.mT, mask, draw.starts)  # (X, C, bits + 1)
    # b.c is an integer. Times the count of clusters, minus the number of the cluster, the candidates of a token differ
    # by at least 1: ties go to the first cluster, and relu(score - largest + 1) is the indicator, without any index.
    # The last row of the code carries that number.
    number = torch.arange(clusters, device=x.device, dtype=code.dtype)
    for left in range(iterations, -1, -1):
        weighted = torch.cat([clusters * centroid[..., :-1], -number.expand(centroid.shape[:-1]).unsqueeze(-1)], -1)
        score = weighted @ code  # (X, C, L)
        member = score.sub_(score.amax(-2, keepdim=True) - 1).relu_()
        if left:
            votes = member @ code.mT
            # A tied vote, and every vote of an empty cluster, leaves the bit as it was.
            centroid = torch.where(votes == 0, centroid, votes.sign())
    return member.to(x.dtype)


def _lloyd(x: Tensor, mask: Tensor | None, draw: ClusterDraw, iterations: int) -> Tensor:
    real = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0.0)
    centroid = _first_tokens(real, mask, draw.starts)
    number = torch.arange(centroid.shape[-2], device=x.device).unsqueeze(-1)
    for left in range(iterations, -1, -1):
        score = centroid @ real.mT - 0.5 * centroid.square().sum(-1, keepdim=True)
        member = (score.argmax(-2, keepdim=True) == number).to(x.dtype)
        if left:
            counted = member if mask is None else member * mask.unsqueeze(-2)
            size = counted.sum(-1, keepdim=True)
            centroid = torch.where(size == 0, centroid, counted @ real / size.clamp(min=1))
    return member
