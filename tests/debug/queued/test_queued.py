"""NCCL: an operation that one device has not come to, since an earlier one of another group, or a send or recv, is not done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.debug.read.test_dumps import entry
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.records import Verdict

WORLD = "[0, 1, 2, 3]"


def judged(folder: Path, rows: Mapping[int, Sequence[dict[str, Any]]], **groups: str) -> list[Verdict]:
    config = {name: {"name": name, "desc": desc, "ranks": WORLD} for name, desc in groups.items()}
    for rank, entries in rows.items():
        document = {"version": "2.10", "pg_config": config, "entries": list(entries)}
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(document))
    return diagnose(open_run(folder))


def collective(place: int, group: tuple[str, str], seq: int, state: str) -> dict[str, Any]:
    done = state == "completed"
    more = {"process_group": group, "collective_seq_id": seq, "state": state, "retired": done, "record_id": place}
    more |= {"time_discovered_started_ns": None} if state == "scheduled" else {}
    return entry("2.10", place + 1, is_done=done, **more)


def message(place: int, text: str, seq: int, state: str) -> dict[str, Any]:
    more = {"profiling_name": f"nccl:{text}", "is_p2p": True, "p2p_seq_id": seq, "collective_seq_id": 0}
    return collective(place, ("0", "default_pg"), 0, state) | more


def routine(groups: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        collective(2 * step + n, group, step + 1, "completed") for step in range(4) for n, group in enumerate(groups)
    ]


def test_groups_taken_in_another_order_on_one_rank(tmp_path: Path) -> None:
    a, b = ("1", "grads_a"), ("2", "grads_b")
    rows = {}
    for rank in range(4):
        first, second = (b, a) if rank == 3 else (a, b)
        ends = [collective(8, first, 5, "started"), collective(9, second, 5, "scheduled")]
        rows[rank] = [*routine((a, b)), *ends]
    top = judged(tmp_path, rows, **{"1": "grads_a", "2": "grads_b"})[0]
    assert (top.verdict, top.culprits) == ("ORDER_MISMATCH", (3,))


def test_a_collective_behind_a_recv_whose_send_is_missing(tmp_path: Path) -> None:
    world = ("0", "default_pg")
    rows = {}
    for rank in range(4):
        before = [collective(n, world, n + 1, "completed") for n in range(3)]
        ring = [
            message(3, f"send {rank}->{(rank + 1) % 4}", 1, "completed"),
            message(4, f"recv {rank}<-{(rank - 1) % 4}", 1, "completed"),
        ]
        again = [message(5, f"recv {rank}<-{(rank - 1) % 4}", 2, "scheduled" if rank == 2 else "completed")]
        again += (
            []
            if rank == 1
            else [message(6, f"send {rank}->{(rank + 1) % 4}", 2, "scheduled" if rank == 2 else "completed")]
        )
        last = collective(7, world, 4, "scheduled" if rank == 2 else "started")
        rows[rank] = [*before, *ring, *again, last]
    verdicts = judged(tmp_path, rows, **{"0": "default_pg"})
    assert verdicts[0].culprits == (1,)
    assert verdicts[0].verdict in ("P2P_MISSING_PEER", "SKIPPED_COLLECTIVE")


def test_a_collective_that_nothing_holds_up_was_not_started(tmp_path: Path) -> None:
    world = ("0", "default_pg")
    rows = {
        rank: [
            *(collective(n, world, n + 1, "completed") for n in range(3)),
            collective(3, world, 4, "scheduled" if rank == 2 else "started"),
        ]
        for rank in range(4)
    }
    top = judged(tmp_path, rows, **{"0": "default_pg"})[0]
    assert (top.verdict, top.culprits) == ("SCHEDULED_NOT_STARTED", (2,))


def test_less_queued_behind_what_all_have_come_to(tmp_path: Path) -> None:
    """An operation of every other step, which all completed, is none too many on the rank that has queued less."""
    shard, world = ("1", "mesh_dp"), ("0", "default_pg")
    order = [shard, shard, world, shard, shard, world, world] * 2
    numbers = [order[: place + 1].count(group) for place, group in enumerate(order)]
    done = [collective(n, group, seq, "completed") for n, (group, seq) in enumerate(zip(order, numbers, strict=True))]
    begun, first = collective(14, shard, 9, "started"), done[:]
    queued = [collective(15, shard, 10, "scheduled"), collective(16, world, 7, "scheduled")]
    rows = {rank: [*first, begun, *(queued if rank != 1 else ())] for rank in range(4)}
    verdicts = judged(tmp_path, rows, **{"0": "default_pg", "1": "mesh_dp"})
    assert not verdicts[0].culprits
    assert not any(verdict.subtype == "extra_collective" for verdict in verdicts)
