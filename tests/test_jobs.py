"""S3 to S3: every row once, parts, receipts and rejects in their places, and a second run that has nothing to do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import tokenizers
from distributed import Client, LocalCluster

from etl import jobs
from etl.config import RunConfig
from etl.errors import StorageError, UsageError
from etl.schema import COLUMNS, SCHEMA
from etl.storage import Storage
from etl.surveys import Survey, survey
from etl.watcher import Watcher
from tests.jobs import QWEN36, chat, config, jsonl, small_rows, stored, upload, workers
from tests.outputs import BYTES, Hands, go_on, make_output, mixed_objects
from tests.servers import start_proxy

TORN = b'{"messages": [{"ro'


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a cluster of two worker processes, for all runs of this file."""
    with workers(2) as client:
        yield client.scheduler.address


@pytest.fixture
def run(bucket: str, scheduler: str) -> Any:
    """Run over the test's own bucket on the shared cluster."""

    def start(**options: Any) -> jobs.RunResult:
        return jobs.run(config(bucket, scheduler=scheduler, **options))

    return start


def test_every_row_arrives_once_in_the_order_of_objects_and_lines(s3: Any, bucket: str, run: Any) -> None:
    names = [f"{i}.jsonl" for i in range(12)]
    upload(s3, bucket, {name: jsonl(small_rows(3, f"{name}-")) for name in names})
    result = run(partition_bytes=1000)
    table = stored(result.output).table
    assert table["id"].to_pylist() == [f"{name}-{i}" for name in sorted(names) for i in range(3)]
    assert (result.exit_code, result.error, result.rows, result.rejected) == (0, None, 36, 0)
    assert table.schema == SCHEMA


def test_an_object_above_the_partition_size_is_cut_and_no_line_is_lost_or_doubled(
    s3: Any, bucket: str, run: Any
) -> None:
    body = jsonl(small_rows(40))
    upload(s3, bucket, {"a.jsonl": body})
    result = run(partition_bytes=1000)
    found = stored(result.output)
    assert result.partitions == -(-len(body) // 1000)
    assert found.table["id"].to_pylist() == [f"r{i}" for i in range(40)]
    offsets = found.table["source_offset"].to_pylist()
    assert [json.loads(body[at:].split(b"\n", 1)[0])["id"] for at in offsets] == [f"r{i}" for i in range(40)]


def test_a_receipt_says_what_its_part_holds(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": b"\n" + jsonl(small_rows(5)) + TORN})
    result = run(max_reject_share=0.5)
    found = stored(result.output)
    (receipt,) = found.receipts
    ((name, body),) = found.parts.items()
    etag = s3.head_object(Bucket=bucket, Key="completions/a.jsonl")["ETag"].strip('"')
    size = s3.head_object(Bucket=bucket, Key="completions/a.jsonl")["ContentLength"]
    assert name == f"part-0000000-{receipt['identity']}.parquet"
    assert (receipt["part"], receipt["size"], receipt["sha256"]) == (name, len(body), hashlib.sha256(body).hexdigest())
    assert receipt["objects"] == [{"key": f"s3://{bucket}/completions/a.jsonl", "etag": etag, "start": 0, "end": size}]
    counts = ("lines", "blank", "candidates", "rows", "rejected")
    assert tuple(receipt[key] for key in counts) == (7, 1, 6, 5, 1)
    assert receipt["reasons"] == {"json": 1}
    assert receipt["tokens"] == sum(found.table["n_tokens"].to_pylist()) == result.tokens
    assert receipt["loss_tokens"] == sum(found.table["n_loss_tokens"].to_pylist()) == result.loss_tokens
    assert set(receipt["run"]) == {"seconds", "stages", "host", "retries"}


def test_a_reject_says_where_it_stands_and_what_was_wrong(s3: Any, bucket: str, run: Any) -> None:
    good = jsonl(small_rows(20))
    upload(s3, bucket, {"a.jsonl": b"\n" + good + TORN + b"\n" + good})
    result = run(max_reject_share=0.5, partition_bytes=500)
    (reject,) = stored(result.output).rejects
    assert result.exit_code == 0
    assert (reject["source"], reject["line"]) == (f"s3://{bucket}/completions/a.jsonl", 22)
    assert (reject["offset"], reject["bytes"]) == (1 + len(good), len(TORN))
    assert (reject["reason"], reject["raw"], reject["truncated"]) == ("json", TORN.decode(), False)
    assert set(reject) == {
        *("source", "line", "offset", "bytes", "choice", "turn", "reason", "detail", "raw", "truncated")
    }


def test_the_largest_partitions_are_worked_on_first(s3: Any, bucket: str) -> None:
    upload(s3, bucket, {f"{n}.jsonl": jsonl(small_rows(n)) for n in (1, 3, 5, 2)})
    todo = jobs.largest_first(survey(config(bucket, partition_bytes=1000)).todo)
    sizes = [partition.bytes for partition in todo]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 1


def test_a_partition_without_rows_has_a_receipt_and_no_part(s3: Any, bucket: str, run: Any) -> None:
    first, second = (jsonl([row]) for row in small_rows(2))
    upload(s3, bucket, {"a.jsonl": b"\n\n", "b.jsonl": first, "c.jsonl": second})
    result = run(partition_bytes=len(first) + 1)
    empty, *_ = receipts = stored(result.output).receipts
    assert (empty["lines"], empty["blank"], empty["rows"]) == (2, 2, 0)
    assert (empty["part"], empty["size"], empty["sha256"]) == (None, None, None)
    assert (len(receipts), result.parts, len(stored(result.output).parts)) == (3, 2, 2)


def test_success_appears_when_all_is_done_and_the_lease_is_gone(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    names = set(stored(run().output).objects)
    assert "__etl/SUCCESS" in names
    assert "__etl/plan.json" in names
    assert "__etl/lease.json" not in names


def test_a_finished_run_is_not_done_again(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(4))})
    first = run()
    before = {k: v for k, v in stored(first.output).objects.items() if not k.startswith("__etl/runs/")}
    times = {o["Key"]: o["LastModified"] for o in s3.list_objects_v2(Bucket=bucket)["Contents"]}
    again = run()
    after = {k: v for k, v in stored(first.output).objects.items() if not k.startswith("__etl/runs/")}
    assert after == before
    assert {o["Key"]: o["LastModified"] for o in s3.list_objects_v2(Bucket=bucket)["Contents"]} == times
    assert (again.exit_code, again.rows, again.partitions_done_before) == (0, 4, 1)


@pytest.mark.parametrize("lost", ["part", "receipt", "both", "SUCCESS", "cut part"])
def test_what_is_missing_is_made_again_byte_for_byte(s3: Any, bucket: str, run: Any, lost: str) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(4)})
    whole = stored(run(partition_bytes=600).output)
    stem = list(whole.parts)[1].removesuffix(".parquet")
    part, receipt = f"tokens/{stem}.parquet", f"tokens/__etl/receipts/{stem}.json"
    for key in {"part": [part], "receipt": [receipt], "both": [part, receipt]}.get(lost, []):
        s3.delete_object(Bucket=bucket, Key=key)
    s3.delete_object(Bucket=bucket, Key="tokens/__etl/SUCCESS")
    if lost == "cut part":
        s3.put_object(Bucket=bucket, Key=part, Body=whole.parts[f"{stem}.parquet"][:-1])
    result = run(partition_bytes=600)
    repaired = stored(result.output)
    assert repaired.parts == whole.parts
    assert repaired.objects["__etl/SUCCESS"] == whole.objects["__etl/SUCCESS"]
    assert result.partitions_done_before == (4 if lost == "SUCCESS" else 3)


def test_a_damaged_receipt_or_success_is_made_again(tmp_path: Path) -> None:
    whole = make_output(tmp_path / "whole", mixed_objects())
    hands = Hands(whole)
    before = {path: path.read_bytes() for path in (hands.receipt(2), hands.success)}
    body = json.loads(before[hands.receipt(2)])
    wrong: list[Any] = [[], None, {}, *({**body, name: "3"} for name in ("rows", "index", "reasons"))]
    wrong += [{**body, "engine": None}, {name: value for name, value in body.items() if name != "part"}]
    damages = [
        b"",
        before[hands.receipt(2)][:100],
        b"\xff\xfe",
        b"[" * 99_999,
        *(json.dumps(w).encode() for w in wrong),
    ]
    for damage in damages:
        for path in before:
            path.write_bytes(damage)
        go_on(tmp_path / "whole")
        assert json.loads(hands.receipt(2).read_bytes()) == {**body, "run": ANY}, damage
        assert hands.success.read_bytes() == before[hands.success]


def test_what_is_counted_of_a_line_is_counted_once_however_many_rows_it_becomes(tmp_path: Path) -> None:
    said: list[dict[str, Any]] = [
        {"role": role, "content": role} for role in ("developer", *(("user", "assistant") * 3))
    ]
    said[-1]["train"] = False
    options: dict[str, Any] = {"turns": "expand", "role_map": {"developer": "system"}}
    output = make_output(tmp_path, {"a.jsonl": jsonl([{"messages": said}])}, **options)
    counts = json.loads(Hands(output).receipt(0).read_bytes())["counts"]
    assert (counts["mapped_roles"], counts["untrained_messages"], counts["shape_messages"]) == (1, 1, 2)


def test_candidates_are_rows_and_rejects_in_every_partition_and_in_all(s3: Any, bucket: str, run: Any) -> None:
    bad: list[dict[str, Any]] = [{"messages": []}, {"messages": [{"role": "user", "content": "Hi"}]}, {"text": 1}]
    upload(s3, bucket, {f"{i}.jsonl": jsonl([*small_rows(3), *bad]) + TORN for i in range(3)})
    result = run(max_reject_share=1)
    receipts = stored(result.output).receipts
    for receipt in (*receipts, result.as_dict()):
        assert (
            receipt["candidates"]
            == receipt["rows"] + receipt["rejected"]
            == sum(receipt["reasons"].values()) + receipt["rows"]
        )
        assert receipt["lines"] == receipt["rows"] + receipt["rejected"] + receipt["blank"]
    assert result.rows == 9


def test_too_many_rejects_end_with_1_and_without_success_and_a_higher_limit_adds_it(
    s3: Any, bucket: str, run: Any
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(9)) + TORN})
    strict = run()
    assert (strict.exit_code, strict.rows) == (1, 9)
    assert "1 of 10 candidates were rejected (10.00%), more than --max-reject-share 0.01" in str(strict.error)
    assert "__etl/SUCCESS" not in stored(strict.output).objects
    lenient = run(max_reject_share=0.1)
    assert (lenient.exit_code, lenient.partitions_done_before) == (0, 1)
    assert "__etl/SUCCESS" in stored(strict.output).objects
    for stricter in ({}, {"max_reject_share": 1, "on_error": "fail"}):
        assert run(**stricter).exit_code == 1
        assert "__etl/SUCCESS" not in stored(strict.output).objects
        assert run(max_reject_share=0.1).exit_code == 0
    assert "__etl/SUCCESS" in stored(strict.output).objects


def test_few_rows_are_judged_at_the_end_so_that_every_partition_is_done(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {f"{i:02}.jsonl": jsonl(small_rows(1, f"{i}-")) + TORN for i in range(20)})
    result = run(partition_bytes=400)
    assert (result.exit_code, result.rows, result.rejected, result.partitions_failed) == (1, 20, 20, 0)
    assert len(stored(result.output).receipts) == result.partitions == 10


def test_rows_over_the_length_that_was_asked_for_are_no_reason_to_fail(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl([chat("a", "Hi", "ok"), chat("b", "Hi", "word " * 50)])})
    result = run(max_length=20)
    assert (result.exit_code, result.reasons) == (0, {"over_length": 1})
    assert "__etl/SUCCESS" in stored(result.output).objects


def test_while_appended_partitions_are_done_the_output_is_not_finished(s3: Any, bucket: str, scheduler: str) -> None:
    finished: list[bool] = []

    class Looking(Watcher):
        def advance(self, _receipt: Any) -> None:
            finished.append("__etl/SUCCESS" in stored(f"s3://{bucket}/tokens/").objects)

    for name in ("a.jsonl", "b.jsonl"):
        upload(s3, bucket, {name: jsonl(small_rows(2, name))})
        assert jobs.run(config(bucket, scheduler=scheduler), Looking()).exit_code == 0
    assert finished == [False, False]


def test_on_error_fail_ends_with_1_at_a_bad_row(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(200)) + TORN})
    result = run(on_error="fail")
    assert result.exit_code == 1
    assert "--on-error fail: 1 rows rejected (json)" in str(result.error)


def test_a_partition_that_fails_leaves_the_others_done(s3: Any, bucket: str, run: Any, monkeypatch: Any) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(4)})
    surveyed = survey

    def replaced_after_listing(options: Any) -> Survey:
        seen = surveyed(options)
        upload(s3, bucket, {"1.jsonl": jsonl(small_rows(9))})
        return seen

    monkeypatch.setattr("etl.jobs.survey", replaced_after_listing)
    result = run(partition_bytes=600)
    assert (result.exit_code, result.partitions_failed, result.rows) == (1, 1, 9)
    assert "1.jsonl changed since it was listed" in str(result.error)
    assert "__etl/SUCCESS" not in stored(result.output).objects


def fail_to_put(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Where this process writes an object whose URL holds `name`, the error comes instead."""
    put = Storage.put

    def fail(storage: Storage, url: str, data: bytes, **condition: Any) -> str:
        if name in url:
            raise error
        return put(storage, url, data, **condition)

    monkeypatch.setattr(Storage, "put", fail)


def test_what_a_run_did_is_kept_with_its_seconds(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    result = run()
    (kept,) = (json.loads(body) for name, body in stored(result.output).objects.items() if "__etl/runs/" in name)
    assert 0 < kept["seconds"] <= result.seconds
    assert {name: kept[name] for name in result.as_dict() if name != "seconds"} == {
        name: value for name, value in result.as_dict().items() if name != "seconds"
    }


@pytest.mark.parametrize(("written", "rows"), [("plan.json", 0), ("SUCCESS", 3), ("/runs/", 3)])
@pytest.mark.parametrize(("error", "ends"), [(StorageError("made up: denied"), 1), (KeyboardInterrupt(), 130)])
def test_a_refused_or_interrupted_write_ends_the_run_with_what_is_known(
    s3: Any, bucket: str, run: Any, monkeypatch: Any, written: str, rows: int, error: BaseException, ends: int
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    fail_to_put(monkeypatch, written, error)
    result = run()
    assert (result.exit_code, result.rows, result.partitions) == (ends, rows, 1)
    assert result.error == (str(error) or "interrupted; the same command goes on from here")
    assert not any("lease" in name or "probe" in name for name in stored(result.output).objects)


def test_a_refused_write_at_the_end_does_not_hide_why_the_run_failed(
    s3: Any, bucket: str, run: Any, monkeypatch: Any
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(9)) + TORN})
    fail_to_put(monkeypatch, "/runs/", StorageError("made up: denied"))
    result = run()
    assert (result.exit_code, result.rows) == (1, 9)
    assert "1 of 10 candidates were rejected" in str(result.error)


def test_results_are_told_in_words_with_units_on_a_terminal_and_in_a_notebook() -> None:
    result = jobs.RunResult(
        lines=1250, rows=1234, rejected=16, reasons={"json": 16}, tokens=9_000_000, loss_tokens=4_500_000, parts=3,
        partitions=4, seconds=61.26, engine="gigatoken", output="s3://b/<o>/", error="1 partitions failed",
    )  # fmt: skip
    told = str(result)
    assert "1,234 rows, 9,000,000 tokens, 4,500,000 trained (50.0%)" in told
    assert "16 rejected (16 json), see s3://b/<o>/__etl/rejects/" in told
    assert "3 parts of 4 partitions in 61.3 s" in told
    page = result._repr_html_()
    assert '<p class="loud">1 partitions failed</p>' in page
    assert "<div>output s3://b/&lt;o&gt;/*.parquet</div>" in page
    plan = jobs.PlanResult(5, 60_968, 1, 0, ("s3://b/x\x1b.txt",), "f" * 64, 2, leaves_idle=True, advised_bytes=7000)
    assert "5 objects, 60,968 bytes\n1 partitions, 0 done\n0.5 partitions for each of 2 workers" in str(plan)
    assert r"passed over: s3://b/x\x1b.txt" in str(plan)
    assert "--partition-bytes 7000 gives 4" in plan._repr_html_()
    assert jobs.PlanResult(1, 0, 1, 0, (), "f", 2, leaves_idle=True).warning is None  # an empty object: nothing to cut


@pytest.mark.parametrize("receipts", [1, 6])
def test_a_robbed_run_ends_with_1_and_writes_no_more_of_parts_or_success(
    s3: Any, bucket: str, scheduler: str, receipts: int
) -> None:
    class Robber(Watcher):
        seen = 0

        def advance(self, receipt: Any) -> None:
            del receipt
            self.seen += 1
            if self.seen == receipts:  # as a run elsewhere does that has waited for the lease to lapse
                Storage().put(f"s3://{bucket}/tokens/__etl/lease.json", b'{"run": "robber"}')

    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(6)})
    result = jobs.run(config(bucket, scheduler=scheduler, partition_bytes=100), Robber())
    assert result.exit_code == 1
    assert "run robber" in str(result.error)
    assert "has taken this output over; this run stops" in str(result.error)
    names = stored(result.output).objects
    assert not any("SUCCESS" in name or "/runs/" in name for name in names)
    assert Storage().get(f"s3://{bucket}/tokens/__etl/lease.json") == b'{"run": "robber"}'


@pytest.mark.parametrize("written", ["probe-", "lease.json"])
def test_a_run_whose_first_write_is_refused_does_not_begin(
    s3: Any, bucket: str, run: Any, monkeypatch: Any, written: str
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    fail_to_put(monkeypatch, written, StorageError("made up: denied"))
    with pytest.raises(UsageError, match="made up: denied"):
        run()
    assert stored(f"s3://{bucket}/tokens/").objects == {}


def test_a_run_that_cannot_look_again_under_its_lease_does_not_begin(
    s3: Any, bucket: str, run: Any, monkeypatch: Any
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    surveyed = survey

    def refused_afterwards(options: Any) -> Survey:
        seen = surveyed(options)
        monkeypatch.setattr("etl.ledger.read_plan", refuse)
        return seen

    def refuse(*_: Any) -> None:
        raise StorageError("made up: denied")

    monkeypatch.setattr("etl.jobs.survey", refused_afterwards)
    with pytest.raises(UsageError, match="made up: denied"):
        run()
    assert stored(f"s3://{bucket}/tokens/").objects == {}


def test_new_objects_are_appended_and_old_parts_never_move(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"b.jsonl": jsonl(small_rows(3, "b"))})
    first = stored(run().output)
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3, "a"))})
    second = stored(run().output)
    assert next(iter(second.parts)) == next(iter(first.parts))
    assert second.table["id"].to_pylist() == ["b0", "b1", "b2", "a0", "a1", "a2"]
    assert len(json.loads(second.objects["__etl/plan.json"])["partitions"]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"min_loss_tokens": 0}, r"min_loss_tokens \(was 1, is 0\)"),
        ({"partition_bytes": "1MiB"}, r"partition_bytes \(was 16777216, is 1048576\)"),
        ({"template_arg": {"preserve_thinking": True}}, r"template_arg"),
    ],
)
def test_other_options_on_a_used_output_are_named_and_refused(
    s3: Any, bucket: str, run: Any, options: dict[str, Any], says: str
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    before = stored(run().output)
    with pytest.raises(UsageError, match=says):
        run(**options)
    assert stored(f"s3://{bucket}/tokens/") == before


@pytest.mark.parametrize(
    ("change", "says"), [("replace", "another .*a.jsonl .ETag was"), ("delete", "a.jsonl, which is gone")]
)
def test_changed_input_is_named_and_refused(s3: Any, bucket: str, run: Any, change: str, says: str) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2)), "b.jsonl": jsonl(small_rows(2))})
    run()
    if change == "replace":
        upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    else:
        s3.delete_object(Bucket=bucket, Key="completions/a.jsonl")
    with pytest.raises(UsageError, match=says):
        run()


def test_overwrite_replaces_what_another_plan_wrote_and_nothing_else(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(3)})
    run(partition_bytes=600)
    again = stored(run(overwrite=True, min_loss_tokens=0).output)
    assert len(again.parts) == 1
    assert [r["fingerprint"] for r in again.receipts] == [json.loads(again.objects["__etl/plan.json"])["fingerprint"]]
    assert "discards" not in json.loads(again.objects["__etl/plan.json"])
    fresh = stored(run(min_loss_tokens=0).output)
    assert fresh.parts == again.parts
    assert len(again.table) == 9


def test_overwrite_with_the_same_options_goes_on_where_it_was(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    run()
    assert run(overwrite=True).partitions_done_before == 1


def test_overwrite_takes_the_place_of_changed_input(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    run()
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2, "new"))})
    assert stored(run(overwrite=True).output).table["id"].to_pylist() == ["new0", "new1"]


def test_overwrite_refuses_foreign_objects(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    run()
    s3.put_object(Bucket=bucket, Key="tokens/mine.parquet", Body=b"x")
    before = stored(f"s3://{bucket}/tokens/")
    with pytest.raises(UsageError, match=r"mine\.parquet"):
        run(overwrite=True, min_loss_tokens=0)
    assert stored(f"s3://{bucket}/tokens/") == before


def test_an_overwrite_killed_before_its_deletions_finishes_them(
    s3: Any, bucket: str, run: Any, monkeypatch: Any
) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(3, f"{i}-")) for i in range(3)})
    run(partition_bytes=600)

    class KilledError(Exception):
        pass

    delete = Storage.delete

    def killed(storage: Storage, urls: list[str]) -> None:
        if any(url.endswith(".parquet") for url in urls):
            raise KilledError
        delete(storage, urls)

    monkeypatch.setattr(Storage, "delete", killed)
    with pytest.raises(KilledError):
        run(overwrite=True, min_loss_tokens=0)
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.meta.endpoint_url)
    found = stored(run(overwrite=True, min_loss_tokens=0).output)
    assert len(found.parts) == len(found.receipts) == 1
    assert len(found.table) == 9


def test_a_local_folder_gives_the_same_rows_as_s3(
    s3: Any, bucket: str, run: Any, tmp_path: Path, scheduler: str
) -> None:
    body = jsonl(small_rows(20))
    upload(s3, bucket, {"a.jsonl": body})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(body)
    remote = stored(run(partition_bytes=500).output).table.drop(["source"])
    here = config(bucket, scheduler=scheduler, partition_bytes=500)
    jobs.run(type(here)(**{**vars(here), "input": str(tmp_path / "in"), "output": str(tmp_path / "out")}))
    local = stored(str(tmp_path / "out")).table
    assert local.drop(["source"]).equals(remote)
    assert set(local["source"].to_pylist()) == {str(tmp_path / "in" / "a.jsonl")}


def test_workers_write_the_bytes_that_the_stages_make_without_them(tmp_path: Path, scheduler: str) -> None:
    """So that what other files find of `make_output` holds for a run."""
    alone = stored(str(make_output(tmp_path, mixed_objects())))
    options: dict[str, Any] = {"scheduler": scheduler, "partition_bytes": BYTES, "max_reject_share": 1}
    here = RunConfig(
        input=str(tmp_path / "in"), output=str(tmp_path / "by-workers"), tokenizer=QWEN36, no_dashboard=True, **options
    )
    assert jobs.run(here).exit_code == 0
    found = stored(str(here.output))
    assert len(found.parts) == 7
    assert (found.parts, found.rejects) == (alone.parts, alone.rejects)


@pytest.mark.filterwarnings("ignore:The inplace keyword:DeprecationWarning")  # Dask's own, inside read_parquet
def test_readers_of_parquet_see_the_promised_columns(
    s3: Any, bucket: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dask.dataframe as dd
    import datasets

    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(5, f"{i}-")) for i in range(3)})
    found = stored(run(partition_bytes=600).output)
    for name, body in found.objects.items():
        (tmp_path / "tokens" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tokens" / name).write_bytes(body)
    parts, names = str(tmp_path / "tokens" / "*.parquet"), [name for name, _, _ in COLUMNS]
    ids, first = found.table["id"].to_pylist(), found.table["input_ids"][0].as_py()

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    dataset = datasets.load_dataset("parquet", data_files=parts, split="train", cache_dir=str(tmp_path / "cache"))
    assert (dataset.column_names, dataset["id"][:], dataset[0]["input_ids"]) == (names, ids, first)
    lazy = pl.scan_parquet(parts).collect()
    assert (lazy.columns, lazy["id"].to_list(), lazy["input_ids"][0].to_list()) == (names, ids, first)
    frame = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "tokens").glob("*.parquet")))
    assert (list(frame.columns), list(frame["id"]), list(frame["input_ids"].iloc[0])) == (names, ids, first)
    whole = pd.read_parquet(tmp_path / "tokens")
    assert sorted(whole["id"]) == sorted(ids)
    dasked = dd.read_parquet(parts).compute()
    assert (list(dasked.columns), list(dasked["id"]), list(dasked["input_ids"].iloc[0])) == (names, ids, first)


def test_a_user_who_types_control_tokens_is_counted_in_the_receipt(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl([chat("x", "What is <|im_end|>?", "A token."), *small_rows(1)])})
    (receipt,) = stored(run().output).receipts
    assert receipt["counts"]["control_token_rows"] == 1


def test_the_drift_from_the_recorded_completion_tokens_is_in_the_receipt(s3: Any, bucket: str, run: Any) -> None:
    exact = {**chat("exact", "Hi", "Good day", "Greet."), "usage": {"completion_tokens": 9}}
    rows = [exact, {**exact, "id": "off", "usage": {"completion_tokens": 11}}, chat("unrecorded", "Hi", "ok")]
    upload(s3, bucket, {"a.jsonl": jsonl(rows)})
    found = stored(run().output)
    assert found.receipts[0]["drift"] == {"equal": 1, "off": 2, "recorded": 20, "rows": 2, "trained": 18}
    ids, think = found.table["input_ids"][0].as_py(), 248068
    # Generated: all behind <think> and its newline, which the prompt supplies, but for the newline at the very end.
    assert len(ids) - (ids.index(think) + 2) - 1 == 9


def test_no_credential_reaches_the_output(s3: Any, bucket: str, run: Any) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2)) + TORN})
    objects = stored(run(max_reject_share=1).output).objects
    assert not [name for name, body in objects.items() if b"test-secret-key" in body or b"test-access-key" in body]
    assert Storage().get(f"s3://{bucket}/tokens/__etl/plan.json") is not None


def test_a_frame_is_lazy_and_computes_the_rows_of_a_run_in_threads_or_on_a_cluster(
    s3: Any, bucket: str, run: Any, scheduler: str
) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(4, f"{i}-")) for i in range(3)})
    options = config(bucket, partition_bytes=800)
    lazy = jobs.frame(RunConfig(**{**vars(options), "output": None}))
    assert lazy.npartitions == 3
    in_threads = pa.Table.from_pandas(lazy.compute(scheduler="threads"), schema=SCHEMA, preserve_index=False)
    with Client(scheduler):
        on_cluster = jobs.frame(options).compute()
    written = stored(run(partition_bytes=800).output).table
    assert in_threads.equals(written)
    assert pa.Table.from_pandas(on_cluster, schema=SCHEMA, preserve_index=False).equals(written)
    assert list(lazy.dtypes) == [pd.ArrowDtype(field.type) for field in SCHEMA]


def test_a_run_says_why_it_does_without_the_fast_engine_and_which_tokenizer_it_took(
    s3: Any, bucket: str, tmp_path: Path
) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl([chat(f"{i}", "Hi", "ok")]) for i in range(3)})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "ok": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(kind))
    said: list[str] = []

    class Listening(Watcher):
        def say(self, text: str) -> None:
            said.append(text)

    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0", silence_logs=50) as own:
        options = config(bucket, scheduler=own.scheduler_address, tokenizer=str(tmp_path), partition_bytes=100)
        result = jobs.run(options, Listening())
    assert (result.exit_code, result.error, result.engine) == (0, None, "transformers")
    (why,) = [text for text in said if text.startswith("engine")]
    assert why.startswith("engine transformers: gigatoken cannot load it (")
    (entry,) = s3.list_objects_v2(Bucket=bucket, Prefix="tokens/__etl/runs/")["Contents"]
    record = json.load(s3.get_object(Bucket=bucket, Key=entry["Key"])["Body"])
    assert (record["tokenizer"], record["revision"]) == (str(tmp_path), None)


def test_rejects_are_stored_before_the_part_and_the_receipt_comes_last(
    s3: Any, bucket: str, moto: str, scheduler: str
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3)) + TORN})
    with start_proxy(moto) as proxy:
        options = config(bucket, scheduler=scheduler, endpoint_url=proxy.endpoint_url, max_reject_share=1.0)
        assert jobs.run(options).rejected == 1
        stored_in_turn = [path for method, path in proxy.seen if method == "PUT" and "part-" in path]
    kinds = [path.partition("/tokens/")[2].rpartition("/")[0] for path in stored_in_turn]
    assert kinds == ["__etl/rejects", "", "__etl/receipts"]


def test_the_shapes_that_were_found_are_counted_in_the_receipt(s3: Any, bucket: str, run: Any) -> None:
    rows = [chat("a", "Hi", "ok"), {"prompt": "Hi", "completion": "ok"}, {"prompt": "Hi", "response": "ok"}]
    upload(s3, bucket, {"a.jsonl": jsonl(rows)})
    counts = stored(run().output).receipts[0]["counts"]
    assert {name: n for name, n in counts.items() if name.startswith("shape_")} == {
        "shape_messages": 1,
        "shape_prompt": 2,
    }


def test_every_switch_that_leaves_tokens_out_is_counted_in_the_receipt(s3: Any, bucket: str, run: Any) -> None:
    flagged = {"messages": [
        {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "ok", "train": False},
        {"role": "user", "content": "And?"}, {"role": "assistant", "content": "word " * 90},
    ]}  # fmt: skip
    upload(s3, bucket, {"a.jsonl": jsonl([flagged])})
    options = {"role_map": {"developer": "system"}, "max_length": 60, "over_length": "truncate"}
    (receipt,) = stored(run(**options).output).receipts
    assert receipt["counts"]["mapped_roles"] == 1
    assert receipt["counts"]["untrained_messages"] == 1
    assert receipt["counts"]["shortened_rows"] == 1
    assert stored(f"s3://{bucket}/tokens").table["n_tokens"].to_pylist() == [60]


def test_python_is_told_on_standard_error_what_the_command_line_says(
    s3: Any, bucket: str, run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl([chat("long", "word " * 500, "Yes.")])})
    assert run().exit_code == 0
    said = capfd.readouterr().err
    assert "dashboard: off\n" in said
    assert "WARNING: only 0.6% of the tokens are trained; look at the mask before you train\n" in said
