"""What a network answers to an example: one value, or one for each of its tokens. One class for each kind of head."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.example_losses import NO_ANSWER
from hf_cgd.models.heads.token_losses import token_losses
from hf_cgd.models.outputs import logits_of

TokenReduction = Literal["mean", "sum"]
TOKEN_REDUCTIONS: tuple[TokenReduction, ...] = get_args(TokenReduction)


@dataclass(frozen=True)
class LossOptions:
    """What the loss of an example depends on besides the network.

    Attributes:
        label_smoothing: in [0, 1), for cross-entropy; 0 for none.
        token_reduction: whether an example's loss is the mean or the sum of its tokens' losses; for heads of tokens.
    """

    label_smoothing: float = 0.0
    token_reduction: TokenReduction = "mean"


class Head(ABC):
    """How one loss for each example is made of what a network returns and of its labels.

    Attributes:
        name: the problem type that messages and files call it by.
        of_tokens: whether labels belong to tokens (or positions), so that an example has several.
        predicts_vocabulary: whether scores are as wide as a vocabulary, so that they are not to be collected.
    """

    name: ClassVar[str] = ""
    of_tokens: ClassVar[bool] = False
    predicts_vocabulary: ClassVar[bool] = False

    def labels_in(self, inputs: Mapping[str, Any], names: Sequence[str]) -> Tensor | None:
        """The labels of a batch, [B, ...], among what it has under these names; None where it has none."""
        return inputs.get(self.label_names(names)[0])

    def label_names(self, names: Sequence[str]) -> list[str]:
        """Of the `Trainer`'s names for labels those that `labels_in` reads: "labels", or else the first."""
        return ["labels"] if "labels" in names else list(names[:1])

    def joined(self, labels: Any, names: Sequence[str]) -> Any:
        """What `labels_in` gives, out of labels as the `Trainer`'s evaluation hands them on, in order of `names`."""
        if not isinstance(labels, (tuple, list)):
            return labels
        # A prediction_step of one's own may give fewer than there are names.
        return labels[names.index(self.label_names(names)[0]) if len(labels) == len(names) else 0]

    def completed(self, inputs: dict[str, Any], labels: Tensor, network: nn.Module) -> dict[str, Any]:
        """The inputs without labels, with what the network would have made of labels."""
        return inputs

    def scores_of(self, outputs: Any, after_loss: bool = False) -> Tensor:
        """The scores in what a network returned, [B, ...]; see `hf_cgd.models.outputs.logits_of`."""
        return logits_of(outputs, after_loss)

    @abstractmethod
    def losses(self, scores: Tensor, labels: Tensor, network: nn.Module, options: LossOptions) -> Tensor:
        """Loss of each example, [B], in at least float32; 0 for one without a label.

        Args:
            scores: of `scores_of`.
            labels: of `labels_in`.
            network: tells by its config what labels mean, where that is open.
            options: of the run.
        """

    @abstractmethod
    def predictions(self, scores: Tensor, labels: Tensor, network: nn.Module) -> Tensor:
        """What the network answers, [B] or [B, ...]; `NO_ANSWER` where scores are NaN."""

    @abstractmethod
    def labelled(self, labels: Tensor) -> Tensor:
        """Which examples [B] have a label; others count in no mean."""

    def all_labelled(self, labels: Tensor) -> bool:
        """Whether all examples are known to have one; False where it is not known without a wait for a device."""
        return False

    def num_tokens(self, labels: Tensor) -> Tensor:
        """How many tokens of each example [B] have a label; 1 or 0 where labels do not belong to tokens."""
        return self.labelled(labels).long()

    def aligned(self, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
        """Labels in the form of the predictions, each beside what was to predict it."""
        return labels.reshape(predictions.shape)

    def mean(self, losses: Tensor, labels: Tensor, by_tokens: bool = True) -> Tensor:
        """The mean of losses [B] over the examples with a label; NaN where there are none, as in the `Trainer`.

        Args:
            losses: [B].
            labels: of `labels_in`.
            by_tokens: whether an example counts as often as it has tokens with a label, so that the mean of means over
                tokens is the mean over all tokens.
        """
        if self.of_tokens and by_tokens:
            counts = self.num_tokens(labels).to(losses)
            return (losses * counts).sum() / counts.sum()
        labelled = self.labelled(labels)
        return losses.mean() if bool(labelled.all()) else losses[labelled].mean()

    def num_outputs(self, network: nn.Module) -> int | None:
        """Width of the scores, None where it is not known."""
        return None


class TokenHead(Head):
    """A head with one answer for each token: the targets are the labels, in the same place."""

    of_tokens = True
    missing_labels: ClassVar[str] = "Have the collator make them."
    """What to do where a batch has no labels, a sentence."""

    def targets(self, labels: Tensor) -> Tensor:
        """What the scores in each place are to predict, [B, L]; `IGNORED` where nothing is."""
        return labels

    def losses(self, scores: Tensor, labels: Tensor, network: nn.Module, options: LossOptions) -> Tensor:
        """See `Head.losses`: the mean (or sum) of the cross-entropies of the tokens that have a label."""
        return self.reduced(self.token_losses(scores, labels, options.label_smoothing), labels, options)

    def token_losses(self, scores: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of each token [B, L], 0 for one without a label.

        Raises:
            ValueError: not as many labels as scores.
        """
        targets = self.targets(labels)
        if scores.shape[:-1] != targets.shape:
            raise ValueError(
                f"Expected one label for each of the network's scores {tuple(scores.shape[:-1])} (rows, tokens), got "
                f"labels {tuple(labels.shape)}. Have the collator pad labels like the inputs, by -100."
            )
        return token_losses(scores, targets, label_smoothing)

    def reduced(self, losses: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
        """Losses of examples [B] out of those of their tokens [B, L]."""
        sums = losses.sum(dim=1)
        return sums if options.token_reduction == "sum" else sums / self.num_tokens(labels).clamp_min(1)

    def predictions(self, scores: Tensor, labels: Tensor, network: nn.Module) -> Tensor:
        """The likeliest class (or word) in each place, [B, L]."""
        broken = scores.amax(dim=-1).isnan()
        return scores.argmax(dim=-1).masked_fill(broken, NO_ANSWER)

    def labelled(self, labels: Tensor) -> Tensor:
        """See `Head.labelled`: those with a label on any token."""
        return self.num_tokens(labels) > 0

    def num_tokens(self, labels: Tensor) -> Tensor:
        """See `Head.num_tokens`."""
        return (self.targets(labels) != IGNORED).sum(dim=1)

    def aligned(self, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
        """See `Head.aligned`; -100 where nothing is to be predicted."""
        return self.targets(torch.from_numpy(labels)).numpy()

    def num_right(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """How many tokens of each example [B] are predicted right, among those with a label."""
        targets = self.targets(labels)
        return ((predictions == targets) & (targets != IGNORED)).sum(dim=1)

    def wrong_labels(self, labels: Tensor, num_outputs: int | None) -> Tensor:
        """Which labels [B, L] are none that the network can be trained to give."""
        wrong = (labels < 0) & (labels != IGNORED)
        return wrong if num_outputs is None else wrong | (labels >= num_outputs)


def vocabulary_of(network: nn.Module) -> int | None:
    """Number of words that a language model gives scores to, None where its config does not say."""
    config = getattr(network, "config", None)
    get_text_config = getattr(config, "get_text_config", None)
    own = getattr(get_text_config(decoder=True) if callable(get_text_config) else config, "vocab_size", None)
    return own if isinstance(own, int) else None
