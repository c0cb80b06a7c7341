"""The state of attention: what remains of the past, in constant memory. A window, sinks, and sums for the rest.

A state is immutable: `absorb` and `merge` return a new one. States merge associatively and in order, so a prefix can be
cached once and a sequence can be cut over machines.
"""

from .checks import (
    Movable,
    check_continues,
    check_crop,
    check_fits,
    check_same,
    check_tokens_join,
    merge,
    register_state,
    state_bytes,
)
from .sums import Partial, Sums, finite, join, masked, row_weights, safe_divide
from .windowed import State, Tokens, take

__all__ = [
    "Movable",
    "Partial",
    "State",
    "Sums",
    "Tokens",
    "check_continues",
    "check_crop",
    "check_fits",
    "check_same",
    "check_tokens_join",
    "finite",
    "join",
    "masked",
    "merge",
    "register_state",
    "row_weights",
    "safe_divide",
    "state_bytes",
    "take",
]
