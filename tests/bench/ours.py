"""A task on standard input -> one `etl.run`, S3 to S3, and what it measured as JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from etl.config import RunConfig
from etl.jobs import RunResult, run
from etl.watcher import Watcher
from tests.bench.gauge import Clock, Reading


class Timer(Watcher):
    """Reads the clock when the cluster is up and when the last receipt is in."""

    def __init__(self, server: list[int]) -> None:
        self._server = server
        self._clock: Clock | None = None
        self._left = 0
        self.stages: Counter[str] = Counter()
        self.reading = Reading(0.0, {}, 0.0, 0.0, 0.0)

    def say(self, text: str) -> None:
        if text.startswith("dashboard"):  # said when all workers have joined
            self._clock = Clock(self._server)

    def start(self, total: int, done: int) -> None:
        self._left = total - done

    def advance(self, receipt: Mapping[str, Any]) -> None:
        self.stages.update(receipt["run"]["stages"])
        self._left -= 1
        if not self._left and self._clock:
            self.reading = self._clock.read()


def measured(result: RunResult, timer: Timer, size: int) -> dict[str, Any]:
    """The fields of `gauge.Measured` that only this process knows."""
    return {
        "rows": result.rows,
        "tokens": result.tokens,
        "bytes": size,
        **timer.reading._asdict(),
        "stages": timer.stages,
        "more": {
            "seconds": result.seconds,
            "rejected": result.rejected,
            "partitions": result.partitions,
            "mismatched_rows": result.mismatched_rows,
            "retries": result.retries,
            "trained": result.trained_share,
        },
    }


def main() -> None:
    """Run the task: `config` (RunConfig's options), `bytes` of the input, `server`: pids of the S3 server."""
    task = json.load(sys.stdin)
    timer = Timer(task["server"])
    result = run(RunConfig(**task["config"]), timer)
    if result.exit_code:
        sys.exit(str(result.error))
    print(json.dumps(measured(result, timer, task["bytes"])))
