"""Turn -> spans: where things lie in one assistant turn, and which of it the mask table trains.

A `Form` is a turn's literal text around its pieces. A later turn that equals a form, character by character, is known
without a second render.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etl.config import RunConfig
from etl.records import Span

Anchor: TypeAlias = tuple[int, int]
"""A place in a form: 0 the turn's start, 1 the reasoning's end, 2 the answer's end, and the offset from there."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where things lie in one assistant turn, as character positions in the row's text.

    `intervals`: the turn's text; `header_end`: where the assistant's text begins; `opener`: the tag that opens a
    thought, with its newline; `thought_end`: behind what closes it, blanks or the next header included; `empty`: an
    empty think block; `calls`: the tool calls; `end`: the end token. `dropped`: the template left out a piece.
    `foreign`: what other messages wrote inside the turn's text.
    """

    intervals: tuple[Span, ...]
    header_end: int
    opener: Span | None = None
    thought_end: int | None = None
    empty: Span | None = None
    calls: Span | None = None
    end: Span | None = None
    dropped: bool = False
    foreign: tuple[Span, ...] = ()

    @property
    def stop(self) -> int:
        """Where the trained text of a complete turn ends."""
        return self.end[1] if self.end else self.intervals[-1][1]


def mask(turn: Turn, config: RunConfig, cut: int | None = None) -> list[Span]:
    """The trained spans of one turn, by the contract's table; `cut`: where the generated text of a cut turn ends."""
    if turn.dropped:
        return []
    stop = turn.stop if cut is None else min(cut, turn.stop)
    spans = [(max(start, turn.header_end), min(end, stop)) for start, end in turn.intervals]
    return subtract([span for span in spans if span[0] < span[1]], _untrained(turn, config))


def _untrained(turn: Turn, config: RunConfig) -> list[Span]:
    out = list(turn.foreign)
    if turn.empty and not config.train_empty_think:
        out.append(turn.empty)
    if turn.opener and config.no_train_think_open:
        out.append(turn.opener)
    if turn.thought_end is not None and config.no_train_reasoning:
        out.append((turn.header_end, turn.thought_end))
    if turn.calls and config.no_train_tool_calls:
        out.append(turn.calls)
    if turn.end and config.no_train_end:
        out.append(turn.end)
    return out


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
    """The literal text before, between and after a turn's pieces, and where things lie in it.

    `reasoning`, `answer`: whether the piece is in the text. `places`: those of `Turn`, in the order of `_to_places`.
    """

    before: str
    between: str
    after: str
    reasoning: bool
    answer: bool
    places: tuple[Anchor | None, ...]
    dropped: bool


def match_form(form: Form, text: str, interval: Span, reasoning: str, answer: str) -> Turn | None:
    """The turn at `interval` read by a form; None where it differs in a single character."""
    start, end = interval
    if not text.startswith(form.before, start):
        return None
    at = start + len(form.before)
    if form.reasoning:
        if not text.startswith(reasoning, at):
            return None
        at += len(reasoning)
    if not text.startswith(form.between, at):
        return None
    thought_end = at
    at += len(form.between)
    if form.answer:
        if not text.startswith(answer, at):
            return None
        at += len(answer)
    if at + len(form.after) != end or not text.startswith(form.after, at):
        return None
    anchors = (start, thought_end, at)
    return _from_places(interval, [p and anchors[p[0]] + p[1] for p in form.places], dropped=form.dropped)


def make_form(turn: Turn, text: str, reasoning: Span | None, answer: Span | None) -> Form | None:
    """The form of a turn whose text is one stretch; None where forms do not fit it."""
    if len(turn.intervals) != 1 or turn.calls or turn.foreign or (reasoning and answer and reasoning[1] > answer[0]):
        return None
    start, end = turn.intervals[0]
    first = reasoning or answer or (end, end)
    thought_end = reasoning[1] if reasoning else first[0]
    begun, ended = answer or (thought_end, thought_end)
    places: list[Anchor | None] = []
    for place in _to_places(turn):
        if place is None:
            places.append(None)
        elif answer and place >= ended:
            places.append((2, place - ended))
        elif reasoning and place >= thought_end:
            places.append((1, place - thought_end))
        else:
            places.append((0, place - start))
    return Form(
        text[start : first[0]],
        text[thought_end:begun],
        text[ended:end],
        reasoning is not None,
        answer is not None,
        tuple(places),
        turn.dropped,
    )


def _to_places(turn: Turn) -> list[int | None]:
    nothing = (None, None)
    return [
        turn.header_end,
        turn.thought_end,
        *(turn.opener or nothing),
        *(turn.empty or nothing),
        *(turn.end or nothing),
    ]


def _from_places(interval: Span, places: Sequence[int | None], *, dropped: bool) -> Turn:
    header_end, thought_end, opener, opened, empty, emptied, end, ended = places
    return Turn(
        (interval,),
        header_end or 0,
        None if opener is None or opened is None else (opener, opened),
        thought_end,
        None if empty is None or emptied is None else (empty, emptied),
        None,
        None if end is None or ended is None else (end, ended),
        dropped,
    )
