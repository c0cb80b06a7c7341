"""What the sections of benchmarks/conversion.py share: the record of a run, baselines, and a conversion for a while."""

import time
from typing import Any

import torch
from torch import nn

import subquad as sq
from subquad.hf.distillation.distilling import distill
from subquad.lab import machine, write_json
from subquad.lab.quality import Uniform

SDERF: dict[str, Any] = {"mechanism": "performer", "features": "sderf", "center": True, "antithetic": True}
WINDOWS = (32, 64, 128, 192)
DEGREE1: dict[str, Any] = {"mechanism": "taylor", "degree": 1, "center": True}


class Study:
    """Results of one run, printed as they come and written after each section."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.record: dict[str, Any] = {"machine": machine(), "torch_threads": torch.get_num_threads(), "sections": {}}
        self.section = ""

    def begin(self, section: str, what: str) -> None:
        self.section = section
        self.record["sections"][section] = {"what": what, "rows": []}
        print(f"\n== {section}: {what}", flush=True)

    def row(self, name: str, **numbers: Any) -> None:
        self.record["sections"][self.section]["rows"].append({"name": name, **numbers})
        shown = "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
        print(f"{name:58s} {shown}", flush=True)
        if self.path:
            write_json(self.path, self.record)

    def note(self, key: str, value: Any) -> None:
        self.record["sections"][self.section][key] = value
        if self.path:
            write_json(self.path, self.record)


def line(text: str, done: int, total: int) -> None:
    if done % 10 == 0 or done == total:
        print(f"    [{done}/{total}] {text}", flush=True)


def converted(model: nn.Module, choice: Any, calibration: list[Any] | None, measure: Any) -> Any:
    """measure() with `model` converted for a while."""
    sq.hf.convert(model, choice, calibration=calibration)
    try:
        return measure()
    finally:
        sq.hf.revert(model)


def baselines(study: Study, model: nn.Module, measure: Any, window: int, sinks: int, name: str) -> None:
    study.row("uniform", **{name: converted(model, Uniform, None, measure)})
    only = {"mechanism": "local", "window": window, "sinks": sinks}
    study.row(f"window {window} + {sinks} sinks only", **{name: converted(model, only, None, measure)})


def taught(teacher: nn.Module, student: nn.Module, lessons: list[Any], **settings: Any) -> dict[str, Any]:
    """Distil, and say what it took: seconds of the clock and of the processor, steps of both stages."""
    start = time.process_time()
    report = distill(teacher, student, lessons, progress=line, **settings)
    return {
        "seconds": report.seconds,
        "cpu_seconds": time.process_time() - start,
        "attention_steps": len(report.attention_losses),
        "lora_steps": len(report.model_losses),
        "stopped": report.stopped or "no",
    }
