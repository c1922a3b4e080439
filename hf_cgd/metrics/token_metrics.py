"""Metrics of models of tokens: losses, perplexities and token accuracies, over all examples and over each group.

`perplexity`, `worst_group_perplexity`, `group_perplexity/<name>`; the same of `token_accuracy`; of models that find
answers `span_exact_match` and `span_f1`. Each has a 95 % interval by bootstrap over examples
(`group_perplexity_low/<name>`, `group_perplexity_high/<name>`). `group_loss/<name>`, `worst_group_loss`,
`group_count/<name>` (examples), `group_token_count/<name>`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hf_cgd.metrics.custom_metrics import lower_is_better_by_name
from hf_cgd.metrics.group_metrics import require_finite, warn_of_empty
from hf_cgd.metrics.group_rows import rows_of_groups
from hf_cgd.metrics.intervals import bootstrap_interval

RESAMPLES = 200
"""Draws of the bootstrap, which runs at every evaluation."""
OF_LANGUAGE = ("perplexity", "token_accuracy")
OF_ANSWERS = ("span_exact_match", "span_f1")
"""Measures of examples whose labels are an answer's first and last place."""


def token_metric_names(measures: Sequence[str], group_names: Sequence[str]) -> list[str]:
    """All names that `token_metrics` may give, the most useful first."""
    worst = [f"worst_group_{name}" for name in (*measures, "loss")] if group_names else []
    kinds = [f"group_{name}{bound}/" for name in measures for bound in ("", "_low", "_high")]
    kinds += ["group_loss/", "group_count/", "group_token_count/"]
    return [*worst, *measures, "loss", *(kind + name for kind in kinds for name in group_names)]


def token_metrics(
    losses: np.ndarray,
    group_ids: np.ndarray,
    group_names: Sequence[str],
    *,
    token_counts: np.ndarray,
    token_losses: np.ndarray,
    tokens_right: np.ndarray,
    by_tokens: bool = False,
    example_scores: Mapping[str, np.ndarray] | None = None,
    resamples: int = RESAMPLES,
) -> dict[str, float]:
    """Metrics out of a few numbers of each example, so that no scores are kept.

    The perplexity of examples is exp(sum of their tokens' losses / number of their tokens), whatever a group's loss
    is a mean over; token accuracy is a share of all tokens likewise.

    Args:
        losses: [N] of each example, as training has them.
        group_ids: [N] or [N, K]; see `named_metrics`.
        group_names: K names.
        token_counts: [N] tokens with a label; an example without any is left out.
        token_losses: [N] sums of their cross-entropies, natural logarithm, without label smoothing.
        tokens_right: [N] how many of them are predicted right.
        by_tokens: whether a group's loss is the mean over its tokens, not over its examples.
        example_scores: more measures by name, [N] each, whose mean over examples counts; they take the place of
            perplexity and token accuracy. None for none.
        resamples: draws of the bootstrap; 0 for no intervals.

    Returns:
        plain floats by the names above. A group without examples is left out, and so is a number that is not finite.
    """
    kept = np.asarray(token_counts) > 0
    members = rows_of_groups(np.asarray(group_ids)[kept], len(group_names))
    losses, counts, sums, right = (
        np.asarray(part)[kept].astype(np.float64) for part in (losses, token_counts, token_losses, tokens_right)
    )
    present = {name: rows for name, rows in zip(group_names, members, strict=True) if len(rows)}
    warn_of_empty(group_names, present)
    measures: dict[str, Callable[[np.ndarray], float]] = {
        "perplexity": lambda rows: _exp(_ratio(sums[rows], counts[rows])),
        "token_accuracy": lambda rows: _ratio(right[rows], counts[rows]),
    }
    if example_scores is not None:
        scores = {name: np.asarray(values)[kept].astype(np.float64) for name, values in example_scores.items()}
        measures = {name: _mean_of(values) for name, values in scores.items()}
    metrics = {name: measure(np.arange(len(losses))) for name, measure in measures.items()}
    for name, measure in measures.items():
        of_groups = {group: measure(rows) for group, rows in present.items()}
        if of_groups:
            worst = max if lower_is_better_by_name(name) else min
            metrics[f"worst_group_{name}"] = worst(of_groups.values())
        for group, rows in present.items():
            metrics[f"group_{name}/{group}"] = of_groups[group]
            interval = _interval(measure, rows, resamples)
            if interval is not None:
                metrics[f"group_{name}_low/{group}"], metrics[f"group_{name}_high/{group}"] = interval
    if present:
        weights = counts if by_tokens else np.ones_like(counts)
        means = {group: _ratio(losses[rows] * weights[rows], weights[rows]) for group, rows in present.items()}
        metrics |= {f"group_loss/{group}": value for group, value in means.items()}
        metrics["worst_group_loss"] = float(np.max(list(means.values())))
        metrics |= {f"group_count/{group}": len(rows) for group, rows in present.items()}
        metrics |= {f"group_token_count/{group}": int(counts[rows].sum()) for group, rows in present.items()}
    return require_finite(metrics)


def span_scores(predictions: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """How well each answer was found, by its places: [N] by name.

    `span_exact_match` is 1 where both places are right. `span_f1` is the harmonic mean of the share of the predicted
    tokens that are in the answer, and of the answer's that were predicted; 0 for a span that ends before it starts.
    (The F1 of SQuAD compares the words of the texts; for that pass a `compute_metrics` that knows them.)

    Args:
        predictions: [N, 2] first and last place.
        labels: [N, 2]; -100 for a place that is not known, which counts as found wrong.
    """
    first = np.maximum(predictions[:, 0], labels[:, 0])
    last = np.minimum(predictions[:, 1], labels[:, 1])
    known = (labels >= 0).all(axis=1)
    common = np.where(known, np.maximum(last - first + 1, 0), 0)
    lengths = np.maximum(predictions[:, 1] - predictions[:, 0] + 1, 0) + np.maximum(labels[:, 1] - labels[:, 0] + 1, 0)
    f1 = np.where(common > 0, 2 * common / np.maximum(lengths, 1), 0.0)
    exact = (predictions == labels).all(axis=1) & known
    return {"span_exact_match": exact.astype(np.float64), "span_f1": f1}


def _interval(measure: Callable[[np.ndarray], float], rows: np.ndarray, resamples: int) -> tuple[float, float] | None:
    if not resamples or len(rows) < 2:
        return None
    return bootstrap_interval(lambda places: measure(rows[places]), np.zeros(len(rows)), resamples)


def _mean_of(values: np.ndarray) -> Callable[[np.ndarray], float]:
    return lambda rows: float(values[rows].mean()) if len(rows) else float("nan")


def _ratio(above: np.ndarray, below: np.ndarray) -> float:
    total = below.sum()
    return float(above.sum() / total) if total else float("nan")


def _exp(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(value))
