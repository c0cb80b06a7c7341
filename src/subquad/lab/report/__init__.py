"""The report: what to use on this machine, measured, as a page, pictures, a JSON file and a table.

`settings` says what is asked, `running` spends the time, `notebook` keeps every number, one file per section
measures, `figures` turns numbers into curves, and `page`, `pictures` and `table` show them. Needs the `lab`
extra.
"""

from .model import captured
from .settings import Settings, quick
from .writing import Outcome, report

__all__ = ["Outcome", "Settings", "captured", "quick", "report"]
