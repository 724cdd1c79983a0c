"""What eyes see of a preview: lines in a terminal with and without colour, one HTML file, and the command."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

from etl.inspection import LegendLine, Preview, ShownRow, Token, show_token, visible
from etl.terminal import main
from etl.viewer import text_lines
from tests.jobs import QWEN36, chat, jsonl

REPLY = (
    Token(1, "<s>", "header", trained=False, message=0),
    Token(2, "Yes", "answer", trained=True, message=0),
    Token(3, ",\n", "answer", trained=True, message=0),
    Token(4, "😀", "answer", trained=True, message=0),
    Token(5, "", "answer", trained=True, message=0),
    Token(6, "<e>", "end", trained=True, message=0),
    Token(7, "\n", "template", trained=False, message=0),
)
NASTY = "<script>alert(1)</script>&amp; \u202e\x1b[31m[red]x[/red]"


def shown(*tokens: Token, **more: Any) -> Preview:
    row = ShownRow(3, "s3://b/a.jsonl", 3, "id-3", tokens=tokens, **more)
    line = LegendLine("answer", "answer", trained=True, says="trained", example="Four.")
    return Preview("t", ("--turns last",), ("look out",), (line,), (row,))


def plain(found: Preview) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in text_lines(found, colour=False)]


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain text", "plain text"),
        ("a\tb\r\n", "a→b␍⏎\n"),
        ("\x00\x1b\x7f", "␀␛␡"),
        ("\xa0\u200b\u200d\ufeff\ufe0f", "⟨NBSP⟩⟨ZWSP⟩⟨ZWJ⟩⟨BOM⟩⟨VS16⟩"),
        ("\x85\u2028\u202e\u3000\u3164\ue000", "⟨U+0085⟩⟨U+2028⟩⟨U+202E⟩⟨U+3000⟩⟨U+3164⟩⟨U+E000⟩"),
        ("é한क👍", "é한क👍"),
    ],
)
def test_invisible_characters_are_made_visible(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_a_mark_at_the_start_of_a_token_does_not_sit_on_the_token_before() -> None:
    assert show_token(Token(1, "\u0301a", "answer", trained=True)) == "◌\u0301a"
    assert show_token(Token(1, "", "answer", trained=True)) == "⋯"


def test_without_colour_bars_tell_tokens_apart_and_a_plus_marks_what_is_trained() -> None:
    assert plain(shown(*REPLY))[-6:] == [
        "row 3, id-3: 7 tokens, 5 trained  s3://b/a.jsonl:3",
        "  header      <s>",
        "+ answer      Yes¦,⏎",
        "+             ¦😀¦⋯",
        "+ end         <e>",
        "  template    ⏎",
    ]


def test_with_colour_two_tokens_side_by_side_never_look_alike() -> None:
    lines = list(text_lines(shown(*REPLY), colour=True))
    styles = {text: style for line in lines for text, style in line}
    assert len({styles["Yes"], styles[",⏎"]}) == 2
    assert "on #" in styles["Yes"]
    assert "on #" not in styles["<s>"]
    assert "¦" not in "".join(text for line in lines[-6:] for text, _ in line)


def test_a_rejected_row_says_why_and_shows_its_beginning() -> None:
    lines = plain(shown(reason="json", detail="torn", raw='{"a\x1b'))
    assert lines[-2:] == ["REJECTED json: torn", '  {"a␛']


class Reader(html.parser.HTMLParser):
    """What a page holds: its tags, its attributes, its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_escaped_and_fetches_nothing() -> None:
    token = Token(1, NASTY, "answer", trained=True)
    page = shown(token, reason="role", detail=NASTY, raw=NASTY, notes=(NASTY,)).to_html()
    read = Reader(page)
    assert not read.tags & {"script", "link", "img", "iframe", "object"}
    assert not read.attributes & {"src", "href", "onload"}
    assert "url(" not in page
    assert "@import" not in page
    assert read.text.count("<script>alert(1)</script>") >= 3
    assert "\u202e" not in page
    assert "\x1b" not in page


def test_the_page_keeps_line_breaks_and_knows_light_and_dark() -> None:
    page = shown(*REPLY).to_html()
    assert ",⏎\n</span>" in page
    assert "prefers-color-scheme:dark" in page
    assert "color-scheme:light dark" in page


def test_a_notebook_gets_a_fragment_and_print_a_summary() -> None:
    found = shown(*REPLY)
    assert found._repr_html_().startswith('<div class="etl-preview">')
    assert str(found) == "t --turns last\nrow 3, id-3: 7 tokens, 5 trained, kept"


# --- the command ---


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([chat(f"r{i}", "Hi", "Yes.", "Hm.") for i in range(5)]))
    return path


def test_the_command_shows_three_rows_and_prints_json_last(rows: Path, capsys: Any) -> None:
    assert main(["preview", str(rows), "--tokenizer", QWEN36, "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [row["id"] for row in json.loads(lines[-1])["rows"]] == ["r0", "r1", "r2"]
    assert sum(line.startswith("+ answer      Yes¦.") for line in lines) == 3
    assert "\x1b" not in "".join(lines)


def test_the_command_takes_the_options_of_a_run(rows: Path, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"tokenizer: {QWEN36}\noutput: s3://nowhere/x/\nworkers: 3\nno_train_end: true\n")
    page = tmp_path / "p.html"
    words = ["preview", "--row", "2", str(rows), "--config", str(config), "--html", str(page), "--quiet", "--json"]
    assert main(words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (row,) = json.loads(line)["rows"]
    assert (row["id"], row["loss_mask"][-2:]) == ("r1", [0, 0])
    assert "r1" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "INPUT"),
        (["--row", "99"], "no line 99"),
        (["--row", "0"], "row 0 must be at least 1"),
        (["-n", "many"], "-n"),
        (["--workers", "3"], "--workers"),
        (["--html", "/no/such/folder/x.html"], "--html"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_2(rows: Path, capsys: Any, words: list[str], says: str) -> None:
    inputs = [str(rows)] if words else []
    assert main(["preview", *inputs, "--tokenizer", QWEN36, *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_colour_is_for_those_who_want_it(rows: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    words = ["preview", str(rows), "--tokenizer", QWEN36, "-n", "1"]
    assert main(words) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    assert "¦" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    without = capsys.readouterr().out
    assert "+ answer" in without
    assert "Yes¦." in without
