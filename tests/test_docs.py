"""What the documents say of names, files, versions and commands is so."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import DOCS, OPTIONS, Piece, options_page, pieces_of_notebook, pieces_of_page, run, words_and_numbers
from paths import ROOT

import hf_cgd

PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
NEAR = 0.1
"""How far a number of a small run may be from the one in a document: other machines round otherwise."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
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


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    """Links between pages, and paths in backticks that begin with a folder of the repository."""
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if not link.startswith("http")]
    paths = re.findall(r"`((?:hf_cgd|recipes|tests|benchmarks|docs)/[\w/.-]+)`", text)
    missing = [link for link in links if not (path.parent / link).exists()]
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


class _AnyTag(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of its extensions."""


_AnyTag.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages_of(navigation: list[dict[str, Any]]) -> list[str]:
    values = [value for entry in navigation for value in entry.values()]
    return [page for value in values for page in (pages_of(value) if isinstance(value, list) else [value])]


def test_the_navigation_names_every_page_once() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _AnyTag)
    assert sorted(pages_of(settings["nav"])) == sorted(path.relative_to(DOCS).as_posix() for path in PAGES)
    text = (DOCS / "notebooks.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"notebooks/{path.name}" not in text] == []


def test_the_reference_covers_what_the_package_exports() -> None:
    """Each public name has an entry; what has one has a docstring."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    found = [id(resolve(entry)) for entry in entries]
    assert [name for name in hf_cgd.__all__ if id(getattr(hf_cgd, name)) not in found] == []
    assert [entry for entry in entries if not resolve(entry).__doc__] == []


def test_the_page_of_options_is_that_of_the_config() -> None:
    """`python tests/support/documents.py` writes it."""
    assert OPTIONS.read_text(encoding="utf-8") == options_page()


def require_as_said(outputs: list[tuple[str, str]]) -> None:
    for said, printed in outputs:
        (words, numbers), (found_words, found_numbers) = words_and_numbers(said), words_and_numbers(printed)
        assert found_words == words
        assert found_numbers == pytest.approx(numbers, abs=NEAR)


def test_a_document_that_says_otherwise_is_found() -> None:
    table = "group        accuracy\n---------\nland (worst)  0.80\n"
    require_as_said(run([Piece("print('group accuracy')\nprint('land 0.82')", table)]))
    for code in ("print('group accuracy')\nprint('land 0.95')", "print('group accuracy')\nprint('water 0.8')"):
        with pytest.raises(AssertionError):
            require_as_said(run([Piece(code, table)]))


def test_the_tutorial_runs_and_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = run(pieces_of_page(DOCS / "tutorial.md"))
    assert len(outputs) == 4
    require_as_said(outputs)
    assert (tmp_path / "out/comparison.png").stat().st_size > 1000
    assert outputs[2][0] in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebooks_run_and_print_what_they_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = run(pieces_of_notebook(path))
    assert len(outputs) >= 2
    require_as_said(outputs)


def test_notebooks_are_committed_with_their_pictures() -> None:
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert '"image/png"' in text and '"text/html"' in text, path
        assert '"output_type": "error"' not in text and '"name": "stderr"' not in text, path


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
