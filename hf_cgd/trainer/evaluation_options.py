"""Options of the host library that have another effect on evaluations than their user may expect."""

import warnings

from transformers import TrainingArguments

from hf_cgd.monitors import GroupRobustWarning


def require_no_generation(args: TrainingArguments) -> None:
    """Raise a ValueError for evaluations that would generate texts: groups are measured by labels that are given."""
    if getattr(args, "predict_with_generate", False):
        raise ValueError(
            "predict_with_generate=True: evaluations do not generate texts here, since groups are measured by the "
            "losses of their labels. Set it to False, generate with the trained model afterwards (model.generate), "
            "and give one score for each text to hf_cgd.group_metrics."
        )


def warn_of_no_evaluation(args: TrainingArguments) -> None:
    """Warn where the best model is asked for and no model is evaluated."""
    if args.load_best_model_at_end and args.eval_strategy == "no":
        warnings.warn(
            "load_best_model_at_end=True has no effect under eval_strategy='no', which evaluates no model: the last "
            "one is kept. Set eval_strategy and save_strategy to 'steps' or 'epoch'.",
            GroupRobustWarning,
            stacklevel=4,
        )
