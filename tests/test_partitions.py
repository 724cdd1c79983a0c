"""What is read and what is passed over, how it is cut, and that output stays apart from input."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import lzma
import os
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from etl.errors import UsageError
from etl.partitions import (
    Listing,
    check_apart,
    compression,
    cut_partitions,
    find_objects,
    partition_identity,
)
from etl.records import ObjectInfo, ObjectRange, Partition
from etl.storage import Storage
from tests.bench.planning import Simulated, plan

KIB = 1024
MIB = 1024 * KIB


def write(folder: Path, *names: str, body: bytes = b'{"text": "x"}\n') -> None:
    for name in names:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(body)


def find(*inputs: object, partition_bytes: int = 16 * MIB) -> Listing:
    return find_objects(Storage(), [str(i) for i in inputs], partition_bytes)


def names(folder: Path, listing: Listing) -> list[str]:
    return [info.url.removeprefix(f"{folder}/") for info in listing.objects]


def passed(folder: Path, listing: Listing) -> list[str]:
    return [url.removeprefix(f"{folder}/") for url in listing.passed_over]


def info(url: str, size: int) -> ObjectInfo:
    return ObjectInfo(url, size, f"etag-of-{url}")


def shape(partitions: tuple[Partition, ...]) -> list[list[tuple[str, int, int]]]:
    return [[(r.url, r.start, r.end) for r in p.ranges] for p in partitions]


# ------------------------------------------------------------------------------------------------------- what is read


def test_a_folder_gives_the_readable_names_in_any_case_and_lists_the_rest(tmp_path: Path) -> None:
    good = ["a.jsonl", "b.NDJSON", "c.json", "d.jsonl.GZ", "e.Json.zst", "f.ndjson.bz2", "sub/g.jsonl"]
    other = ["README.md", "h.jsonl.txt", "_tmp/i.jsonl", ".hidden.jsonl", "sub/_SUCCESS", "sub/.k/l.jsonl", "m.parquet"]
    write(tmp_path, *good, *other)
    listing = find(tmp_path)
    assert names(tmp_path, listing) == sorted(good)
    assert passed(tmp_path, listing) == sorted(other)


def test_a_hidden_segment_above_the_folder_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path / "_data" / ".v1", "a.jsonl")
    assert names(tmp_path / "_data" / ".v1", find(tmp_path / "_data" / ".v1")) == ["a.jsonl"]


def test_an_object_named_outright_is_read_whatever_its_name(tmp_path: Path) -> None:
    write(tmp_path, "_odd.txt")
    assert names(tmp_path, find(tmp_path / "_odd.txt")) == ["_odd.txt"]


def test_an_object_found_through_two_inputs_is_read_once_and_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.txt")
    listing = find(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.txt", f"{tmp_path}/../{tmp_path.name}/")
    assert names(tmp_path, listing) == ["a.jsonl", "b.txt"]
    assert listing.passed_over == ()


def test_an_exact_object_comes_before_a_pattern(tmp_path: Path) -> None:
    write(tmp_path, "st*ar.jsonl", "stxar.jsonl", "q[1].jsonl", "q1.jsonl", "w?.jsonl", "wx.jsonl")
    assert names(tmp_path, find(tmp_path / "st*ar.jsonl")) == ["st*ar.jsonl"]
    assert names(tmp_path, find(tmp_path / "q[1].jsonl")) == ["q[1].jsonl"]
    assert names(tmp_path, find(tmp_path / "w?.jsonl")) == ["w?.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("a*", ["a.jsonl"]),
        ("*/c.jsonl", ["c.jsonl.d/c.jsonl", "x/c.jsonl"]),
        ("**/c.jsonl", ["c.jsonl.d/c.jsonl", "x/c.jsonl", "x/y/c.jsonl"]),
        ("x/**", ["x/c.jsonl", "x/y/c.jsonl"]),
        ("x/*/", ["x/y/c.jsonl"]),
        ("x/*.txt", ["x/d.txt"]),
        ("x/_*/*.jsonl", ["x/_h/e.jsonl"]),
    ],
)
def test_a_star_stays_within_a_segment_and_two_stars_cross(pattern: str, expected: list[str], tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "b.jsonl", "x/c.jsonl", "x/y/c.jsonl", "x/d.txt", "x/_h/e.jsonl", "c.jsonl.d/c.jsonl")
    assert names(tmp_path, find(tmp_path / pattern if pattern[-1] != "/" else f"{tmp_path}/{pattern}")) == expected


def test_an_input_without_a_readable_object_is_named(tmp_path: Path) -> None:
    write(tmp_path, "good/a.jsonl", "other/b.txt")
    (tmp_path / "empty").mkdir()
    for name, seen in (("empty", "no object"), ("other", "1 objects but none"), ("missing", "no object")):
        with pytest.raises(UsageError, match=seen) as caught:
            find(tmp_path / "good", tmp_path / name)
        assert f"{tmp_path}/{name}" in str(caught.value)


def test_xz_is_refused_by_name_and_by_content(tmp_path: Path) -> None:
    write(tmp_path, "named/a.jsonl", "named/b.jsonl.xz", "outright.xz")
    write(tmp_path, "disguised/a.jsonl", body=lzma.compress(b"{}\n"))
    for place in ("named", "outright.xz", "disguised"):
        with pytest.raises(UsageError, match="xz"):
            find(tmp_path / place)


def test_a_name_that_is_not_utf8_is_refused_under_a_folder_and_outright(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"\xfe.jsonl")  # noqa: PTH118 - pathlib takes no bytes
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(b"{}")
    for url in (str(tmp_path), os.fsdecode(path)):
        with pytest.raises(UsageError, match="is not UTF-8; rename it"):
            find(url)


def test_a_broken_link_is_passed_over_and_a_link_to_its_own_folder_ends(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", "sub/b.jsonl")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    listing = find(tmp_path)
    assert names(tmp_path, listing) == ["a.jsonl", "sub/b.jsonl"]
    assert passed(tmp_path, listing) == ["broken.jsonl"]


# ---------------------------------------------------------------------------------------------------- first bytes


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, zstandard.compress])
def test_a_json_array_is_refused_by_its_first_bytes(pack: Any, tmp_path: Path) -> None:
    write(tmp_path, "a.json", body=pack(b'\xef\xbb\xbf \r\n[{"text": "x"}]'))
    with pytest.raises(UsageError, match="a JSON array, not JSON lines"):
        find(tmp_path)


def test_only_the_first_object_that_holds_something_and_the_large_ones_are_looked_at(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", body=b"")
    write(tmp_path, "b.jsonl")
    write(tmp_path, "c.jsonl", body=b"[1]\n")
    assert names(tmp_path, find(tmp_path)) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    with pytest.raises(UsageError, match=r"c\.jsonl is a JSON array"):
        find(tmp_path, partition_bytes=3)


def test_large_compressed_objects_are_known_by_their_content_not_their_name(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", body=gzip.compress(b"{}\n" * 100))
    write(tmp_path, "b.jsonl.gz", body=b"{}\n" * 100)
    assert find(tmp_path, partition_bytes=20).compressed == {f"{tmp_path}/a.jsonl"}


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (gzip.compress(b"x", mtime=0), "gz"),
        (zstandard.compress(b"x"), "zst"),
        (b"\x5f\x2a\x4d\x18\x00\x00\x00\x00", "zst"),
        (bz2.compress(b"x"), "bz2"),
        (bz2.compress(b""), "bz2"),
        (lzma.compress(b"x"), "xz"),
        (b'{"text": "x"}', None),
        (b"BZh9 is how this line begins", None),
        (b"", None),
    ],
)
def test_compression_goes_by_the_first_bytes(head: bytes, kind: str | None) -> None:
    assert compression(head) == kind


# ----------------------------------------------------------------------------------------------------------- cutting


def test_a_group_closes_before_the_object_that_would_take_it_over() -> None:
    objects = [info("a", 6), info("b", 4), info("c", 1), info("d", 9), info("e", 0)]
    assert shape(cut_partitions(objects, 10, "f")) == [
        [("a", 0, 6), ("b", 0, 4)],
        [("c", 0, 1), ("d", 0, 9), ("e", 0, 0)],
    ]


def test_a_plain_object_above_the_size_is_cut_and_each_range_is_alone() -> None:
    objects = [info("a", 1), info("b", 25), info("c", 1), info("d", 10), info("e", 0)]
    assert shape(cut_partitions(objects, 10, "f")) == [
        [("a", 0, 1)],
        [("b", 0, 10)],
        [("b", 10, 20)],
        [("b", 20, 25)],
        [("c", 0, 1)],
        [("d", 0, 10), ("e", 0, 0)],
    ]


def test_a_compressed_object_is_never_cut() -> None:
    objects = [info("a", 1), info("b", 25), info("c", 1)]
    assert shape(cut_partitions(objects, 10, "f", {"b"})) == [[("a", 0, 1)], [("b", 0, 25)], [("c", 0, 1)]]


def test_partitions_follow_the_byte_order_of_the_urls_over_all_inputs() -> None:
    objects = [info(url, 1) for url in ("s3://b/é", "s3://b/Z", "s3://b/a", "s3://b/\U0001f600", "s3://b/\uff5e", "/x")]
    [[*ranges]] = shape(cut_partitions(objects, 10, "f"))
    urls = [url for url, _, _ in ranges]
    assert urls == sorted(urls, key=str.encode)
    assert urls[:3] == ["/x", "s3://b/Z", "s3://b/a"]


def test_the_identity_is_a_hash_of_the_ranges_and_the_fingerprint() -> None:
    ranges = (ObjectRange("s3://b/é", "e1", 0, 5, 9), ObjectRange("s3://b/x", "e2", 0, 3, 3))
    spelled = '["s3://b/é","e1",0,5]\n["s3://b/x","e2",0,3]\nfingerprint'
    assert partition_identity(ranges, "fingerprint") == hashlib.sha256(spelled.encode()).hexdigest()[:12]
    other_etag = (ObjectRange("s3://b/é", "e9", 0, 5, 9), ranges[1])
    assert len({partition_identity(r, f) for r in (ranges, other_etag) for f in ("fingerprint", "another")}) == 4


def test_a_stem_holds_index_and_identity() -> None:
    [partition] = cut_partitions([info("a", 1)], 10, "f")
    assert partition.stem == f"part-0000000-{partition.identity}"


def test_new_objects_are_planned_alone_and_old_partitions_never_move() -> None:
    old = cut_partitions([info("b", 4), info("d", 25)], 10, "f")
    grown = cut_partitions([info("c", 4), info("a", 3)], 10, "f", old=old)
    assert grown[: len(old)] == old
    assert shape(grown[len(old) :]) == [[("a", 0, 3), ("c", 0, 4)]]
    assert [p.index for p in grown] == [0, 1, 2, 3, 4]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=12),
    partition_bytes=st.integers(1, 20),
    packed=st.sets(st.integers(0, 11)),
)
def test_every_byte_is_in_exactly_one_partition(sizes: list[int], partition_bytes: int, packed: set[int]) -> None:
    objects = [info(f"o{i:02d}", size) for i, size in enumerate(sizes)]
    partitions = cut_partitions(objects, partition_bytes, "f", {f"o{i:02d}" for i in packed})
    ranges = [r for p in partitions for r in p.ranges]
    for o in objects:
        own = [(r.start, r.end) for r in ranges if r.url == o.url]
        assert own[0][0] == 0
        assert own[-1][1] == o.size
        assert all(left[1] == right[0] for left, right in itertools.pairwise(own))
    assert all(p.bytes <= partition_bytes or len(p.ranges) == 1 for p in partitions)


def test_1805_objects_of_four_megabytes_are_452_partitions() -> None:
    objects = [info(f"s3://bucket/completions/{i:06d}.jsonl", 4_016_000) for i in range(1805)]
    assert len(cut_partitions(objects, 16 * MIB, "f")) == 452


def test_planning_takes_well_under_two_kilobytes_an_object() -> None:
    tracemalloc.start()
    assert len(plan(20_000)) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000 * 1500


@pytest.mark.long
def test_a_million_objects_are_half_a_million_partitions() -> None:
    assert len(plan(1_000_000)) == 500_000


def test_many_inputs_are_looked_for_at_once_and_their_bucket_is_checked_once() -> None:
    together = threading.Barrier(8)
    checked: list[str] = []

    class Store(Simulated):
        def check_bucket(self, url: str) -> None:
            checked.append(url)

        def stat(self, _url: str) -> ObjectInfo:
            together.wait(30)  # nobody is answered before all eight have asked
            return ObjectInfo(_url, 10, "e")

    store: Any = Store(0)
    urls = [f"s3://bucket/in/{i}.jsonl" for i in range(8)]
    assert [found.url for found in find_objects(store, urls, MIB).objects] == urls
    assert checked == ["s3://bucket/in/0.jsonl"]


# ------------------------------------------------------------------------------------------- output apart from input


@pytest.mark.parametrize(
    ("url", "output", "how"),
    [
        ("s3://b/in/", "s3://b/in", "onto"),
        ("s3://b/in", "S3A://b/in/", "onto"),
        ("s3://b/in/", "s3://b/in/tokens/", "inside"),
        ("s3://b/in/x/", "s3://b/in", "above"),
        ("s3://b/in/x.jsonl", "s3://b/in/", "above"),
        ("s3://b/in/", "s3://b", "above"),
        ("s3://b", "s3://b/out", "inside"),
        ("s3://b/in/*.jsonl", "s3://b/in", "above"),
        ("s3://b/in/**", "s3://b/in/out", "inside"),
        ("s3://b/in/**/*.jsonl", "s3://b/in/out", "inside"),
        ("s3://b/*/x.jsonl", "s3://b/out", "inside"),
        ("s3://b/run*/x/*.jsonl", "s3://b/run1/x/", "inside"),
        ("file:///data/in", "/data/in/out", "inside"),
        ("/data/./in//", "/data/out/../in", "onto"),
    ],
)
def test_output_inside_above_or_onto_the_input_is_refused(url: str, output: str, how: str) -> None:
    with pytest.raises(UsageError, match=how):
        check_apart([url], output)


@pytest.mark.parametrize(
    ("url", "output"),
    [
        ("s3://b/in/", "s3://b/in2/"),
        ("s3://b/in/", "s3://c/in/"),
        ("s3://b/in/x.jsonl", "s3://b/in/tokens/"),
        ("s3://b/in/*.jsonl", "s3://b/in/tokens/"),
        ("s3://b/run*/x.jsonl", "s3://b/out/"),
        ("s3://data/in/", "/data/in"),
    ],
)
def test_output_beside_the_input_is_fine(url: str, output: str) -> None:
    check_apart([url], output)


def test_a_link_to_the_input_is_the_input(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    with pytest.raises(UsageError, match="inside"):
        check_apart([f"{tmp_path}/in"], f"{tmp_path}/link/out")


def test_a_relative_path_is_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="onto"):
        check_apart(["in"], f"{tmp_path}/in/")
