"""The training loop, on Accelerate: one process or many, exact resume, nothing pickled."""

from .loop import Outcome, train
from .run import Run, load_trained
from .settings import Running, Settings

__all__ = ["Outcome", "Run", "Running", "Settings", "load_trained", "train"]
