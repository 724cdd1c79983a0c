"""The one configuration: frozen, checked before anything is read or written, passed by argument."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import UnionType
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
    *("reasoning_content", "reasoning", "thinking"),
    *("tools", "documents", "chat_template_kwargs", "finish_reason", "usage", "custom_id", "id", "uuid"),
)
"""What a row is read for, and so what `--field` can point elsewhere."""

RENDERED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What a template is rendered with, beside its arguments."""

LEAST_MEMORY: Final = 64 * 2**20
"""A worker's own code takes more: with less, Dask would end each as soon as it begins."""

_UNITS: Final = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for unit, base in ((letter + "b", 1000), (letter + "ib", 1024))
}
_SECRET: Final = re.compile("key|secret|token|password", re.IGNORECASE)
_NO_SECRETS: Final = frozenset({"SSEKMSKeyId", "BucketKeyEnabled"})
"""Names of parameters of S3 requests that look like credentials and are none."""

_TYPES: Final[Mapping[str, type | UnionType]] = {
    "bool": bool,
    "str": str,
    "str | None": str | None,
    "int": int,
    "int | None": int | None,
}
_MEANT: Final = {
    "bool": "true or false",
    "str": "text; in YAML, put it in quotes",
    "str | None": "text; in YAML, put it in quotes",
    "int": "a whole number",
    "int | None": "a whole number",
    "Mapping[str, Any]": "names with values",
    "Mapping[str, str]": "names with texts",
    "Sequence[str]": "a list of texts",
    "str | Sequence[str]": "a text or a list of them",
}


def parse_size(value: int | str, option: str) -> int:
    """Bytes from 16777216, '16MiB' (1024s) or '16MB' (1000s). Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or isinstance(value, bool):
        raise UsageError(f"{_flag(option)} {str(value)[:40]!r} is not a size; write bytes, or e.g. 16MiB or 16MB")
    return int(Fraction(match[1]) * unit)


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
        for option in dataclasses.fields(self):
            self._set(**{option.name: _read(option.name, str(option.type), getattr(self, option.name))})
        if not self.input or not all(self.input):
            raise UsageError("name at least one INPUT, e.g. s3://bucket/completions/")
        if self.output == "":
            raise UsageError("OUTPUT is empty; name one, e.g. s3://bucket/tokens/")
        self._set(partition_bytes=parse_size(self.partition_bytes, "partition_bytes"))
        if self.memory_limit is not None:
            self._set(memory_limit=parse_size(self.memory_limit, "memory_limit"))
            if int(self.memory_limit) < LEAST_MEMORY:
                raise UsageError(
                    f"--memory-limit {self.memory_limit} is less than any worker needs; give at least 64MiB"
                )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"{_flag(name)} {getattr(self, name)!r} is unknown; choose {', '.join(allowed)}")
        if self.layout != "default":
            raise UsageError(f"--layout {self.layout}: not yet")
        self._check_numbers()
        self._check_rows()
        self._check_template()
        self._check_storage()
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
            if value is not None and value < least:
                raise UsageError(f"{_flag(name)} {value!r} must be a whole number of at least {least}")
        for name in ("verify_share", "max_reject_share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise UsageError(f"{_flag(name)} {value!r} must be a share between 0 and 1")

    def _check_rows(self) -> None:
        for name, path in self.field.items():
            if name not in FIELDS:
                raise UsageError(f"--field {name} is read by no shape; choose {', '.join(FIELDS)}")
            if not path:
                raise UsageError(f"--field {name}= points nowhere; write e.g. {name}=my.path")
        if "" in self.keep:
            raise UsageError("--keep needs the name of a field")

    def _check_template(self) -> None:
        if self.date is not None:
            try:
                day = datetime.date.fromisoformat(self.date).isoformat()
            except ValueError:
                day = ""
            if day != self.date:  # 20260102 is the same day, but would be another run's
                raise UsageError(f"--date {self.date!r} is not a date; write YYYY-MM-DD")
        for name, value in self.template_kwargs.items():
            if name in RENDERED:
                raise UsageError(f"the template argument {name} is filled from each row and cannot be given")
            try:
                json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise UsageError(
                    f"the template argument {name} is no JSON value: {value!r}; put it in quotes"
                ) from error

    def _check_storage(self) -> None:
        for name, value in self.storage_option.items():
            if _SECRET.search(name) or _holds_secret(value):
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
        return tuple(self.input)

    @property
    def keep_fields(self) -> tuple[str, ...]:
        """`keep` as a tuple."""
        return tuple(self.keep)

    @property
    def partition_size(self) -> int:
        """`partition_bytes` in bytes."""
        return int(self.partition_bytes)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The template arguments given on the command line: `--chat-template-kwargs`, then each `--template-arg`."""
        return {**self.chat_template_kwargs, **self.template_arg}


def _read(name: str, kind: str, value: Any) -> Any:
    """The value of an option whose annotation is `kind`, in its one form. Raises UsageError on another type."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif type(value) is datetime.date:  # as YAML reads one
        value = value.isoformat()
    if kind.startswith("Mapping"):
        value = {} if value is None else value  # as YAML reads a name with nothing behind it
        fits = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
        if fits and (kind == "Mapping[str, Any]" or all(isinstance(item, str) for item in value.values())):
            return dict(value)
    elif "Sequence" in kind:
        value = () if value is None else (value,) if isinstance(value, str) else value
        if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
            items = tuple(os.fspath(item) if isinstance(item, os.PathLike) else item for item in value)
            if all(isinstance(item, str) for item in items):
                return items
    elif kind not in _TYPES or (isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))):
        return value
    shown = "" if name == "storage_option" else f" {value!r}"
    raise UsageError(f"{_flag(name)}{shown} must be {_MEANT[kind]}")


def _holds_secret(value: Any) -> bool:
    """Whether a storage option's value names a credential, or is a URL that carries one."""
    if isinstance(value, Mapping):
        return any(
            (_SECRET.search(str(key)) and key not in _NO_SECRETS) or _holds_secret(item) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return any(map(_holds_secret, value))
    return isinstance(value, str) and "://" in value and "@" in value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
