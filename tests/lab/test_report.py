"""The report: what it measures, keeps, skips and recommends, without looking at its page."""

import copy
import dataclasses
import html
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

import subquad
from subquad.cli import main
from subquad.lab import errors
from subquad.lab.captured import captured_inputs, origin
from subquad.lab.report import Outcome, Settings
from subquad.lab.report.findings import findings
from subquad.lab.report.notebook import Notebook
from subquad.lab.report.page import page as page_of
from subquad.lab.report.running import Clock, measure
from subquad.lab.report.sections import error, model, published, sections, spectrum, speed, use
from subquad.lab.report.sections import memory as memory_section
from subquad.lab.report.table import terminal_table
from subquad.lab.report.tried import Tried, candidates
from subquad.planning.candidates import PLANNABLE
from subquad.planning.cost import time_at

from .report_case import TINY


def test_every_section_is_measured_and_nothing_fails(outcome: Outcome) -> None:
    stored = json.loads(outcome.json.read_text())
    assert stored["complete"] is True
    assert outcome.notebook.failures == []
    assert outcome.notebook.skipped == {}
    names = {cell["section"] for cell in stored["cells"]}
    assert names == {"machine", "speed", "memory", "error", "published", "projections", "generation", "spectrum", "use",
                     "model"}  # fmt: skip
    assert stored["cells_measured"] == stored["cells_total"] > 50
    assert stored["load"]["threads"] >= 1 and stored["load"]["others"] >= 0
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
    (job,) = [job for job in published.jobs(settings, book) if job.asked["features"] == "positive"]
    result = job.run(Clock())
    levels = result["levels"]
    for kind in ("published-orthogonal", "published-hadamard"):
        few, many = result["curves"][kind]
        assert abs(many / levels["key-only"] - 1) < 0.1
        assert levels["uniform"] < many
        assert few != many
    # The correct estimators do not: they are worse than the mean here, and say so.
    assert result["curves"]["orthogonal"][1] > 1.2 * levels["uniform"]


def test_the_published_sines_turn_too_far_and_correct_ones_do_not() -> None:
    """The first figure of the published report: angles 2 pi times too large give another kernel, at any number."""
    settings = dataclasses.replace(TINY, published_features=(16,), published_draws=2)
    (job,) = [job for job in published.jobs(settings, Notebook(Path("x"), {})) if job.asked["features"] == "trig"]
    import torch

    generator = torch.Generator().manual_seed(0)
    x, y = 0.2 * torch.randn(2, 40, published.DIM, generator=generator, dtype=torch.float64)
    exact = torch.softmax(x @ y.mT, -1)
    matrix = torch.randn(20_000, published.DIM, generator=generator, dtype=torch.float64)
    for turn, near in ((1.0, True), (6.283185, False)):
        found = published._trig_weights(matrix, x, y, turn)
        assert (float((found - exact).abs().max()) < 0.005) == near
    assert set(job.run(Clock())["curves"]) == set(published.KINDS)


def test_spectrum_of_known_matrices() -> None:
    import torch

    flat = spectrum.of_matrix(torch.softmax(torch.zeros(32, 32), -1))
    assert flat["rank"] == 1
    assert flat["cumulated"][0] == pytest.approx(1.0)
    identity = spectrum.of_matrix(torch.eye(40))
    assert identity["rank"] == 38  # 95 % of 40 equal singular values


FLAT = "flat"
ASKED = {"pass": "forward", "causal": False}


def _notebook(path: Path, times: dict[int, dict[str, float]], errors: dict[str, dict[str, Any]]) -> Notebook:
    """A notebook with these milliseconds by length and setting, and these errors on flat attention."""
    book = Notebook(path, {})
    for length, cell in times.items():
        every = {name: {"status": "measured", "best_ms": ms, "spread": 0.0} for name, ms in cell.items()}
        book.add("speed", f"{length}", {"length": length, **ASKED}, {"mechanisms": every}, 0.0)
    book.add("use", "e", {"kind": FLAT}, {"settings": errors, "uniform": 0.5, "tokens": 64}, 0.0)
    return book


def _row(label: str, error: float, half: float | None = None) -> dict[str, Any]:
    mechanism = label.split(",")[0].split(" ")[0]
    return {"mechanism": mechanism, "options": {}, "error": error, "half": half, "timed_as": label}


def test_recommendation_takes_the_fastest_that_is_good_enough(tmp_path: Path) -> None:
    times = {"softmax": 10.0, "taylor degree 1": 2.0, "local, window 16": 1.0, "performer, 64 oprf features": 3.0}
    rows = {
        "taylor degree 1": _row("taylor degree 1", 0.04),
        "local, window 16": _row("local, window 16", 0.3, 0.15),
        "performer, 64 oprf features": _row("performer, 64 oprf features", 0.005),
    }
    book = _notebook(tmp_path / "r.json", {64: times, 128: times}, rows)
    settings = dataclasses.replace(TINY, lengths=(64, 128), budgets=(0.001, 0.01, 0.05, 0.4, 9.0))
    found = {(r["length"], r["budget"]): r for r in use.recommend(book, settings) if r["kind"] == FLAT}
    chosen = {key: row["label"] for key, row in found.items()}
    assert chosen[64, 0.001] == "softmax"
    assert chosen[64, 0.01] == "performer, 64 oprf features"
    assert chosen[64, 0.05] == "taylor degree 1"
    assert chosen[64, 0.4] == "local, window 16"
    assert chosen[64, 9.0] == "local, window 16"  # never what is worse than the mean of the values
    assert chosen[128, 0.4] == "taylor degree 1"  # the window's error doubles with the length: 0.6
    assert not found[64, 0.05]["carried"] and found[128, 0.05]["carried"]  # 64 tokens were measured


def test_an_approximation_that_is_no_faster_than_softmax_is_not_recommended(tmp_path: Path) -> None:
    rows = {"taylor degree 1": _row("taylor degree 1", 0.04)}
    times = {64: {"softmax": 10.0, "taylor degree 1": 9.9}, 128: {"softmax": 10.0, "taylor degree 1": 9.0}}
    book = _notebook(tmp_path / "r.json", times, rows)
    settings = dataclasses.replace(TINY, lengths=(64, 128), budgets=(0.05,))
    found = {row["length"]: row["label"] for row in use.recommend(book, settings) if row["kind"] == FLAT}
    assert found == {64: "softmax", 128: "taylor degree 1"}


def test_a_length_without_times_is_said_to_be_missing_and_nothing_is_extrapolated(tmp_path: Path) -> None:
    """Times at 64 and 256 tokens: 128 lies between them, 512 beyond; a setting without a time is counted."""
    short = {"softmax": 4.0, "taylor degree 1": 2.0}
    long = {"softmax": 64.0, "taylor degree 1": 8.0, "local, window 16": 1.0}
    rows = {"taylor degree 1": _row("taylor degree 1", 0.01), "local, window 16": _row("local, window 16", 0.01, 0.01)}
    book = _notebook(tmp_path / "r.json", {64: short, 256: long}, rows)
    settings = dataclasses.replace(TINY, lengths=(64, 128, 256, 512), budgets=(0.05,))
    found = {r["length"]: r for r in use.recommend(book, settings) if r["kind"] == FLAT}
    assert found[64]["label"] == "taylor degree 1" and found[64]["untimed"] == 1
    assert use.in_words(found[64]) == "taylor degree 1 (2.0x) (1 more meets the error; not timed)"
    assert found[128]["gain"] == pytest.approx(16 / 4)
    assert found[256]["label"] == "local, window 16" and found[256]["untimed"] == 0
    assert found[512]["missing"] == "times at 512 tokens were not measured"
    assert all("missing" in row for row in use.recommend(book, settings) if row["kind"] != FLAT)


@pytest.mark.parametrize("seed", range(4))
def test_no_two_tables_disagree_whatever_is_missing(outcome: Outcome, tmp_path: Path, seed: int) -> None:
    """Cells and mechanisms of a whole report are thrown away at random; every ratio that is still printed is the ratio
    of two measured times, or between two on both sides, and every other one is said to be missing."""
    chance = random.Random(seed)
    book = Notebook(tmp_path / "r.json", outcome.notebook.machine)
    for key, cell in outcome.notebook.cells.items():
        if chance.random() < 0.3:
            continue
        kept = copy.deepcopy(cell)
        if cell["section"] in ("speed", "generation"):
            every = kept["result"]["mechanisms"]
            kept["result"]["mechanisms"] = {name: one for name, one in every.items() if chance.random() < 0.8}
        book.cells[key] = kept
    found = findings(book, TINY)
    rows = found["recommendations"]
    assert len(rows) == len(use.KINDS) * len(TINY.lengths) * len(TINY.budgets)
    softmax = speed.points(book, "softmax")
    shown = page_of(book, TINY, found, [(part, part.figures(book, TINY)) for part in sections(model.shipped())])
    table = terminal_table(book, TINY, found)
    for row in rows:
        if "missing" in row:
            assert html.escape(row["missing"]) in shown
            continue
        mine = speed.points(book, row["timed_as"])
        expected = [time_at(times, row["length"]) for times in (softmax, mine)]
        assert None not in expected, row
        assert row["gain"] == pytest.approx(expected[0] / expected[1])
        if row["length"] in mine and row["length"] in softmax:
            assert row["gain"] == pytest.approx(softmax[row["length"]] / mine[row["length"]])
        assert use.in_words(row) in table
    for form, gains in found["gains"].items():
        kind, causal = speed.FORMS[form]
        for name, gain in gains.items():
            times = [speed.points(book, each, kind, causal)[gain["length"]] for each in ("softmax", name)]
            assert gain["gain"] == pytest.approx(times[0] / times[1])


def test_every_candidate_of_the_planner_can_be_recommended() -> None:
    """Multipole, clusters and the others are in every section by being in the planner's list."""
    settings = Settings()
    named = {tried.mechanism for tried in candidates(settings)}
    assert named == set(PLANNABLE)
    timed = {label for job in speed.jobs(settings, Notebook(Path("x"), {})) for label in job.asked["candidates"]}
    assert timed == {tried.timed_as for tried in candidates(settings)} - set(settings.names)
    assert len({tried.label for tried in candidates(settings)}) == len(candidates(settings))  # labels tell them apart
    (same,) = [tried for tried in candidates(settings) if tried.timed_as == "taylor"]  # the default: one time for both
    assert same.options == {"degree": 2}
    clusters = subquad.describe("multipole")["options"]["clusters"]
    assert Tried("x", "multipole", {"clusters": clusters}).timed_as == "multipole"
    assert {"multipole", "improved-clustered"} <= {name for _, _, name, _ in model.TRIED} & set(error.LEVELS) & named


def test_the_shipped_heads_say_where_they_are_from() -> None:
    inputs, about = captured_inputs(), origin()
    assert about["licence"] == "Apache-2.0" and about["text_licence"] == "public domain"
    assert inputs.q.shape == inputs.k.shape == inputs.v.shape == (1, len(about["heads"]), 1024, 32)
    import torch

    weights = torch.softmax(inputs.q @ inputs.k.mT / 32**0.5, -1)
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(-1)[0]
    for found, head in zip(entropy.exp().tolist(), about["heads"], strict=True):
        assert found == pytest.approx(head["perplexity"], rel=0.02)


def test_baselines_are_found_once_per_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    true = errors.baseline_errors
    monkeypatch.setattr(errors, "baseline_errors", lambda *given: found.append(1) or true(*given))
    book = Notebook(tmp_path / "r.json", {})
    settings = dataclasses.replace(TINY, error_features=(16,))
    jobs = error.jobs(settings, book)
    assert measure([("error", jobs)], book, 100.0)
    assert book.failures == []
    assert len(found) == len(TINY.error_data or ())
    alone = error.jobs(settings, Notebook(tmp_path / "other.json", {}))[1].run(Clock())
    for asked, result in book.of("error"):
        if asked["name"] == jobs[1].asked["name"]:
            assert result["baselines"] == alone["baselines"]


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
    part = model.section(seen)
    assert measure([("model", part.jobs(settings, book))], book, 100.0)
    assert book.failures == []
    rows = model.layers(book)
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(row["verdict"] for row in rows)
    ((figure,),) = part.figures(book, settings)
    assert {line.key for line in figure.lines} == {"taylor", "hermite-2", "local", "uniform"}
    (tmp_path / "few.txt").write_text("too short")
    with pytest.raises(ValueError, match="too few"):
        model.captured(tmp_path / "bert", tmp_path / "few.txt")
    for name in ("vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bert" / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="there is no tokenizer"):  # transformers would make one up
        model.captured(tmp_path / "bert")


@pytest.mark.parametrize("y", [[0.1, 0.12, 0.13], [1.0, 9.0, 80.0], [3.0, 3.0, 3.0], [1e-4, 1.0, 100.0]])
def test_every_axis_of_a_picture_has_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, y: list[float]) -> None:
    from matplotlib.figure import Figure as Canvas

    from subquad.lab.report.figure import Figure, Line
    from subquad.lab.report.figure_files import write_figures

    shown: list[list[str]] = []
    true = Canvas.savefig

    def savefig(self: Any, *given: Any, **options: Any) -> None:
        true(self, *given, **options)
        (axes,) = self.get_axes()
        low, high = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        shown.append([label.get_text() for at, label in ticks if low <= at <= high and label.get_text()])

    monkeypatch.setattr(Canvas, "savefig", savefig)
    write_figures([Figure("x", "x", "", "tokens", "ms", [Line("softmax", "softmax", [1, 2, 4], y)])], tmp_path)
    assert all(len(labels) >= 2 for labels in shown) and shown
