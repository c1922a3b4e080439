"""Miniature copies of the benchmarks' own files, with their real columns, encodings and odd rows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Picture

SPLITS = ("train", "validation", "test")
PER_CELL = 2
"""Rows of each group in each split."""


def write_picture(path: Path, number: int, size: tuple[int, int], mode: str = "RGB") -> None:
    """Something that differs from picture to picture, in any mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Picture.fromarray(values).convert(mode).save(path, format="PNG")


# ---- Waterbirds -----------------------------------------------------------------------------------------------------


def waterbirds_rows() -> pd.DataFrame:
    """As many of each group in each split, in an order in which splits and groups alternate."""
    rows = [
        (f"{place + 1:03d}.Brewer's_Sparrow/Bird_{y}{place}{split}_{number}.jpg", y, split, place)
        for number in range(PER_CELL)
        for y in (0, 1)
        for place in (0, 1)
        for split in (0, 1, 2)
    ]
    table = pd.DataFrame(rows, columns=["img_filename", "y", "split", "place"])
    table.insert(0, "img_id", range(1, len(table) + 1))
    table["place_filename"] = [f"/b/bamboo_forest/{number:08d}.jpg" for number in range(len(table))]
    return table


def write_waterbirds(folder: Path, table: pd.DataFrame | None = None, side: int = 20) -> Path:
    """metadata.csv and its images, of which some are grey and some have transparent parts."""
    folder.mkdir(parents=True, exist_ok=True)
    table = waterbirds_rows() if table is None else table
    table.to_csv(folder / "metadata.csv", index=False)
    for number, name in enumerate(table["img_filename"]):
        write_picture(folder / name, number, (side + number % 5, side), ("RGB", "L", "RGBA")[number % 3])
    return folder


def hub_waterbirds(folder: Path, raw: Path) -> Path:
    """The repository on the Hub, of the files in `raw`: parquet below data/, images as bytes."""
    table = pd.read_csv(raw / "metadata.csv")
    features = Features(image=Image(), label=Value("int64"), place=Value("int64"))
    for code, split in enumerate(SPLITS):
        part = table[table["split"] == code]
        images = [{"bytes": (raw / name).read_bytes(), "path": name} for name in part["img_filename"]]
        columns = {"image": images, "label": part["y"].tolist(), "place": part["place"].tolist()}
        write_parquet(folder / f"data/{split}-00000-of-00001.parquet", columns, features)
    return folder


# ---- CelebA ---------------------------------------------------------------------------------------------------------


def celeba_rows() -> pd.DataFrame:
    cells = [
        (split, blond, male) for _ in range(PER_CELL) for split in (0, 1, 2) for blond in (0, 1) for male in (0, 1)
    ]
    table = pd.DataFrame(cells, columns=["partition", "Blond_Hair", "Male"])
    table.insert(0, "image_id", [f"{number + 1:06d}.jpg" for number in range(len(table))])
    table["5_o_Clock_Shadow"] = 0
    table["Young"] = 1
    return table


def write_celeba(folder: Path, table: pd.DataFrame | None = None, images: str = "img_align_celeba") -> Path:
    """Both CSV files, attributes as -1 and 1, and images of 178 x 218."""
    folder.mkdir(parents=True, exist_ok=True)
    table = celeba_rows() if table is None else table
    attributes = table.drop(columns="partition")
    for name in attributes.columns[1:]:
        attributes[name] = 2 * attributes[name] - 1
    attributes.to_csv(folder / "list_attr_celeba.csv", index=False)
    table[["image_id", "partition"]].to_csv(folder / "list_eval_partition.csv", index=False)
    for number, name in enumerate(table["image_id"]):
        write_picture(folder / images / name, number, (178, 218))
    return folder


def hub_celeba(folder: Path, raw: Path) -> Path:
    """The repository on the Hub: one configuration, named in its README, splits train, valid and test."""
    config, table = "img_align+identity+attr", celeba_rows()
    attributes = ["5_o_Clock_Shadow", "Blond_Hair", "Male", "Young"]
    features = Features({"image": Image(), "celeb_id": Value("int64"), **dict.fromkeys(attributes, Value("bool"))})
    names = ("train", "valid", "test")
    for code, split in enumerate(names):
        part = table[table["partition"] == code]
        images = [{"bytes": (raw / "img_align_celeba" / name).read_bytes(), "path": name} for name in part["image_id"]]
        columns = {"image": images, "celeb_id": list(range(len(part)))}
        columns |= {name: part[name].astype(bool).tolist() for name in attributes}
        write_parquet(folder / config / f"{split}-00000-of-00001.parquet", columns, features)
    write_card(folder, config, {split: f"{config}/{split}-*" for split in names})
    return folder


# ---- CivilComments --------------------------------------------------------------------------------------------------

IDENTITIES = ("male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white")
AUXILIARY = ("identity_any", "severe_toxicity", "obscene", "threat", "insult", "identity_attack", "sexual_explicit")


def civilcomments_rows() -> pd.DataFrame:
    """Comments with commas, quotes, line breaks and names of nothing; every identity with both labels in each split."""
    odd = ['He said: "no", twice', "line one\nline two", "NA", "null", "café — naïve", "plain words"]
    rows: list[dict[str, Any]] = []
    for split in ("train", "val", "test"):
        for place, identity in enumerate((*IDENTITIES, None)):
            for toxicity in (0.0, 0.49, 0.5, 0.833333):
                shares = dict.fromkeys(IDENTITIES, 0.0)
                if identity is not None:
                    # A second identity, exactly at the cut.
                    shares |= {IDENTITIES[(place + 1) % len(IDENTITIES)]: 0.5, identity: 0.75}
                rows.append(
                    {
                        "id": 5000 + len(rows),
                        "comment_text": f"{odd[len(rows) % len(odd)]}",
                        "created_date": "2017-01-01 00:00:00+00",
                        "split": split,
                        "toxicity": toxicity,
                        **shares,
                        **dict.fromkeys(AUXILIARY, 0.0),
                        "identity_any": 1.0 if identity else 0.0,
                    }
                )
    return pd.DataFrame(rows).sample(frac=1.0, random_state=0, ignore_index=True)


def write_civilcomments(folder: Path, table: pd.DataFrame | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    table = civilcomments_rows() if table is None else table
    table.to_csv(folder / "all_data_with_identities.csv")
    return folder


def hub_civilcomments(folder: Path, raw: Path) -> Path:
    """The repository on the Hub: configuration "raw", one split that holds all rows."""
    table = pd.read_csv(raw / "all_data_with_identities.csv", index_col=0, keep_default_na=False)
    (folder / "raw").mkdir(parents=True)
    Dataset.from_pandas(table, preserve_index=False).to_parquet(folder / "raw/train-00000-of-00001.parquet")
    write_card(folder, "raw", {"train": "raw/train-*"})
    return folder


# ---- MultiNLI -------------------------------------------------------------------------------------------------------

ORIGINAL = ("multinli_1.0_train", "multinli_1.0_dev_matched", "multinli_1.0_dev_mismatched")
GROUP_DRO_LABELS = ("contradiction", "entailment", "neutral")


def multinli_rows(part: int, size: int = 12) -> list[dict[str, Any]]:
    """Pairs as the corpus has them; in the development parts one pair that nobody agreed on."""
    labels = ["entailment", "neutral", "contradiction"]
    rows = [
        {
            "annotator_labels": [labels[number % 3]] * (1 if part == 0 else 5),
            "genre": "fiction",
            "gold_label": labels[number % 3],
            "pairID": f"{part}{number}e",
            "sentence1": f"premise {part} {number}",
            "sentence2": f"it {'never ' if number % 2 else ''}rained {part} {number}",
        }
        for number in range(size)
    ]
    if part:
        rows.insert(3, {**rows[0], "gold_label": "-", "sentence2": "nobody agrees"})
    return rows


def write_multinli(folder: Path) -> Path:
    """The files of the corpus, and the split file of Group-DRO's authors, whose splits alternate."""
    folder.mkdir(parents=True, exist_ok=True)
    split_rows = []
    for part, stem in enumerate(ORIGINAL):
        rows = multinli_rows(part)
        (folder / f"{stem}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        split_rows += [row for row in rows if row["gold_label"] != "-"]
    table = pd.DataFrame(
        {
            "gold_label": [GROUP_DRO_LABELS.index(row["gold_label"]) for row in split_rows],
            "sentence2_has_negation": [int("never" in row["sentence2"]) for row in split_rows],
            # All six groups in each of the three.
            "split": [number // 6 % 3 for number in range(len(split_rows))],
        }
    )
    table.to_csv(folder / "metadata_random.csv")
    return folder


def hub_multinli(folder: Path, raw: Path) -> Path:
    """The repository on the Hub: no pairs without a label, classes in another order than Group-DRO's."""
    names = ["entailment", "neutral", "contradiction"]
    features = Features(premise=Value("string"), hypothesis=Value("string"), label=ClassLabel(names=names))
    for stem, split in zip(ORIGINAL, ("train", "validation_matched", "validation_mismatched"), strict=True):
        rows = [json.loads(line) for line in (raw / f"{stem}.jsonl").read_text().splitlines()]
        rows = [row for row in rows if row["gold_label"] != "-"]
        columns = {
            "premise": [row["sentence1"] for row in rows],
            "hypothesis": [row["sentence2"] for row in rows],
            "label": [names.index(row["gold_label"]) for row in rows],
        }
        write_parquet(folder / f"data/{split}-00000-of-00001.parquet", columns, features)
    return folder


# ---- What they share ------------------------------------------------------------------------------------------------


def as_wilds(root: Path, name: str, raw: Path) -> Path:
    """The root of the wilds package's folders, one of which is `raw` under the package's name."""
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{name}_v1.0").symlink_to(raw, target_is_directory=True)
    (raw / "RELEASE_v1.0.txt").write_text("")
    return root


def write_parquet(path: Path, columns: Mapping[str, list[Any]], features: Features) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_dict(dict(columns), features=features).to_parquet(path)


def write_card(folder: Path, config: str, files: Mapping[str, str]) -> None:
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, path in files.items():
        lines += [f"  - split: {split}", f"    path: {path}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file and what is in it: for tests that nothing was written."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
