"""`subquad error`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.terminal import numbers, progress, refuse_description, user_errors
from subquad.files import check_writable

__all__ = ["error"]

_MOST_TOKENS = 4096  # exact attention is quadratic


def error(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Further mechanisms beside the random features.")] = None,
    features: Annotated[
        str, typer.Option(help="trig, positive, hyperbolic, oprf, sderf, each with +antithetic or +center; or none.")
    ] = "trig,positive,hyperbolic,oprf,sderf",
    projections: Annotated[
        str, typer.Option(help="gaussian, orthogonal, hadamard-1, hadamard-3, simplex: every one with every feature.")
    ] = "orthogonal",
    num_features: Annotated[str, typer.Option(help="Numbers of features M.")] = "16,32,64,128,256,512,1024",
    file: Annotated[
        Path | None, typer.Option(help="safetensors file with q, k [, v]: (batch, heads, length, width) each.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="What stands before q, k, v in the file: layer0 for layer0.q.")] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens of synthetic inputs.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Heads of synthetic inputs.")] = 2,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head of synthetic inputs.")] = 64,
    std: Annotated[float, typer.Option(help="Standard deviation of synthetic q and k.")] = 0.5,
    anisotropy: Annotated[
        float, typer.Option(help="a: the standard deviation of coordinate i is proportional to i^-a; 0: isotropic.")
    ] = 0.0,
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention.")] = False,
    draws: Annotated[int, typer.Option(min=1, help="Independent projections per point.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="At most this many tokens are measured; all, up to 4096, if absent.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    json: Annotated[Path | None, typer.Option(help="Write every number to this file.")] = None,
) -> None:
    """Error against the number of features, measured, beside the baselines that must be beaten.

    On Gaussian inputs, or on the queries and keys of your own model in a safetensors file.
    """
    from subquad.lab import machine, write_json
    from subquad.lab.errors import ErrorLine, error_study, error_table
    from subquad.lab.inputs import gaussian_inputs, read_inputs

    def words(text: str) -> list[str]:
        return [] if text == "none" else [word.strip() for word in text.split(",")]

    with user_errors(), progress("measuring errors") as step:
        if features == "none" and not names:
            raise ValueError("--features none leaves nothing to measure; name mechanisms, like: error nystrom hybrid")
        if json is not None:
            check_writable("--json", json)
        calibration = None
        if file is not None:
            refuse_description(context, "length", "heads", "head_dim", "std", "anisotropy")
            inputs = read_inputs(file, prefix)
        else:
            law = {"heads": heads, "head_dim": head_dim, "std": std, "anisotropy": anisotropy}
            inputs = gaussian_inputs(length, **law, seed=seed)  # type: ignore[arg-type]
            # Calibrated features must not have seen what they are judged on.
            other = gaussian_inputs(length, **law, seed=seed + 1)  # type: ignore[arg-type]
            calibration = (other.q, other.k)

        def on_line(line: ErrorLine, done: int, total: int) -> None:
            found = ", ".join(f"{point.measured:.2g}" for point in line.points)
            step(f"{line.label}: {found}", done, total)

        study = error_study(
            inputs.q, inputs.k, inputs.v,
            features=words(features), projections=words(projections), mechanisms=names or [],
            num_features=numbers(num_features), is_causal=causal, key_mask=inputs.key_mask, calibration=calibration,
            draws=draws, tokens=_MOST_TOKENS if tokens is None else tokens, seed=seed, on_line=on_line,
        )  # fmt: skip
    print(f"{inputs.source}\n{study.measured_on}\n\n{error_table(study)}")
    if json is not None:
        with user_errors():
            write_json(json, {"source": inputs.source, "machine": machine(), **study.as_dict()})
        print(f"every number: {json}", file=sys.stderr)
    if not study.complete:
        raise typer.Exit(130)
