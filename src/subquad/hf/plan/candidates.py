"""What a plan chooses from: mechanisms with options, each with a seed of its own wherever something is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ... import checks
from ...mechanisms import MECHANISMS, create
from ...planning.candidates import SDERF as SDERF_OPTIONS
from ...planning.candidates import least_tokens

__all__ = [
    "AUTOMATIC", "EXACT", "SDERF", "checked_candidates", "default_candidates", "exact_reach", "seeded",
    "tokens_to_judge", "with_causal_form",
]  # fmt: skip

EXACT: dict[str, Any] = {"mechanism": "softmax"}
SDERF: dict[str, Any] = {"mechanism": "performer", **SDERF_OPTIONS}
# What `convert` chooses from when no mechanism is named, in this order; those without a causal form are left out of
# causal layers, windows out of cross attention.
AUTOMATIC: tuple[dict[str, Any], ...] = (
    EXACT,
    {"mechanism": "local", "window": 32, "sinks": 4},
    {"mechanism": "local", "window": 128, "sinks": 4},
    {"mechanism": "multipole"},
    # For long inputs: fewer clusters in larger chunks. For heads that need more: exact keys, before all are exact.
    {"mechanism": "multipole", "chunk": 1024, "clusters": 16},
    {"mechanism": "multipole", "chunk": 1024, "clusters": 32},
    {"mechanism": "multipole", "chunk": 1024, "clusters": 32, "exact_keys": 512},
    {"mechanism": "multipole", "clusters": 32, "exact_keys": 1024},
    {"mechanism": "improved-clustered", "clusters": 25, "topk": 32, "clustering": "lloyd"},
    {"mechanism": "improved-clustered", "clusters": 100, "topk": 64, "clustering": "lloyd"},
    {"mechanism": "hybrid", "window": 32, "sinks": 4, "far": {**SDERF, "num_features": 64}},
    {"mechanism": "hybrid", "window": 64, "sinks": 4, "far": {**SDERF, "num_features": 256}},
)


def checked_candidates(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Candidates as plain dicts, each with its mechanism.

    >>> checked_candidates([{"mechanism": "local", "window": 64}])
    [{'mechanism': 'local', 'window': 64}]
    """
    for number, one in enumerate(given):
        if not isinstance(one, Mapping):
            raise TypeError(
                f"candidates[{number}] must be a dict like {{'mechanism': 'local', 'window': 64}}, got {one!r}"
            )
        name = checks.named_mechanism(f"candidates[{number}]", one)
        checks.check_option(f"candidates[{number}]['mechanism']", name, MECHANISMS)
    return [dict(one) for one in given]


def default_candidates(
    *,
    windows: Sequence[int] = (32, 64, 128),
    sinks: int = 4,
    features: Sequence[int] = (64, 256),
    clusters: int = 0,
    topk: int = 32,
    multipole: bool = True,
    cross: bool = False,
) -> list[dict[str, Any]]:
    """What a plan chooses from: `multipole`, windows alone and beside cheap or rich far fields, and features alone.

    With `clusters` also improved clustered attention of that many clusters and `topk` keys each: attention that is
    sharp and far at once, which no window reaches and no affordable number of features resolves. It has no causal form.

    >>> [c["mechanism"] for c in default_candidates(windows=(16,), features=(64,), clusters=25)]
    ['taylor', 'performer', 'multipole', 'improved-clustered', 'local', 'hybrid', 'hybrid']
    """
    degree1: dict[str, Any] = {"mechanism": "taylor", "degree": 1, "center": True}
    rich: list[dict[str, Any]] = [{**SDERF, "num_features": m} for m in features]
    found = [degree1, *rich, *([{"mechanism": "multipole"}] if multipole else [])]
    if clusters:
        # K-means on the queries themselves: the bits of their signs lose what sharp heads tell them apart by.
        found.append({"mechanism": "improved-clustered", "clusters": clusters, "topk": topk, "clustering": "lloyd"})
    for window in () if cross else windows:
        found.append({"mechanism": "local", "window": window, "sinks": sinks})
        found += [{"mechanism": "hybrid", "window": window, "sinks": sinks, "far": far} for far in (degree1, *rich)]
    return found


def exact_reach(options: Mapping[str, Any], is_causal: bool) -> int:
    """Up to so many tokens a candidate is exact attention by construction.

    The sinks of a `hybrid` that is not causal use its far field themselves; they are too few to judge it by.

    >>> exact_reach({"mechanism": "local", "window": 32, "sinks": 4}, True)
    37
    >>> exact_reach({"mechanism": "multipole"}, True), exact_reach({"mechanism": "multipole"}, False)
    (512, 511)
    """
    known = {name: x for name, x in _with_defaults(options).items() if isinstance(x, int)}
    if "chunk" in known:
        # Complete chunks have clusters, as many of them as are beyond the exact keys; not so a causal query's own one.
        chunks = known.get("exact_keys", 0) // known["chunk"] + 1
        return chunks * known["chunk"] - (not is_causal)
    if "window" in known:
        return known["window"] + known.get("sinks", 0) + 1
    return max((known.get(name, 0) for name in ("clusters", "topk", "landmarks", "bucket_size", "stride")), default=0)


def tokens_to_judge(options: Mapping[str, Any], is_causal: bool, length: int) -> int:
    """So many tokens an input needs before the error on it says something about `length`, which is more: twice what is
    exact by construction, and several windows or clusters, as in `sq.plan`. Half of the length is enough if not all of
    it is exact.

    >>> [tokens_to_judge({"mechanism": "local", "window": 32}, True, length) for length in (100, 4096)]
    [50, 256]
    """
    if options["mechanism"] == "softmax":
        return 0
    given = {name: x for name, x in _with_defaults(options).items() if x is not None}
    reach = exact_reach(options, is_causal)
    return max(reach + 1, min((length + 1) // 2, max(2 * reach, least_tokens(options["mechanism"], given))))


def _with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    kind = MECHANISMS[options["mechanism"]]
    return {**kind.options(), **kind.without_aliases({name: x for name, x in options.items() if name != "mechanism"})}


def seeded(options: Mapping[str, Any], seed: int, layer: int, number: int) -> dict[str, Any]:
    """The options with a seed of their own wherever something is drawn."""
    found = dict(options)
    if isinstance(found.get("far"), Mapping):
        found["far"] = seeded(found["far"], seed, layer, number)
    if "seed" in MECHANISMS[found["mechanism"]].options():
        found.setdefault("seed", (seed * 1009 + layer) * 101 + number)
    if found.get("mechanism") == "performer":
        found.setdefault("per_head", True)
    return found


def with_causal_form(choices: Sequence[dict[str, Any]], shape: tuple[int, int, int], name: str) -> list[dict[str, Any]]:
    """The candidates that have a causal form."""
    found = []
    for choice in choices:
        options = seeded(choice, 0, 0, 0)
        if create(options.pop("mechanism"), *shape, **options).causal:
            found.append(choice)
    if not found:
        raise ValueError(
            f"candidates: none of {[c['mechanism'] for c in choices]} has a causal form, which layer {name!r} needs; "
            "add for example {'mechanism': 'local', 'window': 64}"
        )
    return found
