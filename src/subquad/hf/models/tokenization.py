"""Text as its UTF-8 bytes: a tokenizer without a vocabulary file, so that byte-level models need no download."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerBase

from ..conversion.restoring import read_config

__all__ = ["ByteTokenizer", "saved_tokenizer"]

# Any of these means that a folder has a tokenizer of its own.
_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ByteTokenizer(PreTrainedTokenizer):
    """Token i is byte i for 0..255; named special tokens (eos_token=, bos_token=, mask_token=) follow from 256 on.

    Nothing is added around a text. Padding is byte 0, which no text contains, so a vocabulary of 256 is enough for
    batches; it goes to the left, where `generate` needs it. Bytes that are no UTF-8 are decoded as U+FFFD.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer("né").input_ids, tokenizer.decode([110, 195, 169])
    ([110, 195, 169], 'né')
    >>> ByteTokenizer(mask_token="<mask>")("a<mask>").input_ids
    [97, 256]
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    vocab_files_names: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, *, pad_token: Any = "\0", padding_side: str = "left", **special: Any) -> None:
        super().__init__(pad_token=pad_token, padding_side=padding_side, **special)  # type: ignore[no-untyped-call]

    @property
    def vocab_size(self) -> int:
        """256, without special tokens."""
        return 256

    def get_vocab(self) -> dict[str, int]:
        """Tokens by name: one character per byte, then the special ones."""
        return {**{chr(byte): byte for byte in range(256)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int | None:
        return ord(token) if len(token) == 1 and ord(token) < 256 else None

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Bytes joined and decoded; special tokens by their names."""
        joined = b"".join(bytes([ord(token)]) if len(token) == 1 else token.encode() for token in tokens)
        return joined.decode("utf-8", errors="replace")

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """The tokens as they are; a pair follows one another."""
        return token_ids_0 + (token_ids_1 or [])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """There is nothing to save besides the config."""
        return ()


def saved_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was saved in a folder with a model, that of bytes for a model of bytes, or None.

    Asked for one of a folder that has none, transformers makes one up from the model's type.
    """
    if any((Path(folder) / name).is_file() for name in _FILES):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return found
    config = read_config(folder)
    return ByteTokenizer() if config.get("model_type") == "subquad" and config.get("vocab") == 256 else None
