"""The fast Walsh-Hadamard transform and the projection that is built from it.

H_1 = [1],  H_2n = [[H_n, H_n], [H_n, -H_n]] (Sylvester), applied in n log2 n additions.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import checks
from .seeded import Projection, chi

__all__ = ["HadamardProjection", "fwht", "next_power_of_two"]


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n.

    >>> [next_power_of_two(n) for n in (1, 2, 20, 64)]
    [1, 2, 32, 64]
    """
    return 1 << (n - 1).bit_length()


def fwht(x: Tensor, *, orthonormal: bool = False) -> Tensor:
    """H x along the last axis, (..., n) -> (..., n), n a power of two; with `orthonormal` H x / sqrt(n), an involution.

    Steps h = 1, 2, 4, ..., n/2 replace each pair (a, b) of entries h apart by (a + b, a - b).

    >>> fwht(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([10., -2., -4.,  0.])
    """
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        raise ValueError(
            f"x must have a last axis of a power of two, got shape {tuple(x.shape)}; pad it with zeros to "
            f"{next_power_of_two(max(n, 1))}."
        )
    shape, h = x.shape, 1
    while h < n:
        pairs = x.reshape(*shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        h *= 2
    return x * n**-0.5 if orthonormal else x


class HadamardProjection(Projection):
    """Blocks of d' orthogonal rows from random signs and Hadamard matrices, d' the next power of two of `dim`.

        M = (H' D_k) ... (H' D_1),  H' = H / sqrt(d'),  D_i random signs,  omega_i = r_i M_i,  r_i ~ chi(d')

    restricted to the first `dim` columns. `blocks` is k: the matrix is the *product* of k factors. Rows are orthogonal
    for any k; their fourth moment is that of a Gaussian up to 2 (1 + 2/d') (2/d')^{k-1}, so one factor is biased on
    sparse inputs at every width and three are as good as uniform (`variance.hadamard_kurtosis`). A token is padded with
    zeros to d', which is why the norms are chi(d'): with chi(dim) the rows would be too short.

    Saved are signs (int8) and norms, O(k rows) instead of rows x dim. The native kernels apply the butterflies where
    they win; torch multiplies by the dense matrix, which is faster there, and keeps it (`RandomFeatures`).
    Choromanski et al., "The Unreasonable Effectiveness of Structured Random Orthogonal Embeddings", 2017.

    >>> W = HadamardProjection(rows=8, dim=5, seed=0)
    >>> x = torch.randn(3, 5)
    >>> bool(torch.allclose(W(x), x @ W.as_matrix().mT, atol=1e-5))
    True
    """

    kind: ClassVar[str] = "hadamard"
    signs: Tensor
    lengths: Tensor

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        blocks: int = 3,
        heads: int | None = None,
        norms: str = "chi",
        seed: int | torch.Generator | None = None,
    ) -> None:
        checks.check_positive("blocks", blocks)
        self.blocks = blocks
        super().__init__(rows, dim, heads=heads, norms=norms, seed=seed)

    @property
    def padded_dim(self) -> int:
        """d', the width of the transform."""
        return next_power_of_two(self.dim)

    def _sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        width = self.padded_dim
        shape = (*self._leading, -(-self.rows // width), self.blocks, width)
        signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
        rows = (*self._leading, self.rows)
        if self.norms == "sqrt":
            return {"signs": signs, "lengths": torch.full(rows, width**0.5, dtype=torch.float64, device="cpu")}
        return {"signs": signs, "lengths": chi(rows, width, generator)}

    def as_matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W written out: (rows, dim) or (heads, rows, dim). For tests and for backends that want a GEMM."""
        # Products with H instead of butterflies: the entries are integers, so float64 has the same bits either way.
        width = self.padded_dim
        h = fwht(torch.eye(width, dtype=torch.float64, device=self.signs.device))
        signs = self.signs.to(torch.float64)
        m = h[:, : self.dim] * signs[..., 0, None, : self.dim]  # (heads?, n_b, d', dim)
        for i in range(1, self.blocks):
            m = h @ (signs[..., i, :, None] * m)
        scale = self.lengths.to(torch.float64) * math.pow(width, -0.5 * self.blocks)
        return (m.flatten(-3, -2)[..., : self.rows, :] * scale.unsqueeze(-1)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        width = self.padded_dim
        y = F.pad(x, (0, width - self.dim)).unsqueeze(-2)  # (..., L, 1, d')
        signs = self.signs.to(x.dtype).unsqueeze(-4)  # (heads?, 1, n_b, k, d')
        for i in range(self.blocks):
            y = fwht(y * signs[..., i, :])  # (..., L, n_b, d')
        # The k factors 1/sqrt(d') are applied once, with the norms.
        scale = self.lengths.to(x.dtype) * math.pow(width, -0.5 * self.blocks)
        return y.flatten(-2)[..., : self.rows] * scale.unsqueeze(-2)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, blocks={self.blocks}"
