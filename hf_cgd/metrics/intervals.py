"""Confidence intervals for the metrics of a group."""

from collections.abc import Callable

import numpy as np
from scipy.stats import binomtest


def wilson_interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927): (low, high) within [0, 1].

    Args:
        correct: successes, 0 <= correct <= total.
        total: trials, >= 1.
        confidence: in (0, 1).
    """
    interval = binomtest(int(correct), int(total)).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap_interval(
    value: Callable[[np.ndarray], float], strata: np.ndarray, resamples: int, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of a stratified bootstrap (Efron 1979): (low, high).

    Args:
        value: the metric of the examples at these places, with repetitions; NaN where it is not defined.
        strata: [N] number of each example's stratum; a draw keeps the size of each.
        resamples: draws; 0 for none.
        seed: of the draws.
        confidence: in (0, 1).

    Returns:
        None where half of the draws or more are not defined, or all are equal: then nothing can be told.
    """
    random = np.random.default_rng(seed)
    members = [np.flatnonzero(strata == stratum) for stratum in np.unique(strata)]
    draws = np.array(
        [
            value(np.concatenate([rows[random.integers(len(rows), size=len(rows))] for rows in members]))
            for _ in range(resamples)
        ]
    )
    draws = draws[np.isfinite(draws)]
    if 2 * len(draws) <= resamples or np.ptp(draws) == 0:
        return None
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
