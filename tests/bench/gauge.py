"""A running program -> what it costs: peak memory of all its processes, their CPU seconds, the machine's idle share,
what other machines took of it, how long workers waited.

Memory is PSS: a page that n processes share counts for 1/n in each, so that the sum is what the program takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent.parent
ONE_THREAD: Final = {
    "RAYON_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ARROW_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DO_NOT_TRACK": "true",
    "SCARF_NO_ANALYTICS": "true",
    "DAFT_ANALYTICS_ENABLED": "0",
    "DAFT_PROGRESS_BAR": "0",
}
"""The environment of every program here: one native thread a process, and nothing that calls home."""

_SAMPLE_SECONDS: Final = 0.5
_GLANCE_SECONDS: Final = 0.1
_SHARE: Final = 0.05
"""Of one core, for looking at memory or threads."""

_FIELDS: Final = ("Pss:", "Private_Clean:", "Private_Dirty:")


@dataclass(frozen=True, slots=True)
class Measured:
    """One program's run. Bytes are of JSON lines read; `whole` and `work` are seconds.

    `work`: without start-up, from all processes being ready to the last row written. `cpu`: seconds by who spent them
    during `work`. `idle`, `stolen`, `waiting`: as a `Reading` has them. `peak`: bytes of all processes; `private`: the
    largest process's own at that moment. `stages`: seconds by stage, of all workers.
    """

    name: str
    rows: int
    tokens: int
    bytes: int
    whole: float
    work: float
    cpu: Mapping[str, float] = field(default_factory=dict)
    idle: float = 0.0
    stolen: float = 0.0
    waiting: float = 0.0
    peak: int = 0
    private: int = 0
    stages: Mapping[str, float] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Rows a second, without start-up."""
        return self.rows / self.work


class Reading(NamedTuple):
    """Seconds since a clock's beginning, CPU seconds by who spent them, and shares of that time.

    `idle`: of the machine's cores with nothing to do; `stolen`: of them taken by the machines beside this one (a
    hypervisor's steal). `waiting`: of the workers' time in which no thread of theirs was running or ready to run.
    """

    work: float
    cpu: Mapping[str, float]
    idle: float
    stolen: float
    waiting: float


class Clock:
    """From a moment on: what this process, its children and the S3 server do, and what is left of the machine.

    A child that ended in between is not counted. Workers are the children's children: a forkserver's.
    """

    def __init__(self, server: Iterable[int] = ()) -> None:
        self._server = [psutil.Process(pid) for pid in server]
        self._before = self._now()
        me = psutil.Process()
        self._waiting = Waiting([p.pid for p in me.children(recursive=True) if p.ppid() != me.pid])

    def _now(self) -> tuple[float, dict[str, dict[int, float]], float, float]:
        me = psutil.Process()
        who = {"client": [me], "workers": me.children(recursive=True), "server": self._server}
        spent = {name: {p.pid: seconds for p in processes if (seconds := _cpu(p))} for name, processes in who.items()}
        machine = psutil.cpu_times()
        return time.monotonic(), spent, machine.idle + machine.iowait, machine.steal

    def read(self) -> Reading:
        """What was seen since the beginning; the last reading, for the workers."""
        (start, before, idle, stolen), (end, after, idle_now, stolen_now) = self._before, self._now()
        spent = {
            name: sum(seconds - before[name].get(pid, 0.0) for pid, seconds in found.items())
            for name, found in after.items()
        }
        seconds = (end - start) * (os.cpu_count() or 1)
        return Reading(
            end - start, spent, (idle_now - idle) / seconds, (stolen_now - stolen) / seconds, self._waiting.stop()
        )


def _cpu(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


class Sampler:
    """Calls `look` again and again in a thread of its own, until `stop`; seldomer where looking takes long."""

    def __init__(self, look: Callable[[], None], seconds: float) -> None:
        self._look = look
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        wait = self._seconds
        while not self._over.wait(wait):
            start = time.thread_time()
            self._look()
            wait = max(self._seconds, (time.thread_time() - start) / _SHARE)

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()


class Waiting:
    """Looks at the threads of processes, again and again, until `stop`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._looks = self._waits = 0
        self._sampler = Sampler(self._look, _GLANCE_SECONDS)

    def _look(self) -> None:
        self._looks += len(self._pids)
        self._waits += sum(not _is_runnable(pid) for pid in self._pids)

    def stop(self) -> float:
        """Look no more; the share of looks in which a process had nothing to do."""
        self._sampler.stop()
        return self._waits / self._looks if self._looks else 0.0


def _is_runnable(pid: int) -> bool:
    """Whether any thread of the process runs or waits for nothing but a core."""
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if path.read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


class Memory:
    """Looks at a process and all below it, again and again, until `stop`."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self.private = 0
        self._root = psutil.Process(pid)
        self._sampler = Sampler(self._look, _SAMPLE_SECONDS)

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            found = [_memory(process.pid) for process in (self._root, *self._root.children(recursive=True))]
            total = sum(pss for pss, _ in found)
            if total > self.peak:
                self.peak = total
                self.private = max(private for _, private in found)

    def stop(self) -> None:
        """Look no more."""
        self._sampler.stop()


def _memory(pid: int) -> tuple[int, int]:
    """(PSS, private bytes) of a process; zeros where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {words[0]: int(words[1]) for line in lines if (words := line.split())[0] in _FIELDS}
    return kib.get("Pss:", 0) * 1024, sum(kib.get(name, 0) for name in _FIELDS[1:]) * 1024


def measure(name: str, module: str, task: Mapping[str, Any], env: Mapping[str, str]) -> Measured:
    """Run the module's `main`, give it `task` as JSON on standard input, read what it measured off its last line.

    `whole` is the process's wall time: the imports and the start of its processes are in it.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {module} import main; main()"],
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD, **env, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    memory = Memory(process.pid)
    out, err = process.communicate(json.dumps(task))
    whole = time.monotonic() - start
    memory.stop()
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{err[-3000:]}{out[-1000:]}")
    return Measured(
        name=name, whole=whole, peak=memory.peak, private=memory.private, **json.loads(out.splitlines()[-1])
    )
