"""Stability and agreement of groups, against values by hand and scikit-learn's."""

import math
from math import comb

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from hf_cgd.discovery.trust import agreement, rand_within_classes, stability

CLASSES = np.repeat([0, 1], 8)


def test_groups_that_only_agree_about_the_class_do_not_agree() -> None:
    first = np.tile([0, 1], 8) + 2 * CLASSES
    second = np.tile([0, 0, 1, 1], 4) + 2 * CLASSES
    assert adjusted_rand_score(first, second) > 0.1
    inside = np.mean([adjusted_rand_score(first[part], second[part]) for part in (slice(8), slice(8, 16))])
    assert rand_within_classes(first, second, CLASSES) == pytest.approx(inside)
    assert inside < 0


def test_the_same_groups_by_other_numbers_agree_and_a_whole_class_is_left_out() -> None:
    first = np.where(CLASSES == 0, 0, np.tile([0, 1], 8))
    second = np.where(CLASSES == 0, 7, np.tile([3, 2], 8))
    assert rand_within_classes(first, second, CLASSES) == 1.0
    # A class that only one of the two splits counts as chance.
    third = np.where(CLASSES == 0, np.tile([0, 1], 8), second)
    assert rand_within_classes(first, third, CLASSES) == pytest.approx(0.5)
    assert math.isnan(rand_within_classes(CLASSES, CLASSES, CLASSES))


def test_classes_count_by_their_sizes() -> None:
    classes = np.repeat([0, 1], [12, 4])
    first = np.tile([0, 1], 8)
    second = np.where(classes == 0, first, 0)
    assert rand_within_classes(first, second, classes) == pytest.approx(12 / 16)


def test_stability_is_mean_and_least() -> None:
    found = np.tile([0, 1], 8)
    other = np.tile([0, 0, 1, 1], 4)
    value = rand_within_classes(found, other, CLASSES)
    measured = stability(found, [found, other], CLASSES, "other models")
    assert (measured.mean, measured.least, measured.repeats) == (pytest.approx((1 + value) / 2), value, 2)


def test_recall_and_precision_by_hand() -> None:
    """Class 0: 6 rows of a and 4 of b; the found groups hold (5 a, 1 b) and (1 a, 3 b). Class 1 has one true group."""
    classes = np.array([0] * 10 + [1] * 4)
    true = np.array([0] * 6 + [1] * 4 + [2] * 4)
    found = np.array([0] * 5 + [1] + [0] + [1] * 3 + [0, 1, 0, 1])
    measured = agreement(found, true, ["a", "b", "c"], classes)
    a, b = measured.groups
    assert (a.name, a.count, a.recall, a.precision) == ("a", 6, 5 / 6, 5 / 6)
    assert (b.name, b.count, b.recall, b.precision) == ("b", 4, 3 / 4, 3 / 4)
    # All ways to draw the 6 rows of the first found group: k of a among them, read as a where k / 6 >= (6 - k) / 4.
    ways = {k: comb(6, k) * comb(4, 6 - k) for k in range(2, 7)}
    of_a = {k: k if k / 6 >= (6 - k) / 4 else 0 for k in ways}
    of_b = {k: 6 - k if k / 6 < (6 - k) / 4 else 0 for k in ways}
    # The second found group holds the rest.
    of_a = {k: n + (6 - k if (6 - k) / 6 >= (k - 2) / 4 else 0) for k, n in of_a.items()}
    of_b = {k: n + (k - 2 if (6 - k) / 6 < (k - 2) / 4 else 0) for k, n in of_b.items()}
    total = sum(ways.values())
    for group, hits, size in ((a, of_a, 6), (b, of_b, 4)):
        expected = sum(ways[k] * hits[k] for k in ways) / size / total
        assert expected > 0.55 and group.by_chance == pytest.approx(expected, abs=0.03)
    as_good = sum(ways[k] for k in ways if of_a[k] / 6 + of_b[k] / 4 >= 5 / 6 + 3 / 4 - 1e-9) / total
    assert a.above_chance == b.above_chance == (as_good < 0.05)
    assert measured.worst is b
    assert measured.adjusted_rand == pytest.approx(adjusted_rand_score(true[:10], found[:10]))


def test_a_found_group_is_read_by_rates_so_that_a_rare_group_can_be_found() -> None:
    """Of 100 rows of a, 10 are in the second found group; of 10 rows of b, 8: a is its majority, but not its meaning."""
    true = np.repeat([0, 1], [100, 10])
    found = np.concatenate([np.repeat([0, 1], [90, 10]), np.repeat([0, 1], [2, 8])])
    _, b = agreement(found, true, ["a", "b"], np.zeros(110, dtype=int)).groups
    assert (b.recall, b.precision) == (0.8, 8 / 18)


def test_a_class_that_is_left_whole_finds_nothing_of_its_minority() -> None:
    true = np.repeat([0, 1], [3, 7])
    a, b = agreement(np.zeros(10, dtype=int), true, ["a", "b"], np.zeros(10, dtype=int)).groups
    assert (a.recall, a.precision, b.recall) == (0.0, None, 1.0)


def test_groups_drawn_at_random_do_not_pass_for_found() -> None:
    """Five clusters of chance are read by the very rows of a small group that they are judged by."""
    random = np.random.default_rng(0)
    true, classes = np.repeat([0, 1], [95, 5]), np.zeros(100, dtype=int)
    drawn = [agreement(random.integers(5, size=100), true, ["a", "b"], classes).groups[1] for _ in range(60)]
    mean = np.mean([group.recall for group in drawn])
    assert mean > 0.7, "one in two is no measure of chance"
    assert np.mean([group.by_chance for group in drawn]) == pytest.approx(mean, abs=0.05)
    assert np.mean([group.above_chance for group in drawn]) < 0.1
    # One that is found in truth is far from it.
    _, found = agreement(np.repeat([0, 1, 2, 3, 4], 20), np.repeat([0, 1], [80, 20]), ["a", "b"], classes).groups
    assert found.recall == found.precision == 1.0 and found.above_chance


def test_nothing_to_find_is_refused() -> None:
    with pytest.raises(ValueError, match="several true groups within a class"):
        agreement(CLASSES, CLASSES, ["a", "b"], CLASSES)
