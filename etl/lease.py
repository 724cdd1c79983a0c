"""OUTPUT/__etl/lease.json: one run at a time writes an output; a dead one is succeeded, a live one respected."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from etl.errors import LeaseLost, StorageError, UsageError, WriteConflict
from etl.storage import ObjectStat, Storage

RENEW_SECONDS: Final = 15.0
EXPIRE_SECONDS: Final = 60.0
"""A lease on another machine that was not renewed for this long, by the store's clock, has no owner."""

RELEASE_SECONDS: Final = 5.0
"""How long the end of a run waits for a store that does not answer."""

_POLL_SECONDS: Final = 2.0


class Lease:
    """This run's hold on an output, kept by a thread. `lost` says why it is gone, once another run has taken it."""

    def __init__(self, storage: Storage, url: str, run_id: str, renew_seconds: float = RENEW_SECONDS) -> None:
        self._storage = storage
        self._url = url
        self._renew_seconds = renew_seconds
        self._etag: str | None = None
        self._renewals = 0
        self._done = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._owner = _owner(run_id)
        self._renewing = threading.Lock()
        self.conditional = True
        self.lost: str | None = None
        self._refused: str | None = None

    def acquire(self, *, take_over: bool, say: Callable[[str], None]) -> None:
        """Become the owner. Raises UsageError where a live run holds the output, or the lease cannot be written."""
        try:
            found = self._storage.get_with_stat(self._url)
            stat = None if found is None else self._turn(*found, take_over=take_over, say=say)
        except StorageError as error:
            raise UsageError(str(error)) from error
        begun: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=(stat, take_over, begun), name="etl-lease", daemon=True)
        self._thread.start()
        begun.result()
        if not self.conditional:
            say("the store ignores conditional writes: two runs started in the same second would not see each other")

    def _turn(self, body: bytes, stat: ObjectStat, *, take_over: bool, say: Callable[[str], None]) -> ObjectStat:
        holder = _decode(body)
        if take_over:
            return stat
        if not _same_boot(holder):
            return self._wait_until_stale(holder, stat, say)
        if _alive(holder):
            raise UsageError(f"{_describe(holder, self._url)} is at work on this output; wait for it to end")
        return stat

    def _wait_until_stale(self, holder: dict[str, Any], stat: ObjectStat, say: Callable[[str], None]) -> ObjectStat:
        left = EXPIRE_SECONDS - (stat.now - stat.modified)
        if left > 0:
            say(f"{_describe(holder, self._url)} may be at work here; waiting up to {left:.0f} s (--take-over)")
        while stat.now - stat.modified < EXPIRE_SECONDS:
            time.sleep(_POLL_SECONDS)
            now = self._storage.stat(self._url)
            if now is None:
                raise UsageError(f"{_describe(holder, self._url)} has just ended; run the same command again")
            if now.etag != stat.etag:
                raise UsageError(f"{_describe(holder, self._url)} is at work on this output; wait for it to end")
            stat = now
        return stat

    def _live(self, stat: ObjectStat | None, take_over: bool, begun: Future[None]) -> None:
        """Write, renew and remove the lease. Ctrl-C leaves a request of the main thread under way, none of these."""
        try:
            self._begin(stat, take_over)
        except UsageError as error:
            begun.set_exception(error)
        else:
            begun.set_result(None)
            self._keep()
        finally:
            begun.cancel()  # does nothing where the waiting one has its answer
            self._remove()
            self._ended.set()

    def _begin(self, stat: ObjectStat | None, take_over: bool) -> None:
        try:
            self.conditional = self._storage.supports_conditions(self._url.rpartition("/")[0])
            if take_over:
                stat = self._storage.stat(self._url)  # its owner may have renewed it meanwhile
            if not self._done.is_set():
                self._write(if_match=stat.etag if stat else None, if_none_match=stat is None)
        except LeaseLost as error:
            raise UsageError(f"{self._url}: another run began on this output a moment ago; wait for it") from error
        except StorageError as error:
            raise UsageError(str(error)) from error

    def _write(self, *, if_match: str | None = None, if_none_match: bool = False) -> None:
        body = json.dumps({**self._owner, "renewals": self._renewals}, sort_keys=True).encode()
        if not self.conditional:
            if self._etag:
                require_held(self._storage, self._url, self._owner["run"])
            if_match, if_none_match = None, False
        try:
            self._etag = self._storage.put(self._url, body, if_match=if_match, if_none_match=if_none_match)
        except WriteConflict as error:
            found = self._storage.get_with_stat(self._url)
            if found is None or not self._is_ours(found[0]):
                raise _lost(found[0] if found else None) from error
            # an earlier write of ours was stored, but its reply was lost
            self._etag = self._storage.put(self._url, body, if_match=found[1].etag)

    def _keep(self) -> None:
        while self.lost is None and not self._done.wait(self._renew_seconds):
            with contextlib.suppress(StorageError):  # away for a moment: the next renewal comes in time
                self._renew()

    def _renew(self) -> None:
        with self._renewing:
            self._renewals += 1
            try:
                self._write(if_match=self._etag)
            except LeaseLost as error:
                self.lost = self.lost or str(error)

    def _remove(self) -> None:
        try:
            found = self._storage.get(self._url)
            if found is not None and self._is_ours(found):
                self._storage.delete([self._url])
        except StorageError as error:
            self._refused = str(error) if self._etag else None  # else there is nothing of ours

    def _is_ours(self, body: bytes) -> bool:
        return bool(_decode(body).get("run") == self._owner["run"])

    def confirm(self) -> None:
        """Renew the lease now: this run may have slept. Raises LeaseLost where another has taken the output over."""
        self._renew()
        self.check()

    def check(self) -> None:
        """Raise LeaseLost where another run is known to have taken the output over."""
        if self.lost is not None:
            raise LeaseLost(f"{self.lost}; this run stops, what it wrote stays")

    def release(self) -> str | None:
        """Give the output free, unless another run holds it by now. Says why the lease stays where it does."""
        self._done.set()
        if self._thread is None:
            return None
        try:
            ended = self._ended.wait(RELEASE_SECONDS)  # an interrupted join takes the thread for ended (bpo-45274)
        except KeyboardInterrupt:  # a second one: it comes late instead of never
            self._ended.wait(RELEASE_SECONDS)
            raise
        return self._refused if ended else "the store does not answer"


@contextlib.contextmanager
def hold(storage: Storage, url: str, run_id: str, *, take_over: bool, say: Callable[[str], None]) -> Iterator[Lease]:
    """The lease at `url` for as long as the context lasts."""
    lease = Lease(storage, url, run_id)
    try:
        lease.acquire(take_over=take_over, say=say)
        yield lease
    finally:
        if reason := lease.release():
            say(f"{url} stays behind: {reason}; it lapses after {EXPIRE_SECONDS:.0f} s")


def require_held(storage: Storage, url: str, run_id: str) -> None:
    """Raise LeaseLost where the lease at `url` is not the run's: a worker may have slept while another took it over."""
    body = storage.get(url)
    if body is None or _decode(body).get("run") != run_id:
        raise _lost(body)


def _lost(body: bytes | None) -> LeaseLost:
    if body is None:
        return LeaseLost("another run has taken this output over, and has ended")
    return LeaseLost(f"{_describe(_decode(body), 'the lease')} has taken this output over")


def _owner(run_id: str) -> dict[str, Any]:
    return {
        "run": run_id,
        "host": platform.node(),
        "boot": _boot_id(),
        "pid": os.getpid(),
        "start": _started(os.getpid()),
    }


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """The kernel's start time of a process: tells it from a later one with the same pid. None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _decode(body: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(body)
    except ValueError:
        holder = None
    return holder if isinstance(holder, dict) else {}


def _same_boot(holder: dict[str, Any]) -> bool:
    return bool(_boot_id()) and (holder.get("host"), holder.get("boot")) == (platform.node(), _boot_id())


def _alive(holder: dict[str, Any]) -> bool:
    pid = holder.get("pid")
    return isinstance(pid, int) and _started(pid) is not None and _started(pid) == holder.get("start")


def _describe(holder: dict[str, Any], url: str) -> str:
    if not holder:
        return f"a run that {url} does not name"
    return f"run {holder.get('run')} (host {holder.get('host')}, pid {holder.get('pid')})"
