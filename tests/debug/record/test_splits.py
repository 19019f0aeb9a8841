"""Splits of all_to_all in the black box: written by both rings, read back, also by readers of boxes without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.debug import open_run
from titan_ckpt.debug.incident.black_box import SPLITS_BYTES, SPLITS_HALF, pack_splits, unpack_splits
from titan_ckpt.debug.read.black_boxes import BlackBox, BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.record import ring
from titan_ckpt.debug.record.hooks import BoxWriter, Hooks
from titan_ckpt.debug.record.ring import splits_of


def parsed(data: bytes) -> BlackBox:
    return BoxReader(Interner()).parse(data, "box")


@pytest.fixture(params=["C", "Python"])
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BoxWriter]:
    """The box of a group of one rank, whose ring holds eight operations."""
    if request.param == "Python":
        monkeypatch.setattr(ring, "compiled", None)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    box = BoxWriter(tmp_path / "rank_00000.box", rank=0, world_size=1, capacity=8)
    hooks = Hooks(box)
    hooks.install()
    yield box
    hooks.remove()
    dist.destroy_process_group()


def test_splits_of_every_call_are_read_back_by_row(box: BoxWriter) -> None:
    dist.all_to_all_single(torch.empty(6), torch.ones(6))
    dist.all_reduce(torch.ones(2))
    dist.all_to_all_single(torch.empty(3, 4), torch.ones(3, 4), [3], [3])
    dist.all_to_all([torch.empty(5)], [torch.ones(5)])
    assert parsed(bytes(box.map)).splits == {0: ((6,), (6,)), 2: ((12,), (12,)), 3: ((5,), (5,))}


def test_splits_stay_with_their_operation_in_a_full_ring(box: BoxWriter) -> None:
    for number in range(1, 21):
        dist.all_to_all_single(torch.empty(number), torch.ones(number))
    assert parsed(bytes(box.map)).splits == {row: ((13 + row,), (13 + row,)) for row in range(8)}


def test_call_that_torch_refuses_is_recorded_without_splits(box: BoxWriter) -> None:
    with pytest.raises(RuntimeError, match="split"):
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [4])
    found = parsed(bytes(box.map))
    assert (len(found.operations), dict(found.splits)) == (1, {})


def test_box_of_an_earlier_release_has_no_splits(box: BoxWriter) -> None:
    dist.all_to_all_single(torch.empty(6), torch.ones(6))
    found = parsed(bytes(box.map)[:-SPLITS_BYTES])
    assert (len(found.operations), dict(found.splits)) == (1, {})


def test_splits_are_read_from_the_tails_of_many_boxes(tmp_path: Path) -> None:
    for rank in range(300):  # more than are read whole
        box = BoxWriter(tmp_path / f"rank_{rank:05d}.box", rank=rank, world_size=300, capacity=64)
        box.add_text("op", 0, "all_to_all")
        box.add_text("group", 0, ["0", "default_pg", [*range(300)]])
        at = ring.new_ring(box.map, 64, _Names(), {}, {}).record(1, ring.NO_PEER, 0, None)
        box.add_splits(at, ((rank,) * 300, (7,) * 300))
        box.count = 1
        box.beat()
        box.map.close()
    run = open_run(str(tmp_path))
    assert [run.ranks[rank].splits[0, 1][0][5] for rank in (0, 8, 299)] == [0, 8, 299]


class _Names:
    """Names for a ring that meets no group, dtype or code that matters."""

    def add_code(self, _code: object) -> bool:
        return False

    def add_site(self, _frame: object) -> int:
        return 1

    def add_group(self, _group: object) -> ring.RingGroup:
        raise AssertionError("no group is used")

    def add_dtype(self, _dtype: object) -> int:
        raise AssertionError("no tensor is used")


@pytest.mark.parametrize("members", [1, 3, 64, 1000, 2047])
def test_the_newest_splits_are_kept_and_no_older_ones_mixed_in(members: int) -> None:
    area, used, kept = bytearray(SPLITS_BYTES), 0, {}
    for number in range(1, 6 * SPLITS_BYTES // (16 * members) + 10):
        splits = tuple(range(number, number + members)), (number,) * members
        begin, packed = pack_splits(used, number, splits)
        area[begin % SPLITS_BYTES : begin % SPLITS_BYTES + len(packed)] = packed
        used, kept[number] = begin + len(packed), splits
        if number % (1 + 200 // members):
            continue
        found = unpack_splits(bytes(area), used)
        assert number in found
        assert all(kept[one] == of_one for one, of_one in found.items())
        assert sorted(found) == list(range(min(found), number + 1))
    assert len(found) >= SPLITS_HALF // (16 + 16 * members)


@pytest.mark.parametrize("area", [b"", b"\xff" * SPLITS_BYTES, bytes(SPLITS_BYTES), bytes(range(256)) * 256])
def test_damaged_splits_are_none(area: bytes) -> None:
    assert unpack_splits(area, 1 << 40) == {}


def test_a_group_too_large_for_the_area_keeps_none(tmp_path: Path) -> None:
    box = BoxWriter(tmp_path / "box", rank=0, world_size=1, capacity=4)
    at = ring.new_ring(box.map, 4, _Names(), {}, {}).record(1, ring.NO_PEER, 0, None)
    box.add_splits(at, ((1,) * 2048, (1,) * 2048))
    box.add_splits(at, ((2,) * 2047, (3,) * 2047))
    assert {row: splits[0][0] for row, splits in parsed(bytes(box.map)).splits.items()} == {0: 2}


@pytest.mark.parametrize(
    ("arguments", "splits"),
    [
        ((torch.ones(4, 3), torch.ones(6, 3), [1, 3], [2, 4]), ((6, 12), (3, 9))),
        ((torch.ones(4, 3), torch.ones(6, 3), [], [2, 4]), ((6, 12), (6, 6))),
        ((torch.ones(0, 3), torch.ones(0, 3), [0, 0], [0, 0]), ((0, 0), (0, 0))),
        (([torch.ones(2), torch.ones(0)], [torch.ones(1), torch.ones(5)], None), ((1, 5), (2, 0))),
        (([torch.ones(2)], [torch.ones(1), torch.ones(5)], None), None),
        ((torch.ones(4), torch.ones(4), [1, 3], [4]), None),
        ((torch.ones(4),), None),
    ],
)
def test_splits_of_a_call_in_elements(arguments: tuple[object, ...], splits: object) -> None:
    assert splits_of(2, arguments) == splits
