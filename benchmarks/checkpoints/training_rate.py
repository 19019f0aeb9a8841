"""The rate of a training loop while its saves upload, at full speed and paced, beside DCP's; each mode in a process of its own.

python -m benchmarks.checkpoints.training_rate MODE URL [--size 0.5] [--pace 100]   # one mode: rate / idle, seconds lost per GB
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

MODES = ("ours", "paced", "dcp")
BAR = 0.93


def bench_rate(size_gb: float, url: str, pace_mb_per_s: float, where: str) -> list[Measurement]:
    """Two rows: full speed and paced, both beside `dcp.async_save` in the same run."""
    found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
    for _ in range(3):
        for mode in MODES:
            found[mode].append(_in_process(mode, size_gb, f"{url}/{mode}", pace_mb_per_s))
    rates, lost = ({mode: median([each[n] for each in found[mode]]) for mode in MODES} for n in (0, 1))
    peer = f"dcp.async_save (thread) {rates['dcp']:.2f}, {lost['dcp']:.2f} s of training lost per GB"
    return [
        Measurement(
            what=f"training rate while uploading, {where} / idle (1 training thread)",
            figure=f"{rates['ours']:.2f}, {lost['ours']:.2f} s of training lost per GB",
            bar=">= 0.80",
            holds=rates["ours"] >= 0.80,
            peer=peer,
        ),
        Measurement(
            what=f"the same, paced at {pace_mb_per_s:g} MB/s",
            figure=f"{rates['paced']:.2f}, {lost['paced']:.2f} s of training lost per GB",
            bar=f">= {BAR}, above DCP's",
            holds=rates["paced"] >= BAR and rates["paced"] > rates["dcp"],
            peer=peer,
        ),
    ]


def _in_process(mode: str, size_gb: float, url: str, pace_mb_per_s: float) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.checkpoints.training_rate", mode, url]
    command += ["--size", str(size_gb), "--pace", str(pace_mb_per_s)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(number) for number in text.split()[-2:]]


class Uploads:
    """Back-to-back asynchronous saves of one state."""

    def __init__(self, mode: str, state: dict[str, Any], url: str, pace_mb_per_s: float) -> None:
        self._state, self._url, self._store = state, url, open_store(url)
        options = SaveOptions(upload_bytes_per_s=pace_mb_per_s * 1e6 if mode == "paced" else None)
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


def measure(mode: str, size_gb: float, url: str, pace_mb_per_s: float) -> tuple[float, float]:
    """Steps per second during back-to-back uploads over those idle, in alternating slices; seconds of training lost per GB."""
    torch.set_num_threads(1)
    uploads = Uploads(mode, make_state(size_gb), url, pace_mb_per_s)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, 256)

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
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(*measure(arguments.mode, arguments.size, arguments.url, arguments.pace))  # noqa: T201


if __name__ == "__main__":
    main()
