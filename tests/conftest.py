"""What every test can rely on: a fixed seed, and threads that do not fight over the cores."""

import os
import signal

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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The result of a test does not depend on which tests ran before it in the same worker."""
    torch.manual_seed(0)
