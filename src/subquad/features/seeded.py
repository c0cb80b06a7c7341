"""What every projection has in common: a seed, a draw counter, and a sample that is a pure function of both.

A projection W (rows x dim) turns a token x into W x. Its seed and draw counter are int64 buffers and its sample sits
beside them, so a `state_dict` says which draw it holds, `redraw()` is the same on every rank, and one seed gives the
same bits again on one machine and torch version; elsewhere the stored sample decides, never the seed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import checks
from .precision import Float32Buffers

__all__ = ["NORMS", "Projection", "chi", "mix"]

NORMS = ("chi", "sqrt")
_MASK = (1 << 64) - 1


def _splitmix64(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def mix(seed: int, draws: int) -> int:
    """Mix a seed and a draw counter into one 64-bit generator seed (splitmix64 of Steele, Lea and Flood, 2014, twice).

    Torch's CPU generator keeps only the low 32 bits of what it is seeded with, and layers are seeded by consecutive
    integers: without mixing, draw 1 of layer 0 would be draw 0 of layer 1.

    >>> mix(0, 1) != mix(1, 0)
    True
    >>> hex(mix(0, 0))
    '0xa706dd2f4d197e6f'
    """
    return _splitmix64(_splitmix64(seed & _MASK) ^ (draws & _MASK))


def chi(shape: tuple[int, ...], degrees: int, generator: torch.Generator) -> Tensor:
    """Independent chi(degrees) variables in float64: the norms of fresh Gaussian vectors, independent of any direction.

    >>> chi((2, 3), 16, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3])
    """
    gaussian = torch.randn(*shape, degrees, generator=generator, dtype=torch.float64, device="cpu")
    norms: Tensor = torch.linalg.vector_norm(gaussian, dim=-1)
    return norms


def _seed_integer(seed: int | torch.Generator | None) -> int:
    if isinstance(seed, bool) or not (seed is None or isinstance(seed, (int, torch.Generator))):
        raise TypeError(f"seed must be an int, a torch.Generator or None, got {seed!r} of type {type(seed).__name__}.")
    if isinstance(seed, int):
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"seed must fit into a signed 64-bit integer, got {seed}; pass seed % 2**63 instead.")
        return seed
    # An explicit device, because the default one may be 'meta', where no integer can be read back.
    device = torch.device("cpu") if seed is None else seed.device
    return int(torch.randint(0, (1 << 63) - 1, (), generator=seed, device=device, dtype=torch.int64))


class Projection(Float32Buffers):
    """A random matrix W of `rows` directions in `dim` dimensions, shared or one per head; subclasses draw it.

    rows: number of directions (rows of W), any integer from 1.
    dim: width of a token, any integer from 1.
    heads: None for one matrix shared by all heads, else the number of independent matrices.
    norms: "chi" gives rows the norm of a Gaussian vector, which makes every row N(0, I) and the estimators of the
        softmax kernel unbiased; "sqrt" gives them the constant norm sqrt(dim): biased, without the heavy tail.
    seed: an integer; a `torch.Generator`, from which one integer is taken; or None, one integer from torch's own.

    Buffers: `seed` and `draws` (int64) and the sample (float32, or int8 signs), all in the `state_dict`.
    """

    kind: ClassVar[str] = ""
    seed: Tensor
    draws: Tensor
    # The tensors (and their versions) whose values `_key` holds; a class default, so that copies start without it.
    _key_source: tuple[Tensor, int, Tensor, int] | None = None

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        heads: int | None = None,
        norms: str = "chi",
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__()
        checks.check_positive("rows", rows)
        checks.check_positive("dim", dim)
        if heads is not None:
            checks.check_positive("heads", heads)
        checks.check_option("norms", norms, NORMS)
        self.rows, self.dim, self.heads, self.norms = rows, dim, heads, norms
        self._initial_seed = _seed_integer(seed)
        self._key = (self._initial_seed, 0)
        self._validate()
        # Sampled on the CPU whatever the default device is, so that the values do not depend on the device.
        device = torch.empty(0).device
        self.register_buffer("seed", torch.tensor(self._initial_seed, dtype=torch.int64, device="cpu").to(device))
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64, device="cpu").to(device))
        for name, sample in self._drawn(self._initial_seed, 0).items():
            self.register_buffer(name, sample.to(device))

    def _validate(self) -> None:
        """Refuse what this kind cannot draw; called before anything is sampled."""

    def _sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        """The sample by buffer name: float64 or int8, on the CPU, from this generator alone."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is drawn")

    def _drawn(self, seed: int, draws: int) -> dict[str, Tensor]:
        with torch.no_grad():
            sample = self._sample(torch.Generator(device="cpu").manual_seed(mix(seed, draws)))
        return {name: x.to(torch.float32) if x.is_floating_point() else x for name, x in sample.items()}

    @property
    def _leading(self) -> tuple[int, ...]:
        """Shape of the sample in front of its rows: () when shared, (heads,) otherwise."""
        return () if self.heads is None else (self.heads,)

    def _write(self, seed: int, draws: int) -> None:
        # In place, so that every reference to the buffers sees the new draw.
        with torch.no_grad():
            self.seed.fill_(seed)
            self.draws.fill_(draws)
            for name, sample in self._drawn(seed, draws).items():
                self.get_buffer(name).copy_(sample)
        self._key, self._key_source = (seed, draws), None

    def redraw(self) -> None:
        """Advance the draw counter by one and resample in place. Nothing else ever resamples."""
        seed, draws = self.draw_key()
        self._write(seed, draws + 1)

    def reset_parameters(self) -> None:
        """Return to draw 0 of the constructor's seed: for modules built on 'meta' and materialised by `to_empty`."""
        self._write(self._initial_seed, 0)

    def draw_key(self) -> tuple[int, int]:
        """(seed, draws) as Python integers.

        Read from the buffers once per change of them, so that no call waits for a device. Where nothing can be read
        ('meta', fake tensors, inside a compiled graph) it is the last known key.
        """
        seed, draws = self.seed, self.draws
        if torch.compiler.is_compiling() or seed.is_meta or type(seed) is not Tensor or type(draws) is not Tensor:
            return self._key
        if seed.is_inference() or draws.is_inference():  # these have no version to compare
            self._key = (int(seed), int(draws))
            return self._key
        source = self._key_source
        # The tensors themselves are kept and compared, since an id may be used again after a buffer is replaced.
        if (
            source is None
            or source[0] is not seed
            or source[1] != seed._version
            or source[2] is not draws
            or source[3] != draws._version
        ):
            self._key = (int(seed), int(draws))
            self._key_source = (seed, seed._version, draws, draws._version)
        return self._key

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.draw_key()  # so that a compiled graph, which cannot read the buffers, knows the loaded draw

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_key_source", None)  # a copy has buffers of its own
        return state

    def as_matrix(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W written out: (rows, dim), or (heads, rows, dim); `forward(x)` is x @ as_matrix(x.dtype).mT."""
        raise NotImplementedError(f"{type(self).__name__} has no matrix form")

    def forward(self, x: Tensor) -> Tensor:
        """W x for every token: (..., L, dim) -> (..., L, rows), with (..., heads, L, .) on both sides if per head."""
        raise NotImplementedError(f"{type(self).__name__} cannot be applied")

    def _check(self, x: Tensor) -> None:
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"x must be float32 or float64, got {x.dtype}; cast x, a projection is never rounded below float32."
            )
        least = 2 if self.heads is None else 3
        if x.ndim < least or x.shape[-1] != self.dim:
            wanted = "(..., L, " if self.heads is None else f"(..., {self.heads}, L, "
            raise ValueError(f"x must have shape {wanted}{self.dim}), got {tuple(x.shape)}.")
        if self.heads is not None and x.shape[-3] != self.heads:
            raise ValueError(
                f"x has {x.shape[-3]} heads in shape {tuple(x.shape)}, but this projection was drawn for "
                f"{self.heads}; make one with heads={x.shape[-3]}, or heads=None to share one matrix."
            )

    def extra_repr(self) -> str:
        return f"rows={self.rows}, dim={self.dim}, heads={self.heads}, norms={self.norms!r}"
