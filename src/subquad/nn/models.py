"""Encoder, decoder and encoder-decoder: one class each for every mechanism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from .attention import reset_linear
from .config import MechanismChoice
from .generation import generate
from .packing import run_packed
from .stack import Model, Stack
from .states import ModelState

__all__ = ["EncoderDecoder", "TransformerDecoder", "TransformerEncoder"]


def _refuse_start(start: int | Tensor | None) -> None:
    if start is not None:
        raise ValueError("start and segment_ids cannot be combined: each segment begins at position 0")


class TransformerEncoder(Stack):
    """A stack of blocks, not causal unless asked: (B, L) token ids or (B, L, dim) floats -> (B, L, dim).

    layers, heads, dim: blocks, query heads, model width
    mechanism: a name, {"mechanism": name, **options}, an object, or a list with one of these per layer
    vocab:     the number of token ids; None = the input is (B, L, dim)
    options:   the other fields of `ModelConfig`

    >>> import torch, subquad as sq
    >>> model = sq.nn.TransformerEncoder(layers=2, heads=2, dim=16, mechanism=["softmax", "performer"], seed=0)
    >>> x, lengths = torch.randn(2, 10, 16), torch.tensor([10, 6])
    >>> out = model(x, key_mask=torch.arange(10) < lengths[:, None])
    >>> torch.allclose(out[1, :6], model(x[1:, :6])[0], atol=1e-5)
    True
    """

    kind = "encoder"

    def __init__(
        self,
        layers: int,
        heads: int,
        dim: int,
        mechanism: MechanismChoice = "multipole",
        *,
        vocab: int | None = None,
        **options: Any,
    ) -> None:
        given = {"layers": layers, "heads": heads, "dim": dim, "mechanism": mechanism, "vocab": vocab}
        # Refusing a causal call is left to the mechanism: an encoder need not be causal.
        super().__init__(self._configured(self.kind, given, options), is_causal=False)

    def forward(
        self,
        x: Tensor,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        start: int | Tensor | None = None,
    ) -> Tensor:
        """x (B, L) ids or (B, L, dim) -> (B, L, dim).

        key_mask:    (B, L) bool, True = real; padding may stand anywhere; its outputs have no meaning
        segment_ids: (B, L) integers: several sequences in a row, each as if it were alone
        start:       position of the first token, for a piece of a longer sequence: an integer or (B,) int64; None = 0
        """
        self.check_input("x", x)
        if segment_ids is not None:
            _refuse_start(start)
            checks.check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
            return run_packed(lambda x, mask: self(x, is_causal=is_causal, key_mask=mask), x, segment_ids, key_mask)
        return self.hidden(x, is_causal=is_causal, key_mask=key_mask, start=start)

    def scan(
        self,
        x: Tensor,
        states: ModelState | None = None,
        *,
        key_mask: Tensor | None = None,
        start: int | Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Consume x causally after the tokens of `states`; (out (B, L, dim), new states), as a causal `forward`."""
        self.check_input("x", x)
        return self.scan_hidden(x, states, key_mask=key_mask, start=start)


class TransformerDecoder(Stack):
    """A causal language model: (B, L) token ids -> (B, L, vocab) logits; also token by token, on states.

    layers, heads, dim, mechanism, options: as for `TransformerEncoder`; must be causal, and recurrent to scan
    vocab: the number of token ids

    >>> import torch, subquad as sq
    >>> model = sq.nn.TransformerDecoder(layers=2, heads=2, dim=16, vocab=20, mechanism="linear")
    >>> tokens = torch.randint(0, 20, (1, 12))
    >>> logits, states = model.scan(tokens[:, :8])               # prefill
    >>> more, states = model.scan(tokens[:, 8:], states)         # any number of further tokens
    >>> torch.allclose(torch.cat([logits, more], 1), model(tokens), atol=1e-5)
    True
    >>> model.generate(tokens, 5, temperature=0).shape
    torch.Size([1, 5])
    """

    kind = "decoder"

    def __init__(
        self,
        layers: int,
        heads: int,
        dim: int,
        vocab: int,
        mechanism: MechanismChoice = "multipole",
        **options: Any,
    ) -> None:
        given = {"layers": layers, "heads": heads, "dim": dim, "mechanism": mechanism, "vocab": vocab}
        super().__init__(self._configured(self.kind, given, options), is_causal=True)
        self.head: nn.Linear | None = None
        if not self.config.tie_embeddings:
            self.head = nn.Linear(dim, vocab, bias=False)
            reset_linear(self.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (B, L, dim) -> (B, L, vocab)."""
        if self.head is not None:
            out: Tensor = self.head(hidden)
            return out
        assert self.embedding is not None
        return nn.functional.linear(hidden, self.embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        *,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        start: int | Tensor | None = None,
    ) -> Tensor:
        """tokens (B, L) -> logits (B, L, vocab); position i has seen tokens 0..i.

        key_mask:    (B, L) bool, True = real; padding may stand anywhere; its outputs have no meaning
        segment_ids: (B, L) integers: several sequences in a row, each as if it were alone
        memory:      (B, S, dim) for models with cross_mechanism, memory_mask (B, S)
        start:       position of the first token, for a piece of a longer sequence: an integer or (B,) int64; None = 0
        """
        self.check_input("tokens", tokens)
        if (memory is None) != (self.config.cross_mechanism is None):
            raise ValueError(
                "memory is needed: the model was built with cross_mechanism"
                if memory is None
                else "memory was given, but the model has no attention to one; build it with cross_mechanism="
            )
        if segment_ids is not None:
            _refuse_start(start)
            if memory is not None:
                raise ValueError("segment_ids and memory cannot be combined: which memory belongs to a segment is open")
            checks.check_mask("key_mask", key_mask, tokens.shape[0], tokens.shape[1], tokens.device)
            return run_packed(lambda x, mask: self(x, key_mask=mask), tokens, segment_ids, key_mask)
        return self.logits(
            self.hidden(tokens, is_causal=True, key_mask=key_mask, memory=memory, memory_mask=memory_mask, start=start)
        )

    def absorb_memory(self, memory: Tensor, *, memory_mask: Tensor | None = None) -> ModelState:
        """States before the first token of sequences that attend to memory (B, S, dim)."""
        if self.config.cross_mechanism is None:
            raise ValueError("the model has no attention to a memory; build it with cross_mechanism=")
        kept = tuple(block.cross.absorb(memory, key_mask=memory_mask) for block in self.blocks)  # type: ignore[union-attr, operator]
        return replace(self.empty_states(memory.shape[0], memory.device), memory=kept)

    def scan(
        self,
        tokens: Tensor,
        states: ModelState | None = None,
        *,
        key_mask: Tensor | None = None,
        start: int | Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, ModelState]:
        """Consume tokens (B, L), also one, after those of `states`; (logits (B, L, vocab), new states).

        key_mask:  (B, L) bool, True = real; masked tokens leave no trace in the states
        start:     position of the first token of a new sequence, an integer or (B,); see `ModelState.merge`
        last_only: logits (B, 1, vocab) of each sequence's last real token only
        """
        self.check_input("tokens", tokens)
        if self.config.cross_mechanism is not None and (states is None or not getattr(states, "memory", True)):
            raise ValueError("states are needed: begin with absorb_memory(memory), or EncoderDecoder.encode(source)")
        hidden, states = self.scan_hidden(tokens, states, key_mask=key_mask, start=start)
        if last_only:
            if key_mask is None:
                hidden = hidden[:, -1:]
            else:
                places = torch.arange(hidden.shape[1], device=hidden.device)
                last = (places * key_mask).amax(-1)
                hidden = hidden.gather(1, last[:, None, None].expand(-1, -1, hidden.shape[-1]))
        return self.logits(hidden), states

    def generate(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """New tokens (B, max_new_tokens) after the prompt; see `subquad.nn.generate`."""
        return generate(self, tokens, max_new_tokens, **options)


class EncoderDecoder(Model):
    """An encoder over the source and a decoder over the target that attends to it: logits (B, L, vocab).

    layers, heads, dim, vocab, mechanism, options: as for `TransformerDecoder`, for both halves
    source_vocab:      token ids of the source; None = the source is (B, S, dim)
    decoder_layers:    None = layers
    encoder_mechanism: None = mechanism; need not be causal
    cross_mechanism:   None = mechanism; must read a memory one query at a time (softmax and all kernelised ones do)

    >>> import torch, subquad as sq
    >>> model = sq.nn.EncoderDecoder(layers=1, heads=2, dim=16, vocab=11, source_vocab=13, mechanism="linear")
    >>> source, target = torch.randint(0, 13, (2, 7)), torch.randint(0, 11, (2, 5))
    >>> logits, states = model.scan(target[:, :3], model.encode(source))
    >>> rest, states = model.scan(target[:, 3:], states)
    >>> torch.allclose(torch.cat([logits, rest], 1), model(source, target), atol=1e-5)
    True
    """

    kind = "encoder-decoder"

    def __init__(
        self,
        layers: int,
        heads: int,
        dim: int,
        vocab: int,
        mechanism: MechanismChoice = "multipole",
        **options: Any,
    ) -> None:
        super().__init__()
        given = {"layers": layers, "heads": heads, "dim": dim, "mechanism": mechanism, "vocab": vocab}
        self.config = self._configured(self.kind, given, options)
        self.encoder = TransformerEncoder.from_config(self.config.of_encoder())
        self.decoder = TransformerDecoder.from_config(self.config.of_decoder())

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """source (B, S) or (B, S, dim), target (B, L) -> logits (B, L, vocab); masks bool, True = real."""
        memory = self._memory(source, source_mask)
        return self.decoder(target, key_mask=target_mask, memory=memory, memory_mask=source_mask)  # type: ignore[no-any-return]

    def _memory(self, source: Tensor, source_mask: Tensor | None) -> Tensor:
        self.encoder.check_input("source", source)
        return self.encoder.hidden(source, is_causal=False, key_mask=source_mask)

    def encode(self, source: Tensor, *, source_mask: Tensor | None = None) -> ModelState:
        """States before the first target token: the source, encoded and absorbed by every decoder layer."""
        return self.decoder.absorb_memory(self._memory(source, source_mask), memory_mask=source_mask)

    def scan(
        self,
        tokens: Tensor,
        states: ModelState,
        *,
        key_mask: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, ModelState]:
        """Consume target tokens (B, L) after `states`, which begin with `encode(source)`."""
        return self.decoder.scan(tokens, states, key_mask=key_mask, last_only=last_only)

    def generate(
        self, source: Tensor, tokens: Tensor, max_new_tokens: int, *, source_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """New tokens (B, max_new_tokens) after target tokens (B, L), L at least 1; see `subquad.nn.generate`."""
        return generate(
            self,
            tokens,
            max_new_tokens,
            begin=lambda: self.encode(source, source_mask=source_mask),
            **options,
        )
