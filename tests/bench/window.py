"""A number of partitions on the command line -> what the client, its scheduler and two workers hold while tasks that
only sleep go through the window that a run has; as JSON on standard output.

The partitions and their graphs are made as in a run; only what a task does is not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import dask
import psutil
from distributed import Client, LocalCluster

from etl import RunConfig, cluster
from etl.records import Partition
from tests.bench.planning import plan

WORKERS = 2
NAP = 0.001
LOOKS = 10


def nap(index: int) -> int:
    """What a task does here."""
    time.sleep(NAP)
    return index


def slide_through(client: Client, scheduler: Any, partitions: Sequence[Partition]) -> list[dict[str, float]]:
    """LOOKS looks, the last of them when all are done: seconds, tasks known at most, resident bytes."""
    config = RunConfig(input="s3://bucket/in/", output="s3://bucket/out/", tokenizer="builtin:qwen3.6", workers=WORKERS)
    me = psutil.Process()

    def submit(chunk: Sequence[cluster.PartTask]) -> Any:
        graph = {task.key: (nap, task.partition.index) for task in chunk}
        return client.get(graph, [*graph], sync=False)

    looks: list[dict[str, float]] = []
    most = 0
    start = time.perf_counter()
    tasks = cluster.part_tasks(partitions, "kit", config)
    for count, (task, result) in enumerate(cluster.slide(client, tasks, submit), 1):
        if result != task.partition.index:
            raise SystemExit(f"partition {task.partition.index} came back as {result!r}")
        most = max(most, len(scheduler.tasks))
        if count % (len(partitions) // LOOKS) == 0:
            workers = sum(child.memory_info().rss for child in me.children(recursive=True))
            seconds = time.perf_counter() - start
            looks.append({"done": count, "s": seconds, "tasks": most, "client": me.memory_info().rss, "rest": workers})
    return looks


def main() -> None:
    """Two to a partition, as many objects as that takes."""
    partitions = plan(2 * int(sys.argv[1]))
    with (
        dask.config.set({**cluster.SETTINGS, **cluster.pace(WORKERS)}),
        LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
    ):
        print(json.dumps(slide_through(client, local.scheduler, partitions)))


if __name__ == "__main__":
    main()
