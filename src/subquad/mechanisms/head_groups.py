"""Different mechanisms for different heads of one layer, and coordinates in which they err least.

    out[heads of group g] = mechanism_g(T q, T^-T k, v)[heads of group g]

Some heads look at their neighbours, some at the whole sequence: a window serves the first, features the second. With
`balance`, queries and keys are first brought to coordinates that suit the group's mechanism, which leaves every score
as it is, (T q).(T^-T k) = q.k. Mechanisms whose weights are no function of q.k (shared queries and keys, other kernels)
keep their coordinates. T comes from calibration:

    random features        the same covariance for queries and keys: several times less noise
    clusters of keys       E[q q^T] = 1: keys that make the same scores are near each other
    clusters of queries    Cov(k) = 1, in the same way; what all keys share changes no weight
    anything else          as they are
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from .. import checks
from ..features.calibration import Calibration, balancing_map, calibrations, whitening_map
from ..features.precision import Float32Buffers
from ..features.random import apply_statistics
from ..features.seeded import Projection
from ..kernels.operator import Call
from ..state import Movable, check_continues, check_same, merge, register_state
from .base import SHAPE, Mechanism
from .clustered import Clustered, ImprovedClustered
from .multipole import Multipole

__all__ = ["HeadGroups", "HeadGroupsState"]


@dataclass(frozen=True)
class HeadGroupsState(Movable):
    """The states of all groups, in their order. Immutable; merges group by group."""

    parts: tuple[Any, ...]
    origin: str = ""

    def merge(self, later: HeadGroupsState) -> HeadGroupsState:
        """This context followed by `later`'s."""
        check_same(self, later)
        return replace(self, parts=tuple(merge(a, b) for a, b in zip(self.parts, later.parts, strict=True)))


register_state(HeadGroupsState)


class _Balance(Float32Buffers):
    """The statistics behind T, and T (H, D, D) for queries and T^-T for keys."""

    query_map: Tensor
    key_map: Tensor

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.calibration = Calibration(heads, head_dim)
        for name in ("query_map", "key_map"):
            self.register_buffer(name, torch.eye(head_dim, dtype=torch.float32).repeat(heads, 1, 1))

    def refresh(self, part: Mechanism, heads: Tensor) -> None:
        """T of some heads, for their mechanism, from the statistics."""
        stats = self.calibration
        if isinstance(part, Multipole):
            found = whitening_map(stats.query_mean[heads], stats.query_cov[heads])
        elif isinstance(part, (Clustered, ImprovedClustered)):
            keys = stats.key_cov[heads]
            found = whitening_map(torch.zeros_like(keys[..., 0]), keys)[::-1]
        else:
            found = balancing_map(stats.query_cov[heads], stats.key_cov[heads])
        with torch.no_grad():
            self.query_map[heads] = found[0].to(self.query_map.dtype)
            self.key_map[heads] = found[1].to(self.key_map.dtype)

    def moved(self, part: Calibration, heads: Tensor) -> None:
        """The statistics of some heads as they are in the new coordinates."""
        stats = self.calibration
        to_query, to_key = (m[heads].to(torch.float64) for m in (self.query_map, self.key_map))
        part.assign(
            torch.einsum("hij,hj->hi", to_query, stats.query_mean[heads].to(torch.float64)),
            torch.einsum("hij,hj->hi", to_key, stats.key_mean[heads].to(torch.float64)),
            to_query @ stats.query_cov[heads].to(torch.float64) @ to_query.mT,
            to_key @ stats.key_cov[heads].to(torch.float64) @ to_key.mT,
            stats.counts,
        )

    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x (B, G H, L, D) in the new coordinates; one matrix per KV head."""
        groups = x.shape[1] // matrix.shape[0]
        matrix = matrix.to(torch.promote_types(x.dtype, torch.float32)).repeat_interleave(groups, 0)
        return (x.to(matrix.dtype).contiguous() @ matrix.mT).to(x.dtype)


def _parse(groups: Iterable[Mapping[str, Any]], kv_heads: int) -> list[tuple[list[int], dict[str, Any]]]:
    """(KV heads, options with "mechanism") per group; every head in exactly one."""
    if not isinstance(groups, Iterable) or isinstance(groups, str | Mapping):
        raise TypeError(f"groups must be a list of dicts, one per group of heads, got {groups!r}")
    parsed: list[tuple[list[int], dict[str, Any]]] = []
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise TypeError(f"groups[{number}] must be a dict with heads and a mechanism, got {group!r}")
        options = dict(group)
        heads = options.pop("heads", None)
        if not isinstance(heads, Sequence) or isinstance(heads, str) or not heads:
            raise ValueError(
                f"groups[{number}]={dict(group)!r} must list its KV heads, for example "
                '{"heads": [0, 3], "mechanism": "local", "window": 64}'
            )
        if "mechanism" not in options:
            raise ValueError(f"groups[{number}]={dict(group)!r} must name its mechanism")
        if not all(type(h) is int for h in heads):
            raise TypeError(f"groups[{number}]: heads must be numbers of KV heads, got {list(heads)!r}")
        parsed.append((list(heads), options))
    flat = sorted(h for heads, _ in parsed for h in heads)
    if flat != list(range(kv_heads)):
        raise ValueError(f"groups must name each of the {kv_heads} KV heads exactly once, got {flat}")
    return parsed


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """(first, count) of the runs of consecutive numbers.

    >>> _runs([4, 5, 6, 2, 0, 1])
    [(4, 3), (2, 1), (0, 2)]
    """
    runs: list[tuple[int, int]] = []
    for number in numbers:
        start, count = runs[-1] if runs else (number, 0)
        if start + count == number:
            runs[-1:] = [(start, count + 1)]
        else:
            runs.append((number, 1))
    return runs


@final
class HeadGroups(Mechanism):
    """Mechanisms for groups of heads.

    groups:  [{"heads": [KV heads], "mechanism": name or object, **options}, ...], every KV head in one of them; the
             query heads that share a KV head go with it
    balance: T q and T^-T k instead of q and k where that helps, T from calibrate(q, k)

    It is causal, recurrent and of constant memory where all of its mechanisms are.

    >>> import torch, subquad as sq
    >>> attn = sq.create("head-groups", 8, 3, groups=[
    ...     {"heads": [0, 2], "mechanism": "local", "window": 4},
    ...     {"heads": [1], "mechanism": "taylor", "degree": 1}])
    >>> q, k, v = torch.randn(3, 1, 3, 20, 8)
    >>> out = attn(q, k, v, is_causal=True)
    >>> torch.allclose(out[:, :1], sq.attention(q, k, v, "local", window=4, is_causal=True)[:, :1], atol=1e-6)
    True
    """

    name = "head-groups"
    equation = "mechanism_g(T q, T^-T k, v) for the heads of group g"
    paper = "a mechanism per head, after what each head does"
    complexity = "that of its mechanisms"
    recurrent = True
    constant_memory = True
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "groups": [
                {"heads": [1], "mechanism": "local", "window": 4, "sinks": 1},
                {"heads": [0], "mechanism": "performer", "num_features": 24, "seed": 3},
            ]
        },
        {
            "groups": [{"heads": [1, 0], "mechanism": "performer", "num_features": 24, "seed": 3}],
            "balance": True,
        },
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        groups: Iterable[Mapping[str, Any]],
        balance: bool = False,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        count = self.need_heads("groups of heads")
        assert self.heads is not None
        checks.check_flag("balance", balance)
        self.balance = balance
        per = self.heads // count
        self.members = nn.ModuleList()
        self._heads: list[list[int]] = []
        from . import create  # the package lists this file as well

        for numbers, options in _parse(groups, count):
            made = create(options.pop("mechanism"), head_dim, len(numbers) * per, len(numbers), **options)
            self.members.append(made)
            self._heads.append(numbers)
        for i, numbers in enumerate(self._heads):
            self.register_buffer(f"kv_{i}", torch.tensor(numbers, dtype=torch.int64), persistent=False)
        self._runs = [_runs(numbers) for numbers in self._heads]
        # What the output is put together from, head by head: (first head, group, place in its output, how many).
        self._pieces = sorted(
            (start * per, i, sum(n for _, n in runs[:j]) * per, count * per)
            for i, runs in enumerate(self._runs)
            for j, (start, count) in enumerate(runs)
        )
        self.balancing = _Balance(count, head_dim) if balance else None
        parts = list(self.parts())
        self.signed = any(part.signed for part in parts)
        self.cross = all(part.cross for part in parts)
        self.merges = all(part.merges for part in parts)
        self.leaks_by_selection = any(part.leaks_by_selection for part in parts)
        self.each_query_alone = all(part.each_query_alone for part in parts)
        self.zero_at_padding = any(part.zero_at_padding for part in parts)
        self.quadratic = any(part.quadratic for part in parts)
        self.causal = all(part.causal for part in parts)
        self.recurrent = all(part.recurrent for part in parts)
        self.constant_memory = all(part.constant_memory for part in parts)
        self.exact = all(part.exact for part in parts) and not balance
        self.causal_refusal = next((part.causal_refusal for part in parts if not part.causal), "")

    def resolve_scale(self, scale: float | None) -> float:
        """The caller's scale, or NaN: the groups may have different defaults, so each takes its own."""
        return math.nan if scale is None else super().resolve_scale(scale)

    def parts(self) -> Iterable[Mechanism]:
        """The mechanisms, in the order of the groups."""
        for part in self.members:
            assert isinstance(part, Mechanism)
            yield part

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups as plain data: their KV heads and what their mechanisms are."""
        rows = []
        for numbers, part in zip(self._heads, self.parts(), strict=True):
            config = part.config()
            rows.append({"heads": list(numbers), **{k: v for k, v in config.items() if k not in SHAPE}})
        return rows

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, groups={self._heads}, balance={self.balance}"

    def calibrate(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> None:
        """Add sample queries and keys to the statistics of every group, in the balanced coordinates if there are."""
        checks.check_attention(q, k, k, head_dim=self.head_dim, heads=self.heads, kv_heads=self.kv_heads)
        if self.balancing is not None:
            # The coordinates change with every batch, so the parts take the statistics over instead of adding up.
            self.balancing.calibration.update(q, k, key_mask, query_mask)
            self._spread()
            return
        needy = [i for i, part in enumerate(self.parts()) if calibrations(part)]
        if not needy:
            super().calibrate(q, k)
        for i, part in enumerate(self.parts()):
            if i in needy:
                part.calibrate(*self._split(i, q, k)[:2], key_mask=key_mask, query_mask=query_mask)

    def use_statistics(self, found: Calibration) -> None:
        """Take over statistics of all KV heads that were gathered elsewhere."""
        if self.balancing is not None:
            self.balancing.calibration.assign(
                found.query_mean, found.key_mean, found.query_cov, found.key_cov, found.counts
            )
            self._spread()
            return
        for i, part in enumerate(self.parts()):
            heads = self.get_buffer(f"kv_{i}")
            for calibration in calibrations(part):
                calibration.assign(
                    found.query_mean[heads], found.key_mean[heads], found.query_cov[heads], found.key_cov[heads],
                    found.counts,
                )  # fmt: skip
            apply_statistics(part)

    def _spread(self) -> None:
        """From the statistics to the coordinates and to what the groups know in them."""
        assert self.balancing is not None
        for i, part in enumerate(self.parts()):
            heads = self.get_buffer(f"kv_{i}")
            if _has_coordinates(part):
                self.balancing.refresh(part, heads)
            for calibration in calibrations(part):
                self.balancing.moved(calibration, heads)
            apply_statistics(part)

    def _check_ready(self) -> None:
        if self.balancing is not None and not self.balancing.calibration.ready:
            raise RuntimeError("balance=True needs calibration: call calibrate(q, k) on sample data first")

    def _split(self, i: int, q: Tensor | None, *keys: Tensor) -> list[Any]:
        """q and the tensors of keys (k, or k and v) of group i, in its coordinates."""
        picked: list[Any] = [None if x is None else self._pick(i, x) for x in (q, *keys)]
        part = self.members[i]
        assert isinstance(part, Mechanism)
        if self.balancing is not None and _has_coordinates(part):
            self._check_ready()
            heads = self.get_buffer(f"kv_{i}")
            if q is not None:
                picked[0] = self.balancing(picked[0], self.balancing.query_map[heads])
            if keys:
                picked[1] = self.balancing(picked[1], self.balancing.key_map[heads])
        return picked

    def _pick(self, i: int, x: Tensor) -> Tensor:
        """The heads of group i: runs of them are views, which a few copies join faster than an index picks heads."""
        assert self.kv_heads is not None
        per = x.shape[1] // self.kv_heads
        found = [x.narrow(1, start * per, count * per) for start, count in self._runs[i]]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _joined(self, outs: list[Tensor]) -> Tensor:
        if len(self._pieces) == 1:
            return outs[0]
        return torch.cat([outs[i].narrow(1, start, count) for _, i, start, count in self._pieces], 1)

    @property
    def absorbs(self) -> bool:
        """Whether all of its mechanisms do."""
        return all(part.absorbs for part in self.parts())

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        outs = []
        for i, part in enumerate(self.parts()):
            rows, keys, values = self._split(i, q, k, v)
            outs.append(part._attend(rows, keys, values, _own(part, call), is_causal=is_causal))
        return self._joined(outs)

    def _origin(self, scale: float) -> str:
        # Draws and calibration of the parts are in the origins of their own states.
        balanced = "" if self.balancing is None else f" balance {self.balancing.calibration.fingerprint}"
        names = [type(part).__name__ for part in self.parts()]
        return f"head-groups {self._heads} of {names}{balanced} scale {scale:.9g}"

    def _states(self, state: Any, scale: float) -> Sequence[Any]:
        if state is None:
            return [None] * len(self._heads)
        check_continues(state, HeadGroupsState, self._origin(scale), "head-groups' scan() or absorb()")
        parts: tuple[Any, ...] = state.parts
        return parts

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, HeadGroupsState]:
        states = self._states(state, call.scale)
        outs, after = [], []
        for i, part in enumerate(self.parts()):
            rows, keys, values = self._split(i, q, k, v)
            out, grown = part._scan(rows, keys, values, states[i], _own(part, call))
            outs.append(out)
            after.append(grown)
        return self._joined(outs), HeadGroupsState(tuple(after), self._origin(call.scale))

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> HeadGroupsState:
        states = self._states(state, call.scale)
        after = []
        for i, part in enumerate(self.parts()):
            _, keys, values = self._split(i, None, k, v)
            after.append(part._absorb(keys, values, states[i], _own(part, call)))
        return HeadGroupsState(tuple(after), self._origin(call.scale))

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        states = self._states(state, call.scale)
        parts = enumerate(self.parts())
        return self._joined([part._read(self._split(i, q)[0], states[i], _own(part, call)) for i, part in parts])


def _own(part: Mechanism, call: Call) -> Call:
    """The call with the default scale of this mechanism where none was given."""
    return call._replace(scale=part.resolve_scale(None)) if math.isnan(call.scale) else call


def _has_coordinates(part: Mechanism) -> bool:
    """Whether a mechanism estimates a function of q.k, and errs differently in other coordinates."""
    if isinstance(part, Multipole):
        return True
    feature_map = getattr(getattr(part, "far", part), "feature_map", None)
    of_scores = part.uses_keys if feature_map is None else feature_map.estimates_softmax
    return of_scores and any(isinstance(x, (Calibration, Projection)) for x in part.modules())
