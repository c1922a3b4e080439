"""Batches in which groups are drawn in proportion to the group weights of a run in progress.

A loader reads ahead, so the present weights are never those of the batch that is drawn. The batches of a step are
drawn with the weights of d steps earlier, where d (`steps_ahead`) is the least number for which these are always
known: 1 without workers. It follows from the loader's options alone, not from who is faster, so a run can be repeated
and resumed, and processes agree.

With q those weights, the plain mean over the drawn examples is an unbiased estimate of sum_i q_i l_i, where l_i is the
mean loss of group i over the training set: what weights in the loss would form, with weights that are d steps old.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hf_cgd.data.sampling import GroupSampler


def steps_ahead(micro_batches: int, num_workers: int, prefetch_factor: int | None) -> int:
    """How many optimizer steps before its own the batches of a step may be drawn, at least 1.

    Args:
        micro_batches: of a step, on one process.
        num_workers: of the loader; each has `prefetch_factor` batches in the making (None: 2, as in torch).
        prefetch_factor: see there. The loader of accelerate reads one batch more, to know the last one.
    """
    in_flight = 0 if num_workers == 0 else num_workers * (2 if prefetch_factor is None else prefetch_factor)
    return 1 + in_flight // micro_batches


class DrawnGroups:
    """What drawing by weights has to remember: recent weights, and how often each group has been drawn.

    Args:
        num_groups: K.
        ahead: `steps_ahead`.
    """

    def __init__(self, num_groups: int, ahead: int = 1) -> None:
        self.num_groups = num_groups
        self.ahead = ahead
        self.follows = False
        """Whether a run is in progress whose steps `note` tells. Elsewhere the latest weights serve all draws."""
        self._weights: dict[int, Tensor] = {}
        self._drawn: dict[int, np.ndarray] = {}
        self.first_step = 0
        """Optimizer steps of the run before the epoch that is iterated next."""
        self._resumed_at: int | None = None
        """The step that a resumed run goes on from, up to which it draws only to pass over the rows."""

    def begin(self, alpha: Tensor, follows: bool = True) -> None:
        """A run begins with these weights [K], or is asked for batches before any (`follows=False`)."""
        self._weights, self._drawn, self.first_step, self._resumed_at = {0: alpha.detach()}, {}, 0, None
        self.follows = follows

    def note(self, step: int, alpha: Tensor) -> None:
        """The weights [K] after that many optimizer steps of the run, on any device."""
        self._weights[step] = alpha.detach()
        self._weights = {known: value for known, value in self._weights.items() if known >= step - self.ahead}
        self._drawn = {known: counts for known, counts in self._drawn.items() if known >= step}

    def proportions(self, step: int) -> np.ndarray:
        """What the groups are drawn by in optimizer step number `step` (from 0): [K], float64, summing to 1.

        Steps that a resumed run passes over may be older than all weights that are known: the oldest serve there.

        Raises:
            RuntimeError: the loader reads further ahead than was told.
        """
        latest = max(self._weights)
        wanted = max(step - self.ahead, min(self._weights)) if self.follows else latest
        if wanted not in self._weights:
            raise RuntimeError(
                f"group_sampling='weights': the loader asks for step {step} before step {wanted} is over (the weights "
                f"are known up to {latest}), so it reads further ahead than {self.ahead} step(s). Loaders of your own "
                "may hold no more batches than dataloader_num_workers x dataloader_prefetch_factor."
            )
        weights = self._weights[wanted].double().cpu().numpy()
        return weights / weights.sum()

    def drawn_before(self, step: int) -> np.ndarray:
        """How often each group was drawn before that step: integers [K]."""
        earlier = [known for known in self._drawn if known <= step]
        return self._drawn[max(earlier)] if earlier else np.zeros(self.num_groups, dtype=np.int64)

    def add(self, step: int, counts: np.ndarray) -> None:
        """The draws [K] of a step are made; made anew, where an epoch was cut short before the step was over."""
        if step + 1 != self._resumed_at:
            self._drawn[step + 1] = self.drawn_before(step) + counts

    def still(self) -> "DrawnGroups":
        """One of its own for draws beside the run, with the latest weights."""
        twin = DrawnGroups(self.num_groups, self.ahead)
        twin.begin(self._weights[max(self._weights)], follows=False)
        return twin

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a run needs that goes on after `step` completed steps, JSON-ready."""
        known = {number: alpha for number, alpha in self._weights.items() if number <= step}
        return {
            "step": step,
            "weights": {str(number): alpha.tolist() for number, alpha in known.items()},
            "drawn": self.drawn_before(step).tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any], order: list[int], like: Tensor) -> None:
        """Inverse of `state_dict`.

        Args:
            state: what was saved.
            order: of each group the place it had there.
            like: weights [K] of the type and on the device of this run's.
        """
        self._weights = {int(n): like.new_tensor([alpha[i] for i in order]) for n, alpha in state["weights"].items()}
        self._resumed_at = int(state["step"])
        self._drawn = {self._resumed_at: np.asarray(state["drawn"], dtype=np.int64)[order]}


class GroupWeightSampler(GroupSampler):
    """Groups are drawn in proportion to the weights, each group's examples in turn.

    A step of n examples over all micro-batches and processes has n q_i of group i up to one more or less, and exactly
    that in expectation (systematic sampling), in random order. Within a group every example is drawn before one is
    drawn again, over the whole run. All depends on the seed, the step and the weights alone. An epoch has as many
    batches as without this sampler.

    Args:
        group_ids, batch_size, seed, drop_last, processes, step_size: see `GroupSampler`.
        memory: weights and counts; shared with whoever moves the weights.
    """

    def __init__(
        self,
        group_ids: np.ndarray,
        batch_size: int,
        seed: int,
        drop_last: bool = False,
        *,
        processes: int = 1,
        step_size: int | None = None,
        memory: DrawnGroups,
    ) -> None:
        super().__init__(group_ids, batch_size, seed, drop_last, processes=processes, step_size=step_size)
        self.memory = memory
        self._rows = [np.flatnonzero(self.group_ids == group) for group in range(memory.num_groups)]
        self._shuffled: dict[int, tuple[int, np.ndarray]] = {}

    def set_first_step(self, step: int) -> None:
        """Tell how many optimizer steps of the run come before the epoch that is iterated next."""
        self.memory.first_step = step

    def __iter__(self) -> Iterator[int]:
        step = self.memory.first_step
        for start in range(0, self.length, self.step_size):
            yield from self._draw(step, min(self.step_size, self.length - start)).tolist()
            step += 1

    def _draw(self, step: int, size: int) -> np.ndarray:
        generator = np.random.default_rng([self.seed, step])
        places = (np.arange(size) + generator.random()) / size
        edges = self.memory.proportions(step).cumsum()
        # Rounding may leave the last edge below 1.
        counts = np.bincount(np.searchsorted(edges[:-1], places, side="right"), minlength=len(edges))
        before = self.memory.drawn_before(step)
        self.memory.add(step, counts)
        rows = [
            self._next_rows(int(group), int(before[group]), int(counts[group])) for group in np.flatnonzero(counts)
        ]
        return generator.permutation(np.concatenate(rows))

    def _next_rows(self, group: int, before: int, count: int) -> np.ndarray:
        """The next rows of a group, after `before` draws."""
        size = len(self._rows[group])
        draws = np.arange(before, before + count)
        return np.concatenate(
            [self._round(group, number)[draws[draws // size == number] % size] for number in np.unique(draws // size)]
        )

    def _round(self, group: int, number: int) -> np.ndarray:
        """The rows of a group in the order of its round `number`."""
        known = self._shuffled.get(group)
        if known is None or known[0] != number:
            generator = np.random.default_rng([self.seed, int(number), int(group), 1])
            known = self._shuffled[group] = (int(number), generator.permutation(self._rows[group]))
        return known[1]
