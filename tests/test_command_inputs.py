"""What `plan`, `error` and `bench` say of files and numbers that are not what they expect."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.cli import main

pytest.importorskip("safetensors")


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr as one line)."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, " ".join(err.replace("│", " ").split())


def saved(path: Path, keys: int = 40, spoilt: str = "") -> str:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: 0.3 * torch.randn(1, 1, n, 8, generator=generator) for name, n in (("q", 40), ("k", keys), ("v", keys))
    }
    if spoilt:
        tensors[spoilt][0, 0, 3, 2] = float("nan")
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("spoilt", ["q", "k", "v"])
@pytest.mark.parametrize("name", [["error", "--num-features", "16"], ["plan", "taylor"]])
def test_an_input_that_is_not_finite_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: list[str], spoilt: str
) -> None:
    status, _, said = command(capsys, *name, "--file", saved(tmp_path / "x.safetensors", spoilt=spoilt))
    assert status == 2
    assert f"{spoilt} must be finite; 1 of its 320 entries" in said
    assert "scale" not in said


@pytest.mark.parametrize("name", ["plan", "error"])
def test_a_folder_is_not_called_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert "this is a folder" in command(capsys, name, "--file", str(tmp_path))[2]
    assert "there is no such file" in command(capsys, name, "--file", str(tmp_path / "none"))[2]


ERROR = ("error", "--features", "positive", "--num-features", "16", "--heads", "1", "--head-dim", "8")


def test_error_says_first_how_much_of_the_input_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, *ERROR, "--length", "1500", "--draws", "1")
    assert status == 0
    assert out.splitlines()[1] == "all 1500 tokens are measured"
    assert "one draw;" in out and "1 draws" not in out
    out = command(capsys, *ERROR, "--length", "60", "--tokens", "32", "--draws", "2")[1]
    assert out.splitlines()[1] == "the first 32 of 60 tokens are measured"
    assert "mean of 2 draws" in out
    file = saved(tmp_path / "cross.safetensors", keys=30)
    assert command(capsys, *ERROR[:5], "--file", file)[1].splitlines()[1] == "cross attention: 40 queries to 30 keys"


@pytest.mark.parametrize("name", ["plan", "error"])
def test_options_of_synthetic_inputs_are_refused_beside_a_file(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, _, said = command(capsys, name, "--file", "x.safetensors", "--head-dim", "64")
    assert status == 2 and "--head-dim describes synthetic inputs, but --file gives the inputs" in said


def test_error_with_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = command(capsys, "error", "--features", "none")
    assert status == 2 and "leaves nothing to measure" in said
    status, out, said = command(capsys, "error", "taylor", "--features", "none", "--length", "40", "--heads", "1")
    assert status == 0 and "taylor" in out, said


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", ".x"])
def test_a_saved_bench_stays_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    inside = tmp_path / "one" / "two" / "three"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    status, _, said = command(capsys, "bench", "linear", "--lengths", "8", "--save", name)
    assert status == 2 and "not a path" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def tensors(path: Path, **made: torch.Tensor) -> str:
    from safetensors.torch import save_file

    save_file({name: x.clone() for name, x in made.items()}, path)
    return str(path)


@pytest.mark.parametrize("name", [["error", "--num-features", "16", "--draws", "1"], ["plan", "taylor"]])
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda q, k, v: (1e30 * q, 1e30 * k, v), "q and k have entries up to"),
        (lambda q, k, v: (q, k, 0 * v), "v is 0 everywhere"),
        (lambda q, k, v: (q[..., :0], k[..., :0], v), "of width 1 or more"),
    ],
)
def test_inputs_without_softmax_attention_are_refused_with_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: list[str], spoil: Any, expected: str
) -> None:
    q, k, v = spoil(*torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0)))
    status, _, said = command(capsys, *name, "--file", tensors(tmp_path / "x.safetensors", q=q, k=k, v=v))
    assert status == 2 and expected in said


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_the_values_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: float
) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    asked = ("error", "--features", "positive", "--num-features", "16", "--draws", "1", "--file")
    usual = command(capsys, *asked, tensors(tmp_path / "x.safetensors", q=q, k=k, v=v))[1]
    scaled = command(capsys, *asked, tensors(tmp_path / "y.safetensors", q=q, k=k, v=size * v))[1]
    assert "positive" in usual and usual.splitlines()[1:] == scaled.splitlines()[1:]


def test_a_plan_of_inputs_that_are_all_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One key, or values all alike: the mean is exact, and no error can be asked to be below its own 0."""
    for name, x in (("one", torch.ones(1, 1, 1, 8)), ("alike", torch.ones(1, 2, 64, 8))):
        status, out, said = command(
            capsys, "plan", "performer", "taylor", "--file", tensors(tmp_path / f"{name}.safetensors", q=x, k=x, v=x)
        )
        assert status == 0, said
        assert "the mean of all values alone would do" in out


@pytest.mark.parametrize(
    "asked",
    [
        ["plan", "taylor", "--length", "64", "--heads", "1", "--head-dim", "8"],
        ["error", "--features", "positive", "--num-features", "16", "--length", "32", "--draws", "1"],
        ["bench", "linear", "--lengths", "16", "--runs", "1"],
    ],
)
def test_a_full_disk_does_not_swallow_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    def full(path: object, data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("subquad.lab.write_json", full)
    status, out, said = command(capsys, *asked, "--json", str(tmp_path / "x.json"))
    assert status == 2 and "No space left on device" in said and "every number" not in said
    assert "softmax" in out or "uniform" in out


def test_sizes_beyond_memory_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for features in (1 << 40, 1 << 62):
        asked = ("--features", "positive", "--num-features", str(features), "--length", "16", "--heads", "1")
        status, _, said = command(capsys, "error", *asked)
        assert status == 2 and "not enough memory" in said, said
