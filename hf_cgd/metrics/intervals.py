"""Confidence intervals for the metrics of a group."""

from collections.abc import Callable
from math import inf, sqrt

import numpy as np
from scipy.stats import norm, studentized_range
from scipy.stats import t as student

FEWEST = 5
"""Examples that a stratum of a bootstrap must have. Draws from fewer vary too little: of a class of one example plain
percentiles of an AUC held the true value in 29 % of 200 samples, of two in 63 %, of three in 77 %, of five in 89 %."""


def wilson_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927): (low, high) within [0, 1].

    Args:
        correct: successes, 0 <= correct <= total.
        total: trials, >= 1.
        confidence: in (0, 1).
    """
    if not 0 <= correct <= total or total < 1:
        raise ValueError(f"Expected 0 <= correct <= total and total >= 1, got {correct} of {total}.")
    return wilson_of_share(correct / total, total, confidence)


def wilson_of_share(share: float, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The same of a share that need not be one of whole examples: what .8 is known to on 2, or a mean over runs.

    Args:
        share: in [0, 1].
        total: trials, >= 1.
        confidence: in (0, 1).
    """
    z = float(norm.ppf(0.5 + 0.5 * confidence))
    width = 2 * (total + z**2)
    middle = (2 * total * share + z**2) / width
    half = z / width * sqrt(4 * total * share * (1 - share) + z**2)
    return 0.0 if share == 0 else middle - half, 1.0 if share == 1 else middle + half


def confidence_of_extremes(groups: int) -> float:
    """Confidence at which the intervals of the best and the worst of so many equal groups overlap 95 times of 100.

    Intervals of 95 % do so for two to five groups. Of 20 equal groups the best and the worst are apart in 37 of 100
    samples, of 40 in 71. The studentised range (Tukey 1949) tells how far extremes lie from one another by chance.
    """
    z = max(float(norm.ppf(0.975)), float(studentized_range.ppf(0.95, groups, inf)) / 2)
    return float(2 * norm.cdf(z) - 1)


def bootstrap_interval(
    value: Callable[[np.ndarray], float], strata: np.ndarray, resamples: int, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Expanded percentile interval of a stratified bootstrap (Efron 1979; Hesterberg 2015): (low, high).

    Draws vary less than samples do, by the factor (n - 1) / n in variance, and few examples tell their spread badly.
    So the percentiles are those further out that make up for both as Student's t does, with n of the smallest stratum.
    Plain percentiles of a mean held the true value in 82 % of samples of 5 examples, and in 92 % of 20.

    Args:
        value: the metric of the examples at these places, with repetitions; NaN where it is not defined.
        strata: [N] number of each example's stratum, see `class_strata`; a draw keeps the size of each.
        resamples: draws; 0 for none.
        seed: of the draws.
        confidence: in (0, 1).

    Returns:
        None where a stratum has fewer than `FEWEST` examples, half of the draws or more are not defined, or all are
        equal: then nothing can be told.
    """
    random = np.random.default_rng(seed)
    members = [np.flatnonzero(strata == stratum) for stratum in np.unique(strata)]
    if resamples == 0 or min(map(len, members), default=0) < FEWEST:
        return None
    draws = np.array(
        [
            value(np.concatenate([rows[random.integers(len(rows), size=len(rows))] for rows in members]))
            for _ in range(resamples)
        ]
    )
    draws = draws[np.isfinite(draws)]
    if 2 * len(draws) <= resamples or np.ptp(draws) == 0:
        return None
    fewest = min(map(len, members))
    further = sqrt(fewest / (fewest - 1)) * float(student.ppf(0.5 + 0.5 * confidence, fewest - 1))
    low, high = np.quantile(draws, norm.cdf([-further, further]))
    return float(low), float(high)


def class_strata(classes: np.ndarray) -> np.ndarray:
    """Strata [N] for `bootstrap_interval` that keep the numbers of the classes [N], as far as they can be kept.

    Classes of fewer than `FEWEST` examples, whose draws would hardly vary, are one stratum together. Where that is
    too small as well, it joins the smallest of the other classes, unless there is only one other: then the metric may
    hang by these few examples.
    """
    _, places, counts = np.unique(classes, return_inverse=True, return_counts=True)
    rare = counts < FEWEST
    if not rare.any():
        return places
    strata = np.where(rare, len(counts), np.arange(len(counts)))
    if counts[rare].sum() < FEWEST and (~rare).sum() > 1:
        strata[rare] = np.argmin(np.where(rare, counts.max() + 1, counts))
    return strata[places]
