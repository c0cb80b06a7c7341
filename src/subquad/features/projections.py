"""Dense random projections: Gaussian, block-orthogonal and simplex; the Hadamard one is in `hadamard.py`.

Every row omega of W is N(0, I) on its own (norms="chi"); the kinds differ in how the rows of a block depend on each
other, which changes the variance of a kernel estimate and never its mean (`variance.py` has the closed forms).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import checks
from .hadamard import HadamardProjection
from .precision import full_precision
from .seeded import Projection, chi

__all__ = [
    "PROJECTIONS",
    "GaussianProjection",
    "OrthogonalProjection",
    "SimplexProjection",
    "haar",
    "make_projection",
]


def haar(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """`count` orthogonal matrices of the uniform (Haar) distribution: float64, (count, dim, dim).

    Q R = G of a Gaussian G, and Q times sign(diag R) (Mezzadri, "How to generate random matrices from the classical
    compact groups", 2007). LAPACK's Q alone is not uniform: its signs follow its own convention, and positive features
    built on it are biased by 7 to 19 %.

    >>> q = haar(3, 8, torch.Generator().manual_seed(0))
    >>> bool((q @ q.mT - torch.eye(8, dtype=q.dtype)).abs().max() < 1e-12)
    True
    """
    gaussian = torch.randn(count, dim, dim, generator=generator, dtype=torch.float64, device="cpu")
    factors: tuple[Tensor, Tensor] = torch.linalg.qr(gaussian)
    q, r = factors
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)


class _Dense(Projection):
    """A projection that stores its matrix; a subclass draws the directions, norm 1, in blocks of at most `dim` rows."""

    matrix: Tensor

    def _directions(self, generator: torch.Generator) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say how its directions are drawn")

    def _sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        directions = self._directions(generator)
        if self.norms == "sqrt":
            return {"matrix": directions * self.dim**0.5}
        # Fresh norms: those of the Gaussian block behind the directions depend on them, a bias of 5 % at dim 4.
        return {"matrix": directions * chi((*self._leading, self.rows), self.dim, generator).unsqueeze(-1)}

    def _blocks(self, generator: torch.Generator) -> Tensor:
        """Haar matrices for every block: (heads or 1, blocks, dim, dim)."""
        blocks = -(-self.rows // self.dim)
        heads = self.heads or 1
        return haar(heads * blocks, self.dim, generator).view(heads, blocks, self.dim, self.dim)

    def _first_rows(self, blocks: Tensor) -> Tensor:
        return blocks.flatten(1, 2)[:, : self.rows].reshape(*self._leading, self.rows, self.dim)

    def as_matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.matrix.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        weight = self.as_matrix(x.dtype).mT
        with full_precision(x):
            return x @ weight


class GaussianProjection(_Dense):
    """Independent rows: W_rc ~ N(0, 1), or with norms="sqrt" independent rows on the sphere of radius sqrt(dim).

    Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", 2007.

    >>> W = GaussianProjection(rows=6, dim=4, seed=0)
    >>> W(torch.ones(2, 5, 4)).shape
    torch.Size([2, 5, 6])
    """

    kind: ClassVar[str] = "gaussian"

    def _sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        shape = (*self._leading, self.rows, self.dim)
        gaussian = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        if self.norms == "sqrt":
            gaussian *= self.dim**0.5 / torch.linalg.vector_norm(gaussian, dim=-1, keepdim=True)
        return {"matrix": gaussian}


class OrthogonalProjection(_Dense):
    """Blocks of `dim` orthogonal rows with independent norms; the last block may be partial.

        W = [diag(r_1) Q_1; diag(r_2) Q_2; ...],  Q_b Haar,  r ~ chi(dim)

    Yu et al., "Orthogonal Random Features", 2016; Choromanski et al., "Rethinking Attention with Performers", 2021.

    >>> W = OrthogonalProjection(rows=4, dim=4, norms="sqrt", seed=0).as_matrix()
    >>> bool(torch.allclose(W @ W.mT, 4 * torch.eye(4), atol=1e-5))
    True
    """

    kind: ClassVar[str] = "orthogonal"

    def _directions(self, generator: torch.Generator) -> Tensor:
        return self._first_rows(self._blocks(generator))


class SimplexProjection(_Dense):
    """Blocks of `dim` rows that point to the corners of a simplex, every pair at the cosine -1/(dim - 1).

        omega_i = r_i sqrt(dim / (dim - 1)) (e_i - 1/dim)^T Q,  Q Haar,  r_i ~ chi(dim)

    Reid et al., "Simplex Random Features", 2023: the lowest variance of positive features for one block.

    >>> W = SimplexProjection(rows=4, dim=4, norms="sqrt", seed=0).as_matrix()
    >>> bool(torch.allclose(W.sum(0), torch.zeros(4), atol=1e-5))
    True
    """

    kind: ClassVar[str] = "simplex"

    def _validate(self) -> None:
        if self.dim < 2:
            raise ValueError("dim must be at least 2 for a simplex projection, got 1; use 'orthogonal' or 'gaussian'.")

    def _directions(self, generator: torch.Generator) -> Tensor:
        q = self._blocks(generator)
        # (I - 11^T/dim) Q without a product: subtract the mean of the rows.
        return self._first_rows((q - q.mean(-2, keepdim=True)) * (self.dim / (self.dim - 1)) ** 0.5)


PROJECTIONS: dict[str, type[Projection]] = {
    "orthogonal": OrthogonalProjection,
    "gaussian": GaussianProjection,
    "hadamard": HadamardProjection,
    "simplex": SimplexProjection,
}


def make_projection(kind: str, rows: int, dim: int, **options: Any) -> Projection:
    """A projection by name: "orthogonal", "gaussian", "hadamard" or "simplex".

    Options are `heads`, `norms` and `seed`, and for "hadamard" also `blocks`; a `blocks=None` means not given.

    >>> make_projection("hadamard", 8, 5, blocks=2, seed=0)
    HadamardProjection(rows=8, dim=5, heads=None, norms='chi', blocks=2)
    >>> make_projection("hadamar", 8, 5)
    Traceback (most recent call last):
    ValueError: projection='hadamar' is not known; expected one of [...'simplex']; did you mean 'hadamard'?
    """
    checks.check_option("projection", kind, PROJECTIONS)
    checks.check_options(f"projection {kind!r}", options, ("heads", "norms", "seed", "blocks"))
    if "blocks" in options and options["blocks"] is None:
        del options["blocks"]
    if "blocks" in options and kind != "hadamard":
        raise ValueError(
            f"blocks={options['blocks']!r} is an option of projection='hadamard' only, got projection={kind!r}; "
            "leave blocks out or choose 'hadamard'."
        )
    return PROJECTIONS[kind](rows, dim, **options)
