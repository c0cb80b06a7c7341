"""Writes the captured heads that the library ships (`src/subquad/lab/captured.*`).

    python benchmarks/capture_heads.py MODEL_FOLDER

MODEL_FOLDER holds all-MiniLM-L6-v2 (Apache-2.0) as `save_pretrained` writes it. The text is that of the built-in text
task, Shakespeare's Coriolanus, which is in the public domain. From each layer the head of median perplexity is taken:
the number of keys that its rows spread over. The model knows 512 positions; for 1024 tokens they are interpolated.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from conversion_data import extended
from torch import Tensor

import subquad
from subquad.hf import capture
from subquad.lab.captured import FOLDER

LENGTH = 1024


def pack(q: Tensor, k: Tensor, v: Tensor, about: dict[str, Any]) -> None:
    """Write both files from q, k, v (heads, length, width)."""
    stacked = torch.stack([q, k, v]).float()
    scales = stacked.abs().amax(-2).clamp(min=1e-12) / 127.0
    numbers = (stacked / scales.unsqueeze(-2)).round().to(torch.int8)
    (FOLDER / "captured.bin").write_bytes(bytes(numbers.view(torch.uint8).flatten().tolist()))
    short = [[[float(f"{x:.4g}") for x in row] for row in heads] for heads in scales.tolist()]
    text = json.dumps({**about, "shape": list(stacked.shape), "scales": short}, indent=1)
    (FOLDER / "captured.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    folder = parser.parse_args().model
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = extended(AutoModel.from_pretrained(str(folder), local_files_only=True).eval(), LENGTH)
    text = (Path(subquad.__file__).parent / "tasks" / "coriolanus.txt").read_text(encoding="utf-8")
    tokens = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"][: LENGTH - 2]
    whole = torch.tensor([[tokenizer.cls_token_id, *tokens, tokenizer.sep_token_id]])
    chosen, heads = [], []
    for sample in capture(model, [{"input_ids": whole}]):
        q, k, v = (torch.cat(x)[0].float() for x in (sample.q, sample.k, sample.v))
        weights = torch.softmax(q @ k.mT * sample.scale, -1)
        entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1).mean(-1)
        head = int(entropy.argsort()[len(entropy) // 2])
        chosen.append((q[head], k[head], v[head]))
        heads.append({"layer": sample.layer, "head": head, "perplexity": round(math.exp(float(entropy[head])))})
    about = {
        "model": "all-MiniLM-L6-v2",
        "licence": "Apache-2.0",
        "where": "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
        "text": "Shakespeare's Coriolanus",
        "text_licence": "public domain",
        "positions": "interpolated from 512 to 1024",
        "rounded": "to 8 bits, one scale per head and coordinate",
        "heads": heads,
    }
    q, k, v = (torch.stack(x) for x in zip(*chosen, strict=True))
    pack(q, k, v, about)
    print(heads)


if __name__ == "__main__":
    main()
