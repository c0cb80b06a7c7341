"""First weights from another run: what the models share is taken over, the mechanisms may differ.

Linear maps, norms, embeddings and heads of a task's model have the same names and shapes with every mechanism. What
belongs to a mechanism alone (its random projection, its learned maps) is taken over only where both runs have the same.
Choromanski et al., "Rethinking Attention with Performers", 2021, start performers from the weights of a softmax model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from .. import checks
from ..mechanisms import Mechanism
from ..nn.config import ModelConfig
from . import checkpoint

__all__ = ["check_same_model", "source_checkpoint", "take_weights"]


def source_checkpoint(start: str | Path) -> Path:
    """The newest checkpoint of a run's folder, or the checkpoint itself that `start` names."""
    path = Path(start)
    if (path / "state.json").is_file():
        return path
    newest = checkpoint.latest(path / "checkpoints")
    if newest is None:
        kind = "holds no checkpoint" if path.is_dir() else "does not exist"
        raise ValueError(
            f"start={str(start)!r} {kind}; expected the folder of a run that `subquad train` wrote, or one of its "
            "checkpoints (--from runs/text-softmax)"
        )
    return newest


def check_same_model(theirs: Mapping[str, Any], mine: Mapping[str, Any], source: Path) -> None:
    """Refuse weights of a model that is another one but for its mechanism, also where all shapes agree."""
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    names = sorted({*theirs, *mine} - {"mechanism", "seed", "dropout"})
    pairs = [(name, *(x.get(name, defaults.get(name)) for x in (theirs, mine))) for name in names]
    wrong = [f"{name} is {there!r} there, {here!r} here" for name, there, here in pairs if there != here]
    if wrong:
        raise ValueError(
            f"--from {source}: its model is another one, nothing was loaded: {'; '.join(wrong)}; only the mechanism "
            "may differ"
        )


def take_weights(module: nn.Module, source: Path, *, same_mechanism: bool) -> None:
    """Load the weights of the checkpoint `source` into `module`, those of mechanisms only if they are the same.

    Nothing is loaded where anything else is missing, left over or of another shape.
    """
    theirs, _, _ = checkpoint.load(source)
    mine = module.state_dict()
    inside = tuple(f"{name}." for name, one in module.named_modules() if isinstance(one, Mechanism))
    if not same_mechanism:
        theirs = {name: x for name, x in theirs.items() if not name.startswith(inside)}
        mine = {name: x for name, x in mine.items() if not name.startswith(inside)}
    wrong = [f"{name} is missing there" for name in mine if name not in theirs]
    wrong += [f"{name} is only there" for name in theirs if name not in mine]
    wrong += [
        f"{name} has {checks.describe_shape(theirs[name])} there, {checks.describe_shape(x)} here"
        for name, x in mine.items()
        if name in theirs and theirs[name].shape != x.shape
    ]
    if wrong:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise ValueError(
            f"--from {source}: its model is another one, nothing was loaded: {'; '.join(wrong[:4])}{more}. Layers, "
            "heads, width, positions and the task's own options must be those of that run; only the mechanism may "
            "differ"
        )
    module.load_state_dict(theirs, strict=False)
