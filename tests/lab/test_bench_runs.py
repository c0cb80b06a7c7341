"""Bench: resuming, skipping, backward, memory, peers; two saved runs side by side."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from subquad.cli import _application
from subquad.lab import Comparison, Timing, bench, compare, read_comparison, table, write_json
from subquad.lab.bench import Cell
from subquad.lab.compare_runs import compare_saved, saved_path
from subquad.lab.peers import Peer

SMALL = {"heads": 1, "head_dim": 8, "runs": 2, "causal": [False], "input_stds": [0.5]}


def command(*arguments):
    return CliRunner().invoke(_application(), list(arguments))


def words(done):
    return " ".join(done.stderr.replace("│", " ").split())


def test_a_record_is_read_back(tmp_path):
    first = compare(["linear"], [16], memory=False, **SMALL)
    write_json(tmp_path / "a.json", first.as_dict())
    again = read_comparison(tmp_path / "a.json")
    assert again.as_dict() == json.loads(json.dumps(first.as_dict()))
    (tmp_path / "a.json").write_text('{"cells": 3}')
    with pytest.raises(ValueError, match=r"a\.json: not a saved comparison"):
        read_comparison(tmp_path / "a.json")


def test_resuming_measures_only_what_is_missing():
    def stop(so_far):
        raise KeyboardInterrupt

    first = compare(["linear"], [16, 32], on_length=stop, **SMALL)
    assert not first.complete
    assert {cell.length for cell in first.cells} == {16}
    # A length that was cut off halfway is measured again: its rounds must be of all mechanisms together.
    torn = Comparison(first.settings, first.machine, first.cells[:-1], False)
    for earlier in (first, torn):
        saved = Comparison(json.loads(json.dumps(earlier.settings)), earlier.machine, earlier.cells, False)
        seen = []
        second = compare(["linear"], [16, 32], resume=saved, on_cell=lambda c, done, total: seen.append(c), **SMALL)  # noqa: B023
        assert second.complete
        assert len(seen) == len(second.cells) == 6
        kept = second.cells[0].timing is first.cells[0].timing
        assert kept == (earlier is first)
    with pytest.raises(ValueError, match="other settings"):
        compare(["linear"], [16, 64], resume=first, **SMALL)


def test_a_length_that_does_not_fit_is_skipped_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(bench, "available_memory", lambda: 10_000_000)
    result = compare(["linear"], [16, 10**9], **SMALL)
    assert result.complete
    skipped = [cell for cell in result.cells if cell.status == "skipped"]
    assert {cell.length for cell in skipped} == {10**9}
    assert "GiB are available" in skipped[0].reason
    text = table(result)
    assert text.count("L=1000000000 (full): skipped: needs about") == 1
    assert "L=1000000000 ms" not in text
    monkeypatch.setattr(bench, "available_memory", lambda: 1)
    assert {cell.status for cell in compare(["linear"], [16], **SMALL).cells} == {"skipped"}


def test_backward_and_memory():
    result = compare(["linear"], [32], backward=True, memory=True, **SMALL)
    cells = {cell.mechanism: cell for cell in result.cells}
    assert all(cell.status == "measured" for cell in cells.values())
    assert cells["linear"].memory["tensor_bytes"] == 4 * 32 * 8 * 4
    assert cells["uniform"].memory == {}
    text = table(dataclasses.replace(result, machine={**result.machine, "threads": 1}))
    assert "1 thread, torch" in text
    assert "forward + backward" in text
    assert "peak MB" in text


def _fake(q, k, v, is_causal, num_features):
    if is_causal:
        raise ValueError("only full attention here")
    return lambda: torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def test_peers_are_timed_beside_ours(monkeypatch):
    fakes = [Peer("exact peer", "torch", "torch", _fake), Peer("own peer", "torch", "torch", _fake, False)]
    monkeypatch.setattr(bench, "installed_peers", lambda: fakes)
    for backward in (False, True):
        result = compare(["linear"], [16], peers=True, backward=backward, **{**SMALL, "causal": [False, True]})
        cells = {(cell.mechanism, cell.causal): cell for cell in result.cells}
        assert cells["exact peer", False].errors[0.5] < 1e-10
        assert cells["exact peer", False].timing.best > 0
        assert cells["own peer", False].errors == {}
        assert cells["exact peer", True].reason == "only full attention here"
    assert result.settings["mechanisms"][-1] == "uniform"
    assert f"peers: torch {torch.__version__.split('+')[0]}" in table(result)


def cells(*rows):
    return tuple(Cell(name, length, False, "measured", timing=Timing(runs)) for name, length, runs in rows)


def comparison(*rows, **settings):
    settings = {"batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32", "backward": False, **settings}
    return Comparison(settings, {"processor": "x", "threads": 2}, cells(*rows), True)


def test_two_saved_runs():
    first = comparison(("softmax", 16, (1.0, 1.0)), ("linear", 16, (0.4, 0.41)), ("lsh", 16, (1.0, 1.5)))
    second = comparison(("softmax", 16, (1.1, 1.2)), ("linear", 16, (0.2, 0.21)), ("local", 16, (1.0, 1.0)))
    result = compare_saved(first, second, ("old", "new"))
    assert {row.mechanism: round(row.ratio, 2) for row in result.rows} == {"softmax": 1.1, "linear": 0.5}
    text = str(result)
    assert "0.50 *" in text
    assert "drift of the machine, from softmax attention in both: 1.10 to 1.10" in text
    assert "only in one: lsh L=16" in text
    with pytest.raises(ValueError, match="old was measured with heads=8, new with 4"):
        compare_saved(first, comparison(("softmax", 16, (1.0,)), heads=4), ("old", "new"))
    with pytest.raises(ValueError, match="in common"):
        compare_saved(first, comparison(("softmax", 32, (1.0,))))


def test_files_of_json_are_compared_by_their_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, ms in (("a.json", 1.0), ("b.json", 2.0)):
        write_json(Path(name), comparison(("softmax", 16, (ms, ms))).as_dict())
    done = command("bench", "--compare", "a.json", "b.json")
    assert done.exit_code == 0, done.stderr
    assert "2.00" in done.output


def test_the_bench_command_saves_continues_and_compares(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = ("--heads", "1", "--head-dim", "8", "--runs", "2", "--lengths", "16,32")
    assert command("bench", "linear", *shape, "--save", "one").exit_code == 0
    path = saved_path("one")
    record = json.loads(path.read_text())
    kept = [cell for cell in record["cells"] if cell["length"] == 16]
    write_json(path, {**record, "cells": kept, "complete": False})
    done = command("bench", "linear", *shape, "--save", "one")
    assert done.exit_code == 0, done.output
    assert "continuing an interrupted run, 6 results are kept" in done.stderr
    now = json.loads(path.read_text())
    assert now["complete"]
    done = command("bench", "linear", *shape, "--save", "one")
    assert done.exit_code == 2
    assert "holds a complete run" in words(done) and str(path) in words(done)
    assert [cell for cell in now["cells"] if cell["length"] == 16] == kept
    write_json(path, {**record, "complete": False})
    done = command("bench", "linear", *shape[:-1], "16", "--save", "one")
    assert done.exit_code == 2
    assert "made with other settings: lengths" in words(done) and "give another name" in words(done)
    assert "continuing" not in done.stderr
    assert not json.loads(path.read_text())["complete"]
    assert command("bench", "linear", *shape, "--json", "two.json").exit_code == 0
    done = command("bench", "--compare", "one", "two.json", "--json", "ratios.json")
    assert done.exit_code == 0, done.output
    assert "one ms" in done.output
    assert len(json.loads(Path("ratios.json").read_text())["rows"]) == 12
    done = command("bench", "--compare", "one", "three")
    assert done.exit_code == 2
    assert "there is no file subquad-bench/three.json or three;" in words(done)
    done = command("bench", "linear", *shape, "--save", "a b")
    assert done.exit_code == 2
