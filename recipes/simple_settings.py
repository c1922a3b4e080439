"""The CGD paper's simple settings: Table 1, Figures 1 to 3 and the data of appendix C. No network, minutes on a CPU.

    python recipes/simple_settings.py                    # Group-DRO and CGD, three step sizes, six seeds
    python recipes/simple_settings.py --objectives erm erm_uw group_dro cgd --best_epoch
    python recipes/simple_settings.py --fast             # two seeds, one step size, few epochs: does it run?

Each objective's step size (the penalty weight of those that have one instead) is the one with the lowest validation
loss of the worst group; the last epoch counts, or with --best_epoch the best one on validation.
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser

from hf_cgd import GroupRobustWarning
from hf_cgd.cli import readable_errors
from hf_cgd.experiments.studies import simple_settings as simple
from hf_cgd.plots import points_figure, save_figure, weights_figure


@dataclass
class Options:
    settings: list[str] = field(default_factory=lambda: list(simple.SETTINGS))
    objectives: list[str] = field(default_factory=lambda: ["group_dro", "cgd"])
    values: list[float] = field(
        default_factory=lambda: list(simple.SEARCH), metadata={"help": "Step sizes (or penalty weights) to try."}
    )
    seeds: int = simple.SEEDS
    first_seed: int = 0
    epochs: int = simple.EPOCHS
    learning_rate: float = simple.LEARNING_RATE
    best_epoch: bool = field(default=False, metadata={"help": "Keep the epoch that is best on validation."})
    output: str = field(default="out/simple_settings", metadata={"help": "Folder of the pictures."})
    fast: bool = field(default=False, metadata={"help": "Two seeds, step size 1, 40 epochs."})


def main(arguments: Sequence[str] | None = None) -> list[simple.Result]:
    kinds: Any = Options
    (options,) = HfArgumentParser(kinds).parse_args_into_dataclasses(arguments)
    if options.fast:
        options.seeds, options.values, options.epochs = 2, [1.0], 40
    # At step size 1 Group-DRO trains on a single group: what this is about.
    warnings.simplefilter("ignore", GroupRobustWarning)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    fitting = {name: getattr(options, name) for name in ("best_epoch", "epochs", "learning_rate")}
    start, results = time.perf_counter(), []
    with readable_errors():
        for setting in options.settings:
            for objective in options.objectives:
                for value in simple.search_values(objective, options.values):
                    results.append(simple.evaluate(setting, objective, value, seeds, **fitting))
    print(f"{len(results) * len(seeds)} runs in {time.perf_counter() - start:.0f} s\n")
    print(simple.table(simple.chosen(results)), end="\n\n")
    print(simple.search_table(results), end="\n\n")
    for setting in options.settings:
        panels = simple.weight_panels(result for result in results if result.setting == setting)
        if panels:
            figure = weights_figure(panels, unit="epoch", title=simple.SETTINGS[setting].title)
            print("Picture:", *save_figure(figure, f"{options.output}/{setting}_weights.png"))
    figure = points_figure(simple.point_panels(options.settings, options.first_seed))
    print("Picture:", *save_figure(figure, f"{options.output}/points.png"))
    return results


if __name__ == "__main__":
    main()
