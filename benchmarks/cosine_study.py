"""How well the cosines of CGD are estimated from small batches, and what better estimators of them are worth.

    python benchmarks/cosine_study.py                            # the simple settings, 14 minutes of one core
    python benchmarks/cosine_study.py mnist --data_dir my/mnist  # small MNIST settings, one hidden layer
    python benchmarks/cosine_study.py --fast                     # six seeds, ten steps: does it run?

All runs of a setting and a batch size (seeds x estimators x step sizes) are trained at once, on the same batches,
balanced by group, for every estimator of a seed, and for the same number of parameter steps at every batch size. Step
sizes and betas are chosen by the worst validation group of the first seeds, and all is reported on other seeds.
Shapes: S seeds, E runs of a seed, K groups, P parameters, M places for the examples of half a group in a batch.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_cgd.data.sampling import BalancedGroupSampler
from hf_cgd.experiments.studies import simple_settings as simple
from hf_cgd.functional import cosine_gram
from hf_cgd.metrics.tables import markdown, mean_and_deviation
from hf_cgd.objectives.adaptive import MIN_WEIGHT_SHARE
from hf_cgd.plots import DASHES, PALETTE, save_figure
from hf_cgd.tasks import colored_mnist, mnist_settings

BETAS = (0.5, 0.9, 0.97, 0.99)
FULL = 0
"""Batch size that stands for all training examples."""
LOWEST_SHARE = 0.1
"""Corrected norms: the square of a norm is never taken to be less than this share of the uncorrected one."""

# ---- Estimators: functions on the statistics of a step --------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """What a step tells of the groups.

    Attributes:
        losses: [..., K] mean losses.
        halves: [..., K, 2, P] gradients of the mean losses of two halves of each group's examples.
        sizes: [..., K, 2] examples in each half.
        squares: [..., K] sum over the group's examples of the squared norms of their gradients.
    """

    losses: Tensor
    halves: Tensor
    sizes: Tensor
    squares: Tensor

    @property
    def gradients(self) -> Tensor:
        """[..., K, P], of the mean losses of the groups."""
        shares = self.sizes / self.sizes.sum(dim=-1, keepdim=True)
        return (self.halves * shares[..., None]).sum(dim=-2)


Memory = dict[str, Tensor]
"""What an estimator keeps from step to step."""
Estimate = Callable[[Statistics, Memory], tuple[Tensor, Tensor]]
"""Losses [..., K] and cosines [..., K, K] for the exponent of equation 5."""


def running(memory: Memory, name: str, value: Tensor, beta: float) -> Tensor:
    """The running average of a statistic, its first value included as it is (as `interaction_momentum` does)."""
    memory[name] = beta * memory[name] + (1 - beta) * value if name in memory else value
    return memory[name]


def gram_of(rows: Tensor) -> Tensor:
    """Inner products [..., K, K] of rows [..., K, P]."""
    return rows @ rows.transpose(-1, -2)


def cosines_of(gram: Tensor) -> Tensor:
    """`cosine_gram` of a stack of matrices [..., K, K]."""
    return torch.vmap(cosine_gram)(gram.flatten(0, -3)).view_as(gram)


def with_diagonal(matrices: Tensor, diagonal: Tensor) -> Tensor:
    """Matrices [..., K, K] with this diagonal [..., K] in place of theirs."""
    return torch.where(torch.eye(matrices.shape[-1], dtype=torch.bool), diagonal[..., None], matrices)


def split_self_products(statistics: Statistics) -> Tensor:
    """<a, b> of the gradients of a group's two halves [..., K]: unbiased for the squared norm of the expected one."""
    return statistics.halves.prod(dim=-2).sum(dim=-1)


def pair_self_products(statistics: Statistics) -> Tensor:
    """Mean of <g_m, g_n> over all pairs of a group's examples [..., K], which is that of `<a, b>` over all splits."""
    counts = statistics.sizes.sum(dim=-1)
    norms = statistics.gradients.square().sum(dim=-1)
    return (counts**2 * norms - statistics.squares) / (counts * (counts - 1))


def shrunk_self(cosines: Tensor, gram: Tensor, self_products: Tensor) -> Tensor:
    """Cosines whose self term is self_products_i / <g_i, g_i>, at least 0: it shrinks with noise as the others do."""
    norms = gram.diagonal(dim1=-2, dim2=-1)
    return with_diagonal(cosines, (self_products / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp(0, 1))


def paper(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Equation 5 as it stands."""
    return statistics.losses, cosines_of(gram_of(statistics.gradients))


def split_half(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term from two independent halves."""
    gram = gram_of(statistics.gradients)
    return statistics.losses, shrunk_self(cosines_of(gram), gram, split_self_products(statistics))


def all_pairs(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term from all pairs of examples."""
    gram = gram_of(statistics.gradients)
    return statistics.losses, shrunk_self(cosines_of(gram), gram, pair_self_products(statistics))


def last_step(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term from two steps: the cosine of a group's gradient with its gradient of the step before, at least 0."""
    gradients = statistics.gradients
    previous = memory.get("gradients", gradients)
    memory["gradients"] = gradients
    similar = torch.nn.functional.cosine_similarity(gradients, previous, dim=-1).clamp(0, 1)
    return statistics.losses, with_diagonal(cosines_of(gram_of(gradients)), similar)


def no_self_term(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
    """Self term shrunk to 0: the sum over j leaves i out."""
    cosines = cosines_of(gram_of(statistics.gradients))
    return statistics.losses, with_diagonal(cosines, torch.zeros_like(statistics.losses))


def gradient_average(beta: float) -> Estimate:
    """Cosines and losses from running averages of gradients and losses: `interaction_momentum`."""

    def estimate(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
        losses = running(memory, "losses", statistics.losses, beta)
        return losses, cosines_of(gram_of(running(memory, "gradients", statistics.gradients, beta)))

    return estimate


def gram_average(beta: float) -> Estimate:
    """Cosines and losses from running averages of the inner products and losses."""

    def estimate(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
        losses = running(memory, "losses", statistics.losses, beta)
        return losses, cosines_of(running(memory, "gram", gram_of(statistics.gradients), beta))

    return estimate


def corrected_norms(beta: float) -> Estimate:
    """The running Gram with self-products of all pairs for norms: cosines between groups do not shrink."""

    def estimate(statistics: Statistics, memory: Memory) -> tuple[Tensor, Tensor]:
        losses = running(memory, "losses", statistics.losses, beta)
        gram = running(memory, "gram", gram_of(statistics.gradients), beta)
        products = running(memory, "products", pair_self_products(statistics), beta)
        norms = torch.maximum(products, LOWEST_SHARE * gram.diagonal(dim1=-2, dim2=-1))
        return losses, cosines_of(with_diagonal(gram, norms))

    return estimate


@dataclass(frozen=True)
class Method:
    """A way to move the weights.

    Attributes:
        name: what tables call it.
        estimate: of equation 5; None for a baseline without cosines.
        beta: what it keeps of old averages, None where there are none.
        full: it sees the statistics of the whole training set, which a user does not have: what perfect cosines give.
        head: the gradient scope is the last layer alone.
        late: the weights of a step come from the step before (`weight_timing="next"`).
        by_loss: Group-DRO's exponent, for `estimate` None; False for weights that stay equal.
    """

    name: str
    estimate: Estimate | None
    beta: float | None = None
    full: bool = False
    head: bool = False
    late: bool = False
    by_loss: bool = False


def methods_of(hidden: bool, betas: Sequence[float] = BETAS) -> list[Method]:
    """All methods of the study; `hidden` for a network with more than one layer."""
    return [
        Method("equal weights", None),
        Method("group_dro", None, by_loss=True),
        Method("cgd", paper),
        Method("cgd, weight_timing next", paper, late=True),
        *([Method("cgd, head only", paper, head=True)] if hidden else []),
        Method("split-half self term", split_half),
        Method("all-pairs self term", all_pairs),
        Method("last-step self term", last_step),
        Method("no self term", no_self_term),
        *(Method("gradient average", gradient_average(beta), beta) for beta in betas),
        *(Method("Gram average", gram_average(beta), beta) for beta in betas),
        *(Method("corrected norms", corrected_norms(beta), beta) for beta in betas),
        Method("full-data cosines", paper, full=True),
    ]


# ---- Tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Examples of S seeds: features [S, N, D] with a last column of ones, labels and group ids [S, N]."""

    features: Tensor
    labels: Tensor
    group_ids: np.ndarray


@dataclass(frozen=True)
class Task:
    """A setting.

    Attributes:
        title: for tables and pictures.
        watched: the groups whose weight is told, and what to call them.
        splits: "train", "validation" and "test".
        layers: the first parameters [S, in + 1, out] of each layer, the bias last, on S different seeds.
    """

    title: str
    watched: tuple[list[int], str]
    splits: dict[str, Split]
    layers: tuple[Tensor, ...]


def first_layers(sizes: Sequence[int], seeds: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """PyTorch's start of linear layers of these sizes [in, …, out], for each seed."""
    starts = []
    for seed in seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [torch.nn.Linear(*pair) for pair in pairwise(sizes)]
        starts.append([torch.cat([layer.weight.T, layer.bias[None]]).detach().to(dtype) for layer in layers])
    return tuple(torch.stack(layer) for layer in zip(*starts, strict=True))


def with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)


WATCHED = {"noise": 0, "rotation": 1, "spurious": 1}
"""The noisy group, which deserves no weight; the center and the clean majority, which serve the others as well."""


def simple_task(setting: str, seeds: Sequence[int]) -> Task:
    """One of the paper's simple settings."""
    info, splits = simple.SETTINGS[setting], {}
    for name in ("train", "validation", "test"):
        points = [simple.draw(setting, name, seed) for seed in seeds]
        features = torch.from_numpy(np.stack([drawn.features for drawn in points]))
        labels = torch.from_numpy(np.stack([drawn.labels for drawn in points]))
        splits[name] = Split(with_ones(features), labels, np.stack([drawn.group_ids for drawn in points]))
    watched = WATCHED[setting]
    dimensions = splits["train"].features.shape[-1] - 1
    layers = first_layers([dimensions, 2], seeds, torch.float64)
    return Task(info.title, ([watched], info.groups[watched]), splits, layers)


MNIST_COUNTS, MNIST_VALIDATION, MNIST_TEST, MNIST_HIDDEN, MNIST_POOL = (980, 980, 40), 1000, 3000, 16, 4
SHORTCUT_RATIO = 20
MNIST_SETTINGS = (*mnist_settings.GROUPS, "shortcut")


def mnist_task(setting: str, seeds: Sequence[int], data: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Task:
    """A small one of the MNIST settings: a fifth of the digits, 7 x 7 pixels (red and blue), one hidden layer.

    "shortcut" is Colored-MNIST at 20 to 1, in four groups (label x colour): its rare groups deserve weight.
    """
    data = {"train": data["train"], "test": (data["test"][0][:MNIST_TEST], data["test"][1][:MNIST_TEST])}
    parts: dict[str, list[tuple[Tensor, Tensor, np.ndarray]]] = {"train": [], "validation": [], "test": []}
    for seed in seeds:
        if setting == "shortcut":
            counts = {"train_size": sum(MNIST_COUNTS), "validation_size": MNIST_VALIDATION}
            splits = colored_mnist.splits_of(data, ratio=SHORTCUT_RATIO, seed=seed, **counts)
        else:
            sizes: Any = {"train_counts": MNIST_COUNTS, "validation_size": MNIST_VALIDATION}
            splits = mnist_settings.splits_of(data, setting, seed=seed, **sizes)
        for name, drawn in parts.items():
            rows = splits[name][:]
            images = torch.nn.functional.avg_pool2d(rows["pixel_values"][:, ::2], MNIST_POOL).flatten(1)
            labels = torch.as_tensor(rows["label"])
            if setting == "shortcut":
                ids = np.array([2 * colored_mnist.GROUPS.index(group) for group in rows["group"]]) + labels.numpy()
            else:
                ids = np.array([mnist_settings.GROUPS[setting].index(group) for group in rows["group"]])
            drawn.append((images, labels, ids))
    stacked = {}
    for name, drawn in parts.items():
        features, targets, groups = zip(*drawn, strict=True)
        stacked[name] = Split(with_ones(torch.stack(features)), torch.stack(targets), np.stack(groups))
    dimensions = stacked["train"].features.shape[-1] - 1
    layers = first_layers([dimensions, MNIST_HIDDEN, 2], seeds, torch.float32)
    if setting == "shortcut":
        return Task("Shortcut-MNIST, small", ([2, 3], "rare groups"), stacked, layers)
    watched = WATCHED[setting]
    title = f"{setting.capitalize()}-MNIST, small"
    return Task(title, ([watched], mnist_settings.GROUPS[setting][watched]), stacked, layers)


# ---- Training -------------------------------------------------------------------------------------------------------


def orders_of(group_ids: np.ndarray, batch_size: int, steps: int, seed: int) -> np.ndarray:
    """The examples [steps, batch_size] of a seed's batches: those of `group_sampling="balanced"`, or all of them."""
    if batch_size == FULL:
        random = np.random.default_rng(seed)
        return np.stack([random.permutation(len(group_ids)) for _ in range(steps)])
    sampler, drawn = BalancedGroupSampler(group_ids, batch_size, seed), []
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
        the statistics, whose P parameters are those of the layers in turn, and the sizes of the layers.
    """
    *hidden, scores = (value.unflatten(1, labels.shape[1:]) for value in forward(layers, features.flatten(1, 3)))
    sizes = taken.sum(dim=-1).to(features)
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
    flat = [gradient.flatten(-2) / sizes[:, None, :, :, None] for gradient in gradients]
    statistics = Statistics(
        losses.sum(dim=(2, 3)).transpose(1, 2) / sizes.sum(dim=-1)[:, None],
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
        validation, test: [S] worst group losses at the end; accuracy: [S] worst group accuracies on test.
        cross, own: estimated minus full-data cosines between different groups, and the estimated self term minus 1:
            [S] root mean squares and means over steps and groups. Only of methods with cosines.
    """

    method: Method
    step_size: float
    weights: np.ndarray
    last_weights: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    accuracy: np.ndarray
    cross_error: np.ndarray
    cross_bias: np.ndarray
    self_bias: np.ndarray


def next_weights(alpha: Tensor, exponents: Tensor) -> Tensor:
    """The exponentiated step of `hf_cgd.functional.exponentiated_step` on a stack [..., K] of weights, none absent."""
    floor = MIN_WEIGHT_SHARE / alpha.shape[-1]
    weights = torch.softmax(alpha.log() + exponents, dim=-1).clamp_min(floor)
    return weights / weights.sum(dim=-1, keepdim=True)


def train(
    task: Task,
    methods: Sequence[Method],
    step_sizes: Sequence[float],
    orders: np.ndarray,
    *,
    learning_rate: float = simple.LEARNING_RATE,
    weight_decay: float = 0.0,
) -> list[Outcome]:
    """Train every method with every step size on all S seeds, side by side.

    Args:
        task: what on.
        methods: how the weights move.
        step_sizes: of the weights; 0 leaves them equal, so that all estimators see the same path.
        orders: [S, T, B] examples of the T steps.
        learning_rate, weight_decay: of SGD.

    Returns:
        for each method in turn, one outcome for each step size.
    """
    data = task.splits["train"]
    seeds, width = len(orders), len(step_sizes)
    layers = [layer[:, None].repeat(1, len(methods) * width, 1, 1) for layer in task.layers]
    groups = int(data.group_ids.max()) + 1
    alpha = torch.full((seeds, len(methods) * width, groups), 1 / groups, dtype=torch.float64)
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
        statistics, sizes = gathered(*places_of(orders[:, step], data.group_ids), slice(None))
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
            moved.append(next_weights(alpha[:, places[number]], exponents))
        alpha = torch.cat(moved[::-1], dim=1)
        used = alpha.clone()
        for number, method in enumerate(methods):
            if method.late:
                used[:, places[number]] = before[:, places[number]]
        total += used
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
            columns = [means[:, run], alpha[:, run], validation[0][:, run], *(values[:, run] for values in test)]
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


# ---- Report ---------------------------------------------------------------------------------------------------------

CHOOSING = 5
"""The first seeds, which choose step sizes and betas; the others report."""
FIXED_STEP = 0.1
Results = dict[int, list[Outcome]]
"""Outcomes of a task by batch size."""


def name_of(method: Method, step_size: float | None = None) -> str:
    beta = "" if method.beta is None else f", beta {method.beta:g}"
    return method.name + beta + ("" if step_size is None else f", step {step_size:g}")


def batch_name(size: int) -> str:
    return "full" if size == FULL else str(size)


def watched_weight(task: Task, outcome: Outcome) -> np.ndarray:
    """[S] weight of the watched groups, mean over the steps."""
    return outcome.weights[:, task.watched[0]].sum(axis=1)


def chosen(outcomes: Sequence[Outcome], name: str) -> Outcome:
    """Of a method, the step size and beta with the lowest validation loss, mean over the choosing seeds."""
    own = [outcome for outcome in outcomes if outcome.method.name == name and outcome.step_size > 0]
    return min(own, key=lambda outcome: outcome.validation[:CHOOSING].mean())


def cosine_table(results: Results) -> str:
    """How far the estimates are from the cosines on all training data, along the path of equal weights."""
    sizes = list(results)
    head = [f"{batch_name(size)} {part}" for size in sizes for part in ("rms", "mean", "self")]
    rows = [["", *head]]
    for place, outcome in enumerate(results[sizes[0]]):
        if outcome.step_size or outcome.method.estimate is None or outcome.method.full or outcome.method.late:
            continue
        row = [name_of(outcome.method)]
        for size in sizes:
            other = results[size][place]
            numbers = [values[CHOOSING:].mean() for values in (other.cross_error, other.cross_bias, other.self_bias)]
            row += [f"{numbers[0]:.2f}", f"{numbers[1]:+.2f}", f"{1 + numbers[2]:.2f}"]
        rows.append(row)
    return markdown(rows)


def score_of(outcome: Outcome, accuracy: bool) -> np.ndarray:
    """Of the worst test group, on the reporting seeds: its loss, or its accuracy in per cent."""
    return (100 * outcome.accuracy if accuracy else outcome.test)[CHOOSING:]


def fixed_table(task: Task, results: Results, accuracy: bool) -> str:
    """Every method at the same step size: worst test group and weight of the watched ones, on the reporting seeds."""
    rows = [["", *(f"{batch_name(size)} {part}" for size in results for part in ("worst", "weight"))]]
    first = next(iter(results.values()))
    for place, outcome in enumerate(first):
        if outcome.step_size == FIXED_STEP:
            row = [name_of(outcome.method)]
            for outcomes in results.values():
                weight = watched_weight(task, outcomes[place])[CHOOSING:]
                row += [mean_and_deviation(score_of(outcomes[place], accuracy), 1 if accuracy else 3)]
                row += [f"{weight.mean():.2f}"]
            rows.append(row)
    return markdown(rows)


def chosen_table(results: Results, accuracy: bool) -> str:
    """Every method at its own best step size and beta; beside its score, that less the score of CGD, seed by seed.

    The last number of a cell says with how many seeds the method is the better one.
    """
    rows = [["", *(f"{batch_name(size)} {part}" for size in results for part in ("worst", "less cgd")), "chosen"]]
    decimals = 1 if accuracy else 3
    for name in dict.fromkeys(outcome.method.name for outcome in next(iter(results.values()))):
        row, values = [name], []
        for outcomes in results.values():
            best = chosen(outcomes, name)
            score = score_of(best, accuracy)
            difference = score - score_of(chosen(outcomes, "cgd"), accuracy)
            wins = ((difference > 0) if accuracy else (difference < 0)).sum()
            row += [mean_and_deviation(score, decimals)]
            row += [f"{mean_and_deviation(difference, decimals)}, {wins}/{len(difference)}" if name != "cgd" else ""]
            values.append(f"{best.step_size:g}" + ("" if best.method.beta is None else f" ({best.method.beta:g})"))
        rows.append([*row, "; ".join(values)])
    return markdown(rows)


DRAWN = {
    "equal weights": None, "group_dro": None, "cgd": None, "split-half self term": None, "last-step self term": None,
    "gradient average": 0.9, "full-data cosines": None,
}  # fmt: skip
"""Lines of the picture, with their beta."""


def picture(studies: Sequence[tuple[Task, Results]]) -> Any:
    """Weight of the watched group and worst group loss against batch size, a line for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(studies) + 0.4, 5.6), layout="constrained")
    grid = figure.subplots(2, len(studies), squeeze=False, sharex="col")
    for column, (task, results) in enumerate(studies):
        labels = [batch_name(size) for size in results]
        for color, (number, (name, beta)) in zip(PALETTE, enumerate(DRAWN.items()), strict=False):
            lines = []
            for outcomes in results.values():
                own = [o for o in outcomes if (o.method.name, o.step_size) == (name, FIXED_STEP)]
                lines += [o for o in own if beta in (None, o.method.beta)][:1]
            if len(lines) < len(labels):
                continue
            style: Any = {
                "color": color, "linestyle": DASHES[number % len(DASHES)], "marker": "os^Dv<P"[number],
                "markersize": 4, "linewidth": 1.6, "label": name if beta is None else f"{name}, beta {beta:g}",
            }  # fmt: skip
            for axes, values in (
                (grid[0, column], [watched_weight(task, o)[CHOOSING:] for o in lines]),
                (grid[1, column], [o.test[CHOOSING:] for o in lines]),
            ):
                axes.plot(labels, [value.mean() for value in values], **style)
        grid[0, column].set_title(f"{task.title}\n({task.watched[1]})", fontsize="medium")
        grid[0, column].set_ylim(0, 1)
        grid[1, column].set_xlabel("batch size")
        for axes in grid[:, column]:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
            axes.grid(axis="y", color="#E0E0E0", linewidth=0.6)
    grid[0, 0].set_ylabel("weight of that group")
    grid[1, 0].set_ylabel("loss of the worst group")
    handles, names = max((axes.get_legend_handles_labels() for axes in grid[0]), key=lambda pair: len(pair[0]))
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def study(
    task: Task, batch_sizes: Sequence[int], methods: Sequence[Method], step_sizes: Sequence[float], steps: int
) -> Results:
    """All runs of a task."""
    ids = task.splits["train"].group_ids
    results = {}
    for size in batch_sizes:
        orders = np.stack([orders_of(own, size, steps, seed) for seed, own in enumerate(ids)])
        results[size] = train(task, methods, step_sizes, orders)
    return results


def main(arguments: Sequence[str] | None = None) -> list[tuple[Task, Results]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=["simple", "mnist"], default="simple")
    parser.add_argument("--settings", nargs="+", help="Those of the kind; all of them unless given.")
    parser.add_argument("--methods", nargs="+", help="Names as in the tables, beside cgd; all of them unless given.")
    parser.add_argument("--batch_sizes", type=int, nargs="+", help="0 for all training examples at once.")
    parser.add_argument("--seeds", type=int, help=f"The first {CHOOSING} choose, the others report.")
    parser.add_argument("--steps", type=int, default=simple.EPOCHS)
    parser.add_argument("--data_dir", help="Folder of MNIST's IDX files; the Hub unless given.")
    parser.add_argument("--output", default="out/cosine_study", help="Folder of the picture.")
    parser.add_argument("--fast", action="store_true", help=f"{CHOOSING + 1} seeds, 10 steps, batches of 16.")
    options = parser.parse_args(arguments)
    small = options.kind == "mnist"
    settings = options.settings or list(MNIST_SETTINGS if small else simple.SETTINGS)
    sizes = options.batch_sizes or ([128, 32, 16] if small else [FULL, 128, 32, 16])
    seeds, steps = options.seeds or (10 if small else 15), options.steps
    if options.fast:
        seeds, steps, sizes = CHOOSING + 1, 10, [16]
    methods = methods_of(small)
    if small:
        # What perfect cosines give, and the estimators that lead nowhere, cost too much on images.
        methods = [m for m in methods if not m.full and m.name not in ("Gram average", "corrected norms")]
    if options.methods:
        methods = [m for m in methods if m.name in ("cgd", *options.methods)]
    step_sizes = simple.SEARCH if small else (0.0, *simple.SEARCH)
    data = colored_mnist.load(options.data_dir) if small else {}
    studies = []
    for setting in settings:
        start = time.perf_counter()
        task = mnist_task(setting, range(seeds), data) if small else simple_task(setting, range(seeds))
        results = study(task, sizes, methods, step_sizes, steps)
        studies.append((task, results))
        runs = len(sizes) * seeds * len(methods) * len(step_sizes)
        print(f"## {task.title}: {runs} runs in {time.perf_counter() - start:.0f} s\n")
        if 0.0 in step_sizes:
            print(f"Cosines along the path of equal weights\n\n{cosine_table(results)}\n")
        print(f"Step size {FIXED_STEP:g}, weight of: {task.watched[1]}\n\n{fixed_table(task, results, small)}\n")
        choice = f"Step size and beta chosen on seeds 0 to {CHOOSING - 1}, the others report"
        print(f"{choice}\n\n{chosen_table(results, small)}\n", flush=True)
    print("Picture:", *save_figure(picture(studies), f"{options.output}/cosines_{options.kind}.png", vector=None))
    return studies


if __name__ == "__main__":
    main()
