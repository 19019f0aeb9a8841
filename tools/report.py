"""Shared by all benchmarks: interleaved runs, medians, and sections of docs/performance.md."""

from __future__ import annotations

import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from tools.paths import DOCS

TAKEN_NOTE = (
    "Before each measure that writes, twice the bytes that it is about to take are written and deleted: to get memory back from\n"
    "the host of a virtual machine can cost more than all the rest."
)
LET_GO_S = 3.0  # the kernel returns freed memory after 2 s
PERFORMANCE = DOCS / "performance.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of a section: a measured figure and the bar it must reach."""

    what: str
    figure: str
    bar: str
    holds: bool
    peer: str = ""


def interleave(cases: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Run each case once per round, in turn, so that noise hits all alike; the returned values by case."""
    results: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, case in cases.items():
            results[name].append(case())
            sys.stderr.write(f"\rround {number + 1}/{rounds} {name:<40}")
    sys.stderr.write("\n")
    return results


def timed(action: Callable[[], object]) -> float:
    """Run `action`; the seconds it took."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def take_memory(folder: Path, size_bytes: int) -> None:
    """Write and delete a file of twice `size_bytes` in `folder`, so that the next measurement finds `size_bytes` of free memory.

    A virtual machine returns freed memory to its host within seconds (Linux: mm/page_reporting.c), and getting it back can cost
    ten times a copy. The wait lets the kernel return earlier memory before the measurement instead of during it; twice the size,
    because the kernel returns part of the deleted file at once.
    """
    time.sleep(LET_GO_S)
    block, path = bytes(4 << 20), folder / "memory"
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-2 * size_bytes // len(block))):
            file.write(block)
    path.unlink()


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """Median with the range, in seconds."""
    return f"{median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"


def machine() -> str:
    """Date, processor count and versions."""
    import torch

    day = time.strftime("%Y-%m-%d")
    return f"{day}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def write_section(name: str, title: str, bars: list[Measurement], notes: str = "") -> None:
    """Print the table and put it into docs/performance.md, replacing the section's old one."""
    rows = [(b.what, b.figure, b.bar, "yes" if b.holds else "NO", b.peer) for b in bars]
    table = tabulate(rows, headers=["what", "measured", "bar", "holds", "peer in the same run"], tablefmt="github")
    replace_section(PERFORMANCE, name, f"## {title}\n\n{machine()}\n\n{table}\n\n{notes}")


def replace_section(page: Path, name: str, text: str) -> None:
    """Print `text` and replace the section `name` of `page` by it; append if there is none."""
    text = f"<!-- begin {name} -->\n{text}\n<!-- end {name} -->"
    sys.stdout.write(text + "\n")
    old = page.read_text() if page.exists() else f"# {page.stem.capitalize()}\n"
    pattern = re.compile(rf"<!-- begin {re.escape(name)} -->.*?<!-- end {re.escape(name)} -->", re.DOTALL)
    write_page(page, pattern.sub(lambda _: text, old) if pattern.search(old) else f"{old.rstrip()}\n\n{text}\n")


def write_page(page: Path, text: str) -> None:
    """Replace a page atomically."""
    new = page.with_suffix(".new")
    new.write_text(text)
    os.replace(new, page)
