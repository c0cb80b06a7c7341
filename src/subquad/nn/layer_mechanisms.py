"""From a choice (a name, options, an object, or a list with one per layer) to the mechanisms of a model's layers.

Everything random in layer i is drawn from (seed, stream, i): layers differ, models with one seed agree, and nothing
else that draws from torch's generator is disturbed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .. import checks
from ..features.seeded import mix
from ..mechanisms import Mechanism, create
from .config import ModelConfig

__all__ = ["draw_seed", "layer_mechanisms", "make_mechanism", "per_layer"]

# One number per kind of attention, so that a decoder's self-attention and cross attention draw differently.
STREAMS = {"encoder": 0, "decoder": 1, "cross": 2}


def draw_seed() -> int:
    """One integer from torch's generator."""
    # An explicit device, because the default one may be 'meta', where no integer can be read back.
    return int(torch.randint(0, (1 << 63) - 1, (), device="cpu", dtype=torch.int64))


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator starts from `seed`; afterwards it is where it was."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reset every device
    try:
        yield
    finally:
        torch.set_rng_state(before)


def per_layer(options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Options given once for all layers: an integer seed among them, also of a far field, is mixed with the
    index, and an object is copied."""
    changed: dict[str, Any] = {}
    for name, value in options.items():
        if name == "seed" and isinstance(value, int):
            value = mix(value, index) >> 1
        elif isinstance(value, Mapping):
            value = per_layer(value, index)
        elif isinstance(value, Mechanism) and index:
            value = copy.deepcopy(value)
        changed[name] = value
    return changed


def make_mechanism(choice: Any, head_dim: int, heads: int, kv_heads: int | None, **options: Any) -> Mechanism:
    """A mechanism from a name, {"mechanism": name, **options} or an object; keyword options are added.

    >>> make_mechanism({"mechanism": "taylor", "degree": 1}, 8, 2, None).degree
    1
    """
    if isinstance(choice, Mapping):
        name = checks.named_mechanism("mechanism", choice)
        inside = {option: value for option, value in choice.items() if option != "mechanism"}
        return create(name, head_dim, heads, kv_heads, **{**inside, **options})
    return create(choice, head_dim, heads, kv_heads, **options)


def layer_mechanisms(config: ModelConfig, seed: int, stream: str, *, is_causal: bool) -> list[Mechanism]:
    """The mechanisms of all layers: `stream` is encoder, decoder or cross.

    An object given once is copied for every layer; a list is taken as it is. Linformer projections with
    sharing='layers' are tied to the first layer's.

    >>> config = ModelConfig(layers=2, heads=2, dim=16, kind="encoder", mechanism="performer")
    >>> first, second = layer_mechanisms(config, 0, "encoder", is_causal=False)
    >>> first.seed != second.seed, layer_mechanisms(config, 0, "encoder", is_causal=False)[1].seed == second.seed
    (True, True)
    """
    field = "cross_mechanism" if stream == "cross" else "mechanism"
    choice = getattr(config, field)
    each = isinstance(choice, Sequence) and not isinstance(choice, str)
    made: list[Mechanism] = []
    for index in range(config.layers):
        one = choice[index] if each else choice
        if isinstance(one, Mechanism):
            one = one if each or index == 0 else copy.deepcopy(one)
        elif isinstance(one, Mapping) and not each:
            one = per_layer(one, index)
        with _drawing_from(mix(mix(seed, STREAMS[stream]), index)):
            mechanism = make_mechanism(one, config.width, config.heads, config.kv_heads)
        if is_causal and not mechanism.causal:
            checks.refuse_causal(mechanism.name, mechanism.causal_refusal)
        if stream == "cross" and not (mechanism.cross and mechanism.recurrent):
            raise ValueError(
                f"{field}={mechanism.name!r} cannot read a memory token by token: what it gives one query depends on "
                "other queries or on the query's own place, or it keeps no state. Set cross_mechanism= to 'softmax' or "
                "to one of list_mechanisms(kernelised=True)"
            )
        made.append(mechanism)
    _tie(made)
    return made


def _tie(made: list[Mechanism]) -> None:
    shared = [m for m in made if getattr(m, "sharing", None) == "layers" and getattr(m, "projection", None) is not None]
    for mechanism in shared[1:]:
        if type(mechanism) is type(shared[0]):
            mechanism.tie(shared[0])  # type: ignore[operator]
