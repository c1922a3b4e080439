"""Weights and accuracies over a run: the numbers are read back from the figure."""

import numpy as np
from figures import COLORS, NAMES, axes_of, bands, evaluated, history, lines_of
from matplotlib.figure import Figure
from tiny import predicts_one_class, text_dataset

from hf_cgd.plots import MUTED, PALETTE, WORST, accuracies_figure, accuracy_curves, draw_group_weights, weight_curves


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


def test_a_worst_group_that_was_not_defined_is_a_gap_in_its_line() -> None:
    """In one evaluation a group has no correlation: the best of the rest is not the worst group."""
    log = evaluated({"land": [0.9, 0.8], "water": [0.5, 0.7]}, metric="pearson")
    for name in ("eval_worst_group_pearson", "eval_group_pearson/water"):
        del log[1][name]
    curves = accuracy_curves(log)
    np.testing.assert_array_equal(curves.worst, [np.nan, 0.7])
    assert lines_of(accuracies_figure({"CGD": [log]}).axes[0])["worst group"] == [[100, 0.7]]


def test_curves_of_a_language_model_are_perplexities_and_the_worst_is_the_highest() -> None:
    log = evaluated({"land": [900.0, 30.0], "water": [800.0, 40.0]}, metric="perplexity")
    # A log that lacks the worst group: it is found among the groups.
    for entries in (log, [{k: v for k, v in entry.items() if "worst" not in k} for entry in log]):
        curves = accuracy_curves(entries)
        assert curves.metric == "perplexity" and curves.worst.tolist() == [900, 40]
    axes = accuracies_figure({"CGD": [log]}).axes[0]
    assert lines_of(axes)["worst group"] == [[50, 900], [100, 40]]
    assert axes.get_ylabel() == "group perplexity" and axes.get_yscale() == "log"
    # Where all is of one size, in every method, powers of ten would hide the differences.
    near = evaluated({"land": [20.0, 18.0], "water": [24.0, 22.0]}, metric="perplexity")
    assert accuracies_figure({"CGD": [near]}).axes[0].get_yscale() == "linear"
    assert accuracies_figure({"ERM": [near], "CGD": [log]}).axes[0].get_yscale() == "log"
    many = {f"g{number}": [9.0, 5.0] for number in range(60)} | {"g7": [9.0, 6.0]}
    figure = accuracies_figure({"CGD": [evaluated(many, metric="perplexity")]})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["worst group", "g7", "other groups"]


@predicts_one_class
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
