"""Text of the command line to the values it stands for: `num_features=64`, `lsh:rounds=4`, a JSON list per layer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

__all__ = ["label_of", "parse_mechanism", "parse_pairs", "parse_value"]


def parse_value(text: str) -> Any:
    """JSON where it is JSON, else the text itself.

    >>> parse_value("64"), parse_value("true"), parse_value("relu"), parse_value("1e-3")
    (64, True, 'relu', 0.001)
    """
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
    if text.lstrip().startswith(("{", "[")):
        try:
            choice = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--mechanism {text!r} is not JSON ({error})") from None
        if options and not isinstance(choice, dict):
            raise ValueError(f"--option belongs to one mechanism; write {sorted(options)} into the entries of the list")
        return {**choice, **options} if options else choice
    name, *pairs = text.split(":")
    inside = {**parse_pairs("--mechanism", pairs), **options}
    return {"mechanism": name, **inside} if inside else name


def label_of(choice: Any) -> str:
    """A short name of a choice, also fit for a folder.

    >>> label_of({"mechanism": "lsh", "rounds": 4}), label_of("linear")
    ('lsh-rounds4', 'linear')
    """
    if isinstance(choice, str):
        return choice
    if isinstance(choice, list):
        return "+".join(label_of(one) for one in choice)
    options = [
        f"{name}{value if not isinstance(value, dict) else label_of(value)}"
        for name, value in choice.items()
        if name != "mechanism"
    ]
    text = "-".join([str(choice.get("mechanism", "")), *options])
    return "".join(letter if letter.isalnum() or letter in "-+._" else "_" for letter in text)
