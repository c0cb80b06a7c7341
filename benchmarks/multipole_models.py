"""Multipole attention in whole models, without training: what they lose; errors that are kept; fine-tuning.

    python benchmarks/multipole_models.py --stories DIR --story-ids FILE [--iglm DIR] [--encoder DIR --text FILE]
        [--rxnmapper DIR --reactions FILE] [--only models,errors,tuning]

DIR are models of `transformers`: a Llama on stories with their token ids (a JSON list of lists), a GPT-2 on antibodies,
which samples its own input, a sentence encoder, and an ALBERT of reactions (one per line of FILE). All but the encoder
read at most 512 tokens, where the default chunk of 512 keys makes everything exact, so shorter chunks stand beside it.
Errors are relative squared errors per head.
"""

import argparse
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversion_call import texts_of
from conversion_data import (
    cosine,
    extended,
    masked_accuracy,
    padded,
    reaction_batches,
    written_out,
)
from multipole import Layer, relative
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import subquad as sq
from subquad.lab.inputs import gaussian_inputs
from subquad.lab.quality import embeddings
from subquad.lab.report.sections.error import DATA

ERRORS = (0.003, 0.01, 0.03, 0.1)
SHORT: dict[str, Any] = {"chunk": 64, "clusters": 8}


def captured(model: nn.Module, ids: Tensor) -> list[Layer]:
    """q, k, v (B, H, L, D) of every layer for ids (B, L), key heads repeated."""
    found: list[Layer] = []
    real = F.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> Tensor:
        times = q.shape[1] // k.shape[1]
        found.append((q.clone(), k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)))
        return real(q, k, v, *args, **named)

    F.scaled_dot_product_attention = seen
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        F.scaled_dot_product_attention = real
    return found


def decoder(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True, attn_implementation="sdpa").eval()


def sampled(model: Any, count: int, length: int) -> Tensor:
    """Tokens (count, length) that the model writes after its first two conditions."""
    torch.manual_seed(0)
    start = torch.tensor([[5, 7]] * count)
    return model.generate(
        start, do_sample=True, max_length=length, min_length=length, pad_token_id=0, eos_token_id=None
    )


def story_rows(path: Path, length: int) -> list[list[int]]:
    """All stories one after the other, cut into rows."""
    tokens = [token for story in json.loads(path.read_text(encoding="utf-8")) for token in story]
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)]


def inputs(args: argparse.Namespace) -> Iterator[tuple[str, bool, dict[str, Any], list[Layer]]]:
    """Name, causal, options, layers."""
    rows = story_rows(args.story_ids, 512)
    yield "stories260K", True, SHORT, captured(decoder(args.stories), torch.tensor(rows[-4:]))
    if args.iglm:
        model = decoder(args.iglm)
        yield "IgLM", True, SHORT, captured(model, sampled(model, 4, 256))
    for data in DATA:
        made = gaussian_inputs(
            data.length, heads=data.heads, head_dim=data.head_dim, std=data.std, anisotropy=data.anisotropy, seed=1
        )
        v = torch.randn(made.k.shape, generator=torch.Generator().manual_seed(2))
        for causal in (False, True):
            yield data.words, causal, {"chunk": 256, "clusters": 16}, [(made.q, made.k, v)]


def perplexity(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    total, count = 0.0, 0
    for batch in batches:
        ids, real = batch["input_ids"], batch["attention_mask"][:, 1:].bool()
        logits = model(**batch).logits[:, :-1]
        total += float(F.cross_entropy(logits[real], ids[:, 1:][real], reduction="sum"))
        count += int(real.sum())
    return math.exp(total / count)


def models(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each model loses with default options, and with chunks short enough that its inputs have several."""
    stories = [row for row in json.loads(args.story_ids.read_text(encoding="utf-8")) if len(row) > 128]
    made: list[tuple[str, nn.Module, Any, list[dict[str, Any]]]] = [
        ("stories260K: perplexity", decoder(args.stories), perplexity, padded(sorted(stories, key=len), 8))
    ]
    if args.iglm:
        model = decoder(args.iglm)
        rows = padded(sampled(model, 32, 256).tolist(), 8)
        made.append(("IgLM, its own samples: perplexity", model, perplexity, rows))
    if args.rxnmapper:
        model = written_out(AutoModelForMaskedLM.from_pretrained(str(args.rxnmapper)).eval())
        _, unseen, _ = reaction_batches(args.reactions, args.rxnmapper, unseen=400, lessons=1)
        made.append(("reactions: masked accuracy", model, masked_accuracy, unseen))
    found = []
    for name, model, measure, batches in made:
        exact = measure(model, batches)
        for options in ({}, *({"chunk": 32, "clusters": 8, "exact_keys": keys} for keys in (16, 32, 64))):
            student, _ = sq.hf.convert(copy.deepcopy(model), "multipole", seed=0, **options)
            value = measure(student, batches)
            found.append({"model": name, "options": options, "exact": exact, "multipole": value})
            lost = f"{100 * (exact - value):.2f} points" if measure is masked_accuracy else f"{value / exact - 1:+.2%}"
            print(f"{name:36} {options or 'default options'}: exact {exact:.4f}, {value:.4f} ({lost})", flush=True)
    if args.encoder:
        tokenizer = AutoTokenizer.from_pretrained(str(args.encoder))
        for length in (512, 2048, 8192):
            model = extended(AutoModel.from_pretrained(str(args.encoder)).eval(), length)
            batches = texts_of(args.text, tokenizer, length, max(4, 4096 // length))
            student, _ = sq.hf.convert(copy.deepcopy(model), "multipole", seed=0)
            value = cosine(embeddings(student, batches), embeddings(model, batches))
            found.append({"model": "encoder", "length": length, "cosine": value, "texts": len(batches)})
            print(
                f"encoder, {length} tokens: cosine to the exact embedding {value:.4f}, {len(batches)} texts", flush=True
            )
    return found


def kept_errors(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, causal, options, layers in inputs(args):
        for error in ERRORS:
            attn = sq.create("multipole", layers[0][0].shape[-1], error=error, seed=0, **options)
            ratios, keys, far = [], 0.0, 0.0
            for layer in layers:
                exact = F.scaled_dot_product_attention(*layer, is_causal=causal)
                ratios.append(relative(attn(*layer, is_causal=causal), exact, (-1, -2)).flatten() / error)
                keys += float(attn.inspect(*layer, is_causal=causal).exact_keys.float().mean()) / len(layers)
                length = layer[1].shape[2]
                far = length / 2 if causal else float(length)
            ratio = torch.cat(ratios)
            rows.append(
                {
                    "input": name, "causal": causal, "error": error, "median": float(ratio.median()),
                    "largest": float(ratio.max()), "within_2x": float((ratio <= 2).float().mean()), "keys": keys,
                    "visible": far,
                }
            )  # fmt: skip
            print(
                f"{name:42} {'causal' if causal else 'full':7} error={error:<6} measured over asked: median "
                f"{ratio.median():.2f}, largest {ratio.max():.2f}, at most 2 in {rows[-1]['within_2x']:.0%} of heads; "
                f"exact keys {keys:.0f} of {far:.0f}",
                flush=True,
            )
    return rows


def tuning(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Loss of the same steps on the same stories, exact and with multipole attention; the last ones for validation."""
    rows = story_rows(args.story_ids, 256)
    train, unseen = torch.tensor(rows[:-12]), torch.tensor(rows[-12:])
    model = decoder(args.stories)
    # Weights away from their optimum, so that there is something to learn.
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x += 0.1 * x.std() * torch.randn_like(x) if x.dim() > 1 else 0.0
    students = {"exact": copy.deepcopy(model)}
    for clusters, keys in ((8, 16), (8, 8)):
        options = {"chunk": 32, "clusters": clusters, "exact_keys": keys, "seed": 0}
        students[f"multipole, {keys} exact keys"] = sq.hf.convert(copy.deepcopy(model), "multipole", **options)[0]
    students["window 32"] = sq.hf.convert(copy.deepcopy(model), "local", window=32)[0]

    found = []
    for name, student in students.items():
        optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4)
        g = torch.Generator().manual_seed(1)
        losses = []
        student.train()
        for _ in range(args.steps):
            ids = train[torch.randint(len(train), (4,), generator=g)]
            loss = student(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        student.eval()
        with torch.no_grad():
            last = float(student(input_ids=unseen, labels=unseen).loss)
        found.append({"attention": name, "losses": losses, "validation": last})
        exact = torch.tensor(found[0]["losses"])
        away = (torch.tensor(losses) - exact).abs()
        print(
            f"{name:28} loss {losses[0]:.4f} -> {sum(losses[-20:]) / 20:.4f} (mean of the last 20), unseen {last:.4f}; "
            f"away from exact: mean {away.mean():.4f}, largest {away.max():.4f}",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True)
    parser.add_argument("--story-ids", type=Path, required=True)
    parser.add_argument("--iglm", type=Path)
    parser.add_argument("--encoder", type=Path, help="with --text")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rxnmapper", type=Path, help="with --reactions")
    parser.add_argument("--reactions", type=Path)
    parser.add_argument("--only", default="models,errors,tuning")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = {}
    for name in args.only.split(","):
        print(f"-- {name}")
        with torch.set_grad_enabled(name == "tuning"):
            results[name] = {"models": models, "errors": kept_errors, "tuning": tuning}[name](args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
