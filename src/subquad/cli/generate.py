"""`subquad generate`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.terminal import user_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["generate"]


def _tokenizer(folder: Path, config: dict[str, Any]) -> "PreTrainedTokenizerBase":
    from subquad.hf.models.tokenization import saved_tokenizer

    found = saved_tokenizer(folder)
    if found is None:
        size = config.get("vocab", config.get("vocab_size"))
        raise ValueError(
            f"{folder} has no tokenizer, and its vocabulary of {size} is not known to be that of bytes; save "
            "one there with tokenizer.save_pretrained(folder), for example subquad.hf.ByteTokenizer()"
        )
    return found


def _model(folder: Path, config: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    from subquad.hf import SubquadForCausalLM

    if config.get("model_type") == "subquad":
        return SubquadForCausalLM.from_pretrained(folder, local_files_only=True)
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def _trained(folder: Path) -> tuple[Any, "PreTrainedTokenizerBase"]:
    """The newest checkpoint of a run that `subquad train text` left behind."""
    from subquad.hf import ByteTokenizer, SubquadForCausalLM
    from subquad.tasks.heads import CausalModel
    from subquad.train import load_trained

    run, model, _ = load_trained(folder)
    if run.task.name != "text" or not isinstance(model, CausalModel) or model.backbone.config.vocab != 256:
        raise ValueError(
            f"{folder} is a run of the task {run.task.name!r} without a model that continues text; expected one of "
            "'text' on bytes that is not masked, or a folder written by save_pretrained"
        )
    return SubquadForCausalLM.from_nn(model.backbone), ByteTokenizer()


def _open(folder: Path) -> tuple[Any, "PreTrainedTokenizerBase"]:
    """Model and tokenizer, whoever wrote the folder."""
    from subquad.hf.conversion.restoring import read_config  # its package also registers the model classes

    if not (folder / "config.json").is_file():
        if (folder / "run.json").is_file():
            return _trained(folder)
        kind = "holds no config.json" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {kind}; expected a folder written by save_pretrained or by `subquad train text`")
    config = read_config(folder)
    tokenizer = _tokenizer(folder, config)
    return _model(folder, config).eval(), tokenizer


def _check_length(model: Any, prompt: int, tokens: int) -> None:
    """Refuse a text that will not fit learned positions before the first token, not in the middle of it."""
    from subquad.hf.conversion.positions import learned_positions

    most = getattr(model.config, "max_positions", None) or learned_positions(model)
    if most is not None and prompt + tokens > most:
        raise ValueError(
            f"the prompt has {prompt} tokens and --tokens asks for {tokens} more, but the model learned {most} "
            f"positions; use --tokens {max(most - prompt, 0)} or less, or a shorter prompt"
        )


def _standard_input() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales bytes that are no UTF-8 come as lone surrogates
        return text
    except UnicodeError as error:
        raise ValueError(f"--prompt -: standard input is not UTF-8 ({error}); convert it first") from None


def generate(
    folder: Annotated[Path, typer.Argument(help="A folder written by save_pretrained, or by `subquad train text`.")],
    prompt: Annotated[str, typer.Option(help="The text to continue; - reads it from standard input.")],
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens to produce.")] = 200,
    sample: Annotated[bool, typer.Option("--sample", help="Draw tokens at random; else the most likely.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="Of sampling; below 1: closer to the most likely token. Implies --sample.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from the k most likely. Implies --sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this much probability. Implies --sample.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam search over so many texts; printed at the end.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue a text with a saved model; tokens are printed as they come."""
    from subquad.mechanisms import Mechanism
    from subquad.nn.generation import check_sampling

    with user_errors():
        check_sampling(1.0 if temperature is None else temperature, top_k, top_p)
        if temperature == 0:
            raise ValueError("--temperature 0: for greedy decoding leave out --temperature")
        from transformers import TextStreamer, set_seed
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model, tokenizer = _open(folder)
        text = _standard_input() if prompt == "-" else prompt
        encoded = tokenizer(text, return_tensors="pt")
        if encoded["input_ids"].numel() == 0:
            raise ValueError("--prompt is empty: give at least one character to continue")
        _check_length(model, encoded["input_ids"].shape[1], tokens)
        drawing = sample or any(option is not None for option in (temperature, top_k, top_p))
        options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": drawing, "num_beams": beams}
        # Without a state there is nothing to keep in a cache: every token computes all of them again.
        options["use_cache"] = all(one.recurrent for one in model.modules() if isinstance(one, Mechanism))
        if drawing:
            options.update(temperature=temperature or 1.0, top_k=top_k or 0, top_p=1.0 if top_p is None else top_p)
        if tokenizer.pad_token_id is not None:
            options["pad_token_id"] = tokenizer.pad_token_id
        set_seed(seed)
        if beams == 1:
            options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        try:
            made = model.generate(encoded["input_ids"], attention_mask=encoded["attention_mask"], **options)
        except KeyboardInterrupt:
            print()  # what was printed so far stays
            raise typer.Exit(130) from None
        if beams > 1:
            new = made[0, encoded["input_ids"].shape[1] :]
            print(tokenizer.decode(new, skip_special_tokens=True))
