"""`GroupRobustConfig`: `TrainingArguments` and the options of group-robust training."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from transformers import TrainingArguments

from hf_cgd.data.sampling import GROUP_SAMPLINGS, GroupSampling
from hf_cgd.gradients import ENGINES, Engine
from hf_cgd.gradients.scope import parse_gradient_layers
from hf_cgd.metrics.group_metrics import lower_is_better, tells_direction
from hf_cgd.models.heads import TOKEN_REDUCTIONS, TokenReduction
from hf_cgd.monitors import NONFINITE, NonFinite
from hf_cgd.objectives import CORAL, IRM, KNOBS, OBJECTIVES, PGI, Objective, build_objective
from hf_cgd.objectives.adaptive import AbsentGroups
from hf_cgd.objectives.base import Variant, require_at_least_zero, require_one_of
from hf_cgd.objectives.cgd import CrossTerms, Interaction, Scaling, SelfTerm
from hf_cgd.robust_loss.excess import EXCESS_CLIPS, ExcessClip
from hf_cgd.robust_loss.loss import WEIGHT_TIMINGS, WeightTiming

ForwardMode = Literal["joint", "split"]
FORWARD_MODES: tuple[ForwardMode, ...] = get_args(ForwardMode)
GroupUnit = Literal["example", "token"]
GROUP_UNITS: tuple[GroupUnit, ...] = get_args(GroupUnit)


def _option(help_text: str, default: Any = None, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help_text, **metadata})


@dataclass
class GroupOptions:
    """The options of group-robust training, apart from those of every training.

    A knob of the objective (`step_size` to `penalty_anneal_steps`) that is None takes the objective's own default; one
    that is set for an objective that does not have it raises a ValueError that lists the ones it has.
    """

    objective: str = _option(
        f"What is minimised: one of {', '.join(OBJECTIVES)}, or the import path of your own, "
        "'my_package.module:MyObjective'.",
        "cgd",
    )
    group_column: list[str] | str | None = _option(
        "Column that holds the group of an example: integers >= 0, strings, bools or a ClassLabel. Several columns "
        "are crossed: one group for each combination that occurs.",
        nargs="+",
    )
    eval_group_column: list[str] | str | None = _option(
        "Column to group evaluations by; None for `group_column`. Several columns of 0/1 values stand for subgroups "
        "that may overlap, one for each column.",
        nargs="+",
    )
    step_size: float | None = _option(
        "eta_a of Group-DRO and CGD (default 0.01). Too large a step makes the weights swing and the model collapse."
    )
    adjustment: float | None = _option(
        "C >= 0 of the group adjustment C / sqrt(n) (Group-DRO, CGD), or of the fixed weights exp(C / sqrt(n)) "
        "(ERM-UW). Default 0."
    )
    exponent: float | None = _option("p of CGD's loss scaling (l_i l_j)^p. Default 0.5.")
    scaling: Scaling | None = _option("CGD: 'loss' (equation 5, default) or 'gradient' (equation 3).")
    interaction: Interaction | None = _option("CGD: 'sum' over the groups (default) or their 'mean'.")
    variant: Variant | None = _option("CGD, ERM-UW: 'paper' (default) or 'reference', the authors' released code.")
    interaction_momentum: float | None = _option(
        "CGD: how much is kept of running averages of the groups' gradients and losses, in [0, 1). Default 0."
    )
    self_term: SelfTerm | None = _option(
        "CGD: 'one' takes cos(g_i, g_i) = 1 (default); 'split_half' estimates it from two halves of the group's "
        "examples, for small batches."
    )
    cross_terms: CrossTerms | None = _option(
        "CGD: 'all' counts the cosines with other groups in full (default); 'consensus' as far as the other groups "
        "agree with one another: CGD where they do, Group-DRO where they do not."
    )
    absent_groups: AbsentGroups | None = _option(
        "Groups without examples in a step: 'frozen' keeps their weight (default), 'zero_loss' is the older way."
    )
    min_weight: float | None = _option("Floor of a group weight, in [0, 1/K). Default 1e-5 / K.")
    penalty_weight: float | None = _option(
        f"lambda >= 0 of the penalty of PGI (default {PGI.penalty_weight}), IRM ({IRM.penalty_weight}) and CORAL "
        f"({CORAL.penalty_weight})."
    )
    penalty_anneal_steps: int | None = _option(
        "IRM: optimizer steps with lambda = min(1, penalty_weight) before it becomes penalty_weight. Default "
        f"{IRM.penalty_anneal_steps}."
    )
    gradient_layers: list[str] | str | int | None = _option(
        "Layers whose gradients CGD compares: a number of last layers (default 3, the head counts as one), 'all', "
        "'head' for the layer that gives the logits alone, or regular expressions over parameter names.",
        nargs="+",
    )
    gradient_engine: Engine = _option(
        "How group gradients are taken. 'single_pass' gets those of all groups from one pass over the activations. "
        "'per_group' runs one backward pass for each group. 'auto' checks on the first batch whether 'single_pass' is "
        "exact and takes 'per_group' where it is not. 'sketch' compares random sketches of the gradients: cheaper "
        "still, for many groups. 'tensor_hooks' takes them in the ordinary backward pass, for the next step's "
        "weights: the choice where parameters are sharded.",
        "auto",
    )
    weight_timing: WeightTiming | None = _option(
        "'current': a step's statistics set the weights of that step (default without gradient accumulation). 'next': "
        "they set those of the following step (default, and the only way, with accumulation or sharded parameters)."
    )
    forward_mode: ForwardMode = _option(
        "'joint': one forward pass of the whole batch. 'split': one for each group, so that BatchNorm statistics are "
        "the group's own; slower, and dropout draws other masks.",
        "joint",
    )
    group_sampling: GroupSampling = _option(
        "'none': the Trainer's own order. 'balanced': every batch holds each group equally often. 'weighted': drawn "
        "with replacement, groups equally likely. 'weights': groups are drawn in proportion to their present weights, "
        "which then do not weigh the loss.",
        "none",
    )
    nonfinite: NonFinite = _option(
        "Where the loss or gradient of a group is NaN or infinite: 'skip' leaves the group weights as they are for "
        "that step and warns; 'raise' stops the run.",
        "skip",
    )
    class_weights: list[float] | str | None = _option(
        "Weight of each class in the training loss: a number > 0 for each, or 'balanced' for N / (C n_c). A group's "
        "mean loss becomes sum(w l) / sum(w) over the group's examples in the step; so does ERM's over all of them.",
        nargs="+",
    )
    example_weight_column: str | None = _option(
        "Column with a weight > 0 of each example in the training loss; it is multiplied with that of the class."
    )
    reference_losses: dict[str, float] | str | None = _option(
        "Group-DRO and CGD: what the group weights see the losses in excess of, max(loss - reference, 0): a column of "
        "the training set, or a number for each group by name (JSON on a command line). The trainer takes a model too."
    )
    excess_clip: ExcessClip | None = _option(
        "What of the excess over `reference_losses` is clipped at 0: each 'example' (default for a column or a model) "
        "or the mean of a 'group' (default for numbers of groups)."
    )
    focal_gamma: float | None = _option(
        "gamma >= 0 of the focal loss (1 - p)^gamma (-log p), which takes the place of the cross-entropy in training."
    )
    group_unit: GroupUnit | None = _option(
        "Models of tokens: what a group's mean is over. 'example': the mean of the examples' losses (default). "
        "'token': an example counts as often as it has tokens with a label, so that the mean is one over all tokens "
        "of the group in the step. ERM takes 'token' by default, as the Trainer does."
    )
    token_reduction: TokenReduction = _option(
        "Models of tokens: an example's loss is the 'mean' or the 'sum' of its tokens' losses.", "mean"
    )
    min_group_size: int = _option(
        "Smallest training group that is accepted; smaller ones are usually typing errors or ids.", 2
    )

    def unit_of(self, objective: Objective) -> GroupUnit:
        """What means of losses of tokens are over: `group_unit`, or else what the objective takes by default."""
        as_the_trainer = objective.plain_mean and self.token_reduction == "mean"
        return self.group_unit or ("token" if as_the_trainer else "example")

    def build_objective(self) -> Objective:
        """The objective that the fields describe.

        Raises:
            ValueError: an unknown objective, a knob it does not have, or a value outside its range.
        """
        return build_objective(self.objective, {knob: getattr(self, knob, None) for knob in KNOBS})


def objective_of(given: Objective | str | None, args: TrainingArguments) -> Objective:
    """The objective of a run: what the trainer was given, with the options of its config, or else the config's.

    Raises:
        ValueError: options of the config that have no effect beside the one that was given.
    """
    options = options_of(args)
    if given is None:
        return options.build_objective()
    knobs = {knob: getattr(options, knob, None) for knob in KNOBS}
    if isinstance(given, str):
        return build_objective(given, knobs)
    if not isinstance(given, Objective):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        remedy = f"Pass an object: {name}()." if isinstance(given, type) else "CGD() is one."
        raise ValueError(f"objective: expected an Objective or the name of one, got {given!r}. {remedy}")
    idle = [knob for knob, value in knobs.items() if value is not None]
    if idle:
        raise ValueError(
            f"{', '.join(idle)} of the config would be ignored beside objective={given!r}, which has its own values. "
            f"Give them to the objective: {type(given).__name__}({', '.join(f'{k}={knobs[k]!r}' for k in idle)})."
        )
    if options.objective not in (GroupOptions.objective, given.name):
        raise ValueError(
            f"The config says objective={options.objective!r} and the trainer was given {given!r}. Leave one of them "
            "out."
        )
    return given


def options_of(args: TrainingArguments) -> GroupOptions:
    """The group options of a run; the defaults, where plain `TrainingArguments` were given.

    Arguments of another class may have fields of these names, apart from `objective` and the objective's knobs.
    """
    if isinstance(args, GroupOptions):
        return args
    names = {option.name for option in fields(GroupOptions)} - {"objective", *KNOBS}
    return GroupOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})


@dataclass
class GroupRobustConfig(GroupOptions, TrainingArguments):
    """All that a `GroupRobustTrainer` run can be told: `transformers.TrainingArguments`, and `GroupOptions`.

    Raises:
        ValueError: an unknown value, or options that do not go together.
    """

    def __post_init__(self) -> None:
        self.direction_is_a_guess = False
        """Whether neither the user nor the name of `metric_for_best_model` says which direction is better."""
        if self.metric_for_best_model is not None and self.greater_is_better is None:
            self.greater_is_better = not lower_is_better(self.metric_for_best_model)
            self.direction_is_a_guess = not tells_direction(self.metric_for_best_model)
        _read_numbers(self)
        super().__post_init__()
        self.require_consistent()

    def require_consistent(self) -> None:
        """Bring the options into one form, and raise a ValueError where they contradict one another.

        Called again before each run: a search, or a script between two runs, may have set others.
        """
        self.class_weights = _as_class_weights(self.class_weights)
        self.reference_losses = _as_reference_losses(self.reference_losses)
        if self.excess_clip is not None:
            require_one_of("excess_clip", self.excess_clip, EXCESS_CLIPS)
        require_at_least_zero(focal_gamma=self.focal_gamma or 0.0)
        if self.focal_gamma is not None and self.label_smoothing_factor:
            raise ValueError("focal_gamma and label_smoothing_factor are two losses of an example. Set one of them.")
        self.group_column = _as_list("group_column", self.group_column)
        self.eval_group_column = _as_list("eval_group_column", self.eval_group_column)
        require_one_of("gradient_engine", self.gradient_engine, ENGINES)
        require_one_of("forward_mode", self.forward_mode, FORWARD_MODES)
        require_one_of("group_sampling", self.group_sampling, GROUP_SAMPLINGS)
        require_one_of("nonfinite", self.nonfinite, NONFINITE)
        require_one_of("token_reduction", self.token_reduction, TOKEN_REDUCTIONS)
        if self.group_unit is not None:
            require_one_of("group_unit", self.group_unit, GROUP_UNITS)
        if self.group_unit == "token" and self.token_reduction == "sum":
            raise ValueError(
                "group_unit='token' is the mean over all tokens of a group, and token_reduction='sum' leaves no mean "
                "over tokens. Set one of them."
            )
        objective = self.build_objective()
        if self.gradient_layers is not None:
            parse_gradient_layers(self.gradient_layers)
            self._refuse_unless(objective.needs_gradients, "gradient_layers", "takes no group gradients")
        if self.gradient_engine != "auto":
            self._refuse_unless(objective.needs_gradients, "gradient_engine", "takes no group gradients")
        if self.reference_losses is not None:
            self._refuse_unless(objective.moves_by_losses, "reference_losses", "does not move weights by losses")
        if self.forward_mode == "split" and self.group_column is None and self.objective == "erm":
            raise ValueError("forward_mode='split' needs to know the groups: set group_column.")
        if self.weight_timing is not None:
            require_one_of("weight_timing", self.weight_timing, WEIGHT_TIMINGS)
            self._refuse_unless(objective.moves_weights, "weight_timing", "has no moving weights")
            if self.weight_timing == "current" and self.gradient_accumulation_steps > 1:
                raise ValueError(
                    "weight_timing='current' needs all of a step's statistics before its first backward pass, which "
                    f"gradient_accumulation_steps={self.gradient_accumulation_steps} rules out. Leave weight_timing "
                    "unset (it is 'next' with accumulation), or do not accumulate."
                )
        if self.nonfinite != "skip":
            self._refuse_unless(objective.moves_weights, "nonfinite", "has no moving weights")
        if self.group_sampling != "none" and self.train_sampling_strategy != "random":
            raise ValueError(
                f"group_sampling={self.group_sampling!r} and train_sampling_strategy={self.train_sampling_strategy!r} "
                "both decide the order of the training examples. Leave one of them unset."
            )
        if self.group_sampling == "weights":
            self._refuse_unless(objective.has_weights, "group_sampling='weights'", "has no group weights")
        if self.min_group_size < 1:
            raise ValueError(f"min_group_size must be at least 1, got {self.min_group_size}.")

    def _refuse_unless(self, sensible: bool, name: str, reason: str) -> None:
        if not sensible:
            raise ValueError(
                f"{name} has no effect on objective={self.objective!r}, which {reason}. Remove it, or choose an "
                "objective that uses it, such as 'cgd'."
            )


def _as_list(name: str, value: Any) -> list[str] | None:
    if value is None:
        return None
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    if not names or not all(isinstance(column, str) and column for column in names) or len(set(names)) < len(names):
        raise ValueError(f"{name} must be the name of a column or a list of different names, got {value!r}.")
    return names


def _as_class_weights(value: Any) -> list[float] | str | None:
    if value is None or value == "balanced" or value == ["balanced"]:
        return None if value is None else "balanced"
    try:
        weights = [float(weight) for weight in value]
    except (TypeError, ValueError):
        weights = []
    if not weights or not all(0 < weight < float("inf") for weight in weights) or isinstance(value, str):
        raise ValueError(f"class_weights must be 'balanced' or a finite number > 0 for each class, got {value!r}.")
    return weights


def _as_reference_losses(value: Any) -> dict[str, float] | str | None:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"reference_losses starts like JSON and is none ({error}): {value!r}.") from None
    if value is None or (isinstance(value, str) and value):
        return value
    numbers = isinstance(value, Mapping) and all(isinstance(part, (int, float)) for part in value.values())
    if not numbers or not value:
        raise ValueError(
            f"reference_losses must be the name of a column or a number for each group by name, got {value!r}. A "
            "model goes to the trainer: GroupRobustTrainer(reference_losses=model)."
        )
    return {str(name): float(number) for name, number in value.items()}


def _read_numbers(config: TrainingArguments) -> None:
    """Turn text into numbers in the fields of numbers: YAML takes 1e-2, without a point, for text."""
    for option in fields(config):
        value, kinds = getattr(config, option.name), {option.type, *get_args(option.type)}
        if not isinstance(value, str) or not kinds & {int, float} or str in kinds:
            continue
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{option.name} must be a number, got {value!r}.") from None
        setattr(config, option.name, int(number) if float not in kinds and number.is_integer() else number)
