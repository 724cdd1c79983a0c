"""One render with the texts of the messages unknown -> Replay: the same way through the template for other texts.

Most rows of a data set have one of few shapes: the same roles, the same fields. What a template does with such a row
hangs on its texts only by what it asks of them (`'</think>' in content`). So it is run once with a `Hole` in place of
each text. A hole notes what is made of it and each question with its answer, and refuses all else; what comes out is a
row of literal text and holes. For other texts the questions are asked again, and where every answer is the same, so is
the way: the texts are put in without the template being run.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from etl.records import Message

Part: TypeAlias = str | int
"""Literal text, or the place of a text among a path's values."""

_MAKES: Final[Mapping[str, Callable[..., str]]] = {
    "lower": str.lower,
    "lstrip": str.lstrip,
    "removeprefix": str.removeprefix,
    "removesuffix": str.removesuffix,
    "replace": str.replace,
    "rstrip": str.rstrip,
    "strip": str.strip,
    "upper": str.upper,
}
_ASKS: Final[Mapping[str, Callable[..., bool]]] = {
    "endswith": str.endswith,
    "isspace": str.isspace,
    "startswith": str.startswith,
}
_FOLLOWED: Final = frozenset({*_MAKES, *_ASKS, "split"})
_METHODS: Final = {"lower": "lower", "trim": "strip", "upper": "upper"}
"""Filters that are methods of strings."""

_TESTS: Final = {
    "boolean": False,
    "callable": False,
    "defined": True,
    "false": False,
    "float": False,
    "integer": False,
    "iterable": True,
    "mapping": False,
    "none": False,
    "number": False,
    "sequence": True,
    "string": True,
    "true": False,
    "undefined": False,
}
"""What tests say of every string."""


_STEPS: Final = 1000
_PARTS: Final = 1000
_MESSAGES: Final = 64
_ROLE: Final = 64  # characters
"""Longer ways cost more than they spare: they are not taken twice."""


class UnfollowableError(Exception):
    """The template does something with a text that a hole cannot stand for."""


class _Step(NamedTuple):
    """Something made of the value at `of`, or of all values where that is None; a question where `answer` is known."""

    function: Callable[..., Any]
    of: int | None
    args: tuple[Any, ...]
    answer: bool | None = None


class Path:
    """What is made of the texts, and asked of them, on the way through a template with these texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.values = list(texts)
        self.steps: list[_Step] = []
        self._known: dict[tuple[Any, ...], Any] = {}

    def make(self, function: Callable[..., str], of: int | None, *args: Any) -> int:
        """The place of a new text."""
        key = function, of, args
        if key not in self._known:
            self._note(_Step(function, of, args))
            self._known[key] = len(self.values)
            self.values.append(self._do(function, of, args))
        place: int = self._known[key]
        return place

    def _note(self, step: _Step) -> None:
        if len(self.steps) >= _STEPS:
            raise UnfollowableError
        self.steps.append(step)

    def ask(self, function: Callable[..., bool], of: int | None, *args: Any) -> bool:
        """The answer for these texts."""
        key = function, of, args
        if key not in self._known:
            self._known[key] = self._do(function, of, args)
            self._note(_Step(function, of, args, self._known[key]))
        answer: bool = self._known[key]
        return answer

    def _do(self, function: Callable[..., Any], of: int | None, args: tuple[Any, ...]) -> Any:
        return function(self.values if of is None else self.values[of], *args)


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnfollowableError


class _StandIn:
    """Stands for a text that is not known, or for something made of it.

    What its kind does not follow it refuses, so that nothing that a template does goes by unseen.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise UnfollowableError(name)

    # what Python and Jinja look up on the type itself
    __add__ = __bool__ = __call__ = __contains__ = __eq__ = __float__ = __format__ = __ge__ = __getitem__ = _refuse
    __gt__ = __index__ = __int__ = __iter__ = __le__ = __len__ = __lt__ = __mod__ = __mul__ = __radd__ = _refuse
    __repr__ = __rmod__ = __rmul__ = __rsub__ = __str__ = __sub__ = _refuse
    __hash__ = _refuse


class Hole(_StandIn):
    """A text that is not known: literal text and places of a path, end to end."""

    __slots__ = ("_parts", "_path")

    def __init__(self, path: Path, *parts: Part) -> None:
        if len(parts) > _PARTS:
            raise UnfollowableError
        self._path = path
        self._parts = parts

    def __add__(self, other: object) -> Hole:
        return Hole(self._path, *_joined(self._parts, parts_of(other)))

    def __radd__(self, other: object) -> Hole:
        return Hole(self._path, *_joined(parts_of(other), self._parts))

    def __bool__(self) -> bool:
        return any(type(part) is str for part in self._parts) or self._path.ask(bool, self._place())

    def __eq__(self, other: object) -> bool:
        if type(other) is Hole:
            return self._path.ask(_are_equal, None, self._place(), other._place())
        return isinstance(other, str) and self._path.ask(operator.eq, self._place(), other)

    def __contains__(self, item: object) -> bool:
        if type(item) is not str:
            raise UnfollowableError
        return self._path.ask(operator.contains, self._place(), item)

    def call(self, name: str, *args: Any) -> Hole | _Split | bool:
        """A method of strings. Raises UnfollowableError for one that is not followed, and for holes as arguments."""
        if any(type(arg) not in (str, int) for arg in args):
            raise UnfollowableError
        if name == "split" and len(args) == 1 and args[0]:
            return _Split(self, args[0])
        if name in _MAKES:
            return Hole(self._path, self._path.make(_MAKES[name], self._place(), *args))
        if name in _ASKS:
            return self._path.ask(_ASKS[name], self._place(), *args)
        raise UnfollowableError

    def piece(self, separator: str, index: int) -> Hole:
        """What stands before the first separator (index 0) or behind the last (-1)."""
        return Hole(self._path, self._path.make(_piece, self._place(), separator, index))

    def _place(self) -> int:
        """The place of the whole text, which is put together where it has none yet."""
        if len(self._parts) == 1 and isinstance(self._parts[0], int):
            return self._parts[0]
        return self._path.make(_put_together, None, self._parts)

    __hash__ = _refuse  # which a class with an __eq__ of its own does not inherit


class _Split(_StandIn):
    """A hole's text split at a separator: its first and last piece, and all of them where it is but one."""

    __slots__ = ("_hole", "_separator")

    def __init__(self, hole: Hole, separator: str) -> None:
        self._hole = hole
        self._separator = separator

    def piece(self, index: Any) -> Hole:
        """The piece at 0 or -1; UnfollowableError for another, which may not be there."""
        if type(index) is not int or index not in (0, -1):
            raise UnfollowableError
        return self._hole.piece(self._separator, index)

    def __iter__(self) -> Iterator[Hole]:
        if self._separator in self._hole:
            raise UnfollowableError
        return iter((self._hole,))


class _Length(_StandIn):
    """A hole's length, which can only be told from 0."""

    __slots__ = ("_hole",)

    def __init__(self, hole: Hole) -> None:
        self._hole = hole

    def __bool__(self) -> bool:
        return bool(self._hole)

    def __gt__(self, other: object) -> bool:
        return self != other

    def __eq__(self, other: object) -> bool:
        if type(other) is not int or other != 0:
            raise UnfollowableError
        return not self._hole

    __hash__ = _refuse


def _piece(text: str, separator: str, index: int) -> str:
    return text.split(separator)[index]


def _are_equal(values: Sequence[str], one: int, other: int) -> bool:
    return values[one] == values[other]


def _put_together(values: Sequence[str], parts: Sequence[Part]) -> str:
    return "".join([part if isinstance(part, str) else values[part] for part in parts])


def parts_of(text: object) -> tuple[Part, ...]:
    """Literal text or a hole as parts; UnfollowableError for anything else."""
    if type(text) is Hole:
        return text._parts  # noqa: SLF001  of the same family
    if type(text) is str:
        return (text,) if text else ()
    raise UnfollowableError


def _joined(before: tuple[Part, ...], after: tuple[Part, ...]) -> tuple[Part, ...]:
    if before and after and isinstance(before[-1], str) and isinstance(after[0], str):
        return (*before[:-1], before[-1] + after[0], *after[1:])
    return before + after


# --- where a template meets holes ---


class _Method(_StandIn):
    """A method of a hole's text, to be called and nothing else."""

    __slots__ = ("_hole", "_name")

    def __init__(self, hole: Hole, name: str) -> None:
        self._hole = hole
        self._name = name

    def call(self, *args: Any) -> Hole | _Split | bool:
        """What the method gives. Raises UnfollowableError."""
        return self._hole.call(self._name, *args)


class Following(ImmutableSandboxedEnvironment):
    """Mixed into an environment, it lets holes through where they are followed and refuses them elsewhere."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute; a hole's is a method to be called, or is not there."""
        return self._of_hole(obj, attribute) if type(obj) is Hole else super().getattr(obj, attribute)

    def _of_hole(self, hole: Hole, name: str) -> Any:
        if name in _FOLLOWED:
            return _Method(hole, name)
        if hasattr("", name):
            raise UnfollowableError
        return self.undefined(name=name)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item; of a hole only those of its pieces."""
        if type(obj) is _Split:
            return obj.piece(argument)
        if type(obj) is Hole and type(argument) is str:
            return self._of_hole(obj, argument)
        if _holds(obj, argument):
            raise UnfollowableError
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call; holes may go to macros and namespaces only."""
        if type(obj) is _Method:
            if kwargs:
                raise UnfollowableError
            return obj.call(*args)
        keeps = type(obj) is Macro or (isinstance(obj, type) and issubclass(obj, Namespace))
        if not keeps and _holds(*args, *kwargs.values()):
            raise UnfollowableError
        return super().call(context, obj, *args, **kwargs)

    def follow(self) -> None:
        """Wrap the filters and tests, and put text together with holes in it."""
        both: tuple[tuple[dict[str, Any], Callable[..., Any]], ...] = ((self.filters, _filter), (self.tests, _test))
        for functions, of_hole in both:
            for name, function in functions.items():
                functions[name] = _following(function, functools.partial(of_hole, name))
        self.filters["random"] = self.globals["lipsum"] = _refuse  # drawn anew for each row
        self.concat = join  # type: ignore[method-assign]


def _following(function: Callable[..., Any], of_hole: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _holds(*args, *kwargs.values()):
            return of_hole(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped


def _holds(*values: Any) -> bool:
    return any(isinstance(value, _StandIn) for value in values)


def _filter(name: str, value: Any, *args: Any) -> Any:
    if type(value) is Hole:
        if name in _METHODS:
            return value.call(_METHODS[name], *args)
        if name == "string" and not args:
            return value
        if name in ("count", "length") and not args:
            return _Length(value)
        if name in ("d", "default") and not _holds(*args):
            return _or_else(value, *args)
    raise UnfollowableError


def _or_else(value: Hole, instead: Any = "", if_blank: Any = False) -> Any:
    return value if not if_blank or value else instead


def _test(name: str, value: Any, *args: Any) -> bool:
    if type(value) is Hole and name in _TESTS and not args:
        return _TESTS[name]
    raise UnfollowableError


def join(chunks: Any) -> Any:
    """What a template puts together: a string, or a hole where there are holes in it."""
    texts = [*chunks]
    if all(type(text) is str for text in texts):
        return "".join(texts)
    parts: list[Part] = []
    for text in texts:
        parts += parts_of(text)
    path = next(text for text in texts if type(text) is Hole)._path  # noqa: SLF001  of the same family
    return Hole(path, *parts)


def as_text(value: Any) -> Any:
    """`str` as a compiled template calls it on what it writes."""
    return value if type(value) is Hole else str(value)


def joined_texts(values: Sequence[Any]) -> Any:
    """`str_join`, the operator `~`."""
    return join(map(as_text, values))


# --- the other texts ---


class Replay:
    """The way through a template for rows of one shape: `parts` as the template wrote them, one behind the other."""

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self._steps = tuple(path.steps)
        literals = dict.fromkeys(part for part in parts if isinstance(part, str))
        self._literals = [*literals, ""]
        at = dict(zip(literals, range(len(path.values), len(path.values) + len(literals)), strict=True))
        places = [at[part] if isinstance(part, str) else part for part in parts]
        # two places more than needed, so that it is a tuple whatever there is
        self._pick: Callable[[Sequence[str]], tuple[str, ...]] = operator.itemgetter(*places, -1, -1)

    def pieces(self, texts: Sequence[str]) -> tuple[str, ...] | None:
        """What the template writes for these texts, piece by piece; None where it would go another way."""
        values = list(texts)
        for function, of, args, answer in self._steps:
            found = function(values if of is None else values[of], *args)
            if answer is None:
                values.append(found)
            elif found is not answer:
                return None
        values += self._literals
        return self._pick(values)


def read_shape(messages: Sequence[Message]) -> tuple[Hashable, list[str]] | None:
    """What rows that go the same way have in common, and the texts in which they differ.

    None where a message holds anything but strings, and for long conversations, whose shapes rarely come again.
    """
    if len(messages) > _MESSAGES:
        return None
    shape: list[Hashable] = []
    texts: list[str] = []
    for message in messages:
        shape.append(tuple(message))
        for name, value in message.items():
            if type(value) is not str:
                return None
            if name != "role":
                texts.append(value)
            elif len(value) > _ROLE:
                return None
            else:
                shape.append(value)
    return tuple(shape), texts


def with_holes(messages: Sequence[Message], path: Path) -> list[Message]:
    """The messages with a hole for each text, in the order of `read_shape`."""
    places = iter(range(len(path.values)))
    return [
        {name: value if name == "role" else Hole(path, next(places)) for name, value in message.items()}
        for message in messages
    ]
