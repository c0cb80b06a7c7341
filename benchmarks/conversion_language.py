"""Sections of benchmarks/conversion.py on language models: stories, antibodies, reactions."""

import argparse
import copy
from typing import Any

from conversion_data import (
    antibody_batches,
    keys_seen,
    masked_accuracy,
    reaction_batches,
    story_batches,
    written_out,
)
from conversion_study import Study, baselines, converted, taught
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import subquad as sq
from subquad.hf.plan.candidates import default_candidates
from subquad.hf.plan.layer_plan import LayerPlan, plan_layers
from subquad.lab.quality import score

__all__ = ["antibodies", "reactions", "stories"]

CLUSTERS = 25  # the number of the clustered-attention paper


def best_plan(model: nn.Module, calibration: list[Any], candidates: list[dict[str, Any]], draws: int = 1) -> LayerPlan:
    """The least error that the candidates allow, whatever the time."""
    plan = plan_layers(
        model, calibration, target_error=1e-12, keep_exact=False, length=512, lengths=(512,), candidates=candidates,
        draws=draws,
    )  # fmt: skip
    print(plan, flush=True)
    return plan


def stories(study: Study, arguments: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(arguments.stories).eval()
    lessons, unseen, mean = story_batches(arguments.story_ids)
    window, sinks = int(mean) // 4 - 8, 8
    study.begin("stories", f"perplexity; mean length {mean:.0f}, window {window} + {sinks} sinks, M <= 64")

    def measure() -> float:
        return score("perplexity", model, unseen)

    exact = measure()
    study.row("exact", perplexity=exact)
    baselines(study, model, measure, window, sinks, "perplexity")
    only: dict[str, Any] = {"mechanism": "local", "window": window, "sinks": sinks}
    near: dict[str, Any] = {"mechanism": "hybrid", "window": window, "sinks": sinks}
    # Degree 2 of heads 8 wide has 1 + 8 + 36 features.
    fars: list[dict[str, Any]] = [
        {"mechanism": "taylor", "degree": 2, "center": True},
        {"mechanism": "performer", "features": "sderf", "center": True, "antithetic": True, "num_features": 64},
    ]
    plan = best_plan(model, lessons[-4:], [only, *({**near, "far": far} for far in fars)], arguments.draws)
    choices: dict[str, Any] = {
        "window only": only,
        "hybrid, Hedgehog far, M = 16": {**near, "far": {"mechanism": "hedgehog", "activation": "softmax"}},
        "plan: window alone or with SDERF, M = 64, or degree 2 far": plan.mechanisms(),
    }
    for name, choice in choices.items():
        student, _ = sq.hf.convert(copy.deepcopy(model), choice)
        found = score("perplexity", student, unseen)
        study.row(f"{name}, no training", perplexity=found, above_exact=found / exact - 1)
        spent = taught(
            model, student, lessons, steps=0 if choice is only else arguments.steps, lr=3e-3,
            lora_steps=arguments.story_steps, lora_rank=16, lora_lr=2e-4, seconds=60 * arguments.story_minutes,
        )  # fmt: skip
        found = score("perplexity", student, unseen)
        study.row(f"{name}, distilled", perplexity=found, above_exact=found / exact - 1, **spent)


def antibodies(study: Study, arguments: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(arguments.iglm).eval()
    batches, mean = antibody_batches(arguments.antibodies, arguments.iglm, arguments.species)
    study.begin("antibodies", f"perplexity of a causal GPT-2, mean length {mean:.0f}, no training")
    quarter = max(2, len(batches) // 4)
    calibration, unseen = batches[:quarter], batches[quarter:]
    sinks = 4
    window = int(mean) // 4 - sinks

    def measure() -> float:
        return score("perplexity", model, unseen)

    exact = measure()
    study.row("exact", perplexity=exact)
    baselines(study, model, measure, window, sinks, "perplexity")
    candidates = default_candidates(windows=(window,), sinks=sinks, features=(256,), multipole=False)
    plan = best_plan(model, calibration, candidates)
    found = converted(model, plan.mechanisms(), None, measure)
    study.row(f"plan, window {window} + {sinks} sinks, M <= 256", perplexity=found, above_exact=found / exact - 1)


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch without its labels."""
    return {name: value for name, value in batch.items() if name != "labels"}


def reactions(study: Study, arguments: argparse.Namespace) -> None:
    model = written_out(AutoModelForMaskedLM.from_pretrained(arguments.rxnmapper).eval())
    lessons, unseen, mean = reaction_batches(
        arguments.reactions, arguments.rxnmapper, unseen=arguments.unseen_reactions, lessons=arguments.reaction_lessons
    )
    sinks, quarter = 4, int(mean) // 4
    window = quarter - sinks
    masked = sum(int((batch["labels"] >= 0).sum()) for batch in unseen)
    count = sum(len(batch["input_ids"]) for batch in unseen)
    study.begin(
        "reactions",
        f"accuracy on {masked} masked tokens of {count} reactions, mean length {mean:.0f}, ALBERT of 12 layers",
    )

    def measure() -> float:
        return masked_accuracy(model, unseen)

    exact = measure()

    def row(name: str, found: float, **more: Any) -> None:
        study.row(name, accuracy=found, below_exact=exact - found, **more)

    row("exact", exact)
    for sample in sq.hf.capture(model, [plain(lessons[0])]):
        keys, beyond = keys_seen(sample, window)
        head = max(range(len(keys)), key=[b / n for b, n in zip(beyond, keys, strict=True)].__getitem__)
        study.row(
            f"layer {sample.layer}, its sharpest far head", head=head, keys=keys[head], beyond_the_window=beyond[head]
        )
    baselines(study, model, measure, window, sinks, "accuracy")
    for name in ("clustered", "improved-clustered"):
        options: dict[str, Any] = {"mechanism": name, "clusters": CLUSTERS, "seed": 0}
        if name == "improved-clustered":
            options["topk"] = quarter
        for clustering in ("hamming", "lloyd"):
            found = converted(model, {**options, "clustering": clustering}, None, measure)
            row(f"{name}, {CLUSTERS} clusters ({clustering})" + f", top {quarter}" * ("topk" in options), found)
    calibration = [plain(batch) for batch in lessons[:4]]
    near: dict[str, Any] = {"windows": (window,), "sinks": sinks, "features": (256,)}
    features = best_plan(model, calibration, default_candidates(**near, multipole=False))
    row(f"plan: window {window} + {sinks}, M <= 256", converted(model, features.mechanisms(), None, measure))
    every = best_plan(model, calibration, default_candidates(**near, clusters=CLUSTERS, topk=quarter, multipole=False))
    row(
        f"plan: the same or {CLUSTERS} clusters with top {quarter}",
        converted(model, every.mechanisms(), None, measure),
    )
    if not arguments.reaction_steps:
        return
    student, _ = sq.hf.convert(copy.deepcopy(model), features.mechanisms())
    spent = taught(
        model, student, [plain(batch) for batch in lessons],
        steps=arguments.steps, lr=5e-3, lora_steps=arguments.reaction_steps, lora_rank=16,
        seconds=60 * arguments.minutes,
    )  # fmt: skip
    row(f"plan: window {window} + {sinks}, M <= 256, distilled", masked_accuracy(student, unseen), **spent)
