"""The process that one revision runs in: asked for single runs over stdin, it answers with seconds on stdout.

Started as a script by path, never imported: it must run with a subquad older than itself, so it uses nothing of it but
`create`, `describe` and the call. One request per line, {"mechanism", "length", "causal"}; the answer is
{"seconds"} or {"error"}. The first line names the shape.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any


def main() -> None:
    """Answer until stdin ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints must not get between the answers
    # This script's own folder: its neighbours are no top-level modules.
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    # An editable installation may put a finder of its own before the path that this process was given.
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if finder is PathFinder or finder.find_spec("subquad", None) is None
    ]
    import torch

    import subquad

    shape = json.loads(sys.stdin.readline())
    if shape["threads"]:
        torch.set_num_threads(shape["threads"])
    calls: dict[str, Callable[[], None]] = {}

    def call(asked: dict[str, Any]) -> Callable[[], None]:
        name, length = asked["mechanism"], asked["length"]
        known = subquad.describe(name)["options"]
        options: dict[str, Any] = {"seed": 0} if "seed" in known else {}
        if "length" in known:
            options["length"] = length
        attend = subquad.create(name, shape["head_dim"], shape["heads"], **options).eval()
        generator = torch.Generator().manual_seed(0)
        size = (shape["batch"], shape["heads"], length, shape["head_dim"])
        inputs = [(0.5 * torch.randn(size, generator=generator)).requires_grad_(shape["backward"]) for _ in range(3)]

        def run() -> None:
            with torch.set_grad_enabled(shape["backward"]):
                out = attend(*inputs, is_causal=asked["causal"])
                if shape["backward"]:
                    out.backward(torch.ones_like(out))

        return run

    print(json.dumps({"version": subquad.__version__, "file": subquad.__file__}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            if line not in calls:
                calls.clear()  # one setting at a time: the other process needs its memory too
                calls[line] = call(json.loads(line))
                calls[line]()  # the warm-up
            start = time.perf_counter()
            calls[line]()
            answer: dict[str, Any] = {"seconds": time.perf_counter() - start}
        except Exception as error:  # what this revision cannot do is an answer
            answer = {"error": (str(error) or type(error).__name__).splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
