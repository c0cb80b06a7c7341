"""The native kernels are optional at installation; where they were demanded, their absence fails the tests."""

import os

import pytest

from subquad.kernels.native import library as native_library


@pytest.fixture
def built() -> None:
    """Skips where this installation has no native kernels, unless SUBQUAD_REQUIRE_NATIVE says it must."""
    reason = native_library.missing()
    if reason:
        if os.environ.get("SUBQUAD_REQUIRE_NATIVE"):
            pytest.fail(reason)
        pytest.skip(reason)
