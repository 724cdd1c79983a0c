"""The notebook runs from top to bottom on the embedded server, shows what it says, and is stored without output."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from etl.config import RunConfig
from tests.jobs import ROOT

NOTEBOOK = ROOT / "notebooks" / "explore.ipynb"


@pytest.fixture(scope="module")
def stored() -> Any:
    """The notebook as it is in the repository."""
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after its cells have run in a kernel of their own, in an empty folder."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(notebook: Any, start: str) -> dict[str, str]:
    """What the cell that begins with `start` shows, by MIME type."""
    (cell,) = [cell for cell in code(notebook) if cell.source.startswith(start)]
    return {kind: str(value) for output in cell.outputs for kind, value in output.get("data", {}).items()}


def test_no_output_is_stored(stored: Any) -> None:
    assert [cell.id for cell in code(stored) if cell.outputs or cell.execution_count] == []


def test_no_function_is_defined(stored: Any) -> None:
    tree = ast.parse("\n".join(cell.source for cell in code(stored)))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)] == []


def test_what_the_cells_take_from_etl_is_there_and_every_option_is_one(stored: Any) -> None:
    tree = ast.parse("\n".join(cell.source for cell in code(stored)))
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and str(node.module).startswith("etl")]
    names = [(node.module or "", alias.name) for node in taken for alias in node.names]
    assert ("etl", "run") in names
    assert [name for module, name in names if not hasattr(importlib.import_module(module), name)] == []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "RunConfig"]
    options = {str(keyword.arg) for call in calls for keyword in call.keywords}
    assert "output" in options
    assert options <= {field.name for field in dataclasses.fields(RunConfig)}


# What the cells call is tested in a run's own files; a kernel, a cluster and all of it together take half a minute.
@pytest.mark.long
def test_every_cell_runs_and_only_the_run_says_something(executed: Any) -> None:
    said = [output for cell in code(executed) for output in cell.outputs if output.output_type in {"stream", "error"}]
    lines = "".join(output.get("text", "error\n") for output in said).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("the template leaves out the reasoning of earlier turns")
    assert lines[1].startswith("dashboard: http://127.0.0.1:")


@pytest.mark.long
def test_the_notebook_shows_what_it_promises(executed: Any) -> None:
    assert "http://127.0.0.1:" in shown(executed, "client.dashboard_link")["text/plain"]
    assert (
        'class="etl-preview"'
        in shown(executed, "preview(RunConfig(input=INPUT, tokenizer=TOKENIZER), n=2)")["text/html"]
    )
    told = shown(executed, "run(config)")["text/html"]
    assert " trained (" in told
    assert 'class="loud"' not in told
    assert "maths-00.jsonl" in shown(executed, "sums =")["text/html"]
    assert "trained without the thoughts" in shown(executed, "without =")["text/plain"]
    assert "ok" in shown(executed, "check(OUTPUT)")["text/plain"].lower()
