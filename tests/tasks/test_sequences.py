"""Text, proteins, ListOps and documents: what they read is what is there, and what cannot be used is named."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from subquad.tasks.base import IGNORED, DataError, generator_for
from subquad.tasks.documents import Documents
from subquad.tasks.fasta import FastaFile
from subquad.tasks.heads import mask_tokens
from subquad.tasks.listops import SYMBOLS, Listops, evaluate
from subquad.tasks.listops import _read as _read_listops
from subquad.tasks.protein import BEGIN, MASK, Protein
from subquad.tasks.text import Text
from subquad.tasks.token_file import TokenFile
from subquad.train import Run, Running, train


def item(task: Any, split: str, index: int = 0, draw: int = 0) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = task.examples(split).item(index, generator_for(split, 0, draw))
    return found


# -- text -----------------------------------------------------------------------------------------------------------


def test_text_targets_are_the_next_bytes_and_splits_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(i % 251 for i in range(2000)))
    task = Text(data=str(path), length=16)
    for draw in range(30):
        one = item(task, "train", 0, draw)
        assert torch.equal(one["targets"][:-1], one["tokens"][1:])
        assert torch.equal((one["tokens"] + 1) % 251, one["targets"])
    valid = task.examples("valid")
    seen = torch.cat([valid.item(i, torch.Generator())["tokens"] for i in range(len(valid))])
    assert seen.tolist() == [i % 251 for i in range(1800, 1800 + len(seen))]


def test_masking_hides_a_share_and_keeps_the_rest() -> None:
    tokens = torch.arange(10_000) % 50
    example = mask_tokens(tokens, 50, 50, torch.Generator().manual_seed(0))
    seen, targets = example["tokens"], example["targets"]
    chosen = targets != IGNORED
    assert example["weight"] == chosen.sum()
    assert 0.13 < float(chosen.float().mean()) < 0.17
    assert torch.equal(seen[~chosen], tokens[~chosen])
    assert torch.equal(targets[chosen], tokens[chosen])
    assert 0.77 < float((seen[chosen] == 50).float().mean()) < 0.83
    for seed in range(20):
        one = mask_tokens(torch.tensor([3]), 50, 50, torch.Generator().manual_seed(seed))
        assert one["targets"].tolist() == [3]  # never nothing to predict


def test_a_file_larger_than_what_may_be_read_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a sparse terabyte: far larger than memory, no room on the disk
        file.seek(5)
        file.write(b"hello")
    task = Text(data=str(path), length=8)
    assert task.examples("train").file.window(4, 7).tolist() == [0, *b"hello", 0]  # type: ignore[attr-defined]
    assert item(task, "train", 0, 3)["tokens"].tolist() == [0] * 8
    again = pickle.loads(pickle.dumps(TokenFile(path)))  # to a worker process: a path, not a terabyte
    assert len(again) == 1 << 40


def test_token_ids_in_npy_files(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(1000, dtype=np.uint16))
    assert item(Text(data=str(path), length=8, vocab=1000), "valid")["tokens"].tolist() == list(range(900, 908))
    with pytest.raises(DataError, match="vocab="):
        Text(data=str(path)).examples("train")
    with pytest.raises(DataError, match=r"holds the id 9\d\d .* outside of 0..vocab-1 = 99"):
        item(Text(data=str(path), length=8, vocab=100), "valid")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x93NUMPY\x01\x00v\x00{'descr'", "truncated or of another type"),
        (b"plain text", "truncated or of another type"),
        (pickle.dumps({"an": "object"}), "truncated or of another type"),
    ],
)
def test_bad_token_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"x.npy.*{message}"):
        Text(data=str(path), vocab=10).examples("train")


def test_truncated_and_mixed_arrays_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000))
    (tmp_path / "t.npy").write_bytes((tmp_path / "t.npy").read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated"):
        TokenFile(tmp_path / "t.npy", 1000)
    np.save(tmp_path / "f.npy", np.zeros((3, 3)))
    with pytest.raises(DataError, match=r"shape \(3, 3\) and type float64"):
        TokenFile(tmp_path / "f.npy", 10)
    (tmp_path / "short.txt").write_bytes(b"too short")
    with pytest.raises(DataError, match="too few for one window"):
        Text(data=str(tmp_path / "short.txt")).examples("train")
    with pytest.raises(DataError, match="is a folder"):
        Text(data=str(tmp_path)).examples("train")


# -- proteins ---------------------------------------------------------------------------------------------------------

FASTA = b">one first\nACDE\nFGHI\n>two\r\nacdx*\r\n" + b"".join(b">n%d\nMKVL-W\n" % i for i in range(18))


@pytest.mark.parametrize("packed", [False, True])
def test_fasta_records(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("a.fasta.gz" if packed else "a.fasta")
    path.write_bytes(gzip.compress(FASTA) if packed else FASTA)
    file = FastaFile(path)
    assert len(file) == 20
    assert file.sequence(0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert file.sequence(1).tolist() == [0, 1, 2, 24]
    assert file.sequence(19).tolist() == [10, 8, 17, 9, 18]
    masked, causal = (item(Protein(data=str(path), length=6, causal=causal), "train") for causal in (False, True))
    chosen = masked["targets"] != IGNORED
    assert len(masked["tokens"]) == 6
    assert set(masked["tokens"][~chosen].tolist()) <= set(range(8))
    assert int(masked["tokens"].max()) <= MASK
    assert int(causal["tokens"][0]) == BEGIN
    assert torch.equal(causal["tokens"][1:], causal["targets"][:-1])
    assert len(Protein(data=str(path)).examples("valid")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"ACDEF\n", "begins with"),
        (b">a\nAC1D\n" * 20, "holds '1', which is no residue"),
        (b">a\n\n" * 20, "has no residues"),
    ],
)
def test_bad_fasta_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.fasta"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"bad.fasta.*{message}"):
        item(Protein(data=str(path)), "train")


def test_eight_thousand_residues_in_one_batch() -> None:
    task = Protein(length=8192)
    batch = task.collate([item(task, "train", draw=draw) for draw in range(2)])
    assert batch["tokens"].shape[1] > 4096
    model = task.build({"layers": 1, "heads": 1, "dim": 8, "mechanism": "linear", "seed": 0})
    assert torch.isfinite(model(batch)["loss"])


# -- ListOps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("7", 7), ("[MED 1 2 9 ]", 2), ("[MED 1 2 ]", 1), ("[SM 9 9 [MIN 4 3 ] ]", 1), ("[MAX [SM 5 6 ] 0 ]", 1)],
)
def test_values_of_expressions(text: str, value: int) -> None:
    assert evaluate(text.split()) == value


def test_generated_expressions_are_complete_varied_and_short_enough() -> None:
    task = Listops(length=60)
    lengths, labels = [], []
    for draw in range(200):
        one = item(task, "train", draw=draw)
        symbols = [SYMBOLS[i] for i in one["tokens"].tolist()]
        assert evaluate(symbols) == int(one["label"])
        lengths.append(len(symbols))
        labels.append(int(one["label"]))
    assert max(lengths) <= 60
    assert max(lengths) > 30
    assert len(set(labels)) == 10
    assert max(labels.count(i) for i in range(10)) < 80


def test_listops_files(tmp_path: Path) -> None:
    (tmp_path / "basic_train.tsv").write_text("Source\tTarget\n( ( [MAX 3 ) 4 ] )\t4\n")
    assert item(Listops(data=str(tmp_path)), "train")["tokens"].tolist() == [10, 3, 4, 14]
    with pytest.raises(DataError, match=r"holds no basic_val\.tsv"):
        Listops(data=str(tmp_path)).examples("valid")
    (tmp_path / "basic_val.tsv").write_text("[MAX 3 4 ]\n")
    with pytest.raises(DataError, match="line 1: expected an expression, a tab and a digit"):
        Listops(data=str(tmp_path)).examples("valid")
    (tmp_path / "basic_val.tsv").write_text("] 3\t4\n")
    _read_listops.cache_clear()
    with pytest.raises(DataError, match="line 1: '] 3' closes a bracket that was not opened"):
        Listops(data=str(tmp_path)).examples("valid")


# -- documents --------------------------------------------------------------------------------------------------------


def test_letters_are_signed_by_their_writer_or_not() -> None:
    for writers in (2, 8):
        task = Documents(length=200, writers=writers)
        names: set[str] = set()
        lengths: dict[str, list[int]] = {"train": [], "valid": []}
        for split in ("train", "valid"):
            for draw in range(100):
                one = item(task, split, draw=draw)
                text = bytes(one["tokens"].tolist()).decode()
                assert (text.split()[0] == text.split()[-1]) == bool(one["label"])
                names.add(text.split()[0])
                lengths[split].append(len(text))
        assert len(names) == writers
        # Names of one length, so that how long a letter is tells nothing; short ones are for training only.
        assert {len(name) for name in names} == {3}
        assert min(lengths["train"]) < 80
        assert max(lengths["train"]) > 120
        assert min(lengths["valid"]) > 150
        assert max(lengths["valid"]) <= 200
    with pytest.raises(ValueError, match=r"writers=9.*2 to 8"):
        Documents(writers=9)


def test_folders_of_labelled_files(tmp_path: Path) -> None:
    for label in ("no", "yes"):
        (tmp_path / label).mkdir()
        for index in range(10):
            (tmp_path / label / f"{index}.txt").write_text(f"{label} {index} " * 50)
    task = Documents(data=str(tmp_path), length=64)
    train, valid = task.examples("train"), task.examples("valid")
    assert (len(train), len(valid)) == (18, 2)
    kept = [valid.item(i, torch.Generator()) for i in range(2)]
    assert {bytes(one["tokens"].tolist())[:9]: int(one["label"]) for one in kept} == {b"no 9 no 9": 0, b"yes 9 yes": 1}
    (tmp_path / "yes/0.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.txt is empty"):
        [train.item(i, torch.Generator()) for i in range(18)]
    (tmp_path / "yes/0.txt").write_bytes(b"PK\0\0")
    with pytest.raises(DataError, match="no text file"):
        [train.item(i, torch.Generator()) for i in range(18)]
    with pytest.raises(DataError, match="of 0 labels"):
        Documents(data=str(tmp_path / "yes")).examples("train")


def test_validation_files_of_all_labels_come_first(tmp_path: Path) -> None:
    for label in ("no", "yes"):
        (tmp_path / label).mkdir()
        for index in range(60):
            (tmp_path / label / f"{index:02}.txt").write_text(f"{label} {index}")
    valid = Documents(data=str(tmp_path), length=64).examples("valid")
    assert {int(valid.item(index, torch.Generator())["label"]) for index in range(len(valid) // 2)} == {0, 1}


def test_documents_are_joined_from_stretches(tmp_path: Path) -> None:
    sources = {"digits": b"0123456789", "large": b"ABCDEFGHIJ", "small": b"abcdefghij"}
    for label, letters in sources.items():
        (tmp_path / label).mkdir()
        for index in range(10):
            (tmp_path / label / f"{index}.txt").write_bytes(letters[:: -1 if index == 9 else 1] * 10)
    (tmp_path / "small/0.txt").write_bytes(b"small")  # shorter than a stretch: left out
    task = Documents(data=str(tmp_path), length=128, stretch=32, share=0.6)
    possible = {
        split: {
            (letters[::step] * 10)[at : at + 32]: label
            for label, letters in enumerate(sources.values())
            for at in range(69)
        }
        for split, step in (("train", 1), ("valid", -1))
    }
    for split, known in possible.items():
        examples = task.examples(split)
        documents = [examples.item(index, torch.Generator().manual_seed(index)) for index in range(500)]
        labels = torch.tensor([int(one["label"]) for one in documents])
        assert set(labels.tolist()) == {0, 1, 2}
        made_of = [[known[bytes(part)] for part in one["tokens"].view(4, 32).tolist()] for one in documents]
        same = torch.tensor(made_of) == labels.unsqueeze(-1)
        # 2,000 draws with a chance of 0.6: a standard error of 0.011
        assert abs(float(same.float().mean()) - 0.6) < 0.066
        again = examples.item(3, torch.Generator().manual_seed(3))
        assert torch.equal(again["tokens"], documents[3]["tokens"])
    whole = Documents(data=str(tmp_path), length=64, stretch=64).examples("train")
    for index in range(20):
        one = whole.item(index, torch.Generator().manual_seed(index))
        assert possible["train"][bytes(one["tokens"][:32].tolist())] == int(one["label"])


def test_joined_documents_refuse_what_cannot_be(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for index in range(10):
            (tmp_path / label / f"{index}.txt").write_text("x" * (90 if label == "b" else 50))
    with pytest.raises(DataError, match="no file to train on of the label 'a' with stretch=64"):
        Documents(data=str(tmp_path), length=64, stretch=64).examples("train")
    for data in (None, "hub:some/set"):
        with pytest.raises(ValueError, match="stretch=32 cuts the files of a folder"):
            Documents(data=data, stretch=32)
    with pytest.raises(ValueError, match="length=100 must be a multiple of stretch=64"):
        Documents(data=str(tmp_path), length=100, stretch=64)
    with pytest.raises(ValueError, match=r"share=0\.5 needs stretch="):
        Documents(data=str(tmp_path), share=0.5)
    with pytest.raises(ValueError, match="share must be a number above 0, and at most 1, got 0"):
        Documents(data=str(tmp_path), stretch=64, length=64, share=0)


def test_listops_files_are_not_cut(tmp_path: Path) -> None:
    long = f"[MAX {'1 ' * 300}9 ]"
    for name in ("basic_train.tsv", "basic_val.tsv"):
        (tmp_path / name).write_text(f"Source\tTarget\n{long}\t9\n")
    with pytest.raises(DataError, match=r"has an expression of 303 symbols, and length=200.*--set length=303"):
        Listops(data=str(tmp_path)).examples("train")
    assert len(item(Listops(data=str(tmp_path), length=303), "train")["tokens"]) == 303
    for line in ("[MAX 1 2 ]\t²", "\t3"):
        (tmp_path / "basic_train.tsv").write_text(f"Source\tTarget\n{line}\n")
        _read_listops.cache_clear()
        with pytest.raises(DataError, match="line 2: expected an expression, a tab and a digit"):
            Listops(data=str(tmp_path), length=303).examples("train")


def test_validation_has_every_label(tmp_path: Path) -> None:
    for label, count in (("neg", 9), ("pos", 40)):
        (tmp_path / "a" / label).mkdir(parents=True)
        for i in range(count):
            (tmp_path / "a" / label / f"{i:02d}.txt").write_text("some words")
    with pytest.raises(DataError, match="too few files of the label 'neg'"):
        Documents(data=str(tmp_path / "a")).examples("valid")
    for split, labels in (("train", ("neg", "pos")), ("val", ("neg", "new"))):
        for label in labels:
            (tmp_path / "b" / split / label).mkdir(parents=True)
            (tmp_path / "b" / split / label / "0.txt").write_text("some words")
    with pytest.raises(DataError, match=r"train has the labels \['neg', 'pos'\], val has \['neg', 'new'\]"):
        Documents(data=str(tmp_path / "b")).examples("train")
    (tmp_path / "a" / "pos" / "00.txt").write_text("")
    with pytest.raises(DataError, match=r"00\.txt is empty"):
        Documents(data=str(tmp_path / "a")).examples("train")


def test_learned_positions_have_as_many_places_as_a_sequence(tmp_path: Path) -> None:
    model = {"layers": 1, "heads": 2, "dim": 16, "positions": "learned"}
    settings = {"steps": 2, "batch": 2, "valid_examples": 2, "valid_every": 1}
    for task in ("text", "documents", "listops", "protein"):
        run = Run.of(task, "linear", model=model, settings=settings, length=64)
        outcome = train(run, tmp_path / task, running=Running(tensorboard=False))
        assert outcome.status == "finished" and "failed" not in outcome.artefacts
    assert len((tmp_path / "text/sample.txt").read_bytes()) == 64


@pytest.mark.parametrize(("line", "message"), [
    ("[MAX 1 2 ]\t7", "line 2: the expression is 2, and 7 is given"),
    ("[MAX 1 2\t2", "line 2: .* no complete expression"), ("1 ]\t1", "line 2: .* was not opened"),
    ("[MAX ]\t1", "line 2: .* has no values"), ("[MAX \xe9 ]\t1", "line 2: .* is no symbol"),
])  # fmt: skip
def test_wrong_expressions_are_refused(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "basic_train.tsv").write_bytes(f"Source\tTarget\n{line}\n".encode("latin-1"))
    _read_listops.cache_clear()
    with pytest.raises(DataError, match=message):
        Listops(data=str(tmp_path)).examples("train")


def test_long_expressions_are_read(tmp_path: Path) -> None:
    (tmp_path / "basic_train.tsv").write_text(f"[MAX {'1 ' * 70000}]\t1\n")  # above the limit of a csv field
    assert len(item(Listops(data=str(tmp_path), length=70002), "train")["tokens"]) == 70002


@pytest.mark.parametrize(("record", "message"), [
    (">only a name\n", "record 3 .'>only a name'. has no residues"), (">gaps\n-*\n", "record 3 .* has no residues"),
    (">odd\nACD\nA1C\n", "record 3 .* holds '1'"), (">odd\n1AC\n", "record 3 .* holds '1'"),
])  # fmt: skip
def test_bad_records_are_found_before_training(tmp_path: Path, record: str, message: str) -> None:
    good = ">good, with 1 number in its name\nACDEF\nGHI\n"
    path = tmp_path / "a.fasta"
    path.write_text(good * 2 + record + good)
    with pytest.raises(DataError, match=message):
        FastaFile(path)
    path.write_text(good * 4)
    assert len(FastaFile(path)) == 4 and len(FastaFile(path).sequence(3)) == 8


def test_token_ids_have_bits_per_token(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(400) % 50)
    task = Text(data=str(tmp_path / "ids.npy"), vocab=50, length=8)
    assert task.metric == "bits_per_token" and Text().metric == "bits_per_byte"
    assert task.metric in task.metrics({"loss": 1.0, "weight": 1.0, "right": 0.0})
