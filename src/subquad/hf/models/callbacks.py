"""Redrawing while transformers' `Trainer` trains."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ... import checks
from ...nn.schedule import RedrawSchedule

__all__ = ["RedrawCallback"]


class RedrawCallback(TrainerCallback):
    """`nn.RedrawSchedule` for `Trainer(callbacks=[RedrawCallback(every=1000)])`: redraws every so many steps.

    A step is an optimizer step; a redraw comes before one, so that every checkpoint has features that it was trained
    with. The count is that of the Trainer and the draws are buffers of the model, so both are in its checkpoints:
    training resumed from one has the draws it would have had. Every rank counts alike and draws alike.

    >>> import subquad as sq
    >>> callback = sq.hf.RedrawCallback(every=100)
    """

    def __init__(self, every: int) -> None:
        checks.check_positive("every", every)
        self.every = every
        self.schedule: RedrawSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count, after a resumed checkpoint where it stopped."""
        model = kwargs["model"]
        # Wrappers (DDP, compile) know nothing of redraw; what they wrap does.
        while not callable(getattr(model, "redraw", None)):
            inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
            if inner is None:
                break
            model = inner
        self.schedule = RedrawSchedule(model, self.every)
        self.schedule.load_state_dict({"every": self.every, "steps": state.global_step})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the optimizer step that comes next."""
        assert self.schedule is not None
        self.schedule.step()
