"""Preview -> lines of text for a terminal: trained tokens marked by `+` and by colour, each told from the next.

Without colour (no terminal, or NO_COLOR) bars stand between tokens, and the `+` alone says what is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from etl.inspection import HOW_TO_READ, PIECES, LegendLine, Preview, ShownRow, Token, one_line, show_token, visible
from etl.pages import printable

Run: TypeAlias = tuple[str, str]
"""Text and the style that `rich` gives it; '' is none."""

_GUTTER: Final = 13
_BREAK: Final = "\N{BROKEN BAR}"
_GREYS: Final = ("color(247)", "color(242)")
_SHADES: Final = ("black on {}", "black on {} underline")


def text_lines(preview: Preview, *, colour: bool) -> Iterator[list[Run]]:
    """The preview line by line. Without colour, tokens have bars between them instead of shades."""
    yield [(preview.subject, "bold")]
    for note in preview.notes:
        yield [(f"note: {printable(note)}", "")]
    yield []
    yield from (_legend_runs(line) for line in preview.legend)
    between = "shades tell tokens apart" if colour else f"{_BREAK} stands between tokens"
    yield [(f"+ is trained; {between}; {HOW_TO_READ}", "dim")]
    for row in preview.rows:
        yield []
        yield from _row_lines(row, colour=colour)


def _legend_runs(line: LegendLine) -> list[Run]:
    style = _SHADES[0].format(PIECES[line.piece].light) if line.trained else ""
    example = f"  {one_line(line.example)}" if line.example else ""
    return [
        ("+ " if line.trained else "  ", "bold"),
        (f"{line.what:<38}", style),
        (f" {line.says:<12}", ""),
        (example, "dim"),
    ]


def _row_lines(row: ShownRow, *, colour: bool) -> Iterator[list[Run]]:
    yield [(row.title, "bold"), (f"  {printable(row.source)}:{row.line}", "dim")]
    if row.reason is not None:
        yield [(row.verdict, "bold red")]
    for note in row.notes:
        yield [(note, "")]
    if row.raw:
        yield from ([(" " * 2 + part, "")] for part in visible(row.raw).splitlines())
    for start, stop in row.stretches():
        yield from _stretch_lines(row.tokens, start, stop, colour=colour)


def _stretch_lines(tokens: Sequence[Token], start: int, stop: int, *, colour: bool) -> Iterator[list[Run]]:
    """A stretch under its name; a line feed in it begins a new line under the same one."""
    first = tokens[start]
    gutter = ("+ " if first.trained else "  ") + PIECES[first.piece].title
    line: list[Run] = [(f"{gutter:<{_GUTTER}} ", "bold" if first.trained else "dim")]
    for i in range(start, stop):
        style = _token_style(tokens[i], i) if colour else ""
        parts = show_token(tokens[i]).split("\n")
        if i > start and not colour:
            line.append((_BREAK, ""))
        for at, part in enumerate(parts):
            if at:
                if i + 1 == stop and at + 1 == len(parts) and not part:
                    break
                yield line
                line = [(f"{'+' if first.trained else '':<{_GUTTER}} ", "bold")]
            line.append((part, style))
    yield line


def _token_style(token: Token, index: int) -> str:
    if not token.trained:
        return _GREYS[index % 2]
    return _SHADES[index % 2].format(PIECES[token.piece].light)
