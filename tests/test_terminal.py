"""The command line: one line and exit 2 before anything is written, and every option where the contract has it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etl.config import RunConfig
from etl.errors import UsageError
from etl.terminal import COMMANDS, GROUPS, ProgressWatcher, main, parse_run, run_parser
from etl.watcher import Notes
from tests.jobs import QWEN36, jsonl, small_rows, upload
from tests.servers import Proxy, start_proxy
from tests.test_tokenizer import tiny_files, write


def words(bucket: str, *more: str, tokenizer: str = QWEN36) -> list[str]:
    """`run` over the test's bucket."""
    return ["run", f"s3://{bucket}/completions/", f"s3://{bucket}/tokens/", "--tokenizer", tokenizer, *more]


def keys(s3: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


def refusal(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What a refused command says: exit code 2 and one line on standard error, nothing else."""
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("etl: ")
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    return said.err


@pytest.fixture
def filled(s3: Any, bucket: str) -> str:
    """A bucket with one object of three rows."""
    upload(s3, bucket, {"a.jsonl": jsonl(small_rows(3))})
    return bucket


def test_a_missing_bucket_is_refused_and_not_created(s3: Any, filled: str, capsys: Any) -> None:
    absent = f"{filled}-absent"
    into = ["run", f"s3://{filled}/completions/", f"s3://{absent}/tokens/", "--tokenizer", QWEN36]
    assert "no such bucket" in refusal(capsys, into)
    assert "no such bucket" in refusal(capsys, ["run", f"s3://{absent}/x/", f"s3://{filled}/tokens/", *into[3:]])
    assert absent not in {entry["Name"] for entry in s3.list_buckets()["Buckets"]}
    assert keys(s3, filled) == ["completions/a.jsonl"]


def test_a_run_interrupted_before_it_begins_names_its_output(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("etl.jobs.run", interrupted)
    assert main([*words("b"), "--json"]) == 130
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["output"] == "s3://b/tokens/"


def test_missing_credentials_are_named(filled: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no credentials found" in refusal(capsys, words(filled))


def test_an_empty_folder_is_refused(s3: Any, bucket: str, capsys: Any) -> None:
    s3.put_object(Bucket=bucket, Key="completions/_temporary/x.jsonl", Body=b"")
    assert f"s3://{bucket}/completions/" in refusal(capsys, words(bucket))
    assert keys(s3, bucket) == ["completions/_temporary/x.jsonl"]


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [("builtin:gpt9", "builtin:gpt9"), ("./no-such-folder", "no-such-folder"), ("nobody/nothing", "nobody/nothing")],
)
def test_an_unknown_tokenizer_is_refused(s3: Any, filled: str, capsys: Any, tokenizer: str, says: str) -> None:
    assert says in refusal(capsys, words(filled, tokenizer=tokenizer))
    assert keys(s3, filled) == ["completions/a.jsonl"]


def test_a_tokenizer_without_a_template_is_refused(s3: Any, filled: str, capsys: Any, tmp_path: Path) -> None:
    tiny = str(write(tmp_path, tiny_files(template=None)))
    assert "--chat-template" in refusal(capsys, words(filled, tokenizer=tiny))
    assert keys(s3, filled) == ["completions/a.jsonl"]


def test_an_output_that_holds_something_else_is_refused(s3: Any, filled: str, capsys: Any) -> None:
    s3.put_object(Bucket=filled, Key="tokens/someone-elses.parquet", Body=b"x")
    assert "someone-elses.parquet" in refusal(capsys, words(filled))
    assert keys(s3, filled) == ["completions/a.jsonl", "tokens/someone-elses.parquet"]


@pytest.mark.parametrize("output", ["completions/", "completions/tokens/", "", "completions"])
def test_an_output_inside_above_or_onto_the_input_is_refused(s3: Any, filled: str, capsys: Any, output: str) -> None:
    argv = ["run", f"s3://{filled}/completions/", f"s3://{filled}/{output}", "--tokenizer", QWEN36]
    assert "choose a place apart" in refusal(capsys, argv)
    assert keys(s3, filled) == ["completions/a.jsonl"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--turns", "some"], "--turns"),
        (["--partition-bytes", "many"], "--partition-bytes 'many' is not a size"),
        (["--workers", "0"], "--workers"),
        (["--workers", "2", "--scheduler", "tcp://x"], "exclude each other"),
        (["--max-reject-share", "2"], "--max-reject-share"),
        (["--date", "yesterday"], "--date"),
        (["--date", "20260102"], "--date '20260102' is not a date; write YYYY-MM-DD"),
        (["--date", "2026-W01-1"], "--date"),
        (["--template-arg", "alone"], "--template-arg needs key=value, not 'alone'"),
        (["--template-arg", "=1"], "--template-arg needs key=value, not '=1'"),
        (["--template-arg", "messages=1"], "the template argument messages is filled from each row"),
        (["--chat-template-kwargs", "[1]"], "not a JSON object"),
        (["--chat-template-kwargs", '{"a": NaN}'], "not a JSON object"),
        (["--chat-template", os.devnull], "is empty"),
        (["--revision", "main"], "--revision 'main' is for hub names"),
        (["--memory-limit", "1"], "--memory-limit 1 is less than any worker needs"),
        (["--endpoint-url", "nowhere"], "--endpoint-url"),
        (["--no-such-option"], "--no-such-option"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--field", "message=x"], "--field"),
        (["--field", "messages="], "--field messages= points nowhere"),
        (["--keep", ""], "--keep needs the name of a field"),
    ],
)
def test_an_unknown_value_is_refused(s3: Any, filled: str, capsys: Any, more: list[str], says: str) -> None:
    assert says in refusal(capsys, words(filled, *more))
    assert keys(s3, filled) == ["completions/a.jsonl"]


def test_a_credential_on_the_command_line_is_refused_and_not_echoed(filled: str, capsys: Any) -> None:
    said = refusal(capsys, words(filled, "--storage-option", "aws_secret_access_key=hunter2"))
    assert "aws_secret_access_key" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("urls", "says"),
    [(["in"], "name INPUT and OUTPUT; only 'in' was given"), (["in", ""], "OUTPUT is empty"), (["", "out"], "INPUT")],
)
def test_an_input_or_output_that_was_left_out_is_named(capsys: Any, urls: list[str], says: str) -> None:
    assert says in refusal(capsys, ["run", *urls, "--tokenizer", QWEN36])


@pytest.mark.parametrize("words", [["report", "out"], ["preview", "in", "--tokenizer", QWEN36]])
def test_a_page_that_cannot_be_written_is_said_before_any_work(tmp_path: Path, capsys: Any, words: list[str]) -> None:
    for place in (tmp_path, tmp_path / "none" / "page.html"):
        assert f"--html {place}: name a file" in refusal(capsys, [*words, "--html", str(place)])


@pytest.mark.parametrize("argv", [[], ["fly"], ["run"], ["run", "--tokenizer", QWEN36], ["run", "a"]])
def test_wrong_usage_ends_with_2(argv: list[str], capsys: Any) -> None:
    assert main(argv) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_debug_shows_the_traceback_of_a_refusal(filled: str, capsys: Any) -> None:
    assert main(words(filled, "--turns", "some", "--debug")) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture
def denied(moto: str) -> Iterator[Proxy]:
    """A way to the server on which every write is refused."""
    with start_proxy(moto) as proxy:
        proxy.refusals, proxy.refusal = -1, (403, "AccessDenied", "made up")
        proxy.refuse_when = lambda method, _path, _count: method == "PUT"
        yield proxy


def test_an_output_that_may_not_be_written_is_refused(s3: Any, filled: str, denied: Proxy, capsys: Any) -> None:
    said = refusal(capsys, words(filled, "--quiet", "--json", "--endpoint-url", denied.endpoint_url))
    assert "cannot write" in said
    assert "access denied" in said
    assert keys(s3, filled) == ["completions/a.jsonl"]


def test_a_write_that_is_refused_later_ends_with_1_and_its_line_of_json(
    filled: str, denied: Proxy, capsys: Any
) -> None:
    denied.refuse_when = lambda method, path, _count: method == "PUT" and "plan.json" in path
    assert main(words(filled, "--quiet", "--json", "--endpoint-url", denied.endpoint_url)) == 1
    said = capsys.readouterr()
    found = json.loads(said.out.splitlines()[-1])
    assert (found["exit_code"], found["rows"], found["partitions"]) == (1, 0, 1)
    assert said.err == f"etl: {found['error']}\n"
    assert "access denied" in found["error"]


def test_inputs_come_before_the_output_and_options_stand_anywhere() -> None:
    config, _ = parse_run(["s3://a/x", "--tokenizer", "t", "s3://a/y", "s3://a/z", "--workers", "3"], "etl run")
    assert (config.inputs, config.output, config.workers) == (("s3://a/x", "s3://a/y"), "s3://a/z", 3)


def test_template_arguments_are_json_where_they_parse_and_text_elsewhere() -> None:
    given = ["--template-arg", "preserve_thinking=true", "--template-arg", "effort=high", "--template-arg", "n=3"]
    config, _ = parse_run(
        ["a", "b", "--tokenizer", "t", *given, "--chat-template-kwargs", '{"n": 1, "m": 2}'], "etl run"
    )
    assert config.template_kwargs == {"preserve_thinking": True, "effort": "high", "n": 3, "m": 2}


def test_a_config_file_has_the_same_names_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("input: s3://a/in/\noutput: s3://a/out/\ntokenizer: t\nworkers: 8\nrole_map: {developer: system}\n")
    config, _ = parse_run(["--config", str(path), "--workers", "2"], "etl run")
    assert (config.inputs, config.output, config.workers) == (("s3://a/in/",), "s3://a/out/", 2)
    assert config.role_map == {"developer": "system"}


def test_an_unknown_name_in_a_config_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("input: a\noutput: b\ntokenizer: t\nworker: 8\n")
    with pytest.raises(UsageError, match="unknown option 'worker'"):
        parse_run(["--config", str(path)], "etl run")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('overwrite: "false"', "--overwrite 'false' must be true or false"),
        ('no_train_end: "no"', "--no-train-end 'no' must be true or false"),
        ("no_train_end:", "--no-train-end None must be true or false"),
        ("anon: 1", "--anon 1 must be true or false"),
        ("input: 5", "--input 5 must be a text or a list of them"),
        ("input:", "name at least one INPUT"),
        ("output: 5", "--output 5 must be text"),
        ("chat_template: [a]", "--chat-template ['a'] must be text"),
        ("dashboard_address: 8787", "--dashboard-address 8787 must be text"),
        ("keep: [1]", "--keep [1] must be a list of texts"),
        ("field: messages", "--field 'messages' must be names with texts"),
        ("field: {messages: 5}", "must be names with texts"),
        ("role_map: {5: system}", "must be names with texts"),
        ("storage_option: hunter2", "--storage-option must be names with values"),
        ("template_arg: {day: 2024-01-02}", "template argument day"),
        ("min_loss_tokens:", "--min-loss-tokens None must be a whole number"),
        ("workers: true", "--workers True must be a whole number"),
        ("max_length: 1.5", "--max-length 1.5 must be a whole number"),
        ('verify_share: "0.1"', "must be a share between 0 and 1"),
        ("partition_bytes:", "--partition-bytes 'None' is not a size"),
        (f"memory_limit: {'9' * 400}x", "is not a size"),
        ("shape: [a]", "--shape ['a'] must be text"),
        ("tokenizer: t: hunter2", "line 4: mapping values are not allowed here"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_name(tmp_path: Path, capsys: Any, line: str, says: str) -> None:
    path, name = tmp_path / "run.yaml", line.partition(":")[0]
    kept = [text for text in ("input: in", "output: out", "tokenizer: t") if not text.startswith(f"{name}:")]
    path.write_text("\n".join(["no_dashboard: true", *kept, line]))
    said = refusal(capsys, ["run", "--config", str(path)])
    assert says in said
    assert str(path) in said
    assert "hunter2" not in said


def test_names_with_nothing_behind_them_are_as_if_left_out_and_a_date_is_one(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    empty = ("keep:", "field:", "role_map:", "template_arg:", "chat_template_kwargs:", "storage_option:", "workers:")
    path.write_text("\n".join(["input: in", "output: out", "tokenizer: t", "date: 2026-01-02", *empty]))
    config, _ = parse_run(["--config", str(path)], "etl run")
    assert config == RunConfig(input="in", output="out", tokenizer="t", date="2026-01-02")


def test_paths_of_pathlib_are_taken(tmp_path: Path) -> None:
    given: Any = tmp_path
    config = RunConfig(input=[given / "in"], output=given / "out", tokenizer=given)
    assert (config.inputs, config.output, config.tokenizer) == (
        (f"{tmp_path}/in",),
        f"{tmp_path}/out",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    "more",
    [
        ["--secret-key", "hunter2"],
        ["--secret-key=hunter2"],
        ["--storage-option", "secret:hunter2"],
        ["--storage-option", "password=hunter2"],
        ["--endpoint-url", "u:hunter2@host"],
    ],
)
def test_what_may_be_a_secret_is_not_echoed(capsys: Any, more: list[str]) -> None:
    said = refusal(capsys, ["plan", "in", "out", "--tokenizer", QWEN36, *more])
    assert "hunter2" not in said
    assert more[0].partition("=")[0] in said


@pytest.mark.parametrize("keep", [["id"], ["loss_mask"], ["x", "x"]])
def test_a_kept_field_that_would_be_a_second_column_is_refused(tmp_path: Path, capsys: Any, keep: list[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(jsonl(small_rows(1)))
    more = [word for name in keep for word in ("--keep", name)]
    for command in ("plan", "run"):
        argv = [command, f"{tmp_path}/in", f"{tmp_path}/out", "--tokenizer", QWEN36, "--no-dashboard", *more]
        assert f"--keep {keep[0]} would be a second column" in refusal(capsys, argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--dashboard-address", "x"], "is not HOST:PORT"),
        (["--dashboard-address", "127.0.0.1:99999"], "ports end at 65535"),
        (["--dashboard-address", "192.0.2.1:8787"], "192.0.2.1 is no address of this machine"),
        (["--scheduler", "x"], "is not tcp://HOST:PORT"),
        (["--scheduler", "http://127.0.0.1:8787/status"], "give the scheduler's own address, e.g. tcp://"),
        (["--scheduler", "tcp://no-such-host.invalid:8786"], "no Dask scheduler answers there"),
        (["--scheduler", "tcp://127.0.0.1:1"], "no Dask scheduler answers there"),
        (["--scheduler", "tls://127.0.0.1:1"], "TLS needs certificates"),
        (["--profile-report", "."], "--profile-report .: name a file"),
        (["--profile-report", "none/page.html"], "--profile-report none/page.html: name a file"),
    ],
)
def test_where_no_cluster_can_be_had_nothing_is_written(
    tmp_path: Path, capsys: Any, more: list[str], says: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(small_rows(1)))
    argv = ["run", f"{tmp_path}/a.jsonl", f"{tmp_path}/out", "--tokenizer", QWEN36, *more]
    assert says in refusal(capsys, argv)
    assert not (tmp_path / "out").exists()


def test_names_are_shown_without_what_a_terminal_obeys(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(small_rows(1)))
    (tmp_path / "\x1b[31mred.txt").write_bytes(b"")
    assert main(["plan", str(tmp_path), f"{tmp_path}-out", "--tokenizer", QWEN36, "--workers", "1"]) == 0
    assert r"\x1b[31mred.txt" in capsys.readouterr().out
    assert r"\x1b[2J" in refusal(capsys, ["plan", f"{tmp_path}/\x1b[2J", f"{tmp_path}-out", "--tokenizer", QWEN36])


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        ({"a.jsonl": b'{"text": "x"}\n' * 99}, r"--partition-bytes \d+ gives 4"),
        ({f"{i}.jsonl.gz": gzip.compress(b'{"text": "x"}\n') for i in range(4)}, "no size gives 4"),
        ({f"{i}.jsonl.gz": gzip.compress(b'{"text": "x"}\n') for i in range(8)}, r"--partition-bytes \d+ gives 4"),
    ],
)
def test_plan_says_how_to_give_each_worker_four_partitions_or_that_it_cannot_be(
    tmp_path: Path, capsys: Any, objects: dict[str, bytes], says: str
) -> None:
    (tmp_path / "in").mkdir()
    for name, body in objects.items():
        (tmp_path / "in" / name).write_bytes(body)
    argv = ["plan", f"{tmp_path}/in", f"{tmp_path}/out", "--tokenizer", QWEN36, "--workers", "2"]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert re.search(f"WARNING: fewer than 4 a worker leave some idle.*{says}", said)
    if size := re.search(r"--partition-bytes \d+", said):
        assert main([*argv, *size[0].split()]) == 0
        assert "WARNING" not in capsys.readouterr().out


def test_every_option_of_the_configuration_is_a_flag() -> None:
    flags = {flag.removeprefix("--").replace("-", "_") for options in GROUPS.values() for flag, _, _ in options}
    assert flags == {f.name for f in dataclasses.fields(RunConfig)} - {"input", "output"}


def test_help_names_every_group(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        run_parser("etl run").parse_args(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"{group}:" in said for group in GROUPS)


def test_plan_says_what_would_be_read_and_writes_nothing(s3: Any, filled: str, capsys: Any) -> None:
    s3.put_object(Bucket=filled, Key="completions/notes.txt", Body=b"x")
    assert main(["plan", *words(filled, "--partition-bytes", "200", "--json")[1:]]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    size = len(jsonl(small_rows(3)))
    assert (found["objects"], found["bytes"], found["partitions"]) == (1, size, -(-size // 200))
    assert (found["partitions_done"], found["passed_over"]) == (0, [f"s3://{filled}/completions/notes.txt"])
    assert len(found["fingerprint"]) == 64
    assert keys(s3, filled) == ["completions/a.jsonl", "completions/notes.txt"]


def test_plan_names_the_partition_size_that_gives_every_worker_four(s3: Any, bucket: str, capsys: Any) -> None:
    upload(s3, bucket, {f"{i}.jsonl": jsonl(small_rows(10)) for i in range(4)})
    assert main(["plan", *words(bucket, "--workers", "2")[1:]]) == 0
    said = capsys.readouterr().out
    assert "0.5 partitions for each of 2 workers" in said
    assert "note: the template leaves out the reasoning of earlier turns" in said  # as the run will say
    size = re.search(r"--partition-bytes (\d+) gives 4", said)
    assert size is not None
    assert main(["plan", *words(bucket, "--workers", "2", "--partition-bytes", size[1])[1:]]) == 0
    said = capsys.readouterr().out
    assert "WARNING" not in said
    assert float(said.splitlines()[2].split()[0]) >= 4


class Late:
    """Is interrupted while it is being finalised."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_that_python_drops_in_a_finaliser_comes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_words: list[str]) -> int:
        Late()
        threading.Event().wait(10)
        return 0

    monkeypatch.setitem(COMMANDS, "plan", command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["plan"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "etl: interrupted; the same command goes on from here\n"


def test_a_full_disk_under_standard_output_is_one_line_and_1(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - as a shell's `>` does
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--help"]) == 1
    assert capsys.readouterr().err == "etl: /dev/full: [Errno 28] No space left on device\n"


def test_a_log_that_takes_no_more_does_not_change_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:  # noqa: PTH123 - as a shell's `2>` does
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["--no-such"]) == 2


def test_a_log_that_takes_no_more_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:  # noqa: PTH123 - as a shell's `2>` does
        monkeypatch.setattr(sys, "stderr", full)
        watcher = ProgressWatcher()
        watcher.start(3, 0)
        watcher.warn("only 1.0% of the tokens are trained")
        Notes().warn("only 1.0% of the tokens are trained")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # or it cannot be closed


INTERRUPTED_IMPORT = """
import os, signal, sys
from etl.terminal import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "dask":
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Finder())
sys.exit(main(["run", "in/", "out/", "--tokenizer", "t", "--json"]))
"""


INTERRUPTED_START = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Finder())
sys.argv = ["etl", "run", "in/", "out/", "--tokenizer", "t", "--json"]
runpy.run_module("etl", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("module", ["rich", "rich.progress", "etl.config"])
def test_a_command_interrupted_while_it_is_imported_says_so_in_one_line(name: str, module: str) -> None:
    code = INTERRUPTED_START.replace("{signal}", name).replace("{module}", module)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "etl: interrupted; nothing had begun\n")


INTERRUPTED_PARSING = """
import argparse, os, signal, sys
from etl.terminal import main

parse = argparse.ArgumentParser.parse_known_args

def interrupted(*args, **kwargs):
    os.kill(os.getpid(), signal.{signal})
    return parse(*args, **kwargs)

argparse.ArgumentParser.parse_known_args = interrupted
sys.exit(main(["run", "in/", "out/", "--tokenizer", "t", "--json"]))
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_run_interrupted_while_its_options_are_parsed_prints_its_json(name: str) -> None:
    code = INTERRUPTED_PARSING.replace("{signal}", name)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 130
    assert done.stderr == "etl: interrupted; the same command goes on from here\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_run_interrupted_while_it_imports_dask_prints_its_json(name: str) -> None:
    code = INTERRUPTED_IMPORT.replace("{signal}", name)
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130
    assert json.loads(done.stdout.splitlines()[-1])["exit_code"] == 130
    assert done.stderr == "etl: interrupted; the same command goes on from here\n"
