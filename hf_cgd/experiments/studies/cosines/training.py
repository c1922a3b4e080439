"""Training of many runs at once: seeds, methods and step sizes side by side on the same batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hf_cgd.data.sampling import BalancedGroupSampler
from hf_cgd.experiments.studies.cosines.data import Split, StudyTask, with_ones
from hf_cgd.experiments.studies.cosines.estimators import Memory, Method, Statistics
from hf_cgd.experiments.studies.simple_settings import LEARNING_RATE
from hf_cgd.objectives.adaptive import MIN_WEIGHT_SHARE

FULL = 0
"""Batch size that stands for all training examples."""


def orders_of(group_ids: np.ndarray, batch_size: int, steps: int, seed: int, balanced: bool = True) -> np.ndarray:
    """The examples [steps, batch_size] of a seed's batches.

    They are those of `group_sampling="balanced"`, or all of them; without `balanced` ordinary ones, epoch after epoch
    in a new order.
    """
    random = np.random.default_rng(seed)
    if batch_size == FULL:
        return np.stack([random.permutation(len(group_ids)) for _ in range(steps)])
    if not balanced:
        epochs = -(-steps * batch_size // len(group_ids))
        order = np.concatenate([random.permutation(len(group_ids)) for _ in range(epochs)])
        return order[: steps * batch_size].reshape(steps, batch_size)
    sampler, drawn = BalancedGroupSampler(group_ids, batch_size, seed), list[int]()
    for epoch in range(-(-steps * batch_size // len(sampler))):
        sampler.set_epoch(epoch)
        drawn.extend(sampler)
    return np.array(drawn[: steps * batch_size]).reshape(steps, batch_size)


def places_of(orders: np.ndarray, group_ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """Deal batches [S, B] out to groups and, in turns, to their halves.

    Args:
        orders: [S, B] examples.
        group_ids: [S, N] of all examples.

    Returns:
        rows [S, K, 2, M] and, in that shape, whether a place is taken.
    """
    groups, seeds = np.take_along_axis(group_ids, orders, axis=1), np.arange(len(orders))[:, None]
    turn = np.zeros_like(orders)
    for group in range(group_ids.max() + 1):
        own = groups == group
        turn[own] = (own.cumsum(axis=1) - 1)[own]
    rows = np.zeros((len(orders), group_ids.max() + 1, 2, turn.max() // 2 + 1), dtype=np.int64)
    taken = np.zeros(rows.shape, dtype=bool)
    where = (seeds, groups, turn % 2, turn // 2)
    rows[where], taken[where] = orders, True
    return torch.from_numpy(rows), torch.from_numpy(taken)


def forward(layers: Sequence[Tensor], features: Tensor) -> list[Tensor]:
    """Inputs of each layer after the first, and the scores: [S, N, E, ...] of features [S, N, D].

    Args:
        layers: [S, E, in + 1, out] each.
        features: the same for all E runs of a seed.
    """
    seeds, runs, size, out = layers[0].shape
    outputs = (features @ layers[0].transpose(1, 2).reshape(seeds, size, runs * out)).unflatten(-1, (runs, out))
    inputs = []
    for layer in layers[1:]:
        inputs.append(with_ones(outputs.relu()))
        outputs = torch.einsum("sneh,seho->sneo", inputs[-1], layer)
    return [*inputs, outputs]


def statistics_of(
    layers: Sequence[Tensor], features: Tensor, labels: Tensor, taken: Tensor
) -> tuple[Statistics, list[int]]:
    """Statistics [S, E, ...] of a batch.

    Args:
        layers: [S, E, in + 1, out] each, one or two.
        features: [S, K, 2, M, D]; labels, taken: [S, K, 2, M].

    Returns:
        the statistics, whose P parameters are those of the layers in turn, and the sizes of the layers. A group
        without examples has zeros.
    """
    *hidden, scores = (value.unflatten(1, labels.shape[1:]) for value in forward(layers, features.flatten(1, 3)))
    sizes = taken.sum(dim=-1).to(features)
    filled = sizes.clamp_min(1)
    mask = taken[..., None].to(features)
    logs = scores.log_softmax(dim=-1)
    answers = labels[..., None, None]
    losses = -logs.gather(-1, answers.expand(*logs.shape[:-1], 1))[..., 0] * mask
    errors = (logs.exp() - torch.nn.functional.one_hot(labels, logs.shape[-1])[..., None, :]) * mask[..., None]
    norms = features.square().sum(dim=-1)[..., None]
    squares = 0.0
    gradients = []
    if hidden:
        (inputs,) = hidden
        gradients.append(torch.einsum("skamei,skameo->sekaio", inputs, errors))
        squares = squares + inputs.square().sum(dim=-1) * errors.square().sum(dim=-1)
        errors = torch.einsum("skameo,seio->skamei", errors, layers[1])[..., :-1] * (inputs[..., :-1] > 0)
    gradients.insert(0, torch.einsum("skami,skameo->sekaio", features, errors))
    squares = squares + norms * errors.square().sum(dim=-1)
    flat = [gradient.flatten(-2) / filled[:, None, :, :, None] for gradient in gradients]
    statistics = Statistics(
        losses.sum(dim=(2, 3)).transpose(1, 2) / sizes.sum(dim=-1).clamp_min(1)[:, None],
        torch.cat(flat, dim=-1),
        sizes[:, None].expand(-1, scores.shape[-2], -1, -1),
        squares.sum(dim=(2, 3)).transpose(1, 2),
    )
    return statistics, [part.shape[-1] for part in flat]


def of_runs(statistics: Statistics, runs: slice, parameters: slice) -> Statistics:
    """Those of some runs and of a gradient scope; the squared norms stay those of all parameters."""
    return Statistics(
        statistics.losses[:, runs],
        statistics.halves[:, runs, ..., parameters],
        statistics.sizes[:, runs],
        statistics.squares[:, runs],
    )


@dataclass(frozen=True)
class Outcome:
    """What became of a method with one step size.

    Attributes:
        weights: [S, K], mean over the steps; last_weights: [S, K], after them.
        validation, test: [S] worst group losses at the end; validation_accuracy, accuracy: [S] worst group accuracies
            on both.
        cross, own: estimated minus full-data cosines between different groups, and the estimated self term minus 1:
            [S] root mean squares and means over steps and groups. Only of methods with cosines.
    """

    method: Method
    step_size: float
    weights: np.ndarray
    last_weights: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    validation_accuracy: np.ndarray
    accuracy: np.ndarray
    cross_error: np.ndarray
    cross_bias: np.ndarray
    self_bias: np.ndarray


def next_weights(alpha: Tensor, exponents: Tensor, present: Tensor) -> Tensor:
    """The exponentiated step of `hf_cgd.functional.exponentiated_step` on a stack [..., K] of weights.

    `present` [..., K] tells who has examples: one or more.
    """
    floor = MIN_WEIGHT_SHARE / alpha.shape[-1]
    mass = (alpha * present).sum(dim=-1, keepdim=True)
    shares = torch.softmax((alpha.log() + exponents).masked_fill(~present, float("-inf")), dim=-1)
    weights = (mass * shares).clamp_min(floor) * present
    return torch.where(present, mass * weights / weights.sum(dim=-1, keepdim=True), alpha)


def train(
    task: StudyTask,
    methods: Sequence[Method],
    step_sizes: Sequence[float],
    orders: np.ndarray,
    *,
    learning_rate: float = LEARNING_RATE,
    weight_decay: float = 0.0,
) -> list[Outcome]:
    """Train every method with every step size on all S seeds, side by side.

    Args:
        task: what on.
        methods: how the weights move.
        step_sizes: of the weights; 0 leaves them equal, so that all estimators see the same path.
        orders: [S, T, B] examples of the T steps. Of methods with averages, only "gradient average" and those without
            any know what to do where a batch lacks a group.
        learning_rate, weight_decay: of SGD.

    Returns:
        for each method in turn, one outcome for each step size.
    """
    data = task.splits["train"]
    seeds, width = len(orders), len(step_sizes)
    layers = [layer[:, None].repeat(1, len(methods) * width, 1, 1) for layer in task.layers]
    groups = int(data.group_ids.max()) + 1
    alpha = torch.full((seeds, len(methods) * width, groups), 1 / groups, dtype=torch.float64)
    shares = torch.from_numpy(np.bincount(data.group_ids[0]) / data.group_ids.shape[1])
    for number, method in enumerate(methods):
        if method.by_size:
            alpha[:, number * width : (number + 1) * width] = shares
    rates = torch.tensor(step_sizes, dtype=torch.float64)[None, :, None]
    memories: list[Memory] = [{} for _ in methods]
    total = torch.zeros_like(alpha)
    places = [slice(number * width, (number + 1) * width) for number in range(len(methods))]
    every = np.broadcast_to(np.arange(data.group_ids.shape[1]), data.group_ids.shape)
    whole = places_of(every, data.group_ids)
    with_full = [number for number, method in enumerate(methods) if method.full]
    errors = torch.zeros(3, seeds, len(methods) * width, dtype=torch.float64)
    off = ~torch.eye(groups, dtype=torch.bool)

    def gathered(rows: Tensor, taken: Tensor, runs: slice) -> tuple[Statistics, list[int]]:
        picked = torch.arange(seeds)[:, None, None, None]
        own = [layer[:, runs] for layer in layers]
        return statistics_of(own, data.features[picked, rows], data.labels[picked, rows], taken)

    for step in range(orders.shape[1]):
        rows, taken = places_of(orders[:, step], data.group_ids)
        statistics, sizes = gathered(rows, taken, slice(None))
        present = taken.any(dim=(2, 3))[:, None]
        truth = {number: gathered(*whole, places[number])[0] for number in with_full}
        before = alpha
        moved = []
        true: Tensor | None = None
        for number, method in reversed(list(enumerate(methods))):
            scope = slice(sum(sizes[:-1]) if method.head else 0, None)
            seen = of_runs(truth.get(number, statistics), slice(None) if method.full else places[number], scope)
            if method.estimate is None:
                exponents = rates * seen.losses if method.by_loss else torch.zeros_like(alpha[:, places[number]])
            else:
                losses, cosines = method.estimate(seen, memories[number])
                scaled = losses.double().sqrt()
                cosines = cosines.double()
                exponents = rates * scaled * (cosines @ scaled[..., None])[..., 0]
                if method.full and true is None:
                    true = cosines
                if true is not None and not method.head:
                    difference = (cosines - true)[..., off]
                    errors[0, :, places[number]] += difference.square().mean(dim=-1)
                    errors[1, :, places[number]] += difference.mean(dim=-1)
                    own = cosines.diagonal(dim1=-2, dim2=-1)
                    errors[2, :, places[number]] += own.mean(dim=-1) - 1
            moved.append(next_weights(alpha[:, places[number]], exponents, present))
        alpha = torch.cat(moved[::-1], dim=1)
        used = alpha.clone()
        for number, method in enumerate(methods):
            if method.late:
                used[:, places[number]] = before[:, places[number]]
        total += used
        used = used * present
        used = used / used.sum(dim=-1, keepdim=True)
        gradient = torch.einsum("sekp,sek->sep", statistics.gradients, used.to(statistics.halves))
        parts = gradient.split(sizes, dim=-1)
        layers = [
            layer - learning_rate * (part.view_as(layer) + weight_decay * layer)
            for layer, part in zip(layers, parts, strict=True)
        ]
    errors /= orders.shape[1]
    means = total / orders.shape[1]
    validation, test = (scores_of(layers, task.splits[name]) for name in ("validation", "test"))
    outcomes = []
    for number, method in enumerate(methods):
        for place, step_size in enumerate(step_sizes):
            run = number * width + place
            scores = [validation[0], test[0], validation[1], test[1]]
            columns = [means[:, run], alpha[:, run], *(values[:, run] for values in scores)]
            columns += [errors[0, :, run].sqrt(), *errors[1:, :, run]]
            outcomes.append(Outcome(method, step_size, *(column.numpy() for column in columns)))
    return outcomes


def scores_of(layers: Sequence[Tensor], split: Split) -> tuple[Tensor, Tensor]:
    """Loss and accuracy [S, E] of the group where each is worst."""
    scores = forward(layers, split.features)[-1]
    answers = split.labels[:, :, None, None].expand(*scores.shape[:3], 1)
    losses = -scores.log_softmax(dim=-1).gather(-1, answers)[..., 0].double()
    right = (scores.argmax(dim=-1) == split.labels[..., None]).double()
    members = torch.nn.functional.one_hot(torch.from_numpy(split.group_ids)).double()
    shares = members / members.sum(dim=1, keepdim=True)
    means = [torch.einsum("snk,sne->ske", shares, values) for values in (losses, right)]
    return means[0].amax(dim=1), means[1].amin(dim=1)


Results = dict[int, list[Outcome]]
"""Outcomes of a task by batch size."""


def study(
    task: StudyTask, batch_sizes: Sequence[int], methods: Sequence[Method], step_sizes: Sequence[float], steps: int
) -> Results:
    """All runs of a task."""
    ids = task.splits["train"].group_ids
    results = {}
    for size in batch_sizes:
        orders = np.stack([orders_of(own, size, steps, seed) for seed, own in enumerate(ids)])
        results[size] = train(task, methods, step_sizes, orders)
    return results
