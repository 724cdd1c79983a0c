"""Many workers, many tokenizers: 128 processes give the bytes of two, and one Python process runs two vocabularies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from etl import cluster, jobs
from etl.config import RunConfig
from etl.errors import UsageError
from etl.pipeline import PackedKit
from etl.records import TokenizerSpec
from tests.jobs import ROOT, chat, config, etl, jsonl, small_rows, stored, upload
from tests.rows import mixed_rows
from tests.test_tokenizer import tiny_files, write


def test_two_runs_with_two_tokenizers_in_one_process_each_get_their_own(
    s3: Any, bucket: str, tmp_path: Path, qwen36: TokenizerSpec
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl([chat("x", "Hello there", "General Kenobi", "A greeting.")])})
    first = jobs.run(config(bucket, workers=1))
    tiny = str(write(tmp_path, tiny_files(qwen36.chat_template)))
    other = RunConfig(**{**vars(config(bucket, workers=1, tokenizer=tiny)), "output": f"s3://{bucket}/tiny/"})
    second = jobs.run(other)
    ids = [stored(result.output).table["input_ids"][0].as_py() for result in (first, second)]
    assert ids[0][-2] == 248046  # <|im_end|>
    assert max(ids[1]) < 300  # as many as the other has


def tiny_spec() -> TokenizerSpec:
    """A token a byte: loaded in no time."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    return TokenizerSpec("tiny", None, backend.to_str(), template, {}, "tiny")


def test_workers_have_the_environment_of_their_own_run_not_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("b", workers=1)
    packed = PackedKit.pack("environment", tiny_spec(), settings)
    seen = []
    for region, token in (("eu-north-1", "first"), ("eu-south-1", None)):
        monkeypatch.setenv("AWS_REGION", region)
        monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("AWS_SESSION_TOKEN", token)
        with cluster.connect(settings, packed) as client:
            cluster.ship(client, packed)
            (found,) = client.run(lambda: [os.environ.get(n) for n in ("AWS_REGION", "AWS_SESSION_TOKEN")]).values()
        seen.append(found)
    assert seen == [["eu-north-1", "first"], ["eu-south-1", None]]


def test_a_script_without_a_main_guard_is_told_so_before_anything_is_written(
    s3: Any, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    script, main = tmp_path / "job.py", types.ModuleType("__main__")
    script.write_text("from etl import RunConfig, run\nrun(RunConfig(...))\n")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(UsageError, match=r"job\.py: put what starts the run under: if __name__ == '__main__':"):
        jobs.run(config(bucket, workers=1))
    assert not [entry for entry in s3.list_objects_v2(Bucket=bucket)["Contents"] if "tokens/" in entry["Key"]]


@pytest.mark.long
def test_a_script_without_a_main_guard_is_told_so_in_one_line(s3: Any, bucket: str, tmp_path: Path) -> None:
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(2))})
    script = tmp_path / "job.py"
    script.write_text(
        "from etl import RunConfig, run\n"
        f"run(RunConfig(input='s3://{bucket}/completions/', output='s3://{bucket}/tokens/',\n"
        "              tokenizer='builtin:qwen3.6', workers=1, no_dashboard=True))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]
    assert not [entry for entry in s3.list_objects_v2(Bucket=bucket)["Contents"] if "tokens/" in entry["Key"]]


def test_open_files_are_raised_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("etl.cluster.resource.setrlimit", lambda _kind, limits: asked.append(limits))
    monkeypatch.setattr("etl.cluster.resource.getrlimit", lambda _kind: (256, 4096))
    cluster.check_startable(config("b", workers=128, endpoint_url=None))
    assert asked == [(1380, 4096)]
    with pytest.raises(UsageError, match="--workers 1000 needs 10100 open files, this shell allows 4096"):
        cluster.check_startable(config("b", workers=1000, endpoint_url=None))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_128_workers_write_the_bytes_of_two_and_end_cleanly(s3: Any, bucket: str) -> None:
    rows = list(mixed_rows(2000, seed=3))
    upload(s3, bucket, {f"{at:02}.jsonl": jsonl(rows[at::20]) for at in range(20)})
    words = ["run", f"s3://{bucket}/completions/", "--tokenizer", "builtin:qwen3.6", "--partition-bytes", "64KiB"]
    words += ["--no-dashboard", "--json"]
    two = etl(*words, f"s3://{bucket}/two/", "--workers", "2")
    many = etl(*words, f"s3://{bucket}/many/", "--workers", "128", seconds=600)
    assert (two.returncode, many.returncode) == (0, 0), many.stderr
    assert stored(f"s3://{bucket}/many/").parts == stored(f"s3://{bucket}/two/").parts
    usual = "partitions|dashboard|the template leaves|128 workers on"
    said = [line for line in many.stderr.splitlines() if not re.search(usual, line)]
    assert said == []
