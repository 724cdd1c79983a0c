"""The one configuration: frozen, checked before anything is read or written, passed by argument."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from etl.errors import UsageError

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "shape": (
        "auto",
        "messages",
        "prompt",
        "conversations",
        "alpaca",
        "batch",
        "choices",
        "text",
        "tokenized",
    ),
    "turns": ("all", "last", "expand"),
    "control_tokens": ("special", "literal", "reject"),
    "truncated_completions": ("mask-end", "reject", "train-end"),
    "over_length": ("reject", "truncate"),
    "engine": ("auto", "gigatoken", "transformers"),
    "on_error": ("reject", "fail"),
    "layout": ("default", "trl", "axolotl", "speculators", "specforge", "megatron-bridge"),
}
"""The options that take one of a few words."""

FIELDS: Final = (
    *("messages", "prompt", "completion", "response", "request", "body", "choices", "conversations", "system"),
    *("instruction", "input", "output", "text", "prompt_token_ids", "token_ids"),
    *("tools", "documents", "chat_template_kwargs", "finish_reason", "usage", "custom_id", "id", "uuid"),
)
"""What a row is read for, and so what `--field` can point elsewhere."""

_UNITS: Final = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter + "b", 1000), (letter + "ib", 1024))
}
_SECRET: Final = re.compile("key|secret|token|password", re.IGNORECASE)


def parse_size(value: int | str, option: str) -> int:
    """Bytes from 16777216, '16MiB' (1024s) or '16MB' (1000s). Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or isinstance(value, bool):
        raise UsageError(f"{_flag(option)} {value!r} is not a size; write bytes, or e.g. 16MiB or 16MB")
    return int(float(match[1]) * unit)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every option of a run, under the command line's names with `_`.

    `input` is a string or a list of them; sizes are an int or '16MiB'; `field`, `role_map`, `template_arg` and
    `storage_option` are mappings. `output` may be absent for `frame` and `preview`. Raises UsageError, one line, on
    any value that cannot be meant.
    """

    input: str | Sequence[str]
    output: str | None = None
    tokenizer: str | None = None
    # model
    revision: str | None = None
    chat_template: str | None = None
    template_arg: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    date: str | None = None
    trust_remote_code: bool = False
    # rows
    shape: str = "auto"
    field: Mapping[str, str] = dataclasses.field(default_factory=dict)
    role_map: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keep: Sequence[str] = ()
    # mask
    turns: str = "all"
    no_train_think_open: bool = False
    no_train_reasoning: bool = False
    no_train_tool_calls: bool = False
    no_train_end: bool = False
    train_empty_think: bool = False
    control_tokens: str = "special"
    truncated_completions: str = "mask-end"
    # size
    max_length: int | None = None
    over_length: str = "reject"
    min_loss_tokens: int = 1
    # tokenizer engine
    engine: str = "auto"
    verify_share: float = 0.002
    # cluster
    workers: int | None = None
    scheduler: str | None = None
    memory_limit: int | str | None = None
    partition_bytes: int | str = "16MiB"
    read_concurrency: int = 32
    dashboard_address: str = "127.0.0.1:8787"
    no_dashboard: bool = False
    tls: bool = False
    profile_report: str | None = None
    # faults
    max_reject_share: float = 0.01
    on_error: str = "reject"
    overwrite: bool = False
    take_over: bool = False
    # storage
    endpoint_url: str | None = None
    profile: str | None = None
    anon: bool = False
    storage_option: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # output
    layout: str = "default"

    def __post_init__(self) -> None:
        inputs = (self.input,) if isinstance(self.input, str) else tuple(self.input)
        if not inputs or not all(isinstance(url, str) and url for url in inputs):
            raise UsageError("name at least one INPUT, e.g. s3://bucket/completions/")
        self._set(input=inputs, partition_bytes=parse_size(self.partition_bytes, "partition_bytes"))
        if self.memory_limit is not None:
            self._set(memory_limit=parse_size(self.memory_limit, "memory_limit"))
        self._set(keep=(self.keep,) if isinstance(self.keep, str) else tuple(self.keep))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{_flag(name)} {getattr(self, name)!r} is unknown; choose {', '.join(allowed)}")
        for name in self.field:
            if name not in FIELDS:
                raise UsageError(f"--field {name} is read by no shape; choose {', '.join(FIELDS)}")
        self._check_numbers()
        self._check_secrets()
        if self.layout != "default":
            raise UsageError(f"--layout {self.layout}: not yet")
        if self.workers is not None and self.scheduler is not None:
            raise UsageError("--workers and --scheduler exclude each other: a running cluster has its own workers")

    def _check_numbers(self) -> None:
        for name, least in (
            ("partition_bytes", 1),
            ("workers", 1),
            ("max_length", 1),
            ("min_loss_tokens", 0),
            ("read_concurrency", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UsageError(f"{_flag(name)} {value!r} must be a whole number of at least {least}")
        for name in ("verify_share", "max_reject_share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise UsageError(f"{_flag(name)} {value!r} must be a share between 0 and 1")
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except (TypeError, ValueError) as error:
                raise UsageError(f"--date {self.date!r} is not a date; write YYYY-MM-DD") from error

    def _check_secrets(self) -> None:
        for name in self.storage_option:
            if _SECRET.search(name):
                raise UsageError(
                    f"--storage-option {name} looks like a credential and is refused; "
                    "give credentials the way AWS tools find them (environment, profile, role)"
                )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def inputs(self) -> tuple[str, ...]:
        """INPUT as a tuple, however it was written."""
        return (self.input,) if isinstance(self.input, str) else tuple(self.input)

    @property
    def keep_fields(self) -> tuple[str, ...]:
        """`keep` as a tuple."""
        return tuple(self.keep)

    @property
    def partition_size(self) -> int:
        """`partition_bytes` in bytes."""
        return parse_size(self.partition_bytes, "partition_bytes")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The template arguments given on the command line: `--chat-template-kwargs`, then each `--template-arg`."""
        return {**self.chat_template_kwargs, **self.template_arg}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
