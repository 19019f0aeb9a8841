"""Screen response times on a large job: `python -m benchmarks.diagnosis.tui_scale [--write]`.

The job is synthetic: all ranks share one table of operations, which `debug.align` aligns as for a real
job. The logs are real files: sixteen different ones, linked under every rank's name.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pty
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from titan_ckpt.debug.diagnosis.align import lanes
from titan_ckpt.debug.diagnosis.waiting.wait_graph import wait_edges
from titan_ckpt.debug.incident.kinds import DumpKind, RankState, VerdictKind
from titan_ckpt.debug.incident.records import (
    COMPLETED,
    OPERATION,
    Dump,
    Frame,
    Group,
    Names,
    RankRecord,
    Run,
    Situation,
    Verdict,
)
from titan_ckpt.debug.incident.waits import began_ns, last_sign_ns
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import Content, find_content
from titan_ckpt.tui.data.incident import Incident
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.index import HEAD_BYTES, LogFilter, LogIndex, cheap_mask, load_logs, search
from titan_ckpt.tui.screenshot import settled
from tools.paths import INCIDENTS
from tools.report import Measurement, timed, write_section

FIXTURE = INCIDENTS / "skip"
START_NS = 1_795_226_821_000_000_000
KEYS = ("j", "k", "pagedown", "n", "l", "h", "N", "G", "g")
PAGE_LINES = 45
ASKED, ANSWER = b"\x1b[c", b"\x1b]11;rgb:0000/0000/0000\x1b\\\x1b[?62;22c"
INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}  # pip compiles what it installs
HOPS = 3  # from the app to the widget to the screen's messages; `pilot.press` would also wait for an idle CPU


def large_incident(ranks: int, operations: int) -> Incident:
    """A job in which the rank in the middle did not issue the last operation."""
    table = np.zeros(operations, OPERATION)
    table["seq"], table["state"], table["retired"] = np.arange(operations), COMPLETED, True
    table["created_ns"] = START_NS + np.arange(operations) * 1_000_000
    table["state"][-1], table["retired"][-1] = 0, False
    frame, late = Frame(file="/app/train.py", line=10, function="step"), ranks // 2
    dump = Dump(source="", kind=DumpKind.FLIGHT_RECORDER, reason="", version="2.10", num_operations=operations)
    records = {rank: RankRecord(rank=rank, operations=table, dumps=(dump,), coordinates={"dp_shard": rank // 8, "tp": rank % 8})
               for rank in range(ranks)}  # fmt: skip
    records[late] = replace(records[late], operations=table[:-1])
    members = tuple(range(ranks))
    run = Run(url="synthetic", incident="synthetic", world_size=ranks, ranks=records,
              groups=(Group(name="0", description="default_pg", members=members),),
              names=Names(ops=("all_reduce",), sizes=("64x32",), dtypes=("Float",), frames=((frame,),)))  # fmt: skip
    found = lanes(run)
    states = {rank: Situation(rank=rank, kind=RankState.ON_CPU if rank == late else RankState.IN_COLLECTIVE, frame=frame)
              for rank in range(ranks)}  # fmt: skip
    top = Verdict(verdict=VerdictKind.STUCK_ON_CPU, culprits=(late,), group="default_pg", seq=operations - 1,
                  headline=f"rank {late} is stuck", chain=tuple((rank, late) for rank in range(60)))  # fmt: skip
    return Incident(
        run=run, verdicts=(top,), lanes=tuple(found), states=states, edges=tuple(wait_edges(run, found, states)),
        began_ns=began_ns(run), last_sign_ns=last_sign_ns(run),
    )  # fmt: skip


def write_logs(folder: Path, ranks: int, lines: int) -> None:
    """About 100 bytes a line, an error among them."""
    for kind in range(min(16, ranks)):
        with (folder / f"kind{kind}").open("w") as file:
            for n in range(lines):
                second, milli = divmod(n * 7 + kind, 1000)
                text = (
                    "ERROR needle in the haystack"
                    if n == lines - 5 and kind == 3
                    else "INFO loss and throughput of a step"
                )
                stamp = f"2026-11-21 {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.{milli:03d}"
                file.write(f"{stamp} [kind{kind}] {text} step {n} loss={n / 7:.4f} tokens_per_s=81234\n")
    for rank in range(ranks):
        os.link(folder / f"kind{rank % 16}", folder / f"rank_{rank:05d}.log")
    for kind in range(min(16, ranks)):
        (folder / f"kind{kind}").unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenFigures:
    """One screen: seconds until first shown, and key latencies in excess of an unbound key's."""

    name: str
    first_s: float
    p95_s: float


async def measure_screens(content: Content, prepare: Callable[[TitanApp], None], screens: str) -> list[ScreenFigures]:
    """Press each of KEYS ten times per screen; latency ends when every widget has handled the resulting messages."""
    app, figures = TitanApp(content), []
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        prepare(app)

        async def press(key: str) -> float:
            started = time.perf_counter()
            app.simulate_key(key)
            for _ in range(HOPS):
                await pilot._wait_for_screen()
            return time.perf_counter() - started

        for number in screens:
            floor = statistics.median([await press("f9") for _ in range(20)])
            first = await press(number) - floor
            await settled(app, pilot)
            taken = sorted([await press(key) - floor for _ in range(10) for key in KEYS])
            figures.append(ScreenFigures(name=app.pane.label, first_s=first, p95_s=taken[int(len(taken) * 0.95)]))
            sys.stderr.write(f"{figures[-1]} floor {floor:.4f}\n")
    return figures


def resident_mb() -> float:
    """Current resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure_grid(ranks: int, operations: int) -> tuple[list[ScreenFigures], float, float]:
    """The incident's screens; resident memory with the aligned operations loaded, and the screens' addition."""
    incident = large_incident(ranks, operations)
    aligned = resident_mb()

    def prepare(app: TitanApp) -> None:
        app.session.incident.value = incident
        app.session.incident.version += 1
        app.pane.update_rows(force=True)

    figures = asyncio.run(measure_screens(find_content(str(FIXTURE)), prepare, "213462"))
    return figures, aligned, resident_mb() - aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFigures:
    """Seconds, unless the name gives another unit."""

    first_page_s: float
    whole_s: float
    jump_s: float
    first_match_s: float
    search_s: float
    lines: int
    index_mb: float
    screen: ScreenFigures


def measure_logs(ranks: int, lines: int) -> LogFigures:
    """A first page from the heads, the whole index, a jump with its page, a search."""
    with tempfile.TemporaryDirectory() as scratch:
        write_logs(Path(scratch), ranks, lines)
        started = time.perf_counter()
        content = find_content(scratch)
        files = LogFiles(open_store(scratch), content.logs)
        read_page(load_logs(files, head_bytes=HEAD_BYTES), 0)
        first_page_s, before = time.perf_counter() - started, resident_mb()
        found: list[LogIndex] = []
        whole_s = timed(lambda: found.append(load_logs(files)))
        index, index_mb = found[0], resident_mb() - before
        middle = index.first_ms + int(index.time_ms.max()) // 2
        jump_s = timed(lambda: read_page(index, index.place_of_time(middle, index.order)))
        started, first_match_s = time.perf_counter(), 0.0
        for _, mask in search(index, "needle", cheap_mask(index, LogFilter())):
            first_match_s = first_match_s or (time.perf_counter() - started if mask.any() else 0.0)
        search_s = time.perf_counter() - started

        def prepare(app: TitanApp) -> None:
            app.session.logs.value = index
            app.session.logs.version += 1

        alone = replace(content, logs=(), has_evidence=False)
        screens = asyncio.run(measure_screens(alone, prepare, "5"))
        files.close()
    return LogFigures(first_page_s=first_page_s, whole_s=whole_s, jump_s=jump_s, first_match_s=first_match_s,
                      search_s=search_s, lines=len(index), index_mb=index_mb, screen=screens[0])  # fmt: skip


def read_page(index: LogIndex, place: int) -> None:
    """Read the lines that one screen shows."""
    for line in index.order[place : place + PAGE_LINES].tolist():
        index.read(line)


def start_up() -> float:
    """Seconds from the command to the first paint in a pseudo-terminal, which says what it is at once, as xterm does."""
    master, slave = pty.openpty()
    started, seen, has_answered = time.perf_counter(), b"", False
    command = [sys.executable, "-m", "titan_ckpt", "tui", str(FIXTURE)]
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **INSTALLED, "TERM": "xterm"}
    ) as process:
        os.close(slave)
        while b"Overview" not in seen:
            if select.select([master], [], [], 1)[0]:
                seen += os.read(master, 65536)
            if not has_answered and ASKED in seen:
                has_answered = os.write(master, ANSWER) > 0
        taken = time.perf_counter() - started
        os.write(master, b"q")
        with contextlib.suppress(OSError):
            while process.poll() is None:
                os.read(master, 65536)
    os.close(master)
    return taken


def imports_torch() -> bool:
    """Whether the screens import torch."""
    code = "import sys, titan_ckpt.tui.app; print('torch' in sys.modules)"
    return (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "True"
    )


def main() -> int:
    """Measure, and write the table to docs/performance.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--operations", type=int, default=2_000)
    parser.add_argument("--logs", type=int, default=1_024)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--write", action="store_true", help="write the section, not only print the figures")
    given = parser.parse_args()
    starts = [start_up() for _ in range(6)][1:]  # the first may have to compile
    screens, aligned_mb, screens_mb = measure_grid(given.ranks, given.operations)
    logs = measure_logs(given.logs, given.lines)
    sys.stderr.write(f"{starts} {logs}\n")
    sys.stderr.write(f"{aligned_mb:.0f} MB aligned, {screens_mb:.0f} MB screens\n")
    if given.write:
        size = f"{given.ranks:,} ranks x {given.operations:,}"
        bars = [*_screen_bars(size, screens, aligned_mb, screens_mb), *_log_bars(logs), *_start_bars(starts)]
        write_section("tui-scale", f"The terminal screens at {size} operations", bars, NOTES)
    return 0


def _screen_bars(size: str, screens: list[ScreenFigures], aligned_mb: float, screens_mb: float) -> list[Measurement]:
    first = {figure.name: figure for figure in reversed(screens)}.values()
    bars = [Measurement(what=f"{f.name}: first paint", figure=f"{f.first_s * 1e3:.0f} ms", bar="< 500 ms", holds=f.first_s < 0.5)
            for f in first]  # fmt: skip
    bars += [Measurement(what=f"{f.name}: a key, p95", figure=f"{f.p95_s * 1e3:.0f} ms", bar="< 50 ms", holds=f.p95_s < 0.05)
             for f in screens[1:]]  # fmt: skip
    total = aligned_mb + screens_mb
    figure = f"{total:.0f} MB ({aligned_mb:.0f} MB of them before the screens)"
    return [*bars, Measurement(what=f"memory, {size}", figure=figure, bar="< 300 MB", holds=total < 300)]


def _log_bars(logs: LogFigures) -> list[Measurement]:
    return [
        Measurement(what=f"logs, {logs.lines:,} lines: first page", figure=f"{logs.first_page_s:.2f} s", bar="< 1 s",
            holds=logs.first_page_s < 1),
        Measurement(what="logs: jump to a time, page read", figure=f"{logs.jump_s * 1e3:.1f} ms", bar="< 300 ms",
            holds=logs.jump_s < 0.3),
        Measurement(what="logs: first match, whole search", figure=f"{logs.first_match_s:.2f} s, {logs.search_s:.2f} s",
            bar="streams", holds=logs.first_match_s < logs.search_s),
        Measurement(what="logs: all lines merged, in the background", figure=f"{logs.whole_s:.1f} s, {logs.index_mb:.0f} MB",
            bar="< 300 MB", holds=logs.index_mb < 300),
        Measurement(what="logs: a key, p95", figure=f"{logs.screen.p95_s * 1e3:.0f} ms", bar="< 50 ms",
                    holds=logs.screen.p95_s < 0.05),
    ]  # fmt: skip


def _start_bars(starts: list[float]) -> list[Measurement]:
    best = min(starts)
    figure = f"{best:.2f} s (median of {len(starts)}: {statistics.median(starts):.2f} s)"
    loaded = imports_torch()
    return [
        Measurement(
            what="command to first paint, fastest; torch not imported",
            figure=figure,
            bar="< 1.2 s",
            holds=best < 1.2 and not loaded,
        )
    ]


NOTES = """\
First paint is of a screen over data that is loaded; a heatmap above a million operations is made in a thread, and its screen
says so until then. Keys are j, k, page down, n, l, h, N, G and g, ten times each, less the median of a key that does nothing.
Not in these figures: reading such a job. The ranks share one table of operations; tables of their own would take 55 bytes an
operation, 1.8 GB at this size (of more than 256 black boxes only the newest operations are read, which bounds that). What it
costs to read large jobs is in the section on diagnosing. Log files are of 16 contents, linked: the page cache is warm."""


if __name__ == "__main__":
    sys.exit(main())
