"""preview: a row's tokens with the pieces and the mask that a run writes, read no further than needed."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etl
from etl.config import RunConfig
from etl.errors import UsageError
from etl.inspection import Preview, ShownRow, normalize, preview
from etl.lines import read_batches
from etl.pipeline import build_kit, transform
from etl.storage import Storage
from etl.surveys import look_at_input
from tests.jobs import QWEN36, chat, jsonl

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
AGENT = {
    "id": "agent",
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Wait.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "Sun."},
    ],
}
TWO_TURNS = {
    "id": "two",
    "messages": [*chat("", "Hi", "Yes.", "Hm.")["messages"], *chat("", "So?", "No.", "Ah.")["messages"]],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An input of one object; tests write into it."""
    return tmp_path / "rows.jsonl"


def look(source: Path, *rows: dict[str, Any], n: int = 9, row: int | None = None, **options: Any) -> Preview:
    """A preview of these rows with the Qwen3.6 tokenizer."""
    if rows:
        source.write_bytes(jsonl(rows))
    return preview(RunConfig(input=str(source), **{"tokenizer": QWEN36, **options}), n, row)


def pieces(row: ShownRow) -> list[tuple[str, str]]:
    """(piece, text), with a `+` before the pieces that are trained."""
    return [
        ("+" * row.tokens[start].trained + row.tokens[start].piece, text(row, start, stop))
        for start, stop in row.stretches()
    ]


def text(row: ShownRow, start: int = 0, stop: int | None = None) -> str:
    return "".join(token.text for token in row.tokens[start:stop])


def legend(found: Preview) -> dict[str, str]:
    return {line.what: line.says for line in found.legend}


# --- pieces and mask ---


def test_every_piece_of_a_row_is_told_apart(source: Path) -> None:
    (row,) = look(source, AGENT).rows
    call = "\n\n<tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
    assert pieces(row) == [
        ("user", "<|im_start|>user\nHi<|im_end|>\n"),
        ("header", "<|im_start|>assistant\n"),
        ("+opener", "<think>\nHm.\n</think>\n\n"),
        ("+answer", "Wait."),
        ("+call", call),
        ("+end", "<|im_end|>"),
        ("template", "\n"),
        ("tool", "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"),
        ("header", "<|im_start|>assistant\n"),
        ("empty", "<think>\n\n</think>\n\n"),
        ("+answer", "Sun."),
        ("+end", "<|im_end|>"),
        ("template", "\n"),
    ]
    assert [token.piece for token in row.tokens if token.text in {"<think>", "</think>"}][:2] == ["opener", "thinking"]
    assert {token.message for token in row.tokens} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("switch", "untrained"),
    [
        ({"no_train_reasoning": True}, {"opener", "thinking", "empty"}),
        ({"no_train_think_open": True}, {"opener", "empty"}),
        ({"no_train_tool_calls": True}, {"call", "empty"}),
        ({"no_train_end": True}, {"end", "empty"}),
        ({"train_empty_think": True}, set()),
    ],
)
def test_a_switch_takes_its_piece_out_of_the_mask_and_nothing_else(
    source: Path, switch: dict[str, bool], untrained: set[str]
) -> None:
    (row,) = look(source, AGENT, **switch).rows
    own = {"opener", "thinking", "empty", "answer", "call", "end"}
    # The token of the blanks between answer and call is fused with neither; all of a piece goes one way.
    assert {token.piece for token in row.tokens if token.piece in own and not token.trained} == untrained
    assert {token.piece for token in row.tokens if token.trained} == own - untrained


def test_a_turn_that_lost_its_thought_is_dropped_and_not_trained(source: Path) -> None:
    (row,) = look(source, TWO_TURNS).rows
    assert ("dropped", "<|im_start|>assistant\nYes.<|im_end|>\n") in pieces(row)
    assert row.notes == ("dropped reasoning turns: 1",)
    (kept,) = look(source, template_arg={"preserve_thinking": True}).rows
    assert [name for name, _ in pieces(kept)].count("+opener") == 2


def test_a_system_message_written_before_the_loop_is_found(source: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *chat("", "Hi", "Yes.")["messages"]]
    (row,) = look(source, {"messages": messages, "tools": [TOOL]}).rows
    assert ("system", "Be brief.") in pieces(row)


def test_what_is_shown_is_what_a_run_writes(source: Path) -> None:
    source.write_bytes(jsonl([AGENT, TWO_TURNS, chat("c", "Hi\u00a0e\u0301", "Ja 👨‍👩‍👧 한", "Hm")]))
    config = RunConfig(input=str(source), tokenizer=QWEN36, turns="expand")
    spec, (partition,) = look_at_input(config)
    kit = build_kit(spec, replace(config, engine="transformers"))
    table = transform(lambda: read_batches(partition, kit.storage), kit, lambda _: contextlib.nullcontext()).table
    written = [(r["turn"], r["input_ids"], r["loss_mask"]) for r in table.to_pylist()]
    shown = preview(config, 99).rows
    assert [(r.turn, [t.id for t in r.tokens], [int(t.trained) for t in r.tokens]) for r in shown] == written
    assert len(written) == 5


def test_a_character_of_several_tokens_stands_once_and_no_text_is_lost(source: Path) -> None:
    said = "Wé 𒀀 👨‍👩‍👧‍👦 क़ e\u0301\u0323 \x00\u200b end"
    row = look(source, chat("x", "Hi", said)).rows[0]
    assert said in text(row)
    at = next(i for i, token in enumerate(row.tokens) if "𒀀" in token.text)
    assert [token.text for token in row.tokens[at + 1 : at + 4]] == ["", "", ""]
    assert {token.piece for token in row.tokens[at : at + 4]} == {"answer"}


def test_control_tokens_typed_as_text_are_shown_as_the_tokens_they_become(source: Path) -> None:
    typed = chat("x", "Say <|im_end|>", "Ok.")
    real = look(source, typed).rows[0]
    literal = look(source, control_tokens="literal").rows[0]
    assert text(real) == text(literal)
    assert [t.text for t in real.tokens].count("<|im_end|>") == 3
    assert [t.text for t in literal.tokens].count("<|im_end|>") == 2


def test_rows_without_messages_have_their_own_pieces(source: Path) -> None:
    plain, ids = look(source, {"text": "as it is"}, {"prompt_token_ids": [9419], "token_ids": [2523, 124]}).rows
    assert pieces(plain) == [("+text", "as it is")]
    assert [(t.id, t.piece, t.trained) for t in ids.tokens] == [
        (9419, "prompt", False),
        (2523, "generated", True),
        (124, "generated", True),
    ]


def test_a_character_of_several_given_ids_belongs_to_the_one_that_completes_it(source: Path) -> None:
    ids = [token.id for token in look(source, {"text": "a 𒀀b"}).rows[0].tokens]
    (row,) = look(source, {"prompt_token_ids": ids[:1], "token_ids": ids[1:]}).rows
    assert text(row) == "a 𒀀b"
    assert "\ufffd" not in text(row)


def test_several_choices_are_several_rows(source: Path) -> None:
    choices = [{"message": {"role": "assistant", "content": word}} for word in ("One", "Two")]
    found = look(source, {"messages": [{"role": "user", "content": "Hi"}], "choices": choices})
    assert [
        (row.choice, ("+answer", word) in pieces(row)) for row, word in zip(found.rows, ("One", "Two"), strict=True)
    ] == [
        (0, True),
        (1, True),
    ]


# --- rejects ---


def test_a_line_that_is_no_json_is_shown_with_its_reason(source: Path) -> None:
    source.write_bytes(b'{"id": "torn\n' + jsonl([chat("b", "Hi", "Yes.")]))
    torn, good = look(source).rows
    assert (torn.reason, torn.tokens, torn.raw) == ("json", (), '{"id": "torn')
    assert good.reason is None


def test_a_row_that_does_not_fit_is_shown_with_tokens_and_reason(source: Path) -> None:
    (row,) = look(source, chat("x", "Hi", "Yes."), max_length=5).rows
    assert (row.reason, len(row.tokens) > 5) == ("over_length", True)
    (cut,) = look(source, max_length=14, over_length="truncate").rows
    assert (cut.reason, len(cut.tokens)) == (None, 14)
    (none,) = look(source, {"messages": [{"role": "user", "content": "Hi"}]}).rows
    assert (none.reason, text(none)) == ("no_loss_tokens", "<|im_start|>user\nHi<|im_end|>\n")


# --- the legend ---


def test_the_legend_says_what_becomes_of_each_piece(source: Path) -> None:
    said = legend(look(source, AGENT))
    assert [what for what, says in said.items() if says == "trained"] == [
        "tag that opens a thought",
        "thought, with what closes it",
        "answer",
        "tool calls",
        "end token",
        "earlier turn without a thought",
        "cut completion: what was generated",
    ]
    assert said["earlier turn with a thought"] == "not trained: the template leaves a part of such a turn out"
    assert said["empty think block"] == said["what follows the end token"] == "not trained"


@pytest.mark.parametrize(
    ("options", "what", "says"),
    [
        ({"no_train_end": True}, "end token", "not trained"),
        ({"no_train_reasoning": True}, "thought, with what closes it", "not trained"),
        ({"no_train_think_open": True}, "tag that opens a thought", "not trained"),
        ({"no_train_tool_calls": True}, "tool calls", "not trained"),
        ({"train_empty_think": True}, "empty think block", "trained"),
        ({"truncated_completions": "reject"}, "cut completion: what ends it", "the row is rejected: truncated"),
        ({"truncated_completions": "train-end"}, "cut completion: what ends it", "trained"),
        ({"turns": "last"}, "earlier turn without a thought", "not trained"),
        ({"turns": "expand"}, "earlier turn with a thought", "trained, in a row of its own"),
        ({"template_arg": {"preserve_thinking": True}}, "earlier turn with a thought", "trained"),
        # How rows are read is no matter of the template.
        ({"shape": "text", "field": {"text": "body"}}, "answer", "trained"),
    ],
)
def test_the_legend_follows_template_and_switches(source: Path, options: dict[str, Any], what: str, says: str) -> None:
    assert legend(look(source, {"body": "x"}, **options))[what] == says


def test_the_legend_is_that_of_any_template(source: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    )
    found = look(source, chat("x", "Hi", "Yes."), chat_template=str(template))
    assert legend(found) == {
        "system text": "not trained",
        "user text": "not trained",
        "results of tools": "the row is rejected: template",
        "role header of a reply": "not trained",
        "thought, with what closes it": "not trained: the template leaves a part of such a turn out",
        "answer": "trained",
        "tool calls": "not trained: the template leaves a part of such a turn out",
        "end token": "trained",
        "earlier turn without a thought": "trained",
        "earlier turn with a thought": "not trained: the template leaves a part of such a turn out",
        "cut completion: what was generated": "trained",
        "cut completion: what ends it": "not trained",
    }
    # The blank that ends the header is fused with the reply, and counts as reply.
    assert pieces(found.rows[0]) == [
        ("user", "<|im_start|>user: Hi<|im_end|>"),
        ("header", "<|im_start|>assistant:"),
        ("+answer", " Yes."),
        ("+end", "<|im_end|>"),
    ]


@pytest.mark.long
def test_another_tokenizer_has_its_own_pieces(source: Path, material: Path) -> None:
    gemma = look(source, chat("x", "Hi", "Yes."), tokenizer=str(material / "tokenizers" / "gemma3"))
    said = legend(gemma)
    assert "empty think block" not in said
    assert said["results of tools"] == "the row is rejected: template"
    assert said["end token"] == "trained"
    assert pieces(gemma.rows[0]) == [
        ("template", "<bos>"),
        ("user", "<start_of_turn>user\nHi<end_of_turn>\n"),
        ("header", "<start_of_turn>model\n"),
        ("+answer", "Yes."),
        ("+end", "<end_of_turn>"),
        ("template", "\n"),
    ]


def test_options_that_were_given_are_named(source: Path) -> None:
    found = look(source, AGENT, no_train_end=True, template_arg={"preserve_thinking": True}, max_length=99)
    assert found.subject == f"{QWEN36} --template-arg preserve_thinking=True --no-train-end --max-length 99"


# --- reading ---


def test_rows_are_counted_over_all_objects_blank_lines_included(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([chat("a1", "Hi", "1")]) + b"\n" + jsonl([chat("a3", "Hi", "3")]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl([chat("b1", "Hi", "1"), chat("b2", "Hi", "2")])))
    config = RunConfig(input=str(tmp_path), tokenizer=QWEN36)
    assert [(row.row, row.id, row.line) for row in preview(config, 3).rows] == [
        (1, "a1", 1),
        (3, "a3", 3),
        (4, "b1", 1),
    ]
    (row,) = preview(config, row=5).rows
    assert (row.id, row.line, row.source) == ("b2", 2, str(tmp_path / "b.jsonl.gz"))
    with pytest.raises(UsageError, match="line 2 of INPUT is blank"):
        preview(config, row=2)
    with pytest.raises(UsageError, match="INPUT has no line 6"):
        preview(config, row=6)


def test_a_large_object_is_read_only_as_far_as_needed(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with source.open("wb") as file:
        file.write(jsonl([chat(f"r{i}", "Hi", "Yes.") for i in range(200)]))
        file.truncate(20 * 2**30)  # a hole, which no disk holds
    read: list[int] = []
    genuine = Storage.read

    def counted(self: Storage, url: str, start: int, end: int, etag: str) -> bytes:
        read.append(end - start)
        return genuine(self, url, start, end, etag)

    monkeypatch.setattr(Storage, "read", counted)
    assert [row.id for row in look(source, n=2).rows] == ["r0", "r1"]
    assert [row.id for row in look(source, row=150).rows] == ["r149"]
    assert sum(read) < 32 * 2**20


def test_an_empty_input_shows_no_rows(source: Path) -> None:
    source.write_bytes(b"\n\n")
    assert look(source).rows == ()


@pytest.mark.parametrize("bad", [{"n": 0}, {"row": 0}])
def test_numbers_count_from_one(source: Path, bad: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        look(source, AGENT, **bad)


def test_a_preview_reads_from_s3(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="completions/a.jsonl", Body=jsonl([chat("a", "Hi", "Yes.")]))
    found = etl.preview(etl.RunConfig(input=f"s3://{bucket}/completions/", tokenizer=QWEN36))
    assert [(row.id, row.source) for row in found.rows] == [("a", f"s3://{bucket}/completions/a.jsonl")]


def test_the_json_holds_ids_mask_texts_and_pieces(source: Path) -> None:
    found = json.loads(json.dumps(look(source, chat("x", "Hi", "Yes."), no_train_end=True).as_dict()))
    (row,) = found["rows"]
    assert row["tokens"][-4:] == ["Yes", ".", "<|im_end|>", "\n"]
    assert row["loss_mask"][-4:] == [1, 1, 0, 0]
    assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["tokens"])
    assert row["pieces"][-2] == {"piece": "end", "message": 1, "start": 15, "stop": 16, "trained": False}
    assert found["options"] == ["--no-train-end"]


def test_normalize_goes_by_the_template_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nA\n</think>\n\nB"}]
    }
    options = RunConfig(input="in", tokenizer="builtin:qwen3.6", chat_template=str(file))
    file.write_text("{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}")
    assert normalize(row, options)[1]["content"].startswith("<think>")
    file.write_text("{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }}{% endfor %}")
    os.utime(file, ns=(1, 1))
    assert normalize(row, options)[1]["reasoning_content"] == "A"
