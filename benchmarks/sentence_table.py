"""Real sentences as a table of numbers for `choice_study.py`: a hundred components of TF-IDF, labels unseen.

python benchmarks/sentence_table.py FOLDER sentences.csv

FOLDER has train, validation and test as Parquet files with the columns text, label, domain and negation.
"""

import argparse
from pathlib import Path

import pandas as pd
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

COMPONENTS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    parts = [pd.read_parquet(options.folder / f"{name}.parquet") for name in ("train", "validation", "test")]
    rows = pd.concat(parts, ignore_index=True)
    words = TfidfVectorizer(min_df=2, sublinear_tf=True).fit_transform(rows["text"])
    table = pd.DataFrame(TruncatedSVD(COMPONENTS, random_state=0).fit_transform(words)).add_prefix("component ")
    table["positive"], table["negation"] = rows["label"], rows["negation"]
    table["domain"] = rows["domain"].astype("category").cat.codes
    table.to_csv(options.output, index=False)


if __name__ == "__main__":
    main()
