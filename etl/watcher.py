"""What a run tells whoever watches it: nobody, or standard error; the terminal has a watcher of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any


class Watcher:
    """Keeps silent. Subclass it to show how a run goes."""

    def say(self, text: str) -> None:
        """One line for the user."""

    def warn(self, text: str) -> None:
        """One line that must not be overlooked."""

    def start(self, total: int, done: int) -> None:
        """`total` partitions, of which `done` were done before this run."""

    def advance(self, receipt: Mapping[str, Any]) -> None:
        """One more partition is done; its receipt has rows and tokens."""

    def finish(self) -> None:
        """The run has ended, well or not."""


class Notes(Watcher):
    """Prints what is said on standard error, and no progress: scripts and notebooks."""

    def say(self, text: str) -> None:
        """One line."""
        with contextlib.suppress(OSError):  # a full disk under a log does not end a run
            sys.stderr.write(f"{text}\n")

    def warn(self, text: str) -> None:
        """One line."""
        self.say(f"WARNING: {text}")
