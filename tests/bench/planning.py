"""A number of objects on the command line -> seconds and peak memory of planning them, as JSON on standard output."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from etl.ledger import Plan
from etl.partitions import cut_partitions, find_objects
from etl.records import ObjectInfo, Partition

OBJECT_BYTES = 7_000_000
PARTITION_BYTES = 16 * 2**20


class Simulated:
    """A storage whose listing is made up, so that only planning is measured."""

    def __init__(self, objects: int) -> None:
        self.objects = objects

    def check_bucket(self, url: str) -> None:
        """There is one."""

    def stat(self, _url: str) -> ObjectInfo | None:
        """No object has the folder's name."""
        return None

    def find(self, prefix: str) -> Iterator[ObjectInfo]:
        """The listing."""
        return (ObjectInfo(f"{prefix}{i:07d}.jsonl", OBJECT_BYTES, f"{i:032x}") for i in range(self.objects))

    def read(self, *_: object) -> bytes:
        """The first bytes of any object."""
        return b"{}\n"


def plan(objects: int) -> tuple[Partition, ...]:
    """List and cut so many objects, two to a partition."""
    storage: Any = Simulated(objects)
    listing = find_objects(storage, ["s3://bucket/in/"], PARTITION_BYTES)
    return cut_partitions(listing.objects, PARTITION_BYTES, "f", listing.compressed)


def main() -> None:
    """Plan, and write the plan out as it is stored."""
    objects = int(sys.argv[1])
    start = time.perf_counter()
    partitions = plan(objects)
    cut = time.perf_counter() - start
    size = len(Plan("f", {}, ("s3://bucket/in/",), partitions).encode())
    found = {"objects": objects, "partitions": len(partitions), "cut": cut, "all": time.perf_counter() - start}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**found, "plan": size, "peak": peak}))


if __name__ == "__main__":
    main()
