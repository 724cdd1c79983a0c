"""Real tokenizers with their own templates: the text and the ids are those of `apply_chat_template`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import transformers

from etl.config import RunConfig
from etl.errors import RowError
from etl.records import TokenizerSpec
from etl.rendering import render, settle
from etl.template import ChatTemplate
from etl.tokenizer import load_named
from tests.chats import CONVERSATIONS, DATE, SYSTEM, TOOLS, USER, bracket, converse, say, show


def _load(material: Path, family: str, template: str | None = None) -> tuple[ChatTemplate, TokenizerSpec, str]:
    folder = str(material / "tokenizers" / family)
    spec = load_named(folder)
    if template is not None:
        source = (material / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
        spec = dataclasses.replace(spec, chat_template=source)
    return ChatTemplate.from_spec(spec, RunConfig(input="x", date=DATE)), spec, folder


def test_the_newline_behind_gemmas_end_token_is_not_trained_though_it_is_an_added_token(material: Path) -> None:
    folder = material / "tokenizers" / "gemma3"
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    backend = (folder / "tokenizer.json").read_text(encoding="utf-8")
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    spec = TokenizerSpec("gemma3", None, backend, settings["chat_template"], special, "")
    template = ChatTemplate.from_spec(spec, RunConfig(input="x"))
    assert template.ending == "<end_of_turn>"
    assert show(template, [SYSTEM, USER, say("ok")]).endswith("<start_of_turn>model\n[[ok<end_of_turn>]]\n")


@pytest.mark.long
@pytest.mark.usefixtures("pinned_clock")
@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", None), ("llama3_1", None), ("gemma3", None), ("deepseek_v3", None), ("gptoss", "gptoss")],
)
def test_text_and_ids_are_those_of_apply_chat_template(material: Path, family: str, name: str | None) -> None:
    template, spec, folder = _load(material, family, name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rendered_rows = 0
    for title, messages in CONVERSATIONS.items():
        tools = TOOLS if title == "tools" else None
        try:
            conversation = converse(template, messages, tools=tools)
            rendered = render(conversation, template, RunConfig(input="x"))
        except RowError as error:
            if error.reason != "template":
                raise
            continue
        rendered_rows += 1
        settled = settle(conversation, template)
        chosen = {"tools": tools, "chat_template": spec.chat_template}
        assert tokenizer.apply_chat_template(settled, tokenize=False, **chosen) == rendered.text, title
        ids = tokenizer.apply_chat_template(settled, tokenize=True, return_dict=False, **chosen)
        assert tokenizer.backend_tokenizer.encode(rendered.text, add_special_tokens=False).ids == ids, title
        if not rendered.counts.get("dropped_reasoning_turns"):
            assert "[[" in bracket(rendered), title
    assert rendered_rows >= 25
