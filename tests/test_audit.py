"""check: each damage done by hand to a good output is found, under its own name, and nothing else is."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import etl
from etl.audit import CheckResult, check
from etl.errors import UsageError
from etl.ledger import COUNTS, Fault, map_in_order
from etl.tables import serialize
from etl.terminal import main
from tests.jobs import chat, jsonl, small_rows, upload
from tests.outputs import TORN, Hands, make_output, mixed_objects

LARGEST = 248_076  # the last of Qwen3.6's added tokens


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight partitions: the first without rows, 3 to 7 of one object, the fifth with two rejects."""
    return make_output(tmp_path_factory.mktemp("good"), mixed_objects())


@pytest.fixture
def hands(good: Path, tmp_path: Path) -> Hands:
    """A copy to lay hands on."""
    return Hands(Path(shutil.copytree(good, tmp_path / "out")))


def found(hands: Hands) -> list[tuple[str, str]]:
    """Kind and place below the output of every fault."""
    root = f"{hands.output}/"
    return [(fault.kind, fault.where.removeprefix(root)) for fault in check(str(hands.output)).faults]


def details(hands: Hands) -> str:
    return "\n".join(fault.detail for fault in check(str(hands.output)).faults)


def test_a_good_output_has_no_fault(good: Path) -> None:
    result = check(str(good))
    assert (result.ok, result.faults, result.parts, result.rows) == (True, (), 7, 38)
    assert str(result) == "ok (7 parts, 38 rows read)"
    assert result.as_dict() == {"ok": True, "parts": 7, "rows": 38, "faults": []}


# --- parts -------------------------------------------------------------------------------------------------------


def test_a_deleted_part_is_missing(hands: Hands) -> None:
    hands.part(2).unlink()
    assert found(hands) == [("missing_part", hands.part(2).name)]


@pytest.mark.parametrize("left", [0, 4, 1000, -1])
def test_a_cut_part_is_truncated(hands: Hands, left: int) -> None:
    hands.part(2).write_bytes(hands.part(2).read_bytes()[:left])
    assert found(hands) == [("truncated", hands.part(2).name)]


def test_one_flipped_mask_bit_is_an_edited_part_and_the_row_is_named(hands: Hands) -> None:
    hands.set_value(2, "loss_mask", lambda mask: [1 - mask[0], *mask[1:]], row=3, blessed=False)
    assert found(hands) == [("edited", hands.part(2).name), ("bad_value", hands.part(2).name)]
    assert "loss_tokens was 114, is 115" in details(hands)
    assert "trained in loss_mask in row 3" in details(hands)


def test_a_flipped_mask_bit_is_found_where_every_count_was_made_to_fit(hands: Hands) -> None:
    hands.set_value(2, "loss_mask", lambda mask: mask[::-1], blessed=False)
    assert found(hands) == [("edited", hands.part(2).name)]
    assert "rows, tokens and loss_tokens are as many as before" in details(hands)


@pytest.mark.parametrize("at", [10, 1500, -3])
def test_a_changed_byte_is_an_edited_part_whether_or_not_it_can_still_be_read(hands: Hands, at: int) -> None:
    body = bytearray(hands.part(2).read_bytes())
    body[at] ^= 1
    hands.part(2).write_bytes(body)
    assert ("edited", hands.part(2).name) in found(hands)
    assert hands.value(hands.receipt(2), "size") == len(body)


def test_the_same_rows_written_by_another_tool_are_an_edited_part(hands: Hands) -> None:
    pq.write_table(hands.table(2), hands.part(2), compression="snappy")
    assert found(hands) == [("edited", hands.part(2).name)]


def test_rows_that_are_gone_are_an_edited_part(hands: Hands) -> None:
    hands.write(2, hands.table(2).slice(1))
    assert found(hands) == [("edited", hands.part(2).name)]
    assert "rows was 7, is 6" in details(hands)


def test_a_part_where_the_receipt_says_that_there_is_none_is_foreign(hands: Hands) -> None:
    shutil.copy(hands.part(2), hands.output / f"{hands.stems[0]}.parquet")
    assert ("foreign", f"{hands.stems[0]}.parquet") in found(hands)


@pytest.mark.parametrize("name", ["part-9999999-0123456789ab.parquet", "copy.parquet", "below/copy.parquet"])
def test_a_part_under_a_second_name_is_doubled(hands: Hands, name: str) -> None:
    (hands.output / "below").mkdir()
    shutil.copy(hands.part(2), hands.output / name)
    assert found(hands) == [("doubled", name)]
    assert f"the same bytes as {hands.stems[2]}.parquet" in details(hands)


def test_some_rows_of_a_part_written_again_elsewhere_are_doubled(hands: Hands) -> None:
    (hands.output / "again.parquet").write_bytes(serialize(hands.table(3).slice(2, 1)))
    assert found(hands) == [("doubled", "again.parquet")]
    assert f"rows of {hands.stems[3]}.parquet again" in details(hands)


def test_a_key_twice_in_a_part_is_doubled(hands: Hands) -> None:
    table = hands.table(2)
    hands.write(2, pa.concat_tables([table, table.slice(4, 1)]))
    assert found(hands) == [("edited", hands.part(2).name), ("doubled", hands.part(2).name)]


def test_a_part_that_took_the_place_of_another_is_doubled_although_its_receipt_vouches_for_it(hands: Hands) -> None:
    hands.write(3, hands.table(2), blessed=True)
    rows = {name: hands.value(hands.receipt(2), name) for name in COUNTS}
    hands.edit(hands.receipt(3), **rows)
    assert found(hands)[0] == ("doubled", hands.part(3).name)
    assert f"belongs to {hands.stems[2]}.parquet" in details(hands)


def test_rows_of_an_object_that_the_plan_does_not_read_do_not_match_it(hands: Hands) -> None:
    hands.set_value(7, "source", "/elsewhere/x.jsonl")
    assert found(hands) == [("plan_mismatch", hands.part(7).name)]


@pytest.mark.parametrize("body", [b"PAR1", b"", serialize(pa.table({"x": [1]}))])
def test_a_parquet_that_the_plan_does_not_name_is_foreign(hands: Hands, body: bytes) -> None:
    (hands.output / "train.parquet").write_bytes(body)
    assert found(hands) == [("foreign", "train.parquet")]


@pytest.mark.parametrize(
    "name", ["notes.txt", "_SUCCESS", "__etl/receipts/x.json", "__etl/mine", "__etl/rejects/x.jsonl"]
)
def test_any_other_object_that_the_plan_does_not_name_is_foreign(hands: Hands, name: str) -> None:
    (hands.output / name).write_bytes(b"{}")
    assert found(hands) == [("foreign", name)]


def test_a_part_of_another_plan_with_its_receipt_is_foreign(hands: Hands) -> None:
    (hands.output / "part-0000001-aaaaaaaaaaaa.parquet").write_bytes(serialize(pa.table({"x": [1]})))
    (hands.receipts / "part-0000001-aaaaaaaaaaaa.json").write_bytes(hands.receipt(1).read_bytes())
    assert [kind for kind, _ in found(hands)] == ["foreign", "foreign"]


def test_what_an_overwrite_has_not_deleted_yet_is_foreign_and_said_to_go(hands: Hands) -> None:
    shutil.copy(hands.part(2), hands.output / "part-0000002-bbbbbbbbbbbb.parquet")
    change_plan(hands, lambda plan: plan.update(discards=["part-0000002-bbbbbbbbbbbb"]))
    assert found(hands) == [("foreign", "part-0000002-bbbbbbbbbbbb.parquet")]
    assert "etl run deletes it" in details(hands)


def test_what_etl_leaves_beside_the_parts_is_not_foreign(hands: Hands) -> None:
    for name in ("lease.json", "report.html", "probe-" + "0" * 32):
        (hands.output / "__etl" / name).write_bytes(b"{}")
    assert found(hands) == []


# --- values, in parts whose receipt vouches for their bytes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("loss_mask", lambda mask: [2 if m else 0 for m in mask], "loss_mask value 2 in row 0"),
        ("loss_mask", lambda mask: [-1 if m else 0 for m in mask], "loss_mask value -1 in row 0"),
        ("loss_mask", lambda mask: [*mask, 0], "33 input_ids, but 34 loss_mask values in row 0"),
        ("loss_mask", lambda mask: [1, *mask[1:]], "n_loss_tokens 16, but 17 trained in loss_mask in row 0"),
        ("input_ids", lambda ids: [*ids[:-1], LARGEST + 1], f"token id {LARGEST + 1} beyond the tokenizer's largest"),
        ("input_ids", lambda ids: [-5, *ids[1:]], "token id -5 in row 0"),
        ("n_tokens", 3, "n_tokens 3, but 33 input_ids in row 0"),
        ("n_loss_tokens", 15, "n_loss_tokens 15, but 16 trained in loss_mask in row 0"),
        ("choice", -1, "choice -1 in row 0"),
        ("turn", 0, "turn 0 in row 0"),
        ("id", None, "id is null in row 0"),
        ("source", None, "source is null in row 0"),
        ("n_tokens", None, "n_tokens is null in row 0"),
        ("input_ids", None, "input_ids is null in row 0"),
        ("loss_mask", lambda mask: [None, *mask[1:]], "loss_mask is null in row 0"),
    ],
)
def test_a_value_that_cannot_be_right_is_a_bad_value(hands: Hands, column: str, value: Any, says: str) -> None:
    hands.set_value(7, column, value)
    assert says in details(hands)
    assert ("bad_value", hands.part(7).name) in found(hands)
    assert {kind for kind, _ in found(hands)} <= {"bad_value", "wrong_count"}


def test_the_largest_id_itself_is_a_good_value(hands: Hands) -> None:
    hands.set_value(7, "input_ids", lambda ids: [*ids[:-1], LARGEST])
    assert found(hands) == []


def test_many_bad_rows_are_one_fault_that_counts_them(hands: Hands) -> None:
    table = hands.table(2)
    hands.write(2, table.set_column(3, "n_tokens", pa.array([1] * 7, pa.int32())), blessed=True)
    assert found(hands) == [("bad_value", hands.part(2).name)]
    assert "in row 0, the first of 7 such rows" in details(hands)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop_columns(["loss_mask"]), "column loss_mask is missing"),
        (lambda t: t.append_column("mine", pa.array([0] * len(t))), "column mine is not of layout default"),
        (
            lambda t: t.set_column(3, "n_tokens", t["n_tokens"].cast(pa.int64())),
            "column n_tokens is int64, not int32",
        ),
    ],
)
def test_columns_that_are_not_the_schema_are_a_bad_value(
    hands: Hands, change: Callable[[pa.Table], pa.Table], says: str
) -> None:
    hands.write(7, change(hands.table(7)), blessed=True)
    assert ("bad_value", hands.part(7).name) in found(hands)
    assert says in details(hands)


def test_columns_are_read_by_name_in_any_order(hands: Hands) -> None:
    table = hands.table(7)
    hands.write(7, table.select(table.column_names[::-1]), blessed=True)
    assert found(hands) == []


def test_bad_values_are_found_in_every_row_group(hands: Hands) -> None:
    table = hands.table(2).set_column(
        3, "n_tokens", pa.array([*hands.table(2)["n_tokens"].to_pylist()[:-1], 1], pa.int32())
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=2)
    body = sink.getvalue().to_pybytes()
    hands.part(2).write_bytes(body)
    hands.edit(hands.receipt(2), size=len(body), sha256=hashlib.sha256(body).hexdigest())
    assert found(hands) == [("bad_value", hands.part(2).name)]
    assert "in row 6" in details(hands)


# --- receipts ----------------------------------------------------------------------------------------------------


def test_a_deleted_receipt_is_missing(hands: Hands) -> None:
    gone = hands.receipt(3)
    gone.unlink()
    assert found(hands) == [("missing_receipt", f"__etl/receipts/{gone.name}")]


def test_a_partition_without_receipt_and_part_is_missing_where_success_says_that_all_is_done(hands: Hands) -> None:
    gone = hands.receipt(3)
    hands.part(3).unlink()
    gone.unlink()
    assert found(hands) == [("missing_receipt", f"__etl/receipts/{gone.name}")]
    assert "although SUCCESS says that all is done" in details(hands)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("by", [1, -1])
def test_a_wrong_count_in_a_receipt_is_found(hands: Hands, name: str, by: int) -> None:
    was = hands.value(hands.receipt(4), name)
    hands.edit(hands.receipt(4), **{name: was + by})
    faults = found(hands)
    assert {kind for kind, _ in faults} == {"wrong_count"}
    assert name in details(hands)


@pytest.mark.parametrize(
    "values",
    [
        {"reasons": {"json": 2}},
        {"reasons": {"json": 1, "shape": 1, "role": 1}},
        {"reasons": {}},
        {"counts": {"control_token_rows": 1}},
        {"counts": {"truncated_rows": 100}},
        {"lines": 10, "blank": 1},
        {"rejected": 3, "candidates": 10, "lines": 10},
        {"rows": 8, "candidates": 10, "lines": 10},
        {"size": 1},
        {"rows": "7"},
        {"rows": -7},
        {"tokens": 239.0},
        {"blank": None},
        {"reasons": ["json"]},
    ],
    ids=str,
)
def test_wrong_counts_that_agree_with_each_other_are_found_too(hands: Hands, values: dict[str, Any]) -> None:
    hands.edit(hands.receipt(4), **values)
    assert {kind for kind, _ in found(hands)} == {"wrong_count"}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"index": 5}, "index 5, the plan has 4"),
        ({"identity": "0" * 12}, "identity '000000000000'"),
        ({"fingerprint": "0" * 64}, "fingerprint '0000"),
        ({"version": 2}, "version 2, the plan has 1"),
        ({"part": "part-0000003.parquet"}, "part 'part-0000003.parquet'"),
        ({"objects": []}, "objects '0 of them', the plan has '1 of them'"),
        ({"objects": None}, "objects 'None of them'"),
    ],
)
def test_a_receipt_that_is_not_of_the_plan_is_a_mismatch(hands: Hands, values: dict[str, Any], says: str) -> None:
    hands.edit(hands.receipt(4), **values)
    assert found(hands) == [("plan_mismatch", f"__etl/receipts/{hands.receipt(4).name}")]
    assert says in details(hands)


@pytest.mark.parametrize("field", ["key", "etag", "start", "end"])
def test_a_receipt_over_other_objects_than_the_plans_is_a_mismatch(hands: Hands, field: str) -> None:
    (entry,) = hands.value(hands.receipt(4), "objects")
    hands.edit(hands.receipt(4), objects=[{**entry, field: 1}])
    assert found(hands) == [("plan_mismatch", f"__etl/receipts/{hands.receipt(4).name}")]


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b'{"version":1,"ind', "truncated"), (b"", "truncated"), (b"[]\n", "edited"), (b"x}\n", "edited")],
)
def test_a_receipt_that_is_none_is_truncated_or_edited(hands: Hands, body: bytes, kind: str) -> None:
    hands.receipt(4).write_bytes(body)
    assert found(hands) == [(kind, f"__etl/receipts/{hands.receipt(4).name}")]


# --- rejects -----------------------------------------------------------------------------------------------------


def test_a_deleted_rejects_file_is_a_wrong_count(hands: Hands) -> None:
    gone = hands.rejects()
    gone.unlink()
    assert found(hands) == [("wrong_count", f"__etl/rejects/{gone.name}")]
    assert "it is not there, its receipt counts 2" in details(hands)


def test_a_line_too_few_or_too_many_in_a_rejects_file_is_a_wrong_count(hands: Hands) -> None:
    first, second = hands.rejects().read_bytes().splitlines(keepends=True)
    for body, count in ((first, 1), (first + second + second, 3)):
        hands.rejects().write_bytes(body)
        assert found(hands) == [("wrong_count", f"__etl/rejects/{hands.rejects().name}")]
        assert f"it holds {count} rejects, its receipt counts 2" in details(hands)


def test_a_rejects_file_cut_within_a_line_is_truncated(hands: Hands) -> None:
    hands.rejects().write_bytes(hands.rejects().read_bytes()[:-20])
    assert found(hands) == [("truncated", f"__etl/rejects/{hands.rejects().name}")]


def test_a_reject_without_a_line_number_in_a_closed_output_is_a_bad_value(hands: Hands) -> None:
    records = [json.loads(line) | {"line": None} for line in hands.rejects().read_bytes().splitlines()]
    hands.rejects().write_text("".join(json.dumps(record) + "\n" for record in records))
    assert found(hands) == [("bad_value", f"__etl/rejects/{hands.rejects().name}")]


# --- plan and SUCCESS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["lines", "blank", "candidates", "rows", "rejected", "tokens", "loss_tokens", "parts", "partitions"]
)
def test_success_with_another_total_is_a_wrong_count(hands: Hands, name: str) -> None:
    hands.edit(hands.success, **{name: hands.value(hands.success, name) + 1})
    assert found(hands) == [("wrong_count", "__etl/SUCCESS")]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"reasons": {"json": 2}}, "wrong_count"),
        ({"counts": {}}, "wrong_count"),
        ({"rows": None}, "wrong_count"),
        ({"fingerprint": "0" * 64}, "plan_mismatch"),
        ({"version": 2}, "plan_mismatch"),
    ],
)
def test_success_of_another_run_is_found(hands: Hands, values: dict[str, Any], kind: str) -> None:
    hands.edit(hands.success, **values)
    assert found(hands) == [(kind, "__etl/SUCCESS")]


def test_an_output_that_no_run_closed_is_no_good_output(hands: Hands) -> None:
    hands.success.unlink()
    assert found(hands) == [("missing_receipt", "__etl/SUCCESS")]


def change_plan(hands: Hands, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads(hands.plan.read_bytes())
    change(record)
    hands.plan.write_text(json.dumps(record))


def test_an_identity_that_does_not_follow_from_its_objects_is_a_mismatch(hands: Hands) -> None:
    change_plan(hands, lambda plan: plan["partitions"][7]["objects"][0].__setitem__(1, "another-etag"))
    faults = found(hands)
    assert ("plan_mismatch", "__etl/plan.json") in faults
    assert {kind for kind, _ in faults} == {"plan_mismatch"}


def test_settings_that_are_not_the_fingerprints_are_a_mismatch(hands: Hands) -> None:
    change_plan(hands, lambda plan: plan["settings"].__setitem__("no_train_end", True))
    assert found(hands) == [("plan_mismatch", "__etl/plan.json")]


def test_a_plan_that_forgot_a_partition_is_a_mismatch_and_its_part_a_stranger(hands: Hands) -> None:
    forgotten = hands.part(5).name
    change_plan(hands, lambda plan: plan["partitions"].pop(5))
    faults = found(hands)
    assert faults[0] == ("plan_mismatch", "__etl/plan.json")
    assert ("foreign", forgotten) in faults


def test_a_plan_without_a_largest_id_leaves_ids_without_an_upper_bound(hands: Hands) -> None:
    change_plan(hands, lambda plan: plan.pop("largest_id"))
    hands.set_value(7, "input_ids", lambda ids: [2**31 - 1, *ids[1:]])
    assert found(hands) == []


# --- outputs that are not finished, not etl's, large, or far away --------------------------------------------------


def test_an_unfinished_output_is_said_to_be_so_in_one_line(tmp_path: Path) -> None:
    hands = Hands(make_output(tmp_path, mixed_objects(), partitions=3))
    assert found(hands) == [("missing_receipt", "__etl/receipts/")]
    assert details(hands) == (
        "unfinished: 5 of 8 partitions have neither receipt nor part yet; the same etl run goes on there"
    )
    (hands.output / "__etl" / "lease.json").write_bytes(b"{}")
    assert "may be at work" in details(hands)


def test_expanded_turns_are_reconciled_by_their_lines(tmp_path: Path) -> None:
    row = chat("x", "One?", "1.")
    row["messages"] += [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2."}]
    hands = Hands(make_output(tmp_path, {"a.jsonl": jsonl([row, *small_rows(2)]) + TORN}, turns="expand"))
    assert found(hands) == []
    assert [hands.value(hands.receipt(0), name) for name in ("lines", "rows", "rejected")] == [4, 4, 1]
    hands.edit(hands.receipt(0), lines=5, blank=0)
    assert ("wrong_count", f"__etl/receipts/{hands.receipt(0).name}") in found(hands)


def test_limits_of_the_run_hold_in_its_rows(tmp_path: Path) -> None:
    hands = Hands(make_output(tmp_path, {"a.jsonl": jsonl(small_rows(3))}, max_length=40, min_loss_tokens=5))
    assert found(hands) == []
    change_plan(hands, lambda plan: plan["settings"].update(max_length=20, min_loss_tokens=30))
    assert "33 tokens, --max-length 20, in row 0, the first of 3 such rows" in details(hands)
    assert "n_loss_tokens 16, --min-loss-tokens 30, in row 0, the first of 3 such rows" in details(hands)


def test_an_output_of_nothing_but_blank_lines_is_good(tmp_path: Path) -> None:
    assert check(str(make_output(tmp_path, {"a.jsonl": b"\n\n"}))).as_dict() == {
        "ok": True,
        "parts": 0,
        "rows": 0,
        "faults": [],
    }


def test_faults_come_in_the_same_order_every_time(hands: Hands) -> None:
    for index in (1, 3, 5, 7):
        hands.part(index).unlink()
    (hands.output / "b.txt").touch()
    (hands.output / "a.txt").touch()
    names = [hands.part(index).name for index in (1, 3, 5, 7)]
    assert [where for _, where in found(hands)] == [*names, "a.txt", "b.txt"]
    assert found(hands) == found(hands)


def test_work_in_threads_keeps_its_order_and_never_runs_far_ahead() -> None:
    begun: list[int] = []

    def work(item: int) -> int:
        begun.append(item)
        return -item

    results = map_in_order(work, range(10_000), threads=4)
    assert next(results) == 0
    assert len(begun) <= 4 * 32
    assert list(results) == [-item for item in range(1, 10_000)]


@pytest.mark.parametrize("place", ["empty", "nowhere", ""])
def test_what_is_no_output_of_etl_is_wrong_usage(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError):
        check(str(tmp_path / place) if place else "")


def test_a_plan_that_is_none_is_wrong_usage(hands: Hands) -> None:
    hands.plan.write_bytes(hands.plan.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"plan.json is not a plan that etl wrote"):
        check(str(hands.output))


@pytest.mark.parametrize(
    "change",
    [
        {"settings": None},
        {"settings": {"keep": 5}},
        {"settings": {"max_length": "x"}},
        {"largest_id": "x"},
        {"inputs": [1]},
        {"partitions": 5},
        {"partitions": [{"index": "0", "identity": "0" * 12, "objects": [["a", "b", 0, 1, 1]]}]},
        {"partitions": [{"index": 0, "identity": "0" * 12, "objects": []}]},
        {"partitions": [{"index": 0, "identity": "0" * 12, "objects": [["a", "b", 0, "1", 1]]}]},
    ],
)
def test_a_plan_with_values_of_another_type_is_wrong_usage(hands: Hands, change: dict[str, Any]) -> None:
    change_plan(hands, lambda plan: plan.update(change))
    for look in (check, etl.report):
        with pytest.raises(UsageError, match=r"plan.json is not a plan that etl wrote"):
            look(str(hands.output))


@pytest.mark.parametrize(("name", "value"), [("source", ["x"]), ("offset", {}), ("reason", []), ("line", "1")])
def test_a_reject_with_a_value_of_another_type_is_an_edited_file(hands: Hands, name: str, value: object) -> None:
    path = hands.rejects()
    records = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.write_text("".join(json.dumps({**record, name: value}) + "\n" for record in records))
    assert ("edited", f"__etl/rejects/{path.name}") in found(hands)


@pytest.mark.usefixtures("s3")
def test_a_bucket_that_is_not_there_is_wrong_usage_and_a_credential_in_an_option_refused(bucket: str) -> None:
    with pytest.raises(UsageError):
        check("s3://no-such-bucket-at-all/tokens/")
    with pytest.raises(UsageError, match="no output of etl"):
        check(f"s3://{bucket}/tokens/")
    with pytest.raises(UsageError, match="looks like a credential"):
        check(f"s3://{bucket}/tokens/", storage_option={"secret": "x"})


def test_an_output_on_s3_is_checked_where_it_lies(s3: Any, bucket: str, hands: Hands) -> None:
    hands.part(3).unlink()
    files = {str(p.relative_to(hands.output)): p.read_bytes() for p in hands.output.rglob("*") if p.is_file()}
    upload(s3, bucket, files)
    result = check(f"s3://{bucket}/completions/", endpoint_url=s3.meta.endpoint_url)
    place = f"s3://{bucket}/completions/{hands.stems[3]}.parquet"
    assert [(fault.kind, fault.where) for fault in result.faults] == [("missing_part", place)]
    assert (result.parts, result.rows) == (6, 32)


# --- what the user sees ----------------------------------------------------------------------------------------------


def test_the_command_line_says_ok_and_ends_with_0(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good)]) == 0
    assert capsys.readouterr().out == "ok (7 parts, 38 rows read)\n"
    assert main(["check", str(good), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_line_names_each_fault_and_ends_with_1(hands: Hands, capsys: pytest.CaptureFixture[str]) -> None:
    hands.part(2).unlink()
    assert main(["check", str(hands.output), "--json"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"missing_part {hands.part(2)}: ")
    assert lines[1] == "FAULTS: 1 missing_part (6 parts, 31 rows read)"
    record = json.loads(last)
    assert set(record) == {"ok", "parts", "rows", "faults"}
    assert (record["ok"], record["parts"], record["rows"]) == (False, 6, 31)
    (fault,) = record["faults"]
    assert (set(fault), fault["kind"], fault["where"]) == (
        {"kind", "where", "detail"},
        "missing_part",
        str(hands.part(2)),
    )


def test_the_command_line_ends_with_2_and_one_line_where_there_is_no_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "no output of etl" in shown.err
    assert main(["check"]) == 2
    assert main(["check", str(tmp_path), "--workers", "2"]) == 2


@pytest.mark.parametrize(
    ("kind", "where", "says"),
    [
        (
            "truncated",
            "o/part-0000000-0123456789ab.parquet",
            "what is missing or truncated the same etl run makes again",
        ),
        ("missing_receipt", "o/__etl/SUCCESS", "what is missing or truncated the same etl run makes again"),
        (
            "truncated",
            "o/__etl/rejects/part-0000000-0123456789ab.jsonl",
            "delete that file and its partition's receipt",
        ),
        ("wrong_count", "o/__etl/SUCCESS", "a SUCCESS that is wrong: delete it, then run again"),
        ("plan_mismatch", "o/__etl/plan.json", "run with --overwrite, or into another OUTPUT"),
        ("plan_mismatch", "o/part-0000000-0123456789ab.parquet", "delete that part and its receipt, then run again"),
        ("foreign", "o/__etl/rejects/x.jsonl", "move it away"),
    ],
)
def test_each_fault_comes_with_what_mends_it(kind: str, where: str, says: str) -> None:
    assert says in str(CheckResult("o", 1, 1, (Fault(kind, where, "d"),))).splitlines()[-1]


def test_a_hostile_name_neither_commands_the_terminal_nor_the_page(hands: Hands) -> None:
    (hands.output / "\x1b[2J<script>.txt").touch()
    result = check(str(hands.output))
    assert "\x1b" not in str(result)
    assert r"\x1b[2J<script>.txt" in str(result)
    assert "<script>" not in result._repr_html_()
    assert "&lt;script&gt;" in result._repr_html_()


def test_check_needs_neither_dask_nor_transformers(good: Path) -> None:
    code = f"import sys, etl; print(etl.check({str(good)!r}).ok, *sys.modules)"
    ok, *loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert ok == "True"
    assert {"dask", "distributed", "transformers"} & set(loaded) == set()


def test_check_and_its_result_are_of_the_package() -> None:
    assert etl.check is check
    assert etl.CheckResult is CheckResult
    assert CheckResult("x", 1, 2, (Fault("edited", "x", "y"),)).ok is False
