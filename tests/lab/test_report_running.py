"""How the report spends its time: order, effort, load, what is left out, interrupts and resuming."""

import dataclasses
import html
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from subquad.lab.report import Outcome, Settings, full, load, quick, report, running
from subquad.lab.report.notebook import Notebook
from subquad.lab.report.running import ERRORS, FIRST, REST, SPEED, Clock, Job, measure
from subquad.lab.report.sections import model, sections, speed

from .report_case import TINY

MAIN = "from subquad.cli import main; main()"


def _job(name: str, ran: list[str], memory: int = 0, first: bool = False) -> Job:
    def work(clock: Clock) -> dict[str, int]:
        ran.append(name)
        if name == "stop":
            raise KeyboardInterrupt
        if name == "broken":
            raise RuntimeError("no such thing")
        return {"value": 1}

    return Job(name, {"name": name}, work, memory=memory, first=first)


def test_what_does_not_fit_into_memory_is_skipped_before_it_runs(tmp_path: Path) -> None:
    ran: list[str] = []
    lines: list[str] = []
    book = Notebook(tmp_path / "r.json", {})
    done = measure([("s", [_job("huge", ran, memory=2**60), _job("small", ran)])], book, 10.0,
                   lambda line, done, total: lines.append(line))  # fmt: skip
    assert done
    assert ran == ["small"]
    assert "GiB" in book.skipped["s: huge"]["reason"]
    assert lines[-1].startswith("s: skipped, needs about")
    settings = dataclasses.replace(TINY, lengths=(32, 10**9))
    assert max(job.memory for job in speed.jobs(settings, book)) > 2**40
    assert (book.cells_total, book.cells_measured) == (2, 1)


def test_a_mechanism_too_slow_for_the_time_left_is_named_and_measured_on_resume(tmp_path: Path) -> None:
    book = Notebook(tmp_path / "r.json", {})
    short, long = (job for job in speed.jobs(dataclasses.replace(TINY, lengths=(16, 64)), book)
                   if job.asked["pass"] == "forward" and not job.asked["causal"])  # fmt: skip
    assert measure([("speed", [short])], book, 100.0)
    for cell in book.cells.values():
        cell["result"]["mechanisms"]["softmax"]["best_ms"] = 1e6
    assert measure([("speed", [short, long])], book, 100.0)
    (name,) = book.skipped
    assert name.endswith("L=64, softmax")
    assert "would take about 16000 s" in book.skipped[name]["reason"]
    lines: list[str] = []
    measure([("speed", [short, long])], book, 1e9, lambda line, done, total: lines.append(line))
    assert book.skipped == {}
    assert lines[0].endswith(": kept")
    assert not lines[1].endswith(": kept")


def test_time_that_is_used_up_skips_all_but_the_first(tmp_path: Path) -> None:
    ran: list[str] = []
    book = Notebook(tmp_path / "r.json", {})
    assert measure([("s", [_job("a", ran, first=True), _job("b", ran)])], book, 1e-9)
    assert ran == ["a"]
    assert "--resume" in book.skipped["s: b"]["reason"]


def test_what_matters_most_comes_first_and_all_shrinks_before_any_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that takes half as long again as the jobs say. With three quarters of the time all of them run, with
    less effort, in the order of their worth; with a fifth of it, those of most worth."""
    order: list[tuple[int, float]] = []
    now = 0.0
    monkeypatch.setattr(running, "time", types.SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))

    def job(worth: int, number: int) -> Job:
        def work(clock: Clock) -> dict[str, int]:
            nonlocal now
            order.append((worth, clock.effort))
            now += 1.5 * (running.FIXED + (1 - running.FIXED) * clock.effort)
            return {"value": number}

        return Job(f"{worth} {number}", {"job": [worth, number]}, work, 1.0, worth)

    book = Notebook(tmp_path / "r.json", {})
    jobs = [job(worth, number) for number in range(4) for worth in (REST, ERRORS, SPEED, FIRST)]
    assert measure([("s", jobs)], book, 100.0)
    assert [worth for worth, _ in order] == sorted(worth for worth, _ in order)
    assert {effort for _, effort in order} == {1.0}
    order.clear()
    book = Notebook(tmp_path / "hurried.json", {})
    assert measure([("s", jobs)], book, 0.75 * 16 * 1.5)
    assert book.cells_measured == book.cells_total == 16
    assert min(effort for _, effort in order) < 0.8
    order.clear()
    book = Notebook(tmp_path / "none.json", {})
    assert measure([("s", jobs)], book, 0.2 * 16 * 1.5)
    assert 0 < book.cells_measured < book.cells_total
    assert {worth for worth, _ in order} <= {FIRST, SPEED}


def test_load_is_what_others_take() -> None:
    """Work of this process is no load."""
    watch = load.Watch()
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:
        pass
    quiet = watch.others
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        busy = load.others(0.8)
    finally:
        child.kill()
        child.wait()
    assert quiet < (os.cpu_count() or 1)
    assert busy > 0.25  # of a core that it may have to share
    assert "took 0.9 of 2 cores" in load.sentence({"others": 0.9, "cores": 2, "threads": 1, "usual_threads": 2})


def test_a_resumed_report_uses_the_threads_that_it_was_started_with(outcome: Outcome, tmp_path: Path) -> None:
    stored = json.loads(outcome.json.read_text())
    stored["machine"]["threads"] = 1
    (tmp_path / "report.json").write_text(json.dumps(stored))
    import torch

    before = torch.get_num_threads()
    again = report(tmp_path, TINY, resume=True, figure_files=False)
    assert again.notebook.load["threads"] == 1
    assert torch.get_num_threads() == before


def test_a_report_without_time_shows_something_in_every_section_and_says_once_what_is_missing(tmp_path: Path) -> None:
    settings, lines = dataclasses.replace(TINY, seconds=1e-6, mechanisms=("linear", "local")), []
    hurried = report(tmp_path, settings, figure_files=False, on_step=lambda line, done, total: lines.append(line))
    assert hurried.notebook.failures == []
    named = {part.name for part in sections(model.shipped())} - {"complexity"}
    assert {cell["section"] for cell in hurried.notebook.cells.values()} == named - {"memory"}
    assert len(hurried.notebook.skipped) > 10
    assert "What to use" in hurried.table
    reason = "the 0 s were used up"
    assert hurried.table.count(reason) == 1
    assert hurried.page.read_text(encoding="utf-8").count(html.escape(reason)) == 1
    told = [line for line in lines if reason in line]
    assert len(told) == len({item["section"] for item in hurried.notebook.skipped.values()})
    for item in hurried.notebook.skipped.values():
        assert item["cell"] in " ".join(told)
        assert item["cell"] in " ".join(hurried.table.split())


def test_an_interrupt_keeps_what_was_measured_and_resume_goes_on(tmp_path: Path) -> None:
    ran: list[str] = []
    path = tmp_path / "r.json"
    where = {"processor": "p", "threads": 1, "torch": "t", "subquad": "s"}
    plan = [("s", [_job("a", ran), _job("broken", ran), _job("stop", ran), _job("b", ran)])]
    book = Notebook(path, where)
    assert not measure(plan, book, 100.0)
    assert {item["cell"] for item in book.skipped.values()} == {"stop", "b", "broken"}
    assert [cell["label"] for cell in book.failures] == ["broken"]
    again = Notebook.resume(path, where)
    ran.clear()
    measure([("s", [_job("a", ran), _job("b", ran)])], again, 100.0)
    assert ran == ["b"]
    assert [asked["name"] for asked, _ in again.of("s")] == ["a", "b"]
    # Cells of other questions stay in the file and out of the report.
    measure([("s", [_job("b", ran)])], again, 100.0)
    assert [asked["name"] for asked, _ in again.of("s")] == ["b"]
    assert len(json.loads(path.read_text())["cells"]) == 2
    with pytest.raises(ValueError, match="threads"):
        Notebook.resume(path, {**where, "threads": 2})
    path.write_text("[1, 2")
    with pytest.raises(ValueError, match="--resume"):
        Notebook.resume(path, where)


def test_a_finished_report_resumes_without_measuring(outcome: Outcome) -> None:
    lines: list[str] = []
    report(
        outcome.page.parent, TINY, resume=True, figure_files=False, on_step=lambda line, done, total: lines.append(line)
    )
    assert lines
    assert all(line.endswith(": kept") for line in lines)


def test_shares_of_the_default_report_fit_into_three_minutes() -> None:
    assert Settings().seconds <= 165  # 15 seconds are left for loading torch and drawing
    parts = sections(model.shipped())
    for settings in (Settings(), quick(Settings()), full(Settings())):
        expected = sum(job.quiet for part in parts for job in part.jobs(settings, Notebook(Path("x"), {})))
        assert expected <= 1.3 * settings.seconds
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
        if "speed: forward, full, L=16" in line:
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
