"""Conversion of every architecture that transformers tests, against the exact model: what is converted, what is
refused, and whether anything differs without saying so.

    python benchmarks/conversion_families.py CHECKOUT --out families.json [--family bert] [--jobs 2]

CHECKOUT is a git checkout of transformers, for its `tests` folder: its model testers say how to build a small model of
every architecture and a batch for it. For the first class of each, and for one that generates:

    softmax   converted to "softmax", the model gives the same bits
    oracle    with exact attention in the converted path (a mechanism that is exact and does not say so), it gives
              the same numbers
    padding   the same on a batch with padding on the left
    greedy, beam   generation gives the logits of the exact model, with the cache and without
    loaded    saved and loaded, it gives the same bits

A row is "same", "differs" (silently: this must not happen), "refused" (an error that names the layer), or absent
where the model has nothing of the kind. Takes about an hour on two cores; finished families are not run again.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from conversion_testers import cases, families, models, padded, prompts
from torch import Tensor

import subquad as sq
from subquad.hf.conversion.checking import StandIn
from subquad.hf.conversion.layers import find_layers

CHECKS = ("softmax", "oracle", "oracle alone", "padding", "greedy", "beam", "loaded")
TOLERANCE = 2e-3
# Families per process, and the seconds that they may take together.
AT_ONCE, SECONDS = 12, 1500


class Oracle(StandIn):
    """Exact attention that conversion takes for an approximation."""

    name = "oracle"

    def __init__(self, head_dim: int, heads: int | None = None, kv_heads: int | None = None) -> None:
        super().__init__(head_dim)


# -- comparing --


def tensors(out: Any, name: str = "") -> dict[str, Tensor]:
    """The floating tensors of an output by name."""
    if isinstance(out, Tensor):
        return {name: out} if out.is_floating_point() else {}
    items: Any = ()
    if hasattr(out, "items"):
        items = out.items()
    elif isinstance(out, list | tuple):
        items = enumerate(out)
    found: dict[str, Tensor] = {}
    for key, value in items:
        if key not in ("past_key_values", "loss", "state"):
            found |= tensors(value, f"{name}.{key}".strip("."))
    return found


def forward(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        found = tensors(model(**copy.deepcopy(inputs)))
    for key in ("attention_mask", "decoder_attention_mask"):
        mask = inputs.get(key)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            found = {n: x[mask.bool()] if x.dim() > 1 and x.shape[:2] == mask.shape else x for n, x in found.items()}
    return found


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any tensor over its largest value."""
    worst = 0.0
    for name, x in wanted.items():
        y = found.get(name)
        if y is None or y.shape != x.shape:
            return float("inf")
        real = torch.isfinite(x)
        gap = (torch.where(real, y, 0) - torch.where(real, x, 0)).abs().double()
        if gap.numel():
            worst = max(worst, float(gap.max() / torch.where(real, x, 0).abs().max().clamp(min=1e-3)))
    return worst


def steady(make: Callable[[], Any], inputs: dict[str, Any]) -> bool:
    """Whether the exact model gives the same twice: some draw noise."""
    return difference(forward(make(), inputs), forward(make(), inputs)) < TOLERANCE


def verdict(value: float, tolerance: float = TOLERANCE) -> str:
    return "same" if value <= tolerance else f"differs by {value:.2g}"


def said(error: Exception) -> str:
    """An error that names what it is about is a refusal; anything else is a crash."""
    known = isinstance(error, ValueError | NotImplementedError | TypeError)
    return f"{'refused' if known else 'crashed'}: {type(error).__name__}: {str(error)[:300]}"


def generated(model: Any, inputs: dict[str, Any], beams: int, **more: Any) -> Any:
    options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "num_beams": beams, **more}
    torch.manual_seed(0)
    with torch.no_grad():
        return model.generate(**copy.deepcopy(inputs), **options, output_logits=True, return_dict_in_generate=True)


def logits_of(out: Any) -> dict[str, Tensor]:
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return {"0": logits}
    return {str(i): x for i, x in enumerate(() if logits is None else logits)}


# -- one model --


def saved_and_loaded(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder).eval()


def attempt(row: dict[str, Any], name: str, run: Callable[[], str | None]) -> None:
    try:
        found = run()
    except Exception as error:
        found = said(error)
    if found is not None:
        row[name] = found


def convert_oracle(model: Any, inputs: dict[str, Any] | None) -> Any:
    batches = None if inputs is None else [inputs]
    return sq.hf.convert(model, Oracle, calibration=batches)[1]


def judge(case: Any, make: Callable[[], Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Every check of one model."""
    row: dict[str, Any] = {}
    exact = make()
    row["layers"] = len(find_layers(exact))
    if not row["layers"]:
        return row
    try:
        if not steady(make, inputs):
            return {**row, "unsteady": True}
    except Exception as error:
        return {**row, "exact": said(error)}
    wanted = forward(exact, inputs)

    def softmax() -> str:
        model = make()
        sq.hf.convert(model, "softmax")
        return verdict(difference(forward(model, inputs), wanted), 0.0)

    attempt(row, "softmax", softmax)
    model = make()

    def oracle() -> str:
        report = convert_oracle(model, inputs)
        row["converted"] = len(report.converted)
        return verdict(difference(forward(model, inputs), wanted))

    def alone() -> str:
        other = make()
        convert_oracle(other, None)
        return verdict(difference(forward(other, inputs), wanted))

    attempt(row, "oracle", oracle)
    attempt(row, "oracle alone", alone)
    if not row.get("converted"):
        return row

    def padding() -> str | None:
        batch = padded(inputs)
        if batch is None or "attention_mask" not in inspect.signature(exact.forward).parameters:
            return None
        try:
            right = forward(exact, batch)
        except Exception:
            return None
        return verdict(difference(forward(model, batch), right))

    attempt(row, "padding", padding)
    if exact.can_generate():
        prompt = prompts(case, inputs)
        for name, beams in (("greedy", 1), ("beam", 2)):

            def generation(beams: int = beams) -> str | None:
                try:
                    right = generated(exact, prompt, beams)
                except Exception:
                    return None
                found = generated(model, prompt, beams)
                # Ties between random logits part ways; the first step always compares.
                if not logits_of(right):
                    return None
                first = {"0": logits_of(right)["0"]}
                value = difference(logits_of(found), logits_of(right) if beams == 1 else first)
                if beams == 1 and value > TOLERANCE and not torch.equal(found.sequences, right.sequences):
                    value = difference(logits_of(found), first) if tied(right) else value
                if beams > 1:
                    return verdict(value)
                # Against the exact model without its cache: some give something else with one.
                plain = [logits_of(generated(one, prompt, 1, use_cache=False)) for one in (model, exact)]
                return verdict(max(value, difference(*plain)))

            attempt(row, name, generation)

    def loaded() -> str | None:
        if difference(forward(saved_and_loaded(make()), inputs), wanted) > 1e-5:
            return None  # the exact model does not come back as it was either
        other = make()
        sq.hf.convert(other, "linear", calibration=[inputs])
        right = forward(other, inputs)
        return verdict(difference(forward(saved_and_loaded(other), inputs), right), 1e-5)

    attempt(row, "loaded", loaded)
    return row


def tied(out: Any) -> bool:
    """Whether two tokens were as good as equal somewhere: rounding decides between them."""
    gaps = [x.float().topk(2).values.diff(dim=-1).abs().min() for x in out.logits]
    return min(float(gap) for gap in gaps) < 1e-4


def run_family(checkout: Path, family: str) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    try:
        for name, case in cases(checkout, family):
            for model, make, inputs in models(case):
                row = {"family": family, "case": name, "model": model}
                try:
                    row |= judge(case, make, inputs)
                except Exception as error:
                    row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
                rows.append(row)
    except Exception as error:
        rows.append(
            {"family": family, "case": "", "model": "", "not built": f"{type(error).__name__}: {str(error)[:300]}"}
        )
    return rows


# -- all of them --


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "models": len(rows),
        "not built or unsteady": sum(any(k in r for k in ("not built", "failed", "exact", "unsteady")) for r in rows),
        "with layers": sum(bool(r.get("layers")) for r in rows),
        "converted in full": sum(r.get("converted", -1) == r.get("layers") for r in rows),
        "converted in part": sum(0 < r.get("converted", 0) < r.get("layers", 0) for r in rows),
    }
    for check in CHECKS:
        counts[check] = dict(Counter(r[check].split(" by ")[0].split(":")[0] for r in rows if check in r))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", action="append")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    known: dict[str, list[dict[str, Any]]] = {}
    if arguments.out.exists():
        known = json.loads(arguments.out.read_text())["families"]
    todo = arguments.family or [f for f in families(arguments.checkout) if f not in known]

    def keep(family: str, rows: list[dict[str, Any]]) -> None:
        known[family] = rows
        every = [row for one in known.values() for row in one]
        arguments.out.write_text(json.dumps({"summary": summary(every), "families": known}, indent=1))

    if arguments.child:  # several families per process: importing transformers' tests takes longer than one of them
        for family in todo:
            print(family, flush=True)
            keep(family, run_family(arguments.checkout, family))
        return
    parts = [todo[i :: arguments.jobs] for i in range(arguments.jobs)]
    with ThreadPoolExecutor(arguments.jobs) as pool, tempfile.TemporaryDirectory() as folder:

        def work(part: list[str]) -> None:
            while part:
                out = Path(folder) / f"{part[0]}.json"
                names = [word for family in part[:AT_ONCE] for word in ("--family", family)]
                command = [sys.executable, __file__, str(arguments.checkout), "--out", str(out), *names, "--child"]
                failure = ""
                try:
                    ran = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
                    failure = "" if ran.returncode == 0 else f"the process ended with {ran.returncode}"
                except subprocess.TimeoutExpired:
                    failure = f"not done after {SECONDS} s"
                done = json.loads(out.read_text())["families"] if out.exists() else {}
                if failure:
                    stuck = next(family for family in part if family not in done)
                    done[stuck] = [{"family": stuck, "case": "", "model": "", "not built": failure}]
                for family, rows in done.items():
                    keep(family, rows)
                    for row in rows:
                        wrong = {k: row[k] for k in CHECKS if row.get(k, "same") != "same"}
                        print(
                            family,
                            row["model"],
                            row.get("converted", ""),
                            "of",
                            row.get("layers", ""),
                            wrong,
                            flush=True,
                        )
                part = [family for family in part if family not in done]

        list(pool.map(work, parts))
    print(json.dumps(summary([row for one in known.values() for row in one]), indent=1))


if __name__ == "__main__":
    main()
