"""Phones on one machine: a share of a processor by a cgroup (version 1), a host of its own with a slow link by namespaces and tc.

Linux; a cgroup that root may write, and the kernel's token bucket filter. What a phone cannot get is refused, not ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from examples.phones.choices import Choices
from scripts.hosts_network import SWITCH, Network
from tools.paths import ROOT

CPU, ACCOUNTS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpuacct")
PERIOD_US = 100_000
PORT = 7000


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """Of a phone: the part of a processor it has, and its link in bits per second, each way.

    `shares` (1024 is one ordinary process) lets the phones get their part while others load the machine.
    """

    cores: float = 0.15
    link_bits_per_s: float = 20e6
    shares: int = 8192


@dataclass(slots=True)
class Phone:
    """A peer that runs, or has run, and what it has printed."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> list[dict[str, Any]]:
        """All events so far."""
        lines = self.output.read_text().splitlines(keepends=True)
        self.events = [json.loads(line) for line in lines if line.endswith("\n")]
        return self.events

    def has(self, event: str, **details: Any) -> bool:
        """Whether it has printed such an event."""
        return self.count(event, **details) > 0

    def count(self, event: str, **details: Any) -> int:
        """How many such events it has printed."""
        return sum({"event": event, **details}.items() <= each.items() for each in self.read())


class Phones:
    """Phones on a switch; a context manager that ends all that it started."""

    def __init__(
        self, network: Network, names: Sequence[str], folder: Path, album: Path, choices: Choices, strength: Strength
    ) -> None:
        self._network, self._folder, self._album = network, folder, album
        self._choices, self._strength = choices, strength
        self.names = list(names)
        self._book = ",".join(f"{network.addresses[name]}:{PORT}" for name in names)
        self.running: dict[str, Phone] = {}
        self._groups: list[Path] = []
        self._sent_before: dict[str, int] = {}

    def __enter__(self) -> Phones:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.running:
            self.kill(name)
        for group in self._groups:
            self._remove(group)

    def start(self, name: str, *options: str) -> Phone:
        """Start a peer on its host, in cgroups of its own."""
        groups = [self._group(CPU, name), self._group(ACCOUNTS, name)]
        (groups[0] / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (groups[0] / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US * self._strength.cores)))
        (groups[0] / "cpu.shares").write_text(str(self._strength.shares))
        self._slow_down(name)
        self._sent_before[name] = self._counter(name)
        enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups) + 'exec "$@"'
        peer = [
            sys.executable, "-m", "examples.phones.peer", "--address", f"{self._network.addresses[name]}:{PORT}", "--book",
            self._book, "--home", str(self._folder / name), "--album", str(self._album), "--choices",
            json.dumps(self._choices.to_json()), *options,
        ]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
        output = self._folder / f"{name}.jsonl"
        with open(output, "wb") as out, open(self._folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                ["sh", "-c", enter, "sh", *self._network.on(name, peer)], stdout=out, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.running[name] = Phone(name, process, output)
        return self.running[name]

    def kill(self, name: str) -> None:
        """SIGKILL a peer with all its processes."""
        process = self.running[name].process
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def cpu_s(self, name: str) -> float:
        """Processor time of a phone so far, imports too."""
        return int((self._path(ACCOUNTS, name) / "cpuacct.usage").read_text()) / 1e9

    def was_held_back(self, name: str) -> float:
        """The part of the periods in which the phone wanted more than its share of the processor."""
        words = (self._path(CPU, name) / "cpu.stat").read_text().split()
        stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        return stat["nr_throttled"] / max(stat["nr_periods"], 1)

    def sent_bytes(self, name: str) -> int:
        """Bytes that left the phone since it was started."""
        return self._counter(name) - self._sent_before[name]

    def _counter(self, name: str) -> int:
        command = self._network.on(name, ["cat", "/sys/class/net/eth0/statistics/tx_bytes"])
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    def _slow_down(self, name: str) -> None:
        rate = f"{self._strength.link_bits_per_s:.0f}bit"
        for host, device in ((name, "eth0"), (SWITCH, f"port-{name}")):
            shape = [
                "tc",
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "64kb",
                "latency",
                "400ms",
            ]
            subprocess.run(self._network.on(host, shape), check=True)

    def _path(self, root: Path, name: str) -> Path:
        return root / f"phones-{os.getpid()}-{self._folder.name}-{name}"

    def _group(self, root: Path, name: str) -> Path:
        path = self._path(root, name)
        path.mkdir()
        self._groups.append(path)
        return path

    def _remove(self, group: Path) -> None:
        """The kernel empties a group some moments after its processes have ended."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.1)
        raise RuntimeError(f"{group}: still has processes: {(group / 'cgroup.procs').read_text().split()}")
