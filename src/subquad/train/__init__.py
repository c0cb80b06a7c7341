"""The training loop, on Accelerate: one process or many, exact resume, nothing pickled."""

from .. import checks

try:
    from .loop import Outcome, train
    from .run import Run, load_trained
    from .settings import Running, Settings
except ModuleNotFoundError as error:
    if error.name not in ("safetensors", "numpy"):
        raise
    raise checks.missing_package("subquad.train", error.name, "train") from None

__all__ = ["Outcome", "Run", "Running", "Settings", "load_trained", "train"]
