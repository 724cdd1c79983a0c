"""RunConfig -> TokenizerSpec: the tokenizer by hub name, local folder or built-in name, loaded once on the client."""

from __future__ import annotations

from etl.builtin import PREFIX, builtin_spec
from etl.config import RunConfig
from etl.errors import UsageError
from etl.records import TokenizerSpec


def load_tokenizer(config: RunConfig) -> TokenizerSpec:
    """The tokenizer of `--tokenizer`. Raises UsageError, one line, where it cannot be had."""
    if not config.tokenizer:
        raise UsageError("--tokenizer is needed: a hub name, a folder, or builtin:qwen3.6")
    if config.tokenizer.startswith(PREFIX):
        return builtin_spec(config.tokenizer)
    raise UsageError("not yet")
