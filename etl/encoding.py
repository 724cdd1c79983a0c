"""Rendered -> Encoded: token ids and loss masks of a batch, by the fast engine where it agrees with the reference.

Positions come from byte lengths: in byte-level BPE each id stands for a fixed number of bytes of the normalised text,
so that a running sum over a batch's ids gives every token's end. A row whose lengths do not add up, and tokenizers
whose ids have no fixed length, take the reference's offsets. A row with characters that the Unicode tables of the
libraries involved do not agree on (marks and letters of the last ten years) takes the reference's ids too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from etl.engines import EngineUnsupported, Gigatoken, Ids, Reference, load_agreeing
from etl.errors import RowError, UsageError
from etl.masking import mask_by_ends, mask_by_offsets
from etl.positions import BytePlaces, byte_places
from etl.records import Encoded, Rendered, Span, TokenizerSpec

T = TypeVar("T")

TokenIds: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""A row that came tokenized: prompt ids, which are not trained, and generated ids, which are."""

_NO_IDS: Final = np.zeros(0, np.int32)
_INT32_END: Final = 2**31
_VERIFIED_LENGTH: Final = 10**6
"""Longer texts are not encoded twice: the reference takes a hundred bytes of memory for each of theirs (measured)."""


class Encoder:
    """Encodes batches; built once in each worker, from the spec alone.

    `engine` is `auto`, `gigatoken` or `transformers`. Under `auto` gigatoken is taken where it loads the tokenizer and
    agrees with the reference on a set of awkward texts; `why` says what spoke against it, or is None. `truth` is the
    reference. Raises UsageError where `gigatoken` is asked for and cannot be had.
    """

    def __init__(self, spec: TokenizerSpec, engine: str = "auto", verify_share: float = 0.002, seed: int = 0) -> None:
        self.truth = Reference(spec.backend_json)
        self._verify_share = verify_share
        self._seed = seed
        self._lock = threading.Lock()
        self._lengths = self.truth.byte_lengths()
        self._longest = 1 if self._lengths is None else int(self._lengths.max())
        self._fast: Gigatoken | None = None
        self.why: str | None = None
        if engine != "transformers":
            try:
                self._fast = load_agreeing(spec.backend_json, self.truth)
            except EngineUnsupported as error:
                self.why = str(error)
                if engine == "gigatoken":
                    raise UsageError(f"--engine gigatoken cannot take {spec.name}: {error}") from error

    @property
    def engine_name(self) -> str:
        """The engine in use: `gigatoken` or `transformers`."""
        return (self._fast or self.truth).name

    def limit_cache(self, size: int) -> None:
        """Let the fast engine remember words in so many bytes of memory."""
        if self._fast is not None:
            self._fast.cache_bytes = size

    def reference(self) -> Encoder:
        """The same encoder on the reference alone: what a partition is done again with after a difference."""
        other = copy.copy(self)
        vars(other).update(_fast=None, why="gigatoken gave other ids on a row")
        return other

    def verifying(self, share: float) -> Encoder:
        """The same encoder, engines and all, which verifies another share of the rows."""
        other = copy.copy(self)
        vars(other).update(_verify_share=share)
        return other

    def encode(self, rows: Sequence[Rendered | TokenIds]) -> Encoded:
        """Ids and mask of each row, in order; a row in `failed` has none and its RowError instead.

        With gigatoken a seeded share of the rows, and at least one, is encoded by the reference as well; texts beyond
        a million characters are left out of that.
        """
        with self._lock:  # a worker with several threads: the native tokenizers cannot be borrowed twice
            return self._encode(rows)

    def _encode(self, rows: Sequence[Rendered | TokenIds]) -> Encoded:
        failed: dict[int, RowError] = {}
        ids = [self._attempt(i, failed, self._row_ids, row) for i, row in enumerate(rows)]
        places = self._places(rows, failed)
        doubtful = self._find_doubtful(rows, places, failed)
        for i, text in doubtful.items():
            ids[i] = self._attempt(i, failed, self.truth.ids, text)
        splits = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(found) for found in ids], out=splits[1:])
        flat = np.concatenate([_NO_IDS, *ids])
        verified, different = self._verify(rows, flat, splits, failed)
        mask, wrong, turns = self._mask(rows, places, flat, splits, failed)
        ones = mask.view(np.bool_)  # which are counted far faster than bytes are added up
        last = {i: int(np.count_nonzero(ones[first : splits[i + 1]])) for i, first in turns.items()}
        return Encoded(flat, mask, splits, verified, different + wrong, failed, last, len(doubtful))

    def _find_doubtful(
        self, rows: Sequence[Rendered | TokenIds], places: Sequence[BytePlaces | None], failed: Mapping[int, RowError]
    ) -> dict[int, str]:
        """Texts in which even the places cannot be told, by row: the engines may not agree what the text is."""
        if self._fast is None or self._lengths is None or None not in places:
            return {}
        unplaced = (i for i, place in enumerate(places) if place is None and i not in failed)
        return {i: row.text for i in unplaced if isinstance(row := rows[i], Rendered) and not row.literal}

    @staticmethod
    def _attempt(i: int, failed: dict[int, RowError], encode: Callable[[T], Ids], row: T) -> Ids:
        try:
            return encode(row)
        except RowError as error:
            failed[i] = error
            return _NO_IDS

    def _row_ids(self, row: Rendered | TokenIds) -> Ids:
        if not isinstance(row, Rendered):
            return self._given_ids(row)
        return self.truth.literal_offsets(row.text, row.literal).ids if row.literal else self._text_ids(row.text)

    def _text_ids(self, text: str) -> Ids:
        if self._fast is not None:
            try:
                return self._fast.ids(text)
            except RowError:
                pass  # the reference may manage; a row's fate must not hang on the engine
        return self.truth.ids(text)

    def _given_ids(self, row: TokenIds) -> Ids:
        try:
            ids = np.array([*row[0], *row[1]])
        except ValueError as error:
            raise RowError("tokenizer", f"token ids must be whole numbers: {error}") from error
        if not len(ids):
            return _NO_IDS
        if ids.ndim != 1 or ids.dtype.kind != "i":
            raise RowError("tokenizer", "token ids must be whole numbers")
        if ids.min() < 0 or ids.max() > self.truth.largest_id:
            seen = ids.min() if ids.min() < 0 else ids.max()
            raise RowError("tokenizer", f"token ids must lie between 0 and {self.truth.largest_id}, saw {seen}")
        return ids.astype(np.int32)

    def _verify(
        self,
        rows: Sequence[Rendered | TokenIds],
        ids: Ids,
        splits: npt.NDArray[np.int64],
        failed: Mapping[int, RowError],
    ) -> tuple[int, int]:
        """(rows that both engines encoded, rows among them on which they differ)."""
        if self._fast is None or not self._verify_share:
            return 0, 0
        texts = [
            (i, row.text)
            for i, row in enumerate(rows)
            if isinstance(row, Rendered) and not row.literal and i not in failed and len(row.text) <= _VERIFIED_LENGTH
        ]
        if not texts:
            return 0, 0
        # Seeded by the batch itself, so that the same rows are taken on every try and for any number of workers.
        draw = np.random.default_rng([self._seed, len(rows), len(ids)])
        count = max(1, int(len(texts) * self._verify_share + draw.random()))
        sample = [texts[i] for i in draw.choice(len(texts), count, replace=False).tolist()]
        return len(sample), sum(not self._is_true(ids[splits[i] : splits[i + 1]], text) for i, text in sample)

    def _is_true(self, ids: Ids, text: str) -> bool:
        try:
            return np.array_equal(ids, self.truth.ids(text))
        except RowError:
            return False

    def _mask(
        self,
        rows: Sequence[Rendered | TokenIds],
        places: Sequence[BytePlaces | None],
        ids: Ids,
        splits: npt.NDArray[np.int64],
        failed: Mapping[int, RowError],
    ) -> tuple[npt.NDArray[np.int8], int, dict[int, int]]:
        """The mask of the batch on one axis of bytes, others apart; how many ids are wrong; where last turns begin."""
        ends = self._token_ends(ids)
        edges = np.concatenate([np.zeros(1, ends.dtype), ends])[splits].tolist()
        spans: list[Span] = []
        cuts: list[Span] = []
        apart: list[int] = []
        last: dict[int, int] = {}
        for i, found in enumerate(places):
            start, end = edges[i], edges[i + 1]
            if found is None or found.size != end - start:
                apart.append(i)
                continue
            spans += [(start + a, start + b) for a, b in found.spans]
            cuts += [(start + a, start + b) for a, b in found.cuts]
            if (turn := _last_turn_span(rows[i])) is not None:
                last[i] = start + found.spans[turn][0]
        mask = mask_by_ends(ends, spans, cuts)
        turns = dict(zip(last, np.searchsorted(ends, list(last.values()), side="right").tolist(), strict=True))
        wrong = 0
        for i in apart:
            if i not in failed:
                own = self._mask_apart(rows[i], ids[splits[i] : splits[i + 1]])
                wrong += own is None
                mask[splits[i] : splits[i + 1]], first = (0, None) if own is None else own
                if first is not None:
                    turns[i] = int(splits[i]) + first
        return mask, wrong, turns

    def _token_ends(self, ids: Ids) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
        """Where each token ends in the bytes of the batch; 32 bits where these are enough, for speed."""
        if self._lengths is None:
            return np.zeros(len(ids), np.int32)
        lengths = self._lengths.take(ids)  # half the time of an index
        small = len(ids) < _INT32_END // self._longest
        return lengths.cumsum(dtype=np.int32) if small else lengths.cumsum(dtype=np.int64)

    def _places(self, rows: Sequence[Rendered | TokenIds], failed: Mapping[int, RowError]) -> list[BytePlaces | None]:
        places: list[BytePlaces | None] = [None] * len(rows)
        if self._lengths is not None:
            texts = {i: row for i, row in enumerate(rows) if isinstance(row, Rendered) and i not in failed}
            found = byte_places(list(texts.values()), self.truth.cut_out, nfc=self.truth.normalises_nfc)
            for i, place in zip(texts, found, strict=True):
                places[i] = place
        return places

    def _mask_apart(self, row: Rendered | TokenIds, ids: Ids) -> tuple[npt.NDArray[np.int8], int | None] | None:
        """One row's mask without byte lengths, and with which token its last turn begins.

        None where the reference has other ids than the row got.
        """
        if not isinstance(row, Rendered):
            return (np.arange(len(ids)) >= len(row[0])).astype(np.int8), None
        truth = self.truth
        found = truth.literal_offsets(row.text, row.literal) if row.literal else truth.offsets(row.text)
        if not np.array_equal(found.ids, ids):
            return None
        turn = _last_turn_span(row)
        first = None if turn is None else int(np.count_nonzero(found.ends <= row.spans[turn][0]))
        return mask_by_offsets(found.starts, found.ends, row.spans, row.cuts), first


def _last_turn_span(row: Rendered | TokenIds) -> int | None:
    """The span that begins with the row's last turn, or None where none does."""
    if not isinstance(row, Rendered) or row.last_turn is None:
        return None
    starts = [span[0] for span in row.spans]
    return starts.index(row.last_turn[0]) if row.last_turn[0] in starts else None
