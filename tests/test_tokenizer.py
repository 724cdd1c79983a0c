"""Loading a tokenizer on the client: built-in, folder, and hub, the last on a loopback server."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from etl.config import RunConfig
from etl.encoding import Encoder
from etl.errors import UsageError
from etl.records import Rendered, TokenizerSpec
from etl.template import ChatTemplate
from etl.tokenizer import load_named, load_tokenizer
from tests.hub import Files, Hub, Repository, start_hub
from tests.texts import HOSTILE, hostile_texts

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"


def tiny_files(template: str | None = TEMPLATE, words: str = "hello world of tokens") -> Files:
    """The two files of a tokenizer trained on a few words."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words] * 3, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    return {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def write(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return folder


def config(tokenizer: str, **options: Any) -> RunConfig:
    return RunConfig(input="s3://bucket/in/", tokenizer=tokenizer, **options)


def ids(spec: TokenizerSpec, text: str) -> list[int]:
    found: list[int] = tokenizers.Tokenizer.from_str(spec.backend_json).encode(text, add_special_tokens=False).ids
    return found


# ── built-in and folder ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_built_in_tokenizer_needs_no_transformers() -> None:
    code = "import sys; from etl.tokenizer import load_named; load_named('builtin:qwen3.6'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"transformers", "huggingface_hub", "tiktoken"} & set(done.stdout.split())


def test_a_folder_gives_ids_template_and_special_tokens(tmp_path: Path) -> None:
    spec = load_named(str(write(tmp_path / "tiny", tiny_files())))
    assert spec.chat_template == TEMPLATE
    assert spec.special_tokens["eos_token"] == "<end>"
    assert spec.revision is None
    assert ids(spec, "hello<end>")[-1] == 0


def test_truncation_and_padding_of_the_saved_tokenizer_do_not_reach_the_rows(tmp_path: Path) -> None:
    spec = load_named(str(write(tmp_path / "tiny", tiny_files())))
    assert len(ids(spec, "z" * 50)) == 50
    assert len(ids(spec, "z")) == 1


@pytest.mark.long
def test_ids_are_the_same_after_saving_and_loading_again(tmp_path: Path, material: Path) -> None:
    import transformers

    folder = material / "tokenizers" / "qwen3"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "again")
    text = "It's naïve  \n\n42 हिन्दी<|im_end|>"
    assert ids(load_named(str(tmp_path / "again")), text) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }} é", encoding="utf-8")
    folder = str(write(tmp_path / "tiny", tiny_files()))
    assert load_tokenizer(config(folder, chat_template=str(file))).chat_template == "{{ messages[0].content }} é"
    assert load_tokenizer(config(folder)).chat_template == TEMPLATE


def test_a_tokenizer_without_a_template_is_loaded_all_the_same(tmp_path: Path) -> None:
    assert load_named(str(write(tmp_path / "tiny", tiny_files(template=None)))).chat_template is None


def with_config(folder: Path, **entries: Any) -> str:
    """A tiny tokenizer with these entries in its tokenizer_config.json."""
    files = dict(tiny_files())
    said = {**json.loads(files["tokenizer_config.json"]), **entries}
    files["tokenizer_config.json"] = json.dumps(said).encode()
    return str(write(folder, files))


def several(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": source} for name, source in templates.items()]


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    assert load_named(with_config(tmp_path / "t", chat_template=several(rag="R", default="D"))).chat_template == "D"


# What may stand at a template's edges: blanks, line breaks, tags that take them away, comments.
EDGES = (
    "\n{% for m in messages %}\n[{{ m.content }}]\n{% endfor %}\n",
    "  {# says #}\n {{- messages[0].content }}  \n\n",
    "{%- set x = 1 -%}\n  {{ x }}\n  {%- if tools %}\n with{{ tools | length }}{% endif %}  ",
    "{{- messages[0].content -}}\n",
    " \n  {%- if true %}z{%- endif -%} \n",
)


@pytest.mark.parametrize("default", EDGES)
def test_rows_with_tools_are_rendered_by_the_template_for_tool_use(tmp_path: Path, default: str) -> None:
    import transformers

    for i, tool_use in enumerate(EDGES):
        folder = with_config(tmp_path / str(i), chat_template=several(default=default, tool_use=tool_use))
        template = ChatTemplate.from_spec(load_named(folder), config(folder))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": "Hi"}]
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            ours = template.trace(messages, tools, None, {}).text
            assert ours == theirs.apply_chat_template(messages, tools=tools, tokenize=False)


def test_templates_of_which_one_alone_marks_what_is_generated_need_a_choice(tmp_path: Path) -> None:
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    folder = with_config(tmp_path / "t", chat_template=several(default=TEMPLATE, tool_use=marked))
    assert "give it with --chat-template" in refusal(folder)
    (tmp_path / "own.jinja").write_text(marked)
    assert load_tokenizer(config(folder, chat_template=str(tmp_path / "own.jinja"))).chat_template == marked


def test_several_templates_without_a_default_serve_where_one_is_given(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "t", chat_template=several(rag="R", tool_use="T"))
    assert "no default" in refusal(folder)
    (tmp_path / "own.jinja").write_text("O")
    assert load_tokenizer(config(folder, chat_template=str(tmp_path / "own.jinja"))).chat_template == "O"


def test_a_tokenizer_that_splits_special_tokens_is_refused(tmp_path: Path) -> None:
    assert "split_special_tokens" in refusal(with_config(tmp_path / "t", split_special_tokens=True))
    assert load_named(with_config(tmp_path / "u", split_special_tokens=False)).chat_template == TEMPLATE


def refusal(tokenizer: str | None, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_tokenizer(config(tokenizer, **options) if tokenizer else RunConfig(input="in"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "--tokenizer is needed" in refusal(None)
    assert "neither a folder nor a hub name" in refusal("./no/such/folder")
    assert "holds no tokenizer files" in refusal(str(write(tmp_path / "empty", {"readme.md": b"x"})))
    assert "cannot be loaded" in refusal(str(write(tmp_path / "torn", {**tiny_files(), "tokenizer.json": b'{"mo'})))
    folder = str(write(tmp_path / "tiny", tiny_files()))
    assert "is for hub names" in refusal(folder, revision="v2")
    assert "cannot be read" in refusal(folder, chat_template=str(tmp_path / "none.jinja"))


def test_a_tokenizer_with_code_of_its_own_names_the_option(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["odd.Odd", None]}}
    files = {"tokenizer_config.json": json.dumps(settings).encode(), "odd.py": b"class Odd: pass\n"}
    assert "--trust-remote-code" in refusal(str(write(tmp_path / "odd", files)))


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────

CLIENT = """
import json, sys
from etl.errors import UsageError
from etl.tokenizer import load_named
for name, revision in json.loads(sys.argv[1]):
    try:
        spec = load_named(name, revision)
        print(json.dumps({"template": spec.chat_template, "revision": spec.revision}))
    except UsageError as error:
        print(json.dumps({"error": str(error)}))
"""


def ask(cache: Path, asks: list[tuple[str, str | None]], **environment: str) -> list[dict[str, str]]:
    """What a fresh client process finds for each (name, revision); it must say nothing on standard error."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"HF_HOME": str(cache)} | environment
    command = [sys.executable, "-c", CLIENT, json.dumps(asks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    commits = {"main": tiny_files("MAIN"), "v2": tiny_files("SECOND")}
    repositories: Mapping[str, Repository] = {
        "org/tiny": Repository({k: {**v, "model.safetensors": b"0" * 100} for k, v in commits.items()}),
        "org/gated": Repository(commits, gated=True),
    }
    with start_hub(repositories) as running:
        yield running


@pytest.fixture(scope="module")
def downloaded(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    cache = tmp_path_factory.mktemp("hub")
    asks = [("org/tiny", None), ("org/tiny", "v2"), ("org/tiny", "v9"), ("org/gated", None), ("org/none", None)]
    return cache, ask(cache, asks, HF_ENDPOINT=hub.url)


def test_a_hub_name_is_downloaded_and_its_commit_recorded(downloaded: tuple[Path, list[dict[str, str]]]) -> None:
    main, second, *_ = downloaded[1]
    assert main["template"] == "MAIN"
    assert second["template"] == "SECOND"
    assert main["revision"] != second["revision"]
    assert len(main["revision"]) == 40


def test_only_the_tokenizers_files_are_downloaded(hub: Hub, downloaded: tuple[Path, list[dict[str, str]]]) -> None:
    assert downloaded
    assert any("tokenizer.json" in path for path in hub.asked)
    assert not any("safetensors" in path for path in hub.asked)


def test_the_hubs_refusals_are_told_apart(downloaded: tuple[Path, list[dict[str, str]]]) -> None:
    revision, gated, unknown = (found["error"] for found in downloaded[1][2:])
    assert "--revision 'v9' is unknown" in revision
    assert "is gated" in gated
    assert "'org/none' is unknown to the hub, or private" in unknown


def test_what_is_in_the_cache_is_found_offline(hub: Hub, downloaded: tuple[Path, list[dict[str, str]]]) -> None:
    asked = len(hub.asked)
    cached, missing = ask(
        downloaded[0], [("org/tiny", None), ("org/other", None)], HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1"
    )
    assert cached == downloaded[1][0]
    assert "not in the cache and HF_HUB_OFFLINE is set" in missing["error"]
    assert len(hub.asked) == asked


def test_a_hub_that_refuses_connections_is_one_line_within_ten_seconds(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound but not listening: nobody else can take the port, and nobody answers
        began = time.monotonic()
        (found,) = ask(tmp_path, [("org/tiny", None)], HF_ENDPOINT=f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert "cannot be reached" in found["error"]
    assert "\n" not in found["error"]
    assert time.monotonic() - began < 10


@pytest.mark.long
def test_a_hub_that_never_answers_is_one_line_within_ten_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        (found,) = ask(tmp_path, [("org/tiny", None)], HF_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert "cannot be reached" in found["error"]
    assert time.monotonic() - began < 10


# SHA-256 over the ids of the texts below (int32, little-endian), its first 16 digits; found with transformers 5.24.
DIGESTS = {
    "qwen3": "045de47bcf55637e",
    "llama3_1": "0e24263a90994af3",
    "gemma3": "fa477f31849d95e1",
    "deepseek_v3": "9f600c6d024ceafe",
    "gptoss": "b16c54c994752198",
}


@pytest.mark.long
@pytest.mark.parametrize("family", DIGESTS)
def test_our_ids_are_those_of_transformers_whatever_its_version(material: Path, family: str) -> None:
    import transformers

    folder = material / "tokenizers" / family
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*HOSTILE, *hostile_texts(300, seed=21)]
    encoded = Encoder(load_named(str(folder))).encode([Rendered(text, ()) for text in texts])
    for i, text in enumerate(texts):
        ours = encoded.ids[encoded.splits[i] : encoded.splits[i + 1]].tolist()
        assert ours == tokenizer(text, add_special_tokens=False)["input_ids"]
    # CI runs this on transformers 4's last release and on 5's newest: the same digest is the same ids.
    assert hashlib.sha256(encoded.ids.astype("<i4").tobytes()).hexdigest()[:16] == DIGESTS[family]
