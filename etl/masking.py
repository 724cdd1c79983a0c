"""Token ends + trained spans -> loss mask: int8 of 0 and 1, for a whole batch of rows at once.

Tokens, spans and cuts are places on one axis. A token is trained when it overlaps a span; a token that holds text on
both sides of a cut is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etl.records import Span


def mask_by_ends(
    token_ends: npt.NDArray[np.signedinteger[Any]], spans: Sequence[Span], cuts: Sequence[Span]
) -> npt.NDArray[np.int8]:
    """The mask of tokens that lie end to end from 0: token i is [token_ends[i - 1], token_ends[i]).

    `token_ends` [n] ascending, in any unit (bytes); `spans` and `cuts` half-open in the same unit, in any order; a cut
    is mostly a point, (p, p), and a range where one character of the text came from both sides. Returns int8 [n].
    """
    mask = np.zeros(len(token_ends), np.int8)
    for value, ranges in ((1, spans), (0, [cut for cut in cuts if cut[1] > 0])):
        if ranges:
            edges = np.array(ranges, token_ends.dtype)
            first = np.searchsorted(token_ends, edges[:, 0], side="right")
            stop = np.searchsorted(token_ends, edges[:, 1], side="left") + 1
            for start, end in zip(first.tolist(), stop.tolist(), strict=True):
                mask[start:end] = value
    return mask


def mask_by_offsets(
    starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], spans: Sequence[Span], cuts: Sequence[int]
) -> npt.NDArray[np.int8]:
    """The mask of tokens [starts[i], ends[i]) that may leave gaps, or share a character that was cut into bytes.

    `spans` ascend and are disjoint. A token without width counts as one wide: it stands for the character that begins
    there. Returns int8 [n].
    """
    ends = np.maximum(ends, starts + 1)
    mask = np.zeros(len(starts), bool)
    if spans:
        edges = np.array(spans, np.int64)
        before = np.searchsorted(edges[:, 0], ends, side="left") - 1  # the last span that begins within or before it
        mask = (before >= 0) & (edges[before, 1] > starts)
    if cuts:
        points = np.sort(np.array(cuts, np.int64))
        after = np.append(points, np.iinfo(np.int64).max)[np.searchsorted(points, starts, side="right")]
        mask &= after >= ends
    return mask.astype(np.int8)
