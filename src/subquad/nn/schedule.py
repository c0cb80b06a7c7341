"""When to redraw during training: every so many steps, the same on every rank, resumed exactly.

Choromanski et al., "Rethinking Attention with Performers", 2021, redraw the projection while training, so that the
model does not adapt to one draw.
"""

from __future__ import annotations

from typing import Any

from .. import checks

__all__ = ["RedrawSchedule"]


class RedrawSchedule:
    """Calls `model.redraw()` between training steps, `every` of them apart; call `step()` before each.

    Never after the last one: a model is validated and saved with features that it was trained on. The draws themselves
    are buffers of the model, a function of its seeds and counters; the schedule only counts. Save both state_dicts
    together and training resumes with the draws it would have had; ranks that step alike draw alike.

    >>> import subquad as sq
    >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="performer")
    >>> schedule = sq.nn.RedrawSchedule(model, every=3)
    >>> [schedule.step() for _ in range(7)]
    [False, False, False, True, False, False, True]
    >>> schedule.state_dict()
    {'every': 3, 'steps': 7}
    """

    def __init__(self, model: Any, every: int) -> None:
        checks.check_positive("every", every)
        if not callable(getattr(model, "redraw", None)):
            raise TypeError(
                f"model must have a redraw() method, as all models and mechanisms do, got {type(model).__name__}"
            )
        self.model, self.every, self.steps = model, every, 0

    def step(self) -> bool:
        """Count the training step that comes next; says whether the model was redrawn for it."""
        due = self.steps > 0 and self.steps % self.every == 0
        if due:
            self.model.redraw()
        self.steps += 1
        return due

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs."""
        return {"every": self.every, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue counting where the saved schedule was; nothing is changed if a key is missing or wrong."""
        if set(state) != {"every", "steps"}:
            raise ValueError(f"a redraw schedule's state has the keys 'every' and 'steps', got {sorted(state)}")
        checks.check_positive("every", state["every"])
        checks.check_positive("steps", state["steps"], least=0)
        self.every, self.steps = state["every"], state["steps"]
