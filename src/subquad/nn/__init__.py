"""Models around any mechanism: attention layer, blocks, encoder, decoder, encoder-decoder, generation.

>>> import torch, subquad as sq
>>> model = sq.nn.TransformerDecoder(layers=2, heads=2, dim=32, vocab=256, mechanism="linear")
>>> logits, states = model.scan(torch.randint(0, 256, (1, 100)))     # prefill
>>> logits, states = model.scan(torch.tensor([[7]]), states)         # constant time and memory from here on
>>> logits.shape
torch.Size([1, 1, 256])
"""

from .attention import AttentionState, MultiheadAttention
from .config import ModelConfig
from .generation import generate, sample, stream
from .interchange import TorchEncoderCall, from_torch
from .models import EncoderDecoder, TransformerDecoder, TransformerEncoder
from .schedule import RedrawSchedule
from .states import ModelState

__all__ = [
    "AttentionState",
    "EncoderDecoder",
    "ModelConfig",
    "ModelState",
    "MultiheadAttention",
    "RedrawSchedule",
    "TorchEncoderCall",
    "TransformerDecoder",
    "TransformerEncoder",
    "from_torch",
    "generate",
    "sample",
    "stream",
]
