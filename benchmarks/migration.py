"""The page "Moving from fast-transformers" checked against that library: carried weights give the same outputs.

    make peers      (or: python benchmarks/migration.py where pytorch-fast-transformers is installed)

The functions come from the page itself, so that what it tells people to type is what is compared.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import torch
from fast_transformers.builders import TransformerEncoderBuilder
from fast_transformers.masking import LengthMask, TriangularCausalMask

import subquad as sq

PAGE = Path(__file__).parent.parent / "docs" / "howto" / "from-fast-transformers.md"
ATTENTION = {"full": "softmax", "linear": "linear", "causal-linear": "linear"}


def difference(theirs_name: str, carried: Any) -> float:
    """The largest difference of the outputs, with the weights of theirs in ours."""
    theirs = TransformerEncoderBuilder.from_kwargs(
        n_layers=4, n_heads=8, query_dimensions=32, value_dimensions=32, feed_forward_dimensions=1024,
        attention_type=theirs_name, activation="gelu", dropout=0.0,
    ).get().eval()  # fmt: skip
    ours = sq.nn.TransformerEncoder(
        layers=4, heads=8, dim=256, hidden=1024, mechanism=ATTENTION[theirs_name], norm="post", final_norm=True,
        activation="gelu", positions="none",
    ).eval()  # fmt: skip
    ours.load_state_dict({**ours.state_dict(), **carried(theirs.state_dict())})
    x, lengths = torch.randn(2, 50, 256), torch.tensor([50, 31])
    with torch.no_grad():
        if theirs_name == "causal-linear":
            a, b = theirs(x, attn_mask=TriangularCausalMask(50)), ours(x, is_causal=True)
        else:
            a = theirs(x, length_mask=LengthMask(lengths))[:, :31]
            b = ours(x, key_mask=torch.arange(50) < lengths[:, None])[:, :31]
    return float((a - b).abs().max())


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    page: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(block, page)
    found = {name: difference(name, page["carried"]) for name in ATTENTION}
    for name, largest in found.items():
        print(f"{name:14s} largest difference of the outputs {largest:.1e}")
    sys.exit(max(found.values()) > 1e-5)


if __name__ == "__main__":
    main()
