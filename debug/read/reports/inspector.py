"""What NCCL's inspector plugin wrote: the newest collective that each rank completed in each communicator, its host and process.

Format: NCCL's plugins/profiler/inspector/inspector_json.cc (`inspector_output_format_version` v4.2) and its README: a line of
JSON per completed operation, with `header` (`id` of the communicator, `rank` in it, `n_ranks`), `metadata` (`hostname`, `pid`)
and `coll_perf` (`coll`; `coll_sn`: the number in its communicator). What is pending is not written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import MAX_RANK
from titan_ckpt.debug.read.text.job_text import JobText
from titan_ckpt.debug.read.text.lines import physical_lines
from titan_ckpt.debug.read.text.schedulers.process_ends import Note

MOST_ENTRIES = 1 << 22
_NUMBER = r"\s{0,4}:\s{0,4}(\d{1,18})"
_TEXT = r'\s{0,4}:\s{0,4}"([^"\\]{0,200})"'
_FIELDS = {name: re.compile(rf'"{name}"{_NUMBER}') for name in ("rank", "n_ranks", "pid", "coll_sn")} | {
    name: re.compile(rf'"{name}"{_TEXT}') for name in ("id", "comm_name", "hostname", "coll")
}


def is_inspector(head: bytes) -> bool:
    """Whether a text begins as the plugin writes it."""
    return b'"inspector_output_format_version"' in head


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The newest collective that a rank completed in a communicator of `size` ranks, as its newest line says."""

    communicator: str
    rank: int
    size: int
    host: str
    pid: int
    done: int
    operation: str
    source: str
    line: int


def read_inspector(chunks: Iterable[bytes], source: str) -> list[Progress]:
    """The newest entry of each communicator and rank in a file."""
    newest: dict[tuple[str, int], Progress] = {}
    for number, line in enumerate(physical_lines(chunks), 1):
        if number > MOST_ENTRIES:
            break
        found = {name: match[1] for name, pattern in _FIELDS.items() if (match := pattern.search(line[:4000]))}
        if not {"id", "rank", "n_ranks", "coll_sn"} <= set(found) or int(found["rank"]) > MAX_RANK:
            continue
        entry = Progress(
            communicator=found["id"], rank=int(found["rank"]), size=int(found["n_ranks"]), host=found.get("hostname", ""),
            pid=int(found.get("pid", 0)), done=int(found["coll_sn"]), operation=found.get("coll", "?"),
            source=source, line=number,
        )  # fmt: skip
        known = newest.get((entry.communicator, entry.rank))
        if known is None or entry.done >= known.done:
            newest[entry.communicator, entry.rank] = entry
    return list(newest.values())


def compared(found: Sequence[Progress]) -> list[JobText]:
    """Ranks that completed less than others of their communicator, and where ranks run; ranks count as the job's in its largest
    communicator only."""
    if not found:
        return []
    by_communicator: defaultdict[str, dict[int, Progress]] = defaultdict(dict)
    for entry in found:
        known = by_communicator[entry.communicator].get(entry.rank)
        if known is None or entry.done >= known.done:
            by_communicator[entry.communicator][entry.rank] = entry
    name, ranks = max(
        by_communicator.items(), key=lambda item: (max(e.size for e in item[1].values()), len(item[1]), item[0])
    )
    first = min(ranks.values(), key=lambda entry: entry.rank)
    text = JobText(source=first.source, scope=first.source, num_ranks=min(first.size, MAX_RANK))
    for rank, entry in ranks.items():
        if entry.host and entry.pid:
            text.hosts[rank] = entry.host
            text.links["pid", entry.host, entry.pid] = rank
    most = max(entry.done for entry in ranks.values())
    behind = sorted(rank for rank, entry in ranks.items() if entry.done < most)
    if behind:
        least = ranks[behind[0]]
        what = (
            f"NCCL inspector: in communicator {name} {', '.join(f'rank {r} completed #{ranks[r].done}' for r in behind[:8])}"
            f" ({least.operation}), the others #{most}"
        )
        names = ",".join(map(str, behind[:4000]))
        text.endings.notes.append(
            Note(kind=EventKind.DESYNC, text=what[:400], line=least.line, values={"names": names, "done": str(most)})
        )
    return [text]
