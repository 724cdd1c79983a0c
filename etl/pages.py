"""Values -> lines of text and tables of HTML, with whatever they carry from the input escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from etl.errors import UsageError

STYLE: Final = (
    ".etl{overflow-x:auto}"
    ".etl table{border-collapse:collapse;margin:.3rem 0 1.2rem}"
    ".etl td,.etl th{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0;border-bottom:1px solid #8884}"
    ".etl .loud{background:#c00;color:#fff;font-weight:bold;padding:.5rem .8rem}"
)


def printable(text: str) -> str:
    r"""The text on one line and without a character that a terminal would obey: ESC shows as `\x1b`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape(text: object) -> str:
    """The text as HTML shows it, control characters spelled out."""
    return html.escape(printable(str(text)))


def html_table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """Rows of cells as a table; every cell is escaped. No rows: nothing."""
    body = "".join(_html_row("td", row) for row in rows)
    return f"<table>{_html_row('th', head) if head else ''}{body}</table>" if body else ""


def _html_row(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def html_lines(text: str, loud: str | None = None) -> str:
    """Lines of text as a notebook shows them, `loud` above them."""
    above = f'<p class="loud">{escape(loud)}</p>' if loud else ""
    return html_fragment(above + "".join(f"<div>{escape(line)}</div>" for line in text.splitlines()))


def html_section(title: str, content: str) -> str:
    """A heading and what stands under it; nothing where that is empty. `content` is HTML already."""
    return f"<h3>{escape(title)}</h3>{content}" if content else ""


def html_fragment(content: str) -> str:
    """HTML with its own style, to stand in a notebook or on a page; it styles nothing around it."""
    return f'<div class="etl"><style>{STYLE}</style>{content}</div>'


def html_page(title: str, fragment: str, body_style: str) -> str:
    """One self-contained file, for light and dark: nothing in it is fetched from elsewhere."""
    style = f"<style>:root{{color-scheme:light dark}}body{{{body_style}}}</style>"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}{style}</head><body>{fragment}</body></html>\n'


def check_place(option: str, path: str) -> None:
    """Raise UsageError where the page that an option names could not be written, before the work that goes into it."""
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise UsageError(f"{option} {path}: name a file in a folder that exists")


def number(value: float) -> str:
    """1234567 as `1,234,567`; a float with one decimal."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def counted(values: Mapping[str, int]) -> str:
    """`3 json, 1 role`, the most frequent first."""
    ordered = sorted(values.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{number(count)} {name}" for name, count in ordered)
