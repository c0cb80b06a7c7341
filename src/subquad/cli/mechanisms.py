"""`subquad mechanisms`."""

import shutil

__all__ = ["mechanisms"]


def mechanisms() -> None:
    """List the mechanisms: what each computes, what it costs and what it can do."""
    from subquad.lab import mechanism_list

    # A terminal's own width where it is narrower than what reads well; a pipe has none.
    print(mechanism_list(min(100, max(40, shutil.get_terminal_size((100, 24)).columns))))
