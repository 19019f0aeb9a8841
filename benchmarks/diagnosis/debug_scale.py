"""Time and memory of the analyzer on large jobs: `python -m benchmarks.diagnosis.debug_scale`.

Full Flight Recorder dumps in the layout of torch 2.13, ten frames a call. As in torch, each distinct frame is stored
once and referenced, and unreferenced objects have no memo entry (130 bytes an operation; a real gloo dump of 2,000
operations takes 265 kB). Each file is written once per kind of rank and linked under every rank's name to save disk
space; it is still read and parsed in full for each rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle  # written here, read by the analyzer's own safe reader
import pickletools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from titan_ckpt.debug.incident.black_box import (
    CAPACITY,
    COUNT,
    COUNT_AT,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    HEARTBEAT_AT,
    MAGIC,
    RECORD,
    TEXT_DIGEST_AT,
    TEXT_END,
    TEXT_USED,
    TEXT_USED_AT,
    file_size,
    pack_members,
)
from tools.report import Measurement, write_section

GROUP = ("0", "default_pg")


@functools.cache
def frame(depth: int, layer: int) -> dict[str, Any]:
    """One frame; the same object for the same location, so that the pickle stores a reference."""
    return {"name": f"call_{depth}_{layer}", "filename": f"/app/train/layer_{depth}.py", "line": 100 + layer + depth}


def entry(number: int, seq: int, members: int) -> dict[str, Any]:
    """One entry as torch writes it; sizes and call sites repeat as a training step's do."""
    layer = number % 40
    return {
        "frames": [frame(depth, layer if depth < 5 else 0) for depth in range(10)],
        "record_id": number,
        "pg_id": 0,
        "process_group": GROUP,
        "thread_name": "pt_main_thread",
        "thread_id": "139691678423936",
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:_all_gather_base" if layer % 2 else "nccl:_reduce_scatter_base",
        "time_created_ns": 1_795_226_821_000_000_000 + seq * 1_000_000,
        "input_sizes": [[4096, 128 + layer]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096 * members, 128 + layer]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": 1_795_226_821_000_100_000 + seq * 1_000_000,
        "time_discovered_completed_ns": 1_795_226_821_000_200_000 + seq * 1_000_000,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }


def write_dumps(folder: Path, ranks: int, entries: int) -> None:
    """Dumps of a job in which the rank in the middle did not issue the last operation."""
    first = 100_000
    members = str(list(range(ranks)))
    config = {GROUP[0]: {"name": GROUP[0], "desc": GROUP[1], "ranks": members}}
    rows = [entry(first + i, first + i, ranks) for i in range(entries)]
    rows[-1] |= {"state": "started", "retired": False, "time_discovered_completed_ns": None}
    for name, some in (("most", rows), ("late", rows[:-1])):
        raw = pickle.dumps({"version": "2.10", "pg_config": config, "entries": some}, protocol=2)
        (folder / name).write_bytes(pickletools.optimize(raw))
    for rank in range(ranks):
        os.link(folder / ("late" if rank == ranks // 2 else "most"), folder / f"rank_{rank}")
    for name in ("most", "late"):
        (folder / name).unlink()


def write_boxes(folder: Path, ranks: int, operations: int) -> None:
    """Black boxes with a full ring, of a job in which the rank in the middle did not issue the last operation."""
    tables: list[list[Any]] = [
        ["op", i, name] for i, name in enumerate(("all_gather_into_tensor", "reduce_scatter_tensor"))
    ]
    tables += [["dtype", 0, "BFloat16"], ["group", 0, ["0", "default_pg", pack_members(range(ranks))]]]
    tables += [
        ["site", i, [[f"/app/train/layer_{depth}.py", 100 + i, f"call_{i}"] for depth in range(6)]]
        for i in range(1, 41)
    ]
    text = b"".join(json.dumps(row).encode() + b"\n" for row in tables)
    now = time.time_ns()
    records = [
        RECORD.pack(now + n * 1000, now + n * 1000 + 1, 4096, n, n % 40 + 1, -1, 0, n % 2, 0, 0, 1, n)
        for n in range(1, operations + 1)
    ]
    records[-1] = RECORD.pack(now, 0, 4096, operations, 1, -1, 0, operations % 2, 0, 0, 0, operations)
    body = bytearray(file_size(CAPACITY))
    for position, record in enumerate(records[-CAPACITY:], len(records) - min(len(records), CAPACITY)):
        at = HEADER_BYTES + position % CAPACITY * RECORD.size
        body[at : at + RECORD.size] = record
    text_at = HEADER_BYTES + CAPACITY * RECORD.size
    TEXT_USED.pack_into(body, TEXT_USED_AT, len(text))
    body[TEXT_DIGEST_AT:TEXT_END] = xxhash.xxh3_128(text).digest()
    COUNT.pack_into(body, COUNT_AT, operations)
    HEARTBEAT.pack_into(body, HEARTBEAT_AT, 7, 3, now, now, 0)
    last_at = HEADER_BYTES + (operations - 1) % CAPACITY * RECORD.size
    for rank in range(ranks):
        HEADER.pack_into(body, 0, MAGIC, rank, ranks, 1000 + rank, CAPACITY, operations, now)
        body[last_at : last_at + RECORD.size] = bytes(RECORD.size) if rank == ranks // 2 else records[-1]
        with open(folder / f"rank_{rank:05d}.box", "wb") as file:
            file.write(body[: HEADER_BYTES + min(operations, CAPACITY) * RECORD.size])
            file.seek(text_at)
            file.write(text)
            file.truncate(len(body))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Time and memory of one diagnosis."""

    seconds: float
    cpu_s: float
    megabytes: float
    verdict: str

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s ({self.cpu_s:.2f} s of CPU), {self.megabytes:.0f} MB"


def measure(folder: Path) -> Figures:
    """One diagnosis in its own process, from its first import on."""
    code = (
        "import resource,sys,time; t=time.perf_counter()\n"
        "from titan_ckpt.debug import diagnose, open_run\n"
        f"top = diagnose(open_run({str(folder)!r}))[0]\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
        "print(time.perf_counter() - t, time.process_time(), peak, top.verdict, top.culprits)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, cpu, megabytes, verdict = result.stdout.split(maxsplit=3)
    return Figures(seconds=float(seconds), cpu_s=float(cpu), megabytes=float(megabytes), verdict=verdict.strip())


def run(write: Callable[[Path, int, int], None], ranks: int, operations: int, rounds: int) -> Figures:
    """The fastest of `rounds` diagnoses (the first one warms the page cache)."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if write is write_boxes and os.path.isdir("/dev/shm") else None
    ) as scratch:
        write(Path(scratch), ranks, operations)
        figures = min((measure(Path(scratch)) for _ in range(rounds)), key=lambda figures: figures.seconds)
    sys.stderr.write(f"{write.__name__} {ranks} x {operations}: {figures}\n")
    return figures


def run_peer(ranks: int, entries: int) -> Figures:
    """torchfrtrace on the same dumps."""
    with tempfile.TemporaryDirectory() as scratch:
        write_dumps(Path(scratch), ranks, entries)
        command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", scratch, "-p", "rank_"]
        started = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
        seconds = time.perf_counter() - started
    figures = Figures(
        seconds=seconds, cpu_s=usage.ru_utime + usage.ru_stime, megabytes=usage.ru_maxrss / 1e3, verdict=last
    )
    sys.stderr.write(f"torchfrtrace {ranks} x {entries}: {figures}, exit {process.returncode}: {last[:200]}\n")
    return figures


# A one-rank group with a no-op all_reduce leaves only torch's Python code to time, with and without the box.
BOX_COST = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from titan_ckpt.debug.record.hooks import BoxWriter, Hooks
folder = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
tensor = torch.zeros(1024)
work = dist.all_reduce(tensor, async_op=True)
work.wait()
kept = dist.ProcessGroup.allreduce, dist.Work.wait
dist.ProcessGroup.allreduce = lambda group, *args, **kwargs: work
dist.Work.wait = lambda work, *args, **kwargs: True
def once(calls=500):
    started = time.perf_counter_ns()
    for _ in range(calls):
        dist.all_reduce(tensor)
    return (time.perf_counter_ns() - started) / calls
bare = min(once() for _ in range(300))
hooks = Hooks(BoxWriter(folder / "rank_00000.box", rank=0, world_size=1))
hooks.install()
boxed = min(once() for _ in range(300))
hooks.remove()
dist.ProcessGroup.allreduce, dist.Work.wait = kept
dist.destroy_process_group()
print(bare, boxed)
"""


def box_cost() -> tuple[float, float]:
    """Microseconds of one blocking all_reduce's Python code without the box, and the box's overhead."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as scratch:
        command = [sys.executable, "-c", BOX_COST, scratch]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bare, boxed = (float(word) / 1e3 for word in output.split())
    sys.stderr.write(f"box: {bare:.2f} us without, {boxed:.2f} us with\n")
    return bare, boxed - bare


def main() -> int:
    """Measure, and write the table to docs/performance.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--many", type=int, default=8192, help="ranks of the larger job")
    parser.add_argument("--boxes", type=int, default=16_384)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument(
        "--no-peer", action="store_true", help="leave torchfrtrace out (4.3 GB of memory at 1,024 ranks)"
    )
    parser.add_argument("--write", action="store_true", help="write the section, not only print the figures")
    given = parser.parse_args()
    cost = box_cost()
    boxes = run(write_boxes, given.boxes, 300, 3)
    dumps = run(write_dumps, given.ranks, given.entries, 1)
    peer = None if given.no_peer else run_peer(given.ranks, given.entries)
    many = run(write_dumps, given.many, given.entries, 1)
    if given.write:
        bars = [*_dump_bars(given, dumps, many, peer), *_box_bars(given, boxes, cost)]
        write_section("debug-scale", f"Diagnosing {given.ranks:,} ranks and more", bars, NOTES)
    return 0


def _dump_bars(given: argparse.Namespace, dumps: Figures, many: Figures, peer: Figures | None) -> list[Measurement]:
    size, larger = f"{given.ranks:,} ranks x {given.entries:,}", f"{given.many:,} ranks x {given.entries:,}"
    return [
        Measurement(what=f"full dumps, {size}: time", figure=str(dumps), bar="<= 8 s", holds=dumps.seconds <= 8,
            peer=str(peer or "not run")),
        Measurement(what=f"full dumps, {size}: memory", figure=f"{dumps.megabytes:.0f} MB", bar="<= 200 MB",
            holds=dumps.megabytes <= 200, peer=f"{peer.megabytes:.0f} MB" if peer else "not run"),
        Measurement(what=f"full dumps, {larger}: time", figure=str(many), bar="<= 60 s", holds=many.seconds <= 60),
    ]  # fmt: skip


def _box_bars(given: argparse.Namespace, boxes: Figures, cost: tuple[float, float]) -> list[Measurement]:
    size = f"{given.boxes:,} ranks"
    return [
        Measurement(what=f"black boxes, {size}: time, warm", figure=str(boxes), bar="<= 1 s", holds=boxes.seconds <= 1),
        Measurement(what=f"black boxes, {size}: memory", figure=f"{boxes.megabytes:.0f} MB", bar="<= 150 MB",
            holds=boxes.megabytes <= 150),
        Measurement(what="the box's cost of one operation, its end included", figure=f"{cost[1]:.2f} us", bar="<= 1 us",
            holds=cost[1] <= 1, peer=f"torch's own Python code of all_reduce: {cost[0]:.2f} us"),
    ]  # fmt: skip


NOTES = """\
From the first import to the verdict, in a process of its own, on one core. Dumps have the shape that torch 2.13 writes: each
distinct frame once. (Pickles that spell out every frame again are five times as large and take 2.5 times as long.) The peer is
torchfrtrace on the same dumps. Of each black box only the newest operations are read where there are more than 256 boxes. The
box's cost is that of a blocking all_reduce by `torch.distributed` whose work is taken out, fastest of 300 rounds of 500.
The speed of this machine varies from day to day by more than half: compare with the peer. On 2026-11-21, when all bars held, the
peer took 7.95 s and `debug` 5.76 s."""


if __name__ == "__main__":
    sys.exit(main())
