"""Every mechanism of the literal dict, with every option set it declares, is one case of each contract test."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import kernels, mechanisms
from subquad.kernels import dispatch, native, native_library
from subquad.kernels.checkpointing import tracing
from subquad.kernels.operator import Call
from subquad.mechanisms import MECHANISMS, Mechanism
from subquad.mechanisms.hybrid import Hybrid


@dataclass(frozen=True)
class Case:
    """One mechanism with one set of options, and the inputs the contract tests give it."""

    name: str
    index: int
    backend: str | None = None  # who computes every call that names no backend; None: the library chooses

    @property
    def tolerance(self) -> float:
        """Between two ways to compute the same; the native kernels take no float64."""
        return 1e-10 if self.backend is None else 5e-5

    @property
    def rounding(self) -> float:
        """Between two calls that do the same sums, perhaps in another order."""
        return 1e-12 if self.backend is None else 1e-5

    @property
    def cls(self) -> type[Mechanism]:
        return MECHANISMS[self.name]

    @property
    def options(self) -> dict[str, Any]:
        return self.cls.CONTRACT_VARIANTS[self.index]

    @property
    def id(self) -> str:
        text = ",".join(f"{key}={value}" for key, value in self.options.items() if key not in ("seed", "num_features"))
        return f"{self.name}[{text.replace(' ', '')}]{'' if self.backend is None else f' by {self.backend}'}"

    @property
    def causal_modes(self) -> list[bool]:
        return [False, True] if self.cls.causal else [False]

    def make(self, head_dim: int = 8, heads: int = 2, kv_heads: int | None = None, **changes: Any) -> Mechanism:
        """The mechanism, calibrated on fixed data where it can be."""
        made = sq.create(self.name, head_dim, heads, kv_heads, **{**self.options, **changes})
        generator = torch.Generator().manual_seed(11)
        q = 0.5 * torch.randn(2, heads, 50, head_dim, generator=generator) + 0.2
        k = 0.5 * torch.randn(2, kv_heads or heads, 50, head_dim, generator=generator) - 0.1
        if made.uses_calibration:
            made.calibrate(q, k)
        else:
            with pytest.raises(ValueError, match="uses no calibration"):
                made.calibrate(q, k)
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
        if self.backend == "native" and dtype == torch.float64:
            dtype = torch.float32

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        q = norm * draw(batch, heads, length, head_dim)
        k = norm * draw(batch, kv_heads or heads, keys, head_dim)
        return q, k, draw(batch, kv_heads or heads, keys, width)


deep = pytest.mark.deep
CASES = [Case(name, index) for name, cls in MECHANISMS.items() for index in range(len(cls.CONTRACT_VARIANTS))]


def _native(case: Case) -> bool:
    """Whether the native kernels take this variant, and no other one here asks them for the same."""
    if case.name == "multipole":
        return True
    if not (case.cls.kernelised or case.name == "hybrid"):
        return False
    options = case.options
    # One matrix is as good as another to the kernels, and butterflies do not know what comes after them.
    fast = options.get("projection") == "hadamard" and options.get("features") in ("positive", "hyperbolic")
    if case.name == "performer" and options.get("projection", "orthogonal") != "orthogonal" and not fast:
        return False
    if native_library.missing():
        return case.index == 0  # enough to say why there are none
    made = case.make()
    feature_map = (made.far if case.name == "hybrid" else made).feature_map
    probe = torch.zeros(1, 1, 1, 8)
    return not native.refusal(feature_map, probe, normalise=getattr(made, "normalise", True))


CASES += [replace(case, backend="native") for case in CASES if _native(case)]
# Tracing takes seconds: the first variant of a mechanism always, the rest in depth.
TRACED = [
    pytest.param(case, id=case.id, marks=[] if case.index == 0 else [deep])
    for case in CASES
    if case.name != "performer" or case.options.get("projection", "orthogonal") == "orthogonal"
]


@pytest.fixture(autouse=True)
def named_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A native case has every call that names no backend computed by the native kernels, or refused by them."""
    given = getattr(request.node, "callspec", None)
    case = next((x for x in given.params.values() if isinstance(x, Case)), None) if given else None
    if case is None or case.backend is None:
        return
    reason = native_library.missing()
    if reason:
        if os.environ.get("SUBQUAD_REQUIRE_NATIVE"):
            pytest.fail(reason)
        pytest.skip(reason)

    def named(call: Call) -> Call:
        return call._replace(backend=case.backend) if call.backend is None else call

    choose, choose_hybrid = dispatch.choose, Hybrid._backend

    def chosen(backends: Any, spec: Any, call: Call, *args: Any) -> Any:
        return choose(backends, spec, named(call), *args)

    def chosen_hybrid(self: Hybrid, call: Call, *args: Any) -> str:
        return choose_hybrid(self, named(call), *args)

    monkeypatch.setattr(dispatch, "choose", chosen)
    monkeypatch.setattr(mechanisms.multipole, "choose", chosen)
    own = kernels.multipole.reference.choose

    def same_choices(spec: Any, call: Call, q: Tensor, *args: Any) -> Any:
        """The oracle takes the clusters and the selection of the kernels that it is compared with."""
        return (own if tracing(q) else kernels.multipole.native.choose)(spec, call, q, *args)

    monkeypatch.setattr(kernels.multipole.reference, "choose", same_choices)
    monkeypatch.setattr(Hybrid, "_backend", chosen_hybrid)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, cases in (
        ("case", CASES),
        ("traced_case", TRACED),
        # Input is checked before options matter: one case per mechanism.
        ("first_case", [case for case in CASES if case.index == 0]),
        # Finite differences need float64; for the native kernels the definition's gradient stands in their place.
        ("float64_case", [case for case in CASES if case.backend is None]),
        ("causal_case", [case for case in CASES if case.cls.causal]),
        ("recurrent_case", [case for case in CASES if case.cls.recurrent]),
        ("kernelised_case", [case for case in CASES if case.cls.kernelised]),
    ):
        if fixture in metafunc.fixturenames:
            ids = None if cases is TRACED else [case.id for case in cases]
            metafunc.parametrize(fixture, cases, ids=ids)
