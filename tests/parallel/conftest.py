"""Runs a function in several processes that form a gloo group; each process checks, and any failure is the test's.

Where the system can, processes are forked from one that has imported torch and the library already: importing them
takes seconds, and more than twenty processes are started here.
"""

import multiprocessing
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
# DistributedDataParallel loads torch's compiler, and a first collective sympy.
PRELOADED = ["pytest", "sympy", "torch._dynamo", "torch.nn.parallel", "subquad.nn", "subquad.parallel"]
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    multiprocessing.set_forkserver_preload(PRELOADED)

    def run(world: int, function: Callable[..., None], *arguments: Any) -> None:
        given = (world, str(tmp_path / "store"), function, arguments)
        mp.start_processes(_process, given, world, start_method=METHOD)

    return run
