"""Miniature copies of the folders of the WILDS bundles: real names, columns and encodings, tiny images, odd rows."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

IDENTITIES = ("male", "female", "LGBTQ", "christian", "muslim", "other_religions", "black", "white")
AUXILIARY = (
    "identity_any", "severe_toxicity", "obscene", "threat", "insult", "identity_attack", "sexual_explicit",
)  # fmt: skip
COUNTRIES = (
    "angola", "benin", "burkina_faso", "cameroon", "cote_d_ivoire", "democratic_republic_of_congo", "ethiopia",
    "ghana", "guinea", "kenya", "lesotho", "malawi", "mali", "mozambique", "nigeria", "rwanda", "senegal",
    "sierra_leone", "tanzania", "togo", "uganda", "zambia", "zimbabwe",
)  # fmt: skip
CATEGORIES = ("airport", "multi-unit_residential", "zoo")
REGIONS = {"ETH": "Africa", "BRA": "Americas", "CHN": "Asia", "FRA": "Europe", "AUS": "Oceania"}
SIDE = 16


def bundle(root: Path, name: str, version: str) -> Path:
    """The folder of a bundle as the package unpacks it, with the file by which it knows that it is complete."""
    folder = root / f"{name}_v{version}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"RELEASE_v{version}.txt").touch()
    return folder


def picture(path: Path, number: int, side: int = SIDE) -> None:
    """A PNG that can be told from the others by its upper left pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((side, side, 3), (number * 37) % 256, dtype=np.uint8)
    pixels[0, 0] = number % 256
    Image.fromarray(pixels).save(path)


def write_poverty(root: Path, id_rows: int = 60, ood_rows: int = 12, side: int = SIDE, images: bool = True) -> Path:
    """PovertyMap: 2,000 rows of fold A's own countries to validate and test, `id_rows` to train, and the others.

    The package holds back 2,000 rows whatever the size. Images of whatever rows are links to a few files.
    """
    folder = bundle(root, "poverty", "1.1")
    generator = np.random.default_rng(0)
    train = [name for name in COUNTRIES if name not in _FOLD_A_OTHERS]
    countries = [train[row % len(train)] for row in range(2000 + id_rows)]
    countries += [_FOLD_A_OTHERS[row % len(_FOLD_A_OTHERS)] for row in range(ood_rows)]
    generator.shuffle(countries)
    size = len(countries)
    pd.DataFrame(
        {
            "filename": [f"{number:05d}" for number in range(size)], "lat": generator.normal(size=size),
            "lon": generator.normal(size=size), "wealthpooled": generator.normal(size=size).round(6),
            "country": countries, "year": generator.integers(2009, 2017, size),
            "urban": generator.integers(0, 2, size).astype(bool), "nl_mean": generator.random(size),
        }
    ).to_csv(folder / "dhs_metadata.csv", index=False)  # fmt: skip
    (folder / "images").mkdir(exist_ok=True)
    kinds = 4
    for number in range(size if images else 0):
        path = folder / "images" / f"landsat_poverty_img_{number}.npz"
        if number < kinds:
            array = generator.normal(size=(8, side, side)).astype(np.float32)
            array[0, 0, 0] = number
            np.savez_compressed(path, x=array)
        elif not path.exists():
            os.link(folder / "images" / f"landsat_poverty_img_{number % kinds}.npz", path)
    return folder


_FOLD_A_OTHERS = (
    "benin", "burkina_faso", "guinea", "sierra_leone", "tanzania",
    "angola", "cote_d_ivoire", "ethiopia", "mali", "rwanda",
)  # fmt: skip


def write_fmow(root: Path, rows: int = 120, side: int = SIDE, images: bool = True) -> Path:
    """FMoW: years 2002 to 2017, five regions, countries of no region, and rows that are held back ("seq")."""
    folder = bundle(root, "fmow", "1.1")
    generator = np.random.default_rng(1)
    splits = ["train", "train", "train", "val", "test", "seq"]
    # "XKX" is in no mapping.
    codes = [*REGIONS, "XKX"]
    table = pd.DataFrame(
        {
            "split": [splits[row % 6] for row in range(rows)],
            "img_filename": [f"x_{row}_rgb.jpg" for row in range(rows)],
            "category": [CATEGORIES[generator.integers(3)] for _ in range(rows)],
            "country_code": [codes[row // 6 % 6] for row in range(rows)],
            "timestamp": [f"{2002 + row * 7 % 16}-{1 + row % 12:02d}-03T08:17:{row % 60:02d}Z" for row in range(rows)],
            "visible": [1] * rows,
        }
    )
    # The edges of the periods.
    table.loc[0, ["split", "timestamp"]] = ["train", "2012-12-31T23:59:59Z"]
    table.loc[3, ["split", "timestamp"]] = ["val", "2013-01-01T00:00:00Z"]
    table.loc[4, ["split", "timestamp"]] = ["test", "2016-01-01T00:00:00Z"]
    table.to_csv(folder / "rgb_metadata.csv", index=False)
    mapping = {"name": list(REGIONS), "alpha-3": list(REGIONS), "region": list(REGIONS.values())}
    pd.DataFrame(mapping | {"region-code": range(5)}).to_csv(folder / "country_code_mapping.csv", index=False)
    for row in range(rows if images else 0):
        if splits[row % 6] != "seq":
            picture(folder / "images" / f"rgb_img_{row}.png", row, side)
    return folder


def write_camelyon(root: Path, rows: int = 60, side: int = SIDE, images: bool = True) -> Path:
    """Camelyon17: five hospitals, patients with leading zeros, splits of the hospitals 1 and 2 left to the package."""
    folder = bundle(root, "camelyon17", "1.0")
    generator = np.random.default_rng(2)
    centers = [row % 5 for row in range(rows)]
    table = pd.DataFrame(
        {
            "patient": [f"{4 + 20 * center:03d}" for center in centers],
            "node": [row // 5 % 2 for row in range(rows)],
            "x_coord": [3328 + 32 * row for row in range(rows)],
            "y_coord": [21792 + 64 * row for row in range(rows)],
            "tumor": generator.integers(0, 2, rows),
            "slide": [10 * center + row // 5 % 3 for row, center in enumerate(centers)],
            "center": centers,
            "split": [int(row // 5 % 4 == 3) for row in range(rows)],
        }
    )
    table.to_csv(folder / "metadata.csv")
    for row, (patient, node, x, y) in enumerate(table[["patient", "node", "x_coord", "y_coord"]].values):
        name = f"patient_{patient}_node_{node}"
        if images:
            picture(folder / "patches" / name / f"patch_{name}_x_{x}_y_{y}.png", row, side)
    return folder


def write_civilcomments(root: Path, rows: int = 200) -> Path:
    """CivilComments: shares of annotators, on both sides of a half and on it; comments with commas and line ends."""
    folder = bundle(root, "civilcomments", "1.0")
    generator = np.random.default_rng(3)
    size = (rows, len(IDENTITIES) + len(AUXILIARY) + 1)
    shares = generator.choice([0.0, 0.25, 0.5, 0.75, 1.0], size, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    columns = ["toxicity", *IDENTITIES, *AUXILIARY]
    table = pd.DataFrame({name: shares[:, place] for place, name in enumerate(columns)})
    table.insert(0, "comment_text", [f'comment {row}, "so" they\nsay' for row in range(rows)])
    table.insert(1, "split", [("train", "val", "test")[row % 3] for row in range(rows)])
    table.to_csv(folder / "all_data_with_identities.csv")
    return folder


def write_waterbirds(root: Path, rows: int = 120) -> Path:
    """The table of Waterbirds."""
    folder = bundle(root, "waterbirds", "1.0")
    generator = np.random.default_rng(4)
    table = {
        "img_id": range(1, rows + 1), "img_filename": [f"001.Albatross/Bird_{row}.jpg" for row in range(rows)],
        "y": generator.integers(0, 2, rows), "split": [row % 3 for row in range(rows)],
        "place": generator.integers(0, 2, rows), "place_filename": [f"/b/place_{row}.jpg" for row in range(rows)],
    }  # fmt: skip
    pd.DataFrame(table).to_csv(folder / "metadata.csv", index=False)
    return folder


def write_celeba(root: Path, rows: int = 120, attributes: Sequence[str] = ("Bald", "Blond_Hair", "Male")) -> Path:
    """The tables of CelebA."""
    folder = bundle(root, "celebA", "1.0")
    generator = np.random.default_rng(5)
    names = [f"{row + 1:06d}.jpg" for row in range(rows)]
    values = {name: generator.choice([-1, 1], rows) for name in attributes}
    pd.DataFrame({"image_id": names, **values}).to_csv(folder / "list_attr_celeba.csv", index=False)
    splits = {"image_id": names, "partition": [row % 3 for row in range(rows)]}
    pd.DataFrame(splits).to_csv(folder / "list_eval_partition.csv", index=False)
    return folder
