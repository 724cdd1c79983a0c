"""Every line is owned by one range, whatever the cut; damage costs what is damaged and nothing beside it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import itertools
import random
import re
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import ObjectChanged
from etl.lines import _DECODERS, RAW_BYTES, Batch, _DamagedError, _decode, read_batches
from etl.records import Line, ObjectRange, Partition, Reject
from etl.storage import Storage

MIB = 1024 * 1024
PACKERS: dict[str, Any] = {
    "plain": bytes,
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bz2": bz2.compress,
}
PACKED = {name: pack for name, pack in PACKERS.items() if name != "plain"}


def partition_of(*paths: Path) -> Partition:
    ranges = []
    for path in paths:
        seen = Storage().stat(str(path))
        assert seen is not None
        ranges.append(ObjectRange(str(path), seen.etag, 0, seen.size, seen.size))
    return Partition(0, "0" * 12, tuple(ranges))


def read(partition: Partition, **options: Any) -> list[Batch]:
    return list(read_batches(partition, Storage(), **options))


def write(folder: Path, body: bytes, name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_bytes(body)
    return path


def read_bytes(folder: Path, body: bytes, **options: Any) -> list[Batch]:
    return read(partition_of(write(folder, body)), **options)


def lines(batches: list[Batch]) -> list[Line]:
    return [line for batch in batches for line in batch.lines]


def rejects(batches: list[Batch]) -> list[Reject]:
    return [reject for batch in batches for reject in batch.rejects]


def raws(batches: list[Batch]) -> list[bytes]:
    return [line.raw for line in lines(batches)]


def counts(batches: list[Batch]) -> tuple[int, int, int]:
    """Lines of every kind, blank ones, rejects."""
    return sum(b.line_count for b in batches), sum(b.blank for b in batches), len(rejects(batches))


# ------------------------------------------------------------------------------------------------------ what a line is


@pytest.mark.parametrize(
    ("body", "expected", "total", "blank"),
    [
        (b"", [], 0, 0),
        (b"\n", [], 1, 1),
        (b"\n\n", [], 2, 2),
        (b"a\nb\n", [b"a", b"b"], 2, 0),
        (b"a\nb", [b"a", b"b"], 2, 0),
        (b"a\r\nb\r\n", [b"a\r", b"b\r"], 2, 0),
        (b"a\n \t\r\n\nb", [b"a", b"b"], 4, 2),
        (b"\xef\xbb\xbfa\nb\n", [b"a", b"b"], 2, 0),
        (b"\xef\xbb\xbf", [], 1, 1),
        (b"\xef\xbb\xbf \t\r\na\n", [b"a"], 2, 1),
        (b"a\x00b\n\x00\n", [b"a\x00b", b"\x00"], 2, 0),
        (b"a\xe2\x80\xa8b\x0bc\x85d\n", [b"a\xe2\x80\xa8b\x0bc\x85d"], 1, 0),
    ],
)
@pytest.mark.parametrize("pack", PACKERS)
def test_lines_end_at_the_line_feed_alone(
    pack: str, body: bytes, expected: list[bytes], total: int, blank: int, tmp_path: Path
) -> None:
    batches = read_bytes(tmp_path, PACKERS[pack](body))
    assert raws(batches) == expected
    assert counts(batches) == (total, blank, 0)


@pytest.mark.parametrize("pack", PACKERS)
def test_offset_and_number_count_in_the_decompressed_object(pack: str, tmp_path: Path) -> None:
    batches = read_bytes(tmp_path, PACKERS[pack](b"\xef\xbb\xbfone\n\ntwo\n"))
    assert [(line.offset, line.number, line.raw) for line in lines(batches)] == [(0, 1, b"one"), (8, 3, b"two")]


def test_every_object_of_a_partition_starts_anew(tmp_path: Path) -> None:
    paths = [write(tmp_path, body, f"{i}.jsonl") for i, body in enumerate([b"a\nb", b"", b"\xef\xbb\xbfc\n", b"\n"])]
    batches = read(partition_of(*paths))
    assert [(Path(x.source).name, x.offset, x.number, x.raw) for x in lines(batches)] == [
        ("0.jsonl", 0, 1, b"a"),
        ("0.jsonl", 2, 2, b"b"),
        ("2.jsonl", 0, 1, b"c"),
    ]
    assert counts(batches) == (4, 1, 0)


# ---------------------------------------------------------------------------------------------------------- batches


def test_a_batch_holds_no_more_than_its_bytes_unless_one_line_does(tmp_path: Path) -> None:
    body = b"\n".join([b"x" * 100] * 20 + [b"y" * 5000] + [b"z" * 100] * 20)
    batches = read_bytes(tmp_path, body, batch_bytes=1000)
    sizes = [sum(len(line.raw) for line in batch.lines) for batch in batches]
    assert b"\n".join(raws(batches)) == body
    assert max(size for size in sizes if size != 5000) <= 1000
    assert 5000 in sizes


def test_small_objects_share_a_batch(tmp_path: Path) -> None:
    batches = read(partition_of(*(write(tmp_path, b"x\n", f"{i}.jsonl") for i in range(50))))
    assert [len(batch.lines) for batch in batches] == [50]


class Recording(Storage):
    """The real storage, noting which ranges were asked for and how many at a time."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "asked", [])
        object.__setattr__(self, "started", threading.Event())
        object.__setattr__(self, "gate", None)

    asked: list[tuple[int, int]]
    started: threading.Event
    gate: threading.Barrier | None

    def read(self, url: str, start: int, end: int, etag: str) -> bytes:
        self.asked.append((start, end))
        self.started.set()
        if self.gate is not None:
            self.gate.wait(timeout=20)
        return super().read(url, start, end, etag)


def test_fetching_begins_with_the_call(tmp_path: Path) -> None:
    storage = Recording()
    read_batches(partition_of(write(tmp_path, b"x\n")), storage)
    assert storage.started.wait(timeout=20)


def test_objects_are_fetched_many_at_once_and_handed_out_in_order(tmp_path: Path) -> None:
    paths = [write(tmp_path, b"%d\n" % i, f"{i}.jsonl") for i in range(8)]
    storage = Recording()
    object.__setattr__(storage, "gate", threading.Barrier(8))  # passes only once eight reads are under way together
    batches = list(read_batches(partition_of(*paths), storage, concurrency=8))
    assert raws(batches) == [b"%d" % i for i in range(8)]


def test_no_more_is_fetched_ahead_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("wb") as file:
        file.truncate(200 * MIB)
    storage = Recording()
    batches = read_batches(partition_of(path), storage, concurrency=64)
    assert storage.started.wait(timeout=20)
    assert sum(end - start for start, end in storage.asked) <= 32 * MIB
    del batches


def test_an_object_that_changed_is_named_not_mixed(tmp_path: Path) -> None:
    path = write(tmp_path, b"old\n")
    partition = partition_of(path)
    path.write_bytes(b"new and longer\n")
    with pytest.raises(ObjectChanged, match=r"a\.jsonl changed"):
        read(partition)


# ------------------------------------------------------------------------------------------------------------ ranges


def cut(path: Path, edges: list[int]) -> list[Partition]:
    whole = partition_of(path).ranges[0]
    bounds = sorted({0, whole.size, *(e for e in edges if e < whole.size)})
    return [
        Partition(i, "0" * 12, (ObjectRange(whole.url, whole.etag, start, end, whole.size),))
        for i, (start, end) in enumerate(itertools.pairwise(bounds))
    ]


def keys(batches: list[Batch]) -> list[tuple[int, bytes]]:
    return [(x.offset, x.raw) for x in lines(batches)] + [(x.offset, x.raw) for x in rejects(batches)]


@given(
    body=st.lists(st.sampled_from([b"\n", b"\r", b" ", b"\xef\xbb\xbf", b"ab", b"{}", b"x" * 9]), max_size=40).map(
        b"".join
    ),
    edges=st.lists(st.integers(1, 120), max_size=8),
    line_bytes=st.sampled_from([5, 256]),
)
@settings(deadline=None, max_examples=150)
def test_every_cut_gives_the_same_lines(
    body: bytes, edges: list[int], line_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.getbasetemp(), body, "cut.jsonl")
    whole = read(partition_of(path), line_bytes=line_bytes)
    parts = [read(p, line_bytes=line_bytes) for p in cut(path, edges)]
    assert sorted(key for part in parts for key in keys(part)) == sorted(keys(whole))
    assert tuple(map(sum, zip(*map(counts, parts), strict=True))) == (counts(whole) if body else ())


def test_a_range_owns_the_lines_that_start_in_it(tmp_path: Path) -> None:
    path = write(tmp_path, b"aaaa\nbbbb\ncccc\n")
    first, second, third = (read(p) for p in cut(path, [5, 7]))
    assert raws(first) == [b"aaaa"]
    assert raws(second) == [b"bbbb"]
    assert raws(third) == [b"cccc"]


def test_a_line_far_longer_than_its_range_is_read_to_its_end_once(tmp_path: Path) -> None:
    long = bytes(random.Random(1).choices(b"abc", k=1_000_000))
    path = write(tmp_path, b"x\n" + long + b"\ny\n")
    parts = [read(p) for p in cut(path, list(range(1000, 1_000_004, 99_000)))]
    assert [raw for part in parts for raw in raws(part)] == [b"x", long, b"y"]
    assert [counts(part)[0] for part in parts] == [2, *[0] * (len(parts) - 2), 1]


def test_numbers_count_within_the_range(tmp_path: Path) -> None:
    path = write(tmp_path, b"a\n\nb\nc\n")
    first, second = (read(p) for p in cut(path, [3]))
    assert [x.number for x in lines(first)] == [1]
    assert counts(first)[0] == 2
    assert [x.number for x in lines(second)] == [1, 2]


# --------------------------------------------------------------------------------------------------------- compressed


def skippable(body: bytes = b"12345") -> bytes:
    return b"\x5a\x2a\x4d\x18" + len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize("kind", PACKED)
def test_all_members_frames_and_streams_are_read(kind: str, tmp_path: Path) -> None:
    pack = PACKED[kind]
    batches = read_bytes(tmp_path, pack(b"a\nb") + pack(b"") + pack(b"c\n") + pack(b"d"))
    assert raws(batches) == [b"a", b"bc", b"d"]


@pytest.mark.parametrize("kind", PACKED)
def test_members_on_the_edges_of_the_pieces_are_all_read(kind: str, tmp_path: Path) -> None:
    words = [random.Random(i).randbytes(40_000).hex().encode() for i in range(30)]
    batches = read_bytes(tmp_path, b"".join(PACKED[kind](word + b"\n") for word in words))
    assert raws(batches) == words


def test_skippable_zstd_frames_are_skipped_wherever_they_stand(tmp_path: Path) -> None:
    zst = PACKED["zst"]
    batches = read_bytes(tmp_path, skippable() + zst(b"a\n") + skippable(b"") + zst(b"b\n") + skippable())
    assert raws(batches) == [b"a", b"b"]


def test_zero_padding_after_a_gzip_member_is_no_damage(tmp_path: Path) -> None:
    batches = read_bytes(tmp_path, gzip.compress(b"a\n") + b"\0" * 512 + gzip.compress(b"b\n") + b"\0" * 3)
    assert raws(batches) == [b"a", b"b"]
    assert rejects(batches) == []


@pytest.mark.parametrize("kind", PACKED)
def test_a_torn_stream_gives_its_good_lines_and_one_reject_for_the_rest(kind: str, tmp_path: Path) -> None:
    words = [random.Random(i).randbytes(500).hex().encode() for i in range(2000)]
    packed = PACKED[kind](b"\n".join(words) + b"\n")
    batches = read_bytes(tmp_path, packed[: len(packed) * 3 // 4])
    found = raws(batches)
    assert found == words[: len(found)]
    assert 800 < len(found) < 1900
    [reject] = rejects(batches)
    assert (reject.reason, reject.offset, reject.number) == ("decompress", 1001 * len(found), len(found) + 1)
    assert words[len(found)].startswith(reject.raw)
    assert reject.size == len(reject.raw)
    assert counts(batches) == (len(found) + 1, 0, 1)


@pytest.mark.parametrize(("kind", "step"), [("gz", 3), ("bz2", 1), ("zst", 2)])
def test_wherever_a_stream_is_torn_all_that_came_in_before_comes_out(kind: str, step: int) -> None:
    packed = PACKED[kind](b'{"a":1}\n' * 150_000)
    for cut in range(12, len(packed), step):
        out = 0
        with contextlib.suppress(_DamagedError):
            for piece in _decode(iter([packed[:cut]]), _DECODERS[kind], kind):
                out += len(piece)
        assert out >= _ALL_OF[kind](packed[:cut]), cut


def _unpacked_bz2(packed: bytes) -> int:
    decompressor = bz2.BZ2Decompressor()
    size = len(decompressor.decompress(packed))
    while more := len(decompressor.decompress(b"")):  # it gives up its output in pieces
        size += more
    return size


_ALL_OF: dict[str, Callable[[bytes], int]] = {
    "gz": lambda packed: len(zlib.decompressobj(31).decompress(packed)),
    "bz2": _unpacked_bz2,
    "zst": lambda packed: len(zstandard.ZstdDecompressor().decompressobj().decompress(packed)),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_stream_torn_between_two_lines_still_has_one_reject(kind: str, tmp_path: Path) -> None:
    pack = PACKED[kind]
    batches = read_bytes(tmp_path, pack(b"a\nb\n") + pack(b"")[:5])
    assert raws(batches) == [b"a", b"b"]
    assert [(r.reason, r.offset, r.size, r.raw) for r in rejects(batches)] == [("decompress", 4, 0, b"")]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("garbage", [b"x", b"garbage, and more of it\n", b"\x1f", b"\x1f\x8bnot gzip"])
def test_garbage_after_the_end_is_a_reject(kind: str, garbage: bytes, tmp_path: Path) -> None:
    batches = read_bytes(tmp_path, PACKED[kind](b"a\nb\n") + garbage)
    assert raws(batches) == [b"a", b"b"]
    assert [r.reason for r in rejects(batches)] == ["decompress"]


def test_a_wrong_gzip_checksum_costs_no_line_that_came_before_it(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"a\nb\nc"))
    packed[-5] ^= 1
    batches = read_bytes(tmp_path, bytes(packed))
    assert raws(batches) == [b"a", b"b"]
    assert [(r.reason, r.offset, r.raw) for r in rejects(batches)] == [("decompress", 4, b"c")]


@pytest.mark.parametrize("kind", PACKED)
def test_damage_in_the_middle_leaves_the_objects_beside_it_alone(kind: str, tmp_path: Path) -> None:
    words = [random.Random(i).randbytes(500).hex().encode() for i in range(2000)]
    packed = bytearray(PACKED[kind](b"\n".join(words)))
    packed[len(packed) // 2 : len(packed) // 2 + 50] = bytes(50)
    paths = [write(tmp_path, b"before\n", "0"), write(tmp_path, bytes(packed), "1"), write(tmp_path, b"after\n", "2")]
    batches = read(partition_of(*paths))
    found = raws(batches)
    assert found[:801] == [b"before", *words[:800]]  # the first of bzip2's blocks ends there
    assert found[-1] == b"after"
    assert [Path(r.source).name for r in rejects(batches)] == ["1"]
    total, blank, _ = counts(batches)
    assert total == len(found) + blank + 1  # deflate may go on and spell nonsense, even blank lines, until the checksum


def test_xz_inside_a_plain_name_is_a_reject(tmp_path: Path) -> None:
    batches = read_bytes(tmp_path, b"\xfd7zXZ\x00rest")
    assert [(r.reason, r.detail.split()[0]) for r in rejects(batches)] == [("decompress", "xz")]


# --------------------------------------------------------------------------------------------------------- too large


@pytest.mark.parametrize("kind", PACKERS)
def test_a_line_above_the_limit_is_a_reject_and_its_neighbours_are_not(kind: str, tmp_path: Path) -> None:
    body = b"before\n" + b"x" * 101 + b"\n" + b"y" * 100 + b"\nafter\n"
    batches = read_bytes(tmp_path, PACKERS[kind](body), line_bytes=100)
    assert raws(batches) == [b"before", b"y" * 100, b"after"]
    [reject] = rejects(batches)
    assert (reject.reason, reject.offset, reject.size, reject.number) == ("too_large", 7, 101, 2)
    assert re.search("101 bytes", reject.detail)
    assert counts(batches) == (4, 0, 1)


def test_a_line_too_large_without_a_line_feed_at_its_end_counts_too(tmp_path: Path) -> None:
    batches = read_bytes(tmp_path, b"a\n" + b"x" * 500, line_bytes=100)
    assert [(r.reason, r.size) for r in rejects(batches)] == [("too_large", 500)]


@pytest.mark.parametrize("kind", PACKED)
def test_a_bomb_stays_within_bounds(kind: str, tmp_path: Path) -> None:
    bomb = b"before\n" + bytes(48 * MIB) + b"\nafter\n"
    path = write(tmp_path, PACKED[kind](bomb))
    del bomb
    partition = partition_of(path)
    tracemalloc.start()
    batches = read(partition, line_bytes=4 * MIB)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert raws(batches) == [b"before", b"after"]
    assert [(r.size, len(r.raw)) for r in rejects(batches)] == [(48 * MIB, RAW_BYTES)]
    assert peak < 24 * MIB


def test_a_raw_deflate_bomb_of_many_lines_comes_in_batches(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    packed = b"".join([packer.compress(b"line\n" * 300_000), packer.flush()])
    path = write(tmp_path, packed)
    tracemalloc.start()
    total = sum(batch.line_count for batch in read_batches(partition_of(path), Storage()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 300_000
    assert peak < 48 * MIB


@given(
    words=st.lists(st.binary(max_size=30), max_size=30),
    kind=st.sampled_from(list(PACKED)),
    cut_at=st.floats(0, 1),
    patch=st.binary(max_size=6),
    extra=st.sampled_from([b"", b"\0\0", b"\n", skippable(), gzip.compress(b"x\ny"), b"BZh9"]),
)
@settings(deadline=None, max_examples=150)
def test_whatever_happens_to_a_stream_every_line_is_a_line_a_blank_or_the_one_reject(
    words: list[bytes], kind: str, cut_at: float, patch: bytes, extra: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    packed = PACKED[kind](b"\n".join(words)) + extra
    at = int(cut_at * len(packed))
    path = write(tmp_path_factory.getbasetemp(), packed[:at] + patch + packed[at + len(patch) :], "hostile.jsonl")
    batches = read(partition_of(path), line_bytes=20)
    found = sorted([(x.number, x.offset) for x in lines(batches)] + [(x.number, x.offset) for x in rejects(batches)])
    total, blank, _ = counts(batches)
    assert len(found) == total - blank
    assert len({number for number, _ in found}) == len(found)
    assert found == sorted(found, key=lambda item: item[1])
    assert sum(reject.reason == "decompress" for reject in rejects(batches)) <= 1
