"""A second opinion on ids and masks: one row at a time, with the offsets of `tokenizers` and plain loops.

Written apart from etl's encoding, which it shares nothing with but the record types. It is slow and means to be.
"""

from __future__ import annotations

import functools

import tokenizers

from etl.records import Rendered


@functools.lru_cache(maxsize=8)
def load_plain(backend_json: str) -> tokenizers.Tokenizer:
    """The tokenizer without its post-processor, which would trim blanks off the offsets.

    Loaded once for all files that a process runs: a large vocabulary takes seconds.
    """
    tokenizer = tokenizers.Tokenizer.from_str(backend_json)
    tokenizer.post_processor = None
    return tokenizer


def independent_mask(tokenizer: tokenizers.Tokenizer, rendered: Rendered) -> tuple[list[int], list[int]]:
    """(ids, mask) of one row; `tokenizer` from `load_plain`.

    Exact where no span or cut falls inside a cluster of characters that NFC changes: there offsets do not tell.
    """
    tokens = _tokens(tokenizer, rendered)
    mask = []
    for _, start, end in tokens:
        trained = False
        for span_start, span_end in rendered.spans:
            for position in range(start, end):
                if span_start <= position < span_end:
                    trained = True
        for cut in rendered.cuts:
            if any(p < cut for p in range(start, end)) and any(p >= cut for p in range(start, end)):
                trained = False
        mask.append(int(trained))
    return [token_id for token_id, _, _ in tokens], mask


def _tokens(tokenizer: tokenizers.Tokenizer, rendered: Rendered) -> list[tuple[int, int, int]]:
    """(id, first character, character after the last) of each token."""
    if not rendered.literal:
        return _encode(tokenizer, rendered.text, 0)
    # What is literal is hidden from the search for control tokens behind characters that no token holds.
    hidden = rendered.text
    for start, end in rendered.literal:
        hidden = hidden[:start] + "\uf8ff" * (end - start) + hidden[end:]
    added = tokenizer.get_added_tokens_decoder()
    control = [token for token in _encode(tokenizer, hidden, 0) if token[0] in added]
    tokenizer.encode_special_tokens = True
    found: list[tuple[int, int, int]] = []
    at = 0
    for token_id, start, end in control:
        found += _encode(tokenizer, rendered.text[at:start], at)
        found.append((token_id, start, end))
        at = end
    found += _encode(tokenizer, rendered.text[at:], at)
    tokenizer.encode_special_tokens = False
    return found


def _encode(tokenizer: tokenizers.Tokenizer, text: str, by: int) -> list[tuple[int, int, int]]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    tokens = []
    for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        flags = added.get(token_id)
        first, last = start, end
        if flags and flags.rstrip:
            while last > first and text[last - 1].isspace() and not flags.content.endswith(text[last - 1]):
                last -= 1
        if flags and flags.lstrip:
            while last > first and text[first].isspace() and not flags.content.startswith(text[first]):
                first += 1
        # A token without width stands for the character that begins there.
        tokens.append((token_id, first + by, max(last, first + 1) + by))
    return tokens
