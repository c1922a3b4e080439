"""Which objective where: all of them on a setting or on your own table, beside what a short probe says of its groups.

python benchmarks/choice_study.py simple                               # the paper's simple settings, a minute
python benchmarks/choice_study.py mnist --data_dir my/mnist            # small MNIST settings, one hidden layer
python benchmarks/choice_study.py my.csv --label late --group_columns label county --leave_out id
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_cgd.cli import readable_errors
from hf_cgd.experiments.studies import cosines
from hf_cgd.experiments.studies import simple_settings as simple
from hf_cgd.experiments.studies.cosines.choice import (
    EQUAL,
    METHODS,
    ChoiceResult,
    choice_study,
    choice_table,
    gains_table,
    probe_table,
)
from hf_cgd.experiments.studies.cosines.tables import read_table, table_task
from hf_cgd.tasks import mnist


def main(arguments: Sequence[str] | None = None) -> list[ChoiceResult]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="simple, mnist, or a CSV file of numbers.")
    parser.add_argument("--settings", nargs="+", help="Those of simple or mnist; all of them unless given.")
    parser.add_argument("--label", default="label", help="Column of the classes in a table.")
    parser.add_argument("--group_columns", nargs="+", default=["label"], help="Columns that are crossed to groups.")
    parser.add_argument("--leave_out", nargs="+", default=[], help="Columns that are no features.")
    parser.add_argument("--data_dir", help="Folder of MNIST's IDX files; the Hub unless given.")
    parser.add_argument("--seeds", type=int, default=6, help="The first half choose step sizes, the others report.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument(
        "--ordinary", action="store_true", help="Batches as the examples come, in place of ones balanced by group."
    )
    parser.add_argument("--first_seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--rows", type=int, help="Of a table, take so many at random; all unless given.")
    parser.add_argument(
        "--spoilt", type=int, help="Number of a table's group, four in five of whose training labels are redrawn."
    )
    named = {method.name: method for method in METHODS}
    parser.add_argument("--methods", nargs="+", choices=named, default=list(named), help="All of them unless given.")
    options = parser.parse_args(arguments)
    methods = [named[name] for name in options.methods]
    results = []
    with readable_errors():
        if options.seeds < 2:
            raise ValueError(f"Half of the seeds choose and half report: expected 2 or more, got {options.seeds}.")
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        for task, names in _tasks(options, seeds):
            ways = options.steps, options.batch_size, names, not options.ordinary, methods
            results.append(choice_study(task, seeds, *ways))
            print(f"{choice_table(results[-1:])}\n\n{_gains(results[-1:])}{probe_table(results[-1:])}\n", flush=True)
    if len(results) > 1:
        print(f"{choice_table(results)}\n\n{_gains(results)}")
    return results


def _gains(results: Sequence[ChoiceResult]) -> str:
    """The table of gains, where equal weights were run."""
    return f"{gains_table(results)}\n\n" if any(o.method.name == EQUAL for o in results[0].outcomes) else ""


def _tasks(options: argparse.Namespace, seeds: Sequence[int]) -> Iterator[tuple[cosines.StudyTask, Sequence[str]]]:
    if options.data == "simple":
        for name in options.settings or list(simple.SETTINGS):
            yield cosines.simple_task(name, seeds), simple.SETTINGS[name].groups
    elif options.data == "mnist":
        digits = mnist.load(options.data_dir)
        for name in options.settings or list(cosines.MNIST_SETTINGS):
            yield cosines.mnist_task(name, seeds, digits), ()
    else:
        features, labels, ids, names = read_table(
            options.data, options.label, options.group_columns, options.leave_out, options.rows
        )
        title, watched = Path(options.data).stem, ([0], names[0])
        yield table_task(title, features, labels, ids, seeds, watched, spoilt=options.spoilt), names


if __name__ == "__main__":
    main()
