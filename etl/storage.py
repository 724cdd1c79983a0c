"""URLs <-> bytes: the one file that knows S3, local folders and fsspec; everything else holds URLs and a `Storage`.

    find (a literal prefix) ─→ ObjectInfo …      read (one version of an object, by ETag) ─→ bytes
    put (one request, optionally conditional)    get, stat, delete

A URL is taken as it is: `[ ] ? * + % #`, blanks and double slashes are ordinary characters of a key. A local file's
URL is its absolute path.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import fcntl
import functools
import hashlib
import json
import os
import random
import re
import stat as stat_module
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import aiobotocore.session
import aiohttp
import botocore.loaders
import fsspec
import fsspec.asyn
import s3fs
from botocore import exceptions as boto
from botocore.config import Config

from etl.config import RunConfig
from etl.errors import ObjectChanged, StorageError, UsageError, WriteConflict, scrub
from etl.records import ObjectInfo

T = TypeVar("T")

ATTEMPTS: Final = 8
_FIRST_WAIT: Final = 0.25
_LONGEST_WAIT: Final = 20.0
_QUICK_ATTEMPTS: Final = 2
_QUICK_SECONDS: Final = 6.0
_DELETES_AT_ONCE: Final = 32
_TEMPORARY: Final = ".etl-"
_PAGE_KEYS: Final = 1000  # the most that S3 gives


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """One object as it is now. `modified` and `now` are seconds since 1970 by the store's own clock."""

    url: str
    size: int
    etag: str
    modified: float
    now: float


class _Backend(Protocol):
    def find(self, prefix: str) -> Iterator[ObjectInfo]: ...
    def stat(self, url: str) -> ObjectStat | None: ...
    def read(self, url: str, start: int, end: int, etag: str) -> bytes: ...
    def get(self, url: str) -> tuple[bytes, ObjectStat] | None: ...
    def put(self, url: str, data: bytes, if_match: str | None, if_none_match: bool) -> str: ...
    def delete(self, urls: list[str]) -> None: ...
    def check(self, url: str) -> None: ...


@dataclass(slots=True)
class _Retries:
    """Requests that had to be sent again; bumped from the I/O thread."""

    count: int = 0


@dataclass(frozen=True)
class Storage:
    """Access to every URL, by options that hold no credential: it can be pickled into a task.

    Connections are made where and when they are first used, one for each process and set of options, and are safe in
    threads. Nothing is connected before that, so a process that has only built a `Storage` may still fork.
    """

    endpoint_url: str | None = None
    profile: str | None = None
    anon: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    _retries: _Retries = field(default_factory=_Retries, init=False, repr=False, compare=False)

    @classmethod
    def from_config(cls, config: RunConfig) -> Storage:
        """The storage that a run's options describe.

        Raises UsageError on an option that nothing takes, and an endpoint that is none or carries a credential.
        """
        if config.endpoint_url is not None:
            _check_endpoint(config.endpoint_url)
        storage = cls(config.endpoint_url, config.profile, config.anon, dict(config.storage_option))
        _s3_arguments(storage)
        return storage

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the options travel: no connection, no credential, no count."""
        return Storage, (self.endpoint_url, self.profile, self.anon, dict(self.options))

    @property
    def retries(self) -> int:
        """How many requests this instance has had to send again."""
        return self._retries.count

    def find(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose URL begins with `prefix`, freshly listed. Nothing there: nothing is yielded.

        A local entry that no one can read as a file (a broken link, a pipe) has an empty ETag.
        """
        return self._backend(prefix).find(prefix)

    def list(self, folder: str) -> tuple[ObjectInfo, ...]:
        """Every object below a folder, in byte order of the URLs."""
        prefix = folder if folder.endswith("/") else folder + "/"
        return tuple(sorted(self.find(prefix), key=lambda info: info.url))

    def stat(self, url: str) -> ObjectStat | None:
        """The object at exactly this URL, or None."""
        return self._backend(url).stat(url)

    def read(self, url: str, start: int, end: int, etag: str) -> bytes:
        """The bytes [start, end) of that version of the object. Raises ObjectChanged where it is another one."""
        if start >= end:
            return b""
        data = self._backend(url).read(url, start, end, etag)
        if len(data) != end - start:
            raise StorageError(f"{url}: asked for bytes {start} to {end}, got {len(data)} bytes; the store cut them")
        return data

    def get(self, url: str) -> bytes | None:
        """The whole of a small object, or None where there is none."""
        found = self.get_with_stat(url)
        return None if found is None else found[0]

    def get_with_stat(self, url: str) -> tuple[bytes, ObjectStat] | None:
        """The whole of a small object and its ETag and times, of one and the same version."""
        return self._backend(url).get(url)

    def put(self, url: str, data: bytes, *, if_match: str | None = None, if_none_match: bool = False) -> str:
        """Write the object in one request and return its ETag: it is there as a whole or not at all.

        `if_match`: only over the version with that ETag. `if_none_match`: only where there is none. Raises
        WriteConflict where the condition does not hold; two writers under a condition must not write the same bytes,
        for those that are there already count as written.
        """
        return self._backend(url).put(url, data, if_match, if_none_match)

    def delete(self, urls: Iterable[str]) -> None:
        """Delete exactly these objects; one that is gone already is no error."""
        groups: dict[str, list[str]] = {}
        for url in urls:
            groups.setdefault(_scheme(url), []).append(url)
        for group in groups.values():
            self._backend(group[0]).delete(group)

    def check_bucket(self, url: str) -> None:
        """Raise UsageError, within about 12 seconds, where the URL's bucket cannot be reached or does not exist."""
        try:
            self._backend(url).check(url)
        except UsageError:
            raise
        except StorageError as error:
            raise UsageError(str(error)) from error

    def check_writable(self, url: str) -> None:
        """Raise UsageError where nothing can be written below the URL, as far as that shows without writing."""
        self.check_bucket(url)
        if _scheme(url) == "":
            try:
                _check_local_folder(Path(url))
            except StorageError as error:
                raise UsageError(str(error)) from error

    def supports_conditions(self, folder: str) -> bool:
        """Whether the store honours conditional writes, tried out on one object of its own below the folder."""
        url = f"{folder.rstrip('/')}/probe-{uuid.uuid4().hex}"
        try:
            etag = self.put(url, b"1", if_none_match=True)
            return self._refuses(url, if_none_match=True) and self._refuses(url, if_match=f"{etag[:-1]}_")
        except StorageError as error:
            if "NotImplemented" in str(error):
                return False
            raise
        finally:
            self.delete([url])

    def _refuses(self, url: str, *, if_match: str | None = None, if_none_match: bool = False) -> bool:
        try:
            self.put(url, b"2", if_match=if_match, if_none_match=if_none_match)
        except WriteConflict:
            return True
        return False

    def _backend(self, url: str) -> _Backend:
        match _scheme(url):
            case "":
                return _LOCAL
            case "s3":
                return _S3(_connection(self), self._retries)
            case _:
                return _Other(dict(self.options))


def canonical_url(text: str) -> str:
    """One spelling for one place: s3a is s3, a scheme is lower case, a local path absolute; a final `/` stays.

    Raises UsageError on a URL that carries a credential or names no bucket.
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.:-]*)://", text)
    if match is None or match[1].lower() in {"file", "local"}:
        path = os.path.expanduser(text[match.end() :] if match else text)  # noqa: PTH111 - Path would drop a final slash
        if "\0" in path:
            raise UsageError(f"{text!r} is not a path: it holds a NUL")
        absolute = os.path.abspath(path)  # noqa: PTH100 - links stay as they were named
        return absolute if absolute == "/" or not path.endswith("/") else absolute + "/"
    scheme, rest = match[1].lower(), text[match.end() :]
    if _carries_credential(scheme, rest):
        raise UsageError(
            f"a {scheme}:// URL carries a credential and is refused; give credentials the way AWS tools find them"
        )
    if scheme in {"s3", "s3a", "s3n"}:
        scheme = "s3"
        if not rest.partition("/")[0]:
            raise UsageError(f"{text!r} names no bucket; write s3://bucket/folder/")
    return f"{scheme}://{rest}"


def _carries_credential(scheme: str, rest: str) -> bool:
    """Whether what follows the scheme has `user:secret@` before a host, slashes in it or not, or is a signed link."""
    host = rest.partition("/")[0]
    if "@" in host or ("@" in rest and ":" in host and scheme in {"s3", "s3a", "s3n"} and not host.startswith("arn:")):
        return True
    return scheme in {"http", "https"} and _SECRET_PARAMETER.search(rest) is not None


_SECRET_PARAMETER: Final = re.compile(r"(?i)[?&](?:[^=&]*[-_.])?(?:sig|signature|token|secret|password|key)=")


def _scheme(url: str) -> str:
    return "" if url.startswith("/") else url.partition("://")[0]


# ---------------------------------------------------------------------------------------------------- local folders


class _Local:
    """Files below absolute paths. An ETag is `size-mtime_ns`."""

    def find(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rindex("/") + 1]
        with _local_errors(prefix, "list"):
            yield from (info for info in _walk(folder, frozenset()) if info.url.startswith(prefix))

    def stat(self, url: str) -> ObjectStat | None:
        with _local_errors(url, "read"):
            try:
                seen = Path(url).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return _local_stat(url, seen) if stat_module.S_ISREG(seen.st_mode) else None

    def read(self, url: str, start: int, end: int, etag: str) -> bytes:
        with _local_errors(url, "read"):
            try:
                with Path(url).open("rb") as file:
                    file.seek(start)
                    data = file.read(end - start)
                    now = _local_etag(os.fstat(file.fileno()))
            except FileNotFoundError as error:
                raise _gone(url, etag) from error
            if now != etag:
                raise _changed(url, etag, now)
            return data

    def get(self, url: str) -> tuple[bytes, ObjectStat] | None:
        with _local_errors(url, "read"):
            try:
                with Path(url).open("rb") as file:
                    return file.read(), _local_stat(url, os.fstat(file.fileno()))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def put(self, url: str, data: bytes, if_match: str | None, if_none_match: bool) -> str:
        target = Path(url)
        with _local_errors(url, "write"):
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, suffix=".tmp", dir=target.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()  # size and time as they stay, before they become the ETag
                    os.fchmod(file.fileno(), 0o666 & ~_umask())
                    etag = _local_etag(os.fstat(file.fileno()))
                _replace(temporary, target, if_match, if_none_match)
            finally:
                Path(temporary).unlink(missing_ok=True)
        return etag

    def delete(self, urls: list[str]) -> None:
        for url in urls:
            with _local_errors(url, "delete"):
                Path(url).unlink(missing_ok=True)

    def check(self, url: str) -> None:
        """A folder needs no bucket."""


_LOCAL: Final = _Local()


def _walk(folder: str, above: frozenset[str]) -> Iterator[ObjectInfo]:
    real = os.path.realpath(folder)
    if real in above or not Path(folder).is_dir():
        return  # a link to a folder that holds it, or no folder
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(f"{entry.path}/", above | {real})
            elif entry.name.startswith(_TEMPORARY) and entry.name.endswith(".tmp"):
                continue  # what a killed process left of a write
            elif entry.is_file():
                seen = entry.stat()
                yield ObjectInfo(entry.path, seen.st_size, _local_etag(seen))
            else:
                yield ObjectInfo(entry.path, 0, "")


def _replace(temporary: str, target: Path, if_match: str | None, if_none_match: bool) -> None:
    if if_match is None and not if_none_match:
        Path(temporary).replace(target)
        return
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # between the look and the replacement nobody else may look
        now = _local_etag(target.stat()) if target.exists() else None
        if (if_none_match and now is not None) or (if_match is not None and now != if_match):
            raise _conflict(str(target), if_match, now)
        Path(temporary).replace(target)
    finally:
        os.close(folder)


def _umask() -> int:
    with _UMASK_LOCK:
        mask = os.umask(0o077)
        os.umask(mask)
    return mask


_UMASK_LOCK: Final = threading.Lock()


def _local_etag(seen: os.stat_result) -> str:
    return f"{seen.st_size}-{seen.st_mtime_ns}"


def _local_stat(url: str, seen: os.stat_result) -> ObjectStat:
    return ObjectStat(url, seen.st_size, _local_etag(seen), seen.st_mtime, time.time())


def _check_local_folder(folder: Path) -> None:
    with _local_errors(str(folder), "write"):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{folder}: {existing} is a file, not a folder; choose another place")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: {existing} may not be written by this user; choose another place")


@contextlib.contextmanager
def _local_errors(url: str, action: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot {action} {url}: {error.strerror or error}") from error


# ------------------------------------------------------------------------------------- any other fsspec file system


class _Other:
    """Any fsspec URL, without conditions of the store's own: versions are compared before and after."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def find(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = prefix[: prefix.rindex("/") + 1]
        with _other_errors(prefix, "list"):
            fs, path = self._open(folder)
            fs.invalidate_cache()
            found = fs.find(path, detail=True)
            for name, info in found.items():
                url = folder + name[len(path.rstrip("/")) :].lstrip("/")  # as the user spells it; fsspec may not
                if url.startswith(prefix):
                    seen = info if info.get("size") is not None else fs.info(name)  # a web server's list tells none
                    yield ObjectInfo(url, _other_size(url, seen), _other_etag(seen))

    def stat(self, url: str) -> ObjectStat | None:
        with _other_errors(url, "read"):
            fs, path = self._open(url)
            fs.invalidate_cache()
            try:
                info = fs.info(path)
            except FileNotFoundError as error:
                if _is_out_of_reach(error.__cause__):
                    raise OSError(str(error.__cause__)) from error
                return None
            if info.get("type") == "directory":
                return None
            return ObjectStat(url, _other_size(url, info), _other_etag(info), _other_time(info), time.time())

    def read(self, url: str, start: int, end: int, etag: str) -> bytes:
        self._check_version(url, etag)
        with _other_errors(url, "read"):
            fs, path = self._open(url)
            data: bytes = fs.cat_file(path, start=start, end=end)
        self._check_version(url, etag)
        return data

    def get(self, url: str) -> tuple[bytes, ObjectStat] | None:
        seen = self.stat(url)
        if seen is None:
            return None
        return self.read(url, 0, seen.size, seen.etag), seen

    def put(self, url: str, data: bytes, if_match: str | None, if_none_match: bool) -> str:
        if if_match is not None or if_none_match:
            seen = self.stat(url)
            now = seen.etag if seen else None
            if (if_none_match and now is not None) or (if_match is not None and now != if_match):
                raise _conflict(url, if_match, now)
        with _other_errors(url, "write"):
            fs, path = self._open(url)
            fs.makedirs(fs._parent(path), exist_ok=True)  # noqa: SLF001 - fsspec has no other name for it
            fs.pipe_file(path, data)
        written = self.stat(url)
        return written.etag if written else ""

    def delete(self, urls: list[str]) -> None:
        for url in urls:
            with _other_errors(url, "delete"), contextlib.suppress(FileNotFoundError):
                fs, path = self._open(url)
                fs.rm_file(path)

    def check(self, url: str) -> None:
        """Raise UsageError where fsspec does not know the scheme or lacks what it takes."""
        try:
            self._open(url)
        except (ValueError, ImportError, TypeError) as error:
            raise UsageError(f"{url}: {error}") from error

    def _check_version(self, url: str, etag: str) -> None:
        seen = self.stat(url)
        if seen is None:
            raise _gone(url, etag)
        if seen.etag != etag:
            raise _changed(url, etag, seen.etag)

    def _open(self, url: str) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(url, **self._options)
        return fs, path


def _is_out_of_reach(cause: BaseException | None) -> bool:
    """Whether what fsspec calls a missing file (over HTTP, whatever goes wrong) is a server that cannot be asked."""
    status = getattr(cause, "status", None)
    return (isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)) or status not in {None, 404, 410}


def _other_size(url: str, info: Mapping[str, Any]) -> int:
    size = info.get("size")
    if size is None:
        raise StorageError(f"cannot read {url}: its server does not tell how large it is; download it first")
    return int(size)


def _other_etag(info: Mapping[str, Any]) -> str:
    named = info.get("ETag") or info.get("etag")
    return str(named).strip('"') if named else f"{info.get('size')}-{_other_time(info)}"


def _other_time(info: Mapping[str, Any]) -> float:
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
    return 0.0


@contextlib.contextmanager
def _other_errors(url: str, action: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, zipfile.BadZipFile) as error:
        raise StorageError(f"cannot {action} {url}: {scrub(str(error)) or type(error).__name__}") from error


# --------------------------------------------------------------------------------------------------------------- S3


class _S3:
    """Objects of S3 and its look-alikes, through s3fs: one request each, ours to repeat.

    botocore's own standard retries share a budget of 500 points in a client: a store that slows many keys down at
    once uses it up, and every later refusal is final. So each call is sent once, and repeated here with full jitter.
    """

    def __init__(self, connection: _Connection, retries: _Retries) -> None:
        self._connection = connection
        self._retries = retries

    def find(self, prefix: str) -> Iterator[ObjectInfo]:
        bucket, key = _split(prefix)
        page: dict[str, Any] = {"IsTruncated": True}
        token: dict[str, Any] = {}
        while page.get("IsTruncated"):
            page = self._call("list", prefix, "list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=_PAGE_KEYS, **token)
            for entry in page.get("Contents", ()):
                yield ObjectInfo(f"s3://{bucket}/{entry['Key']}", entry["Size"], _bare(entry["ETag"]))
            token = {"ContinuationToken": page.get("NextContinuationToken", "")}

    def stat(self, url: str) -> ObjectStat | None:
        bucket, key = _split(url)
        if not key:
            return None
        try:
            try:
                reply = self._call("read", url, "head_object", Bucket=bucket, Key=key)
            except _Missing:
                raise
            except StorageError:
                # A reply to HEAD has no body, so no reason either. Listing the same key says it, and renews expired
                # credentials: then HEAD is worth another try.
                self._call("list", url, "list_objects_v2", Bucket=bucket, Prefix=key, MaxKeys=1)
                reply = self._call("read", url, "head_object", Bucket=bucket, Key=key)
        except _Missing:
            return None
        return _s3_stat(url, reply)

    def read(self, url: str, start: int, end: int, etag: str) -> bytes:
        bucket, key = _split(url)
        span = f"bytes={start}-{end - 1}"
        try:
            reply = self._call("read", url, "get_object", Bucket=bucket, Key=key, Range=span, IfMatch=f'"{etag}"')
        except _Missing as error:
            raise _gone(url, etag) from error
        except WriteConflict as error:
            seen = self.stat(url)
            raise (_changed(url, etag, seen.etag) if seen else _gone(url, etag)) from error
        if _bare(reply["ETag"]) != etag:  # a store that ignores If-Match
            raise _changed(url, etag, _bare(reply["ETag"]))
        return bytes(reply["Body"])

    def get(self, url: str) -> tuple[bytes, ObjectStat] | None:
        bucket, key = _split(url)
        try:
            reply = self._call("read", url, "get_object", Bucket=bucket, Key=key)
        except _Missing:
            return None
        return bytes(reply["Body"]), _s3_stat(url, reply)

    def put(self, url: str, data: bytes, if_match: str | None, if_none_match: bool) -> str:
        bucket, key = _split(url)
        extra: dict[str, Any] = _content_type(key)
        if if_none_match:
            extra["IfNoneMatch"] = "*"
        if if_match is not None:
            extra["IfMatch"] = f'"{if_match}"'
        try:
            reply = self._call("write", url, "put_object", Bucket=bucket, Key=key, Body=data, **extra)
        except (WriteConflict, _Missing) as error:
            seen = self.get(url)
            if seen is not None and seen[0] == data:
                return seen[1].etag  # a lost reply: the request was sent again, and found what it had written itself
            raise _conflict(url, if_match, seen[1].etag if seen else None) from error
        return _bare(reply["ETag"])

    def delete(self, urls: list[str]) -> None:
        async def delete_all(fs: Any) -> dict[str, Any]:
            gate = asyncio.Semaphore(_DELETES_AT_ONCE)

            async def delete_one(url: str) -> None:
                bucket, key = _split(url)
                async with gate:
                    await self._repeat(lambda: _send(fs, "delete_object", Bucket=bucket, Key=key), ATTEMPTS)

            await asyncio.gather(*map(delete_one, urls))
            return {}

        # One by one: the multi-object call needs checksums that some stores do not take (botocore issue 3352).
        if urls:
            self._run("delete", urls[0] if len(urls) == 1 else f"{len(urls)} objects, e.g. {urls[0]}", delete_all)

    def check(self, url: str) -> None:
        bucket, _ = _split(url)
        self._call("reach", f"s3://{bucket}", "list_objects_v2", Bucket=bucket, MaxKeys=1, quick=True)

    def _call(self, action: str, url: str, method: str, *, quick: bool = False, **arguments: Any) -> dict[str, Any]:
        async def call(fs: Any) -> dict[str, Any]:
            if not quick:
                return await self._repeat(lambda: _send(fs, method, **arguments), ATTEMPTS)
            return await self._repeat(
                lambda: asyncio.wait_for(_send(fs, method, **arguments), _QUICK_SECONDS), _QUICK_ATTEMPTS
            )

        return self._run(action, url, call)

    def _run(self, action: str, url: str, call: Callable[[Any], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        where = f"{url}{self._connection.endpoint}"
        try:
            fs = self._connection.open()
            try:
                return _sync(fs, call)
            except boto.ClientError as error:
                if _code(error) not in _EXPIRED:
                    raise
                return _sync(self._connection.renew(fs), call)
        except (boto.BotoCoreError, boto.ClientError, aiohttp.ClientError, OSError, ValueError) as error:
            raise _explain(error, action, where) from error

    async def _repeat(self, send: Callable[[], Awaitable[dict[str, Any]]], attempts: int) -> dict[str, Any]:
        attempt = 0
        while True:
            try:
                return await send()
            except (boto.BotoCoreError, boto.ClientError, aiohttp.ClientError, TimeoutError) as error:
                attempt += 1
                if isinstance(error, boto.ClientError):
                    attempts = ATTEMPTS  # whoever answers is reachable
                if attempt >= attempts or not _passes(error):
                    raise
            self._retries.count += 1
            await asyncio.sleep(random.uniform(0, min(_FIRST_WAIT * 2 ** (attempt - 1), _LONGEST_WAIT)))  # noqa: S311


async def _send(fs: Any, method: str, **arguments: Any) -> dict[str, Any]:
    failed: Exception | None = None
    try:
        reply: dict[str, Any] = await fs._call_s3(method, **arguments)  # noqa: SLF001 - call_s3 in fsspec's async spelling
    except OSError as error:
        # s3fs turns replies into OSErrors; the reply itself says more. Raised in here, each would name the other as
        # where it comes from, and Dask, which pickles an error with its causes, would never come to an end.
        failed = error.__cause__ if isinstance(error.__cause__, boto.ClientError) else error
    except RecursionError:  # botocore asks whoever redirects where the bucket is, and is redirected again
        failed = boto.ClientError({"Error": {"Code": "308"}}, method)
    if failed is not None:
        raise failed
    if "Body" in reply:
        async with reply["Body"] as stream:
            reply["Body"] = await stream.read()
    return reply


def _sync(fs: Any, call: Callable[[Any], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    reply: dict[str, Any] = fsspec.asyn.sync(fs.loop, call, fs)
    return reply


@functools.cache
def _descriptions() -> Any:
    """The loader of botocore's service descriptions, which keeps what it has parsed: one for all of a process."""
    return botocore.loaders.create_loader()


def _session(profile: str | None = None) -> Any:
    """A session that reads credentials anew, and service descriptions not again."""
    session = aiobotocore.session.AioSession(profile=profile)
    session.register_component("data_loader", _descriptions())
    return session


def warm() -> None:
    """Parse what every client needs, without a connection: a process forked from this one finds it done."""

    async def make_client() -> None:
        made_up = {"aws_access_key_id": "-", "aws_secret_access_key": "-", "region_name": "us-east-1"}
        async with _session().create_client("s3", **made_up):
            pass

    asyncio.run(make_client())


class _Connection:
    """One s3fs file system for a process and a set of options; made at first use, renewed when credentials expire."""

    def __init__(self, storage: Storage) -> None:
        self._arguments = _s3_arguments(storage)
        self._profile = storage.profile
        self._lock = threading.Lock()
        self._fs: Any = None
        shown = storage.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        place = re.fullmatch(r"(https?://)(?:.*@)?([^/?#@]+)(?:[/?#][^@]*)?", shown or "")
        self.endpoint = f" (endpoint {place[1]}{place[2]})" if place else ""

    def open(self) -> Any:
        with self._lock:
            if self._fs is None:
                self._fs = self._make()
            return self._fs

    def renew(self, stale: Any) -> Any:
        """A new session reads the credentials at their source again; a static copy never would."""
        with self._lock:
            if self._fs is stale:
                self._fs = self._make()
            return self._fs

    def _make(self) -> Any:
        fs = s3fs.S3FileSystem(
            skip_instance_cache=True, use_listings_cache=False, session=_session(self._profile), **self._arguments
        )
        fs.retries = 1  # see _S3: repeating is ours
        fsspec.asyn.get_loop().set_exception_handler(_tell_or_pass_over)
        return fs


def _tell_or_pass_over(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What no one awaited is told; but for aiohttp's own tasks whose connection broke, of which the request knows."""
    if not isinstance(context.get("exception"), aiohttp.ClientConnectionError):
        loop.default_exception_handler(context)


_CONNECTIONS: Final[dict[tuple[int, str], _Connection]] = {}
_CONNECTIONS_LOCK: Final = threading.Lock()


def _connection(storage: Storage) -> _Connection:
    # Whoever changes the environment means it; a digest, because it may hold credentials.
    environment = sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))
    options = [storage.endpoint_url, storage.profile, storage.anon, storage.options, environment]
    name = hashlib.sha256(json.dumps(options, default=str, sort_keys=True).encode()).hexdigest()
    with _CONNECTIONS_LOCK:
        key = (os.getpid(), name)  # a forked child must not use its parent's sockets
        if key not in _CONNECTIONS:
            _CONNECTIONS[key] = _Connection(storage)
        return _CONNECTIONS[key]


_CLIENT_OPTIONS: Final = frozenset({"region_name", "api_version", "verify", "use_ssl"})
_TEXTS: Final = frozenset({"region_name", "api_version"})
_NESTED: Final = frozenset({"s3_additional_kwargs", "client_kwargs", "config_kwargs"})
_FILE_SYSTEM_OPTIONS: Final = frozenset({"requester_pays", *_NESTED})


def _s3_arguments(storage: Storage) -> dict[str, Any]:
    client: dict[str, Any] = {}
    config: dict[str, Any] = {
        "connect_timeout": 5,
        "read_timeout": 60,
        "max_pool_connections": 64,
        "retries": {"mode": "standard", "total_max_attempts": 1},
    }
    rest: dict[str, Any] = {}
    for name, value in storage.options.items():
        if isinstance(value, Mapping) is not (name in _NESTED) and name in _FILE_SYSTEM_OPTIONS | _CLIENT_OPTIONS:
            raise UsageError(f"--storage-option {name} must be {'an object' if name in _NESTED else 'one value'}")
        if name in _TEXTS and not isinstance(value, str):
            raise UsageError(f"--storage-option {name} must be text")
        if name in _CLIENT_OPTIONS:
            client[name] = value
        elif name in Config.OPTION_DEFAULTS:
            config[name] = value
        elif name in _FILE_SYSTEM_OPTIONS:
            rest[name] = value
        else:
            known = sorted(_CLIENT_OPTIONS | _FILE_SYSTEM_OPTIONS | {"request_checksum_calculation"})
            raise UsageError(f"--storage-option {name} is unknown; known are {', '.join(known)}, botocore's Config")
    client |= rest.pop("client_kwargs", {})
    config |= rest.pop("config_kwargs", {})
    if (storage.endpoint_url or "").startswith("http://"):
        client.setdefault("verify", False)  # there is no certificate; loading all known ones costs each process 30 ms
    if storage.endpoint_url is not None:  # else fsspec's own configuration may name one
        rest["endpoint_url"] = storage.endpoint_url
    return {"anon": storage.anon, "client_kwargs": client, "config_kwargs": config, **rest}


def _check_endpoint(url: str) -> None:
    if "@" in url:
        raise UsageError("--endpoint-url carries a credential and is refused; give it the way AWS tools find them")
    if "?" in url or "#" in url:
        raise UsageError("--endpoint-url has a query or a fragment; write e.g. http://127.0.0.1:9000")
    if re.match(r"https?://[^/]", url) is None:
        raise UsageError(f"--endpoint-url {url!r} is no URL; write e.g. http://127.0.0.1:9000")


def _split(url: str) -> tuple[str, str]:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key


_CONTENT_TYPES: Final[Mapping[str, str]] = {
    ".parquet": "application/vnd.apache.parquet",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".html": "text/html; charset=utf-8",
}


def _content_type(key: str) -> dict[str, str]:
    """What the object is, for browsers, which then show a report, and for stores, which then do not guess."""
    kind = _CONTENT_TYPES.get(Path(key).suffix)
    return {} if kind is None else {"ContentType": kind}


def _bare(etag: str) -> str:
    return etag.strip('"')


def _s3_stat(url: str, reply: Mapping[str, Any]) -> ObjectStat:
    said = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    now = email.utils.parsedate_to_datetime(said).timestamp() if said else time.time()
    return ObjectStat(url, reply["ContentLength"], _bare(reply["ETag"]), reply["LastModified"].timestamp(), now)


# ------------------------------------------------------------------------- what went wrong, in one line, no secrets


class _Missing(StorageError):
    """There is no such object; which of its meanings that has, the caller knows."""


_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
_SLOW: Final = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "TooManyRequests",
        "BandwidthLimitExceeded",
        "ServiceUnavailable",
        "503",
        "429",
    }
)
_PASSING: Final = _SLOW | {"InternalError", "RequestTimeout", "500", "502", "504", "ConditionalRequestConflict"}
_CHECKSUM: Final = frozenset(
    {
        "MissingContentLength",
        "MissingContentMD5",
        "XAmzContentSHA256Mismatch",
        "XAmzContentChecksumMismatch",
        "BadDigest",
        "InvalidDigest",
        "InvalidChunkSizeError",
        "411",
    }
)
_SEEN: Final[Mapping[str, tuple[str, str]]] = {
    "NoSuchBucket": ("no such bucket", "check its name and the endpoint; etl never creates one"),
    "InvalidBucketName": ("that is not a valid bucket name", "write s3://bucket/folder/"),
    "InvalidAccessKeyId": ("the store does not know the access key", "check the credentials, profile and endpoint"),
    "InvalidToken": ("the session token is not valid", "renew the credentials and run the same command again"),
    "SignatureDoesNotMatch": (
        "wrong signature",
        "the secret key does not fit the access key, or a proxy changed the request; check the credentials",
    ),
    "RequestTimeTooSkewed": ("this machine's clock is off", "set it and run the same command again"),
    "PermanentRedirect": ("the bucket lies in another region", "set AWS_DEFAULT_REGION to it"),
    "AuthorizationHeaderMalformed": ("the bucket lies in another region", "set AWS_DEFAULT_REGION to it"),
    "IllegalLocationConstraintException": ("the bucket lies in another region", "set AWS_DEFAULT_REGION to it"),
    "301": ("the bucket lies in another region", "set AWS_DEFAULT_REGION to it"),
    "308": (
        "whoever answers there sends every request elsewhere",
        "give the store's own address as --endpoint-url, e.g. https instead of http, and set AWS_DEFAULT_REGION",
    ),
    "NotImplemented": ("NotImplemented: the store cannot do that", "see its documentation"),
}
_DENIED: Final = ("access denied", "the credentials in use may not do this here; check them, --profile and --anon")
_RENEW: Final = ("the credentials have expired", "renew them (e.g. aws sso login) and run the same command again")
_NO_CREDENTIALS: Final = (
    "no credentials found",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or --profile, or --anon for a public bucket",
)
_WHEN_REQUIRED: Final = (
    "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required "
    "(or --storage-option request_checksum_calculation=when_required)"
)


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _passes(error: Exception) -> bool:
    """Whether the same request may succeed in a moment."""
    if isinstance(error, boto.ClientError):
        return _code(error) in _PASSING or _status(error) in {429, 500, 502, 503, 504}
    if isinstance(error, boto.SSLError):
        return False
    kinds = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, aiohttp.ClientError, TimeoutError)
    return isinstance(error, kinds) or type(error).__name__ in {"ResponseParserError", "FlexibleChecksumError"}


def _explain(error: Exception, action: str, where: str) -> StorageError:
    """The failure as one line: where, what was seen, what to do."""
    if isinstance(error, boto.ClientError):
        if _code(error) in {"PreconditionFailed", "412", "ConditionalRequestConflict"}:
            return WriteConflict(f"{where}: the object is not in the required state")
        if _code(error) in {"NoSuchKey", "404"}:
            return _Missing(f"{where}: no such object")
        seen, remedy = _from_reply(error)
    else:
        seen, remedy = _from_client(error)
    return StorageError(f"cannot {action} {where}: {seen}; {remedy}")


def _from_reply(error: boto.ClientError) -> tuple[str, str]:
    code, message = _code(error), str(error.response.get("Error", {}).get("Message", ""))
    if code in _EXPIRED:
        return _RENEW
    if code in _SEEN:
        return _SEEN[code]
    if code in {"AccessDenied", "AllAccessDisabled", "403"} or _status(error) == 403:  # noqa: PLR2004
        return _DENIED
    if code in _SLOW:
        return f"the store still asked to slow down at the {ATTEMPTS}th try ({code})", "use fewer --workers, or wait"
    if code in _CHECKSUM or re.search("checksum|x-amz-content-sha256|aws-chunked", message, re.IGNORECASE):
        return f"the store does not take the request's checksum ({code})", _WHEN_REQUIRED
    return f"the store answered {code}: {scrub(message)}", "see the store's documentation"


def _from_client(error: Exception) -> tuple[str, str]:  # noqa: PLR0911 - a table, read from the top
    match error:
        case boto.NoCredentialsError() | boto.PartialCredentialsError():
            return _NO_CREDENTIALS
        case boto.TokenRetrievalError() | boto.UnauthorizedSSOTokenError() | boto.SSOTokenLoadError():
            return _RENEW
        case boto.CredentialRetrievalError():
            return "the credentials could not be fetched from their source", "try: aws sts get-caller-identity"
        case boto.ParamValidationError() if "bucket name" in str(error):
            return _SEEN["InvalidBucketName"]
        case boto.ProfileNotFound():
            return scrub(str(error)), "see ~/.aws/config, or choose another --profile"
        case boto.SSLError():
            return f"TLS failed: {scrub(str(error))}", "check the endpoint, or set AWS_CA_BUNDLE"
        case boto.ConnectionError() | boto.HTTPClientError() | aiohttp.ClientError() | TimeoutError():
            return f"the endpoint cannot be reached ({type(error).__name__})", "check --endpoint-url and the network"
        case _ if type(error).__name__ == "FlexibleChecksumError":
            return "a reply's checksum does not fit it", "set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
        case _:
            return f"{type(error).__name__}: {scrub(str(error))}", "check the URL and the storage options"


def _changed(url: str, was: str, now: str) -> ObjectChanged:
    return ObjectChanged(f"{url} changed since it was listed: its ETag was {was}, is {now}; let it settle, plan anew")


def _gone(url: str, was: str) -> ObjectChanged:
    return ObjectChanged(f"{url} is gone since it was listed: its ETag was {was}; restore it, or plan anew")


def _conflict(url: str, required: str | None, now: str | None) -> WriteConflict:
    was = "no object" if required is None else f"ETag {required}"
    return WriteConflict(f"{url} was not written: it requires {was}, there is {f'ETag {now}' if now else 'no object'}")
