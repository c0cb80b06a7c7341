"""What every mechanism is: an `nn.Module` without projections of its own that maps q, k, v to an output.

A new mechanism is one file: a final class below `Mechanism` (or `Kernelised`, for a feature map plus a state), with
its facts as class attributes, its options as keyword arguments of `__init__`, and its name in the literal dict of
`mechanisms/__init__.py`. Being listed there is what puts it under the contract tests.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import checks
from ..features.calibration import Calibration, calibrations
from ..features.precision import full_precision
from ..features.random import apply_statistics
from ..features.seeded import Projection
from ..kernels.operator import Call
from ..kernels.padding import empty_output
from ..rollback import Checkpoints

__all__ = ["SHAPE", "Mechanism", "as_stored", "check_call", "without_padding"]


# What a layer says of every mechanism; the other arguments of a class are its options.
SHAPE = ("head_dim", "heads", "kv_heads")
# Options of each class: reading a signature takes a fifth of a decode step, whose state names its origin by them. Not a
# functools.cache, of which torch.compile warns.
_OPTIONS: dict[type, dict[str, Any]] = {}


def check_call(call: Call) -> None:
    """Refuse what a mechanism with one fast form and one definition does not know."""
    if call.backend is not None:
        checks.check_option("backend", call.backend, ("reference",))


def as_stored(x: Tensor) -> Tensor:
    """x with its values in memory: of a lazy negation, as `z.conj().imag` is one, kernels would read the opposite."""
    if torch.compiler.is_compiling():  # it cannot ask, and the operators themselves look
        return x
    return x.resolve_neg() if x.is_neg() else x


def without_padding(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """k and v with zeros at masked keys: a weight of 0 times NaN would still be NaN, forward and in the gradient."""
    k, v = as_stored(k), as_stored(v)
    if key_mask is None:
        return k, v
    hidden = key_mask.logical_not().unsqueeze(1).unsqueeze(-1)
    return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


class Mechanism(nn.Module):
    """Base of all mechanisms.

    Facts, as class attributes:
        name, equation, paper, complexity: text for `describe`
        causal, recurrent, exact:  has a causal form; has a `scan`; equals softmax attention
        kernelised:                is a feature map and a sum (`Kernelised`)
        constant_memory:           the state of its `scan` does not grow with the context
        quadratic:                 its time has a term in the square of the length, however small
        causal_refusal:            why there is no causal form, where there is none
        cross:                     there may be fewer or more queries than keys
        each_query_alone:          no query changes what another one gets
        zero_at_padding:           the output of a token whose key is masked is 0
        follows_autocast:          products are in autocast's dtype; the others are outside of it, in float32 or wider
        leaks_by_selection:        in causal calls, which keys a query sees can depend on later tokens
        CONTRACT_VARIANTS:         option sets that the contract tests run; every option appears in one of them
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    paper: ClassVar[str]
    complexity: ClassVar[str]
    causal: bool = True
    recurrent: bool = False
    exact: bool = False
    kernelised: bool = False
    causal_refusal: str = ""
    # Other names of options that are accepted, and what they stand for.
    aliases: ClassVar[dict[str, str]] = {}
    cross: bool = True
    constant_memory: bool = False
    quadratic: bool = False
    # Whether the states of its `scan` merge, and whether they crop by themselves.
    merges: bool = True
    crops: bool = False
    each_query_alone: bool = False
    zero_at_padding: bool = False
    follows_autocast: bool = False
    leaks_by_selection: bool = False
    # Whether weights can be negative: then a normaliser can come close to 0 and outputs are unbounded.
    signed: bool = False
    # Whether the keys given are read at all; Reformer's shared form makes its own from the queries.
    uses_keys: bool = True
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def __init__(self, head_dim: int, heads: int | None = None, kv_heads: int | None = None) -> None:
        super().__init__()
        checks.check_positive("head_dim", head_dim)
        for argument, count in (("heads", heads), ("kv_heads", kv_heads)):
            if count is not None:
                checks.check_positive(argument, count)
        if heads is not None and kv_heads is not None:
            checks.check_head_counts(heads, kv_heads)
        self.head_dim = head_dim
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        # What `forward` calls in place of `_attend`, with the mechanism in front of the same arguments: a sequence that
        # is cut over processes sets it (subquad.parallel), and a copy of the module keeps it.
        self.attend_override: Callable[..., Tensor] | None = None

    @classmethod
    def options(cls) -> dict[str, Any]:
        """Option names and defaults, without head_dim, heads and kv_heads."""
        found = _OPTIONS.get(cls)
        if found is None:
            parameters = inspect.signature(cls.__init__).parameters.values()
            fixed = ("self", *SHAPE)
            found = {p.name: p.default for p in parameters if p.name not in fixed and p.kind is not p.VAR_KEYWORD}
            _OPTIONS[cls] = found
        return dict(found)

    @classmethod
    def without_aliases(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Options under their own names, where some were given by another name that is accepted.

        >>> import subquad as sq
        >>> sq.create("local", head_dim=8, global_tokens=2).sinks
        2
        """
        named = dict(options)
        for alias, name in cls.aliases.items():
            if alias in named:
                if name in named:
                    raise TypeError(f"{cls.name}: {alias} is another name of {name}; give one of them")
                named[name] = named.pop(alias)
        return named

    def config(self) -> dict[str, Any]:
        """Name, sizes and options as plain data: `create(**config)` makes the mechanism again.

        An option that is a function is refused: code cannot be written to JSON, and unpickling it is not safe.

        >>> import json, subquad as sq
        >>> attn = sq.create("performer", head_dim=8, num_features=16, seed=1)
        >>> sq.create(**json.loads(json.dumps(attn.config()))).config() == attn.config()
        True
        """
        config: dict[str, Any] = {"mechanism": self.name, "head_dim": self.head_dim}
        if self.heads is not None:
            config["heads"] = self.heads
        if self.kv_heads is not None and self.kv_heads != self.heads:
            config["kv_heads"] = self.kv_heads
        for option in self.options():
            value = getattr(self, option)
            if isinstance(value, Mechanism):
                value = value.config()
            if callable(value):
                raise TypeError(
                    f"the option {option}={value!r} of {self.name!r} is a callable, which has no JSON form; "
                    "use a named choice, or build the mechanism in code and load its state_dict"
                )
            config[option] = value
        return config

    def extra_repr(self) -> str:
        shown = {option: getattr(self, option, None) for option in self.options()}
        return ", ".join([f"head_dim={self.head_dim}", *(f"{k}={v!r}" for k, v in shown.items() if v is not None)])

    def need_heads(self, why: str) -> int:
        """The number of KV heads, or an error that says which option needs it."""
        if self.kv_heads is None:
            raise ValueError(f"{self.name} with {why} has parameters per head: pass heads= (and kv_heads= if grouped)")
        return self.kv_heads

    def resolve_scale(self, scale: float | None) -> float:
        """The caller's scale, or 1/sqrt(head_dim)."""
        if scale is None:
            return 1.0 / math.sqrt(self.head_dim)
        checks.check_scale(scale)
        return float(scale)

    # -- the public calls -------------------------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = True,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Attention: q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E) -> (B, Hq, L, E) in v's dtype.

        is_causal:  token i sees tokens 0..i; needs L = S (use `scan` to continue a sequence)
        scale:      multiplies q.k inside the kernel; None = the mechanism's default
        key_mask:   (B, S) bool, True = real; masked keys have exactly zero weight
        query_mask: (B, L) bool, True = real; masked queries give 0
        backend, chunk_size: which implementation computes, and how many tokens at a time; None = the fastest

        attn_mask, dropout_p, enable_gqa are torch's arguments: a mask or dropout of the (L, S) weights is refused,
        since they are never formed; grouped-query heads are always recognised.
        """
        checks.refuse_attn_mask(attn_mask)
        checks.refuse_dropout(dropout_p)
        checks.check_flag("is_causal", is_causal)
        checks.check_chunk_size(chunk_size)
        checks.check_attention(q, k, v, head_dim=self.head_dim, heads=self.heads, kv_heads=self.kv_heads)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        checks.check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q.device)
        if is_causal:
            if not self.causal:
                checks.refuse_causal(self.name, self.causal_refusal)
            checks.check_causal_lengths(q, k)
        if q.shape[0] == 0 or v.shape[-1] == 0:
            return empty_output(q, k, v)  # of the last, odd-sized batch of a data loader
        q, (k, v) = as_stored(q), without_padding(k, v, key_mask)
        call = Call(self.resolve_scale(scale), key_mask, query_mask, backend, chunk_size)
        attend = self._attend if self.attend_override is None else partial(self.attend_override, self)
        with self._precision(q):
            out = attend(q, k, v, call, is_causal=is_causal)
        if query_mask is not None:
            out = out.masked_fill(~query_mask.unsqueeze(1).unsqueeze(-1), 0.0)
        if q.shape[2] == 0 or k.shape[2] == 0:
            # Nothing was computed, but the result is still a part of the graph: its gradients are 0, not absent.
            out = out + sum(x.flatten()[:0].sum() for x in (q, k, v))
        return out

    def scan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any = None,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Any]:
        """Consume any number of tokens (also one), causally, after those in `state`; returns (out, new state).

        q (B, Hq, L, D), k (B, H, L, D), v (B, H, L, E); `state=None` starts a sequence. The state is never changed in
        place. A `Checkpoints` in place of a state remembers the last tokens, so that they can be taken back.
        """
        if isinstance(state, Checkpoints):
            given = {"key_mask": key_mask, "scale": scale, "backend": backend, "chunk_size": chunk_size}
            with self._precision(q):
                return state.scan(self, q, k, v, **given)
        if not self.recurrent:
            raise NotImplementedError(
                f"{self.name} has no recurrent form, so it cannot scan; choose one of list_mechanisms(recurrent=True)"
            )
        checks.check_attention(q, k, v, head_dim=self.head_dim, heads=self.heads, kv_heads=self.kv_heads)
        checks.check_value_width(v)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"scan consumes tokens, so q and k must have the same length, got {q.shape[2]} and {k.shape[2]}; "
                "use absorb(k, v) and read(q, state) for cross attention"
            )
        checks.check_chunk_size(chunk_size)
        q, (k, v) = as_stored(q), without_padding(k, v, key_mask)
        call = Call(self.resolve_scale(scale), key_mask, None, backend, chunk_size)
        with self._precision(q):
            return self._scan(q, k, v, state, call)

    def absorb(
        self,
        k: Tensor,
        v: Tensor,
        state: Any = None,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """The state after keys k (B, H, S, D) and values v (B, H, S, E), to be read by later queries."""
        if not self.absorbs:
            raise NotImplementedError(f"{self.name} has no state to absorb into; see list_mechanisms(recurrent=True)")
        checks.check_keys(k, v, self.head_dim, self.kv_heads)
        checks.check_value_width(v)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        checks.check_chunk_size(chunk_size)
        k, v = without_padding(k, v, key_mask)
        call = Call(self.resolve_scale(scale), key_mask, None, backend, chunk_size)
        with self._precision(k):
            return self._absorb(k, v, state, call)

    def read(
        self,
        q: Tensor,
        state: Any,
        *,
        scale: float | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Attention of q (B, Hq, L, D) to all keys that were absorbed into `state` -> (B, Hq, L, E)."""
        if not self.absorbs:
            raise NotImplementedError(f"{self.name} has no state to read; see list_mechanisms(recurrent=True)")
        checks.check_queries(q, self.head_dim, self.heads)
        checks.check_chunk_size(chunk_size)
        call = Call(self.resolve_scale(scale), None, None, backend, chunk_size)
        with self._precision(q):
            return self._read(as_stored(q), state, call)

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        return nullcontext() if self.follows_autocast else full_precision(x)

    @property
    def absorbs(self) -> bool:
        """Whether it has `absorb` and `read`, for cross attention while decoding."""
        return type(self)._absorb is not Mechanism._absorb

    @property
    def uses_calibration(self) -> bool:
        """Whether it has statistics that `calibrate` fills; other mechanisms refuse to be calibrated.

        >>> import subquad as sq
        >>> [sq.create("performer", 8, heads=2, center=center).uses_calibration for center in (True, False)]
        [True, False]
        """
        return bool(calibrations(self))

    @property
    def is_random(self) -> bool:
        """Whether `redraw` changes anything: it, or a mechanism that it is made of, has a random part.

        >>> import subquad as sq
        >>> far = {"performer": True, "linear": False}
        >>> [sq.create("hybrid", 8, heads=2, far=name).is_random == random for name, random in far.items()]
        [True, True]
        """
        drawn = any(isinstance(module, Projection) for module in self.modules())
        return drawn or type(self).redraw is not Mechanism.redraw

    def redraw(self) -> None:
        """Resample every projection, hash function and starting point: the next draw of the same seed. Without anything
        random it does nothing."""
        for module in self.modules():
            if isinstance(module, Projection):
                module.redraw()

    def calibrate(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> None:
        """Gather statistics of sample queries (B, Hq, L, D) and keys (B, H, S, D); further calls add to them.

        A mechanism that uses none raises; ask `uses_calibration` first.
        """
        raise ValueError(f"{self.name} as configured uses no calibration; nothing was changed")

    def use_statistics(self, found: Calibration) -> None:
        """Take over statistics of all KV heads that were gathered elsewhere, in place of `calibrate`."""
        own = calibrations(self)
        if any(one.heads != found.heads for one in own):
            raise ValueError(
                f"{self.name} has statistics of {own[0].heads} KV heads, those given are of {found.heads}; make it "
                "with heads= and kv_heads= of the layer"
            )
        for one in own:
            one.assign(found.query_mean, found.key_mean, found.query_cov, found.key_cov, found.counts)
        apply_statistics(self)

    # -- what a mechanism implements: inputs are checked, masked keys and values are 0, the scale is a number, and
    # -- autocast is off, unless the mechanism follows it --------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement attention")

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not implement scan")

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not implement absorb")

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement read")
