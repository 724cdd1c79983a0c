"""URLs to bytes and back: exact keys, one version of an object, conditional writes, and failures in one clear line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import http.server
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import fsspec.asyn
import pytest

from etl import storage as storage_module
from etl.config import RunConfig
from etl.errors import EtlError, ObjectChanged, StorageError, UsageError, WriteConflict
from etl.partitions import find_objects
from etl.storage import ATTEMPTS, Storage, canonical_url
from tests.servers import SECRET_KEY, Proxy, S3Server, start_moto, start_proxy, start_seaweedfs

KEYS = [
    "a+b.jsonl",
    "50%25.jsonl",
    "x%.jsonl",
    "with space.jsonl",
    "h#sh.jsonl",
    "run=5/p=1.jsonl",
    "sub//d.jsonl",
    "q[1].jsonl",
    "w?.jsonl",
    "wx.jsonl",
    "st*ar.jsonl",
    "stxar.jsonl",
    "é\U0001f600.jsonl",
    "marker/",
    'q"uote.jsonl',
    "x.jsonl?versionId=1",
]


@pytest.fixture
def folder(s3: Any, bucket: str) -> str:
    """A fresh bucket's URL; AWS_ENDPOINT_URL points at its server."""
    assert s3 is not None
    return f"s3://{bucket}"


@pytest.fixture
def proxy(moto: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the server, and the environment set so that etl goes through it."""
    assert bucket
    with start_proxy(moto) as started:
        monkeypatch.setenv("AWS_ENDPOINT_URL", started.endpoint_url)
        yield started


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a few milliseconds between tries."""
    monkeypatch.setattr(storage_module, "_FIRST_WAIT", 0.001)


def etag_of(storage: Storage, url: str) -> str:
    seen = storage.stat(url)
    assert seen is not None
    return seen.etag


def places(tmp_path: Path, folder: str) -> list[str]:
    return [folder, str(tmp_path), f"memory://{uuid.uuid4().hex}"]


# -------------------------------------------------------------------------------------------------------------- keys


def test_every_key_is_read_written_and_deleted_as_it_is(s3: Any, bucket: str) -> None:
    for key in KEYS:
        s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    storage = Storage()
    listed = {info.url: info for info in storage.list(f"s3://{bucket}")}
    assert sorted(listed) == sorted(f"s3://{bucket}/{key}" for key in KEYS)
    for key in KEYS:
        info = listed[f"s3://{bucket}/{key}"]
        assert storage.read(info.url, 0, info.size, info.etag) == key.encode()
        storage.put(f"s3://{bucket}/out/{key}", b"copy of " + key.encode())
    for key in KEYS:
        assert s3.get_object(Bucket=bucket, Key=f"out/{key}")["Body"].read() == b"copy of " + key.encode()
    storage.delete([f"s3://{bucket}/w?.jsonl", f"s3://{bucket}/st*ar.jsonl", f"s3://{bucket}/q[1].jsonl"])
    left = {info.url.removeprefix(f"s3://{bucket}/") for info in storage.list(f"s3://{bucket}")}
    assert {key for key in left if not key.startswith("out/")} == set(KEYS) - {"w?.jsonl", "st*ar.jsonl", "q[1].jsonl"}


def test_an_object_says_what_it_is(s3: Any, bucket: str) -> None:
    kinds = {
        "part-0.parquet": "application/vnd.apache.parquet",
        "rejects/part-0.jsonl": "application/x-ndjson",
        "plan.json": "application/json",
        "report.html": "text/html; charset=utf-8",
    }
    for key in kinds:
        Storage().put(f"s3://{bucket}/{key}", b"{}")
    assert {key: s3.head_object(Bucket=bucket, Key=key)["ContentType"] for key in kinds} == kinds


def test_a_prefix_is_literal(s3: Any, bucket: str) -> None:
    for key in ("a[1]/x", "a1/x", "a[1]b"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    assert [info.url for info in Storage().list(f"s3://{bucket}/a[1]")] == [f"s3://{bucket}/a[1]/x"]
    assert [info.url for info in Storage().find(f"s3://{bucket}/a[1]")] == [
        f"s3://{bucket}/a[1]/x",
        f"s3://{bucket}/a[1]b",
    ]


def test_a_listing_of_many_pages_is_complete_and_fresh(s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_PAGE_KEYS", 3)
    storage = Storage()
    assert storage.list(f"s3://{bucket}") == ()
    for i in range(10):
        s3.put_object(Bucket=bucket, Key=f"in/{i}", Body=b"")
    assert [info.url[-1] for info in storage.list(f"s3://{bucket}")] == list("0123456789")


@pytest.mark.parametrize(
    ("spelled", "canonical"),
    [
        ("s3://b/x/", "s3://b/x/"),
        ("s3a://b/x", "s3://b/x"),
        ("S3://B/X", "s3://B/X"),
        ("/a/../b//c/", "/b/c/"),
        ("file:///a/b", "/a/b"),
        ("gs://b/x", "gs://b/x"),
        ("/", "/"),
    ],
)
def test_one_place_has_one_spelling(spelled: str, canonical: str) -> None:
    assert canonical_url(spelled) == canonical


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert canonical_url("x/") == f"{tmp_path}/x/"
    assert canonical_url("~/x") == "/home/someone/x"


# ----------------------------------------------------------------------------------------------- reading and writing


def test_all_kinds_of_places_work_the_same(tmp_path: Path, folder: str) -> None:
    storage = Storage()
    for place in places(tmp_path, folder):
        url = f"{place}/new/folder/x.bin"
        assert storage.get(url) is None
        assert storage.stat(url) is None
        etag = storage.put(url, b"hello world")
        [info] = storage.list(place)
        assert (info.url, info.size, info.etag) == (url, 11, etag)
        assert storage.read(url, 6, 11, etag) == b"world"
        assert storage.read(url, 3, 3, etag) == b""
        assert storage.get(url) == b"hello world"
        storage.delete([url, f"{place}/was/never/there"])
        assert storage.list(place) == ()


def test_a_changed_object_is_named_with_what_it_was_and_is(tmp_path: Path, folder: str) -> None:
    storage = Storage()
    for place in places(tmp_path, folder):
        url = f"{place}/x.jsonl"
        was = storage.put(url, b"short\n")
        now = storage.put(url, b"a longer body\n")
        with pytest.raises(ObjectChanged, match=f"{url} changed.*was {was}, is {now}"):
            storage.read(url, 0, 6, was)
        storage.delete([url])
        with pytest.raises(ObjectChanged, match=f"{url} is gone"):
            storage.read(url, 0, 6, was)


def test_a_local_file_rewritten_with_the_same_size_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"aaaa")
    os.utime(path, ns=(1, 1))
    assert etag_of(Storage(), str(path)) == "4-1"
    os.utime(path, ns=(1, 2))
    with pytest.raises(ObjectChanged, match="was 4-1, is 4-2"):
        Storage().read(str(path), 0, 4, "4-1")


def test_a_store_that_ignores_if_match_is_caught_by_the_etag_of_its_reply(proxy: Proxy, bucket: str) -> None:
    proxy.dropped_headers = {"if-match"}
    storage = Storage()
    etag = storage.put(f"s3://{bucket}/x", b"old")
    storage.put(f"s3://{bucket}/x", b"new")
    with pytest.raises(ObjectChanged, match="changed"):
        storage.read(f"s3://{bucket}/x", 0, 3, etag)


def test_a_read_asks_for_its_bytes_alone_of_the_version_that_was_planned(proxy: Proxy, bucket: str) -> None:
    etag = Storage().put(f"s3://{bucket}/x", b"hello world")
    asked: list[tuple[str | None, str | None]] = []

    def note(headers: Mapping[str, str]) -> bool:
        asked.append((headers.get("Range"), headers.get("If-Match")))
        return False

    proxy.refusals, proxy.refuse_headers = -1, note
    assert Storage().read(f"s3://{bucket}/x", 2, 5, etag) == b"llo"
    assert asked == [("bytes=2-4", f'"{etag}"')]


def test_a_failed_local_write_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    blocked = tmp_path / "x"
    blocked.mkdir()
    with pytest.raises(StorageError, match="cannot write"):
        Storage().put(str(blocked), b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_write_left_behind_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".etl-abc.tmp").write_bytes(b"half")
    (tmp_path / "x").write_bytes(b"")
    assert [info.url for info in Storage().list(str(tmp_path))] == [f"{tmp_path}/x"]


def test_a_local_write_has_the_rights_of_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    Storage().put(f"{tmp_path}/ours", b"")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ------------------------------------------------------------------------------------------------------- conditions


def test_conditional_writes_hold(tmp_path: Path, folder: str) -> None:
    storage = Storage()
    for place in places(tmp_path, folder):
        url = f"{place}/lease.json"
        with pytest.raises(WriteConflict, match="there is no object"):
            storage.put(url, b"0", if_match="never")
        first = storage.put(url, b"1", if_none_match=True)
        with pytest.raises(WriteConflict, match=f"there is ETag {first}"):
            storage.put(url, b"22", if_none_match=True)
        second = storage.put(url, b"22", if_match=first)
        with pytest.raises(WriteConflict, match=f"requires ETag {first}, there is ETag {second}"):
            storage.put(url, b"333", if_match=first)
        assert storage.get(url) == b"22"


def test_of_many_who_want_the_lease_one_gets_it(tmp_path: Path, folder: str) -> None:
    def take(storage: Storage, url: str, me: int) -> bool:
        try:
            storage.put(url, b"%d" % me, if_none_match=True)
        except WriteConflict:
            return False
        return True

    for place in (folder, str(tmp_path)):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda me: take(Storage(), f"{place}/lease", me), range(8)))  # noqa: B023 - joined here
        assert won.count(True) == 1
        assert Storage().get(f"{place}/lease") == b"%d" % won.index(True)


def test_a_store_is_tried_out_for_conditional_writes(tmp_path: Path, folder: str) -> None:
    for place in (folder, str(tmp_path)):
        assert Storage().supports_conditions(place)
        assert Storage().list(place) == ()


def test_a_store_that_ignores_conditions_is_found_out(proxy: Proxy, bucket: str) -> None:
    proxy.dropped_headers = {"if-match", "if-none-match"}
    assert not Storage().supports_conditions(f"s3://{bucket}/x")


def test_a_store_that_refuses_conditions_is_found_out(proxy: Proxy, bucket: str) -> None:
    proxy.refusal, proxy.refusals = (501, "NotImplemented", "A header you provided implies more."), -1
    proxy.refuse_when = lambda method, _path, _count: method == "PUT"
    assert not Storage().supports_conditions(f"s3://{bucket}/x")


@pytest.mark.usefixtures("quick_retries")
def test_a_lost_reply_to_a_conditional_write_is_no_conflict(proxy: Proxy, bucket: str) -> None:
    proxy.drop_replies = 1
    storage = Storage()
    etag = storage.put(f"s3://{bucket}/lease", b"run 1", if_none_match=True)
    assert etag_of(storage, f"s3://{bucket}/lease") == etag
    assert proxy.requests("PUT") == 2


def test_times_are_the_stores_own(tmp_path: Path, folder: str) -> None:
    for place in (folder, str(tmp_path)):
        Storage().put(f"{place}/x", b"1")
        found = Storage().get_with_stat(f"{place}/x")
        assert found is not None
        assert found[0] == b"1"
        assert abs(found[1].modified - time.time()) < 60
        assert 0 <= found[1].now - found[1].modified + 1 < 60


# --------------------------------------------------------------------------------------- processes, threads, secrets


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_storage_travels_to_another_process_and_connects_there(method: str, folder: str) -> None:
    storage = Storage()
    storage.put(f"{folder}/x", b"seen")  # the parent is connected already; a forked child must not use its sockets
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as another:
        assert another.submit(storage.get, f"{folder}/x").result(timeout=60) == b"seen"


def test_a_storage_is_safe_in_threads(folder: str) -> None:
    storage = Storage()
    bodies = [b"%d" % i * 1000 for i in range(40)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: storage.put(f"{folder}/{i}", bodies[i]), range(40)))
        assert list(pool.map(lambda i: storage.get(f"{folder}/{i}"), range(40))) == bodies


def test_building_a_storage_connects_nothing_and_pickles_no_secret(folder: str) -> None:
    config = RunConfig(input="x", profile=None, storage_option={"region_name": "eu-west-1"})
    storage = Storage.from_config(config)
    before = len(pickle.dumps(storage))
    Storage.from_config(config).get(f"{folder}/x")
    storage.get(f"{folder}/x")
    assert len(pickle.dumps(storage)) == before < 300
    assert SECRET_KEY.encode() not in pickle.dumps(storage)
    assert pickle.loads(pickle.dumps(storage)) == storage  # noqa: S301 - made one line above


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"endpoint_url": "http://user:hunter2@host:9000"}, "carries a credential"),
        ({"endpoint_url": "host:9000"}, "is no URL"),
        ({"endpoint_url": "user:hunter2@host:9000"}, "carries a credential"),
        ({"endpoint_url": "http://user:hun/hunter2@host:9000"}, "carries a credential"),
        ({"endpoint_url": "http://host:9000/?token=hunter2"}, "has a query"),
        ({"storage_option": {"colour": "red"}}, "colour is unknown"),
        ({"storage_option": {"client_kwargs": 5}}, "client_kwargs must be an object"),
        ({"storage_option": {"region_name": 5}}, "region_name must be text"),
        ({"storage_option": {"client_kwargs": {"aws_secret_access_key": "hunter2"}}}, "looks like a credential"),
        ({"storage_option": {"s3_additional_kwargs": {"SSECustomerKey": "hunter2"}}}, "looks like a credential"),
        ({"storage_option": {"proxies": {"http": "http://u:hunter2@host"}}}, "looks like a credential"),
    ],
)
def test_options_that_nothing_takes_are_refused(option: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        Storage.from_config(RunConfig(input="x", **option))
    assert "hunter2" not in str(caught.value)


def test_the_name_of_a_key_that_the_store_keeps_is_no_credential() -> None:
    kept = {"SSEKMSKeyId": "arn:aws:kms:…", "ServerSideEncryption": "aws:kms"}
    Storage.from_config(RunConfig(input="x", storage_option={"s3_additional_kwargs": kept}))


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIDEXAMPLE:hunter2@bucket/x",
        "s3://AKIDEXAMPLE:sla/sh/hunter2@bucket/x",
        "https://host/a.jsonl?X-Amz-Date=1&X-Amz-Signature=hunter2",
        "https://host/a.jsonl?sig=hunter2",
        "ftp://user:hunter2@host/x",
    ],
)
def test_a_url_with_a_credential_is_refused_and_not_echoed(url: str) -> None:
    with pytest.raises(UsageError, match="carries a credential") as caught:
        canonical_url(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket/a:b@c?sig=1", "s3://arn:aws:s3:r:1:accesspoint/p/x@y", "https://h/x?max_tokens=1&keyword=k"]
)
def test_signs_of_a_credential_in_a_key_are_a_keys(url: str) -> None:
    assert canonical_url(url) == url


@pytest.mark.parametrize("endpoint", ["u:hunter2@host:9", "http://u:h/hunter2@host:9", "http://host:9/?t=hunter2"])
def test_an_endpoint_in_the_environment_is_told_without_its_credential(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert "hunter2" not in storage_module._Connection(Storage()).endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://u:pw@host:9000/base")
    assert storage_module._Connection(Storage()).endpoint == " (endpoint http://host:9000)"


# --------------------------------------------------------------------------------------------------------- endpoints


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_endpoint_in_the_environment_gets_reads_and_writes(
    variable: str, host: str, proxy: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(variable, proxy.endpoint_url.replace("127.0.0.1", host))
    Storage().put(f"s3://{bucket}/x", b"1")
    assert Storage().get(f"s3://{bucket}/x") == b"1"
    assert (proxy.requests("PUT"), proxy.requests("GET")) == (1, 1)
    assert {path for _, path in proxy.seen} == {f"/{bucket}/x"}


# ----------------------------------------------------------------------------------------------------------- retries


@pytest.mark.usefixtures("quick_retries")
def test_slow_down_on_the_first_five_requests_of_each_key_is_outlasted(proxy: Proxy, bucket: str) -> None:
    """So many keys at once are more than the shared budget of botocore's own retries would allow."""
    proxy.refusals = 5
    storage = Storage()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: storage.put(f"s3://{bucket}/{i}", b"%d" % i), range(25)))
        read = list(pool.map(lambda i: storage.get(f"s3://{bucket}/{i}"), range(5)))
    assert read == [b"0", b"1", b"2", b"3", b"4"]
    assert storage.retries == 5 * (25 + 5)


@pytest.mark.usefixtures("quick_retries")
def test_endless_slow_down_ends_in_one_clear_line(proxy: Proxy, bucket: str) -> None:
    proxy.refusals = -1
    with pytest.raises(StorageError, match="still asked to slow down at the 8th try"):
        Storage().put(f"s3://{bucket}/x", b"1")
    assert proxy.requests("PUT") == ATTEMPTS


@pytest.mark.usefixtures("quick_retries")
def test_a_reply_cut_short_is_asked_for_again(proxy: Proxy, bucket: str) -> None:
    storage = Storage()
    body = b"x" * 100_000
    etag = storage.put(f"s3://{bucket}/x", body)
    proxy.cut_bodies = 2
    assert storage.read(f"s3://{bucket}/x", 0, len(body), etag) == body
    assert storage.retries == 2


def test_a_broken_connection_prints_no_traceback_of_a_task_that_nobody_awaits(
    bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    Storage().put(f"s3://{bucket}/x", b"x")

    async def leave_alone() -> None:
        async def fail(error: Exception) -> None:
            raise error

        for error in (aiohttp.ClientConnectionResetError("reset"), ValueError("told")):
            task = asyncio.ensure_future(fail(error))
            await asyncio.wait([task])
            del task
            gc.collect()

    fsspec.asyn.sync(fsspec.asyn.get_loop(), leave_alone)
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info and record.exc_info[1]] == [
        ("told",)
    ]


def test_a_refusal_that_cannot_pass_is_not_repeated(proxy: Proxy, bucket: str) -> None:
    proxy.refusal, proxy.refusals = (403, "AccessDenied", "Access Denied"), -1
    with pytest.raises(StorageError, match="access denied"):
        Storage().get(f"s3://{bucket}/x")
    assert proxy.requests("GET") == 1


# ---------------------------------------------------------------------------------------------------------- failures


def ends(error: BaseException, path: tuple[BaseException, ...] = ()) -> bool:
    """Whether the chain of what is behind an error comes to an end: Dask pickles all of it."""
    behind = [cause for cause in (error.__cause__, error.__context__) if cause is not None]
    return error not in path and all(ends(cause, (*path, error)) for cause in behind)


def failure(call: Callable[[], object]) -> EtlError:
    with pytest.raises(EtlError) as caught:
        call()
    assert ends(caught.value)
    assert "\n" not in str(caught.value)
    assert SECRET_KEY not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args  # noqa: S301 - made here
    return caught.value


REFUSALS = [
    (403, "AccessDenied", "access denied; the credentials in use may not do this here"),
    (400, "ExpiredToken", "the credentials have expired; renew them"),
    (403, "InvalidAccessKeyId", "the store does not know the access key"),
    (403, "SignatureDoesNotMatch", "wrong signature"),
    (403, "RequestTimeTooSkewed", "clock is off"),
    (411, "MissingContentLength", "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
    (400, "MissingContentMD5", "request_checksum_calculation=when_required"),
    (400, "XAmzContentSHA256Mismatch", "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"),
    (301, "PermanentRedirect", "another region; set AWS_DEFAULT_REGION"),
    (418, "Teapot", "the store answered Teapot: made up"),
]


def test_each_refusal_says_where_what_and_what_to_do(proxy: Proxy, bucket: str) -> None:
    proxy.refusals = -1
    proxy.refuse_when = lambda method, _path, _count: method != "HEAD"  # botocore asks so where a moved bucket is
    for status, code, said in REFUSALS:
        proxy.refusal = (status, code, "made up")
        error = failure(lambda: Storage().put(f"s3://{bucket}/x", b"1"))
        assert said in str(error)
        assert f"cannot write s3://{bucket}/x (endpoint {proxy.endpoint_url})" in str(error)
        assert isinstance(failure(lambda: Storage().check_bucket(f"s3://{bucket}")), UsageError)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_an_address_that_sends_every_request_elsewhere_is_said(status: int, proxy: Proxy, bucket: str) -> None:
    proxy.refusal, proxy.refusals = (status, str(status), "made up"), -1
    error = failure(lambda: Storage().check_bucket(f"s3://{bucket}"))
    assert "sends every request elsewhere; give the store's own address as --endpoint-url" in str(error)


@pytest.mark.parametrize("way", ["environment", "option"])
def test_a_store_without_the_newer_checksums_is_named_and_can_be_used(
    way: str, proxy: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.refusal, proxy.refusals = (400, "InvalidRequest", "x-amz-checksum-crc32 is not supported"), -1
    proxy.refuse_headers = lambda headers: any(name.lower().startswith("x-amz-checksum-crc") for name in headers)
    error = failure(lambda: Storage().put(f"s3://{bucket}/x", b"1"))
    assert "AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in str(error)
    option = {"request_checksum_calculation": "when_required"}
    if way == "environment":
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    storage = Storage(options=option if way == "option" else {})
    storage.put(f"s3://{bucket}/x", b"1")
    storage.put(f"s3://{bucket}/y", b"2")
    storage.delete([f"s3://{bucket}/x", f"s3://{bucket}/y"])
    assert storage.list(f"s3://{bucket}") == ()


def test_no_such_bucket_is_said_and_it_is_not_created(s3: Any) -> None:
    name = f"missing-{uuid.uuid4().hex}"
    for call in (
        lambda: Storage().check_bucket(f"s3://{name}/x"),
        lambda: Storage().check_writable(f"s3://{name}/x"),
        lambda: Storage().put(f"s3://{name}/x", b"1"),
        lambda: Storage().get(f"s3://{name}/x"),
        lambda: Storage().list(f"s3://{name}/x"),
    ):
        assert "no such bucket" in str(failure(call))
    assert name not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}


def test_missing_credentials_are_said(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = failure(lambda: Storage().check_bucket(folder))
    assert isinstance(error, UsageError)
    assert "no credentials found; set AWS_ACCESS_KEY_ID" in str(error)
    Storage(anon=True).check_bucket(folder)


def test_an_unknown_profile_is_said(folder: str) -> None:
    assert "profile (nobody) could not be found" in str(failure(lambda: Storage(profile="nobody").check_bucket(folder)))


def test_an_unreachable_endpoint_is_said_at_once(bucket: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()
    error = failure(lambda: Storage(f"http://127.0.0.1:{port}").check_bucket(f"s3://{bucket}"))
    assert "the endpoint cannot be reached" in str(error)
    assert time.monotonic() - started < 5


@pytest.mark.long
def test_an_endpoint_that_never_answers_is_said_within_15_seconds(bucket: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        error = failure(lambda: Storage(f"http://127.0.0.1:{silent.getsockname()[1]}").check_bucket(f"s3://{bucket}"))
    assert "the endpoint cannot be reached" in str(error)
    assert time.monotonic() - started < 15


def test_expired_credentials_are_read_again_at_their_source(
    proxy: Proxy, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Session credentials in a file expire; whoever renews them writes the file anew, and the run goes on."""
    source = tmp_path / "credentials"
    template = "[default]\naws_access_key_id={0}\naws_secret_access_key=x\naws_session_token=y\n"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(source))
    source.write_text(template.format("OLDKEY"))
    proxy.refusal, proxy.refusals = (400, "ExpiredToken", "The provided token has expired."), -1
    proxy.refuse_when = lambda method, _path, count: count > 1 or method != "PUT"
    proxy.refuse_headers = lambda headers: "OLDKEY" in headers.get("Authorization", "")
    storage = Storage()
    storage.put(f"s3://{bucket}/x", b"1")
    assert "the credentials have expired; renew them" in str(failure(lambda: storage.put(f"s3://{bucket}/x", b"2")))
    assert "the credentials have expired; renew them" in str(failure(lambda: storage.stat(f"s3://{bucket}/x")))
    source.write_text(template.format("NEWKEY"))
    assert storage.stat(f"s3://{bucket}/x") is not None  # a reply to HEAD does not even say that they expired
    storage.put(f"s3://{bucket}/x", b"3")
    assert Storage().get(f"s3://{bucket}/x") == b"3"


def test_a_local_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "is a file, not a folder" in str(failure(lambda: Storage().check_writable(f"{tmp_path}/file/out")))
    Storage().check_writable(f"{tmp_path}/new/out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_that_no_disk_takes_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        Storage().check_writable(str(tmp_path / ("x" * 300)))


def test_an_unknown_kind_of_url_is_said() -> None:
    assert "nosuch" in str(failure(lambda: Storage().check_bucket("nosuch://x/y")))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_args: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize("url", ["/", "/*.jsonl"])
def test_objects_whose_size_a_listing_does_not_tell_are_read_to_their_end(url: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}\n")
    serve = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        [found] = find_objects(Storage(), [base + url], 1000).objects
        assert (found.url, found.size) == (f"{base}/a.jsonl", 3)
        assert Storage().read(found.url, 0, 3, found.etag) == b"{}\n"
        server.shutdown()


def test_a_web_server_that_cannot_be_asked_is_not_an_object_that_is_missing(tmp_path: Path) -> None:
    class Failing(_Quiet):
        def send_head(self) -> None:
            self.send_error(500 if self.path == "/broken.jsonl" else 404)

    serve = functools.partial(Failing, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        assert Storage().stat(f"{base}/absent.jsonl") is None
        with pytest.raises(StorageError, match="500"):
            Storage().stat(f"{base}/broken.jsonl")
        server.shutdown()
    with pytest.raises(StorageError, match="Cannot connect"):
        Storage().stat(f"{base}/absent.jsonl")


def test_an_fsspec_url_is_listed_under_its_own_name() -> None:
    name = uuid.uuid4().hex
    fsspec.filesystem("memory").pipe_file(f"/{name}/a.jsonl", b"{}\n")
    assert [info.url for info in Storage().list(f"memory://{name}")] == [f"memory://{name}/a.jsonl"]


# ----------------------------------------------------------------------------------------- a second, stricter server


@pytest.fixture(scope="module")
def weed() -> Iterator[S3Server]:
    with start_seaweedfs() as server:
        yield server


@pytest.mark.long
def test_seaweedfs_holds_every_promise_that_moto_holds(weed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    folder = weed.create_bucket(f"b{uuid.uuid4().hex}")
    storage = Storage()
    keys = [key for key in KEYS if "//" not in key and not key.endswith("/")]  # it keeps keys as paths of a file system
    for key in keys:
        storage.put(f"{folder}/{key}", key.encode())
    for info in storage.list(folder):
        assert storage.read(info.url, 0, info.size, info.etag) == info.url.removeprefix(f"{folder}/").encode()
    assert sorted(weed.keys(folder.removeprefix("s3://"))) == sorted(keys)
    assert storage.supports_conditions(f"{folder}/c")
    was = storage.put(f"{folder}/x", b"1")
    storage.put(f"{folder}/x", b"22")
    with pytest.raises(ObjectChanged, match="changed"):
        storage.read(f"{folder}/x", 0, 1, was)
    assert "no such bucket" in str(failure(lambda: storage.put("s3://missing/x", b"1")))


@pytest.mark.long
def test_a_wrong_secret_is_said(weed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    folder = weed.create_bucket(f"b{uuid.uuid4().hex}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    error = failure(lambda: Storage().check_bucket(folder))
    assert "wrong signature" in str(error)
    assert "wrong-secret" not in str(error)


@pytest.mark.long
def test_seaweedfs_lists_2100_objects(weed: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in weed.environment.items():
        monkeypatch.setenv(name, value)
    folder = weed.create_bucket(f"b{uuid.uuid4().hex}")
    storage = Storage()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: storage.put(f"{folder}/in/{i:04d}", b"x"), range(2100)))
    assert [info.url[-4:] for info in storage.list(f"{folder}/in")] == [f"{i:04d}" for i in range(2100)]


def test_a_server_ends_with_its_context() -> None:
    with start_moto() as server:
        port = int(server.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


STARTS_A_SERVER_AND_WAITS = """
import sys
from etl.embedded import start_server
with start_server() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_a_server_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_SERVER_AND_WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline().rpartition(b":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=120) as held_open:
            parent.kill()
            # Returns once the server's end is closed, raises TimeoutError after two minutes. A server that had not yet
            # taken the connection up resets it with its end.
            with contextlib.suppress(ConnectionResetError):
                assert held_open.recv(1) == b""
