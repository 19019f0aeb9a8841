"""Reading the files that jobs leave behind: many formats, damaged files, hostile files."""

from __future__ import annotations

import gzip
import json
import os
import pickle  # to make hostile and damaged dumps
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from titan_ckpt.cli.main import main
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, HEARTBEAT, HEARTBEAT_AT, RECORD
from titan_ckpt.debug.incident.kinds import FlagKind
from titan_ckpt.debug.read.logs import combine
from titan_ckpt.debug.read.plain_pickle import plain_loads
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.read.text.job_text import JobText, read_text
from titan_ckpt.debug.record.hooks import BoxWriter
from titan_ckpt.errors import DamagedError, NotFoundError, TitanError, UnsafeContentError
from tools.paths import DATA, INCIDENTS


def copy(case: str, folder: Path, change: Callable[[Path, bytes], tuple[str, bytes] | None]) -> None:
    """Copy a case's files through `change`, which gives a new name and content, or None to leave the file out."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (INCIDENTS / case).iterdir():
        changed = change(source, source.read_bytes())
        if changed is not None:
            (folder / changed[0]).write_bytes(changed[1])


def flags(folder: Path) -> set[str]:
    return {flag.flag for flag in open_run(str(folder)).flags}


# ------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_packed_files_read_like_plain_ones(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    suffix = ".gz" if pack is gzip.compress else ".zst"
    copy("dataloader", tmp_path, lambda path, data: (path.name + suffix, pack(data)))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.subtype, top.culprits) == ("STUCK_ON_CPU", "dataloader", (3,))


def test_run_layout_takes_the_newest_incident_and_the_logs(tmp_path: Path) -> None:
    shutil.copytree(INCIDENTS / "skip", tmp_path / "debug" / "20260101-000000")
    (tmp_path / "logs").mkdir()
    copy("type", tmp_path / "debug" / "20260102-000000", lambda p, d: None if p.suffix == ".log" else (p.name, d))
    copy("type", tmp_path / "logs", lambda p, d: (p.name, d) if p.suffix == ".log" else None)
    run = open_run(str(tmp_path))
    assert run.incident == "20260102-000000"
    assert len(run.incidents) == 2
    assert run.ranks[0].log is not None
    assert diagnose(run)[0].verdict == "OP_MISMATCH"


def test_one_log_with_prefixed_lines_is_split_by_rank() -> None:
    text = (
        b"[rank0]: Traceback (most recent call last):\n[default3]: step 7 start\n[2026-11-22 01:00:00] [rank 2] hello\n"
    )
    assert set(combine([read_text(JobText(source="job.log", scope="job.log"), [(text, False)])]).ranks) == {0, 2, 3}


def test_single_dump_file_is_accepted() -> None:
    run = open_run(str(INCIDENTS / "ok" / "rank_2"))
    assert len(run.ranks[2].operations) == 10


def test_a_file_that_is_no_evidence_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.bin").write_bytes(bytes(range(256)) * 8)
    with pytest.raises(NotFoundError, match=r"other\.bin is no dump, stack, black box, log or archive"):
        open_run(str(tmp_path / "other.bin"))


def test_old_dump_with_seq_id_and_without_process_group_is_read(tmp_path: Path) -> None:
    for rank in range(2):
        entries = [
            {"record_id": i, "pg_id": 0, "seq_id": i + 1, "profiling_name": "nccl:all_reduce", "input_sizes": [[4]],
             "output_sizes": [[4]], "state": "completed", "frames": [], "time_created_ns": 5 + i}
            for i in range(3 - rank)
        ]  # fmt: skip
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"version": "2.3", "entries": entries}, 2))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert "VERSION_MIX" not in flags(tmp_path)
    assert top.verdict in ("HEALTHY", "RUNNING", "STUCK_ON_CPU")


def test_mixed_versions_are_flagged(tmp_path: Path) -> None:
    copy(
        "ok", tmp_path, lambda p, d: None if p.suffix else (p.name, d.replace(b"2.10", b"2.07") if "1" in p.name else d)
    )
    assert "VERSION_MIX" in flags(tmp_path)


# ------------------------------------------------------------------------------------------------ damage and hostility


class Hostile:
    """Creates a file if an unsafe unpickler loads it."""

    def __init__(self, target: str) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._target, "w")


def test_pickle_that_asks_for_a_class_is_refused_and_flagged(tmp_path: Path) -> None:
    target = tmp_path / "owned"
    shutil.copytree(INCIDENTS / "skip", tmp_path / "job")
    (tmp_path / "job" / "rank_0").write_bytes(pickle.dumps({"entries": [], "x": Hostile(str(target))}))
    run = open_run(str(tmp_path / "job"))
    assert not target.exists()
    assert any("refused" in flag.text for flag in run.flags)
    assert diagnose(run)[0].culprits == (2,)


def test_persistent_ids_are_refused() -> None:
    with pytest.raises(UnsafeContentError):
        plain_loads(b"\x80\x02\x8c\x01aQ.")


def test_truncated_dump_falls_back_to_its_json_twin(tmp_path: Path) -> None:
    shutil.copytree(INCIDENTS / "type", tmp_path / "job")
    dump = tmp_path / "job" / "rank_1"
    dump.write_bytes(dump.read_bytes()[:700])
    run = open_run(str(tmp_path / "job"))
    assert "DUMP_CORRUPT" in {flag.flag for flag in run.flags}
    assert diagnose(run)[0].culprits == (1,)


def test_folder_of_damaged_files_exits_with_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0").write_bytes(b"\x80\x02garbage")
    assert main(["debug", str(tmp_path)]) == 3
    assert "nothing readable" in capsys.readouterr().err


def mutate(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes flipped, cut, duplicated or replaced."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(broken) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(broken):
            broken[at] = rng.randrange(256)
        elif kind == 1:
            del broken[at : at + rng.randint(1, 64)]
        elif kind == 2:
            broken[at:at] = broken[at : at + rng.randint(1, 64)]
        else:
            broken[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(broken)


@pytest.mark.parametrize("case", ["skip", "chain", "size", "pginit"])
def test_mutated_files_never_crash_the_analyzer(case: str, tmp_path: Path) -> None:
    rng = random.Random(case)
    for number in range(40):
        folder = tmp_path / str(number)
        copy(case, folder, lambda p, d: (p.name, mutate(rng, d) if d and rng.random() < 0.6 else d))
        try:
            verdicts = diagnose(open_run(str(folder)))
        except TitanError:
            continue
        assert verdicts


def test_wild_json_values_never_crash_the_analyzer(tmp_path: Path) -> None:
    rng = random.Random(7)
    wild: list[Any] = [None, -1, 2**70, "x", [], {}, [[]], [[2**80]], 1.5, True, "[0, 1", {"a": 1}]
    dump = json.loads((INCIDENTS / "skip" / "rank_0.json").read_text())
    for number in range(150):
        folder = tmp_path / str(number)
        folder.mkdir()
        for rank in range(2):
            changed = json.loads(json.dumps(dump))
            for _ in range(rng.randint(1, 4)):
                entry = rng.choice(changed["entries"])
                entry[rng.choice(list(entry))] = rng.choice(wild)
            if rng.random() < 0.3:
                changed[rng.choice(list(changed))] = rng.choice(wild)
            (folder / f"rank_{rank}.json").write_text(json.dumps(changed))
        try:
            assert diagnose(open_run(str(folder)))
        except TitanError:
            continue


@pytest.mark.parametrize("seed", range(20))
def test_mutated_logs_and_stacks_never_crash_their_parsers(seed: int) -> None:
    rng = random.Random(seed)
    for path in [*INCIDENTS.glob("s*/*.log"), *INCIDENTS.glob("s*/*.stacks")]:
        data = mutate(rng, path.read_bytes() or b"x")
        combine([read_text(JobText(source=path.name, scope=path.name), [(data, False), (data, True)])])
        parse_stacks(data.decode("utf-8", "replace"), path.name, "")


def test_pickle_that_asks_for_a_huge_memo_is_refused_at_once() -> None:
    with pytest.raises(DamagedError, match="memory"):
        plain_loads(b"\x80\x02]r\xff\xff\xff\x7f.")


# ---------------------------------------------------------------------------------------- records that contradict


def nccl_dump(
    ranks: dict[str, list[int]], group: str, count: int, *, done: int | None = None, start_ns: int = 10**18
) -> bytes:
    """A JSON dump of `count` all_reduces on `group`, the first `done` of them completed (default: all but the last)."""
    entries = [
        {"record_id": i, "pg_id": 0, "process_group": [group, ""], "collective_seq_id": i + 1, "p2p_seq_id": 0,
         "profiling_name": "nccl:all_reduce", "input_sizes": [[4]], "output_sizes": [[4]], "input_dtypes": ["Float"],
         "state": "completed" if i < (count - 1 if done is None else done) else "started", "retired": False,
         "time_created_ns": start_ns + i * 10**6, "time_discovered_started_ns": start_ns + i * 10**6 + 1, "timeout_ms": 1000}
        for i in range(count)
    ]  # fmt: skip
    config = {name: {"name": name, "desc": "", "ranks": str(members)} for name, members in ranks.items()}
    return json.dumps({"version": "2.10", "pg_config": config, "entries": entries}).encode()


def test_ranks_that_disagree_about_a_group_are_the_verdict(tmp_path: Path) -> None:
    for rank in range(3):
        members = [2, 3] if rank == 2 else [0, 1, 2, 3]
        (tmp_path / f"rank_{rank}.json").write_bytes(nccl_dump({"1": members}, "1", 1))
    (tmp_path / "rank_00003.stall.stacks").write_text(
        'Thread 0x0000000000000001 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 7 '
        'in new_group\n  File "/job/train.py", line 9 in <module>\n'
    )
    found = diagnose(open_run(str(tmp_path)))
    assert (found[0].verdict, found[0].culprits, found[0].group) == ("PG_CONFIG_CONFLICT", (2,), "1")
    assert [verdict.verdict for verdict in found].count(found[0].verdict) == 1
    assert "PG_CONFIG_CONFLICT" in flags(tmp_path)


FROZEN_INSIDE = DATA / "frozen_inside"


def test_rank_frozen_inside_its_collective_is_the_verdict() -> None:
    """A real incident: rank 1 of 2 got SIGSTOP inside an all_reduce."""
    top = diagnose(open_run(str(FROZEN_INSIDE)))[0]
    assert (top.verdict, top.culprits, top.victims) == ("RANK_FROZEN", (1,), (0,))
    assert "last ticked 443 s before" in top.evidence[0].text


@pytest.mark.parametrize(("length", "why"), [(0, "is empty"), (700, "is cut off: nothing of it can be unpacked")])
def test_a_packed_dump_without_content_says_why(tmp_path: Path, length: int, why: str) -> None:
    name = "rank_00000.stall.pickle.zst"
    (tmp_path / name).write_bytes((FROZEN_INSIDE / name).read_bytes()[:length])
    with pytest.raises(TitanError, match=f"1 damaged file: {name}: {why}$"):
        open_run(str(tmp_path))


@pytest.mark.parametrize("gone", ["rank_00000.stall.pickle.zst", "rank_00000.box.zst"])
def test_without_dump_or_heartbeat_no_rank_is_frozen(gone: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FROZEN_INSIDE, tmp_path / "incident")
    (folder / gone).unlink()
    assert "RANK_FROZEN" not in [verdict.verdict for verdict in diagnose(open_run(str(folder)))]


def test_rank_with_only_its_dump_missing_is_not_frozen(tmp_path: Path) -> None:
    """Its recorder ticked as long as the other rank's, so the rank is alive."""
    folder = shutil.copytree(FROZEN_INSIDE, tmp_path / "incident")
    boxes = [zstandard.ZstdDecompressor().decompress(path.read_bytes()) for path in sorted(folder.glob("*.box.zst"))]
    beat = slice(HEARTBEAT_AT, HEARTBEAT_AT + HEARTBEAT.size)
    (folder / "rank_00001.box.zst").write_bytes(
        zstandard.compress(boxes[1][: beat.start] + boxes[0][beat] + boxes[1][beat.stop :])
    )
    assert "RANK_FROZEN" not in [verdict.verdict for verdict in diagnose(open_run(str(folder)))]


def test_black_box_does_not_pass_for_what_a_device_did(tmp_path: Path) -> None:
    for rank in range(3):
        path = tmp_path / f"rank_{rank}.json"
        path.write_bytes(nccl_dump({"0": [0, 1, 2]}, "0", 1).replace(b"started", b"scheduled"))
    (tmp_path / "rank_2.json").unlink()
    box = BoxWriter(tmp_path / "rank_00002.box", rank=2, world_size=3)
    for kind, value in (("op", "all_reduce"), ("dtype", "Float"), ("group", ["0", "", [0, 1, 2]])):
        box.add_text(kind, 0, value)
    RECORD.pack_into(box.map, HEADER_BYTES, 10**18, 10**18 + 1, 4, 1, 0, -1, 0, 0, 0, 0, 1, 1)
    assert "SCHEDULED_NOT_STARTED" not in [verdict.verdict for verdict in diagnose(open_run(str(tmp_path)))]


def test_dump_taken_too_early_is_flagged(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.json").write_bytes(nccl_dump({"0": [0, 1, 2]}, "0", 5 if rank == 1 else 9))
    found = {flag.flag: flag.ranks for flag in open_run(str(tmp_path)).flags}
    assert found[FlagKind.DUMP_SKEW] == (1,)


def test_a_dump_of_an_earlier_attempt_is_left_out(tmp_path: Path) -> None:
    """Rank 1 has dumped nothing this time: its old dump ends in an operation that all the others finished together since."""
    for rank in range(4):
        count, start_ns = (5, 10**18 - 3600 * 10**9) if rank == 1 else (9, 10**18)
        (tmp_path / f"rank_{rank}.json").write_bytes(nccl_dump({"0": [0, 1, 2, 3]}, "0", count, start_ns=start_ns))
    run = open_run(str(tmp_path))
    assert [flag.ranks for flag in run.flags if flag.flag == FlagKind.EARLIER_ATTEMPT] == [(1,)]
    assert not len(run.ranks[1].operations)
    assert diagnose(run)[0].culprits == ()


def test_dumps_written_long_apart_are_flagged(tmp_path: Path) -> None:
    for rank in range(2):
        path = tmp_path / f"rank_{rank}.json"
        path.write_bytes(nccl_dump({"0": [0, 1]}, "0", 9))
        os.utime(path, (1_700_000_000 + 600 * rank,) * 2)
    assert "DUMP_SKEW" in flags(tmp_path)


def test_clock_that_is_wrong_is_flagged(tmp_path: Path) -> None:
    for rank in range(3):
        start_ns = 10**18 + (3600 * 10**9 if rank == 2 else 0)
        (tmp_path / f"rank_{rank}.json").write_bytes(nccl_dump({"0": [0, 1, 2]}, "0", 9, start_ns=start_ns))
    found = {flag.flag: flag.ranks for flag in open_run(str(tmp_path)).flags}
    assert found == {"CLOCK_SKEW": (2,)}


# ------------------------------------------------------------------------------------------------------- logs only


LOGS_ONLY = {
    "skip": (2,), "order": (1,), "type": (1,), "dataloader": (3,), "pydeadlock": (1,), "ckpt_io": (0,), "sigkill": (1,),
    "sigstop": (1,), "exception": (1,), "pginit": (1,), "ring": (2,), "ok": (), "all_ops": (),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGS_ONLY)
def test_logs_alone_name_the_culprit(case: str, tmp_path: Path) -> None:
    copy(case, tmp_path, lambda path, data: (path.name, data) if path.suffix == ".log" else None)
    assert diagnose(open_run(str(tmp_path)))[0].culprits == LOGS_ONLY[case]


def test_rank_that_gloo_aborted_is_not_blamed_by_its_log(tmp_path: Path) -> None:
    copy("size", tmp_path, lambda path, data: (path.name, data) if path.suffix == ".log" else None)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == ("SIZE_MISMATCH", ())


WATCHDOG = (
    "[rank{rank}]:[E1121 02:07:18.2] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 600031 milliseconds before "
    "timing out.\n"
)


def test_watchdog_lines_name_the_rank_in_another_call(tmp_path: Path) -> None:
    for rank in range(4):
        op = "BROADCAST" if rank == 2 else "ALLREDUCE"
        (tmp_path / f"rank_{rank}.log").write_text(WATCHDOG.format(rank=rank, seq=81, op=op))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == (2,)


def test_rank_without_a_watchdog_line_is_the_suspect(tmp_path: Path) -> None:
    for rank in range(4):
        text = "2026-01-01 00:00:00 step 3 loading shard from dataset\n" if rank == 1 else ""
        (tmp_path / f"rank_{rank}.log").write_text(text or WATCHDOG.format(rank=rank, seq=81, op="ALLREDUCE"))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.subtype, top.culprits) == ("STUCK_ON_CPU", "dataloader", (1,))


# ---------------------------------------------------------------------------------------------------------- imports


def test_analyzer_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import titan_ckpt.debug, titan_ckpt.cli.main\n"
        f"assert titan_ckpt.cli.main.main(['debug', {str(INCIDENTS / 'ok')!r}]) == 0\n"
        "assert not {'s3fs', 'textual', 'titan_ckpt.debug.record.recorder'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.repeats
@pytest.mark.parametrize("field", ["input_sizes", "process_group", "frames", "state", "profiling_name", "p2p_seq_id"])
@pytest.mark.parametrize("pair", [list, tuple])
def test_lists_nested_exponentially_are_refused_at_once(field: str, pair: type, tmp_path: Path) -> None:
    bomb: Any = pair([1, 2])
    for _ in range(50):
        bomb = pair([bomb, bomb])  # 2**50 numbers in a few hundred bytes
    entries = [{"collective_seq_id": n, "profiling_name": "nccl:send 0->1", field: bomb} for n in range(2)]
    for rank, groups, of_rank in ((0, {}, entries), (1, {"0": {"desc": bomb}}, []), (2, {}, [])):
        dump = {"version": "2.10", "pg_config": groups, "entries": of_rank}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    run = open_run(str(tmp_path))
    assert {flag.source for flag in run.flags if flag.flag == "DUMP_CORRUPT"} == {"rank_0", "rank_1"}
