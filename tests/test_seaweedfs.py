"""SeaweedFS, independent and stricter, sees the same promises kept as moto, and some that moto cannot show."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from botocore.exceptions import ClientError

from etl import jobs
from tests import test_jobs, test_lease
from tests.jobs import QWEN36, config, etl, jsonl, small_rows, stored, upload
from tests.servers import ACCESS_KEY, SECRET_KEY, S3Server, start_proxy, start_seaweedfs
from tests.test_jobs import run, scheduler  # noqa: F401 - fixtures
from tests.test_lease import ctrl_c, storage, url  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    """SeaweedFS under the other's name: whatever asks for `s3` or `bucket` in this file gets this server's."""
    with start_seaweedfs() as server:
        yield server


@pytest.mark.long
class TestTheSuiteOfTheOtherServer:
    """Every test of test_jobs.py and test_lease.py that uses the server, those that will be added included."""


for _suite in (test_jobs, test_lease):
    for _name, _test in vars(_suite).items():
        if _name.startswith("test_") and {"s3", "bucket", "url"} & {*inspect.signature(_test).parameters}:
            setattr(TestTheSuiteOfTheOtherServer, _name, staticmethod(_test))


def command(bucket: str, *more: str, verb: str = "run") -> tuple[str, ...]:
    """The words of a run over the test's bucket."""
    return (verb, f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", QWEN36, *more)


def test_a_run_on_a_stricter_server_is_complete_and_leaves_no_lease(s3: Any, bucket: str, run: Any) -> None:  # noqa: F811
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(5, f"{i}-")) for i in range(4)})
    result = run(partition_bytes=1000)
    found = stored(result.output)
    assert (result.exit_code, result.error, result.retries) == (0, None, 0)
    assert found.table["id"].to_pylist() == [f"{i}-{j}" for i in range(4) for j in range(5)]
    assert [name for name in found.objects if "lease" in name or "probe" in name] == []


# That a store says so, and what becomes of it, is in test_storage.py; this one finds out by itself.
@pytest.mark.long
def test_a_wrong_secret_is_one_line_and_2_and_writes_nothing(s3: Any, bucket: str, moto: S3Server) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    done = etl(*command(bucket), AWS_SECRET_ACCESS_KEY="not-the-secret")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"s3://{bucket}" in line
    assert "wrong signature; the secret key does not fit the access key" in line
    assert "not-the-secret" not in line
    assert moto.keys(bucket) == ["completions/a.jsonl"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        ((), "nobody", "the store does not know the access key"),
        (("--anon",), ACCESS_KEY, "access denied"),
    ],
)
def test_who_is_not_known_is_refused_in_one_line(
    s3: Any, bucket: str, words: tuple[str, ...], key: str, says: str
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    done = etl(*command(bucket, *words), AWS_ACCESS_KEY_ID=key)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert says in line
    assert SECRET_KEY not in line


@pytest.mark.long
def test_what_is_written_carries_a_checksum_that_the_server_verifies(
    s3: Any,
    bucket: str,
    moto: S3Server,
    run: Any,  # noqa: F811
) -> None:
    with pytest.raises(ClientError):
        s3.put_object(Bucket=bucket, Key="damaged", Body=b"123456789", ChecksumCRC32="AAAAAA==")
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(5))})
    unchecked: list[str] = []

    def note(headers: Any) -> bool:
        names = {name.lower() for name in headers}
        if "content-length" in names and headers.get("Content-Length") != "0":
            checked = any(name.startswith("x-amz-checksum-") for name in names) or "x-amz-trailer" in names
            unchecked.extend([] if checked else [str(dict(headers))])
        return False

    with start_proxy(moto) as proxy:
        proxy.refusals, proxy.refuse_headers = -1, note
        result = run(endpoint_url=proxy.endpoint_url)
    assert (result.exit_code, result.rows, unchecked) == (0, 5, [])
    assert proxy.requests("PUT") > 3


@pytest.mark.long
def test_a_run_beside_a_live_one_is_refused_by_the_store_itself(s3: Any, bucket: str) -> None:
    """Two that find no lease: the conditional write lets one of them in."""
    from etl.errors import UsageError
    from etl.lease import Lease
    from etl.storage import Storage

    place = f"s3://{bucket}/tokens/__etl/lease.json"
    late = Lease(Storage(), place, "late")
    early = Lease(Storage(), place, "early")
    early.acquire(take_over=False, say=lambda _text: None)
    assert early.conditional
    with pytest.raises(UsageError, match="another run began on this output a moment ago"):
        late._begin(None, take_over=False)  # what it does when it has seen no lease
    early.release()
    assert s3.list_objects_v2(Bucket=bucket).get("KeyCount") == 0


@pytest.mark.long
def test_2100_objects_are_listed_over_three_pages_and_run_in_few_partitions(s3: Any, bucket: str, run: Any) -> None:  # noqa: F811
    bodies = {f"{i:04}.jsonl": jsonl(small_rows(1, f"{i:04}-")) for i in range(2100)}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: upload(s3, bucket, dict([item])), bodies.items()))
    size = sum(map(len, bodies.values()))
    planned = jobs.plan(config(bucket, partition_bytes=size // 4))
    assert (planned.objects, planned.bytes, planned.partitions_done) == (2100, size, 0)
    assert planned.partitions in {4, 5}
    result = run(partition_bytes=size // 4)
    assert (result.exit_code, result.partitions, result.rows) == (0, planned.partitions, 2100)
    assert stored(result.output).table["id"].to_pylist() == [f"{i:04}-0" for i in range(2100)]
