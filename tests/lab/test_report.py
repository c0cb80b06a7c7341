"""The report: what it measures, keeps, skips and recommends, without looking at its page."""

import dataclasses
import html
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.cli import main
from subquad.lab import errors
from subquad.lab.report import (
    Outcome,
    Settings,
    error,
    model,
    published,
    quick,
    recommendation,
    report,
    running,
    spectrum,
    speed,
    writing,
)
from subquad.lab.report import memory as memory_section
from subquad.lab.report.notebook import Notebook
from subquad.lab.report.running import Clock, Job, Section, measure
from subquad.lab.report.settings import QUICK_SHARES, SHARES

from .report_case import TINY

MAIN = "from subquad.cli import main; main()"


def test_every_section_is_measured_and_nothing_fails(outcome: Outcome) -> None:
    stored = json.loads(outcome.json.read_text())
    assert stored["complete"] is True
    assert outcome.notebook.failures == []
    assert outcome.notebook.skipped == {}
    names = {cell["section"] for cell in stored["cells"]}
    assert names == {"machine", "speed", "memory", "error", "published", "projections", "generation", "spectrum",
                     "recommendation"}  # fmt: skip
    assert stored["summary"]["gemm_gflops"] > 0


def test_pictures_page_and_json_lie_side_by_side(outcome: Outcome) -> None:
    names = os.listdir(outcome.page.parent)
    assert {"index.html", "report.json", "speed.png", "speed.svg", "error-features.png", "rank.svg"} <= set(names)
    assert not [name for name in names if name.endswith(".tmp")]
    page = outcome.page.read_text(encoding="utf-8")
    # Self-contained: the one script source is the page, and nothing is fetched by it.
    assert "<script src" not in page
    assert '<link rel="stylesheet"' not in page
    assert "cdn.plot.ly" not in page.split("<script>")[0]


def test_table_names_every_mechanism_and_a_recommendation(outcome: Outcome) -> None:
    for name in (*TINY.names, "no attention", "What to use"):
        assert name in outcome.table


def test_times_and_memory_are_plausible(outcome: Outcome) -> None:
    for name in TINY.names:
        for kind in ("forward", "training"):
            times = speed.points(outcome.notebook, name, kind, causal=True)
            assert times, (name, kind)
            assert all(0 < ms < 60_000 for ms in times.values())
        assert set(memory_section.points(outcome.notebook, name, "forward")) == {64}


def test_the_published_curves_sink_to_weights_of_the_key_alone() -> None:
    settings = dataclasses.replace(TINY, published_features=(16, 592))
    book = Notebook(Path("unused.json"), {})
    (job,) = published.jobs(settings, book)
    result = job.run(Clock(0.0))
    levels = result["levels"]
    for kind in ("published-orthogonal", "published-hadamard"):
        few, many = result["curves"][kind]
        assert abs(many / levels["key-only"] - 1) < 0.1
        assert levels["uniform"] < many
        assert few != many
    # The correct estimators do not: they are worse than the mean here, and say so.
    assert result["curves"]["orthogonal"][1] > 1.2 * levels["uniform"]


def test_spectrum_of_known_matrices() -> None:
    import torch

    flat = spectrum.of_matrix(torch.zeros(32, 32))
    assert flat["rank"] == 1
    assert flat["cumulated"][0] == pytest.approx(1.0)
    identity = spectrum.of_matrix(100.0 * torch.eye(40))
    assert identity["rank"] == 38  # 95 % of 40 equal singular values


def test_recommendation_takes_the_fastest_that_is_good_enough(tmp_path: Path) -> None:
    book = Notebook(tmp_path / "r.json", {})
    times = {"softmax": 10.0, "taylor degree 1": 2.0, "local 16": 1.0, "performer oprf 64": 3.0}
    for length in (64, 128):
        cell = {"times": {name: {"runs_ms": [ms, ms]} for name, ms in times.items()}}
        book.add("recommendation", "t", {"times": length}, cell, 0.0)
    rows = {
        "taylor degree 1": {"mechanism": "taylor", "options": {}, "error": 0.04, "half": None},
        "local 16": {"mechanism": "local", "options": {}, "error": 0.3, "half": 0.15},
        "performer oprf 64": {"mechanism": "performer", "options": {}, "error": 0.005, "half": None},
    }
    book.add("recommendation", "e", {"kind": "flat", "tokens": 64}, {"settings": rows, "uniform": 0.5}, 0.0)
    chosen = {
        (row["length"], row["budget"]): row["label"]
        for row in recommendation.recommend(book, (64, 128), (0.001, 0.01, 0.05, 0.4, 9.0))
    }
    assert chosen[64, 0.001] == "softmax"
    assert chosen[64, 0.01] == "performer oprf 64"
    assert chosen[64, 0.05] == "taylor degree 1"
    assert chosen[64, 0.4] == "local 16"
    assert chosen[64, 9.0] == "local 16"  # never what is worse than the mean of the values
    assert chosen[128, 0.4] == "taylor degree 1"  # the window's error doubles with the length: 0.6


def _job(name: str, ran: list[str], memory: int = 0, first: bool = False) -> Job:
    def work(clock: Clock) -> dict[str, int]:
        ran.append(name)
        if name == "stop":
            raise KeyboardInterrupt
        if name == "broken":
            raise RuntimeError("no such thing")
        return {"value": 1}

    return Job(name, {"name": name}, work, memory, first)


def test_what_does_not_fit_into_memory_is_skipped_before_it_runs(tmp_path: Path) -> None:
    ran: list[str] = []
    lines: list[str] = []
    book = Notebook(tmp_path / "r.json", {})
    done = measure([Section("s", 1.0, [_job("huge", ran, memory=2**60), _job("small", ran)])], book, 10.0,
                   lambda line, done, total: lines.append(line))  # fmt: skip
    assert done
    assert ran == ["small"]
    assert "GiB" in book.skipped["s: huge"]["reason"]
    assert lines[-1].startswith("s: skipped, needs about")
    settings = dataclasses.replace(TINY, lengths=(32, 10**9))
    assert max(job.memory for job in speed.jobs(settings, book)) > 2**40


def test_a_mechanism_too_slow_for_the_time_left_is_named_and_measured_on_resume(tmp_path: Path) -> None:
    book = Notebook(tmp_path / "r.json", {})
    short, long = (job for job in speed.jobs(dataclasses.replace(TINY, lengths=(16, 64)), book)
                   if job.asked["pass"] == "forward" and not job.asked["causal"])  # fmt: skip
    assert measure([Section("speed", 1.0, [short])], book, 100.0)
    for cell in book.cells.values():
        cell["result"]["mechanisms"]["softmax"]["best_ms"] = 1e6
    assert measure([Section("speed", 1.0, [short, long])], book, 100.0)
    (name,) = book.skipped
    assert name.endswith("L=64, softmax")
    assert "would take about 16000 s" in book.skipped[name]["reason"]
    lines: list[str] = []
    measure([Section("speed", 1.0, [short, long])], book, 1e9, lambda line, done, total: lines.append(line))
    assert book.skipped == {}
    assert lines[0].endswith(": kept")
    assert not lines[1].endswith(": kept")


def test_time_that_is_used_up_skips_all_but_the_first(tmp_path: Path) -> None:
    ran: list[str] = []
    book = Notebook(tmp_path / "r.json", {})
    assert measure([Section("s", 1.0, [_job("a", ran, first=True), _job("b", ran)])], book, 1e-9)
    assert ran == ["a"]
    assert "--resume" in book.skipped["s: b"]["reason"]


def test_a_report_without_time_shows_something_in_every_section_and_says_once_what_is_missing(tmp_path: Path) -> None:
    settings, lines = dataclasses.replace(TINY, seconds=1e-6, mechanisms=("linear", "local")), []
    hurried = report(tmp_path, settings, pictures=False, on_step=lambda line, done, total: lines.append(line))
    assert hurried.notebook.failures == []
    sections = set(SHARES)
    assert {cell["section"] for cell in hurried.notebook.cells.values()} == sections - {"memory"}
    assert len(hurried.notebook.skipped) > 10
    assert "What to use" in hurried.table
    reason = "the section's share of the 0 s was used up"
    assert hurried.table.count(reason) == 1
    assert hurried.page.read_text(encoding="utf-8").count(html.escape(reason)) == 1
    told = [line for line in lines if reason in line]
    assert len(told) == len({item["section"] for item in hurried.notebook.skipped.values()})
    for item in hurried.notebook.skipped.values():
        assert item["cell"] in " ".join(told)
        assert item["cell"] in " ".join(hurried.table.split())


def test_shares_name_every_section() -> None:
    names = {section.name for section in writing.sections(TINY, Notebook(Path("unused.json"), {}))}
    assert set(SHARES) == set(QUICK_SHARES) == names
    assert quick(Settings()).shares == QUICK_SHARES


def test_baselines_are_found_once_per_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    true = errors.baseline_errors
    monkeypatch.setattr(errors, "baseline_errors", lambda *given: found.append(1) or true(*given))
    book = Notebook(tmp_path / "r.json", {})
    settings = dataclasses.replace(TINY, error_features=(16,))
    jobs = error.jobs(settings, book)
    assert measure([Section("error", 1.0, jobs)], book, 100.0)
    assert book.failures == []
    assert len(found) == len(TINY.error_data or ())
    alone = error.jobs(settings, Notebook(tmp_path / "other.json", {}))[1].run(Clock(0.0))
    for asked, result in book.of("error"):
        if asked["name"] == jobs[1].asked["name"]:
            assert result["baselines"] == alone["baselines"]


def test_an_interrupt_keeps_what_was_measured_and_resume_goes_on(tmp_path: Path) -> None:
    ran: list[str] = []
    path = tmp_path / "r.json"
    where = {"processor": "p", "threads": 1, "torch": "t", "subquad": "s"}
    plan = [Section("s", 1.0, [_job("a", ran), _job("broken", ran), _job("stop", ran), _job("b", ran)])]
    book = Notebook(path, where)
    assert not measure(plan, book, 100.0)
    assert {item["cell"] for item in book.skipped.values()} == {"stop", "b", "broken"}
    assert [cell["label"] for cell in book.failures] == ["broken"]
    again = Notebook.resume(path, where)
    ran.clear()
    measure([Section("s", 1.0, [_job("a", ran), _job("b", ran)])], again, 100.0)
    assert ran == ["b"]
    assert [asked["name"] for asked, _ in again.of("s")] == ["a", "b"]
    # Cells of other questions stay in the file and out of the report.
    measure([Section("s", 1.0, [_job("b", ran)])], again, 100.0)
    assert [asked["name"] for asked, _ in again.of("s")] == ["b"]
    assert len(json.loads(path.read_text())["cells"]) == 2
    with pytest.raises(ValueError, match="threads"):
        Notebook.resume(path, {**where, "threads": 2})
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="--resume"):
        Notebook.resume(path, where)


def test_a_finished_report_resumes_without_measuring(outcome: Outcome) -> None:
    lines: list[str] = []
    report(outcome.page.parent, TINY, resume=True, pictures=False, on_step=lambda line, done, total: lines.append(line))
    assert lines
    assert all(line.endswith(": kept") for line in lines)


def test_shares_of_the_default_report_fit_into_three_minutes() -> None:
    assert Settings().seconds <= 155  # 25 seconds are left for loading torch and drawing
    assert quick(Settings()).seconds <= 30
    assert running.MEMORY_SHARE < 1


def test_ctrl_c_writes_the_page_and_exits_130(tmp_path: Path) -> None:
    arguments = ("--out", str(tmp_path), "--lengths", "16,32", "--mechanisms", "linear", "--quick", "--seconds", "600")
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "report", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "speed: forward, causal, L=16" in line:
            break
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "Interrupted" in rest
    assert "Not measured" in out
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["complete"] is False
    assert any(cell["section"] == "speed" for cell in stored["cells"])
    assert "This report was interrupted" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mechanisms", "linear,performr"), "performr"),
        (("--lengths", "12,x"), "512,1024,4096"),
        (("--out", "{file}/below"), "nothing can be written"),
        (("--model", "{folder}"), "config.json"),
        (("--model", "{folder}", "--text", "{empty}"), "the file is empty"),
        (("--model", "{folder}", "--text", "{binary}"), "cannot be read as UTF-8"),
        (("--text", "{empty}"), "--model"),
        (("--out", "{broken}", "--resume"), "not a readable report"),
    ],
)
def test_wrong_arguments_exit_2_and_say_what_is_expected(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: tmp_path / name for name in ("file", "folder", "empty", "binary", "broken")}
    places["file"].write_text("a file")
    places["folder"].mkdir()
    places["broken"].mkdir()
    (places["broken"] / "report.json").write_text("{")
    places["empty"].write_text(" \n")
    places["binary"].write_bytes(b"\xff\xfe\x00\xd8")
    given = [argument.format(**places) for argument in arguments]
    if "--out" not in given:
        given += ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop:
        main(["report", *given])
    assert stop.value.code == 2
    # Boxes and line breaks of the terminal are not part of the message.
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said
    assert "Traceback" not in said


def _saved_bert(folder: Path) -> None:
    from transformers import BertConfig, BertModel, BertTokenizer

    folder.mkdir()
    words = sorted({word.strip(".,;:'").lower() for word in model.TEXT.split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words) + 5, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=130,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the tokenizers' bindings
@pytest.mark.usefixtures("own_cache")
def test_a_model_gets_an_error_curve_and_a_plan_per_layer(tmp_path: Path) -> None:
    _saved_bert(tmp_path / "bert")
    seen = model.captured(tmp_path / "bert")
    assert [layer.index for layer in seen.layers] == [0, 1]
    assert seen.layers[0].q.shape[1:] == (2, 128, 16)
    book = Notebook(tmp_path / "r.json", {})
    settings = dataclasses.replace(TINY, mechanisms=("taylor", "local"), lengths=(64,))
    assert measure([Section("model", 1.0, model.jobs(settings, book, seen))], book, 100.0)
    assert book.failures == []
    rows = model.layers(book)
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(row["verdict"] for row in rows)
    figure = model.model_figure(book)
    assert figure is not None
    assert {line.key for line in figure.lines} == {"taylor", "hermite-2", "local", "uniform"}
    (tmp_path / "few.txt").write_text("too short")
    with pytest.raises(ValueError, match="too few"):
        model.captured(tmp_path / "bert", tmp_path / "few.txt")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bert" / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="there is no tokenizer"):  # transformers would make one up
        model.captured(tmp_path / "bert")
