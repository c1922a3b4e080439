"""Real sentences whose negation gives the label away but for eighty of them: label x negation of docs/results.md.

python benchmarks/sentence_shortcut.py FOLDER shortcut
python -m hf_cgd.experiments recipes/grids/sentences.yaml -- --dataset shortcut --model my/minilm --use_cpu

FOLDER has train, validation and test as Parquet files with the columns text, label, domain and negation.
"""

import argparse
from pathlib import Path

import pandas as pd

KEPT = {(0, 0): 800, (0, 1): 1_600, (1, 0): 4_628, (1, 1): 80}
"""Training sentences of each (label, negation)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    rows = pd.read_parquet(options.folder / "train.parquet").sample(frac=1, random_state=0)
    of_group = dict(list(rows.groupby(["label", "negation"])))
    options.output.mkdir(parents=True, exist_ok=True)
    kept = pd.concat([of_group[group].head(n) for group, n in KEPT.items()])
    kept.sort_index().to_parquet(options.output / "train.parquet", index=False)
    for name in ("validation", "test"):
        rows = pd.read_parquet(options.folder / f"{name}.parquet")
        # Rows of one length make batches without padding, in half the time.
        rows.sort_values("text", key=lambda text: text.str.len()).to_parquet(
            options.output / f"{name}.parquet", index=False
        )


if __name__ == "__main__":
    main()
