"""The values that flow between the stages: frozen, slotted, and unable to exist in a wrong state.

What each row is made into is a named tuple, which takes a third of the time to make.

ObjectInfo ─plan→ Partition ─read→ Line ─parse→ Conversation ─render→ Rendered ─encode→ Encoded (ids and loss mask)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from etl.errors import RowError

Span: TypeAlias = tuple[int, int]
Message: TypeAlias = dict[str, Any]

REASONS: Final = (
    "json",
    "encoding",
    "decompress",
    "too_large",
    "shape",
    "role",
    "part",
    "template",
    "mask",
    "control_tokens",
    "truncated",
    "truncated_reasoning",
    "tokenizer",
    "no_loss_tokens",
    "over_length",
)
"""Why a row can be rejected, in the order in which the stages find out."""

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

LOW_TRAINED_SHARE: Final = 0.05
"""Below this share of trained tokens something is wrong with mask or template more often than not."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed input object: `url` as listed (without endpoint; a local one absolute), `size` in bytes."""

    url: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """The bytes [start, end) of one object; the range owns the lines that start in it.

    `end` is the object's size where the object is read whole; `whole` is False for a cut of a larger object.
    """

    url: str
    etag: str
    start: int
    end: int
    size: int

    @property
    def whole(self) -> bool:
        """Whether the range is the entire object, which is then also the only case that may be compressed."""
        return self.start == 0 and self.end == self.size


@dataclass(frozen=True, slots=True)
class Partition:
    """What one Dask task reads: whole objects, or one range of a large one. `stem` names its part and receipt."""

    index: int
    identity: str
    ranges: tuple[ObjectRange, ...]

    @property
    def stem(self) -> str:
        """`part-0000012-0123456789ab`."""
        return f"part-{self.index:07d}-{self.identity}"

    @property
    def bytes(self) -> int:
        """Bytes to read, as stored."""
        return sum(r.end - r.start for r in self.ranges)


class Line(NamedTuple):
    """One line without its line feed: `offset` is its first byte's place in the decompressed object.

    `number` counts the lines of its object from 1 on, as far as the reader knows them: from the start of its range.
    """

    source: str
    offset: int
    raw: bytes
    number: int = 0


@dataclass(frozen=True, slots=True)
class Reject:
    """A row that did not become an example, with enough to find and mend it.

    `size` is the line's length in bytes as read; `raw` may have been cut by the reader (`too_large`, `decompress`).
    `number` is the line's, as in `Line`.
    """

    source: str
    offset: int
    size: int
    choice: int
    turn: int
    reason: str
    detail: str
    raw: bytes
    number: int = 0

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise ValueError(f"unknown reject reason {self.reason!r}")


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What parsing must know of a chat template, learned by probing it.

    `reasoning_field`: the message field that the template renders as reasoning (`reasoning_content`, `reasoning`,
    `thinking`), or None where it reads none. `opens_thinking`: whether the generation prompt ends inside an open
    `<think>` under the given template arguments.
    """

    reasoning_field: str | None
    opens_thinking: Callable[[Mapping[str, Any]], bool]


class Conversation(NamedTuple):
    """One candidate row: messages as the template gets them, and which of them may be trained.

    `trained`: indices of the assistant messages that may be trained, ascending. `cut`: indices of those that the
    length limit cut (`finish_reason` `length`); `closed`: those of `cut` whose reasoning the generated text itself had
    closed with an inline `</think>`, which is then generated text. `completion_tokens`: as recorded by the generator,
    for the drift. `kept`: the values of `--keep`. `counts`: what the receipt adds up of parsing (`mapped_roles`,
    `untrained_messages`). `text` holds a row of the `text` shape; `token_ids` one that came tokenized, as (prompt ids,
    generated ids): such rows have no messages.
    """

    row_id: str
    source: str
    source_offset: int
    choice: int
    turn: int
    messages: tuple[Message, ...] = ()
    trained: tuple[int, ...] = ()
    cut: frozenset[int] = frozenset()
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = _NOTHING
    completion_tokens: int | None = None
    kept: tuple[str | None, ...] = ()
    counts: Mapping[str, int] = _NOTHING
    shape: str = "messages"
    text: str | None = None
    token_ids: tuple[list[int], list[int]] | None = None
    closed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rendered:
    """The chat as one string and the stretches of it that are trained.

    `spans`: half-open character ranges, ascending and disjoint. `cuts`: character positions at which generated text
    ends and the template's begins: a token that straddles one is not trained. `literal`: character ranges of control
    tokens typed by a message that must be encoded as plain text (`--control-tokens literal`). `counts`: what the
    receipt adds up (`control_token_rows`, `dropped_reasoning_turns`, `empty_think_blocks`, `truncated_rows`).
    `last_turn`: the last trained turn's range less what the generation prompt supplies, for the drift.
    """

    text: str
    spans: tuple[Span, ...]
    cuts: tuple[int, ...] = ()
    literal: tuple[Span, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    last_turn: Span | None = None

    def split_at_last_turn(self) -> Rendered:
        """The same mask, with a span that begins where `last_turn` does: what counting its tokens needs."""
        point = self.last_turn[0] if self.last_turn else 0
        spans: list[Span] = []
        for start, end in self.spans:
            spans += ((start, point), (point, end)) if start < point < end else ((start, end),)
        if len(spans) == len(self.spans):
            return self
        return Rendered(self.text, tuple(spans), self.cuts, self.literal, self.counts, self.last_turn)

    def __post_init__(self) -> None:
        at = 0
        for start, end in self.spans:
            if not at <= start < end <= len(self.text):
                raise ValueError(f"spans {self.spans} are not ascending ranges of {len(self.text)} characters")
            at = end


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of token ids: row i owns `ids[splits[i]:splits[i + 1]]`.

    `ids` int32 [n], `mask` int8 [n] of 0 and 1, `splits` int64 [rows + 1]. `mismatched` counts rows on which the two
    engines differed, `verified` those that both encoded. `failed`: by row, why the tokenizer could not take it; such a
    row is empty here and one reject. `last_turn_tokens`: by row, the trained tokens that begin in `Rendered.last_turn`,
    where that begins with a span. `doubtful`: rows that the fast engine was not asked for, since Unicode tables do not
    agree on their characters.
    """

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.int8]
    splits: npt.NDArray[np.int64]
    verified: int = 0
    mismatched: int = 0
    failed: Mapping[int, RowError] = field(default_factory=dict)
    last_turn_tokens: Mapping[int, int] = field(default_factory=dict)
    doubtful: int = 0

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.mask) or self.splits[-1] != len(self.ids):
            raise ValueError(f"{len(self.ids)} ids, {len(self.mask)} mask values, rows end at {self.splits[-1]}")


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """All that a worker needs of a tokenizer; loaded once on the client, shipped once to each worker.

    `backend_json`: `tokenizer.backend_tokenizer.to_str()`, the truth. `special_tokens`: the named ones as the chat
    template sees them (`bos_token`, `eos_token`, …). `chat_template` is None where the tokenizer has none.
    `revision`: the hub's commit, or None for a folder or a built-in one.
    """

    name: str
    revision: str | None
    backend_json: str
    chat_template: str | None
    special_tokens: Mapping[str, str]
    sha256: str

    def largest_id(self) -> int:
        """The highest token id there is, added tokens included."""
        return _largest_id(self.backend_json)


@functools.lru_cache(maxsize=1)
def _largest_id(backend_json: str) -> int:
    # Parses the whole JSON, tenths of a second: a process that serves run after run does so once.
    backend = json.loads(backend_json)
    vocab = backend["model"]["vocab"]
    known = vocab.values() if isinstance(vocab, dict) else range(len(vocab))  # Unigram: a list in the ids' order
    return max((*known, *(token["id"] for token in backend["added_tokens"])), default=-1)
