"""How long the analyzer takes on large jobs, and how much memory: `python -m benchmarks.debug_scale`.

Full Flight Recorder dumps of the shape torch 2.13 writes, ten frames a call: as there each distinct frame is stored once and
referred to, and what nothing refers to has no memo entry (130 bytes an operation; a real gloo dump of 2,000 has 265 kB).
Every file is written once per kind of rank and linked under every rank's name, so that no disk is needed; each is read and
parsed in full for each rank.
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
from pathlib import Path
from typing import Any

from titan_ckpt.debug.blackbox import (
    CAPACITY,
    COUNT,
    COUNT_AT,
    HEADER,
    HEADER_BYTES,
    HEARTBEAT,
    HEARTBEAT_AT,
    MAGIC,
    RECORD,
    TEXT_USED,
    TEXT_USED_AT,
    file_size,
    pack_members,
)

GROUP = ("0", "default_pg")


@functools.cache
def frame(depth: int, layer: int) -> dict[str, Any]:
    """One frame; the same object for the same place, so that the pickle refers to it."""
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


def measure(folder: Path) -> tuple[float, float, float, str]:
    """Seconds, seconds of CPU, peak MB and the verdict of one diagnosis in a process of its own, from its first line on."""
    code = (
        "import resource,sys,time; t=time.perf_counter()\n"
        "from titan_ckpt.debug import diagnose, open_run\n"
        f"top = diagnose(open_run({str(folder)!r}))[0]\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3\n"
        "print(time.perf_counter() - t, time.process_time(), peak, top.verdict, top.culprits)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, cpu, megabytes, verdict = result.stdout.split(maxsplit=3)
    return float(seconds), float(cpu), float(megabytes), verdict.strip()


def main() -> int:
    """Print one line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024")
    parser.add_argument("--entries", type=int, default=2000)
    given = parser.parse_args()
    for ranks in map(int, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as scratch:
            write_dumps(Path(scratch), ranks, given.entries)
            seconds, cpu, megabytes, verdict = measure(Path(scratch))
        sys.stdout.write(
            f"{ranks:6} ranks x {given.entries}: {seconds:6.2f} s ({cpu:.2f} s of CPU)  {megabytes:6.0f} MB  {verdict}\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
