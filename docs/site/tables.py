"""The tables of the pages that come from the code and from measurements, written into the pages by one command.

    python docs/site/tables.py             fills every page below docs/ again
    python docs/site/tables.py --check     fails where a page is not up to date (a test runs this)

What stands between a mark and `<!-- end -->` is replaced:

<!-- facts NAME -->      equation, paper, cost and abilities of a mechanism, as `sq.describe` knows them
<!-- measured NAME -->   its error and time from data/mechanisms.json (python docs/site/measure.py)
<!-- experiment NAME METRIC STEPS -ROW /ROW -->   a metric of an experiment's runs after these steps, without some rows,
                         and relative to one of them, from data/experiments.json (python benchmarks/experiments keep)
<!-- results NAME FIGURE:TITLE -->   figures of an experiment's runs at their end, each below its title (_ for a blank)
<!-- catalogue -->       the table of all mechanisms
<!-- contributing PART -->   a section of CONTRIBUTING.md
"""

import argparse
import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import subquad as sq

DOCS = Path(__file__).parent.parent
# Numbers of the papers on arxiv.org, in the order in which `paper` names them.
PAPERS: dict[str, tuple[str, ...]] = {
    "clustered": ("2007.04825",),
    "efficient": ("1812.01243",),
    "hedgehog": ("2402.04347",),
    "hybrid": ("2402.18668", "2309.17453"),
    "improved-clustered": ("2007.04825",),
    "linear": ("2006.16236",),
    "linformer": ("2006.04768",),
    "local": ("2004.05150",),
    "lsh": ("2001.04451",),
    "multipole": ("2007.04825", "2506.13059"),
    "nystrom": ("2102.03902",),
    "performer": ("2009.14794",),
    "separable-linformer": ("2101.10277",),
    "softmax": ("1706.03762",),
    "sparse": ("1904.10509",),
    "taylor": ("2402.18668",),
}
MARK = re.compile(
    r"^<!-- (?P<kind>facts|measured|experiment|results|catalogue|contributing) ?(?P<argument>.*?) ?-->\n"
    r".*?^<!-- end -->$",
    re.DOTALL | re.MULTILINE,
)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _code(text: str) -> str:
    """Code for a cell of a table: a vertical bar would end the cell, and backticks know no escape for it."""
    return f"<code>{html.escape(text.replace('`', '')).replace('|', '&#124;')}</code>"


def _paper(name: str) -> str:
    """The paper as `sq.describe` names it, its title (or titles) linked.

    >>> _paper("linear")
    'Katharopoulos et al., ["Transformers are RNNs"](https://arxiv.org/abs/2006.16236), 2020'
    """
    text: str = sq.describe(name)["paper"]
    titles = re.findall(r'"[^"]+"', text)
    for title, number in zip(titles, PAPERS[name], strict=True):
        text = text.replace(title, f"[{title}](https://arxiv.org/abs/{number})")
    return text


def _constant_memory(about: dict[str, Any]) -> str:
    """Whether the state of a scan has a fixed size, for a cell of a table.

    >>> [_constant_memory(sq.describe(name)) for name in ("linear", "multipole", "softmax", "lsh")]
    ['yes', 'with `memory="constant"`', 'no, its state grows', 'no']
    """
    if "memory" in about["options"]:
        return 'with `memory="constant"`'
    return "no, its state grows" if about["recurrent"] > about["constant_memory"] else _yes(about["constant_memory"])


def _facts(name: str) -> str:
    about: dict[str, Any] = sq.describe(name)
    options = ", ".join(f"`{option}={value!r}`" for option, value in about["options"].items()) or "none"
    rows = [
        ("weights", _code(about["equation"])),
        ("paper", _paper(name)),
        ("cost", _code(about["complexity"])),
        ("causal", _yes(about["causal"])),
        ("token by token, in constant memory", _constant_memory(about)),
        ("options", options),
    ]
    letters = "Per head: L queries and S keys of width D, values of width E, M features; s is the score of a key."
    return "\n".join(["| | |", "|---|---|", *(f"| **{key}** | {value} |" for key, value in rows), "", letters])


def _settings(options: dict[str, Any]) -> str:
    """Options as one would type them.

    >>> _settings({"degree": 1, "center": True}), _settings({})
    ('`degree=1, center=True`', 'the defaults')
    """
    typed = ", ".join(f"{option}={value!r}" for option, value in options.items())
    return f"`{typed}`" if typed else "the defaults"


def _measured(name: str) -> str:
    data = json.loads((DOCS / "data" / "mechanisms.json").read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if row["mechanism"] == name]
    if not rows:
        raise KeyError(f"data/mechanisms.json has no rows for {name!r}: run python docs/site/measure.py")
    kinds = data["kinds"]
    head = ["| length | time, ms | softmax, ms |", "|---|---|---|"]
    for kind in kinds:
        head[0] += f" error, {kind} input | uniform |"
        head[1] += "---|---|"
    lines = head
    for row in rows:
        line = f"| {row['length']} | {row['ms']:.1f} | {row['softmax_ms']:.1f} |"
        for kind in kinds:
            line += f" {row['errors'][kind]['error']:.3f} | {row['errors'][kind]['uniform']:.3f} |"
        lines.append(line)
    note = (
        f"Settings: {_settings(rows[0]['options'])}. Error is the relative squared error of the output, without "
        "training; *uniform* is that of uniform attention, the mean of all values. *Flat*: scores of "
        "standard deviation 0.5, all directions alike. *Sharp*: standard deviation 2.5, few directions matter. Not "
        f"causal, 8 heads of width 64; {data['date']}, {data['machine']['processor']}, "
        f"{data['machine']['threads']} threads (`python docs/site/measure.py`)."
    )
    return "\n".join([*lines, "", note])


def _runs(experiment: str) -> dict[str, list[dict[str, Any]]]:
    """Kept runs of an experiment by row, a run per seed."""
    data = json.loads((DOCS / "data" / "experiments.json").read_text(encoding="utf-8"))
    rows: dict[str, list[dict[str, Any]]] = {}
    for folder, run in data.items():
        name, label, _ = folder.split("/")
        if name == experiment:
            rows.setdefault(label, []).append(run)
    if not rows:
        raise KeyError(f"data/experiments.json has no runs of {experiment!r}")
    return rows


def _results(asked: str) -> str:
    """Metrics and other figures (bytes of a state, steps), mean over seeds; rows by the first of them, best first."""
    name, *columns = asked.split()
    figures, titles = zip(*(column.split(":") for column in columns), strict=True)
    rows = {
        label: [sum({**run, **run["metrics"], **run["artefacts"]}[f] for run in runs) / len(runs) for f in figures]
        for label, runs in _runs(name).items()
    }
    lines = [f"| | {' | '.join(titles).replace('_', ' ')} |", "|---" * (len(figures) + 1) + "|"]
    for label, values in sorted(rows.items(), key=lambda row: row[1], reverse=figures[0].startswith("accuracy")):
        lines.append(f"| {label} | {' | '.join(f'{x:.3f}' if x < 100 else f'{x:,.0f}' for x in values)} |")
    return "\n".join(lines)


def _experiment(asked: str) -> str:
    """Rows in the order of their last figure, the best first; of several seeds the mean and the range."""
    name, metric, *rest = asked.split()
    numbers = [int(step) for step in rest if step.isdigit()]
    rows = {label: runs for label, runs in _runs(name).items() if f"-{label}" not in rest}

    def at(runs: list[dict[str, Any]], step: int) -> list[float]:
        return [point[metric] for run in runs for point in run["valid"] if point["step"] == step]

    def cell(values: list[float]) -> str:
        if not values:
            return ""
        mean = f"{sum(values) / len(values):.3f}"
        return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"

    final = {label: sum(at(runs, numbers[-1])) / max(len(at(runs, numbers[-1])), 1) for label, runs in rows.items()}
    best_first = sorted(rows, key=lambda label: final[label], reverse=metric.startswith("accuracy"))
    timed = all("step_seconds" in runs[0] for runs in rows.values())
    head = ["", *(f"after {n:,} steps" if n else "before training" for n in numbers)]
    head += ["seconds per step"] * timed
    base = next((row[1:] for row in rest if row.startswith("/")), None)
    if base is not None:
        head += [f"{figure} relative to {base}" for figure in (metric.replace("_", " "), "time")]
    head += ["parameters", "seeds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for label in best_first:
        runs = rows[label]
        cells = [label, *(cell(at(runs, n)) for n in numbers)]
        cells += [f"{runs[0]['step_seconds']:.2g}"] if timed else []
        if base is not None:
            cells.append(f"{final[label] / final[base]:.2g}")
            cells.append(f"{runs[0]['step_seconds'] / rows[base][0]['step_seconds']:.2g}")
        cells += [f"{runs[0]['parameters']:,}", str(len(runs))]
        lines.append(f"| {' | '.join(cells)} |")
    first = next(iter(rows.values()))[0]
    where = f"{max(run['date'] for runs in rows.values() for run in runs)[:10]}, {first['machine']['processor']}"
    return "\n".join([*lines, "", f"{metric.replace('_', ' ')}; {where}."])


def _catalogue() -> str:
    lines = ["| mechanism | causal | constant-memory state | weights | paper |", "|---|---|---|---|---|"]
    for name in sq.list_mechanisms():
        about = sq.describe(name)
        state = _constant_memory(about)
        weights = _code(about["equation"])
        lines.append(f"| [{name}]({name}.md) | {_yes(about['causal'])} | {state} | {weights} | {_paper(name)} |")
    return "\n".join(lines)


def _contributing(part: str) -> str:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(part)}.*?\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise KeyError(f"CONTRIBUTING.md has no section {part!r}")
    return found.group(1)


def filled(page: str) -> str:
    """The text of a page with its tables made again."""
    makers = {"facts": _facts, "measured": _measured, "experiment": _experiment, "results": _results,
              "contributing": _contributing}  # fmt: skip

    def made(match: re.Match[str]) -> str:
        kind, argument = match["kind"], match["argument"]
        text = _catalogue() if kind == "catalogue" else makers[kind](argument)
        return f"{match[0].splitlines()[0]}\n\n{text.strip()}\n\n<!-- end -->"

    return MARK.sub(made, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a page would change")
    check = parser.parse_args().check
    old = []
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            old.append(str(path.relative_to(DOCS.parent)))
            if not check:
                path.write_text(new, encoding="utf-8")
    if old:
        print(f"{'not up to date' if check else 'filled'}: {', '.join(old)}")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
