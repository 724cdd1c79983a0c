"""Measured runs -> tables of plain text: medians over rounds, ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tests.bench.gauge import Measured

BUDGET: Final[Mapping[str, tuple[tuple[str, ...], float]]] = {
    "parse JSON": (("parse",), 20),
    "render": (("render",), 70),
    "UTF-8, encode, mask": (("encode",), 68),
    "Arrow + Parquet": (("table", "parquet"), 55),
    "S3 in and out": (("read", "write"), 25),
}
"""The goal of each stage in microseconds a row, and the stages of a receipt that belong to it."""

_COMPUTING: Final = ("parse", "render", "encode", "table", "parquet")


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A titled table, first column to the left, others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        print("  " + "  ".join(cells).rstrip())


def middle(runs: Sequence[Measured], value: Callable[[Measured], float]) -> float:
    """The median of a figure over the rounds."""
    return statistics.median(map(value, runs))


def show_speeds(runs: Mapping[str, Sequence[Measured]]) -> None:
    """One line a contender: speed without start-up, with it, memory, who spent the CPU."""
    head = (
        *("", "rows/s", "Mtokens/s", "MB/s", "work s", "whole s", "rows/s whole", "peak MB", "private MB"),
        *("CPU s client", "workers", "S3 server", "idle", "stolen"),
    )
    show("speed and memory (work: without start-up; whole: with it)", head, map(_speed_line, runs.values()))


def _speed_line(of_one: Sequence[Measured]) -> list[str]:
    first = of_one[0]
    work, whole = middle(of_one, lambda m: m.work), middle(of_one, lambda m: m.whole)
    spent = [f"{middle(of_one, _cpu(who)):.1f}" if who in first.cpu else "-" for who in _SPENDERS]
    shares = [f"{middle(of_one, value):.0%}" if first.cpu else "-" for value in (lambda m: m.idle, lambda m: m.stolen)]
    return [
        f"{first.name} ({first.rows:,} rows)",
        f"{first.rows / work:,.0f}",
        f"{first.tokens / work / 1e6:.2f}",
        f"{first.bytes / work / 1e6:.1f}",
        f"{work:.1f}",
        f"{whole:.1f}",
        f"{first.rows / whole:,.0f}",
        f"{middle(of_one, lambda m: m.peak) / 1e6:,.0f}",
        f"{middle(of_one, lambda m: m.private) / 1e6:,.0f}",
        *spent,
        *shares,
    ]


_SPENDERS: Final = ("client", "workers", "server")


def ratios(one: Sequence[Measured], other: Sequence[Measured]) -> str:
    """How many times the rows a second of `other` is `one`, in each round and the median; then with start-up."""
    pairs = list(zip(one, other, strict=True))
    each = [a.speed / b.speed for a, b in pairs]
    whole = [a.rows / a.whole / (b.rows / b.whole) for a, b in pairs]
    said = ", ".join(f"{ratio:.1f}" for ratio in each)
    return f"{statistics.median(each):.2f}x (rounds {said}; with start-up {statistics.median(whole):.1f}x)"


def show_stages(runs: Mapping[str, Sequence[Measured]]) -> None:
    """Wall microseconds a row by stage, summed over workers, beside the goal; then CPU by who spent it."""
    every = tuple(name for names, _ in BUDGET.values() for name in names)

    def line(title: str, goal: float | None, value: Callable[[Measured], float]) -> list[str]:
        wanted = "" if goal is None else f"{goal:.0f}"
        return [title, wanted, *(f"{middle(of_one, value):.1f}" for of_one in runs.values())]

    lines = [
        *(line(stage, goal, _micros(names)) for stage, (names, goal) in BUDGET.items()),
        line("all", sum(goal for _, goal in BUDGET.values()), _micros(every)),
        *(line(f"  of it {name}", None, _micros((name,))) for name in every),
        *(line(f"CPU {who}", None, _per_row(_cpu(who))) for who in _SPENDERS),
    ]
    show("by stage, us a row (wall in the workers; read and write lie beside the rest)", ["", "goal", *runs], lines)


def _micros(names: Sequence[str]) -> Callable[[Measured], float]:
    return _per_row(lambda m: sum(m.stages.get(name, 0.0) for name in names))


def _per_row(seconds: Callable[[Measured], float]) -> Callable[[Measured], float]:
    return lambda m: seconds(m) / m.rows * 1e6


def _cpu(who: str) -> Callable[[Measured], float]:
    return lambda m: m.cpu[who]


def waiting(run: Measured, workers: int) -> float:
    """The share of wall time in which a worker neither computed nor compressed: it read, wrote, or had no task.

    With fewer workers than cores the two lie beside each other, and this says nothing.
    """
    return 1 - sum(run.stages.get(name, 0.0) for name in _COMPUTING) / (workers * run.work)


def show_scale(runs: Mapping[int, Sequence[Measured]]) -> None:
    """Time and memory against the amount of data, as multiples of the least."""
    least = runs[min(runs)]
    lines = [
        [
            f"{times}x ({of_one[0].rows:,} rows, {of_one[0].bytes / 1e6:,.0f} MB)",
            f"{middle(of_one, lambda m: m.work):.2f}",
            f"{statistics.median(a.work / b.work for a, b in zip(of_one, least, strict=True)):.2f}",
            f"{middle(of_one, lambda m: m.peak) / 1e6:,.0f}",
            f"{middle(of_one, lambda m: m.private) / 1e6:,.0f}",
        ]
        for times, of_one in runs.items()
    ]
    show("more data, 2 workers", ["", "work s", "times the least", "peak MB", "private MB"], lines)
