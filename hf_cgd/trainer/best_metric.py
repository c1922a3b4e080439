"""The metric that chooses the best model: which ones there will be, and whether higher or lower values are better."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainingArguments

from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.metrics.custom_metrics import GroupMetric, direction_of, names_of
from hf_cgd.metrics.group_metrics import is_group_metric, lower_is_better, metric_names, tells_direction
from hf_cgd.metrics.token_metrics import OF_ANSWERS, OF_LANGUAGE, token_metric_names
from hf_cgd.models.example_losses import REGRESSION
from hf_cgd.models.heads import QuestionAnsweringHead, head_of
from hf_cgd.models.outputs import declared_problem_type, num_outputs_of
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.trainer.config import GroupOptions


def set_direction(args: TrainingArguments, wanted: str, own: Mapping[str, GroupMetric]) -> None:
    """Set `greater_is_better` for a metric whose direction is known here, and not by the last letters of its name.

    Args:
        args: those of the Trainer.
        wanted: the metric.
        own: the user's metrics, by name.
    """
    direction = direction_of(wanted, own)
    if direction is not None:
        args.greater_is_better = direction
    elif not isinstance(args, GroupOptions) and is_group_metric(wanted):
        # The parent goes by the last letters of the name, which may be those of a group, and knows no "mse".
        args.greater_is_better = not lower_is_better(wanted)


def warn_of_direction(args: TrainingArguments, wanted: str) -> None:
    """Warn where the direction of `metric_for_best_model` is a guess, or is not what its name says."""
    greater = args.greater_is_better
    if getattr(args, "direction_is_a_guess", False):
        warnings.warn(
            f"Nothing says whether higher or lower values of metric_for_best_model={wanted!r} are better; higher "
            "ones are taken to be, so that of a cost the worst model is kept. Say it: greater_is_better=True or "
            "False.",
            GroupRobustWarning,
            stacklevel=4,
        )
    elif greater is not None and tells_direction(wanted) and greater is lower_is_better(wanted):
        warnings.warn(
            f"{'Higher' if greater else 'Lower'} values of metric_for_best_model={wanted!r} are taken to be "
            f"better (greater_is_better={greater}), although its name says the opposite. If that is a mistake, "
            "the worst model is kept.",
            GroupRobustWarning,
            stacklevel=4,
        )


def names_of_metrics(
    sets: Mapping[str, Any],
    evaluation: EvaluationGroups,
    network: nn.Module,
    own: Mapping[str, GroupMetric],
    may_be_binary: bool,
) -> dict[str, list[str]]:
    """The metrics that evaluations of a network will give, by evaluation set.

    Args:
        sets: the evaluation sets, by name.
        evaluation: the groups that are reported.
        network: tells what is measured.
        own: the user's metrics, by name.
        may_be_binary: whether one output may stand for two classes.
    """
    problem, head = declared_problem_type(network), head_of(network)
    if problem is None and num_outputs_of(network) == 1 and not may_be_binary:
        problem = REGRESSION

    def names_for(groups: Sequence[str]) -> list[str]:
        if head.of_tokens:
            measures = OF_ANSWERS if isinstance(head, QuestionAnsweringHead) else OF_LANGUAGE
            return token_metric_names(measures, groups)
        return metric_names(problem, groups)

    of_own = names_of(own, evaluation.names)
    return {
        name: [*names_for(evaluation.names if evaluation.covers(data) else ()), *of_own] for name, data in sets.items()
    }


def hint_at_groups(sets: Mapping[str, Any], evaluation: EvaluationGroups) -> str:
    """Why there are no metrics of groups; "" where each evaluation set has some."""
    if not evaluation.columns:
        return "There are no metrics of groups without group_column."
    bare = [name for name, data in sets.items() if not evaluation.covers(data)]
    if not bare:
        return ""
    where = f"the evaluation set(s) {bare}" if bare != [""] else "the evaluation dataset"
    return f"There are no metrics of groups for {where}, without the column(s) {list(evaluation.columns)}."
