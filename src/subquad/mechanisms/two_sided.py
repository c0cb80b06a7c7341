"""Hybrid attention without a causal mask in one sweep, for CPUs: `near_far.full` with half of its work shared.

For a chunk of T rows and the T + 2W keys around it, in slots 0 .. T + 2W - 1,

    row i    near   slots i .. i + 2W         exact
             far    the state of all keys before the slots, and the slots 0 .. i - 1
                    the state of all keys after them, and the slots i + 2W + 1 .. T + 2W - 1

The states from behind are gathered first, last chunk to first. Then one product with the sum of both states serves both
sides. That needs one shift for all far keys; a chunk in which it would lose something is computed side by side, each
with shifts of its own. Deciding so means looking at values: where that is not possible, `near_far` makes two passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..features.base import FeatureMap, Features, weigh
from ..features.precision import widened
from ..kernels.chunked import BLOCK, exact_causal, masked
from ..state import LinearState, Partial, finite, row_weights
from .hybrid_state import HybridState
from .near_far import combine, lay_out, sound
from .windows import dense_partial, take, window_partial

__all__ = ["full"]

# A state whose shift is this far above its largest key still holds sixty orders of magnitude below it.
SLACK = 20.0


def _between(features: Features, start: int, end: int) -> Features:
    return Features(*(None if part is None else part[..., start:end, :] for part in features))


def _reversed(features: Features, groups: int) -> Features:
    """The rows in reverse order, for each of the groups that stand in one row of tokens."""
    return Features(
        *(None if part is None else part.unflatten(-2, (groups, -1)).flip(-2).flatten(-3, -2) for part in features)
    )


def _shared(
    queries: Features, keys: Features, v: Tensor, before: LinearState, behind: LinearState, groups: int, tokens: int
) -> tuple[LinearState | None, Partial]:
    """Both sides with one shift per feature; also the next state, unless that shift is too high for it."""
    batch, heads, slots, width = v.shape
    count, reach = before.normaliser.shape[-1], slots - tokens
    log_max, shift = before.log_max, before.log_max
    rho, rho_behind = None, None
    if keys.log_scale is None:
        key_weights, query_weights = weigh(keys, None), weigh(queries, None)
    else:
        own_max = torch.maximum(log_max, keys.log_scale.detach()[..., :tokens, :].amax(-2))
        log_max = torch.maximum(torch.maximum(own_max, behind.log_max), keys.log_scale.detach().amax(-2))
        key_weights = weigh(keys, -finite(log_max).unsqueeze(-2))
        rho, rho_behind = (torch.exp(x.log_max - finite(log_max)) for x in (before, behind))
        query_weights, shift = row_weights(queries, log_max)
        shift = finite(shift)

    block = min(BLOCK, tokens)
    blocks = -(-tokens // block)
    spare = blocks * block - tokens
    flat = batch * heads * blocks

    def split(x: Tensor, start: int) -> Tensor:
        part = x[:, :, start : start + tokens]
        return (F.pad(part, (0, 0, 0, spare)) if spare else part).reshape(flat, block, x.shape[-1])

    def carried(state: LinearState, factor: Tensor | None) -> list[Tensor]:
        if factor is None:
            return [state.weighted, state.normaliser]
        return [state.weighted * factor.unsqueeze(-1), state.normaliser * factor]

    left, right = split(key_weights, 0), split(key_weights, reach)
    left_v, right_v = split(v, 0), split(v, reach)
    rows = query_weights.reshape(batch, heads, groups, tokens, count)
    rows = F.pad(rows, (0, 0, 0, spare)) if spare else rows
    rows = rows.unflatten(3, (blocks, block)).transpose(2, 3).reshape(flat, -1, count)

    def block_sums(keys: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.bmm(keys.mT, v).view(batch, heads, -1, count, width)
        return sums, keys.sum(1).view(batch, heads, -1, count)

    if spare == 0 and reach % block == 0:  # the blocks of both sides are the same ones, some places apart
        sums, totals = block_sums(key_weights.reshape(-1, block, count), v.reshape(-1, block, width))
        left_sums, left_totals = sums[:, :, :blocks], totals[:, :, :blocks]
        right_sums, right_totals = sums[:, :, reach // block :], totals[:, :, reach // block :]
    else:
        left_sums, left_totals = block_sums(left, left_v)
        right_sums, right_totals = block_sums(right, right_v)

    def running(sums: Tensor, start: Tensor, order: range) -> list[Tensor]:
        """Sums over the blocks before each one in the given order, and over all of them."""
        total = [start]
        for i in order:
            total.append(total[-1] + sums.select(2, i))
        return total

    forwards, backwards = range(blocks), range(blocks - 1, -1, -1)
    (weighted, normaliser), (weighted_behind, normaliser_behind) = carried(before, rho), carried(behind, rho_behind)
    ahead, ahead_total = running(left_sums, weighted, forwards), running(left_totals, normaliser, forwards)
    past = running(right_sums, weighted_behind, backwards)
    past_total = running(right_totals, normaliser_behind, backwards)
    states = torch.stack([a + b for a, b in zip(ahead[:-1], past[-2::-1], strict=True)], 2).view(flat, count, width)
    totals = torch.stack([a + b for a, b in zip(ahead_total[:-1], past_total[-2::-1], strict=True)], 2)
    ones = torch.ones(block, block, dtype=v.dtype, device=v.device)

    def scores(keys: Tensor, visible: Tensor) -> Tensor:
        return (torch.bmm(rows, keys.mT).view(flat, groups, block, block) * visible).view(flat, -1, block)

    left_scores, right_scores = scores(left, ones.tril(-1)), scores(right, ones.triu(1))
    numerator = torch.baddbmm(torch.bmm(left_scores, left_v), right_scores, right_v).baddbmm(rows, states)
    normaliser = torch.bmm(rows, totals.view(flat, count, 1)).squeeze(-1) + left_scores.sum(-1) + right_scores.sum(-1)

    def unblocked(x: Tensor) -> Tensor:
        x = x.view(batch, heads, blocks, groups, block, -1).transpose(2, 3)
        return x.reshape(batch, heads, groups, blocks * block, -1)[:, :, :, :tokens]

    shift = shift.expand(batch, heads, groups * tokens).reshape(batch, heads, groups, tokens)
    part = Partial(unblocked(numerator), unblocked(normaliser).squeeze(-1), shift)
    if keys.log_scale is not None and not bool((log_max - own_max).amax() <= SLACK):
        return None, part
    return LinearState(ahead[-1], ahead_total[-1], log_max, before.count, before.origin), part


def full(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slot: Tensor,
    state: HybridState,
    *,
    log_far: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """out (B, Hq, L, E); mask, slot (B, L): real keys, and positions from the first real key on; `state` is empty."""
    window, number, scale, origin = state.window_mask.shape[1], state.sink_mask.shape[1], state.scale, state.origin
    heads, length = q.shape[1], q.shape[2]
    groups = heads // k.shape[1]
    tokens = min(chunk_size, length)
    chunks = -(-length // tokens)
    spare = chunks * tokens - length

    def around(x: Tensor) -> tuple[Tensor, ...]:
        """(B, H, L, C) -> for each chunk its tokens and `window` on each side, (B, H, T + 2W, C)."""
        padded = F.pad(x, (0, 0, window, window + spare))
        return padded.unfold(2, tokens + 2 * window, tokens).mT.unbind(2)

    near_mask = mask[:, None, :, None]
    far_mask = near_mask & ~((slot >= 0) & (slot < number))[:, None, :, None]
    far_keys = far_mask.sum((2, 3))  # (B, 1)
    sink_k = sink_v = sink_place = sink_mask = None
    if number:
        # The position of number 0 is -slot[0]: the same for every token of a sequence.
        place = torch.arange(number, device=q.device) - slot[:, :1]
        index = place.clamp(max=length - 1)
        sink_k, sink_v = take(widened(k), index), take(widened(v), index)
        sink_mask, sink_place = (place < length) & mask.gather(1, index), place

    def gather(carry: tuple[Tensor, ...], k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        keys, values = masked(feature_map.keys(k, scale), v, mask)
        assert values is not None
        return LinearState.of(carry, origin).absorb(keys, values, mask.sum((1, 2, 3))).tensors

    def step(
        carry: tuple[Tensor, ...],
        after: tuple[Tensor, ...],
        start: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        near_mask: Tensor,
        far_mask: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        before, behind = LinearState.of(carry, origin), LinearState.of(after, origin)
        q = widened(q)
        parts = [window_partial(q, k, v, near_mask, scale)]
        if sink_k is not None and sink_v is not None and sink_place is not None and sink_mask is not None:
            distance = torch.arange(start, start + tokens, device=q.device)[:, None] - sink_place[:, None]
            parts.append(dense_partial(q, sink_k, sink_v, (distance.abs() > window) & sink_mask[:, None], scale))
        queries = feature_map.queries(q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]), scale)
        hidden = None if bool(far_mask.all()) else far_mask
        keys, values = masked(feature_map.keys(k, scale), v, hidden)
        assert values is not None
        count = before.count + far_mask[:, :, :tokens].sum((1, 2, 3))
        kept, both = _shared(queries, keys, values, before, behind, groups, tokens)
        far = lay_out(both, heads, log_far)
        left, left_v = _between(keys, 0, tokens), values[:, :, :tokens]
        if not sound(far, parts, keys.log_scale is not None, far_keys):
            right, right_v = _between(keys, 2 * window, 2 * window + tokens), values[:, :, 2 * window :]
            one = Partial(*exact_causal(queries, left, left_v, before, groups, strict=True))
            flipped = exact_causal(
                *(_reversed(queries, groups), _reversed(right, 1), right_v.flip(-2), behind, groups), strict=True
            )
            other = Partial(flipped[0].flip(-2), flipped[1].flip(-1), flipped[2].flip(-1))
            far, kept = lay_out(combine([one, other]), heads, log_far), None
        if kept is None:
            kept = before.absorb(left, left_v, 0)
        total = combine([*parts, far])
        return total.finish(), (*kept.tensors[:3], count)

    wants_gradient = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, k, v, *feature_map.parameters(), *([] if log_far is None else [log_far]))
    )
    run: Callable[..., Any] = _run
    if wants_gradient and chunks > 1 and not feature_map.hidden_parameters:
        run = _recomputed
    rows = F.pad(q, (0, 0, 0, spare)).split(tokens, 2)
    key_parts, value_parts = around(widened(k)), around(widened(v))
    near_masks, far_masks = around(near_mask), around(far_mask)
    behind = [state.far.tensors]
    for i in range(chunks - 1, 0, -1):
        last = [x[i][:, :, 2 * window :] for x in (key_parts, value_parts, far_masks)]
        behind.append(run(gather, behind[-1], *last))
    carry, outputs = state.far.tensors, []
    for i in range(chunks):
        tensors = (x[i] for x in (rows, key_parts, value_parts, near_masks, far_masks))
        out, carry = run(step, carry, behind.pop(), i * tokens, *tensors)
        outputs.append(out)
    return torch.cat(outputs, 2)[:, :, :length]


def _run(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _recomputed(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
