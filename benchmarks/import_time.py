"""What `import subquad` costs beyond `import torch`: seconds, and the modules that it loads.

    python benchmarks/import_time.py [--runs 7] [--json results/import_time.json]

Every measurement is a fresh process; the three take turns, after an unmeasured round that fills the disk's caches.
A process reads its own clock around the statement, so that starting Python is not counted; the best of the runs counts.
The third one times `import subquad` where torch is loaded already: the difference of the other two says the same, with
the noise of both.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from subquad.lab import Timing, machine, write_json

TORCH, SUBQUAD, AFTER = "import torch", "import subquad", "import subquad after torch"
# What is timed, and what the process does before.
CASES = {TORCH: (TORCH, ""), SUBQUAD: (SUBQUAD, ""), AFTER: (SUBQUAD, TORCH)}
# Run by `python -c` with both as its arguments; its own imports must not be among those counted.
CHILD = """
import json, sys, time
exec(sys.argv[2])
before = set(sys.modules)
start = time.perf_counter()
exec(sys.argv[1])
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def once(statement: str, first: str) -> dict[str, Any]:
    """Seconds and new modules of one statement in a fresh process."""
    done = subprocess.run([sys.executable, "-c", CHILD, statement, first], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(runs: int) -> dict[str, Any]:
    """All cases in turn, and what subquad loads that torch does not."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    modules: dict[str, list[str]] = {}
    for turn in range(runs + 1):
        for name, (statement, first) in CASES.items():
            found = once(statement, first)
            modules[name] = found["modules"]
            if turn:
                seconds[name].append(found["seconds"])
    timings = {name: Timing(tuple(values)) for name, values in seconds.items()}
    added = sorted(set(modules[SUBQUAD]) - set(modules[TORCH]))
    return {
        "timings": {name: timing.as_dict() for name, timing in timings.items()},
        "ratio": timings[SUBQUAD].best / timings[TORCH].best,
        "torch_modules": len(modules[TORCH]),
        "subquad_modules": [name for name in added if name.split(".")[0] == "subquad"],
        "other_modules": [name for name in added if name.split(".")[0] != "subquad"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="fresh processes of each kind; the best counts")
    parser.add_argument("--json", type=Path, help="write every number and name to this file")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error(f"--runs {given.runs}: expected 1 or more")
    result = measure(given.runs)
    for name, timing in result["timings"].items():
        print(f"{name:28s} {timing['best_ms']:8.0f} ms  spread {timing['spread']:4.0%}")
    print(f"subquad takes {result['ratio']:.2f} times as long as torch")
    own, others = result["subquad_modules"], result["other_modules"]
    print(f"modules: {result['torch_modules']} for torch, then {len(own)} of subquad and {len(others)} others")
    print("subquad:", ", ".join(own))
    print("others:", ", ".join(others) or "none")
    if given.json:
        write_json(given.json, {"machine": machine(), **result})


if __name__ == "__main__":
    main()
