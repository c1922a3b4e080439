"""Writes wilds_numbers.json: what the `wilds` package says of made predictions on miniature data.

Its accuracies of groups need torch_scatter, which has to be compiled:

    pip install --no-build-isolation torch_scatter
    PYTHONPATH=.:tests/support python tests/data/make_wilds_numbers.py
"""

import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import wilds_folders as folders
from wilds import get_dataset
from wilds.common.grouper import CombinatorialGrouper

NUMBERS = Path(__file__).with_name("wilds_numbers.json")
# Name in the package, its miniature, the split that is evaluated, the fields that its training groups come from.
CASES: dict[str, tuple[Callable[[Path], Path], str, list[str]]] = {
    "civilcomments": (folders.write_civilcomments, "test", ["black", "y"]),
    "poverty": (lambda root: folders.write_poverty(root, ood_rows=40, images=False), "test", ["country"]),
    "fmow": (lambda root: folders.write_fmow(root, rows=1200, images=False), "test", ["year"]),
    "camelyon17": (lambda root: folders.write_camelyon(root, rows=200, images=False), "test", ["hospital"]),
    "waterbirds": (folders.write_waterbirds, "test", ["background", "y"]),
    "celebA": (folders.write_celeba, "test", ["male", "y"]),
}


def numbers_of(name: str, root: Path) -> dict[str, Any]:
    """Metadata, predictions, groups and results of one benchmark."""
    write, split, fields = CASES[name]
    write(root)
    # The package writes numbers into columns of strings, which pandas 3 refuses.
    with pd.option_context("future.infer_string", False):
        dataset = get_dataset(name, root_dir=str(root))
    part = dataset.get_subset(split)
    truth, metadata = part.y_array, part.metadata_array
    generator = torch.Generator().manual_seed(0)
    if name == "poverty":
        predicted = truth + torch.randn(truth.shape, generator=generator)
    else:
        wrong = torch.rand(len(truth), generator=generator) < 0.3
        predicted = torch.where(wrong, (truth + 1) % dataset.n_classes, truth)
    grouper = CombinatorialGrouper(dataset, fields)
    results, _ = dataset.eval(predicted, truth, metadata)
    named = dataset.metadata_map or {}
    return {
        "fields": dataset.metadata_fields,
        "names": {field: [str(value) for value in values] for field, values in named.items()},
        "metadata": metadata.tolist(),
        "labels": truth.flatten().tolist(),
        "predictions": predicted.flatten().tolist(),
        "training_fields": fields,
        "training_groups": grouper.metadata_to_group(metadata).tolist(),
        "results": {key: float(value) for key, value in results.items()},
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="(CombinatorialGrouper|Minimum metadata value)")
    with tempfile.TemporaryDirectory() as folder:
        found = {name: numbers_of(name, Path(folder)) for name in CASES}
    lines = [f"{json.dumps(name)}: {json.dumps(content)}" for name, content in found.items()]
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print({name: (len(content["labels"]), content["results"]) for name, content in found.items()})
