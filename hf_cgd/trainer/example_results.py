"""What evaluation keeps of each example, and how it is collected beside the Trainer's loop."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EvalPrediction

from hf_cgd.data.training_groups import IGNORED
from hf_cgd.models.example_losses import NO_ANSWER
from hf_cgd.monitors import GroupRobustWarning

ROUNDED = 1e-3
"""How far a metric that a user's function returns may be from ours of that name and still be the same, rounded."""


class ExampleResults(NamedTuple):
    """What evaluation keeps of each example: tensors of a batch, or arrays of all examples.

    Of models of tokens a few numbers are kept of each example in place of scores, which are as wide as a vocabulary:
    the number of tokens with a label, the sum of their losses (without label smoothing), and how many are right.
    """

    labels: Any
    group_ids: Any
    losses: Any
    predictions: Any
    token_counts: Any = None
    token_losses: Any = None
    tokens_right: Any = None

    def packed(self) -> tuple[Any, ...]:
        """What there is, without what is None."""
        return tuple(part for part in self if part is not None)

    @property
    def labelled(self) -> np.ndarray:
        """Which examples [N] have a label; -100 stands for none among classes."""
        if self.token_counts is not None:
            return self.token_counts > 0
        if self.labels.ndim > 1 or not np.issubdtype(self.predictions.dtype, np.integer):
            return np.ones(len(self.labels), dtype=bool)
        return self.labels != IGNORED

    def as_binary(self) -> "ExampleResults":
        """Single scores of examples with integer labels 0 and 1 as the classes that they stand for."""
        labels, scores = self.labels, self.predictions
        given = labels[labels != IGNORED] if np.issubdtype(labels.dtype, np.integer) else np.array([0.5])
        if (
            labels.ndim > 1
            or scores.ndim > 1
            or np.issubdtype(scores.dtype, np.integer)
            or not np.isin(given, (0, 1)).all()
        ):
            return self
        return self._replace(predictions=np.where(np.isnan(scores), NO_ANSWER, scores > 0).astype(np.int64))


class CollectedResults:
    """The results of an evaluation, batch by batch.

    They do not go through the Trainer's loop, which copies all that it has with each batch.

    Args:
        stride: batches after which what is on a device goes to the host; None: at the end.
        expected: so many examples are expected; 0: it is not known.
    """

    def __init__(self, stride: int | None = None, expected: int = 0) -> None:
        self._stride, self._expected = stride, expected
        self._num_batches = 0
        self._rows: list[_GrowingRows] = []
        self._on_host: list[_GrowingRows] = []
        self._arrays: ExampleResults | None = None
        self._is_taken = False

    def add(self, results: Sequence[Tensor]) -> None:
        """Add those of a batch (see `ExampleResults.packed`)."""
        self._add(self._rows, results)
        self._num_batches += 1
        if self._stride is not None and self._num_batches % self._stride == 0:
            self._move()

    def arrays(self) -> ExampleResults | None:
        """Those of all batches as arrays on the host; None where no batch had any."""
        self._move()
        if self._on_host:
            self._arrays = ExampleResults(*(_array(rows.tensor) for rows in self._on_host))
            self._on_host = []
        return self._arrays

    def take(self) -> ExampleResults | None:
        """The same once: None afterwards."""
        is_taken, self._is_taken = self._is_taken, True
        return None if is_taken else self.arrays()

    def _move(self) -> None:
        if self._rows:
            self._add(self._on_host, [rows.tensor.cpu() for rows in self._rows])
            self._rows = []

    def _add(self, known: list["_GrowingRows"], results: Sequence[Tensor]) -> None:
        if not known:
            known.extend(_GrowingRows(part, self._expected) for part in results)
            return
        for rows, part in zip(known, results, strict=True):
            rows.add(part)


class _GrowingRows:
    """Rows of a tensor that grows, in one piece of memory.

    Small tensors that were kept until the end would lie between the ones that the loop replaces by longer ones with
    each batch: memory that is given back could then not be used for those.

    Args:
        first: rows.
        expected: rows to make room for on the host, where memory is not taken before it is used.
    """

    def __init__(self, first: Tensor, expected: int) -> None:
        self._memory, self._size = first, len(first)
        self._expected = expected if first.device.type == "cpu" else 0

    @property
    def tensor(self) -> Tensor:
        """All rows."""
        return self._memory[: self._size]

    def add(self, part: Tensor) -> None:
        """Add rows. Of rows of other lengths, [B, L], the shorter ones are filled up by -100.

        Raises:
            ValueError: tensors of other shapes.
        """
        memory, part = _of_one_width(self._memory, part)
        if memory.shape[1:] != part.shape[1:]:
            raise ValueError(
                f"Evaluation keeps results of shape {tuple(memory.shape[1:])} for each example, but a batch has "
                f"{tuple(part.shape[1:])}. All batches must have labels and outputs of one kind."
            )
        start, end, kind = self._size, self._size + len(part), torch.promote_types(memory.dtype, part.dtype)
        if end > len(memory) or kind != memory.dtype:
            before, room = memory, max(end, 2 * start, self._expected)
            memory = before.new_empty((room, *before.shape[1:]), dtype=kind)
            memory[:start] = before[:start]
        memory[start:end] = part
        self._memory, self._size = memory, end


class EvaluationMetrics:
    """The `compute_metrics` of a `GroupRobustTrainer`: group metrics, and the user's own.

    Args:
        metrics_of: group metrics of the collected results.
        take_results: what has been collected in the loop that calls; None for nothing, or where it has been taken.
        user_metrics: the user's `compute_metrics` or None. Where it returns a name of ours, its value is kept, and a
            warning says so once if ours is another.
    """

    def __init__(
        self,
        metrics_of: Callable[[ExampleResults], dict[str, float]],
        take_results: Callable[[], ExampleResults | None],
        user_metrics: Callable[..., dict[str, Any]] | None,
    ) -> None:
        self.metrics_of = metrics_of
        self.take_results = take_results
        self.user_metrics = user_metrics
        self._warned = False

    def __call__(self, prediction: EvalPrediction, compute_result: bool | None = None) -> dict[str, Any]:
        """All metrics; `compute_result` is given under `batch_eval_metrics`, where batches come one by one."""
        results = None if compute_result is False else self.take_results()
        own: dict[str, Any] = {}
        if self.user_metrics is not None:
            extra = {} if compute_result is None else {"compute_result": compute_result}
            own = self.user_metrics(prediction, **extra) or {}
        if results is None:
            return own
        ours = self.metrics_of(results)
        self._warn_of_others(own, ours)
        return {**ours, **own}

    def _warn_of_others(self, own: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        """Warn once of a name of ours under which the user's function returns another value."""
        others = [name for name in own if name in ours and not _is_same(own[name], ours[name])]
        if not others or self._warned:
            return
        self._warned = True
        found = ", ".join(f"{name}={own[name]!r} (ours: {ours[name]:.4g})" for name in others)
        warnings.warn(
            f"compute_metrics returns {found}. Its values are kept under these names, also in the report and for the "
            "choice of the best model, beside group metrics that are ours. If they measure something else, or in "
            "other units (percent), return them under other names.",
            GroupRobustWarning,
            stacklevel=2,
        )


def _is_same(value: Any, other: float) -> bool:
    """Whether a user's value is ours, rounding apart."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    both_undefined = math.isnan(number) and math.isnan(other)
    return both_undefined or math.isclose(number, other, rel_tol=ROUNDED, abs_tol=ROUNDED)


def _array(values: Tensor) -> np.ndarray:
    # numpy knows no bfloat16.
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _of_one_width(*parts: Tensor) -> list[Tensor]:
    if any(part.ndim != 2 for part in parts) or len({part.shape[1] for part in parts}) == 1:
        return list(parts)
    width = max(part.shape[1] for part in parts)
    return [F.pad(part, (0, width - part.shape[1]), value=IGNORED) for part in parts]
