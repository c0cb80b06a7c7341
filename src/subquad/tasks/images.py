"""Images, pixel by pixel: a causal model of the values in reading order, bits per dimension, sampling, completion.

The experiment of Katharopoulos et al., "Transformers are RNNs", 2020, section 4.2: every value (red, green and blue one
after the other) is a token; a discretised mixture of logistics gives its distribution. Built in are digits drawn at
random (14 x 14); `data=` names a folder with MNIST, CIFAR-10 or pictures of one size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..features.precision import full_precision, widened
from ..nn.models import TransformerEncoder
from .base import UNLIMITED, Batch, DataError, Examples, Progress, Task, TaskModel, generator_for
from .heads import with_positions
from .image_files import draw_digit, read_images, write_grid
from .logistics import log_probability, parameters_per_pixel, sample_values

__all__ = ["ImageModel", "Images"]

START = 256
# Without a recurrent form every new value costs a pass over all before it; beyond this many that is no longer minutes.
LONGEST_RECOMPUTED = 1024


class ImageModel(TaskModel):
    """A causal encoder over the values seen so far and a mixture of logistics for the next: batch `values` (B, L)."""

    def __init__(self, components: int, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.backbone = TransformerEncoder(vocab=START + 1, **model)
        self.head = nn.Linear(self.backbone.config.dim, parameters_per_pixel(components))
        with torch.no_grad():
            # Means spread over the range: components that all start in one place take long to part.
            self.head.bias[components : 2 * components] = torch.linspace(-1, 1, components)
            self.head.bias[2 * components :] = -1.0

    def forward(self, batch: Batch) -> Batch:
        """Sum of -log P over all values."""
        values = batch["values"]
        seen = F.pad(values[:, :-1], (1, 0), value=START)
        hidden = self.backbone(seen, is_causal=True)
        # bfloat16 has 8 bits: a mean rounded to them would be up to half a pixel value off.
        with full_precision(hidden):
            parameters = self.head(widened(hidden))
        return {"loss": -log_probability(parameters, values).sum()}

    @property
    def recurrent(self) -> bool:
        """Whether it can be run value by value."""
        return all(mechanism.recurrent for mechanism in self.backbone.mechanisms())

    @torch.no_grad()
    def complete(
        self,
        begin: Tensor,
        length: int,
        *,
        recompute: bool = False,
        generator: torch.Generator | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """begin (B, N) values -> (B, length): the rest drawn value by value; N may be 0.

        recompute: forget everything after each value and run over all before it again, the only way for mechanisms
        that have no recurrent form
        """
        training = self.training
        self.eval()
        try:
            tokens = F.pad(begin, (1, 0), value=START)
            state: Any = None
            new, values = tokens, [begin]
            for place in range(begin.shape[1], length):
                if progress is not None:
                    progress("sampling", place, length)
                if recompute:
                    hidden = self.backbone(tokens, is_causal=True)
                else:
                    hidden, state = self.backbone.scan(new, state)
                new = sample_values(self.head(hidden[:, -1]), generator).unsqueeze(1)
                if recompute:
                    tokens = torch.cat([tokens, new], 1)
                values.append(new)
            return torch.cat(values, 1)
        finally:
            self.train(training)


@dataclass(frozen=True)
class _Drawn:
    size: int

    def __len__(self) -> int:
        return UNLIMITED

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """A digit nobody has seen before."""
        digit = int(torch.randint(10, (), generator=generator))
        values = draw_digit(digit, self.size, generator).flatten().long()
        return {"values": values, "weight": torch.tensor(float(len(values)))}


@dataclass(frozen=True)
class _Stored:
    images: np.ndarray
    factor: int

    def __len__(self) -> int:
        return len(self.images)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """values (height * width * channels,) in reading order, averaged over squares of `factor`."""
        image = torch.from_numpy(self.images[index].astype(np.float32))
        if self.factor > 1:
            image = F.avg_pool2d(image.permute(2, 0, 1), self.factor).permute(1, 2, 0)
        values = image.round().long().flatten()
        return {"values": values, "weight": torch.tensor(float(len(values)))}


@dataclass(frozen=True)
class Images(Task):
    """Images of the folder `data`, reduced to `size` x `size`; `components` logistics; `samples` drawn at the end."""

    name: ClassVar[str] = "images"
    metric: ClassVar[str] = "bits_per_dim"
    model: ClassVar[dict[str, Any]] = {"layers": 4, "heads": 4, "dim": 64}
    training: ClassVar[dict[str, Any]] = {"steps": 1000, "batch": 16, "lr": 2e-3, "warmup": 100}

    data: str | None = None
    size: int | None = None
    components: int = 10
    samples: int = 16

    def __post_init__(self) -> None:
        if self.size is not None:
            checks.check_positive("size", self.size, least=2)
        checks.check_positive("components", self.components)
        checks.check_positive("samples", self.samples, least=0)

    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image as the model sees it."""
        if self.data is None:
            return (self.size or 14, self.size or 14, 1)
        height, width, channels = read_images(self.data, "train").shape[1:]
        if self.size is None:
            return height, width, channels
        if height != width or height % self.size:
            raise DataError(
                f"size={self.size} does not fit the images in {self.data!r}, which are {height} x {width}; expected "
                f"square ones and a divisor of their side"
                + (f": one of {[n for n in range(1, height + 1) if not height % n]}" if height == width else "")
            )
        return self.size, self.size, channels

    def examples(self, split: str) -> Examples:
        """Drawn digits without end, or the stored images."""
        height = self.shape()[0]
        if self.data is None:
            return _Drawn(height)
        images, first = read_images(self.data, split), read_images(self.data, "train")
        if images.shape[1:] != first.shape[1:]:
            raise DataError(
                f"the {split} images in {self.data!r} have the size {images.shape[1:]}, those for training "
                f"{first.shape[1:]}; they must be alike"
            )
        return _Stored(images, images.shape[1] // height)

    def build(self, model: Mapping[str, Any]) -> ImageModel:
        """Learned positions get one place per value."""
        return ImageModel(self.components, with_positions(model, math.prod(self.shape())))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Nats and bits per dimension; a uniform guess has 8 bits."""
        loss = totals["loss"] / totals["weight"]
        return {"loss": loss, "bits_per_dim": loss / math.log(2)}

    def finish(self, model: Any, folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
        """`samples.png`, and `completions.png`: rows of original, upper half, and four ways to go on from it."""
        shape, length = self.shape(), math.prod(self.shape())
        recompute = not model.recurrent
        if not self.samples or (recompute and length > LONGEST_RECOMPUTED):
            return {"samples": "none: the mechanism has no recurrent form"} if self.samples else {}
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        nothing = torch.zeros(self.samples, 0, dtype=torch.int64, device=device)
        begin = time.perf_counter()
        drawn = model.complete(nothing, length, recompute=recompute, generator=generator, progress=progress)
        seconds = time.perf_counter() - begin
        columns = math.isqrt(self.samples - 1) + 1
        write_grid(folder / "samples.png", drawn.view(-1, *shape).byte().cpu(), columns)
        valid = self.examples("valid")
        rows = []
        for index in range(min(4, len(valid))):
            whole = valid.item(index, generator_for("valid", 0, index))["values"].to(device)
            half = whole[: length // 2]
            ways = model.complete(
                half.expand(4, -1), length, recompute=recompute, generator=generator, progress=progress
            )
            rows += [whole[None], F.pad(half, (0, length - length // 2))[None], ways]
        write_grid(folder / "completions.png", torch.cat(rows).view(-1, *shape).byte().cpu(), 6)
        return {
            "samples": "samples.png",
            "completions": "completions.png",
            "tokens_per_second": round(self.samples * length / seconds, 1),
            "form": "recomputed" if recompute else "recurrent",
        }
