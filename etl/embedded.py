"""Nothing -> a running S3 server: moto in a process of its own on a free loopback port, gone with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Final

from etl.errors import EtlError

# The server ends when its standard input does, so it cannot outlive the process that started it, however that one
# ended; it ignores SIGINT, so that Ctrl-C leaves it up for what the parent still has to save.
_SERVE: Final = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.buffer.read()
os._exit(0)
"""
_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


@contextmanager
def start_server() -> Iterator[str]:
    """An empty S3 server; yields its endpoint URL, e.g. `http://127.0.0.1:40123`.

    It accepts any credentials, keeps everything in memory and forgets it on exit. Raises EtlError where it does not
    start.
    """
    process = subprocess.Popen(  # noqa: S603 - this interpreter, and the program above
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=server_environment(),
    )
    try:
        yield f"http://127.0.0.1:{_port(process.stdout)}"
    finally:
        _stop(process)


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without proxies: a loopback server must not forward anything."""
    kept = {name: value for name, value in os.environ.items() if name.lower() not in _PROXIES}
    return {**kept, "AWS_EC2_METADATA_DISABLED": "true", **(extra or {})}


def _port(output: IO[bytes] | None) -> int:
    said = output.readline().strip() if output is not None else b""
    if not said.isdigit():
        raise EtlError("the embedded S3 server did not start; is moto installed? Try: python -m moto.server -p 5000")
    return int(said)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
