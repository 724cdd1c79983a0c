"""The file that ETL_WARM names -> a built kit in this process: the forkserver imports it before it forks workers.

The variable holds the client's process id, a blank and the path. The client writes the file when it has looked at its
input, while this process is still importing. What is loaded before the fork is shared by all workers: 128 of them hold
one vocabulary, not 128. A worker whose run has another kit than its forkserver builds its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from pathlib import Path
from typing import Final

from etl import cluster, storage
from etl.engines import return_freed_memory
from etl.errors import EtlError
from etl.pipeline import read_kit, rehearse, tune_worker

# Many workers that start at once on few cores are slow at everything; that is no news of a slow disk.
warnings.filterwarnings("ignore", message="Creating scratch directories", category=UserWarning)

_LOOKS_EVERY: Final = 0.02


def _await(path: Path, client: int) -> bool:
    """Whether the kit has come; not where the client has given up, or is gone, maybe before this process looked."""
    while not path.exists():
        if not path.parent.exists() or os.getppid() != client:
            return False
        time.sleep(_LOOKS_EVERY)
    return True


if "ETL_WARM" in os.environ:
    tune_worker()
    storage.warm()
    client, path = os.environ["ETL_WARM"].split(" ", 1)
    if _await(Path(path), int(client)):
        with contextlib.suppress(EtlError):  # each worker meets the same error, and the client hears of it there
            rehearse(read_kit(Path(path)).build())
    cluster.ask_beforehand()
    # What the collector never touches again is not copied when it runs in a worker, nor what the allocator has not kept
    # to be filled anew.
    gc.collect()
    return_freed_memory()
    gc.freeze()
