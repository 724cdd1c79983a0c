"""A task on standard input -> the same rows by another recipe, local files in and out; what it measured as JSON.

    pool      the script that etl replaces: multiprocessing.Pool, one transformers tokenizer a process, row by row,
              everything in memory, Arrow out; trained is what follows the generation prompt
    datasets  Hugging Face datasets.map(num_proc=…), apply_chat_template(return_assistant_tokens_mask=True), Parquet out
    daft      Daft, the same function in `processes` processes of its own, Parquet out

Each process has one native thread. No S3 is in any of them, to their advantage.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.bench.corpus import read_rows
from tests.bench.gauge import Clock

Row: TypeAlias = dict[str, Any]
Ids: TypeAlias = list[int]


@functools.cache
def tokenizer(folder: str, template: str) -> Any:
    """The transformers tokenizer in `folder` with the chat template in the file `template`, once a process."""
    import transformers

    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    loaded.chat_template = Path(template).read_text()
    return loaded


# --- what each does with a row -----------------------------------------------------------------------------------


def by_prefix(tokens: Any, messages: list[Row]) -> tuple[Ids, Ids]:
    """(ids, mask): trained is what follows the tokenized prompt, as the old script had it."""
    ids = tokens.apply_chat_template(messages, tokenize=True, return_dict=False)
    prompt = tokens.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
    return ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def by_marks(tokens: Any, messages: list[Row]) -> tuple[Ids, Ids]:
    """(ids, mask): trained is what the template's `{% generation %}` blocks hold, as transformers finds it."""
    found = tokens.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return found["input_ids"], found["assistant_masks"]


# --- the recipes: each returns (tokens, the clock that began when its processes were ready) ------------------------

_ready: dict[str, Any] = {}


def _start(folder: str, template: str, barrier: Barrier) -> None:
    _ready["tokenizer"] = tokenizer(folder, template)
    barrier.wait(300)


def _one(row: Row) -> tuple[str, Ids, Ids]:
    return (row["id"], *by_prefix(_ready["tokenizer"], row["messages"]))


def run_pool(task: Mapping[str, Any], files: list[Path]) -> tuple[int, float, dict[str, Any]]:
    """multiprocessing.Pool over all rows in memory, one Arrow file."""
    rows = list(read_rows(files))
    barrier = multiprocessing.Barrier(task["processes"] + 1)
    with multiprocessing.Pool(task["processes"], _start, (task["tokenizer"], task["template"], barrier)) as pool:
        barrier.wait(300)
        clock = Clock()
        results = pool.map(_one, rows, chunksize=16)
        ids, inputs, masks = zip(*results, strict=True)
        table = pa.table(
            {
                "id": pa.array(ids, pa.string()),
                "input_ids": pa.array(inputs, pa.list_(pa.int32())),
                "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            }
        )
        with pa.OSFile(f"{task['output']}.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sum(map(len, inputs)), *_read(clock)


def _read(clock: Clock) -> tuple[float, dict[str, Any]]:
    reading = clock.read()._asdict()
    return reading.pop("work"), reading


def _marked(row: Row, *, folder: str, template: str, stamps: str) -> Row:
    tokens = _stamped(folder, template, stamps)
    ids, mask = by_marks(tokens, [{k: v for k, v in m.items() if v is not None} for m in row["messages"]])
    return {"id": row["id"], "input_ids": ids, "loss_mask": mask}


@functools.cache
def _stamped(folder: str, template: str, stamps: str) -> Any:
    """The tokenizer; when it was ready is left in the folder `stamps`."""
    loaded = tokenizer(folder, template)
    loaded.apply_chat_template([{"role": "user", "content": "x"}], tokenize=True)
    name = f"{multiprocessing.current_process().name}-{time.monotonic_ns()}"
    Path(stamps, name).write_text(repr(time.monotonic()))
    return loaded


def _since_ready(stamps: str) -> float:
    """Seconds since the last process was ready: what the others did until then is given to them."""
    return time.monotonic() - max(float(path.read_text()) for path in Path(stamps).iterdir())


def run_datasets(task: Mapping[str, Any], files: list[Path]) -> tuple[int, float, dict[str, Any]]:
    """datasets.map with processes, one Parquet file."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=list(map(str, files)), split="train", cache_dir=task["output"])
    one = functools.partial(
        _marked, folder=task["tokenizer"], template=task["template"], stamps=_stamps(task["output"])
    )
    features = datasets.Features(
        id=datasets.Value("string"),
        input_ids=datasets.List(datasets.Value("int32")),
        loss_mask=datasets.List(datasets.Value("int8")),
    )
    done = rows.map(one, num_proc=task["processes"], remove_columns=rows.column_names, features=features)
    done.to_parquet(f"{task['output']}/out.parquet")
    work = _since_ready(_stamps(task["output"]))
    return pc.sum(pc.list_value_length(done.data["input_ids"])).as_py(), work, {}


def run_daft(task: Mapping[str, Any], files: list[Path]) -> tuple[int, float, dict[str, Any]]:
    """Daft with a function in processes of its own, Parquet files."""
    import daft

    kind = daft.DataType
    columns = {"id": kind.string(), "input_ids": kind.list(kind.int32()), "loss_mask": kind.list(kind.int8())}
    options = {"folder": task["tokenizer"], "template": task["template"], "stamps": _stamps(task["output"])}

    @daft.udf(return_dtype=kind.struct(columns), batch_size=16, concurrency=task["processes"], use_process=True)
    class Tokenize:
        def __init__(self) -> None:
            _stamped(**options)

        def __call__(self, ids: Any, messages: Any) -> list[Row]:
            pairs = zip(ids.to_pylist(), messages.to_pylist(), strict=True)
            return [_marked({"id": i, "messages": m}, **options) for i, m in pairs]

    frame = daft.read_json(list(map(str, files)))
    tokenize: Any = Tokenize
    made = frame.select(tokenize(frame["id"], frame["messages"]).alias("row"))
    columns_out = [daft.col("row").struct.get(name).alias(name) for name in columns]
    written = made.select(*columns_out).write_parquet(f"{task['output']}/out").to_pydict()["path"]
    work = _since_ready(_stamps(task["output"]))
    return sum(pc.sum(pc.list_value_length(pq.read_table(path)["input_ids"])).as_py() for path in written), work, {}


def _stamps(output: str) -> str:
    path = Path(output, "ready")
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


RECIPES: Final[Mapping[str, Callable[[Mapping[str, Any], list[Path]], tuple[int, float, dict[str, Any]]]]] = {
    "pool": run_pool,
    "datasets": run_datasets,
    "daft": run_daft,
}


def count_rows(files: Iterable[Path]) -> int:
    """Lines in the files."""
    return sum(path.read_bytes().count(b"\n") for path in files)


def main() -> None:
    """Run the task: `recipe`, `files`, `tokenizer` (folder), `template` (file), `processes`, `output` (to be made)."""
    task = json.load(sys.stdin)
    files = [Path(name) for name in task["files"]]
    tokens, work, more = RECIPES[task["recipe"]](task, files)
    size = sum(path.stat().st_size for path in files)
    print(json.dumps({"rows": count_rows(files), "tokens": tokens, "bytes": size, "work": work, **more}))
