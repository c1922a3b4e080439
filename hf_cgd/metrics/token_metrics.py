"""Metrics of models of tokens: losses, perplexities and token accuracies, over all examples and over each group.

`perplexity`, `worst_group_perplexity`, `group_perplexity/<name>`; `token_accuracy`, `worst_group_token_accuracy`,
`group_token_accuracy/<name>`; `group_loss/<name>`, `worst_group_loss`, `group_count/<name>` (examples),
`group_token_count/<name>`.
"""

from collections.abc import Sequence

import numpy as np

from hf_cgd.metrics.group_metrics import membership, require_finite, warn_of_empty


def token_metrics(
    losses: np.ndarray,
    group_ids: np.ndarray,
    group_names: Sequence[str],
    *,
    token_counts: np.ndarray,
    token_losses: np.ndarray,
    tokens_right: np.ndarray,
    by_tokens: bool = False,
) -> dict[str, float]:
    """Metrics out of a few numbers of each example, so that no scores are kept.

    The perplexity of examples is exp(sum of their tokens' losses / number of their tokens), whatever a group's loss
    is a mean over; so is token accuracy a share of all tokens.

    Args:
        losses: [N] of each example, as training has them.
        group_ids: [N] or [N, K]; see `named_metrics`.
        group_names: K names.
        token_counts: [N] tokens with a label; an example without any is left out.
        token_losses: [N] sums of their cross-entropies, natural logarithm, without label smoothing.
        tokens_right: [N] how many of them are predicted right.
        by_tokens: whether a group's loss is the mean over its tokens, not over its examples.

    Returns:
        plain floats by the names above. A group without examples is left out, and so is a number that is not finite.
    """
    kept = np.asarray(token_counts) > 0
    members = membership(np.asarray(group_ids), len(group_names))[kept]
    losses, counts, sums, right = (
        np.asarray(part)[kept].astype(np.float64) for part in (losses, token_counts, token_losses, tokens_right)
    )
    sizes = members.sum(axis=0)
    present = {name: members[:, k] for k, name in enumerate(group_names) if sizes[k] > 0}
    warn_of_empty(group_names, present)
    everyone = np.ones(len(losses), dtype=bool)

    def perplexity(rows: np.ndarray) -> float:
        total = counts[rows].sum()
        with np.errstate(over="ignore"):
            return float(np.exp(sums[rows].sum() / total)) if total else float("nan")

    def accuracy(rows: np.ndarray) -> float:
        total = counts[rows].sum()
        return float(right[rows].sum() / total) if total else float("nan")

    metrics = {"perplexity": perplexity(everyone), "token_accuracy": accuracy(everyone)}
    if present:
        perplexities = {name: perplexity(rows) for name, rows in present.items()}
        accuracies = {name: accuracy(rows) for name, rows in present.items()}
        weights = counts if by_tokens else np.ones_like(counts)
        of_groups = {name: float(np.average(losses[rows], weights=weights[rows])) for name, rows in present.items()}
        metrics["worst_group_perplexity"] = float(np.max(list(perplexities.values())))
        metrics["worst_group_token_accuracy"] = min(accuracies.values())
        metrics["worst_group_loss"] = float(np.max(list(of_groups.values())))
        for name, rows in present.items():
            metrics[f"group_perplexity/{name}"] = perplexities[name]
            metrics[f"group_token_accuracy/{name}"] = accuracies[name]
            metrics[f"group_loss/{name}"] = of_groups[name]
            metrics[f"group_count/{name}"] = int(rows.sum())
            metrics[f"group_token_count/{name}"] = int(counts[rows].sum())
    return require_finite(metrics)
