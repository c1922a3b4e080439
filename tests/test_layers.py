"""A folder imports only from folders above it in one list, and nothing above `trainer` knows transformers."""

import ast
from pathlib import Path

import pytest

import hf_cgd

PACKAGE = Path(hf_cgd.__file__).parent
ORDER = [
    "lazy", "visible_text", "visible_numbers", "whole_files", "arithmetic", "penalties", "functional", "html", "monitors", "data", "models", "distributed", "objectives", "gradients", "robust_loss",
    "metrics", "tasks", "plots", "cards", "trainer", "discovery", "cli", "experiments", "", "__main__",
]  # fmt: skip
"""Folders (and the few files beside them), each above those that may import it; "" is the package itself, "__main__" the command."""
HOST_LIBRARIES = {"transformers", "accelerate"}


def room_of(module: str) -> str:
    return module.split(".")[0]


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) or "hf_cgd" for path in FILES])
def test_a_folder_imports_only_from_folders_above_it(path: Path) -> None:
    own = room_of(module_name(path))
    for name in imports_of(path):
        library, _, target = name.partition(".")
        if library == "hf_cgd" and room_of(target) != own:
            assert ORDER.index(room_of(target)) < ORDER.index(own), f"{own} imports {target}, which is not above it"
        if library in HOST_LIBRARIES:
            assert ORDER.index(own) >= ORDER.index("trainer"), f"{own} must not know {library}"


def test_every_folder_is_in_the_list_and_the_list_names_nothing_else() -> None:
    rooms = {room_of(module_name(path)) for path in FILES}
    assert rooms == set(ORDER)


def test_no_file_is_called_utils() -> None:
    assert not [path for path in FILES if "util" in path.stem]
