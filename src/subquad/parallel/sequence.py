"""Attention over a sequence that is cut over processes, by one all-gather of states.

    process r holds q_r, k_r, v_r of its piece of the sequence, in order of rank, and computes

    own_r  = absorb(k_r, v_r)                             the state of its own piece: its size does not depend on L
    all    = all-gather(own)                              the only communication; reduce-scatter in the backward
    full:    out_r = read(q_r, merge(all))
    causal:  out_r = scan(q_r, k_r, v_r, merge(all[:r]))

States merge associatively and in order, so the result is that of one process, to rounding; LASP-2 (Sun et al., 2025)
does the same for attention without a normaliser.

Communication per attention layer and direction: each process sends its state once,

    B H (M E + 2 M) 4 bytes        B H (M E + M + 1) 4 where the map has one scale per token or none

and receives those of the W - 1 others, in the forward; the backward sends W - 1 and receives one. Nothing depends on
the length: at B 1, H 8, M 256, E 64 it is 528 KiB per process, against 2 H D L 4 bytes = 4 MiB per 1024 tokens for
passing keys and values around, as exact attention has to.

Work: full attention is computed once, piece by piece. Causal attention computes the key features twice (once for the
state that the others wait for, once in the scan), about 1.5 times the forward work of one process, divided by W.
"""

from __future__ import annotations

import hashlib
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from ..kernels.operator import Call
from ..mechanisms import Mechanism
from ..mechanisms.kernelised import Kernelised
from ..nn.attention import MultiheadAttention
from ..nn.stack import Stack
from ..state import merge
from .exchange import gather_tensors, place

__all__ = ["SequenceParallel", "attention", "shard_sequence"]


class _Pieces:
    """What a mechanism does instead of attending by itself, while its sequence is cut over `group`."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Pieces:
        return self  # a copy of a model belongs to the same processes

    def __reduce__(self) -> Any:
        raise TypeError(
            "a mechanism whose sequence is cut over processes cannot be pickled: a process group exists only here; "
            "call SequenceParallel.release() first, or save its state_dict"
        )

    def __call__(self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        rank, world = place(self.group)
        if world == 1:
            return mechanism._attend(q, k, v, call, is_causal=is_causal)
        if isinstance(mechanism, Kernelised):
            own = mechanism._absorb(k, v, None, call)
        elif is_causal:
            own = mechanism._scan(q, k, v, None, call)[1]
        else:
            raise ValueError(
                f"{mechanism.name} over a sequence that is cut over processes is causal only: without is_causal=True "
                "a window needs the keys of the next piece. Use a kernelised mechanism, or one process per sequence"
            )
        if k.shape[2] == 0:
            # The state of no tokens does not depend on k and v; without a path to them autograd would leave this
            # process out of the backward of the exchange, which the others wait for.
            nothing = k.sum() + v.sum()
            own = pytree.tree_map(lambda x: x + nothing.to(x.dtype) if x.is_floating_point() else x, own)
        states, tie = self._gathered(own)
        if not is_causal:
            out = mechanism._read(q, reduce(merge, states), call)
        else:
            before = reduce(merge, states[:rank]) if rank else None
            out = mechanism._scan(q, k, v, before, call)[0]
        # The first process uses no other's state, yet has to take part in the backward of the exchange.
        return (out + tie).to(v.dtype)

    def start(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """(B,): how many real tokens the pieces before this process's x (B, L_r, ...) hold."""
        rank, _ = place(self.group)
        real = torch.full((x.shape[0],), x.shape[1], device=x.device) if key_mask is None else key_mask.sum(-1)
        rows = gather_tensors([real], self.group)
        return sum((row[0] for row in rows[:rank]), torch.zeros_like(real))

    def _gathered(self, own: Any) -> tuple[list[Any], Tensor]:
        """Everyone's states in order, and a zero that depends on all of them."""
        leaves, spec = pytree.tree_flatten(own)
        digest = hashlib.sha256(repr(_origins(own)).encode()).digest()[:8]
        mark = torch.tensor(list(digest), dtype=torch.uint8, device=leaves[0].device)
        rows = gather_tensors([*leaves, mark], self.group)
        rank, _ = place(self.group)
        for other, row in enumerate(rows):
            if not torch.equal(row[-1], mark):
                raise ValueError(
                    f"process {other} has other features than process {rank} ({own.origin!r}): build the mechanism "
                    "with the same seed everywhere and redraw at the same steps"
                )
        tie = torch.stack([x.flatten()[:0].sum() for row in rows for x in row[:-1] if x.is_floating_point()]).sum()
        return [pytree.tree_unflatten(row[:-1], spec) for row in rows], tie


def _origins(state: Any) -> list[str]:
    """The origin of a state and of those that it is made of."""
    return [state.origin, *(origin for part in getattr(state, "parts", ()) for origin in _origins(part))]


def _check(mechanism: Mechanism) -> None:
    if mechanism.constant_memory and mechanism.merges:
        return
    raise ValueError(
        f"{mechanism.name} has no state of constant size that pieces of a sequence could exchange; "
        "use a kernelised mechanism (linear, performer, taylor, efficient, hedgehog), or hybrid or local when causal"
    )


def attention(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    **call: Any,
) -> Tensor:
    """Attention over the whole sequence for this process's piece of it: q, k (B, H, L_r, D), v (B, H, L_r, E).

    mechanism: the same on every process (same seed, same draws); kernelised, or causal `hybrid` and `local`
    group:     the processes that hold one sequence, in order of rank; None = all
    call:      is_causal, scale, key_mask (B, L_r), query_mask, backend, chunk_size, as for the mechanism itself

    Pieces may differ in length. Every process calls it, and every process runs the backward.

    >>> import torch.distributed as dist, subquad as sq
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> attn = sq.create("performer", head_dim=8, num_features=16, seed=0)
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> torch.equal(sq.parallel.attention(attn, q, k, v, is_causal=True), attn(q, k, v, is_causal=True))
    True
    >>> dist.destroy_process_group()
    """
    _check(mechanism)
    before, mechanism.attend_override = mechanism.attend_override, _Pieces(group)
    try:
        out: Tensor = mechanism(q, k, v, **call)
    finally:
        mechanism.attend_override = before
    return out


class SequenceParallel(nn.Module):
    """A model that takes this process's piece of each sequence; made by `shard_sequence`."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None = None) -> None:
        super().__init__()
        place(group)
        found = [m for m in module.modules() if isinstance(m, Mechanism)]
        # A far field inside a hybrid is run by it.
        inner = {id(child) for m in found for child in m.modules() if child is not m}
        own = [m for m in found if id(m) not in inner]
        if not own:
            raise ValueError(f"{type(module).__name__} holds no subquad mechanism; build it with subquad.nn")
        for mechanism in own:
            _check(mechanism)
        for part in module.modules():
            if isinstance(part, (Stack, MultiheadAttention)):
                part.sequence_start = _Pieces(group).start
        for mechanism in own:
            mechanism.attend_override = _Pieces(group)
        self.module = module
        self.group = group

    def forward(self, x: Tensor, *args: Any, key_mask: Tensor | None = None, **call: Any) -> Any:
        """The module's own forward on this piece: x (B, L_r) or (B, L_r, dim), key_mask (B, L_r); out (B, L_r, ...)."""
        if key_mask is not None:
            call["key_mask"] = key_mask
        return self.module(x, *args, **call)

    def release(self) -> nn.Module:
        """The module itself; its attention no longer exchanges states."""
        for part in self.module.modules():
            if isinstance(part, Mechanism):
                part.attend_override = None
            elif isinstance(part, (Stack, MultiheadAttention)):
                part.sequence_start = None
        return self.module


def shard_sequence(module: nn.Module, group: ProcessGroup | None = None) -> SequenceParallel:
    """`module` for sequences that are cut over the processes of `group` (None = all), in order of rank.

    module: a model of `subquad.nn`, any module whose attention is subquad mechanisms, or a mechanism itself; the same
            weights on every process. The positions of subquad's models and layers continue from piece to piece
            (sinusoidal, learned, rotary), also inside other modules; those that a module makes itself it has to
            continue itself.

    Cut the input with `split_sequence`; the output is this process's piece. Gradients of parameters are this process's
    share: sum them over the group, or wrap the result in DistributedDataParallel, which averages them. With the mean
    loss of each (equally long) piece that average is the gradient of the mean over the whole sequence. For data and
    sequence parallelism together give each sequence's processes a `group` of their own and wrap over all processes.

    Per attention layer each process sends one state per direction, whose size does not depend on the length.

    >>> import torch.distributed as dist, subquad as sq
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=11, mechanism="linear", positions="rotary")
    >>> tokens = torch.randint(0, 11, (1, 16))
    >>> sharded = sq.parallel.shard_sequence(model)
    >>> logits = sharded(sq.parallel.split_sequence(tokens))
    >>> torch.allclose(sq.parallel.gather_sequence(logits), sharded.release()(tokens), atol=1e-6)
    True
    >>> dist.destroy_process_group()
    """
    return SequenceParallel(module, group)
