"""Command line -> RunConfig -> exit code: the only file that reads arguments and writes to the terminal."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from etl.config import CHOICES, RunConfig
from etl.errors import EtlError, UsageError
from etl.pages import check_place, printable
from etl.watcher import Watcher

LATER: Final = ("doctor", "export")
"""Commands of the contract that are not built yet."""

PLAIN_PROGRESS_SECONDS: Final = 10.0


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong usage is one line and an exception."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the whole usage; what follows an unknown option may be a secret."""
        start, unknown = message.partition("unrecognized arguments: ")[::2]
        flags = [word.partition("=")[0] for word in unknown.split() if word.startswith("-")]
        if flags:
            message = f"{start}unrecognized arguments: {' '.join(flags)}"
        raise UsageError(f"{message}; see python -m {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the contract: 0, 1, 2 or 130."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a name may hold what the terminal's encoding has not
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    debug = "--debug" in words
    with _interruptible():
        try:
            return _dispatch(words)
        except EtlError as error:
            _explain(error, debug=debug)
            return error.exit_code
        except KeyboardInterrupt:
            _explain(EtlError("interrupted; the same command goes on from here"), debug=debug)
            return 130
        except BrokenPipeError:
            return 1  # the reader of our output has gone (`| head`); there is nobody left to tell
        except OSError as error:  # what is printed finds no room
            _explain(EtlError(f"{_drop_unwritable()}{error}"), debug=debug)
            return 1
        finally:
            _drop_unwritable()


def _dispatch(words: list[str]) -> int:
    if not words:
        raise UsageError(f"name a command: {', '.join(COMMANDS)}; see python -m etl --help")
    if words[0] in {"-h", "--help"}:
        print(HELP, flush=True)
        return 0
    command, rest = words[0], words[1:]
    if command in LATER:
        raise UsageError(f"etl {command}: not yet")
    if command not in COMMANDS:
        raise UsageError(f"unknown command {command!r}; choose {', '.join(COMMANDS)}")
    exit_code = COMMANDS[command](rest)
    print(end="", flush=True)  # at the exit of Python it would be too late to tell that this cannot be written
    return exit_code


def _explain(error: EtlError, *, debug: bool) -> None:
    with contextlib.suppress(OSError):
        if debug:
            traceback.print_exception(error)
        print(f"etl: {printable(' '.join(str(error).split()))}", file=sys.stderr)


def _drop_unwritable() -> str:
    """What standard output or error cannot take goes nowhere, or Python's own last try would exit with 120.

    Returns which of them it was.
    """
    dropped = ""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:
            dropped += f"{stream.name}: "
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return dropped


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends a command the way Ctrl-C does: exit 130, resumable.

    Python drops what is raised in a finaliser, an interrupt too, which then comes again.
    """

    def interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    def again(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            hook(dropped)

    before, hook = signal.signal(signal.SIGTERM, interrupt), sys.unraisablehook
    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, before)


_AGAIN_SECONDS: Final = 0.1
"""By then the finaliser is over."""


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """An interrupt inside comes at the end of it."""
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


# --- commands ----------------------------------------------------------------------------------------------------


def run_command(words: list[str]) -> int:
    """`etl run INPUT [INPUT …] OUTPUT --tokenizer NAME_OR_FOLDER`."""
    watcher = Watcher()
    try:
        with _interrupts_later():  # what is imported or parsed by half can neither be used nor begun again
            config, flags = parse_run(words, "etl run")
            watcher = Watcher() if flags.quiet else ProgressWatcher()
            from etl import jobs  # Dask takes a second to import; wrong usage should not wait for it
        result = jobs.run(config, watcher)
    except KeyboardInterrupt:
        error = "interrupted; the same command goes on from here"
        result = jobs.RunResult(output=str(config.output), exit_code=130, error=error)
    finally:
        watcher.finish()
    if not flags.quiet:
        print(result)
    if result.error:
        _explain(EtlError(result.error), debug=False)
    if flags.json:
        print(json.dumps(result.as_dict()))
    return result.exit_code


def plan_command(words: list[str]) -> int:
    """`etl plan …as run…`: what would be read, how it is cut, what is done."""
    config, flags = parse_run(words, "etl plan")
    from etl import jobs

    found = jobs.plan(config)
    if not flags.quiet:
        print_plan(found)
    if flags.json:
        print(json.dumps(found.as_dict()))
    return 0


def preview_command(words: list[str]) -> int:
    """`etl preview INPUT [INPUT …] --tokenizer T [-n 3] [--row N] [--html FILE]`: tokens in colour, with a legend."""
    config, flags = parse_preview(words)
    if flags.html is not None:
        check_place("--html", flags.html)
    from etl.inspection import preview

    found = preview(config, flags.rows, flags.row)
    if flags.html is not None:
        _write_page(flags.html, found.to_html())
    if not flags.quiet:
        print_preview(found)
    if flags.json:
        print(json.dumps(found.as_dict()))
    return 0


def check_command(words: list[str]) -> int:
    """`etl check OUTPUT`: 0 where all is well, 1 where a fault was found."""
    flags, options = parse_output(output_parser("check", "re-read parts and receipts and reconcile them"), words)
    from etl.audit import check

    result = check(flags.output, **options)
    if not (flags.quiet and result.ok):
        print(result)
    if flags.json:
        print(json.dumps(result.as_dict()))
    return 0 if result.ok else 1


def report_command(words: list[str]) -> int:
    """`etl report OUTPUT [--html FILE]`: the totals of an output, from its receipts."""
    parser = output_parser("report", "the totals of an output: rows, rejects by reason, where the time went")
    parser.add_argument("--html", metavar="FILE", default=None, help="write one self-contained page as well")
    flags, options = parse_output(parser, words)
    if flags.html is not None:
        check_place("--html", flags.html)
    from etl.summary import report

    result = report(flags.output, **options)
    if flags.html is not None:
        _write_page(flags.html, result.to_html())
    if not flags.quiet:
        print(result)
    if flags.json:
        print(json.dumps(result.as_dict()))
    return 0


def _write_page(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}; name a file in a folder that exists") from error


def demo_command(words: list[str]) -> int:
    """`etl demo`: the whole job on an embedded S3 server with a bundled sample."""
    parser = Parser(prog="etl demo", description="the whole job on an embedded S3 server with a bundled sample")
    parser.add_argument("--keep-running", action="store_true", help="leave server and dashboard up until Ctrl-C")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    flags = parser.parse_args(words)
    from etl import demo

    return demo.play(keep_running=flags.keep_running, command=main, say=print_line)


COMMANDS: Final[Mapping[str, Callable[[list[str]], int]]] = {
    "run": run_command,
    "plan": plan_command,
    "preview": preview_command,
    "check": check_command,
    "report": report_command,
    "demo": demo_command,
}

HELP: Final = """\
usage: python -m etl COMMAND …

  run INPUT [INPUT …] OUTPUT --tokenizer T   chat completions on S3 → masked training tokens on S3
  plan …as run…                              what would be read, how it is cut, what is done
  preview INPUT --tokenizer T [-n 3]         tokens in colour, with a legend of what is trained; [--row N] [--html F]
  check OUTPUT                               re-read parts and receipts: every count, hash, length, id, mask value
  report OUTPUT [--html FILE]                totals, rejects by reason, where the time went
  demo                                       the whole job on an embedded S3 server with a bundled sample

python -m etl run --help lists the options."""


# --- arguments ---------------------------------------------------------------------------------------------------

_FLAG: Final[dict[str, Any]] = {"action": "store_true"}
_LIST: Final[dict[str, Any]] = {"action": "append"}

GROUPS: Final[Mapping[str, tuple[tuple[str, str, dict[str, Any]], ...]]] = {
    "model": (
        ("--tokenizer", "a hub name, a local folder, or builtin:qwen3.6", {"metavar": "NAME_OR_FOLDER"}),
        ("--revision", "branch, tag or commit of a hub name", {"metavar": "R"}),
        ("--chat-template", "this template instead of the tokenizer's", {"metavar": "FILE"}),
        ("--template-arg", "what the template is given; JSON where it parses, else text", {"metavar": "k=v", **_LIST}),
        ("--chat-template-kwargs", "the same as one object", {"metavar": "JSON"}),
        ("--date", "today, for templates that ask the clock", {"metavar": "YYYY-MM-DD"}),
        ("--trust-remote-code", "let the tokenizer's folder run code of its own", _FLAG),
    ),
    "rows": (
        ("--shape", "read every row as this shape", {"choices": CHOICES["shape"]}),
        ("--field", "where a row holds what is read", {"metavar": "messages=my.path", **_LIST}),
        ("--role-map", "take one role for another", {"metavar": "developer=system", **_LIST}),
        ("--keep", "carry this field of the row into the output", {"metavar": "FIELD", **_LIST}),
    ),
    "mask": (
        ("--turns", "which replies are trained; expand: each one in a row of its own", {"choices": CHOICES["turns"]}),
        ("--no-train-think-open", "leave out <think> and its newline", _FLAG),
        ("--no-train-reasoning", "leave out the reasoning", _FLAG),
        ("--no-train-tool-calls", "leave out tool calls", _FLAG),
        ("--no-train-end", "leave out the token that ends a turn", _FLAG),
        ("--train-empty-think", "train empty think blocks", _FLAG),
        ("--control-tokens", "what control tokens typed in a text are", {"choices": CHOICES["control_tokens"]}),
        ("--truncated-completions", "replies cut by the length limit", {"choices": CHOICES["truncated_completions"]}),
    ),
    "size": (
        ("--max-length", "the most tokens of a row", {"metavar": "N", "type": int}),
        ("--over-length", "what becomes of longer rows", {"choices": CHOICES["over_length"]}),
        ("--min-loss-tokens", "reject rows with fewer trained tokens", {"metavar": "N", "type": int}),
    ),
    "engine": (
        ("--engine", "auto: gigatoken where it agrees with transformers", {"choices": CHOICES["engine"]}),
        ("--verify-share", "share of the rows that both engines encode", {"metavar": "SHARE", "type": float}),
    ),
    "cluster": (
        ("--workers", "processes (default: cores)", {"metavar": "N", "type": int}),
        ("--scheduler", "use this Dask cluster, tcp://HOST:PORT or tls://HOST:PORT", {"metavar": "URL"}),
        ("--memory-limit", "of each worker (default: its share of the machine)", {"metavar": "SIZE"}),
        ("--partition-bytes", "input of one task, and so of one part", {"metavar": "SIZE"}),
        ("--read-concurrency", "requests at once in all", {"metavar": "N", "type": int}),
        ("--dashboard-address", "where Dask's dashboard listens", {"metavar": "HOST:PORT"}),
        ("--no-dashboard", "start none", _FLAG),
        ("--tls", "encrypt between the processes of --workers", _FLAG),
        ("--profile-report", "write Dask's performance report there", {"metavar": "FILE"}),
    ),
    "faults": (
        ("--on-error", "fail: stop at the first bad row", {"choices": CHOICES["on_error"]}),
        ("--max-reject-share", "exit 1 where more of the rows are rejected", {"metavar": "SHARE", "type": float}),
        ("--overwrite", "replace what another configuration or input left in OUTPUT", _FLAG),
        ("--take-over", "do not wait for a run that seems to hold OUTPUT", _FLAG),
    ),
    "storage": (
        ("--endpoint-url", "of an S3 store other than AWS", {"metavar": "URL"}),
        ("--profile", "profile of the AWS configuration", {"metavar": "P"}),
        ("--anon", "without credentials", _FLAG),
        ("--storage-option", "for fsspec; credentials are refused", {"metavar": "k=v", **_LIST}),
    ),
    "output": (("--layout", "columns; only default is built yet", {"choices": CHOICES["layout"]}),),
}

PAIRS: Final = ("template_arg", "field", "role_map", "storage_option")


def output_parser(command: str, description: str) -> Parser:
    """The parser of the commands that take an OUTPUT and the options of storage."""
    parser = Parser(prog=f"etl {command}", description=description, allow_abbrev=False)
    parser.add_argument("output", metavar="OUTPUT", help="e.g. s3://bucket/tokens/")
    _add_group(parser, "storage")
    _add_display(parser.add_argument_group("all"))
    return parser


def parse_output(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The flags of `output_parser`, and those of storage as `check` and `report` take them."""
    flags = parser.parse_args(list(words))
    names = (_option(flag) for flag, _, _ in GROUPS["storage"])
    options = {name: getattr(flags, name) for name in names}
    options["storage_option"] = _pairs("storage_option", flags.storage_option or ())
    return flags, options


def _add_group(parser: Parser, title: str) -> None:
    group = parser.add_argument_group(title)
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    for flag, text, settings in GROUPS[title]:
        default = defaults[_option(flag)]
        is_said = isinstance(default, str | int | float) and not isinstance(default, bool)
        group.add_argument(flag, help=f"{text} (default {default})" if is_said else text, **settings)


def _option(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _add_display(group: Any) -> None:
    for flag, text in (("json", "last line of stdout"), ("debug", "show tracebacks"), ("quiet", "only errors")):
        group.add_argument(f"--{flag}", action="store_true", default=False, help=text)


def run_parser(prog: str, urls: str = "INPUT [INPUT …] OUTPUT", groups: Sequence[str] = tuple(GROUPS)) -> Parser:
    """The parser of `run` and of the commands that take its options, or some groups of them."""
    parser = Parser(prog=prog, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("urls", nargs="*", metavar=urls, default=[])
    for title in groups:
        _add_group(parser, title)
    group = parser.add_argument_group("all")
    group.add_argument("--config", metavar="FILE.yaml", help="the same names with _; flags win")
    _add_display(group)
    return parser


def parse_run(words: Sequence[str], prog: str) -> tuple[RunConfig, argparse.Namespace]:
    """Arguments and `--config` file -> the checked configuration, and the flags that concern the terminal alone."""
    flags = run_parser(prog).parse_intermixed_args(list(words))
    urls, options = _read_options(flags)
    if len(urls) == 1 and not options.get("input"):
        raise UsageError(f"name INPUT and OUTPUT; only {urls[0]!r} was given")
    if urls:
        options |= {"input": urls[:-1] or options["input"], "output": urls[-1]}
    return RunConfig(**{"input": (), **options}), flags


def parse_preview(words: Sequence[str]) -> tuple[RunConfig, argparse.Namespace]:
    """As `parse_run`; every URL is an INPUT."""
    parser = run_parser("etl preview", "INPUT", ("model", "rows", "mask", "size", "storage"))
    group = parser.add_argument_group("what to show")
    group.add_argument("-n", dest="rows", metavar="N", type=int, default=3, help="rows from the first on (default 3)")
    group.add_argument("--row", metavar="N", type=int, default=None, help="line N of INPUT alone, from 1 on")
    group.add_argument("--html", metavar="FILE", default=None, help="write one self-contained page as well")
    flags = parser.parse_intermixed_args(list(words))
    urls, options = _read_options(flags)
    return RunConfig(**{"input": (), **options, **({"input": urls} if urls else {})}), flags


def _read_options(flags: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The URLs, and the options of the configuration from `--config` and, which win, from flags."""
    known = {f.name for f in dataclasses.fields(RunConfig)}
    given = {name: value for name, value in vars(flags).items() if name in known}
    options = _read_config_file(flags.config) if hasattr(flags, "config") else {}
    options |= {name: _pairs(name, value) if name in PAIRS else value for name, value in given.items()}
    if "chat_template_kwargs" in given:
        options["chat_template_kwargs"] = _json_object(given["chat_template_kwargs"])
    if not options.get("tokenizer"):
        raise UsageError("name a --tokenizer: a hub name such as Qwen/Qwen3.6-27B, a local folder, or builtin:qwen3.6")
    return flags.urls, options


def _read_config_file(path: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:  # whose text quotes the line, which may hold a secret
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"--config {path}: {line}{error.problem}; write option: value lines") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from error
    known = {f.name for f in dataclasses.fields(RunConfig)}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UsageError(f"--config {path}: write option: value lines")
    if unknown := sorted(set(values) - known):
        raise UsageError(f"--config {path}: unknown option {unknown[0]!r}; the names are the flags' with _")
    try:
        RunConfig(**{"input": "any", **values})
    except UsageError as error:
        raise UsageError(f"--config {path}: {error}") from error
    return values


def _pairs(name: str, words: Sequence[str]) -> dict[str, Any]:
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            seen = "" if name == "storage_option" else f", not {word!r}"
            raise UsageError(f"--{name.replace('_', '-')} needs key=value{seen}")
        pairs[key] = _json_or_text(value) if name in {"template_arg", "storage_option"} else value
    return pairs


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except ValueError:
        return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")  # which Python would read


def _json_object(text: str) -> dict[str, Any]:
    value = _json_or_text(text)
    if not isinstance(value, dict):
        raise UsageError(f"--chat-template-kwargs {text!r} is not a JSON object")
    return value


# --- what the user sees ------------------------------------------------------------------------------------------


class ProgressWatcher(Watcher):
    """A progress bar on standard error; where that is no terminal, a plain line every few seconds."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar: Progress | None = None
        self.rows = self.tokens = self.done = self.total = 0
        self.began = self.said = time.monotonic()

    def say(self, text: str) -> None:
        """One line above the bar."""
        self._print(text)

    def warn(self, text: str) -> None:
        """As `say`, in red."""
        self._print(f"WARNING: {text}", "bold red")

    def _print(self, text: str, style: str | None = None) -> None:
        with contextlib.suppress(OSError):  # a terminal that has gone, or a full disk under a log, does not end a run
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def start(self, total: int, done: int) -> None:
        """Show how much there is."""
        self.total, self.done, self.began = total, done, time.monotonic()
        self.say(f"{total} partitions, {done} done before")
        if self.console.is_terminal and total > done:
            columns = (TextColumn("tokenize"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.description}"), console=self.console)
            self.bar.start()
            self.bar.add_task("", total=total, completed=done)

    def advance(self, receipt: Mapping[str, Any]) -> None:
        """One more partition."""
        self.rows, self.tokens, self.done = self.rows + receipt["rows"], self.tokens + receipt["tokens"], self.done + 1
        seconds = max(time.monotonic() - self.began, 1e-9)
        speed = f"{self.rows / seconds:,.0f} rows/s, {self.tokens / seconds / 1e6:.2f} M tokens/s"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done, description=speed)
        elif time.monotonic() - self.said > PLAIN_PROGRESS_SECONDS:
            self.said = time.monotonic()
            self.say(f"{self.done} of {self.total} partitions, {speed}")

    def finish(self) -> None:
        """Take the bar down."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.stop()


def print_line(text: str) -> None:
    """One line on standard output, at once."""
    print(text, flush=True)


def print_preview(found: Any) -> None:
    """Rows token by token; in colour where the terminal has some and NO_COLOR is not set."""
    from rich.text import Text

    from etl.viewer import text_lines

    out = Console(highlight=False, soft_wrap=True)
    for line in text_lines(found, colour=out.color_system is not None and not out.no_color):
        out.print(Text.assemble(*line))


def print_plan(found: Any) -> None:
    """What a run would do, for people."""
    print(found)
    if found.warning:
        print(f"WARNING: {found.warning}")
