"""Tokens after a prompt, one scan step each, on states instead of keys (of fixed size with `constant_memory`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .modes import evaluation_mode
from .stack import padding_first, take_tokens

__all__ = ["check_sampling", "generate", "sample", "stream"]


def check_sampling(temperature: object, top_k: object, top_p: object) -> None:
    """Refuse a temperature below 0, a top_k below 1 and a top_p outside (0, 1]."""
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, (int, float))
        or not 0 <= temperature < float("inf")
    ):
        raise ValueError(f"temperature must be a finite number of at least 0 (0 = greedy), got {temperature!r}")
    if top_k is not None:
        checks.check_positive("top_k", top_k)
    if top_p is not None and (isinstance(top_p, bool) or not isinstance(top_p, (int, float)) or not 0 < top_p <= 1):
        raise ValueError(f"top_p must be a number in (0, 1], got {top_p!r}")


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token id per row of logits (B, vocab) -> (B,).

    temperature: 0 takes the most likely token; otherwise logits are divided by it
    top_k: keep the k most likely tokens;  top_p: keep the most likely tokens until their probability reaches p
    (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020); the token that reaches it is kept

    >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), temperature=0)
    tensor([1])
    """
    check_sampling(temperature, top_k, top_p)
    if bool(logits.isnan().any()):
        raise ValueError("logits hold NaN: the model diverged, or its input did; there is no most likely token")
    if not bool(logits.amax(-1).isfinite().all()):
        raise ValueError(
            "the largest logit of a row is infinite: every token is forbidden there, or the model overflowed"
        )
    if temperature < torch.finfo(torch.float32).tiny:  # 0 to what divides by it
        return logits.argmax(-1)
    # Relative to the largest first: a tiny temperature then gives -inf and 0, never inf - inf.
    scores = logits.float()
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        # By place, not by value: of equal ones at the border no more than k stay.
        kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(top_k).indices, True)
        scores = scores.masked_fill(~kept, float("-inf"))
    probabilities = torch.softmax(scores, -1)
    if top_p is not None and top_p < 1:
        ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def _prefill(
    model: Any, tokens: Tensor, states: Any, key_mask: Tensor | None, pieces: int | None
) -> tuple[Tensor, Any]:
    """Logits (B, vocab) after the prompt and the states, in pieces of at most so many tokens."""
    if key_mask is not None:
        # Padding to the front, so that the pieces hold none of it after a real token, and each ends with the last ones.
        order = padding_first(key_mask)
        if order is not None:
            tokens, key_mask = take_tokens(tokens, order), key_mask.gather(1, order)
    size = tokens.shape[1] if pieces is None else pieces
    logits = None
    for begin in range(0, tokens.shape[1], size):
        mask = None if key_mask is None else key_mask[:, begin : begin + size]
        logits, states = model.scan(tokens[:, begin : begin + size], states, key_mask=mask, last_only=True)
    if logits is None:
        raise ValueError(
            f"the prompt is empty ({checks.describe_shape(tokens)}): give at least one token per sequence, for example "
            "a begin-of-text token"
        )
    return logits[:, -1], states


def stream(
    model: Any,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    end_token: int | None = None,
    key_mask: Tensor | None = None,
    states: Any = None,
    begin: Callable[[], Any] | None = None,
    prefill_size: int | None = 4096,
) -> Iterator[Tensor]:
    """The tokens of `generate` one step at a time: yields (B,) int64 as soon as they are known.

    >>> import subquad as sq
    >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear")
    >>> [step.shape for step in sq.nn.stream(model, torch.tensor([[1, 2], [3, 4]]), 2)]
    [torch.Size([2]), torch.Size([2])]
    """
    checks.check_positive("max_new_tokens", max_new_tokens)
    check_sampling(temperature, top_k, top_p)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {generator!r}; for a seed use "
            "torch.Generator().manual_seed(seed)"
        )
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise ValueError(
            f"tokens must be an integer tensor of shape (batch, length), got {checks.describe_shape(tokens)}"
        )
    checks.check_mask("key_mask", key_mask, tokens.shape[0], tokens.shape[1], tokens.device)
    if key_mask is not None and not bool(key_mask.any(-1).all()):
        row = int((~key_mask.any(-1)).nonzero()[0])
        raise ValueError(
            f"key_mask: the prompt in row {row} is all padding, so it is empty; give at least one real token"
        )
    if prefill_size is not None:
        checks.check_positive("prefill_size", prefill_size)
    if end_token is not None:
        checks.check_positive("end_token", end_token, least=0)
        if end_token >= model.config.vocab:
            raise ValueError(
                f"end_token={end_token} can never be produced: the vocabulary is 0..{model.config.vocab - 1}"
            )
    return _steps(
        model,
        tokens,
        max_new_tokens,
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator},
        end_token,
        key_mask,
        states,
        begin,
        prefill_size,
    )


def _steps(
    model: Any,
    tokens: Tensor,
    max_new_tokens: int,
    sampling: dict[str, Any],
    end_token: int | None,
    key_mask: Tensor | None,
    states: Any,
    begin: Callable[[], Any] | None,
    prefill_size: int | None,
) -> Iterator[Tensor]:
    parts = list(model.modules())
    # Around each piece of work and not around the yields: the caller's own code keeps its gradients and its dropout.
    with evaluation_mode(parts), torch.no_grad():
        if begin is not None:
            states = begin()
        logits, states = _prefill(model, tokens, states, key_mask, prefill_size)
    finished = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for step in range(max_new_tokens):
        with torch.no_grad():
            chosen = sample(logits, **sampling)
            if end_token is not None:
                chosen = chosen.masked_fill(finished, end_token)
                finished = finished | (chosen == end_token)
        yield chosen
        if step + 1 == max_new_tokens or (end_token is not None and bool(finished.all())):
            return
        with evaluation_mode(parts), torch.no_grad():
            last, states = model.scan(chosen.unsqueeze(1), states, last_only=True)
            logits = last[:, -1]


_OPTIONS = tuple(
    name for name, given in inspect.signature(stream).parameters.items() if given.kind == given.KEYWORD_ONLY
)


def generate(model: Any, tokens: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
    """New tokens (B, N) after prompts (B, L); N is max_new_tokens, or less if every sequence has ended.

    temperature: 0 = greedy;  top_k, top_p: see `sample`
    generator:    a torch.Generator: the same one gives the same tokens
    end_token:    ends a sequence, which is then filled with it; generation stops when all have ended
    key_mask:     (B, L) bool, True = real: prompts of different lengths, padded on either side
    states:       continue after these instead of an empty context
    begin:        a function that makes the first states instead; called in evaluation mode, without gradients
    prefill_size: the prompt is consumed in pieces of so many tokens, in memory that does not grow; None = at once

    Meanwhile the model is in evaluation mode; afterwards, and for `stream` between the steps, in the mode that it had.

    >>> import subquad as sq
    >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear")
    >>> prompt = torch.tensor([[1, 2, 3]])
    >>> a = sq.nn.generate(model, prompt, 8, top_p=0.9, generator=torch.Generator().manual_seed(1))
    >>> b = sq.nn.generate(model, prompt, 8, top_p=0.9, generator=torch.Generator().manual_seed(1))
    >>> torch.equal(a, b)
    True
    """
    checks.check_options("generate", options, _OPTIONS)
    return torch.stack(list(stream(model, tokens, max_new_tokens, **options)), 1)
