"""`subquad convert`, and the figures it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from subquad import cli
from subquad.hf import convert, load
from subquad.hf.conversion.interface import mechanism_of
from subquad.hf.conversion.layers import find_layers
from subquad.hf.plan import automatic, survey
from subquad.lab.converted import lengthened, memory_of, pays_from, time_models
from subquad.lab.quality import kind_of, read_documents, score, to_batches

from .test_sentences import encoder
from .zoo import VOCAB, make


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in range(6, 36)]
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(rows))
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli._application(), ["convert", *(str(one) for one in arguments)])


def saved(tmp_path: Path, name: str) -> Path:
    make(name).save_pretrained(tmp_path / name)
    return tmp_path / name


def test_a_folder_comes_out_with_the_report(tmp_path: Path, ids: Path) -> None:
    out = tmp_path / "out"
    ran = invoke(
        saved(tmp_path, "llama"), "--mechanism", "hybrid:window=4:sinks=1", "--option",
        'far={"mechanism": "performer", "features": "sderf", "num_features": 16, "seed": 0}',
        "--layers", "0,2", "--calibrate", ids, "--no-speed", "--out", out,
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert "2 of 3 attention layers converted" in ran.output and "perplexity (lower is better)" in ran.output
    record = json.loads((out / "report.json").read_text())
    assert record["layers"]["converted"] == [0, 2]
    quality = record["quality"]
    assert {"exact", "converted", "uniform", "window only"} < quality.keys()
    assert 0 < abs(quality["converted"] - quality["exact"]) < abs(quality["uniform"] - quality["exact"])
    model = load(out)
    assert [mechanism_of(layer.module) is None for layer in find_layers(model)] == [False, True, False]


@pytest.mark.parametrize(("length", "pays"), [(8192, True), (16, False)])
def test_text_alone_chooses_or_says_that_nothing_pays(
    tmp_path: Path, ids: Path, length: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times(choices: Any, shape: Any, causal: bool, lengths: Any) -> Any:
        rows = [[1e-8 * n * n if c["mechanism"] == "softmax" else 1e-6 * n for n in lengths] for c in choices]
        return torch.tensor(rows, dtype=torch.float64), [shape[2] * 1e-8 * n * n for n in lengths]

    monkeypatch.setattr("subquad.hf.plan.survey._layer_times", times)
    # Eight windows of 32: fewer tokens could not judge it for more.
    rows = json.loads(ids.read_text())
    ids.write_text(json.dumps([(50 * row)[:256] for row in rows]))
    out = tmp_path / "out"
    ran = invoke(
        saved(tmp_path, "llama"), "--text", ids, "--error", 0.5, "--length", length, "--no-speed", "--out", out
    )
    assert ran.exit_code == 0, ran.output
    record = json.loads((out / "report.json").read_text())["layers"]
    assert bool(record["converted"]) == pays and record["choice"]["error"] <= 0.5
    assert ("times as fast as exact" if pays else "nothing was converted") in ran.output
    assert (out / "model.safetensors").exists() == pays


def test_an_interrupted_choice_goes_on_where_it_was(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    errors = survey._best_draws

    def counted(one: Any, *rest: Any) -> Any:
        if len(measured) == 3 * 2 + 1:  # in the middle of the third layer
            measured.append(-1)
            raise KeyboardInterrupt
        measured.append(one.layer.index)
        return errors(one, *rest)

    def known(choices: Any, shape: Any, causal: bool, lengths: Any) -> Any:
        rows = [[1e-8 * n * n if c["mechanism"] == "softmax" else 1e-6 * n for n in lengths] for c in choices]
        return torch.tensor(rows, dtype=torch.float64), [shape[2] * 1e-8 * n * n for n in lengths]

    monkeypatch.setattr(survey, "_best_draws", counted)
    monkeypatch.setattr(survey, "_layer_times", known)
    few = [
        {"mechanism": "softmax"},
        {"mechanism": "local", "window": 2},
        {"mechanism": "performer", "num_features": 8},
    ]
    monkeypatch.setattr(automatic, "AUTOMATIC", few)
    folder, reports = saved(tmp_path, "llama"), []
    for out in ("out", "out", "other"):
        ran = invoke(folder, "--text", ids, "--error", 0.9, "--length", 8192, "--no-speed", "--out", tmp_path / out)
        unfinished = (tmp_path / out / "choice.unfinished").exists()
        if not reports and measured[-1] == -1:
            assert ran.exit_code != 0 and unfinished and "[1/3] layer 1: 3 candidates" in ran.stderr
            del measured[:]
            measured += [0] * 8  # no further interruption
            continue
        assert ran.exit_code == 0 and not unfinished, ran.output
        if not reports:
            assert measured[8:] == [2] * 3  # the first two layers were known
        reports.append(json.loads((tmp_path / out / "report.json").read_text())["layers"])
    first, second = reports
    assert first["converted"] and first["layers"] == second["layers"]
    assert first["choice"]["error"] == second["choice"]["error"]


def test_distillation_lowers_the_damage(tmp_path: Path, ids: Path) -> None:
    out = tmp_path / "out"
    ran = invoke(
        saved(tmp_path, "bert"), "--mechanism", "hedgehog", "--calibrate", ids, "--distill", ids, "--steps", 30,
        "--no-speed", "--out", out,
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    record = json.loads((out / "report.json").read_text())
    assert record["quality"]["score"] == "embedding cosine"  # there is no tokenizer to name a mask token
    assert record["quality"]["exact"] == pytest.approx(1.0, abs=1e-5)
    assert record["quality"]["converted"] < record["quality"]["distilled"] < 1
    assert record["distillation"]["attention_losses"][-1] < record["distillation"]["attention_losses"][0]


def test_documents_kept_aside_are_used_for_nothing_else(
    tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one file serves for calibration and distillation, and holds a document twice."""
    rows = json.loads(ids.read_text())
    ids.write_text(json.dumps([*rows, rows[0], rows[5]]))
    seen: dict[str, set[tuple[int, ...]]] = {"calibration": set(), "training": set(), "figures": set()}

    def note(where: str, batches: Any) -> None:
        for one in batches:
            for row, mask in zip(one["input_ids"], one["attention_mask"], strict=True):
                seen[where].add(tuple(row[mask.bool()].tolist()))

    from subquad import hf
    from subquad.hf.distillation import distilling as training
    from subquad.lab import quality

    true_convert, true_distill, true_score = hf.convert, training.distill, quality.score

    def converting(*args: Any, calibration: Any = (), **options: Any) -> Any:
        note("calibration", calibration or ())
        return true_convert(*args, calibration=calibration or None, **options)

    def distilling(teacher: Any, student: Any, batches: Any, **options: Any) -> Any:
        note("training", batches)
        return true_distill(teacher, student, batches, **options)

    def measuring(kind: str, model: Any, batches: Any, **options: Any) -> float:
        note("figures", batches)
        return true_score(kind, model, batches, **options)

    monkeypatch.setattr(hf, "convert", converting)
    monkeypatch.setattr(training, "distill", distilling)
    monkeypatch.setattr(quality, "score", measuring)
    ran = invoke(
        saved(tmp_path, "bert"), "--mechanism", "hedgehog", "--calibrate", ids, "--distill", ids, "--steps", 1,
        "--no-speed", "--out", tmp_path / "out",
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert all(seen.values())
    assert not seen["figures"] & (seen["calibration"] | seen["training"])


def test_a_sentence_encoder_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its pooling and normalisation, by which it is judged as well."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    model = encoder(tmp_path)
    model[1].pooling_mode = "cls"
    model.append(modules.Normalize())
    folder, out, words = tmp_path / "encoder", tmp_path / "out", [f"w{i}" for i in range(40)]
    model.save(str(folder))
    text = tmp_path / "words.txt"
    text.write_text("\n".join(" ".join(words[i : i + 2 + i % 9]) for i in range(30)))
    monkeypatch.setattr("subquad.lab.converted.memory_of", lambda folder, lengths: [])
    ran = invoke(
        folder, "--mechanism", "performer:num_features=16", "--calibrate", text, "--distill", text, "--steps", 1,
        "--lora-steps", 1, "--lengths", 16, "--out", out,
    )  # fmt: skip
    assert ran.exit_code == 0, ran.output
    again = load(out, device="cpu")
    assert [type(part).__name__ for part in again] == ["ConvertedTransformer", "Pooling", "Normalize"]
    assert again[1].pooling_mode == "cls"
    record = json.loads((out / "report.json").read_text())
    exact = torch.as_tensor(model.encode(["w1 w2 w3"]))
    assert float(torch.as_tensor(again.encode(["w1 w2 w3"])) @ exact.T) > record["quality"]["uniform"]
    assert record["quality"]["score"] == "embedding cosine" and record["quality"]["exact"] == pytest.approx(1)
    assert record["speed"][0]["exact_ms"] > 0
    ran = invoke(out, "--no-speed", "--out", tmp_path / "twice")
    assert ran.exit_code == 2 and "convert the folder that it was made from" in _flat(ran.output), ran.output


def test_draws_without_a_seed_are_the_same_in_every_run(tmp_path: Path) -> None:
    """Else an interrupted distillation could not go on: its student would be another one."""
    model, found = saved(tmp_path, "llama"), []
    for name in ("one", "other"):
        torch.rand(3)
        ran = invoke(model, "--mechanism", "performer:num_features=8", "--no-speed", "--out", tmp_path / name)
        assert ran.exit_code == 0, ran.output
        found.append(load(tmp_path / name).state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_converted_folder_is_refused(tmp_path: Path) -> None:
    model = make("llama")
    convert(model, "linear")
    model.save_pretrained(tmp_path / "model")
    ran = invoke(tmp_path / "model", "--no-speed", "--out", tmp_path / "out")
    assert ran.exit_code == 2 and "convert the folder that it was made from" in _flat(ran.output), ran.output


def test_bad_input_is_a_message_and_status_2(tmp_path: Path, ids: Path) -> None:
    model = saved(tmp_path, "bert")
    text = tmp_path / "short.txt"
    text.write_text("one line\n")
    few = tmp_path / "few.json"
    few.write_text("[[5, 6, 7]]")
    names = ("words", "broken", "unknown")
    words, broken, unknown = (tmp_path / f"{name}.json" for name in names)
    words.write_text('[["a", "b"]]')
    broken.write_text("[[1, 2")
    unknown.write_text(json.dumps([[5, 10**6]] * 40))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    (tmp_path / "file").touch()
    out = ("--out", tmp_path / "out")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((tmp_path / "nowhere", *out), "holds no config.json"),
        ((model, "--mechanism", "performr", *out), "did you mean 'performer'"),
        ((model, "--mechanism", "linear", "--option", "x", *out), "expected name=value"),
        ((model, "--mechanism", "linear", "--layers", "9", *out), "index 9 is out of range"),
        ((model, "--mechanism", "linear", "--calibrate", few, *out), "at least 16 of two or more tokens"),
        ((model, "--mechanism", "linear", "--calibrate", text, *out), "has no tokenizer"),
        ((model, "--mechanism", "linear", "--calibrate", tmp_path / "no.txt", *out), "there is no such file"),
        ((model, "--mechanism", "linear", "--calibrate", binary, *out), "binary.txt: it cannot be read as UTF-8 text"),
        ((model, "--mechanism", "linear", "--calibrate", words, *out), "words.json: expected a JSON list of lists"),
        ((model, "--mechanism", "linear", "--calibrate", broken, *out), "broken.json: expected a JSON list of lists"),
        ((model, "--mechanism", "linear", "--distill", unknown, *out), "holds the token id 1000000; the model knows"),
        ((model, "--mechanism", "linear", "--out", tmp_path / "file" / "below"), "nothing can be written there"),
        ((model, "--mechanism", "performer", "--option", "features=sderf", *out), "or --calibrate"),
        ((model, "--distill", tmp_path / "none.txt", *out), "there is no such file"),
        ((model, "--error", "2", *out), "--error 2 must be between 0 and 1"),
        ((model, "--steps", "5", *out), "--steps are of a distillation"),
        ((model, "--documents", "5", *out), "--documents limits what is read of texts"),
        ((model, "--lengths", "64", "--no-speed", *out), "--lengths are for the times that --no-speed leaves out"),
        ((model, "--layers", "1-0", *out), "the range is empty; write 0-1"),
        ((model, "--mechanism", "", *out), "the mechanism is empty"),
    ]
    for arguments, message in cases:
        ran = invoke(*arguments)
        shown = " ".join(ran.output.replace("│", " ").split())
        assert ran.exit_code == 2 and message in shown, (arguments, ran.output)
        assert "Traceback" not in ran.output
    assert not (tmp_path / "out").exists()


def _flat(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_the_model_that_is_read_is_never_written_over(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (tmp_path / "link").symlink_to(folder)
    for out in (folder, tmp_path / "link", folder / ".." / folder.name):
        ran = invoke(folder, "--no-speed", "--out", out)
        assert ran.exit_code == 2 and "the folder of the model itself" in _flat(ran.output), ran.output
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    other = saved(tmp_path, "bert")
    ran = invoke(folder, "--no-speed", "--out", other)
    assert ran.exit_code == 2 and "holds a model already" in _flat(ran.output), ran.output
    ran = invoke(folder, "--no-speed", "--lora-steps", "5", "--out", tmp_path / "new")
    assert ran.exit_code == 2 and "--lora-steps come after a distillation" in _flat(ran.output), ran.output
    (tmp_path / "file").touch()
    ran = invoke(folder, "--no-speed", "--out", tmp_path / "file")
    assert ran.exit_code == 2 and "a folder is expected" in _flat(ran.output)


def test_perplexity_is_that_of_the_models_own_loss() -> None:
    model = make("gpt2")
    batches = to_batches([[5, 6, 7, 8, 9], [10, 11, 12]], 2, 0)
    assert batches[0]["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    labels = batches[0]["input_ids"].masked_fill(batches[0]["attention_mask"] == 0, -100)
    with torch.no_grad():
        loss = float(model(**batches[0], labels=labels).loss)
    assert kind_of(model, None) == "perplexity"
    assert score("perplexity", model, batches) == pytest.approx(math.exp(loss), rel=1e-5)


def test_masked_accuracy_counts_hidden_tokens_only() -> None:
    model = make("bert")
    assert kind_of(model, 4) == "masked accuracy" and kind_of(make("vit"), None) == "embedding cosine"
    batches = to_batches([list(range(5, 45))] * 4, 4, 0)

    class Copying(torch.nn.Module):
        """Says what it is shown: right about every visible token, wrong about every hidden one."""

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            logits = torch.nn.functional.one_hot(input_ids, VOCAB).float()
            return type("Out", (), {"logits": logits})

    assert score("masked accuracy", Copying(), batches, mask_token=4) == 0.0
    assert 0 <= score("masked accuracy", model, batches, mask_token=4) <= 1


def test_documents_are_cut_and_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([list(range(10)), [1], [2, 3]]))
    assert read_documents(path, None, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [2, 3]]


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama", "albert", "distilbert"])
def test_lengthened_models_take_longer_inputs(name: str) -> None:
    model = make(name)
    tokens = torch.full((1, 700), 7)
    with torch.no_grad():
        assert lengthened(model, 700)(input_ids=tokens).logits.shape[:2] == (1, 700)
    short = tokens[:, :20]
    torch.testing.assert_close(lengthened(model, 700)(input_ids=short).logits, model(input_ids=short).logits)


def test_times_and_the_length_from_which_it_pays() -> None:
    exact, converted = make("llama"), make("llama")
    convert(converted, "linear")
    rows = time_models(exact, converted, [32, 16], runs=1)
    assert [row["length"] for row in rows] == [16, 32]
    assert all(row["exact_ms"] > 0 and row["converted_ms"] > 0 for row in rows)

    def made(*gains: float) -> list[dict[str, float]]:
        return [{"length": 2**i, "exact_ms": gain, "converted_ms": 1.0} for i, gain in enumerate(gains)]

    assert pays_from(made(0.5, 2.0, 4.0)) == pytest.approx(2**0.5)
    assert pays_from(made(2.0, 0.5, 2.0)) == pytest.approx(2**1.5)  # noise at the short end does not count
    assert pays_from(made(2.0, 3.0)) == pytest.approx(1.0)
    assert pays_from(made(2.0, 0.5)) is None and pays_from([]) is None


@pytest.mark.deep
def test_memory_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = make("llama")
    convert(model, "linear")
    model.save_pretrained(tmp_path)
    rows = memory_of(tmp_path, [64, 4096])
    assert [row["length"] for row in rows] == [64, 4096]
    assert rows[1]["bytes"] > 1e6


def test_the_least_that_can_be_typed_is_multipole(tmp_path: Path, ids: Path) -> None:
    model, out = saved(tmp_path, "llama"), tmp_path / "out"
    ran = invoke(model, "--error", "0.02", "--no-speed", "--out", out)
    assert ran.exit_code == 0, ran.output
    found = [mechanism_of(layer.module) for layer in find_layers(load(out))]
    assert [(one.name, one.error) for one in found if one is not None] == [("multipole", 0.02)] * 3
    for arguments, message in (
        (["--text", ids, "--mechanism", "local"], "--text chooses the mechanisms, and --mechanism"),
        (["--mechanism", "local", "--error", "0.1"], "error=0.1 applies where no mechanism is named"),
        (["--length", "64"], "--length 64 is what mechanisms are chosen for, with --text"),
    ):
        ran = invoke(model, *arguments, "--no-speed", "--out", tmp_path / "other")
        assert ran.exit_code == 2 and message in " ".join(ran.output.split()), ran.output


def test_models_that_take_more_than_one_text(tmp_path: Path, ids: Path) -> None:
    """Converted and saved without texts; with texts refused before anything is done."""
    for name in ("vit", "bart"):
        folder = saved(tmp_path, name)
        ran = invoke(folder, "--mechanism", "linear", "--out", tmp_path / f"{name}-out")
        assert ran.exit_code == 0 and "times were not measured" in ran.output, ran.output
        assert load(tmp_path / f"{name}-out") is not None
        ran = invoke(folder, "--mechanism", "linear", "--calibrate", ids, "--out", tmp_path / f"{name}-other")
        assert ran.exit_code == 2 and "takes more than one text" in _flat(ran.output)
        assert not (tmp_path / f"{name}-other").exists()
