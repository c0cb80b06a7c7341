"""Error against time of every mechanism on the queries, keys and values of a real model, without training.

    python benchmarks/error_time.py [--model DIR --text FILE] [--lengths 2048,8192] [--json FILE] [--figure FILE]
    python benchmarks/error_time.py --draw FILE --figure FILE

DIR is a BERT-type encoder (its position embeddings are interpolated for longer inputs), FILE a text that nothing was
tuned on: its first tokens are measured, the tokens that follow calibrate what takes calibration. Without both, the six
heads that the library ships are measured: the second half of their 1024 tokens, calibrated on the first half.

Error is the relative squared error of a layer's output, the mean over layers. Time is that of the mechanism over that
of torch's softmax attention (SDPA) on the middle layer, each the best of interleaved runs. The settings of a mechanism
are fixed here and are the same for all lengths.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from multipole import Layer, captured, relative

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.lab.captured import captured_inputs, origin
from subquad.lab.measure import CLOCKS
from subquad.planning.baselines import uniform_attention

SDERF = {"features": "sderf", "center": True, "antithetic": True, "seed": 0}
FAR = {"mechanism": "performer", **SDERF}
# Line of the figure -> mechanism and its settings, cheapest first. A line is what a user would try first.
LINES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "softmax": ("softmax", [{}]),
    "multipole": ("multipole", [{"exact_keys": n, "seed": 0} for n in (32, 128, None)] + [{"error": 0.003, "seed": 0}]),
    "hybrid (window + calibrated features)": (
        "hybrid",
        [{"window": n, "sinks": 4, "far": FAR} for n in (32, 128)],
    ),
    "performer": ("performer", [{"num_features": n, "seed": 0} for n in (64, 256, 1024)]),
    "performer, calibrated": ("performer", [{"num_features": n, **SDERF} for n in (64, 256, 1024)]),
    "taylor, centred": ("taylor", [{"degree": n, "center": True} for n in (1, 2)]),
    "local (window)": ("local", [{"window": n, "sinks": 4} for n in (32, 128)]),
    "sparse": ("sparse", [{"stride": n} for n in (64, 128)]),
    "lsh": ("lsh", [{"rounds": n, "seed": 0} for n in (1, 4)]),
    "clustered": ("clustered", [{"clusters": n, "seed": 0} for n in (25, 100)]),
    "improved-clustered": ("improved-clustered", [{"clusters": n, "topk": n, "seed": 0} for n in (25, 100)]),
    "nystrom": ("nystrom", [{"landmarks": n} for n in (64, 256)]),
    "linear": ("linear", [{}]),
    "efficient": ("efficient", [{}]),
    "separable-linformer": ("separable-linformer", [{}]),
    "linformer, untrained": ("linformer", [{"rank": n} for n in (128, 512)]),
    "hedgehog, fitted": ("hedgehog", [{}]),
}
FITTED_TOKENS, FITTED_STEPS = 512, 100


@dataclass
class Point:
    """One mechanism with one setting at one length; `time` is in units of SDPA's."""

    line: str
    mechanism: str
    options: dict[str, Any]
    length: int
    causal: bool
    error: float = 0.0
    time: float = 0.0


def layers_of(
    model: Path | None, text: Path | None, lengths: list[int]
) -> Iterator[tuple[int, list[Layer], list[Layer]]]:
    """Length, measured layers and calibration layers, each (1, H, L, D)."""
    if model is None or text is None:
        shipped = captured_inputs()
        whole = torch.stack([shipped.q, shipped.k, shipped.v])
        first, second = (tuple(half.contiguous()) for half in whole.chunk(2, -2))
        yield second[0].shape[-2], [second], [first]
        return
    for length in lengths:
        yield length, captured(model, text, length), captured(model, text, length, skip=length)


def built(point: Point, layer: Layer, calibration: Layer) -> sq.Mechanism:
    """The mechanism for one layer, calibrated and fitted on tokens that are not measured."""
    options = dict(point.options)
    if "length" in sq.describe(point.mechanism)["options"]:
        options["length"] = point.length
    torch.manual_seed(0)
    made = sq.create(point.mechanism, layer[0].shape[-1], layer[0].shape[1], **options)
    q, k, _ = calibration
    if made.uses_calibration:
        made.calibrate(q, k)
    if point.mechanism == "hedgehog":
        few = [x[:, :, :FITTED_TOKENS] for x in (q, k)]
        with torch.enable_grad():
            made.fit(*few, is_causal=point.causal, steps=FITTED_STEPS, rows=128)
    return made.eval()


def measure(length: int, layers: list[Layer], samples: list[Layer], causal: bool, runs: int, clock: str) -> list[Point]:
    points = [
        Point(line, mechanism, options, length, causal)
        for line, (mechanism, settings) in LINES.items()
        for options in settings
        if not causal or sq.describe(mechanism)["causal"]
    ]
    points.append(Point("mean of the values", "uniform", {}, length, causal))
    calls: dict[str, Any] = {}
    for number, (layer, sample) in enumerate(zip(layers, samples, strict=True)):
        softmax = functools.partial(F.scaled_dot_product_attention, *layer, is_causal=causal)
        exact = softmax()
        timed = number == len(layers) // 2
        if timed:
            calls["SDPA"] = softmax
        for name, point in enumerate(points):
            attend = uniform_attention if point.mechanism == "uniform" else built(point, layer, sample)
            call = functools.partial(attend, *layer, is_causal=causal)
            point.error += float(relative(call(), exact)) / len(layers)  # the call is also the warm-up
            if timed:
                calls[str(name)] = call
    timings = interleave(calls, runs=runs, warmup=0, clock=clock)
    for name, point in enumerate(points):
        point.time = timings[str(name)].best / timings["SDPA"].best
    return points


def draw(record: dict[str, Any], file: Path) -> None:
    """One row of panels per length: without a causal mask and with it."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "subquad", "font.size": 9}
    points = [Point(**row) for row in record["points"]]
    lengths = sorted({point.length for point in points})
    figure, axes = plt.subplots(
        len(lengths), 2, figsize=(9.6, 0.8 + 2.5 * len(lengths)), squeeze=False, sharex=True, sharey=True
    )
    shown = [line for line in LINES if line != "softmax"]
    # Two shades of each hue, red left out for the thick line.
    hues = [plt.get_cmap("tab20")(2 * i + shade) for shade in (0, 1) for i in (0, 1, 2, 4, 5, 6, 7, 8, 9)]
    style = {
        line: {"color": hues[i], "marker": "osD^vP*X"[i % 8], "markersize": 5, "linewidth": 1.2}
        for i, line in enumerate(shown)
    }
    style["multipole"] |= {"color": "crimson", "linewidth": 2.4, "markersize": 7, "zorder": 5}
    handles: dict[str, Any] = {}
    for row, length in zip(axes, lengths, strict=True):
        for axis, causal in zip(row, (False, True), strict=True):
            here = [point for point in points if (point.length, point.causal) == (length, causal)]
            for line in shown:
                part = sorted((p for p in here if p.line == line), key=lambda p: p.time)
                if part:
                    (handles[line],) = axis.plot(
                        [p.time for p in part], [max(p.error, 1e-4) for p in part], **style[line]
                    )
            (mean,) = (point.error for point in here if point.mechanism == "uniform")
            handles["uniform attention"] = axis.axhline(mean, color="black", linestyle=":", linewidth=1)
            handles["time of torch's softmax attention"] = axis.axvline(1, color="black", linewidth=1)
            axis.set(
                xscale="log", yscale="log", ylim=(2e-4, 2), title=f"{length} tokens, {'causal' if causal else 'full'}"
            )
            axis.grid(which="major", alpha=0.25)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        row[0].set_ylabel("relative squared error")
    for axis in axes[-1]:
        axis.set_xlabel("time, in units of torch's softmax attention")
    figure.legend(list(handles.values()), list(handles), loc="center left", bbox_to_anchor=(0.76, 0.5), frameon=False)
    figure.tight_layout(rect=(0, 0, 0.77, 1))
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=160, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3, help="timed rounds at 8192 tokens; more at fewer")
    parser.add_argument(
        "--clock", choices=sorted(CLOCKS), default="wall", help="cpu, with --threads 1: on a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write the measurements")
    parser.add_argument("--figure", type=Path, help="draw them (.svg or .png; needs matplotlib)")
    parser.add_argument("--draw", type=Path, help="draw earlier measurements instead of measuring")
    given = parser.parse_args()
    if (given.model is None) != (given.text is None):
        parser.error("--model and --text: both or none")
    if given.draw:
        record = json.loads(given.draw.read_text(encoding="utf-8"))
    else:
        torch.set_num_threads(given.threads)
        about = {"model": origin()["model"], "text": origin()["text"]}
        if given.model:
            about = {"model": given.model.name, "text": given.text.name}
        points: list[Point] = []
        with torch.no_grad():
            for length, layers, samples in layers_of(
                given.model, given.text, [int(n) for n in given.lengths.split(",")]
            ):
                for causal in (False, True):
                    runs = max(given.runs, min(7, given.runs * 8192 // length))
                    found = measure(length, layers, samples, causal, runs, given.clock)
                    points += found
                    print(f"-- {length} tokens, {'causal' if causal else 'full'}")
                    for point in found:
                        print(
                            f"{point.line:38} {point.options!s:60.60} error {point.error:.4f}   time {point.time:.3f}"
                        )
        record = {**about, "clock": given.clock, "machine": machine(), "points": [asdict(point) for point in points]}
    if given.json:
        write_json(given.json, record)
    if given.figure:
        draw(record, given.figure)


if __name__ == "__main__":
    main()
