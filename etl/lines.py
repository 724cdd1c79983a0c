"""Partition -> batches of Lines: fetched many at once, decompressed as a stream, cut at line feeds.

    ranges ─fetch (ahead, in order)→ stored bytes ─inflate→ bytes ─split→ Line | Reject | blank ─group→ Batch …

Memory is bounded by the fetches ahead, one batch and one line, whatever the objects hold.
"""

from __future__ import annotations

import bz2
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import zstandard

from etl.partitions import compression
from etl.records import Line, ObjectRange, Partition, Reject
from etl.storage import Storage

BATCH_BYTES: Final = 4 * 2**20
LINE_BYTES: Final = 256 * 2**20
"""The longest line that is read; a longer one is a reject `too_large`."""

RAW_BYTES: Final = 2**20
"""How much of a line that cannot be read its reject keeps."""

_BLOCK_BYTES: Final = 4 * 2**20
_LOOKAHEAD_BYTES: Final = 32 * 2**20
_OVERHANG_BYTES: Final = 64 * 2**10
_PIECE_BYTES: Final = 256 * 2**10
_LINE_OVERHEAD: Final = 64
_BOM: Final = b"\xef\xbb\xbf"
_BLANKS: Final = b" \t\r"


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines that are worked on together: `batch_bytes` of them at most, or a single longer one.

    `lines` are those that hold something, in order; `blank` counts those that do not; `rejects` are those that could
    not be read.
    """

    lines: tuple[Line, ...]
    blank: int = 0
    rejects: tuple[Reject, ...] = ()

    @property
    def line_count(self) -> int:
        """Lines of every kind: what the receipt counts as `lines`."""
        return len(self.lines) + self.blank + len(self.rejects)


def read_batches(
    partition: Partition,
    storage: Storage,
    batch_bytes: int = BATCH_BYTES,
    concurrency: int = 8,
    line_bytes: int = LINE_BYTES,
) -> Iterator[Batch]:
    """The partition's lines in order. Fetching begins with the call, not with the first `next`.

    `concurrency` requests are under way at most. Raises ObjectChanged where an object is not the one that was planned,
    StorageError where it cannot be read; damaged content is a Reject.
    """
    fetcher = _Fetcher(partition, storage, concurrency)
    return _group(fetcher, partition, batch_bytes, line_bytes)


def _group(fetcher: _Fetcher, partition: Partition, batch_bytes: int, line_bytes: int) -> Iterator[Batch]:
    batch = _Collector()
    try:
        for index, r in enumerate(partition.ranges):
            for item in _read_range(fetcher, index, r, line_bytes):
                if not batch.fits(item, batch_bytes):
                    yield batch.take()
                batch.add(item)
        if not batch.empty:
            yield batch.take()
    finally:
        fetcher.close()


class _Collector:
    """The batch that is being filled."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._lines: list[Line] = []
        self._rejects: list[Reject] = []
        self._blank = 0
        self._size = 0

    @property
    def empty(self) -> bool:
        return not (self._lines or self._rejects or self._blank)

    def fits(self, item: Line | Reject | None, batch_bytes: int) -> bool:
        return item is None or not self._size or self._size + len(item.raw) <= batch_bytes

    def add(self, item: Line | Reject | None) -> None:
        if item is None:
            self._blank += 1
            return
        self._size += len(item.raw) + _LINE_OVERHEAD  # a million tiny lines are big objects
        if isinstance(item, Line):
            self._lines.append(item)
        else:
            self._rejects.append(item)

    def take(self) -> Batch:
        batch = Batch(tuple(self._lines), self._blank, tuple(self._rejects))
        self._clear()
        return batch


# --------------------------------------------------------------------------------------------------------- fetching


class _Fetcher:
    """The stored bytes of a partition's ranges, requested ahead and handed out in order."""

    def __init__(self, partition: Partition, storage: Storage, concurrency: int) -> None:
        self._storage = storage
        self._ranges = partition.ranges
        self._planned = deque(
            (index, start, end) for index, r in enumerate(partition.ranges) for start, end in _blocks(r)
        )
        self._concurrency = concurrency
        self._ahead: deque[tuple[int, int, Future[bytes]]] = deque()
        self._ahead_bytes = 0
        threads = max(1, min(concurrency, len(self._planned)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="etl-read")
        self._fill()

    def chunks(self, index: int) -> Iterator[bytes]:
        """The blocks of one range. Ranges must be asked for in order; blocks that nobody took are skipped."""
        self._skip(index)
        while self._ahead and self._ahead[0][0] == index:
            _, size, future = self._ahead.popleft()
            data = future.result()
            self._ahead_bytes -= size
            self._fill()
            yield data

    def read_on(self, index: int, start: int) -> Iterator[bytes]:
        """The object's bytes from `start` to its end, in growing steps: the rest of a line longer than foreseen."""
        r = self._ranges[index]
        step = _OVERHANG_BYTES
        while start < r.size:
            end = min(start + step, r.size)
            yield self._storage.read(r.url, start, end, r.etag)
            start, step = end, min(2 * step, _BLOCK_BYTES)

    def close(self) -> None:
        """Forget what was asked for and is not needed."""
        self._planned.clear()
        for _, _, future in self._ahead:
            future.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _skip(self, index: int) -> None:
        while self._ahead and self._ahead[0][0] < index:
            _, size, future = self._ahead.popleft()
            future.cancel()
            self._ahead_bytes -= size
        while self._planned and self._planned[0][0] < index:
            self._planned.popleft()
        self._fill()

    def _fill(self) -> None:
        while self._planned and len(self._ahead) < self._concurrency:
            index, start, end = self._planned[0]
            if self._ahead and self._ahead_bytes + end - start > _LOOKAHEAD_BYTES:
                return
            self._planned.popleft()
            r = self._ranges[index]
            future = self._pool.submit(self._storage.read, r.url, start, end, r.etag)
            self._ahead.append((index, end - start, future))
            self._ahead_bytes += end - start


def _blocks(r: ObjectRange) -> Iterator[tuple[int, int]]:
    """What to request of a range: the byte before it, which may end a line; it; and some of what follows it."""
    start, end = max(0, r.start - 1), min(r.size, r.end + (0 if r.whole else _OVERHANG_BYTES))
    count = max(1, round((end - start) / _BLOCK_BYTES))
    edges = [start + (end - start) * i // count for i in range(count + 1)]
    return itertools.pairwise(edges)


# -------------------------------------------------------------------------------------------------------- splitting


def _read_range(fetcher: _Fetcher, index: int, r: ObjectRange, line_bytes: int) -> Iterator[Line | Reject | None]:
    """The lines that start in the range; None for a blank one."""
    chunks = fetcher.chunks(index)
    chunks = _inflate(chunks) if r.whole else _chain_overhang(chunks, fetcher, index, r)
    # The offsets of a whole object count in what comes out of the decompressor, so they have no end known before.
    splitter = _Splitter(r.url, r.start, None if r.whole else r.end, line_bytes)
    if r.start > 0:
        chunks = splitter.skip_to_line(chunks)
    try:
        for chunk in chunks:
            yield from splitter.feed(chunk)
            if splitter.done:
                return
    except _DamagedError as damage:
        yield splitter.reject_rest(str(damage))
        return
    yield from splitter.finish()


def _chain_overhang(chunks: Iterator[bytes], fetcher: _Fetcher, index: int, r: ObjectRange) -> Iterator[bytes]:
    at = max(0, r.start - 1)
    for chunk in chunks:
        at += len(chunk)
        yield chunk
    yield from fetcher.read_on(index, at)


class _Splitter:
    """Bytes in, lines out; holds the line that has begun."""

    def __init__(self, url: str, offset: int, end: int | None, line_bytes: int) -> None:
        self._url = url
        self._offset = offset
        self._end = end
        self._line_bytes = line_bytes
        self._number = 0
        self._begun: list[bytes] = []
        self._begun_size = 0

    @property
    def done(self) -> bool:
        """Whether the line that begins now belongs to the next range."""
        return self._end is not None and self._offset >= self._end

    def skip_to_line(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Drop what a line of the range before still owns; `chunks` begin one byte before the range."""
        self._offset -= 1
        for chunk in chunks:
            found = chunk.find(b"\n")
            self._offset += len(chunk) if found < 0 else found + 1
            if self.done:
                return
            if found >= 0:
                yield chunk[found + 1 :]
                yield from chunks

    def feed(self, chunk: bytes) -> Iterator[Line | Reject | None]:
        """The lines that end in the chunk and start in the range."""
        if b"\n" not in chunk:
            self._hold(chunk)
            return
        head, *rest = chunk.split(b"\n")
        if self._begun_size:
            self._hold(head)
            yield self._take()
        else:
            rest.insert(0, head)
        tail = rest.pop()
        for raw in rest:
            if self.done:
                return
            yield self._line(raw, len(raw))
        self._hold(tail)

    def finish(self) -> Iterator[Line | Reject | None]:
        """The last line, where no line feed ends it."""
        if self._begun_size and not self.done:
            yield self._take()

    def reject_rest(self, detail: str) -> Reject:
        """Everything from the line that has begun on, as one line that cannot be read."""
        self._number += 1
        raw = b"".join(self._begun)[:RAW_BYTES]
        return self._reject("decompress", detail, raw, self._begun_size)

    def _hold(self, piece: bytes) -> None:
        self._begun_size += len(piece)
        if not piece:
            return
        if self._begun_size <= self._line_bytes:
            self._begun.append(piece)
        elif sum(map(len, self._begun)) < RAW_BYTES or len(self._begun) > 1:
            self._begun = [_join_first([*self._begun, piece], RAW_BYTES)]

    def _take(self) -> Line | Reject | None:
        raw, size = b"".join(self._begun), self._begun_size
        self._begun, self._begun_size = [], 0
        return self._line(raw, size)

    def _line(self, raw: bytes, size: int) -> Line | Reject | None:
        self._number += 1
        offset = self._offset
        if size > self._line_bytes:
            detail = f"the line is {size} bytes long, the most that is read is {self._line_bytes}"
            reject = self._reject("too_large", detail, raw[:RAW_BYTES], size)
            self._offset += size + 1
            return reject
        self._offset += size + 1
        if offset == 0 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
        if raw[:1] != b"{" and not raw.removeprefix(_BOM).strip(_BLANKS):
            return None
        return Line(self._url, offset, raw, self._number)

    def _reject(self, reason: str, detail: str, raw: bytes, size: int) -> Reject:
        return Reject(self._url, self._offset, size, 0, -1, reason, detail, raw, self._number)


def _join_first(pieces: Iterable[bytes], size: int) -> bytes:
    kept: list[bytes] = []
    for piece in pieces:
        kept.append(piece[:size])
        size -= len(kept[-1])
        if not size:
            break
    return b"".join(kept)


# ---------------------------------------------------------------------------------------------------- decompressing


class _DamagedError(Exception):
    """The rest of a compressed object cannot be read; the message says why."""


class _Decoder(Protocol):
    """One member, frame or stream."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def feed(self, data: bytes) -> Iterator[bytes]:
        """What comes out, in pieces of bounded size. Raises one of _DAMAGES."""


_DAMAGES: Final = (zlib.error, zstandard.ZstdError, OSError, ValueError, EOFError)


def _inflate(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress by the first bytes; plain text passes as it is. Raises _DamagedError where the stream breaks off."""
    first = next(chunks, b"")
    kind = compression(first[:16])
    if kind is None:
        yield first
        yield from chunks
    elif kind == "xz":
        raise _DamagedError("xz is not read; compress it with zstd or gzip instead")
    else:
        yield from _decode(_pieces(first, chunks), _DECODERS[kind], kind)


def _pieces(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in itertools.chain((first,), chunks):
        yield from (chunk[at : at + _PIECE_BYTES] for at in range(0, len(chunk), _PIECE_BYTES))


def _decode(pieces: Iterator[bytes], make: Callable[[], _Decoder], kind: str) -> Iterator[bytes]:
    decoder, begun = make(), False
    for piece in pieces:
        data = piece
        while data:
            if not begun and kind == "gz":
                data = data.lstrip(b"\0")  # padding of tapes and block devices, which gzip itself passes over
                if not data:
                    break
            begun = True
            try:
                yield from filter(None, decoder.feed(data))
            except _DAMAGES as error:
                raise _DamagedError(f"damaged {kind} data: {error}") from error
            data = b""
            if decoder.eof:
                data = decoder.unused_data
                decoder, begun = make(), False
    if begun:
        raise _DamagedError(f"the {kind} stream breaks off before its end")


class _Gzip:
    """A gzip member. On damage it still gives every byte before it: the step is done again byte by byte."""

    _STEP: Final = 2**20

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data

    def feed(self, data: bytes) -> Iterator[bytes]:
        out = b""
        while data or len(out) == self._STEP:  # a full step: there may be more of what came in already
            before = self._inflater.copy()
            try:
                out = self._inflater.decompress(data, self._STEP)
            except zlib.error:
                for at in range(len(data)):
                    yield before.decompress(data[at : at + 1])
                raise
            yield out
            data = self._inflater.unconsumed_tail


class _Zstd:
    """A zstd frame, fed so little at a time that what comes out stays small: a block of 4 bytes may hold 128 KiB."""

    _STEP: Final = 256

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor().decompressobj()
        self._rest = b""

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data + self._rest

    def feed(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), self._STEP):
            yield self._decompressor.decompress(data[at : at + self._STEP])
            if self.eof:
                self._rest = data[at + self._STEP :]
                return


class _Bzip2:
    """A bzip2 stream."""

    _STEP: Final = 2**16

    def __init__(self) -> None:
        self._decompressor = bz2.BZ2Decompressor()

    @property
    def eof(self) -> bool:
        return self._decompressor.eof

    @property
    def unused_data(self) -> bytes:
        return self._decompressor.unused_data

    def feed(self, data: bytes) -> Iterator[bytes]:
        out = self._decompressor.decompress(data, self._STEP)
        yield out
        # it asks for input while it still holds output
        while not self.eof and (out or not self._decompressor.needs_input):
            out = self._decompressor.decompress(b"", self._STEP)
            yield out


_DECODERS: Final[dict[str, Callable[[], _Decoder]]] = {"gz": _Gzip, "zst": _Zstd, "bz2": _Bzip2}
