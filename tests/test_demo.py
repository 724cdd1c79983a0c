"""`etl demo` plays on its own server whatever the environment says, and never deletes what is not its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etl.demo import BUCKET, COPY, serve_sample
from etl.storage import Storage
from etl.terminal import main
from tests import sample

ELSEWHERE = {
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
    "AWS_PROFILE": "nobody",
    "AWS_SESSION_TOKEN": "old",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "NO_PROXY": "example.org",
    "no_proxy": "example.org",
}
"""What leads another program to another store."""


def test_the_sample_is_served_where_the_environment_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ELSEWHERE.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with serve_sample() as (_, source):
        assert source == f"s3://{BUCKET}/completions/"
        assert len(list(Storage().find(source))) == len(list(sample.SAMPLE.iterdir()))
    assert dict(os.environ) == before


def test_the_demo_runs_whole_and_leaves_a_copy_of_its_output(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "etl", "demo"]
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **ELSEWHERE}, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert f"{sample.ROWS:,} rows" in done.stdout
    success = json.loads((tmp_path / COPY / "__etl" / "SUCCESS").read_text())
    parts = sorted((tmp_path / COPY).glob("*.parquet"))
    assert (success["rows"], success["parts"]) == (sample.ROWS, len(parts))
    assert f"({len(parts)} parts, " in done.stdout


@pytest.mark.parametrize("own", [(), ("__etl/SUCCESS",), ("__etl/plan.json", "part-0000000-0123456789ab.parquet")])
def test_a_folder_in_the_way_of_the_copy_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, own: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*own, "mine.txt"):
        path = tmp_path / COPY / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    assert main(["demo"]) == 2
    assert f"{COPY}, which holds mine.txt, is in the way and no output of etl" in capsys.readouterr().err
    assert (tmp_path / COPY / "mine.txt").read_text() == "precious"
