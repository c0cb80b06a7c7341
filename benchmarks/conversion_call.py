"""The one call, `sq.hf.convert(model, calibration=batches, length=...)`: what it chooses, and what that costs and wins
on text that it has not seen. No training, no option but the length.

    python benchmarks/conversion_call.py --encoder DIR --text FILE --unseen FILE FILE [--sts DIR]
        [--stories DIR --story-ids FILE] [--iglm DIR [--antibodies FILE]] [--rxnmapper DIR --reactions FILE]
        [--only texts,sentences,...] [--lengths 2048 8192] --students DIR --json FILE
    python benchmarks/conversion_call.py --encoder DIR --text FILE --only speed --students DIR --json FILE

texts      a sentence encoder, positions interpolated, converted for each of --lengths: the conversion sees four texts
           of --text, of which it holds one out; the cosines are those of texts of each file of --unseen, at 512
           tokens, at every length up to the one it was converted for. --students keeps the converted encoders,
           and a run that finds some there goes on with them
sentences  the encoders of `texts`, or those in --students, on STS-B dev: Spearman
stories, antibodies, reactions   the language models of benchmarks/conversion.py on their own data, converted for
           --chosen-for tokens: perplexity, masked accuracy. Without a file of antibodies IgLM samples them
speed      seconds of the whole encoders in --students at the lengths that they were converted for, exact and converted
           in turn, and at 32768 tokens with what was chosen for 8192; wants a quiet machine. One length at a time
           with --speed-lengths
"""

import argparse
import copy
import functools
from pathlib import Path
from typing import Any

import torch
from conversion_data import (
    antibody_batches,
    cosine,
    extended,
    masked_accuracy,
    pair_scores,
    reaction_batches,
    sampled_antibodies,
    spearman,
    story_batches,
    written_out,
)
from conversion_study import Study, converted
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import subquad as sq
from subquad.hf.conversion.interface import mechanism_of
from subquad.hf.conversion.layers import known_layers
from subquad.hf.plan.automatic import output_error, outputs
from subquad.lab import interleave
from subquad.lab.quality import embeddings, score

SECTIONS = ("texts", "sentences", "stories", "antibodies", "reactions", "speed")


def texts_of(path: Path, tokenizer: Any, length: int, count: int, rows: int = 1) -> list[dict[str, torch.Tensor]]:
    """Batches of texts of exactly `length` tokens, from places all over a file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    found = []
    for number in range(count * rows):
        begin = number * len(text) // (count * rows)
        piece = text[begin : begin + 12 * length]
        ids = tokenizer(piece, add_special_tokens=False, truncation=True, max_length=length - 2)["input_ids"]
        if len(ids) < length - 2:
            raise SystemExit(f"{path} is too short for {count * rows} texts of {length} tokens")
        found.append([tokenizer.cls_token_id, *ids, tokenizer.sep_token_id])
    ids = torch.tensor(found).view(count, rows, length)
    return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]


def made(model: nn.Module, batches: list[Any], length: int, study: Study) -> tuple[Any, Any]:
    """A converted copy, and its report."""
    found, report = sq.hf.convert(copy.deepcopy(model), calibration=batches, length=length)
    print(report, flush=True)
    study.note(f"report at {length}", report.as_dict())
    return found, report


def encoder_of(arguments: argparse.Namespace, length: int) -> Any:
    return extended(AutoModel.from_pretrained(arguments.encoder).eval(), length)


def with_choice(model: nn.Module, choice: dict[int, Any]) -> Any:
    """A copy of the model with these mechanisms."""
    student = copy.deepcopy(model)
    if any(one is not None for one in choice.values()):
        sq.hf.convert(student, copy.deepcopy(choice), check=False)
    return student


def kept_choice(folder: Path) -> dict[int, Any]:
    """The mechanisms of a converted encoder that was saved."""
    return {layer.index: mechanism_of(layer.module) for layer in known_layers(sq.hf.load(folder))}


def texts(study: Study, arguments: argparse.Namespace) -> dict[int, Any]:
    study.begin("texts", "tokens: cosine of the last hidden states of every token; cosine: of mean embeddings")
    tokenizer, choices = AutoTokenizer.from_pretrained(arguments.encoder), {}
    for length in arguments.lengths:
        folder = None if arguments.students is None else arguments.students / str(length)
        if folder is not None and folder.exists():
            choices[length] = kept_choice(folder)
        else:
            shown = min(length, arguments.calibration_tokens or length)
            batches = texts_of(arguments.text, tokenizer, shown, 4, max(1, 1024 // length))
            student, report = made(encoder_of(arguments, length), batches, length, study)
            choices[length] = report.choice.mechanisms
            if folder is not None:
                student.save_pretrained(folder)
        for at in sorted({512, *(n for n in arguments.lengths if n < length), length}):
            exact = encoder_of(arguments, at)
            other = with_choice(exact, choices[length])
            for path in arguments.unseen:
                unseen = texts_of(path, tokenizer, at, arguments.texts)
                study.row(
                    f"for {length} tokens, {path.name}, {at} tokens",
                    tokens=1 - output_error(outputs(other, unseen), outputs(exact, unseen)),
                    cosine=cosine(embeddings(other, unseen), embeddings(exact, unseen)),
                    layers=sum(one is not None for one in choices[length].values()),
                    texts=len(unseen),
                )
    return choices


def sentences(study: Study, arguments: argparse.Namespace, choices: dict[int, Any]) -> None:
    study.begin("sentences", f"STS-B dev, first {arguments.pairs} pairs, Spearman, with what texts chose")
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    pairs = pair_scores(tokenizer, arguments.sts, arguments.pairs)
    model = encoder_of(arguments, 0)  # short texts have the positions that it was trained with
    exact = spearman(model, pairs)
    study.row("exact", spearman=exact)
    for length, choice in choices.items():
        found = exact if not any(choice.values()) else converted(model, choice, None, lambda: spearman(model, pairs))
        study.row(f"converted for {length} tokens", spearman=found, below_exact=exact - found)


def stories(study: Study, arguments: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(arguments.stories).eval()
    lessons, unseen, mean = story_batches(arguments.story_ids)
    study.begin("stories", f"perplexity, mean length {mean:.0f}")
    language(study, model, lessons[-8:], unseen, arguments)


def antibodies(study: Study, arguments: argparse.Namespace) -> None:
    model = AutoModelForCausalLM.from_pretrained(arguments.iglm).eval()
    if arguments.antibodies:
        batches, mean = antibody_batches(arguments.antibodies, arguments.iglm, arguments.species)
    else:
        batches, mean = sampled_antibodies(model, arguments.iglm, arguments.species, 256)
    quarter = max(4, len(batches) // 4)
    study.begin("antibodies", f"perplexity, mean length {mean:.0f}")
    language(study, model, batches[:quarter], batches[quarter:], arguments)


def language(
    study: Study, model: nn.Module, lessons: list[Any], unseen: list[Any], arguments: argparse.Namespace
) -> None:
    exact = score("perplexity", model, unseen)
    study.row("exact", perplexity=exact)
    for length in arguments.chosen_for:
        student, report = made(model, lessons, length, study)
        found = score("perplexity", student, unseen)
        study.row(
            f"length={length}", perplexity=found, above_exact=found / exact - 1, layers=len(report.converted),
            verdict=report.verdict,
        )  # fmt: skip


def reactions(study: Study, arguments: argparse.Namespace) -> None:
    model = written_out(AutoModelForMaskedLM.from_pretrained(arguments.rxnmapper).eval())
    lessons, unseen, mean = reaction_batches(arguments.reactions, arguments.rxnmapper, unseen=400, lessons=2000)
    study.begin("reactions", f"masked accuracy, mean length {mean:.0f}")
    exact = masked_accuracy(model, unseen)
    study.row("exact", accuracy=exact)
    for length in arguments.chosen_for:
        student, report = made(model, lessons[:16], length, study)
        found = masked_accuracy(student, unseen)
        study.row(
            f"length={length}", accuracy=found, below_exact=exact - found, layers=len(report.converted),
            verdict=report.verdict,
        )  # fmt: skip


def speed(study: Study, arguments: argparse.Namespace) -> None:
    study.begin("speed", "seconds of the whole encoder, one text, exact and converted in turn")
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    for length in arguments.speed_lengths:
        known = [int(folder.name) for folder in arguments.students.iterdir() if folder.is_dir()]
        chosen_for = max((n for n in known if n <= length), default=min(known))
        choice = kept_choice(arguments.students / str(chosen_for))
        exact = encoder_of(arguments, length)
        student = with_choice(exact, choice)
        (batch,) = texts_of(arguments.text, tokenizer, length, 1)
        calls = {"exact": functools.partial(exact, **batch), "converted": functools.partial(student, **batch)}
        once = frozenset({"exact"} if length > 16384 else ())
        with torch.no_grad():
            times = interleave(calls, runs=arguments.runs, seconds=60.0, once=once)
        seconds = {name: timing.best for name, timing in times.items()}
        layers = sum(one is not None for one in choice.values())
        faster = seconds["exact"] / seconds["converted"]
        study.row(f"{length} tokens, chosen for {chosen_for}", **seconds, faster=faster, layers=layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (
        "encoder", "text", "sts", "stories", "story-ids", "iglm", "antibodies", "rxnmapper", "reactions", "students"
    )  # fmt: skip
    parser.add_argument("--unseen", type=Path, nargs="+", default=[])
    for name in names:
        parser.add_argument(f"--{name}", type=Path, default=None)
    parser.add_argument("--only", default="texts,sentences,stories,antibodies,reactions")
    parser.add_argument("--json", default=None)
    parser.add_argument("--species", default="HUMAN")
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--calibration-tokens", type=int, default=0, help="of the texts to convert with; 0: the length")
    parser.add_argument("--texts", type=int, default=4, help="of each unseen file and length")
    parser.add_argument("--speed-lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--chosen-for", type=int, nargs="+", default=[2048], help="lengths for the language models")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    unknown = set(only) - set(SECTIONS)
    if unknown:
        parser.error(f"--only: {sorted(unknown)} are no sections; expected some of {SECTIONS}")
    study, choices = Study(arguments.json), {}
    if "texts" in only:
        choices = texts(study, arguments)
    if "sentences" in only:
        if not choices and arguments.students:
            choices = {int(folder.name): kept_choice(folder) for folder in sorted(arguments.students.iterdir())}
        sentences(study, arguments, choices)
    for function in (stories, antibodies, reactions, speed):
        if function.__name__ in only:
            function(study, arguments)


if __name__ == "__main__":
    main()
