"""The file that ETL_WARM names -> a built kit in this process: the forkserver imports it before it forks workers.

What is loaded before the fork is shared by all workers: 128 of them hold one vocabulary, not 128. A worker whose run
has another kit than its forkserver builds its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import warnings
from pathlib import Path

from etl import storage
from etl.errors import EtlError
from etl.pipeline import rehearse, settle

# Many workers that start at once on few cores are slow at everything; that is no news of a slow disk.
warnings.filterwarnings("ignore", message="Creating scratch directories", category=UserWarning)

if "ETL_WARM" in os.environ:
    settle()
    # Written by the client a moment ago, readable by its user alone.
    kit = pickle.loads(Path(os.environ["ETL_WARM"]).read_bytes())  # noqa: S301
    with contextlib.suppress(EtlError):  # each worker meets the same error, and the client hears of it there
        rehearse(kit.build())
    storage.warm()
    # What the collector never touches again is not copied when it runs in a worker.
    gc.collect()
    gc.freeze()
