"""What every test can rely on: a fixed seed, a wide terminal, and threads that do not fight over the cores."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores: with torch's default each would start a thread per core and all would wait.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared or slow machine must not turn a correct property into a failure; the same examples run everywhere.
hypothesis.settings.register_profile("subquad", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("subquad")


@pytest.fixture
def saved_bytes() -> Callable[..., int]:
    """saved_bytes(call, without=...): what autograd keeps between forward and backward of a call, each storage once."""

    def count(call: Callable[[], torch.Tensor], without: Iterable[torch.Tensor] = ()) -> int:
        aside = {x.untyped_storage().data_ptr() for x in without}
        kept: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = call()
        assert out.requires_grad
        return sum(size for place, size in kept.items() if place not in aside)

    return count


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of this machine yet: what is measured is kept for this test alone."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """The result of a test depends neither on the tests before it in the same worker nor on the terminal.

    Messages are one line each: where they would be broken depends on the length of temporary paths.
    """
    torch.manual_seed(0)
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"
    yield
    if before is None:
        os.environ.pop("COLUMNS", None)
    else:
        os.environ["COLUMNS"] = before
