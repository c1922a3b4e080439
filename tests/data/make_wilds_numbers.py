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

from hf_cgd.tasks.wilds_source import PACKAGE_WARNINGS

MOST_ROWS = 150
NUMBERS = Path(__file__).with_name("wilds_numbers.json")
# Name in the package, its miniature, the split that is evaluated, the fields that its training groups come from.
CASES: dict[str, tuple[Callable[[Path], Path], str, list[str]]] = {
    "civilcomments": (folders.write_civilcomments, "test", ["black", "y"]),
    # In splits of the same distribution, which hold all training groups.
    "poverty": (lambda root: folders.write_poverty(root, images=False), "id_test", ["country"]),
    "fmow": (lambda root: folders.write_fmow(root, rows=1200, images=False), "id_test", ["year"]),
    "camelyon17": (lambda root: folders.write_camelyon(root, rows=600, images=False), "id_val", ["hospital"]),
    "waterbirds": (folders.write_waterbirds, "test", ["background", "y"]),
    "celebA": (folders.write_celeba, "test", ["male", "y"]),
}


def evaluation_groupers(dataset: Any) -> list[CombinatorialGrouper]:
    """All of a dataset; it keeps one, a list or a dictionary."""
    kept = getattr(dataset, "_eval_grouper", None) or getattr(dataset, "_eval_groupers", None)
    return list(kept.values()) if isinstance(kept, dict) else kept if isinstance(kept, list) else [kept]


def grouped(grouper: CombinatorialGrouper, metadata: torch.Tensor) -> dict[str, Any]:
    """The group of each row, and the names of all groups as they stand in results."""
    return {
        "fields": list(grouper.groupby_fields),
        "groups": grouper.metadata_to_group(metadata).tolist(),
        "names": [grouper.group_field_str(group) for group in range(grouper.n_groups)],
    }


def predicted(name: str, root: Path) -> tuple[Any, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A dataset of the package on miniature data; predictions, labels and metadata of the split that is evaluated."""
    write, split, _ = CASES[name]
    write(root)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=PACKAGE_WARNINGS)
        # The package writes numbers into columns of strings, which pandas 3 refuses.
        with pd.option_context("future.infer_string", False):
            dataset = get_dataset(name, root_dir=str(root))
    part, generator = dataset.get_subset(split), torch.Generator().manual_seed(0)
    truth, metadata = part.y_array[:MOST_ROWS], part.metadata_array[:MOST_ROWS]
    if name == "poverty":
        return dataset, (truth + torch.randn(truth.shape, generator=generator), truth, metadata)
    wrong = torch.rand(len(truth), generator=generator) < 0.3
    return dataset, (torch.where(wrong, (truth + 1) % dataset.n_classes, truth), truth, metadata)


def numbers_of(dataset: Any, name: str, rows: Any, results: dict[str, float]) -> dict[str, Any]:
    """Metadata, predictions, groups and results of one benchmark, as they are kept."""
    predictions, truth, metadata = rows
    return {
        "fields": dataset.metadata_fields,
        "metadata": metadata.tolist(),
        "labels": truth.flatten().tolist(),
        "predictions": predictions.flatten().tolist(),
        "training": grouped(CombinatorialGrouper(dataset, CASES[name][2]), metadata),
        "evaluation": [grouped(one, metadata) for one in evaluation_groupers(dataset)],
        "results": {key: float(value) for key, value in results.items()},
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=PACKAGE_WARNINGS)
    lines = []
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            dataset, rows = predicted(name, Path(folder))
            results, shown = dataset.eval(*rows)
        print(f"{name}, {len(rows[1])} rows\n{shown}")
        lines.append(f"{json.dumps(name)}: {json.dumps(numbers_of(dataset, name, rows, results))}")
    NUMBERS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
