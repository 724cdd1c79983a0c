"""What every test stands on: an environment of its own, the fetched material, and one real S3 server a session.

The environment is laid before anything is imported: boto, Dask and transformers read it once, and workers inherit it.
"""

from __future__ import annotations

import atexit
import datetime
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etl.records import TokenizerSpec
from tests.material import MATERIAL

_OTHERS = ("AWS_", "BOTO", "DASK_", "ETL_", "FSSPEC_", "HF_", "HUGGINGFACE_", "S3FS_", "TOKENIZERS_", "TRANSFORMERS_")
_DISPLAY = ("CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PYTHONWARNINGS")
_PROXIES = ("ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY")


def isolate(home: Path) -> None:
    """Hide the user's clouds, hubs, proxies and settings; anything not on this machine's loopback is out of reach."""
    for name in list(os.environ):
        if name.startswith(_OTHERS) or name in _DISPLAY or name.upper() in _PROXIES:
            del os.environ[name]
    os.environ |= {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


_HOME = Path(tempfile.mkdtemp(prefix="etl-tests-"))
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
isolate(_HOME)

# A shell's background jobs are deaf to Ctrl-C, and so would be every command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Else every process that a test starts compiles the packages anew, as long as nobody has done so: seconds each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of fetched templates and tokenizers; reading only."""
    if not (MATERIAL / "complete").exists():
        pytest.fail(f"{MATERIAL} is not complete: `make test` fetches it", pytrace=False)
    return MATERIAL


@pytest.fixture(scope="session")
def qwen36() -> TokenizerSpec:
    """`builtin:qwen3.6`, made once: the 248,077 tokens and the chat template of the model of the born-for job."""
    from etl.builtin import builtin_spec

    return builtin_spec("builtin:qwen3.6")


@pytest.fixture
def pinned_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is `tests.chats.DATE` where transformers renders a template."""
    from transformers.utils import chat_template_utils

    class Pinned(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Pinned:
            return cls(2026, 1, 2, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Pinned)


@pytest.fixture(scope="session")
def encoder(qwen36: TokenizerSpec) -> Any:
    """Its encoder, which is the one of every kit that this process builds of that tokenizer: it loads in seconds."""
    from etl.config import RunConfig
    from etl.pipeline import build_kit

    return build_kit(qwen36, RunConfig(input="x")).encoder


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of a moto S3 server in a process of its own, on a free loopback port."""
    from tests.servers import start_moto

    with start_moto() as url:
        yield url


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A boto3 client of the server; AWS_ENDPOINT_URL points there too, as a user's own endpoint would."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    return boto3.client("s3", endpoint_url=moto)


@pytest.fixture
def bucket(s3: Any) -> str:
    """The name of a fresh, empty bucket on the server."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name
