"""Messages -> Trace: one chat template with the special tokens it sees, and what probing has taught of it.

Probing renders a few made-up conversations whose texts cannot be mistaken. It learns which field reasoning is read
from, the generation prompt, what ends a turn, and whether the loops tell whose text it is (see `etl.sandbox`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from etl.config import RunConfig
from etl.errors import RowError, UsageError
from etl.messages import REASONING_FIELDS
from etl.records import Message, TemplateTraits, TokenizerSpec
from etl.sandbox import ClockError, Sandbox, Trace

_TAG: Final = r"[^<>\[\]◁▷\s]*(?:think|thought|reason)[^<>\[\]◁▷\s]*[>\]▷]"
THINK_OPEN: Final = re.compile(rf"<\|channel>thought|[<\[◁](?!/|\|?END){_TAG}", re.IGNORECASE)
"""A tag that opens a thought, in the spellings that models use; never one that closes it."""
THINK_CLOSE: Final = re.compile(rf"<channel\|>|[<\[◁](?:/|\|?END_?){_TAG}", re.IGNORECASE)
"""A tag that closes a thought."""

_BELIEVED: Final = ("reasoning_content", "thinking", "reasoning")
"""REASONING_FIELDS in the order in which transformers believes them."""

_T = TypeVar("_T")
_MEMORY: Final = 256  # rows can bring any number of template arguments
_CALL: Final = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_SAID: Final = ("zq first", "zq second", "zq third", "zq fourth")
_THOUGHT: Final = "zq thought"
_THINKING: Final = dict.fromkeys(REASONING_FIELDS, _THOUGHT)
_SYSTEM: Final = {"role": "system", "content": "zq system"}


class ChatTemplate:
    """A compiled chat template.

    `special_tokens`: as `bos_token`, `eos_token`, …; `added_tokens`: the contents of all added tokens;
    `special_contents`: of those with `special` true; `date`: YYYY-MM-DD for templates that ask the clock;
    `arguments`: template arguments that hold for every row and win over the row's own.
    Raises UsageError where there is no template, it cannot be compiled, or it asks the clock and has no date.

    `shows_responses`: it may write what tools said into the turn that called them (Gemma 4).
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        added_tokens: Sequence[str] = (),
        special_contents: Iterable[str] = (),
        date: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not source:
            raise UsageError("the tokenizer has no chat template; give one with --chat-template FILE")
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.arguments = dict(arguments or {})
        eos = self.special_tokens.get("eos_token")
        special = [token for token in special_contents if token]
        self.added_tokens = _alternatives([*added_tokens, *special, *([eos] if isinstance(eos, str) else [])])
        self.control_tokens = _alternatives(special)
        self.control_starts = tuple(sorted({token[0] for token in special}))
        self._memory: dict[tuple[str, str], Any] = {}
        self._last_key: tuple[Mapping[str, Any] | None, str] = None, ""
        self._sandbox = Sandbox(source, date, self.special_tokens)
        self.shows_responses = "tool_responses" in source
        self._check_clock()
        self.as_parts = self._learn_parts()
        self._own_prompt = self._split_prompt(self._find_prompt(self.arguments))
        self.reasoning_field = self._learn_reasoning_field()
        learned = self._learn_thought()
        self.empty_thought = _empty_thought(learned)
        self.thought_tags = tuple(tag for pair in learned for tag in pair)
        self.follows_loops, self.ending, self.late_ending = self._learn_turns()
        self.openers = self._learn_openers()

    @classmethod
    def from_spec(cls, spec: TokenizerSpec, config: RunConfig) -> ChatTemplate:
        """From what a worker is sent; `spec.chat_template` is that of `--chat-template` where it was given."""
        added = _added_tokens(spec.backend_json)
        return cls(
            spec.chat_template,
            spec.special_tokens,
            [token["content"] for token in added],
            [token["content"] for token in added if token.get("special")],
            config.date,
            config.template_kwargs,
        )

    # --- rendering ---

    def trace(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        documents: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> Trace:
        """Render messages as they are (see `prepare`) under exactly these arguments. Raises RowError `template`."""
        variables = {
            **arguments,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        plain = tools is None and documents is None and not add_generation_prompt
        return self._sandbox.trace(messages, variables, self.key(arguments) if plain else None)

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Canonical messages -> as the template gets them.

        Reasoning goes under each name that transformers 5 gives it, so that 4 renders the same; content goes as parts
        where the template reads nothing else.
        """
        prepared = [_aliased(message) for message in messages]
        return [_with_parts(message) for message in prepared] if self.as_parts else prepared

    def merged(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row's template arguments under the run's, which win."""
        # under the same names, in the order that a template can see, nothing of the row's is left
        return self.arguments if [*arguments] in ([], [*self.arguments]) else {**arguments, **self.arguments}

    # --- what is known of it ---

    @property
    def traits(self) -> TemplateTraits:
        """What parsing must know of the template."""
        return TemplateTraits(self.reasoning_field, self.opens_thinking)

    @property
    def hides_tags(self) -> bool:
        """Whether its `{% generation %}` blocks lie where they cannot be followed, and are not heeded."""
        return self._sandbox.hides_tags

    def prompt(self, arguments: Mapping[str, Any]) -> str:
        """The generation prompt under these template arguments, thinking opener included.

        Where there is none: what every reply begins with, or '' where that is blank.
        """
        return self._prompt(arguments)[0]

    def header(self, arguments: Mapping[str, Any]) -> str:
        """The role header: `prompt` up to, not including, a tag that opens or closes a thought."""
        return self._prompt(arguments)[1]

    def opens_thinking(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the generation prompt ends inside an open thought under a row's template arguments."""
        prompt, header = self._prompt(self.merged(arguments))
        return len(prompt) > len(header) and not THINK_CLOSE.search(prompt, len(header))

    def shows(self, messages: Sequence[Message], wanted: str, times: int = 1) -> bool:
        """Whether the template renders these messages, with `wanted` in the text at least so many times."""
        trace = self._try(messages)
        return trace is not None and trace.text.count(wanted) >= times

    def complaint(self, messages: Sequence[Message]) -> str:
        """What the template says of messages that it refuses, in brackets; '' where it renders them."""
        try:
            self.trace(self.prepare(messages), None, None, self.arguments)
        except RowError as error:
            return f" ({error.detail})"
        return ""

    @property
    def reads(self) -> frozenset[str]:
        """The names of the variables that the template can read."""
        return self._sandbox.reads

    # --- probing ---

    def _try(self, messages: Sequence[Message]) -> Trace | None:
        try:
            return self.trace(self.prepare(messages), None, None, self.arguments)
        except RowError:
            return None

    def key(self, arguments: Mapping[str, Any]) -> str:
        """Equal for template arguments between which this template cannot tell."""
        if arguments is self.arguments:
            return ""
        asked, key = self._last_key  # a row asks for it again and again
        if asked is not arguments:
            read = {name: value for name, value in arguments.items() if name in self.reads}
            key = repr(read)  # in the order given, which a template can see
            self._last_key = arguments, key
        return key

    def recall(self, what: str, arguments: Mapping[str, Any], make: Callable[[], _T]) -> _T:
        """What is remembered under these template arguments, made where it is not. Threads may share it."""
        key = what, self.key(arguments)
        if key not in self._memory and len(self._memory) >= _MEMORY:
            self._memory = {}
        memory: dict[tuple[str, str], _T] = self._memory
        return memory[key] if key in memory else memory.setdefault(key, make())

    def _prompt(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        if arguments is self.arguments:
            return self._own_prompt
        return self.recall("prompt", arguments, lambda: self._split_prompt(self._find_prompt(arguments)))

    def _split_prompt(self, prompt: str) -> tuple[str, str]:
        tags = [found.start() for tag in (THINK_OPEN, THINK_CLOSE) if (found := tag.search(prompt))]
        return prompt, prompt[: min(tags, default=len(prompt))]

    def _find_prompt(self, arguments: Mapping[str, Any]) -> str:
        for before in ([], [_SYSTEM]):
            messages = self.prepare([*before, {"role": "user", "content": _SAID[0]}])
            try:
                asked = self.trace(messages, None, None, arguments, add_generation_prompt=True)
                plain = self.trace(messages, None, None, arguments)
            except RowError:
                continue
            if asked.text == plain.text:
                return self._find_lead(messages, arguments)
            if asked.text.startswith(plain.text):
                return asked.text[len(plain.text) :]
            # the template ends otherwise without the prompt (Phi-3 writes its eos): take what follows the messages
            return asked.text[max((end for _, end, _ in asked.owners), default=len(asked.text)) :]
        return ""

    def _find_lead(self, before: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """What every reply begins with, for a template without a generation prompt; '' where it is blank."""
        leads: list[str] = []
        for said in ({"content": _SAID[1]}, {"content": "", "tool_calls": [_CALL]}, {"content": _SAID[1], **_THINKING}):
            reply: Message = {"role": "assistant", **said}
            try:
                trace = self.trace([*before, *self.prepare([reply])], None, None, arguments)
            except RowError:
                continue
            own = [trace.text[start:end] for start, end, owner in trace.owners if owner == len(before)]
            leads += [own[0].partition(_SAID[1])[0]] if own else []
        if not leads:
            return ""
        lead = functools.reduce(_common_prefix, leads)
        split = [found.start() for found in self.added_tokens.finditer(leads[0]) if found.end() > len(lead)]
        _, header = self._split_prompt(lead[: min([len(lead), *split])])
        return header if header.strip() else ""

    def _check_clock(self) -> None:
        for before in ([], [_SYSTEM]):
            messages = [*before, {"role": "user", "content": _SAID[0]}, {"role": "assistant", "content": _SAID[1]}]
            try:
                self.trace(messages, None, None, self.arguments)
            except RowError as error:
                if isinstance(error.__cause__, ClockError):
                    raise UsageError(error.detail) from error

    def _learn_parts(self) -> bool:
        """Whether content must go as a list of parts."""
        messages = [{"role": "user", "content": _SAID[0]}, {"role": "assistant", "content": _SAID[1]}]
        self.as_parts = False
        if self.shows(messages, _SAID[1]):
            return False
        self.as_parts = True
        return self.shows(messages, _SAID[1])

    def _learn_reasoning_field(self) -> str | None:
        user = {"role": "user", "content": _SAID[0]}
        for extra in ({"content": _SAID[1]}, {"content": _SAID[1], "tool_calls": [_CALL]}, {"tool_calls": [_CALL]}):
            for field in REASONING_FIELDS:
                turn: Message = {"role": "assistant", "content": "", **extra, field: _THOUGHT}
                shown = [_with_parts(m) for m in (user, turn)] if self.as_parts else [user, turn]
                try:
                    if _THOUGHT in self.trace(shown, None, None, self.arguments).text:
                        return field
                except RowError:
                    continue
        return None

    def _learn_thought(self) -> tuple[tuple[str, str], ...]:
        """What the template writes on either side of a thought, where that is no tag but a channel (gpt-oss)."""
        field, header = self.reasoning_field, self.header(self.arguments)
        if field is None or not header:
            return ()
        turn: Message = {"role": "assistant", "content": _SAID[1], field: _THOUGHT}
        trace = self._try([{"role": "user", "content": _SAID[0]}, turn])
        before, _, after = trace.text.partition(_THOUGHT) if trace else ("", "", "")
        between = after.partition(_SAID[1])[0]
        close = THINK_CLOSE.search(between)
        opener = before.rpartition(header)[2].strip() if header in before else ""
        closer = between[: close.end()].strip() if close else between.partition(header)[0].strip()
        return ((opener, closer),) if opener and closer else ()

    def _learn_turns(self) -> tuple[bool, str, str]:
        """Whether the loops tell whose text it is; what ends a turn; the same if the next iteration writes it."""
        messages: list[Message] = [
            {"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(_SAID)
        ]
        short, long = self._try(messages[:2]), self._try(messages)
        if short is None or long is None or not all(content in long.text for content in _SAID):
            return True, "", ""
        tail = short.text.rpartition(_SAID[1])[2]
        gap = long.text.partition(_SAID[1])[2].partition(_SAID[2])[0]
        at = long.text.find(_SAID[1])
        own = [(start, end) for start, end, owner in long.owners if owner == 1]
        follows = any(start <= at < end for start, end in own)
        late = bool(own) and own[-1][1] <= at + len(_SAID[1])
        if follows and not late:
            gap = gap[: own[-1][1] - at - len(_SAID[1])]  # what the next iteration writes opens the next turn
        tokens = [found.end() for found in self.added_tokens.finditer(_common_prefix(tail, gap))]
        ending = tail[: tokens[-1]] if tokens else ""
        return follows, ending, ending if late else ""

    def _learn_openers(self) -> frozenset[str]:
        """Added tokens with which a tool's or a user's text begins: written behind a reply, they are not its end."""
        user: Message = {"role": "user", "content": _SAID[0]}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        tool: Message = {"role": "tool", "content": _SAID[2], "tool_call_id": _CALL["id"], "name": "f"}
        chats = [user, call, tool], [user, {"role": "assistant", "content": _SAID[1]}, user]
        tokens = {self._first_token(trace) for trace in map(self._try, chats) if trace}
        return frozenset(tokens - {"", self.special_tokens.get("eos_token"), *self.added_tokens.findall(self.ending)})

    def _first_token(self, trace: Trace) -> str:
        """The added token with which the text of a chat's third message begins; '' where there is none."""
        start = next((start for start, _, owner in trace.owners if owner == len(_SAID) // 2), None)
        token = None if start is None else self.added_tokens.match(trace.text, start)
        return token[0] if token else ""


def _aliased(message: Message) -> Message:
    """The message with its reasoning under the names that transformers 5 adds."""
    for field in _BELIEVED:
        reasoning = message.get(field)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _added_tokens(backend_json: str) -> list[dict[str, Any]]:
    """The `added_tokens` of a tokenizer.json, without reading the rest, which can hold tens of megabytes."""
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', backend_json)
    added: list[dict[str, Any]] = json.JSONDecoder().raw_decode(backend_json, found.end())[0] if found else []
    return added


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of the tokens, the longest that fits; never matches where there are none.

    Blank ones are left out: Gemma's added tokens hold every run of newlines. Written as a tree, since an alternation
    of Gemma's 6,000 is tried one by one at each `<` of a text.
    """
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for char in "" if token.isspace() else token:
            node = node.setdefault(char, {})
        node[""] = {}
    tree.pop("", None)
    return re.compile(_branches(tree) if tree else r"(?!)")


def _branches(node: Mapping[str, Any]) -> str:
    branches = [re.escape(char) + _branches(child) for char, child in node.items() if char]
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + "?" if "" in node else body


def _empty_thought(learned: Iterable[tuple[str, str]]) -> re.Pattern[str]:
    """Group 1 is an empty think block with the blanks behind it; blanks may stand before it."""
    pairs = dict.fromkeys([("<think>", "</think>"), *learned])
    blocks = "|".join(rf"{re.escape(opener)}\s*{re.escape(closer)}\s*" for opener, closer in pairs)
    return re.compile(rf"\s*({blocks})")


def _common_prefix(one: str, other: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


# --- what a run says before it starts ---


def probe(template: ChatTemplate) -> list[str]:
    """Plain notes on what the template does to trained text; none where it does nothing out of the ordinary.

    Raises UsageError where an assistant's answer cannot be found in what the template renders.
    """
    dialogue: list[Message] = [{"role": "user", "content": _SAID[0]}, {"role": "assistant", "content": _SAID[1]}]
    shown = template.shows(dialogue, _SAID[1])
    if not shown and not template.shows([_SYSTEM, *dialogue], _SAID[1]):
        said = template.complaint(dialogue)
        raise UsageError(
            f"the chat template does not render what an assistant says{said}; give another with --chat-template"
        )
    notes = _unread_notes(template)
    if template.hides_tags:
        notes.append("the template's {% generation %} blocks lie inside macros; the trained text is found without them")
    if not template.follows_loops:
        notes.append("the template hides which message it renders; each row is rendered twice, to follow its messages")
    header = template.header(template.arguments)
    if not template.prompt(template.arguments):
        notes.append("the template has no generation prompt: turns are trained from their first character")
    elif shown and not template.shows(dialogue, header):
        notes.append(f"no turn begins with the generation prompt {header!r}: role headers may be trained")
    return notes + _reasoning_notes(template)


def _unread_notes(template: ChatTemplate) -> list[str]:
    return [
        f"the template never reads {name}: this template argument changes nothing"
        for name in template.arguments
        if name not in template.reads
    ]


def _reasoning_notes(template: ChatTemplate) -> list[str]:
    field = template.reasoning_field
    user, again = {"role": "user", "content": _SAID[0]}, {"role": "user", "content": _SAID[2]}
    inline = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID[1]}"}
    thinking = inline if field is None else {"role": "assistant", "content": _SAID[1], field: _THOUGHT}
    shown = template.shows([user, thinking], _THOUGHT)
    if field is None and not shown:
        return ["the template never renders reasoning: turns that have any are not trained"]
    notes = []
    if field is None:
        notes.append(
            "the template reads no reasoning field: inline <think> text stays; a turn whose reasoning comes in a field "
            "is not trained, since the template leaves it out"
        )
    if not shown:
        notes.append("the template renders reasoning beside tool calls only: other turns that have any are not trained")
    elif not template.shows([user, thinking, again, thinking], _THOUGHT, 2):
        keep = "--template-arg preserve_thinking=true or " if "preserve_thinking" in template.source else ""
        notes.append(
            "the template leaves out the reasoning of earlier turns, which are then not trained; "
            f"{keep}--turns expand keeps it"
        )
    return notes
