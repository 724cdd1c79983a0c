"""One row, by hand: the messages that the template gets for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etl.config import RunConfig
from etl.conversation import parse_row
from etl.errors import RowError
from etl.records import Message, Reject
from etl.rendering import settle
from etl.template import ChatTemplate
from etl.tokenizer import load_tokenizer


def normalize(row: Mapping[str, Any], config: RunConfig) -> list[Message]:
    """The messages that are rendered for a row: `apply_chat_template` on them gives the `input_ids` of its example.

    Of a row that stands for several conversations, the first. Raises RowError where the row would be rejected.
    """
    template = _template(_Key(config))
    first = parse_row(dict(row), config, template.traits)[0]
    if isinstance(first, Reject):
        raise RowError(first.reason, first.detail)
    return settle(first, template)


@dataclass(frozen=True, slots=True)
class _Key:
    """A configuration as a cache's key: its mappings cannot be hashed, its text can."""

    config: RunConfig

    def __hash__(self) -> int:
        return hash(repr(self.config))


@functools.lru_cache(maxsize=4)
def _template(key: _Key) -> ChatTemplate:
    return ChatTemplate.from_spec(load_tokenizer(key.config), key.config)
