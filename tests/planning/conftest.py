"""What the tests of plans measure, they measure briefly."""

import pytest

from subquad.planning import cost


@pytest.fixture
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs from three short lengths, one round each."""
    monkeypatch.setattr(cost, "LENGTHS", (128, 256, 512))
    monkeypatch.setattr(cost, "ROUNDS", 1)
