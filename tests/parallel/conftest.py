"""Runs a function in several processes that form a gloo group; each process checks, and any failure is the test's."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _process(rank: int, world: int, file: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world, timeout=limit)
    try:
        function(rank, world, *arguments)
    finally:
        dist.destroy_process_group()


Processes = Callable[..., None]


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    def run(world: int, function: Callable[..., None], *arguments: Any) -> None:
        mp.spawn(_process, (world, str(tmp_path / "store"), function, arguments), world)

    return run
