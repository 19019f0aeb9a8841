"""How long the analyzer takes on large jobs, and how much memory: `python -m benchmarks.debug_scale`.

Full Flight Recorder dumps of the shape torch 2.13 writes, ten frames a call: as there each distinct frame is stored once and
referred to, and what nothing refers to has no memo entry (130 bytes an operation; a real gloo dump of 2,000 has 265 kB).
Every file is written once per kind of rank and linked under every rank's name, so that no disk is needed; each is read and
parsed in full for each rank.
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle  # written here, read by the analyzer's own safe reader
import pickletools
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
