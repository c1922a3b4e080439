"""Tables and pictures of a grid."""

from dataclasses import replace

import numpy as np
import pytest
from grids import RECIPE, result

from hf_cgd.experiments import Grid, Run, RunResult, choose, result_rows, search_rows
from hf_cgd.experiments.summary import accuracy_figure, condition_figure, learning_figure, reported_split, standing
from hf_cgd.metrics import wilson_interval
from hf_cgd.metrics.tables import latex


def test_the_table_of_results() -> None:
    grid = Grid(RECIPE, ("erm", "cgd"), {"step_size": [1, 0.1]}, seeds=(0, 1))
    tests = {("erm", 0): 0.1, ("erm", 1): 0.3}
    results = [
        result(
            run, 0.5 if dict(run.point).get("step_size") == 0.1 else 0.4, tests.get((run.objective, run.seed), 0.75)
        )
        for run in grid.search_runs()
    ]
    choices = choose(grid, results)
    rows = result_rows(choices, published={("", "cgd"): ("78.6 (0.5)", "65.6 (5.9)")})
    assert rows == [
        ["", "accuracy", "worst_group_accuracy", "chosen, seeds"],
        ["erm", "90.0 (0.0)", "20.0 (14.1)", "2"],
        ["cgd", "90.0 (0.0)", "75.0 (0.0)", "step_size=0.1, 2"],
        ["cgd, paper", "78.6 (0.5)", "65.6 (5.9)", ""],
    ]
    assert search_rows(grid, results[:-1], choices)[1:] == [
        ["erm", "", "40.0 (0.0)", "20.0 (14.1)", "2"],
        ["cgd", "step_size=1", "40.0 (0.0)", "75.0 (0.0)", "2"],
        ["cgd", "step_size=0.1 *", "50.0", "75.0", "1 of 2"],
    ]
    # Without a test split validation stands there once.
    head, first, *_ = search_rows(grid, results, choices, "validation")
    assert head == ["objective", "values", "validation worst_group_accuracy", "seeds"]
    assert first == ["erm", "", "40.0 (0.0)", "2"]


def test_the_mean_of_the_last_evaluations_stands_beside_the_best() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0, 1))
    ends = [[0.9, 0.1, 0.2, 0.3], [0.4, 0.4, 0.4]]
    results = [
        replace(result(run, 0.5, 0.5), evaluations=[{"worst_group_accuracy": value} for value in values])
        for run, values in zip(grid.search_runs(), ends, strict=True)
    ]
    rows = result_rows(choose(grid, results))
    assert rows[0][-1] == "worst_group_accuracy, last 3 evaluations on validation" and rows[1][-1] == "30.0 (14.1)"
    short = [results[0], replace(results[1], evaluations=results[1].evaluations[1:])]
    assert result_rows(choose(grid, short))[0][-1] == "chosen, seeds", "not of some runs only"


def test_an_end_that_was_not_defined_is_not_made_up_for_by_what_was_before() -> None:
    run = Grid(RECIPE, ("erm",), seeds=(0,)).search_runs()[0]
    entries: list[dict[str, float]] = [{"runtime": 1.0, "worst_group_pearson": 0.9}] * 4
    ended = replace(result(run, 0.5), evaluations=[*entries, {"runtime": 1.0, "mse": 3.0}])
    assert np.isnan(ended.last_evaluations("worst_group_pearson"))
    of_another_set = replace(ended, evaluations=[*entries, {"hospital_runtime": 1.0}])
    assert of_another_set.last_evaluations("worst_group_pearson") == pytest.approx(0.9)


def test_a_run_without_a_finite_loss_is_not_chosen_and_ends_no_table() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, seeds=(0,), metric="worst_group_loss")
    first, second = grid.search_runs()
    lost = replace(result(first, 0.1), metrics={"validation": {"loss": None, "accuracy": 0.5}})  # type: ignore[dict-item]
    (choice,) = choose(grid, [lost, result(second, 0.7, metric="worst_group_loss")])
    assert choice.point == second.point and choice.candidates == 1
    by_loss = replace(grid, metric="loss")
    (choice,) = choose(by_loss, [lost, result(second, 0.7, metric="loss")])
    assert choice.point == second.point


def test_means_are_not_rounded_to_a_perfect_score() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0, 1))
    results = [result(run, 0.5, 0.9997) for run in grid.search_runs()]
    assert result_rows(choose(grid, results))[1][2] == ">99.9 (0.0)"
    assert latex([["a"], [">99.9"]]).splitlines()[4] == r"$>$99.9 \\"


def test_learning_curves_are_means_where_all_runs_were_evaluated() -> None:
    grid = Grid(RECIPE, ("erm", "cgd"), seeds=(0, 1))
    ends = {0: {100: 0.2, 200: 0.4}, 1: {100: 0.4, 200: 0.5, 300: 0.9}}
    results = [
        replace(
            result(run, 0.5, 0.5),
            evaluations=[{"step": step, "worst_group_accuracy": value} for step, value in ends[run.seed].items()],
        )
        for run in grid.search_runs()
        if run.objective == "cgd"
    ]
    choices = choose(grid, results)
    figure = learning_figure(choices, (), "worst_group_accuracy")
    assert figure is not None
    (line,) = (line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 2)
    assert line.get_xydata().tolist() == [[100, pytest.approx(0.3)], [200, pytest.approx(0.45)]]
    assert learning_figure(choices, (), "accuracy") is None


def test_the_table_says_which_values_were_chosen_where() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, {"ratio": [2, 50]}, seeds=(0,))
    for scores, note in [
        ([0.9, 0.1, 0.3, 0.2], "step_size=1, 1"),
        ([0.9, 0.1, 0.2, 0.3], "ratio=2: step_size=1, 1; ratio=50: step_size=0.1, 1"),
    ]:
        runs = zip(grid.search_runs(), scores, strict=True)
        rows = result_rows(choose(grid, [result(run, score, 0.5) for run, score in runs]), ("worst_group_accuracy",))
        assert rows[0][1:3] == ["ratio=2 worst_group_accuracy", "ratio=50 worst_group_accuracy"] and rows[1][3] == note


def test_without_a_test_split_validation_is_reported() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0,))
    results = [result(grid.search_runs()[0], 0.5)]
    assert reported_split(results) == "validation"
    rows = result_rows(choose(grid, results), ("worst_group_accuracy",), split="validation")
    assert rows[1] == ["erm", "50.0", "1"]


def judged(run: Run, low: float, one_class: bool, count: int = 20) -> RunResult:
    """A run whose group b is right in a share `low` of `count` examples."""
    groups = [{"name": "a", "accuracy": 0.9, "count": 50}, {"name": "b", "accuracy": low, "count": count}]
    overall = {"accuracy": 0.8, "worst_group_accuracy": low, "one_class_predicted": float(one_class)}
    return RunResult(
        run, dict.fromkeys(("validation", "test"), overall), dict.fromkeys(("validation", "test"), groups), 1.0
    )


def test_tables_mark_a_collapse_and_say_how_far_the_worst_group_is_known() -> None:
    grid = Grid(RECIPE, ("erm", "cgd"), {"step_size": [1, 0.1]}, seeds=(0, 1))
    scores = {("erm", None): 0.4, ("cgd", 1): 0.75, ("cgd", 0.1): 0.5}
    results = [
        judged(run, scores[run.objective, dict(run.point).get("step_size")], dict(run.point).get("step_size") == 1)
        for run in grid.search_runs()
    ]
    choices = choose(grid, results)
    low, high = wilson_interval(10, 20)
    known = f"b: n = 20, {100 * low:.1f}-{100 * high:.1f}"
    rows = result_rows(choices)
    assert rows[0][-1] == "worst group" and rows[2] == ["cgd", "80.0 (0.0)", "50.0 (0.0)", "step_size=0.1, 2", known]
    searched = {row[1]: row[-1] for row in search_rows(grid, results, choices)[1:]}
    assert searched["step_size=0.1 *"] == known and searched["step_size=1"].startswith(
        "ONE CLASS in 2 of 2 runs; b: n"
    )


def test_the_interval_is_that_of_the_smallest_run() -> None:
    runs = [Run((), "erm", (), seed) for seed in (0, 1)]
    results = [judged(runs[0], 0.5, False, count=20), judged(runs[1], 0.75, True, count=8)]
    low, high = wilson_interval(5, 8)  # .625 of 8
    assert standing(results, "test") == f"ONE CLASS in 1 of 2 runs; b: n = 8, {100 * low:.1f}-{100 * high:.1f}"
    assert standing([], "test") == standing([result(runs[0], 0.5)], "validation") == ""


def test_pictures_mark_a_collapse() -> None:
    grid = Grid(RECIPE, ("cgd",), {}, {"ratio": [2, 50]}, seeds=(0,))
    choices = choose(grid, [judged(run, 0.4, dict(run.condition)["ratio"] == 50) for run in grid.search_runs()])
    (legend,) = condition_figure(choices, grid.metric).legends
    assert [text.get_text() for text in legend.get_texts()] == ["cgd (ONE CLASS at 50)"]
    titles = [accuracy_figure(choices, condition).axes[0].get_title() for condition in grid.all_conditions()]
    assert ["ONE CLASS in 1 of 1 run" in title for title in titles] == [False, True]
    assert all("n = 20, 21.9-61.3" in title for title in titles)  # Wilson, 8 of 20


def test_latex() -> None:
    assert latex([["a_b", "50 %"], ["x", "1 (2)"]]) == "\n".join(
        [
            r"\begin{tabular}{lr}",
            r"\toprule",
            r"a\_b & 50 \% \\",
            r"\midrule",
            r"x & 1 (2) \\",
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def test_pictures_show_the_chosen_runs() -> None:
    grid = Grid(RECIPE, ("erm", "cgd"), {}, {"ratio": [2, 1000]}, seeds=(0, 1))
    results = [
        RunResult(
            run,
            {name: {"worst_group_accuracy": 0.1 * run.seed + (0.5 if run.objective == "cgd" else 0.2)} for name in
             ("validation", "test")},
            {"test": [{"name": "a", "accuracy": 0.9}, {"name": "b", "accuracy": 0.25}]},
            1.0,
        )
        for run in grid.search_runs()
    ]  # fmt: skip
    choices = choose(grid, results)
    axes = condition_figure(choices, grid.metric).axes[0]
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 2]
    found = sorted(np.asarray(line.get_ydata()).round(6).tolist() for line in lines)
    assert found == [[0.25, 0.25], [0.55, 0.55]] and axes.get_xlabel() == "ratio"
    bars = accuracy_figure(choices, grid.all_conditions()[1]).axes
    assert [sorted(round(patch.get_width(), 6) for patch in panel.patches) for panel in bars] == [[0.25, 0.9]] * 2
    with pytest.raises(ValueError, match="one condition that is a number"):
        condition_figure(choose(Grid(RECIPE, ("erm",), seeds=(0,)), [result(Run((), "erm", (), 0), 0.5)]), "accuracy")
