"""JSON as it comes: what orjson refuses or rounds is read by the patient parser, and a bad line says how it is bad."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etl.errors import RowError
from etl.jsonline import LongInteger, compact, decode, require_text, spelled_object, spelled_value


def value_of(raw: bytes) -> Any:
    return decode(raw)[0]


def error_of(raw: bytes) -> RowError:
    with pytest.raises(RowError) as caught:
        decode(raw)
    return caught.value


def test_a_leading_bom_is_passed_over() -> None:
    assert value_of(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_bom_within_text_stays() -> None:
    assert value_of(b'{"a": "\xef\xbb\xbfx"}') == {"a": "\ufeffx"}


def test_blanks_and_a_carriage_return_around_the_value_are_json() -> None:
    assert value_of(b' \t{"a": 1}\t\r') == {"a": 1}


def test_separators_that_are_no_line_feed_stay_in_the_text() -> None:
    assert value_of('{"a": "x\u2028y\u0085z\u2029"}'.encode()) == {"a": "x\u2028y\u0085z\u2029"}


def test_nan_and_infinity_do_not_cost_the_row() -> None:
    assert str(value_of(b'{"a": NaN, "b": [Infinity, -Infinity, 1e999]}')) == "{'a': nan, 'b': [inf, -inf, inf]}"


def test_raw_control_characters_stay_in_the_text() -> None:
    assert value_of(b'{"a": "x\x00y\x01z\tw"}') == {"a": "x\x00y\x01z\tw"}


def test_the_last_of_duplicate_keys_wins_with_either_parser() -> None:
    assert value_of(b'{"a": 1, "b": 2, "a": 3}') == {"a": 3, "b": 2}
    assert value_of(b'{"a": 1, "b": NaN, "b": 2, "a": 3}') == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    "digits",
    ["9007199254740993", "9223372036854775808", "18446744073709551616", "-18446744073709551617", "1" + "0" * 400 + "7"],
)
def test_integers_keep_every_digit(digits: str) -> None:
    assert str(value_of(f'{{"a": [{digits}]}}'.encode())["a"][0]) == digits


def test_an_integer_longer_than_python_converts_keeps_its_digits_and_its_row() -> None:
    digits = "7" * 100_000
    value = value_of(f'{{"id": {digits}, "b": 1}}'.encode())
    assert value["b"] == 1
    assert isinstance(value["id"], LongInteger)
    assert value["id"] == digits


@given(st.binary(max_size=30), st.integers(min_value=19, max_value=40), st.binary(max_size=30))
def test_nineteen_digits_in_a_row_are_seen_wherever_they_stand(before: bytes, count: int, after: bytes) -> None:
    raw = orjson.dumps([before.hex(), "x"])[:-1] + b"," + b"9" * count + b"," + orjson.dumps(after.hex()) + b"]"
    assert value_of(raw)[2] == int("9" * count)


def test_a_good_pair_of_surrogates_is_one_character() -> None:
    assert decode(b'{"a": "\\ud83d\\ude00"}') == ({"a": "😀"}, True)


def test_a_lone_surrogate_is_read_and_known_to_be_unchecked() -> None:
    value, clean = decode(b'{"a": "x\\ud83d", "b": "fine"}')
    assert (value["b"], clean) == ("fine", False)
    require_text(value["b"], "b")
    with pytest.raises(RowError, match=r"encoding: a holds a lone surrogate \\ud83d at character 1"):
        require_text(value["a"], "a")


def test_lone_surrogates_are_found_in_keys_and_depths() -> None:
    for bad in ({"\ud800": 1}, [[["x\udfff"]]], {"a": [{"b": "\ud83d"}]}):
        with pytest.raises(RowError, match="encoding"):
            require_text(bad, "tools")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a": "\xff"}', "byte 0xff at byte 7"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        ("\ufeff{}".encode("utf-16-le"), "UTF-16?"),
        ("{}".encode("utf-16-be"), "json"),
    ],
)
def test_what_is_not_utf8_is_encoding(raw: bytes, said: str) -> None:
    error = error_of(raw)
    assert said in f"{error.reason}: {error.detail}"


@pytest.mark.parametrize("raw", [b'{"messages":[{"ro', b'{"a": "un', b'{"a":', b"", b'{"a": 1,'])
def test_a_torn_line_says_so(raw: bytes) -> None:
    error = error_of(raw)
    assert error.reason == "json"
    assert "torn" in error.detail


@pytest.mark.parametrize("raw", [b"[", b'[{"a": 1},', b'\xef\xbb\xbf [{"a": 1}, {"b"'])
def test_the_first_line_of_an_array_is_of_no_shape(raw: bytes) -> None:
    assert error_of(raw).reason == "shape"


def test_a_line_of_an_array_names_its_comma() -> None:
    error = error_of(b'  {"a": 1}, ')
    assert (error.reason, "a JSON array, not JSON lines?" in error.detail) == ("json", True)


def test_two_glued_objects_say_where_the_second_begins() -> None:
    error = error_of('{"a": "é"}{"b": 2}'.encode())
    assert error.reason == "json"
    assert "glued together?) at byte 11" in error.detail


def test_a_torn_line_glued_to_the_next_says_where_the_next_begins() -> None:
    error = error_of(b'{"mess{"messages":[{"role":"user","content":"x"}]}')
    assert error.reason == "json"
    assert "a whole object begins at character 6" in error.detail


@pytest.mark.parametrize(("opener", "closer"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_what_is_nested_too_deep_costs_only_those_who_use_it(opener: bytes, closer: bytes) -> None:
    deep = opener * 100_000 + b"1" + closer * 100_000
    value = value_of(b'{"a": "]\\"[[", "b": ' + deep + b', "c": [' + deep + b', 2], "d": 9223372036854775808.5}')
    assert (value["a"], value["c"][1], value["d"]) == (']"[[', 2, 9223372036854775808.5)
    for used in ("b", "c"):
        with pytest.raises(RowError, match=f"json: {used} is nested too deep to be read"):
            require_text(value[used], used)
    require_text(value["a"], "a")


@pytest.mark.parametrize("opener", [b"[", b'{"a":', b'{"a": "x", "b": ['])
def test_what_is_nested_too_deep_and_never_closed_is_a_reject(opener: bytes) -> None:
    error = error_of(opener * 100_000)
    assert (error.reason, error.detail) == ("json", "nested too deep to be read")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
@settings(max_examples=30, deadline=None)
def test_any_value_comes_back_as_the_standard_library_reads_it(value: Any) -> None:
    raw = json.dumps(value).encode()
    assert value_of(raw) == json.loads(raw)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_or_a_named_reason(raw: bytes) -> None:
    with contextlib.suppress(RowError):  # and nothing else
        decode(raw)


def test_a_number_too_long_to_convert_is_named_where_its_value_is_used() -> None:
    with pytest.raises(RowError, match="json: tools holds a number of 5000 digits"):
        require_text(value_of(b'[{"maximum": ' + b"7" * 5000 + b"}]"), "tools")


def test_a_string_that_spells_an_object_is_that_object() -> None:
    assert spelled_object('{"city": "M\\u00e1laga", "n": 18446744073709551617}') == {
        "city": "Málaga",
        "n": 18446744073709551617,
    }


@pytest.mark.parametrize("text", ["{city:", "null", "[1]", '"x"', "7", "", "  ", '{"a": 1} x', "\ud83d", "{" * 5000])
def test_a_string_that_spells_no_object_is_none(text: str) -> None:
    assert spelled_object(text) is None


def test_a_surrogate_hidden_in_a_spelled_string_is_found() -> None:
    with pytest.raises(RowError, match="encoding"):
        spelled_value('{"a": "\\ud83d"}')


def test_compact_json_leaves_other_scripts_as_they_are() -> None:
    assert compact({"é": [1, 2.5, None, True]}) == '{"é":[1,2.5,null,true]}'
