"""Figures of several runs can be read: names that are long, error rates that are small."""

from typing import Any

import pytest

from subquad.train import curves


def drawn(runs: dict[str, Any], *, larger_is_better: bool = False) -> Any:
    result = {"metric": "word_error_rate", "larger_is_better": larger_is_better, "runs": runs}
    figure = curves._figure(result, curves.VALIDATION)
    figure.draw_without_rendering()
    return figure


def run(*values: float) -> list[dict[str, Any]]:
    rows = [
        {"step": 10 * n, "training_seconds": 1.0 * n, "word_error_rate": value} for n, value in enumerate(values, 1)
    ]
    return [{"valid": rows}]


def test_long_names_stay_inside_the_figure() -> None:
    figure = drawn({f"performer-256-from-scratch-{n}": run(0.5, 0.4) for n in range(6)})
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


@pytest.mark.parametrize(
    ("values", "larger_is_better", "scale"),
    [
        ((1.0, 0.2, 0.01), False, "log"),
        ((1.0, 0.2, 0.1), False, "linear"),
        ((1.0, 0.2, 0.0), False, "linear"),  # no place for 0
        ((0.01, 0.2, 1.0), True, "linear"),
    ],
)
def test_error_rates_of_several_sizes_have_a_logarithmic_axis(
    values: tuple[float, ...], larger_is_better: bool, scale: str
) -> None:
    figure = drawn({"linear": run(*values)}, larger_is_better=larger_is_better)
    assert [axes.get_yscale() for axes in figure.axes] == [scale, scale]
