"""What a model is, as frozen plain data that goes through JSON and back.

How fast it runs (activation checkpointing, backend, compile) is no part of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import checks
from ..mechanisms import COMBINED, MECHANISMS, Mechanism
from ..mechanisms.base import SHAPE

__all__ = ["CONFIG_VERSION", "LayerMechanism", "MechanismChoice", "ModelConfig", "check_version", "mechanism_data"]

# Raised when a field changes its meaning or is removed; new fields with a default do not need it for reading old files.
CONFIG_VERSION = 1

# One layer's mechanism: a name, {"mechanism": name, **options}, or an object.
LayerMechanism = str | Mapping[str, Any] | Mechanism
# One for all layers, or one per layer.
MechanismChoice = LayerMechanism | Sequence[LayerMechanism]

KINDS = ("encoder", "decoder", "encoder-decoder")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swiglu")
POSITIONS = ("none", "sinusoidal", "learned", "rotary")


def _check_layer_mechanism(argument: str, choice: object) -> None:
    if isinstance(choice, (str, Mechanism)):
        if isinstance(choice, str) and choice not in COMBINED:
            checks.check_option(argument, choice, sorted(MECHANISMS))
        return
    if isinstance(choice, Mapping):
        _check_layer_mechanism(argument, checks.named_mechanism(argument, choice))
        return
    raise TypeError(
        f"{argument} must be a mechanism's name, a dict of options with 'mechanism', a Mechanism object, or a list "
        f"with one of these per layer, got {type(choice).__name__}"
    )


def _frozen_mechanism(argument: str, choice: Any, layers: int) -> Any:
    """`choice` checked, with lists as tuples and dicts copied, so that the config cannot change later."""
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        if len(choice) != layers:
            raise ValueError(
                f"{argument} lists {len(choice)} mechanisms for {layers} layers; give one per layer, or one for all"
            )
        return tuple(_frozen_mechanism(argument, one, layers) for one in choice)
    _check_layer_mechanism(argument, choice)
    return dict(choice) if isinstance(choice, Mapping) else choice


def mechanism_data(argument: str, choice: Any) -> Any:
    """A mechanism choice as JSON data; what only exists as code is refused.

    >>> mechanism_data("mechanism", ({"mechanism": "linear"}, "softmax"))
    [{'mechanism': 'linear'}, 'softmax']
    """
    if isinstance(choice, Mechanism):
        if {**MECHANISMS, **COMBINED}.get(choice.name) is not type(choice):
            raise TypeError(
                f"{argument} holds an object of {type(choice).__name__}, which is not one of list_mechanisms(), so it "
                "has no JSON form; build the model in code and load its state_dict"
            )
        return {name: value for name, value in choice.config().items() if name not in SHAPE}
    if isinstance(choice, Mapping):
        return {name: mechanism_data(f"{argument}[{name!r}]", value) for name, value in choice.items()}
    if isinstance(choice, (tuple, list)):
        return [mechanism_data(argument, one) for one in choice]
    if choice is not None and not isinstance(choice, (str, int, float, bool)):
        raise TypeError(
            f"{argument}={choice!r} has no JSON form (a callable or another object of code); use a named choice, or "
            "build the model in code and load its state_dict"
        )
    return choice


def check_version(field: str, version: object) -> None:
    """Refuse a config whose `field` says that a newer subquad wrote it, or nothing that can be understood."""
    if isinstance(version, bool) or not isinstance(version, int):
        raise ValueError(f"the field {field!r} of a model config must be an integer, got {version!r}")
    if version > CONFIG_VERSION:
        raise ValueError(
            f"the config has {field}={version}, this subquad reads up to {field}={CONFIG_VERSION}; it was written "
            "by a newer one: upgrade subquad to load it"
        )


@dataclass(frozen=True)
class ModelConfig:
    """What a model is.

    kind:          encoder | decoder | encoder-decoder
    layers, heads, dim: blocks, query heads, model width
    vocab:         token ids 0..vocab-1; None = the input is (batch, length, dim) floats (encoders only)
    mechanism:     a name, {"mechanism": name, **options}, an object, or a list with one of these per layer
    kv_heads:      grouped-query heads; None = heads.   head_dim: None = dim / heads
    hidden:        width of the feed-forward; None = 4 dim, or 8/3 dim rounded up to a multiple of 8 for swiglu
    norm:          pre | post (before a branch, or after its sum).   normalization: layer | rms.   norm_eps: its epsilon
    final_norm:    a norm after the last block; None = for pre-norm.   final_norm_eps: None = norm_eps
    activation:    gelu | gelu_tanh | relu | swiglu
    positions:     none | sinusoidal | learned (needs max_length) | rotary (with rotary_base)
    dropout:       on what each branch adds to the residual stream
    bias:          of all linear maps inside the blocks
    tie_embeddings: the output layer uses the token embedding
    reversible:    reversible residual blocks (pre-norm only)
    seed:          of all that is random in mechanisms; layer i draws from (seed, i). None = one from torch's generator
    cross_mechanism: of a decoder's attention to a memory; None = a decoder without one (encoder-decoder: as mechanism)
    source_vocab, encoder_mechanism, decoder_layers: for kind encoder-decoder; None = floats, mechanism, layers

    >>> config = ModelConfig(kind="decoder", layers=2, heads=2, dim=16, vocab=32, mechanism="linear", seed=0)
    >>> ModelConfig.from_json(config.to_json()) == config
    True
    """

    layers: int
    heads: int
    dim: int
    kind: str = "decoder"
    vocab: int | None = None
    mechanism: Any = "multipole"
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    norm: str = "pre"
    normalization: str = "layer"
    norm_eps: float = 1e-5
    final_norm: bool | None = None
    final_norm_eps: float | None = None
    activation: str = "gelu"
    positions: str = "rotary"
    max_length: int | None = None
    rotary_base: float = 10000.0
    dropout: float = 0.0
    bias: bool = True
    tie_embeddings: bool = False
    reversible: bool = False
    seed: int | None = None
    cross_mechanism: Any = None
    source_vocab: int | None = None
    encoder_mechanism: Any = None
    decoder_layers: int | None = None

    def __post_init__(self) -> None:
        checks.check_option("kind", self.kind, KINDS)
        for name in ("layers", "heads", "dim"):
            checks.check_positive(name, getattr(self, name))
        for name in ("vocab", "kv_heads", "head_dim", "hidden", "max_length", "source_vocab", "decoder_layers"):
            if getattr(self, name) is not None:
                checks.check_positive(name, getattr(self, name))
        checks.check_option("norm", self.norm, ("pre", "post"))
        checks.check_option("normalization", self.normalization, ("layer", "rms"))
        checks.check_option("activation", self.activation, ACTIVATIONS)
        checks.check_option("positions", self.positions, POSITIONS)
        for name, optional in (("bias", False), ("tie_embeddings", False), ("reversible", False), ("final_norm", True)):
            if not isinstance(getattr(self, name), bool) and not (optional and getattr(self, name) is None):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        checks.check_number("dropout", self.dropout, 0, 1, closed=True)
        for name in ("norm_eps", "rotary_base", "final_norm_eps"):
            if name != "final_norm_eps" or self.final_norm_eps is not None:
                checks.check_number(name, getattr(self, name), 0)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise TypeError(f"seed must be an integer or None, got {self.seed!r}")
        self._check_shape()
        self._check_kind()
        counts = {"mechanism": self.layers, "encoder_mechanism": self.layers, "cross_mechanism": self.target_layers}
        if self.kind == "encoder-decoder" and self.encoder_mechanism is not None:
            counts["mechanism"] = self.target_layers
        for name, layers in counts.items():
            if getattr(self, name) is not None or name == "mechanism":
                object.__setattr__(self, name, _frozen_mechanism(name, getattr(self, name), layers))

    def _check_shape(self) -> None:
        checks.check_head_dim(self.dim, self.heads, self.head_dim)
        if self.kv_heads is not None:
            checks.check_head_counts(self.heads, self.kv_heads)
        if self.positions == "learned" and self.max_length is None:
            raise ValueError("positions='learned' needs max_length=, the number of positions to learn")
        if self.positions != "learned" and self.max_length is not None:
            raise ValueError(
                f"max_length={self.max_length} belongs to positions='learned'; positions={self.positions!r} has no "
                "longest length, leave it out"
            )
        if self.positions == "rotary" and self.width % 2:
            raise ValueError(f"positions='rotary' turns pairs, so head_dim={self.width} must be even; use another dim")
        if self.reversible and self.norm != "pre":
            raise ValueError("reversible=True needs norm='pre': a norm after the sum cannot be inverted")

    def _check_kind(self) -> None:
        if self.kind != "encoder" and self.vocab is None:
            raise ValueError(f"vocab is needed for kind={self.kind!r}: the number of token ids")
        if self.tie_embeddings and self.kind == "encoder":
            raise ValueError("tie_embeddings=True belongs to models with an output layer; an encoder has none")
        for name in ("source_vocab", "encoder_mechanism", "decoder_layers"):
            if self.kind != "encoder-decoder" and getattr(self, name) is not None:
                raise ValueError(f"{name} belongs to kind='encoder-decoder', got it with kind={self.kind!r}")
        if self.kind == "encoder" and self.cross_mechanism is not None:
            raise ValueError("cross_mechanism belongs to decoders: an encoder has no memory to attend to")
        several = isinstance(self.mechanism, Sequence) and not isinstance(self.mechanism, str)
        if several and self.encoder_mechanism is None and self.target_layers != self.layers:
            raise ValueError(
                f"mechanism lists one per layer, but the encoder has {self.layers} layers and the decoder "
                f"{self.target_layers}; give encoder_mechanism= as well"
            )

    # -- what follows from the fields -------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Head width D."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def hidden_width(self) -> int:
        """Width of the feed-forward."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.dim // 24) * 8 if self.activation == "swiglu" else 4 * self.dim

    @property
    def target_layers(self) -> int:
        """Layers of the decoder."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    def of_encoder(self) -> ModelConfig:
        """The encoder's part of an encoder-decoder."""
        return replace(
            self,
            kind="encoder",
            vocab=self.source_vocab,
            mechanism=self.mechanism if self.encoder_mechanism is None else self.encoder_mechanism,
            tie_embeddings=False,
            cross_mechanism=None,
            source_vocab=None,
            encoder_mechanism=None,
            decoder_layers=None,
        )

    def of_decoder(self) -> ModelConfig:
        """The decoder's part of an encoder-decoder, whose attention to the memory is `mechanism` unless given."""
        return replace(
            self,
            kind="decoder",
            layers=self.target_layers,
            cross_mechanism=self.mechanism if self.cross_mechanism is None else self.cross_mechanism,
            source_vocab=None,
            encoder_mechanism=None,
            decoder_layers=None,
        )

    # -- JSON -------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data with a `version` field; refuses mechanisms that hold callables or come from outside."""
        data: dict[str, Any] = {"version": CONFIG_VERSION}
        for field in fields(self):
            value = getattr(self, field.name)
            data[field.name] = mechanism_data(field.name, value) if field.name.endswith("mechanism") else value
        return data

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """The config that `to_dict` wrote; refuses newer versions and unknown or missing fields by name."""
        if not isinstance(data, Mapping):
            raise TypeError(f"a model config must be a JSON object, got {type(data).__name__}")
        check_version("version", data.get("version"))
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(data) - known - {"version"})
        if unknown:
            hint = checks.nearest(unknown[0], known)
            raise ValueError(f"the config has unknown fields {unknown}{hint}; known fields: {sorted(known)}")
        missing = [name for name in ("layers", "heads", "dim") if name not in data]
        if missing:
            raise ValueError(f"the config lacks the fields {missing}")
        return cls(**{name: value for name, value in data.items() if name != "version"})

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The config that `to_json` wrote."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the text is not JSON, so it holds no model config: {error}") from error
        return cls.from_dict(data)
