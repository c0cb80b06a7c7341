"""The report: what to use on this machine, measured, as a page, figures, a JSON file and a table.

`settings` says what is asked, `running` spends the time, `notebook` keeps every number, each file of `sections`
measures and shows one section, and `page`, `figure_files` and `table` put them together. Needs the `lab` extra.
"""

from .sections.model import captured
from .settings import Settings, full, quick
from .writing import Outcome, report

__all__ = ["Outcome", "Settings", "captured", "full", "quick", "report"]
