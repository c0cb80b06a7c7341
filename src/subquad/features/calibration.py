"""Statistics of queries and keys, gathered once from sample data and then fixed.

Centring and per-direction scales use only these fixed numbers, never the sequence at hand: a mean over the sequence
would let earlier tokens see later ones.

    mean, cov  of queries and of keys, per KV head; the queries of a group are pooled

`balancing_map` is what the covariances say about a free choice: x.y = (T x).(T^-T y) for any invertible T.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from .precision import Float32Buffers

__all__ = ["Calibration", "balancing_map", "calibrations", "whitening_map"]

# Of the mean variance, added to every direction: directions that the sample hardly shows are not stretched beyond it.
FLOOR = 1e-3
# Mean variance below which a head is as good as constant: nothing says how its coordinates should be stretched.
CONSTANT = 1e-20


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """A symmetric positive definite matrix (..., D, D) to a power, by its eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    least = values[..., -1:].clamp(min=torch.finfo(values.dtype).tiny) * 1e-12
    power: Tensor = (vectors * values.clamp(min=least).pow(exponent).unsqueeze(-2)) @ vectors.mT
    return power


def _floored(cov: Tensor) -> Tensor:
    """cov (H, D, D) in float64, with something in directions that are never used; the identity for a constant head."""
    cov = cov.to(torch.float64)
    mean = cov.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(cov.shape[-1], dtype=torch.float64, device=cov.device)
    return torch.where(mean > CONSTANT, cov + FLOOR * mean * eye, eye)


def balancing_map(query_cov: Tensor, key_cov: Tensor) -> tuple[Tensor, Tensor]:
    """T and T^-T (H, D, D) that give T x and T^-T y the same covariance; query_cov, key_cov (H, D, D).

        G = T^T T solves G Cov(x) G = Cov(y):  G = Sx^{-1/2} (Sx^{1/2} Sy Sx^{1/2})^{1/2} Sx^{-1/2},  T = G^{1/2}

    Scores do not change, (T x).(T^-T y) = x.y, but of all such T this one makes E|T x|^2 + E|T^-T y|^2 least, on which
    the variance of random features depends exponentially. Symmetric, in float64.

    >>> q, k = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 4.0]))
    >>> T, back = balancing_map(q[None], k[None])
    >>> [round(float(x), 2) for x in (T @ q.double() @ T.mT).diagonal(dim1=-2, dim2=-1)[0]]
    [2.0, 2.0]
    """
    x, y = _floored(query_cov), _floored(key_cov)
    root, inverse = _power(x, 0.5), _power(x, -0.5)
    squared = inverse @ _power(root @ y @ root, 0.5) @ inverse
    return _power(squared, 0.5), _power(squared, -0.5)


def whitening_map(query_mean: Tensor, query_cov: Tensor) -> tuple[Tensor, Tensor]:
    """T and T^-T (H, D, D) for which the queries T x have the identity as second moment; (H, D), (H, D, D).

        T = M^{-1/2},  M = E[x x^T] = Cov(x) + E[x] E[x]^T;   |T^-T (y - y')|^2 = E (x.y - x.y')^2

    Distances of keys are then the differences of scores that they make, which is what clusters of keys have to keep
    small. The mean of the queries counts: what it adds to a score differs between keys.

    >>> mean, cov = torch.tensor([[3.0, 0.0]]), torch.eye(2)[None]
    >>> T, back = whitening_map(mean, cov)
    >>> [round(float(x), 2) for x in back[0] @ torch.tensor([1.0, 0.0]).double()]
    [3.16, 0.0]
    """
    mean = query_mean.to(torch.float64).unsqueeze(-1)
    moment = _floored(query_cov.to(torch.float64) + mean @ mean.mT)
    return _power(moment, -0.5), _power(moment, 0.5)


class Calibration(Float32Buffers):
    """Running mean and covariance of queries and keys. Stored in float32, merged in float64.

    query_mean, key_mean: (H, D);  query_cov, key_cov: (H, D, D);  counts: (2,) int64, tokens per head seen
    """

    query_mean: Tensor
    key_mean: Tensor
    query_cov: Tensor
    key_cov: Tensor
    counts: Tensor

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        for side in ("query", "key"):
            self.register_buffer(f"{side}_mean", torch.zeros(heads, head_dim, dtype=torch.float32))
            self.register_buffer(f"{side}_cov", torch.zeros(heads, head_dim, head_dim, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self._known_ready = False
        self._checksum = 0

    @property
    def ready(self) -> bool:
        """Whether both sides have seen data."""
        if not self._known_ready and not torch.compiler.is_compiling() and type(self.counts) is Tensor:
            self.refresh()
        return self._known_ready

    def refresh(self) -> None:
        """Take note that the buffers were changed from outside."""
        # Read when the data changes: afterwards no call has to wait for a device, and a compiled graph need not look.
        self._known_ready = not self.counts.is_meta and bool((self.counts > 0).all())
        if self._known_ready:
            sides = (self.query_mean, self.key_mean, self.query_cov, self.key_cov)
            held = torch.cat([x.detach().flatten() for x in sides]).cpu()
            self._checksum = zlib.crc32(ctypes.string_at(held.data_ptr(), held.nbytes))

    @property
    def fingerprint(self) -> str:
        """What identifies the statistics: a state made with others holds other features.

        >>> a, b = Calibration(1, 2), Calibration(1, 2)
        >>> a.update(*torch.randn(2, 1, 1, 9, 2))
        >>> b.load_state_dict(a.state_dict())
        <All keys matched successfully>
        >>> before = a.fingerprint
        >>> a.update(*torch.randn(2, 1, 1, 9, 2))
        >>> b.fingerprint == before, a.fingerprint == before
        (True, False)
        """
        return f"{self._checksum:08x}" if self.ready else "none"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def update(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None) -> None:
        """Add a batch: q (B, G H, L, D), k (B, H, S, D); masks (B, S) and (B, L), True = real."""
        checks.check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q.device)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        with torch.no_grad():
            queries, keys = self._rows(q, query_mask), self._rows(k, key_mask)
            # Before anything is merged: one NaN would stay in the running means, and in every output, for good.
            for argument, mask, rows in (("q", "query_mask", queries), ("k", "key_mask", keys)):
                bad = int((~rows.isfinite().all(-1)).sum())
                if bad:
                    raise ValueError(
                        f"calibrate: {argument} holds NaN or infinity in {bad} of {rows.shape[0] * rows.shape[1]} "
                        f"vectors; give finite samples, or leave those tokens out with {mask}=. Nothing was changed"
                    )
            self._merge("query", 0, queries)
            self._merge("key", 1, keys)
        self.refresh()

    def assign(self, query_mean: Tensor, key_mean: Tensor, query_cov: Tensor, key_cov: Tensor, counts: Tensor) -> None:
        """Take over statistics gathered elsewhere: (H, D) twice, (H, D, D) twice, (2,) tokens."""
        with torch.no_grad():
            for name, value in (
                ("query_mean", query_mean),
                ("key_mean", key_mean),
                ("query_cov", query_cov),
                ("key_cov", key_cov),
                ("counts", counts),
            ):
                getattr(self, name).copy_(value)
        self.refresh()

    def _rows(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, G H, L, D) -> (H, tokens, D) in float64, real tokens only. One head of ours pools all of theirs."""
        batch, heads, length, width = x.shape
        if heads % self.heads:
            raise ValueError(f"calibrate: got {heads} heads, expected {self.heads} or a multiple of it")
        rows = x.detach().to(torch.float64).reshape(batch, self.heads, heads // self.heads, length, width)
        rows = rows.permute(1, 2, 0, 3, 4).reshape(self.heads, heads // self.heads, batch * length, width)
        if mask is not None:
            rows = rows[:, :, mask.reshape(-1)]
        return rows.reshape(self.heads, -1, width)

    def _merge(self, side: str, index: int, rows: Tensor) -> None:
        new = rows.shape[1]
        if new == 0:
            return
        old = int(self.counts[index])
        mean_buffer, cov_buffer = getattr(self, f"{side}_mean"), getattr(self, f"{side}_cov")
        mean, cov = mean_buffer.to(torch.float64), cov_buffer.to(torch.float64)
        new_mean = rows.mean(1)
        centred = rows - new_mean.unsqueeze(1)
        # Chan, Golub and LeVeque's pairwise update: no difference of large sums.
        share = new / (old + new)
        delta = new_mean - mean
        cov = (1 - share) * cov + share * (centred.mT @ centred) / new
        cov = cov + share * (1 - share) * delta.unsqueeze(-1) * delta.unsqueeze(-2)
        mean_buffer.copy_(mean + share * delta)
        cov_buffer.copy_(cov)
        self.counts[index] += new


def calibrations(module: nn.Module) -> list[Calibration]:
    """All statistics inside `module`; [] where it uses none.

    >>> from subquad import create
    >>> len(calibrations(create("taylor", 8, heads=2, center=True))), calibrations(create("taylor", 8))
    (1, [])
    """
    return [part for part in module.modules() if isinstance(part, Calibration)]
