"""The sections of the report, in the order of the page. A new one is a file here and a line in this list."""

from ..section import Section
from . import complexity, error, generation, machine, memory, model, projections, published, spectrum, speed, use
from .model import Captured

__all__ = ["sections"]


def sections(seen: Captured) -> list[Section]:
    """All of them; the one about a model says what its layers saw."""
    return [
        use.SECTION,
        model.section(seen),
        speed.SECTION,
        memory.SECTION,
        generation.SECTION,
        error.SECTION,
        projections.SECTION,
        published.SECTION,
        spectrum.SECTION,
        complexity.SECTION,
        machine.SECTION,
    ]
