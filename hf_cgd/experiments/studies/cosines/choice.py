"""Which way of weighing the groups is best on a setting, beside what a short probe says of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hf_cgd.experiments.studies.cosines.data import StudyTask
from hf_cgd.experiments.studies.cosines.estimators import Method, consensus, gradient_average, paper, split_half
from hf_cgd.experiments.studies.cosines.probe import probe
from hf_cgd.experiments.studies.cosines.training import Outcome, orders_of, train
from hf_cgd.experiments.studies.simple_settings import SEARCH
from hf_cgd.metrics.diagnosis import GroupDiagnosis
from hf_cgd.metrics.tables import markdown, mean_and_deviation

EQUAL = "erm_uw"
METHODS = (
    Method("erm_uw, reference", None, by_size=True),
    Method(EQUAL, None),
    Method("group_dro", None, by_loss=True),
    Method("cgd", paper),
    Method("cgd, split halves", split_half),
    Method("cgd, consensus", consensus),
    Method("cgd, momentum .9", gradient_average(0.9), 0.9),
)
"""What is compared, on the same group-balanced batches. The first is ERM again, see `ERMUW`."""
WARM_UP, PROBED = 100, 50
"""Steps of equal weights before the probe, and steps of the probe."""


@dataclass(frozen=True)
class ChoiceResult:
    """What came of a setting.

    Attributes:
        task: the setting.
        counts: training examples of each group.
        probes: one for each seed.
        outcomes: of each method with each step size.
        choosing: how many seeds, the first ones, choose the step size; the others report.
    """

    task: StudyTask
    counts: tuple[int, ...]
    probes: Sequence[GroupDiagnosis]
    outcomes: Sequence[Outcome]
    choosing: int

    def chosen(self, method: str) -> Outcome:
        """With the step size whose worst validation group is right most often, mean over the choosing seeds."""
        own = [outcome for outcome in self.outcomes if outcome.method.name == method]
        return max(own, key=lambda outcome: outcome.validation_accuracy[: self.choosing].mean())

    def scores(self, method: str) -> np.ndarray:
        """Accuracy of the worst test group in per cent, on the reporting seeds."""
        return 100 * self.chosen(method).accuracy[self.choosing :]

    def probe(self, name: str) -> torch.Tensor:
        """A number of the probe, mean over the seeds."""
        return torch.stack([getattr(found, name) for found in self.probes]).nanmean(dim=0)


def choice_study(
    task: StudyTask,
    seeds: Sequence[int],
    steps: int,
    batch_size: int,
    names: Sequence[str] = (),
    balanced: bool = True,
    methods: Sequence[Method] = METHODS,
) -> ChoiceResult:
    """Probe a setting and train the methods on it; half of the seeds choose, the others report.

    Args:
        task: what on.
        seeds: those that it was drawn with, for the order of the examples as well.
        steps, batch_size: of the runs.
        names: of the groups.
        balanced: whether the runs' batches hold all groups equally often; those of the probe do in any case.
        methods: what is trained. One method's numbers do not depend on the others.
    """
    ids = task.splits["train"].group_ids
    orders = [orders_of(own, batch_size, steps, seed, balanced) for seed, own in zip(seeds, ids, strict=True)]
    probes = probe(task, batch_size, WARM_UP, PROBED, names)
    counts = tuple(np.bincount(ids[0]).tolist())
    return ChoiceResult(task, counts, probes, train(task, methods, SEARCH, np.stack(orders)), len(seeds) // 2)


def choice_table(results: Sequence[ChoiceResult]) -> str:
    """Accuracy of the worst test group in per cent, mean (standard deviation), with the chosen step size."""
    methods = list(dict.fromkeys(outcome.method for outcome in results[0].outcomes))
    rows = [["", *(method.name for method in methods)]]
    for result in results:
        row = [result.task.title]
        for method in methods:
            moves = method.estimate is not None or method.by_loss
            step = f", {result.chosen(method.name).step_size:g}" if moves else ""
            row.append(mean_and_deviation(result.scores(method.name), 1) + step)
        rows.append(row)
    return markdown(rows)


def gains_table(results: Sequence[ChoiceResult]) -> str:
    """Points of the worst test group beyond equal weights, seed by seed: mean (standard deviation)."""
    methods = list(dict.fromkeys(outcome.method.name for outcome in results[0].outcomes))
    others = [name for name in methods if name != EQUAL]
    rows = [["less erm_uw", *others]]
    for result in results:
        equal = result.scores(EQUAL)
        rows.append([result.task.title, *(mean_and_deviation(result.scores(name) - equal, 1) for name in others)])
    return markdown(rows)


def probe_table(results: Sequence[ChoiceResult]) -> str:
    """The numbers of the probes: a row for each group, with the mean weight of the group under CGD where that ran."""
    rows = [["", "group", "training examples", "loss", "signal", "agreement with the others", "mean weight, cgd .1"]]
    for result in results:
        cgd = next((o for o in result.outcomes if o.method.name == "cgd" and o.step_size == SEARCH[1]), None)
        losses, signal, agreement = (result.probe(name) for name in ("losses", "signal", "agreement"))
        names = result.probes[0].names or [str(place) for place in range(len(result.counts))]
        for place, name in enumerate(names):
            others = " / ".join(f"{value:+.2f}" for j, value in enumerate(agreement[place]) if j != place)
            numbers = [f"{losses[place]:.3f}", f"{signal[place]:.2f}", others]
            numbers.append("" if cgd is None else f"{cgd.weights[:, place].mean():.2f}")
            rows.append([result.task.title if not place else "", name, f"{result.counts[place]:,}", *numbers])
    return markdown(rows)
