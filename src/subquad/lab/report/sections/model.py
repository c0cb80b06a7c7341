"""What the layers of a real model see on a text, how wrong each mechanism would be there, and a plan per layer.

Without `--model` these are the heads that the library ships (`lab/captured.py`). With it the model is loaded from a
folder on this machine, never from elsewhere, and runs as it is; queries, keys and values are taken down on the way.
Errors are of the layer's own outputs, without any training.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subquad.lab.captured import captured_inputs, origin
from subquad.mechanisms import MECHANISMS, create
from subquad.plain_text import first_line
from subquad.planning.candidates import DEGREE_1, PLANNABLE, SDERF, calibrated
from subquad.planning.piece import Piece
from subquad.planning.planner import plan

from ..figure import Figure, Line
from ..formatting import dot
from ..notebook import Notebook
from ..running import ERRORS, Clock, Job
from ..section import Section
from ..settings import Settings

__all__ = ["TEXT", "Captured", "Layer", "captured", "layers", "section", "shipped", "source"]

NAME = "model"
TARGET = 0.05
MOST_TOKENS = 1024
MOST_WINDOWS = 4
DRAWS = 3

# (key of the colour, words, mechanism, options): one setting per mechanism that needs no training.
TRIED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("multipole", "multipole, default options", "multipole", {}),
    ("hyperbolic", "performer hyperbolic 256", "performer", {"num_features": 256}),
    ("sderf", "performer SDERF 256", "performer", {**SDERF, "num_features": 256}),
    ("taylor", "taylor degree 1", "taylor", {"degree": 1, "center": True}),
    ("hermite-2", "taylor Hermite 2", "taylor", {"degree": 2, "hermite": True}),
    ("hybrid", "hybrid window 32 + degree 1", "hybrid", {"window": 32, "sinks": 4, "far": DEGREE_1}),
    ("local", "local window 32", "local", {"window": 32}),
    ("nystrom", "nystrom 32", "nystrom", {"landmarks": 32}),
    ("improved-clustered", "improved-clustered 100", "improved-clustered", {"clusters": 100}),
)

TEXT = """
Attention compares every word of a text with every other. For a sentence this is nothing; for a book it is everything,
because the work grows with the square of the length. Methods that avoid the square all make the same bargain: they
give up the exact comparison and keep a summary. What the summary loses depends on the text. A legal contract refers to
definitions forty pages earlier, and a summary that forgets names will misread it. A weather log repeats itself, and a
summary of its averages is nearly the log itself. A novel does both: most sentences need only the ones before them, and
once in a chapter a detail from the first pages decides what a word means.

There are honest ways to find out which kind of text one has. Take the model as it is, let it read, and write down what
each of its layers looks at. Some heads look at the previous word and at nothing else. Some spread themselves over the
whole page so evenly that the mean of everything would do. A few are sharp: one word in a thousand has all the weight,
and it is a different word each time. The first kind is served by a window, the second by almost anything, the third by
exact attention or by training the model to do without.

In 1965 a clerk in Lyon kept a ledger of river levels, four times a day, in a hand so even that the pages could be
photographed and read by machine half a century later. On 3 March the entry is missing. The engineers who found the gap
wrote that the gauge had frozen; the clerk's daughter, asked in 2011, said that he had been at her birth. Nothing in the
four thousand entries around it says so. That is the difference between a series and a story, and it is why the question
of what may be forgotten has no answer that holds for all data.
"""


@dataclass(frozen=True)
class Layer:
    """What one layer saw: q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E)."""

    index: int
    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    scale: float


@dataclass(frozen=True)
class Captured:
    """Every layer of a model on a text; `key` tells two models or texts apart."""

    layers: Sequence[Layer]
    key: str
    words: str


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModel
    from transformers.utils import logging

    from subquad.hf.models.tokenization import saved_tokenizer  # importing it registers our own model classes

    logging.disable_progress_bar()  # there is a bar already
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {folder}: there is no config.json; expected a folder as save_pretrained writes it (config.json, "
            "model.safetensors and the tokenizer's files)"
        )
    try:
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    except Exception as error:  # transformers raises many kinds; all of them mean that the folder cannot be used
        raise ValueError(f"--model {folder}: the model cannot be loaded: {first_line(error)}") from error
    try:
        tokenizer = saved_tokenizer(folder)
    except Exception as error:
        raise ValueError(f"--model {folder}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if tokenizer is None:
        raise ValueError(f"--model {folder}: there is no tokenizer; save one there with tokenizer.save_pretrained")
    return model, tokenizer


def _windows(model: Any, tokenizer: Any, text: str, where: str) -> Tensor:
    """Token numbers (windows, length): as many full windows as there are, or the one that there is."""
    tokens = tokenizer(text, add_special_tokens=True, truncation=False, verbose=False)["input_ids"]
    if len(tokens) < 8:
        raise ValueError(f"{where}: {len(tokens)} tokens are too few to look at attention; a page of text is expected")
    limits = [getattr(model.config, name, None) for name in ("max_position_embeddings", "n_positions")]
    # RoBERTa and its relatives number positions from 2 on.
    length = min([MOST_TOKENS, len(tokens), *(limit - 2 for limit in limits if isinstance(limit, int) and limit > 10)])
    count = min(MOST_WINDOWS, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).view(count, length)


def captured(folder: Path, text: Path | None = None) -> Captured:
    """Load the model, read the text with it, and take down what its layers saw."""
    from subquad.hf import capture

    if text is None:
        where, words = "the built-in text", TEXT
    else:
        where = f"--text {text}"
        try:
            words = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: it cannot be read as UTF-8 text: {error}") from error
        if not words.strip():
            raise ValueError(f"{where}: the file is empty; a page of text or more is expected")
    model, tokenizer = _load(folder)
    windows = _windows(model, tokenizer, words, where)
    seen = [
        Layer(
            sample.layer, sample.name, torch.cat(sample.q).float(), torch.cat(sample.k).float(),
            torch.cat(sample.v).float(), sample.is_causal, sample.scale,
        )
        for sample in capture(model, [{"input_ids": windows}])
        if len(sample)
    ]  # fmt: skip
    if not seen:
        raise ValueError(f"--model {folder}: no attention layer ran on the text")
    weights = sorted((file.name, file.stat().st_size) for file in folder.glob("*.safetensors"))
    digest = hashlib.sha256(repr((str(folder.resolve()), weights, windows.tolist())).encode()).hexdigest()[:16]
    count, length = windows.shape
    kind = getattr(model.config, "model_type", type(model).__name__)
    shown = f"{kind} from {folder}: {len(seen)} layers on {where}, {count} × {length} tokens."
    return Captured(seen, digest, shown)


def _study(layer: Layer, settings: Settings) -> dict[str, Any]:
    tokens = layer.k.shape[2]
    piece = Piece(
        layer.q, layer.k, layer.v, tokens=tokens, is_causal=layer.is_causal, scale=layer.scale, key_mask=None,
        seed=settings.seed,
    )  # fmt: skip
    errors: dict[str, Any] = {}
    for key, _, name, options in TRIED:
        if name not in settings.names:
            continue
        own = {**options, "seed": settings.seed} if "seed" in MECHANISMS[name].options() else options
        try:
            attend = create(name, layer.q.shape[-1], layer.q.shape[1], layer.k.shape[1], **own)
            ready = calibrated(attend, layer.q, layer.k, None)
            errors[key] = {"error": piece.mean_error(ready, draws=DRAWS if "seed" in own else 1)}
        except (ValueError, TypeError, NotImplementedError) as error:
            errors[key] = {"refused": first_line(error)}
    names = [x for x in settings.names if x in PLANNABLE and (MECHANISMS[x].causal or not layer.is_causal)]
    chosen = plan(
        layer.q, layer.k, layer.v, target_error=TARGET, length=max(settings.lengths), is_causal=layer.is_causal,
        scale=layer.scale, mechanisms=names, seed=settings.seed,
    )  # fmt: skip
    return {"name": layer.name, "errors": errors, "plan": chosen.as_dict()}


def shipped() -> Captured:
    """The heads that the library ships, each as a layer of one head."""
    inputs, about = captured_inputs(), origin()
    assert inputs.v is not None
    scale = inputs.q.shape[-1] ** -0.5
    found = []
    for place, head in enumerate(about["heads"]):
        q, k, v = (x[:, place : place + 1] for x in (inputs.q, inputs.k, inputs.v))
        found.append(Layer(head["layer"], f"head {head['head']}", q, k, v, False, scale))
    words = f"{about['model']} reading {about['text']}: one head of each layer, {inputs.q.shape[2]} tokens."
    return Captured(found, "shipped", words)


def _jobs(settings: Settings, notebook: Notebook, seen: Captured) -> list[Job]:
    """One per layer."""
    found = []
    layers = seen.layers if seen.key != "shipped" else seen.layers[:: settings.shipped_step]
    for layer in layers:
        asked = {"model": seen.key, "words": seen.words, "layer": layer.index, "names": settings.names,
                 "length": max(settings.lengths), "seed": settings.seed}  # fmt: skip

        def run(clock: Clock, layer: Layer = layer) -> Mapping[str, Any]:
            with torch.no_grad():
                return _study(layer, settings)

        label, first = f"layer {layer.index} ({layer.name})", layer is seen.layers[0]
        quiet = 0.3 + 4e-4 * layer.k.shape[2] * min(8, layer.q.shape[1])
        found.append(Job(label, asked, run, quiet, ERRORS, first=first, cells=len(TRIED) + 1))
    return found


def _cells(notebook: Notebook) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return sorted(notebook.of(NAME), key=lambda cell: cell[0]["layer"])


def source(notebook: Notebook) -> str:
    """Which model, which text."""
    return next((asked["words"] for asked, _ in notebook.of(NAME)), "")


def layers(notebook: Notebook) -> list[dict[str, Any]]:
    """Per layer: what the plan says, its error, and that of the mean of the values."""
    rows = []
    for asked, result in _cells(notebook):
        best = result["plan"]["best"]
        uniform = result["plan"]["uniform"]
        rows.append(
            {
                "layer": asked["layer"], "name": result["name"], "uniform": uniform,
                "mechanism": "softmax" if best is None else best["mechanism"], "verdict": result["plan"]["verdict"],
                "length": asked["length"], "error": 0.0 if best is None else best["error"],
            }
        )  # fmt: skip
    return rows


def _figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Error of each mechanism against the layer."""
    cells = _cells(notebook)
    lines = []
    for key, words, name, _ in TRIED:
        points = {a["layer"]: r["errors"][key]["error"] for a, r in cells if "error" in r["errors"].get(key, {})}
        if points:
            notes = [f"error {y:.3g}" if y is not None else "diverged" for y in points.values()]
            lines.append(Line(key, words, list(points), list(points.values()), name, notes=notes))
    uniform = {asked["layer"]: result["plan"]["uniform"] for asked, result in cells}
    if uniform:
        lines.append(Line("uniform", "mean of the values", list(uniform), list(uniform.values()),
                          notes=[f"error {y:.3g}" for y in uniform.values()]))  # fmt: skip
    return [[Figure(
        "model-error", "Error of each mechanism, layer by layer",
        f"{html.escape(source(notebook))} Relative squared error of the layer’s own outputs when its attention is "
        "replaced without any training. Layers differ: what is harmless in one ruins another, so convert the easy ones "
        "first. Errors beyond 100 leave the figure.",
        "layer", "relative squared error of the output", lines, x_log=False, legend=True, y_max=100.0,
    )]]  # fmt: skip


def _table(notebook: Notebook, settings: Settings) -> str:
    """The plan of every layer."""
    rows = layers(notebook)
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td>{row['layer']}<small>{html.escape(row['name'])}</small></td>"
        f"<td>{dot(row['mechanism'])}{html.escape(row['verdict'])}</td><td>{row['uniform']:.2g}</td></tr>"
        for row in rows
    )
    return (
        f'<figure><h3>What each layer could use at {rows[0]["length"]:,} tokens</h3><div class="scroll">'
        '<table class="use plan"><thead><tr><th>layer</th><th>plan, for an error of at most '
        f"{TARGET:g}</th><th>error of the mean</th></tr></thead><tbody>{lines}</tbody></table></div>"
        "<figcaption>From <code>sq.plan</code> on what the layer saw; its times are its own, kept from one plan to the "
        "next. Where the mean of the values is already good, the layer attends to nearly everything alike, and almost "
        "any mechanism will do.</figcaption></figure>"
    )


def section(seen: Captured) -> Section:
    """The section about this model."""
    intro = "" if seen.key != "shipped" else (
        "Heads of a small sentence encoder on a play, as they are shipped with the library. "
        "<code>--model FOLDER</code> puts your own model here."
    )  # fmt: skip
    title = "A real model, layer by layer" if seen.key == "shipped" else "Your model, layer by layer"
    return Section(
        NAME, title, intro, lambda settings, notebook: _jobs(settings, notebook, seen), _figures, after=_table
    )
