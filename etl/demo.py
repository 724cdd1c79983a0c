"""The bundled sample -> an embedded S3 server -> `etl run` -> a folder that outlives the server."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from etl.embedded import start_server
from etl.errors import UsageError

BUCKET: Final = "demo"
TOKENIZER: Final = "builtin:qwen3.6"
COPY: Final = Path("demo-tokens")
"""Where the output is copied, below the current folder."""

ALONE: Final[Mapping[str, str | None]] = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_PROFILE": None,
    "AWS_DEFAULT_PROFILE": None,
    "AWS_SESSION_TOKEN": None,
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": None,
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}
"""An environment that leads to the embedded server, which checks no credentials, and to no store of the user's."""

_ENDPOINTS: Final = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")


def play(
    *,
    keep_running: bool,
    command: Callable[[list[str]], int],
    say: Callable[[str], None],
) -> int:
    """Upload the sample, run the command line on it, copy the output out, show two rows; returns the exit code.

    `command` is the command line's own entry, so that the demo goes the way a user's run goes; `say` prints a line.
    """
    began = time.monotonic()
    _require_place(COPY)
    with serve_sample() as (endpoint, source):
        client = _client(endpoint)
        say(f"embedded S3 server at {endpoint}, the sample in {source}")
        words = ["run", source, f"s3://{BUCKET}/tokens/", "--tokenizer", TOKENIZER]
        words += ["--partition-bytes", "64KiB"]
        say(f"$ python -m etl {' '.join(words)}\n")
        # The sample carries a few bad lines on purpose: under 1 %.
        exit_code = command([*words, "--workers", "2"])
        if exit_code:
            return exit_code
        copied = _copy_output(client, COPY)
        words = ["preview", source, "--tokenizer", TOKENIZER, "-n", "2"]
        say(f"\n$ python -m etl {' '.join(words)}\n")
        exit_code = command(words)
        say(_farewell(len(copied), time.monotonic() - began))
        if keep_running:
            say(f"\nserver stays up at {endpoint} until Ctrl-C (credentials: any)")
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)
    return exit_code


@contextlib.contextmanager
def serve_sample() -> Iterator[tuple[str, str]]:
    """An embedded S3 server that holds the sample; yields its endpoint and the sample's URL.

    Until it ends, the environment of this process and its children leads to that server.
    """
    with _environment(ALONE), start_server() as endpoint, _environment(dict.fromkeys(_ENDPOINTS, endpoint)):
        _upload_sample(_client(endpoint))
        yield endpoint, f"s3://{BUCKET}/completions/"


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _client(endpoint: str) -> Any:
    try:
        import boto3  # only the demo makes buckets
    except ImportError as error:
        raise UsageError("the demo needs its own packages: pip install 'etl[demo]'") from error
    return boto3.client("s3", endpoint_url=endpoint)


def _upload_sample(client: Any) -> None:
    client.create_bucket(Bucket=BUCKET)
    sample = importlib.resources.files("etl") / "data" / "sample"
    names = sorted(entry.name for entry in sample.iterdir() if not entry.name.startswith("."))
    for name in names:
        client.put_object(Bucket=BUCKET, Key=f"completions/{name}", Body=(sample / name).read_bytes())


def _copy_output(client: Any, folder: Path) -> list[Path]:
    """Everything under tokens/ as files, in place of an earlier copy; returns the parts in order."""
    if folder.exists():
        shutil.rmtree(folder)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="tokens/")
    for key in [entry["Key"] for page in pages for entry in page.get("Contents", [])]:
        path = folder / key.removeprefix("tokens/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    return sorted(folder.glob("*.parquet"))


def _require_place(folder: Path) -> None:
    """Raise UsageError where the copy's place is taken by anything but an output of etl."""
    if folder.exists():
        others = [p for p in folder.iterdir() if p.name != "__etl" and not _PART.fullmatch(p.name)]
        if others or not (folder / "__etl" / "plan.json").is_file():
            held = f", which holds {others[0].name}," if others else ""
            raise UsageError(f"{folder.resolve()}{held} is in the way and no output of etl; move it, then try again")


_PART: Final = re.compile(r"part-\d{7}-[0-9a-f]{12}\.parquet")


def _farewell(parts: int, seconds: float) -> str:
    return f"""
output copied to {COPY.resolve()}/ ({parts} parts, __etl/ holds plan, receipts and rejects); all in {seconds:.1f} s

look at it:       {_python()} -c "import pandas as pd; print(pd.read_parquet('{COPY}').iloc[0])"
your own bucket:  {_python()} -m etl run s3://BUCKET/completions/ s3://BUCKET/tokens/ --tokenizer Qwen/Qwen3.6-27B
look before:      the same with `plan` for `run`"""


def _python() -> str:
    """This interpreter as one would type it here."""
    here = Path(sys.executable)
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else sys.executable
