"""Several ranks at fault: those that left their own order, or that differ from most groups of their kind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import Verdict, diagnose
from titan_ckpt.debug.diagnosis.same_fault import named_together
from titan_ckpt.debug.incident.kinds import VerdictKind

GROUPS = "".join(
    f"group {name}: {members}\n"
    for name, members in (
        ("a as rep", "0 3 6"), ("b as rep", "1 4 7"), ("c as rep", "2 5 8"),
        ("d as shard", "0 1 2"), ("e as shard", "3 4 5"), ("f as shard", "6 7 8"),
    )
)  # fmt: skip
REP = dict(zip(range(9), "abcabcabc", strict=True))
SHARD = dict(zip(range(9), "dddeeefff", strict=True))


def mesh(culprits: set[int], wrong: str, *, usual: str = "{rep}:all_gather(8)@1 {shard}:all_reduce(4)@2") -> str:
    """Nine ranks, three steps; in the last those at fault do `wrong` instead, and all wait."""
    lines = []
    for rank in range(9):
        names = {"rep": REP[rank], "shard": SHARD[rank]}
        steps = [usual.format(**names)] * 3 + [(wrong if rank in culprits else usual).format(**names)]
        *before, last = " ".join(steps).split()
        lines.append(f"{rank}: {' '.join([*before, last])}?")
    return GROUPS + "\n".join(lines)


def test_two_of_three_that_pass_another_size_are_at_fault() -> None:
    """The other groups of the mesh passed what the third did."""
    top = diagnose(job(mesh({6, 7}, "{rep}:all_gather(8)@1 {shard}:all_reduce(5)@2")))[0]
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", (6, 7))


def test_one_of_three_that_passes_another_size_is_at_fault() -> None:
    top = diagnose(job(mesh({6}, "{rep}:all_gather(8)@1 {shard}:all_reduce(5)@2")))[0]
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", (6,))


@pytest.mark.parametrize(("odd", "culprits"), [({0, 1}, ()), ({0}, (0,))])
def test_without_other_groups_a_new_size_of_most_accuses_nobody(odd: set[int], culprits: tuple[int, ...]) -> None:
    """From one line all had passed 64; now two of three pass 67: the third may be wrong, or they."""
    lines = (f"{rank}: {'all_reduce(64)@5 ' * 4}all_reduce({67 if rank in odd else 64})@5?" for rank in range(3))
    top = diagnose(job("\n".join(lines)))[0]
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", culprits)


def test_a_whole_node_that_leaves_one_out_is_at_fault() -> None:
    """Each waits for the other: the node in the next operation of all, the others in the one that it left out."""
    tp = {0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "b", 6: "a", 7: "b"}
    lines = ["group a as dp: 0 2 4 6", "group b as dp: 1 3 5 7"]
    for rank in range(8):
        step = f"{tp[rank]}:all_gather@1 all_reduce@2 "
        last = "all_reduce@2?" if rank in (4, 5) else f"{tp[rank]}:all_gather@1?"
        lines.append(f"{rank}: {step * 4}{last}")
    top = diagnose(job("\n".join(lines)))[0]
    assert top.culprits == (4, 5)
    assert "left out all_gather" in top.headline


def test_verdicts_on_the_same_rank_are_not_named_together_twice() -> None:
    """Two rules may find the same fault of one rank; of another rank it is said that the same is true."""
    first, other = (
        Verdict(
            verdict=VerdictKind.SKIPPED_COLLECTIVE, culprits=(rank,), victims=(0,), confidence=confidence, headline="h"
        )
        for rank, confidence in ((2, 0.9), (3, 0.8))
    )
    assert named_together([first, replace(first, headline="again", confidence=0.8)], 1.0) == first
    both = named_together([first, other, replace(first, headline="again")], 1.0)
    assert (both.culprits, both.headline) == ((2, 3), "h; the same is true of rank 3")
