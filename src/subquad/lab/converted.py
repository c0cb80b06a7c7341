"""Time and memory of a whole model against length, exact and converted, and the length from which converting pays.

Models with learned positions are lengthened for the timing: their table is repeated, which changes what they say but
not what they cost.
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from subquad.hf.conversion.capturing import run
from subquad.lab.measure import interleave
from subquad.lab.peak_memory import high_water, reset_high_water
from subquad.plain_text import first_line
from subquad.planning.crossover import faster_from

__all__ = ["lengthened", "memory_of", "pays_from", "time_models"]


def lengthened(model: nn.Module, length: int) -> nn.Module:
    """A copy of `model` that takes at least `length` tokens: tables and index buffers of learned positions repeated.

    >>> from transformers import BertConfig, BertModel
    >>> small = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
    ...                              vocab_size=9, max_position_embeddings=16))
    >>> lengthened(small, 40)(torch.ones(1, 40, dtype=torch.long)).last_hidden_state.shape
    torch.Size([1, 40, 8])
    """
    longer = copy.deepcopy(model)
    config: Any = longer.config
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not isinstance(positions, int) or positions >= length:
        return longer
    # Some families begin to count behind the padding token's number.
    room = length + 4
    for name, module in longer.named_modules():
        table = isinstance(module, nn.Embedding) and positions <= module.num_embeddings <= positions + 4
        if isinstance(module, nn.Embedding) and table and ("pos" in name or name.endswith("wpe")):
            times = math.ceil(room / module.num_embeddings)
            module.weight = nn.Parameter(module.weight.detach().repeat(times, 1), requires_grad=False)
            module.num_embeddings = module.weight.shape[0]
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dim() == 2 and buffer.shape[1] == positions and not buffer.is_floating_point():
                # Position and segment numbers that the module slices by length.
                fresh = torch.arange(room)[None] if "position" in key else torch.zeros(1, room, dtype=buffer.dtype)
                module.register_buffer(key, fresh.to(buffer.device), persistent=False)
    config.max_position_embeddings = room
    return longer


def _tokens(model: nn.Module, length: int) -> dict[str, Tensor]:
    config: Any = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generator = torch.Generator().manual_seed(0)
    low = min(10, text.vocab_size - 1)
    return {"input_ids": torch.randint(low, text.vocab_size, (1, length), generator=generator)}


def time_models(
    exact: nn.Module,
    converted: nn.Module,
    lengths: Sequence[int],
    *,
    runs: int = 3,
    seconds: float = 20.0,
    on_length: Callable[[int, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Milliseconds of one forward pass of one sequence, both models in turn: [{length, exact_ms, converted_ms}, ...].

    A length at which exact attention runs out of memory is recorded with `error` and ends the list.
    """
    rows: list[dict[str, Any]] = []
    longest = max(lengths)
    models = {"exact": lengthened(exact, longest).eval(), "converted": lengthened(converted, longest).eval()}
    with torch.no_grad():
        for number, length in enumerate(sorted(lengths), 1):
            batch = _tokens(exact, length)
            calls = {name: (lambda m=model, b=batch: run(m, b)) for name, model in models.items()}
            try:
                times = interleave(calls, runs=runs, seconds=seconds)
            except RuntimeError as error:
                rows.append({"length": length, "error": first_line(error)})
                break
            rows.append({"length": length, **{f"{name}_ms": time.best * 1e3 for name, time in times.items()}})
            if on_length is not None:
                on_length(length, number, len(lengths))
    return rows


def pays_from(rows: Sequence[dict[str, Any]]) -> float | None:
    """The length from which the converted model is faster at every length measured, interpolated; None if at none.

    >>> pays_from([{"length": 512, "exact_ms": 1.0, "converted_ms": 2.0},
    ...            {"length": 1024, "exact_ms": 4.0, "converted_ms": 2.0}])
    724.07...
    """
    measured = [row for row in rows if "exact_ms" in row]
    times = ({row["length"]: row[f"{name}_ms"] for row in measured} for name in ("converted", "exact"))
    return faster_from(*times)


def memory_of(folder: Path, lengths: Sequence[int], *, timeout: float = 600.0) -> list[dict[str, Any]]:
    """Bytes that one forward pass needs above the model itself, in a process of its own: [{length, bytes}, ...]."""
    command = [sys.executable, "-m", "subquad.lab.converted", str(folder), json.dumps(sorted(lengths))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        out, problem = done.stdout, (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as late:
        out, problem = (late.stdout or b"").decode(), f"took longer than {timeout:.0f} s"
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows + [{"length": length, "error": problem} for length in sorted(lengths)[len(rows) :]]


def _child(folder: str, lengths: Sequence[int]) -> None:
    import subquad.hf  # noqa: F401 - converted models need it to come back as such
    from subquad.hf.conversion.restoring import saved_class

    model = lengthened(saved_class(folder).from_pretrained(folder).eval(), max(lengths))
    with torch.no_grad():
        run(model, _tokens(model, 64))
        for length in lengths:
            batch = _tokens(model, length)
            before = reset_high_water()
            run(model, batch)
            print(json.dumps({"length": length, "bytes": max(0, high_water() - before)}), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], json.loads(sys.argv[2]))
