"""What a run tells whoever watches it: nobody here; the terminal has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Watcher:
    """Keeps silent. Subclass it to show how a run goes."""

    def say(self, text: str) -> None:
        """One line for the user."""

    def start(self, total: int, done: int) -> None:
        """`total` partitions, of which `done` were done before this run."""

    def advance(self, receipt: Mapping[str, Any]) -> None:
        """One more partition is done; its receipt has rows and tokens."""

    def finish(self) -> None:
        """The run has ended, well or not."""
