"""Telling stragglers from a busy host, on black boxes with known times."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.cli import exit_code
from titan_ckpt.debug.diagnosis.looks_well import went_on
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RECORD, RETURNED
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import RECV
from titan_ckpt.debug.record.hooks import BoxWriter

MS = 1_000_000
START_NS = 1_700_000_000 * 10**9


def _box(folder: Path, rank: int, ranks: int) -> BoxWriter:
    box = BoxWriter(folder / f"rank_{rank:05d}.box", rank=rank, world_size=ranks)
    for kind, value in (("op", "all_reduce"), ("dtype", "Float"), ("group", ["0", "default_pg", list(range(ranks))])):
        box.add_text(kind, 0, value)
    box.add_text("op", 1, "recv")
    box.add_text("site", 1, [["train.py", 10, "step"]])
    return box


def _write_boxes(folder: Path, delays_ms: list[list[int]]) -> None:
    """One box per rank; each rank enters an operation `delays_ms[operation][rank]` after the previous one ended."""
    ranks = len(delays_ms[0])
    for rank in range(ranks):
        box = _box(folder, rank, ranks)
        now = START_NS
        for number, delays in enumerate(delays_ms):
            created, now = now + delays[rank] * MS, now + max(delays) * MS + MS
            at = HEADER_BYTES + number * RECORD.size
            RECORD.pack_into(box.map, at, created, now, 1, number + 1, 1, -1, 0, 0, 0, 0, RETURNED, number + 1)
        box.count = len(delays_ms)
        box.stop()


def test_straggler_on_a_busy_host_is_named(tmp_path: Path) -> None:
    delays = [[0, 500, 0, 0] for _ in range(10)]
    delays[2], delays[5], delays[6] = [0, 500, 1150, 0], [1300, 500, 0, 0], [0, 500, 0, 950]
    _write_boxes(tmp_path, delays)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("STRAGGLER", (1,))


def test_random_delays_hardly_ever_make_a_straggler(tmp_path: Path) -> None:
    verdicts = []
    for seed in range(100):
        chance = random.Random(seed)
        delays = [[0] * 4 for _ in range(20)]
        for operation in delays:
            operation[chance.randrange(4)] = chance.choice((0, 100, 300, 1000))
        folder = tmp_path / str(seed)
        folder.mkdir()
        _write_boxes(folder, delays)
        verdicts.append(diagnose(open_run(str(folder)))[0].verdict)
    assert verdicts.count(VerdictKind.HEALTHY) >= 95


@pytest.mark.parametrize(("own_ms", "culprits"), [(100, ()), (900, (2,))])
def test_last_stage_of_a_pipeline_is_late_for_itself_only(
    own_ms: int, culprits: tuple[int, ...], tmp_path: Path
) -> None:
    """Three stages: each receives, works (100 ms; the last `own_ms`) and sends; then all meet in an all_reduce."""
    work, ends = (100, 100, own_ms), [0, 0, 0]
    rows: list[list[tuple[int, int, int, int, int]]] = [[], [], []]  # created, ended (ms), seq, peer, direction
    for step in range(1, 12):
        begun, came = max(ends), 0
        for rank in range(3):
            free = begun
            if rank:
                rows[rank].append((begun, came, step, rank - 1, RECV))
                free = came
            came = ends[rank] = free + work[rank]
        for rank in range(3):
            rows[rank].append((ends[rank], max(ends) + 1, step, -1, 0))
        ends = [max(ends) + 1] * 3
    for rank in range(3):
        box = _box(tmp_path, rank, 3)
        for number, (created, ended, seq, peer, way) in enumerate(rows[rank]):
            times = START_NS + created * MS, START_NS + ended * MS
            op = 1 if way else 0
            RECORD.pack_into(
                box.map,
                HEADER_BYTES + number * RECORD.size,
                *times,
                1,
                seq,
                1,
                peer,
                0,
                op,
                0,
                way,
                RETURNED,
                number + 1,
            )
        box.count = len(rows[rank])
        box.stop()
    run = open_run(str(tmp_path))
    top = diagnose(run)[0]
    assert (top.culprits, exit_code(top, is_over=went_on(run))) == (culprits, 0)
    assert exit_code(top) == (1 if culprits else 0)
