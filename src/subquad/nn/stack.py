"""What all models share: embedding, positions, blocks, the final norm, and both ways through them.

`hidden` takes whole sequences, `scan_hidden` consumes tokens after a state; they agree to rounding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .. import checks
from ..kernels.checkpointing import tracing
from ..mechanisms import Mechanism
from ..rollback import unused
from .attention import MultiheadAttention, calibrating, check_sequence
from .blocks import Block, BlockInputs, make_norm
from .config import ModelConfig
from .layer_mechanisms import draw_seed, layer_mechanisms
from .positions import (
    LearnedPositions,
    Rotation,
    SequenceStart,
    SinusoidalPositions,
    checked_start,
    rotation_at,
    token_positions,
)
from .recomputing import recomputed
from .reversible import run_reversible
from .states import ModelState

__all__ = ["Model", "Stack", "check_tokens", "padding_first", "take_tokens"]

Self = TypeVar("Self", bound="Model")


def check_tokens(argument: str, tokens: object, vocab: int) -> None:
    """Refuse anything but integers (batch, length), length at least 1, in 0..vocab-1."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"{argument} must be an integer tensor of shape (batch, length), got {type(tokens).__name__}; "
            f"make one with torch.tensor({argument})"
        )
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{argument} must be token ids of dtype int64 or int32, got {tokens.dtype}; use .long()")
    if tokens.dim() != 2:
        raise ValueError(
            f"{argument} must have shape (batch, length), got {checks.describe_shape(tokens)}; "
            f"for one sequence use {argument}.unsqueeze(0)"
        )
    if tokens.numel() == 0:
        raise ValueError(
            f"{argument} is empty ({checks.describe_shape(tokens)}): give at least one token per sequence, for example "
            "a begin-of-text token"
        )
    # Reading values would make every step wait for another device; there the embedding itself refuses.
    if tokens.device.type == "cpu" and not tracing(tokens):
        least, most = (int(x) for x in tokens.aminmax())
        if least < 0 or most >= vocab:
            raise ValueError(
                f"{argument} holds the id {least if least < 0 else most}, but ids go from 0 to vocab-1 = {vocab - 1}; "
                "check that tokenizer and model belong together"
            )


def take_tokens(x: Tensor, order: Tensor) -> Tensor:
    """x (B, L) or (B, L, C) at places order (B, N)."""
    return x.gather(1, order) if x.dim() == 2 else x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def padding_first(key_mask: Tensor, *, either_end: bool = False) -> Tensor | None:
    """The order (B, L) that moves padding to the front, or None if it is known to be there (or at either end)."""
    if not tracing(key_mask) and key_mask.device.type == "cpu":
        before, after = key_mask[:, :-1], key_mask[:, 1:]
        if bool((after >= before).all()) or (either_end and bool((after <= before).all())):
            return None
    return torch.argsort(key_mask.to(torch.uint8), dim=-1, stable=True)


class Model(nn.Module):
    """What every model can do besides computing."""

    config: ModelConfig
    kind: ClassVar[str]

    @classmethod
    def from_config(cls: type[Self], config: ModelConfig) -> Self:
        """The model that a config describes, with fresh weights.

        >>> import subquad as sq
        >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear")
        >>> again = sq.nn.TransformerDecoder.from_config(model.config)
        >>> again.load_state_dict(model.state_dict())
        <All keys matched successfully>
        """
        if config.kind != cls.kind:
            raise ValueError(f"the config is of kind={config.kind!r}, {cls.__name__} needs kind={cls.kind!r}")
        return cls(**{f.name: getattr(config, f.name) for f in fields(config) if f.name != "kind"})

    @staticmethod
    def _configured(kind: str, given: dict[str, Any], options: dict[str, Any]) -> ModelConfig:
        """A config with a seed, from constructor arguments; unknown ones are refused by name."""
        checks.check_options(f"a model of kind {kind!r}", options, (f.name for f in fields(ModelConfig)))
        config = ModelConfig(kind=kind, **given, **options)
        return config if config.seed is not None else replace(config, seed=draw_seed())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, except that keys and shapes are compared first: what does not fit is named, nothing is loaded.

        torch's own copies every tensor that fits before it complains about the others.
        """
        own = self.state_dict()
        wrong = [
            f"{name} has {checks.describe_shape(state_dict[name])}, expected {checks.describe_shape(x)}"
            for name, x in own.items()
            if name in state_dict and getattr(state_dict[name], "shape", None) != x.shape
        ]
        if strict:
            wrong += [f"{name} is missing" for name in own if name not in state_dict]
            wrong += [f"{name} is unknown{checks.nearest(name, own)}" for name in state_dict if name not in own]
        if wrong:
            more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise RuntimeError(
                f"the state_dict does not fit {type(self).__name__}, nothing was loaded: {'; '.join(wrong[:8])}{more}. "
                "Build the model from the config that was saved beside it"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def attentions(self) -> Iterator[MultiheadAttention]:
        """Every attention layer."""
        return (module for module in self.modules() if isinstance(module, MultiheadAttention))

    def mechanisms(self) -> list[Mechanism]:
        """The mechanism of every attention layer, each once."""
        return list({id(a.mechanism): a.mechanism for a in self.attentions()}.values())

    def redraw(self) -> None:
        """Resample what is random in every mechanism, deterministically from its seed and its draw counter."""
        for mechanism in self.mechanisms():
            mechanism.redraw()

    def calibrate(self, *inputs: Any, **call: Any) -> None:
        """Run the model on sample inputs and add each layer's queries and keys to its mechanism's statistics.

        Needed before the first use of mechanisms with center=True, features='sderf' or hermite=True; the others are
        left alone. Call it once per batch.
        """
        with calibrating(self):
            self(*inputs, **call)

    def checkpoint_activations(self: Self, enabled: bool = True) -> Self:
        """While training, keep only the input of each block and compute it again in the backward; returns the model.

        Reversible models keep less than that already and are not changed by it.
        """
        for module in self.modules():
            if isinstance(module, Stack):
                module.checkpointing = enabled
        return self


class Stack(Model):
    """Embedding, positions, blocks and final norm: what an encoder and a decoder have in common."""

    sequence_start: SequenceStart | None = None

    def __init__(self, config: ModelConfig, *, is_causal: bool) -> None:
        super().__init__()
        assert config.seed is not None
        self.config = config
        self.checkpointing = False
        self.embedding = None
        spread = config.dim**-0.5 if config.tie_embeddings else 1.0  # tied: logits of order 1
        if config.vocab is not None:
            self.embedding = nn.Embedding(config.vocab, config.dim)
            if config.tie_embeddings:
                nn.init.normal_(self.embedding.weight, std=spread)
        self.positions: nn.Module | None = None
        if config.positions == "sinusoidal":
            self.positions = SinusoidalPositions(config.dim)
        elif config.positions == "learned":
            assert config.max_length is not None
            self.positions = LearnedPositions(config.max_length, config.dim, spread)
        own = layer_mechanisms(config, config.seed, self.kind, is_causal=is_causal)
        cross: list[Any] = [None] * config.layers
        if config.cross_mechanism is not None:
            cross = layer_mechanisms(config, config.seed, "cross", is_causal=False)
        self.blocks = nn.ModuleList(Block(config, a, b) for a, b in zip(own, cross, strict=True))
        final = config.norm == "pre" if config.final_norm is None else config.final_norm
        self.norm = make_norm(config, final=True) if final else nn.Identity()
        digest = hashlib.sha256(repr(config).encode()).hexdigest()[:12]
        # The seed is part of it, so models that were not told to be alike do not pass for each other.
        self.origin = f"{type(self).__name__}(layers={config.layers}, dim={config.dim}) {digest}"

    # -- in -----------------------------------------------------------------------------------------------------------

    def check_input(self, argument: str, x: Any) -> None:
        """Token ids where there is an embedding, else floats (B, L, dim)."""
        if self.config.vocab is not None:
            check_tokens(argument, x, self.config.vocab)
            return
        check_sequence(argument, x, self.config.dim)
        if x.numel() == 0:
            raise ValueError(f"{argument} is empty ({checks.describe_shape(x)}): give at least one token per sequence")

    def _embedded(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Rotation | None]:
        # Floats are embeddings already: of a model without ids, or given by a caller in place of them.
        h = x if self.embedding is None or x.is_floating_point() else self.embedding(x)
        if self.positions is not None:
            h = self.positions(h, positions)
        rotation = None
        if self.config.positions == "rotary":
            rotation = rotation_at(positions, self.config.width, self.config.rotary_base, h.dtype)
        return h, rotation

    # -- whole sequences --------------------------------------------------------------------------------------------

    def hidden(
        self,
        x: Tensor,
        *,
        is_causal: bool,
        key_mask: Tensor | None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        start: int | Tensor | None = None,
        between: list[Tensor] | None = None,
    ) -> Tensor:
        """x (B, L) or (B, L, dim) -> (B, L, dim), after the final norm; positions begin at `start`, an integer or (B,).

        between: gets the input of the first block and the output of each
        """
        checks.check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
        start = checked_start(start, x.shape[0], x.device)
        if start is None and self.sequence_start is not None and self.config.positions != "none":
            start = self.sequence_start(x, key_mask)
        order = None
        if key_mask is not None:
            # Padding at either end of a sequence exists for no mechanism; inside, some would count it as a place.
            order = padding_first(key_mask, either_end=True)
            if order is not None:
                x, key_mask = take_tokens(x, order), key_mask.gather(1, order)
        h, rotation = self._embedded(x, token_positions(x.shape[1], key_mask, x.device, start))
        call = BlockInputs(is_causal, key_mask, rotation, memory, memory_mask)
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        kept = [h]
        if self.config.reversible:
            _refuse_between(between)
            h = run_reversible(blocks, h, call)
        else:
            for block in blocks:
                if self.checkpointing and self.training and torch.is_grad_enabled():
                    h = checkpoint(recomputed(block), h, call, use_reentrant=False)
                else:
                    h = block(h, call)
                if between is not None:
                    kept.append(h)
        return _in_order(self.norm(h), order, kept, between)

    # -- token by token ---------------------------------------------------------------------------------------------

    def _checked(self, states: Any, batch: int) -> ModelState:
        if not isinstance(states, ModelState):
            raise TypeError(f"states must be a ModelState from this model's scan(), got {type(states).__name__}")
        if states.origin != self.origin:
            raise ValueError(
                f"states were made by {states.origin}, this model is {self.origin}: a state can only be continued by "
                "the model that made it, or one with the same config and seed and its weights"
            )
        if states.batch != batch:
            raise ValueError(
                f"states hold {states.batch} sequences, the tokens given {batch}; use states.select(index) to repeat, "
                "reorder or drop sequences"
            )
        return states

    def empty_states(self, batch: int, device: torch.device, start: int | Tensor = 0) -> ModelState:
        """States before the first token; `start` is its position, an integer or (B,) int64."""
        begin = checked_start(start, batch, device)
        assert begin is not None
        return ModelState((None,) * self.config.layers, (), begin, torch.zeros_like(begin), self.origin)

    def scan_hidden(
        self,
        x: Tensor,
        states: ModelState | None,
        *,
        key_mask: Tensor | None,
        start: int | Tensor | None,
        between: list[Tensor] | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Consume x (B, L) or (B, L, dim) after `states`: (hidden (B, L, dim) after the final norm, new states).

        between: as for `hidden`
        """
        checks.check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
        if states is None:
            states = self.empty_states(x.shape[0], x.device, 0 if start is None else start)
        elif start is not None:
            raise ValueError(f"start={start!r} is where a new sequence begins; states say where this one continues")
        before = self._checked(states, x.shape[0])
        order = None
        if key_mask is not None and all(unused(layer) for layer in before.layers):
            # To the front, because behind real tokens it would be inside once the sequence continues.
            order = padding_first(key_mask)
            if order is not None:
                x, key_mask = take_tokens(x, order), key_mask.gather(1, order)
        positions = token_positions(x.shape[1], key_mask, x.device, before.start + before.length)
        h, rotation = self._embedded(x, positions)
        call, reversible = BlockInputs(True, key_mask, rotation), self.config.reversible
        carried: Any = (h, h) if reversible else h
        passed = [h]
        if reversible:
            _refuse_between(between)
        memory = before.memory or (None,) * self.config.layers
        layers: list[Any] = []
        blocks: list[Block] = list(self.blocks)  # type: ignore[arg-type]
        for block, state, kept in zip(blocks, before.layers, memory, strict=True):
            carried, state = block.scan(carried, call, state, kept, reversible=reversible)
            layers.append(state)
            if between is not None:
                passed.append(carried)
        h = _in_order(self.norm((carried[0] + carried[1]) / 2 if reversible else carried), order, passed, between)
        real = x.shape[1] if key_mask is None else key_mask.sum(-1)
        return h, replace(before, layers=tuple(layers), length=before.length + real)


def _refuse_between(between: list[Tensor] | None) -> None:
    if between is not None:
        raise ValueError("what is between the blocks is not kept with reversible=True: leave it out, or train without")


def _in_order(out: Tensor, order: Tensor | None, kept: list[Tensor], between: list[Tensor] | None) -> Tensor:
    """The output, and what was kept between the blocks, with the tokens back in the caller's order."""
    back = None if order is None else torch.argsort(order, dim=-1)
    if between is not None:
        between += kept if back is None else [take_tokens(x, back) for x in kept]
    return out if back is None else take_tokens(out, back)
