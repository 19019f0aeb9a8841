"""Save and load on a local disk beside torch DCP: stall, sync save, load, memory, training rate while uploading.

python -m benchmarks.checkpoints.core_local [--size 1.0] [--rounds 5] [--dir DIR] [--pace 100]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.checkpoints.states import make_state, tensors_of
from benchmarks.checkpoints.training_rate import bench_rate
from titan_ckpt.loading.load import load, open_checkpoint
from titan_ckpt.saving.saver import Saver, save
from titan_ckpt.state.state_dict import as_bytes
from tools.report import TAKEN_NOTE, Measurement, interleave, median, spread, take_memory, timed, write_section


def raw_write(tensors: list[torch.Tensor], path: Path) -> None:
    """Lower bound for a durable save: write the bytes and fsync."""
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            view, done = as_bytes(tensor), 0
            while done < len(view):
                done += file.write(view[done : done + (16 << 20)])
        os.fsync(file.fileno())


def raw_read(tensors: list[torch.Tensor], path: Path) -> None:
    """Lower bound for a load: readinto."""
    with open(path, "rb", buffering=0) as file:
        for tensor in tensors:
            view, done = as_bytes(tensor), 0
            while done < len(view):
                done += file.readinto(view[done:])


def clear_steps(run: Path) -> None:
    """Delete a run's checkpoints; the run's owner file stays."""
    for path in run.glob("step-*"):
        shutil.rmtree(path)


def bench_stall(state: dict[str, Any], folder: Path, rounds: int) -> list[Measurement]:
    """How long `save` blocks the training loop, against a copy of the same bytes into warm buffers."""
    tensors = tensors_of(state)
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    saver = Saver(str(folder / "stall"))
    stager = DefaultStager(StagingOptions(False, False, False, False))
    step = iter(range(1, 1000))

    def copy() -> float:
        return timed(lambda: [buffer.copy_(tensor) for buffer, tensor in zip(buffers, tensors, strict=True)])

    def ours() -> float:
        handle = saver.save(state, step=next(step))
        handle.wait()
        clear_steps(folder / "stall")
        return handle.stall_s

    def dcp_default() -> float:
        started = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=folder / f"dcp{next(step)}", no_dist=True)
        stall = time.perf_counter() - started
        future.result()  # type: ignore[union-attr]
        for path in folder.glob("dcp*"):
            shutil.rmtree(path)
        return stall

    def dcp_stager() -> float:
        started = time.perf_counter()
        stager.stage(state)
        return time.perf_counter() - started

    cases = {"copy": copy, "ours": ours, "dcp default": dcp_default, "dcp kept stager": dcp_stager}
    interleave(cases, rounds=1)
    result = interleave(cases, rounds=rounds)
    saver.close()
    base = median(result["copy"])
    ratio = {name: median(values) / base for name, values in result.items()}
    return [
        Measurement(
            what="stall of an async save / copy into warm buffers",
            figure=f"{ratio['ours']:.2f} x ({spread(result['ours'])})",
            bar="<= 1.25 x",
            holds=ratio["ours"] <= 1.25,
            peer=f"DCP async_save default {ratio['dcp default']:.1f} x, kept DefaultStager {ratio['dcp kept stager']:.1f} x",
        )
    ]


def bench_disk(state: dict[str, Any], folder: Path, rounds: int) -> list[Measurement]:
    """Sync save with fsync and load, against plain writes and reads of the same bytes."""
    tensors = tensors_of(state)
    target = {part: {name: torch.zeros_like(t) for name, t in inner.items()} for part, inner in state.items()}
    raw_write(tensors, folder / "raw")
    save(str(folder / "keep"), state, step=1)
    dcp.save(state, checkpoint_id=folder / "keepdcp", no_dist=True)

    size_bytes = sum(tensor.nbytes for tensor in tensors)

    def fresh(action: Callable[[Path], object]) -> Callable[[], float]:
        return lambda: timed_in_new(folder / "fresh", action, size_bytes)

    cases: dict[str, Callable[[], float]] = {
        "raw write": fresh(lambda path: raw_write(tensors, path / "raw")),
        "our save": fresh(lambda path: save(str(path), state, step=1)),
        "dcp save": fresh(lambda path: dcp.save(state, checkpoint_id=path, no_dist=True)),
        "dcp save t2": fresh(
            lambda path: dcp.save(
                state, storage_writer=dcp.FileSystemWriter(path, thread_count=2, sync_files=True), no_dist=True
            )
        ),
        "raw read": lambda: timed(lambda: raw_read(tensors_of(target), folder / "raw")),
        "our load": lambda: timed(lambda: load(str(folder / "keep"), target)),
        "our open": lambda: timed(lambda: open_checkpoint(str(folder / "keep"))),
        "dcp load": lambda: timed(lambda: dcp.load(target, checkpoint_id=folder / "keepdcp", no_dist=True)),
    }
    result = interleave(cases, rounds=rounds)
    return _disk_bars(result)


def timed_in_new(path: Path, action: Callable[[Path], object], size_bytes: int) -> float:
    """Seconds that `action` takes to write `size_bytes` into a new folder, once the disk is idle."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.sync()
    take_memory(path, size_bytes)
    seconds = timed(lambda: action(path))
    shutil.rmtree(path)
    return seconds


def _disk_bars(result: dict[str, list[float]]) -> list[Measurement]:
    times = {name: median(values) for name, values in result.items()}
    saved, loaded = times["our save"] / times["raw write"], times["our load"] / times["raw read"]
    return [
        Measurement(
            what="sync save, local disk / raw write + fsync",
            figure=f"{saved:.2f} x ({spread(result['our save'])})",
            bar="<= 1.2 x",
            holds=saved <= 1.2,
            peer=f"dcp.save {times['dcp save'] / times['raw write']:.2f} x, two threads "
            f"{times['dcp save t2'] / times['raw write']:.2f} x",
        ),
        Measurement(
            what="load, local, digests verified / raw readinto",
            figure=f"{loaded:.2f} x ({spread(result['our load'])})",
            bar="<= 1.5 x",
            holds=loaded <= 1.5,
            peer=f"dcp.load, nothing verified {times['dcp load'] / times['raw read']:.2f} x",
        ),
    ]


def bench_memory(size_gb: float, folder: Path) -> list[Measurement]:
    """Peak and growth of resident memory over 50 async saves, in its own process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.checkpoints.core_local",
        "--memory",
        "--size",
        str(size_gb),
        "--dir",
        str(folder),
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    state_mb, after_first_mb, peak_mb = map(float, text.split()[-3:])
    growth = peak_mb - after_first_mb
    return [
        Measurement(
            what=f"memory over 50 async saves of {state_mb:.0f} MB",
            figure=f"peak {peak_mb / state_mb:.2f} x the state beyond the job's own, {growth:.0f} MB of it after the first save",
            bar="flat; peak <= state + 64 MB",
            holds=growth <= 16 and peak_mb <= state_mb + 64,
            peer="not run beside it",
        )
    ]


def resident_kb(field: str) -> int:
    """VmRSS or VmHWM (the peak) of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0])


def memory(state: dict[str, Any], folder: Path) -> str:
    """State size, peak memory added by the first save, peak memory added by fifty; MB."""
    size_mb = sum(t.numel() * t.element_size() for t in tensors_of(state)) / 1e6
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, first = resident_kb("VmRSS"), 0
    with Saver(str(folder / "memory")) as saver:
        for step in range(1, 51):
            saver.save(state, step=step).wait()
            clear_steps(folder / "memory")
            first = first or resident_kb("VmHWM")
    return f"{size_mb} {(first - before) * 1.024e-3} {(resident_kb('VmHWM') - before) * 1.024e-3}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1.0, help="GB of state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--pace", type=float, default=100.0, help="MB/s of the paced upload")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    state = make_state(arguments.size)
    folder = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        if arguments.memory:
            print(memory(state, folder))  # noqa: T201
        else:
            bars = bench_stall(state, folder, arguments.rounds) + bench_disk(state, folder, arguments.rounds)
            bars += bench_memory(min(arguments.size, 0.3), folder)
            bars += bench_rate(min(arguments.size, 0.5), str(folder / "rate"), arguments.pace, "local disk")
            size = sum(t.numel() * t.element_size() for t in tensors_of(state)) / 1e9
            title = f"Save and load, local disk, {size:.2f} GB in {len(tensors_of(state))} tensors"
            write_section("core-local", title, bars, f"{TAKEN_NOTE}\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
