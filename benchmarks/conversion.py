"""Pretrained models with linear-time attention: what is lost, and what is won back.

    python benchmarks/conversion.py --encoder DIR --sts DIR [--stories DIR --story-ids FILE]
        [--iglm DIR --antibodies FILE] [--rxnmapper DIR --reactions FILE] [--only sentences,...] --json FILE

Sections (those whose data is given; --only picks): sentences, passages, long, stories, antibodies, reactions, speed.
Every layer is converted in each of them, and window-only and uniform attention stand beside every figure.

--encoder    a BERT-type sentence encoder with mean pooling (all-MiniLM-L6-v2)
--sts        the STS benchmark: sts-train.csv, sts-dev.csv
--stories    a small causal Llama; --story-ids: JSON, a list of token lists
--iglm       a causal GPT-2 on antibodies, vocab.txt beside or above it; --antibodies: heavy chains, one per line
--rxnmapper  an ALBERT masked language model on reactions; --reactions: one reaction SMILES per line

What is measured where (no text is used twice):
  sentences    statistics and draws from sentences of sts-train; Spearman on the first 600 pairs of sts-dev
  passages     400 to 512 tokens: sentences of one split, shuffled and joined; statistics and distillation use
               sts-train, the cosine of converted and exact embeddings is measured on sts-dev, without those sentences
               that sts-train has as well
  long         the same at 2048 and 8192 tokens, the 512 position embeddings interpolated
  stories      every third story is measured, the others are for statistics and distillation
  antibodies   the first quarter for statistics, the rest is measured
  reactions    the first half for statistics and distillation, the rest is measured
Each section is written to --json as soon as it is done.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from conversion_data import (
    Uniform,
    antibody_batches,
    cosine,
    embeddings,
    extended,
    masked_accuracy,
    pair_scores,
    passages,
    perplexity,
    reaction_batches,
    sentence_batches,
    spearman,
    story_batches,
    written_out,
)
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import subquad as sq
from subquad.hf.distillation import distill
from subquad.hf.layer_plan import default_candidates, plan_layers
from subquad.lab import interleave, machine, write_json

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


def uniform_of(layer: Any) -> Uniform:
    return Uniform(layer.head_dim, layer.heads, layer.kv_heads)


def baselines(study: Study, model: nn.Module, measure: Any, window: int, sinks: int, name: str) -> None:
    study.row("uniform", **{name: converted(model, uniform_of, None, measure)})
    only = {"mechanism": "local", "window": window, "global_tokens": sinks}
    study.row(f"window {window} + {sinks} sinks only", **{name: converted(model, only, None, measure)})


def sentences(study: Study, arguments: argparse.Namespace) -> None:
    study.begin("sentences", "STS-B dev, first 600 pairs, Spearman; M = 256, no window, no sinks, no training")
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    model = AutoModel.from_pretrained(arguments.encoder).eval()
    pairs = pair_scores(tokenizer, arguments.sts, arguments.pairs)
    calibration = sentence_batches(tokenizer, arguments.sts, count=512, batch=64)

    def measure() -> float:
        return spearman(model, pairs)

    study.row("exact", spearman=measure())
    baselines(study, model, measure, 4, 1, "spearman")
    for seed in range(arguments.seeds):
        plain = {"mechanism": "performer", "features": "positive", "num_features": 256, "seed": seed}
        study.row(f"FAVOR+ M=256, seed {seed}", spearman=converted(model, plain, None, measure))
        centred = {**SDERF, "num_features": 256, "seed": seed}
        study.row(f"centred SDERF M=256, seed {seed}", spearman=converted(model, centred, calibration, measure))
        plan = plan_layers(
            model, calibration, target_error=1e-6, keep_exact=False, length=512, lengths=(512,), seed=seed,
            candidates=[{**SDERF, "num_features": 256}, DEGREE1], draws=arguments.draws,
        )  # fmt: skip
        study.row(
            f"plan: balanced SDERF M=256 or degree 1, seed {seed}",
            spearman=converted(model, plan.mechanisms(), None, measure),
        )
        print(plan)
    for name in ("clustered", "improved-clustered"):
        study.row(f"{name}, 25 clusters", spearman=converted(model, {"mechanism": name, "clusters": 25}, None, measure))


def encoder_plan(model: nn.Module, calibration: list[Any], arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(the uniform hybrid of SDERF M = 256 with a window of 32, the plan within its cost at 2048 tokens)."""
    lengths = (2048,)
    base = {"mechanism": "hybrid", "window": 32, "sinks": 4, "far": {**SDERF, "num_features": 256}}
    former = plan_layers(model, calibration, budget=1e9, candidates=[base], lengths=lengths, balance=False)
    candidates = default_candidates(windows=WINDOWS, features=(256,))
    budget = arguments.share * former.seconds(2048)
    return former, plan_layers(
        model, calibration, budget=budget, candidates=candidates, lengths=lengths, draws=arguments.draws
    )


def long_passages(study: Study, arguments: argparse.Namespace) -> None:
    """Sections passages and long share the plan, the training and the student."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    model = AutoModel.from_pretrained(arguments.encoder).eval()
    calibration = passages(tokenizer, arguments.sts, "train", count=8, batch=4, seed=1)
    lessons = passages(tokenizer, arguments.sts, "train", count=arguments.lessons, batch=4, seed=2)
    unseen = passages(tokenizer, arguments.sts, "dev", count=arguments.passages, batch=8, seed=3)
    exact = embeddings(model, unseen)

    def measure() -> float:
        return cosine(embeddings(model, unseen), exact)

    study.begin("passages", "400-512 tokens, mean cosine to the exact embedding")
    former, plan = encoder_plan(model, calibration, arguments)
    print(plan)
    study.note("plan", plan.as_dict())
    baselines(study, model, measure, 32, 4, "cosine")
    plain = {"mechanism": "performer", "features": "positive", "num_features": 256, "seed": 0}
    study.row("FAVOR+ M=256", cosine=converted(model, plain, None, measure))
    study.row(
        "window 32 + 4 sinks, SDERF M=256 far (the cost to meet)",
        cosine=converted(model, former.mechanisms(), None, measure),
    )
    study.row("plan at the same cost, no training", cosine=converted(model, plan.mechanisms(), None, measure))
    for name in ("clustered", "improved-clustered"):
        study.row(f"{name}, 25 clusters", cosine=converted(model, {"mechanism": name, "clusters": 25}, None, measure))
    cost(study, model, {"uniform hybrid": former.mechanisms(), "plan": plan.mechanisms()}, 2048, arguments.runs)
    student = copy.deepcopy(model)
    sq.hf.convert(student, plan.mechanisms())
    report = distill(
        model, student, lessons, steps=arguments.steps, lora_steps=arguments.lora_steps, lora_rank=16, lr=2e-3,
        seconds=60 * arguments.minutes, progress=line,
    )  # fmt: skip
    study.row(
        f"plan, distilled {report.seconds:.0f} s", cosine=cosine(embeddings(student, unseen), exact),
        seconds=report.seconds, stopped=report.stopped or "no",
    )  # fmt: skip
    if "long" not in arguments.only:
        return
    study.begin("long", "positions interpolated, mean cosine to the exact embedding at the same length")
    # The longer the input, the more lies far away: wider windows and more features, still linear.
    for length, count, window, features in ((2048, 4, 128, 256), (8192, 2, 256, 512)):
        taught = length // 2 if length > 4096 else length
        far = passages(tokenizer, arguments.sts, "dev", count=count, batch=1, seed=5, shortest=length, longest=length)
        lesson = passages(tokenizer, arguments.sts, "train", count=2, batch=1, seed=6, shortest=taught, longest=taught)
        long_model = extended(model, length)
        wanted = embeddings(long_model, far)
        found = plan_layers(
            long_model,
            lesson,
            target_error=1e-6,
            keep_exact=False,
            candidates=default_candidates(windows=(window,), features=(features,)),
            lengths=(2048,),
            draws=arguments.draws,
        )
        print(found)

        def at_length(long_model: nn.Module = long_model, far: Any = far, wanted: Any = wanted) -> float:
            return cosine(embeddings(long_model, far), wanted)

        study.row(f"{length}: uniform", cosine=converted(long_model, uniform_of, None, at_length))
        only = {"mechanism": "local", "window": window, "global_tokens": 4}
        study.row(f"{length}: window {window} + 4 sinks only", cosine=converted(long_model, only, None, at_length))
        study.row(
            f"{length}: plan, window {window}, M <= {features}, no training",
            cosine=converted(long_model, found.mechanisms(), None, at_length),
        )
        long_student = extended(student, length)
        study.row(f"{length}: distilled at 512", cosine=cosine(embeddings(long_student, far), wanted))


def cost(study: Study, model: nn.Module, choices: dict[str, Any], length: int, runs: int) -> None:
    """Time of the whole encoder, exact and converted, in turn."""
    long_model = extended(model, length)
    tokens = {"input_ids": torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))}
    models = {"exact": long_model}
    for name, choice in choices.items():
        models[name] = sq.hf.convert(copy.deepcopy(long_model), choice)[0]
    with torch.no_grad():
        times = interleave({n: (lambda m=m: m(**tokens)) for n, m in models.items()}, runs=runs, seconds=120.0)
    for name, timing in times.items():
        study.row(f"whole encoder at {length} tokens, {name}", seconds=timing.best)


def speed(study: Study, arguments: argparse.Namespace) -> None:
    study.begin("speed", "the whole sentence encoder, one sequence, against SDPA; best of the runs, in turn")
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    model = AutoModel.from_pretrained(arguments.encoder).eval()
    calibration = passages(tokenizer, arguments.sts, "train", count=8, batch=4, seed=1)
    former, plan = encoder_plan(model, calibration, arguments)
    performer = plan_layers(
        model, calibration, budget=1e9, candidates=[{**SDERF, "num_features": 256}], lengths=(2048,)
    )
    choices = {"plan": plan, "hybrid 32 + SDERF": former, "SDERF M=256 alone": performer}
    for length in (512, 1024, 2048, 8192, 32768):
        cost(study, model, {n: c.mechanisms() for n, c in choices.items()}, length, arguments.runs)


def stories(study: Study, arguments: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(arguments.stories).eval()
    lessons, unseen, mean = story_batches(arguments.story_ids)
    window, sinks = int(mean) // 4 - 8, 8
    study.begin("stories", f"perplexity; mean length {mean:.0f}, window {window} + {sinks} sinks, M <= 64")

    def measure() -> float:
        return perplexity(model, unseen)

    exact = measure()
    study.row("exact", perplexity=exact)
    baselines(study, model, measure, window, sinks, "perplexity")
    far: dict[str, Any] = {"mechanism": "hedgehog", "activation": "softmax"}
    hybrid = {"mechanism": "hybrid", "window": window, "sinks": sinks, "far": far}
    plans: dict[str, Any] = {
        "window only": {"mechanism": "local", "window": window, "global_tokens": sinks},
        "hybrid, Hedgehog far": hybrid,
    }
    for name, choice in plans.items():
        student, _ = sq.hf.convert(copy.deepcopy(model), choice)
        study.row(f"{name}, no training", perplexity=perplexity(student, unseen))
        report = distill(
            model, student, lessons, steps=arguments.steps if "hybrid" in name else 0, lr=5e-3,
            lora_steps=arguments.story_steps, lora_rank=16, lora_lr=5e-4, seconds=60 * arguments.minutes, progress=line,
        )  # fmt: skip
        found = perplexity(student, unseen)
        study.row(
            f"{name}, distilled {report.seconds:.0f} s", perplexity=found, above_exact=found / exact - 1,
            seconds=report.seconds,
        )  # fmt: skip


def without_training(
    study: Study, model: nn.Module, calibration: list[Any], unseen: list[Any], name: str, measure: Any, mean: float
) -> Any:
    """The plan within a window of a quarter of the mean length, and what it gives."""
    sinks = 4
    window = int(mean) // 4 - sinks
    exact = measure(unseen)
    study.row("exact", **{name: exact})
    baselines(study, model, lambda: measure(unseen), window, sinks, name)
    plan = plan_layers(
        model, calibration, target_error=1e-6, keep_exact=False, length=512, lengths=(512,),
        candidates=default_candidates(windows=(window,), sinks=sinks, features=(256,)),
    )  # fmt: skip
    print(plan)
    found = converted(model, plan.mechanisms(), None, lambda: measure(unseen))
    study.row(f"plan, window {window} + {sinks} sinks, M <= 256", **{name: found}, relative=found / exact - 1)
    return plan


def antibodies(study: Study, arguments: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(arguments.iglm).eval()
    batches, mean = antibody_batches(arguments.antibodies, arguments.iglm, arguments.species)
    study.begin("antibodies", f"perplexity of a causal GPT-2, mean length {mean:.0f}, no training")
    quarter = max(2, len(batches) // 4)
    parts = (batches[:quarter], batches[quarter:])
    without_training(study, model, *parts, "perplexity", lambda unseen: perplexity(model, unseen), mean)


def reactions(study: Study, arguments: argparse.Namespace) -> None:
    model = written_out(AutoModelForMaskedLM.from_pretrained(arguments.rxnmapper).eval())
    batches, mean = reaction_batches(arguments.reactions, arguments.rxnmapper)
    study.begin("reactions", f"accuracy on masked tokens of an ALBERT, mean length {mean:.0f}")
    half = max(2, len(batches) // 2)
    lessons, unseen = batches[:half], batches[half:]
    plan = without_training(
        study, model, lessons[:4], unseen, "accuracy", lambda unseen: masked_accuracy(model, unseen), mean
    )
    student = copy.deepcopy(model)
    sq.hf.convert(student, plan.mechanisms())
    report = distill(
        model, student, lessons, steps=arguments.steps, lr=5e-3, lora_steps=arguments.story_steps, lora_rank=16,
        seconds=60 * arguments.minutes, progress=line,
    )  # fmt: skip
    found = masked_accuracy(student, unseen)
    study.row(f"plan, distilled {report.seconds:.0f} s", accuracy=found, seconds=report.seconds)


SECTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sentences": (sentences, ("encoder", "sts")),
    "passages": (long_passages, ("encoder", "sts")),
    "stories": (stories, ("stories", "story_ids")),
    "antibodies": (antibodies, ("iglm", "antibodies")),
    "reactions": (reactions, ("rxnmapper", "reactions")),
    "speed": (speed, ("encoder", "sts")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("encoder", "sts", "stories", "story-ids", "iglm", "antibodies", "rxnmapper", "reactions"):
        parser.add_argument(f"--{name}", type=Path, default=None)
    parser.add_argument("--only", default="sentences,passages,long,stories,antibodies,reactions,speed")
    parser.add_argument("--json", default=None)
    parser.add_argument("--species", default="HUMAN", help="of the antibodies: HUMAN, MOUSE, RAT, ...")
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--passages", type=int, default=32, help="unseen passages of 400-512 tokens")
    parser.add_argument("--lessons", type=int, default=256, help="passages to distil on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=4, help="draws per head of which the best is kept")
    parser.add_argument("--share", type=float, default=1.0, help="of the uniform hybrid's time, for the plan")
    parser.add_argument("--steps", type=int, default=30, help="attention matching")
    parser.add_argument("--lora-steps", type=int, default=150)
    parser.add_argument("--story-steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of each distillation")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = set(arguments.only) - {*SECTIONS, "long"}
    if unknown:
        parser.error(f"--only: {sorted(unknown)} are no sections; expected some of {[*SECTIONS, 'long']}")
    study = Study(arguments.json)
    start = time.perf_counter()
    for name, (function, needs) in SECTIONS.items():
        if name not in arguments.only and not (name == "passages" and "long" in arguments.only):
            continue
        missing = [f"--{need.replace('_', '-')}" for need in needs if getattr(arguments, need) is None]
        if missing:
            print(f"\n== {name}: left out, needs {' '.join(missing)}")
            continue
        function(study, arguments)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
