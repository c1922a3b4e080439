"""How well the cosines of CGD are estimated from small batches, and what better estimators of them are worth.

All runs of a setting and a batch size (seeds x estimators x step sizes) are trained at once, on the same batches,
balanced by group, for every estimator of a seed, and for the same number of parameter steps at every batch size. Step
sizes and betas are chosen by the worst validation group of the first seeds, and all is reported on other seeds.
Shapes: S seeds, E runs of a seed, K groups, P parameters, M places for the examples of half a group in a batch.
"""

from hf_cgd.experiments.studies.cosines.data import (
    MNIST_SETTINGS,
    Split,
    StudyTask,
    first_layers,
    mnist_task,
    simple_task,
    with_ones,
)
from hf_cgd.experiments.studies.cosines.estimators import (
    BETAS,
    Method,
    Statistics,
    all_pairs,
    corrected_norms,
    gradient_average,
    gram_average,
    last_step,
    methods_of,
    no_self_term,
    pair_self_products,
    paper,
    split_half,
    split_self_products,
)
from hf_cgd.experiments.studies.cosines.report import (
    CHOOSING,
    FIXED_STEP,
    chosen,
    chosen_table,
    cosine_table,
    fixed_table,
    picture,
)
from hf_cgd.experiments.studies.cosines.training import (
    FULL,
    Outcome,
    Results,
    next_weights,
    orders_of,
    places_of,
    statistics_of,
    study,
    train,
)

__all__ = [
    "BETAS",
    "CHOOSING",
    "FIXED_STEP",
    "FULL",
    "MNIST_SETTINGS",
    "Method",
    "Outcome",
    "Results",
    "Split",
    "Statistics",
    "StudyTask",
    "all_pairs",
    "chosen",
    "chosen_table",
    "corrected_norms",
    "cosine_table",
    "first_layers",
    "fixed_table",
    "gradient_average",
    "gram_average",
    "last_step",
    "methods_of",
    "mnist_task",
    "next_weights",
    "no_self_term",
    "orders_of",
    "pair_self_products",
    "paper",
    "picture",
    "places_of",
    "simple_task",
    "split_half",
    "split_self_products",
    "statistics_of",
    "study",
    "train",
    "with_ones",
]
