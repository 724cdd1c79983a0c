"""One run at a time writes an output: the dead are succeeded, the living respected."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etl import lease
from etl.errors import LeaseLost, StorageError, UsageError
from etl.lease import Lease, hold, require_held
from etl.storage import Storage
from tests.servers import start_proxy


def silent(_text: str) -> None:
    """Nobody listens."""


def take(storage: Storage, url: str, run: str = "run-1", *, take_over: bool = False) -> Lease:
    held = Lease(storage, url, run)
    held.acquire(take_over=take_over, say=silent)
    return held


@pytest.fixture(params=["s3", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('bucket')}/tokens/__etl/lease.json"
    return str(tmp_path / "tokens" / "__etl" / "lease.json")


@pytest.fixture
def storage() -> Storage:
    return Storage()


def write(storage: Storage, url: str, **holder: object) -> None:
    storage.put(url, json.dumps({"run": "other", **holder}).encode())


def test_a_lease_names_its_run_while_it_is_held_and_leaves_nothing_when_released(storage: Storage, url: str) -> None:
    held = take(storage, url)
    assert json.loads(storage.get(url) or b"")["run"] == "run-1"
    assert json.loads(storage.get(url) or b"")["pid"] == os.getpid()
    held.release()
    assert storage.get(url) is None
    assert storage.list(url.rpartition("/")[0]) == ()


def test_a_live_run_on_this_machine_is_refused_at_once(storage: Storage, url: str) -> None:
    held = take(storage, url)
    with pytest.raises(UsageError, match=f"run-1.*pid {os.getpid()}.*wait for it to end"):
        take(storage, url, "run-2")
    assert json.loads(storage.get(url) or b"")["run"] == "run-1"
    held.release()


def test_a_dead_run_on_this_machine_is_succeeded_at_once(storage: Storage, url: str) -> None:
    code = (
        "import sys; from etl.lease import Lease; from etl.storage import Storage; import os\n"
        "Lease(Storage(), sys.argv[1], 'dead').acquire(take_over=False, say=print); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, url], check=False, cwd=Path(__file__).parents[1])
    assert json.loads(storage.get(url) or b"")["run"] == "dead"
    held = take(storage, url)
    assert json.loads(storage.get(url) or b"")["run"] == "run-1"
    held.release()


def test_a_later_process_with_the_dead_one_s_pid_is_not_taken_for_it(storage: Storage, url: str) -> None:
    held = take(storage, url)
    holder = json.loads(storage.get(url) or b"")
    held.release()
    write(storage, url, **{**holder, "start": "1", "run": "other"})
    take(storage, url).release()


def test_another_machine_s_lease_is_waited_for_and_taken_when_it_was_not_renewed(
    storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 0.0)
    write(storage, url, host="elsewhere", boot="1", pid=1)
    take(storage, url).release()


def test_a_renewal_seen_while_waiting_is_refused(storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(storage, url, host="elsewhere", boot="1", pid=1)
    said: list[str] = []

    def renew(text: str) -> None:
        said.append(text)
        write(storage, url, host="elsewhere", boot="1", pid=1, renewals=1)

    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.01)
    with pytest.raises(UsageError, match="host elsewhere, pid 1"):
        Lease(storage, url, "run-1").acquire(take_over=False, say=renew)
    assert "waiting up to" in said[0]


def test_take_over_takes_it_and_the_robbed_run_stops(storage: Storage, url: str) -> None:
    robbed = Lease(storage, url, "run-1", renew_seconds=0.5)
    robbed.acquire(take_over=False, say=silent)
    robber = take(storage, url, "robber", take_over=True)
    thread = robbed._thread
    assert thread is not None
    thread.join(timeout=30)
    with pytest.raises(LeaseLost, match=r"robber.*taken this output over"):
        robbed.check()
    robbed.release()
    assert json.loads(storage.get(url) or b"")["run"] == "robber"
    robber.release()
    assert storage.get(url) is None


def test_a_run_that_slept_learns_of_its_robber_when_it_asks(storage: Storage, url: str) -> None:
    robbed = take(storage, url)
    robbed.confirm()
    require_held(storage, url, "run-1")
    robber = take(storage, url, "robber", take_over=True)
    for ask in (robbed.confirm, robbed.confirm, lambda: require_held(storage, url, "run-1")):
        with pytest.raises(LeaseLost, match=r"robber.*taken this output over"):
            ask()
    assert json.loads(storage.get(url) or b"")["run"] == "robber"
    robber.confirm()
    robber.release()
    with pytest.raises(LeaseLost, match="another run has taken this output over, and has ended"):
        require_held(storage, url, "run-1")
    robbed.release()


def test_a_robbed_run_stops_where_the_store_knows_no_conditions_too(storage: Storage, url: str) -> None:
    robbed = take(storage, url)
    robbed.conditional = False
    robber = take(storage, url, "robber", take_over=True)
    with pytest.raises(LeaseLost, match=r"robber.*taken this output over"):
        robbed.confirm()
    assert json.loads(storage.get(url) or b"")["run"] == "robber"
    robber.release()
    robbed.release()


def hold_for_three_renewals(storage: Storage, url: str) -> None:
    """Hold the lease and give it back, which leaves nothing."""
    held = Lease(storage, url, "run-1", renew_seconds=0.01)
    held.acquire(take_over=False, say=silent)
    while json.loads(storage.get(url) or b"")["renewals"] < 3:
        held.check()
    held.release()
    assert storage.get(url) is None


def test_a_lease_that_was_renewed_stays_with_its_run(storage: Storage, url: str) -> None:
    hold_for_three_renewals(storage, url)


def lose_a_reply(monkeypatch: pytest.MonkeyPatch, renewals: int) -> None:
    """The store keeps the lease of that many renewals, once, and says that it could not."""
    put, lost = Storage.put, threading.Event()

    def put_silently(storage: Storage, url: str, data: bytes, **condition: Any) -> str:
        etag = put(storage, url, data, **condition)
        if f'"renewals": {renewals}'.encode() in data and not lost.is_set():
            lost.set()
            raise StorageError("made up: no reply")
        return etag

    monkeypatch.setattr(Storage, "put", put_silently)


def test_a_run_whose_renewal_was_stored_without_a_reply_goes_on(
    storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_a_reply(monkeypatch, renewals=1)
    hold_for_three_renewals(storage, url)


def test_a_lease_that_was_stored_without_a_reply_is_refused_and_removed(
    storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_a_reply(monkeypatch, renewals=0)
    with (
        pytest.raises(UsageError, match="no reply"),
        hold(storage, url, "run-1", take_over=False, say=silent),
    ):
        pytest.fail("the run goes on without a lease")
    assert storage.get(url) is None


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT is a KeyboardInterrupt, whatever this process inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("written", "times"), [("probe-", 1), ("probe-", 2), ("lease.json", 1)])
def test_an_interrupt_or_two_while_the_lease_is_acquired_leave_nothing(
    s3: Any, bucket: str, moto: str, written: str, times: int
) -> None:
    main, left = threading.main_thread(), threading.Event()
    interrupts = iter([signal.SIGINT] * times)

    def interrupt(method: str, path: str, _count: int) -> bool:
        if method == "PUT" and written in path and (number := next(interrupts, None)):
            signal.pthread_kill(main.ident or 0, number)
            left.wait(1)  # the store is slow: whoever does not wait for its reply has left by then
        return False

    with start_proxy(moto) as proxy:
        proxy.refusals, proxy.refuse_when = -1, interrupt
        storage = Storage(endpoint_url=proxy.endpoint_url)
        with (
            pytest.raises(KeyboardInterrupt),
            hold(storage, f"s3://{bucket}/tokens/__etl/lease.json", "run-1", take_over=False, say=silent),
        ):
            pytest.fail("nobody was interrupted")
        left.set()
        while proxy.in_flight:
            pass
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_a_lease_that_may_not_be_deleted_is_said(bucket: str, moto: str) -> None:
    said: list[str] = []
    with start_proxy(moto) as proxy:
        url, store = f"s3://{bucket}/tokens/__etl/lease.json", Storage(endpoint_url=proxy.endpoint_url)
        with hold(store, url, "run-1", take_over=False, say=said.append):
            proxy.refusals, proxy.refusal = -1, (403, "AccessDenied", "Access Denied")
            proxy.refuse_when = lambda method, path, _count: "delete" in path or method == "DELETE"
    (line,) = said
    assert line.startswith(f"{url} stays behind: ")
    assert "access denied" in line
    assert line.endswith("it lapses after 60 s")


def test_the_end_of_a_run_waits_a_few_seconds_for_a_silent_store_and_says_so(
    storage: Storage, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, renewing, answer = Storage.put, threading.Event(), threading.Event()
    said: list[str] = []

    def hang(storage: Storage, url: str, data: bytes, **condition: Any) -> str:
        if b'"renewals": 1' in data:
            renewing.set()
            answer.wait(10)
        return put(storage, url, data, **condition)

    monkeypatch.setattr(Storage, "put", hang)
    monkeypatch.setattr(lease, "Lease", functools.partial(Lease, renew_seconds=0.01))
    monkeypatch.setattr(lease, "RELEASE_SECONDS", 0.01)
    with hold(storage, url, "run-1", take_over=False, say=said.append) as held:
        assert renewing.wait(10)
    assert said == [f"{url} stays behind: the store does not answer; it lapses after 60 s"]
    answer.set()
    monkeypatch.setattr(lease, "RELEASE_SECONDS", 10)
    assert held.release() is None
    assert storage.get(url) is None
