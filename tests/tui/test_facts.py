"""What the screens say is so: states, counts, metrics, and one story of each incident, which is the verdict's."""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_jobs import job
from titan_ckpt.debug import diagnose
from titan_ckpt.debug.diagnosis.align import lanes
from titan_ckpt.debug.incident.frames import program_frames
from titan_ckpt.debug.incident.group_mesh import with_coordinates
from titan_ckpt.debug.incident.kinds import RankState, VerdictKind
from titan_ckpt.debug.incident.records import Frame, Group, Thread
from titan_ckpt.debug.incident.waits import pending
from titan_ckpt.debug.report.as_json import report_json
from titan_ckpt.tui.data.grid import ABSENT, DIFFERS, LATE, PENDING, SILENT, build_grid
from titan_ckpt.tui.data.incident import SITUATIONS, Incident, diagnosed, first_error, load_incident, with_odd_splits
from titan_ckpt.tui.data.metrics import parse_metric_lines
from titan_ckpt.tui.data.standing import standing
from titan_ckpt.tui.data.timeline import build_time_grid
from titan_ckpt.tui.pictures.details import operation_rows, rank_rows
from titan_ckpt.tui.pictures.timeline import bars_rows
from titan_ckpt.tui.rows import Role, fitted, row, truncate, truncate_start, wrapped
from titan_ckpt.tui.screens.grid_rows import grid_of
from titan_ckpt.tui.screens.groups import group_rows, member_rows
from titan_ckpt.tui.screens.waits import wait_rows
from tools.paths import DATA

RECORDED = (
    *(f"flight_recorder/{path.name}" for path in sorted((DATA / "flight_recorder").iterdir()) if path.is_dir()),
    *(f"injected/{path.name}" for path in sorted((DATA / "injected").iterdir()) if path.is_dir()),
)
PACKED = (
    *(f"nccl/{name}" for name in ("fsdp_rank5_no_dump", "fsdp_stuck_timed_out", "gpu_clip_rec", "hsdp_cross_deadlock")),
    *(f"nccl/{name}" for name in ("ok_skew_300ms", "pp_missing_send", "rank0_extra_barrier", "two_ranks_swap")),
    *(
        f"job/{name}/recorder_live"
        for name in ("ddp_unequal_then_eval", "new_group_if", "sigstop_self", "tp_dp_loader8")
    ),
    "job/fsdp2_early_exit/recorder_post",
)
ONE_PAIR = """
0 1 2: all_reduce@1 all_to_all@5?
splits 0: world#2 4,4,4 4,4,4
splits 1: world#2 4,4,9 4,4,4
splits 2: world#2 4,4,4 4,4,4
"""
OTHER_SIZE = """
0 2: all_reduce@1 all_reduce@1 all_reduce(4)@1?
1: all_reduce@1 all_reduce@1 all_reduce(8)@1?
"""
CALM = (VerdictKind.HEALTHY, VerdictKind.RUNNING)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    with tarfile.open(DATA / "incidents.tar.xz") as archive:
        wanted = [member for member in archive if member.name.startswith(PACKED)]
        archive.extractall(folder, wanted, filter="data")
    return folder


@pytest.fixture(params=[*RECORDED, *PACKED])
def incident(request: pytest.FixtureRequest, packed: Path) -> Incident:
    name = str(request.param)
    return load_incident(str((packed if name in PACKED else DATA) / name))


def test_the_waits_of_the_screens_are_those_of_the_verdict(incident: Incident) -> None:
    top, culprits = incident.top, set(incident.top.culprits)
    shown = {(edge.waiter, edge.awaited) for edge in incident.edges}
    told = report_json(incident.run, incident.verdicts)["verdicts"][0]["chain"]
    assert {tuple(pair) for pair in told} == set(top.chain)
    assert set(top.chain) <= shown
    direct = {(waiter, awaited) for waiter, awaited in shown if awaited in culprits}
    assert top.verdict in CALM or direct <= set(top.chain)
    # the first tree is a culprit's, and no rank that leads to one is shown to wait for another cause
    texts = [row.text for row in wait_rows(incident, 200)]
    assert not direct or re.search(r"rank \d+ ! culprit", texts[0]) or texts[0].startswith("wait cycle")
    leading = {waiter for waiter, _ in top.chain}
    assert not [pair for pair in shown - set(top.chain) if culprits and pair[0] in leading]
    for rank in culprits - leading:
        assert "waits for" not in "\n".join(row.text for row in rank_rows(incident, rank, 100))


def test_a_rank_waits_in_what_has_not_ended_well(incident: Incident) -> None:
    for edge in incident.edges:
        if edge.seq >= 0 and not edge.is_p2p:
            table = incident.run.ranks[edge.waiter].operations
            rows = np.flatnonzero((table["group"] == edge.group) & (table["seq"] == edge.seq) & (table["p2p"] == 0))
            is_open = bool(pending(table[rows]).any()) or edge.waiter in incident.failed
            assert is_open != edge.is_after, edge


def test_ranks_that_wait_are_shown_as_waiting(incident: Incident) -> None:
    """Also where nothing but the recorder shows it, and where the main thread is in `.item()` or `backward()`."""
    elsewhere = (RankState.ON_CPU, RankState.IN_TORCH, RankState.UNKNOWN)
    waiting = {edge.waiter for edge in incident.edges} & set(incident.wait_of) - set(incident.top.culprits)
    assert not [rank for rank in waiting if incident.states[rank].kind in elsewhere]


def test_only_the_verdict_s_ranks_are_marked_as_different(incident: Incident) -> None:
    top = incident.top
    for lane in incident.lanes:
        grid = grid_of(incident, lane)
        odd = {int(rank) for rank, codes in zip(grid.members, grid.codes, strict=True) if DIFFERS in codes}
        assert odd <= set(top.culprits or top.suspects), (incident.name_of(lane), odd)
        assert top.verdict not in CALM or not (grid.codes >= ABSENT).any()
    others = [rank for rank in incident.states if rank not in (top.culprits or top.suspects)]
    lines = "\n".join(row.text for row in group_rows(incident, 200))
    assert not [rank for rank in others if re.search(rf"(^|\s){rank} differs", lines)]


def test_of_an_unknown_rank_no_screen_counts_operations(incident: Incident) -> None:
    for lane in incident.lanes:
        if incident.is_p2p(lane):
            continue
        grid, name = grid_of(incident, lane), incident.name_of(lane)
        line = next(row.text for row in group_rows(incident, 300) if row.link is not None and row.link.group == name)
        for place in np.flatnonzero(lane.is_silent).tolist():
            rank, codes = lane.members[place], set(grid.codes[place].tolist())
            assert ABSENT not in codes
            assert not re.search(rf"\b{rank} behind", line)
            if lane.last[place] < 0:
                assert codes <= {0, SILENT}
                assert "unknown" in line
                text = "\n".join(row.text for row in operation_rows(incident, lane, lane.first_seq, rank, 80))
                assert "not issued" not in text
                assert any(f"{rank}  unknown" in row.text for row in member_rows(incident, name, 80))


def test_the_cursor_starts_in_the_culprits_group(incident: Incident) -> None:
    link = incident.link_of(incident.top)
    assert len(set(incident.names)) == len(incident.lanes)
    if link is not None and link.group is not None and incident.top.culprits:
        lane = incident.lanes[incident.lane_of(link.group)]
        assert link.rank in lane.members
        last = lane.first_seq + lane.row.shape[1]
        assert lane.first_seq <= incident.stands_at(lane) <= last
        assert link.seq in (None, incident.stands_at(lane))


def test_a_standstill_has_a_moment_in_the_bar(incident: Incident) -> None:
    facts = " ".join(standing(incident, 2e9).facts)
    if incident.began_ns and incident.top.verdict not in (*CALM, VerdictKind.INSUFFICIENT_DATA, VerdictKind.STRAGGLER):
        assert re.search(r"(stuck|stopped) for \d|stopped \d{4}-\d\d-\d\d", facts), facts


def test_ranks_wait_in_the_first_operation_somebody_misses(packed: Path) -> None:
    found = load_incident(str(packed / "nccl/fsdp_stuck_timed_out"))
    assert found.top.seq == 42
    assert {edge.seq for edge in found.edges} == {42}


def test_skewed_clocks_are_no_lateness(packed: Path) -> None:
    found = load_incident(str(packed / "nccl/ok_skew_300ms"))
    lane = found.lanes[0]
    assert LATE not in grid_of(found, lane).codes
    rows = [row.text for rank in lane.members for row in operation_rows(found, lane, lane.first_seq, rank, 80)]
    assert not [text for text in rows if " after the first" in text]
    bars = build_time_grid(found.run, lane, grid_of(found, lane), None, 80, found.clock_offsets(lane))
    assert bars is not None
    assert (np.abs(bars.codes.astype(int) - bars.codes[0]).sum(axis=1) < 8).all()  # but for the width of a cell
    labels = [f"{rank:<3}" for rank in (0, 9)]
    lines = [row.text[1:] for row in bars_rows(found, 100, 40)]
    first, ninth = (next(line for line in lines if line.startswith(label)).rstrip()[3:] for label in labels)
    assert abs(len(first) - len(ninth)) < 3


def test_a_mesh_is_read_off_the_groups(packed: Path) -> None:
    found = load_incident(str(packed / "nccl/hsdp_cross_deadlock")).run
    assert dict(found.ranks[5].coordinates) == {"rep": 1, "shard": 1}
    one_group = load_incident(str(packed / "nccl/two_ranks_swap")).run
    assert not any(record.coordinates for record in one_group.ranks.values())


def test_flattened_axes_are_no_axes_of_the_mesh() -> None:
    text = "0 1 2 3 4 5 6 7: all_reduce\n"
    axes = {"mesh_pp": (4, 2, 2), "mesh_dp": (2, 2, 4), "mesh_tp": (1, 2, 1)}
    text += "group mesh_pp: 0 4\ngroup mesh_dp: 0 2\ngroup mesh_tp: 0 1\n"
    run = job(f"\n{text}")
    groups = [Group(name="world", members=tuple(range(8)))]
    for name, (stride, size, _) in axes.items():
        starts = [rank for rank in range(8) if rank // stride % size == 0]
        groups += [Group(name=f"{name}{i}", description=name, members=(i, i + stride)) for i in starts]
    groups += [Group(name=f"flat{i}", description="mesh_dp_tp", members=tuple(range(i, i + 4))) for i in (0, 4)]
    found = with_coordinates(replace(run, groups=tuple(groups)))
    assert dict(found.ranks[6].coordinates) == {"pp": 1, "dp": 1, "tp": 0}
    lopsided = replace(run, groups=tuple(groups[:2]))
    assert with_coordinates(lopsided) is lopsided


def test_sends_and_receives_have_a_line_among_the_groups(packed: Path) -> None:
    found = load_incident(str(packed / "nccl/pp_missing_send"))
    (line,) = [row.text for row in group_rows(found, 120) if row.text.startswith("pp send/recv ")]
    assert line.endswith("! rank 1 left one out; ranks 0,2-3 wait")
    texts = [row.text for row in member_rows(found, "pp send/recv", 80)]
    assert texts[1] == "  ! rank 1 left one out; ranks 0,2-3 wait"
    assert texts[2].endswith("in send/recv")
    assert "waits in   all_reduce #6 of group default_pg" in [row.text for row in rank_rows(found, 1, 80)]


def test_many_ranks_seen_alike_are_one_line(packed: Path) -> None:
    found = load_incident(str(packed / "nccl/ok_skew_300ms"))
    assert [row.text for row in wait_rows(found, 100)] == ["as last seen", "  - 16 ranks: 0-15 · no stack"]


def test_ranks_wait_for_one_that_was_killed_inside_the_operation() -> None:
    found = diagnosed(job("\n0 1 2: all_reduce all_reduce?\nexit 1: -9\n"))
    assert {(edge.waiter, edge.awaited) for edge in found.edges} == {(0, 1), (2, 1)} == set(found.top.chain)


def test_waits_of_other_sizes_are_told_apart() -> None:
    found = diagnosed(job("\n0 2: all_reduce all_reduce(4)?\n1: all_reduce all_reduce(8)?\n"))
    waiting = report_json(found.run, found.verdicts)["waiting"]
    assert [wait["ranks"] for wait in waiting] == [[0, 2], [1]]


def test_every_state_of_a_rank_has_a_glyph_of_its_own() -> None:
    assert set(SITUATIONS) == set(RankState)
    assert len({glyph.char for glyph in SITUATIONS.values()}) == len(RankState)


def test_only_steps_are_counted_as_steps_and_keep_their_loss() -> None:
    lines = [
        {"event": "start", "step": 0, "launched_s": 1.0},
        *({"event": "step", "step": step, "loss": 5.0 - step} for step in (1, 2)),
        {"event": "validation", "step": 2, "loss": 9.0},
        {"event": "save", "step": 2, "stall_s": 0.5},
        {"event": "end", "step": 2, "loss": 3.0},
    ]
    found = parse_metric_lines("\n".join(map(json.dumps, lines)).encode(), "metrics.jsonl")
    assert found.steps.tolist() == [1, 2]
    assert found.columns["loss"].tolist() == [4, 3]
    assert found.columns["validation_loss"].tolist()[1] == 9
    assert found.columns["save_stall_s"].tolist()[1] == 0.5
    foreign = parse_metric_lines(b'{"event": "train", "step": 7, "loss": 1}\n{"step": 8, "loss": 2}', "m")
    assert foreign.columns["loss"].tolist() == [1, 2]


def test_a_run_that_is_new_in_its_folder_is_shown_alone() -> None:
    runs = [
        [{"event": "start", "step": 0, "launched_s": at, "time_s": at + 1, "is_new": 1},
         *({"event": "step", "step": step, "step_s": 1.0, "time_s": at + 1 + step} for step in range(1, count + 1))]
        for at, count in ((10.0, 4), (100.0, 2))
    ]  # fmt: skip
    found = parse_metric_lines("\n".join(json.dumps(line) for run in runs for line in run).encode(), "m")
    assert found.steps.tolist() == [1, 2]
    assert found.goodput is not None
    assert (found.goodput.total_s, found.goodput.seconds["recomputed"]) == (3.0, 0.0)


def test_a_piece_of_a_text_knows_all_of_it_without_secrets() -> None:
    text = "PUT https://me:secret@host/a failed at\x1b[31m line 7"
    for cut in (truncate(text, 12), truncate_start(text, 12), fitted(text, 12), *wrapped(text, 16)):
        assert row(" ", (cut, Role.BAD)).whole == "PUT https://***@host/a failed at line 7"
    assert row(fitted("ab", 4), ("c", Role.DIM)).whole == "ab  c"
    assert truncate("ab", 4) == fitted("ab", 2) == wrapped("ab", 9)[0] == "ab"


def incident_of(text: str) -> Incident:
    run = job(text)
    verdicts = tuple(diagnose(run))
    found = tuple(with_odd_splits(run, lane, verdicts[0]) for lane in lanes(run))
    return Incident(run=run, verdicts=verdicts, lanes=found, states={})


@pytest.mark.parametrize("text", [ONE_PAIR, OTHER_SIZE])
def test_the_grid_marks_the_rank_whose_splits_do_not_fit(text: str) -> None:
    incident = incident_of(text)
    assert build_grid(incident.run, incident.lanes[0]).codes[:, -1].tolist() == [PENDING, DIFFERS, PENDING]


def test_of_two_suspects_one_differs_from_the_other() -> None:
    both = "0 1: all_to_all@5?\nsplits 0: world#1 4,4 4,4\nsplits 1: world#1 6,4 4,4"
    incident = incident_of(both)
    assert incident.top.suspects == (0, 1)
    assert build_grid(incident.run, incident.lanes[0]).codes[:, -1].tolist() == [PENDING, DIFFERS]


def test_details_of_an_operation_show_its_splits() -> None:
    incident = incident_of(ONE_PAIR)
    shown = [line.text for line in operation_rows(incident, incident.lanes[0], 2, 1, 80)]
    assert any("splits" in line and "sends [4, 4, 9], expects [4, 4, 4]" in line for line in shown)


def test_frames_of_our_recorder_are_left_out() -> None:
    own = [
        Frame(file=f"/x/titan_ckpt/debug/record/{name}.py", line=1, function=name)
        for name in ("own_stacks", "recorder")
    ]
    mine = Frame(file="/job/train.py", line=7, function="main")
    assert program_frames(Thread(name="", frames=(*own, mine))) == (mine,)
    assert program_frames(Thread(name="", frames=(mine,))) == (mine,)


def test_a_line_that_is_being_written_is_no_damage() -> None:
    whole = b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n'
    assert parse_metric_lines(whole + b'{"step": 3, "lo', "metrics.jsonl").num_damaged == 0
    assert parse_metric_lines(whole + b'{"step": 3, "lo\n', "metrics.jsonl").num_damaged == 1
    assert len(parse_metric_lines(whole + b'{"step": 3, "loss": 1.0}', "metrics.jsonl").steps) == 3


def test_the_first_error_is_none_that_was_caught(tmp_path: Path) -> None:
    caught = (
        'Traceback (most recent call last):\n  File "/job/model.py", line 4, in <module>\n    import flash_attn\n'
        "ModuleNotFoundError: No module named 'flash_attn'\n2026-11-22 00:59:00,000 WARNING model: falling back to sdpa\n"
    )
    steps = "".join(f"2026-11-22 01:{n:02}:00,000 INFO train: step {n} loss 2.1\n" for n in range(1, 30))
    waited = (
        '[rank{0}]: Traceback (most recent call last):\n[rank{0}]:   File "/job/train.py", line 51, in <module>\n'
        "[rank{0}]:     dist.all_reduce(x)\n[rank{0}]: RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out "
        "waiting 1800000ms for recv operation to complete\n"
    )
    for rank in range(3):
        text = caught * (rank == 1) + steps + waited.format(rank) * (rank < 2)
        (tmp_path / f"rank_{rank}.log").write_text(text)
    found = load_incident(str(tmp_path))
    assert found.top.culprits == (2,)
    assert first_error(found) is None  # rank 1 went on for 29 steps
    assert found.states[1].frame is not None
    assert found.states[1].frame.place == "/job/train.py:51"
