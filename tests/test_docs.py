"""What the documents say of names, files, versions and commands is so."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

import hf_cgd

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LATER = {"reliability.md"}
"""Pages of the navigation that may be missing while they are written."""


def resolve(name: str) -> object:
    """What a dotted name stands for; AttributeError where it stands for nothing."""
    module, _, rest = name.partition(".")
    found: object = importlib.import_module(module)
    path = module
    for part in filter(None, rest.split(".")):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                raise AttributeError(path) from None
    return found


def python_blocks(text: str) -> list[str]:
    return [block.removesuffix("\n") for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def imported_names(code: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.split(".")[0] == "hf_cgd"}


def names_in(text: str) -> set[str]:
    """Dotted names of the package in code and prose, and what examples import."""
    dotted = {name for name in re.findall(r"(?<![\w/.-])hf_cgd(?:\.\w+)+", text) if not name.endswith(".py")}
    return dotted.union(*map(imported_names, python_blocks(text)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_names_of_the_package_exist(path: Path) -> None:
    missing = []
    for name in sorted(names_in(path.read_text(encoding="utf-8"))):
        try:
            resolve(name)
        except AttributeError:
            missing.append(name)
    assert missing == []


def test_names_that_do_not_exist_are_found() -> None:
    text = "`hf_cgd.tasks.files`, `hf_cgd.CGD`\n```python\nfrom hf_cgd.plots import no_figure\n```"
    assert names_in(text) == {"hf_cgd.tasks.files", "hf_cgd.CGD", "hf_cgd.plots.no_figure", "hf_cgd.plots"}
    assert resolve("hf_cgd.CGD") is hf_cgd.CGD
    for name in ("hf_cgd.tasks.files", "hf_cgd.plots.no_figure"):
        with pytest.raises(AttributeError):
            resolve(name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Links between pages, and paths in backticks that begin with a folder of the repository."""
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:hf_cgd|recipes|tests|benchmarks|docs)/[\w/.-]+)`", text)
    missing = [link for link in links if not (path.parent / link).exists() and Path(link).name not in LATER]
    missing += [name for name in paths if not (ROOT / name).exists()]
    assert missing == []


def test_files_of_the_architecture_exist() -> None:
    """Its tables name files relative to the package, and functions behind a colon."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    package = Path(hf_cgd.__file__).parent
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)(?:: (\w+(?:\.\w+)?))?`", text)
    assert len(named) > 30
    for name, inside in named:
        found = [package / name, package / "robust_loss" / name, ROOT / name]
        source = next((path for path in found if path.exists()), None)
        assert source is not None, name
        for part in filter(None, inside.split(".")):
            assert re.search(rf"\b(def|class) {part}\b", source.read_text(encoding="utf-8")), f"{name}: {inside}"


def test_the_navigation_names_every_page() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {page for entry in navigation for page in entry.values()}
    assert pages - LATER == {path.name for path in DOCUMENTS if path.parent.name == "docs"} - LATER


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(r"^## (\S+)", text, re.MULTILINE)
    assert found is not None and found[1] == hf_cgd.__version__


def test_new_names_of_the_changelog_exist() -> None:
    """The right column of the table of renames, where a name is written out whole."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    now = {name for row in rows for name in re.findall(r"`(hf_cgd(?:\.\w+)+)", row[1])}
    assert len(now) > 10
    for name in now:
        resolve(name)
