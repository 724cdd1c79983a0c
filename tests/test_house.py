"""The house rules: where a module may import from, what it may be called, how long and how plain its code is.

A new module is placed in ORDER by its author: the data's way through the house, each module importing from those above.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ETL = Path(__file__).resolve().parent.parent / "etl"

ORDER = (
    # the shared words
    "errors", "records", "config", "schema", "watcher", "pages",
    # s3 objects -> partitions -> lines
    "storage", "partitions", "lines",
    # -> conversations
    "jsonline", "messages", "shapes", "conversation",
    # -> rendered text and its trained spans
    "replays", "sandbox", "builtin", "tokenizer", "template", "pieces", "marks", "turns", "rendering",
    # -> token ids and masks
    "added", "positions", "engines", "masking", "encoding",
    # -> Parquet, and the stages composed for one partition
    "tables", "fingerprint", "pipeline",
    # -> the books of a run, the engine, the run itself
    "ledger", "contents", "recount", "audit", "summary", "lease", "surveys", "cluster", "preload", "jobs", "inspection",
    # the doors: Python, eyes, command line
    "etl", "viewer", "embedded", "demo", "terminal", "__main__",
)  # fmt: skip

HOMES = {
    "dask": {"cluster"},
    "distributed": {"cluster"},
    "aiobotocore": {"storage"},
    "aiohttp": {"storage"},
    "botocore": {"storage"},
    "fsspec": {"storage"},
    "s3fs": {"storage"},
    "boto3": {"demo"},  # makes the embedded server's bucket, which `storage` never does
    "moto": {"embedded"},
    "transformers": {"tokenizer"},
    "huggingface_hub": {"tokenizer"},
    "gigatoken": {"engines"},
    "orjson": {"jsonline", "partitions"},  # lines, and the identity of a partition
    "zstandard": {"lines", "partitions"},  # partitions look at the first bytes of an object
    "argparse": {"terminal"},
    "rich": {"terminal", "viewer"},
}
"""The one place that knows a package."""

BROAD = {
    "engines": "a native panic is a BaseException whose class has no name to import",
    "tokenizer": "hub clients and tokenizer loaders raise whatever their libraries do, plain Exception included",
}
"""Modules that may catch everything, and why."""

FUNCTIONS = {"RunConfig", "plan", "run", "frame", "preview", "check", "report", "export", "doctor", "normalize"}
LONGEST = 40


@cache
def house() -> dict[str, ast.Module]:
    """Module name -> its tree; the package itself is `etl`."""
    names = {path: ".".join(path.relative_to(ETL).with_suffix("").parts) for path in sorted(ETL.rglob("*.py"))}
    return {"etl" if n == "__init__" else n: ast.parse(path.read_text("utf-8"), str(path)) for path, n in names.items()}


def imported(tree: ast.Module) -> Iterator[str]:
    """Every module that a file imports, at the top or inside a function; `etl.x` where it is one of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            inside = module == "etl"
            yield from (f"etl.{alias.name}" if inside and alias.name in house() else module for alias in node.names)


def ours(tree: ast.Module) -> set[str]:
    """The modules of this house that a file imports."""
    names = (name.removeprefix("etl.") for name in imported(tree) if name.split(".")[0] == "etl")
    return set(names)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_module_has_its_place_in_the_order_of_the_data() -> None:
    assert sorted(set(house()) - set(ORDER)) == [], "place the new module in ORDER, after all that it imports"
    assert sorted(set(ORDER) - set(house())) == [], "ORDER names modules that are gone"


@pytest.mark.parametrize("name", sorted(house()))
def test_a_module_imports_only_from_those_before_it(name: str) -> None:
    known = ORDER[: ORDER.index(name)] if name in ORDER else ()
    assert sorted(ours(house()[name]) - set(known)) == []


def test_imports_are_absolute() -> None:
    assert [(name, other) for name, tree in house().items() for other in imported(tree) if other.startswith(".")] == []


@pytest.mark.parametrize("package", sorted(HOMES))
def test_a_package_is_known_in_one_place(package: str) -> None:
    users = {name for name, tree in house().items() if package in {other.split(".")[0] for other in imported(tree)}}
    assert sorted(users - HOMES[package]) == []


def test_no_module_is_named_like_a_public_function_or_the_standard_library() -> None:
    taken = {name.lower() for name in FUNCTIONS} | sys.stdlib_module_names
    assert sorted(name for name in house() if set(name.split(".")) & taken) == []


def test_every_module_says_what_flows_in_and_out() -> None:
    assert [name for name, tree in house().items() if not ast.get_docstring(tree)] == []


def test_no_function_is_longer_than_a_screen() -> None:
    sizes = {
        f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, tree in house().items()
        for node in functions(tree)
    }
    assert {name: size for name, size in sizes.items() if size > LONGEST} == {}


def is_broad(handler: ast.ExceptHandler) -> bool:
    names = (
        (node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)) if handler.type else ["Exception"]
    )
    return bool({"Exception", "BaseException"} & set(names))


def test_nothing_catches_everything() -> None:
    handlers = (
        (name, node.lineno)
        for name, tree in house().items()
        if name not in BROAD
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    )
    assert list(handlers) == []


def test_the_source_asserts_nothing() -> None:
    found = [(n, node.lineno) for n, tree in house().items() for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert found == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("etl", {"dask", "distributed", "transformers", "pyarrow", "s3fs", "rich"}),
        ("etl.pipeline", {"dask", "distributed", "transformers", "torch", "rich", "argparse", "boto3"}),
        ("etl.terminal", {"dask", "distributed", "transformers"}),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert sorted(absent & set(loaded)) == []
