"""A cache for `generate()` that holds one mechanism state per layer instead of keys and values.

Its size is that of the states: constant in the context for every kernelised mechanism and for sliding windows, growing
for `softmax` and `multipole`, whose states have all keys. transformers' own linear-attention layers hold a convolution
and a recurrent tensor of one shape and track no length; a mechanism's state is any registered pytree (sums with a
running maximum, a window with a count, both), and masks, positions and prompts that continue a cache need the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .. import checks
from ..mechanisms import Mechanism
from ..nn.states import ModelState
from ..rollback import Checkpoints
from ..state import state_bytes

__all__ = ["RollbackCache", "StateCache", "StateLayer"]

# Tokens that assisted decoding may take back at once; its candidates are some ten or twenty.
ROLLBACK = 64


class StateLayer(CacheLayerMixin):
    """One layer's memory: a mechanism's state and the number of tokens it was made from, padding included.

    `update` counts new tokens and returns their k and v alone, never the past; `advance` goes on from the state over
    them, so the state goes in and comes out in one place. The mask of such a call covers the new tokens only, which
    is what `get_mask_sizes` says.

    >>> import subquad as sq
    >>> attn = sq.create("linear", head_dim=8)
    >>> q, k, v = torch.randn(3, 2, 4, 10, 8)
    >>> layer = StateLayer()
    >>> for piece in (slice(0, 7), slice(7, 10)):
    ...     new_k, new_v = layer.update(k[:, :, piece], v[:, :, piece])
    ...     out = layer.advance(attn, q[:, :, piece], new_k, new_v)
    >>> torch.allclose(out, attn(q, k, v, is_causal=True)[:, :, 7:], atol=1e-5), layer.get_seq_length()
    (True, 10)
    """

    # generate() would compile a step on its own for these; a state is replaced, not written in place.
    is_compileable = False
    is_sliding = False
    # There is nothing to allocate before the first token: only the mechanism knows the shapes.
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state: Any = None
        self.length = 0
        self.device: torch.device | None = None
        self.dtype: torch.dtype | None = None
        # How many tokens can be taken back at least, for states that keep none; 0 = as many as the state itself can.
        self.rollback = 0

    def __repr__(self) -> str:
        return f"StateLayer(length={self.length}, state={type(self.state).__name__})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayer:
        # States are replaced and never written to, so a copy can share them: forking a context costs nothing.
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        memo[id(self)] = made
        return made

    # -- tokens -------------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember device and dtype; the state itself comes from the mechanism."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count new tokens k (B, H, L, D), v (B, H, L, E) and return them alone; see the class for what follows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.length += key_states.shape[-2]
        return key_states, value_states

    def advance(self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
        """mechanism.scan of the tokens that `update` counted, after the state, which is replaced; -> (B, Hq, L, E)."""
        self._record(k.shape[2])
        out, self.state = mechanism.scan(q, k, v, self.state, **call)
        return out

    def _record(self, new: int) -> None:
        """Let the state remember its last tokens, if that is wanted: `new` of all tokens are not in it yet."""
        if self.rollback and not getattr(self.state, "crops", False):
            self.state = Checkpoints(self.rollback, self.state, self.length - new)

    def store(self, state: Any, length: int, device: torch.device) -> None:
        """Put in the state after further `length` tokens: for models that scan by themselves."""
        self.state, self.device, self.is_initialized = state, device, True
        self.length += length

    # -- what masks and positions need -------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens so far, padding included, as transformers counts them."""
        return self.length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """(keys that `update` returns, position of the first of them): the new tokens, after all that went before.

        The first versions of transformers 5 give the positions of the queries (L,) instead of their number.
        """
        return (query_length if isinstance(query_length, int) else len(query_length)), self.length

    def get_max_length(self) -> int:
        """-1: there is no longest context."""
        return -1

    # The name of the same question in the first versions of transformers 5.
    get_max_cache_shape = get_max_length

    # -- sequences of the batch ------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Number of sequences; an AttributeError before the first token, as for transformers' own lazy layers."""
        for leaf in pytree.tree_leaves(self.state):
            if isinstance(leaf, Tensor):
                return int(leaf.shape[0])
        raise AttributeError("batch_size: the layer has seen no token yet")

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = pytree.tree_map_only(Tensor, change, self.state)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, reorder or repeat sequences: `indices` (N,) int64."""
        self._change(lambda x: x.index_select(0, indices.to(x.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes sequence beam_idx[i]: beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times in a row."""
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget everything; the next token is the first one."""
        self.state, self.length = None, 0

    # -- taking tokens back -------------------------------------------------------------------------------------------

    def activate_past_recording(self, tokens: int = ROLLBACK) -> None:
        """From now on the last `tokens` can be taken back; transformers calls it before assisted decoding."""
        checks.check_positive("tokens", tokens)
        self.rollback = tokens
        if self.length:
            self._record(0)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether `crop` can take tokens back: states of all keys always, others if past recording is active."""
        return bool(self.rollback if self.state is None else getattr(self.state, "crops", False))

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: crop(-3) three of them, crop(100) all after the first hundred."""
        # The first versions of transformers 5 name the number of tokens that are left.
        left = self.length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self.length)
        if left < 0:
            raise ValueError(f"crop({tokens_to_remove}): the layer has {self.length} tokens")
        if left < self.length and not self.is_croppable:
            raise NotImplementedError(
                f"crop({tokens_to_remove}): this state is a running sum that keeps no single token, so tokens cannot "
                "be taken back. Keep checkpoints: call activate_past_recording() of a subquad.hf.StateCache before "
                "they are scanned; converted models take past_key_values=subquad.hf.RollbackCache(config=model.config)"
            )
        if left < self.length:
            self.state, self.length = self.state.crop(left), left

    # -- devices ----------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._change(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to where it was made."""
        self._change(lambda x: x.to(self.device, non_blocking=True))


@contextmanager
def _all_or_none(layers: Sequence[Any]) -> Iterator[None]:
    """Inside, layers are cropped one after the other; where one refuses, all have again what they had."""
    # References: states and keys are replaced and never written to. transformers' convolutions keep theirs in a dict.
    before = [{name: dict(x) if isinstance(x, dict) else x for name, x in vars(layer).items()} for layer in layers]
    try:
        yield
    except BaseException:
        for layer, had in zip(layers, before, strict=True):
            vars(layer).update(had)
        raise


class RollbackCache(DynamicCache):
    """A cache for assisted decoding with a converted model: its states can take their last `tokens` back.

    A converted model puts its states into whatever cache `generate` makes, and these keep no checkpoints by default:

        model.generate(ids, prompt_lookup_num_tokens=10, past_key_values=RollbackCache(config=model.config))
    """

    def __init__(self, *args: Any, tokens: int = ROLLBACK, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        checks.check_positive("tokens", tokens)
        self.rollback = tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back; where a layer refuses, nothing has changed."""
        with _all_or_none(self.layers):
            super().crop(tokens_to_remove)


class StateCache(Cache):
    """A `past_key_values` made of `StateLayer`s; one of transformers' own layers may stand wherever one is needed.

    layers: their number, or the layers themselves. For a model of which only some layers are converted:

        mixed = DynamicCache(config=model.config).layers
        cache = StateCache([StateLayer() if i in converted else layer for i, layer in enumerate(mixed)])

    It also carries what a whole model of this library remembers besides its layers: where each sequence begins, how
    many real tokens it has, and which model made it (`model_state`, `store`).

    >>> import subquad as sq
    >>> model = sq.nn.TransformerDecoder(layers=2, heads=2, dim=8, vocab=5, mechanism="linear")
    >>> cache = StateCache(2)
    >>> _, states = model.scan(torch.tensor([[1, 2, 3]]), cache.model_state)
    >>> cache.store(states, 3)
    >>> cache.batch_repeat_interleave(4)
    >>> cache.get_seq_length(), cache.model_state.batch
    (3, 4)
    """

    layers: list[Any]

    def __init__(self, layers: int | Sequence[Any]) -> None:
        if isinstance(layers, int):
            checks.check_positive("layers", layers)
            layers = [StateLayer() for _ in range(layers)]
        super().__init__(layers=list(layers))
        # start and length (B,) and the origin of `ModelState`, without its layers.
        self._rest: ModelState | None = None

    # -- states of a whole model ------------------------------------------------------------------------------------

    @property
    def model_state(self) -> ModelState | None:
        """What `scan` of a model of this library takes; None before the first token."""
        if self._rest is None:
            return None
        rest = self._rest
        return ModelState(
            tuple(layer.state for layer in self.layers), rest.memory, rest.start, rest.length, rest.origin
        )

    def store(self, state: ModelState, length: int) -> None:
        """Put in the model's state after further `length` tokens (padding included)."""
        if len(state.layers) != len(self.layers):
            raise ValueError(
                f"the cache has {len(self.layers)} layers, the state {len(state.layers)}: make a new cache"
            )
        for layer, one in zip(self.layers, state.layers, strict=True):
            layer.store(one, length, state.length.device)
        self._rest = ModelState((), state.memory, state.start, state.length, state.origin)

    def _change_rest(self, change: Callable[[Tensor], Tensor]) -> None:
        self._rest = pytree.tree_map_only(Tensor, change, self._rest)

    # -- transformers' own calls --------------------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, position of the first) for the mask that all layers of one kind share.

        Where some layers keep keys, they decide: states need no more than the last `query_length` columns.
        """
        if isinstance(self.layers[layer_idx], StateLayer):
            for layer in self.layers:
                if not isinstance(layer, StateLayer) and not getattr(layer, "is_sliding", False):
                    sizes: tuple[int, int] = layer.get_mask_sizes(query_length)
                    return sizes
        sizes = self.layers[layer_idx].get_mask_sizes(query_length)
        return sizes

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes sequence beam_idx[i]: beam search."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._change_rest(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep, reorder or repeat sequences: `indices` (N,) int64."""
        super().batch_select_indices(indices)
        self._change_rest(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times in a row."""
        super().batch_repeat_interleave(repeats)
        self._change_rest(lambda x: x.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        """Forget everything; the next token is the first one."""
        super().reset()  # type: ignore[no-untyped-call]
        self._rest = None

    def activate_past_recording(self, tokens: int = ROLLBACK) -> None:
        """From now on the last `tokens` can be taken back (`crop`): states that keep no keys get checkpoints.

        >>> import subquad as sq
        >>> attn, cache = sq.create("linear", head_dim=8), StateCache(1)
        >>> cache.activate_past_recording(4)
        >>> q, k, v = torch.randn(3, 2, 4, 10, 8)
        >>> _ = cache.layers[0].advance(attn, q, *cache.layers[0].update(k, v))
        >>> cache.crop(-3)
        >>> cache.get_seq_length(), cache.is_croppable
        (7, True)
        """
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.activate_past_recording(tokens)
            elif hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def recording(self, state: ModelState) -> ModelState:
        """A model's state before its first token, with checkpoints where the layers want them."""
        layers = [
            Checkpoints(layer.rollback) if one is None and layer.rollback else one
            for layer, one in zip(self.layers, state.layers, strict=True)
        ]
        return replace(state, layers=tuple(layers))

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: crop(-3) three of them, crop(100) all after the first hundred.

        They must be real ones, as generated tokens are. Where a layer refuses, nothing has changed.
        """
        before = self.get_seq_length()
        with _all_or_none(self.layers):
            super().crop(tokens_to_remove)
        if self._rest is not None:
            self._rest = replace(self._rest, length=self._rest.length - (before - self.get_seq_length()))

    @property
    def is_croppable(self) -> bool:
        """Whether every layer can take tokens back."""
        return all(layer.is_croppable for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of all states and layers."""
        states = [x.state if isinstance(x, StateLayer) else (x.keys, x.values) for x in self.layers]
        return state_bytes([self._rest, *states])
