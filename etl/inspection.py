"""RunConfig -> Preview: the first rows of INPUT as `run` would write them, token by token, every piece named.

    INPUT ─read no further than needed→ Line ─the run's own stages→ ids, mask, rejects ─┐
                              Conversation ─render, once for each switch→ pieces ───────┴→ Token … → Preview → HTML

What belongs to a piece is read off the mask itself: it is what the piece's switch takes out. In HTML a `+` and a colour
mark what is trained, so that nothing hangs on colour alone; invisible characters are made visible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from etl.config import RunConfig
from etl.conversation import parse, parse_row
from etl.engines import Reference
from etl.errors import RowError, UsageError
from etl.lines import Batch, read_batches
from etl.pages import escape, html_page, html_section, printable
from etl.partitions import find_objects
from etl.pieces import content_text
from etl.pipeline import Kit, build_kit, transform
from etl.records import Conversation, Line, Message, ObjectInfo, ObjectRange, Partition, Reject, Rendered, Span
from etl.rendering import render, settle
from etl.storage import Storage
from etl.template import ChatTemplate, probe
from etl.tokenizer import load_tokenizer
from etl.turns import subtract

_Label: TypeAlias = tuple[str, int | None]
"""A piece, and the index of the message that it belongs to."""

_RAW: Final = 500
_LONGEST_CHARACTER: Final = 4  # bytes, so tokens
_ROLES: Final = {"system": "system", "developer": "system", "tool": "tool", "function": "tool", "ipython": "tool"}
_ANY_SHAPE: Final[dict[str, Any]] = {"shape": "auto", "field": {}, "role_map": {}}
_EVERYTHING: Final[dict[str, Any]] = {
    "turns": "all",
    "no_train_think_open": False,
    "no_train_reasoning": False,
    "no_train_tool_calls": False,
    "no_train_end": False,
    "train_empty_think": True,
    "truncated_completions": "train-end",
}
_SWITCHES: Final[dict[str, dict[str, Any]]] = {
    "thinking": {"no_train_reasoning": True},
    "opener": {"no_train_think_open": True},
    "call": {"no_train_tool_calls": True},
    "empty": {"train_empty_think": False},
    "end": {"no_train_end": True},
}
"""Piece -> the switch that takes it out of the mask; a later one lies inside an earlier one, or apart from it."""

_SHOWN_OPTIONS: Final = frozenset(
    [
        *("revision", "chat_template", "template_arg", "chat_template_kwargs", "date", "shape", "field", "role_map"),
        *(*_EVERYTHING, "control_tokens", "max_length", "over_length", "min_loss_tokens"),
    ]
)


class Look(NamedTuple):
    """How a piece of text is called and coloured: `light` and `dark` are backgrounds where it is trained."""

    title: str
    light: str
    dark: str


PIECES: Final[Mapping[str, Look]] = {
    "system": Look("system", "#e0e0e0", "#4a4a4a"),
    "user": Look("user", "#e0e0e0", "#4a4a4a"),
    "tool": Look("tool", "#e0e0e0", "#4a4a4a"),
    "template": Look("template", "#e0e0e0", "#4a4a4a"),
    "header": Look("header", "#d5d5d5", "#555555"),
    "opener": Look("thinking", "#cfe2ff", "#1d3c66"),
    "thinking": Look("thinking", "#cfe2ff", "#1d3c66"),
    "empty": Look("empty think", "#ded7fb", "#3b3269"),
    "answer": Look("answer", "#c9f0cf", "#1d4d2a"),
    "call": Look("tool call", "#ffe4ad", "#584310"),
    "end": Look("end", "#f9cfe7", "#5a2349"),
    "dropped": Look("dropped", "#e0e0e0", "#4a4a4a"),
    "text": Look("text", "#c9f0cf", "#1d4d2a"),
    "prompt": Look("prompt", "#e0e0e0", "#4a4a4a"),
    "generated": Look("generated", "#c9f0cf", "#1d4d2a"),
}
"""What a token can belong to. `opener` is the tag that opens a thought; `dropped` a turn that lost a part of what it
said and is not trained; `text`, `prompt` and `generated` are rows without messages."""

CONTINUES: Final = "\N{MIDLINE HORIZONTAL ELLIPSIS}"
"""Stands for a token that only continues a character."""

HOW_TO_READ: Final = f"{CONTINUES} goes on with a character; ⏎ → ␀ ⟨NBSP⟩ are invisible characters"

_EXAMPLE: Final = 44
_NAMES: Final = {
    "\t": "→",
    "\n": "⏎\n",
    "\r": "␍",
    "\x7f": "␡",
    "\xa0": "⟨NBSP⟩",
    "\xad": "⟨SHY⟩",
    "\u200b": "⟨ZWSP⟩",
    "\u200c": "⟨ZWNJ⟩",
    "\u200d": "⟨ZWJ⟩",
    "\u200e": "⟨LRM⟩",
    "\u200f": "⟨RLM⟩",
    "\u2060": "⟨WJ⟩",
    "\ufe0e": "⟨VS15⟩",
    "\ufe0f": "⟨VS16⟩",
    "\ufeff": "⟨BOM⟩",
}
_BLANK: Final = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
"""Characters that Python counts as printable and that nobody sees."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token: `text` holds the characters that begin in it, so that a row's texts joined are the row.

    A token that only continues a character has none. `piece` is one of PIECES; `message` the index of the message that
    it belongs to, where that is known.
    """

    id: int
    text: str
    piece: str
    trained: bool
    message: int | None = None


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One candidate row. `row` is its 1-based line over all of INPUT, `line` that in its own object.

    `reason`: why it is rejected, or None; such a row has tokens where it could be encoded, else `raw`, the beginning
    of its line. `notes`: what rendering counted, e.g. dropped reasoning.
    """

    row: int
    source: str
    line: int
    id: str = ""
    choice: int = 0
    turn: int = -1
    tokens: tuple[Token, ...] = ()
    reason: str | None = None
    detail: str = ""
    raw: str = ""
    notes: tuple[str, ...] = ()

    @property
    def trained(self) -> int:
        """How many tokens are trained."""
        return sum(token.trained for token in self.tokens)

    @property
    def title(self) -> str:
        """`row 3, completion-000002: 120 tokens, 90 trained`."""
        which = f", choice {self.choice}" * bool(self.choice) + f", turn {self.turn}" * (self.turn >= 0)
        name = printable(f", {self.id}") if self.id else ""
        return f"row {self.row}{name}{which}: {len(self.tokens)} tokens, {self.trained} trained"

    @property
    def verdict(self) -> str:
        """`kept`, or why it is rejected."""
        return "kept" if self.reason is None else printable(f"REJECTED {self.reason}: {self.detail}")

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Token ranges [start, stop) of one message, piece and mask value."""
        alike = itertools.groupby(
            range(len(self.tokens)),
            lambda i: (PIECES[self.tokens[i].piece].title, self.tokens[i].trained, self.tokens[i].message),
        )
        for _, group in alike:
            indices = list(group)
            yield indices[0], indices[-1] + 1

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints of a row: ids and mask as `run` writes them, the tokens' texts, and the pieces."""
        tokens = self.tokens
        pieces = [
            {
                "piece": tokens[start].piece,
                "message": tokens[start].message,
                "start": start,
                "stop": stop,
                "trained": tokens[start].trained,
            }
            for start, stop in self.stretches()
        ]
        return {
            **{name: getattr(self, name) for name in ("row", "source", "line", "id", "choice", "turn")},
            "rejected": None if self.reason is None else {"reason": self.reason, "detail": self.detail},
            "input_ids": [token.id for token in tokens],
            "loss_mask": [int(token.trained) for token in tokens],
            "tokens": [token.text for token in tokens],
            "pieces": pieces,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class LegendLine:
    """What becomes of one kind of text: `trained` is None where that is neither yes nor no, and `says` says it."""

    piece: str
    what: str
    trained: bool | None
    says: str
    example: str = ""


@dataclass(frozen=True, slots=True)
class Preview:
    """The first rows of an input as a run would tokenize them. `options`: those that differ from their defaults."""

    tokenizer: str
    options: tuple[str, ...]
    notes: tuple[str, ...]
    legend: tuple[LegendLine, ...]
    rows: tuple[ShownRow, ...]

    @property
    def subject(self) -> str:
        """`builtin:qwen3.6 --no-train-end`."""
        return printable(" ".join((self.tokenizer, *self.options)))

    def as_dict(self) -> dict[str, Any]:
        """What `preview --json` prints."""
        legend = [
            {"piece": line.piece, "what": line.what, "trained": line.trained, "says": line.says} for line in self.legend
        ]
        return {
            "tokenizer": self.tokenizer,
            "options": list(self.options),
            "notes": list(self.notes),
            "legend": legend,
            "rows": [row.as_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        return "\n".join([self.subject, *(f"{row.title}, {row.verdict}" for row in self.rows)])

    def to_html(self) -> str:
        """One self-contained HTML file, for light and dark."""
        return html_page(f"etl preview: {self.subject}", self._repr_html_(), "margin:0")

    def _repr_html_(self) -> str:
        rows = "".join(map(_html_row, self.rows)) or "<p>no rows</p>"
        return f'<div class="etl-preview"><style>{_style()}</style>{_html_legend(self)}{rows}</div>'


def visible(text: str) -> str:
    """Every character to be seen: a line feed as `⏎` before the break, a tab as `→`, others by picture or name."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char in _NAMES:
        return _NAMES[char]
    if char < " ":
        return chr(0x2400 + ord(char))
    hidden = char in _BLANK or not char.isprintable()
    return f"⟨U+{ord(char):04X}⟩" if hidden else char


def show_token(token: Token) -> str:
    """A token's text, all visible; a mark that would sit on the character before it gets a circle of its own."""
    if not token.text:
        return CONTINUES
    shown = visible(token.text)
    return f"◌{shown}" if unicodedata.category(shown[0]).startswith("M") else shown


def one_line(text: str) -> str:
    """The beginning of a text, all visible and without line breaks."""
    shown = visible(text).replace("\n", "")
    return shown if len(shown) <= _EXAMPLE else shown[: _EXAMPLE - 1] + "…"


# --- normalize ---


def normalize(row: Mapping[str, Any], config: RunConfig) -> list[Message]:
    """The messages that are rendered for a row: `apply_chat_template` on them gives the `input_ids` of its example.

    Of a row that stands for several conversations, the first. Raises RowError where the row would be rejected.
    """
    template = _template(_Key(config, _changed(config)))
    first = parse_row(dict(row), config, template.traits)[0]
    if isinstance(first, Reject):
        raise RowError(first.reason, first.detail)
    return settle(first, template)


@dataclass(frozen=True, slots=True)
class _Key:
    """A configuration, and when its files were `changed`, as a cache's key: mappings cannot be hashed, text can."""

    config: RunConfig
    changed: tuple[int, ...]

    def __hash__(self) -> int:
        return hash(repr(self.config))


def _changed(config: RunConfig) -> tuple[int, ...]:
    """When each local file that template and tokenizer come from was last written."""
    places = [Path(name).expanduser() for name in (config.chat_template, config.tokenizer) if name]
    files = [file for place in places for file in (sorted(place.iterdir()) if place.is_dir() else [place])]
    return tuple(file.stat().st_mtime_ns for file in files if file.is_file())


@functools.lru_cache(maxsize=4)
def _template(key: _Key) -> ChatTemplate:
    return ChatTemplate.from_spec(load_tokenizer(key.config), key.config)


# --- preview ---


def preview(config: RunConfig, n: int = 3, row: int | None = None) -> Preview:
    """The first `n` rows of INPUT, or those of its line `row` alone (from 1 on, counted over all objects in order).

    Reads from the first object on, and no further than it must; needs no OUTPUT and writes nothing. Raises UsageError
    as `run` does, and where there is no such line.
    """
    for name, value in (("n", n), ("row", row)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} must be at least 1")
    storage = Storage.from_config(config)
    listing = find_objects(storage, config.inputs, sys.maxsize)  # so large an object would be looked into: none
    bench = _Bench.set_up(config)
    with contextlib.closing(_read_lines(storage, listing.objects)) as lines:
        wanted = lines if row is None else iter([_line_at(lines, row)])
        shown = list(
            itertools.islice((one for at, item in wanted for one in _show(at, item, bench)), None if row else n)
        )
    return Preview(
        str(config.tokenizer),
        tuple(_options(config)),
        tuple(probe(bench.template)),
        tuple(_legend(bench)),
        tuple(shown),
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """What rows are looked at with: the stages of a run, and the configurations that tell its pieces apart."""

    config: RunConfig
    kit: Kit
    switched: tuple[RunConfig, ...]

    @classmethod
    def set_up(cls, config: RunConfig) -> _Bench:
        """Load the tokenizer and compile the template. Raises UsageError where either cannot be used."""
        spec = load_tokenizer(config)
        # The reference is what a run is held to, and all that a few rows need.
        kit = build_kit(spec, dataclasses.replace(config, engine="transformers"))
        everything = dataclasses.replace(config, **_EVERYTHING)
        switched = (everything, *(dataclasses.replace(everything, **switch) for switch in _SWITCHES.values()))
        return cls(config, kit, switched)

    @property
    def template(self) -> ChatTemplate:
        return self.kit.template

    @property
    def reference(self) -> Reference:
        return self.kit.encoder.truth


def _options(config: RunConfig) -> Iterator[str]:
    """The options of model, rows, mask and size that were given, as flags."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default is not dataclasses.MISSING else {}
        if field.name not in _SHOWN_OPTIONS or value == default:
            continue
        flag = "--" + field.name.replace("_", "-")
        if field.name == "chat_template_kwargs":
            yield f"{flag} {json.dumps(value)}"
        elif isinstance(value, Mapping):
            yield from (f"{flag} {key}={given}" for key, given in value.items())
        else:
            yield flag if value is True else f"{flag} {value}"


def _read_lines(storage: Storage, objects: Sequence[ObjectInfo]) -> Generator[tuple[int, Line | Reject], None, None]:
    """Each line that holds something with its number over all objects. One object and one line at a time."""
    before = 0
    for info in objects:
        whole = Partition(0, "", (ObjectRange(info.url, info.etag, 0, info.size, info.size),))
        lines = 0
        for batch in read_batches(whole, storage, batch_bytes=1, concurrency=1):
            found: list[Line | Reject] = [*batch.lines, *batch.rejects]
            yield from ((before + item.number, item) for item in found)
            lines += batch.line_count
        before += lines


def _line_at(lines: Iterator[tuple[int, Line | Reject]], row: int) -> tuple[int, Line | Reject]:
    last = 0
    for at, item in lines:
        if at == row:
            return at, item
        if at > row:
            raise UsageError(f"line {row} of INPUT is blank; the next that is not is {at}")
        last = at
    raise UsageError(f"INPUT has no line {row}: the last that is not blank is {last}")


# --- one line ---


def _show(at: int, item: Line | Reject, bench: _Bench) -> Iterator[ShownRow]:
    """The rows of a line, each as the run's own stages judge it."""
    if isinstance(item, Reject):
        yield _refused(at, item)
        return
    outcome = transform(lambda: [Batch((item,))], bench.kit, lambda _: contextlib.nullcontext())
    rejects = {(r.choice, r.turn): r for r in outcome.rejects}
    written = {(r["choice"], r["turn"]): r for r in outcome.table.to_pylist()}
    for candidate in parse(item, bench.config, bench.template.traits):
        key = candidate.choice, candidate.turn
        if isinstance(candidate, Reject):
            yield _refused(at, rejects.get(key, candidate))
            continue
        seen = _look(candidate, bench)
        reject = rejects.get(key)
        if seen is None or (reject is not None and not seen.tokens):
            yield _refused(at, reject) if reject else ShownRow(at, item.source, item.number, candidate.row_id)
            continue
        row = ShownRow(at, item.source, item.number, candidate.row_id, *key, seen.tokens, notes=seen.notes)
        if reject is not None:
            yield dataclasses.replace(row, reason=reject.reason, detail=reject.detail)
        else:
            yield dataclasses.replace(row, tokens=_as_written(seen.tokens, written[key]))


def _refused(at: int, reject: Reject) -> ShownRow:
    raw = reject.raw[:_RAW].decode("utf-8", "backslashreplace") + "…" * (len(reject.raw) > _RAW)
    return ShownRow(
        at,
        reject.source,
        reject.number,
        "",
        reject.choice,
        reject.turn,
        reason=reject.reason,
        detail=reject.detail,
        raw=raw,
    )


def _as_written(tokens: tuple[Token, ...], row: Mapping[str, Any]) -> tuple[Token, ...]:
    """The tokens with the ids and the mask of the row that a run writes, which may be cut to --max-length."""
    pairs = zip(tokens, row["input_ids"], row["loss_mask"], strict=False)
    return tuple(dataclasses.replace(token, id=i, trained=bool(mask)) for token, i, mask in pairs)


class _Seen(NamedTuple):
    tokens: tuple[Token, ...]
    notes: tuple[str, ...] = ()


def _look(conversation: Conversation, bench: _Bench) -> _Seen | None:
    """A candidate's tokens; None where it cannot be rendered or encoded."""
    if conversation.token_ids is not None:
        return _look_at_ids(*conversation.token_ids, bench)
    try:
        rendered = render(conversation, bench.template, bench.config)
        encoded = bench.kit.encoder.encode([rendered])
        ends = _token_ends(rendered, bench.reference)
    except RowError:
        return None
    if encoded.failed or len(ends) != len(encoded.ids):
        return None
    labels = [("text", None)] * len(rendered.text) if conversation.text is not None else _label(conversation, bench)
    notes = tuple(f"{name.replace('_', ' ')}: {count}" for name, count in rendered.counts.items())
    return _Seen(tuple(_tokens(rendered.text, encoded.ids.tolist(), encoded.mask.tolist(), ends, labels)), notes)


def _token_ends(rendered: Rendered, reference: Reference) -> list[int]:
    text, literal = rendered.text, rendered.literal
    found = reference.literal_offsets(text, literal) if literal else reference.offsets(text)
    ends: list[int] = found.ends.tolist()
    return ends


def _tokens(
    text: str, ids: Sequence[int], mask: Sequence[int], ends: Sequence[int], labels: Sequence[_Label]
) -> Iterator[Token]:
    at = 0
    for i, (token, trained, reached) in enumerate(zip(ids, mask, ends, strict=True)):
        end = len(text) if i + 1 == len(ids) else max(at, reached)
        # What is fused across header and reply counts as reply; what only goes on with a character, as that one.
        piece, message = labels[max(end, 1) - 1] if text else ("template", None)
        yield Token(token, text[at:end], piece, bool(trained), message)
        at = end


def _look_at_ids(prompt: Sequence[int], generated: Sequence[int], bench: _Bench) -> _Seen | None:
    """A row that came tokenized: a character belongs to the token that completes it."""
    ids = [*prompt, *generated]
    if bench.kit.encoder.encode([(prompt, generated)]).failed:
        return None
    decode = bench.reference.decode
    tokens: list[Token] = []
    known: list[int] = []
    waiting: list[int] = []
    for i, token in enumerate(ids):
        waiting.append(token)
        # Decoded behind the token before, since some decoders take a blank off the first one.
        text = decode([*known, *waiting])[len(decode(known)) :] if known else decode(waiting)
        if text.endswith("\ufffd") and len(waiting) < _LONGEST_CHARACTER and i + 1 < len(ids):
            text = ""
        else:
            known, waiting = waiting if len(waiting) == 1 else [], []
        generates = i >= len(prompt)
        tokens.append(Token(token, text, "generated" if generates else "prompt", generates))
    return _Seen(tuple(tokens))


# --- pieces ---


def _label(conversation: Conversation, bench: _Bench) -> list[_Label]:
    """Of each character of the rendered text: its piece, and the index of the message that it belongs to."""
    template = bench.template
    messages = settle(conversation, template)
    trace = template.trace(
        messages, conversation.tools, conversation.documents, template.merged(conversation.template_kwargs)
    )
    labels: list[_Label] = [("template", None)] * len(trace.text)
    owned: dict[int, list[Span]] = {}
    if template.follows_loops:
        for start, end, k in trace.owners:
            owned.setdefault(k, []).append((start, end))
    at = 0
    for k, message in enumerate(messages):
        if message.get("role") == "assistant":
            spans = _label_turn(labels, trace.text, k, owned.get(k, ()), conversation, bench)
        else:
            # Many templates write the system message before their loop.
            spans = owned.get(k) or _find_text(trace.text, content_text(message).strip(), at)
            _paint(labels, spans, _ROLES.get(str(message.get("role")), "user"), k)
        at = max([at, *(end for _, end in spans)])
    return labels


def _find_text(text: str, said: str, start: int) -> list[Span]:
    at = text.find(said, start) if said else -1
    return [] if at < 0 else [(at, at + len(said))]


def _paint(labels: list[_Label], spans: Iterable[Span], piece: str, message: int) -> None:
    for start, end in spans:
        labels[start:end] = [(piece, message)] * (end - start)


def _label_turn(
    labels: list[_Label], text: str, k: int, owned: Sequence[Span], conversation: Conversation, bench: _Bench
) -> list[Span]:
    """Name the pieces of assistant message k; returns where its turn lies, as far as that can be told."""
    try:
        pieces = _turn_pieces(conversation, k, bench)
    except RowError:
        return list(owned)
    (_, whole), *_ = pieces
    _paint(labels, owned, "template" if whole else "dropped", k)
    if not whole:
        return list(owned)
    header = bench.template.header(bench.template.merged(conversation.template_kwargs))
    begin = whole[0][0]
    at = text.rfind(header, 0, begin) if header else -1
    if at >= 0 and (at + len(header) == begin or any(start <= at < end for start, end in owned)):
        _paint(labels, [(at, at + len(header))], "header", k)
    for piece, spans in pieces:
        _paint(labels, spans, piece, k)
    return [*owned, *whole]


def _turn_pieces(conversation: Conversation, k: int, bench: _Bench) -> list[tuple[str, list[Span]]]:
    """The assistant's text of one turn, and of it what each switch takes out of the mask. Raises RowError."""
    one = conversation._replace(trained=(k,))
    whole, *rest = (list(render(one, bench.template, config).spans) for config in bench.switched)
    taken = [subtract(whole, left) for left in rest]
    return [("answer", whole), *zip(_SWITCHES, taken, strict=True)]


# --- the legend ---


def _legend(bench: _Bench) -> Iterator[LegendLine]:
    """What becomes of each kind of text under this template and these switches: read off probe conversations."""
    rows = _probe_rows(thinks=bench.template.reasoning_field is not None)
    seen = {name: _probe(row, bench) for name, row in rows.items()}
    for question in _QUESTIONS:
        found = seen[question.row]
        if isinstance(found, str):
            yield LegendLine(question.piece, question.what, None, found)
            continue
        tokens = [t for t in found if t.piece in question.pieces and question.message in (None, t.message)]
        if tokens:
            yield _judge(question, tokens, expanded=bench.config.turns == "expand")


def _probe(row: Mapping[str, Any], bench: _Bench) -> list[Token] | str:
    """The tokens of a made-up row, over all that becomes of it; or why it would be rejected."""
    tokens: list[Token] = []
    refused = "this template and these switches reject such a row"
    for candidate in parse_row(dict(row), dataclasses.replace(bench.config, **_ANY_SHAPE), bench.template.traits):
        if isinstance(candidate, Reject):
            refused = f"the row is rejected: {candidate.reason}"
            continue
        try:
            render(candidate, bench.template, bench.config)
        except RowError as error:
            refused = f"the row is rejected: {error.reason}"
            continue
        seen = _look(candidate, bench)
        tokens += seen.tokens if seen else ()
    return tokens or refused


def _judge(question: _Question, tokens: Sequence[Token], *, expanded: bool) -> LegendLine:
    trained = sum(token.trained for token in tokens)
    if not trained:
        dropped = any(token.piece == "dropped" for token in tokens)
        says = "not trained" + ": the template leaves a part of such a turn out" * dropped
    elif trained == len(tokens):
        says = "trained"
    else:
        says = "trained, in a row of its own" if expanded else f"partly: {trained} of {len(tokens)} tokens"
    shown = [token for token in tokens if token.trained] if trained and expanded else tokens
    return LegendLine(question.piece, question.what, trained > 0, says, "".join(token.text for token in shown))


# --- what the legend asks ---


class _Question(NamedTuple):
    """What becomes of the tokens of `pieces` in message `message` (None: in any) of the made-up row `row`?"""

    piece: str
    what: str
    row: str
    pieces: frozenset[str]
    message: int | None = 1


def _ask(piece: str, what: str, row: str, *also: str, message: int | None = 1) -> _Question:
    return _Question(piece, what, row, frozenset({piece, *also}), message)


_QUESTIONS: Final = (
    _ask("system", "system text", "system", message=None),
    _ask("user", "user text", "bare", message=None),
    _ask("tool", "results of tools", "results", message=None),
    _ask("header", "role header of a reply", "bare"),
    _ask("opener", "tag that opens a thought", "thought"),
    _ask("thinking", "thought, with what closes it", "thought", "dropped"),
    _ask("empty", "empty think block", "bare"),
    _ask("answer", "answer", "bare"),
    _ask("call", "tool calls", "calls", "dropped"),
    _ask("end", "end token", "bare"),
    _ask("template", "what follows the end token", "bare"),
    _ask("answer", "earlier turn without a thought", "turns", "dropped"),
    _ask("answer", "earlier turn with a thought", "thoughts", "dropped"),
    _ask("answer", "cut completion: what was generated", "cut", "dropped"),
    _ask("end", "cut completion: what ends it", "cut"),
)
_USER: Final = {"role": "user", "content": "And two?"}
_CALL: Final = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"to": "2"}}}
_RESULT: Final = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "4"}
_TOOL: Final = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


def _probe_rows(*, thinks: bool) -> dict[str, dict[str, Any]]:
    """The made-up rows; `thinks`: the template reads reasoning from a field."""
    bare = {"role": "assistant", "content": "Four."}
    thought = {**bare, "reasoning_content": "Two and two."}
    call = {**(thought if thinks else bare), "content": "", "tool_calls": [_CALL]}
    return {
        "system": {"messages": [{"role": "system", "content": "Be brief."}, _USER, bare]},
        "bare": {"messages": [_USER, bare]},
        "thought": {"messages": [_USER, thought]},
        "calls": {"messages": [_USER, call], "tools": [_TOOL]},
        "results": {"messages": [_USER, call, _RESULT, bare], "tools": [_TOOL]},
        "turns": {"messages": [_USER, bare, _USER, bare]},
        "thoughts": {"messages": [_USER, thought, _USER, thought]},
        "cut": {"messages": [_USER, thought if thinks else bare], "finish_reason": "length"},
    }


# --- HTML ---

_CSS: Final = (
    ".etl-preview{--fg:#1b1b1b;--bg:#fff;--off:#5f5f5f;--line:#888a;color:var(--fg);background:var(--bg);padding:1rem;"
    "font:14px/1.55 system-ui,sans-serif}"
    ".etl-preview table{border-collapse:collapse;margin:.4rem 0 1rem;color:inherit}"
    ".etl-preview td{text-align:left;vertical-align:top;padding:.1rem .9rem .1rem 0;background:none}"
    ".etl-preview code,.etl-preview .x{font:13px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;"
    "white-space:pre-wrap;overflow-wrap:anywhere;color:inherit;background:none}"
    ".etl-preview td:last-child{min-width:9rem}"
    ".etl-preview .w{border-radius:3px;padding:0 .35rem;box-decoration-break:clone}"
    ".etl-preview .r{border-top:1px solid var(--line);margin-top:1rem;padding-top:.6rem}"
    ".etl-preview .s{display:grid;grid-template-columns:7.5rem 1fr}"
    ".etl-preview .s>b{font-weight:400;color:var(--off);white-space:pre}"
    ".etl-preview .s.on>b{font-weight:700;color:var(--fg)}"
    ".etl-preview .t{border-left:1px solid var(--line);color:var(--off);unicode-bidi:isolate}"
    ".etl-preview .on .t{color:var(--fg);background:var(--k);border-bottom:2px solid var(--off)}"
    ".etl-preview .bad{color:#fff;background:#b3261e;padding:.2rem .5rem;font-weight:700;overflow-wrap:anywhere}"
)
_DARK: Final = "--fg:#ececec;--bg:#161616;--off:#a2a2a2"


def _style() -> str:
    """The colours in light, in dark where the system asks for it, and as JupyterLab's own theme has it."""

    def colours(where: str, basis: str, *, dark: bool) -> str:
        kinds = "".join(f"{where} .k-{n}{{--k:{look.dark if dark else look.light}}}" for n, look in PIECES.items())
        return (f"{where}{{{basis}}}" if basis else "") + kinds

    own, light, dark = ".etl-preview", *(f"[data-jp-theme-light={word}] .etl-preview" for word in ("true", "false"))
    return (
        _CSS
        + colours(own, "", dark=False)
        + f"@media(prefers-color-scheme:dark){{{colours(own, _DARK, dark=True)}}}"
        + colours(light, "--fg:#1b1b1b;--bg:#fff;--off:#5f5f5f", dark=False)
        + colours(dark, _DARK, dark=True)
    )


def _html_legend(preview: Preview) -> str:
    table = "".join(map(_html_legend_line, preview.legend))
    notes = "".join(f"<p>note: {escape(note)}</p>" for note in preview.notes)
    key = f"<p>{escape('+ is trained; a bar stands before each token; ' + HOW_TO_READ)}</p>"
    return html_section(preview.subject, f"<table>{table}</table>{notes}{key}")


def _html_legend_line(line: LegendLine) -> str:
    sign, on = ("+", ' style="background:var(--k)"') if line.trained else ("\N{EN DASH}", "")
    what = f'<span class="w k-{line.piece}"{on}>{sign} {escape(line.what)}</span>'
    example = f"<code>{escape(one_line(line.example))}</code>"
    return f"<tr><td>{what}</td><td>{escape(line.says)}</td><td>{example}</td></tr>"


def _html_row(row: ShownRow) -> str:
    head = f"<b>{escape(row.title)}</b> <code>{escape(row.source)}:{row.line}</code>"
    bad = "" if row.reason is None else f'<p class="bad">{escape(row.verdict)}</p>'
    notes = "".join(f"<p>{escape(note)}</p>" for note in row.notes)
    raw = f'<div class="x">{_html_text(visible(row.raw))}</div>' if row.raw else ""
    stretches = "".join(_html_stretch(row.tokens, start, stop) for start, stop in row.stretches())
    return f'<div class="r">{head}{bad}{notes}{raw}{stretches}</div>'


def _html_stretch(tokens: Sequence[Token], start: int, stop: int) -> str:
    first = tokens[start]
    shown = "".join(
        f'<span class="t" title="{token.id}">{_html_text(show_token(token))}</span>' for token in tokens[start:stop]
    )
    on, title = ("on ", f"+ {PIECES[first.piece].title}") if first.trained else ("", f"  {PIECES[first.piece].title}")
    return f'<div class="s {on}k-{first.piece}"><b>{title}</b><span class="x">{shown}</span></div>'


def _html_text(shown: str) -> str:
    """Visible text as HTML, its line breaks kept, which `escape` would spell out."""
    return "\n".join(map(escape, shown.split("\n")))
