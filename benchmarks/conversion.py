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
  reactions    --unseen-reactions are measured; statistics and distillation use reactions that share no molecule of 12
               or more characters with them
Each section is written to --json as soon as it is done.
"""

import argparse
import copy
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from conversion_data import cosine, extended, pair_scores, passages, sentence_batches, spearman
from conversion_language import antibodies, reactions, stories
from conversion_study import DEGREE1, SDERF, WINDOWS, Study, baselines, converted, taught
from torch import nn
from transformers import AutoModel, AutoTokenizer

import subquad as sq
from subquad.hf.plan.candidates import default_candidates
from subquad.hf.plan.layer_plan import plan_layers
from subquad.hf.plan.statistics import calibrate_layers
from subquad.lab import interleave
from subquad.lab.quality import Uniform, embeddings
from subquad.mechanisms.head_groups import HeadGroups


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
            model, calibration, target_error=1e-12, keep_exact=False, length=512, lengths=(512,), seed=seed,
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
    candidates = default_candidates(windows=WINDOWS, features=(64, 128, 256), multipole=False)
    budget = arguments.share * former.seconds(2048)
    return former, plan_layers(
        model, calibration, budget=budget, candidates=candidates, lengths=lengths, draws=arguments.draws
    )


def everywhere(statistics: dict[int, Any], window: int, far: dict[str, Any]) -> dict[int, Any]:
    """A window, 4 sinks and one far field for all heads, in balanced coordinates."""
    made = {}
    for layer, one in statistics.items():
        heads, width = one.calibration.heads, one.calibration.head_dim
        drawn = {"per_head": True, "seed": layer} if far["mechanism"] == "performer" else {}
        hybrid = {"mechanism": "hybrid", "window": window, "sinks": 4, "far": {**far, **drawn}}
        group = {"heads": list(range(heads)), **hybrid}
        made[layer] = one.calibrate(HeadGroups(width, heads, groups=[group], balance=True))
    return made


def passages_and_long(study: Study, arguments: argparse.Namespace) -> None:
    """Sections passages and long; what the first one has taught is tried at the lengths of the second."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    model = AutoModel.from_pretrained(arguments.encoder).eval()
    student = None
    if "passages" in arguments.only:
        student = of_passages(study, arguments, tokenizer, model)
    if "long" in arguments.only:
        of_long(study, arguments, tokenizer, model, student)


def of_passages(study: Study, arguments: argparse.Namespace, tokenizer: Any, model: nn.Module) -> nn.Module:
    calibration = passages(tokenizer, arguments.sts, "train", count=8, batch=4, seed=1)
    lessons = passages(tokenizer, arguments.sts, "train", count=arguments.lessons, batch=4, seed=2)
    unseen = passages(tokenizer, arguments.sts, "dev", count=arguments.passages, batch=8, seed=3)
    exact = embeddings(model, unseen)

    def measure() -> float:
        return cosine(embeddings(model, unseen), exact)

    study.begin("passages", f"400-512 tokens, mean cosine to the exact embedding of {len(exact)} passages")
    former, plan = encoder_plan(model, calibration, arguments)
    print(plan, flush=True)
    study.note("plan", plan.as_dict())
    baselines(study, model, measure, 32, 4, "cosine")
    plain = {"mechanism": "performer", "features": "positive", "num_features": 256, "seed": 0}
    study.row("FAVOR+ M=256", cosine=converted(model, plain, None, measure))
    study.row(
        "window 32 + 4 sinks, SDERF M=256 far (the cost to meet)",
        cosine=converted(model, former.mechanisms(), None, measure),
    )
    study.row("plan at the same cost, no training", cosine=converted(model, plan.mechanisms(), None, measure))
    timed = {"uniform hybrid": former.mechanisms(), "plan": plan.mechanisms()}
    statistics = calibrate_layers(model, calibration)
    for window, features in ((64, 256), (128, 128), (192, 64)):
        name = f"window {window} + 4 sinks, SDERF M={features}, balanced"
        timed[name] = everywhere(statistics, window, {**SDERF, "num_features": features})
        study.row(name, cosine=converted(model, timed[name], None, measure))
    for name in ("clustered", "improved-clustered"):
        study.row(f"{name}, 25 clusters", cosine=converted(model, {"mechanism": name, "clusters": 25}, None, measure))
    cost(study, model, timed, 2048, arguments.runs)
    student: nn.Module = copy.deepcopy(model)
    sq.hf.convert(student, plan.mechanisms())
    spent = taught(
        model, student, lessons, steps=arguments.steps, lora_steps=arguments.lora_steps, lora_rank=16, lr=2e-3,
        seconds=60 * arguments.minutes,
    )  # fmt: skip
    study.row("plan, distilled", cosine=cosine(embeddings(student, unseen), exact), **spent)
    return student


def of_long(
    study: Study, arguments: argparse.Namespace, tokenizer: Any, model: nn.Module, student: nn.Module | None
) -> None:
    study.begin("long", "positions interpolated, mean cosine to the exact embedding at the same length, no training")
    # The longer the input, the more lies far away: wider windows and more features, still linear.
    for length, count, window, features in ((2048, 8, 128, 256), (8192, 3, 256, 512)):
        shown = min(length, 4096)
        far = passages(tokenizer, arguments.sts, "dev", count=count, batch=1, seed=5, shortest=length, longest=length)
        lesson = passages(tokenizer, arguments.sts, "train", count=1, batch=1, seed=6, shortest=shown, longest=shown)
        long_model = extended(model, length)
        wanted = embeddings(long_model, far)
        statistics = calibrate_layers(long_model, lesson)
        rich = {**SDERF, "num_features": features}
        choices: dict[str, Any] = {
            "uniform": Uniform,
            f"window {window} + 4 sinks only": {"mechanism": "local", "window": window, "sinks": 4},
            f"window {window} + 4 sinks, degree 1 far": everywhere(statistics, window, DEGREE1),
            f"window {window} + 4 sinks, SDERF M={features} far": everywhere(statistics, window, rich),
        }
        for name, choice in choices.items():
            given = converted(long_model, choice, None, functools.partial(embeddings, long_model, far))
            study.row(f"{length}: {name}", cosine=cosine(given, wanted), passages=len(far))
        if student is not None:
            value = cosine(embeddings(extended(student, length), far), wanted)
            study.row(f"{length}: distilled at 512", cosine=value, passages=len(far))


def cost(study: Study, model: nn.Module, choices: dict[str, Any], length: int, runs: int) -> None:
    """Time of the whole encoder, exact and converted, in turn."""
    long_model = extended(model, length)
    tokens = {"input_ids": torch.randint(1000, 20000, (1, length), generator=torch.Generator().manual_seed(0))}
    models = {"exact": long_model}
    for name, choice in choices.items():
        models[name] = sq.hf.convert(copy.deepcopy(long_model), choice)[0]
    calls = {name: functools.partial(one, **tokens) for name, one in models.items()}
    # Exact attention takes minutes there; once tells as much.
    once = frozenset({"exact"} if length > 16384 else ())
    with torch.no_grad():
        times = interleave(calls, runs=runs, seconds=60.0, once=once)
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
    for length in arguments.lengths:
        cost(study, model, {n: c.mechanisms() for n, c in choices.items()}, length, arguments.runs)


SECTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "sentences": (sentences, ("encoder", "sts")),
    "passages": (passages_and_long, ("encoder", "sts")),
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
    parser.add_argument("--unseen-reactions", type=int, default=400)
    parser.add_argument("--reaction-lessons", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=4, help="draws per head of which the best is kept")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 8192, 32768], help="of speed")
    parser.add_argument("--share", type=float, default=0.97, help="of the uniform hybrid's attention, for the plan")
    parser.add_argument("--steps", type=int, default=30, help="attention matching")
    parser.add_argument("--lora-steps", type=int, default=150)
    parser.add_argument("--story-steps", type=int, default=400)
    parser.add_argument("--reaction-steps", type=int, default=0, help="LoRA steps of reactions without clusters")
    parser.add_argument("--minutes", type=float, default=10.0, help="limit of each distillation")
    parser.add_argument("--story-minutes", type=float, default=4.0, help="the same for each one on stories")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = set(arguments.only) - {*SECTIONS, "long"}
    if unknown:
        parser.error(f"--only: {sorted(unknown)} are no sections; expected some of {[*SECTIONS, 'long']}")
    if "SUBQUAD_CACHE" not in os.environ:
        # Costs that another run has measured, on a busier machine perhaps, must not decide what this one plans.
        os.environ["SUBQUAD_CACHE"] = tempfile.mkdtemp(prefix="conversion-")
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
