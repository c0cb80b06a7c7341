"""Search long documents with a converted sentence encoder: texts beyond its learned positions, in one vector each.

    python examples/search_documents.py [--model FOLDER] [--documents FILE ...] [--query TEXT] [--length 2048]

Without a folder it makes a small random encoder over a few words, so that the example runs anywhere. Yours: the folder
or name of any SentenceTransformer with learned positions, such as all-MiniLM-L6-v2, which takes 512 tokens by itself.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel, BertTokenizer

import subquad as sq

TOPICS = {
    "sea": "ship sail wave harbour captain storm whale anchor",
    "law": "court judge law justice trial witness sentence appeal",
    "garden": "tree flower soil garden seed rain leaf root",
}


def small_encoder() -> Any:
    """A random BERT of 64 positions that knows the words of TOPICS."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *" ".join(TOPICS.values()).split()]
    config = BertConfig(vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, max_position_embeddings=64)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(words))
        BertTokenizer(vocab_file=str(Path(folder, "vocab.txt"))).save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        return SentenceTransformer(folder, device="cpu")


def made_up(length: int) -> dict[str, str]:
    rng = random.Random(0)
    return {topic: " ".join(rng.choices(words.split(), k=length)) for topic, words in TOPICS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or name of a SentenceTransformer")
    parser.add_argument("--documents", nargs="+", type=Path, help="text files, one document each")
    parser.add_argument("--query", default="the captain and the whale in a storm")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document that are read")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = SentenceTransformer(given.model, device="cpu") if given.model else small_encoder()
    documents = made_up(given.length)
    if given.documents:
        documents = {path.name: path.read_text(encoding="utf-8") for path in given.documents}
    before = model.max_seq_length
    # With texts of your own and no mechanism named, the fastest within an error is chosen: convert(model,
    # calibration=texts, length=..., positions="interpolate").
    model, report = sq.hf.convert(model, "multipole", seed=0, length=given.length, positions="interpolate")
    print(report)
    start = time.perf_counter()
    found = torch.as_tensor(model.encode(list(documents.values()), normalize_embeddings=True))
    print(f"{len(documents)} documents of up to {given.length} tokens (the encoder itself takes {before}) in "
          f"{time.perf_counter() - start:.2f} s")  # fmt: skip
    scores = found @ torch.as_tensor(model.encode([given.query], normalize_embeddings=True))[0]
    print(f"\n{given.query!r} is nearest to")
    for number in scores.argsort(descending=True).tolist():
        print(f"  {scores[number]:.3f}  {list(documents)[number]}")


if __name__ == "__main__":
    main()
