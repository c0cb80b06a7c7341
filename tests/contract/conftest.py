"""Every mechanism of the literal dict, with every option set it declares, is one case of each contract test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.mechanisms import MECHANISMS, Mechanism


@dataclass(frozen=True)
class Case:
    """One mechanism with one set of options, and the inputs the contract tests give it."""

    name: str
    index: int

    @property
    def cls(self) -> type[Mechanism]:
        return MECHANISMS[self.name]

    @property
    def options(self) -> dict[str, Any]:
        return self.cls.CONTRACT_VARIANTS[self.index]

    @property
    def id(self) -> str:
        text = ",".join(f"{key}={value}" for key, value in self.options.items() if key not in ("seed", "num_features"))
        return f"{self.name}[{text.replace(' ', '')}]"

    @property
    def causal_modes(self) -> list[bool]:
        return [False, True] if self.cls.causal else [False]

    def make(self, head_dim: int = 8, heads: int = 2, kv_heads: int | None = None, **changes: Any) -> Mechanism:
        """The mechanism, calibrated on fixed data where it can be."""
        made = sq.create(self.name, head_dim, heads, kv_heads, **{**self.options, **changes})
        generator = torch.Generator().manual_seed(11)
        q = 0.5 * torch.randn(2, heads, 50, head_dim, generator=generator) + 0.2
        k = 0.5 * torch.randn(2, kv_heads or heads, 50, head_dim, generator=generator) - 0.1
        try:
            made.calibrate(q, k)
        except ValueError as error:
            assert "uses no calibration" in str(error)
        return made

    def inputs(
        self,
        batch: int = 2,
        heads: int = 2,
        kv_heads: int | None = None,
        length: int = 37,
        keys: int | None = None,
        head_dim: int = 8,
        width: int = 6,
        dtype: torch.dtype = torch.float64,
        norm: float = 0.5,
        seed: int = 5,
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        keys = length if keys is None else keys

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        q = norm * draw(batch, heads, length, head_dim)
        k = norm * draw(batch, kv_heads or heads, keys, head_dim)
        return q, k, draw(batch, kv_heads or heads, keys, width)


deep = pytest.mark.deep
CASES = [Case(name, index) for name, cls in MECHANISMS.items() for index in range(len(cls.CONTRACT_VARIANTS))]
# Tracing takes seconds: the first variant of a mechanism and each feature map of performer always, the rest in depth.
TRACED = [
    pytest.param(
        case,
        id=case.id,
        marks=[]
        if case.index == 0 or set(case.options) == {"features", "projection", "num_features", "seed"}
        else [deep],
    )
    for case in CASES
    if case.name != "performer" or case.options.get("projection", "orthogonal") == "orthogonal"
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, cases in (
        ("case", CASES),
        ("traced_case", TRACED),
        # Input is checked before options matter: one case per mechanism.
        ("first_case", [case for case in CASES if case.index == 0]),
        ("causal_case", [case for case in CASES if case.cls.causal]),
        ("recurrent_case", [case for case in CASES if case.cls.recurrent]),
        ("kernelised_case", [case for case in CASES if case.cls.kernelised]),
    ):
        if fixture in metafunc.fixturenames:
            ids = None if cases is TRACED else [case.id for case in cases]
            metafunc.parametrize(fixture, cases, ids=ids)
