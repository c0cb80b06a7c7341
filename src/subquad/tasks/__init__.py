"""Training tasks, most of them from the papers: one file per task, with its data, its model head and its metric."""

from __future__ import annotations

import importlib

from .. import checks
from .base import DataError, Task

__all__ = ["TASKS", "DataError", "Task", "get_task"]

# Each is the module of that name in this package, with a class in it: imported when it is asked for.
TASKS: dict[str, str] = {
    "copy": "Copy",
    "recall": "Recall",
    "images": "Images",
    "speech": "Speech",
    "text": "Text",
    "protein": "Protein",
    "listops": "Listops",
    "documents": "Documents",
}


def get_task(name: str) -> type[Task]:
    """The class of a task by name.

    >>> get_task("copy")().length
    32
    """
    checks.check_option("task", name, TASKS)
    task: type[Task] = getattr(importlib.import_module(f"{__name__}.{name}"), TASKS[name])
    return task
