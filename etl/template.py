"""Messages -> Trace: the chat template's text, and which message was being rendered while each stretch was emitted.

The text is byte-equal to transformers' `apply_chat_template(tokenize=False)`: same sandbox, same globals. The compiled
template is instrumented: each `for` loop notes, without emitting anything, how many chunks had been emitted when an
iteration began and which object it is about. The root of a compiled template is a lazy generator, so the chunks
counted then are the text before that iteration. Blocks that Jinja buffers (macros, `set` blocks) cannot be followed
so; probing tells whether a template hides its messages in one.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, NoneType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from etl.config import RunConfig
from etl.errors import RowError, UsageError
from etl.records import Message, Span, TemplateTraits, TokenizerSpec

REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""The names a message's reasoning goes under, in the order in which transformers believes them."""

THINK_OPEN: Final = re.compile(
    r"<\|channel>thought|[<\[◁](?![^<>\[\]◁▷]*\bEND)[^<>\[\]◁▷/\s]*(?:think|thought|reason)[^<>\[\]◁▷\s]*[>\]▷]",
    re.IGNORECASE,
)
"""A tag that opens a thought, in the spellings that models use; never one that closes it."""
THINK_CLOSE: Final = re.compile(
    r"<channel\|>|[<\[◁](?:/|\|?END_?)[^<>\[\]◁▷\s]*(?:think|thought|reason)[^<>\[\]◁▷\s]*[>\]▷]", re.IGNORECASE
)
"""A tag that closes a thought."""

_EVENT: Final = "event"  # the expression context by which the code generator knows our own statements
_GENERATION: Final = -1
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_PLAIN_TYPES: Final = frozenset({str, int, float, bool, list, dict, NoneType})
_STRING_METHODS: Final = frozenset({"endswith", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip"})
_LOOP_ATTRIBUTES: Final = frozenset({"first", "index", "index0", "last", "length", "revindex", "revindex0"})
# what a template can raise, from a bad row or its own bug; all of it rejects the row, none of it may end the run
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with shortcuts for what it allows anyway: keys of plain dicts, attributes of namespaces and loops,
    macros, methods of strings. Everything else goes its way through the sandbox (30 % of a render, measured)."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is _TemplateNamespace:
            value = object.__getattribute__(obj, "_Namespace__attrs").get(attribute, missing)
            if type(value) in _PLAIN_TYPES and not attribute.startswith("_"):
                return value
        elif (kind is str and attribute in _STRING_METHODS) or (kind is LoopContext and attribute in _LOOP_ATTRIBUTES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        kind = type(__obj)
        if kind is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
        if __obj is _TemplateNamespace or (kind is BuiltinMethodType and type(__obj.__self__) is str):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Context(Context):
    """A render in progress: the chunks emitted so far and what the loops noted."""

    def __init__(
        self,
        environment: jinja2.Environment,
        parent: dict[str, Any],
        name: str | None,
        blocks: dict[str, Callable[[Context], Iterator[str]]],
        globals: Mapping[str, Any] | None = None,  # noqa: A002  the base class's name
    ) -> None:
        # as the base class, whose own constructor copies the globals' names each time
        self.parent = parent
        self.vars = {}
        self.environment = environment
        self.eval_ctx = EvalContext(environment, name)
        self.exported_vars = set()
        self.name = name
        self.globals_keys = set() if globals is None else globals.keys()  # type: ignore[assignment]
        self.blocks = {key: [value] for key, value in blocks.items()}
        self.chunks: list[str] = []
        self.events: list[tuple[int, ...]] = []


class _CodeGenerator(CodeGenerator):
    """Compiles our own statements, which note an event and emit nothing."""

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        if not (isinstance(node.node, nodes.Tuple) and node.node.ctx == _EVENT):
            super().visit_ExprStmt(node, frame)
            return
        depth, *targets = node.node.items
        self.newline(node)
        self.write("context.events.append((len(context.chunks), ")
        self.visit(depth, frame)
        for target in targets:
            self.write(", id(")
            self.visit(target, frame)
            self.write(")")
        self.write("))")


class _GenerationTag(Extension):
    """`{% generation %}`: what it encloses is trained text by the template's own word."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope([_event(line, _GENERATION, nodes.Const(True)), *body, _event(line, _GENERATION)], lineno=line)


class _TemplateDict:
    """`dict` as transformers shows it to templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace` as transformers shows it to templates: no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805  a template may pass `self=`
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"chat templates cannot store {name!r} on a namespace")


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _ClockError(jinja2.TemplateError):
    """The template asked the clock, and no date was given."""


def _clock(date: str | None) -> Callable[[str], str]:
    if date is None:

        def refuse(_: str) -> str:
            raise _ClockError("the chat template asks for today's date; give --date YYYY-MM-DD")

        return refuse
    return datetime.datetime.fromisoformat(date).strftime


def _environment(date: str | None) -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.code_generator_class = _CodeGenerator
    environment.context_class = _Context
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_clock(date),
        dict=_TemplateDict(),
        namespace=_TemplateNamespace,
    )
    return environment


# --- instrumentation: what is compiled in beside the template's own statements ---


def _event(line: int, depth: int, *targets: nodes.Expr) -> nodes.ExprStmt:
    return nodes.ExprStmt(nodes.Tuple([nodes.Const(depth), *targets], _EVENT), lineno=line)


def _instrument(node: nodes.Node, depth: int = 0) -> None:
    """Note each iteration of each loop whose text goes straight to the output; buffered blocks are left alone."""
    for name in ("body", "else_", "elif_"):
        children = getattr(node, name, None)
        if not isinstance(children, list):
            continue
        for child in tuple(children):
            if _is_buffered(child):
                continue
            is_loop = isinstance(child, nodes.For)
            _instrument(child, depth + is_loop)
            if isinstance(child, nodes.For):
                child.body.insert(0, _event(child.lineno, depth, *_loop_objects(child)))
                children.insert(_index(children, child) + 1, _event(child.lineno, depth))


def _index(children: Sequence[nodes.Node], child: nodes.Node) -> int:
    return next(i for i, other in enumerate(children) if other is child)  # nodes compare by value


_BUFFERED: Final = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)


def _is_buffered(node: nodes.Node) -> bool:
    return isinstance(node, _BUFFERED) or (isinstance(node, nodes.For) and node.recursive)


def _has_events(node: nodes.Node) -> bool:
    return any(isinstance(n.node, nodes.Tuple) and n.node.ctx == _EVENT for n in node.find_all(nodes.ExprStmt))


def _loop_objects(loop: nodes.For) -> Iterator[nodes.Expr]:
    """What an iteration can be about: its targets, or `messages[i]` where `i` is the target."""
    names = [name.name for name in loop.target.find_all(nodes.Name)]
    if isinstance(loop.target, nodes.Name):
        names = [loop.target.name]
    yield from (nodes.Name(name, "load") for name in names)
    stored = {name.name for child in loop.body for name in child.find_all(nodes.Name) if name.ctx == "store"}
    seen = set()
    for item in (item for child in loop.body for item in child.find_all(nodes.Getitem)):
        of, index = item.node, item.arg
        if isinstance(of, nodes.Name) and isinstance(index, nodes.Name) and index.name in names:
            if of.name not in stored and (of.name, index.name) not in seen:
                seen.add((of.name, index.name))
                yield nodes.Getitem(nodes.Name(of.name, "load"), nodes.Name(index.name, "load"), "load")


# --- the trace of one render ---


@dataclass(frozen=True, slots=True)
class Trace:
    """One render: its text; `owners`, (start, end, message index), ascending and disjoint; `generated`, the stretches
    inside `{% generation %}` (None where the template has no such tag)."""

    text: str
    owners: tuple[tuple[int, int, int], ...]
    generated: tuple[Span, ...] | None = None


def _read_events(context: _Context, index: Mapping[int, int], *, tagged: bool) -> Trace:
    ends = [0, *itertools.accumulate(map(len, context.chunks))]
    owners: list[tuple[int, int, int]] = []
    generated: list[Span] = []
    stack: list[int] = []
    since = begun = 0
    for event in context.events:
        at, depth = ends[event[0]], event[1]
        if depth == _GENERATION:
            if len(event) > 2:
                begun = at
            elif at > begun:
                generated.append((begun, at))
            continue
        if at > since:
            if stack and stack[-1] >= 0:
                if owners and owners[-1][1:] == (since, stack[-1]):
                    since = owners.pop()[0]
                owners.append((since, at, stack[-1]))
            since = at
        del stack[depth:]
        if len(event) > 2:
            outer = stack[-1] if stack else -1
            stack.append(next((index[known] for known in event[2:] if known in index), outer))
    return Trace("".join(context.chunks), tuple(owners), tuple(generated) if tagged else None)


class ChatTemplate:
    """A compiled chat template with the special tokens it sees, and what probing has taught of it.

    `special_tokens`: as `bos_token`, `eos_token`, …; `added_tokens`: the contents of all added tokens;
    `special_contents`: of those with `special` true; `arguments`: template arguments that hold for every row and win
    over the row's own. Raises UsageError where there is no template, or it cannot be used.
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
        eos = [token for token in (self.special_tokens.get("eos_token"),) if isinstance(token, str)]
        self.added_tokens = _alternatives([*added_tokens, *eos])
        self.control_tokens = _alternatives(special_contents)
        self.control_prefixes = tuple({token[:2] for token in special_contents if token})
        self._environment = _environment(date)
        self._root, self._globals, self._tagged, self.hides_tags = self._compile(source)
        self._prompts: dict[str, tuple[str, str]] = {}
        self.memory: dict[Any, Any] = {}
        self.as_parts = False
        self.follows_loops = True
        self.ending = self.late_ending = ""
        self.openers: frozenset[str] = frozenset()
        self.empty_thought = _empty_thought(())
        self._learn()

    @classmethod
    def from_spec(cls, spec: TokenizerSpec, config: RunConfig) -> ChatTemplate:
        """From what a worker is sent; `config.chat_template` is the text of `--chat-template`."""
        added = _added_tokens(spec.backend_json)
        return cls(
            config.chat_template or spec.chat_template,
            spec.special_tokens,
            [token["content"] for token in added],
            [token["content"] for token in added if token.get("special")],
            config.date,
            config.template_kwargs,
        )

    def _compile(self, source: str) -> tuple[Any, Mapping[str, Any], bool, bool]:
        """The template, its globals, whether `{% generation %}` bounds the trained text, and whether it is hidden."""
        try:
            tree = self._environment.parse(source)
            tagged = _has_events(tree)
            hidden = any(_has_events(node) for node in tree.find_all(_BUFFERED))
            _instrument(tree)
            template = jinja2.Template.from_code(
                self._environment, self._environment.compile(tree), self._environment.make_globals(None)
            )
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            raise UsageError(f"the chat template cannot be compiled: {_one_line(error)}") from error
        return template, dict(template.globals), tagged and not hidden, hidden

    # --- rendering ---

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **arguments: Any,
    ) -> str:
        """The rendered chat, byte-equal to `apply_chat_template(messages, tokenize=False, …)`. Raises RowError."""
        plain = [_aliased({key: value for key, value in m.items() if value is not None}) for m in messages]
        return self.trace(
            plain, tools, documents, {**arguments, **self.arguments}, add_generation_prompt=add_generation_prompt
        ).text

    def trace(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        documents: Sequence[Any] | None,
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool = False,
    ) -> Trace:
        """Render messages as they are (see `prepare`); all of `arguments` are seen. Raises RowError `template`."""
        variables = {**self._globals, **self.special_tokens, **arguments}
        variables.update(
            messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt
        )
        context = _Context(self._environment, variables, None, self._root.blocks, self._globals)
        append = context.chunks.append
        try:
            for chunk in self._root.root_render_func(context):
                append(chunk)
        except _TEMPLATE_ERRORS as error:
            raise RowError("template", _one_line(error)) from error
        return _read_events(context, {id(m): i for i, m in enumerate(messages)}, tagged=self._tagged)

    def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Canonical messages -> as the template gets them: reasoning under each name that transformers 5 gives it
        (so that 4 renders the same), content as parts where the template reads nothing else."""
        prepared = [_aliased(message) for message in messages]
        if self.as_parts:
            prepared = [_with_parts(message) for message in prepared]
        return prepared

    def merged(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row's template arguments under the run's, which win."""
        return {**arguments, **self.arguments} if arguments else self.arguments

    # --- what probing teaches ---

    @property
    def traits(self) -> TemplateTraits:
        """What parsing must know of the template."""
        return self._traits

    def prompt(self, arguments: Mapping[str, Any]) -> str:
        """The generation prompt under these template arguments, thinking opener included; '' where there is none."""
        return self._prompt(arguments)[0]

    def header(self, arguments: Mapping[str, Any]) -> str:
        """The role header: the generation prompt up to, not including, a thinking opener."""
        return self._prompt(arguments)[1]

    def opens_thinking(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the generation prompt ends inside an open thought under these template arguments."""
        prompt, header = self._prompt(self.merged(arguments))
        return len(prompt) > len(header) and not THINK_CLOSE.search(prompt, len(header))

    def _prompt(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        key = "" if arguments is self.arguments else json.dumps(arguments, sort_keys=True, default=repr)
        if key not in self._prompts:
            prompt = self._find_prompt(arguments)
            opener = THINK_OPEN.search(prompt)
            self._prompts[key] = prompt, prompt[: opener.start()] if opener else prompt
        return self._prompts[key]

    def _find_prompt(self, arguments: Mapping[str, Any]) -> str:
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            messages = self.prepare([*system, {"role": "user", "content": "Hi"}])
            try:
                asked = self.trace(messages, None, None, arguments, add_generation_prompt=True)
                plain = self.trace(messages, None, None, arguments)
            except RowError:
                continue
            if asked.text.startswith(plain.text):
                return asked.text[len(plain.text) :]
            # the template ends otherwise without the prompt (Phi-3 writes its eos): take what follows the messages
            return asked.text[max((end for _, end, _ in asked.owners), default=len(asked.text)) :]
        return ""

    def _learn(self) -> None:
        self._traits = TemplateTraits(None, self.opens_thinking)
        self._check_clock()
        asked, answered = "zq question", "zq answer"
        dialogue = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        if not self._renders(dialogue, answered):
            self.as_parts = True
            self.as_parts = self._renders(dialogue, answered)
        self._traits = TemplateTraits(self._find_reasoning_field(), self.opens_thinking)
        self.empty_thought = _empty_thought(self._find_thought())
        self._learn_turns()
        self.openers = self._find_openers()

    def _learn_turns(self) -> None:
        """Whether the loops tell whose text it is, and what ends a turn that another one follows."""
        said = ("zq first", "zq second", "zq third", "zq fourth")
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": content} for i, content in enumerate(said)
        ]
        traces = [self._try(messages[:n]) for n in (2, 4)]
        if traces[0] is None or traces[1] is None or not all(content in traces[1].text for content in said):
            return
        short, long = traces
        tail = short.text.rpartition(said[1])[2]
        gap = long.text.partition(said[1])[2].partition(said[2])[0]
        same = os.path.commonprefix([tail, gap])
        tokens = [found.end() for found in self.added_tokens.finditer(same)]
        self.ending = same[: tokens[-1]] if tokens else ""
        at = long.text.find(said[1])
        own = [(start, end) for start, end, owner in long.owners if owner == 1]
        self.follows_loops = any(start <= at < end for start, end in own)
        if own and tokens and own[-1][1] <= at + len(said[1]):
            self.late_ending = self.ending

    def _find_openers(self) -> frozenset[str]:
        """Added tokens with which a tool's text begins: written behind a call, they are not what ended it."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "zq result", "tool_call_id": "call00000", "name": "f"},
        ]
        trace = self._try(messages)
        start = next((start for start, _, owner in trace.owners if owner == 2), None) if trace else None
        token = self.added_tokens.match(trace.text, start) if trace and start is not None else None
        ends = {self.special_tokens.get("eos_token"), *self.added_tokens.findall(self.ending)}
        return frozenset() if token is None or token[0] in ends else frozenset({token[0]})

    def _try(self, messages: Sequence[Message]) -> Trace | None:
        try:
            return self.trace(self.prepare(messages), None, None, self.arguments)
        except RowError:
            return None

    def _find_thought(self) -> tuple[tuple[str, str], ...]:
        """What the template writes on either side of a thought, where that is no tag but a channel (gpt-oss)."""
        field = self._traits.reasoning_field
        if field is None:
            return ()
        turn = {"role": "assistant", "content": "zq answer", field: "zq thought"}
        trace = self._try([{"role": "user", "content": "Hi"}, turn])
        if trace is None:
            return ()
        before, _, after = trace.text.partition("zq thought")
        header = self.header(self.arguments)
        opener = before[before.rfind(header) + len(header) :].strip() if header and header in before else ""
        between = after.partition("zq answer")[0]
        close = THINK_CLOSE.search(between)
        closer = between[: close.end()] if close else between.partition(header)[0] if header else ""
        return ((opener, closer.strip()),) if opener and closer.strip() else ()

    def _check_clock(self) -> None:
        for system in ([], [{"role": "system", "content": "Be brief."}]):
            messages = [*system, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
            try:
                self.trace(messages, None, None, self.arguments)
            except RowError as error:
                if isinstance(error.__cause__, _ClockError):
                    raise UsageError(error.detail) from error

    def _find_reasoning_field(self) -> str | None:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
        for extra in ({}, {"tool_calls": [call]}, {"content": "", "tool_calls": [call]}):
            for field in ("reasoning_content", "reasoning", "thinking"):
                turn = {"role": "assistant", "content": "zq answer", field: "zq thought", **extra}
                if self._renders([{"role": "user", "content": "Hi"}, turn], "zq thought", aliased=False):
                    return field
        return None

    @property
    def has_tags(self) -> bool:
        """Whether `{% generation %}` blocks bound the trained text."""
        return self._tagged

    def shows(self, messages: Sequence[Message], wanted: str, times: int = 1) -> bool:
        """Whether the template renders these messages, and `wanted` at least so many times in the text."""
        trace = self._try(messages)
        return trace is not None and trace.text.count(wanted) >= times

    def _renders(self, messages: Sequence[Message], wanted: str, *, aliased: bool = True) -> bool:
        shown = [_with_parts(m) for m in messages] if self.as_parts else list(messages)
        try:
            return wanted in self.trace(shown, None, None, self.arguments).text
        except RowError:
            return False


def _empty_thought(learned: Iterable[tuple[str, str]]) -> re.Pattern[str]:
    """Group 1 is an empty think block with the blanks behind it; blanks may stand before it."""
    pairs = [("<think>", "</think>"), *learned]
    blocks = "|".join(rf"{re.escape(opener)}\s*{re.escape(closer)}\s*" for opener, closer in pairs)
    return re.compile(rf"\s*({blocks})")


def _aliased(message: Message) -> Message:
    """The message with its reasoning under the names that transformers 5 adds."""
    for field in REASONING_FIELDS:
        reasoning = message.get(field)
        if reasoning is not None:
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _added_tokens(backend_json: str) -> list[dict[str, Any]]:
    """The `added_tokens` of a tokenizer.json, without reading the rest, which can hold tens of megabytes."""
    key = '"added_tokens":'
    at = backend_json.find(key)
    if at < 0:
        return []
    at += len(key)
    while backend_json[at] in " \t\r\n":
        at += 1
    added: list[dict[str, Any]] = json.JSONDecoder().raw_decode(backend_json, at)[0]
    return added


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    """Any of the tokens, the longest first; never matches where there are none."""
    longest_first = sorted({token for token in tokens if token}, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:500]


# --- what a run says before it starts ---


def probe(template: ChatTemplate) -> list[str]:
    """Plain notes on what the template does to trained text; none where it does nothing out of the ordinary.

    Raises UsageError where no assistant turn can be found in what the template renders.
    """
    user, again = {"role": "user", "content": "zq question"}, {"role": "user", "content": "zq follow-up"}
    answer = {"role": "assistant", "content": "zq answer"}
    shown = template.shows([user, answer], "zq answer")
    if not shown and not template.shows([{"role": "system", "content": "zq system"}, user, answer], "zq answer"):
        raise UsageError("the chat template does not render what an assistant message says; give another --chat-template")
    notes = []
    if template.hides_tags:
        notes.append("the template's {% generation %} blocks lie inside macros; the trained text is found without them")
    elif template.has_tags:
        notes.append("the template's {% generation %} blocks bound the trained text")
    if not template.follows_loops:
        notes.append("the template hides which message it renders; every row is rendered twice to follow the messages")
    prompt, header = template.prompt(template.arguments), template.header(template.arguments)
    if not prompt:
        notes.append("the template has no generation prompt: turns are trained from their first character")
    elif header and shown and not template.shows([user, answer], header):
        notes.append(f"no turn begins with the generation prompt {header!r}: role headers may be trained")
    return notes + _reasoning_notes(template, user, again)


def _reasoning_notes(template: ChatTemplate, user: Message, again: Message) -> list[str]:
    field = template.traits.reasoning_field
    inline = {"role": "assistant", "content": "<think>\nzq thought\n</think>\n\nzq answer"}
    thinking = inline if field is None else {"role": "assistant", "content": "zq answer", field: "zq thought"}
    if not template.shows([user, thinking], "zq thought") and field is None:
        return ["the template never renders reasoning: turns that have any are not trained"]
    notes = []
    if field is None:
        notes.append(
            "the template reads no reasoning field: inline <think> text stays; a turn whose reasoning comes in a field "
            "is not trained, since it is left out"
        )
    if not template.shows([user, thinking], "zq thought"):
        notes.append("the template renders reasoning beside tool calls only: other turns that have any are not trained")
    elif not template.shows([user, thinking, again, thinking], "zq thought", 2):
        keep = "--template-arg preserve_thinking=true or " if "preserve_thinking" in template.source else ""
        notes.append(
            "the template leaves out the reasoning of earlier turns, which are then not trained; "
            f"{keep}--turns expand keeps it"
        )
    return notes
