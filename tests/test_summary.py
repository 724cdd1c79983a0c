"""report: the totals of an output by its receipts, what was rejected and why, and what is not done yet."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import etl
from etl.audit import CheckResult
from etl.errors import UsageError
from etl.summary import Report, report
from etl.terminal import main
from tests.jobs import chat, jsonl, small_rows, upload
from tests.outputs import TORN, Hands, make_output, mixed_objects

HOSTILE = '{"messages": "<script>alert(1)</script>\\u001b[31m"}'


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight partitions: 38 rows, 2 rejects, one partition without rows."""
    return make_output(tmp_path_factory.mktemp("report"), mixed_objects())


@pytest.fixture(scope="module")
def told(good: Path) -> Report:
    return report(str(good))


def test_the_totals_are_those_of_success(good: Path, told: Report) -> None:
    success = json.loads((good / "__etl" / "SUCCESS").read_bytes())
    names = ("lines", "blank", "candidates", "rows", "rejected", "reasons", "tokens", "loss_tokens", "parts", "counts")
    assert {name: getattr(told, name) for name in names} == {name: success[name] for name in names}
    assert (told.partitions, told.partitions_done, told.finished, told.not_done) == (8, 8, True, ())
    assert told.size == sum(path.stat().st_size for path in good.glob("*.parquet"))
    assert told.trained_share == 626 / 1293


def test_counts_engine_and_verification_are_told(told: Report) -> None:
    assert told.counts == {"shape_messages": told.rows, "control_token_rows": 1, "empty_think_blocks": 1}
    assert told.engines == {"gigatoken": 8}
    assert (told.verified_rows, told.mismatched_rows, told.fallback_partitions) == (38, 0, 0)
    text = str(told)
    assert "gigatoken (8 partitions)" in text
    assert "38 against transformers, 0 differed" in text
    assert "control_token_rows  1" in text


def test_a_report_reads_no_part(good: Path, tmp_path: Path, told: Report) -> None:
    hands = Hands(Path(shutil.copytree(good, tmp_path / "out")))
    for path in hands.output.glob("*.parquet"):
        path.write_bytes(b"x" * path.stat().st_size)
    assert report(str(hands.output)).rows == told.rows


def test_rejects_are_shown_by_reason_with_place_detail_and_the_beginning_of_the_row(good: Path, told: Report) -> None:
    (torn,) = told.examples["json"]
    source = str(good.parent / "in" / "c.jsonl")
    assert (torn.place, torn.raw) == (f"{source}:16", '{"messages": [{"ro')
    assert "torn" in torn.detail
    (empty,) = told.examples["shape"]
    assert (empty.place, empty.detail, empty.raw) == (f"{source}:17", "messages is empty", '{"messages": []}')
    assert f"json   {torn.place}" in str(told)
    assert "rejected       2 (1 json, 1 shape)" in str(told)


def test_each_reason_has_at_most_three_examples_of_at_most_120_characters(tmp_path: Path) -> None:
    bad = b"".join(b'{"messages": [], "x": "%s"}\n' % (b"y" * 500) for _ in range(7))
    told = report(str(make_output(tmp_path, {"a.jsonl": bad * 2, "b.jsonl": b"\xff\n"})))
    assert [len(example.raw) for example in told.examples["shape"]] == [120, 120, 120]
    assert [example.line for example in told.examples["shape"]] == [1, 2, 3]
    assert (told.examples["encoding"][0].raw, told.reasons) == (r"\xff", {"encoding": 1, "shape": 14})


def test_a_reject_whose_line_is_not_known_yet_is_placed_by_its_offset(tmp_path: Path) -> None:
    objects = mixed_objects()
    told = report(str(make_output(tmp_path, objects, partitions=5)))
    at = objects["c.jsonl"].index(TORN)
    assert [example.place for example in told.examples["json"]] == [f"{tmp_path}/in/c.jsonl@{at}"]


def test_what_is_not_done_yet_is_named_and_counted(tmp_path: Path) -> None:
    told = report(str(make_output(tmp_path, mixed_objects(), partitions=2)))
    assert (told.partitions_done, told.partitions, told.finished, told.rows) == (2, 8, False, 6)
    assert [stem[:12] for stem in told.not_done] == [f"part-000000{i}" for i in range(2, 7)]
    assert "2 of 8 done" in str(told)
    assert "not finished" in str(told)
    assert "1 more" in str(told)


@pytest.mark.parametrize("damage", ["part gone", "part cut", "receipt gone", "receipt cut"])
def test_a_damaged_partition_is_not_done(good: Path, tmp_path: Path, damage: str) -> None:
    hands = Hands(Path(shutil.copytree(good, tmp_path / "out")))
    stem = hands.stems[4]
    path = hands.part(4) if "part" in damage else hands.receipt(4)
    path.write_bytes(path.read_bytes()[:50]) if "cut" in damage else path.unlink()
    told = report(str(hands.output))
    assert (told.partitions_done, told.not_done, told.rows, told.finished) == (7, (stem,), 31, False)


def test_stages_are_summed_and_the_largest_and_slowest_partitions_named(good: Path, told: Report) -> None:
    hands = Hands(good)
    runs = [hands.value(hands.receipt(i), "run") for i in range(8)]
    assert told.seconds == pytest.approx(sum(run["seconds"] for run in runs), abs=0.002)
    assert told.stages["render"] == pytest.approx(sum(run["stages"].get("render", 0) for run in runs), abs=0.002)
    sizes = [path.stat().st_size for path in good.glob("*.parquet")]
    assert [note.size for note in told.largest] == sorted(sizes, reverse=True)[:5]
    seconds = [note.seconds for note in told.slowest]
    assert seconds == sorted((run["seconds"] for run in runs), reverse=True)[:5]
    assert "seconds by stage" in str(told)


def test_a_trained_share_under_5_percent_is_said_loudly_and_first(tmp_path: Path, told: Report) -> None:
    row = chat("long", "word " * 400, "Yes.")
    seldom = report(str(make_output(tmp_path, {"a.jsonl": jsonl([row])})))
    assert seldom.trained_share < 0.05
    assert str(seldom).startswith("WARNING: only ")
    assert '<p class="loud">WARNING: only ' in seldom.to_html()
    assert "WARNING" not in str(told)
    assert 'class="loud"' not in told.to_html()


def test_engines_that_differed_are_said_loudly(good: Path, tmp_path: Path) -> None:
    hands = Hands(Path(shutil.copytree(good, tmp_path / "out")))
    hands.edit(hands.receipt(4), mismatched_rows=2)
    told = report(str(hands.output))
    assert (told.mismatched_rows, told.fallback_partitions) == (2, 1)
    assert "WARNING: the two engines differed on 2 rows; 1 partitions were done again" in str(told)


def test_drift_is_told_where_receipts_have_it(good: Path, tmp_path: Path, told: Report) -> None:
    hands = Hands(Path(shutil.copytree(good, tmp_path / "out")))
    hands.edit(hands.receipt(1), drift={"rows": 3, "tokens": -2})
    hands.edit(hands.receipt(2), drift={"rows": 4, "tokens": 5})
    assert told.drift == {}
    assert report(str(hands.output)).drift == {"rows": 7, "tokens": 3}


class Page(HTMLParser):
    """The tags of a page, and whatever it would load from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [f"{name}={value}" for name, value in attrs if name in {"src", "href"}]


def test_the_page_is_self_contained_and_nothing_of_the_input_is_markup(tmp_path: Path) -> None:
    objects = {"<b>&.jsonl": HOSTILE.encode() + b"\n" + jsonl(small_rows(2))}
    told = report(str(make_output(tmp_path, objects)))
    for page in (Page(told.to_html()), Page(told._repr_html_())):
        assert page.links == []
        assert {"script", "b", "link", "img"} & set(page.tags) == set()
        assert "table" in page.tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in told.to_html()
    assert "&lt;b&gt;&amp;.jsonl" in told.to_html()


def test_what_a_notebook_shows_leaves_the_page_around_it_as_it_is(told: Report) -> None:
    assert "body{" in told.to_html()
    assert "color-scheme:light dark" in told.to_html()
    for shown in (told._repr_html_(), CheckResult("o", 0, 0, ())._repr_html_()):
        style = shown.partition("<style>")[2].partition("</style>")[0]
        assert [rule for rule in style.split("}") if rule and not rule.startswith(".etl")] == []


def test_text_of_the_input_does_not_command_the_terminal(tmp_path: Path) -> None:
    told = report(str(make_output(tmp_path, {"a.jsonl": b'\x1b[2J\x07{"bad\n' + jsonl(small_rows(2))})))
    assert not [c for c in str(told) if c != "\n" and not c.isprintable()]
    assert r"\x1b[2J\x07" in str(told)


def test_the_command_line_prints_text_a_page_and_json(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Report
) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(good), "--html", str(page), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "\n".join(lines) == str(told)
    record = json.loads(last)
    assert (record["rows"], record["trained_share"], record["examples"]["shape"][0]["line"]) == (38, 0.484145, 17)
    assert page.read_text("utf-8") == told.to_html()
    assert main(["report", str(good), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_wrong_usage_is_one_line_and_2(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["report", str(tmp_path)], ["report"], ["report", str(good), "--html", str(tmp_path / "no" / "x")]):
        assert main(words) == 2
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)
    with pytest.raises(UsageError, match="no output of etl"):
        report(str(tmp_path))


def test_an_output_on_s3_is_reported_where_it_lies(s3: Any, bucket: str, good: Path, told: Report) -> None:
    upload(s3, bucket, {str(p.relative_to(good)): p.read_bytes() for p in good.rglob("*") if p.is_file()})
    there = report(f"s3://{bucket}/completions/", endpoint_url=s3.meta.endpoint_url)
    assert there.output == f"s3://{bucket}/completions"
    assert there.as_dict() | {"output": told.output} == told.as_dict()


def test_report_is_of_the_package() -> None:
    assert etl.report is report
    assert etl.Report is Report
