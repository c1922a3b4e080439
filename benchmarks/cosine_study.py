"""How well the cosines of CGD are estimated from small batches, and what better estimators of them are worth.

python benchmarks/cosine_study.py                            # the simple settings, 14 minutes of one core
python benchmarks/cosine_study.py mnist --data_dir my/mnist  # small MNIST settings, one hidden layer
python benchmarks/cosine_study.py --fast                     # six seeds, ten steps: does it run?
"""

import argparse
import time
from collections.abc import Sequence

from hf_cgd.experiments.studies import cosines
from hf_cgd.experiments.studies import simple_settings as simple
from hf_cgd.plots import save_figure
from hf_cgd.tasks import mnist


def main(arguments: Sequence[str] | None = None) -> list[tuple[cosines.StudyTask, cosines.Results]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=["simple", "mnist"], default="simple")
    parser.add_argument("--settings", nargs="+", help="Those of the kind; all of them unless given.")
    parser.add_argument("--methods", nargs="+", help="Names as in the tables, beside cgd; all of them unless given.")
    parser.add_argument("--batch_sizes", type=int, nargs="+", help="0 for all training examples at once.")
    parser.add_argument("--seeds", type=int, help=f"The first {cosines.CHOOSING} choose, the others report.")
    parser.add_argument("--steps", type=int, default=simple.EPOCHS)
    parser.add_argument("--data_dir", help="Folder of MNIST's IDX files; the Hub unless given.")
    parser.add_argument("--output", default="out/cosine_study", help="Folder of the picture.")
    parser.add_argument("--fast", action="store_true", help=f"{cosines.CHOOSING + 1} seeds, 10 steps, batches of 16.")
    options = parser.parse_args(arguments)
    small = options.kind == "mnist"
    settings = options.settings or list(cosines.MNIST_SETTINGS if small else simple.SETTINGS)
    sizes = options.batch_sizes or ([128, 32, 16] if small else [cosines.FULL, 128, 32, 16])
    seeds, steps = options.seeds or (10 if small else 15), options.steps
    if options.fast:
        seeds, steps, sizes = cosines.CHOOSING + 1, 10, [16]
    methods = cosines.methods_of(small)
    if small:
        # What perfect cosines give, and the estimators that lead nowhere, cost too much on images.
        methods = [m for m in methods if not m.full and m.name not in ("Gram average", "corrected norms")]
    if options.methods:
        methods = [m for m in methods if m.name in ("cgd", *options.methods)]
    step_sizes = simple.SEARCH if small else (0.0, *simple.SEARCH)
    data = mnist.load(options.data_dir) if small else {}
    studies = []
    for setting in settings:
        start = time.perf_counter()
        task = cosines.mnist_task(setting, range(seeds), data) if small else cosines.simple_task(setting, range(seeds))
        results = cosines.study(task, sizes, methods, step_sizes, steps)
        studies.append((task, results))
        runs = len(sizes) * seeds * len(methods) * len(step_sizes)
        print(f"## {task.title}: {runs} runs in {time.perf_counter() - start:.0f} s\n")
        if 0.0 in step_sizes:
            print(f"Cosines along the path of equal weights\n\n{cosines.cosine_table(results)}\n")
        fixed = cosines.fixed_table(task, results, small)
        print(f"Step size {cosines.FIXED_STEP:g}, weight of: {task.watched[1]}\n\n{fixed}\n")
        choice = f"Step size and beta chosen on seeds 0 to {cosines.CHOOSING - 1}, the others report"
        print(f"{choice}\n\n{cosines.chosen_table(results, small)}\n", flush=True)
    print(
        "Picture:", *save_figure(cosines.picture(studies), f"{options.output}/cosines_{options.kind}.png", vector=None)
    )
    return studies


if __name__ == "__main__":
    main()
