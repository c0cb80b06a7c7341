"""`SubquadConfig`: what `nn.ModelConfig` says a model is, in the form that transformers saves and loads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any

from transformers import PreTrainedConfig

from ... import checks
from ...nn.config import CONFIG_VERSION, ModelConfig, check_version, mechanism_data

__all__ = ["SubquadConfig"]

# Fields of ModelConfig that belong to encoder-decoders, which are no part of this family.
_FOREIGN = ("cross_mechanism", "source_vocab", "encoder_mechanism", "decoder_layers")
# transformers keeps `max_length` for generation and refuses to save a config that has one.
_RENAMED = {"max_length": "max_positions"}
_REQUIRED = {"layers": 12, "heads": 12, "dim": 768}
# What heads and generation need besides the model itself.
_EXTRA: dict[str, Any] = {
    "frame_width": None,
    "frame_stack": 1,
    "pooling": None,
    "classifier_dropout": 0.0,
    "ctc_blank": 0,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_POOLINGS = ("mean", "first", "last")


def _model_fields() -> dict[str, Any]:
    """Names here and defaults of the fields that make a ModelConfig."""
    return {
        _RENAMED.get(field.name, field.name): _REQUIRED.get(field.name, field.default)
        for field in fields(ModelConfig)
        if field.name not in _FOREIGN
    }


def _common_fields() -> set[str]:
    """Names that transformers itself puts into every config, in any version."""
    names = {
        "model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "name_or_path", "_name_or_path",
        "num_labels", "id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states",
        "return_dict", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "experts_implementation", "_experts_implementation", "_commit_hash", "is_encoder_decoder", "use_cache",
        "chunk_size_feed_forward", "quantization_config", "tokenizer_class", "auto_map", "per_layer_config",
    }  # fmt: skip
    names |= {
        name for name in signature(PreTrainedConfig.__init__).parameters if name not in ("self", "kwargs", "args")
    }
    if is_dataclass(PreTrainedConfig):  # in later versions of transformers 5
        names |= {field.name for field in fields(PreTrainedConfig)}
    return names


class SubquadConfig(PreTrainedConfig):
    """The config of every model class here: the fields of `nn.ModelConfig` and a few for heads, by keyword.

    layers, heads, dim, kind (decoder | encoder), vocab, mechanism, kv_heads, head_dim, hidden, norm, normalization,
    norm_eps, final_norm, final_norm_eps, activation, positions, rotary_base, dropout, bias, tie_embeddings, reversible,
    seed: as in `nn.ModelConfig`. Its `max_length` is called `max_positions`, since transformers uses that name for the
    length of generated text. transformers' names work too: hidden_size, num_hidden_layers, num_attention_heads,
    num_key_value_heads, intermediate_size, vocab_size, tie_word_embeddings, max_position_embeddings.

    mechanism:   a name, {"mechanism": name, **options}, or a list with one of these per layer. A mechanism object is
                 written down as its name and options at once: what has no such form is refused here, not when saving
    frame_width: the input is speech or other frames (B, T, frame_width), kind encoder without a vocabulary
    frame_stack: so many consecutive frames make one token
    pooling:     of sequence classification: mean | first | last; None = mean for encoders, last for decoders
    classifier_dropout: before the classification heads
    ctc_blank:   the label that stands for "nothing" in CTC
    use_cache:   whether a decoder in evaluation mode begins a cache where a call does not say
    bos_token_id, eos_token_id, pad_token_id: what `generate` begins, ends and pads with

    A file written by a newer version of the format, or with a field unknown here, is refused by name.

    >>> config = SubquadConfig(layers=2, heads=2, dim=16, vocab=256, mechanism={"mechanism": "performer"}, seed=0)
    >>> SubquadConfig.from_dict(config.to_dict()) == config, config.num_hidden_layers
    (True, 2)
    """

    model_type = "subquad"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "hidden",
        "vocab_size": "vocab",
        "tie_word_embeddings": "tie_embeddings",
        "max_position_embeddings": "max_positions",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(self, **given: Any) -> None:
        given = {self.attribute_map.get(name, name): value for name, value in given.items()}
        version = given.pop("config_version", None)
        if version is not None:
            self._check_file(version, given)
        model = _model_fields()
        self._refuse_unknown(given, (*model, *_EXTRA))
        if "vocab" not in given:
            given["vocab"] = None if given.get("frame_width") is not None else 256
        own = {name: given.pop(name, default) for name, default in {**model, **_EXTRA}.items()}
        super().__init__(**given)
        own["mechanism"] = mechanism_data("mechanism", own["mechanism"])
        for name, value in own.items():
            setattr(self, name, value)
        self.config_version = CONFIG_VERSION
        self.architecture()  # refuses what no model can be built from, here and not later
        self._check_extras()

    @staticmethod
    def _check_file(version: object, given: dict[str, Any]) -> None:
        check_version("config_version", version)
        missing = [name for name in (*_REQUIRED, "kind", "vocab", "mechanism") if name not in given]
        if missing:
            raise ValueError(f"the config lacks the fields {missing}")

    @staticmethod
    def _refuse_unknown(given: Iterable[str], own: Iterable[str]) -> None:
        known = {*own, *_common_fields()}
        unknown = sorted(set(given) - known)
        if "max_length" in unknown:
            raise ValueError(
                "SubquadConfig has no field 'max_length': the number of learned positions is max_positions= here, "
                "and the length of generated text belongs to generate(max_length=)"
            )
        if unknown:
            hint = checks.nearest(unknown[0], own)
            raise ValueError(f"SubquadConfig has no fields {unknown}{hint}; its own fields: {sorted(own)}")

    def _check_extras(self) -> None:
        if self.kind == "encoder-decoder":
            raise ValueError(
                "kind='encoder-decoder' is no part of these classes, expected 'decoder' or 'encoder'; use "
                "subquad.nn.EncoderDecoder"
            )
        checks.check_positive("frame_stack", self.frame_stack)
        checks.check_positive("ctc_blank", self.ctc_blank, least=0)
        if self.pooling is not None:
            checks.check_option("pooling", self.pooling, _POOLINGS)
        if self.frame_width is not None:
            checks.check_positive("frame_width", self.frame_width)
            if self.vocab is not None or self.kind != "encoder":
                raise ValueError(
                    f"frame_width={self.frame_width} means the input is frames, so it needs kind='encoder' and "
                    f"vocab=None, got kind={self.kind!r} and vocab={self.vocab!r}"
                )

    def architecture(self) -> ModelConfig:
        """The `nn.ModelConfig` of the blocks, checked anew.

        >>> SubquadConfig(layers=1, heads=2, dim=8, vocab=5, mechanism="linear").architecture().width
        4
        """
        back = {new: old for old, new in _RENAMED.items()}
        return ModelConfig(**{back.get(name, name): getattr(self, name) for name in _model_fields()})

    @property
    def labels(self) -> int:
        """The number of labels; 2 unless told, as transformers has it."""
        return 2 if self.num_labels is None else self.num_labels

    def __eq__(self, other: object) -> bool:
        # transformers compares dataclass fields, which ours are not: two different models would count as equal.
        return isinstance(other, SubquadConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_architecture(cls, config: ModelConfig, **more: Any) -> SubquadConfig:
        """The config of an `nn` model, plus fields for heads.

        >>> import subquad as sq
        >>> model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear")
        >>> SubquadConfig.from_architecture(model.config).architecture() == model.config
        True
        """
        for name in _FOREIGN:
            if getattr(config, name) is not None:
                raise ValueError(f"{name} belongs to models with a memory, which are no part of these classes")
        names = {field.name: _RENAMED.get(field.name, field.name) for field in fields(ModelConfig)}
        return cls(**{new: getattr(config, old) for old, new in names.items() if old not in _FOREIGN}, **more)
