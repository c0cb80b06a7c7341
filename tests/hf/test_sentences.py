"""Sentence encoders: converted, saved and loaded with their mechanisms, and long texts on interpolated positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

import subquad as sq
from subquad.hf.conversion.positions import InterpolatedEmbedding, interpolate_positions


def encoder(tmp_path: Path) -> Any:
    """A tiny SentenceTransformer around a random BERT."""
    sentences = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tf.BertTokenizer(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    config = tf.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=16, initializer_range=0.3,
    )  # fmt: skip
    tf.BertModel(config).save_pretrained(tmp_path / "bert")
    return sentences.SentenceTransformer(str(tmp_path / "bert"), device="cpu")


def test_saved_and_loaded_with_its_mechanisms(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    texts = ["w1 w2 w3", " ".join(f"w{i % 40}" for i in range(60))]
    exact = model.encode(texts)
    with pytest.raises(ValueError, match="nothing"):
        sq.hf.convert(model, "nothing", positions="interpolate", length=64)
    assert model.max_seq_length == 16 and type(model[0]).__name__ == "Transformer"
    model, report = sq.hf.convert(
        model, "performer", num_features=16, seed=0, positions="interpolate", length=64,
        calibration=texts,
    )  # fmt: skip
    assert report.converted == [0, 1] and "up to 64 tokens" in str(report)
    assert report.calibration_tokens == 5 + 62  # the long text is not cut to the 16 positions
    found = torch.as_tensor(model.encode(texts))
    assert (found - torch.as_tensor(exact)).abs().max() > 1e-3
    torch.testing.assert_close(torch.as_tensor(model.encode(texts[1:]))[0], found[1], rtol=1e-4, atol=1e-4)
    model.save(str(tmp_path / "saved"))
    kind = json.loads((tmp_path / "saved" / "modules.json").read_text())[0]["type"]
    assert kind == "subquad.hf.conversion.sentences.ConvertedTransformer"
    again = sq.hf.load(tmp_path / "saved", device="cpu")
    torch.testing.assert_close(torch.as_tensor(again.encode(texts)), found, rtol=1e-5, atol=1e-5)
    assert type(sq.hf.revert(model)[0]).__name__ == "Transformer" and model.max_seq_length == 16
    torch.testing.assert_close(torch.as_tensor(model.encode(texts)), torch.as_tensor(exact))


def test_positions_between_those_that_were_learned() -> None:
    torch.manual_seed(0)
    model = tf.BertModel(tf.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8,
    )).eval()  # fmt: skip
    weight = model.embeddings.position_embeddings.weight.detach().clone()
    table = interpolate_positions(model, 64)
    assert isinstance(model.embeddings.position_embeddings, InterpolatedEmbedding)
    places = table.places((1, 15), None, torch.device("cpu"))
    stretched = nn.functional.interpolate(weight.T[None], size=15, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(table(places)[0], stretched, rtol=1e-5, atol=1e-6)
    short = torch.tensor([[1, 1, 1, 1, 0]])
    assert table.places((1, 5), short, torch.device("cpu"))[0, :4].tolist() == [0, 1, 2, 3]
    ids = torch.randint(0, 30, (1, 15))
    with torch.no_grad():
        out = model(ids, position_ids=places, token_type_ids=torch.zeros_like(ids)).last_hidden_state
    assert out.shape == (1, 15, 16) and bool(torch.isfinite(out).all())


def test_what_has_no_such_positions_is_refused() -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    llama = tf.LlamaModel(tf.LlamaConfig(vocab_size=10, **size))
    with pytest.raises(ValueError, match=r"needs one learned table of positions .*has 0"):
        interpolate_positions(llama, 64)
    model = tf.BertModel(tf.BertConfig(vocab_size=30, **size))
    with pytest.raises(ValueError, match="needs a SentenceTransformer and length="):
        sq.hf.convert(model, "linear", positions="interpolate", length=64)


def test_a_refused_second_conversion_leaves_the_first(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    model, _ = sq.hf.convert(model, "local", window=500, positions="interpolate", length=64)
    long = " ".join(f"w{i % 40}" for i in range(50))
    before = model.encode([long])
    with pytest.raises(ValueError, match="converted already"):
        sq.hf.convert(model, "local", window=5, positions="interpolate", length=128)
    assert (model.encode([long]) == before).all()
    assert model.max_seq_length == 64 and type(model[0]).__name__ == "ConvertedTransformer"


def test_where_nothing_is_converted_positions_stay_as_they_were(tmp_path: Path) -> None:
    model = encoder(tmp_path)
    texts = [" ".join(f"w{(i * s) % 40}" for i in range(60)) for s in (1, 3, 7, 9)]
    candidates = [{"mechanism": "performer", "num_features": 4}]
    model, report = sq.hf.convert(
        model, positions="interpolate", length=64, calibration=texts, candidates=candidates, error=1e-6
    )
    assert not report.converted
    assert model.max_seq_length == 16 and type(model[0]).__name__ == "Transformer"
