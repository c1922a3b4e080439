"""Last-layer retraining of the quickstart's ERM model, beside its other methods. No network; a minute on a CPU.

python benchmarks/last_layer.py --seeds 4 --images 399

The head is fitted on validation images, which no method trains on; test rows are those of the quickstart's table.
"""

import argparse

import numpy as np
import torch
import transformers

from hf_cgd import last_layer_retraining
from hf_cgd.cli import coloured_digits as quickstart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--images", type=int, default=399, help="validation images of each source, 399 are all")
    parser.add_argument("--objective", default="erm", help="what the model was trained by")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    options = argparse.Namespace(output="out/quickstart/quickstart.png", split="test", step_size=None)
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        splits = quickstart.make_splits(seed)
        size = len(splits["validation"]) // len(quickstart.COUNTS)
        held_out = [row for place, row in enumerate(splits["validation"]) if place % size < args.images]
        trainer = quickstart.train({"objective": args.objective}, splits, seed, options)
        for values, retrain in ((before, False), (after, True)):
            if retrain:
                print(last_layer_retraining(trainer.model, held_out, "group", batch_size=4096, seed=seed))
                trainer.predict(splits["test"])
            for name, value in quickstart.numbers(trainer.group_report("test"), trainer.state.log_history).items():
                values.setdefault(name.strip(), []).append(value)
    for name in before:
        cells = [f"{np.mean(v[name]):.3f} ± {np.std(v[name], ddof=1):.3f}" for v in (before, after)]
        print(f"{name:28}{cells[0]:>17}{cells[1]:>17}")


if __name__ == "__main__":
    main()
