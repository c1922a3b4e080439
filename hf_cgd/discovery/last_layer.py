"""`last_layer_retraining`: the head of a trained classifier, fitted anew on rows in which the groups are balanced."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_cgd.data.columns import read_columns, require_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.values import crossed
from hf_cgd.discovery.balanced_regression import (
    INVERSE_PENALTIES,
    SUBSAMPLES,
    LinearMap,
    Penalty,
    Trial,
    balanced_regression,
    choose_inverse_penalty,
    halves,
    worst_and_mean,
)
from hf_cgd.discovery.features import ExampleFeatures, example_features, label_column_of
from hf_cgd.discovery.shared_rows import shared_rows
from hf_cgd.models.head import classification_heads
from hf_cgd.models.outputs import forward_parameters, num_outputs_of
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.visible_numbers import decimals

FEW_ROWS = 20
"""Rows of the smallest cell below which the regression is warned of."""
LISTED_CELLS = 8
"""Above this many cells their smallest and largest are printed in their place."""
SAME_SCORES = 1e-3
"""How far, relative to the largest score, the head on the features may be from the model's own scores."""
SAME_SCORES_ROUNDED = 3e-2
"""The same for heads in 16 bits."""


@dataclass(frozen=True)
class LastLayerRetraining:
    """What was done to the model. `print` it.

    Args:
        model: the one that was given, with its new head.
        counts: rows of each cell that was balanced.
        inverse_penalty: the C that was chosen.
        trials: every C on the held-out half, the best first. The choice was made by these numbers, so that the first
            is too good; measure the model on rows that were not used here.
        worst_before: accuracy of the worst group of the same half under the old head.
        mean_before: mean accuracy of the groups there.
    """

    model: nn.Module
    counts: dict[str, int]
    inverse_penalty: float
    trials: tuple[Trial, ...]
    worst_before: float
    mean_before: float

    def __str__(self) -> str:
        best = self.trials[0]
        counts = ", ".join(f"{name}: {count:,}" for name, count in self.counts.items())
        if len(self.counts) > LISTED_CELLS:
            counts = f"{len(self.counts)} cells of {min(self.counts.values()):,} to {max(self.counts.values()):,}"
        tried = [trial.inverse_penalty for trial in self.trials]
        at_edge = len(tried) > 1 and best.inverse_penalty in (min(tried), max(tried))
        edge = ", at the edge of what was tried" if at_edge else ""
        return (
            f"Last layer fitted anew on balanced rows ({counts}), C = {self.inverse_penalty:g}{edge}. On the half "
            f"that chose C, worst group {decimals(self.worst_before)} -> {decimals(best.worst)}, mean of the groups "
            f"{decimals(self.mean_before)} -> {decimals(best.mean)}. Measure the model on other rows: these chose C."
        )


def last_layer_retraining(
    model: nn.Module,
    dataset: Any,
    group_column: str | Sequence[str],
    *,
    train_dataset: Any = None,
    penalty: Penalty | None = None,
    inverse_penalties: Sequence[float] = INVERSE_PENALTIES,
    subsamples: int = SUBSAMPLES,
    label_column: str | None = None,
    seed: int = 0,
    **options: Any,
) -> LastLayerRetraining:
    """Deep feature reweighting: fit the head of a trained classifier on held-out rows, all groups alike (in place).

        result = last_layer_retraining(model, validation, "place", train_dataset=train, processing_class=tokenizer)
        print(result)
        model.save_pretrained("robust")          # an ordinary model

    The network runs once over `dataset`. Its last features are standardised, and logistic regressions on balanced
    subsamples are averaged. C is chosen on a held-out half by the worst group's accuracy; the head is then fitted on
    both. Standardisation is multiplied into the weights (Kirichenko et al. 2023).

    Args:
        model: a classifier whose head is one `nn.Linear` with an output per class.
        dataset: rows with labels and groups on which the model was *not* trained. It has fitted its training rows, so
            that their features show a shortcut as harmless. Whether that is so cannot be seen from the model.
        group_column: a name, or several to cross. Balanced are the classes within the groups (so that a group of one
            class is one cell); C is judged by the groups.
        train_dataset: what the model was trained on, to warn of rows that are in both; None: not checked.
        penalty: "l1" or "l2"; None for the paper's "l1" with two classes, and "l2" with more, where scikit-learn takes
            far longer for l1.
        inverse_penalties: values of scikit-learn's C to choose from; a single one is taken as it is.
        subsamples: balanced draws that are averaged.
        label_column: None for the first of labels, label, label_ids.
        seed: of halves and draws.
        **options: see `hf_cgd.discovery.example_features`.

    Raises:
        ValueError: another kind of head, a head whose weights are used elsewhere, labels or groups that do not fit,
            a class without rows, or a group with a single row.
    """
    columns = [group_column] if isinstance(group_column, str) else list(group_column)
    if subsamples < 1 or not inverse_penalties or min(inverse_penalties) <= 0:
        raise ValueError(
            f"Expected subsamples >= 1 and inverse_penalties > 0, got {subsamples} and {list(inverse_penalties)}."
        )
    require_columns(dataset, columns, "group_column", "dataset", "Name the column of the groups.")
    head = linear_head(model)
    label, _ = label_column_of(dataset, label_column)
    read = read_columns(dataset, columns)
    groups = GroupInfo.from_columns(read)
    group_ids = groups.encode_columns(read)
    if train_dataset is not None:
        _warn_of_shared_rows(model, dataset, train_dataset, [label, *columns])
    seen = example_features(model, dataset, label_column=label, not_inputs=columns, **options)
    _require_own_scores(head, seen)
    present = np.unique(seen.labels)
    if len(present) < len(head.weight):
        lacking = [name for number, name in enumerate(seen.class_names) if number not in present]
        raise ValueError(f"The head has {len(head.weight)} classes, but no row of the dataset is of {lacking}.")
    keys, cells = crossed([seen.labels, group_ids])
    names = [
        groups.names[b] if len(keys) == len(groups) else f"{seen.class_names[a]}, {groups.names[b]}" for a, b in keys
    ]
    counts = dict(zip(names, np.bincount(cells).tolist(), strict=True))
    _look_at_sizes(counts, seen, cells)
    fit: dict[str, Any] = {
        "penalty": penalty or ("l1" if len(present) == 2 else "l2"),
        "subsamples": subsamples,
        "intercept": head.bias is not None,
        "seed": seed,
    }
    half = halves(cells, seed)
    trials = choose_inverse_penalty(
        seen.features, seen.labels, cells, group_ids, half, values=inverse_penalties, **fit
    )
    chosen = trials[0].inverse_penalty
    before = worst_and_mean(seen.predictions[~half] == seen.labels[~half], group_ids[~half])
    put_into_head(head, balanced_regression(seen.features, seen.labels, cells, inverse_penalty=chosen, **fit))
    return LastLayerRetraining(model, counts, chosen, tuple(trials), *before)


def linear_head(model: nn.Module) -> nn.Linear:
    """The `nn.Linear` that gives the scores of a model.

    Raises:
        ValueError: it has none, or another layer gives them, or its weights are used elsewhere.
    """
    try:
        heads = classification_heads(model, num_outputs_of(model))
    except ValueError as error:
        raise ValueError(f"Last-layer retraining needs a head. {error}") from error
    found = [type(head).__name__ for head in heads]
    if len(heads) != 1 or not isinstance(heads[0], nn.Linear):
        raise ValueError(
            f"Last-layer retraining fits a head that is one linear layer, but {type(model).__name__} ends in "
            f"{' and '.join(found)}. Merge adapters first (merge_and_unload); for another head, train the model with "
            "gradient_layers='head' in a GroupRobustTrainer, all other parameters frozen."
        )
    head = heads[0]
    users = [m for m in model.modules() for p in m.parameters(recurse=False) if p is head.weight]
    if len(users) > 1:
        raise ValueError(
            f"The weights of the head of {type(model).__name__} are tied to those of another layer, which a new head "
            "would change as well. Untie them (config.tie_word_embeddings=False) first."
        )
    return head


def put_into_head(head: nn.Linear, scores: LinearMap) -> None:
    """Give a head these weights, in its own precision and place."""
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(scores.weight))
        if head.bias is not None:
            head.bias.copy_(torch.from_numpy(scores.bias))


def _require_own_scores(head: nn.Linear, seen: ExampleFeatures) -> None:
    """Raise a ValueError unless the head, on the features, gives the model's own scores."""
    weight = head.weight.detach().double().cpu().numpy()
    if weight.shape != (seen.logits.shape[1], seen.features.shape[1]):
        raise ValueError(
            f"Expected the head's weight to be whole, {(seen.logits.shape[1], seen.features.shape[1])}, got "
            f"{weight.shape}. Load the model without sharding or quantisation."
        )
    bias = 0.0 if head.bias is None else head.bias.detach().double().cpu().numpy()
    error = float(np.abs(seen.features @ weight.T + bias - seen.logits).max())
    allowed = SAME_SCORES if head.weight.dtype in (torch.float32, torch.float64) else SAME_SCORES_ROUNDED
    if not error <= allowed * (1 + float(np.abs(seen.logits).max())):
        raise ValueError(
            f"The scores are not a linear function of the head's input (they differ by {error:.3g}): "
            f"{type(head).__name__} or what follows it does more. Last-layer retraining needs a plain linear head."
        )


def _look_at_sizes(counts: dict[str, int], seen: ExampleFeatures, cells: np.ndarray) -> None:
    """Raise a ValueError for cells that cannot be halved, and warn of small ones."""
    single = [name for name, count in counts.items() if count < 2]
    if single:
        raise ValueError(
            f"Every group needs two rows in each of its classes, one for each half, but these have one: {single[:20]}."
            " Leave such rows out."
        )
    least = min(counts, key=lambda name: counts[name])
    if counts[least] < FEW_ROWS:
        warnings.warn(
            f"Every balanced draw holds {counts[least]} rows of each group, as many as {least!r} has, for "
            f"{seen.features.shape[1]} features: the new head is hardly determined, and C is chosen by half of them.",
            GroupRobustWarning,
            stacklevel=3,
        )


def _warn_of_shared_rows(model: nn.Module, dataset: Any, train_dataset: Any, not_inputs: Sequence[str]) -> None:
    found = shared_rows(dataset, train_dataset, list(forward_parameters(model)), not_inputs)
    if found is None:
        warnings.warn(
            "train_dataset and the dataset have no input column in common, so that it is not known whether the model "
            "was trained on rows that its head is fitted on.",
            GroupRobustWarning,
            stacklevel=3,
        )
    elif found:
        warnings.warn(
            f"{len(found):,} of {len(dataset):,} rows are among those the model was trained on. It has fitted them, "
            "so that a shortcut looks harmless there: use held-out rows.",
            GroupRobustWarning,
            stacklevel=3,
        )
