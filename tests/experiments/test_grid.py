"""Grids: which runs there are, and which of them is chosen."""

from typing import Any

import pytest
from grids import RECIPE, result
from hypothesis import given
from hypothesis import strategies as st

from hf_cgd.experiments import Grid, Run, choose
from hf_cgd.experiments.records import option_words
from hf_cgd.experiments.selection import RunResult


def test_values_of_knobs_are_searched_for_the_objectives_that_have_them() -> None:
    grid = Grid(
        RECIPE,
        ("erm", "erm_uw", "cgd", "pgi"),
        {"learning_rate": [1e-3, 1e-5], "step_size": [1, 0.1, 0.01], "adjustment": [0, 5], "penalty_weight": [1]},
        seeds=(3, 4),
    )
    assert [len(grid.points(name)) for name in grid.objectives] == [2, 4, 12, 2]
    assert grid.points("erm") == [(("learning_rate", 1e-3),), (("learning_rate", 1e-5),)]
    assert grid.points("pgi")[0] == (("learning_rate", 1e-3), ("penalty_weight", 1))
    assert len(grid.search_runs()) == len(set(grid.search_runs())) == (2 + 4 + 12 + 2) * 2
    assert len({run.name for run in grid.search_runs()}) == 40


def test_fewer_seeds_to_choose_on() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, seeds=(0, 1, 2), search_seeds=(7,))
    assert [run.seed for run in grid.search_runs()] == [7, 7]
    assert sorted(run.seed for run in grid.all_runs()) == [0, 0, 1, 1, 2, 2, 7, 7]


def test_options_of_a_run() -> None:
    grid = Grid(
        RECIPE,
        ("erm", "cgd"),
        {"step_size": [0.1], "learning_rate": [1e-3]},
        {"ratio": [10]},
        options={"adjustment": 2, "model": "resnet18", "group_sampling": "balanced"},
        objective_options={"erm": {"group_sampling": "none"}},
    )
    erm, cgd = (grid.options_of(run) for run in grid.search_runs() if run.seed == 1)
    shared = {"seed": 1, "ratio": 10, "learning_rate": 1e-3, "model": "resnet18"}
    assert erm == shared | {"objective": "erm", "group_sampling": "none"}, "no knob that ERM does not have"
    assert cgd == shared | {"objective": "cgd", "group_sampling": "balanced", "step_size": 0.1, "adjustment": 2}


def test_one_objective_with_different_options_side_by_side() -> None:
    halves = "cgd self_term=split_half"
    grid = Grid(
        RECIPE,
        ("erm", "cgd", halves),
        {"step_size": [1, 0.1], "weight_decay": [0, 1]},
        objective_options={"cgd": {"gradient_layers": "all", "weight_decay": 2}, halves: {"gradient_layers": 3}},
        seeds=(0,),
    )
    assert [len(grid.points(name)) for name in grid.objectives] == [2, 2, 2]
    plain, other = (grid.options_of(run) for run in grid.search_runs() if run.point == (("step_size", 1),))
    assert plain == {"objective": "cgd", "seed": 0, "step_size": 1, "gradient_layers": "all", "weight_decay": 2}
    assert other == plain | {"self_term": "split_half", "gradient_layers": 3}
    assert Run((), halves, (), 0).name == "cgd_self_term=split_half/seed-0"


def test_a_value_that_an_objective_has_of_its_own_is_not_searched_for_it() -> None:
    grid = Grid(RECIPE, ("cgd", "erm"), {"lr": [1, 2]}, objective_options={"cgd": {"lr": 3}})
    assert grid.points("cgd") == [()] and len(grid.points("erm")) == 2


def test_folders_tell_what_the_run_is() -> None:
    run = Run((("setting", "noise"),), "cgd", (("step_size", 0.1), ("gradient_layers", ["a/b", "all"])), 4)
    assert run.name == "setting=noise/cgd_step_size=0.1_gradient_layers=a_b+all/seed-4"
    assert Run((), "erm", (), 0).name == "erm/seed-0"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objectives": ("cdg",)}, "objective must be one of 'erm', .*got 'cdg'"),
        ({"objectives": ("erm self_term=split_half",)}, "erm has no option self_term"),
        ({"objectives": ("cgd  self_term",)}, "options as name=value"),
        ({"objectives": ("cgd seed=3",)}, "got seed again"),
        ({"objectives": ("erm", "erm")}, "objectives: expected a list of one or more different values"),
        ({"seeds": ()}, "seeds: expected a list"),
        ({"values": {"step_size": "0.1"}}, "step_size: expected a list .*'0.1'"),
        ({"values": {"step_size": [1, 1.0]}}, "step_size: .*different"),
        ({"objectives": ("erm",), "values": {"step_size": [1]}}, "None of erm has step_size"),
        ({"values": {"lr": [1]}, "options": {"lr": 2}}, "given once.*lr again"),
        ({"conditions": {"lr": [1]}, "values": {"lr": [2]}}, "given once.*lr again"),
        ({"options": {"seed": 2}}, "set by the grid itself, got seed again"),
        ({"objective_options": {"cgd": {"output_dir": "x"}}}, "got output_dir again"),
    ],
)
def test_grids_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(RECIPE, **fields)


def test_options_as_words() -> None:
    options = {"a": True, "b": [1, "x y"], "c": None, "d": 1e-5, "e": "text", "f": False}
    assert option_words(options) == ["--a", "true", "--b", "1", "x y", "--d", "1e-05", "--e", "text", "--f", "false"]


@given(st.lists(st.floats(0, 1), min_size=6, max_size=6), st.booleans())
def test_the_best_mean_on_validation_is_chosen(scores: list[float], lower: bool) -> None:
    metric = "worst_group_loss" if lower else "worst_group_accuracy"
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1, 0.01]}, seeds=(0, 1), metric=metric)
    results = [result(run, score, metric=metric) for run, score in zip(grid.search_runs(), scores, strict=True)]
    (choice,) = choose(grid, results[::-1])
    means = [(scores[2 * i] + scores[2 * i + 1]) / 2 for i in range(3)]
    best = min(means) if lower else max(means)
    assert choice.score == pytest.approx(best) and choice.candidates == 3
    assert choice.point == grid.points("cgd")[means.index(best)], "the first of equal ones"
    assert [r.run.seed for r in choice.results] == [0, 1]


def test_the_test_set_has_no_say() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, seeds=(0,))
    good, bad = grid.search_runs()
    (choice,) = choose(grid, [result(good, 0.6, test=0.1), result(bad, 0.5, test=0.9)])
    assert choice.point == good.point


def test_unfinished_and_diverged_points_take_no_part() -> None:
    grid = Grid(RECIPE, ("cgd", "erm"), {"step_size": [1, 0.1, 0.01]}, seeds=(0, 1))
    runs = grid.search_runs()
    scores = [0.9, None, 0.8, float("nan"), 0.1, 0.2, None, 0.5]
    finished = [result(run, score) for run, score in zip(runs, scores, strict=True) if score is not None]
    (choice,) = choose(grid, finished)
    assert (choice.objective, choice.point, choice.candidates) == ("cgd", (("step_size", 0.01),), 1)


@pytest.mark.parametrize(
    ("scores", "collapsed", "lower", "place"),
    [
        ([0.9, 0.9, 0.5, 0.5, 0.6, 0.6], [1, 1, 0, 0, 0, 0], False, 2),
        ([0.9, 0.9, 0.5, 0.5, 0.4, 0.4], [0, 1, 0, 0, 0, 0], False, 1),  # one collapse is enough
        ([0.1, 0.1, 0.5, 0.5, 0.6, 0.6], [1, 1, 0, 0, 0, 0], True, 1),
        ([0.9, 0.9, 0.5, 0.5, 0.6, 0.6], [1, 1, 1, 0, 1, 1], False, 1),  # none without: the fewest
        (
            [0.9, 0.9, 0.5, 0.5, 0.6, 0.6],
            [1, 1, 1, 1, 1, 1],
            False,
            0,
        ),  # nothing has learned: by the score, and marked
    ],
)
def test_a_collapse_is_not_chosen_over_what_has_learned(
    scores: list[float], collapsed: list[int], lower: bool, place: int
) -> None:
    metric = "worst_group_loss" if lower else "worst_group_accuracy"
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1, 0.01]}, seeds=(0, 1), metric=metric)
    results = [
        result(run, score, metric=metric, one_class=bool(one))
        for run, score, one in zip(grid.search_runs(), scores, collapsed, strict=True)
    ]
    (choice,) = choose(grid, results)
    assert choice.point == grid.points("cgd")[place] and choice.score == pytest.approx(scores[2 * place])
    assert choice.collapsed("validation") == sum(collapsed[2 * place : 2 * place + 2])


def test_conditions_are_chosen_for_apart() -> None:
    grid = Grid(RECIPE, ("cgd",), {"step_size": [1, 0.1]}, {"ratio": [2, 50]}, seeds=(0,))
    scores = [0.9, 0.1, 0.2, 0.3]
    choices = choose(grid, [result(run, score) for run, score in zip(grid.search_runs(), scores, strict=True)])
    assert [(dict(c.condition)["ratio"], dict(c.point)["step_size"]) for c in choices] == [(2, 1), (50, 0.1)]


def test_a_run_without_the_metric_is_refused() -> None:
    grid = Grid(RECIPE, ("erm",), seeds=(0,), metric="worst_group_pearson")
    with pytest.raises(
        ValueError, match="expected 'worst_group_pearson' of a validation split, got .'worst_group_acc"
    ):
        choose(grid, [result(grid.search_runs()[0], 0.5)])


def test_a_point_whose_correlation_is_not_defined_takes_no_part() -> None:
    """A regression that gives one number to all rows of a group has no worst correlation; its run has finished."""
    grid = Grid(RECIPE, ("erm",), {"learning_rate": [1, 2]}, seeds=(0,), metric="worst_group_pearson")
    first, second = grid.search_runs()
    silent = RunResult(first, {"validation": {"mse": 0.2, "pearson": 0.9}}, {}, 1.0)
    (choice,) = choose(grid, [silent, result(second, 0.5, metric="worst_group_pearson")])
    assert choice.point == second.point and choice.candidates == 1


def test_the_direction_of_a_metric_of_ones_own_is_asked_for_and_used() -> None:
    """The runs are told it as well, so that it is the same for epochs and for values."""
    made: dict[str, Any] = {"values": {"step_size": [1, 0.1]}, "seeds": (0,), "metric": "upkeep"}
    with pytest.raises(ValueError, match="metric='upkeep': nothing says whether .* greater_is_better: true, or false"):
        Grid(RECIPE, ("cgd",), **made)
    for said, chosen in ((False, 0.1), ("false", 0.1), (True, 1), ("True", 1)):
        grid = Grid(RECIPE, ("cgd",), options={"greater_is_better": said}, **made)
        first, second = grid.search_runs()
        results = [result(first, 0.9, metric="upkeep"), result(second, 0.2, metric="upkeep")]
        assert dict(choose(grid, results)[0].point) == {"step_size": chosen}
        assert grid.options_of(first)["greater_is_better"] == said
    with pytest.raises(ValueError, match="greater_is_better is one for all runs"):
        Grid(RECIPE, ("cgd",), objective_options={"cgd": {"greater_is_better": True}}, seeds=(0,))
    with pytest.raises(ValueError, match="greater_is_better must be true or false, got 'up'"):
        Grid(RECIPE, ("cgd",), options={"greater_is_better": "up"}, seeds=(0,))
