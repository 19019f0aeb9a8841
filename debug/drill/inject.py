"""`debug inject CASE`: hang a small real gloo job on purpose, and leave its incident: a drill, and the tests' truth."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_ckpt.arguments import nearest
from titan_ckpt.console.command import Command
from titan_ckpt.console.output import write_note, write_text
from titan_ckpt.debug.read.black_boxes import BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.errors import TitanError, UsageError

TRUTH = "truth.json"  # written last: an incident that has it is whole
STALL_S = 1.5
DEADLINE_S = 180.0  # the operations' own timeout, after which ranks end by themselves, is a minute
GRACE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What an analyzer must find. `subtype` None = any; `everyone` = all ranks are part of it. `operations`: how many a rank
    issues at least before anything goes wrong; a stall before that is only a slow start."""

    verdict: str
    subtype: str | None = None
    everyone: bool = False
    least_ranks: int = 2
    is_even: bool = False
    operations: int = 6
    text: str = ""

    @property
    def is_hang(self) -> bool:
        return self.verdict not in ("HEALTHY", "STRAGGLER")

    def culprits(self, size: int) -> tuple[int, ...]:
        """The guilty ranks in a job of `size` ranks."""
        if self.verdict == "HEALTHY":
            return ()
        return tuple(range(size)) if self.everyone else (culprit_of(size),)


def culprit_of(size: int) -> int:
    """The rank that goes wrong: neither the first nor the last where there are more than two."""
    return 1 if size <= 4 else size // 2 + 1


CASES: Mapping[str, Truth] = {
    "ok": Truth(verdict="HEALTHY", text="nothing goes wrong"),
    "gc_pause": Truth(verdict="HEALTHY", text="a pause of one rank that ends"),
    "subset_groups": Truth(verdict="HEALTHY", text="groups that only some ranks use, legally"),
    "async_not_waited": Truth(verdict="HEALTHY", text="an asynchronous handle that nobody waits for"),
    "skip": Truth(verdict="SKIPPED_COLLECTIVE", text="a rank leaves a collective out"),
    "order": Truth(verdict="ORDER_MISMATCH", text="a rank swaps two collectives"),
    "op_type": Truth(verdict="OP_MISMATCH", text="all_gather against all_reduce"),
    "size": Truth(verdict="SIZE_MISMATCH", text="a rank passes another size"),
    "dtype": Truth(verdict="DTYPE_MISMATCH", text="a rank passes another dtype"),
    "extra_collective": Truth(
        verdict="SKIPPED_COLLECTIVE", subtype="extra_collective", text="a collective under `if rank`"
    ),
    "finished_early": Truth(
        verdict="SKIPPED_COLLECTIVE", subtype="finished_early", text="a rank has fewer batches and ends"
    ),
    "wrong_group": Truth(verdict="WRONG_GROUP", text="the right collective on the wrong group"),
    "split_sizes": Truth(
        verdict="SIZE_MISMATCH", operations=8, text="a rank sends more by all_to_all than others expect"
    ),
    "expert_skipped": Truth(
        verdict="SKIPPED_COLLECTIVE", operations=9, text="a rank leaves the all_to_all of its expert group out"
    ),
    "dataloader": Truth(verdict="STUCK_ON_CPU", subtype="dataloader", text="storage behind the data is gone"),
    "checkpoint_io": Truth(verdict="STUCK_ON_CPU", subtype="checkpoint_io", text="a checkpoint write never ends"),
    "python_lock": Truth(verdict="STUCK_ON_CPU", subtype="python_lock", text="a lock taken twice"),
    "gil_held": Truth(verdict="STUCK_ON_CPU", subtype="gil_held", text="C code that keeps the GIL"),
    "user_code": Truth(verdict="STUCK_ON_CPU", subtype="user_code", text="a loop without an end"),
    "gc_storm": Truth(verdict="STUCK_ON_CPU", subtype="gc", text="garbage collection over and over"),
    "teardown": Truth(verdict="TEARDOWN_STUCK", text="a rank ends, and waits for a thread that does not"),
    "ring_overflow": Truth(
        verdict="STUCK_ON_CPU", operations=160, text="more operations than the rings hold, then a stop"
    ),
    "chain": Truth(
        verdict="STUCK_ON_CPU",
        subtype="dataloader",
        is_even=True,
        operations=3,
        text="one stop, felt in TP and PP",
    ),
    "sigkill": Truth(verdict="RANK_DIED", subtype="signal", text="SIGKILL"),
    "segfault": Truth(verdict="RANK_DIED", subtype="signal", text="a segmentation fault"),
    "sigstop": Truth(verdict="RANK_FROZEN", text="SIGSTOP"),
    "exception": Truth(verdict="RANK_DIED", subtype="python_exception", text="an exception on one rank"),
    "out_of_memory": Truth(verdict="RANK_DIED", subtype="oom", text="one rank runs out of memory"),
    "p2p_missing": Truth(verdict="P2P_MISSING_PEER", text="a recv without its send"),
    "p2p_size": Truth(verdict="P2P_SIZE_MISMATCH", text="a send larger than its recv"),
    "p2p_cycle": Truth(verdict="P2P_CYCLE", everyone=True, text="everybody receives before sending"),
    "p2p_batch": Truth(verdict="P2P_MISSING_PEER", text="a batch that lacks one send"),
    "subset_new_group": Truth(verdict="PG_INIT_HANG", subtype="new_group", text="new_group not called by one rank"),
    "init_hang": Truth(verdict="PG_INIT_HANG", operations=0, text="a rank never joins"),
    "straggler": Truth(verdict="STRAGGLER", text="one rank is always late"),
}


@dataclass(slots=True)
class _Rank:
    """One process of the job."""

    number: int
    process: subprocess.Popen[bytes]
    was_told: bool = False
    state: str = ""
    ended_s: float | None = None


def inject(
    case: str, folder: Path, *, ranks: int = 4, stall_s: float = STALL_S, deadline_s: float = DEADLINE_S
) -> Path:
    """Run `case` with real processes until it hangs or ends, and leave the evidence in `folder`."""
    truth = _check(case, ranks)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        job = [_start(case, number, ranks, folder, Path(scratch) / "store", stall_s) for number in range(ranks)]
        try:
            _wait_until_settled(job, folder, truth, deadline_s)
            for rank in job:
                rank.state = _process_state(rank.process.pid) if rank.process.poll() is None else ""
            _end(job)
        finally:
            for rank in job:
                if rank.process.poll() is None:
                    rank.process.kill()
                    rank.process.wait()
    _write_exits(job, folder)
    answer = {
        "titan_ckpt": "truth",
        "case": case,
        "verdict": truth.verdict,
        "subtype": truth.subtype,
        "culprits": truth.culprits(ranks),
    }
    (folder / TRUTH).write_text(json.dumps(answer))
    return folder


def _check(case: str, ranks: int) -> Truth:
    if case not in CASES:
        raise UsageError(f"no case {case!r}; {nearest(case, CASES)}there are: {', '.join(CASES)}")
    truth = CASES[case]
    if not is_possible(case, ranks):
        needs = "an even number of" if truth.is_even else f"between {truth.least_ranks} and 64"
        raise UsageError(f"case {case} needs {needs} ranks, not {ranks}")
    return truth


def is_possible(case: str, ranks: int) -> bool:
    """Whether the case can be made with that many ranks."""
    truth = CASES[case]
    return truth.least_ranks <= ranks <= 64 and not (truth.is_even and ranks % 2)


def _start(case: str, number: int, ranks: int, folder: Path, store: Path, stall_s: float) -> _Rank:
    command = [
        sys.executable, "-m", "titan_ckpt.debug.drill.rank_main", case, "--rank", str(number), "--world-size", str(ranks),
        "--culprit", str(culprit_of(ranks)), "--folder", str(folder), "--store", str(store), "--stall-s", str(stall_s),
    ]  # fmt: skip
    entries = 32 if case == "ring_overflow" else 2000
    variables = {**os.environ, **environment(entries), "OMP_NUM_THREADS": "1", "RANK": str(number)}
    with open(folder / f"rank_{number:05d}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=variables)
    return _Rank(number=number, process=process)


def _wait_until_settled(job: list[_Rank], folder: Path, truth: Truth, deadline_s: float) -> None:
    """Until every process has ended, or (where the case is a hang) every one that still can has reported its stall; at most
    until the deadline."""
    give_up = time.monotonic() + deadline_s
    quiet_since: float | None = None
    while time.monotonic() < give_up:
        for rank in job:
            if rank.process.poll() is not None and rank.ended_s is None:
                rank.ended_s = time.time()
        alive = [rank for rank in job if rank.process.poll() is None]
        if not alive:
            return
        if truth.is_hang and all(_has_reported(rank, folder, truth.operations) for rank in alive):
            quiet_since = quiet_since or time.monotonic()
            if time.monotonic() - quiet_since > 0.5:
                return
        else:
            quiet_since = None
        time.sleep(0.05)
    raise TitanError(
        f"{folder}: the job neither ended nor reported a stall within {deadline_s:.0f} s; see the logs there"
    )


def _has_reported(rank: _Rank, folder: Path, operations: int) -> bool:
    stem = f"rank_{rank.number:05d}"
    gil = folder / f"{stem}.gil.stacks"
    if gil.exists() and gil.stat().st_size > 0 and _is_newest(gil, folder / f"{stem}.box", operations):
        return True
    if _is_newest(folder / f"{stem}.stall.pickle", folder / f"{stem}.box", operations):
        return True
    return _process_state(rank.process.pid).startswith("T")


def _is_newest(dump: Path, box: Path, least: int) -> bool:
    """Whether the rank has issued so many operations and none after its dump: one that started slowly reports a stall and
    then goes on."""
    try:
        dumped_ns = dump.stat().st_mtime_ns
        found = BoxReader(Interner()).parse(box.read_bytes(), box.name)
    except (FileNotFoundError, ValueError):
        return False  # not dumped, or taken back, or the box is just being made
    return found.count >= least and dumped_ns > int(found.operations["created_ns"].max(initial=0))


def _process_state(pid: int) -> str:
    """The kernel's state of a process, such as `S (sleeping)`; empty if unknown."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "")


def _end(job: list[_Rank]) -> None:
    """SIGTERM, a moment of grace, SIGKILL: what a launcher does."""
    for rank in job:
        if rank.process.poll() is None:
            rank.was_told = True
            rank.process.send_signal(signal.SIGTERM)
    give_up = time.monotonic() + GRACE_S
    for rank in job:
        try:
            rank.process.wait(timeout=max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()


def _write_exits(job: list[_Rank], folder: Path) -> None:
    ended = [rank for rank in job if rank.ended_s is not None and rank.process.returncode]
    first = min(ended, key=lambda rank: rank.ended_s or 0.0, default=None)
    value: dict[str, Any] = {
        "titan_ckpt": "exits",
        "world_size": len(job),
        "code": max((abs(rank.process.returncode) for rank in job), default=0),
        "exits": [
            {
                "rank": rank.number, "code": rank.process.returncode, "pid": rank.process.pid, "was_told": rank.was_told,
                "time_s": rank.ended_s, "is_first": rank is first,
            }
            for rank in job
        ],
        "processes": [{"rank": rank.number, "state": rank.state} for rank in job if rank.state],
    }  # fmt: skip
    (folder / "exits.json").write_text(json.dumps(value))


_EXAMPLE = """
example:
  titan-ckpt debug inject skip --ranks 4 --out ./drill
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "cases:\n" + "".join(f"  {name:18} {truth.text}\n" for name, truth in CASES.items()) + _EXAMPLE
    parser.add_argument("case", metavar="CASE")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes to start (default 4)")
    parser.add_argument("--out", metavar="DIR", help="folder for the incident (default: ./incident-CASE)")
    parser.add_argument("--force", action="store_true", help="write into a folder that holds files already")


def _run(arguments: argparse.Namespace) -> int:
    _need_torch()
    folder = Path(arguments.out or f"incident-{arguments.case}")
    _check_free(folder, is_forced=arguments.force)
    inject(arguments.case, folder, ranks=arguments.ranks)
    write_text(f"{folder}")
    write_note(f"now try: titan-ckpt debug {folder}")
    return 0


def _check_free(folder: Path, *, is_forced: bool) -> None:
    """Refuse a folder with files of something else: an incident's would replace them, or be mixed with them."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; give a folder as --out")
    if folder.is_dir() and any(folder.iterdir()) and not is_forced:
        raise UsageError(f"{folder}: holds files already; give another --out, or --force to write into it")


def _need_torch() -> None:
    """Fail here, with the pip command, rather than in the ranks."""
    import torch  # noqa: F401  (the laptop install has none)


INJECT = Command(configure=_configure, run=_run)
