"""Sends and receives as lanes, which the grid shows: column j holds each rank's j-th send or receive of a group. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from titan_ckpt.debug.diagnosis.align import MAX_WINDOW, Lane
from titan_ckpt.debug.diagnosis.waiting.wait_graph import Edge
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.operation_table import operation_blocks
from titan_ckpt.debug.incident.records import Array, Run, Verdict

P2P_VERDICTS = (VerdictKind.P2P_MISSING_PEER, VerdictKind.P2P_SIZE_MISMATCH, VerdictKind.P2P_CYCLE)


def ordinal(number: int) -> str:
    """`1st`, `12th`, `23rd`: how sends and receives are counted per rank, as their recorded numbers count per pair of ranks."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def p2p_lanes(run: Run) -> list[Lane]:
    """A lane per group in which ranks send and receive; one column more than any rank has, for a half that is missing."""
    group, owner, row = _p2p_rows(run)
    ranks = np.fromiter(run.ranks, np.int64, len(run.ranks))
    return [
        _lane(run, number, ranks, owner[group == number], row[group == number]) for number in np.unique(group).tolist()
    ]


def _p2p_rows(run: Run) -> tuple[Array, Array, Array]:
    """Of each send and receive: group, place of its rank among all ranks, place among its rank's operations."""
    found = [[np.zeros(0, np.int64)] * 3]
    for block in operation_blocks(run.ranks):
        places = np.flatnonzero(block.table["p2p"])
        if len(places):
            found.append([block.table["group"][places], block.owner[places], block.row[places]])
    group, owner, row = (np.concatenate(column).astype(np.int64) for column in zip(*found, strict=True))
    return group, owner, row


def _lane(run: Run, group: int, ranks: Array, owner: Array, row: Array) -> Lane:
    order = np.argsort(owner, kind="stable")
    owner, row = owner[order], row[order]
    users, starts, counts = np.unique(owner, return_index=True, return_counts=True)
    width = min(int(counts.max()), MAX_WINDOW)
    column = np.arange(len(owner)) - np.repeat(starts, counts) - np.repeat(np.maximum(counts - width, 0), counts)
    rows = np.full((len(users), width + 1), -1, np.int32)
    is_kept = column >= 0
    rows[np.repeat(np.arange(len(users)), counts)[is_kept], column[is_kept]] = row[is_kept]
    members = tuple(ranks[users].tolist())
    return Lane(
        group=group, members=members, first_seq=1, row=rows, signature=np.where(rows >= 0, 0, -1).astype(np.int8),
        codes=np.zeros(1, np.int64),
        last=np.minimum(counts, width), done=np.ones(len(users), bool), pending=np.full(len(users), -1),
        is_silent=np.array([not run.ranks[rank].dumps for rank in members]),
    )  # fmt: skip


def missing_halves(lane: Lane, edges: Iterable[Edge]) -> dict[int, int]:
    """The column of the send or receive that a rank has not issued, by the place of the rank among the members."""
    place = {rank: i for i, rank in enumerate(lane.members)}
    awaited = {edge.awaited for edge in edges if edge.is_p2p and edge.group == lane.group}
    return {place[rank]: int(lane.last[place[rank]]) for rank in awaited if rank in place}


def different_halves(run: Run, lane: Lane, top: Verdict) -> dict[int, int]:
    """The column of the send or receive whose size differs from its other half, by the place of the rank at fault."""
    if top.verdict != VerdictKind.P2P_SIZE_MISMATCH or top.seq is None or str(run.groups[lane.group]) != top.group:
        return {}
    found: dict[int, int] = {}
    for place, rank in enumerate(lane.members):
        if rank in top.culprits:
            table = run.ranks[rank].operations[lane.row[place][lane.row[place] >= 0]]
            of_pair = (table["seq"] == top.seq) & (np.isin(table["peer"], top.victims) | (not top.victims))
            if of_pair.any():
                found[place] = int(of_pair.argmax())
    return found
