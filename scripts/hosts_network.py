"""Several hosts on one machine: network namespaces on a virtual switch, with links that can be cut. Linux; needs no privileges
where user namespaces are allowed.

The namespaces end with the process that created them; the machine's own network is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

INSIDE = "TITAN_CKPT_HOSTS_INSIDE"
SWITCH, BRIDGE = "switch", "br0"
STORAGE = "storage"  # the host of this process
NETWORK = "10.77.0"


def enter(module: str, arguments: Sequence[str]) -> int | None:
    """Run `python -m module arguments` in new namespaces and return its exit code; None if already inside."""
    if os.environ.get(INSIDE):
        return None
    missing = [tool for tool in ("unshare", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: not installed (util-linux and iproute2 bring them)")
    isolate = [
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "--mount",
        "--pid",
        "--mount-proc",
        "--fork",
        "--kill-child",
    ]
    if subprocess.run([*isolate, "true"], capture_output=True, check=False).returncode:
        raise RuntimeError(
            "this kernel or container allows no user and network namespaces: `unshare -Urnmpf true` fails"
        )
    command = [*isolate, sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode


class Network:
    """A switch with this process as the host `storage`, and the other hosts."""

    def __init__(self, hosts: Sequence[str]) -> None:
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        os.mkdir("/run/netns")
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "netns", "add", SWITCH)
        _run("ip", "-n", SWITCH, "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "-n", SWITCH, "link", "set", BRIDGE, "up")
        self.addresses = {host: f"{NETWORK}.{number}" for number, host in enumerate((STORAGE, *hosts), start=1)}
        for host in self.addresses:
            self._connect(host)

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """`command` wrapped to run on a host."""
        return ["ip", "netns", "exec", host, *command]

    def cut(self, host: str) -> None:
        """Cut a host's link: its packets are dropped silently."""
        _run("ip", "-n", SWITCH, "link", "set", f"port-{host}", "down")

    def restore(self, host: str) -> None:
        """Restore a host's link."""
        _run("ip", "-n", SWITCH, "link", "set", f"port-{host}", "up")

    def _connect(self, host: str) -> None:
        """Link the host's eth0 to a port of the switch."""
        there = []
        if host != STORAGE:
            _run("ip", "netns", "add", host)
            there = ["-n", host]
        _run("ip", "link", "add", f"eth-{host}", "type", "veth", "peer", "name", f"port-{host}")
        _run("ip", "link", "set", f"port-{host}", "netns", SWITCH)
        _run("ip", "-n", SWITCH, "link", "set", f"port-{host}", "master", BRIDGE, "up")
        if there:
            _run("ip", "link", "set", f"eth-{host}", "netns", host)
        _run("ip", *there, "link", "set", f"eth-{host}", "name", "eth0")
        _run("ip", *there, "address", "add", f"{self.addresses[host]}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", *there, "link", "set", device, "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
