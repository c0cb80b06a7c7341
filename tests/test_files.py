"""Files that are written in one step: whole, readable like any other, and nothing left over when writing fails."""

import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from subquad.files import check_writable, replacing, write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    write_text(path, "old")

    def half(how: type[BaseException]) -> None:
        with replacing(path) as draft:
            draft.write_text("ne", encoding="utf-8")
            raise how

    for how in (OSError, KeyboardInterrupt):
        with pytest.raises(how):
            half(how)
        assert path.read_text(encoding="utf-8") == "old"
        assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]


def test_the_file_has_the_permissions_of_any_new_one_and_its_folders_are_made(tmp_path: Path) -> None:
    ordinary, path = tmp_path / "ordinary", tmp_path / "new" / "folder" / "a.json"
    ordinary.touch()
    write_json(path, {"value": math.inf, "nested": [{"value": math.nan}], "kept": 1})
    assert path.stat().st_mode == ordinary.stat().st_mode
    assert json.loads(path.read_text(encoding="utf-8")) == {"value": None, "nested": [{"value": None}], "kept": 1}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_links_permissions_and_what_is_no_file_stay_as_they_are(tmp_path: Path) -> None:
    real, link, private, pipe = (tmp_path / name for name in ("real", "link", "private", "pipe"))
    for path in (real, private):
        path.write_text("old")
    link.symlink_to(real)
    private.chmod(0o600)
    os.mkfifo(pipe)
    write_text(link, "new")
    write_text(private, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable("--json", pipe)
    write_text(pipe, "new")
    assert os.read(reader, 10) == b"new" and pipe.is_fifo()
    os.close(reader)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["link", "pipe", "private", "real"]


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="there is no /dev/stdout here")
def test_standard_output_behind_a_pipe() -> None:
    names = "from subquad.files import check_writable, write_text"
    code = f"{names}; check_writable('--json', '/dev/stdout'); write_text('/dev/stdout', 'new')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("new", 0), done.stderr
