"""The rate of a training loop while its saves upload, at full speed and paced, beside DCP's; each mode in a process of its own.

python -m benchmarks.checkpoints.training_rate MODE URL [--size 0.5] [--pace 100] [--loop small]

One mode: its rate over that of an idle store, and the seconds of training lost per GB. The loop `small` runs products so small
that Python is its limit, as it is where a GPU waits for its kernels to be launched.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from benchmarks.checkpoints.states import make_state
from titan_ckpt.saving.options import SaveOptions
from titan_ckpt.saving.saver import Saver
from titan_ckpt.store.open import open_store
from tools.report import Measurement, median

MODES = ("ours", "process", "paced", "dcp")
LOOPS = {"products": (256, 64), "small": (16, 2)}  # width of the layers, rows of a batch
CASES = [("products", mode) for mode in MODES] + [("small", mode) for mode in ("ours", "process", "dcp")]
BAR = 0.93


def bench_rate(size_gb: float, url: str, pace_mb_per_s: float, where: str) -> list[Measurement]:
    """Rows for full speed, a process of its own, and paced, each beside `dcp.async_save` in the same run."""
    found: dict[tuple[str, str], list[list[float]]] = {case: [] for case in CASES}
    for _ in range(3):
        for loop, mode in CASES:
            found[loop, mode].append(_in_process(mode, loop, size_gb, f"{url}/{mode}", pace_mb_per_s))
    rates, lost = ({case: median([each[n] for each in found[case]]) for case in CASES} for n in (0, 1))

    def row(what: str, loop: str, mode: str, bar: str, *, least: float, above: tuple[str, ...] = ()) -> Measurement:
        def figure(mode: str) -> str:
            return f"{rates[loop, mode]:.2f}, {lost[loop, mode]:.2f} s of training lost per GB"

        rate = rates[loop, mode]
        return Measurement(
            what=what,
            figure=figure(mode),
            bar=bar,
            holds=rate >= least and all(rate > rates[loop, other] for other in above),
            peer=f"dcp.async_save (thread) {figure('dcp')}",
        )

    uploading = f"training rate while uploading, {where} / idle"
    small = "the same, a loop of small products"
    return [
        row(f"{uploading} (1 training thread)", "products", "ours", ">= 0.80", least=0.80),
        row(
            f"the same, paced at {pace_mb_per_s:g} MB/s", "products", "paced", f">= {BAR}, above DCP's",
            least=BAR, above=("dcp",),
        ),
        row("the same, upload_process=True", "products", "process", "shown", least=0.0),
        row(small, "small", "ours", "above DCP's", least=0.0, above=("dcp",)),
        row(f"{small}, upload_process=True", "small", "process", "above the thread's", least=0.0, above=("ours", "dcp")),
    ]  # fmt: skip


def _in_process(mode: str, loop: str, size_gb: float, url: str, pace_mb_per_s: float) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.checkpoints.training_rate", mode, url]
    command += ["--size", str(size_gb), "--pace", str(pace_mb_per_s), "--loop", loop]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(number) for number in text.split()[-2:]]


class Uploads:
    """Back-to-back asynchronous saves of one state."""

    def __init__(self, mode: str, state: dict[str, Any], url: str, pace_mb_per_s: float) -> None:
        self._state, self._url, self._store = state, url, open_store(url)
        pace = pace_mb_per_s * 1e6 if mode == "paced" else None
        options = SaveOptions(upload_bytes_per_s=pace, upload_process=mode == "process")
        self._saver = None if mode == "dcp" else Saver(url, options)
        self._pending: Any = None
        self._count = 0

    def keep_busy(self) -> None:
        """Start the next save if none is under way."""
        if self._pending is None or self._pending.done():
            self._count += 1
            self._pending = self._save()

    def _save(self) -> Any:
        if self._saver is not None:
            return self._saver.save(self._state, step=self._count).future
        path = f"{self._url}/step-{self._count}"
        writer = FsspecWriter(path, overwrite=True) if "://" in path else dcp.FileSystemWriter(path)
        return dcp.async_save(self._state, storage_writer=writer, no_dist=True)

    def sent_gb(self, size_gb: float) -> float:
        """GB that were sent so far; of DCP whole saves."""
        return size_gb * self._count if self._saver is None else self._saver.metrics().uploaded_bytes / 1e9

    def end(self) -> None:
        """Wait for the save under way, and delete all of them."""
        self._pending.result()
        self._store.delete([each.path for each in self._store.list() if each.path.startswith("step-")])


def measure(mode: str, loop: str, size_gb: float, url: str, pace_mb_per_s: float) -> tuple[float, float]:
    """Steps per second during back-to-back uploads over those idle, in alternating slices; seconds of training lost per GB."""
    torch.set_num_threads(1)
    uploads = Uploads(mode, make_state(size_gb), url, pace_mb_per_s)
    width, rows = LOOPS[loop]
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(rows, width)

    def train(seconds: float, before_step: Callable[[], None]) -> float:
        started, steps, paused = time.perf_counter(), 0, 0.0
        while time.perf_counter() - started - paused < seconds:
            before = time.perf_counter()
            before_step()
            paused += time.perf_counter() - before
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            steps += 1
        return steps / seconds

    train(1.0, lambda: None)
    uploads.keep_busy()
    uploads.end()
    ratios, lost = [], []
    for _ in range(3):
        idle = train(2.0, lambda: None)
        sent_gb = uploads.sent_gb(size_gb)
        busy = train(4.0, uploads.keep_busy)
        sent_gb = uploads.sent_gb(size_gb) - sent_gb
        uploads.end()
        ratios.append(busy / idle)
        lost.append((1 - busy / idle) * 4.0 / max(sent_gb, 1e-3))
    return median(ratios), median(lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("url")
    parser.add_argument("--size", type=float, default=0.5, help="GB of state")
    parser.add_argument("--pace", type=float, default=100.0, help="MB/s of the paced mode")
    parser.add_argument("--loop", choices=LOOPS, default="products")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(*measure(arguments.mode, arguments.loop, arguments.size, arguments.url, arguments.pace))  # noqa: T201


if __name__ == "__main__":
    main()
