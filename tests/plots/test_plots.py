"""What is drawn is what was measured: the numbers are read back from the figure."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tiny import text_dataset

from hf_cgd.metrics import GroupReport
from hf_cgd.plots import (
    EXTREMES,
    LABELLED_GROUPS,
    MUTED,
    PALETTE,
    WORST,
    accuracies_figure,
    accuracy_curves,
    comparison_figure,
    draw_group_accuracies,
    draw_group_weights,
    group_colors,
    interactions_figure,
    points_figure,
    save_figure,
    sweep_figure,
    weight_curves,
    weights_figure,
)

NAMES = ["land", "water"]
COLORS = {"land": PALETTE[0], "water": MUTED}
LONG = "label:1 negation:0 hospital:University Medical Center"


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


def evaluated(
    accuracies: dict[str, list[float | None]], every: int = 50, prefix: str = "eval", metric: str = "accuracy"
) -> list[dict[str, float]]:
    """A Trainer's log with an evaluation at every so many steps, None where it lacks the group."""
    entries: list[dict[str, float]] = []
    for number, row in enumerate(zip(*accuracies.values(), strict=True), start=1):
        named = {name: value for name, value in zip(accuracies, row, strict=True) if value is not None}
        entries.append({"loss": 1.0, "group_loss/land": 0.4, "step": number * every})
        logged = {f"{prefix}_group_{metric}/{name}": value for name, value in named.items()}
        logged[f"{prefix}_worst_group_{metric}"] = min(named.values())
        entries.append(logged | {f"{prefix}_loss": 1.0, "step": number * every})
    return [*entries, {"train_runtime": 1.0, "step": number * every}]


def lines_of(axes: Axes) -> dict[str, list[list[float]]]:
    return {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.get_lines()}


def bands(axes: Axes) -> list[dict[float, tuple[float, float]]]:
    """Lower and upper bound by x of each band, in the order in which they were drawn."""
    found = []
    for collection in axes.collections:
        bounds: dict[float, set[float]] = {}
        for x, y in collection.get_paths()[0].vertices:
            bounds.setdefault(round(float(x), 6), set()).add(round(float(y), 6))
        found.append({x: (min(ys), max(ys)) for x, ys in bounds.items()})
    return found


def assert_fits(figure: Figure) -> None:
    """Nothing is cut off, nothing lies on something else, and no panel is squashed."""
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.axison]
    boxes = [axes.get_tightbbox() for axes in panels]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    boxes += [text.get_window_extent() for text in figure.texts]
    for number, box in enumerate(boxes):
        assert figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
        assert figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1
        assert not any(box.shrunk(0.99, 0.99).overlaps(other) for other in boxes[:number])
    for axes in panels:
        assert axes.bbox.height > 0.5 * figure.dpi
        labels = [label for label in axes.get_xticklabels() if label.get_text() and label.get_visible()]
        ticks = [label.get_window_extent() for label in labels if axes.xaxis.get_tick_params()["labelbottom"]]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(ticks, 2))


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
    assert_fits(figure)


@pytest.mark.parametrize(("count", "name"), [(2, "g"), (2, LONG), (8, LONG), (60, LONG)])
def test_every_figure_is_readable_with_few_and_many_groups_of_short_and_long_names(count: int, name: str) -> None:
    names = [f"{name} {number}" for number in range(count)]
    weights = [history({group: [1 / count, 1 / count] for group in names}, every=60_000)] * 2
    runs = [evaluated({group: [0.2 + seed / 5, 0.4] for group in names}, every=60_000) for seed in range(2)]
    single = weights_figure({"CGD": {"": weights}}, title="a title")
    assert_fits(single)
    # Legends go down rather than make a figure broad.
    assert single.get_figwidth() < 5
    assert_fits(weights_figure({"CGD": {"small steps": weights, "large steps": weights}, "DRO": {"": weights}}))
    assert_fits(accuracies_figure({"CGD": runs}))
    assert_fits(accuracies_figure({f"method {number}": runs for number in range(8)}, title="a title"))
    assert_fits(comparison_figure({"CGD": [report(dict.fromkeys(names, 0.5))]}, {"CGD": weights}))
    assert_fits(points_figure({"train": dict.fromkeys(names[:8], (np.eye(2), np.arange(2)))}))
    matrix = interactions_figure(np.eye(count), names, title="a title")
    matrix.draw_without_rendering()
    rows = [label.get_window_extent() for label in matrix.axes[0].get_yticklabels()]
    assert not any(above.overlaps(below) for above, below in itertools.pairwise(rows))
    assert min(label.get_fontsize() for label in matrix.axes[0].get_yticklabels()) >= 6


# Machado, Oliveira and Fernandes, 2009: what is seen of linear RGB, severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}


def lab(linear: np.ndarray) -> np.ndarray:
    """CIELAB under D65 of linear sRGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear.clip(0, 1) / to_xyz.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart_without_red_or_green_cones(vision: str) -> None:
    assert WORST == EXTREMES
    seen = []
    for color in (*PALETTE, MUTED, WORST):
        srgb = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        seen.append(lab(VISION[vision] @ linear))
    # A distance of 2.3 is just seen; 15 is far more, also for thin lines.
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


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
            "different steps, 10 and 5",
        ),
        (
            lambda: draw_group_weights(axes_of(Figure()), [history({"a": [1.0]}), history({"b": [1.0]})], {}),
            r"different groups, \['a'\] and \['b'\]",
        ),
        (lambda: accuracies_figure({}), "at least one method"),
        (lambda: accuracies_figure({"CGD": []}), "at least one run"),
        (
            lambda: accuracies_figure({"CGD": [history({"a": [1.0]})]}),
            "no eval_group_accuracy/<name> .* eval_strategy",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]}, prefix="eval_b")]}),
            r"its prefixes are \['eval_b'\]",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5] * 2}), evaluated({"a": [0.5] * 3})]}),
            "different steps, 50, 100 and 50, 100, 150; .*eval_steps",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]}), evaluated({"b": [0.5]})]}),
            r"different groups, \['a'\] and \['b'\]",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]})], "ERM": [evaluated({"b": [0.5]})]}),
            r"'ERM' reports the groups \['b'\], the first method \['a'\]",
        ),
        (
            lambda: accuracies_figure(
                {"CGD": [evaluated({"a": [0.5]})], "ERM": [evaluated({"a": [0.5]}, metric="pearson")]}
            ),
            "'ERM' has another metric than the accuracy",
        ),
        (lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]})]}, highlight=["z"]), r"\['z'\], which are not"),
        (lambda: sweep_figure({}, xlabel="x", ylabel="y"), "at least one method"),
        (lambda: sweep_figure({"CGD": {}}, xlabel="x", ylabel="y"), "'CGD': expected values at one x"),
        (
            lambda: sweep_figure({"CGD": {0.5: np.array([])}}, xlabel="x", ylabel="y"),
            r"'CGD', x = 0.5: expected one finite value or more, got \[\]",
        ),
        (lambda: sweep_figure({"CGD": {2: np.array([1, np.nan])}}, xlabel="x", ylabel="y"), r"got \[1.0, nan\]"),
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


def test_accuracy_curves_reads_the_evaluations_of_its_prefix() -> None:
    log = evaluated({"land": [0.9, 0.8], "water": [0.5, 0.7]}) + evaluated({"land": [0.1]}, prefix="test")
    steps, groups, worst, metric = accuracy_curves(log)
    assert steps.tolist() == [50, 100] and worst.tolist() == [0.5, 0.7] and metric == "accuracy"
    assert {name: values.tolist() for name, values in groups.items()} == {"land": [0.9, 0.8], "water": [0.5, 0.7]}
    assert accuracy_curves(log, "test").groups["land"].tolist() == [0.1]


def test_accuracy_curves_of_a_regression_are_correlations() -> None:
    curves = accuracy_curves(evaluated({"land": [0.9, -0.2]}, metric="pearson"))
    assert curves.metric == "pearson" and curves.groups["land"].tolist() == [0.9, -0.2]
    figure = accuracies_figure({"CGD": [evaluated({"land": [0.9, -0.2]}, metric="pearson")]})
    assert figure.axes[0].get_ylabel() == "group pearson" and figure.axes[0].get_ylim()[0] < -0.2


def test_accuracy_curves_end_in_what_a_trainer_evaluates_at_the_end(trainer) -> None:
    run = trainer({"eval_strategy": "steps", "eval_steps": 1}, eval_dataset=text_dataset(64, seed=1))
    run.train()
    before = accuracy_curves(run.state.log_history)
    assert before.steps.tolist() == [1, 2, 3]
    metrics = run.evaluate()
    assert {name: values[-1] for name, values in before.groups.items()} == {
        name: metrics[f"eval_group_accuracy/{name}"] for name in run.groups.names
    }
    assert before.worst[-1] == metrics["eval_worst_group_accuracy"]
    assert accuracy_curves(run.state.log_history).steps.tolist() == [1, 2, 3]


def test_an_evaluation_of_the_best_model_does_not_replace_that_of_the_last_step() -> None:
    again = {"step": 100, "eval_group_accuracy/land": 0.99, "eval_worst_group_accuracy": 0.99}
    steps, groups, worst, _ = accuracy_curves([*evaluated({"land": [0.9, 0.8]}), again])
    assert steps.tolist() == [50, 100] and groups["land"].tolist() == [0.9, 0.8] and worst.tolist() == [0.9, 0.8]


def test_accuracies_are_means_with_the_range_of_the_runs_and_the_worst_of_each_run() -> None:
    runs = [evaluated({"land": [0.9, 0.4], "water": [0.5, 0.7]}), evaluated({"land": [0.7, 0.8], "water": [0.6, 0.6]})]
    figure = accuracies_figure({"ERM": runs[:1], "CGD": runs}, unit="update", title="T")
    erm, cgd = figure.axes
    assert lines_of(erm)["worst group"] == [[50, 0.5], [100, 0.4]] and not bands(erm)
    lines = lines_of(cgd)
    np.testing.assert_allclose(lines["land"], [[50, 0.8], [100, 0.6]])
    np.testing.assert_allclose(lines["water"], [[50, 0.55], [100, 0.65]])
    # At the second evaluation land is the worst group of the first run and water that of the second.
    np.testing.assert_allclose(lines["worst group"], [[50, 0.55], [100, 0.5]])
    assert bands(cgd) == [
        {50: (0.5, 0.6), 100: (0.4, 0.6)},
        {50: (0.7, 0.9), 100: (0.4, 0.8)},
        {50: (0.5, 0.6), 100: (0.6, 0.7)},
    ]
    worst, *others = cgd.get_lines()
    assert worst.get_color() == WORST and worst.get_linewidth() > 1.5 * max(line.get_linewidth() for line in others)
    assert erm.get_ylim() == cgd.get_ylim() and figure.get_suptitle() == "T"
    assert [axes.get_xlabel() for axes in figure.axes] == ["update"] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["worst group", *NAMES]


def test_of_many_groups_the_worst_of_each_method_at_the_end_are_in_colour() -> None:
    best = {f"g{number}": [0.8, 0.9] for number in range(60)}
    figure = accuracies_figure(
        {
            "ERM": [evaluated(best | {"g3": [0.6, 0.1], "g4": [0.05, 0.8]})],
            "CGD": [evaluated(best | {"g5": [0.2, 0.3]})],
            "DRO": [evaluated(best | {"g3": [0.2, 0.3]})],
        }
    )
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["worst group", "g3", "g5", "other groups"]
    for axes in figure.axes:
        colors = {line.get_label(): line.get_color() for line in axes.get_lines()}
        assert len(colors) == 61 and colors["g3"] == PALETTE[0] and colors["g5"] == PALETTE[1]
        assert {color for name, color in colors.items() if name not in ("worst group", "g3", "g5")} == {MUTED}


def test_a_point_at_which_a_run_lacks_the_group_is_left_out() -> None:
    whole, gap = evaluated({"a": [0.2, 0.4, 0.6], "b": [0.9] * 3}), evaluated({"a": [0.4, None, 0.8], "b": [0.9] * 3})
    axes = accuracies_figure({"CGD": [whole, gap]}).axes[0]
    np.testing.assert_allclose(lines_of(axes)["a"], [[50, 0.3], [150, 0.7]])
    assert len(lines_of(axes)["b"]) == 3


def test_a_single_evaluation_is_a_marked_point() -> None:
    axes = accuracies_figure({"CGD": [evaluated({"a": [0.5]})]}).axes[0]
    assert lines_of(axes)["a"] == [[50, 0.5]] and all(line.get_marker() == "o" for line in axes.get_lines())
    many = accuracies_figure({"CGD": [evaluated({"a": [0.5] * 50})]}).axes[0]
    assert all(line.get_marker() == "None" for line in many.get_lines())


def test_methods_may_be_evaluated_at_different_steps() -> None:
    figure = accuracies_figure({"a": [evaluated({"g": [0.5] * 2})], "b": [evaluated({"g": [0.6] * 3}, every=100)]})
    assert [lines_of(axes)["g"][-1][0] for axes in figure.axes] == [100, 300]
    assert all(axes.get_xlim()[0] <= 50 and axes.get_xlim()[1] >= 300 for axes in figure.axes)


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
