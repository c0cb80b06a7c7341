"""Give a pretrained model linear attention, see what it costs, save it, and load it again.

    python examples/convert_model.py [--model FOLDER] [--window 16] [--num-features 64]

Without a folder it makes a small random Llama, so that the example runs anywhere.
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import subquad as sq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder that AutoModelForCausalLM can load")
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--num-features", type=int, default=64)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.model:
        model = AutoModelForCausalLM.from_pretrained(given.model)
    else:
        small = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip
        model = LlamaForCausalLM(small)
    model.eval()
    # A few batches as the model takes them; with a real model, tokenised text.
    ids = torch.randint(3, model.config.vocab_size, (3, 2, 128))
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
    with torch.no_grad():
        exact = model(**batches[0]).logits
    far = {"mechanism": "performer", "features": "sderf", "center": True, "num_features": given.num_features, "seed": 0}
    model, report = sq.hf.convert(model, "hybrid", window=given.window, sinks=4, far=far, calibration=batches)
    print(report)
    with torch.no_grad():
        converted = model(**batches[0]).logits
    print(f"logits differ by {float((converted - exact).norm() / exact.norm()):.3f} (relative)")
    new = model.generate(**batches[0], max_new_tokens=8, do_sample=False, pad_token_id=0)
    print("generated with a cache of constant size:", new[0, -8:].tolist())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = sq.hf.load(folder)
    with torch.no_grad():
        print("saved and loaded, the same logits:", torch.allclose(again(**batches[0]).logits, converted, atol=1e-5))


if __name__ == "__main__":
    main()
