"""bytes of one line -> the JSON value it spells: at orjson's speed, with the standard library's patience.

orjson refuses NaN, raw control characters, lone surrogates and numbers that are no double: such lines go to the
standard library before they are rejected, since what stands in a field that nobody uses must not cost the row. It
rounds integers beyond 64 bits to floats: lines that gave a float and hold 19 digits in a row go there too. Both end at
about a thousand values within each other: what lies deeper is cut out, and missed only where it is used.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from typing import Any, Final

import orjson

from etl.errors import RowError

_IS_DIGIT: Final = bytes(ord("0") if byte in b"0123456789" else ord(" ") for byte in range(256))
_MOST_DIGITS: Final = 4000
_BLANKS: Final = " \t\r\n"
_LOOKS: Final = 100
_DEEPEST: Final = 500
_BRACKETS: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[{]|[\]}]', re.DOTALL)
_CUT_OUT: Final = f"too deep {secrets.token_hex(16)}"
"""Stands where a value lay too deep to be read: a string that no line can hold."""


class LongInteger(str):
    """An integer of more digits than Python converts (4,300): kept as its digits, which is all an id needs of it."""

    __slots__ = ()


def decode(raw: bytes) -> tuple[Any, bool]:
    """The value, and whether all its text is known to be encodable. Raises RowError `json`, `encoding` or `shape`.

    One leading BOM is passed over. The last of duplicate keys wins, integers keep every digit.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass  # the patient parser decides, and words the error
    else:
        if not (_may_hold_float(value) and _has_long_number(raw)):
            return value, True
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RowError("encoding", _not_utf8(raw, error)) from error
    try:
        return _decode_text(text), False
    except RecursionError:
        return _decode_shallow(text), False


def _decode_text(text: str) -> Any:
    try:
        return _PATIENT.decode(text)
    except json.JSONDecodeError as error:
        if text.lstrip(_BLANKS).startswith("["):
            raise RowError("shape", f"a JSON array begins, not an object: {_describe(text, error)}") from error
        raise RowError("json", _describe(text, error)) from error


def _decode_shallow(text: str) -> Any:
    """The value with what lies too deep cut out, which `require_text` refuses where it is used."""
    shown: list[str] = []
    depth = done = cut = 0
    for found in _BRACKETS.finditer(text):
        if found[0] in "[{":
            depth += 1
            if depth == _DEEPEST:
                cut = found.start()
        elif found[0] in "]}":
            if depth == _DEEPEST:
                shown += (text[done:cut], f'"{_CUT_OUT}"')
                done = found.end()
            depth -= 1
    try:
        return _decode_text("".join([*shown, text[done:]]))
    except (RowError, RecursionError) as error:
        raise RowError("json", "nested too deep to be read") from error


def spelled_object(text: str) -> dict[str, Any] | None:
    """The object that a string spells, None where it is broken or spells something else. Raises RowError `encoding`.

    The text of the object is checked here, since the line that holds the string as text could not show it.
    """
    value = spelled_value(text) if text.lstrip(_BLANKS).startswith("{") else None
    return value if isinstance(value, dict) else None


def spelled_value(text: str) -> Any:
    """The value that a string spells, None where it is broken. Raises RowError `encoding` on lone surrogates in it."""
    try:
        value, clean = decode(text.encode("utf-8", "surrogatepass"))
    except RowError:
        return None
    if not clean:
        require_text(value, "JSON in a string")
    return value


def compact(value: Any) -> str:
    """Compact JSON, other scripts as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def require_text(value: Any, where: str) -> None:
    """Raise RowError `encoding` if any string within the value cannot be written as UTF-8 (a lone surrogate)."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, LongInteger) and item is not value:
            raise RowError("json", f"{where} holds a number of {len(item)} digits")
        if isinstance(item, str):
            if item == _CUT_OUT:
                raise RowError("json", f"{where} is nested too deep to be read")
            _require_encodable(item, where)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)


def _require_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        seen = f"\\u{ord(text[error.start]):04x}"
        raise RowError("encoding", f"{where} holds a lone surrogate {seen} at character {error.start}") from error


def _may_hold_float(value: Any) -> bool:
    """Whether a float is anywhere in it; also where that would take long to tell."""
    stack, looks = [value], _LOOKS
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind is dict or kind is list:
            looks -= len(item)
            if looks < 0:
                return True
            stack += item.values() if kind is dict else item
        elif kind is float:
            return True
    return False


def _has_long_number(raw: bytes) -> bool:
    # 19 digits in a row cover three neighbours of every sixth byte, and six of every third: looking there first costs
    # 3 µs for 8 KB where the full look costs 11 and a regular expression 100
    return _has_digits(raw[::6], 3) and _has_digits(raw[::3], 6) and _has_digits(raw, 19)


def _has_digits(raw: bytes, count: int) -> bool:
    return b"0" * count in raw.translate(_IS_DIGIT)


def _integer(digits: str) -> int | LongInteger:
    return int(digits) if len(digits) <= _MOST_DIGITS else LongInteger(digits)


_PATIENT: Final = json.JSONDecoder(strict=False, parse_int=_integer)


def _not_utf8(raw: bytes, error: UnicodeDecodeError) -> str:
    wide = "; UTF-16?" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in raw[:4] else ""
    return f"not UTF-8: byte 0x{raw[error.start]:02x} at byte {error.start} of the line{wide}"


def _describe(text: str, error: json.JSONDecodeError) -> str:
    at = len(text[: error.pos].encode("utf-8", "surrogatepass"))
    near = ascii(text[max(0, error.pos - 20) : error.pos + 20])
    if not text[error.pos :].strip() or error.msg.startswith("Unterminated string"):
        return f"the line ends within a value (torn?): {error.msg} at byte {at}, near {near}"
    if text[error.pos :].strip() == ",":
        return f"a comma follows the value at byte {at}: a JSON array, not JSON lines?"
    if error.msg == "Extra data":
        return f"more follows the value (two lines glued together?) at byte {at}, near {near}"
    return f"{error.msg} at byte {at}, near {near}{_glued(text)}"


def _glued(text: str) -> str:
    start = text.find('{"', 1)
    if start < 0:
        return ""
    try:
        _PATIENT.decode(text[start:])
    except (json.JSONDecodeError, RecursionError):
        return ""
    return f"; a whole object begins at character {start}: a torn line glued to the next?"
