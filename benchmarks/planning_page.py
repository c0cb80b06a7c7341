"""How `planning.py` shows its results: a line per plan as it goes, a summary, a page of the documentation."""

from typing import Any

HISTORY = (
    "Nothing was changed because of the kinds held out; two that led to a change count as developed since then, and",
    "results of an earlier planner on all of them were known (`benchmarks/planning_kinds.py`).",
    "",
)
CAPTURED = (
    "With `--model` and `--text` it also captures queries, keys and values of a pretrained model's layers: the sample",
    "from the first fifth of a text, the fresh inputs from the others; their errors are those of the outputs.",
    "",
)
HEADING = (
    f"{'kind':41s} {'target':>8s} {'error':>6s} {'time':>6s} {'time/':>6s} {'softmax':>8s}  {'predicted':24s} verdict\n"
    f"{'':41s} {'':8s} {'/target':>6s} {'/best':>6s} {'hind.':>6s} {'/time':>8s}  {'reliable: meas./pred.':24s} "
    "and first choice"
)


def show(record: dict[str, Any]) -> None:
    ratios = [row["ratio"] for row in record["predictions"] if row["reliable"]]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
    for i, row in enumerate(record["plans"]):
        predicted = f"{len(ratios):2d} of {len(record['predictions'])}: {spread}" if i == 0 else ""
        print(
            f"{record['kind'] if i == 0 else '':41s} {row['target']:8.2g} {row['error_over_target']:6.2f} "
            f"{row['time_over_fastest']:6.2f} {row['time_over_fastest_draw']:6.2f} {row['softmax_over_first']:7.1f}x  "
            f"{predicted:24s} "
            f"{'good' if row['good'] else 'BAD '} {row['first']}"
            + ("" if row["good"] else f"   [fastest: {row['fastest']}]"),
            flush=True,
        )


def groups(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The kinds of each group: held out first, then captured ones, then those that the planner was developed with."""
    names = sorted({kind["group"] for kind in record["kinds"]}, key=lambda g: (g == "developed with", g != "held out"))
    return {name: [kind for kind in record["kinds"] if kind["group"] == name] for name in names}


def summary(kinds: list[dict[str, Any]]) -> str:
    """The figures of some kinds, in words."""
    plans = [row for kind in kinds for row in kind["plans"]]
    every = [row for kind in kinds for row in kind["predictions"]]
    trusted = [row for row in every if row["reliable"]]
    good = sum(row["good"] for row in plans)
    whole = sum(all(row["good"] for row in kind["plans"]) for kind in kinds)
    near = sum(row["time_over_fastest_draw"] <= 1.5 for row in plans)
    words = [
        f"{good} of {len(plans)} plans good, all targets on {whole} of {len(kinds)} kinds",
        f"{near} within 1.5 times the fastest in hindsight",
    ]
    if not every:
        return "; ".join(words)
    for which, what in (("ratio", "predictions"), ("ratio_out", "predicted outputs")):
        ratios = [row[which] for row in trusted]
        within = sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios)
        span = f" (measured / predicted {min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        words.append(f"{within} of {len(ratios)} reliable {what} within 20 %{span}")
    words.append(f"{len(trusted)} of {len(every)} predictions reliable")
    return "; ".join(words)


def page(record: dict[str, Any]) -> str:
    """The results as a page of the documentation."""
    host = record["machine"]
    lines = [
        "# Results of the planner",
        "",
        "Written by `python benchmarks/planning.py --json results/planning.json --page docs/planning-results.md`;",
        "the script says what is measured. A plan is good if, on fresh inputs, its first choice has an error of at",
        "most 1.2 times the target and takes at most 1.5 times as long as the fastest of all settings whose mean over",
        "draws meets it. The last column is the same with the fastest setting in hindsight: it meets the target there",
        "with the draw that was best on the sample, without a margin for inputs that differ.",
        "",
        *HISTORY,
        *CAPTURED * any(kind["group"].startswith("captured") for kind in record["kinds"]),
        f"Machine: {host['processor']}, {host['cores']} cores, threads: {host['threads']}, torch {host['torch']},",
        f"load at the start {host['load_1min']:.1f}." + ("" if record["complete"] else " The run was not complete."),
        "",
    ]
    for group, kinds in groups(record).items():
        lines += [f"## {group[0].upper()}{group[1:]}", "", summary(kinds) + ".", ""]
        lines += [
            "| input | target | first choice | error / target | time / fastest | softmax / time | time / hindsight |",
            "|---|---|---|---|---|---|---|",
        ]
        for kind in kinds:
            for i, row in enumerate(kind["plans"]):
                first = row["first"] if row["good"] else f"{row['first']} (fastest: `{row['fastest']}`)"
                names = ("error_over_target", "time_over_fastest", "softmax_over_first", "time_over_fastest_draw")
                shown = " | ".join(f"{row[name]:.2f}" for name in names)
                lines.append(f"| {kind['kind'] if i == 0 else ''} | {row['target']:.2g} | {first} | {shown} |")
        lines.append("")
    return "\n".join(lines)
