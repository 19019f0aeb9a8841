"""Slurm's notation for many hosts or tasks: `node[003-004,7]`, `0-2,5` (`scontrol show hostnames`)."""

from __future__ import annotations

import re


def ranges(text: str) -> list[int]:
    """
    >>> ranges("0-2,5")
    [0, 1, 2, 5]
    """
    found: list[int] = []
    for part in text.strip("[]").split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and (not high or high.isdigit()):
            found.extend(range(int(low[:6]), min(int((high or low)[:6]), int(low[:6]) + 100_000) + 1))
    return found


MOST_HOSTS = 4096
_HOSTS = re.compile(r"(?P<stem>[^\[\],]{0,80})(?:\[(?P<numbers>[\d,-]{1,200})\])?(?P<end>[^,\[\]]{0,80})")


def expanded(hosts: str) -> list[str]:
    """Host names of Slurm's notation for many (`scontrol show hostnames`).

    >>> expanded("node[003-004,7],login1")
    ['node003', 'node004', 'node7', 'login1']
    """
    found: list[str] = []
    for part in re.findall(r"[^,\[]{0,80}(?:\[[^\]]{0,200}\])?[^,]{0,80}", hosts):
        match = _HOSTS.fullmatch(part)
        if not part or match is None:
            continue
        if match["numbers"] is None:
            found.append(part)
            continue
        for numbers in match["numbers"].split(","):
            low, _, high = numbers.partition("-")
            last = min(int(high or low or 0), int(low or 0) + MOST_HOSTS)
            found += [f"{match['stem']}{n:0{len(low)}d}{match['end']}" for n in range(int(low or 0), last + 1)]
    return found[:MOST_HOSTS]


def one_host(text: str) -> str:
    """The host, or "" where the text means several."""
    return "" if "[" in text or "," in text else text
