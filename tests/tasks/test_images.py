"""Images: the mixture is a distribution, files of all formats are read, bad ones are named, sampling forms agree."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from subquad.tasks.base import DataError, generator_for
from subquad.tasks.image_files import draw_digit, read_idx, read_images, write_grid
from subquad.tasks.images import Images
from subquad.tasks.logistics import log_probability, sample_values


def test_the_mixture_sums_to_one_and_has_finite_gradients_everywhere() -> None:
    parameters = torch.randn(20, 30) * torch.tensor([0.1, 1.0, 4.0, 20.0]).repeat(5).unsqueeze(-1)
    parameters.requires_grad_()
    values = torch.arange(256)
    logs = log_probability(parameters.unsqueeze(1), values.expand(20, 256))
    torch.testing.assert_close(logs.exp().sum(-1), torch.ones(20), rtol=2e-4, atol=0)
    logs.sum().backward()
    assert parameters.grad is not None
    assert bool(parameters.grad.isfinite().all())


def test_the_mixture_against_its_definition() -> None:
    parameters, values = torch.randn(64, 6, dtype=torch.float64), torch.randint(1, 255, (64,))
    weights, means, scales = parameters.chunk(3, -1)
    x = (values.double() / 127.5 - 1).unsqueeze(-1)
    difference = torch.sigmoid((x + 1 / 255 - means) / scales.exp()) - torch.sigmoid(
        (x - 1 / 255 - means) / scales.exp()
    )
    expected = (weights.softmax(-1) * difference).sum(-1).log()
    torch.testing.assert_close(log_probability(parameters, values).double(), expected, rtol=1e-4, atol=1e-5)


def test_samples_follow_the_mixture() -> None:
    parameters = torch.tensor([0.0, 1.0, -0.5, 0.4, -3.0, -2.0])
    drawn = sample_values(parameters.expand(40_000, 6), torch.Generator().manual_seed(0))
    probabilities = log_probability(parameters.expand(256, 6), torch.arange(256)).exp()
    counted = torch.bincount(drawn, minlength=256) / len(drawn)
    assert float((counted - probabilities).abs().sum()) < 0.1  # twice the total variation; unrelated ones have near 2


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def write_mnist(folder: Path, side: int = 4) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (12, side, side), dtype=np.uint8)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx(images[:5]))
    return images


def values(task: Images, split: str, index: int) -> torch.Tensor:
    return task.examples(split).item(index, generator_for(split, 0, 0))["values"]


def test_idx_files_whole_and_reduced(tmp_path: Path) -> None:
    images = write_mnist(tmp_path)
    assert values(Images(data=str(tmp_path)), "train", 3).tolist() == images[3].flatten().tolist()
    assert len(Images(data=str(tmp_path)).examples("valid")) == 5
    reduced = values(Images(data=str(tmp_path), size=2), "train", 3)
    expected = torch.from_numpy(images[3].astype(np.float32)).view(2, 2, 2, 2).mean((1, 3)).round().flatten()
    assert reduced.tolist() == expected.tolist()


def test_cifar_files(tmp_path: Path) -> None:
    records = np.random.default_rng(1).integers(0, 256, (4, 3073), dtype=np.uint8)
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes())
    (tmp_path / "test_batch.bin").write_bytes(records[:2].tobytes())
    pixel = values(Images(data=str(tmp_path)), "train", 2)
    assert len(pixel) == 3072
    assert pixel[:3].tolist() == [records[2, 1], records[2, 1 + 1024], records[2, 1 + 2048]]  # red, green, blue
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes()[:-1])
    from subquad.tasks.image_files import read_images

    read_images.cache_clear()
    with pytest.raises(DataError, match="multiple of 3073"):
        Images(data=str(tmp_path)).examples("train")


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    for index in range(20):
        Image.fromarray(np.full((3, 3, 3), index, dtype=np.uint8)).save(tmp_path / f"{index:02d}.png")
    task = Images(data=str(tmp_path))
    assert (len(task.examples("train")), len(task.examples("valid"))) == (18, 2)
    assert values(task, "valid", 0).tolist() == [9] * 27


def test_sheets_with_an_image_per_row(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 4, 4, 3), dtype=np.uint8)
    for name, part in (("data_batch_1", images[:3]), ("data_batch_2", images[3:5]), ("test_batch", images[5:])):
        Image.fromarray(part.reshape(len(part), 16, 3)).save(tmp_path / f"{name}.png")
    task = Images(data=str(tmp_path))
    assert task.shape() == (4, 4, 3)
    assert (len(task.examples("train")), len(task.examples("valid"))) == (5, 2)
    assert values(task, "train", 3).tolist() == images[3].flatten().tolist()
    assert values(task, "valid", 1).tolist() == images[6].flatten().tolist()
    Image.fromarray(images[:, 0, :3]).save(tmp_path / "data_batch_3.png")
    with pytest.raises(DataError, match="3 pixels wide; expected a square number"):
        read_images.__wrapped__(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", idx(np.zeros((2, 4, 4), np.uint8))[:-3], "truncated: it holds 29 values"),
        ("train-images-idx3-ubyte", b"PK\3\4", "no idx file"),
        ("train-images-idx3-ubyte", b"\0\0\x0d\3" + bytes(12), "type 0x0d, expected unsigned bytes"),
        ("train-images-idx3-ubyte", idx(np.zeros(5, np.uint8)), "expected \\(count, height, width\\)"),
        ("train-images-idx3-ubyte.gz", gzip.compress(bytes(99), mtime=0)[:-9], "truncated or of another type"),
        (
            "train-images-idx3-ubyte",
            idx(np.zeros((2, 4, 0), np.uint8)),
            r"2 train images of the size \(4, 0, 1\)",
        ),
        ("a.png", b"not a picture", "cannot be read as a picture"),
        ("notes.txt", b"hello", "holds no train images"),
    ],
    ids=["short", "magic", "type", "dimensions", "gzip", "empty", "png", "other"],
)
def test_bad_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        Images(data=str(tmp_path)).examples("train")


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=r"size=3 does not fit .* 4 x 4"):
        Images(data=str(tmp_path), size=3).examples("train")
    (tmp_path / "p").mkdir()
    for index, side in enumerate((3, 3, 5)):
        Image.fromarray(np.zeros((side, side), dtype=np.uint8)).save(tmp_path / "p" / f"{index}.png")
    with pytest.raises(DataError, match=r"2.png has the size \(5, 5, 1\).*\(3, 3, 1\)"):
        Images(data=str(tmp_path / "p")).examples("train")
    with pytest.raises(DataError, match="is not a folder"):
        Images(data=str(tmp_path / "nothing")).examples("train")
    with pytest.raises(DataError, match="no idx file"):
        read_idx(tmp_path / "p" / "0.png")


@pytest.mark.parametrize("mechanism", ["linear", "softmax"])
def test_value_by_value_is_the_same_as_recomputing(mechanism: str) -> None:
    task = Images(size=5)
    model = task.build({"layers": 2, "heads": 2, "dim": 16, "positions": "learned", "mechanism": mechanism, "seed": 0})
    begin = torch.randint(0, 256, (3, 7))
    outs = [
        model.complete(begin, 25, recompute=recompute, generator=torch.Generator().manual_seed(1))
        for recompute in (False, True)
    ]
    assert torch.equal(outs[0], outs[1])
    assert outs[0].shape == (3, 25)
    assert torch.equal(outs[0][:, :7], begin)
    assert model.training  # as it was


def test_drawn_digits_differ_and_a_grid_holds_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    digits = torch.stack([draw_digit(index % 10, 14, generator) for index in range(20)])
    assert len({tuple(x.flatten().tolist()) for x in digits}) == 20
    means = digits.float().mean((1, 2))
    assert float(means.min()) > 5
    assert float(means.max()) < 128
    write_grid(tmp_path / "grid.png", digits.unsqueeze(-1), 5, scale=1)
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == (5 * 15 + 1, 4 * 15 + 1)
        assert np.array_equal(np.asarray(picture)[1:15, 1:15], digits[0].numpy())


@pytest.mark.parametrize("name", ["valid", "validation", "val", "test"])
def test_folders_of_a_split_come_in_pairs(name: str, tmp_path: Path) -> None:
    def pictures(folder: Path, values: range) -> None:
        folder.mkdir(parents=True)
        for value in values:
            Image.fromarray(np.full((4, 4), value, dtype=np.uint8)).save(folder / f"{value:03d}.png")

    pictures(tmp_path / "train", range(20))
    with pytest.raises(DataError, match=r"has a folder 'train' and none to valid on; expected train and valid"):
        read_images(str(tmp_path), "valid")
    read_images.cache_clear()
    pictures(tmp_path / name, range(100, 105))
    assert read_images(str(tmp_path), "train")[:, 0, 0, 0].tolist() == list(range(20))
    assert read_images(str(tmp_path), "valid")[:, 0, 0, 0].tolist() == list(range(100, 105))


def test_grey_pictures_of_other_depths(tmp_path: Path) -> None:
    for index in range(20):
        deep = np.full((4, 4), 257 * index, dtype=np.uint16)
        Image.fromarray(deep).save(tmp_path / f"{index:02d}.png")
    values = [*read_images(str(tmp_path), "train")[:, 0, 0, 0], *read_images(str(tmp_path), "valid")[:, 0, 0, 0]]
    assert sorted(values) == list(range(20))
    alpha = tmp_path / "alpha"
    alpha.mkdir()
    for index in range(20):
        Image.merge("LA", [Image.new("L", (4, 4), index)] * 2).save(alpha / f"{index:02d}.png")
    assert read_images(str(alpha), "train").shape[1:] == (4, 4, 1)
    few = tmp_path / "few"
    few.mkdir()
    Image.new("L", (4, 4)).save(few / "0.png")
    with pytest.raises(DataError, match="holds 1 pictures, too few to keep one in ten"):
        read_images(str(few), "valid")
