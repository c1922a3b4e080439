"""What users read of a run: weights, interactions, the mixture, the table of groups, a diagnosis."""

from typing import TYPE_CHECKING, cast

from torch import Tensor

from hf_cgd.data.groups import GroupInfo
from hf_cgd.metrics import GroupReport
from hf_cgd.metrics.diagnosis import GroupDiagnosis
from hf_cgd.trainer.diagnosis import STEPS, diagnose
from hf_cgd.trainer.publishing import PublishingTrainer
from hf_cgd.trainer.search import require_model

if TYPE_CHECKING:
    from hf_cgd.trainer.trainer import GroupRobustTrainer


class OutcomesTrainer(PublishingTrainer):
    """A `Trainer` that tells what became of its groups."""

    groups: GroupInfo | None
    """The training groups; None where nothing is trained."""

    @property
    def group_weights(self) -> Tensor | None:
        """Current group weights [K], float64, summing to 1, in the order of `groups`; None under ERM."""
        return self._weights()

    @property
    def group_interactions(self) -> Tensor | None:
        """Mean cosines [K, K] between the groups' gradients over this run, NaN for two groups that never met.

        None for objectives without gradients, and for more than 64 groups (see `GroupInteractions`).
        """
        loss = self.robust_loss
        return None if loss is None or loss.interactions is None else loss.interactions.cosines

    def mixture(self) -> dict[str, float]:
        """Mean weight of each group over the optimizer steps so far, by name; they sum to 1.

        As in DoReMi these are the proportions to draw the groups' examples in for another, larger run: give them to
        `datasets.interleave_datasets(probabilities=...)`. Weights on group means and draws in their proportion have
        the same expected loss. Raises a ValueError for an objective without group weights.
        """
        require_model(self.model)
        mean = None if self.robust_loss is None else self.robust_loss.mean_alpha
        if self.groups is None or mean is None:
            raise ValueError(
                f"mixture() needs group weights: objective={self.group_objective.name!r} has none, or there are no "
                "training groups. Use 'group_dro' or 'cgd' with a group_column."
            )
        return dict(zip(self.groups.names, (mean / mean.sum()).tolist(), strict=True))

    def group_report(self, metric_key_prefix: str = "eval") -> GroupReport:
        """The table of groups: training count, weight, and how each fares on the evaluation set.

        Evaluates the model first if it has not been since it was last changed. `print` it, or use its `to_dict` and
        `to_markdown`. With several evaluation sets, `metric_key_prefix` is "eval_<name>".

        Raises:
            ValueError: no metrics have that prefix.
        """
        require_model(self.model)
        is_evaluation = self.eval_dataset is not None and metric_key_prefix.split("_")[0] == "eval"
        if is_evaluation and not self.group_evaluation.has(metric_key_prefix):
            self.evaluate()
        return self._report_of(metric_key_prefix)

    def diagnose_groups(self, steps: int = STEPS) -> GroupDiagnosis:
        """Losses, noise and agreement of the groups in so many training steps that change nothing; `print` it.

        Call it after a short run: the numbers are those of the model as it is, with batches drawn as in training and
        gradients over `gradient_layers`. Raises a ValueError without training groups, and with sharded parameters.
        """
        return diagnose(cast("GroupRobustTrainer", self), steps)
