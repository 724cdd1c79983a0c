"""The file that ETL_WARM names -> a built kit in this process: the forkserver imports it before it forks workers.

The variable holds the client's process id, a blank and the path. The client writes the file when it has looked at its
input, while this process is still importing. What is loaded before the fork is shared by all workers: 128 of them hold
one vocabulary, not 128. A worker whose run has another kit than its forkserver builds its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Final

from etl import storage
from etl.errors import EtlError
from etl.pipeline import PackedKit, rehearse, settle

# Many workers that start at once on few cores are slow at everything; that is no news of a slow disk.
warnings.filterwarnings("ignore", message="Creating scratch directories", category=UserWarning)

_LOOKS_EVERY: Final = 0.02


def _awaited(path: Path, client: int) -> PackedKit | None:
    """The kit; None where the client has given up, or is gone, which it may have been before this process looked."""
    while not path.exists():
        if not path.parent.exists() or os.getppid() != client:
            return None
        time.sleep(_LOOKS_EVERY)
    # Written by the client a moment ago, readable by its user alone.
    kit: PackedKit = pickle.loads(path.read_bytes())  # noqa: S301
    return kit


if "ETL_WARM" in os.environ:
    settle()
    storage.warm()
    client, path = os.environ["ETL_WARM"].split(" ", 1)
    packed = _awaited(Path(path), int(client))
    with contextlib.suppress(EtlError):  # each worker meets the same error, and the client hears of it there
        if packed is not None:
            rehearse(packed.build())
    # What the collector never touches again is not copied when it runs in a worker.
    gc.collect()
    gc.freeze()
