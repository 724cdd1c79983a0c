"""Text -> token ids, by two engines: the reference (`tokenizers`, the truth) and gigatoken, which is far faster.

Both are loaded from the same backend JSON and give the ids of `tokenizer(text, add_special_tokens=False)`. A text that
makes one fail is one RowError, native panics included.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import re
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import tokenizers

from etl.added import BLANKS, AddedTokens
from etl.errors import RowError
from etl.records import Span

T = TypeVar("T")
Ids: TypeAlias = npt.NDArray[np.int32]

AWKWARD: Final = (
    "It's I'LL they'Ve 'S 1234567890 ٣٤٥ x=f(1);\r\n\r\n\t# ok  \n   end   ",
    "naïve Ångström e\u0301 a\u0316\u0301 \u0301 - \u0300-\u036f \u212b \u2126 \u0958 \ufb1d \u1e9b\u0323 \u017f İ ǅ ﬁ",
    "\u1112\u1161\u11ab 한국어 हिन्दी क़ ภาษาไทย ที่ مُحَمَّد שׁ 日本語。か\u3099 ཀྲ",
    "👨‍👩‍👧 🏳️‍🌈 🇩🇪 1️⃣ \U0001d518\U0001d52b\U0001d526 𐍈 \U0010ffff",
    "\x00\x01\x7f\x80\x85\u2028\u2029\ufeff\u200b \u00a0\u3000\u2003x\u1680",
    "_" * 70 + "=" * 70 + " " * 70 + "^" * 70 + "a" * 70 + "的" * 40 + "\n" * 40,
    "https://example.org/a?b=c&d=%20#e <b>bold</b> {{x}} [[1, 2], [3]] -> != <= ... --- ***",
)
"""Texts on which engines have differed: contractions, marks, compositions, scripts, emoji, blanks, long runs."""

CACHE_BYTES: Final = 256 * 2**20
"""How much the process may grow before the fast engine is loaded anew."""

_WEIGHED_EVERY: Final = 4_000_000
_SETTLING: Final = 16
"""Weighings after which a worker's buffers are taken to be in use."""

_BLANKS_MARKED: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_STANDIN: Final = "\U0010fffdetl\U0010fffd"
"""Stands before text where a tokenizer marks the first word of a text: a token of nobody's."""

_BYTE_TOKEN: Final = re.compile("<0x[0-9A-F]{2}>")
_SAMPLED_TOKENS: Final = 4000
_SAMPLED_ADDED: Final = 64


class EngineUnsupported(Exception):
    """The fast engine cannot be used for this tokenizer; the message says why."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """One row's tokens and the characters that each came from: int32 and two int64 arrays of one length."""

    ids: Ids
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]


class Reference:
    """The tokenizer as transformers runs it."""

    name = "transformers"

    def __init__(self, backend_json: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(backend_json)
        # It adds no ids without special tokens, but byte-level ones trim the blanks off the offsets.
        self._tokenizer.post_processor = None
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        self._added = added
        self._absorbing = [i for i, token in added.items() if token.lstrip or token.rstrip]
        normalizer = _parts(self._tokenizer.normalizer, "normalizers")
        self.cut_out = AddedTokens(token for token in added.values() if not token.normalized)
        self._first = self.cut_out if normalizer else AddedTokens(added.values())
        self._later = AddedTokens(t for t in added.values() if normalizer and t.normalized and t.special)
        self.normalises_nfc = any(part["type"] == "NFC" for part in normalizer)
        splitters = _parts(self._tokenizer.pre_tokenizer, "pretokenizers")
        self._marks_first = any(part.get("prepend_scheme") == "first" for part in splitters)
        if self._marks_first:
            self._tokenizer.add_tokens([tokenizers.AddedToken(_STANDIN, normalized=False)])

    @functools.cached_property
    def largest_id(self) -> int:
        """The highest id there is, in a vocabulary with holes too; found out when a row that came as ids asks."""
        return max((*self._tokenizer.get_vocab(with_added_tokens=False).values(), *self._added), default=-1)

    def ids(self, text: str) -> Ids:
        """Token ids, int32 [n]. Raises RowError where the text defeats the tokenizer."""
        encoding = guarded(self._tokenizer.encode_batch_fast, [text], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def offsets(self, text: str) -> Offsets:
        """Token ids with their characters, an added token's blanks left to its neighbours. Raises RowError as `ids`."""
        encoding = guarded(self._tokenizer.encode, text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T.copy()
        for i in np.flatnonzero(np.isin(ids, self._absorbing)).tolist():
            starts[i], ends[i] = self._own_text(text, int(ids[i]), int(starts[i]), int(ends[i]))
        return Offsets(ids, starts, ends)

    def _own_text(self, text: str, token_id: int, start: int, end: int) -> Span:
        held, token = text[start:end], self._added[token_id]
        if token.lstrip:
            start += len(held) - len(held.lstrip(BLANKS))
        if token.rstrip:
            end -= len(held) - len(held.rstrip(BLANKS))
        return start, end

    def literal_offsets(self, text: str, literal: Sequence[Span]) -> Offsets:
        """As `offsets`, with what stands in the `literal` ranges read as text.

        Each stretch between two tokens in which such a range lies is encoded apart. Raises RowError `control_tokens`
        where one holds a token that is looked for after normalising, which cannot be told from typed ones.
        """
        found: list[Offsets] = []
        at = 0
        for start, end in self._literal_stretches(text, literal):
            found += [self._shifted(self.offsets(text[at:start]), at), self._without_special(text, start, end)]
            at = end
        found.append(self._shifted(self.offsets(text[at:]), at))
        return Offsets(
            np.concatenate([part.ids for part in found]),
            np.concatenate([part.starts for part in found]),
            np.concatenate([part.ends for part in found]),
        )

    def _literal_stretches(self, text: str, literal: Sequence[Span]) -> Iterator[Span]:
        start = 0
        waiting = deque(literal)
        for cut, behind in (*self._first.find(text, literal), (len(text), len(text))):
            own: list[Span] = []
            while waiting and waiting[0][0] < cut:
                a, b = waiting.popleft()
                own.append((a - start, b - start))
            if own:
                if next(self._later.find(text[start:cut], own), None):
                    raise RowError("control_tokens", "this tokenizer cannot be given this control token as text")
                yield start, cut
            start = behind

    def _without_special(self, text: str, start: int, end: int) -> Offsets:
        """text[start:end] with no special token in it, as what follows other text unless it begins there."""
        before = _STANDIN if start and self._marks_first else ""
        self._tokenizer.encode_special_tokens = True
        try:
            found = self.offsets(before + text[start:end])
        finally:
            self._tokenizer.encode_special_tokens = False
        own = found.ends > len(before) if before else slice(None)
        return self._shifted(Offsets(found.ids[own], found.starts[own], found.ends[own]), start - len(before))

    @staticmethod
    def _shifted(found: Offsets, by: int) -> Offsets:
        return Offsets(found.ids, found.starts + by, found.ends + by)

    def byte_lengths(self) -> npt.NDArray[np.int32] | None:
        """How many bytes of text each id stands for, int32 [largest id + 1]; None where ids have no fixed length.

        They have one in byte-level BPE without a normaliser, or with NFC, whose byte lengths count then; and in BPE
        with byte fallback where the normaliser only writes blanks as `▁`.
        """
        model, normalizer = self._tokenizer.model, _parts(self._tokenizer.normalizer, "normalizers")
        if not isinstance(model, tokenizers.models.BPE):
            return None
        splitters = _parts(self._tokenizer.pre_tokenizer, "pretokenizers")
        if any(part.get("add_prefix_space") for part in splitters):
            return None  # a blank that is not in the text, before each stretch of it
        splits = [part["type"] for part in splitters]
        if "ByteLevel" in splits and [part["type"] for part in normalizer] in ([], ["NFC"]):
            width: Callable[[str], int] = len
        elif model.byte_fallback and normalizer == [_BLANKS_MARKED] and "Metaspace" not in splits:
            width = _marked_width
        else:
            return None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        count = len(vocabulary)
        lengths = np.zeros(max((*vocabulary.values(), *self._added), default=0) + 1, np.int32)
        places = np.fromiter(vocabulary.values(), np.int64, count)
        lengths[places] = np.fromiter(map(width, vocabulary), np.int32, count)
        for i, token in self._added.items():
            # Gemma's runs of blanks are added tokens and words alike: as words they stand for blanks.
            lengths[i] = len(token.content.encode()) if width is len else _marked_width(token.content)
        return lengths

    def awkward_texts(self) -> list[str]:
        """Texts for the start-up check: AWKWARD, this tokenizer's added tokens in bad company, tokens as words."""
        count = self._tokenizer.get_vocab_size()
        words = "\n".join(self._tokenizer.decode([i]) for i in range(0, count, max(1, count // _SAMPLED_TOKENS)))
        contents = [token.content for token in self._added.values()]
        chosen = contents[:: max(1, len(contents) // _SAMPLED_ADDED)]
        beside = [f"x {token} \n y{token}{token}\u0338 {token[:-1]}\u0301{token[1:]}" for token in chosen]
        return [*AWKWARD, *beside, words]


def _marked_width(token: str) -> int:
    return 1 if _BYTE_TOKEN.fullmatch(token) else len(token.replace("▁", " ").encode())


def _parts(component: Any, children: str) -> list[dict[str, Any]]:
    """What a normaliser or pre-tokenizer consists of, sequences laid flat."""
    found: list[dict[str, Any]] = []
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            waiting[:0] = part[children]
        else:
            found.append(part)
    return found


class Gigatoken:
    """The fast engine. Raises EngineUnsupported where it cannot load the tokenizer.

    It remembers every distinct word for good, in a table that doubles: 85 MB after 212 MB of prose and code (measured).
    Where the process has grown by more than `cache_bytes`, which may be set, it is loaded anew, which takes more than a
    second.
    """

    name = "gigatoken"

    def __init__(self, backend_json: str) -> None:
        self.cache_bytes = CACHE_BYTES
        self._json = backend_json
        self._load()

    def ids(self, text: str) -> Ids:
        """Token ids, int32 [n]. Raises RowError where the text defeats the engine."""
        self._unweighed += len(text)
        if self._unweighed > _WEIGHED_EVERY:
            self._weigh()
        ids: Ids = guarded(self._tokenizer.encode, text).view(np.int32)
        return ids

    def _load(self) -> None:
        self._tokenizer = _load_gigatoken(self._json)
        self._unweighed = self._weighings = 0
        self._start = self._settled = resident_bytes()

    def _weigh(self) -> None:
        """Load anew if the process has grown too much.

        While the buffers of reading and writing fill, their growth is not the engine's: the most that was seen then is
        what later growth is counted from, and that time has twice the allowance.
        """
        self._unweighed = 0
        self._weighings += 1
        now = resident_bytes()
        settling = self._weighings <= _SETTLING
        if now > (self._start if settling else self._settled) + self.cache_bytes * (1 + settling):
            self._tokenizer = None  # before the next one is loaded: never both at once
            return_freed_memory()
            self._load()
        elif settling:
            self._settled = max(self._settled, now)


def _load_gigatoken(backend_json: str) -> Any:
    try:
        import gigatoken
    except ImportError as error:
        raise EngineUnsupported("gigatoken is not installed") from error
    try:
        return guarded(gigatoken.Tokenizer.from_json, backend_json)
    except RowError as error:
        raise EngineUnsupported(f"gigatoken cannot load it ({error.detail})") from error


def resident_bytes() -> int:
    """The process's resident memory; where the system does not tell, the most that it ever was."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def return_freed_memory() -> None:
    """Have glibc give freed memory back to the system; other C libraries do so by themselves."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def load_agreeing(backend_json: str, reference: Reference) -> Gigatoken:
    """The fast engine, if it gives the reference's ids for every awkward text. Raises EngineUnsupported if not."""
    fast = Gigatoken(backend_json)
    text = first_difference(reference, fast, reference.awkward_texts())
    if text is not None:
        raise EngineUnsupported(f"gigatoken gives other ids than transformers for {text[:60]!r}")
    return fast


def first_difference(reference: Reference, fast: Gigatoken, texts: Iterable[str]) -> str | None:
    """The first text on which the engines differ, or None."""
    return next((text for text in texts if not np.array_equal(reference.ids(text), fast.ids(text))), None)


def guarded(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """What native code returns; where it raises, RowError `tokenizer`. A KeyboardInterrupt and its like pass.

    A panic in native code arrives as pyo3's PanicException, which is a BaseException and cannot be imported.
    """
    try:
        return work(*args, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        first = (str(error).splitlines() or [""])[0]
        raise RowError("tokenizer", f"{type(error).__name__}: {first[:200]}") from error
