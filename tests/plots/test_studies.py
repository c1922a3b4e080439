"""Figures of studies, weights by variant, points and sweeps: the numbers are read back from the figure."""

import numpy as np
import pytest
from figures import LONG, assert_fits, bands, history, lines_of

from hf_cgd.plots import points_figure, sweep_figure, weights_figure


def test_weights_figure_shows_each_variant_in_a_panel_of_its_method() -> None:
    one, two = ({"land": [0.5, value], "water": [0.5, 1 - value]} for value in (0.2, 0.4))
    figure = weights_figure(
        {"dro": {"step 1": [history(one), history(two)], "step 0.1": [history(one)]}, "uw": {"": [history(two)]}},
        unit="epoch",
        title="T",
    )
    drawn = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in drawn] == ["dro, step 1", "dro, step 0.1", "uw"]
    lines = {line.get_label(): line.get_ydata() for line in drawn[0].get_lines()}
    assert np.array(lines["land"]) == pytest.approx([0.5, 0.3])
    assert np.array(drawn[1].get_lines()[1].get_ydata()) == pytest.approx([0.5, 0.8])
    assert all(axes.get_ylim() == (0, 1) for axes in drawn)
    # Each column names its axis once, under its lowest panel.
    assert [axes.get_xlabel() for axes in drawn] == ["", "epoch", "epoch"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["land", "water"]


def test_weights_that_stay_small_fill_the_axis() -> None:
    alike = {name: [1 / 3, value] for name, value in (("a", 0.3), ("b", 0.4), ("c", 0.3))}
    (axes,) = weights_figure({"cgd": {"": [history(alike)]}}).axes
    assert axes.get_ylim()[0] == 0 and 0.4 < axes.get_ylim()[1] < 0.5


def test_weights_figure_needs_weights() -> None:
    with pytest.raises(ValueError, match="at least one method, got none"):
        weights_figure({})
    with pytest.raises(ValueError, match="'erm', 'x': expected log histories with group weights"):
        weights_figure({"erm": {"x": [[{"step": 5, "loss": 1.0}]]}})


def test_points_figure_shows_every_point_by_label() -> None:
    points = np.arange(8.0).reshape(4, 2)
    labels = np.array([1, 0, 1, 1])
    figure = points_figure({"set": {"a": (points, labels), "b": (points[:1], labels[:1])}})
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["a (4)", "b (1)"]
    shown = [np.array(marks.get_offsets()) for marks in first.collections]
    assert np.array_equal(shown[0], points[1:2]) and np.array_equal(shown[1], points[[0, 2, 3]])
    none, alone = second.collections
    assert len(none.get_offsets()) == 0 and np.array_equal(alone.get_offsets(), points[:1])
    # Label 1 has the same colour everywhere, also where label 0 does not occur.
    assert np.array_equal(alone.get_facecolor(), first.collections[1].get_facecolor())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["label 0", "label 1"]
    with pytest.raises(ValueError, match="at least one group, got none"):
        points_figure({})


def test_of_many_groups_the_heaviest_at_the_end_of_each_panel_are_in_colour_and_the_axis_is_theirs() -> None:
    rest = {f"g{number}": [0.01, 0.01] for number in range(60)}
    one, two = history(rest | {"g7": [0.1, 0.3], "g9": [0.4, 0.1]}), history(rest | {"g30": [0.01, 0.2]})
    figure = weights_figure({"cgd": {"a": [two], "b": [one]}})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["g7", "g30", "other groups"]
    bottom, top = figure.axes[0].get_ylim()
    assert bottom == 0 and 0.4 <= top < 0.5
    chosen = weights_figure({"cgd": {"a": [one]}}, highlight=["g9"])
    assert [text.get_text() for text in chosen.legends[0].get_texts()] == ["g9", "other groups"]


def test_points_of_many_groups_go_on_in_further_rows() -> None:
    group = (np.zeros((1, 2)), np.zeros(1, dtype=int))
    figure = points_figure({"set": {f"g{number}": group for number in range(8)}, "other": {"g0": group}})
    drawn = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in drawn] == [*(f"g{number} (1)" for number in range(8)), "g0 (1)"]
    rows = [axes.get_subplotspec().rowspan.start for axes in drawn]
    assert rows == [0] * 6 + [1] * 2 + [2]


def test_sweep_lines_are_means_and_bands_one_standard_error() -> None:
    curves = {"CGD": {1: np.array([0.5, 0.7]), 0.1: np.array([0.2, 0.4, 0.6])}, "ERM": {0.5: np.array([0.9])}}
    figure = sweep_figure(curves, xlabel="step size", ylabel="accuracy", title="T")
    axes = figure.axes[0]
    np.testing.assert_allclose(lines_of(axes)["CGD"], [[0.1, 0.4], [1, 0.6]])
    assert lines_of(axes)["ERM"] == [[0.5, 0.9]]
    # Deviations .2 and .1 * sqrt(2), divided by sqrt(3) and sqrt(2).
    error = 0.2 / 3**0.5
    (band,) = bands(axes)
    assert band == {0.1: pytest.approx((0.4 - error, 0.4 + error), abs=1e-6), 1: pytest.approx((0.5, 0.7))}
    assert axes.get_xscale() == "linear" and axes.get_xticks().tolist() == [0.1, 0.5, 1]
    assert (axes.get_xlabel(), axes.get_ylabel(), figure.get_suptitle()) == ("step size", "accuracy", "T")
    # In the order in which the lines end.
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["ERM", "CGD"]
    assert legend.get_title().get_text() == "mean and standard\nerror of 1 to 3 runs"


def test_a_sweep_of_single_seeds_has_no_band_and_claims_no_error() -> None:
    figure = sweep_figure({"CGD": {1: [0.5], 2: [0.6]}}, xlabel="x", ylabel="y")
    assert not figure.axes[0].collections and figure.legends[0].get_title().get_text() == ""


@pytest.mark.parametrize(
    ("xs", "scale"), [([0.01, 0.3], "log"), ([0.1, 2], "linear"), ([0, 50, 100], "linear"), ([-1, 50], "linear")]
)
def test_a_sweep_over_more_than_a_factor_20_of_positive_x_is_logarithmic(xs: list[float], scale: str) -> None:
    axes = sweep_figure({"CGD": {x: [0.5, 0.6] for x in xs}}, xlabel="x", ylabel="y").axes[0]
    assert axes.get_xscale() == scale and axes.get_xticks().tolist() == xs
    assert len(axes.get_xticks(minor=True)) == 0
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"{x:g}" for x in xs]


def test_a_sweep_of_many_methods_and_crowded_x_fits() -> None:
    xs = [100, 110, 120, 128, 200, 256, 1000, 1024, 4096, 10_000, 1_000_000]
    curves = {f"{LONG} {number}": {x: [0.5, 0.6] for x in xs} for number in range(20)}
    figure = sweep_figure(curves, xlabel="x", ylabel="y", title="a title")
    assert_fits(figure)
    axes = figure.axes[0]
    assert axes.get_xticks().tolist() == xs
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels[0] == "100" and labels[-1] == "1e+06" and labels[1] == ""
    styles = {(line.get_color(), line.get_marker()) for line in axes.get_lines()}
    assert len(styles) == 20
