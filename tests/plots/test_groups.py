"""Accuracies of groups, and methods side by side: the numbers are read back from the figure."""

import numpy as np
import pytest
from figures import COLORS, NAMES, axes_of, bars, history, report, whiskers
from matplotlib.figure import Figure

from hf_cgd.metrics import GroupReport, GroupRow
from hf_cgd.plots import LABELLED_GROUPS, MUTED, comparison_figure, draw_group_accuracies


def test_bars_of_one_report_carry_its_intervals() -> None:
    axes = axes_of(Figure())
    draw_group_accuracies(axes, [report({"land": 0.9, "water": 0.6})], COLORS)
    assert bars(axes) == {"land": 0.9, "water": 0.6}
    np.testing.assert_allclose(whiskers(axes), [[0.8, 0.95], [0.5, 0.65]])
    top, bottom = (tick for tick in axes.get_yticks())
    assert axes.transData.transform((0, top))[1] > axes.transData.transform((0, bottom))[1]


def test_bars_of_several_reports_are_means_with_one_deviation_and_every_run() -> None:
    axes = axes_of(Figure())
    draw_group_accuracies(axes, [report({"land": 0.9, "water": w}) for w in (0.5, 0.6, 0.7)], COLORS)
    assert bars(axes) == pytest.approx({"land": 0.9, "water": 0.6})
    np.testing.assert_allclose(whiskers(axes), [[0.9, 0.9], [0.5, 0.7]])
    dots = np.asarray(axes.collections[0].get_offsets())
    np.testing.assert_allclose(sorted(dots[dots[:, 1] > 0.5, 0]), [0.5, 0.6, 0.7])


def test_the_number_of_the_worst_group_is_bold() -> None:
    axes = axes_of(Figure())
    draw_group_accuracies(axes, [report({"land": 0.9, "water": 0.6})], COLORS)
    assert [(t.get_text(), t.get_fontweight()) for t in axes.texts] == [("0.90", "normal"), ("0.60", "bold")]


def test_order_chooses_and_sorts_the_groups() -> None:
    axes = axes_of(Figure())
    draw_group_accuracies(axes, [report({"a": 0.9, "b": 0.8, "c": 0.7})], dict.fromkeys("abc", MUTED), ["c", "a"])
    assert list(bars(axes).items()) == [("c", 0.7), ("a", 0.9)]


def test_comparison_puts_methods_in_columns_with_the_mean_of_each_runs_worst_group() -> None:
    reports = {
        "ERM": [report({"land": 0.9, "water": 0.5})],
        "CGD": [report({"land": 0.6, "water": 0.8}), report({"land": 0.9, "water": 0.7})],
    }
    figure = comparison_figure(reports, {"CGD": [history({"land": [0.5], "water": [0.5]})] * 2}, title="two sources")
    erm, cgd, no_weights, weights = figure.axes
    assert erm.get_title() == "ERM\nworst group 0.50" and cgd.get_title() == "CGD\nworst group 0.65"
    assert not no_weights.get_lines() and len(weights.get_lines()) == 2
    bar_colors = [patch.get_facecolor()[:3] for patch in cgd.patches]
    assert bar_colors == [patch.get_facecolor()[:3] for patch in erm.patches] and len(set(bar_colors)) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == NAMES


def test_of_many_groups_the_worst_are_shown_and_said_to_be_a_choice() -> None:
    accuracies = {f"g{number}": 0.3 + number / 100 for number in range(60)}
    figure = comparison_figure({"CGD": [report(accuracies)]}, {"CGD": [history({"g0": [0.1], "g59": [0.9]})]})
    shown = bars(figure.axes[0])
    assert list(shown) == [f"g{number}" for number in range(LABELLED_GROUPS)]
    assert figure.get_suptitle() == f"the {LABELLED_GROUPS} of 60 groups with the lowest accuracies"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["g0", "other groups"]


def test_names_in_pictures_are_short_and_no_formula() -> None:
    names = ["$50k-$100k", "two\nlines", "x" * 200]
    rows = tuple(GroupRow(name, accuracy=0.5, accuracy_low=0.4, accuracy_high=0.6) for name in names)
    figure = comparison_figure({"erm": [GroupReport(rows, {}, "erm")]})
    texts = figure.axes[0].get_yticklabels()
    assert [text.get_text() for text in texts][:2] == ["$50k-$100k", "two lines"]
    assert len(texts[2].get_text()) == 40
    assert not any(text.get_parse_math() for text in texts)
    figure.canvas.draw()
    numbers = [text for text in figure.axes[0].texts if text.get_text() == "0.50"]
    assert [text.get_weight() for text in numbers] == ["bold"] * 3  # All three are the worst.
