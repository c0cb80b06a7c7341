"""`subquad convert`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.terminal import given, numbers, progress, user_errors
from subquad.files import check_writable

if TYPE_CHECKING:
    from subquad.hf.conversion.report import ConversionReport

__all__ = ["convert"]

# Documents per batch, and the share of the text that nothing but the figures before and after sees.
_BATCH, _HELD_OUT = 8, 5


def _layers(text: str | None) -> list[int | str] | None:
    """`0,2,4-7` or names, separated by commas."""
    if text is None:
        return None
    found: list[int | str] = []
    for part in (piece.strip() for piece in text.split(",")):
        first, dash, last = part.partition("-")
        if dash and first.isdigit() and last.isdigit():
            if int(first) > int(last):
                raise ValueError(f"--layers {part}: the range is empty; write {last}-{first}")
            found += range(int(first), int(last) + 1)
        else:
            found.append(int(part) if part.lstrip("-").isdigit() else part)
    return found


def _check_target(model: str, out: Path) -> None:
    """Refuse to write over the model that is read, or over a file, before minutes are spent on it."""
    if out.exists() and Path(model).exists() and out.samefile(model):
        raise ValueError(
            f"--out {out} is the folder of the model itself: its weights would be overwritten. Name another folder"
        )
    if (out / "config.json").is_file():
        raise ValueError(f"--out {out} holds a model already, which would be overwritten. Name another folder")
    check_writable("--out", out, folder=True)


def _documents(file: Path, tokenizer: Any, config: Any, longest: int, least: int) -> list[list[int]]:
    from subquad.lab.quality import read_documents

    documents = read_documents(file, tokenizer, longest)
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    largest = max((max(document) for document in documents), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(f"{file} holds the token id {largest}; the model knows 0 to {vocabulary - 1}")
    if len(documents) < least:
        raise ValueError(
            f"{file} holds {len(documents)} documents; at least {least} of two or more tokens are needed: lists of "
            "token ids, or texts separated by empty lines (by line ends where there are none)"
        )
    return documents


def _without(documents: list[list[int]], aside: list[list[int]], file: Path) -> list[list[int]]:
    """The documents that are not among those kept aside, wherever those come from: one file may serve twice."""
    kept = {tuple(document) for document in aside}
    rest = [document for document in documents if tuple(document) not in kept]
    if not rest:
        raise ValueError(f"{file}: every document is among those kept aside for the figures; give more, or others")
    return rest


def _read(folder: str) -> tuple[Any, Any, Any]:
    """The model of a folder, the transformers model in it, which is the same unless it is a sentence encoder, and its
    tokenizer; None for a model that takes token ids."""
    from subquad.hf.conversion.attachment import outermost
    from subquad.hf.conversion.restoring import is_converted, saved_class
    from subquad.hf.models.tokenization import saved_tokenizer

    encodes = (Path(folder) / "modules.json").is_file()
    if (not encodes or (Path(folder) / "config.json").is_file()) and is_converted(folder):
        raise ValueError(f"{folder} holds a converted model; convert the folder that it was made from")
    if not encodes:
        model = saved_class(folder).from_pretrained(folder).eval()
        return model, model, saved_tokenizer(folder)
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError:
        raise ValueError(f"{folder} is a sentence encoder: pip install sentence-transformers to convert it") from None
    encoder = SentenceTransformer(folder, device="cpu", local_files_only=True).eval()
    inner = next(outermost(encoder), None)
    if inner is None:
        raise ValueError(f"{folder} is a sentence encoder without a transformers model: it has no attention")
    return encoder, inner, encoder.tokenizer


def _judge(exact: Any, inner: Any, tokenizer: Any, held: list[Any]) -> tuple[str, Callable[[Any], float]]:
    """The score that fits the model, and the function that gives it for a model; sentence encoders are judged by what
    they encode to."""
    from subquad.lab.quality import kind_of, score

    mask_token, special = getattr(tokenizer, "mask_token_id", None), list(getattr(tokenizer, "all_special_ids", []))
    kind = kind_of(exact, mask_token)
    if inner is exact:
        return kind, lambda one: score(kind, one, held, exact=exact, mask_token=mask_token, special=special)
    from subquad.hf.conversion.sentences import sentence_cosine

    return kind, lambda one: sentence_cosine(one, exact, held)


def _needs_more_than_text(model: Any) -> bool:
    """Whether token ids of one text are not an input of this model."""
    config = model.config
    return bool(getattr(config, "is_encoder_decoder", False)) or getattr(model, "main_input_name", "") != "input_ids"


def _longest(model: Any, config: Any, tokenizer: Any, length: int | None) -> int:
    """Tokens of a document at the most: as many as the model takes, up to 2048 or the length to choose for."""
    text = config.get_text_config()
    known = [
        *(getattr(text, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)),
        *(getattr(model, "max_seq_length", None), max(2048, length or 0)),  # the first: of a sentence encoder
    ]
    # RoBERTa counts its positions from the padding token's number on.
    room = min(x for x in known if isinstance(x, int) and x > 0)
    return room - 2 if room > 4 and text.model_type in ("roberta", "xlm-roberta", "camembert") else room


def convert(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a transformers model or a sentence encoder.")],
    out: Annotated[Path, typer.Option(help="Folder for the converted model and report.json.")],
    text: Annotated[
        Path | None,
        typer.Option(help="Text, or JSON lists of token ids: choose the fastest mechanisms within --error."),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(
            help="With --text: largest error of the model's output (0.01); without: multipole's error= of each layer."
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens to choose for, with --text; those of the texts.")
    ] = None,
    mechanism: Annotated[
        str | None, typer.Option(help="A name, name:option=value:..., or JSON; multipole if there is no --text.")
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the mechanism, name=value; repeat it.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Attention layers, like 0,2,4-7; all that can be if absent.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Text (documents separated by empty lines), or JSON lists of token ids.")
    ] = None,
    distill: Annotated[Path | None, typer.Option(help="Text to train the converted layers on.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of distillation.")] = 100,
    lora_steps: Annotated[int, typer.Option(min=0, help="Further steps with LoRA on q, k, v, o.")] = 0,
    lengths: Annotated[str, typer.Option(help="Lengths for time and memory, separated by commas.")] = "512,2048,8192",
    speed: Annotated[bool, typer.Option(help="Measure time and memory against length.")] = True,
    documents: Annotated[int, typer.Option(min=2, help="At most this many documents per file.")] = 400,
) -> None:
    """Replace the attention of a pretrained model and say what it costs: error, quality, time and memory."""
    import copy

    import torch
    from transformers.utils import logging

    from subquad import hf
    from subquad.hf.conversion.attachment import outermost
    from subquad.hf.distillation.distilling import distill as run_distillation
    from subquad.hf.distillation.trainable import learns
    from subquad.lab import machine, write_json
    from subquad.lab.converted import memory_of, pays_from, time_models
    from subquad.lab.quality import KINDS, to_batches
    from subquad.train.choices import parse_mechanism, parse_pairs

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with user_errors(), progress("converting") as step:
        if text is not None and calibrate is not None:
            raise ValueError("--text and --calibrate both name texts to measure on: give --text alone")
        if text is not None and (mechanism is not None or option):
            raise ValueError(
                "--text chooses the mechanisms, and --mechanism or --option names one: to measure one on texts, give "
                "these as --calibrate"
            )
        if error is not None and not 0 < error < 1:
            raise ValueError(f"--error {error:g} must be between 0 and 1: it is relative to the exact output")
        if text is None and length is not None:
            raise ValueError(
                f"--length {length} is what mechanisms are chosen for, with --text; give that, or leave it out"
            )
        if distill is None and lora_steps:
            raise ValueError("--lora-steps come after a distillation: name a text to train on with --distill")
        read = text is not None or calibrate is not None or distill is not None
        for name, used, why in (
            ("steps", distill is not None, "are of a distillation: name a text to train on with --distill"),
            ("documents", read, "limits what is read of texts, and none is named"),
            ("lengths", speed, "are for the times that --no-speed leaves out"),
        ):
            if name in given(context) and not used:
                raise ValueError(f"--{name} {why}")
        pairs = parse_pairs("--option", option or [])
        chosen = None if text is not None else parse_mechanism("multipole" if mechanism is None else mechanism, pairs)
        calibrate = text if text is not None else calibrate
        at, wanted = numbers(lengths), _layers(layers)
        for file in (calibrate, distill):
            if file is not None and not file.is_file():
                raise ValueError(f"{file}: there is no such file")
        _check_target(model, out)
        step("loading the model", 0, 5)
        # Draws without a seed are the same in every run, so that an interrupted one can go on.
        torch.manual_seed(0)
        exact, inner, tokenizer = _read(model)
        longest = _longest(exact, inner.config, tokenizer, length)
        if (calibrate is not None or distill is not None) and _needs_more_than_text(inner):
            raise ValueError(
                f"{type(inner).__name__} takes more than one text (images, sounds, or what its decoder is to say): "
                "convert it in Python, sq.hf.convert(model, calibration=batches), with batches as the model takes them"
            )
        padding = getattr(inner.config.get_text_config(), "pad_token_id", None) or 0
        held: list[dict[str, torch.Tensor]] = []
        aside: list[list[int]] = []
        batches, training = None, None
        if calibrate is not None:
            texts = _documents(calibrate, tokenizer, inner.config, longest, 2 * _BATCH)[:documents]
            aside = texts[::_HELD_OUT]
            held = to_batches(aside, _BATCH, padding)
            batches = to_batches(_without(texts, aside, calibrate), _BATCH, padding)
        if distill is not None:
            texts = _documents(distill, tokenizer, inner.config, longest, _BATCH)
            training = to_batches(_without(texts, aside, distill)[:documents], _BATCH, padding)
        step("calibrating and measuring each layer", 1, 5)
        unfinished = out / "choice.unfinished"
        choosing: dict[str, Any] = {"resume": unfinished, "progress": step} if chosen is None else {}
        converted, report = hf.convert(
            copy.deepcopy(exact), chosen, layers=wanted, calibration=batches, error=error, length=length,
            **choosing,
        )  # fmt: skip
        record: dict[str, Any] = {"model": model, "mechanism": chosen, "layers": report.as_dict(), "machine": machine()}
        print(report)
        write_json(out / "report.json", record)
        if not report.converted:
            unfinished.unlink(missing_ok=True)
            print(f"no model was written; every number: {out / 'report.json'}", file=sys.stderr)
            return

        if held:
            kind, judge = _judge(exact, inner, tokenizer, held)
            step(f"{kind} on {sum(len(b['input_ids']) for b in held)} held-out documents", 2, 5)
            values = {"exact": judge(exact), "converted": judge(converted)}
            for name, choice in _baselines(report).items():
                values[name] = judge(hf.convert(copy.deepcopy(exact), choice, layers=report.converted)[0])
        if training is not None and not lora_steps and not learns(converted):
            print("--distill: these mechanisms have nothing to train; --lora-steps trains the projections around them")
            training = None
        if training is not None:
            step("distilling", 3, 5)
            learned = run_distillation(
                exact, converted, training, steps=steps, lora_steps=lora_steps,
                checkpoint=out / "distillation.checkpoint", progress=step,
            )  # fmt: skip
            record["distillation"] = learned.as_dict()
            if held:
                values["distilled"] = judge(converted)
        if held:
            record["quality"] = {"score": kind, **values}
            print(f"\n{kind} ({KINDS[kind]})")
            for name, value in values.items():
                print(f"  {name:<12} {value:.4f}")
        if inner is not exact:
            converted.save(str(out))  # with its pooling and tokenizer
        else:
            converted.save_pretrained(out)
            if tokenizer is not None:
                tokenizer.save_pretrained(out)
        unfinished.unlink(missing_ok=True)
        write_json(out / "report.json", record)
        if speed and _needs_more_than_text(inner):
            print(f"times were not measured: {type(inner).__name__} takes more than one text", file=sys.stderr)
        elif speed:
            step("time against length", 4, 5)
            rows = time_models(inner, next(outermost(converted)), at)
            for name, folder in (("exact", Path(model)), ("converted", out)):
                for row, found in zip(rows, memory_of(folder, at), strict=False):
                    row[f"{name}_bytes"] = found.get("bytes")
            record["speed"], record["pays_from"] = rows, pays_from(rows)
            _print_speed(rows, record["pays_from"])
        write_json(out / "report.json", record)
    print(f"the converted model and every number: {out}", file=sys.stderr)


def _baselines(report: "ConversionReport") -> dict[str, Any]:
    """What any conversion must beat, in the same layers: the mean of the values, and the window alone."""
    from subquad.lab.quality import Uniform

    configs = [layer.mechanism for layer in report.layers if layer.mechanism is not None]
    found: dict[str, Any] = {"uniform": Uniform}
    windows = [config["window"] for config in configs if isinstance(config.get("window"), int)]
    if windows and len(windows) == len(configs):
        sinks = max(int(config.get("sinks") or 0) for config in configs)
        found["window only"] = {"mechanism": "local", "window": max(windows), "sinks": sinks}
    return found


def _print_speed(rows: list[dict[str, Any]], start: float | None) -> None:
    print(f"\n{'length':>8} {'exact ms':>10} {'converted ms':>13} {'faster':>7} {'exact MB':>9} {'converted MB':>13}")
    for row in rows:
        if "error" in row:
            print(f"{row['length']:>8} {row['error']}")
            continue
        megabytes = [row.get(f"{name}_bytes") for name in ("exact", "converted")]
        shown = ["" if x is None else f"{x / 1e6:.0f}" for x in megabytes]
        gain = row["exact_ms"] / row["converted_ms"]
        print(
            f"{row['length']:>8} {row['exact_ms']:>10.1f} {row['converted_ms']:>13.1f} {gain:>6.2f}x "
            f"{shown[0]:>9} {shown[1]:>13}"
        )
    if not rows:
        return
    shortest, longest = rows[0]["length"], rows[-1]["length"]
    if start is None:
        print(f"not faster up to {longest} tokens")
    elif start <= shortest:
        print(f"faster at every length measured, {shortest} tokens and more")
    else:
        print(f"faster from about {start:.0f} tokens on")
