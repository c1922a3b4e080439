"""A file imports only from layers below its own, and nothing below the line knows transformers."""

import ast
from pathlib import Path

import pytest

import hf_cgd

PACKAGE = Path(hf_cgd.__file__).parent
LAYERS = [
    ["columns", "communication", "functional", "group_history", "guard_rails", "losses", "tables"],
    ["groups", "forward_pass", "interactions", "late_checks", "sampling", "objectives.base", "pooled_rows", "gradients.scope", "gradients.surrogate",
     "metrics.intervals"],
    ["gradients.layer_gradients", "gradients.per_group", "head"],
    ["gradients.single_pass"],
    ["gradients.sketch", "gradients.one_hot"],
    ["gradients.auto"],
    ["gradients.tensor_hooks"],
    ["collator", "dataset_groups", "gradients", "objectives.adaptive", "objectives.penalty",
     "metrics.group_metrics", "metrics.report"],
    ["objectives.erm", "objectives.group_dro", "objectives.cgd", "objectives.pgi", "objectives.irm", "objectives.coral",
     "metrics", "metrics.evaluate_module"],
    ["objectives"],
    ["robust_loss"],
    ["tasks"],
    ["config", "evaluation", "callbacks", "checkpoints", "plots", "cards", "sharding"],
    ["trainer"],
    ["launch"],
    ["experiments.grid"],
    ["experiments.selection"],
    ["experiments.runner", "experiments.summary"],
    ["experiments.presets"],
    ["experiments", "experiments.__main__"],
    [""],
]  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FIRST_WITH_TRANSFORMERS = RANK["config"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def rank_of(module: str) -> int:
    return RANK["tasks"] if module.split(".")[0] == "tasks" else RANK[module]


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) or "hf_cgd" for path in FILES])
def test_imports_point_down(path: Path) -> None:
    own = module_name(path)
    for name in imports_of(path):
        if name.split(".")[0] == "hf_cgd":
            target = name.removeprefix("hf_cgd").lstrip(".")
            if own.startswith("tasks") and target.startswith("tasks"):
                continue
            assert rank_of(target) < rank_of(own), f"{own} imports {target}, which is not below it"
        if name.split(".")[0] in ("transformers", "accelerate") and not own.startswith("tasks"):
            assert rank_of(own) >= FIRST_WITH_TRANSFORMERS, f"{own} must not know {name}"


def test_no_file_is_called_utils() -> None:
    assert not [path for path in PACKAGE.rglob("*.py") if "util" in path.stem]
