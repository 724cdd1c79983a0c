"""RunConfig -> TokenizerSpec: the tokenizer by hub name, local folder or built-in name, loaded once on the client.

    builtin:…   from a package, no transformers
    folder      transformers reads it
    hub name    the files are fetched into the hub's cache, or found there, and then read like a folder

The only module that imports transformers and huggingface_hub, and only when it needs them: workers never do.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from etl.builtin import PREFIX, builtin_spec
from etl.config import RunConfig
from etl.errors import UsageError, scrub
from etl.records import TokenizerSpec

T = TypeVar("T")

HUB_SECONDS: Final = 8.0
"""How long the hub may take to answer at all; a download that has begun may take longer."""

_HUB_NAME: Final = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)?(?<![.-])", re.ASCII)
_FILES: Final = (
    *("tokenizer*", "*token*.json", "config.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates/*"),
)
_NAMES_OF_ONE: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\b")


def load_tokenizer(config: RunConfig) -> TokenizerSpec:
    """The tokenizer of `--tokenizer`, with the template of `--chat-template` where that is given.

    Raises UsageError, one line, where it cannot be had: unknown, gated, out of reach, or not of a kind that works.
    """
    if not config.tokenizer:
        raise UsageError("--tokenizer is needed: a hub name, a folder, or builtin:qwen3.6")
    template = None if config.chat_template is None else _read_template(config.chat_template)
    return load_named(config.tokenizer, config.revision, template, trust_remote_code=config.trust_remote_code)


def load_named(
    name: str, revision: str | None = None, template: str | None = None, *, trust_remote_code: bool = False
) -> TokenizerSpec:
    """The tokenizer of that name, with the chat template that it comes with unless another is given.

    Raises UsageError as `load_tokenizer` does.
    """
    if name.startswith(PREFIX):
        if revision is not None:
            raise UsageError(f"--revision {revision!r} is for hub names; --tokenizer {name!r} comes with etl")
        spec = builtin_spec(name)
        return spec if template is None else replace(spec, chat_template=template)
    with _quiet():
        folder = Path(name).expanduser()
        commit = None
        if not folder.is_dir():
            if not _HUB_NAME.fullmatch(name) or folder.exists():
                raise UsageError(f"--tokenizer {name!r} is neither a folder nor a hub name such as Qwen/Qwen3.6-27B")
            folder, commit = _fetch(name, revision, trust_remote_code=trust_remote_code)
        elif revision is not None:
            raise UsageError(f"--revision {revision!r} is for hub names; --tokenizer {name!r} is a folder")
        tokenizer = _load_folder(name, folder, trust_remote_code=trust_remote_code)
        if template is None:
            template = _template(name, tokenizer.chat_template)
        return _spec(name, commit, tokenizer, template)


def _read_template(path: str) -> str:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--chat-template {path!r} cannot be read: {reason}") from error
    if not text.strip():
        raise UsageError(f"--chat-template {path!r} is empty")
    return text


# ── the hub ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fetch(name: str, revision: str | None, *, trust_remote_code: bool) -> tuple[Path, str]:
    """The cached folder of the tokenizer's files and the commit they are from; asks the hub once, if it answers.

    transformers itself would ask for each file, and try five times for each where the hub is out of reach.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    patterns = [*_FILES, *(["*.py"] if trust_remote_code else [])]

    def download() -> str:
        _within(HUB_SECONDS, lambda: huggingface_hub.HfApi().model_info(name, revision=revision, timeout=5))
        with _no_progress():
            return huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns)

    found = _attempt(download)
    if isinstance(found, errors.GatedRepoError | errors.RepositoryNotFoundError | errors.RevisionNotFoundError):
        raise UsageError(_refusal(name, revision, found)) from found
    cached = _cached(name, revision, patterns) if isinstance(found, Exception) else found
    if cached is None:
        offline = constants.HF_HUB_OFFLINE
        seen = (
            "HF_HUB_OFFLINE is set" if offline else f"{scrub(constants.ENDPOINT)} cannot be reached ({_brief(found)})"
        )
        raise UsageError(f"--tokenizer {name!r} is not in the cache and {seen}; give a folder, or builtin:qwen3.6")
    return Path(cached), Path(cached).name


def _cached(name: str, revision: str | None, patterns: list[str]) -> str | None:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=patterns, local_files_only=True
        )
    except errors.LocalEntryNotFoundError:
        return None


def _refusal(name: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.RevisionNotFoundError):
        return f"--revision {revision!r} is unknown to the hub's {name!r}"
    if isinstance(error, errors.GatedRepoError):
        return f"--tokenizer {name!r} is gated: ask for access on the hub, then log in with `hf auth login` or HF_TOKEN"
    return f"--tokenizer {name!r} is unknown to the hub, or private: check the name, or log in with `hf auth login`"


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises, or TimeoutError: the time-outs of a host's addresses add up."""
    answers: list[T | Exception] = []
    thread = threading.Thread(target=lambda: answers.append(_attempt(ask)), daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


@contextlib.contextmanager
def _no_progress() -> Iterator[None]:
    utils: Any = importlib.import_module("huggingface_hub.utils")
    shown = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()


# ── transformers ────────────────────────────────────────────────────────────────────────────────────────────────────


def _load_folder(name: str, folder: Path, *, trust_remote_code: bool) -> Any:
    """The transformers tokenizer in the folder."""
    held = {path.name for path in folder.iterdir()}
    if not (held & {*_NAMES_OF_ONE, "tokenizer_config.json"} or any(n.endswith((".model", ".tiktoken")) for n in held)):
        raise UsageError(f"--tokenizer {name!r} holds no tokenizer files: no tokenizer.json, no tokenizer_config.json")

    def load() -> Any:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)

    found = _attempt(load)
    if not isinstance(found, Exception):
        return found
    if "trust_remote_code" in str(found) and not trust_remote_code:
        raise UsageError(f"--tokenizer {name!r} runs code of its own: allow it with --trust-remote-code") from found
    reason = f"its files lack {found}" if isinstance(found, KeyError) else _brief(found)
    raise UsageError(f"--tokenizer {name!r} cannot be loaded: {reason}") from found


def _spec(name: str, revision: str | None, tokenizer: Any, template: str | None) -> TokenizerSpec:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise UsageError(f"--tokenizer {name!r} has no fast form (tokenizer.json), which etl needs")
    if getattr(tokenizer, "split_special_tokens", False):
        raise UsageError(
            f"--tokenizer {name!r} says split_special_tokens in its tokenizer_config.json: the chat template's own "
            "tokens would be encoded as text; take it out, or use --control-tokens literal for what messages type"
        )
    backend.no_truncation()
    backend.no_padding()
    text: str = backend.to_str()
    return TokenizerSpec(
        name=name,
        revision=revision,
        backend_json=text,
        chat_template=template,
        special_tokens={key: str(v) for key, v in tokenizer.special_tokens_map.items() if not isinstance(v, list)},
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )


def _template(name: str, found: str | dict[str, str] | None) -> str | None:
    if not isinstance(found, dict):
        return found or None
    if "default" not in found:
        raise UsageError(
            f"--tokenizer {name!r} has several chat templates ({', '.join(sorted(found))}) and no default: "
            "save the one you mean to a file and give it with --chat-template"
        )
    if "tool_use" not in found:
        return found["default"]
    default, tool_use = found["default"], found["tool_use"]
    if bool(_GENERATION.search(default)) != bool(_GENERATION.search(tool_use)):
        raise UsageError(
            f"--tokenizer {name!r} has a chat template for rows with tools and one for others, of which one alone "
            "marks what is generated: save the one you mean to a file and give it with --chat-template"
        )
    return _by_tools(default, tool_use)


def _by_tools(default: str, tool_use: str) -> str:
    """The two templates as one that chooses as transformers does: by whether the row has tools.

    The line break that each begins behind is not rendered; the empty expression behind it keeps its last blanks.
    """
    first, second = ("\n" + source.removesuffix("\n") + "{{ '' }}" for source in (tool_use, default))
    return f"{{% if tools is not none %}}{first}{{% else %}}{second}{{% endif %}}"


def _attempt(work: Callable[[], T]) -> T | Exception:
    """What `work` returns, or what it raised: three libraries, and each of their versions has errors of its own."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        return error


def _brief(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return scrub(lines[0] if lines else type(error).__name__)[:200]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices of the libraries: that there is no PyTorch, that a regex may be wrong, that a name is old."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
