"""What setup.cfg asks for is what is imported, and what CI installs once: the oldest set and the newest."""

import ast
import sys
from configparser import ConfigParser

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from paths import ROOT

HELPERS = {"deepspeed", "trl", "trackio", "mlflow", "wandb"}
"""Floors that the oldest set leaves out: DeepSpeed compiles, trl wants newer datasets, and trackers beside TensorBoard are tried by hand."""
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""What a package is called where it is imported, if otherwise."""
PARTS = {"pyarrow": "datasets", "tokenizers": "transformers"}
"""Packages whose versions another one fixes, by that one."""


def config() -> ConfigParser:
    found = ConfigParser(interpolation=None)
    found.read(ROOT / "setup.cfg")
    return found


def requirements(section: str, name: str) -> dict[str, Requirement]:
    lines = [line for line in config()[section][name].split("\n") if line and not line.startswith("%")]
    return {Requirement(line).name.lower(): Requirement(line) for line in lines}


def pins(name: str) -> dict[str, Version]:
    lines = (ROOT / "tests/constraints" / f"{name}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower(): Version(version) for name, version in pairs}


def floors() -> dict[str, Version]:
    asked = dict(requirements("options", "install_requires"))
    for extra in ("vision", "wilds", "peft", "search", "trl", "slurm", "tokens", "trackers"):
        asked |= requirements("options.extras_require", extra)
    found = {}
    for name, requirement in asked.items():
        (bound,) = requirement.specifier
        assert bound.operator == ">=", requirement
        found[name] = Version(bound.version)
    return found


def test_the_oldest_set_is_that_of_the_lower_bounds() -> None:
    assert {name: version for name, version in floors().items() if name not in HELPERS} == pins("oldest")


def test_the_newest_set_names_the_same_packages_and_is_newer() -> None:
    old, new = pins("oldest"), pins("newest")
    assert set(new) - HELPERS == set(old)
    assert all(new[name] >= version for name, version in old.items())


def test_what_is_imported_is_asked_for() -> None:
    names = set()
    for path in (ROOT / "hf_cgd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.add(node.module.split(".")[0])
    names -= {*sys.stdlib_module_names, "hf_cgd"}
    assert {"torch", "sklearn", "PIL", "yaml"} <= names
    asked = {*floors(), "deepspeed"}
    assert {name for name in names if PARTS.get(name) not in asked and PACKAGES.get(name, name) not in asked} == set()


@pytest.mark.parametrize("name", ["oldest", "newest"])
def test_no_file_names_where_packages_come_from(name: str) -> None:
    text = (ROOT / "tests/constraints" / f"{name}.txt").read_text()
    assert "//" not in text and "--" not in text
