"""Chat template source -> Trace: the rendered text, and which message each stretch of it is about.

The text is byte-equal to transformers' `apply_chat_template(tokenize=False)`: the same sandbox, the same globals. The
template is instrumented before it is compiled: each `for` loop notes, without emitting anything, how many chunks had
been emitted when an iteration began and which objects it is about. The root of a compiled template is a lazy
generator, so the chunks counted by then are the text before that iteration. What Jinja buffers (macros, `set` blocks)
cannot be followed so and is left alone.

A row that goes the way of an earlier one is rendered without running the template again (see `etl.replays`).
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinMethodType, CodeType, NoneType
from typing import Any, Final, NamedTuple, TypeVar

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, missing

from etl.errors import RowError, UsageError
from etl.records import Message, Span
from etl.replays import (
    Following,
    Path,
    Replay,
    UnfollowableError,
    as_text,
    joined_texts,
    parts_of,
    read_shape,
    with_holes,
)

_EVENT: Final = "event"  # the expression context by which the code generator knows our own statements
_GENERATION: Final = -1  # the depth that stands for a `{% generation %}` tag
_PLACE: Final = 2  # an event is (chunks so far, depth) and, where something begins, the ids of what it is about
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_PLAIN_TYPES: Final = frozenset({str, int, float, bool, list, dict, NoneType})
_STRING_METHODS: Final = frozenset({"endswith", "lower", "lstrip", "replace", "rstrip", "split", "startswith", "strip"})
_LOOP_ATTRIBUTES: Final = frozenset({"first", "index", "index0", "last", "length", "revindex", "revindex0"})
_SHAPES_KEPT: Final = 256
_TRIES: Final = 8  # renders with holes for one shape: as many ways through the template may be kept
_TRIES_AHEAD: Final = 64  # of all shapes, before ways must have served eight rows for each further one
_PATIENCE: Final = 64  # rows for which no way of a shape served, beyond those that one did, until they are given up
_BUFFERED: Final = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
# what a template can raise, from a bad row or its own bug: all of it rejects the row, none of it may end the run
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
)


_E = TypeVar("_E", bound="_Environment")


class ClockError(jinja2.TemplateError):
    """The template asked the clock, and no date was given."""


class Trace(NamedTuple):
    """One render.

    `owners`: (start, end, message index), ascending and disjoint, for the text emitted while a loop was at a message.
    `generated`: the stretches inside `{% generation %}`; None where the template has no such tag.
    """

    text: str
    owners: tuple[tuple[int, int, int], ...]
    generated: tuple[Span, ...] | None = None


class Sandbox:
    """A compiled template. Raises UsageError where it cannot be compiled.

    `constants`: variables that every render sees; `date`: YYYY-MM-DD, for templates that ask the clock.
    `has_tags`: `{% generation %}` blocks bound its trained text; `hides_tags`: it has such blocks in macros, where
    they cannot be followed; `reads`: the names of the variables that it can read.
    """

    def __init__(self, source: str, date: str | None, constants: Mapping[str, Any]) -> None:
        environment = _environment(date, _Environment)
        try:
            tree = environment.parse(source)
            # Jinja leaves its own globals out, but an argument of such a name wins over them.
            self.reads = frozenset(meta.find_undeclared_variables(tree)) | environment.globals.keys()
            has_tags = _has_events(tree)
            self.hides_tags = any(_has_events(node) for node in tree.find_all(_BUFFERED))
            self.has_tags = has_tags and not self.hides_tags
            _instrument(tree)
            code = environment.compile(tree)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f"line {line}: "
            raise UsageError(f"the chat template cannot be compiled: {where}{_one_line(error)}") from error
        self._template = _Compiled(environment, code, constants)
        self._following = functools.cache(lambda: _follow(code, date, constants))
        self._shapes: dict[Hashable, _Shape] = {}
        self._tries = self._taken = 0

    def trace(self, messages: Sequence[Message], variables: Mapping[str, Any], key: Hashable = None) -> Trace:
        """Render; `variables` win over the constants. Raises RowError `template`.

        `key`: equal for calls whose variables are equal, `messages` apart, so that a row's way through the template
        may be kept and taken again; None where that is not known.
        """
        read = None if key is None else read_shape(messages)
        if read is None:
            return self._run(messages, variables)
        shape, texts = read
        known = self._shapes.get((key, shape))
        if known is not None and (found := known.take(texts)) is not None:
            self._taken += 1
            return found
        trace = self._run(messages, variables)
        if known is None:
            if len(self._shapes) >= _SHAPES_KEPT:
                self._shapes.clear()
            self._shapes[key, shape] = _Shape()  # most shapes come once or all the time: kept from the second time on
        elif known.tries < _TRIES and self._tries <= _TRIES_AHEAD + self._taken // _TRIES:
            known.tries += 1
            self._tries += 1
            learned = self._learn(messages, texts, variables)
            if learned is not None and learned.trace(texts) == trace:
                known.ways.append(learned)
        return trace

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Trace:
        try:
            chunks, events = self._template.run(variables)
            return _trace(chunks, _read_events(events, messages), has_tags=self.has_tags)
        except _TEMPLATE_ERRORS as error:
            raise RowError("template", _one_line(error)) from error

    def _learn(self, messages: Sequence[Message], texts: Sequence[str], variables: Mapping[str, Any]) -> _Way | None:
        """The way that a row with these texts takes; None where the template does what cannot be followed."""
        path = Path(texts)
        opened = with_holes(messages, path)
        try:
            chunks, events = self._following().run({**variables, "messages": opened})
            pieces = [parts_of(chunk) for chunk in chunks]
        except (UnfollowableError, *_TEMPLATE_ERRORS):
            return None
        starts = [0, *itertools.accumulate(map(len, pieces))]
        replay = Replay(path, [part for piece in pieces for part in piece])
        course = _read_events([(starts[at], *event) for at, *event in events], opened)
        return _Way(replay, course, self.has_tags)


@dataclass(slots=True)
class _Shape:
    """The ways that rows of one shape have taken, given up where they serve too few of them."""

    ways: list[_Way] = field(default_factory=list)
    tries: int = 0
    taken: int = 0
    missed: int = 0

    def take(self, texts: Sequence[str]) -> Trace | None:
        """The render by a known way; None where no one is the texts'."""
        for way in self.ways:
            trace = way.trace(texts)
            if trace is not None:
                self.taken += 1
                return trace
        if self.ways:
            self.missed += 1
            if self.missed > _PATIENCE + self.taken:
                self.ways.clear()
                self.tries = _TRIES
        return None


class _Way(NamedTuple):
    """A replay, and the course of the render that it was learned from, counted in its pieces."""

    replay: Replay
    course: _Course
    has_tags: bool

    def trace(self, texts: Sequence[str]) -> Trace | None:
        """The render of these texts; None where they go another way."""
        pieces = self.replay.pieces(texts)
        return None if pieces is None else _trace(pieces, self.course, has_tags=self.has_tags)


def _trace(chunks: Sequence[str], course: _Course, *, has_tags: bool) -> Trace:
    ends = [0, *itertools.accumulate(map(len, chunks))]
    return Trace("".join(chunks), course.owners(ends), course.spans(ends) if has_tags else None)


class _Compiled:
    """Code ready to run in an environment."""

    def __init__(self, environment: _Environment, code: CodeType, constants: Mapping[str, Any]) -> None:
        template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        self._environment = environment
        self._globals = {**template.globals, **constants}
        self._blocks = template.blocks
        self.render = template.root_render_func

    def run(self, variables: Mapping[str, Any]) -> tuple[list[str], list[tuple[int, ...]]]:
        """The chunks that the template emits and the events that it notes. Raises what the template raises."""
        context = _Context(self._environment, {**self._globals, **variables}, None, self._blocks, self._globals)
        append = context.chunks.append
        try:
            for chunk in self.render(context):
                append(chunk)
        finally:
            context.let_go()
        return context.chunks, context.events


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:500]


class _Course(NamedTuple):
    """What the events of a render tell, counted in chunks.

    `stretches`: (end, message index), each from the end of the one before, -1 where the text is about no message;
    `generated`: (start, end) of what stands inside `{% generation %}`.
    """

    stretches: tuple[tuple[int, int], ...]
    generated: tuple[Span, ...]

    def owners(self, ends: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """As in Trace; `ends`: where each chunk begins, and where the last one ends."""
        owners: list[tuple[int, int, int]] = []
        since = 0
        for place, owner in self.stretches:
            at = ends[place]
            if at > since:
                if owner >= 0:
                    if owners and owners[-1][1:] == (since, owner):
                        since = owners.pop()[0]
                    owners.append((since, at, owner))
                since = at
        return tuple(owners)

    def spans(self, ends: Sequence[int]) -> tuple[Span, ...]:
        """The text that was generated."""
        return tuple((ends[start], ends[end]) for start, end in self.generated if ends[start] < ends[end])


def _read_events(events: Sequence[tuple[int, ...]], messages: Sequence[Message]) -> _Course:
    index = {id(message): i for i, message in enumerate(messages)}
    stretches: dict[int, int] = {}
    generated: list[Span] = []
    stack: list[int] = []  # the message that each open loop is at, -1 where it is about something else
    begun = 0
    for event in events:
        at, depth = event[0], event[1]
        if depth == _GENERATION:
            if len(event) > _PLACE:
                begun = at
            else:
                generated.append((begun, at))
            continue
        stretches.setdefault(at, stack[-1] if stack else -1)
        del stack[depth:]
        if len(event) > _PLACE:
            stack.append(_owner(event, index, stack[-1] if stack else -1))
    return _Course(tuple(stretches.items()), tuple(generated))


def _owner(event: tuple[int, ...], index: Mapping[int, int], outer: int) -> int:
    for known in event[_PLACE:]:
        if known in index:
            return index[known]
    return outer


# --- the environment: what transformers gives a template, no more ---


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with shortcuts for what it allows anyway: keys of plain dicts, attributes of namespaces and loops,
    macros, methods of strings. Everything else takes the long way. Halves the time of a render (measured).
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                value = obj.get(attribute, missing)
                return self.undefined(obj=obj, name=attribute) if value is missing else value
        elif kind is _TemplateNamespace:
            value = object.__getattribute__(obj, "_Namespace__attrs").get(attribute, missing)
            if type(value) in _PLAIN_TYPES and not attribute.startswith("_"):
                return value
        elif (kind is str and attribute in _STRING_METHODS) or (kind is LoopContext and attribute in _LOOP_ATTRIBUTES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(obj)
        if kind is Macro:
            absent = len(obj.arguments) - len(args)
            special = obj.caller or obj.catch_kwargs or obj.catch_varargs or context.eval_ctx.autoescape
            if kwargs or special or absent < 0:
                return obj(context.eval_ctx, *args, **kwargs)
            return obj._func(*args, *(missing,) * absent)  # noqa: SLF001  what its __call__ comes to
        if obj is _TemplateNamespace or (kind is BuiltinMethodType and type(obj.__self__) is str):
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)


class _Context(Context):
    """A render in progress: the chunks emitted so far, and what the loops noted."""

    def __init__(
        self,
        environment: jinja2.Environment,
        parent: dict[str, Any],
        name: str | None,
        blocks: dict[str, Callable[[Context], Iterator[str]]],
        globals: Mapping[str, Any] | None = None,  # noqa: A002  the base class's name
    ) -> None:
        # as the base class does, whose own constructor copies the globals' names each time
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

    def let_go(self) -> None:
        """Undo what a render ties into a ring: macros hold the context, which holds them.

        Else every row's messages and text stay until the cyclic collector comes by (measured: 3 % of a worker's time,
        and each row written to cold memory).
        """
        for value in self.vars.values():
            if type(value) is Macro:
                value._func = _ended  # noqa: SLF001  the only way to it
        self.vars.clear()


def _ended(*_: Any) -> str:
    raise jinja2.TemplateRuntimeError("a macro was called after its render")


class _TemplateDict:
    """`dict` as transformers shows it to templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """`namespace` as transformers shows it to templates: no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        self._Namespace__attrs = attributes  # as the base class does, without a second copy

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


def _clock(date: str | None) -> Callable[[str], str]:
    if date is None:

        def refuse(_: str) -> str:
            raise ClockError("the chat template asks for today's date; give --date YYYY-MM-DD")

        return refuse
    return datetime.datetime.fromisoformat(date).strftime


class _FollowingEnvironment(Following, _Environment):
    """The same, for a render with holes."""


def _follow(code: CodeType, date: str | None, constants: Mapping[str, Any]) -> _Compiled:
    environment = _environment(date, _FollowingEnvironment)
    environment.follow()
    compiled = _Compiled(environment, code, constants)
    compiled.render.__globals__.update(str=as_text, str_join=joined_texts)
    return compiled


def _environment(date: str | None, kind: type[_E]) -> _E:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
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


class _CodeGenerator(CodeGenerator):
    """Compiles our own statements, which note an event and emit nothing."""

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802  found by this name
        if not _is_event(node):
            super().visit_ExprStmt(node, frame)
            return
        depth, *targets = node.node.items  # type: ignore[attr-defined]
        self.newline(node)
        self.write("context.events.append((len(context.chunks), ")
        self.visit(depth, frame)
        for target in targets:
            self.write(", id(")
            self.visit(target, frame)
            self.write(")")
        self.write("))")

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802  found by this name
        """Without the variables of loops and blocks, which only callables that ask for the context see: there are none.

        Passed as keywords and taken out again, they cost more than most calls.
        """
        before = frame.loop_frame, frame.block_frame
        frame.loop_frame = frame.block_frame = False
        try:
            super().visit_Call(node, frame, forward_caller=forward_caller)
        finally:
            frame.loop_frame, frame.block_frame = before

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802  found by this name
        if node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
        else:
            self._read_key(node.node, "getattr", node.attr, frame)

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802  found by this name
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            self._read_key(node.node, "getitem", node.arg.value, frame)
        else:
            super().visit_Getitem(node, frame)

    def _read_key(self, of: nodes.Expr, how: str, key: str, frame: Frame) -> None:
        """A key of a plain dict, read in place; all else asks the sandbox. A third of a render's time (measured)."""
        self.write(f"(etl_read[{key!r}] if type(etl_read := ")
        self.visit(of, frame)
        self.write(f") is dict and {key!r} in etl_read else environment.{how}(etl_read, {key!r}))")


class _GenerationTag(Extension):
    """`{% generation %}`: what it encloses is trained text by the template's own word."""

    tags = {"generation"}  # noqa: RUF012  the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = _event(line, _GENERATION, nodes.Const(1)), _event(line, _GENERATION)
        return nodes.Scope([begin, *body, end], lineno=line)


def _event(line: int, depth: int, *targets: nodes.Expr) -> nodes.ExprStmt:
    return nodes.ExprStmt(nodes.Tuple([nodes.Const(depth), *targets], _EVENT), lineno=line)


def _is_event(node: nodes.ExprStmt) -> bool:
    return isinstance(node.node, nodes.Tuple) and node.node.ctx == _EVENT


def _has_events(node: nodes.Node) -> bool:
    return any(_is_event(statement) for statement in node.find_all(nodes.ExprStmt))


def _instrument(node: nodes.Node, depth: int = 0) -> None:
    """Note each iteration of each loop whose text goes straight to the output."""
    for name in ("body", "else_", "elif_"):
        children = getattr(node, name, None)
        if not isinstance(children, list):
            continue
        for child in tuple(children):
            if isinstance(child, _BUFFERED) or (isinstance(child, nodes.For) and child.recursive):
                continue
            _instrument(child, depth + isinstance(child, nodes.For))
            if isinstance(child, nodes.For):
                child.body.insert(0, _event(child.lineno, depth, *_loop_objects(child)))
                at = next(i for i, other in enumerate(children) if other is child)  # nodes compare by value
                children.insert(at + 1, _event(child.lineno, depth))


def _loop_objects(loop: nodes.For) -> Iterator[nodes.Expr]:
    """What an iteration can be about: its targets, or `messages[i]` where `i` is a target."""
    target = loop.target
    names = [target.name] if isinstance(target, nodes.Name) else [name.name for name in target.find_all(nodes.Name)]
    yield from (nodes.Name(name, "load") for name in names)
    stored = {name.name for child in loop.body for name in child.find_all(nodes.Name) if name.ctx == "store"}
    pairs = {
        (item.node.name, item.arg.name): None  # in the order of the text
        for child in loop.body
        for item in child.find_all(nodes.Getitem)
        if isinstance(item.node, nodes.Name) and isinstance(item.arg, nodes.Name)
    }
    for of, by in pairs:
        if by in names and of not in stored:
            yield nodes.Getitem(nodes.Name(of, "load"), nodes.Name(by, "load"), "load")
