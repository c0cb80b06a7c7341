"""Checks that several packages share. Messages say the argument, what was given, what is expected, how to fix it."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "check_attention",
    "check_chunk_size",
    "check_flag",
    "check_keys",
    "check_mask",
    "check_option",
    "check_options",
    "check_positive",
    "check_queries",
    "check_scale",
    "check_value_width",
    "describe_shape",
    "missing_package",
    "nearest",
    "refuse_attn_mask",
    "refuse_causal",
    "refuse_dropout",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def describe_shape(x: Any) -> str:
    """The shape of a tensor, or the type of anything else, for a message."""
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def nearest(name: object, choices: Iterable[str]) -> str:
    """'; did you mean ...?' where something close exists, else an empty string."""
    close = difflib.get_close_matches(str(name), list(choices), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_option(argument: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is not among `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{argument}={value!r} is not known; expected one of {choices}{nearest(value, choices)}")


def check_options(where: str, given: Iterable[str], valid: Iterable[str], of_call: Iterable[str] = ()) -> None:
    """Refuse unknown option names; `of_call` are arguments that people give to `create` but that belong to the call."""
    valid = list(valid)
    for name in given:
        if name in valid:
            continue
        hint = nearest(name, valid)
        if not hint and (close := difflib.get_close_matches(name, list(of_call), n=1)):
            hint = f"; {close[0]} is an argument of the call: attn(q, k, v, {close[0]}=...)"
        hint = f"{hint} Valid" if hint.endswith("?") else f"{hint}; valid"
        raise TypeError(f"{where} has no option {name!r}{hint} options: {sorted(valid)}")


def named_mechanism(argument: str, options: Mapping[str, Any]) -> str:
    """The mechanism that a dict of options names."""
    name = options.get("mechanism")
    if not isinstance(name, str):
        raise ValueError(
            f"{argument}={dict(options)!r} must name its mechanism, for example "
            '{"mechanism": "performer", "num_features": 256}'
        )
    return name


def check_positive(argument: str, value: object, least: int = 1) -> None:
    """Refuse anything but an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        # Of numpy, say: it would be refused later, where a configuration is written as JSON.
        hint = "; use int(...)" if isinstance(value, numbers.Integral) and not isinstance(value, bool) else ""
        raise TypeError(
            f"{argument} must be an integer of at least {least}, got {value!r} ({type(value).__name__}){hint}"
        )
    if value < least:
        raise ValueError(f"{argument} must be at least {least}, got {value}")


def check_scale(scale: object) -> None:
    """Refuse a scale that is not a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None for the mechanism's default, got {scale!r}")


def _check_tensor(argument: str, x: object, layout: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{argument} must be a tensor of shape {layout}, got {type(x).__name__}")
    if x.dim() != 4:
        hint = ""
        if x.dim() == 3:
            hint = f"; for (batch, length, width) split the heads first, or use {argument}.unsqueeze(1) for one head"
        raise ValueError(f"{argument} must have 4 dimensions {layout}, got {describe_shape(x)}{hint}")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{argument} must be a floating-point tensor, got {x.dtype}; convert it with {argument}.float()"
        )


def check_queries(q: object, head_dim: int, heads: int | None) -> None:
    """q (B, H, L, D) fits a mechanism built for `head_dim` and, if it was told, `heads`."""
    _check_tensor("q", q, "(batch, heads, length, head_dim)")
    assert isinstance(q, Tensor)
    if q.shape[-1] != head_dim:
        raise ValueError(
            f"q has head width {q.shape[-1]} ({describe_shape(q)}), but the mechanism was created with "
            f"head_dim={head_dim}; the layout is (batch, heads, length, head_dim)"
        )
    if q.shape[1] == 0:
        raise ValueError(
            f"q has no heads ({describe_shape(q)}); expected (batch, heads, length, head_dim) with one or more"
        )
    if heads is not None and q.shape[1] != heads:
        raise ValueError(f"q has {q.shape[1]} heads ({describe_shape(q)}), but the mechanism was created with {heads=}")


def check_keys(k: object, v: object, head_dim: int, kv_heads: int | None) -> None:
    """k (B, H, S, D) and v (B, H, S, E) fit each other and the mechanism."""
    _check_tensor("k", k, "(batch, heads, length, head_dim)")
    _check_tensor("v", v, "(batch, heads, length, value_dim)")
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    if k.shape[-1] != head_dim:
        raise ValueError(f"k has head width {k.shape[-1]} ({describe_shape(k)}), expected head_dim={head_dim}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in batch, heads and length, got k {describe_shape(k)} and v {describe_shape(v)}"
        )
    if k.shape[1] == 0:
        raise ValueError(
            f"k has no heads ({describe_shape(k)}); expected (batch, heads, length, head_dim) with one or more"
        )
    if kv_heads is not None and k.shape[1] != kv_heads:
        raise ValueError(
            f"k has {k.shape[1]} heads ({describe_shape(k)}), but the mechanism was created with {kv_heads=}"
        )
    if k.device != v.device or k.dtype != v.dtype:
        raise ValueError(
            f"k and v must share device and dtype, got {k.device} {k.dtype} and {v.device} {v.dtype}; use v = v.to(k)"
        )


def check_value_width(v: Tensor) -> None:
    """Refuse values of width 0: a state would hold nothing."""
    if v.shape[-1] == 0:
        raise ValueError(f"v must have a width of at least 1, got {describe_shape(v)}: there is nothing to average")


def check_attention(q: Any, k: Any, v: Any, *, head_dim: int, heads: int | None, kv_heads: int | None) -> None:
    """q, k and v fit each other: same batch, device and dtype; query heads a multiple of key heads."""
    check_queries(q, head_dim, heads)
    check_keys(k, v, head_dim, kv_heads)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch size, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}; expected equal numbers, or grouped-query heads with "
            "q's a multiple of k's"
        )
    if q.device != k.device or q.dtype != k.dtype:
        raise ValueError(
            f"q and k must share device and dtype, got {q.device} {q.dtype} and {k.device} {k.dtype}; use k = k.to(q)"
        )


def check_mask(argument: str, mask: object, batch: int, length: int, device: torch.device) -> None:
    """A padding mask is (batch, length), bool, True = real."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"{argument} must be a bool tensor of shape ({batch}, {length}), got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{argument} must be bool with True for real tokens, got {mask.dtype}; convert it with {argument}.bool() "
            "if non-zero means real"
        )
    if tuple(mask.shape) != (batch, length):
        raise ValueError(
            f"{argument} must have shape (batch, length) = ({batch}, {length}), got {describe_shape(mask)}"
        )
    if mask.device != device:
        raise ValueError(f"{argument} is on {mask.device}, the tokens are on {device}; move it with .to(...)")


def refuse_attn_mask(attn_mask: object) -> None:
    """Mechanisms need not form the score matrix, so they take no mask of its shape."""
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not supported: mechanisms need not form the (L, S) score matrix. Use is_causal=True for a "
            "causal mask and key_mask= (batch, S), bool, True = real, for padding"
        )


def refuse_dropout(dropout_p: object) -> None:
    """Dropout of attention weights has no meaning where the weights are never formed."""
    if dropout_p != 0.0:
        raise ValueError(
            f"dropout_p={dropout_p!r} is not supported: mechanisms need not form the weights that it would drop. Apply "
            "dropout to the output instead"
        )


def check_causal_lengths(q: Tensor, k: Tensor) -> None:
    """A causal call has as many queries as keys."""
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"is_causal=True needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}: where the queries stand "
            "is ambiguous. Use scan(q, k, v, state) to continue a sequence"
        )


def check_head_counts(heads: int, kv_heads: int) -> None:
    """Every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")


def check_head_dim(dim: int, heads: int, head_dim: int | None) -> None:
    """The model width splits into heads, unless their width is given."""
    if head_dim is None and dim % heads:
        raise ValueError(f"dim={dim} must be a multiple of heads={heads}, or give head_dim=")


def check_number(argument: str, value: object, low: float, high: float = math.inf, *, closed: bool = False) -> None:
    """Refuse anything but a number above `low` (from `low` on, if closed) and below `high`; numpy's have no JSON."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low < value < high or (closed and value == low)):  # type: ignore[operator]
        least = f"at least {low:g}" if closed else f"above {low:g}"
        most = "" if high == math.inf else f" and below {high:g}"
        raise ValueError(f"{argument} must be a number {least}{most}, got {value!r}")


def check_flag(argument: str, value: object) -> None:
    """Refuse anything but True and False: a string or a tensor would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r} ({type(value).__name__})")


def check_chunk_size(chunk_size: object) -> None:
    """Refuse anything but None and a positive integer."""
    if chunk_size is not None:
        check_positive("chunk_size", chunk_size)


def refuse_causal(name: str, reason: str) -> NoReturn:
    """Say why a mechanism has no causal form."""
    raise ValueError(
        f"{name} cannot be causal: {reason}. Choose one of list_mechanisms(causal=True), for example 'multipole' or "
        "'hybrid', or call it with is_causal=False"
    )


def missing_package(what: str, package: str, extra: str) -> ModuleNotFoundError:
    """The error to raise where a package of an extra is not installed.

    >>> print(missing_package("reading wav files", "soundfile", "train"))
    reading wav files needs soundfile, which is not installed: pip install "subquad[train]"
    """
    return ModuleNotFoundError(
        f'{what} needs {package}, which is not installed: pip install "subquad[{extra}]"', name=package
    )
