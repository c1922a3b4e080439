"""A short probe of a setting: what its groups look like after some steps with equal weights."""

from collections.abc import Sequence

import numpy as np
import torch

from hf_cgd.experiments.studies.cosines.data import StudyTask
from hf_cgd.experiments.studies.cosines.estimators import gram_of, split_self_products
from hf_cgd.experiments.studies.cosines.training import orders_of, places_of, statistics_of
from hf_cgd.experiments.studies.simple_settings import LEARNING_RATE
from hf_cgd.metrics.diagnosis import GroupDiagnosis, diagnosis_of
from hf_cgd.objectives import GroupStatistics


def probe(
    task: StudyTask,
    batch_size: int,
    warm_up: int,
    batches: int,
    names: Sequence[str] = (),
    learning_rate: float = LEARNING_RATE,
) -> list[GroupDiagnosis]:
    """What `GroupRobustTrainer.diagnose_groups` would say after `warm_up` steps of equal weights, for each seed.

    Args:
        task: what on.
        batch_size: of training and probe, balanced by group.
        warm_up: steps that are trained.
        batches: steps of the probe.
        names: of the K groups.
        learning_rate: of SGD.
    """
    data = task.splits["train"]
    seeds = len(data.group_ids)
    steps = warm_up + batches
    orders = np.stack([orders_of(own, batch_size, steps, seed) for seed, own in enumerate(data.group_ids)])
    layers = [layer[:, None] for layer in task.layers]
    picked = torch.arange(seeds)[:, None, None, None]
    found: list[list[GroupStatistics]] = [[] for _ in range(seeds)]
    sizes_of_groups = torch.from_numpy(np.bincount(data.group_ids[0])).double()
    for step in range(steps):
        rows, taken = places_of(orders[:, step], data.group_ids)
        own, sizes = statistics_of(layers, data.features[picked, rows], data.labels[picked, rows], taken)
        if step >= warm_up:
            grams, products = gram_of(own.gradients)[:, 0], split_self_products(own)[:, 0]
            counts = taken.sum(dim=(2, 3)).double()
            for seed, kept in enumerate(found):
                numbers = (own.losses[seed, 0].double(), counts[seed], sizes_of_groups, grams[seed].double(), names)
                kept.append(GroupStatistics(*numbers, products[seed].double()))
            continue
        parts = own.gradients.mean(dim=2).split(sizes, dim=-1)
        layers = [layer - learning_rate * part.view_as(layer) for layer, part in zip(layers, parts, strict=True)]
    return [diagnosis_of(kept) for kept in found]
