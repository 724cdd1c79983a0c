"""Which options make other parts, so that a run under them is refused, and which do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from etl.config import CHOICES, RunConfig
from etl.fingerprint import digest, settings
from etl.records import TokenizerSpec
from etl.terminal import GROUPS

SPEC = TokenizerSpec("test", None, "{}", "{{ messages }}", {"eos_token": "<end>"}, "0" * 64)
COUNTING = ("rows", "mask", "size")
KINDS: dict[str, Any] = {
    "bool": True,
    "int": 7,
    "int | None": 7,
    "Mapping[str, str]": {"messages": "other"},
    "Sequence[str]": ["other"],
}
OTHER = {
    option: next((choice for choice in CHOICES[option] if choice != field.default), None)
    if option in CHOICES
    else KINDS[str(field.type)]
    for group in COUNTING
    for flag, _, _ in GROUPS[group]
    for option in [flag.removeprefix("--").replace("-", "_")]
    for field in dataclasses.fields(RunConfig)
    if field.name == option
}


def fingerprint(spec: TokenizerSpec = SPEC, **options: Any) -> str:
    """Of a run under these options."""
    return digest(settings(spec, RunConfig(**{"input": "in", "tokenizer": "test", **options})))


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name, value in OTHER.items()),
        {"date": "2026-01-02"},
        {"partition_bytes": 9},
        {"template_arg": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_option_that_can_change_a_parts_bytes_counts(options: dict[str, Any]) -> None:
    assert fingerprint(**options) != fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        {"sha256": "1" * 64},
        {"chat_template": "{{ messages[0] }}"},
        {"special_tokens": {"eos_token": "<|end|>"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_tokenizer_and_template_count_by_what_they_are(other: dict[str, Any]) -> None:
    assert fingerprint(dataclasses.replace(SPEC, **other)) != fingerprint()
    assert fingerprint(dataclasses.replace(SPEC, name="another", revision="r")) == fingerprint()


def test_what_only_says_how_and_where_it_is_done_does_not_count() -> None:
    how: dict[str, Any] = {
        "workers": 3,
        "engine": "transformers",
        "verify_share": 1.0,
        "read_concurrency": 2,
        "no_dashboard": True,
    }
    where: dict[str, Any] = {
        "endpoint_url": "http://127.0.0.1:9",
        "anon": True,
        "storage_option": {"use_ssl": False},
        "output": "out",
    }
    limits: dict[str, Any] = {"max_reject_share": 1.0, "on_error": "fail", "overwrite": True, "take_over": True}
    assert fingerprint(**how, **where, **limits) == fingerprint()
    assert fingerprint(scheduler="tcp://127.0.0.1:9") == fingerprint()
