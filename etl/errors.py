"""Every error etl raises on purpose, and the exit code each one ends a command with.

    EtlError                     1  something to look at
    ├── UsageError               2  wrong usage, configuration, input or output: nothing was written
    ├── LeaseLost                1  another run took the output over
    ├── StorageError             1  a read, write or listing failed for good
    │   ├── ObjectChanged        1  an object is not what was planned
    │   └── WriteConflict        1  a conditional write found another state than it required
    └── RowError                 -  one row is rejected; the run goes on

All take positional arguments only, so that they survive pickling between processes.
"""

from __future__ import annotations

import re
from typing import ClassVar


class EtlError(Exception):
    """The run ended with something to look at. The message is one line: where, what was seen, what to do."""

    exit_code: ClassVar[int] = 1


class UsageError(EtlError):
    """Wrong usage, configuration, input or output, found before anything is written."""

    exit_code: ClassVar[int] = 2


class LeaseLost(EtlError):
    """Another run has taken the output over; this one stops and leaves what it wrote."""


class StorageError(EtlError):
    """A read, write or listing failed for good; the message holds no secret."""


class ObjectChanged(StorageError):
    """An object was replaced, cut or deleted after it was listed; what was planned cannot be read any more."""


class WriteConflict(StorageError):
    """A conditional write found another state than the one it required; nothing was written."""


class RowError(EtlError):
    """One row cannot become an example: `reason` is one of `records.REASONS`, `detail` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def scrub(message: str) -> str:
    """One line of at most 300 characters without anything that looks like a credential."""
    line = " ".join(message.split())
    line = re.sub(r"\b(AKIA|ASIA)[A-Z0-9]{8,}", "***", line)
    line = re.sub(r"(?i)((?:signature|credential|token|secret|password|key)\s*[=:]\s*)\S+", r"\1***", line)
    return re.sub(r"//[^\s@]+@", "//***@", line)[:300]
