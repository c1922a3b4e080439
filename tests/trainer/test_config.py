"""The config: defaults, spellings, and every message about options that do not fit."""

from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_cgd import CGD, CORAL, ERM, ERMUW, IRM, PGI, GroupDRO, GroupRobustConfig
from hf_cgd.gradients import ENGINES
from hf_cgd.objectives import KNOBS, OBJECTIVES, build_objective
from hf_cgd.trainer.config import GroupOptions, objective_of, options_of


def config(tmp_path: Path, **changes: object) -> GroupRobustConfig:
    return GroupRobustConfig(str(tmp_path), report_to=[], use_cpu=True, **changes)


def test_defaults_are_those_of_the_objectives(tmp_path: Path) -> None:
    expected = {
        "erm": ERM(),
        "erm_uw": ERMUW(),
        "group_dro": GroupDRO(),
        "cgd": CGD(),
        "pgi": PGI(),
        "irm": IRM(),
        "coral": CORAL(),
    }
    assert {name: config(tmp_path, objective=name).build_objective() for name in OBJECTIVES} == expected
    assert config(tmp_path).objective == "cgd"
    assert CGD().step_size == GroupDRO().step_size == 0.01


def test_knobs_reach_the_objective(tmp_path: Path) -> None:
    built = config(tmp_path, step_size=0.2, adjustment=3.0, interaction="mean", exponent=1.0).build_objective()
    assert built == CGD(step_size=0.2, adjustment=3.0, interaction="mean", exponent=1.0)
    built = config(tmp_path, objective="irm", penalty_weight=10.0, penalty_anneal_steps=500).build_objective()
    assert built == IRM(penalty_weight=10.0, penalty_anneal_steps=500)


@pytest.mark.parametrize("column", ["place", ["place"], ["label", "place"]])
def test_group_column(tmp_path: Path, column: object) -> None:
    assert config(tmp_path, group_column=column).group_column == ([column] if isinstance(column, str) else column)


def test_command_line(tmp_path: Path) -> None:
    arguments = ["--output_dir", str(tmp_path), "--group_column", "label", "place", "--gradient_layers", "2"]
    (parsed,) = HfArgumentParser([GroupRobustConfig]).parse_args_into_dataclasses(
        [*arguments, "--objective", "cgd", "--step_size", "0.3", "--report_to", "none"]
    )
    assert parsed.group_column == ["label", "place"]
    assert parsed.build_objective() == CGD(step_size=0.3)


def test_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\ngroup_column: place\nobjective: group_dro\nadjustment: 2.0\nreport_to: []\n"
    )
    (parsed,) = HfArgumentParser([GroupRobustConfig]).parse_yaml_file(str(file))
    assert parsed.group_column == ["place"] and parsed.build_objective() == GroupDRO(adjustment=2.0)


def test_to_dict_round_trip(tmp_path: Path) -> None:
    first = config(tmp_path, group_column="g", gradient_layers=["2"], step_size=0.5)
    second = GroupRobustConfig(**{k: v for k, v in first.to_dict().items() if v is not None and k != "report_to"})
    assert second.build_objective() == first.build_objective() and second.group_column == first.group_column


@pytest.mark.parametrize(
    "metric,greater",
    [
        ("worst_group_accuracy", True),
        ("eval_worst_group_accuracy", True),
        ("loss", False),
        ("worst_group_loss", False),
        ("eval_group_loss/sea", False),
        ("mse", False),
        ("worst_group_pearson", True),
        ("eval_group_accuracy_low/loss", True),
        ("group_perplexity_high/a", False),
        ("group_perplexity_low/a", False),
    ],
)
def test_direction_of_the_best_metric(tmp_path: Path, metric: str, greater: bool) -> None:
    assert config(tmp_path, metric_for_best_model=metric).greater_is_better is greater
    assert (
        config(tmp_path, metric_for_best_model=metric, greater_is_better=not greater).greater_is_better is not greater
    )


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(objective="dro"), r"objective must be one of 'erm', .*, 'cgd', 'pgi', 'irm', 'coral'.* got 'dro'"),
        (
            dict(objective="pgi", penalty_anneal_steps=5),
            r"'pgi' has no option 'penalty_anneal_steps'; it has penalty_w",
        ),
        (dict(objective="coral", step_size=0.1), r"'coral' has no option 'step_size'; it has penalty_weight\."),
        (dict(penalty_weight=1.0), r"'cgd' has no option 'penalty_weight'; it has step_size"),
        (dict(objective="irm", penalty_weight=-1.0), r"penalty_weight must be a finite number >= 0, got -1.0"),
        (dict(objective="irm", penalty_anneal_steps=-1), r"penalty_anneal_steps must be a finite number >= 0, got -1"),
        (dict(objective="irm", weight_timing="next"), r"weight_timing has no effect on objective='irm'"),
        (dict(objective="coral", gradient_layers=["2"]), r"gradient_layers has no effect on objective='coral'"),
        (
            dict(objective="erm", step_size=0.1),
            r"'erm' has no option 'step_size'; it has none.*'group_dro', 'cgd' have it",
        ),
        (dict(objective="GroupDRO"), r"got 'GroupDRO'\. Did you mean group_dro\?"),
        (dict(objective="erm_uw", step_size=0.1), r"'erm_uw' has no option 'step_size'; it has adjustment"),
        (dict(objective="group_dro", exponent=1.0), r"'group_dro' has no option 'exponent'; it has step_size, adj"),
        (dict(step_size=-1.0), r"step_size must be a finite number >= 0, got -1.0"),
        (dict(step_size=float("nan")), r"step_size must be a finite number >= 0, got nan"),
        (dict(adjustment=-2.0), r"adjustment must be a finite number >= 0"),
        (dict(min_weight=-0.1), r"min_weight must be a finite number >= 0"),
        (dict(exponent=-0.5), r"exponent must be a finite number >= 0"),
        (dict(scaling="norm"), r"scaling must be one of 'loss', 'gradient', got 'norm'"),
        (dict(interaction="max"), r"interaction must be one of 'sum', 'mean'"),
        (dict(variant="old"), r"variant must be one of 'paper', 'reference'"),
        (dict(absent_groups="drop"), r"absent_groups must be one of 'frozen', 'zero_loss'"),
        (dict(objective="erm_uw", variant="old"), r"variant must be one of 'paper', 'reference'"),
        (dict(objective="erm_uw", variant="reference", adjustment=1.0), r"ERM-UW has no adjustment, got 1.0"),
        (dict(scaling="gradient", adjustment=1.0), r"adjustment cannot be set with scaling='gradient'"),
        (dict(scaling="gradient", exponent=1.0), r"exponent cannot be set with scaling='gradient'"),
        (dict(variant="reference", interaction="mean"), r"interaction cannot be set with variant='reference'"),
        (
            dict(gradient_engine="fast"),
            r"gradient_engine must be one of 'auto', 'single_pass', 'sketch', 'tensor_hooks', 'per_group'",
        ),
        (dict(forward_mode="both"), r"forward_mode must be one of 'joint', 'split'"),
        (dict(group_sampling="even"), r"group_sampling must be one of 'none', 'balanced', 'weighted'"),
        (dict(weight_timing="last"), r"weight_timing must be one of 'current', 'next'"),
        (dict(weight_timing="current", gradient_accumulation_steps=2), r"weight_timing='current' needs all of a step"),
        (dict(objective="erm_uw", weight_timing="next"), r"weight_timing has no effect on objective='erm_uw'"),
        (
            dict(objective="group_dro", gradient_layers=["2"]),
            r"gradient_layers has no effect on objective='group_dro'",
        ),
        (dict(objective="erm", gradient_engine="per_group"), r"gradient_engine has no effect on objective='erm'"),
        (dict(objective="erm", forward_mode="split"), r"forward_mode='split' needs to know the groups"),
        (dict(gradient_layers=["("]), r"'\(' is not a regular expression"),
        (dict(gradient_layers=0), r"gradient_layers must be a number of layers >= 1"),
        (dict(group_column=[]), r"group_column must be the name of a column"),
        (dict(group_column=["a", "a"]), r"group_column must be .* different names"),
        (dict(group_column=3), r"group_column must be the name of a column"),
        (dict(eval_group_column=""), r"eval_group_column must be the name of a column"),
        (dict(min_group_size=0), r"min_group_size must be at least 1"),
        (
            dict(group_sampling="balanced", train_sampling_strategy="group_by_length"),
            r"group_sampling='balanced' and train_sampling_strategy='group_by_length' both decide",
        ),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_unknown_knob_of_an_objective() -> None:
    with pytest.raises(ValueError, match=r"objective='cgd' has no option 'speed'"):
        build_objective("cgd", {"speed": 3})


def test_a_class_in_place_of_an_objective(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected an Objective .* got <class .*CGD'>. Pass an object: CGD\(\)"):
        objective_of(CGD, TrainingArguments(str(tmp_path)))  # type: ignore[arg-type]


def test_unknown_option_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="stepsize"):
        config(tmp_path, stepsize=0.1)


def test_every_knob_of_an_objective_has_a_field() -> None:
    hints = get_type_hints(GroupOptions)
    for name, kind in OBJECTIVES.items():
        knobs = get_type_hints(kind)
        for knob in (knob.name for knob in fields(kind)):
            wanted = knobs[knob] | None
            assert knob in hints, f"{name}: add `{knob}: {wanted} = _option(...)` to GroupOptions in trainer/config.py"
            assert hints[knob] == wanted, f"{name}: GroupOptions.{knob} is {hints[knob]}, the objective's {wanted}"
    defaults = {option.name: option.default for option in fields(GroupOptions)}
    assert [knob for knob in KNOBS if defaults[knob] is not None] == []
    assert all(option.metadata["help"] for option in fields(GroupOptions))


def test_choices_are_those_of_the_types() -> None:
    parser = HfArgumentParser([GroupRobustConfig])
    choices = {action.dest: action.choices for action in parser._actions}
    literals = {
        name: [value for part in (hint, *get_args(hint)) for value in get_args(part) if isinstance(value, str)]
        for name, hint in get_type_hints(GroupOptions).items()
    }
    chosen = {name: values for name, values in literals.items() if values}
    assert {"scaling", "interaction", "variant", "self_term", "cross_terms", "absent_groups", "gradient_engine", "weight_timing",
            "forward_mode", "group_sampling", "nonfinite", "excess_clip", "group_unit", "token_reduction"} == set(chosen)  # fmt: skip
    assert tuple(chosen["gradient_engine"]) == ENGINES
    for name, values in chosen.items():
        assert list(choices[name]) == values
    # An import path of one's own is no choice among these.
    assert choices["objective"] is None


def test_what_is_not_said_on_the_command_line_stays_as_it_is(tmp_path: Path) -> None:
    arguments = ["--output_dir", str(tmp_path), "--report_to", "none"]
    (parsed,) = HfArgumentParser([GroupRobustConfig]).parse_args_into_dataclasses(arguments)
    for option in fields(GroupOptions):
        assert option.default is not MISSING
        assert getattr(parsed, option.name) == option.default, option.name


def test_options_of_other_arguments(tmp_path: Path) -> None:
    own = config(tmp_path, step_size=0.5)
    assert options_of(own) is own
    assert options_of(TrainingArguments(str(tmp_path), use_cpu=True)) == GroupOptions()
    other = TrainingArguments(str(tmp_path), use_cpu=True)
    other.group_column, other.variant = "place", "large"  # type: ignore[attr-defined]
    assert options_of(other) == GroupOptions(group_column="place")
