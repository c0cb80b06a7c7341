"""`subquad plan`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.terminal import progress, refuse_description, user_errors
from subquad.files import check_writable

if TYPE_CHECKING:
    from subquad.planning.answer import Plan

__all__ = ["plan"]

_SAMPLE = 16384  # tokens of a described input that are made: a plan looks at no more


def plan(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Mechanisms to choose from; all if none is named.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="safetensors file with q, k [, v]: (batch, heads, length, width) each.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="What stands before q, k, v in the file: layer0 for layer0.q.")] = "",
    length: Annotated[int | None, typer.Option(min=1, help="Tokens to plan for; as in the file, or 4096.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads, where no file is given.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head, where no file is given.")] = 64,
    std: Annotated[float, typer.Option(help="Standard deviation of q and k, where no file is given.")] = 0.5,
    anisotropy: Annotated[
        float, typer.Option(help="a: the standard deviation of coordinate i is proportional to i^-a; 0: isotropic.")
    ] = 0.0,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    target_error: Annotated[float, typer.Option(help="Relative squared error to stay below.")] = 0.05,
    time_budget: Annotated[float | None, typer.Option(help="Seconds for one sequence with all heads.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Also: how long a model of this many layers would take.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of that model.")] = 1,
    mlp_ratio: Annotated[float, typer.Option(min=0.0, help="Width of its feed-forward over its own.")] = 4.0,
    training: Annotated[bool, typer.Option("--training", help="Its forward and backward.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="Every setting with its options and errors.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
) -> None:
    """What to use for given queries and keys: errors measured on them, ranked by time; softmax where nothing will do.

    The queries and keys come from a file, or from a description. With --layers, also how long a whole model would take
    at that length, with each recommended mechanism and with softmax attention. Times are of this machine.
    """
    import subquad
    from subquad.lab import gaussian_inputs, machine, read_inputs, write_json

    with user_errors(), progress("planning") as step:
        if json is not None:
            check_writable("--json", json)
        if layers is None and (batch != 1 or mlp_ratio != 4.0 or training):
            raise ValueError("--batch, --mlp-ratio and --training are of a whole model: say how many --layers it has")
        if file is not None:
            refuse_description(context, "heads", "head_dim", "std", "anisotropy")
            inputs = read_inputs(file, prefix)
            source = inputs.source
        else:
            length = 4096 if length is None else length
            sample = min(length, _SAMPLE)
            inputs = gaussian_inputs(
                sample, heads=heads, head_dim=head_dim, std=std, anisotropy=anisotropy, seed=seed
            )  # fmt: skip
            source = inputs.source
        answer = subquad.plan(
            inputs.q, inputs.k, inputs.v,
            target_error=target_error, length=length, is_causal=causal, key_mask=inputs.key_mask,
            mechanisms=names or None, time_budget=time_budget, seed=seed, on_step=step,
        )  # fmt: skip
        record: dict[str, Any] = {"source": source, "machine": machine(), **answer.as_dict()}
        text = f"{answer.details if verbose else answer}\n{source}"
        if layers is not None:
            model = {"layers": layers, "batch": batch, "training": training, "mlp_ratio": mlp_ratio}
            times = _model_times(answer, inputs.q.shape[-1], model)
            record["model"] = {**model, "times": times}
            kind = "training step" if training else "forward pass"
            text += f"\n\na {kind} of {layers} layers, batch {batch}, at length {answer.length}:"
            text += "".join(f"\n  {line['label']}: {line['shown']}" for line in times)
    print(text)
    if json is not None:
        with user_errors():
            write_json(json, record)
        print(f"every number: {json}", file=sys.stderr)


def _model_times(answer: "Plan", head_dim: int, model: dict[str, Any]) -> list[dict[str, Any]]:
    """A whole model with the recommended mechanism, if there is one, and with softmax attention."""
    from subquad.planning.cost import predict_time

    chosen = [answer.exact] if answer.best in (None, answer.exact) else [answer.best, answer.exact]
    found = []
    for choice in chosen:
        mechanism = choice.create(head_dim, answer.heads, seed=0)
        estimate = predict_time(
            mechanism, answer.length, heads=answer.heads, head_dim=head_dim, is_causal=answer.is_causal, **model
        )
        found.append({"label": choice.label, "seconds": estimate.seconds, "low": estimate.low, "high": estimate.high,
                      "shown": str(estimate)})  # fmt: skip
    return found
