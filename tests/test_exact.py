"""Whole outputs against transformers and a mask worked out by other means: every row, every id, every mask value.

The model's own template (from `trl`) renders; spans are found here by scanning the ChatML text, tokens by offsets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from etl import normalize
from etl.config import RunConfig
from etl.records import TokenizerSpec
from tests.independent import load_plain
from tests.jobs import jsonl, stored
from tests.outputs import make_output
from tests.rows import mixed_rows

HEADER = "<|im_start|>assistant\n"
END = "<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"


def chatml_mask(tokenizer: tokenizers.Tokenizer, text: str, messages: list[dict[str, Any]], cut: bool) -> list[int]:
    """What the table of the contract says, for ChatML text without typed control tokens."""
    spans = list(trained_spans(text, [m for m in messages if m["role"] == "assistant"], cut))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [
        int(any(start < b and a < max(end, start + 1) and (not hard or end <= b) for a, b, hard in spans))
        for start, end in encoding.offsets
    ]


def trained_spans(text: str, replies: list[dict[str, Any]], cut: bool) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether a token across the end is left out) of each trained turn."""
    at = 0
    for number, reply in enumerate(replies):
        start = text.index(HEADER, at) + len(HEADER)
        end = text.index(END, start) + len(END)
        at = end
        body = text[start:end]
        reasoning = (reply.get("reasoning_content") or "").strip()
        if reasoning and not body.startswith("<think>\n" + reasoning):
            continue  # the template dropped the thought
        if body.startswith(EMPTY):
            start += len(EMPTY)
        elif body.startswith("<think>\n\n\n</think>\n\n"):
            start += len("<think>\n\n\n</think>\n\n")
        if cut and number == len(replies) - 1:
            last = reply["content"].strip() or reasoning
            yield start, text.rindex(last) + len(last), True
        else:
            yield start, end, False


def reference(spec: TokenizerSpec, template: str) -> Any:
    """The tokenizer as transformers has it, with the template."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(spec.backend_json),
        chat_template=template,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )


@pytest.mark.parametrize(
    ("family", "count"),
    [("qwen3_6", 200), *(pytest.param(family, 2000, marks=pytest.mark.long) for family in ("qwen3_6", "qwen3"))],
)
def test_ids_and_masks_of_a_mix_of_rows_are_right(
    family: str, count: int, material: Path, tmp_path: Path, qwen36: TokenizerSpec
) -> None:
    from etl.tokenizer import load_named

    rows = list(mixed_rows(count, seed=11, median_bytes=2500))
    template = (material / "templates" / f"{family}.jinja").read_text()
    name = "builtin:qwen3.6" if family == "qwen3_6" else str(material / "tokenizers" / family)
    spec = qwen36 if family == "qwen3_6" else load_named(name)
    quarters = {f"{at}.jsonl": jsonl(rows[at * len(rows) // 4 : (at + 1) * len(rows) // 4]) for at in range(4)}
    (tmp_path / "chat.jinja").write_text(template)
    options: dict[str, Any] = {"chat_template": str(tmp_path / "chat.jinja"), "partition_bytes": "1MiB"}
    output = make_output(tmp_path, quarters, tokenizer=name, **options)
    receipts = stored(str(output)).receipts
    assert sum(receipt["rows"] for receipt in receipts) == len(rows)
    assert [(receipt["rejected"], receipt["mismatched_rows"]) for receipt in receipts] == [(0, 0)] * len(receipts)

    config = RunConfig(input=str(tmp_path / "in"), tokenizer=name, **options)
    tokenizer, plain = reference(spec, template), load_plain(spec.backend_json)
    table = stored(str(output)).table
    for row, written in zip(rows, table.to_pylist(), strict=True):
        messages = normalize(row, config)
        tools = row.get("tools")
        ids = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        assert (written["id"], written["input_ids"]) == (row["id"], ids)
        mask = chatml_mask(plain, text, messages, row.get("finish_reason") == "length")
        assert written["loss_mask"] == mask, (row["id"], json.dumps(messages)[:300])
        assert (written["n_tokens"], written["n_loss_tokens"]) == (len(ids), sum(mask))
