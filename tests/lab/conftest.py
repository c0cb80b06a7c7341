"""One small report, measured once for all tests of this folder that look at it."""

import pytest

from subquad.lab.report import Outcome, report

from .report_case import TINY


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Every section, page and figures."""
    return report(tmp_path_factory.mktemp("report"), TINY)
