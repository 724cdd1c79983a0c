"""Texts that tokenizers get wrong: written out one by one, and mixed at random from their pieces."""

from __future__ import annotations

import random
import unicodedata
from typing import Final

HOSTILE: Final = (
    "",
    " ",
    "\n",
    "\r\n\r\n",
    "  \t \n  x",
    "a  b   c    ",
    "It's I'LL they'Ve ſs 'S 'ſ",
    "1234567890 ٣٤٥ ①②",
    "def f(x):\n\treturn x  # ok\n\n\n",
    "naïve café Ångström",
    "e\u0301 a\u0316\u0301 \u0301 - \u0300-\u036f",
    "\u212b \u2126 \u212a \u0958 \ufb1d \u1e9b\u0323",
    "\u1112\u1161\u11ab 한국어 \uac00\u11a8",
    "हिन्दी में क़िताब",
    "ภาษาไทย ที่",
    "العربية مُحَمَّد",
    "עִבְרִית שׁ",
    "日本語のテキスト。漢字！",
    "がぎ\u304b\u3099",
    "👨‍👩‍👧 🏳️‍🌈 🇩🇪 1️⃣",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "\x00\x01\x7f\x80\x85\u2028\u2029\ufeff\u200b",
    "\u00a0\u3000\u2003x\u1680",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think>\n\n",
    "<|im_end|>\u0338x",
    "<|im_end\u0338|> <|im_ <|im_end|",
    "<<think>><think></think</think>> <|endoftext|><|endoftext|>",
    "x <|im_end|> \n y<tool_call>\n{}\n</tool_call>",
    " selanjutnya selanjutnya 的的的",
    "_" * 300 + "=" * 300 + " " * 300 + "^" * 100,
    "https://example.org/a?b=c&d=%20#e",
    "ÀÈÌÒÙ àèìòù ÃÕ ﬁ ﬂ ǅ",
    "\u0344 \u0374 \u037e \u0387 \u1f71",
    "ཀྲ \u0f73\u0f75",
)
"""One worry each: blanks, contractions, marks, compositions, control tokens whole, torn and marked."""

_PIECES: Final = (
    *(
        "the ",
        "thinking",
        " answer",
        ".\n\n",
        "\n",
        " ",
        "  ",
        "\t",
        "x",
        "A",
        "7",
        "42",
        "'s",
        "'LL",
        "()",
        "->",
        "==",
    ),
    *("é", "e\u0301", "\u0301", "\u0316", "\u0338", "\u212b", "\u0958", "한", "\u1112\u1161\u11ab", "क़", "\u094d", "ี่"),
    *("日本", "。", "👍🏽", "\u200d", "\ufe0f", "𝔘", "\u00a0", "\u3000", "\x00", "\u2028", "ß", "ſ", "İ", "א\u05b4"),
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|endoftext|>", "<|im_", "|>", "<", "<tool_call>"),
)


def hostile_texts(count: int, seed: int) -> list[str]:
    """`count` random mixtures of up to 40 awkward pieces; the same for the same seed."""
    draw = random.Random(seed)
    return ["".join(draw.choices(_PIECES, k=draw.randint(1, 40))) for _ in range(count)]


def block_texts(count: int, seed: int) -> list[str]:
    """Texts of one Unicode block each, assigned or not, with marks, blanks and ASCII strewn in."""
    draw = random.Random(seed)
    return [_block_text(draw) for _ in range(count)]


def _block_text(draw: random.Random) -> str:
    block = draw.randrange(0x34000) & ~0x7F
    if 0xD800 <= block < 0xE000:
        return ""
    kinds = (
        lambda: chr(block + draw.randrange(128)),
        lambda: chr(block + draw.randrange(128)),
        lambda: draw.choice(_MARKS),
        lambda: draw.choice(_PIECES),
        lambda: chr(draw.randrange(32, 127)),
        lambda: " ",
    )
    return "".join(draw.choice(kinds)() for _ in range(120))


_MARKS: Final = tuple(chr(code) for code in range(0x300, 0x20000) if unicodedata.combining(chr(code)))
