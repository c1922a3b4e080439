"""The published row beside the run's: cells by hand."""

from dataclasses import replace

from hf_cgd.cli.published import published_table
from hf_cgd.tasks import TASKS, Published

BIRDS = TASKS["waterbirds"]().info
METRICS = {"test": {"accuracy": 0.9114, "worst_group_accuracy": 0.875, "adjusted_accuracy": 0.95}}


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if line and not line.startswith("-")]


def test_the_average_of_the_benchmark_has_a_column_of_its_own() -> None:
    assert rows(published_table(BIRDS, "group_dro", METRICS)) == [
        ["accuracy", "worst_group_accuracy", "adjusted_accuracy"],
        ["group_dro,", "this", "run", "91.1", "87.5", "95.0"],
        ["group_dro,", "paper", "90.1", "(0.5)", "85.0", "(1.5)"],
    ]


def test_an_objective_that_nobody_reported_stands_beside_all_of_them() -> None:
    table = rows(published_table(BIRDS, "irm", METRICS))
    assert [row[0] for row in table[1:]] == ["irm,", "erm,", "erm_uw,", "pgi,", "group_dro,", "cgd,"]


def test_metrics_of_other_splits_and_numbers_that_are_no_shares() -> None:
    published = Published(
        ("id_test:worst_group_pearson", "worst_group_pearson"), {"cgd": ("0.58 (0.05)", "0.43 (0.03)")}
    )
    info = replace(BIRDS, published={"paper": published, "other": published}, average_metric="worst_group_pearson")
    metrics = {"test": {"worst_group_pearson": 0.4}, "id_test": {"worst_group_pearson": 0.5}}
    expected = [
        ["id_test:worst_group_pearson", "worst_group_pearson"],
        ["cgd,", "this", "run", "0.500", "0.400"],
    ]
    paper, other = ([["cgd,", source, "0.58", "(0.05)", "0.43", "(0.03)"]] for source in ("paper", "other"))
    assert rows(published_table(info, "cgd", metrics)) == [*expected, *paper, *expected, *other]
    assert rows(published_table(info, "cgd", {"test": {}}))[1] == ["cgd,", "this", "run"]


def test_what_keeps_numbers_from_comparing_is_said() -> None:
    info = replace(BIRDS, caveat="Another split.")
    assert published_table(info, "cgd", METRICS).endswith("\nAnother split.")
    assert "made up" in published_table(info, "cgd", METRICS, made_up=True).splitlines()[-1]
