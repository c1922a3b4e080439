"""`python -m hf_cgd.experiments`: run a grid, print and keep its tables and pictures."""

import argparse
import logging
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from hf_cgd.cli import readable_errors
from hf_cgd.cli.parser import OneLineParser
from hf_cgd.experiments.cluster import Cluster
from hf_cgd.experiments.grid import Grid, has_option
from hf_cgd.experiments.presets import PRESETS, Preset
from hf_cgd.experiments.records import load_results, other_sources
from hf_cgd.experiments.runner import Outcome, run_grid
from hf_cgd.experiments.selection import choose
from hf_cgd.experiments.summary import (
    COLLAPSED,
    COLUMNS,
    accuracy_figure,
    condition_figure,
    learning_figure,
    reported_split,
    result_rows,
    search_rows,
)
from hf_cgd.metrics.tables import latex, markdown
from hf_cgd.objectives import OBJECTIVES
from hf_cgd.plots import save_figure
from hf_cgd.whole_files import write_whole

EXAMPLES = """examples:
  python -m hf_cgd.experiments mnist_settings --workers 2 -- --data_dir my/mnist
  python -m hf_cgd.experiments colored_mnist --fast -- --data_dir my/mnist --use_cpu
  python -m hf_cgd.experiments my_grid.yaml --objectives erm cgd --seeds 0 1 2 --search_seeds 0
  python -m hf_cgd.experiments recipes/text_classification.py --values step_size=0.1,0.01 \\
      -- --dataset my.csv --group_column place

A YAML file holds fields of hf_cgd.experiments.Grid. Options of the recipe stand behind `--`, the same for all runs.
What has finished is not run again: start the same command to go on."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 if runs failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    own = _parser().parse_args(words[:cut])
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with readable_errors():
        preset = _changed(_preset(own.grid), own, _recipe_options(words[cut + 1 :]))
        grid = preset.grid
        folder = Path(own.output_dir or f"outputs/experiments/{Path(own.grid).stem}{'_fast' if own.fast else ''}")
        if own.table:
            results = load_results(grid, folder)
            outcome = Outcome(tuple(results), tuple(choose(grid, results)), (), ())
        else:
            if own.workers < 1:
                raise ValueError(f"--workers must be at least 1, got {own.workers}.")
            print(f"{len(grid.search_runs())} runs to choose from, in {folder}", file=sys.stderr)
            launcher = shlex.split(own.launcher) if own.launcher else (sys.executable,)
            cluster = None
            if own.cluster is not None:
                given = _choices(own.cluster_options)
                cluster = Cluster({name: value[0] for name, value in given.items() if value}, own.cluster)
            elif own.cluster_options:
                raise ValueError("--cluster_options are those of a scheduler: name it, --cluster slurm.")
            outcome = run_grid(
                grid, folder, workers=own.workers, launcher=launcher, keep_models=own.keep_models, cluster=cluster
            )
        _show(preset, outcome, folder)
    for failure in outcome.failures:
        print(f"Failed: {failure}", file=sys.stderr)
    if outcome.failures or outcome.busy:
        print(
            f"{len(outcome.failures)} runs failed, {len(outcome.busy)} are worked at elsewhere. The tables above are "
            "of what has finished; the same command tries the others again.",
            file=sys.stderr,
        )
    return int(bool(outcome.failures))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m hf_cgd.experiments",
        description="Train every objective with every value and seed, choose by the worst group on validation.",
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("grid", help=f"A preset ({', '.join(PRESETS)}), a YAML file, or a recipe.")
    parser.add_argument("--objectives", nargs="+", help='Instead of the grid\'s own; "cgd self_term=split_half" too.')
    parser.add_argument(
        "--values",
        nargs="+",
        default=[],
        metavar="NAME=V,V",
        help="Values to choose among; NAME= takes one out.",
    )
    parser.add_argument(
        "--conditions", nargs="+", default=[], metavar="NAME=V,V", help="Values to compare; NAME= takes one out."
    )
    parser.add_argument("--seeds", nargs="+", type=int, help="Seeds of the runs that are reported.")
    parser.add_argument("--search_seeds", nargs="+", type=int, help="Seeds to choose values on; all by default.")
    parser.add_argument("--metric", help="What to choose by, and the best epoch; worst_group_accuracy by default.")
    parser.add_argument("--columns", nargs="+", help="Metrics that the table shows.")
    parser.add_argument("--workers", type=int, default=1, help="Runs at a time.")
    parser.add_argument("--launcher", help='Instead of python, such as "accelerate launch --num_processes 2".')
    parser.add_argument("--cluster", choices=("slurm", "local"), help="Runs are jobs of a scheduler, by submitit.")
    parser.add_argument(
        "--cluster_options",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="What a job is given: timeout_min=600 gpus_per_node=1 cpus_per_task=8 slurm_partition=gpu.",
    )
    parser.add_argument("--output_dir", help="Folder of the runs; outputs/experiments/<grid> by default.")
    parser.add_argument("--keep_models", action="store_true", help="Keep models and checkpoints of finished runs.")
    parser.add_argument("--fast", action="store_true", help="A preset's small version: does everything run?")
    parser.add_argument("--table", action="store_true", help="Run nothing, show what has finished.")
    return parser


def _preset(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix == ".py":
        return Preset(Grid(name))
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ValueError(f"Expected a preset ({', '.join(PRESETS)}), a YAML file or a recipe, got {name!r}.")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = {f.name for f in fields(Grid)} | {"columns"}
    if not isinstance(content, dict) or not content.keys() <= known or "recipe" not in content:
        raise ValueError(
            f"{path}: expected the fields {', '.join(sorted(known))}, recipe among them, got {content!r}."
        )
    columns = tuple(content.pop("columns", COLUMNS))
    for field in ("values", "conditions"):
        given = content.get(field, {})
        content[field] = {name: [_number(value) for value in choices] for name, choices in given.items()}
    return Preset(Grid(**content), columns=columns)


def _changed(preset: Preset, own: argparse.Namespace, options: dict[str, Any]) -> Preset:
    """The preset with what the command line says instead."""
    if own.fast:
        if not preset.fast:
            raise ValueError(f"--fast: {own.grid} has no small version; the presets have one.")
        preset = preset.quick()
    grid = preset.grid
    given = {name: getattr(own, name) for name in ("objectives", "seeds", "search_seeds", "metric")}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in ("values", "conditions"):
        changes[name] = {**getattr(grid, name), **_choices(getattr(own, name))}
        changes[name] = {option: values for option, values in changes[name].items() if values}
    # An option behind `--` is meant to hold, so that there is nothing left to choose of it.
    changes["values"] = {option: values for option, values in changes["values"].items() if option not in options}
    objectives = changes.get("objectives", grid.objectives)
    if own.objectives is not None:
        changes["values"] = _of_use(changes["values"], objectives)
    changes["options"] = {**grid.options, **options}
    preset = replace(preset, grid=replace(grid, **changes))
    return preset if own.columns is None else replace(preset, columns=tuple(own.columns))


def _of_use(values: dict[str, Any], objectives: Sequence[str]) -> dict[str, Any]:
    """Without the knobs of objectives that the command line leaves out."""
    known = [objective for objective in objectives if objective.split(" ")[0] in OBJECTIVES or ":" in objective]
    return {name: choices for name, choices in values.items() if any(has_option(o, name) for o in known)}


def _choices(words: Sequence[str]) -> dict[str, list[Any]]:
    choices = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not name or not equals:
            raise ValueError(f"Expected NAME=VALUE,VALUE, got {word!r}.")
        choices[name] = [_number(value) for value in values.split(",") if value]
    return choices


def _number(value: Any, as_written: bool = False) -> Any:
    """A number where the text is one and nothing is lost by it: not 007, 1_000, 1.10 or nan.

    `as_written`: 1e-3 stays a text too, so that it is passed on as it is. (YAML takes it for text.)
    """
    if not isinstance(value, str) or not re.fullmatch(r"-?\d*\.?\d*([eE][+-]?\d+)?", value):
        return value
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        scientific = re.search("[eE]", value) and not as_written
        return number if scientific or str(number) == value else value
    return value


def _recipe_options(words: Sequence[str]) -> dict[str, Any]:
    """`--name`, `--name value`, `--name value value` as a mapping."""
    options: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            options[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"Behind `--` stand options of the recipe (--name value), got {word!r}.")
        else:
            options[name].append(word)
    return {
        name: True if not values else _number(values[0], as_written=True) if len(values) == 1 else values
        for name, values in options.items()
    }


def _show(preset: Preset, outcome: Outcome, folder: Path) -> None:
    """Print the tables, and write them and the pictures to the folder of the experiment."""
    if not outcome.choices:
        print("No objective has finished with all its seeds: there is nothing to show yet.", file=sys.stderr)
        return
    grid, split = preset.grid, reported_split(outcome.results)
    results = result_rows(outcome.choices, preset.columns, preset.published, split)
    searched = search_rows(grid, outcome.results, outcome.choices, split)
    heading = f"{split} set, mean (standard deviation) over seeds, chosen by {grid.metric} on validation"
    if split == "validation":
        heading = f"validation set, on which values and epochs were chosen as well: too good. {heading}"
    text = f"{heading}\n\n{markdown(results)}\n\nAll that was tried (* chosen):\n\n{markdown(searched)}\n"
    if COLLAPSED in text:
        text += (
            f"\n{COLLAPSED}: the model predicts one class for all examples, so it has learned nothing, whatever its "
            "score. Such values are chosen only where no others have finished.\n"
        )
    if any(" n = " in cell for row in results for cell in row):
        text += (
            "\nBehind a worst group stand its examples (n) and the 95 % interval of one accuracy on so many. Of a "
            "group that was picked because it is the lowest of several, the true accuracy lies outside more often.\n"
        )
    changed = other_sources(grid, folder)
    if changed:
        text += (
            f"\nNot all of these runs are of the same sources: {'; '.join(changed)}. They may not compare: run them "
            "again in another output_dir.\n"
        )
    print(text)
    write_whole(folder / "tables.md", text)
    write_whole(folder / "tables.tex", f"% {heading}\n{latex(results)}\n\n{latex(searched)}\n")
    figures = {}
    for place, condition in enumerate(grid.all_conditions()):
        own = [choice for choice in outcome.choices if choice.condition == condition and choice.results]
        if own and all(row.get("accuracy") is not None for row in own[0].results[0].groups[split]):
            name = "groups" if not condition else f"groups_{place}"
            figures[name] = accuracy_figure(own, condition, split)
        curves = learning_figure(own, condition, grid.metric)
        if curves is not None:
            figures["learning" if not condition else f"learning_{place}"] = curves
    compared = list(grid.conditions.values())
    if len(compared) == 1 and len(compared[0]) > 1 and all(isinstance(value, (int, float)) for value in compared[0]):
        figures["conditions"] = condition_figure(outcome.choices, grid.metric, split)
    for name, figure in figures.items():
        print("Picture:", *save_figure(figure, folder / f"{name}.png"))


def _stop(*_: Any) -> None:
    """An orderly end where the program is told to stop, so that its runs stop as well."""
    raise SystemExit("Stopped. The same command goes on.")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
