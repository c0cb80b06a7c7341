"""What the tests of plans measure, they measure briefly."""

import pytest

from subquad.planning import cost, planner


@pytest.fixture
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs from three short lengths, one round each."""
    monkeypatch.setattr(cost, "LENGTHS", (128, 256, 512))
    monkeypatch.setattr(cost, "ROUNDS", 1)


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting is left out because a busy machine made one run slow."""
    monkeypatch.setattr(planner._Study, "too_slow", lambda self, seconds: False)
