"""The versions of transformers that this package works with; imported before anything that needs one."""

from __future__ import annotations

__all__ = ["MAJOR"]

# From 5.0.0 on: 4 has other cache layers, another way of loading weights and another tokenizer base.
MAJOR = 5

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "subquad.hf needs transformers 5, which is not installed: pip install 'subquad[hf]'", name="transformers"
    ) from None

if transformers.__version__.split(".")[0] != str(MAJOR):
    raise ImportError(
        f"subquad.hf works with transformers >=5.0,<6, found {transformers.__version__}: pip install 'subquad[hf]'"
    )
