"""Text of the command line to the values it stands for: `num_features=64`, `lsh:rounds=4`, a JSON list per layer."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from typing import Any

__all__ = ["label_of", "parse_mechanism", "parse_pairs", "parse_value", "split_mechanisms"]


_CONSTANTS = {"True": True, "False": False, "None": None}


def parse_value(text: str) -> Any:
    """JSON or a Python constant where it is one, else the text itself.

    >>> parse_value("64"), parse_value("true"), parse_value("False"), parse_value("relu"), parse_value("1e-3")
    (64, True, False, 'relu', 0.001)
    """
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_pairs(argument: str, pairs: Iterable[str]) -> dict[str, Any]:
    """`name=value` texts to a dict.

    >>> parse_pairs("--option", ["num_features=64", "features=relu"])
    {'num_features': 64, 'features': 'relu'}
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or not name:
            raise ValueError(f"{argument} {pair!r}: expected name=value, for example num_features=64")
        if name in found:
            raise ValueError(f"{argument} {pair!r}: {name} was given before")
        found[name] = parse_value(value)
    return found


def parse_mechanism(text: str, options: dict[str, Any] | None = None) -> Any:
    """A mechanism of the command line: a name, `name:option=value:...`, or JSON (an object, or a list per layer).

    >>> parse_mechanism("lsh:rounds=4:buckets=16")
    {'mechanism': 'lsh', 'rounds': 4, 'buckets': 16}
    >>> parse_mechanism("linear")
    'linear'
    """
    options = options or {}
    if not text.strip():
        raise ValueError("the mechanism is empty; name one (subquad mechanisms lists them), or leave the option out")
    if text.lstrip().startswith(("{", "[")):
        try:
            choice = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is not JSON ({error}); expected a mechanism, or a list per layer") from None
        if not choice:
            raise ValueError(f"{text!r} names no mechanism")
        if options and not isinstance(choice, dict):
            raise ValueError(f"--option belongs to one mechanism; write {sorted(options)} into the entries of the list")
    else:
        name, *pairs = text.strip().split(":")
        inside = parse_pairs("--mechanism", pairs)
        choice = {"mechanism": name, **inside} if inside or options else name
    if options:
        if twice := sorted(options.keys() & choice.keys()):
            raise ValueError(f"--option {twice[0]}: --mechanism {text} says it already; give it once")
        choice = {**choice, **options}
    for one in choice if isinstance(choice, list) else [choice]:
        _check_name(one)
    return choice


def _check_name(choice: Any) -> None:
    options = choice if isinstance(choice, dict) else {"mechanism": choice}
    name = options.get("mechanism")
    if name == "auto":
        raise ValueError(
            "mechanism 'auto' is for sq.create alone, which is told a length; ask `subquad plan`, and name what it says"
        )
    if name == "head-groups" and "groups" not in options:
        raise ValueError(
            "mechanism 'head-groups' needs groups, the mechanism of every head. `subquad convert` makes it; by hand, "
            'for 2 heads: --mechanism \'{"mechanism": "head-groups", "groups": [{"heads": [0], "mechanism": "local"}, '
            '{"heads": [1], "mechanism": "linear"}]}\''
        )


def split_mechanisms(text: str) -> list[str]:
    """The mechanisms of a list with commas; those inside of JSON separate nothing.

    >>> split_mechanisms('softmax, {"mechanism": "lsh", "rounds": 2},linear')
    ['softmax', '{"mechanism": "lsh", "rounds": 2}', 'linear']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts]
    if "" in parts:
        raise ValueError(
            f"--compare {text!r}: an entry is empty; expected mechanisms separated by commas, like softmax,linear"
        )
    return parts


def label_of(choice: Any) -> str:
    """A short name of a choice, also fit for a folder.

    >>> label_of({"mechanism": "lsh", "rounds": 4}), label_of("linear")
    ('lsh-rounds4', 'linear')
    """
    if isinstance(choice, str):
        return choice
    if isinstance(choice, list):
        whole = "+".join(label_of(one) for one in choice)
    else:
        options = [
            f"{name}{value if not isinstance(value, dict) else label_of(value)}"
            for name, value in choice.items()
            if name != "mechanism"
        ]
        text = "-".join([str(choice.get("mechanism", "")), *options])
        whole = "".join(letter if letter.isalnum() or letter in "-+._" else "_" for letter in text)
    # Folders have names of 255 letters at most.
    return whole if len(whole) <= 120 else f"{whole[:100]}-{zlib.crc32(whole.encode()):08x}"
