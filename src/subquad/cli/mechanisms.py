"""``subquad mechanisms``."""

__all__ = ["mechanisms"]


def mechanisms() -> None:
    """List the mechanisms: what each computes, what it costs and what it can do."""
    from subquad.lab import mechanism_list

    print(mechanism_list())
