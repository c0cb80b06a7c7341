"""Multipole attention: far keys by cluster, the important ones exactly, one normaliser.

    out_i = (sum_{c far} e^{l_ic} vbar_c + sum_{j exact} e^{s q_i.k_j} v_j) / (the same with 1 for the values)
    l_ic  = s q_i.mu_c + min(cap, s^2 |q_i|^2 var_c / 2) + log n_c,                                    s = scale

Keys are cut into chunks, and the keys of a complete chunk into clusters of size n_c with mean key mu_c, mean value
vbar_c and variance var_c. Each query evaluates the clusters that matter to it key by key (`exact_keys`, or as many as
an `error` needs) and takes the others by their means, with the second-order term of their mass. Keys in no complete
chunk are exact, and in causal calls the query's own chunk is.

Clusters of keys instead of queries: the sibling of clustered attention (Vyas, Katharopoulos and Fleuret, 2020).
Related: Hooper et al., "Multipole Attention", 2025; Kang et al., "Fast Multipole Attention", 2023.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import checks
from ..features.precision import full_precision
from ..kernels.kmeans import ClusterDraw
from ..kernels.multipole import Inspection, Spec, all_keys, constant, constant_memory, inspect
from ..kernels.multipole.states import ConstantState, MultipoleState
from ..kernels.operator import Call
from ..state import check_continues, check_fits
from .base import Mechanism, as_stored, without_padding

__all__ = ["ConstantState", "Multipole", "MultipoleState"]


@final
class Multipole(Mechanism):
    """Attention over clusters of keys, exact for the keys that matter.

    chunk:      keys per chunk; clusters are made of complete chunks, everything else is exact
    clusters:   clusters per chunk
    exact_keys: the most keys per query that are evaluated exactly beside those. None: of the n clustered keys that it
                sees min(3n/8, max(256, n/32)), in causal calls min(n/4, max(160, n/48)), twice as many for queries
                whose scores spread widely inside clusters; with `error` any number
    error:      relative squared error |out - exact|^2 / |exact|^2 to keep to: clusters are evaluated key by key until
                the expected error is below it. 0 is exact attention
    cap:        limit of the second-order term; scores in the hundreds need one
    radius:     how much the farthest key of a cluster counts when clusters are chosen, 0 to 1: single keys that matter
                among others that do not (needles) are found by it
    iterations: of k-means; 0 = nearest starting point
    memory:     "all" keeps every key. "constant" keeps `limit` clusters in all, the first `sinks` keys and the query's
                own chunk (when causal; else the keys in no complete chunk): nothing is evaluated key by key beside
                these, and of more clusters the closest are merged
    limit, sinks: see `memory`; 256 and 4 unless given
    seed:       integer or torch.Generator; None takes one integer from torch's generator

    The result does not depend on batch, padding, threads or how a sequence is cut. `scan` keeps all keys, complete
    chunks of them in pages that are never written again: a step costs the clusters, the exact keys and the own chunk.
    For endless generation take memory="constant", whose state has a fixed size; the output of masked tokens is then 0
    in causal calls, and states neither merge nor crop. Below some 500 tokens `softmax` is faster.
    On keys without any structure (isotropic, sharp) nothing but softmax is accurate, and `error` says so by its price.

    >>> import torch, subquad as sq
    >>> attn = sq.create("multipole", head_dim=16, chunk=64, clusters=8, exact_keys=32, seed=0)
    >>> q, k, v = torch.randn(3, 1, 4, 300, 16)
    >>> k = k + 3 * torch.randn(1, 4, 10, 16).repeat_interleave(30, 2)  # ten kinds of keys
    >>> exact = sq.attention(q, k, v, "softmax")
    >>> bool((attn(q, k, v) - exact).square().sum() < 0.1 * exact.square().sum())
    True
    >>> sure = sq.create("multipole", head_dim=16, chunk=64, clusters=8, error=0.01, seed=0)
    >>> bool((sure(q, k, v) - exact).square().sum() < 0.01 * exact.square().sum())
    True
    """

    name = "multipole"
    equation = (
        "(sum_far e^l vbar + sum_exact e^s v) / (the same with 1 for v), l = q.mu + min(cap, |q|^2 var / 2) + log n"
    )
    paper = 'after Vyas et al., "Clustered Attention", 2020, and Hooper et al., "Multipole Attention", 2025'
    complexity = "O(L (S clusters / chunk + exact_keys + chunk) (D + E)); state O(S (D + E))"
    recurrent = True
    quadratic = True
    each_query_alone = True
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"chunk": 8, "clusters": 2, "exact_keys": 4, "seed": 3},
        {"chunk": 8, "clusters": 3, "exact_keys": 0, "cap": 0.2, "radius": 0.0, "iterations": 0, "seed": 3},
        {"chunk": 12, "clusters": 4, "error": 0.02, "iterations": 2, "seed": 3},
        {"memory": "constant", "chunk": 8, "clusters": 3, "limit": 5, "sinks": 2, "seed": 3},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        chunk: int = 512,
        clusters: int = 24,
        exact_keys: int | None = None,
        error: float | None = None,
        cap: float = 3.0,
        radius: float = 0.5,
        iterations: int = 4,
        memory: str = "all",
        limit: int | None = None,
        sinks: int | None = None,
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_positive("chunk", chunk, 2)
        if chunk > 1 << 16:
            raise ValueError(f"chunk must be at most {1 << 16}, got {chunk}: keys of incomplete chunks are all exact")
        checks.check_positive("clusters", clusters)
        if clusters > chunk:
            raise ValueError(f"clusters={clusters} must be at most chunk={chunk}: a chunk has no more keys than that")
        if exact_keys is not None:
            checks.check_positive("exact_keys", exact_keys, 0)
        checks.check_positive("iterations", iterations, 0)
        for argument, number, most in (("error", error, float("inf")), ("cap", cap, 40.0), ("radius", radius, 1.0)):
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise TypeError(f"{argument} must be a number, got {number!r} of type {type(number).__name__}")
            if not 0 <= number <= most:
                raise ValueError(f"{argument} must be between 0 and {most:g}, got {number}")
        if error == 0 and exact_keys is not None:
            raise ValueError(f"error=0 is exact attention, which exact_keys={exact_keys} would limit; give one of them")
        checks.check_option("memory", memory, ("all", "constant"))
        if memory == "constant":
            limit, sinks = 256 if limit is None else limit, 4 if sinks is None else sinks
        for option, size, least in (("limit", limit, 1), ("sinks", sinks, 0)):
            if size is not None:
                checks.check_positive(option, size, least)
                if memory == "all":
                    raise ValueError(f"{option}={size} needs memory='constant'; with memory='all' every key is kept")
        if memory == "constant":
            for argument, given in (("exact_keys", exact_keys), ("error", error)):
                if given is not None:
                    raise ValueError(
                        f"{argument}={given} needs the keys of clustered chunks, which memory='constant' does not "
                        "keep; leave it out, or use memory='all'"
                    )
            if sinks is not None and sinks > chunk:
                raise ValueError(f"sinks={sinks} must be at most chunk={chunk}: they are of a sequence's first chunk")
        self.memory, self.limit, self.sinks = memory, limit, sinks
        self.constant_memory = self.zero_at_padding = memory == "constant"
        self.quadratic = not self.constant_memory
        self.merges = self.crops = not self.constant_memory
        self.chunk, self.clusters, self.exact_keys, self.iterations = chunk, clusters, exact_keys, iterations
        self.error, self.cap, self.radius = error, cap, radius
        self.draw = ClusterDraw(clusters, 1, head_dim, seed=seed)
        # Kept: a decode step has no time to write it, and a tracer no way.
        self._identity = f"multipole({self.extra_repr()})"

    @property
    def seed(self) -> int:
        """The integer behind the draws."""
        return self.draw.draw_key()[0]

    def _spec(self, **where: Any) -> Spec:
        most = 1 << 40 if self.exact_keys is None and self.error is not None else self.exact_keys
        # Twice the average size, so that `exact_keys` is a limit that no cluster exceeds by itself.
        largest = max(1, 2 * self.chunk // self.clusters)
        return Spec(
            *(self.chunk, self.clusters, largest, self.iterations, most, self.error, self.cap, self.radius, self.draw),
            **where,
        )

    # -- the calls ----------------------------------------------------------------------------------------------------

    @property
    def _kernels(self) -> Any:
        """Who attends, scans, absorbs and reads: the same calls for every memory."""
        return constant_memory if self.constant_memory else all_keys

    def _kept(self, is_causal: bool = False) -> Any:
        """The spec that they take."""
        spec = self._spec(causal=is_causal)
        return constant.Bounded(spec, self.limit or 0, self.sinks or 0) if self.constant_memory else spec

    def _origin(self, scale: float) -> str:
        return f"{self._identity} draw {self.draw.draw_key()} scale {scale:.9g}"

    def _checked(
        self, state: Any, scale: float, tokens: Tensor, heads: int | None = None, width: int | None = None
    ) -> Any:
        kind = ConstantState if self.constant_memory else MultipoleState
        check_continues(state, kind, self._origin(scale), "multipole's scan() or absorb()")
        check_fits(state.example(), tokens, heads, width, exactly=not self.constant_memory)
        return state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        out: Tensor = self._kernels.attend(self._kept(is_causal), call, q, k, v)
        return out

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        before = None if state is None else self._checked(state, call.scale, k, k.shape[1], v.shape[-1])
        found: tuple[Tensor, Any] = self._kernels.scan(self._kept(), call, q, k, v, before, self._origin(call.scale))
        return found

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> Any:
        before = None if state is None else self._checked(state, call.scale, k, k.shape[1], v.shape[-1])
        return self._kernels.absorb(self._kept(), call, k, v, before, self._origin(call.scale))

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        out: Tensor = self._kernels.read(self._kept(), call, q, self._checked(state, call.scale, q))
        return out

    def inspect(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
    ) -> Inspection:
        """Expected errors and exact keys of every query, from a forward pass: tensors (B, Hq, L), see `Inspection`.

        >>> import torch, subquad as sq
        >>> attn = sq.create("multipole", head_dim=8, chunk=32, clusters=4, error=0.05, exact_keys=16, seed=0)
        >>> found = attn.inspect(*torch.randn(3, 1, 2, 100, 8))
        >>> int(found.exact_keys.max()) <= 16, found.limited.shape
        (True, torch.Size([1, 2, 100]))
        """
        if self.constant_memory:
            raise ValueError("memory='constant' chooses no keys, so there is nothing to inspect; use memory='all'")
        checks.check_attention(q, k, v, head_dim=self.head_dim, heads=self.heads, kv_heads=self.kv_heads)
        checks.check_value_width(v)
        checks.check_flag("is_causal", is_causal)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        if is_causal:
            checks.check_causal_lengths(q, k)
        call = Call(self.resolve_scale(scale), key_mask)
        q, (k, v) = as_stored(q), without_padding(k, v, key_mask)
        with torch.no_grad(), full_precision(q):
            return inspect(self._spec(causal=is_causal), call, q, k, v)

    def estimated_error(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """Expected relative squared error of the output of every head, (B, Hq), without exact attention beside it.

            sum_{i,far c} P_c^2 ((e^{2t} - 1) V_c + ((e^{2t} - 1) / n_c + t^2 / 4) |vbar_c - out_i|^2) / sum_i |out_i|^2

        with P_c the weight of cluster c, t its second-order term, V_c the summed variance of its values. In real models
        it is mostly an upper bound, of about twice the error. It is no guarantee: where scores inside one cluster are
        tens apart (large vectors without structure) a single key decides, and it can be far too small.

        >>> import torch, subquad as sq
        >>> attn = sq.create("multipole", head_dim=8, chunk=32, clusters=4, exact_keys=8, seed=0)
        >>> attn.estimated_error(*torch.randn(3, 1, 2, 100, 8)).shape
        torch.Size([1, 2])
        """
        found = self.inspect(q, k, v, is_causal, scale=scale, key_mask=key_mask)
        error, norm = found.squared_error, found.squared_norm
        if query_mask is not None:
            checks.check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q.device)
            error, norm = (x.masked_fill(~query_mask.unsqueeze(1), 0.0) for x in (error, norm))
        total = norm.sum(-1)
        return torch.where(total > 0, error.sum(-1) / total, 0.0)
