"""Twelve steps of every way to train give the recorded numbers: to the bit with HF_CGD_SAME_MACHINE=1."""

import os
from functools import cache

import pytest
import trajectories
from trajectories import CASES, RESUMED, SAVED_STEP, Record, errors, recorded_cases, tolerance_of

SAME_MACHINE = os.environ.get("HF_CGD_SAME_MACHINE") == "1"
recorded = cache(recorded_cases)
run_case = cache(trajectories.run_case)


def test_all_cases_are_recorded() -> None:
    assert list(recorded()) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_case_gives_the_recorded_numbers(name: str) -> None:
    found = run_case(name)
    by_place = errors(recorded()[name], found)
    assert {place: error for place, error in by_place.items() if error > tolerance_of(name)} == {}
    if SAME_MACHINE:
        assert found == recorded()[name]


def of_the_second_half(record: Record) -> Record:
    by_step = ("losses", "weights", "group_losses")
    return {**{name: record[name][-SAVED_STEP:] for name in by_step}, "parameters": record["parameters"]}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_case_ends_like_the_one_that_was_not_interrupted(name: str) -> None:
    both = run_case(name)
    assert len(both["straight"]["losses"]) == 2 * len(both["resumed"]["losses"])
    assert of_the_second_half(both["resumed"]) == of_the_second_half(both["straight"])
