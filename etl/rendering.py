"""Conversation -> Rendered: the chat as one string, and the stretches of it that are trained.

    messages ─trace→ text, whose turn is where ─read_turn→ Turn (header, thought, answer, calls, end) ─mask→ spans

What lies where in a turn is never guessed from the text alone. The careful way renders the row once more with a private
character on either side of each piece that the assistant wrote: taken out again they must leave the very same text,
and they show where each piece went, or that the template dropped it. What was learned so is kept as a `Form`, the
literal text around the pieces; a later turn that equals a form, character by character, needs no second render.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from etl.config import RunConfig
from etl.errors import RowError
from etl.records import Conversation, Message, Rendered, Span
from etl.template import THINK_CLOSE, THINK_OPEN, ChatTemplate, Trace

Anchor: TypeAlias = tuple[int, int]

_BLANKS: Final = re.compile(r"\s*")
_MARKS: Final = (0x100000, 0xF0000)  # the private-use planes
_PLANE: Final = 0xFFF0
_FORMS_KEPT: Final = 64
_LEAVES_NO_TEXT: Final = "the template leaves out {} messages; --role-map {}=… renames a role"


def render(conversation: Conversation, template: ChatTemplate, config: RunConfig) -> Rendered:
    """The row's text with its trained spans, by the mask table of the contract.

    Raises RowError: `template` where the template raises, `role` where a message leaves no text, `mask` where the
    trained text cannot be told, `control_tokens`, `truncated`, `truncated_reasoning`.
    """
    if conversation.text is not None:
        text = conversation.text
        return Rendered(text, ((0, len(text)),) if text else ())
    row = _open(conversation, template, config)
    typed = _types_control_tokens(conversation, template)
    turns = None if typed or row.cut else _turns_by_form(row)
    if turns is not None and _shows_every_role(row):
        return _finish(row, turns, {}, (), {})
    return _render_carefully(row, typed=typed)


def settle(conversation: Conversation, template: ChatTemplate) -> list[Message]:
    """The messages exactly as they are rendered; `apply_chat_template` on them gives our ids. Raises RowError."""
    return _trace(conversation, template, template.merged(conversation.template_kwargs))[0]


@dataclass(slots=True)
class _Row:
    """One conversation being rendered: its trace, and which assistant messages are trained and cut in this run."""

    conversation: Conversation
    template: ChatTemplate
    config: RunConfig
    arguments: Mapping[str, Any]
    messages: list[Message]
    trace: Trace
    trained: tuple[int, ...]
    cut: frozenset[int]
    owned: dict[int, list[Span]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for start, end, owner in self.trace.owners:
            self.owned.setdefault(owner, []).append((start, end))

    def intervals(self, k: int) -> list[Span]:
        """Where message k's text lies, as the loops tell. An end token written behind the turn's own iteration, by the
        next one or behind the loop, belongs to the turn."""
        owners, text = self.trace.owners, self.trace.text
        found = list(self.owned.get(k, ()))
        if not found:
            return found
        start, end = found[-1]
        if k == len(self.messages) - 1 and end == owners[-1][1] < len(text):
            if self.template.added_tokens.search(text, end):
                found[-1] = (start, len(text))
        elif self.template.late_ending and text.startswith(self.template.late_ending, end):
            found[-1] = (start, end + len(self.template.late_ending))
        return found


@dataclass(frozen=True, slots=True)
class Turn:
    """Where things lie in one assistant turn, as character positions in the row's text.

    `intervals`: the turn's text; `header_end`: where the assistant's text begins; `opener`: the tag that opens a
    thought, with its newline; `thought_end`: behind the tag that closes it, its blanks included; `empty`: an empty
    think block; `calls`: the tool calls; `end`: the end token; `last`: behind the last piece that a message wrote.
    `dropped`: the template left out a piece. `foreign`: what other messages wrote inside the turn's text.
    """

    intervals: tuple[Span, ...]
    header_end: int
    opener: Span | None = None
    thought_end: int | None = None
    empty: Span | None = None
    calls: Span | None = None
    end: Span | None = None
    last: int | None = None
    dropped: bool = False
    foreign: tuple[Span, ...] = ()

    @property
    def stop(self) -> int:
        """Where the trained text of a complete turn ends."""
        return self.end[1] if self.end else self.intervals[-1][1]


@dataclass(frozen=True, slots=True)
class Pieces:
    """What an assistant message says: the cores of its reasoning and its answer, as (field, start, end) in the
    message's fields, blanks around them left out; None where there is none. `calls`: the number of tool calls."""

    reasoning: tuple[str, int, int] | None
    answer: tuple[str, int, int] | None
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Form:
    """A turn's literal text around its pieces, and where things lie in it.

    Positions are (anchor, offset): anchor 0 is the turn's start, 1 the reasoning's end, 2 the answer's end.
    """

    before: str
    between: str
    after: str
    reasoning: bool
    answer: bool
    places: tuple[Anchor | None, ...]
    dropped: bool


# --- one row ---


def _open(conversation: Conversation, template: ChatTemplate, config: RunConfig) -> _Row:
    arguments = template.merged(conversation.template_kwargs)
    trained = conversation.trained
    if config.turns == "last" and trained:
        last = max(i for i, m in enumerate(conversation.messages) if m.get("role") == "assistant")
        trained = tuple(k for k in trained if k == last)
    cut = conversation.cut.intersection(trained) if conversation.cut else conversation.cut
    if cut and config.truncated_completions == "reject":
        raise RowError("truncated", f"message {min(cut)} was cut by the length limit")
    messages, trace = _trace(conversation, template, arguments)
    return _Row(conversation, template, config, arguments, messages, trace, trained, cut)


def _trace(
    conversation: Conversation, template: ChatTemplate, arguments: Mapping[str, Any]
) -> tuple[list[Message], Trace]:
    """Render; where the template raises on tool arguments as objects, once more with their JSON text."""
    messages = template.prepare(conversation.messages)
    try:
        return messages, template.trace(messages, conversation.tools, conversation.documents, arguments)
    except RowError as first:
        spelled = [_spell_arguments(message) for message in messages]
        if all(new is old for new, old in zip(spelled, messages, strict=True)):
            raise
        try:
            return spelled, template.trace(spelled, conversation.tools, conversation.documents, arguments)
        except RowError:
            raise first from None


def _spell_arguments(message: Message) -> Message:
    """The message with its tool arguments as JSON text; the same object where there is nothing to spell."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not any(isinstance(_function(call).get("arguments"), dict) for call in calls):
        return message
    spelled = []
    for call in calls:
        function = _function(call)
        if isinstance(function.get("arguments"), dict):
            function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            call = {**call, "function": function} if "function" in call else function  # noqa: PLW2901
        spelled.append(call)
    return {**message, "tool_calls": spelled}


def _function(call: Any) -> Mapping[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _finish(
    row: _Row, turns: Mapping[int, Turn], cuts: Mapping[int, int], literal: Sequence[Span], counts: Mapping[str, int]
) -> Rendered:
    """Mask every turn and put the row together. `cuts`: where the generated text of a cut message ends."""
    text, config = row.trace.text, row.config
    spans: list[Span] = []
    last: Span | None = None
    found = dict(counts)
    for k, turn in turns.items():
        if turn.dropped:
            found["dropped_reasoning_turns"] = found.get("dropped_reasoning_turns", 0) + 1
            continue
        if turn.empty:
            found["empty_think_blocks"] = found.get("empty_think_blocks", 0) + 1
        own = mask(turn, config, cuts.get(k))
        if row.trace.generated is not None:
            own = _intersect(own, row.trace.generated)
        if own:
            spans += own
            last = _behind_prompt(row, turn, own)
    return Rendered(text, _joined(spans), tuple(sorted(cuts.values())), tuple(literal), found, last)


def _behind_prompt(row: _Row, turn: Turn, own: Sequence[Span]) -> Span | None:
    """The turn's trained range less what the generation prompt supplies."""
    prompt = row.template.prompt(row.arguments)
    begin, stop = own[0][0], own[-1][1]
    at = turn.header_end - len(row.template.header(row.arguments))
    if at >= 0 and row.trace.text.startswith(prompt, at):
        begin = max(begin, at + len(prompt))
    return (begin, stop) if begin < stop else None


# --- the mask of one turn ---


def mask(turn: Turn, config: RunConfig, cut: int | None = None) -> list[Span]:
    """The trained spans of one turn, by the contract's table; `cut`: where the generated text of a cut turn ends."""
    if turn.dropped:
        return []
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
    stop = turn.stop if cut is None else min(cut, turn.stop)
    kept = [(max(start, turn.header_end), min(end, stop)) for start, end in turn.intervals]
    return _subtract([span for span in kept if span[0] < span[1]], out)


def _subtract(spans: list[Span], out: Iterable[Span]) -> list[Span]:
    for low, high in out:
        pieces = [part for start, end in spans for part in ((start, min(end, low)), (max(start, high), end))]
        spans = [(start, end) for start, end in pieces if start < end]
    return spans


def _intersect(spans: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    pieces = [(max(start, low), min(end, high)) for start, end in spans for low, high in others]
    return [(start, end) for start, end in pieces if start < end]


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)


# --- what a message says ---


def read_pieces(message: Message, template: ChatTemplate, *, open_prompt: bool, cut: bool) -> Pieces:
    """The pieces of an assistant message. Inline tags count where the template reads no reasoning field."""
    field = template.traits.reasoning_field
    calls = message.get("tool_calls")
    count = len(calls) if isinstance(calls, list) else 0
    reasoning = _core(message, field or "reasoning_content")
    content = _text_of(message)
    if reasoning is None and (field is None or message.get(field) is None):
        inline = _inline_thought(content, open_prompt=open_prompt, cut=cut and not count)
        if inline is not None:
            (start, end), answer = inline
            thought = _core_within(content, start, end)
            if cut and thought is None and not content[answer:].strip():
                return Pieces(None, _named(_core_within(content, 0, len(content))), count)  # a bare tag was generated
            return Pieces(thought and ("content", *thought), _named(_core_within(content, answer, len(content))), count)
    return Pieces(reasoning, _named(_core_within(content, 0, len(content))), count)


def _named(span: Span | None) -> tuple[str, int, int] | None:
    return span and ("content", *span)


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else ""


def _core(message: Message, field: str) -> tuple[str, int, int] | None:
    text = message.get(field)
    if not isinstance(text, str) or not text:
        return None
    span = _core_within(text, 0, len(text))
    return span and (field, *span)


def _core_within(text: str, start: int, end: int) -> Span | None:
    """text[start:end] without the blanks at its ends; None where it is blank."""
    part = text if end - start == len(text) else text[start:end]
    left = part.lstrip()
    if not left:
        return None
    start += len(part) - len(left)
    return start, start + len(left.rstrip())


def _inline_thought(content: str, *, open_prompt: bool, cut: bool) -> tuple[Span, int] | None:
    """Of text that carries its reasoning inline: where the thought lies, and where the answer begins."""
    blank = _BLANKS.match(content)
    at = blank.end() if blank else 0
    opener = THINK_OPEN.match(content, at)
    start = opener.end() if opener else 0
    close = THINK_CLOSE.search(content, start)
    if close and (opener or open_prompt):
        return (start, close.start()), close.end()
    if cut and at < len(content) and (opener or open_prompt):
        return (start, len(content)), len(content)
    return None


def _piece(message: Message, piece: tuple[str, int, int]) -> str:
    name, start, end = piece
    text = _text_of(message) if name == "content" else message[name]
    return text[start:end] if end - start < len(text) else text


# --- by form ---


def _turns_by_form(row: _Row) -> dict[int, Turn] | None:
    """The turns of a row all of whose trained turns equal a known form; None where one does not."""
    forms: dict[tuple[bool, bool], list[Form]] | None = row.template.memory.get(_key(row, "forms"))
    if not row.template.follows_loops:
        return None
    if forms is None:
        return {} if not row.trained else None
    turns = {}
    for k in row.trained:
        intervals = row.intervals(k)
        message = row.messages[k]
        if len(intervals) != 1 or message.get("tool_calls"):
            return None
        turn = _match_forms(row, message, intervals[0], forms)
        if turn is None:
            return None
        turns[k] = turn
    return turns


def _match_forms(
    row: _Row, message: Message, interval: Span, forms: Mapping[tuple[bool, bool], Sequence[Form]]
) -> Turn | None:
    pieces = read_pieces(message, row.template, open_prompt=_opens(row), cut=False)
    reasoning = _piece(message, pieces.reasoning) if pieces.reasoning else ""
    answer = _piece(message, pieces.answer) if pieces.answer else ""
    if answer and answer[0] in "<[◁" and THINK_OPEN.match(answer):
        return None  # it may hold an empty block of its own
    for form in forms.get((bool(reasoning), bool(answer)), ()):
        turn = match_form(form, row.trace.text, interval, reasoning, answer)
        if turn is not None:
            return turn
    return None


def match_form(form: Form, text: str, interval: Span, reasoning: str, answer: str) -> Turn | None:
    """The turn at `interval` read by a form; None where it differs in a single character."""
    start, end = interval
    at = start + len(form.before)
    if not text.startswith(form.before, start):
        return None
    thought_end = at
    if form.reasoning:
        if not text.startswith(reasoning, at):
            return None
        thought_end = at = at + len(reasoning)
    if not text.startswith(form.between, at):
        return None
    at += len(form.between)
    if form.answer:
        if not text.startswith(answer, at):
            return None
        at += len(answer)
    if at + len(form.after) != end or not text.startswith(form.after, at):
        return None
    anchors = (start, thought_end, at)
    places = [None if place is None else anchors[place[0]] + place[1] for place in form.places]
    return _from_places((interval,), places, dropped=form.dropped)


def _from_places(intervals: tuple[Span, ...], places: Sequence[int | None], *, dropped: bool) -> Turn:
    header, opener, opened, thought_end, empty, emptied, end, ended, last = places
    return Turn(
        intervals,
        header or 0,
        None if opener is None or opened is None else (opener, opened),
        thought_end,
        None if empty is None or emptied is None else (empty, emptied),
        None,
        None if end is None or ended is None else (end, ended),
        last,
        dropped,
    )


def _to_places(turn: Turn) -> list[int | None]:
    opener, empty, end = turn.opener or (None, None), turn.empty or (None, None), turn.end or (None, None)
    return [turn.header_end, *opener, turn.thought_end, *empty, *end, turn.last]


def _remember(row: _Row, turn: Turn, pieces: Pieces, reasoning: Span | None, answer: Span | None) -> None:
    """Keep the form of a turn whose text is one stretch without tool calls."""
    if len(turn.intervals) != 1 or pieces.calls or turn.foreign or (reasoning and answer and reasoning[1] > answer[0]):
        return
    start, end = turn.intervals[0]
    text = row.trace.text
    first = reasoning or answer or (end, end)
    thought_end = reasoning[1] if reasoning else first[0]
    begun = answer[0] if answer else thought_end
    ended = answer[1] if answer else thought_end
    anchors = (start, thought_end if reasoning else start, ended if answer else thought_end if reasoning else start)
    places: list[Anchor | None] = []
    for place in _to_places(turn):
        if place is None:
            places.append(None)
            continue
        nearest = 2 if place >= ended and answer else 1 if reasoning and place >= thought_end else 0
        places.append((nearest, place - anchors[nearest]))
    form = Form(
        text[start : first[0]],
        text[thought_end:begun],
        text[ended:end],
        reasoning is not None,
        answer is not None,
        tuple(places),
        turn.dropped,
    )
    forms = row.template.memory.setdefault(_key(row, "forms"), {})
    known = forms.setdefault((pieces.reasoning is not None, pieces.answer is not None), [])
    if form not in known and len(known) < _FORMS_KEPT:
        known.append(form)


def _key(row: _Row, of: str) -> tuple[str, str]:
    arguments = row.arguments
    return of, "" if arguments is row.template.arguments else json.dumps(arguments, sort_keys=True, default=repr)


def _opens(row: _Row) -> bool:
    return row.template.traits.reasoning_field is None and row.template.opens_thinking(
        row.conversation.template_kwargs
    )


# --- the careful way ---


@dataclass(frozen=True, slots=True)
class _Marked:
    """A second render with marks: where each mark came out, as positions in the plain text."""

    places: Mapping[int, tuple[int, ...]]
    broken: tuple[int, ...]

    def within(self, mark: int, intervals: Sequence[Span]) -> list[int]:
        """The places of a mark that lie in the intervals, their ends included."""
        return [at for at in self.places.get(mark, ()) if any(start <= at <= end for start, end in intervals)]


@dataclass(slots=True)
class _Marks:
    """Hands out the marks of one render: single characters that occur nowhere in the row. Mark 0 breaks up control
    tokens; `of` maps (message, piece) to the pair of marks around it."""

    base: int
    of: dict[tuple[int, str], tuple[int, int]]

    def pair(self, message: int, piece: str) -> tuple[str, str]:
        number = 2 * len(self.of) + 1
        if number + 1 >= _PLANE:
            raise RowError("mask", "too many messages to follow one by one")
        self.of[message, piece] = number, number + 1
        return chr(self.base + number), chr(self.base + number + 1)


def _render_carefully(row: _Row, *, typed: bool) -> Rendered:
    marks, marked = _mark(row, typed=typed)
    _require_roles(row, marks, marked)
    literal, counts = _judge_control_tokens(row, marked, typed=typed)
    turns: dict[int, Turn] = {}
    cuts: dict[int, int] = {}
    others = [span for k, span in _find_bounds(marks, marked).items() if k not in row.trained] if marked else []
    for k in row.trained:
        pieces = _pieces(row, k)
        turn, reasoning, answer = _read_turn(row, k, pieces, marks, marked)
        foreign = tuple(_intersect(turn.intervals, others))
        turns[k] = turn = replace(turn, foreign=foreign) if foreign else turn
        if k in row.cut:
            if row.config.truncated_completions == "mask-end" and not turn.dropped:
                cuts[k] = _find_cut(row, k, pieces, turn, (reasoning, answer), marks, marked)
        elif not typed:
            _remember(row, turn, pieces, reasoning, answer)
    if row.cut:
        counts["truncated_rows"] = 1
    return _finish(row, turns, cuts, literal, counts)


def _pieces(row: _Row, k: int) -> Pieces:
    return read_pieces(row.messages[k], row.template, open_prompt=_opens(row), cut=k in row.cut)


def _mark(row: _Row, *, typed: bool) -> tuple[_Marks, _Marked | None]:
    """Render with marks; None where no way of marking leaves the text as it is."""
    base = _free_plane(row.trace.text)
    for with_calls, with_breaks in ((True, True), (True, False), (False, False)):
        if with_breaks and not typed:
            continue
        marks = _Marks(base, {})
        messages = [_mark_message(row, k, marks, with_calls=with_calls) for k in range(len(row.messages))]
        tools, documents = row.conversation.tools, row.conversation.documents
        if with_breaks:
            messages, tools, documents = _broken((messages, tools, documents), row.template, chr(base))
        marked = _read_marks(row, messages, tools, documents, base)
        if marked is not None:
            return marks, marked
    return _Marks(base, {}), None


def _free_plane(text: str) -> int:
    for base in _MARKS:
        if not any(base <= ord(char) < base + _PLANE for char in set(text)):
            return base
    raise RowError("mask", "the text uses both private-use planes of Unicode")


def _read_marks(row: _Row, messages: list[Message], tools: Any, documents: Any, base: int) -> _Marked | None:
    try:
        text = row.template.trace(messages, tools, documents, row.arguments).text
    except RowError:
        return None
    places: dict[int, list[int]] = {}
    plain: list[str] = []
    at = since = 0
    for found in re.finditer(f"[{chr(base)}-{chr(base + _PLANE - 1)}]", text):
        plain.append(text[since : found.start()])
        at += found.start() - since
        since = found.end()
        places.setdefault(ord(found[0]) - base, []).append(at)
    plain.append(text[since:])
    if "".join(plain) != row.trace.text:
        return None
    broken = tuple(place - 1 for place in places.pop(0, []))
    return _Marked({mark: tuple(found) for mark, found in places.items()}, broken)


def _mark_message(row: _Row, k: int, marks: _Marks, *, with_calls: bool) -> Message:
    message = row.messages[k]
    if message.get("role") != "assistant":
        core = _core_within(content := _text_of(message), 0, len(content))
        return message if core is None else _with_content(message, _around(content, [(*core, marks.pair(k, "text"))]))
    pieces = _pieces(row, k)
    inserts: dict[str, list[tuple[int, int, tuple[str, str]]]] = {}
    for name, piece in (("reasoning", pieces.reasoning), ("answer", pieces.answer)):
        if piece is not None:
            inserts.setdefault(piece[0], []).append((piece[1], piece[2], marks.pair(k, name)))
    marked = dict(message)
    for field, found in inserts.items():
        if field == "content":
            marked = _with_content(marked, _around(_text_of(message), found))
        else:
            text = _around(message[field], found)
            marked.update({alias: text for alias in marked if marked[alias] == message[field] and alias in _REASONING})
    if with_calls and pieces.calls:
        marked["tool_calls"] = [_mark_call(call, k, i, marks) for i, call in enumerate(message["tool_calls"])]
    return marked


_REASONING: Final = frozenset({"reasoning_content", "thinking", "reasoning"})


def _with_content(message: Message, text: str) -> Message:
    content = message.get("content")
    return {**message, "content": [{**content[0], "text": text}] if isinstance(content, list) else text}


def _around(text: str, found: Sequence[tuple[int, int, tuple[str, str]]]) -> str:
    for start, end, (left, right) in sorted(found, reverse=True):
        text = text[:start] + left + text[start:end] + right + text[end:]
    return text


def _mark_call(call: Any, k: int, i: int, marks: _Marks) -> Any:
    function = _function(call)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return call
    left, right = marks.pair(k, f"name {i}")
    new = {**function, "name": left + name + right}
    arguments = function.get("arguments")
    left, right = marks.pair(k, f"arguments {i}")
    if isinstance(arguments, str):
        new["arguments"] = _around(arguments, [(*core, (left, right))]) if (
            core := _core_within(arguments, 0, len(arguments))
        ) else arguments
    else:
        new["arguments"] = _mark_last(arguments, left, right)
    return {**call, "function": new} if "function" in call else new


def _mark_last(value: Any, left: str, right: str) -> Any:
    """The value with marks around its last text, if its last leaf is one."""
    if isinstance(value, str):
        core = _core_within(value, 0, len(value))
        return _around(value, [(*core, (left, right))]) if core else value
    if isinstance(value, dict) and value:
        key = next(reversed(value))
        return {**value, key: _mark_last(value[key], left, right)}
    if isinstance(value, list) and value:
        return [*value[:-1], _mark_last(value[-1], left, right)]
    return value


def _read_turn(
    row: _Row, k: int, pieces: Pieces, marks: _Marks, marked: _Marked | None
) -> tuple[Turn, Span | None, Span | None]:
    """The turn of message k, and where its reasoning and its answer lie. Raises RowError `mask`."""
    if marked is None:
        raise RowError("mask", "the template changes text so that the parts of a message cannot be told in it")
    intervals = _find_intervals(row, k, pieces, marks, marked)
    if not intervals:
        return Turn(((0, 0),), 0, dropped=True), None, None
    spans = {name: _find_piece(marks.of.get((k, name)), marked, intervals) for name in _names(pieces)}
    text = row.trace.text
    dropped = any(span is None for span in spans.values()) or _shortened(row, k, pieces, spans)
    reasoning, answer = spans.get("reasoning"), spans.get("answer")
    present = sorted(span for span in spans.values() if span)
    header_end = _find_header(row, intervals, present)
    empty = _find_empty(row, intervals, header_end)
    arguments = [_find_piece(marks.of.get((k, f"arguments {i}")), marked, intervals) for i in range(pieces.calls)]
    last = max([*(span[1] for span in present), *(span[1] for span in arguments if span)], default=None)
    end = _find_end(row, intervals, max(header_end, empty[1] if empty else 0, last or 0), marked.broken)
    turn = Turn(intervals, header_end, empty=empty, end=end, last=last, dropped=dropped)
    if reasoning:
        following = min((s[0] for s in present if s[0] >= reasoning[1]), default=end[0] if end else intervals[-1][1])
        turn = replace(
            turn,
            opener=_find_opener(text, header_end, reasoning[0]),
            thought_end=_find_thought_end(row, reasoning[1], following),
        )
    if pieces.calls:
        turn = replace(turn, calls=_find_calls(row, turn, spans, last))
    return turn, reasoning, answer


def _find_intervals(row: _Row, k: int, pieces: Pieces, marks: _Marks, marked: _Marked) -> tuple[Span, ...]:
    """Where message k's text lies: as the loops tell, or, where its pieces lie elsewhere, around its pieces."""
    intervals = row.intervals(k) if row.template.follows_loops else []
    pairs = [pair for name in _names(pieces) if (pair := marks.of.get((k, name)))]
    if intervals and (not pairs or any(_find_piece(pair, marked, intervals) for pair in pairs)):
        return tuple(intervals)
    bounds = _find_bounds(marks, marked)
    if k not in bounds:
        if pairs or row.template.follows_loops:
            return tuple(intervals)  # nothing that it says was rendered
        raise RowError("mask", f"message {k} says nothing by which it could be found in this template's text")
    return (_turn_around(row, k, bounds),)


def _find_bounds(marks: _Marks, marked: _Marked) -> dict[int, Span]:
    """From the first to the last character that each message wrote, of those that left any."""
    bounds: dict[int, Span] = {}
    for (k, _), (left, right) in marks.of.items():
        if left in marked.places and right in marked.places:
            start = marked.places[left][0]
            end = next((at for at in marked.places[right] if at > start), start)
            low, high = bounds.get(k, (start, end))
            bounds[k] = min(low, start), max(high, end)
    return bounds


def _turn_around(row: _Row, k: int, bounds: Mapping[int, Span]) -> Span:
    """The turn around what message k wrote: from its role header to what ends a turn in this template."""
    text, template = row.trace.text, row.template
    start, end = bounds[k]
    low = max((high for j, (_, high) in bounds.items() if j != k and high <= start), default=0)
    high = min((first for j, (first, _) in bounds.items() if j != k and first >= end), default=len(text))
    header = template.header(row.arguments)
    at = text.rfind(header, low, start) if header else -1
    if at < 0:
        opener = next((m for m in THINK_OPEN.finditer(text, low, start) if text[m.end() : start].isspace()), None)
        at = opener.start() if opener else start
    if k == len(row.messages) - 1 and high == len(text):
        return at, high
    if template.ending and text.startswith(template.ending, end):
        return at, end + len(template.ending)
    close = THINK_CLOSE.match(text, _skip_blanks(text, end, high))
    floor = close.end() if close else end
    token = template.added_tokens.search(text, floor, high)
    following = text.find(header, floor, high) if header else -1
    if token is None or 0 <= following <= token.start():
        return at, floor
    return at, token.end()


def _names(pieces: Pieces) -> list[str]:
    names = ["reasoning"] * (pieces.reasoning is not None) + ["answer"] * (pieces.answer is not None)
    return names + [f"name {i}" for i in range(pieces.calls)]


def _find_piece(pair: tuple[int, int] | None, marked: _Marked, intervals: Sequence[Span]) -> Span | None:
    if pair is None:
        return None
    starts, ends = marked.within(pair[0], intervals), marked.within(pair[1], intervals)
    return (starts[0], ends[-1]) if starts and ends and starts[0] < ends[-1] else None


def _shortened(row: _Row, k: int, pieces: Pieces, spans: Mapping[str, Span | None]) -> bool:
    """Whether the template left something out inside a piece; one that it escapes grows, and is not dropped."""
    text = row.trace.text
    for name, piece in (("reasoning", pieces.reasoning), ("answer", pieces.answer)):
        span = spans.get(name)
        if piece and span:
            said, shown = _piece(row.messages[k], piece), text[span[0] : span[1]]
            if said != shown and len("".join(shown.split())) < len("".join(said.split())):
                return True
    return False


def _find_header(row: _Row, intervals: Sequence[Span], present: Sequence[Span]) -> int:
    """Where the assistant's text begins: behind the role header, looked for before the first thing that it wrote."""
    text = row.trace.text
    start, end = intervals[0]
    limit = present[0][0] if present else end
    begin = row.template.special_tokens.get("bos_token") or ""
    if begin and text.startswith(begin, start) and start + len(begin) <= limit:
        start += len(begin)
    header = row.template.header(row.arguments)
    at = text.find(header, start, limit)
    return start if at < 0 else at + len(header)


def _find_empty(row: _Row, intervals: Sequence[Span], header_end: int) -> Span | None:
    end = next((end for start, end in intervals if start <= header_end <= end), header_end)
    found = row.template.empty_thought.match(row.trace.text, header_end, end)
    return found.span(1) if found else None


def _find_end(row: _Row, intervals: Sequence[Span], floor: int, broken: Sequence[int]) -> Span | None:
    """The last added token that the template emitted in the turn, behind all that the message wrote."""
    text = row.trace.text
    for start, end in reversed(intervals):
        found = [m.span() for m in row.template.added_tokens.finditer(text, max(start, floor), end)]
        found = [
            span for span in found if span[0] not in broken and text[span[0] : span[1]] not in row.template.openers
        ]
        if found:
            return found[-1]
    return None


def _find_opener(text: str, header_end: int, reasoning: int) -> Span | None:
    found = THINK_OPEN.search(text, header_end, reasoning)
    return found and (found.start(), found.end() + text.startswith("\n", found.end()))


def _find_thought_end(row: _Row, reasoning_end: int, following: int) -> int:
    """Behind what closes a thought: its tag and blanks, else the next header, else the next token."""
    text = row.trace.text
    close = THINK_CLOSE.search(text, reasoning_end, following)
    header = row.template.header(row.arguments)
    if close is None and header and (at := text.find(header, reasoning_end, following)) >= 0:
        return at + len(header)
    close = close or row.template.added_tokens.search(text, reasoning_end, following)
    return _skip_blanks(text, close.end() if close else reasoning_end, following)


def _skip_blanks(text: str, at: int, end: int) -> int:
    while at < end and text[at].isspace():
        at += 1
    return at


def _find_calls(row: _Row, turn: Turn, spans: Mapping[str, Span | None], last: int | None) -> Span | None:
    """From the header or blanks before the first call to the end of the last one."""
    text = row.trace.text
    names = [span for name, span in spans.items() if span and name.startswith("name ")]
    if not names:
        return None
    first = min(names)[0]
    others = [span for name, span in spans.items() if span and not name.startswith("name ")]
    reasoning = spans.get("reasoning")
    start = max([turn.header_end, *([turn.empty[1]] if turn.empty else []), *(s[1] for s in others if s[1] <= first)])
    if reasoning and start == reasoning[1]:
        start = max(start, _close_of_thought(row, reasoning[1], first))
    floor = max(max(names)[1], last or 0)
    end = min([turn.end[0] if turn.end else turn.intervals[-1][1], *(s[0] for s in others if s[0] >= floor)])
    inside = next((e for s, e in turn.intervals if s <= floor <= e), end)
    end = min(end, inside)
    while end > floor and text[end - 1].isspace():
        end -= 1
    return start, end


def _close_of_thought(row: _Row, reasoning_end: int, following: int) -> int:
    """Behind the tag or token that closes a thought, before any blanks or header that follow."""
    text = row.trace.text
    close = THINK_CLOSE.search(text, reasoning_end, following)
    close = close or row.template.added_tokens.search(text, reasoning_end, following)
    return close.end() if close else reasoning_end


# --- cut completions ---


def _find_cut(
    row: _Row,
    k: int,
    pieces: Pieces,
    turn: Turn,
    found: tuple[Span | None, Span | None],
    marks: _Marks,
    marked: _Marked | None,
) -> int:
    """Where the generated text of a cut message ends. Raises RowError `truncated_reasoning`."""
    text = row.trace.text
    reasoning, answer = found
    if turn.empty and THINK_OPEN.match(text, turn.empty[1]):
        raise RowError("truncated_reasoning", f"the template closes a thought that message {k} had only begun")
    if pieces.calls and marked:
        return _end_of_calls(row, k, pieces.calls, turn, marks, marked)
    if answer and pieces.answer:
        return answer[1] + _kept_blanks(row, k, pieces.answer)
    if reasoning and pieces.reasoning:
        field, _, end = pieces.reasoning
        said = _text_of(row.messages[k]) if field == "content" else ""
        if k in row.conversation.closed or THINK_CLOSE.search(said, end):
            return _close_of_thought(row, reasoning[1], turn.stop)
        return reasoning[1] + _kept_blanks(row, k, pieces.reasoning)
    if turn.empty:
        opener = THINK_OPEN.match(text, turn.empty[0])
        return opener.end() if opener else turn.empty[0]
    return turn.header_end


def _kept_blanks(row: _Row, k: int, piece: tuple[str, int, int]) -> int:
    """How many of the blanks behind a piece the template kept: that many may lie before a mark unnoticed."""
    message = row.messages[k]
    field, _, end = piece
    text = _text_of(message) if field == "content" else message[field]
    base = _free_plane(row.trace.text)
    for stop in range(len(text), end, -1):
        if not text[stop - 1].isspace():
            continue
        shown = text[:stop] + chr(base + 1) + text[stop:]
        if field == "content":
            new = _with_content(message, shown)
        else:
            new = {**message, **{alias: shown for alias in _REASONING if message.get(alias) == text}}
        messages = [*row.messages[:k], new, *row.messages[k + 1 :]]
        marked = _read_marks(row, messages, row.conversation.tools, row.conversation.documents, base)
        if marked is not None and marked.places.get(1):
            return stop - end
    return 0


def _end_of_calls(row: _Row, k: int, calls: int, turn: Turn, marks: _Marks, marked: _Marked) -> int:
    text = row.trace.text
    name = _find_piece(marks.of.get((k, f"name {calls - 1}")), marked, turn.intervals)
    shown = _find_piece(marks.of.get((k, f"arguments {calls - 1}")), marked, turn.intervals)
    at = name[1] if name else turn.header_end
    arguments = _function(row.messages[k]["tool_calls"][-1]).get("arguments")
    spelled = json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, dict) and (found := text.find(spelled, at, turn.stop)) >= 0:
        return found + len(spelled)
    if shown:
        return shown[1]
    leaf = json.dumps(_last_leaf(arguments), ensure_ascii=False)
    found = text.rfind(leaf, at, turn.stop) if arguments else -1
    return found + len(leaf) if found >= 0 else at


def _last_leaf(value: Any) -> Any:
    while isinstance(value, dict | list) and value:
        value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
    return value


# --- control tokens typed by messages, and roles that leave no text ---


def _types_control_tokens(conversation: Conversation, template: ChatTemplate) -> bool:
    """Whether any text of the row spells a control token."""
    prefixes = template.control_prefixes
    search = template.control_tokens.search
    rest = [conversation.tools, conversation.documents]
    for message in conversation.messages:
        for value in message.values():
            if type(value) is str:
                for prefix in prefixes:
                    # the first character alone is found by memchr, thirty times as fast as two (measured)
                    if prefix[0] in value and prefix in value:
                        if search(value):
                            return True
                        break
            elif value:
                rest.append(value)
    return any(search(text) for value in rest if value for text in _strings(value))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _broken(value: Any, template: ChatTemplate, mark: str) -> Any:
    """The value with every control token in its text broken up by a mark behind the token's first character."""
    if isinstance(value, str):
        if not template.control_tokens.search(value):
            return value
        return template.control_tokens.sub(lambda m: m[0][0] + mark + m[0][1:], value)
    if isinstance(value, dict):
        return {key: _broken(item, template, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_broken(item, template, mark) for item in value]
    if isinstance(value, tuple):
        return tuple(_broken(item, template, mark) for item in value)
    return value


def _judge_control_tokens(row: _Row, marked: _Marked | None, *, typed: bool) -> tuple[tuple[Span, ...], dict[str, int]]:
    """The ranges to encode as plain text, and the counts. Raises RowError `control_tokens`."""
    if not typed:
        return (), {}
    text, how = row.trace.text, row.config.control_tokens
    spans = []
    for at in marked.broken if marked else ():
        token = row.template.control_tokens.match(text, at)
        if token:
            spans.append(token.span())
    unsure = marked is None or not spans
    if how == "reject" and (spans or unsure):
        shown = text[spans[0][0] : spans[0][1]] if spans else "a control token"
        raise RowError("control_tokens", f"a message types {shown!r}")
    if how == "literal" and unsure and row.template.control_tokens.search("".join(_strings(row.messages))):
        raise RowError("control_tokens", "a control token typed by a message cannot be told from the template's own")
    return tuple(sorted(set(spans))) if how == "literal" else (), {"control_token_rows": 1} if spans or unsure else {}


def _shows_every_role(row: _Row) -> bool:
    """Whether every message that says something is known to be in the text, without looking closely."""
    shown = row.owned
    known: set[tuple[str, bool]] = row.template.memory.get(_key(row, "roles"), set())
    for k, message in enumerate(row.messages):
        if k in shown or message.get("role") == "assistant":
            continue
        said = _text_of(message).strip()
        if said and ((message["role"], k == 0) not in known or said not in row.trace.text):
            return False
    return True


def _require_roles(row: _Row, marks: _Marks, marked: _Marked | None) -> None:
    """Raises RowError `role` where a message that says something left no text."""
    shown = row.owned
    for k, message in enumerate(row.messages):
        if k in shown or message.get("role") == "assistant" or (k, "text") not in marks.of:
            continue
        role = message.get("role")
        if marked is not None and not marked.places.get(marks.of[k, "text"][0]):
            raise RowError("role", _LEAVES_NO_TEXT.format(role, role))
        row.template.memory.setdefault(_key(row, "roles"), set()).add((role, k == 0))
