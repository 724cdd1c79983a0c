"""Options -> the whole comparison, printed as tables and kept as JSON with `--json`.

Contenders take turns within a round, and the order is turned round from one to the next, so that what slows the
machine slows all; a ratio is taken within a round, its median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import psutil
import tokenizers

from tests.bench import agreement, figures
from tests.bench.corpus import Corpus, read_rows, write_corpus
from tests.bench.gauge import ONE_THREAD, Measured, measure
from tests.material import MATERIAL
from tests.servers import S3Server, start_moto, start_proxy, start_seaweedfs

QWEN36: Final = "builtin:qwen3.6"
PLAIN: Final = str(MATERIAL / "templates" / "qwen3_6.jinja")
MARKED: Final = str(MATERIAL / "templates" / "qwen3_6_training.jinja")
RIVALS: Final = {"b": "pool", "c": "datasets", "d": "daft"}
SECTIONS: Final = ("a", "b", "c", "d", "stages", "many", "scale", "latency", "planning", "window")
PLANNED: Final = (1_805, 1_000_000)
FINE: Final = "1MiB"
"""Partition size where 128 workers are compared with 2: small enough for more partitions than workers."""

STORED_AS: Final = "application/zip"
"""What the objects are said to be. SeaweedFS keeps text gzipped and inflates it again for every read, which costs it
five times the CPU; S3 keeps objects as they are."""

SCALES: Final = (1, 4, 16)
LATENCY: Final = 0.05
OBJECTS: Final = 200
CHECKED: Final = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What every measurement needs: options, folder, server with its processes, and what is on it."""

    options: argparse.Namespace
    home: Path
    server: S3Server
    server_pids: tuple[int, ...]
    corpus: Corpus
    taken: dict[str, list[Measured]] = dataclasses.field(default_factory=dict)

    def ours(self, name: str, rows: int, **config: Any) -> Measured:
        """One run, S3 to S3, over the first objects that hold `rows` rows."""
        files, _, size = self.corpus.first(rows)
        output = f"s3://bench/out/{time.monotonic_ns()}/"
        common = {"tokenizer": QWEN36, "chat_template": PLAIN, "no_dashboard": True, "endpoint_url": str(self.server)}
        common["input"] = [f"s3://bench/in/{path.name}" for path in files]
        whole = {**common, "partition_bytes": self.options.partition_bytes, **config, "output": output}
        task = {"config": whole, "bytes": size, "server": self.server_pids}
        found = self._keep(measure(name, "tests.bench.ours", task, self.server.environment))
        _delete(self.server, output)
        return found

    def rival(self, letter: str) -> Measured:
        """One run of the recipe, from files to files."""
        files, _, _ = self.corpus.first(self.options.rival_rows)
        output = Path(tempfile.mkdtemp(dir=self.home))
        task = {
            "recipe": RIVALS[letter],
            "files": list(map(str, files)),
            "tokenizer": str(self.home / "tokenizer"),
            "template": PLAIN if letter == "b" else MARKED,
            "processes": 2,
            "output": str(output),
        }
        cache = {"HF_HOME": str(output), "HF_DATASETS_CACHE": str(output)}
        found = self._keep(measure(f"({letter}) {RIVALS[letter]}, 2 processes", "tests.bench.rivals", task, cache))
        shutil.rmtree(output)
        return found

    def _keep(self, found: Measured) -> Measured:
        self.taken.setdefault(found.name, []).append(found)
        said = f"{found.rows / found.work:8,.0f} rows/s  {found.work:6.2f} s of {found.whole:6.2f}"
        print(f"    {found.name:32} {said}", file=sys.stderr, flush=True)
        return found


def _delete(server: S3Server, url: str) -> None:
    client = server.client()
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        if page.get("Contents"):
            client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": o["Key"]} for o in page["Contents"]]})


# --- before ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(name: str) -> Iterator[tuple[S3Server, tuple[int, ...]]]:
    """The S3 server of that name and its processes."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with {"moto": start_moto, "seaweedfs": start_seaweedfs}[name]() as server:
        server.create_bucket("bench")
        yield server, tuple(p.pid for p in psutil.Process().children(recursive=True) if p.pid not in before)


def save_tokenizer(folder: Path) -> None:
    """The vocabulary of `builtin:qwen3.6` as transformers keeps it: what the rivals load."""
    import transformers

    from etl.builtin import builtin_spec

    backend = tokenizers.Tokenizer.from_str(builtin_spec(QWEN36).backend_json)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def check_agreement(home: Path, corpus: Corpus) -> None:
    """All recipes on a few hundred rows, before anything is timed."""
    rows = list(islice(read_rows(list(corpus.files)), CHECKED))
    (home / "few").mkdir()
    (home / "few" / "rows.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    config = {"input": str(home / "few"), "output": str(home / "few-out"), "tokenizer": QWEN36, "workers": 1}
    task = {"config": {**config, "chat_template": PLAIN, "no_dashboard": True}, "bytes": 1, "server": []}
    measure("agreement", "tests.bench.ours", task, {})
    count = agreement.check(rows, home / "few-out", str(home / "tokenizer"), PLAIN, MARKED)
    print(f"agreement   ids and masks of {count} rows are equal in all recipes; rules: {agreement.RULES}")


# --- the sections ------------------------------------------------------------------------------------------------


def take_rounds(rounds: int, contenders: Sequence[Callable[[], Measured]]) -> list[list[Measured]]:
    """Each contender's runs; within a round one after the other, the order turned round every time."""
    taken: list[list[Measured]] = [[] for _ in contenders]
    for round_ in range(rounds):
        order = range(len(contenders)) if round_ % 2 == 0 else reversed(range(len(contenders)))
        for at in order:
            taken[at].append(contenders[at]())
    return taken


def show_contest(bench: Bench, only: Sequence[str]) -> None:
    """Ours with 1, 2 and 128 workers beside the rivals in one table, and ours by stage."""
    options = bench.options
    letters = [letter for letter in RIVALS if letter in only and _can(letter)]
    names = ["(a) etl, 2 workers", *letters]
    calls: list[Callable[[], Measured]] = [partial(bench.ours, names[0], options.rows, workers=2)]
    calls += [partial(bench.rival, letter) for letter in letters]
    if {"a", "stages"} & set(only):
        names.append("(a) etl, 1 worker")
        calls.append(partial(bench.ours, names[-1], options.rows, workers=1))
    taken = dict(zip(names, take_rounds(options.rounds, calls), strict=True))
    crowd = take_many(bench) if "many" in only else {}
    figures.show_speeds({**taken, **crowd})
    two = taken[names[0]]
    for letter in letters:
        print(f"  2 workers against ({letter}): {figures.ratios(two, taken[letter])}")
    if crowd:
        few, many = crowd.values()
        print(f"  {options.many} workers against 2, partitions of {FINE}: {figures.ratios(many, few)}")
    show_waiting(two)
    if "stages" in only:
        figures.show_stages({"1 worker": taken["(a) etl, 1 worker"], "2 workers": two})


def show_waiting(two: Sequence[Measured]) -> None:
    """How long 2 workers wait, by three measures."""
    values = (lambda m: m.waiting, lambda m: m.idle, lambda m: figures.waiting(m, 2))
    none_ready, idle, other = (figures.middle(two, value) for value in values)
    print(f"  waiting at 2 workers: no thread of a worker runs or is ready to {none_ready:.1%} of the time;")
    print(f"    the cores idle {idle:.1%}; a worker neither computes nor compresses {other:.1%}")


def take_many(bench: Bench) -> dict[str, list[Measured]]:
    """2 and 128 workers on the same small partitions."""
    options = bench.options
    names = [f"(a) etl, {count} workers, {FINE}" for count in (2, options.many)]
    calls = [
        partial(bench.ours, name, options.many_rows, workers=count, partition_bytes=FINE)
        for count, name in zip((2, options.many), names, strict=True)
    ]
    return dict(zip(names, take_rounds(options.rounds, calls), strict=True))


def _can(letter: str) -> bool:
    if letter != "d" or importlib.util.find_spec("daft"):
        return True
    print("(d) is left out: Daft is not installed (pip install 'daft>=0.6')")
    return False


def show_scale(bench: Bench) -> None:
    """1, 4 and 16 times the data, 2 workers."""
    base = bench.options.scale_rows
    calls = [partial(bench.ours, f"{times}x the data", base * times, workers=2) for times in SCALES]
    figures.show_scale(dict(zip(SCALES, take_rounds(bench.options.rounds, calls), strict=True)))


def show_latency(bench: Bench) -> None:
    """The same run over 200 objects through a proxy that adds nothing, and one that adds 50 ms to each request."""
    _put_small_objects(bench)
    with start_proxy(bench.server) as proxy:

        def run(latency: float) -> Measured:
            proxy.latency = latency
            name = f"{latency * 1000:.0f} ms more a request"
            return bench.ours(
                name, bench.options.rows, workers=2, endpoint_url=proxy.endpoint_url, input="s3://bench/small/"
            )

        without, late = take_rounds(bench.options.rounds, [partial(run, 0.0), partial(run, LATENCY)])
    pairs = list(zip(late, without, strict=True))
    lines = [
        [m[0].name, *(f"{figures.middle(m, value):.2f}" for value in (lambda r: r.work, lambda r: r.whole))]
        for m in (without, late)
    ]
    title = f"latency, 2 workers, {OBJECTS} objects, through a proxy on the same cores"
    figures.show(title, ["", "work s", "whole s"], lines)
    for name, times in (
        ("its work", [a.work / b.work for a, b in pairs]),
        ("start-up and end too", [a.whole / b.whole for a, b in pairs]),
    ):
        said = ", ".join(f"{ratio:.3f}" for ratio in times)
        print(
            f"  with 50 ms a run takes this much of the time without, {name}: {statistics.median(times):.3f} ({said})"
        )


def _put_small_objects(bench: Bench) -> None:
    lines = [line for path in bench.corpus.first(bench.options.rows)[0] for line in path.read_bytes().splitlines(True)]
    each = -(-len(lines) // OBJECTS)
    client = bench.server.client()
    for at in range(OBJECTS):
        body = b"".join(lines[at * each : (at + 1) * each])
        client.put_object(Bucket="bench", Key=f"small/{at:03d}.jsonl", Body=body, ContentType=STORED_AS)


def show_planning() -> None:
    """Listing made up, objects cut into partitions, the plan written out: seconds and memory of a process each."""
    lines = []
    for objects in PLANNED:
        command = [sys.executable, "-m", "tests.bench.planning", str(objects)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        lines.append(
            [f"{objects:,}", f"{found['all']:.2f}", f"{found['peak'] / 1e6:,.0f}", f"{found['plan'] / 1e6:.1f}"]
        )
    figures.show("planning", ["objects", "s", "peak MB", "plan.json MB"], lines)


def show_window(partitions: int) -> None:
    """What client, scheduler and workers hold while sleeping tasks, as many as that, go through a run's window."""
    command = [sys.executable, "-m", "tests.bench.window", str(partitions)]
    looks = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    lines = [
        [f"{a['done']:,}", f"{a['s']:.0f}", str(a["tasks"]), f"{a['client'] / 1e6:.1f}", f"{a['rest'] / 1e6:.1f}"]
        for a in looks
    ]
    head = ["partitions done", "s", "tasks known at most", "client and scheduler MB", "the rest MB"]
    figures.show("window, tasks that only sleep, 2 workers", head, lines)


# --- the door ----------------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rows", type=int, default=64_000, help="rows of etl's runs")
    parser.add_argument("--rival-rows", type=int, help="rows of the other recipes' runs; default a twentieth")
    parser.add_argument("--scale-rows", type=int, help="rows of 1x in `scale`; default a sixteenth")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}; comma between")
    parser.add_argument("--many", type=int, default=128, help="workers in the comparison of many with 2")
    parser.add_argument("--many-rows", type=int, help="rows of that comparison; default three quarters of --rows")
    parser.add_argument("--window-tasks", type=int, default=100_000, help="partitions in `window`; 8 ms each")
    parser.add_argument("--partition-bytes", default="16MiB", help="default as that of `etl run`")
    parser.add_argument("--server", choices=("seaweedfs", "moto"), default="seaweedfs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every single run")
    options = parser.parse_args()
    options.rival_rows = options.rival_rows or max(500, options.rows // 20)
    options.scale_rows = options.scale_rows or max(500, options.rows // 16)
    options.many_rows = options.many_rows or options.rows * 3 // 4
    if unknown := set(options.only.split(",")) - set(SECTIONS):
        parser.error(f"--only {', '.join(sorted(unknown))} is unknown; choose {', '.join(SECTIONS)}")
    return options


def show_setting(options: argparse.Namespace, corpus: Corpus) -> None:
    """What was measured on, so that the figures can be read later."""
    memory = psutil.virtual_memory().total / 2**30
    print(
        f"machine     {os.cpu_count()} cores, {memory:.0f} GB, load {os.getloadavg()[0]:.1f}, {sys.version.split()[0]}"
    )
    print(
        f"rows        {corpus.rows:,} distinct, {corpus.bytes / 1e6:,.0f} MB, median {corpus.median_bytes:,} bytes, "
        f"from installed sources and documentation, gone through {corpus.repeats:.2f} times"
    )
    print(
        f"S3 server   {options.server} on loopback, on the same cores, objects stored uncompressed; "
        "the other recipes read and write files"
    )
    print("threads     one native thread in every process, the other recipes' too (Daft's own scheduler excepted)")


def main() -> None:
    """Make the data, check agreement, measure, print."""
    options = parse_options()
    only = options.only.split(",")
    os.environ |= ONE_THREAD
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # server and folders go with an ended bench
    rows = max(
        options.rows,
        options.scale_rows * max(SCALES) if "scale" in only else 0,
        options.many_rows if "many" in only else 0,
    )
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="etl-bench-")))
        corpus = write_corpus(home / "in", rows)
        save_tokenizer(home / "tokenizer")
        show_setting(options, corpus)
        check_agreement(home, corpus)
        server, pids = stack.enter_context(started(options.server))
        client = server.client()
        for path in corpus.files:
            client.put_object(Bucket="bench", Key=f"in/{path.name}", Body=path.read_bytes(), ContentType=STORED_AS)
        print(f"set-up      {time.monotonic() - start:.0f} s", flush=True)
        bench = Bench(options, home, server, pids, corpus)
        measure_all(bench, only)
    if options.json:
        options.json.write_text(json.dumps(_record(options, bench.taken), indent=1))
    print(f"\nin all {time.monotonic() - start:.0f} s")


def measure_all(bench: Bench, only: Sequence[str]) -> None:
    """The sections that were asked for."""
    if "planning" in only:
        show_planning()
    if "window" in only:
        show_window(bench.options.window_tasks)
    if set(only) - {"scale", "latency", "planning", "window"}:
        show_contest(bench, only)
    if "scale" in only:
        show_scale(bench)
    if "latency" in only:
        show_latency(bench)


def _record(options: argparse.Namespace, taken: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
    shown = {name: str(value) for name, value in vars(options).items()}
    return {"options": shown, "runs": {name: list(map(dataclasses.asdict, runs)) for name, runs in taken.items()}}


if __name__ == "__main__":
    main()
