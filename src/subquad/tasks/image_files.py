"""Images as arrays (N, height, width, channels) of bytes: MNIST's idx, CIFAR-10's binary files or sheets, pictures."""

from __future__ import annotations

import gzip
import math
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..files import replacing
from .base import DataError, split_of
from .hub import HubName, choose_column, is_hub, open_rows

__all__ = ["draw_digit", "read_idx", "read_images", "write_grid"]

_PICTURES = (".png", ".bmp", ".jpg", ".jpeg")
_CIFAR_RECORD = 1 + 32 * 32 * 3


def _pillow() -> tuple[Any, Any]:
    """PIL's Image and its error for files that hold none."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise checks.missing_package("reading and writing pictures", "pillow", "train") from None
    return Image, UnidentifiedImageError


def _bytes(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}); the file is truncated or of another type") from None


def read_idx(path: Path) -> np.ndarray:
    """The array of an idx file of unsigned bytes, plain or gzipped (LeCun et al.'s format of MNIST)."""
    data = _bytes(path)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise DataError(f"{path} is no idx file: it begins with {data[:4].hex() or 'nothing'}, expected 0000")
    if data[2] != 8:
        raise DataError(f"{path} holds idx values of type 0x{data[2]:02x}, expected unsigned bytes, 0x08")
    dimensions = data[3]
    if len(data) < 4 + 4 * dimensions:
        raise DataError(f"{path} is truncated inside its header")
    shape = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    start = 4 + 4 * dimensions
    if len(data) - start != math.prod(shape):
        raise DataError(f"{path} is truncated: it holds {len(data) - start} values, its header says {shape}")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _mnist(folder: Path, split: str) -> np.ndarray | None:
    stem = "train" if split == "train" else "t10k"
    for name in (f"{stem}-images-idx3-ubyte", f"{stem}-images.idx3-ubyte"):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                images = read_idx(path)
                if images.ndim != 3:
                    raise DataError(f"{path} holds an array of shape {images.shape}, expected (count, height, width)")
                return images[..., None]
    return None


def _cifar(folder: Path, split: str) -> np.ndarray | None:
    paths = sorted(folder.glob("data_batch_*.bin" if split == "train" else "test_batch.bin"))
    if not paths:
        return None
    parts = []
    for path in paths:
        data = _bytes(path)
        if not data or len(data) % _CIFAR_RECORD:
            raise DataError(f"{path} has {len(data)} bytes, expected a multiple of {_CIFAR_RECORD}; it is truncated")
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, _CIFAR_RECORD)
        parts.append(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return np.concatenate(parts)


def _sheets(folder: Path, split: str) -> np.ndarray | None:
    """CIFAR-10 as `data_batch_*.png` and `test_batch.png`: an image per row of the sheet, its pixels one by one."""
    paths = sorted(folder.glob("data_batch_*.png" if split == "train" else "test_batch.png"))
    if not paths:
        return None
    Image, UnidentifiedImageError = _pillow()
    parts = []
    for path in paths:
        try:
            with Image.open(path) as sheet:
                rows = np.asarray(sheet.convert("RGB"))
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
            raise DataError(f"{path} cannot be read as a picture ({error})") from None
        side = math.isqrt(rows.shape[1])
        if side * side != rows.shape[1]:
            raise DataError(f"{path} is {rows.shape[1]} pixels wide; expected a square number, an image per row")
        parts.append(rows.reshape(-1, side, side, 3))
    if len({part.shape[1] for part in parts}) != 1:
        raise DataError(f"the sheets {paths[0].name} ... in {folder} hold images of different sizes")
    return np.concatenate(parts)


class _Pictures:
    """Pictures of one size, one after the other."""

    def __init__(self) -> None:
        self.images: list[np.ndarray] = []

    def add(self, picture: Any, where: object) -> None:
        """A PIL image: grey or in colour."""
        if picture.mode.startswith("I;16"):
            image = (np.asarray(picture) // 257).astype(np.uint8)  # `convert` would clip at 255
        elif picture.mode in ("I", "F"):
            raise DataError(f"{where} has 32 bits per pixel, of an unknown range; expected 8 or 16")
        else:
            image = np.asarray(picture.convert("L" if picture.mode in ("1", "L", "LA", "La") else "RGB"))
        image = image[..., None] if image.ndim == 2 else image
        if self.images and image.shape != self.images[0].shape:
            raise DataError(
                f"{where} has the size {image.shape} (height, width, channels), those before it "
                f"{self.images[0].shape}; bring all pictures to one size first"
            )
        self.images.append(image)


def _hub_images(data: str, split: str) -> np.ndarray:
    hub = HubName.parse(data)
    rows = open_rows(hub, split)
    column = choose_column(hub, rows.table, hub.column, "column", ("image", "img", "picture"))
    found = _Pictures()
    for index in range(len(rows)):
        picture = rows[index][column]
        where = f"{hub}: row {rows.chosen[index]}"
        if not hasattr(picture, "convert"):
            raise DataError(f"{where} has {type(picture).__name__} in column {column!r}; expected a picture")
        found.add(picture, where)
    return np.stack(found.images)


def _pictures(folder: Path, split: str) -> np.ndarray | None:
    """Every picture below the folder; its folders `train` and `valid` are the split, without them one in ten is."""
    names = {"train": ("train",), "valid": ("valid", "validation", "val", "test")}
    parts = {kind: next((folder / n for n in some if (folder / n).is_dir()), None) for kind, some in names.items()}
    part = parts[split]
    if part is None and any(parts.values()):
        raise DataError(
            f"{folder} has a folder {next(p for p in parts.values() if p).name!r} and none to {split} on; expected "
            "train and valid (or validation, val, test), or neither: then one picture in ten is for validation"
        )
    paths = sorted(p for p in (part or folder).rglob("*") if p.is_file() and not p.name.startswith("."))
    if not any(p.suffix.lower() in _PICTURES for p in paths):
        return None
    Image, UnidentifiedImageError = _pillow()
    found = _Pictures()
    for index, path in enumerate(paths):
        if part is None and split_of(index) != split:
            continue
        try:
            with Image.open(path) as picture:
                found.add(picture, path)
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
            raise DataError(
                f"{path} cannot be read as a picture ({error}); expected pictures only below {folder}"
            ) from None
    if not found.images:
        raise DataError(f"{folder} holds {len(paths)} pictures, too few to keep one in ten for validation")
    return np.stack(found.images)


@lru_cache(maxsize=4)
def read_images(folder: str, split: str) -> np.ndarray:
    """(N, height, width, channels) uint8 of 'train' or 'valid'; says what a folder must hold if it does not.

    folder: a folder, or `hub:NAME` with a column of pictures (`hub.py`)
    """
    if is_hub(folder):
        return _hub_images(folder, split)
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"data={folder!r} is not a folder; expected one with MNIST's idx files, CIFAR-10's or pictures")
    for reader in (_mnist, _cifar, _sheets, _pictures):
        images = reader(path, split)
        if images is not None and not images[:1].size:
            raise DataError(f"data={folder!r} holds {len(images)} {split} images of the size {images.shape[1:]}")
        if images is not None:
            return images
    raise DataError(
        f"data={folder!r} holds no {split} images; expected MNIST's train-images-idx3-ubyte and t10k-images-idx3-ubyte "
        "(also .gz), CIFAR-10's data_batch_*.bin and test_batch.bin (or .png, an image per row), or pictures (.png, "
        ".jpg) of one size"
    )


# Strokes of the ten digits: points in a unit square, y downwards; a curve is a polygon with enough corners.
def _arc(x: float, y: float, rx: float, ry: float, begin: float, end: float) -> list[tuple[float, float]]:
    angles = np.linspace(math.radians(begin), math.radians(end), 10)
    return [(x + rx * math.cos(a), y + ry * math.sin(a)) for a in angles]


_DIGITS: tuple[list[list[tuple[float, float]]], ...] = (
    [_arc(0.5, 0.5, 0.26, 0.38, 0, 360)],
    [[(0.35, 0.28), (0.55, 0.12), (0.55, 0.88)]],
    [[*_arc(0.5, 0.34, 0.25, 0.22, 190, 400), (0.26, 0.88), (0.78, 0.88)]],
    [_arc(0.47, 0.32, 0.25, 0.2, 200, 450), _arc(0.47, 0.68, 0.28, 0.2, 270, 520)],
    [[(0.62, 0.88), (0.62, 0.12), (0.22, 0.64), (0.8, 0.64)]],
    [[(0.74, 0.12), (0.32, 0.12), (0.3, 0.46)], _arc(0.48, 0.64, 0.26, 0.24, 230, 500)],
    [[(0.66, 0.12), (0.4, 0.36), (0.27, 0.62)], _arc(0.5, 0.66, 0.24, 0.22, 0, 360)],
    [[(0.24, 0.12), (0.76, 0.12), (0.42, 0.88)]],
    [_arc(0.5, 0.31, 0.21, 0.19, 0, 360), _arc(0.5, 0.69, 0.25, 0.19, 0, 360)],
    [_arc(0.5, 0.34, 0.24, 0.22, 0, 360), [(0.74, 0.34), (0.66, 0.66), (0.5, 0.88)]],
)


def draw_digit(digit: int, size: int, generator: torch.Generator) -> Tensor:
    """Strokes of a digit, turned, slanted, stretched, moved and thickened at random -> (size, size) uint8.

    >>> image = draw_digit(3, 14, torch.Generator().manual_seed(0))
    >>> image.shape, image.dtype, int(image.max()) > 200
    (torch.Size([14, 14]), torch.uint8, True)
    """
    u = 2 * torch.rand(7, generator=generator, dtype=torch.float64) - 1
    turn, slant = 0.2 * u[0], 0.25 * u[1]
    wide, high = 1 + 0.15 * u[2], 1 + 0.1 * u[3]
    move, thickness = 0.06 * u[4:6], 0.055 + 0.02 * u[6]
    matrix = torch.stack(
        [
            torch.stack([wide * turn.cos(), slant * turn.cos() - turn.sin()]),
            torch.stack([turn.sin(), high * turn.cos()]),
        ]
    )
    begins, ends = [], []
    for stroke in _DIGITS[digit]:
        points = (torch.tensor(stroke, dtype=torch.float64) - 0.5) @ matrix.T + 0.5 + move
        begins.append(points[:-1])
        ends.append(points[1:])
    a, b = torch.cat(begins), torch.cat(ends)  # (segments, 2)
    centres = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    grid = torch.stack(torch.meshgrid(centres, centres, indexing="xy"), -1).view(-1, 1, 2)
    along = b - a
    t = (((grid - a) * along).sum(-1) / along.square().sum(-1)).clamp(0, 1).unsqueeze(-1)
    distance = (grid - a - t * along).norm(dim=-1).amin(-1)
    ink = ((thickness - distance) * size / 1.5 + 0.5).clamp(0, 1)
    image: Tensor = (ink * 255).round().to(torch.uint8)
    return image.view(size, size)


def write_grid(path: Path, images: Tensor, columns: int, scale: int = 2) -> None:
    """images (N, height, width, channels) uint8, side by side with a grey line between them, as a PNG."""
    Image, _ = _pillow()
    count, height, width, channels = images.shape
    rows = -(-count // columns)
    sheet = torch.full((rows * (height + 1) + 1, columns * (width + 1) + 1, channels), 96, dtype=torch.uint8)
    for index, image in enumerate(images):
        top, left = (index // columns) * (height + 1) + 1, (index % columns) * (width + 1) + 1
        sheet[top : top + height, left : left + width] = image
    array: Any = sheet.squeeze(-1).numpy()
    picture = Image.fromarray(array).resize((sheet.shape[1] * scale, sheet.shape[0] * scale), Image.Resampling.NEAREST)
    with replacing(path) as draft:
        picture.save(draft, format="PNG")
