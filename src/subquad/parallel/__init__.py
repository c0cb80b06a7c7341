"""One sequence cut over several processes: each computes its piece, and states are merged in order."""

from .exchange import gather_sequence, split_sequence
from .sequence import SequenceParallel, attention, shard_sequence

__all__ = ["SequenceParallel", "attention", "gather_sequence", "shard_sequence", "split_sequence"]
