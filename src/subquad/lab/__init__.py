"""The laboratory: measuring what the mechanisms cost and how far they are from softmax attention.

`bench` compares mechanisms, `errors` studies how the error falls with the number of features, `inputs` makes or
reads what they are studied on, `catalogue` lists them, `measure` times them properly, `report` puts everything on
a page. All but the report, which needs the `lab` extra, need torch only.
"""

from subquad.files import write_json
from subquad.lab.bench import Cell, Comparison, compare, read_comparison, table
from subquad.lab.catalogue import mechanism_list
from subquad.lab.errors import ErrorStudy, error_study, error_table
from subquad.lab.inputs import Inputs, gaussian_inputs, read_inputs
from subquad.lab.measure import Timing, interleave, machine

__all__ = [
    "Cell",
    "Comparison",
    "ErrorStudy",
    "Inputs",
    "Timing",
    "compare",
    "error_study",
    "error_table",
    "gaussian_inputs",
    "interleave",
    "machine",
    "mechanism_list",
    "read_comparison",
    "read_inputs",
    "table",
    "write_json",
]
