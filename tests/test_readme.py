"""README.md says what the code says: its tables of columns and files are those of etl/schema.py and etl/*.py.

python -m tests.test_readme        writes both tables again
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from etl.config import RunConfig
from etl.schema import COLUMNS
from tests.test_house import ETL, ORDER

README = ETL.parent / "README.md"
TYPE_NAMES = {"list<item: int32>": "list<int32>", "list<item: int8>": "list<int8>"}


def column_rows() -> list[str]:
    """One Markdown row for each column of the output, in file order."""
    return [f"| `{name}` | `{TYPE_NAMES.get(str(kind), str(kind))}` | {meaning} |" for name, kind, meaning in COLUMNS]


def house_rows() -> list[str]:
    """One Markdown row for each module, in the data's order, with the first line of its docstring."""
    return [f"| `{path.name}` | {first_line(path)} |" for path in files()]


def files() -> list[Path]:
    return [ETL / f"{'__init__' if name == 'etl' else name}.py" for name in ORDER]


def first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n")[0].rstrip(".:")


TABLES = {"columns": column_rows, "house": house_rows}


def table(name: str) -> re.Pattern[str]:
    """The rows of a table between its two comments."""
    return re.compile(rf"(<!-- {name}:.*?-->\n\|.*\n\|[-|]+\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_says(name: str) -> None:
    found = table(name).search(README.read_text("utf-8"))
    assert found is not None
    assert found[2].splitlines() == TABLES[name](), "python -m tests.test_readme writes it again"


def test_every_option_that_the_readme_names_exists() -> None:
    own = {"help", "json", "debug", "config", "quiet", "html", "endpoint-url"}
    named = set(re.findall(r"--([a-z][a-z-]+)", README.read_text("utf-8").replace("<!--", "").replace("-->", "")))
    known = {field.name.replace("_", "-") for field in dataclasses.fields(RunConfig)} | own
    assert sorted(named - known) == []


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ETL.parent / "Makefile").read_text("utf-8")
    named = re.findall(r"\bmake ([a-z-]+)", README.read_text("utf-8"))
    assert {"run", "test"} <= set(named)
    assert [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def write() -> None:
    """Write both tables into README.md."""
    text = README.read_text("utf-8")
    for name, rows in TABLES.items():
        found = table(name).search(text)
        if found is not None:
            text = text[: found.start(2)] + "".join(f"{row}\n" for row in rows()) + text[found.end(2) :]
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    write()
