"""environment.yml and the files of constraints say the same as pyproject.toml."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
CONDA_NAMES = {
    "dask": "dask-core",
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
}
"""PyPI's name -> conda-forge's, where they differ. (dask-core is Dask without what `dataframe` adds: listed itself.)"""

IMPORT_NAMES = {"yaml": "pyyaml"}
"""Import name -> PyPI's name, where they differ."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


@pytest.fixture(scope="module")
def requirements(project: dict[str, Any]) -> list[Requirement]:
    extras = project["optional-dependencies"]
    return [Requirement(line) for line in [*project["dependencies"], *extras["demo"], *extras["dev"]]]


def conda_bounds() -> dict[str, str]:
    """Name -> bounds of every package in environment.yml, its pip section included."""
    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = [line for entry in lines if isinstance(entry, dict) for line in entry["pip"] if not line.startswith("-")]
    pairs = (line.partition(" ")[::2] for line in [*(entry for entry in lines if isinstance(entry, str)), *pip])
    return {name: bounds.replace(" ", "") for name, bounds in pairs}


def test_conda_gets_the_same_packages_with_the_same_bounds(
    project: dict[str, Any], requirements: list[Requirement]
) -> None:
    wanted = {
        CONDA_NAMES.get(str(canonicalize_name(r.name)), str(canonicalize_name(r.name))): str(r.specifier)
        for r in requirements
    }
    assert conda_bounds() == {**wanted, "python": project["requires-python"], "pip": ""}


def test_every_package_has_a_lower_bound(requirements: list[Requirement]) -> None:
    assert [str(r) for r in requirements if not str(r.specifier).startswith(">=")] == []


def test_every_import_is_a_declared_package(project: dict[str, Any], requirements: list[Requirement]) -> None:
    files = [*(ROOT / "etl").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"etl", "tests", "pytest"}
    rivals = [Requirement(line) for line in project["optional-dependencies"]["bench"]]
    declared = {canonicalize_name(r.name) for r in [*requirements, *rivals]}
    assert sorted(n for n in foreign if canonicalize_name(IMPORT_NAMES.get(n, n)) not in declared) == []


def pins(file: str) -> dict[str, Version]:
    """Name -> the one version that a constraints file allows."""
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line)] == []
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def test_every_pin_lies_within_the_bounds(requirements: list[Requirement]) -> None:
    pinned = pins("constraints.txt")
    assert [str(r) for r in requirements if not r.specifier.contains(pinned[canonicalize_name(r.name)])] == []


def test_the_lowest_versions_are_the_bounds_themselves(project: dict[str, Any]) -> None:
    pinned = pins("constraints-lowest.txt")
    lines = [*project["dependencies"], *project["optional-dependencies"]["demo"]]
    bounds = {canonicalize_name(r.name): Version(b.version) for r in map(Requirement, lines) for b in r.specifier}
    assert {name: pinned[name] for name in bounds} == bounds


def test_torch_is_nowhere() -> None:
    files = ("pyproject.toml", "environment.yml", "constraints.txt", "constraints-lowest.txt")
    named = re.compile(r"^\W*(torch|jax|tensorflow)\b", re.MULTILINE)
    assert [name for name in files if named.search((ROOT / name).read_text())] == []
