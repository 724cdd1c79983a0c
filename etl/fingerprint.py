"""TokenizerSpec + RunConfig -> fingerprint: everything that can change a part's bytes, as named values and one hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from etl.config import RunConfig
from etl.records import TokenizerSpec

PIPELINE_VERSION: Final = 7
"""Raised by hand when the same input and options would give other bytes than before."""

OPTIONS: Final = (
    "date",
    "shape",
    "field",
    "role_map",
    "keep",
    "turns",
    "no_train_think_open",
    "no_train_reasoning",
    "no_train_tool_calls",
    "no_train_end",
    "train_empty_think",
    "control_tokens",
    "truncated_completions",
    "max_length",
    "over_length",
    "min_loss_tokens",
    "partition_bytes",
    "layout",
)
"""The options that count: not workers, scheduler, engine, limits, endpoint, storage or display."""


def settings(spec: TokenizerSpec, config: RunConfig) -> dict[str, Any]:
    """The named values that a part's bytes depend on; long ones as their SHA-256. JSON-safe, keys sorted."""
    values = {name: getattr(config, name) for name in OPTIONS}
    values |= {
        "pipeline_version": PIPELINE_VERSION,
        "tokenizer": spec.sha256,
        "chat_template": _sha256(spec.chat_template or ""),
        "special_tokens": dict(spec.special_tokens),
        "template_arg": config.template_kwargs,
    }
    plain: dict[str, Any] = json.loads(json.dumps(values, sort_keys=True))
    return plain


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex) of `settings`' values."""
    return _sha256(json.dumps(values, sort_keys=True, separators=(",", ":")))


_SHOWN: Final = 40


def difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first few options that differ, each as `name (was …, is …)`."""
    changed = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
    return ", ".join(f"{name} (was {_short(was.get(name))}, is {_short(now.get(name))})" for name in changed[:3])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else text[:12] + "…"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
