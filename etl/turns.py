"""Turn -> spans: where things lie in one assistant turn, and which of it the mask table trains.

A `Form` is a turn's literal text around its pieces. A later turn that equals a form, character by character, is known
without a second render.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from etl.config import RunConfig
from etl.records import Span

Anchor: TypeAlias = tuple[int, int]
"""A place in a form: the offset from 0 the turn's start, 1 the thought's end, 2 the answer's end, 3 the calls' end."""

_TELLING: Final = 4  # characters before a call's name by which a call can be told


class Turn(NamedTuple):
    """Where things lie in one assistant turn, as character positions in the row's text.

    `intervals`: the turn's text; `header_end`: where the assistant's text begins; `opener`: the tag that opens a
    thought, with its newline; `thought`: from the assistant's first text, or behind the calls that are rendered before
    it, to behind what closes it, blanks or the next header included; `empty`: an empty think block; `calls`: the tool
    calls; `end`: the end token. `dropped`: the template left out a piece. `foreign`: what other messages wrote inside
    the turn's text.
    """

    intervals: tuple[Span, ...]
    header_end: int
    opener: Span | None = None
    thought: Span | None = None
    empty: Span | None = None
    calls: Span | None = None
    end: Span | None = None
    dropped: bool = False
    foreign: tuple[Span, ...] = ()

    @property
    def stop(self) -> int:
        """Where the trained text of a complete turn ends."""
        return self.end[1] if self.end else self.intervals[-1][1]


class Masked(NamedTuple):
    """What a turn comes to: its trained spans, where the assistant's text begins, whether the template left out a
    piece, and whether an empty think block stands at the start.
    """

    spans: list[Span]
    header_end: int
    dropped: bool
    empty: bool


def mask(turn: Turn, config: RunConfig, cut: int | None = None) -> Masked:
    """The turn masked by the contract's table; `cut`: where the generated text of a cut turn ends."""
    spans: list[Span] = []
    if not turn.dropped:
        stop = turn.stop if cut is None else min(cut, turn.stop)
        bounds = [(max(start, turn.header_end), min(end, stop)) for start, end in turn.intervals]
        spans = subtract([span for span in bounds if span[0] < span[1]], _untrained(turn, config))
    return Masked(spans, turn.header_end, turn.dropped, turn.empty is not None)


def _untrained(turn: Turn, config: RunConfig) -> list[Span]:
    out = list(turn.foreign)
    if turn.empty and not config.train_empty_think:
        out.append(turn.empty)
    if turn.opener and config.no_train_think_open:
        out.append(turn.opener)
    if turn.thought and config.no_train_reasoning:
        out.append(turn.thought)
    if turn.calls and config.no_train_tool_calls:
        out.append(turn.calls)
    if turn.end and config.no_train_end:
        out.append(turn.end)
    return out


def switches(config: RunConfig) -> tuple[bool, ...]:
    """The options by which `_untrained` decides: a form made under others does not serve."""
    return (
        config.train_empty_think,
        config.no_train_think_open,
        config.no_train_reasoning,
        config.no_train_tool_calls,
        config.no_train_end,
    )


def subtract(spans: list[Span], out: Iterable[Span]) -> list[Span]:
    """The spans without the ranges in `out`."""
    for low, high in out:
        parts = [part for start, end in spans for part in ((start, min(end, low)), (max(start, high), end))]
        spans = [(start, end) for start, end in parts if start < end]
    return spans


def intersect(spans: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    """What the spans and the others have in common."""
    parts = [(max(start, low), min(end, high)) for start, end in spans for low, high in others]
    return [(start, end) for start, end in parts if start < end]


def join(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans in order, those that touch made one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] >= start:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Form:
    """The literal text around a turn's pieces, and what of it is trained.

    `before` the first piece, `between` reasoning and answer, `after` all; `reasoning`, `answer`: whether the piece is
    in the text. `head`: what stands before the name of the first tool call; None without calls. `lead`: what stands
    before the name of each further one. `spans`, `header_end`, `dropped`, `empty`: those of `Masked`.
    """

    before: str
    between: str
    after: str
    reasoning: bool
    answer: bool
    spans: tuple[tuple[Anchor, Anchor], ...]
    header_end: Anchor
    dropped: bool
    empty: bool
    head: str | None = None
    lead: str = ""


class Said(NamedTuple):
    """What a turn must hold to equal a form: its pieces' texts, and of each call the name and the texts in it."""

    reasoning: str
    answer: str
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def key(self) -> tuple[bool, bool, int]:
        """Forms are kept by what is there; two calls stand for any greater number."""
        return bool(self.reasoning), bool(self.answer), min(len(self.calls), 2)


def match_form(form: Form, text: str, interval: Span, said: Said) -> Masked | None:
    """The turn at `interval` masked by a form; None where it differs."""
    start, end = interval
    if not text.startswith(form.before, start):
        return None
    at = start + len(form.before)
    if form.reasoning:
        if not text.startswith(said.reasoning, at):
            return None
        at += len(said.reasoning)
    if not text.startswith(form.between, at):
        return None
    thought_end = at
    at += len(form.between)
    if form.answer:
        if not text.startswith(said.answer, at):
            return None
        at += len(said.answer)
    limit = end - len(form.after)
    reached = at if form.head is None else _match_calls(form, form.head, text, at, limit, said.calls)
    fits = reached == limit if form.head is None else 0 <= reached <= limit
    hidden = "" if form.reasoning else said.reasoning  # may be shown where the form does not look for it
    if not (fits and text.startswith(form.after, limit)) or (hidden and text.find(hidden, start, end) >= 0):
        return None
    anchors = (start, thought_end, at, limit)
    spans = [(anchors[i] + more, anchors[j] + beyond) for (i, more), (j, beyond) in form.spans]
    i, more = form.header_end
    return Masked(spans, anchors[i] + more, form.dropped, form.empty)


def _match_calls(
    form: Form, head: str, text: str, at: int, limit: int, calls: Sequence[tuple[str, tuple[str, ...]]]
) -> int:
    """Behind the last text of the last call, all found one behind the other; -1 where one is missing."""
    for i, (name, texts) in enumerate(calls):
        opened = f"{form.lead}{name}" if i else f"{head}{name}"
        found = text.find(opened, at, limit) if i else at
        if found < 0 or not text.startswith(opened, found):
            return -1
        at = found + len(opened)
        for shown in texts:
            found = text.find(shown, at, limit)
            if found < 0:
                return -1
            at = found + len(shown)
    return at


def make_form(
    turn: Turn, masked: Masked, text: str, reasoning: Span | None, answer: Span | None, calls: Sequence[Span]
) -> Form | None:
    """The form of a turn whose text is one stretch; None where forms do not fit it.

    `masked`: the turn as a complete one. `calls`: from the name of each tool call to the last text found in it. What
    is trained must hang on the text around the pieces alone: an edge inside a piece is another row's business.
    """
    if len(turn.intervals) != 1 or turn.foreign or (reasoning and answer and reasoning[1] > answer[0]):
        return None
    edges = [masked.header_end, *(edge for span in masked.spans for edge in span)]
    pieces = [piece for piece in (reasoning, answer, *calls) if piece]
    if any(start < edge < end for edge in edges for start, end in pieces) or intersect(pieces, [turn.empty or (0, 0)]):
        return None
    start, end = turn.intervals[0]
    first = reasoning or answer
    begins = first[0] if first else start if turn.calls else end
    thought_end = reasoning[1] if reasoning else begins
    begun, ended = answer or (thought_end, thought_end)
    limit = min(turn.calls[1], turn.end[0] if turn.end else turn.calls[1]) if turn.calls else ended
    head, lead = (text[ended : calls[0][0]], _lead(text, ended, calls)) if turn.calls else (None, "")
    if turn.calls and (calls[0][0] < ended or max(e for _, e in calls) > limit or (len(calls) > 1 and not lead)):
        return None
    anchors = (start, thought_end if reasoning else None, ended if answer else None, limit if turn.calls else None)
    return Form(
        text[start:begins],
        text[thought_end:begun],
        text[limit:end],
        reasoning is not None,
        answer is not None,
        tuple((_anchored(start, anchors), _anchored(end, anchors)) for start, end in masked.spans),
        _anchored(masked.header_end, anchors),
        masked.dropped,
        masked.empty,
        head,
        lead,
    )


def _anchored(place: int, anchors: Sequence[int | None]) -> Anchor:
    """The place from the nearest anchor before it."""
    number, at = max((i, at) for i, at in enumerate(anchors) if at is not None and at <= place)
    return number, place - at


def _lead(text: str, ended: int, calls: Sequence[Span]) -> str:
    """What stands before each name alike; '' where that is too little to tell a call by."""
    gaps = [text[low:high] for low, high in zip((ended, *(e for _, e in calls)), (s for s, _ in calls), strict=False)]
    size = min(map(len, gaps))
    while size and any(not gap.endswith(gaps[0][len(gaps[0]) - size :]) for gap in gaps):
        size -= 1
    return gaps[0][len(gaps[0]) - size :] if size >= _TELLING else ""
