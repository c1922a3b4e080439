"""Confidence intervals for the accuracy of a group."""

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
