"""The native kernels are optional at installation; where they were demanded, their absence fails the tests."""

import os
from collections.abc import Iterator

import pytest
import torch

from subquad.kernels.native import library as native_library


@pytest.fixture
def built() -> None:
    """Skips where this installation has no native kernels, unless SUBQUAD_REQUIRE_NATIVE says it must."""
    reason = native_library.missing()
    if reason:
        if os.environ.get("SUBQUAD_REQUIRE_NATIVE"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
