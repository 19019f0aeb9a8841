"""The analyzer on partial evidence from hung jobs: it accuses no innocent rank and reports what is undecided."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.debug import Run, Verdict, diagnose, open_run
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RECORD
from titan_ckpt.debug.incident.records import RECV, SEND
from titan_ckpt.debug.record.hooks import BoxWriter
from tools.paths import INCIDENTS

CASES: dict[str, dict[str, Any]] = json.loads((INCIDENTS / "MANIFEST.json").read_text())["cases"]
_RANK = re.compile(r"rank_(\d+)")


def _rank_of(name: str) -> int:
    match = _RANK.match(name)
    return int(match.group(1)) if match else -1


def _is_of(rank: int, name: str) -> bool:
    return _rank_of(name) == rank


def _is_not_of(rank: int, name: str) -> bool:
    return _rank_of(name) != rank


PARTS: dict[str, Callable[[str], bool]] = {
    "dumps": lambda name: name.startswith("rank") and not name.endswith((".log", ".stacks")),
    "stacks": lambda name: name.endswith(".stacks"),
    "logs": lambda name: name.startswith("rank") and name.endswith(".log"),
    "launcher": lambda name: name == "launcher.log",
    "no launcher": lambda name: name != "launcher.log",
    "later snapshots": lambda name: "after_error" in name or "sigterm" in name,
    **{f"without rank {rank}": partial(_is_not_of, rank) for rank in range(4)},
    **{f"rank {rank}": partial(_is_of, rank) for rank in range(2)},
}


def part_of(case: str, part: str, folder: Path) -> Run | None:
    kept = [path for path in sorted((INCIDENTS / case).iterdir()) if PARTS[part](path.name)]
    for path in kept:
        shutil.copy(path, folder / path.name)
    return open_run(str(folder)) if kept else None


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES)
def test_part_of_the_evidence_accuses_nobody_innocent(case: str, part: str, tmp_path: Path) -> None:
    run = part_of(case, part, tmp_path)
    if run is None:
        return
    top = diagnose(run)[0]
    guilty = set(CASES[case]["culprits"])
    assert guilty <= set(top.culprits) or not top.culprits  # a tie names both ranks
    assert len(top.culprits) <= 2 * len(guilty)


def test_rank_of_which_nothing_was_collected_is_asked_for(tmp_path: Path) -> None:
    top = _top("skip", "without rank 2", tmp_path)
    assert (top.verdict, top.culprits, top.victims) == ("INSUFFICIENT_DATA", (), (0, 1, 3))
    assert "rank 2" in top.headline
    assert "collect from rank 2" in top.next_steps[0]


def test_launcher_alone_does_not_blame_an_aborted_rank(tmp_path: Path) -> None:
    assert _top("size", "launcher", tmp_path).verdict == "INSUFFICIENT_DATA"


def test_stack_in_another_collective_names_its_rank(tmp_path: Path) -> None:
    for path in (INCIDENTS / "skip").iterdir():
        if _rank_of(path.name) != 2 or path.suffix in (".stacks", ".log"):
            shutil.copy(path, tmp_path / path.name)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("SKIPPED_COLLECTIVE", (2,))


def test_dumps_written_for_an_error_are_not_healthy(tmp_path: Path) -> None:
    assert _top("pydeadlock", "later snapshots", tmp_path).verdict != "HEALTHY"


def _top(case: str, part: str, folder: Path) -> Verdict:
    run = part_of(case, part, folder)
    assert run is not None
    return diagnose(run)[0]


def nccl_dump(entries: list[dict[str, Any]], *, first: int = 0) -> str:
    """The dump of one of two ranks; each entry extends `common`."""
    common = {
        "pg_id": 0, "process_group": ["0", "default_pg"], "input_sizes": [[8]], "output_sizes": [[8]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "completed", "retired": True, "timeout_ms": 600_000,
        "time_discovered_started_ns": 2, "time_discovered_completed_ns": 3, "collective_seq_id": 0, "p2p_seq_id": 0,
        "is_p2p": False, "frames": [{"name": "step", "filename": "/srv/train.py", "line": 7}],
    }  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    found = [common | {"record_id": first + i, "time_created_ns": i + 1} | entry for i, entry in enumerate(entries)]
    return json.dumps({"version": "2.10", "pg_config": config, "entries": found})


def batch(rank: int, number: int, *, state: str, seq: int) -> list[dict[str, Any]]:
    """A send to and a recv from the other rank in one batch, as NCCL records them."""
    inside = {"state": "scheduled", "retired": False, "p2p_seq_id": number, "is_p2p": True, "collective_seq_id": seq}
    whole = inside | {
        "profiling_name": "nccl:coalesced",
        "input_sizes": [],
        "state": state,
        "retired": state == "completed",
    }
    return [
        inside | {"profiling_name": f"nccl:send {rank}->{1 - rank}"},
        inside | {"profiling_name": f"nccl:recv {rank}<-{1 - rank}"},
        whole,
    ]


def all_reduce(seq: int, state: str = "completed") -> dict[str, Any]:
    return {
        "profiling_name": "nccl:all_reduce",
        "collective_seq_id": seq,
        "state": state,
        "retired": state == "completed",
    }


@pytest.mark.parametrize("first", [0, 5_000])
def test_batches_of_sends_that_ended_are_waits_of_nobody(first: int, tmp_path: Path) -> None:
    for rank in (0, 1):
        steps = [[*batch(rank, n, state="completed", seq=n), all_reduce(n + 1)] for n in range(4)]
        dump = nccl_dump([entry for step in steps for entry in step], first=first)
        (tmp_path / f"rank_{rank}.json").write_text(dump)
    run = open_run(str(tmp_path))
    assert diagnose(run)[0].verdict == "RUNNING"
    assert set(run.ranks[0].operations["seq"][run.ranks[0].operations["p2p"] != 0]) == (
        {1, 2, 3, 4} if first == 0 else {-1}
    )


@pytest.mark.parametrize(("first", "culprits", "suspects"), [(0, (1,), ()), (5_000, (), (1,))])
def test_batch_without_its_other_half_waits_for_the_peer(
    first: int, culprits: tuple[int, ...], suspects: tuple[int, ...], tmp_path: Path
) -> None:
    """A full ring has lost the numbers of earlier messages: nobody is accused then."""
    steps = [[*batch(0, n, state="completed", seq=n), all_reduce(n + 1)] for n in range(3)]
    waiting = [entry for step in steps for entry in step] + batch(0, 3, state="started", seq=3)
    steps = [[*batch(1, n, state="completed", seq=n), all_reduce(n + 1)] for n in range(3)]
    elsewhere = [entry for step in steps for entry in step] + [all_reduce(4, "started")]
    (tmp_path / "rank_0.json").write_text(nccl_dump(waiting, first=first))
    (tmp_path / "rank_1.json").write_text(nccl_dump(elsewhere, first=first))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits, top.suspects) == ("P2P_MISSING_PEER", culprits, suspects)


def test_gloo_dumps_alone_do_not_accuse_a_rank_in_p2p(tmp_path: Path) -> None:
    gloo = {
        "state": "scheduled",
        "retired": True,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
    }
    for rank in range(2):
        entries = [all_reduce(n + 1) | gloo for n in range(3 - rank)]
        if rank == 0:
            entries[-1]["retired"] = False
        (tmp_path / f"rank_{rank}.json").write_text(nccl_dump(entries))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits, top.victims, top.chain) == ("INSUFFICIENT_DATA", (), (0, 1), ((0, 1),))
    assert "rank 1 did not issue" in top.headline
    assert "py-spy dump" in top.next_steps[0]


CLOSED = """\
Traceback (most recent call last):
  File "/srv/train.py", line 9, in <module>
    dist.all_reduce(tensor)
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3, in all_reduce
    work.wait()
RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242
"""


def _leave(folder: Path, codes: list[int], times: list[float], dead: set[int]) -> Verdict:
    """Diagnose logs and exits of ranks; each surviving rank logs a closed connection."""
    for rank in range(len(codes)):
        text = f"2026-11-21 07:55:06,{rank}00 INFO step 2 done\n"
        (folder / f"rank_{rank}.log").write_text(text + (CLOSED if rank not in dead else ""))
    exits = [
        {"rank": rank, "code": code, "time_s": time_s}
        for rank, (code, time_s) in enumerate(zip(codes, times, strict=True))
    ]
    value = {"titan_ckpt": "exits", "world_size": len(codes), "code": 1, "exits": exits}
    (folder / "exits.json").write_text(json.dumps(value))
    return diagnose(open_run(str(folder)))[0]


def test_rank_that_silently_failed_first_is_the_dead_one(tmp_path: Path) -> None:
    top = _leave(tmp_path, [1, 1, 3, 1], [13.0, 13.0, 10.0, 13.0], {2})
    assert (top.verdict, top.culprits) == ("RANK_DIED", (2,))
    assert "exit code 3" in top.headline


def test_ranks_killed_together_are_one_verdict_later_ones_not(tmp_path: Path) -> None:
    top = _leave(tmp_path, [1, -9, -9, -9], [13.0, 10.0, 10.5, 40.0], {1, 2, 3})
    assert (top.verdict, top.subtype, top.culprits) == ("RANK_DIED", "signal", (1, 2))
    assert "they were killed by SIGKILL" in top.headline


@pytest.mark.parametrize(("earlier", "culprit"), [(0, 1), (2, 2)])
def test_first_send_to_a_rank_went_to_the_wrong_peer(earlier: int, culprit: int, tmp_path: Path) -> None:
    """Rank 0 waits for 1, 1 sends to 2, 2 is in a collective: the culprit depends on earlier sends from 1 to 2."""
    recv, send, reduce, out = (1, RECV), (0, SEND), (2, 0), 1
    whole = [[], [(*send, 2, n + 1, out) for n in range(earlier)], [(*recv, 1, n + 1, out) for n in range(earlier)]]
    ends = [(*recv, 1, 1, 0), (*send, 2, earlier + 1, 0), (*reduce, -1, 1, 0)]
    for rank in range(3):
        box = BoxWriter(tmp_path / f"rank_{rank:05d}.box", rank=rank, world_size=3, capacity=8)
        for number, name in enumerate(("send", "recv", "all_reduce")):
            box.add_text("op", number, name)
        box.add_text("group", 0, ["0", "default_pg", [0, 1, 2]])
        for number, (op, direction, peer, seq, outcome) in enumerate([*whole[rank], ends[rank]], 1):
            at = HEADER_BYTES + (number - 1) * RECORD.size
            RECORD.pack_into(box.map, at, number, 0, 4, seq, 0, peer, 0, op, -1, direction, outcome, number)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("P2P_MISSING_PEER", (culprit,))
    assert f"for rank {culprit}'s half" in top.headline
