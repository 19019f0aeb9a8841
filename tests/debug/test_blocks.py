"""Operations of many ranks, processed in blocks: the alignment does not depend on block boundaries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.simulated_jobs import random_scenario, write
from titan_ckpt.debug import open_run
from titan_ckpt.debug.diagnosis.align import Lane, lanes
from titan_ckpt.debug.incident import operation_table
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RECORD
from titan_ckpt.debug.incident.operation_table import LEAST_SHARING, BlockedRanks, Distinct, column, with_blocks
from titan_ckpt.debug.incident.records import Array
from titan_ckpt.debug.record.hooks import BoxWriter


def _cells(found: list[Lane]) -> list[tuple[Array, ...]]:
    return [(lane.row, lane.signature, lane.last, lane.done) for lane in found]


@pytest.mark.parametrize("seed", range(6))
def test_lanes_are_the_same_in_blocks_of_any_size(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(random_scenario(seed, (16,)), tmp_path)
    run = open_run(str(tmp_path))
    whole = _cells(lanes(run))
    monkeypatch.setattr(operation_table, "MOST_OPERATIONS", 50)
    for one, other in zip(whole, _cells(lanes(run)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_three_keys_give_the_order_of_the_one_that_does_not_fit() -> None:
    random = np.random.default_rng(0)
    group, owner, seq = random.integers(0, 9, 500), np.sort(random.integers(0, 9, 500)), random.integers(0, 99, 500)
    few = operation_table._order(group, owner, seq)
    many = operation_table._order(group + (1 << 40), owner, seq)
    assert np.array_equal(few, many)


def test_values_are_numbered_by_first_appearance() -> None:
    known = Distinct()
    known.add(np.array([7, 3, 7, 5]))
    known.add(np.array([1, 5]))
    assert known.numbers(np.array([7, 3, 5, 1])).tolist() == [0, 1, 2, 3]


def _box(folder: Path, rank: int, world_size: int, operations: int) -> None:
    """A black box whose text differs from rank to rank."""
    box = BoxWriter(folder / f"rank_{rank:05d}.box", rank=rank, world_size=world_size, capacity=64)
    box.add_text("op", 0, "all_reduce")
    box.add_text("group", 0, [f"tp{rank}", "", [rank, (rank + 1) % world_size]])
    box.add_text("group", 1, ["0", "default_pg", {"from": 0, "to": world_size - 1, "by": 1}])
    for n in range(1, operations + 1):
        at = HEADER_BYTES + (n - 1) % 64 * RECORD.size
        RECORD.pack_into(box.map, at, n * 1000, n * 1000 + 1, 8, n, 0, -1, n % 2, 0, 0, 0, 1, n)
    box.count = operations
    box.beat()
    box.map.close()


def test_boxes_of_different_texts_keep_their_own_groups(tmp_path: Path) -> None:
    for rank in range(300):
        _box(tmp_path, rank, 300, rank % 50)
    kept = open_run(str(tmp_path))
    assert isinstance(kept.ranks, BlockedRanks)
    assert len(kept.ranks.blocks) < len(kept.ranks) // LEAST_SHARING
    assert {len(record.operations) for record in kept.ranks.values()} == set(range(50))
    assert [kept.operation(rank, -2).group.name for rank in (2, 3, 49)] == ["0", "tp3", "tp49"]
    built = replace(kept, ranks=dict(kept.ranks))
    for one, other in zip(_cells(lanes(kept)), _cells(lanes(built)), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    rows = np.array([[0, 1], [1, 0]])
    assert np.array_equal(
        column(kept.ranks, "created_ns", [7, 3], rows), column(built.ranks, "created_ns", [7, 3], rows)
    )


def test_operations_out_of_rank_order_are_no_blocks(tmp_path: Path) -> None:
    for rank in range(20):
        _box(tmp_path, rank, 20, 3)
    ranks = open_run(str(tmp_path)).ranks
    table = np.concatenate([record.operations for record in ranks.values()])
    homes = [(table, 3 * place) for place in range(20)]
    assert isinstance(with_blocks(ranks, homes), BlockedRanks)
    assert not isinstance(with_blocks(ranks, homes[::-1]), BlockedRanks)
    assert not isinstance(with_blocks(ranks, [*homes[:-1], None]), BlockedRanks)
