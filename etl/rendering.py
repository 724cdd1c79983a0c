"""Conversation -> Rendered: the chat as one string, and the stretches of it that are trained.

    messages ─trace→ text, and whose it is ─read_turn→ Turn (header, thought, answer, calls, end) ─mask→ spans

What lies where in a turn is never guessed from the text alone. The careful way renders the row once more, with marks
around each piece that a message wrote (`etl.marks`), and keeps the literal text around the pieces as a form
(`etl.turns`). A row all of whose turns equal known forms, character by character, needs no second render.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from etl.config import RunConfig
from etl.errors import RowError
from etl.marks import Marked, kept_blanks, mark_all, strings_in
from etl.pieces import Piece, Pieces, content_text, field_text, function_of, piece_text, read_pieces
from etl.records import Conversation, Message, Rendered, Span
from etl.sandbox import Trace
from etl.template import THINK_CLOSE, THINK_OPEN, ChatTemplate
from etl.turns import Form, Masked, Said, Turn, intersect, join, make_form, mask, match_form, subtract, switches

_FormKey: TypeAlias = tuple[tuple[bool, bool, int], tuple[bool, ...]]
"""`Said.key`, and `switches` of the configuration."""

_Frame: TypeAlias = tuple[bool, str, str]
"""Whether a message's text lay in the loops' own stretch of it, and what of the template's stood on either side."""

_FORMS_KEPT: Final = 64
_FRAMES_KEPT: Final = 16
_FRAME_WIDTH: Final = 12
_TELLING: Final = 3  # characters of an id by which a call can be told
_BRACKETS: Final = frozenset("<[◁")


def render(conversation: Conversation, template: ChatTemplate, config: RunConfig) -> Rendered:
    """The row's text with its trained spans, by the mask table of the contract.

    Raises RowError: `template` where the template raises, `role` where a message leaves no text, `mask` where the
    trained text cannot be told, `control_tokens`, `truncated`, `truncated_reasoning`, `json` where a value is nested
    too deep.
    """
    if conversation.text is not None:
        text = conversation.text
        return Rendered(text, ((0, len(text)),) if text else ())
    try:
        return _render(conversation, template, config)
    except RecursionError as error:  # what a message holds is walked in several ways, none of them without end
        raise RowError("json", "nested too deep to be rendered") from error


def settle(conversation: Conversation, template: ChatTemplate) -> list[Message]:
    """The messages exactly as they are rendered: `apply_chat_template` on them gives our ids. Raises RowError."""
    return _trace(conversation, template, template.merged(conversation.template_kwargs))[0]


@dataclass(slots=True)
class _Row:
    """A conversation being rendered: its trace, and which of the messages that are trained were cut."""

    conversation: Conversation
    template: ChatTemplate
    config: RunConfig
    arguments: Mapping[str, Any]
    messages: list[Message]
    trace: Trace
    cut: frozenset[int]
    owned: dict[int, list[Span]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for start, end, owner in self.trace.owners:
            self.owned.setdefault(owner, []).append((start, end))

    def intervals(self, k: int) -> list[Span]:
        """Where message k's text lies, as the loops tell.

        An end token written behind the turn's own iteration, by the next one or behind the loop, belongs to the turn.
        """
        found = list(self.owned.get(k, ()))
        if not found:
            return found
        text, late = self.trace.text, self.template.late_ending
        start, end = found[-1]
        if k == len(self.messages) - 1 and end == self.trace.owners[-1][1] < len(text):
            token = self.template.added_tokens.search(text, end)
            if token and token[0] not in self.template.openers:  # else a header for the next reply (Command A)
                found[-1] = (start, len(text))
        elif late and text.startswith(late, end):
            found[-1] = (start, end + len(late))
        return found

    def pieces(self, k: int) -> Pieces:
        """What assistant message k says."""
        reads = self.template.reasoning_field
        opens = reads is None and self.template.opens_thinking(self.conversation.template_kwargs)
        return read_pieces(self.messages[k], reads, open_prompt=opens, cut=k in self.cut)

    def render(self, messages: Sequence[Message], tools: Any, documents: Any) -> str:
        """The text of other messages under the row's template arguments. Raises RowError."""
        return self.template.trace(messages, tools, documents, self.arguments).text

    @property
    def forms(self) -> dict[_FormKey, list[Form]]:
        """What is known of the text around pieces."""
        return self.template.recall("forms", self.arguments, dict)

    @property
    def frames(self) -> dict[str, list[_Frame]]:
        """What is known of the text around the texts of messages, by role."""
        return self.template.recall("frames", self.arguments, dict)


# --- one row ---


def _render(conversation: Conversation, template: ChatTemplate, config: RunConfig) -> Rendered:
    if template.shows_responses:
        _require_own_text(conversation)
    row = _open(conversation, template, config)
    typed = _types_control_tokens(conversation, template)
    if not (typed or row.cut) and _shows_every_role(row):
        turns = _turns_by_form(row)
        if turns is not None:
            return _finish(row, turns, (), (), {})
    return _render_carefully(row, typed=typed)


def _open(conversation: Conversation, template: ChatTemplate, config: RunConfig) -> _Row:
    cut = conversation.cut.intersection(conversation.trained) if conversation.cut else conversation.cut
    if cut and config.truncated_completions == "reject":
        raise RowError("truncated", f"message {min(cut)} was cut by the length limit")
    arguments = template.merged(conversation.template_kwargs)
    messages, trace = _trace(conversation, template, arguments)
    return _Row(conversation, template, config, arguments, messages, trace, cut)


def _trace(
    conversation: Conversation, template: ChatTemplate, arguments: Mapping[str, Any]
) -> tuple[list[Message], Trace]:
    """Render; where the template raises on tool arguments as they are, once more with them spelled otherwise."""
    messages = template.prepare(conversation.messages)
    tools, documents = conversation.tools, conversation.documents
    try:
        return messages, template.trace(messages, tools, documents, arguments)
    except RowError:
        for spell in (_empty_arguments, _text_arguments):
            spelled = [_respell(message, spell) for message in messages]
            if all(new is old for new, old in zip(spelled, messages, strict=True)):
                continue
            try:
                return spelled, template.trace(spelled, tools, documents, arguments)
            except RowError:
                continue
        raise


def _empty_arguments(arguments: Any) -> Any:
    """No arguments where their text is blank, as some servers write it."""
    return {} if isinstance(arguments, str) and not arguments.strip() else arguments


def _text_arguments(arguments: Any) -> Any:
    """The JSON text of arguments that are an object."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _respell(message: Message, spell: Callable[[Any], Any]) -> Message:
    """The message with other tool arguments; the same object where there is nothing to spell."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    spelled = [_respell_call(call, spell) for call in calls]
    same = all(new is old for new, old in zip(spelled, calls, strict=True))
    return message if same else {**message, "tool_calls": spelled}


def _respell_call(call: Any, spell: Callable[[Any], Any]) -> Any:
    function = function_of(call)
    arguments = function.get("arguments")
    if (other := spell(arguments)) is arguments:
        return call
    spelled = {**function, "arguments": other}
    return {**call, "function": spelled} if "function" in call else spelled


def _finish(
    row: _Row, turns: Sequence[Masked], cuts: Sequence[int], literal: tuple[Span, ...], counts: Mapping[str, int]
) -> Rendered:
    """Put the row together. `turns`: its trained ones; `cuts`: where the generated text of cut messages ends."""
    spans: list[Span] = []
    last: Span | None = None
    found = dict(counts)
    for turn in turns:
        if turn.dropped:
            found["dropped_reasoning_turns"] = found.get("dropped_reasoning_turns", 0) + 1
            last = None  # what an earlier turn trains is not what the generator recorded of this one
            continue
        if turn.empty:
            found["empty_think_blocks"] = found.get("empty_think_blocks", 0) + 1
        own = turn.spans if row.trace.generated is None else intersect(turn.spans, row.trace.generated)
        spans += own
        last = _behind_prompt(row, turn.header_end, own) if own else None
    return Rendered(row.trace.text, join(spans), tuple(sorted(cuts)), literal, found, last)


def _behind_prompt(row: _Row, header_end: int, own: Sequence[Span]) -> Span | None:
    """The turn's trained range less what the generation prompt supplies."""
    prompt = row.template.prompt(row.arguments)
    begin, stop = own[0][0], own[-1][1]
    at = header_end - len(row.template.header(row.arguments))
    if at >= 0 and row.trace.text.startswith(prompt, at):
        begin = max(begin, at + len(prompt))
    return (begin, stop) if begin < stop else None


def _require_own_text(conversation: Conversation) -> None:
    """Raises RowError `mask` where an assistant message carries the texts of tools, which are not its own."""
    for k, message in enumerate(conversation.messages):
        if message.get("role") == "assistant" and message.get("tool_responses"):
            raise RowError("mask", f"messages[{k}].tool_responses: give what tools said in messages of role tool")


# --- by form ---


def _turns_by_form(row: _Row) -> list[Masked] | None:
    """The trained turns of a row all of which equal a known form; None where one does not."""
    if not row.conversation.trained:
        return []
    forms = row.forms
    if not forms or not row.template.follows_loops:
        return None
    turns = []
    for k in row.conversation.trained:
        intervals = row.intervals(k)
        turn = _turn_by_form(row, k, intervals[0], forms) if len(intervals) == 1 else None
        if turn is None:
            return None
        turns.append(turn)
    return turns


def _turn_by_form(row: _Row, k: int, interval: Span, forms: Mapping[_FormKey, Sequence[Form]]) -> Masked | None:
    said = _said(row, k)
    if said is None:
        return None
    for form in forms.get((said.key, switches(row.config)), ()):
        turn = match_form(form, row.trace.text, interval, said)
        if turn is not None:
            return turn
    return None


def _said(row: _Row, k: int) -> Said | None:
    """What message k says, in a form's words; the plainest message, which most are, takes a short cut.

    None where forms do not serve: a call without a name, and pieces that begin with a tag, which may make an empty
    block, alone or with the template's own tag.
    """
    message = row.messages[k]
    content, reasoning = message.get("content"), message.get(row.template.reasoning_field or "")
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()
    if message.get("tool_calls"):
        functions = [function_of(call) for call in message["tool_calls"]]
        if not all(isinstance(function.get("name"), str) and function["name"] for function in functions):
            return None
        calls = tuple((str(f["name"]), tuple(strings_in(f.get("arguments")))) for f in functions)
    if type(content) is str and type(reasoning) is str:
        reasoning, answer = reasoning.strip(), content.strip()
    else:
        pieces = row.pieces(k)
        reasoning = piece_text(message, pieces.reasoning) if pieces.reasoning else ""
        answer = piece_text(message, pieces.answer) if pieces.answer else ""
    tags = row.template.thought_tags
    if _begins_with_tag(reasoning, tags) or _begins_with_tag(answer, tags):
        return None
    return Said(reasoning, answer, calls)


def _begins_with_tag(text: str, tags: tuple[str, ...]) -> bool:
    return text.startswith(tags) or (text[:1] in _BRACKETS and bool(THINK_OPEN.match(text) or THINK_CLOSE.match(text)))


def _remember(row: _Row, k: int, turn: Turn, masked: Masked, pieces: Pieces, marked: Marked) -> None:
    said = _said(row, k)
    reasoning, answer = (marked.find(k, name, turn.intervals) for name in ("reasoning", "answer"))
    if (pieces.answer and not answer) or _is_changed(row, k, pieces, {"reasoning": reasoning, "answer": answer}):
        return  # of what the template leaves out in one row it may show more in another
    names = [marked.find(k, f"name {i}", turn.intervals) for i in range(pieces.calls)]
    whole = [marked.find_call(k, i, turn.intervals) for i in range(pieces.calls)]
    calls = [(name[0], call[1]) for name, call in zip(names, whole, strict=True) if name and call]
    if said is None or len(calls) < pieces.calls or calls != sorted(calls):
        return
    form = make_form(turn, masked, row.trace.text, reasoning, answer, calls)
    known = row.forms.setdefault((said.key, switches(row.config)), [])
    if form is not None and form not in known and len(known) < _FORMS_KEPT:
        known.append(form)


# --- the careful way ---


def _render_carefully(row: _Row, *, typed: bool) -> Rendered:
    pieces = {k: row.pieces(k) for k, message in enumerate(row.messages) if message.get("role") == "assistant"}
    tools, documents = row.conversation.tools, row.conversation.documents
    tokens = row.template.control_tokens if typed else None
    marked = mark_all(row.messages, pieces, tools, documents, row.trace.text, row.render, tokens)
    if marked is None:
        raise RowError("mask", "the template changes text, so that the parts of a message cannot be told in it")
    _require_roles(row, marked)
    literal, counts = _judge_control_tokens(row, marked, typed=typed)
    others = [span for k, span in marked.bounds().items() if k not in row.conversation.trained]
    turns: list[Masked] = []
    cuts: list[int] = []
    for k in row.conversation.trained:
        turn = _read_turn(row, k, pieces[k], marked)
        turn = turn._replace(foreign=tuple(intersect(turn.intervals, others)))
        _require_apart(row, marked, _around_pieces(k, pieces[k], turn, marked))
        cut: int | None = None
        if k in row.cut and row.config.truncated_completions == "mask-end" and not turn.dropped:
            cut = _find_cut(row, k, pieces[k], turn, marked)
            cuts.append(cut)
        masked = mask(turn, row.config, cut)
        if k not in row.cut:
            _remember(row, k, turn, masked, pieces[k], marked)
        turns.append(masked)
    if row.cut:
        counts["truncated_rows"] = 1
    return _finish(row, turns, cuts, literal, counts)


def _read_turn(row: _Row, k: int, pieces: Pieces, marked: Marked) -> Turn:
    """Where things lie in the turn of message k. Raises RowError `mask`."""
    intervals = _find_intervals(row, k, pieces, marked)
    if not intervals:
        return Turn(((0, 0),), 0, dropped=True)
    spoken = {name: marked.find(k, name, intervals) for name in pieces.spoken}
    reasoning = spoken.get("reasoning")
    calls = [_find_call(row, k, i, marked, intervals) for i in range(pieces.calls)]
    present = sorted(span for span in (*spoken.values(), *calls) if span)
    header_end = _find_header(row, k, intervals, present)
    empty = _find_empty(row, k, intervals, header_end, present)
    floor = max([header_end, *(span[1] for span in present), *([empty[1]] if empty else [])])
    turn = Turn(
        intervals,
        header_end,
        empty=empty,
        end=_find_end(row, intervals, floor, marked.broken),
        dropped=len(present) < len(spoken) + len(calls) or _is_shortened(row, k, pieces, spoken),
    )
    limit = turn.end[0] if turn.end else intervals[-1][1]
    if empty and not reasoning:
        turn = _with_empty_thought(row, turn, empty, min([limit, *(start for start, _ in present)]))
    if reasoning:
        turn = _with_thought(row, turn, reasoning, limit, present)
    if pieces.calls:
        turn = turn._replace(calls=_bound_calls(row, turn, spoken, [span for span in calls if span]))
    return turn


def _is_shortened(row: _Row, k: int, pieces: Pieces, found: Mapping[str, Span | None]) -> bool:
    """Whether the template left something out inside a piece; one that it escapes grows, and is not dropped."""
    return any(
        len("".join(shown.split())) < len("".join(said.split()))
        for said, shown in _said_and_shown(row, k, pieces, found)
        if said != shown
    )


def _is_changed(row: _Row, k: int, pieces: Pieces, found: Mapping[str, Span | None]) -> bool:
    """Whether the template shows a piece otherwise than the message says it."""
    return any(said != shown for said, shown in _said_and_shown(row, k, pieces, found))


def _said_and_shown(row: _Row, k: int, pieces: Pieces, found: Mapping[str, Span | None]) -> Iterator[tuple[str, str]]:
    for name, piece in (("reasoning", pieces.reasoning), ("answer", pieces.answer)):
        span = found.get(name)
        if piece and span:
            yield piece_text(row.messages[k], piece), row.trace.text[span[0] : span[1]]


def _find_header(row: _Row, k: int, intervals: Sequence[Span], present: Sequence[Span]) -> int:
    """Where the assistant's text begins: behind the role header, looked for before the first thing that it wrote.

    A turn without one begins behind what the template writes when it is asked for the reply: DeepSeek closes the texts
    of tools there.
    """
    text, header = row.trace.text, row.template.header(row.arguments)
    start, end = intervals[0]
    limit = present[0][0] if present else end
    begin = row.template.special_tokens.get("bos_token") or ""
    if begin and text.startswith(begin, start) and start + len(begin) <= limit:
        start += len(begin)
    at = text.find(header, start, limit)
    if at < 0:  # its first blanks may be the end of the message before (Alpaca)
        at = text.find(header, max(0, start + 1 - len(header)), limit)
    if at >= 0:
        return at + len(header)
    asked = _asked_for(row, k)
    return start + len(asked) if start + len(asked) <= limit and text.startswith(asked, start) else start


def _asked_for(row: _Row, k: int) -> str:
    """What the template writes behind the messages before k when it is asked for a reply, a thought's opener left out;
    '' where it does not say.
    """
    tools, documents, before = row.conversation.tools, row.conversation.documents, row.messages[:k]
    try:
        trace = row.template.trace(before, tools, documents, row.arguments, add_generation_prompt=True)
    except RowError:  # no template needs to render half a conversation
        return ""
    tail = trace.text[max((end for _, end, _ in trace.owners), default=len(trace.text)) :]
    opener = THINK_OPEN.search(tail)
    return tail[: opener.start()] if opener else tail


def _find_empty(row: _Row, k: int, intervals: Sequence[Span], header_end: int, present: Sequence[Span]) -> Span | None:
    """The empty think block at the start of the turn. Some templates write only the tag that closes it (GLM 4.7)."""
    text = row.trace.text
    end = next((end for start, end in intervals if start <= header_end <= end), header_end)
    found = row.template.empty_thought.match(text, header_end, end)
    if found:
        return found.span(1)
    limit = min(end, present[0][0]) if present else end
    close = THINK_CLOSE.match(text, _skip_blanks(text, header_end, limit), limit)
    if close is None or (row.template.reasoning_field is None and close[0] in content_text(row.messages[k])):
        return None
    return close.start(), _skip_blanks(text, close.end(), limit)


def _find_end(row: _Row, intervals: Sequence[Span], floor: int, broken: Sequence[int]) -> Span | None:
    """The last added token that the template emitted in the turn, behind all that the message wrote.

    Where a tool's text is opened there instead, the turn ends, without a token, before it.
    """
    text, openers = row.trace.text, row.template.openers
    opened: int | None = None
    for start, end in reversed(intervals):
        for match in reversed(list(row.template.added_tokens.finditer(text, max(start, floor), end))):
            if match[0] in openers:
                opened = match.start()
            elif match.start() not in broken and not THINK_CLOSE.fullmatch(match[0]):
                return match.span()
    return None if opened is None else (opened, opened)


def _with_thought(row: _Row, turn: Turn, reasoning: Span, limit: int, present: Sequence[Span]) -> Turn:
    """The turn with the tag that opens its thought, and the end of what closes it.

    That is a tag and the blanks behind it, else the next header, else the next token. `limit`: where the end token
    begins; `present`: the turn's pieces, some of which may lie before the thought.
    """
    text, header = row.trace.text, row.template.header(row.arguments)
    before = [stop for _, stop in present if stop <= reasoning[0]]
    following = min([limit, *(start for start, _ in present if start >= reasoning[1])])
    floor = max([turn.empty[1] if turn.empty else turn.header_end, *before])
    opener = THINK_OPEN.search(text, floor, reasoning[0])
    begin = (opener.start() if opener else reasoning[0]) if before else turn.header_end
    span = opener and (opener.start(), opener.end() + text.startswith("\n", opener.end()))
    close = THINK_CLOSE.search(text, reasoning[1], following)
    at = text.find(header, reasoning[1], following) if header and close is None else -1
    end = at + len(header)
    if at < 0:
        end = _skip_blanks(text, _close_of_thought(row, reasoning[1], following), following)
    return turn._replace(opener=span, thought=(begin, end))


def _with_empty_thought(row: _Row, turn: Turn, empty: Span, limit: int) -> Turn:
    """The same of an empty think block, for those who train it (`--train-empty-think`). `limit`: the first piece."""
    text, header = row.trace.text, row.template.header(row.arguments)
    opener = THINK_OPEN.match(text, empty[0])
    span = opener and (opener.start(), opener.end() + text.startswith("\n", opener.end()))
    behind = empty[1] + len(header)
    end = behind if behind <= limit and text.startswith(header, empty[1]) else empty[1]
    return turn._replace(opener=span, thought=(turn.header_end, end))


def _close_of_thought(row: _Row, reasoning_end: int, following: int) -> int:
    """Behind the tag or token that closes a thought, before any blanks or header that follow."""
    text = row.trace.text
    close = THINK_CLOSE.search(text, reasoning_end, following)
    close = close or row.template.added_tokens.search(text, reasoning_end, following)
    return close.end() if close else reasoning_end


def _skip_blanks(text: str, at: int, end: int) -> int:
    while at < end and text[at].isspace():
        at += 1
    return at


def _find_call(row: _Row, k: int, i: int, marked: Marked, intervals: Sequence[Span]) -> Span | None:
    """Where a tool call lies; None where it was left out.

    Told by its marks, else by its id, which some templates write for the name (Kimi), or, where the template looks
    names up and calls can bear no marks, by its name.
    """
    found = marked.find_call(k, i, intervals)
    if found:
        return found
    call = row.messages[k]["tool_calls"][i]
    floor = max((span[1] for name in ("reasoning", "answer") if (span := marked.find(k, name, intervals))), default=0)
    identity = call.get("id") if isinstance(call, dict) else None
    name = None if marked.bears(k, f"name {i}") else function_of(call).get("name")
    for said, least in ((name, 1), (identity, _TELLING)):
        if isinstance(said, str) and len(said) >= least:
            for start, end in intervals:
                at = row.trace.text.find(said, max(start, floor), end)
                if at >= 0:
                    return at, at + len(said)
    return None


def _bound_calls(row: _Row, turn: Turn, spoken: Mapping[str, Span | None], calls: Sequence[Span]) -> Span | None:
    """From the header or blanks before the first call to the end of the last one."""
    if not calls:
        return None
    text = row.trace.text
    first, last = min(calls)[0], max(end for _, end in calls)
    before = [span[1] for span in spoken.values() if span and span[1] <= first]
    after = [span[0] for span in (*spoken.values(), turn.thought) if span and span[0] >= last]
    start = max([turn.header_end, *before, *([turn.empty[1]] if turn.empty else [])])
    reasoning, header = spoken.get("reasoning"), row.template.header(row.arguments)
    if header and (at := text.find(header, start, first)) >= 0:
        start = at  # what stands before the call's own header closes the piece before it (gpt-oss)
    elif reasoning and start == reasoning[1]:
        start = _close_of_thought(row, start, first)
    limit = turn.end[0] if turn.end else turn.intervals[-1][1]
    if turn.end and not row.template.control_tokens.match(text, *turn.end):
        limit = turn.end[1]  # a tag that closes the call, where nothing else ends the turn (GLM)
    inside = next((high for low, high in turn.intervals if low <= last <= high), limit)
    end = min([limit, inside, *after])
    while end > last and text[end - 1].isspace():
        end -= 1
    return start, end


# --- whose text it is, where the loops do not tell ---


def _find_intervals(row: _Row, k: int, pieces: Pieces, marked: Marked) -> tuple[Span, ...]:
    """Where message k's text lies: as the loops tell, or, where its pieces lie elsewhere, around its pieces."""
    intervals = row.intervals(k) if row.template.follows_loops else []
    says = marked.says(k)
    found = any(marked.find(k, name, intervals) for name in pieces.spoken) or any(
        marked.find_call(k, i, intervals) for i in range(pieces.calls)
    )
    if intervals and (found or not says):
        return tuple(intervals)
    bounds = marked.bounds()
    if k in bounds:
        return (_turn_around(row, k, bounds),)
    if says or row.template.follows_loops:
        return tuple(intervals)  # nothing that it says was rendered
    raise RowError("mask", f"message {k} says nothing by which it could be found in this template's text")


def _turn_around(row: _Row, k: int, bounds: Mapping[int, Span]) -> Span:
    """The turn around what message k wrote: from its role header to what ends a turn in this template."""
    text, template = row.trace.text, row.template
    start, end = bounds[k]
    low = max((high for j, (_, high) in bounds.items() if j != k and high <= start), default=0)
    high = min((first for j, (first, _) in bounds.items() if j != k and first >= end), default=len(text))
    header = template.header(row.arguments)
    begin = text.rfind(header, low, start) if header else -1
    if begin < 0:
        openers = [match for match in THINK_OPEN.finditer(text, low, start) if not text[match.end() : start].strip()]
        begin = openers[0].start() if openers else start
    if k == len(row.messages) - 1 and high == len(text):
        return begin, high
    if template.ending and text.startswith(template.ending, end):
        return begin, end + len(template.ending)
    close = THINK_CLOSE.match(text, _skip_blanks(text, end, high), high)
    floor = close.end() if close else end
    token = template.added_tokens.search(text, floor, high)
    following = text.find(header, floor, high) if header else -1
    return begin, floor if token is None or 0 <= following <= token.start() else token.end()


# --- cut completions ---


def _find_cut(row: _Row, k: int, pieces: Pieces, turn: Turn, marked: Marked) -> int:
    """Where the generated text of a cut message ends. Raises RowError `truncated_reasoning`."""
    text = row.trace.text
    reasoning, answer = (marked.find(k, name, turn.intervals) for name in ("reasoning", "answer"))
    if turn.empty and THINK_OPEN.match(text, turn.empty[1]):
        raise RowError("truncated_reasoning", f"the template closes a thought that message {k} had only begun")
    ends = [_end_of_calls(row, k, pieces.calls, turn, marked)] if pieces.calls else []
    if answer and pieces.answer:
        ends.append(answer[1] + _kept_blanks(row, k, pieces.answer))
    if ends:
        return max(ends)  # Gemma 4 writes the answer behind the calls
    if reasoning and pieces.reasoning:
        name, _, end = pieces.reasoning
        closed = name == "content" and THINK_CLOSE.search(field_text(row.messages[k], name), end)
        if closed or k in row.conversation.closed:
            return _close_of_thought(row, reasoning[1], turn.stop)
        return reasoning[1] + _kept_blanks(row, k, pieces.reasoning)
    if turn.empty:
        opener = THINK_OPEN.match(text, turn.empty[0])
        return opener.end() if opener else turn.empty[0]
    return turn.header_end


def _kept_blanks(row: _Row, k: int, piece: Piece) -> int:
    tools, documents = row.conversation.tools, row.conversation.documents
    return kept_blanks(row.messages, k, piece, tools, documents, row.trace.text, row.render)


def _end_of_calls(row: _Row, k: int, calls: int, turn: Turn, marked: Marked) -> int:
    """Behind the last character of the last call's arguments, as far as they can be told in the text."""
    text = row.trace.text
    said = [span for name in ("reasoning", "answer") if (span := marked.find(k, name, turn.intervals))]
    name = marked.find(k, f"name {calls - 1}", turn.intervals)
    at = name[1] if name else max([turn.header_end, *(end for _, end in said)])
    arguments = function_of(row.messages[k]["tool_calls"][-1]).get("arguments")
    spelled = json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, dict) and (found := text.find(spelled, at, turn.stop)) >= 0:
        return found + len(spelled)
    shown = marked.find(k, f"arguments {calls - 1}", turn.intervals)
    at = shown[1] if shown else at
    last = _last_leaf(arguments)
    leaf = json.dumps(last, ensure_ascii=False)
    # texts that are not blank bear marks wherever they are rendered, but where calls can bear none
    is_marked = shown and isinstance(last, str) and last.strip()
    found = text.rfind(leaf, at, turn.stop) if arguments and not is_marked else -1
    return found + len(leaf) if found >= 0 else at


def _last_leaf(value: Any) -> Any:
    while isinstance(value, dict | list) and value:
        value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
    return value


# --- control tokens that messages type, and roles that leave no text ---


def _types_control_tokens(conversation: Conversation, template: ChatTemplate) -> bool:
    """Whether any text of the row spells a control token."""
    first, search = template.control_starts, template.control_tokens.search
    rest = [conversation.tools, conversation.documents]
    for message in conversation.messages:
        for value in message.values():
            if type(value) is not str:
                rest.append(value)
                continue
            for character in first:
                # one character is found by memchr, many times as fast as the expression (measured)
                if character in value and search(value):
                    return True
    return any(search(text) for value in rest if value for text in strings_in(value, keys=True))


def _judge_control_tokens(row: _Row, marked: Marked, *, typed: bool) -> tuple[tuple[Span, ...], dict[str, int]]:
    """The ranges to encode as plain text, and the counts. Raises RowError `control_tokens`."""
    if not typed:
        return (), {}
    text, how, tokens = row.trace.text, row.config.control_tokens, row.template.control_tokens
    spans = sorted({match.span() for at in marked.broken if (match := tokens.match(text, at))})
    hidden = not marked.breaks  # they cannot be told from the template's own
    if how == "reject" and (spans or hidden):
        raise RowError("control_tokens", f"a message types {text[slice(*spans[0])] if spans else 'a control token'!r}")
    if how == "literal" and hidden:
        raise RowError("control_tokens", "a control token that a message types cannot be told from the template's own")
    return tuple(spans) if how == "literal" else (), {"control_token_rows": 1} if spans or hidden else {}


def _shows_every_role(row: _Row) -> bool:
    """Whether every message that says something is known to be in the text, without looking closely."""
    frames = row.frames
    for k, message in enumerate(row.messages):
        role = message["role"]
        said = "" if role == "assistant" else content_text(message).strip()
        if said and not any(_is_shown(row, k, said, frame) for frame in frames.get(role, ())):
            return False
    return True


def _is_shown(row: _Row, k: int, said: str, frame: _Frame) -> bool:
    """Whether message k's text is in the frame: in its own stretch, or, of the first message alone, elsewhere.

    Elsewhere it must not be what another message says there, which may begin alike.
    """
    is_own, before, after = frame
    text = row.trace.text
    if is_own:
        spans: Sequence[Span] = row.owned.get(k, ())
        if _find_framed(text, spans, before, said, after) is not None:
            return True
        spelled = _spell(said)
        return spelled != said and _find_framed(text, spans, before, spelled, after) is not None
    if k:
        return False
    at = _find_framed(text, ((0, len(text) if before else len(said) + len(after)),), before, said, after)
    if at is None:
        return False
    owner = next((of for start, end, of in row.trace.owners if start <= at < end), None)
    other = "" if owner is None else content_text(row.messages[owner]).strip()
    return not (other and text.startswith(other, at))


def _spell(said: str) -> str:
    """The text as a template writes it that writes JSON."""
    return json.dumps(said, ensure_ascii=False)[1:-1]


def _find_framed(text: str, spans: Sequence[Span], before: str, said: str, after: str) -> int | None:
    """Where what is said begins, between the two, within a span."""
    # looking for the short text in front costs a fifth of looking for a long one (measured)
    first, rest = (before, said) if before else (said, "")
    for start, end in spans:
        at = text.find(first, start, end)
        while at >= 0:
            stop = at + len(first) + len(rest)
            if text.startswith(rest, at + len(first), end) and text.startswith(after, stop, end):
                return at + len(before)
            at = text.find(first, at + 1, end)
    return None


def _require_roles(row: _Row, marked: Marked) -> None:
    """Raises RowError `role` where a message that says something left no text of its own."""
    text = row.trace.text
    turns = sorted({0, len(text), *(at for start, end, _ in row.trace.owners for at in (start, end))})
    marks = sorted({at for found in marked.places.values() for at in found})
    names = _names(row.messages)
    for k, message in enumerate(row.messages):
        role, said = message["role"], content_text(message).strip()
        if role == "assistant" or not said:
            continue
        pair = marked.of.get((k, "text"))
        is_shown = bool(marked.places.keys() & set(pair)) if pair else k in marked.shown or said in text
        if not is_shown:
            raise RowError("role", f"the template leaves out {role} messages; --role-map {role}=… renames a role")
        place = marked.find(k, "text", [(0, len(text))])
        if place and text[slice(*place)] in (said, _spell(said)):
            _remember_frame(row, k, place, (turns, marks, names))


def _names(messages: Sequence[Message]) -> set[str]:
    """What may stand beside a message's text and differs from row to row: names and ids of calls."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    found = [value for message in messages for value in (message.get("name"), message.get("tool_call_id"))]
    found += [value for call in calls for value in (call.get("id"), function_of(call).get("name"))]
    return {value for value in found if isinstance(value, str) and value}


def _remember_frame(
    row: _Row, k: int, place: Span, edges: tuple[Sequence[int], Sequence[int], Collection[str]]
) -> None:
    """Keep what stands around message k's text at `place`: the template's alone, within the turn where it is its own.

    `edges`: where turns begin and end, where pieces of messages do, and the names that may stand beside.
    """
    text, (start, end), (turns, marks, names) = row.trace.text, place, edges
    is_own = any(low <= start and end <= high for low, high in row.owned.get(k, ()))
    before, after = bisect_left(marks, start), bisect_right(marks, end)
    opened = (bisect_right if is_own else bisect_left)(turns, start) or 1
    closed = min((bisect_left if is_own else bisect_right)(turns, end), len(turns) - 1)
    low = max(start - _FRAME_WIDTH, turns[opened - 1], *marks[max(0, before - 1) : before])
    high = min(end + _FRAME_WIDTH, turns[closed], *marks[after : after + 1])
    for name in names:
        if (at := text.rfind(name, max(0, low - len(name)), start)) >= 0:
            low = max(low, at + len(name))
        if (at := text.find(name, end, high + len(name))) >= 0:
            high = min(high, at)
    frame = is_own, text[low:start], text[end:high]
    known = row.frames.setdefault(row.messages[k]["role"], [])
    if (is_own or (k == 0 and frame[2] and (frame[1] or not start))) and frame not in known:
        known.append(frame)
        del known[:-_FRAMES_KEPT]


def _around_pieces(k: int, pieces: Pieces, turn: Turn, marked: Marked) -> list[Span]:
    """What of the turn of message k its own pieces did not write."""
    calls = [marked.find_call(k, i, turn.intervals) for i in range(pieces.calls)]
    own = [*(marked.find(k, name, turn.intervals) for name in pieces.spoken), *calls]
    return subtract(list(turn.intervals), [span for span in own if span])


def _require_apart(row: _Row, marked: Marked, stretches: Sequence[Span]) -> None:
    """Raises RowError `mask` where a message's text bears no marks and may lie in these stretches of a trained turn."""
    for k, message in enumerate(row.messages):
        said = content_text(message).strip()
        if not said or message.get("role") == "assistant" or marked.bears(k, "text"):
            continue
        if not row.template.follows_loops or any(row.trace.text.find(said, *span) >= 0 for span in stretches):
            raise RowError("mask", f"the template changes text, so that message {k} cannot be told from a reply")
