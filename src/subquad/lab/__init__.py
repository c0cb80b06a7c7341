"""The laboratory: measuring what the mechanisms cost and how far they are from softmax attention.

``bench`` compares mechanisms, ``catalogue`` lists them, ``measure`` times them properly, ``record`` keeps the numbers.
Nothing in the library imports this room. It needs torch only; its pages and pictures will need the ``lab`` extra.
"""

from subquad.lab.bench import Cell, Comparison, compare, table
from subquad.lab.catalogue import mechanism_list
from subquad.lab.measure import Timing, interleave, machine
from subquad.lab.record import write_json

__all__ = ["Cell", "Comparison", "Timing", "compare", "interleave", "machine", "mechanism_list", "table", "write_json"]
