"""What is drawn is what was measured: the numbers are read back from the figure."""

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_cgd.metrics import GroupReport
from hf_cgd.plots import (
    LABELLED_GROUPS,
    MUTED,
    PALETTE,
    comparison_figure,
    draw_group_accuracies,
    draw_group_weights,
    group_colors,
    points_figure,
    save_figure,
    weight_curves,
    weights_figure,
)

NAMES = ["land", "water"]
COLORS = {"land": PALETTE[0], "water": MUTED}


def report(accuracies: dict[str, float]) -> GroupReport:
    metrics = {}
    for name, accuracy in accuracies.items():
        metrics[f"eval_group_accuracy/{name}"] = accuracy
        metrics[f"eval_group_accuracy_low/{name}"] = accuracy - 0.1
        metrics[f"eval_group_accuracy_high/{name}"] = accuracy + 0.05
    return GroupReport.from_metrics(metrics, "eval", list(accuracies), "cgd")


def history(weights: dict[str, list[float]], every: int = 10) -> list[dict[str, float]]:
    """A Trainer's log: training entries with weights, an evaluation between them, a summary last."""
    entries: list[dict[str, float]] = []
    for number, row in enumerate(zip(*weights.values(), strict=True), start=1):
        logged = {f"group_weight/{name}": value for name, value in zip(weights, row, strict=True)}
        entries.append({"loss": 1.0, "group_loss/land": 0.4, "step": number * every} | logged)
        entries.append({"eval_accuracy": 0.9, "step": number * every})
    return [*entries, {"train_runtime": 1.0, "step": 99}]


def axes_of(figure: Figure) -> Axes:
    return figure.subplots()


def bars(axes: Axes) -> dict[str, float]:
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    return {label: patch.get_width() for label, patch in zip(labels, axes.patches, strict=True)}


def whiskers(axes: Axes) -> list[list[float]]:
    """Lower and upper end of each whisker, from the top."""
    (lines,) = axes.containers[1].lines[2]
    return [segment[:, 0].tolist() for segment in lines.get_segments()]


def test_weight_curves_reads_the_entries_that_hold_weights() -> None:
    steps, curves = weight_curves(history({"land": [0.5, 0.25], "water": [0.5, 0.75]}))
    assert steps.tolist() == [10, 20]
    assert {name: values.tolist() for name, values in curves.items()} == {"land": [0.5, 0.25], "water": [0.5, 0.75]}


def test_weight_curves_of_many_groups_are_the_extremes() -> None:
    _, curves = weight_curves([{"step": 5, "group_weight_min": 0.01, "group_weight_max": 0.2}])
    assert {name: values.tolist() for name, values in curves.items()} == {"min": [0.01], "max": [0.2]}


def test_weight_curves_of_a_run_without_weights_are_empty() -> None:
    steps, curves = weight_curves([{"step": 5, "loss": 1.0}])
    assert len(steps) == 0 and curves == {}


def test_a_group_that_an_entry_lacks_is_nan_there() -> None:
    _, curves = weight_curves([{"step": 1, "group_weight/a": 1.0}, {"step": 2, "group_weight/b": 1.0}])
    np.testing.assert_array_equal(curves["a"], [1.0, np.nan])


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


def test_weight_lines_are_means_over_runs_and_the_band_their_range() -> None:
    axes = axes_of(Figure())
    runs = [history({"land": [0.5, 0.2], "water": [0.5, 0.8]}), history({"land": [0.5, 0.4], "water": [0.5, 0.6]})]
    draw_group_weights(axes, runs, COLORS)
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_allclose(lines["land"].get_xydata(), [[10, 0.5], [20, 0.3]])
    np.testing.assert_allclose(lines["water"].get_xydata(), [[10, 0.5], [20, 0.7]])
    assert lines["land"].get_color() == PALETTE[0] and lines["land"].get_zorder() > lines["water"].get_zorder()
    edge = axes.collections[0].get_paths()[0].vertices
    assert {round(y, 6) for x, y in edge if x == 20} == {0.2, 0.4}


def test_a_run_without_weights_says_so() -> None:
    axes = axes_of(Figure())
    draw_group_weights(axes, [[{"step": 1, "loss": 1.0}]], COLORS)
    assert [text.get_text() for text in axes.texts] == ["no group weights"] and not axes.get_lines()


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


@pytest.mark.parametrize("count", [2, 60])
def test_no_texts_overlap(count: int) -> None:
    names = [f"label:{number % 2} place:{number}" for number in range(count)]
    runs = [report(dict.fromkeys(names, 0.2 + 0.3 * seed)) for seed in range(3)]
    weights = [history({name: [1 / count, 1 / count] for name in names})] * 3
    figure = comparison_figure(dict.fromkeys(("ERM", "Group-DRO", "CGD"), runs), {"CGD": weights}, title="a title")
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [legend.get_window_extent() for legend in figure.legends]
    boxes += [text.get_window_extent() for text in figure.texts]
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
        assert not any(box.shrunk(0.99, 0.99).overlaps(other) for other in boxes[:number])


def test_group_colors() -> None:
    assert group_colors(NAMES) == {"land": PALETTE[0], "water": PALETTE[1]}
    assert group_colors(NAMES, ["water"]) == {"land": MUTED, "water": PALETTE[0]}
    assert set(group_colors([str(number) for number in range(60)]).values()) == {MUTED}


def test_save_writes_png_and_vector_and_makes_the_folder(tmp_path) -> None:
    figure = comparison_figure({"CGD": [report({"land": 0.9, "water": 0.6})]})
    files = save_figure(figure, tmp_path / "new" / "groups.png")
    assert [file.name for file in files] == ["groups.png", "groups.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG") and "<svg" in files[1].read_text(encoding="utf-8")
    assert save_figure(figure, tmp_path / "groups.pdf", vector="pdf") == [tmp_path / "groups.pdf"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comparison_figure({}), "at least one method"),
        (lambda: comparison_figure({"CGD": []}), "at least one run"),
        (lambda: comparison_figure({"CGD": [report({"a": 0.5})]}, {"ERM": []}), r"histories of \['ERM'\]"),
        (
            lambda: comparison_figure({"CGD": [report({"a": 0.5})], "ERM": [report({"b": 0.5})]}),
            r"'ERM' reports the groups \['b'\], the first method \['a'\]",
        ),
        (lambda: comparison_figure({"CGD": [report({"a": 0.5}), report({"b": 0.5})]}), r"lacks .*\['a'\]"),
        (lambda: comparison_figure({"CGD": [report({})]}), "no group accuracies"),
        (lambda: comparison_figure({"CGD": [report({"a": 0.5})]}, highlight=["z"]), r"\['z'\], which are not among"),
        (lambda: group_colors(list("abcdefghi"), list("abcdefghi")), "At most 8 groups"),
        (lambda: draw_group_weights(axes_of(Figure()), [], {}), "at least one run"),
        (
            lambda: draw_group_weights(
                axes_of(Figure()), [history({"a": [1.0]}), history({"a": [1.0]}, every=5)], {"a": MUTED}
            ),
            "different steps",
        ),
    ],
)
def test_errors_say_what_is_wrong(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys, hf_cgd.plots as p; from hf_cgd.metrics import GroupReport, report; "
        "row = report.GroupRow('a', accuracy=0.5); "
        "p.comparison_figure({'CGD': [GroupReport((row,), {}, 'cgd')]}).draw_without_rendering(); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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
