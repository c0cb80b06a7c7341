"""The report on a quiet machine and beside a busy process: is it still there, and does it still say the same?

    python benchmarks/report_load.py --json results/report-load.json

Runs `subquad report` twice, into two folders, the second time with processes beside it that do nothing but count. Three
things are asked of the second: at least 80 % of the cells, a recommendation in every row, and the same first choice as
quietly in at least 90 % of the rows, with speed-ups within 1.6 times of the quiet ones; and that it says that it was
taken on a busy machine. A choice counts as the same if it is the same mechanism, whatever the size of its setting.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from subquad.lab import machine, write_json

BUSY = "while True: pass"
REPORT = "from subquad.cli import main; main()"


def run(folder: Path, busy: int, extra: list[str]) -> dict[str, Any]:
    """The report's JSON, with the seconds that the whole command took."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    start = time.perf_counter()
    try:
        subprocess.run([sys.executable, "-c", REPORT, "report", "--out", str(folder), *extra], check=True)
    finally:
        for process in beside:
            process.kill()
            process.wait()
    seconds = time.perf_counter() - start
    stored: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    page = (folder / "index.html").read_text(encoding="utf-8")
    return {**stored, "seconds": seconds, "says_busy": 'id="busy"' in page}


def rows(report: dict[str, Any]) -> dict[tuple[str, int, float], dict[str, Any]]:
    found = report["summary"]["recommendations"]
    return {(row["kind"], row["length"], row["budget"]): row for row in found if "missing" not in row}


def compared(quiet: dict[str, Any], busy: dict[str, Any]) -> dict[str, Any]:
    first, second = rows(quiet), rows(busy)
    both = first.keys() & second.keys()
    same = [key for key in both if first[key]["mechanism"] == second[key]["mechanism"]]
    ratios = [second[key]["gain"] / first[key]["gain"] for key in both if first[key]["label"] == second[key]["label"]]
    near = [ratio for ratio in ratios if 1 / 1.6 <= ratio <= 1.6]
    return {
        "quiet": {name: quiet[name] for name in ("seconds", "cells_total", "cells_measured", "load")},
        "busy": {name: busy[name] for name in ("seconds", "cells_total", "cells_measured", "load", "says_busy")},
        "cells": busy["cells_measured"] / busy["cells_total"],
        "recommendation": len(second) / len(busy["summary"]["recommendations"]),
        "same_choice": len(same) / max(1, len(both)),
        "ratios_within_1.6": len(near) / max(1, len(ratios)),
        "worst_ratio": max((max(ratio, 1 / ratio) for ratio in ratios), default=None),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--busy", type=int, default=1, help="processes beside the second run")
    parser.add_argument("--out", type=Path, default=None, help="keep both reports in this folder")
    parser.add_argument("--quick", action="store_true", help="the quick report, to see that this works")
    arguments = parser.parse_args()
    extra = ["--quick"] if arguments.quick else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        quiet = run(folder / "quiet", 0, extra)
        busy = run(folder / "busy", arguments.busy, extra)
    found = compared(quiet, busy)
    for name in ("quiet", "busy"):
        one = found[name]
        print(f"{name}: {one['cells_measured']} of {one['cells_total']} cells in {one['seconds']:.0f} s, {one['load']}")
    for name in ("cells", "recommendation", "same_choice", "ratios_within_1.6"):
        print(f"{name}: {found[name]:.0%}")
    print(f"worst ratio: {found['worst_ratio']}; the second page says that the machine was busy: {busy['says_busy']}")
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), **found})


if __name__ == "__main__":
    main()
