"""Two git revisions of this library raced on this machine: each in a process of its own, run in turn.

Each revision is checked out into a temporary `git worktree`, which is removed afterwards; "." is the working tree as it
is. A process per revision has that source alone on its path and waits while the other one runs, so both meet the same
machine, run by run. Native kernels are no part of a checkout: they are copied where their source is the same as here,
else compiled where there is a compiler, else torch computes, and a note says which.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from subquad.lab.compare_runs import Ratio, Ratios
from subquad.lab.measure import Timing

__all__ = ["compare_revisions", "is_revision"]

WORKING_TREE = "."
_KERNELS = Path("src/subquad/kernels/native")


def _git(*arguments: str, at: Path) -> str:
    done = subprocess.run(["git", "-C", str(at), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip() or f'ended with {done.returncode}'}")
    return done.stdout.strip()


def _repository(at: Path) -> Path:
    if shutil.which("git") is None:
        raise ValueError("comparing revisions needs git, which is not on the PATH")
    root = Path(_git("rev-parse", "--show-toplevel", at=at))
    if not (root / "src" / "subquad").is_dir():
        raise ValueError(f"{root} is no repository of subquad: it has no src/subquad; run this inside a clone of it")
    return root


def is_revision(name: str, at: Path | None = None) -> bool:
    """Whether git knows this name here: a branch, a tag, a commit, or "." for the working tree."""
    try:
        root = _repository(at or Path.cwd())
        return name == WORKING_TREE or bool(_git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", at=root))
    except ValueError:
        return False


def _kernels(root: Path, tree: Path, revision: str) -> str:
    """Put native kernels into the checkout; returns what was done, for the note."""
    built = [*(root / _KERNELS).glob("*.so"), *(root / _KERNELS).glob("*.dylib")]
    different = subprocess.run(
        ["git", "-C", str(root), "diff", "--quiet", revision, "--", "csrc", "CMakeLists.txt"], check=False
    ).returncode
    if built and not different:
        for file in built:
            shutil.copy2(file, tree / _KERNELS)
        return "native kernels copied (their source is the same)"
    if not (tree / "CMakeLists.txt").is_file() or shutil.which("cmake") is None:
        return "without native kernels"
    steps = (
        ["cmake", "-S", str(tree), "-B", str(tree / "build"), "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", str(tree / "build")],
        ["cmake", "--install", str(tree / "build"), "--prefix", str(tree / "src")],
    )
    for step in steps:
        if subprocess.run(step, capture_output=True, check=False).returncode:
            return "without native kernels (they did not build)"
    return "native kernels built"


@contextlib.contextmanager
def _checkout(root: Path, revision: str) -> Iterator[tuple[Path, str]]:
    """The source of this revision, and a note on its kernels; gone afterwards, also after an error or Ctrl-C."""
    if revision == WORKING_TREE:
        yield root, "the working tree as it is"
        return
    with tempfile.TemporaryDirectory(prefix="subquad-revision-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(tree), revision, at=root)
        try:
            yield tree, _kernels(root, tree, revision)
        finally:
            with contextlib.suppress(ValueError):
                _git("worktree", "remove", "--force", str(tree), at=root)


class _Worker:
    """A revision's process; see `compare_worker.py`."""

    def __init__(self, tree: Path, shape: dict[str, Any]) -> None:
        # Threads that spin while they wait would take the other process's cores.
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("compare_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            greeting = self.ask(shape)
            if not Path(greeting["file"]).is_relative_to(tree / "src"):
                raise ValueError(f"the process for {tree} imported {greeting['file']}: another subquad comes first")
        except BaseException:
            self.close()
            raise

    def ask(self, line: dict[str, Any]) -> dict[str, Any]:
        """One line out, one line back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            assert self.process.stderr is not None
            said = self.process.stderr.read().strip().splitlines() or ["nothing"]
            raise ValueError(f"the process of a revision ended; it last said: {said[-1]}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def compare_revisions(
    first: str,
    second: str,
    mechanisms: Sequence[str],
    lengths: Sequence[int],
    *,
    causal: Sequence[bool] = (False, True),
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    runs: int = 5,
    seconds: float = 3.0,
    threads: int | None = None,
    backward: bool = False,
    at: Path | None = None,
    on_row: Callable[[str, int, int], None] | None = None,
) -> Ratios:
    """Times of `second` over times of `first`, for every mechanism and length; both are names that git knows, or ".".

    at: a folder of the repository, None = the current one;  seconds: of one setting, both together;  on_row: a line,
    how many settings are done, and how many there will be. Ctrl-C keeps what was measured, with `complete=False`.
    """
    root = _repository(at or Path.cwd())
    for revision in (first, second):
        if not is_revision(revision, root):
            raise ValueError(f"{revision!r} is no revision of {root}; a branch, tag or commit, or '.', is expected")
    shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "threads": threads, "backward": backward}
    asked = [{"mechanism": name, "length": length, "causal": kind}
             for kind in causal for length in sorted(set(lengths)) for name in mechanisms]  # fmt: skip
    rows: list[Ratio] = []
    missing: list[str] = []
    notes: list[str] = []
    complete = False
    with contextlib.ExitStack() as stack:
        try:
            workers = []
            for revision in (first, second):
                tree, note = stack.enter_context(_checkout(root, revision))
                notes.append(f"{revision}: {note}")
                workers.append(_Worker(tree, shape))
                stack.callback(workers[-1].close)
            for done, setting in enumerate(asked, 1):
                line, row = _race(workers, setting, runs, seconds)
                if row is not None:
                    rows.append(row)
                else:
                    missing.append(line)
                if on_row:
                    on_row(line, done, len(asked))
            complete = True
        except KeyboardInterrupt:
            pass  # the caller sees complete=False and still has every finished row
    return Ratios((first, second), tuple(rows), tuple(missing), tuple(notes), {**shape, "runs": runs}, complete)


def _race(workers: Sequence[_Worker], setting: dict[str, Any], runs: int, seconds: float) -> tuple[str, Ratio | None]:
    """Both revisions in turn on one setting: a line to show, and the ratio if both can do it."""
    name = f"{setting['mechanism']}{' causal' if setting['causal'] else ''} L={setting['length']}"
    measured: list[list[float]] = [[], []]
    for turn in range(runs):
        for side, worker in enumerate(workers):
            answer = worker.ask(setting)
            if "error" in answer:
                return f"{name}: {('first', 'second')[side]} refused: {answer['error']}", None
            measured[side].append(answer["seconds"])
        if turn and sum(map(sum, measured)) > seconds:
            break
    row = Ratio(setting["mechanism"], setting["length"], setting["causal"], *(Timing(tuple(m)) for m in measured))
    return f"{name}: {row.ratio:.2f}", row
