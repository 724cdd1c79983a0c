"""INPUT URLs -> Listing -> Partitions: which objects are read, and which task reads which bytes of them.

    find_objects: INPUT … ─list→ Listing(objects, passed_over, compressed)
    cut_partitions: objects ─→ Partition …      small objects grouped, a large plain one cut into ranges

Names and bytes follow from the objects, the partition size and the fingerprint alone, never from the workers.
"""

from __future__ import annotations

import bz2
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

import orjson
import zstandard

from etl.errors import StorageError, UsageError
from etl.records import ObjectInfo, ObjectRange, Partition
from etl.storage import Storage, canonical_url

READABLE: Final = re.compile(r"\.(jsonl|ndjson|json)(\.(gz|zst|bz2))?\Z", re.IGNORECASE)
"""The endings of what is read under a folder."""

COMPRESSED_NAME: Final = re.compile(r"\.(gz|zst|bz2)\Z", re.IGNORECASE)
_XZ_NAME: Final = re.compile(r"\.xz\Z", re.IGNORECASE)
_HEAD_BYTES: Final = 4096
_LOOKS_AT_ONCE: Final = 32
_BLANKS: Final = b" \t\r\n"
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Listing:
    """What the INPUTs hold. `objects` in byte order of their URLs, each once.

    `passed_over`: URLs below the INPUTs that are not read. `compressed`: URLs of the objects above the partition size
    that are compressed, by their first bytes.
    """

    objects: tuple[ObjectInfo, ...]
    passed_over: tuple[str, ...] = ()
    compressed: frozenset[str] = frozenset()


def find_objects(storage: Storage, inputs: Iterable[str], partition_bytes: int) -> Listing:
    """List the INPUTs afresh. Raises UsageError for an INPUT that holds nothing readable, or cannot be listed or read.

    The first bytes are looked at of the first object of each INPUT and of the objects above `partition_bytes`.
    """
    found: dict[str, ObjectInfo] = {}
    passed: dict[str, None] = {}
    firsts: dict[str, ObjectInfo] = {}
    try:
        urls = list(dict.fromkeys(canonical_url(text) for text in inputs))
        for url in {"/".join(url.split("/")[:3]): url for url in reversed(urls)}.values():  # the first of each bucket
            storage.check_bucket(url)
        with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
            inside = list(pool.map(partial(_find_input, storage), urls))
        for chosen, rest in inside:
            found |= {info.url: info for info in chosen}
            passed |= dict.fromkeys(rest)
            first = min((info for info in chosen if info.size), key=lambda info: info.url, default=None)
            if first is not None:
                firsts[first.url] = first
        objects = tuple(found[url] for url in sorted(found))
        looked_at = firsts | {info.url: info for info in objects if info.size > partition_bytes}
        compressed = _look_at(storage, list(looked_at.values()))
    except StorageError as error:
        raise UsageError(str(error)) from error
    return Listing(objects, tuple(sorted(url for url in passed if url not in found)), compressed)


def cut_partitions(
    objects: Iterable[ObjectInfo],
    partition_bytes: int,
    fingerprint: str,
    compressed: Collection[str] = (),
    old: Sequence[Partition] = (),
) -> tuple[Partition, ...]:
    """The `old` partitions, unmoved, and after them those of `objects`, planned alone.

    Each holds at most `partition_bytes`, in byte order of the URLs. A group closes before the object that would take it
    over; a plain object above the size is cut into ranges, each a partition alone; an object of `compressed` is never
    cut, so it may be larger.
    """
    groups = _group(sorted(objects, key=lambda info: info.url), partition_bytes, compressed)
    new = (
        Partition(index, partition_identity(ranges, fingerprint), ranges)
        for index, ranges in enumerate(groups, start=old[-1].index + 1 if old else 0)
    )
    return (*old, *new)


def partition_identity(ranges: Iterable[ObjectRange], fingerprint: str) -> str:
    """First 12 hex of SHA-256 over a line of JSON a range, then the fingerprint, all in UTF-8.

    The line is `["url","etag",start,end]` without blanks, ended by a line feed.
    """
    digest = hashlib.sha256()
    for r in ranges:
        digest.update(orjson.dumps([r.url, r.etag, r.start, r.end]) + b"\n")
    digest.update(fingerprint.encode())
    return digest.hexdigest()[:12]


def check_apart(inputs: Iterable[str], output: str) -> None:
    """Raise UsageError where OUTPUT lies inside, above or onto an INPUT, however the two are spelled."""
    place = canonical_url(output)
    for text in inputs:
        url = canonical_url(text)
        for one, other in {(url, place), (_resolve(url), _resolve(place))}:
            how = _overlap(one, other)
            if how:
                raise UsageError(f"OUTPUT {output} lies {how} INPUT {text}; choose a place apart from it")


def compression(head: bytes) -> str | None:
    """`gz`, `zst`, `bz2` or `xz` by an object's first bytes (10 are enough), None for plain text."""
    return next((name for name, magic in _MAGIC if magic.match(head)), None)


_MAGIC: Final = (
    ("gz", re.compile(rb"\x1f\x8b")),
    ("zst", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)),
    ("bz2", re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)", re.DOTALL)),
    ("xz", re.compile(rb"\xfd7zXZ\x00")),
)


# -------------------------------------------------------------------------------------------------- finding objects


def _find_input(storage: Storage, url: str) -> tuple[list[ObjectInfo], list[str]]:
    """The objects of one INPUT and the URLs passed over: an exact object, else a folder, else a pattern."""
    if not url.endswith("/"):
        exact = storage.stat(url)
        if exact is not None:
            _refuse_xz([exact.url])
            _refuse_unprintable([exact.url])
            return [ObjectInfo(exact.url, exact.size, exact.etag)], []
    folder = url if url.endswith("/") else url + "/"
    seen = list(storage.find(folder))
    wanted = _folder_filter(folder)
    if not seen and "*" in url:
        pattern = url + "**" if url.endswith("/") else url
        matches = _compile_pattern(pattern)
        seen = [info for info in storage.find(pattern[: pattern.index("*")]) if matches.fullmatch(info.url)]
        wanted = _pattern_filter(pattern)
    chosen = [info for info in seen if info.etag and wanted(info.url)]
    taken = {info.url for info in chosen}
    rest = [info.url for info in seen if info.url not in taken]
    _refuse_xz([*taken, *(name for name in rest if wanted(_XZ_NAME.sub("", name)))])
    if not chosen:
        raise UsageError(_nothing_found(url, len(seen)))
    _refuse_unprintable(taken)
    return chosen, rest


def _folder_filter(folder: str) -> Callable[[str], bool]:
    def wanted(url: str) -> bool:
        below = url[len(folder) :]
        return not _hidden(below.split("/")) and READABLE.search(below) is not None

    return wanted


def _pattern_filter(pattern: str) -> Callable[[str], bool]:
    """A pattern that spells its ending (`*.txt`) means it; so does one that spells a hidden name (`_new/*`)."""
    literal = pattern[: pattern.index("*")].rfind("/") + 1
    spelled = [_compile_pattern(s) for s in pattern[literal:].split("/") if s.startswith(("_", "."))]
    any_ending = not pattern.endswith("*")

    def wanted(url: str) -> bool:
        segments = [s for s in url[literal:].split("/") if not any(p.fullmatch(s) for p in spelled)]
        return not url.endswith("/") and not _hidden(segments) and (any_ending or READABLE.search(url) is not None)

    return wanted


def _hidden(segments: Iterable[str]) -> bool:
    return any(segment.startswith(("_", ".")) for segment in segments)


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """`*` within a segment, `**` across (`a/**/b` matches `a/b` too); every other character is itself."""
    parts = re.split(r"((?<=/)\*\*/|\*\*|\*)", pattern)
    spelled = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    return re.compile("".join(spelled.get(part) or re.escape(part) for part in parts), re.DOTALL)


def _nothing_found(url: str, seen: int) -> str:
    if not seen:
        hint = "`*` stays within a segment, `**` crosses them" if "*" in url else "check the spelling"
        return f"INPUT {url} holds no object; {hint}"
    return (
        f"INPUT {url} holds {seen} objects but none that is read: names must end in .jsonl, .ndjson or .json, also "
        "with .gz, .zst or .bz2; name one outright to read it anyway"
    )


def _refuse_xz(urls: Iterable[str]) -> None:
    for url in urls:
        if _XZ_NAME.search(url):
            raise UsageError(f"{url} is xz, which is not read; compress it with zstd or gzip instead")


def _refuse_unprintable(urls: Iterable[str]) -> None:
    for url in urls:
        if not url.isascii():
            try:
                url.encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"the name {url!r} is not UTF-8; rename it") from error


# ---------------------------------------------------------------------------------------------- looking at contents


def _look_at(storage: Storage, objects: Sequence[ObjectInfo]) -> frozenset[str]:
    """The URLs of those that are compressed. Raises UsageError for xz and for a JSON array."""

    def look(info: ObjectInfo) -> str | None:
        head = storage.read(info.url, 0, min(info.size, _HEAD_BYTES), info.etag)
        kind = compression(head)
        if kind == "xz":
            raise UsageError(f"{info.url} is xz, which is not read; compress it with zstd or gzip instead")
        if _first_text(head, kind).lstrip(_BLANKS).startswith(b"["):
            raise UsageError(
                f"{info.url} is a JSON array, not JSON lines; write one object a line, e.g. jq -c '.[]' in.json"
            )
        return kind

    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        kinds = pool.map(look, objects)
        return frozenset(info.url for info, kind in zip(objects, kinds, strict=True) if kind is not None)


def _first_text(head: bytes, kind: str | None) -> bytes:
    """The first bytes of the text in a (compressed) head; nothing where it cannot be told."""
    try:
        match kind:
            case "gz":
                head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_BYTES)
            case "bz2":
                head = bz2.BZ2Decompressor().decompress(head, _HEAD_BYTES)
            case "zst":
                head = zstandard.ZstdDecompressor().stream_reader(head).read(_HEAD_BYTES)
            case _:
                pass
    except (zlib.error, zstandard.ZstdError, OSError):
        return b""  # damaged: the reader rejects it with the place
    return head.removeprefix(_BOM)


# ---------------------------------------------------------------------------------------------------------- cutting


def _group(
    objects: Iterable[ObjectInfo], partition_bytes: int, compressed: Collection[str]
) -> Iterator[tuple[ObjectRange, ...]]:
    group: list[ObjectRange] = []
    size = 0
    for info in objects:
        cut = info.size > partition_bytes and info.url not in compressed
        if group and (cut or size + info.size > partition_bytes):
            yield tuple(group)
            group, size = [], 0
        if cut:
            for start in range(0, info.size, partition_bytes):
                end = min(start + partition_bytes, info.size)
                yield (ObjectRange(info.url, info.etag, start, end, info.size),)
        else:
            group.append(ObjectRange(info.url, info.etag, 0, info.size, info.size))
            size += info.size
    if group:
        yield tuple(group)


# ------------------------------------------------------------------------------------------- output apart from input


def _resolve(url: str) -> str:
    """A local path without its links, so that two spellings of one folder are one."""
    if not url.startswith("/"):
        return url
    resolved = os.path.realpath(url)
    return resolved + "/" if url.endswith("/") and resolved != "/" else resolved


def _overlap(url: str, output: str) -> str | None:
    place = output.rstrip("/") + "/"
    folder = url.rstrip("/") + "/"
    if folder == place:
        return "onto"
    if place.startswith(folder):
        return "inside"
    if folder.startswith(place):
        return "above"
    if "*" in url and _reaches(url, place):
        return "inside"
    return "above" if "*" in url and url[: url.index("*")].startswith(place) else None


def _reaches(pattern: str, place: str) -> bool:
    """Whether the pattern can match anything below the folder `place`."""
    segments = place.rstrip("/").split("/")
    for at, segment in enumerate(pattern.rstrip("/").split("/")):
        if "**" in segment:
            return _compile_pattern(segment.partition("**")[0] + "*").fullmatch(segments[at]) is not None
        if not _compile_pattern(segment).fullmatch(segments[at]):
            return False
        if at + 1 == len(segments):
            return at + 1 < len(pattern.rstrip("/").split("/")) or pattern.endswith("/")
    return False
