"""Every mechanism of the literal dict, with every option set it declares, is one case of each contract test."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad import kernels
from subquad.kernels import operator, windowed_linear
from subquad.kernels.checkpointing import tracing
from subquad.kernels.native import library
from subquad.kernels.operator import Call
from subquad.mechanisms import COMBINED, MECHANISMS, Mechanism
from subquad.mechanisms.kernelised import Kernelised
from subquad.mechanisms.sparse import Sparse
from subquad.mechanisms.windowed import Windowed


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
        return EVERY[self.name]

    @property
    def options(self) -> dict[str, Any]:
        return self.cls.CONTRACT_VARIANTS[self.index]

    @property
    def id(self) -> str:
        text = ",".join(f"{key}={value}" for key, value in self.options.items() if key not in ("seed", "num_features"))
        return f"{self.name}[{text.replace(' ', '')}]{'' if self.backend is None else f' by {self.backend}'}"

    @property
    def seeded(self) -> bool:
        """Whether it draws something by a seed of its own."""
        return "seed" in self.cls.options()

    @property
    def leaks(self) -> bool:
        """Whether its choices see later tokens, which is documented."""
        return sq.create(self.name, 8, 2, **self.options).leaks_by_selection

    @property
    def scalable(self) -> bool:
        """Whether scaling q and k is a scale: not where inputs were calibrated on, or keys have length 1."""
        made = sq.create(self.name, 8, 2, **self.options)
        return made.uses_keys and not made.uses_calibration

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


EVERY = {**MECHANISMS, **COMBINED}
deep = pytest.mark.deep
CASES = [Case(name, index) for name, cls in EVERY.items() for index in range(len(cls.CONTRACT_VARIANTS))]


# Mechanisms whose operator has a native backend for every variant.
WHOLE = ("multipole", "clustered", "improved-clustered", "sparse", "lsh")


def _native(case: Case) -> bool:
    """Whether the native kernels take this variant, and no other one here asks them for the same."""
    if case.name in WHOLE:
        return True
    if not issubclass(case.cls, (Kernelised, Windowed)):
        return False
    options = case.options
    # One matrix is as good as another to the kernels, and butterflies do not know what comes after them.
    fast = options.get("projection") == "hadamard" and options.get("features") in ("positive", "hyperbolic")
    if case.name == "performer" and options.get("projection", "orthogonal") != "orthogonal" and not fast:
        return False
    if library.missing():
        return case.index == 0  # enough to say why there are none
    made = case.make()
    assert isinstance(made, (Kernelised, Windowed))
    return not windowed_linear.BACKENDS["native"].refusal(made._spec(True), Call(1.0), torch.zeros(1, 1, 1, 8))


CASES += [replace(case, backend="native") for case in CASES if _native(case)]
# Tracing takes seconds: the first variant of a mechanism always, the rest in depth.
TRACED = [
    pytest.param(case, id=case.id, marks=[] if case.index == 0 else [deep])
    for case in CASES
    if case.name != "performer" or case.options.get("projection", "orthogonal") == "orthogonal"
]


TRACED_MODES = [
    pytest.param((case, is_causal), id=f"{case.id} {'causal' if is_causal else 'full'}", marks=given.marks)
    for given in TRACED
    for case in given.values
    for is_causal in case.causal_modes  # type: ignore[union-attr]
]


@pytest.fixture(autouse=True)
def named_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A native case has every call that names no backend computed by the native kernels, or refused by them."""
    given = getattr(request.node, "callspec", None)
    values = [x[0] if isinstance(x, tuple) else x for x in given.params.values()] if given else []
    case = next((x for x in values if isinstance(x, Case)), None)
    if case is None or case.backend is None:
        return
    reason = library.missing()
    if reason:
        if os.environ.get("SUBQUAD_REQUIRE_NATIVE"):
            pytest.fail(reason)
        pytest.skip(reason)

    choose_backend = operator.choose_backend

    def chosen(backends: Any, spec: Any, call: Call, *args: Any) -> Any:
        return choose_backend(backends, spec, call._replace(backend=call.backend or case.backend), *args)

    for module in (operator, windowed_linear):
        monkeypatch.setattr(module, "choose_backend", chosen)
    for package in (kernels.multipole, kernels.clustered):
        _share_choices(package, monkeypatch)


def _share_choices(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle takes the choices of the kernels that it is compared with."""
    own = package.reference.make_choices

    def same_choices(spec: Any, call: Call, q: Tensor, *args: Any) -> Any:
        return (own if tracing(q) else package.native.make_choices)(spec, call, q, *args)

    monkeypatch.setattr(package.reference, "make_choices", same_choices)


FIXTURES: dict[str, list[Any]] = {
    "case": CASES,
    "traced_case": TRACED,
    "traced_mode": TRACED_MODES,
    # Input is checked before options matter: one case per mechanism.
    "first_case": [case for case in CASES if case.index == 0],
    "first_recurrent_case": [case for case in CASES if case.index == 0 and case.cls.recurrent],
    # Tensors without data have no bytes that a compiled loop could read.
    "first_torch_case": [case for case in CASES if case.index == 0 and case.backend is None],
    "parallel_case": [case for case in CASES if not case.cls.recurrent],
    "seeded_case": [case for case in CASES if case.seeded],
    "seeded_recurrent_case": [case for case in CASES if case.seeded and case.cls.recurrent],
    "cross_case": [case for case in CASES if case.make().cross],
    "self_case": [case for case in CASES if not case.make().cross],
    "unsigned_case": [case for case in CASES if not case.make().signed],
    # What is exact is torch's own kernel, under torch's own autocast rule.
    "approximate_case": [case for case in CASES if not case.cls.exact],
    "buffered_case": [case for case in CASES if any(x.is_floating_point() for x in case.make().buffers())],
    "scalable_case": [case for case in CASES if case.scalable],
    # Finite differences need float64; for the native kernels the definition's gradient stands in their place.
    "float64_case": [case for case in CASES if case.backend is None],
    "causal_case": [case for case in CASES if case.cls.causal],
    "blind_case": [case for case in CASES if case.cls.causal and not case.leaks],
    "leaking_case": [case for case in CASES if case.cls.causal and case.leaks],
    "noncausal_case": [case for case in CASES if not case.cls.causal],
    "recurrent_case": [case for case in CASES if case.cls.recurrent],
    "merging_case": [case for case in CASES if case.cls.recurrent and case.make().merges],
    "cropping_case": [case for case in CASES if case.cls.recurrent and case.make().crops],
    "absorbing_case": [c for c in CASES if c.cls.recurrent and c.make().absorbs and c.name not in COMBINED],
    "calibrated_case": [case for case in CASES if case.cls.recurrent and case.make().uses_calibration],
    # Where a token's place among the others counts.
    "placed_case": [case for case in CASES if issubclass(case.cls, (Windowed, Sparse))],
    "kernelised_case": [case for case in CASES if case.cls.kernelised],
    # Chunks are those of torch, and do not know which directions the features have.
    "chunked_case": [
        case
        for case in CASES
        if case.cls.kernelised and case.backend is None and case.options.get("projection", "orthogonal") == "orthogonal"
    ],
    "learned_case": [case for case in CASES if any(p.requires_grad for p in case.make().parameters())],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, cases in FIXTURES.items():
        if fixture in metafunc.fixturenames:
            ids = None if cases in (TRACED, TRACED_MODES) else [case.id for case in cases]
            metafunc.parametrize(fixture, cases, ids=ids)
