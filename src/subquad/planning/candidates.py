"""What a plan chooses from: one list, each row a mechanism with settings from cheap to expensive.

Mechanisms with a kernel of their own (linear, efficient, relu) or that must be trained first (Linformer, Hedgehog) do
not estimate softmax attention; their error without training says nothing, so no plan proposes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..mechanisms import MECHANISMS, create
from ..mechanisms.base import Mechanism

__all__ = [
    "CANDIDATES",
    "DEGREE_1",
    "PLANNABLE",
    "SDERF",
    "Sweep",
    "calibrated",
    "error_keeping",
    "least_tokens",
    "make_candidate",
    "sweeps",
    "with_seed",
]

Options = dict[str, Any]

DEGREE_1: Options = {"mechanism": "taylor", "degree": 1, "center": True}
SDERF: Options = {"features": "sderf", "antithetic": True, "center": True}


def _values(name: str, values: Iterable[int], **fixed: Any) -> tuple[Options, ...]:
    return tuple({name: value, **fixed} for value in values)


# Times of neighbours in a row differ by less than half: a plan that is one step too careful is still a good one.
# Clusters per chunk of keys, and keys that a query evaluates exactly beside them; {} has the default options.
MULTIPOLE: tuple[Options, ...] = (
    {"clusters": 8, "exact_keys": 64},
    {"clusters": 16, "exact_keys": 64},
    {"clusters": 16, "exact_keys": 128},
    {"clusters": 24, "exact_keys": 160},
    {},
    {"clusters": 48, "exact_keys": 256},
    {"clusters": 48, "exact_keys": 512},
    {"clusters": 64, "exact_keys": 1024},
)
CLUSTERS = (25, 35, 50, 70, 100, 140, 200)
FEATURES = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# To add a mechanism, add a row: plans, `subquad error`'s notes and the report's recommendations follow.
CANDIDATES: tuple[tuple[str, tuple[Options, ...]], ...] = (
    ("multipole", MULTIPOLE),
    ("performer", _values("num_features", FEATURES, features="hyperbolic")),
    ("performer", _values("num_features", FEATURES, features="hyperbolic", center=True)),
    ("performer", _values("num_features", FEATURES, features="oprf", antithetic=True)),
    ("performer", _values("num_features", FEATURES, **SDERF)),
    ("taylor", ({"degree": 1, "center": True},)),
    ("taylor", ({"degree": 2, "hermite": True},)),
    ("taylor", ({"degree": 2},)),
    ("hybrid", _values("window", (16, 64, 128, 256), sinks=4, far=DEGREE_1)),
    ("hybrid", _values("window", (16, 64, 128), sinks=4, far={"mechanism": "performer", **SDERF, "num_features": 128})),
    ("local", _values("window", (16, 24, 32, 48, 64, 96, 128, 192, 256))),
    ("clustered", _values("clusters", CLUSTERS)),
    ("improved-clustered", _values("clusters", CLUSTERS, topk=32)),
    ("improved-clustered", _values("clusters", (100, 140, 200, 300), topk=64)),
    ("nystrom", _values("landmarks", (32, 64, 128))),
    ("lsh", _values("rounds", (1, 4))),
)
PLANNABLE = tuple(dict.fromkeys(name for name, _ in CANDIDATES))


@dataclass(frozen=True)
class Sweep:
    """Settings of one mechanism from cheap to expensive; an object from outside has one."""

    mechanism: str
    options: tuple[Options, ...]
    given: Mechanism | None = None


def least_tokens(mechanism: str, options: Options) -> int:
    """On fewer tokens than this a setting sees nearly everything, and its error there says nothing about more tokens.

    >>> least_tokens("local", {"window": 64}), least_tokens("taylor", {"degree": 1})
    (512, 0)
    """
    if "error" in options:
        return 1024  # two chunks
    if mechanism == "lsh":
        return 16 * 64 * int(options.get("rounds", 4)) // 4
    sizes = [int(options[name]) for name in ("window", "clusters", "landmarks") if name in options]
    return max(8 * max(sizes, default=0), 4 * int(options.get("exact_keys", 0)))


def sweeps(mechanisms: Iterable[str | Mechanism] | None, *, is_causal: bool, cross: bool) -> list[Sweep]:
    """The sweeps of the mechanisms asked for, or of all that can do what the call needs."""
    if isinstance(mechanisms, str | Mechanism):
        mechanisms = [mechanisms]
    chosen: list[Sweep] = []
    for item in PLANNABLE if mechanisms is None else mechanisms:
        if isinstance(item, Mechanism):
            chosen.append(Sweep(item.name, ({},), item))
            continue
        checks.check_option("mechanisms", item, MECHANISMS)
        if item == "softmax":
            continue  # always there, as the exact answer
        if item not in PLANNABLE:
            raise ValueError(
                f"mechanisms: {item!r} does not estimate softmax attention without training, so its error on a sample "
                f"says nothing; expected some of {sorted(PLANNABLE)}, or an object that you have trained"
            )
        cls = MECHANISMS[item]
        if mechanisms is not None and is_causal and not cls.causal:
            checks.refuse_causal(item, cls.causal_refusal)
        if mechanisms is not None and cross and not cls.cross:
            raise ValueError(f"mechanisms: {item!r} needs as many queries as keys; leave it out")
        if (cls.causal or not is_causal) and (cls.cross or not cross):
            chosen += [Sweep(name, options) for name, options in CANDIDATES if name == item]
    return chosen


def error_keeping(target: float) -> Sweep:
    """What keeps to an error by itself, at any length: more expensive than a fixed number of exact keys, which needs an
    input as long as the length to be judged."""
    return Sweep("multipole", ({"error": target},))


def with_seed(name: str, options: Options, seed: int) -> Options:
    """The same options with `seed` wherever something is drawn, also in a far field.

    >>> with_seed("lsh", {"rounds": 1}, 3), with_seed("local", {"window": 8}, 3)
    ({'rounds': 1, 'seed': 3}, {'window': 8})
    """
    options = dict(options)
    far = options.get("far")
    if isinstance(far, dict) and far.get("mechanism") in MECHANISMS:  # else whoever makes it says what is wrong
        options["far"] = with_seed(far["mechanism"], far, seed)
    if "seed" in MECHANISMS[name].options():
        options["seed"] = seed
    return options


def calibrated(attend: Mechanism, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Mechanism:
    """`attend`, calibrated on q and k where it uses calibration; in self attention padding is no query either."""
    if attend.uses_calibration:
        own = key_mask if q.shape[2] == k.shape[2] else None
        with torch.no_grad():
            attend.calibrate(q.detach(), k.detach(), key_mask=key_mask, query_mask=own)
    return attend


def make_candidate(sweep: Sweep, options: Options, seed: int, q: Tensor, k: Tensor) -> Mechanism:
    """The mechanism with these options, for heads like these, not calibrated yet. All heads of a layer share one draw,
    which depends on the seed alone: the whole layer has the draw that is looked at here, with some of its heads."""
    if sweep.given is not None:
        return sweep.given
    own = with_seed(sweep.mechanism, options, seed)
    return create(sweep.mechanism, q.shape[-1], q.shape[1], k.shape[1], **own)
