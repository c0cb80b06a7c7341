"""Data sets by name, `hub:...`: folders on this machine stand for those of the hub, nothing is fetched."""

import builtins
import gc
import io
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subquad.tasks import DataError, get_task
from subquad.tasks.base import SequentialExamples, generator_for
from subquad.tasks.heads import Classifier
from subquad.tasks.hub import HubName, open_rows
from subquad.tasks.token_stream import BETWEEN, TokenStream
from subquad.train import Run, Running, load_trained, train

datasets = pytest.importorskip("datasets")
WORDS = ("red", "green", "blue", "white", "black")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    open_rows.cache_clear()
    datasets.enable_progress_bars()


def sentences(count: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS, size=int(generator.integers(0, 30)))) for _ in range(count)]


def json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text_folder(folder: Path, documents: list[str], valid: list[str] | None = None) -> str:
    half = len(documents) // 2
    json_lines(folder / "train-00000.jsonl", [{"text": text, "id": 0} for text in documents[:half]])
    json_lines(folder / "train-00001.jsonl", [{"text": text, "id": 1} for text in documents[half:]])
    if valid is not None:
        json_lines(folder / "validation.jsonl", [{"text": text, "id": 2} for text in valid])
    return f"hub:{folder}"


# -- names and what can go wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("hub:", "names no data set; expected hub:NAME"),
        ("hub:a/b:text", "'text' is no field=value"),
        ("hub:a/b:colum=text", "unknown.*column"),
        ("hub:a/b:column=x:column=y", "given twice"),
    ],
)
def test_a_name_that_cannot_be_read(data: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        HubName.parse(data)


def test_without_network_the_message_says_what_to_do() -> None:
    task = get_task("text").from_options({"data": "hub:nobody/nothing-of-that-name"})
    with pytest.raises(DataError, match=r"cannot be loaded.*network.*save_to_disk\(FOLDER\) and give hub:FOLDER"):
        task.examples("train")


def test_without_the_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "subquad\[train\]"'):
        get_task("text").from_options({"data": "hub:a/b"}).examples("train")


def test_columns_and_splits_that_do_not_exist_are_named(tmp_path: Path) -> None:
    data = text_folder(tmp_path / "set", sentences(20), sentences(20, 1))
    for wrong, message in (
        (":column=txt", r"no column 'txt'; it has \['text', 'id'\]"),
        (":valid=test", r"no split valid='test'; it has \['train', 'validation'\]"),
        (":train=validation:valid=validation", "train and valid are both 'validation'"),
        (":column=id", "has int in column 'id'; expected text"),
    ):
        with pytest.raises(DataError, match=message):
            get_task("text").from_options({"data": data + wrong, "length": 8}).examples("valid")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"cannot be loaded.*parquet"):
        get_task("documents").from_options({"data": f"hub:{tmp_path / 'other'}"}).examples("train")


# -- streams -------------------------------------------------------------------------------------------------------


def joined(documents: list[str]) -> bytes:
    return b"".join(text.encode() + BETWEEN for text in documents)


def stream(data: str, split: str = "train", block: int = 16) -> TokenStream:
    return TokenStream(HubName.parse(data), split, 8, None, block)


@pytest.mark.parametrize("own_split", [True, False])
def test_a_stream_is_its_documents_one_after_the_other_pass_after_pass(tmp_path: Path, own_split: bool) -> None:
    documents, kept = sentences(40), sentences(15, 1)
    if not own_split:
        every, documents, kept = documents, [], []
        for index, text in enumerate(every):
            (kept if index % 10 == 9 else documents).append(text)
        data = text_folder(tmp_path / "set", every)
    else:
        data = text_folder(tmp_path / "set", documents, kept)
    once = joined(documents)
    whole = once * 3
    train_stream, count = stream(data), len(once) * 2 // 8 // 16 * 16  # through two passes
    got = [bytes(train_stream.window(i).tolist()) for i in range(count)]
    train_stream.close()
    expected = [whole[8 * i : 8 * i + 9] for i in range(count)]
    for begin in range(0, count, 16):
        assert sorted(got[begin : begin + 16]) == sorted(expected[begin : begin + 16])
    assert got != expected  # shuffled within its block
    valid, whole = stream(data, "valid"), joined(kept)
    assert len(valid) == min((len(whole) - 1) // 8, 16)
    assert bytes(valid.window(3).tolist()) == whole[24:33]


def test_a_position_finds_its_window_again_in_any_block_and_pass(tmp_path: Path) -> None:
    data = text_folder(tmp_path / "set", sentences(30), sentences(5, 1))
    first = stream(data)
    count = len(joined(sentences(30))) * 2 // 8
    windows = [first.window(i) for i in range(count)]
    first.close()
    for index in (0, 1, 16, count // 2, count - 3):
        reader = stream(data)
        if index:
            reader.window(index - 1)
        position = json.loads(json.dumps(reader.position(index)))
        assert position["block"] == index // 16  # nothing before its block is read again
        reader.close()
        again = stream(data)
        again.seek(position)
        assert all(torch.equal(again.window(i), windows[i]) for i in range(index, min(index + 20, count)))
        again.close()


def test_only_two_blocks_are_kept_and_the_thread_ends(tmp_path: Path) -> None:
    reader = stream(text_folder(tmp_path / "set", sentences(60), sentences(5, 1)))
    for index in range(160):
        reader.window(index)
        assert set(reader._places) <= {0, index // 16, index // 16 + 1}
    assert any(thread.name.startswith("subquad-stream") for thread in threading.enumerate())
    reader.close()
    assert not any(thread.name.startswith("subquad-stream") for thread in threading.enumerate())


def test_token_ids_are_checked_against_the_vocabulary(tmp_path: Path) -> None:
    json_lines(tmp_path / "set" / "train.jsonl", [{"input_ids": [i % 7, 5, 6]} for i in range(60)])
    data = f"hub:{tmp_path / 'set'}"
    examples = get_task("text").from_options({"data": data, "length": 8, "vocab": 7}).examples("train")
    assert int(examples.item(0, generator_for("train", 0, 0))["tokens"].max()) < 7
    assert isinstance(examples, SequentialExamples)
    examples.close()
    with pytest.raises(DataError, match=r"outside of 0\.\.vocab-1 = 5"):
        get_task("text").from_options({"data": data, "length": 8, "vocab": 6}).examples("valid")
    with pytest.raises(DataError, match="has list in column 'input_ids'; expected text"):
        get_task("text").from_options({"data": data, "length": 8}).examples("valid")


@pytest.mark.parametrize("kind", ["saved", "files"])
def test_training_on_a_stream_resumes_to_the_same_weights(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("subquad.tasks.token_stream.TokenStream.__init__.__defaults__", (16,))
    if kind == "files":
        data = text_folder(tmp_path / "set", sentences(40), sentences(30, 1))
    else:
        datasets.Dataset.from_dict({"text": sentences(40)}).save_to_disk(str(tmp_path / "set"))
        data = f"hub:{tmp_path / 'set'}"
    settings = {"steps": 12, "batch": 6, "valid_every": 6, "valid_examples": 4, "warmup": 2}

    def run() -> Run:
        small = {"layers": 1, "heads": 1, "dim": 8}
        return Run.of("text", "linear", model=small, settings=settings, data=data, length=8, masked=True)

    running = Running(tensorboard=False, save_every=5, workers=2)
    whole = train(run(), tmp_path / "whole", running=running)
    assert whole.status == "finished"
    assert not any(thread.name.startswith("subquad-stream") for thread in threading.enumerate())

    def stop(text: str, done: int, total: int) -> None:
        if done == 7:  # in the middle of a block
            signal.raise_signal(signal.SIGINT)

    part = train(run(), tmp_path / "part", running=Running(tensorboard=False, log_every=1), on_log=stop)
    assert part.status == "interrupted"
    train(run(), tmp_path / "part", resume=True, running=running)
    one, other = (load_trained(tmp_path / name)[1].state_dict() for name in ("whole", "part"))
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- tables --------------------------------------------------------------------------------------------------------


def test_documents_from_csv(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    lines = [f"{WORDS[i % 3]} and more of it,{'good' if i % 3 else 'bad'}" for i in range(40)]
    (folder / "all.csv").write_text("body,mood\n" + "\n".join(lines) + "\n")
    task = get_task("documents").from_options({"data": f"hub:{folder}:column=body:label=mood", "length": 64})
    rows, kept = task.examples("train"), task.examples("valid")
    assert (len(rows), len(kept)) == (36, 4)
    item = kept.item(0, generator_for("valid", 0, 0))  # row 9 or 39: red, so 'bad', the first label
    assert bytes(item["tokens"].tolist()) == b"red and more of it"
    assert int(item["label"]) == 0
    model = task.build({**task.model, "mechanism": "linear"})
    assert isinstance(model, Classifier)
    assert model.head.out_features == 2
    with pytest.raises(DataError, match=r"has the columns \['body', 'mood'\]; say which one to read with :label="):
        get_task("documents").from_options({"data": f"hub:{folder}"}).examples("train")


def test_validation_sees_every_label_of_a_table_sorted_by_it(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "all.csv").write_text("text,label\n" + "\n".join(f"text {i},{i // 200}" for i in range(400)) + "\n")
    kept = get_task("documents").from_options({"data": f"hub:{folder}"}).examples("valid")
    items = [kept.item(i, generator_for("valid", 0, i)) for i in range(len(kept))]
    assert {int(one["label"]) for one in items[:10]} == {0, 1}
    texts = {bytes(one["tokens"].tolist()).decode() for one in items}
    assert texts == {f"text {i}" for i in range(9, 400, 10)}  # each of the kept rows once


def test_proteins_from_parquet(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"sequence": ["ACDEFGHIK" * 3, "MNPQ"] * 10 + ["AC1"]})
    (tmp_path / "set").mkdir()
    table.to_parquet(str(tmp_path / "set" / "train.parquet"))
    task = get_task("protein").from_options({"data": f"hub:{tmp_path / 'set'}", "length": 16, "causal": True})
    examples = task.examples("train")
    assert len(examples.item(1, generator_for("train", 0, 0))["tokens"]) == 4
    with pytest.raises(DataError, match="row 20 holds '1', which is no residue"):
        examples.item(len(examples) - 1, generator_for("train", 0, 0))


def test_pictures_of_a_saved_set(tmp_path: Path) -> None:
    from PIL import Image

    pixels = np.arange(20 * 16, dtype=np.uint8).reshape(20, 4, 4)
    parts = {
        name: datasets.Dataset.from_dict(
            {"image": [Image.fromarray(one) for one in some]}, features=datasets.Features({"image": datasets.Image()})
        )
        for name, some in (("train", pixels[:15]), ("test", pixels[15:]))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    task = get_task("images").from_options({"data": f"hub:{tmp_path / 'set'}"})
    train_images, valid = task.examples("train"), task.examples("valid")
    assert (len(train_images), len(valid)) == (15, 5)
    assert valid.item(0, generator_for("valid", 0, 0))["values"].tolist() == pixels[15].flatten().tolist()


def test_sounds_of_a_saved_set_are_read_without_a_decoder_of_datasets(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    sounds = []
    for index in range(20):
        file = io.BytesIO()
        wave = 0.3 * np.sin(np.arange(3000) * 0.05 * (1 + index % 10))
        soundfile.write(file, wave if index != 18 else 0 * wave, 8000, format="WAV")
        sounds.append({"bytes": file.getvalue(), "path": None})
    stored = datasets.Features(
        {
            "audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
            "label": datasets.Value("int64"),
        }
    )
    table = datasets.Dataset.from_dict({"audio": sounds, "label": [i % 10 for i in range(20)]}, features=stored)
    table = table.cast_column("audio", datasets.Audio())
    good = table.select([i for i in range(20) if i != 18])
    good.save_to_disk(str(tmp_path / "good"))
    task = get_task("speech").from_options({"data": f"hub:{tmp_path / 'good'}", "digits": 2, "fewest": 2})
    item = task.examples("train").item(0, generator_for("train", 0, 0))
    assert len(item["symbols"]) == 2
    assert bool(item["frames"].isfinite().all())
    table.save_to_disk(str(tmp_path / "silent"))
    with pytest.raises(DataError, match="train row 17 is empty or holds silence only"):
        get_task("speech").from_options({"data": f"hub:{tmp_path / 'silent'}"}).examples("train")


def test_the_only_column_is_no_label(tmp_path: Path) -> None:
    json_lines(tmp_path / "train.jsonl", [{"text": f"words {i}"} for i in range(40)])
    with pytest.raises(DataError, match=r"has the columns \['text'\]; say which one to read with :label=NAME"):
        get_task("documents").from_options({"data": f"hub:{tmp_path}"}).examples("train")


# datasets leaves a CSV file open that is not read to its end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_columns_of_streamed_files_are_those_of_their_rows(tmp_path: Path) -> None:
    """Text, CSV and JSON say which columns they have only when they are read."""
    documents = sentences(60)
    (tmp_path / "a.txt").write_text("\n".join(text or "-" for text in documents))
    (tmp_path / "a.json").write_text(json.dumps([{"story": text, "id": n} for n, text in enumerate(documents)]))
    (tmp_path / "a.csv").write_text("body\n" + "\n".join(text or "-" for text in documents))
    for name in ("a.txt", "a.csv", "a.json:column=story"):
        examples = get_task("text").from_options({"data": f"hub:{tmp_path / name}", "length": 16}).examples("train")
        assert examples.item(0, generator_for("train", 0, 0))["tokens"].shape == (16,)
        assert isinstance(examples, SequentialExamples)
        examples.close()
    for name, message in (("a.csv:column=foo", r"has no column 'foo'; it has \['body'\]"),
                          ("a.csv:revision=1", "has no revision")):  # fmt: skip
        with pytest.raises(DataError, match=message):
            get_task("text").from_options({"data": f"hub:{tmp_path / name}", "length": 16}).examples("train")
    gc.collect()
