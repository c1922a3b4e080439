"""Who divides the loss of a micro-batch by the number of micro-batches of its step."""

from typing import Any

from torch import Tensor
from transformers import Trainer

HAS_SWITCH = hasattr(Trainer, "loss_is_scaled_for_ga")
"""Whether the Trainer can be told to divide (transformers 5.19 and later).

Before, it always divides unless the model normalises its loss itself, and never where there is a `compute_loss_func`.
"""


class AccumulatingTrainer(Trainer):
    """A step's loss is the mean over its micro-batches, whoever forms it."""

    _parent_accepts_loss_kwargs: bool
    _divides_here = False
    _in_step = False

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`."""
        self._in_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._in_step = False

    def _scale_as_the_parent(self, as_the_parent: bool) -> None:
        """Whether the loss is the parent's, which knows if it is normalised; a mean over the micro-batch if not."""
        self.model_accepts_loss_kwargs = as_the_parent and self._parent_accepts_loss_kwargs
        self._divides_here = not (HAS_SWITCH or as_the_parent or self.compute_loss_func is None)
        if HAS_SWITCH:
            self.loss_is_scaled_for_ga = type(self).loss_is_scaled_for_ga if as_the_parent else False

    def _share_of_step(self, loss: Tensor) -> Tensor:
        """The loss as `training_step` must get it."""
        return loss / self.current_gradient_accumulation_steps if self._divides_here and self._in_step else loss
