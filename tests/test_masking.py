"""Token ends and spans -> mask, on arrays that can be checked by eye."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etl.masking import mask_by_ends, mask_by_offsets

ENDS = np.array([2, 5, 6, 9])
"""Tokens [0, 2) [2, 5) [5, 6) [6, 9)."""
STARTS = np.array([0, 2, 5, 6])


def by_ends(spans: list[tuple[int, int]], cuts: list[tuple[int, int]] | None = None) -> list[int]:
    found: list[int] = mask_by_ends(ENDS, spans, cuts or []).tolist()
    return found


def test_a_span_on_token_edges_trains_just_its_tokens() -> None:
    assert by_ends([(2, 6)]) == [0, 1, 1, 0]


def test_a_token_that_overlaps_a_span_by_one_byte_is_trained() -> None:
    assert by_ends([(1, 3)]) == [1, 1, 0, 0]
    assert by_ends([(8, 9)]) == [0, 0, 0, 1]


def test_several_spans_may_share_a_token() -> None:
    assert by_ends([(0, 3), (4, 6)]) == [1, 1, 1, 0]


def test_no_span_trains_nothing_and_no_token_is_no_mask() -> None:
    assert by_ends([]) == [0, 0, 0, 0]
    assert mask_by_ends(np.zeros(0, np.int64), [], []).tolist() == []


def test_a_token_that_straddles_a_cut_is_not_trained() -> None:
    assert by_ends([(0, 9)], [(3, 3)]) == [1, 0, 1, 1]


def test_a_cut_between_two_tokens_touches_neither() -> None:
    assert by_ends([(0, 9)], [(5, 5), (0, 0), (9, 9)]) == [1, 1, 1, 1]


def test_a_cut_within_a_changed_character_takes_all_its_tokens() -> None:
    assert by_ends([(0, 9)], [(4, 6)]) == [1, 0, 0, 1]


def test_the_mask_is_int8_of_0_and_1() -> None:
    assert mask_by_ends(ENDS, [(0, 9)], []).dtype == np.int8
    assert mask_by_offsets(STARTS, ENDS, [(0, 9)], []).dtype == np.int8


def test_tokens_that_share_a_character_share_its_fate() -> None:
    # An emoji at character 1 cut into three tokens: each has its whole place.
    starts, ends = np.array([0, 1, 1, 1, 2]), np.array([1, 2, 2, 2, 3])
    assert mask_by_offsets(starts, ends, [(1, 2)], []).tolist() == [0, 1, 1, 1, 0]
    assert mask_by_offsets(starts, ends, [(0, 3)], [1, 2]).tolist() == [1, 1, 1, 1, 1]


def test_a_token_without_width_stands_for_the_character_that_begins_there() -> None:
    starts = ends = np.array([0, 4, 5])
    assert mask_by_offsets(starts, ends, [(4, 5)], []).tolist() == [0, 1, 0]


def test_text_between_tokens_that_no_token_covers_does_not_matter() -> None:
    assert mask_by_offsets(np.array([0, 4]), np.array([2, 6]), [(2, 4)], []).tolist() == [0, 0]


@given(st.lists(st.integers(1, 5), max_size=20), st.sets(st.integers(0, 60), max_size=12), st.sets(st.integers(0, 60)))
def test_both_ways_say_what_a_loop_says(widths: list[int], edges: set[int], cuts: set[int]) -> None:
    ends = np.cumsum(np.array(widths, np.int64), dtype=np.int64)
    starts = ends - np.array(widths, np.int64)
    ordered = sorted(edges)
    spans = list(zip(ordered[::2], ordered[1::2], strict=False))
    loop = [
        int(any(s < end and e > start for s, e in spans) and not any(start < c < end for c in cuts))
        for start, end in pairwise([0, *ends.tolist()])
    ]
    assert mask_by_ends(ends, spans, [(c, c) for c in cuts]).tolist() == loop
    assert mask_by_offsets(starts, ends, spans, sorted(cuts)).tolist() == loop
