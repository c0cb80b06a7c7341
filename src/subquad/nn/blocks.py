"""Residual blocks: attention, attention to a memory where there is one, feed-forward.

    pre-norm    x <- x + f(norm(x))              post-norm   x <- norm(x + f(x))          for each branch f in turn
    reversible  (a, b) <- (b, a + f(norm(b)))    Gomez et al., 2017, as in Reformer (Kitaev et al., 2020)

SwiGLU is W_d (silu(W_g x) * W_u x), Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ..mechanisms import Mechanism
from .attention import MultiheadAttention, reset_linear
from .config import ModelConfig
from .positions import Rotation

__all__ = ["Block", "BlockInputs", "Branch", "FeedForward", "make_norm"]


@dataclass(frozen=True)
class BlockInputs:
    """What all blocks of one call share: masks (B, L) bool, the rotation, and the memory (B, S, dim) with its mask."""

    is_causal: bool = False
    key_mask: Tensor | None = None
    rotation: Rotation | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


class Branch(NamedTuple):
    """One residual branch: its norm, what it computes, and the modules whose parameters that uses."""

    norm: nn.Module
    compute: Callable[[Tensor], Tensor]
    modules: tuple[nn.Module, ...]


def make_norm(config: ModelConfig, *, final: bool = False) -> nn.Module:
    """LayerNorm or RMSNorm over the model width."""
    eps = config.final_norm_eps if final and config.final_norm_eps is not None else config.norm_eps
    return nn.RMSNorm(config.dim, eps=eps) if config.normalization == "rms" else nn.LayerNorm(config.dim, eps=eps)


class FeedForward(nn.Module):
    """Two linear maps with a function between them, or SwiGLU; (B, L, dim) -> (B, L, dim).

    >>> import torch
    >>> config = ModelConfig(kind="encoder", layers=1, heads=2, dim=16, mechanism="linear", activation="swiglu")
    >>> FeedForward(config)(torch.randn(2, 3, 16)).shape, config.hidden_width
    (torch.Size([2, 3, 16]), 48)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = None
        if config.activation == "swiglu":
            self.gate = nn.Linear(config.dim, config.hidden_width, bias=config.bias)
        self.up = nn.Linear(config.dim, config.hidden_width, bias=config.bias)
        self.down = nn.Linear(config.hidden_width, config.dim, bias=config.bias)
        reset_linear(self.gate, self.up, self.down)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.gate is not None:
            hidden = F.silu(self.gate(x)) * hidden
        elif self.activation == "relu":
            hidden = F.relu(hidden)
        else:
            hidden = F.gelu(hidden, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        down: Tensor = self.down(hidden)
        return down


class Block(nn.Module):
    """One layer of a model: self attention, cross attention if `cross` is given, feed-forward, each with its residual.

    >>> import torch, subquad as sq
    >>> config = ModelConfig(kind="encoder", layers=1, heads=2, dim=16, mechanism="linear", positions="none")
    >>> Block(config, sq.create("linear", head_dim=8))(torch.randn(2, 5, 16), BlockInputs()).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, config: ModelConfig, mechanism: Mechanism, cross: Mechanism | None = None) -> None:
        super().__init__()
        shape: dict[str, Any] = {"kv_heads": config.kv_heads, "head_dim": config.width, "bias": config.bias}
        self.pre_norm = config.norm == "pre"
        self.attention_norm = make_norm(config)
        self.attention = MultiheadAttention(config.dim, config.heads, mechanism, **shape)
        self.cross_norm = None if cross is None else make_norm(config)
        self.cross = None if cross is None else MultiheadAttention(config.dim, config.heads, cross, **shape)
        self.feed_norm = make_norm(config)
        self.feed = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def _branches(self, attend: Callable[[Tensor], Tensor], read: Callable[[Tensor], Tensor]) -> list[Branch]:
        branches = [Branch(self.attention_norm, attend, (self.attention_norm, self.attention))]
        if self.cross is not None and self.cross_norm is not None:
            branches.append(Branch(self.cross_norm, read, (self.cross_norm, self.cross)))
        branches.append(Branch(self.feed_norm, self.feed, (self.feed_norm, self.feed)))
        return branches

    def _attend(self, x: Tensor, call: BlockInputs) -> Tensor:
        out: Tensor = self.attention(x, is_causal=call.is_causal, key_mask=call.key_mask, rotation=call.rotation)
        return out

    def _read(self, x: Tensor, call: BlockInputs) -> Tensor:
        assert self.cross is not None
        # No query depends on another one, but the statistics of `calibrate` are of real ones.
        out: Tensor = self.cross(x, call.memory, key_mask=call.memory_mask, query_mask=call.key_mask)
        return out

    def branches(self, call: BlockInputs) -> list[Branch]:
        """The branches for whole sequences, in order."""
        return self._branches(partial(self._attend, call=call), partial(self._read, call=call))

    def delta(self, branch: Branch, x: Tensor) -> Tensor:
        """What a pre-norm branch adds to the residual stream."""
        added: Tensor = self.dropout(branch.compute(branch.norm(x)))
        return added

    def _run(self, x: Tensor, branches: list[Branch]) -> Tensor:
        for branch in branches:
            added = x + self.delta(branch, x) if self.pre_norm else x + self.dropout(branch.compute(x))
            x = added if self.pre_norm else branch.norm(added)
        return x

    def forward(self, x: Tensor, call: BlockInputs) -> Tensor:
        """x (B, L, dim) -> (B, L, dim)."""
        return self._run(x, self.branches(call))

    def scan(self, x: Any, call: BlockInputs, state: Any, memory_state: Any, *, reversible: bool) -> tuple[Any, Any]:
        """Consume further tokens; `state` is the mechanism's own. x is a tensor, or the pair of reversible blocks."""
        after = state

        def attend(x: Tensor) -> Tensor:
            nonlocal after
            out, after = self.attention.advance(x, state, call.key_mask, call.rotation)
            return out

        def read(x: Tensor) -> Tensor:
            assert self.cross is not None
            return self.cross.read(x, memory_state)

        branches = self._branches(attend, read)
        if not reversible:
            return self._run(x, branches), after
        return self.couple(x, branches), after

    def couple(self, pair: tuple[Tensor, Tensor], branches: list[Branch]) -> tuple[Tensor, Tensor]:
        """(a, b) <- (b, a + f(norm(b))) for each branch."""
        for branch in branches:
            pair = (pair[1], pair[0] + self.delta(branch, pair[1]))
        return pair
