"""The tools as a user calls them, on disk and on a real S3 server: what they print, return and leave alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.check.diff import compare, diff
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.console.output import write_json
from titan_ckpt.errors import DamagedError
from titan_ckpt.format.names import OWNER, new_attempt
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.copy import copy_checkpoint
from titan_ckpt.upkeep.deletion import delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy

DAY_S = 86_400.0


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tensors = {
        "w": torch.randn(60, 20),
        "h": torch.randn(7, 3, dtype=torch.bfloat16),
        "s": torch.tensor(float(seed)),
        "e": torch.zeros(0, 4),
    }
    return {"model": tensors, "optim": {"step": seed}}


def save_steps(url: str, *steps: int, kind: str = "full") -> None:
    with Saver(url) as saver:
        for step in steps:
            saver.save(state(step), step=step, kind="model" if kind == "model" else "full", training={"step": step})


@pytest.fixture
def run(tmp_path: Path) -> str:
    url = str(tmp_path / "source")
    save_steps(url, 10, 20, 30)
    return url


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code, out, _ = call(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_the_tools_start_without_torch_or_any_s3_library() -> None:
    heavy = ("torch", "s3fs", "botocore", "fsspec", "textual")
    rooms = ", ".join(f"titan_ckpt.cli.{name}" for name in ("ls", "inspect", "verify", "diff", "cp", "prune"))
    code = f"import sys, {rooms}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.strip() == "[]"


def test_a_whole_session_of_tools_loads_no_torch(run: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    calls = [
        ["ls", run, "--check"], ["inspect", run], ["verify", "--data", run], ["diff", f"{run}@10", f"{run}@20", "--values"],
        ["cp", run, copy], ["prune", run, "--keep-last", "1", "--yes"],
    ]  # fmt: skip
    code = (
        f"import sys\nfrom titan_ckpt.cli.main import main\ncodes = [main(c) for c in {calls!r}]\n"
        "assert 'torch' not in sys.modules\nprint(codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 1, 0, 0]"
    assert done.stderr == ""


def test_ls_shows_committed_partial_and_damaged(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(run, 40, kind="model")
    Path(run, "step-00000020", "COMMIT.json").unlink()
    Path(run, "step-00000030", "COMMIT.json").write_text("{")
    code, rows = call_json(capsys, "ls", run)
    assert code == 1
    assert [(r["step"], r["state"], r["kind"]) for r in rows] == [
        (10, "committed", "full"), (20, "partial", None), (30, "damaged", None), (40, "committed", "model"),
    ]  # fmt: skip
    assert all(r["size_bytes"] > 0 and r["age_s"] >= 0 for r in rows)
    _, out, _ = call(capsys, "ls", run)
    assert "step 30: " in out.splitlines()[-1]


def test_ls_check_finds_a_lost_file_that_plain_ls_misses(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    next(Path(run, "step-00000010").glob("a-*/*.distcp")).unlink()
    assert call(capsys, "ls", run)[0] == 0
    code, rows = call_json(capsys, "ls", run, "--check")
    assert (code, rows[0]["state"]) == (1, "damaged")


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune"])
def test_nothing_there_is_one_clear_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--keep-last", "1"] if command == "prune" else []
    code, out, err = call(capsys, command, str(tmp_path / "nothing"), *extra)
    assert (code, out) == (3, "")
    assert err.startswith("titan-ckpt: error: ")
    assert err.count("\n") == 1


def test_inspect_shows_what_is_inside_by_glob(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = call_json(capsys, "inspect", f"{run}@20", "*.w")
    assert code == 0
    assert [(t["fqn"], t["dtype"], t["global_shape"], t["size_bytes"]) for t in facts["tensors"]] == [
        ("model.w", "float32", [60, 20], 4800)
    ]
    assert facts["training"] == {"step": 20}
    _, out, _ = call(capsys, "inspect", f"{run}@20", "--files")
    assert "model.h" in out
    assert "bfloat16" in out
    assert "__0_0.distcp" in out
    assert call(capsys, "inspect", run, "nothing.*")[0] == 2


def test_inspect_and_ls_open_a_checkpoint_of_plain_dcp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dcp.save({"w": torch.randn(20, 30)}, checkpoint_id=tmp_path / "step-500")
    code, facts = call_json(capsys, "inspect", str(tmp_path / "step-500"))
    assert (code, facts["kind"], facts["mesh"]) == (0, "foreign", None)
    assert facts["tensors"][0]["global_shape"] == [20, 30]
    code, rows = call_json(capsys, "ls", str(tmp_path / "step-500"))
    assert (code, rows[0]["state"], rows[0]["step"]) == (0, "foreign", 500)


def test_a_copy_into_its_own_source_is_refused(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "cp", run, f"{run}/copy")
    assert code == 2
    assert "would lie inside its source" in err
    assert not Path(run, "copy").exists()


def test_verify_prints_whole_or_names_the_damage(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "verify", "--data", run)
    assert code == 0
    assert f"{run}@30: whole" in out
    assert err == ""
    path = next(Path(run, "step-00000030").glob("a-*/*.distcp"))
    checkpoint = open_checkpoint(run)
    chunk = checkpoint.manifest.chunk(checkpoint.manifest.by_fqn["model.w"], 0)
    data = bytearray(path.read_bytes())
    data[chunk.offset + chunk.payload_offset] ^= 1
    path.write_bytes(data)
    assert call(capsys, "verify", run)[0] == 0
    code, facts = call_json(capsys, "verify", "--data", run)
    assert (code, facts["is_ok"], facts["problems"][0]["fqn"]) == (1, False, "model.w")


def test_verify_tells_a_file_that_is_cut_off_once(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(Path(run, "step-00000030").glob("a-*/*.distcp"))
    path.write_bytes(path.read_bytes()[:100])
    code, out, _ = call(capsys, "verify", "--data", run)
    assert (code, len(out.splitlines())) == (1, 5)
    assert f"{path.name}: has 100 bytes, expected" in out.splitlines()[1]
    assert "more problems; --json lists all" in out.splitlines()[-1]


def test_diff_lists_differences_and_their_size(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call_json(capsys, "diff", run, run) == (0, {
        "a": f"{run}@30", "b": f"{run}@30", "is_equal": True, "equal": 4, "unknown": [], "differences": [],
    })  # fmt: skip
    other = str(tmp_path / "other")
    changed = state(30)
    changed["model"]["w"][3, 4] += 0.5
    changed["model"]["extra"] = torch.ones(2)
    del changed["model"]["e"]
    changed["model"]["h"] = changed["model"]["h"].float()
    with Saver(other) as saver:
        saver.save(changed, step=30, training={"step": 31})
    code, facts = call_json(capsys, "diff", run, other, "--values")
    found = {(d["kind"], d["fqn"]): d for d in facts["differences"]}
    assert code == 1
    assert set(found) == {
        ("values", "model.w"), ("only_b", "model.extra"), ("only_a", "model.e"), ("dtype", "model.h"), ("training", "step"),
    }  # fmt: skip
    assert found["values", "model.w"]["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert found["values", "model.w"]["num_different"] == 1


def test_diff_within_tolerance_is_equal_but_nan_differs(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "abc"]
    base = torch.ones(10)
    for url, tensor in zip(urls, [base, base * (1 + 1e-6), base.clone().fill_(float("nan"))], strict=True):
        with Saver(url) as saver:
            saver.save({"w": tensor, "i": torch.tensor([2**62])}, step=1)
    a, b, c = (open_checkpoint(url) for url in urls)
    assert diff(a, b, values=True, rtol=1e-5) == []
    assert [d.kind for d in diff(a, b, values=True)] == ["values"]
    (difference,) = diff(a, c, values=True, rtol=1e9)
    assert (difference.num_different, difference.max_abs) == (10, float("inf"))
    assert compare(c, c, values=True).differences == []


def test_diff_takes_axes_of_one_rank_for_no_cut(run: str) -> None:
    def cut(mesh: str, **placements: int) -> Checkpoint:
        opened = open_checkpoint(run)
        cuts = {axis: Shard(dim) for axis, dim in placements.items()}
        tensors = tuple(replace(tensor, placements=cuts) for tensor in opened.manifest.tensors)
        return replace(opened, manifest=replace(opened.manifest, tensors=tensors, mesh=MeshSpec.parse(mesh)))

    both = cut("dp_shard=2", dp_shard=0)
    assert diff(both, cut("dp_shard=2", dp_shard=0, tp=1)) == []
    assert {d.kind for d in diff(both, cut("dp_shard=2", tp=1))} == {"placement"}


def test_json_has_no_infinity_and_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": [float("inf"), 1.5], "b": {"c": float("nan")}, "d": (True, None)})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}, "d": [True, None]}


def test_cp_mirrors_and_a_second_cp_finds_it_there(
    store_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, facts = call_json(capsys, "cp", f"{run}@20", store_url)
    assert (code, facts["step"], facts["kept_bytes"]) == (0, 20, 0)
    assert verify(store_url, read_data=True) == []
    assert call(capsys, "diff", f"{run}@20", store_url)[0] == 0
    code, facts = call_json(capsys, "cp", f"{run}@20", store_url)
    assert (facts["copied_bytes"], facts["was_committed"]) == (0, True)


def test_cp_goes_on_where_it_was_stopped(run: str, tmp_path: Path) -> None:
    source, target = open_checkpoint(run), FileStore(str(tmp_path / "copy"))
    copy_checkpoint(source, target)
    target.delete(["step-00000030/COMMIT.json"])
    assert copy_checkpoint(source, target).copied_bytes == 0
    path = next((tmp_path / "copy").rglob("*.distcp"))
    path.write_bytes(bytes(path.stat().st_size))
    target.delete(["step-00000030/COMMIT.json"])
    assert copy_checkpoint(source, target).kept_bytes == 0
    assert verify(str(tmp_path / "copy"), read_data=True) == []


def test_cp_never_copies_damage(run: str, tmp_path: Path) -> None:
    source = open_checkpoint(run)
    path = next(Path(run, "step-00000030").glob("a-*/*.distcp"))
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DamagedError, match="not what was saved"):
        copy_checkpoint(source, FileStore(str(tmp_path / "copy")))
    assert list(FileStore(str(tmp_path / "copy")).list()) == []


def test_cp_leaves_another_save_of_the_same_step_alone(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(tmp_path / "other")
    save_steps(other, 30)
    code, _, err = call(capsys, "cp", run, other)
    assert code == 3
    assert "another save of that step" in err
    assert call(capsys, "cp", run, run)[0] == 2


@pytest.mark.parametrize("options", [SaveOptions(codec="planes-zstd"), SaveOptions(incremental=True)])
def test_the_tools_know_codecs_and_incremental_saves(tmp_path: Path, options: SaveOptions) -> None:
    run, copy = str(tmp_path / "run"), str(tmp_path / "copy")
    content = state(1)
    content["model"]["w"] = torch.randn(2000, 700)
    with Saver(run, options) as saver:
        for step in (1, 2):
            content["model"]["h"].fill_(step)
            saver.save(content, step=step)
    plain = str(tmp_path / "plain")
    with Saver(plain) as saver:
        saver.save(content, step=2)
    assert diff(open_checkpoint(run), open_checkpoint(plain), values=True) == []
    copy_checkpoint(open_checkpoint(run), FileStore(copy))
    assert verify(run, read_data=True) == verify(copy, read_data=True) == []
    opened = open_checkpoint(copy)
    assert torch.equal(opened.read("model.w"), content["model"]["w"])
    chunk = opened.manifest.chunk(opened.manifest.by_fqn["model.w"], 0)
    file = Path(copy, opened.path(chunk.file))
    data = bytearray(file.read_bytes())
    data[chunk.offset + chunk.payload_offset + chunk.payload_length // 2] ^= 1
    file.write_bytes(data)
    assert [p.fqn for p in verify(copy, read_data=True)] == ["model.w"]


def test_prune_keeps_files_of_incremental_checkpoints(tmp_path: Path) -> None:
    run, content = str(tmp_path), state(1)
    with Saver(run, SaveOptions(incremental=True)) as saver:
        for step in (1, 2, 3):
            content["model"]["h"] += 1
            saver.save(content, step=step)
    store = open_store(run)
    delete(store, plan_removal(store, RetentionPolicy(keep_last=1), now_s=time.time()))
    assert [i.step for i in list_checkpoints(run) if i.state == "committed"] == [3]
    assert verify(run, read_data=True) == []
    policy = RetentionPolicy(keep_last=1, is_incomplete=True, older_than_s=0)
    assert plan_removal(store, policy, now_s=time.time() + DAY_S).garbage == ()


def test_prune_previews_and_keeps_the_newest_whole_checkpoint(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "add --yes" in call(capsys, "prune", run, "--keep-last", "1")[1]
    assert [i.step for i in list_checkpoints(run)] == [10, 20, 30]
    next(Path(run, "step-00000030").glob("a-*/*.distcp")).unlink()
    code, facts = call_json(capsys, "prune", run, "--keep-last", "1", "--yes")
    assert (code, facts["is_deleted"]) == (0, True)
    # 30 is damaged: it is kept for inspection, and 20 is the newest intact one.
    assert [i.step for i in list_checkpoints(run)] == [20, 30]
    assert not Path(run, "step-00000010").exists()
    assert call(capsys, "verify", f"{run}@20", "--data")[0] == 0


def test_prune_keeps_pins_exports_and_foreign_names(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(run, 25, kind="model")
    shutil.copytree(Path(run, "step-00000010"), Path(run, "best-step-10-keep"))
    shutil.copytree(Path(run, "step-00000010"), Path(run, "step-10"))
    Path(run, "pins.txt").write_text("10 # the good one\n")
    call(capsys, "prune", run, "--keep-last", "1", "--keep", "20", "--incomplete", "--older-than", "0s", "--yes")
    assert sorted(p.name for p in Path(run).iterdir() if p.name != OWNER) == [
        "best-step-10-keep", "pins.txt", "step-00000010", "step-00000020", "step-00000025", "step-00000030", "step-10",
    ]  # fmt: skip
    Path(run, "pins.txt").write_text("ten\n")
    assert call(capsys, "prune", run, "--keep-last", "1", "--yes")[0] == 2


def test_prune_deletes_only_old_uncommitted_attempts(run: str) -> None:
    store, now = open_store(run), time.time()
    young, old = new_attempt(now), new_attempt(now - 3 * DAY_S)
    for path in [
        f"step-00000030/{young}/__0_0.distcp",
        f"step-00000030/{old}/__0_0.distcp",
        f"step-00000040/{old}/__0_0.distcp",
    ]:
        store.write(path, [b"half"])
    for name in ["step-00000030", "step-00000040"]:
        file = Path(run, name, old, "__0_0.distcp")
        os.utime(file, (now - 2 * DAY_S, now - 2 * DAY_S))
    policy = RetentionPolicy(keep_last=3, is_incomplete=True)
    plan = plan_removal(store, policy, now_s=now)
    assert [(g.step, old in str(g.entries)) for g in plan.garbage] == [(30, True), (40, True)]
    delete(store, plan)
    assert young in str(list(store.list("step-00000030")))
    assert store.folders("step-00000040") == []
    assert verify(run, read_data=True) == []


def test_deleting_takes_the_commit_first(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted: list[list[str]] = []
    store = open_store(run)
    remove = store.delete

    def record(paths: Iterable[str]) -> None:
        deleted.append(list(paths))
        remove(deleted[-1])

    monkeypatch.setattr(store, "delete", record)
    delete(store, plan_removal(store, RetentionPolicy(keep_last=2), now_s=time.time()))
    assert deleted[:2] == [["step-00000010/COMMIT.json"], ["step-00000010/.metadata"]]
    assert len(deleted[2]) == 2


@pytest.mark.s3
def test_the_tools_work_on_s3(s3_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(s3_url, 10, 20)
    assert call(capsys, "ls", s3_url, "--check")[0] == 0
    assert call(capsys, "verify", "--data", s3_url)[0] == 0
    assert call(capsys, "prune", s3_url, "--keep-last", "1", "--yes")[0] == 0
    code, rows = call_json(capsys, "ls", s3_url)
    assert (code, [row["step"] for row in rows]) == (0, [20])
    assert call(capsys, "inspect", f"{s3_url}@20")[0] == 0


@pytest.mark.parametrize(
    "arguments", [["ls", "x@3"], ["diff", "x", "x", "--values", "--rtol", "-1"], ["prune", "x", "--keep-last", "0"]]
)
def test_a_request_that_makes_no_sense_is_a_usage_error(
    arguments: list[str], run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, *[run + a[1:] if a in ("x", "x@3") else a for a in arguments])
    assert code == 2
    assert err.startswith("titan-ckpt: error: ")
