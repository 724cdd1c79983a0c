"""Seed -> chat completions of realistic size and distinct text, for the tests that need thousands of rows.

Text is spliced from the standard library's sources, a few words of each row's own put in for common ones, so that no
two rows are alike and a caching encoder is not flattered. Every row is a good one under Qwen3.6's template.
"""

from __future__ import annotations

import functools
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

Row = dict[str, Any]

SCRIPTS: Final = (
    "हिन्दी में लिखा हुआ पाठ, जिसमें संयुक्ताक्षर हैं: क्ष, त्र, ज्ञ।",
    "这是一段没有空格的中文文本，用来测试分词。",
    "النص العربي يُكتب من اليمين إلى اليسار.",
    "한국어 문장은 띄어쓰기가 있고, 분해된 자모도 있습니다: 한글.",
    "ภาษาไทยไม่เว้นวรรคระหว่างคำ",
    "👨‍👩‍👧‍👦 🏳️‍🌈 ✋🏽 e\u0301 a\u0316\u0301 ﬁ ½ Ⅷ",
    "日本語の文章、カタカナとひらがな。",
    "Ελληνικά και Русский и עברית в одной строке",
    "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε",
)
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Lines of a file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
]


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """Blank-line separated pieces of 60 to 1,200 characters from the standard library's own modules, in name order."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "\n\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))
    pieces = (piece.strip() for piece in re.split(r"\n\s*\n", text.replace("<|", "<").replace("think>", "thought>")))
    return tuple(piece for piece in pieces if 60 <= len(piece) <= 1200)


def prose(rng: random.Random, size: int) -> str:
    """About `size` characters that no other draw repeats."""
    pieces, length = [], 0
    while length < size:
        piece = rng.choice(paragraphs())
        pieces.append(piece)
        length += len(piece) + 2
    if rng.random() < 0.15:
        pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(SCRIPTS))
    text = "\n\n".join(pieces)
    for word in ("self", "the", "return"):
        text = text.replace(word, "".join(rng.choices("abcdeghiklmnoprstuvz", k=rng.randint(3, 7))))
    return text


def asked(rng: random.Random) -> Row:
    return {"role": "user", "content": prose(rng, rng.randint(80, 900))}


def answered(rng: random.Random, size: int, field: str | None = "reasoning_content") -> Row:
    """An assistant message of about `size` characters, two thirds of them thought."""
    content = prose(rng, size // 3)
    if field is None:
        return {"role": "assistant", "content": content}
    thought = prose(rng, size * 2 // 3)
    if field == "content":
        return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{content}"}
    return {"role": "assistant", field: thought, "content": content}


def tool_turns(rng: random.Random, size: int) -> list[Row]:
    """One or two calls, their results, the answer."""
    count, as_text = rng.randint(1, 2), rng.random() < 0.5
    given = [{"path": f"src/{rng.getrandbits(32):08x}.py", "lines": rng.randint(1, 99)} for _ in range(count)]
    functions = [{"name": "read_file", "arguments": json.dumps(a) if as_text else a} for a in given]
    calls = [{"id": f"c{at}", "type": "function", "function": function} for at, function in enumerate(functions)]
    results = [{"role": "tool", "tool_call_id": f"c{at}", "content": prose(rng, 400)} for at in range(count)]
    return [{**answered(rng, 600), "tool_calls": calls}, *results, answered(rng, size)]


def plain(rng: random.Random, size: int) -> Row:
    return {"messages": [asked(rng), answered(rng, size)], "finish_reason": "stop"}


def inline(rng: random.Random, size: int) -> Row:
    return {"messages": [asked(rng), answered(rng, size, "content")]}


def prompted(rng: random.Random, size: int) -> Row:
    return {"prompt": asked(rng)["content"], "completion": answered(rng, size, "content")["content"]}


def several_turns(rng: random.Random, size: int) -> Row:
    system = [{"role": "system", "content": prose(rng, 150)}] if rng.random() < 0.5 else []
    turns = [m for _ in range(rng.randint(1, 3)) for m in (asked(rng), answered(rng, size // 4, None))]
    return {"messages": [*system, *turns, asked(rng), answered(rng, size // 2)]}


def with_tools(rng: random.Random, size: int) -> Row:
    return {"messages": [asked(rng), *tool_turns(rng, size)], "tools": TOOLS}


def thoughtless(rng: random.Random, size: int) -> Row:
    return {"messages": [asked(rng), answered(rng, size, None)]}


def cut_short(rng: random.Random, size: int) -> Row:
    return {**plain(rng, size), "finish_reason": "length"}


KINDS: Final = {plain: 45, inline: 15, prompted: 10, several_turns: 10, with_tools: 10, thoughtless: 6, cut_short: 4}


def mixed_row(rng: random.Random, median_bytes: int) -> Row:
    """One row of one of KINDS (their shares in per cent), its size drawn log-normally."""
    size = max(200, int(rng.lognormvariate(0, 0.5) * median_bytes * 0.85))
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng, size)


def mixed_rows(n: int, seed: int = 0, median_bytes: int = 8000) -> Iterator[Row]:
    """`n` distinct rows of about `median_bytes` of JSON, the same for the same seed and Python; ids `row-0000000`."""
    rng = random.Random(seed)
    for at in range(n):
        yield {"id": f"row-{at:07d}", **mixed_row(rng, median_bytes)}
