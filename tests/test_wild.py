"""Files and rows as they come: every line is a row, a reject with a true reason, or blank, however the file is cut."""

from __future__ import annotations

import base64
import bz2
import codecs
import contextlib
import gzip
import itertools
import json
import multiprocessing
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import zstandard

from etl.config import RunConfig
from etl.ledger import encode_json, encode_rejects, number_rejects, open_output, read_receipts
from etl.lines import Batch
from etl.pipeline import Kit, Outcome, build_kit, transform
from etl.records import Line, Partition
from etl.tables import serialize
from etl.tokenizer import load_tokenizer
from tests.chats import DATE
from tests.jobs import QWEN36, Stored, chat, jsonl, small_rows, stored
from tests.outputs import make_output

Row = dict[str, Any]

# --- lines, each with what must become of it ---


@dataclass(frozen=True)
class Wild:
    """A line, and what it must become: so many rows, or a reject for one of `reasons`; neither where it is blank.

    `free`: bytes were changed at random, so that the standard library's parser is asked what the line is.
    """

    raw: bytes
    rows: int = 0
    reasons: frozenset[str] = frozenset()
    free: bool = False


def rejected(raw: bytes, *reasons: str) -> Wild:
    return Wild(raw, reasons=frozenset(reasons))


def _user(draw: random.Random) -> Row:
    return {"role": "user", "content": f"What is {draw.randrange(10**6)}?"}


def _reply(draw: random.Random, **more: Any) -> Row:
    return {"role": "assistant", "content": f"It is {draw.randrange(10**6)}.", **more}


def _messages(draw: random.Random) -> Row:
    return {"messages": [_user(draw), _reply(draw, reasoning_content="Because.")]}


def _tool_call(draw: random.Random) -> Row:
    calls = [{"id": "c1", "function": {"name": "f", "arguments": draw.choice(['{"x": 1}', {"x": "é"}, {}, None])}}]
    answer = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    return {"messages": [_user(draw), _reply(draw, tool_calls=calls), answer, _reply(draw)], "tools": [{"name": "f"}]}


def _batch_output(draw: random.Random) -> Row:
    choices = [{"message": _reply(draw), "finish_reason": "stop"}]
    return {"response": {"body": {"choices": choices}}, "body": {"messages": [_user(draw)]}}


SHAPES: Final[tuple[tuple[Callable[[random.Random], Row], int], ...]] = (
    (_messages, 1),
    (_messages, 1),
    (_tool_call, 1),
    (lambda draw: {"prompt": "Hi", "completion": f"<think>\nhm\n</think>\n\n{draw.random()}"}, 1),
    (lambda draw: {"prompt": [_user(draw)], "response": [_reply(draw)], "finish_reason": "length"}, 1),
    (
        lambda draw: {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": draw.choice("ab")}]},
        1,
    ),
    (lambda draw: {"instruction": "Add", "input": str(draw.random()), "output": "2"}, 1),
    (_batch_output, 1),
    (lambda draw: {"messages": [_user(draw)], "choices": [{"message": _reply(draw)} for _ in range(3)]}, 3),
    (lambda draw: {"text": f"plain {draw.random()}"}, 1),
    (lambda draw: {"prompt_token_ids": [1, 2], "token_ids": [draw.randrange(1000) for _ in range(5)]}, 1),
)


def _good(draw: random.Random) -> tuple[Row, int]:
    make, rows = draw.choice(SHAPES)
    named = {"id": f"row-{draw.getrandbits(40):x}"} if draw.random() < 0.8 else {}
    return {**named, **make(draw)}, rows


def _spell(draw: random.Random, row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=draw.random() < 0.5).encode()


_DEEP: Final = b"[" * 5000 + b"]" * 5000


def _plain(draw: random.Random) -> Wild:
    row, rows = _good(draw)
    return Wild(_spell(draw, row), rows)


def _dressed(draw: random.Random) -> Wild:
    """A good row with something around or beside it that must not matter."""
    row, rows = _good(draw)
    raw = _spell(draw, row)
    unused = draw.choice(
        [
            *(b'"score": NaN', b'"n": -Infinity', b'"n": 123456789012345678901234567890', b'"n": ' + b"9" * 5000),
            *(b'"x": 1e999', b'"s": "\\ud83d"', b'"s": "a\tb\x01"', b'"d": ' + _DEEP, b'"id": null'),
            *(b'"s": "\xe2\x80\xa8\xc2\x85"', b'"s": "a\\u0000b"', b'"k": 1, "k": 2', b'"": {"": []}'),
        ]
    )
    dressed = draw.choice([codecs.BOM_UTF8 + raw, raw + b"\r", b" \t" + raw + b"  ", b"{" + unused + b", " + raw[1:]])
    return Wild(dressed, rows)


def _said(draw: random.Random) -> Wild:
    """A row whose text is odd, and is kept."""
    odd = draw.choice(
        ["\u2028b\u0085c", "\u0000", "😀", "<|im_end|>", "x" * draw.choice([10, 70_000]), "e\u0301", "\ufeff", "\r\n"]
    )
    reply = {"role": "assistant", "content": odd + "."}
    return Wild(_spell(draw, {"messages": [{"role": "user", "content": odd}, reply]}), 1)


def _doubled_key(draw: random.Random) -> Wild:
    row, rows = _good(draw)
    return Wild(b'{"messages": [], "text": 7, ' + _spell(draw, row)[1:], rows) if "messages" in row else _plain(draw)


def _torn(draw: random.Random) -> Wild:
    raw = _spell(draw, _good(draw)[0])
    piece = raw[: draw.randrange(1, len(raw))]
    try:
        piece.decode()
    except UnicodeDecodeError:
        return rejected(piece, "encoding")
    return rejected(piece, "json")


def _glued(draw: random.Random) -> Wild:
    first, second = (_spell(draw, _messages(draw)) for _ in range(2))
    return rejected(draw.choice([first, first[: draw.randrange(1, len(first))]]) + second, "json", "encoding")


def _array(draw: random.Random) -> Wild:
    raw = _spell(draw, _good(draw)[0])
    return rejected(draw.choice([b"[" + raw + b"]", b"[", b"[]", b"[1, 2", b"[" + raw + b",", b"[null]"]), "shape")


def _not_utf8(draw: random.Random) -> Wild:
    raw = b'{"text": "caf\xe9 ' + str(draw.random()).encode() + b'"}'
    wide = ("\ufeff" + _spell(draw, {"text": "x"}).decode()).encode("utf-16-le")
    return rejected(draw.choice([raw, raw[:13] + b"\xed\xa0\xbd" + raw[14:], b"\xff\xfe", wide, b"\x80"]), "encoding")


def _of_no_use(draw: random.Random) -> Wild:
    user = b'{"role": "user", "content": "x"}'
    return draw.choice(
        [
            *(
                rejected(raw, "shape")
                for raw in (b"null", b"7", b'"x"', b"true", b'{"x": ' + _DEEP + b"}", b'{"messages": []}')
            ),
            *(rejected(raw, "json") for raw in (b"nul", b"{'a': 1}", b"\x0b", b",", b"}", b'{"x": ' + _DEEP)),
            rejected(b'{"messages": [null, ' + user + b"]}", "shape"),
            rejected(b'{"messages": [{"content": "x"}]}', "shape"),
            rejected(b'{"messages": [' + user + b', {"role": "assistant", "content": 7}]}', "shape"),
            rejected(b'{"messages": [{"role": "assistant", "content": [{"type": "image_url"}]}]}', "part"),
            rejected(b'{"messages": [' + user + b"]}", "no_loss_tokens"),
            rejected(b'{"messages": [{"role": "oracle", "content": "x"}, {"role": "assistant"}]}', "template", "role"),
            rejected(
                b'{"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]}', "template"
            ),
            rejected(b'{"text": "\\udc00"}', "encoding"),
            rejected(b'{"text": ""}', "no_loss_tokens"),
            rejected(b'{"prompt_token_ids": [1], "token_ids": [999999]}', "tokenizer"),
            rejected(b'{"prompt_token_ids": [1], "token_ids": [-1]}', "shape"),
            rejected(b'{"prompt": "x"}', "shape"),
        ]
    )


def _blank(draw: random.Random) -> Wild:
    return Wild(draw.choice([b"", b" ", b"\r", b"\t \r", codecs.BOM_UTF8, codecs.BOM_UTF8 + b" \r"]))


def _mutated(draw: random.Random) -> Wild:
    raw = bytearray(_spell(draw, _good(draw)[0]))
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(raw))
        raw[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3)).replace(b"\n", b"n")
    return Wild(bytes(raw) or b"x", free=True)


KINDS: Final = {
    _plain: 30,
    _dressed: 15,
    _said: 8,
    _doubled_key: 3,
    _torn: 8,
    _glued: 6,
    _array: 3,
    _not_utf8: 5,
    _of_no_use: 9,
    _blank: 6,
    _mutated: 15,
}


def wild_lines(count: int, seed: int) -> list[Wild]:
    """`count` lines of every kind, the same for the same seed; the first is good, so that the file looks like one."""
    draw = random.Random(seed)
    kinds, shares = list(KINDS), list(KINDS.values())
    return [_plain(draw), *(draw.choices(kinds, shares)[0](draw) for _ in range(count - 1))]


# --- what became of them ---


@dataclass(frozen=True)
class Seen:
    """An output as the file's lines see it, without what its folder is called.

    `rows`: (offset, choice) -> (id, ids, mask); `rejects`: offset -> the records; `totals`: lines, blank, candidates.
    """

    rows: dict[tuple[int, int], tuple[str, list[int], list[int]]]
    rejects: dict[int, list[Row]]
    totals: Row


def see(output: Path, source: Path) -> Seen:
    found: Stored = stored(str(output))
    columns = ("source_offset", "choice", "id", "input_ids", "loss_mask")
    table = [found.table[name].to_pylist() for name in columns]
    rows = {
        (at, choice): (name.replace(str(source), ""), ids, mask)
        for at, choice, name, ids, mask in zip(*table, strict=True)
    }
    assert len(rows) == found.table.num_rows
    rejects: dict[int, list[Row]] = {}
    for record in found.rejects:
        assert record.pop("source") == str(source)
        rejects.setdefault(record["offset"], []).append(record)
    summed = ("lines", "blank", "candidates", "rows", "rejected", "mismatched_rows")
    return Seen(rows, rejects, {name: sum(receipt[name] for receipt in found.receipts) for name in summed})


def require_fate(lines: list[Wild], seen: Seen) -> None:
    """Every line became what it must, under its own offset and number."""
    rows = Counter(offset for offset, _ in seen.rows)
    offset = 0
    for number, line in enumerate(lines, 1):
        records = seen.rejects.get(offset, [])
        reasons = {record["reason"] for record in records}
        where = f"line {number}: {line.raw[:80]!r} became {rows[offset]} rows and {reasons}"
        if line.free:
            assert rows[offset] or records, where
            assert not reasons or reasons <= plausible(line.raw), where
        else:
            assert rows[offset] == line.rows, where
            assert len(records) == bool(line.reasons), where
            assert reasons <= line.reasons, where
        for record in records:
            kept = raw_of(record)
            assert (record["line"], record["bytes"]) == (number, len(line.raw)), where
            assert kept == line.raw[: len(kept)], where
            assert (len(kept) == len(line.raw)) == (not record["truncated"]), where
            assert "line_in_range" not in record, where
        offset += len(line.raw) + 1
    assert seen.totals["lines"] == len(lines)
    assert seen.totals["blank"] == sum(not (line.rows or line.reasons or line.free) for line in lines)
    assert seen.totals["candidates"] == seen.totals["rows"] + seen.totals["rejected"]
    assert seen.totals["mismatched_rows"] == 0


def raw_of(record: Row) -> bytes:
    return str(record["raw"]).encode() if "raw" in record else base64.b64decode(record["raw_base64"])


def plausible(raw: bytes) -> set[str]:
    """The reasons for which such bytes may be rejected, by the standard library's own parser."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return {"encoding"}
    try:
        value = json.loads(text.removeprefix("\ufeff"), strict=False)
    except ValueError:
        return {"shape"} if text.lstrip().startswith("[") else {"json"}
    if not isinstance(value, dict):
        return {"shape"}
    return {"encoding", "shape", "role", "part", "template", "no_loss_tokens", "tokenizer"}


def body_of(lines: list[Wild]) -> bytes:
    return b"".join(line.raw + b"\n" for line in lines)


def _members(body: bytes, pack: Callable[[bytes], bytes], size: int) -> bytes:
    return b"".join(pack(body[at : at + size]) for at in range(0, len(body), size))


PACKERS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "bz2": bz2.compress,
    "gz members": lambda body: _members(body, gzip.compress, 50_000),
    "zst frames": lambda body: _members(body, zstandard.ZstdCompressor(write_checksum=True).compress, 10_000),
    "bz2 streams": lambda body: _members(body, bz2.compress, 70_000),
}


def require_same_however_cut(folder: Path, lines: list[Wild], sizes: list[int | str], packed: list[str]) -> None:
    """One file, plain in ranges of each size and packed, gives the same rows and rejects, and the right ones."""
    body = body_of(lines)
    if lines[-1].raw:
        body = body[:-1]  # the last line needs no line feed
    first: Seen | None = None
    for name, content, size in [
        *((f"ranges of {size}", body, size) for size in sizes),
        *((name, PACKERS[name](body), 10_000) for name in packed),
    ]:
        place = folder / name.replace(" ", "-")
        output = make_output(place, {"rows.jsonl": content}, partition_bytes=size, verify_share=0.05)
        seen = see(output, place / "in" / "rows.jsonl")
        if first is None:
            require_fate(lines, seen)
            first = seen
        assert seen == first, name


def test_a_file_of_wild_lines_gives_the_same_rows_and_rejects_however_it_is_cut(tmp_path: Path) -> None:
    require_same_however_cut(tmp_path, wild_lines(200, seed=1), ["16MiB", 1_499], ["zst frames"])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_wild_lines_give_the_same_rows_and_rejects_however_they_are_cut(tmp_path: Path) -> None:
    lines = wild_lines(10_000, seed=2)
    began = time.monotonic()
    require_same_however_cut(tmp_path, lines, ["16MiB", 1_000_003, 4_096], list(PACKERS))
    print(f"\n{len(body_of(lines))} bytes, 9 times in {time.monotonic() - began:.0f} s")


def test_the_rejects_of_a_run_with_too_many_of_them_are_numbered_too(tmp_path: Path) -> None:
    lines = wild_lines(60, seed=5)
    output = make_output(tmp_path, {"rows.jsonl": body_of(lines)}, partition_bytes=1_009, max_reject_share=0)
    found = stored(str(output))
    assert "__etl/SUCCESS" not in found.objects
    assert len(found.receipts) > 5
    require_fate(lines, see(output, tmp_path / "in" / "rows.jsonl"))


def test_a_range_that_is_not_done_leaves_the_numbers_behind_it_open(tmp_path: Path) -> None:
    body = jsonl(small_rows(3)) + b"{\n" + jsonl(small_rows(3)) + b"{\n" + jsonl(small_rows(3)) + b"{\n"
    output = make_output(tmp_path, {"rows.jsonl": body}, partition_bytes=len(body) // 3 + 1)
    storage, places, plan = open_output(str(output))
    receipts = read_receipts(storage, places, plan)
    assert [record["line"] for record in stored(str(output)).rejects] == [4, 8, 12]
    for stem in receipts:
        records = [json.loads(line) for line in (storage.get(places.rejects(stem)) or b"").splitlines()]
        opened = [encode_json({**record, "line": None, "line_in_range": 1}) for record in records]
        storage.put(places.rejects(stem), b"".join(opened))
    second = plan.partitions[1].stem
    number_rejects(storage, places, plan, {stem: r for stem, r in receipts.items() if stem != second})
    assert [record["line"] for record in stored(str(output)).rejects] == [None, None, None]


# --- hostile objects among good ones ---

DEPTHS: Final = (30, 120, 200, 400, 480, 700, 990)
WORDS: Final = (
    *("messages", "prompt", "completion", "response", "body", "choices", "conversations", "instruction", "output"),
    *("role", "content", "reasoning_content", "thinking", "tool_calls", "function", "name", "arguments", "parameters"),
    *("type", "properties", "items", "get", "keys", "values", "__class__", "", "id", "train", "weight"),
    *("tools", "documents", "chat_template_kwargs", "token_ids", "prompt_token_ids", "usage", "from", "value"),
    *("message", "finish_reason", "text"),
)
TEXTS: Final = (
    *("", " ", "\n", "x", "<think>", "</think>", "<think>\nhalf", "a</think>b", "<|im_end|>", "<|im_start|>user\n"),
    *("\ud83d", "\udc00x", "\x00", "\ufeff", "e\u0301\u0338", "\u0301" * 3000, "\ue000", "\uf8ff\U000f0000\U00100000"),
    *("a" * 100_000, "{" * 5000, "<" * 20_000, "<think>" * 2000, '{"a": ' * 300, '{"a": "\\ud800"}', "null", "NaN"),
    *("user", "assistant", "system", "tool", "developer", "length", "{{ 7 * 7 }}", "%s", "\u202e", "[" * 3000),
)
SCALARS: Final = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1e308, 0.5, -0.0),
    *(float("inf"), float("nan")),
)
OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"turns": "expand", "control_tokens": "literal"},
    {"control_tokens": "reject", "truncated_completions": "reject", "keep": ("tools", "usage", "messages")},
    {"turns": "last", "no_train_reasoning": True, "max_length": 4000, "over_length": "truncate"},
)
TEMPLATES: Final = (None, "gptoss", "deepseekv3", "llama3_1", "gemma4_v5", "glm4moe", "qwen2_5", "cohere2")


def _deep(draw: random.Random) -> Any:
    value: Any = draw.choice(TEXTS[:12])
    for _ in range(draw.choice(DEPTHS)):
        value = [value] if draw.random() < 0.5 else {draw.choice(WORDS): value}
    return value


def hostile_value(draw: random.Random, depth: int = 3) -> Any:
    """Any JSON value, the odd ones first of all."""
    kind = draw.random()
    if kind < 0.35 or depth == 0:
        return draw.choice(SCALARS) if draw.random() < 0.5 else draw.choice(TEXTS)
    if kind < 0.4:
        return _deep(draw)
    if kind < 0.42:
        return [draw.choice(SCALARS)] * draw.choice([100, 20_000])
    if kind < 0.7:
        return [hostile_value(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    return {draw.choice(WORDS): hostile_value(draw, depth - 1) for _ in range(draw.randint(0, 4))}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value within."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def hostile_object(draw: random.Random) -> Any:
    """A row of some shape of which something was replaced, taken out, doubled or renamed; or anything at all."""
    if draw.random() < 0.1:
        return hostile_value(draw)
    row = orjson.loads(json.dumps(_good(draw)[0]))
    for _ in range(draw.choice([1, 1, 2, 3])):
        places = list(itertools.islice(_places(row), 400))
        if not places:
            break
        deeper = [place for place in places if place[0] is not row]
        container, key = draw.choice(deeper if deeper and draw.random() < 0.7 else places)
        kind = draw.random()
        if kind < 0.6:
            container[key] = hostile_value(draw)
        elif kind < 0.75:
            del container[key]
        elif isinstance(container, list):
            container.insert(key, draw.choice([container[key], hostile_value(draw)]))
        else:
            container[draw.choice(WORDS)] = draw.choice([container[key], hostile_value(draw)])
    return row


def spell_deep(value: Any) -> bytes:
    """JSON of any depth."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value).encode()
    finally:
        sys.setrecursionlimit(usual)


@contextlib.contextmanager
def untimed(_stage: str) -> Iterator[None]:
    yield


def _neighbour(i: int) -> bytes:
    return orjson.dumps(chat(f"good-{i}", "Hi", f"ok {i}"))


def make_kit(template: Path | None, options: dict[str, Any]) -> Kit:
    more: dict[str, Any] = {} if template is None else {"chat_template": str(template)}
    settings: dict[str, Any] = {"verify_share": 0.05, **more, **options}
    config = RunConfig(input="x", tokenizer=QWEN36, date=DATE, **settings)
    return build_kit(load_tokenizer(config), config)


def require_neighbours(kit: Kit, objects: list[Any]) -> Counter[str]:
    """The objects among good rows in one batch: no good row is lost or changed. Returns what became of the others."""
    raws = [raw for i, item in enumerate(objects) for raw in (_neighbour(i), spell_deep(item))]
    lines = tuple(Line("s3://b/x.jsonl", 10 * i, raw, i + 1) for i, raw in enumerate(raws))
    outcome: Outcome = transform(lambda: [Batch(lines)], kit, untimed)
    found = dict(zip(outcome.table["id"].to_pylist(), outcome.table["source_offset"].to_pylist(), strict=True))
    assert [found.get(f"good-{i}") for i in range(len(objects))] == [20 * i for i in range(len(objects))]
    assert outcome.candidates == outcome.table.num_rows + len(outcome.rejects)
    touched = {*outcome.table["source_offset"].to_pylist(), *(reject.offset for reject in outcome.rejects)}
    assert touched == {line.offset for line in lines}
    assert outcome.mismatched_rows == 0
    serialize(outcome.table)
    for record in encode_rejects(outcome.rejects, Partition(0, "0" * 12, ())).splitlines():
        json.loads(record)
    fates = Counter(reject.reason for reject in outcome.rejects)
    fates["row"] = outcome.table.num_rows - len(objects)
    return fates


def hold_hostile(folder: str, count: int, seed: int, at_once: int = 25) -> tuple[Counter[str], float, int]:
    """`count` objects over all templates and options: what became of them, the slowest batch's seconds, peak bytes."""
    draw = random.Random(seed)
    kits = [
        make_kit(None if name is None else Path(folder) / f"{name}.jinja", OPTIONS[i % len(OPTIONS)])
        for i, name in enumerate(TEMPLATES)
    ]
    fates: Counter[str] = Counter()
    slowest = 0.0
    for i in range(-(-count // at_once)):
        began = time.monotonic()
        fates += require_neighbours(kits[i % len(kits)], [hostile_object(draw) for _ in range(at_once)])
        slowest = max(slowest, time.monotonic() - began)
    return fates, slowest, peak_bytes()


def peak_bytes() -> int:
    """The most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts what the parent had when this process was started
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def test_hostile_objects_cost_no_neighbour(material: Path) -> None:
    fates, _, _ = hold_hostile(str(material / "templates"), 400, seed=3)
    assert fates["row"] > 50
    assert fates["shape"] > 50


def test_a_text_of_a_million_characters_is_not_held_by_both_engines() -> None:
    kit = make_kit(None, {"verify_share": 1})
    raws = [orjson.dumps(chat("long", "Hi", "word " * 210_000)), orjson.dumps(chat("short", "Hi", "ok"))]
    outcome = transform(lambda: [Batch(tuple(Line("x", i, raw, i) for i, raw in enumerate(raws)))], kit, untimed)
    assert (outcome.table.num_rows, outcome.verified_rows) == (2, 1)


def test_the_many_rejects_of_one_line_keep_it_once() -> None:
    body = {"choices": [7] * 20_000, "padding": "x" * 2**19}
    raw = orjson.dumps({"response": body, "body": {"messages": [{"role": "user", "content": "Hi"}]}})
    outcome = transform(lambda: [Batch((Line("x", 0, raw, 1),))], make_kit(None, {}), untimed)
    encoded = encode_rejects(outcome.rejects, Partition(0, "0" * 12, ()))
    assert len(encoded) < 8_000_000
    first, *_, last = map(json.loads, encoded.splitlines())
    assert (first["raw"], first["truncated"], first["choice"]) == (raw.decode(), False, 0)
    assert (last["raw"], last["truncated"], last["choice"]) == ("", True, 19_999)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_ten_thousand_hostile_objects_cost_no_neighbour_no_hang_and_no_gigabyte(material: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        work = alone.submit(hold_hostile, str(material / "templates"), 10_000, 4)
        fates, slowest, peak = work.result(timeout=1000)
    print(f"\n{dict(fates.most_common())}, slowest batch {slowest:.1f} s, peak {peak / 1e6:.0f} MB")
    assert slowest < 60
    assert peak < 1_000_000_000
