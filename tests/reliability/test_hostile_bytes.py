"""Broken or hostile files under the commands: one line of error and its exit code, the rest of the evidence still read."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reliability.test_malice import forge, forge_commit
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters.torch_file import import_torch
from titan_ckpt.debug import open_run
from titan_ckpt.errors import CheckpointError, DamagedError
from titan_ckpt.format.names import COMMIT
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.index import load_logs
from titan_ckpt.tui.data.metrics import parse_metric_lines


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Saver(str(tmp_path / "run"), SaveOptions(is_exclusive=False)) as saver:
        for step in (1, 2):
            saver.save({"w": torch.arange(100.0), "n": 3}, step=step)
    return tmp_path / "run"


COMMITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "infinite step": lambda c: c.update(step=float("inf")),
    "not a number": lambda c: c.update(size_bytes=float("nan")),
    "step of 300 digits": lambda c: c.update(step=10**300),
    "true for a step": lambda c: c.update(step=True),
    "a list for an attempt": lambda c: c.update(attempt=["a"]),
    "half a surrogate pair": lambda c: c.update(created="\ud800"),
    "a text for the manifest": lambda c: c.update(manifest="x"),
    "negative size": lambda c: c.update(size_bytes=-1),
    "version of 4000 digits": lambda c: c.update(version=10**4000),
}


@pytest.mark.parametrize("what", COMMITS)
def test_a_commit_of_wrong_values_concerns_one_step(run: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Saver(str(run), SaveOptions(is_exclusive=False)) as saver:
        saver.save({"w": torch.zeros(3)}, step=3)
    forge_commit(run, COMMITS[what])
    states = {info.step: info.state for info in list_checkpoints(str(run))}
    state = CheckpointState.NEWER if what.startswith("version") else CheckpointState.DAMAGED
    assert states == {1: state, 2: CheckpointState.COMMITTED, 3: CheckpointState.COMMITTED}
    assert main(["ls", str(run)]) in (0, 1)
    with pytest.raises(CheckpointError):
        open_checkpoint(str(run), step=1)
    assert main(["inspect", f"{run}@1"]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a float for a size": lambda m: m["files"][0].update(size=1.5),
    "true for a dimension": lambda m: m["tensors"][0].update(shape=[True]),
    "100,000 dimensions": lambda m: m["tensors"][0].update(shape=[1] * 100_000),
    "a number for a name": lambda m: m["tensors"][0].update(fqn=3),
    "a text for a list": lambda m: m.update(tensors="w"),
    "a list for a table": lambda m: m.update(user=[]),
    "a digest that is too short": lambda m: m["files"][0].update(digest="00"),
    "deep user values": lambda m: m.update(user={"a": json.loads("[" * 90 + "]" * 90)}),
    "half a surrogate pair": lambda m: m.update(user={"a": "\ud800"}),
    "a placement that is not there": lambda m: m["tensors"][0].update(placement=-1),
    "a cut of another dimension": lambda m: m.update(placements=[[["tp", 5]]]),
    "an axis of no mesh": lambda m: m.update(placements=[[["zz", 0]]]),
    "a mesh of a billion ranks": lambda m: m.update(mesh={"tp": 10**9}),
    "a mesh of text": lambda m: m.update(mesh={"tp": "2"}),
    "versions that are lists": lambda m: m.update(versions={"torch": []}),
    "a tensor without chunks": lambda m: m["tensors"][0].update(chunks=0),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_of_wrong_types_is_damage(run: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    forge(run, MANIFESTS[what])
    with pytest.raises(DamagedError, match=r"manifest\.json"):
        open_checkpoint(str(run), step=1)
    assert main(["inspect", f"{run}@1"]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert open_checkpoint(str(run)).step == 2


def test_a_key_given_twice_is_damage(run: Path) -> None:
    path = run / "step-00000001" / COMMIT
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 1, "step": 1'))
    with pytest.raises(DamagedError, match="twice"):
        open_checkpoint(str(run), step=1)


# --------------------------------------------------------------------------------------------------- torch files


def _saved(state: dict[str, Any], *, is_zip: bool = True) -> bytes:
    out = io.BytesIO()
    torch.save(state, out, _use_new_zipfile_serialization=is_zip)
    return out.getvalue()


def _with_pickle(data: bytes, change: Callable[[bytes], bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, change(content) if info.filename.endswith("data.pkl") else content)
    return out.getvalue()


def _longer(data: bytes) -> bytes:
    """The pickle of a storage of 12 elements, as one of 2**30."""
    (end,) = (end for end in (b"t", b"N") if data.count(b"K\x0c" + end) == 1)
    return data.replace(b"K\x0c" + end, b"J" + struct.pack("<i", 1 << 30) + end)


SMALL = {"w": torch.arange(12.0)}
TORCH_FILES: dict[str, Callable[[], bytes]] = {
    "strides of 0": lambda: _saved({"w": torch.zeros(1).expand(1 << 29)}),
    "a storage past its record": lambda: _with_pickle(_saved(SMALL), _longer),
    "the same before torch 1.6": lambda: _longer(_saved(SMALL, is_zip=False)),
    "compressed records": lambda: _with_pickle(_saved(SMALL), bytes, method=zipfile.ZIP_DEFLATED),
    "one list in itself again and again": lambda: _saved({"a": _doubled(40)}),
    "many views of one storage": lambda: _saved(dict.fromkeys(map(str, range(400)), torch.zeros(1 << 20)))[: 1 << 26],
    "truncated": lambda: _saved(SMALL)[:-100],
    "nothing": lambda: b"",
}  # fmt: skip


def _doubled(times: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize("what", TORCH_FILES)
def test_a_torch_file_that_lies_is_refused(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(TORCH_FILES[what]())
    with pytest.raises(CheckpointError):
        import_torch(str(path), str(tmp_path / "out"))
    assert not list(tmp_path.glob("out/step-*/COMMIT.json"))
    assert main(["convert", "from-torch", str(path), str(tmp_path / "out")]) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_genuine_torch_file_passes(tmp_path: Path, is_zip: bool) -> None:
    tied = torch.arange(6.0)
    state = {"a": tied, "b": tied[2:4], "n": {"x": [1, "y"], 3: None}, "p": torch.nn.Parameter(tied), "h": tied.half()}
    (tmp_path / "x.pt").write_bytes(_saved(state, is_zip=is_zip))
    assert import_torch(str(tmp_path / "x.pt"), str(tmp_path / "out")).num_tensors == 4


# ------------------------------------------------------------------------------------------------------ evidence

LOG = "2026-01-01 00:00:00 step 3\nTraceback (most recent call last):\nValueError: no\n"
SIDECAR = {
    "titan_ckpt": "sidecar",
    "rank": 0,
    "world_size": 2,
    "host": "h",
    "pid": 5,
    "started_s": 1.7e9,
    "utc_offset_s": 0,
}


@pytest.mark.parametrize(
    "change",
    [{"started_s": "abc"}, {"started_s": 1e200}, {"rank": True}, {"groups": {"a": 1}}, {"world_size": 10**400},
     {"coordinates": ["tp"]}, {"host": "\ud800"}],
)  # fmt: skip
def test_a_bad_sidecar_loses_itself_alone(tmp_path: Path, change: dict[str, Any]) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank_0000{rank}.log").write_text(LOG)
    (tmp_path / "rank_00000.sidecar.json").write_text(json.dumps(SIDECAR | change))
    found = open_run(str(tmp_path))
    assert [flag.source for flag in found.flags if flag.source] == ["rank_00000.sidecar.json"]
    assert all(record.log is not None and record.log.events for record in found.ranks.values())


def test_a_dump_that_repeats_one_entry_is_refused(tmp_path: Path) -> None:
    entry = {"profiling_name": "nccl:coalesced", "is_p2p": True, "process_group": ("0", ""), "p2p_seq_id": 1}
    (tmp_path / "rank_0.pickle").write_bytes(pickle.dumps({"version": "2.3", "entries": [entry] * 400_000}, protocol=2))
    (tmp_path / "rank_1.log").write_text(LOG)
    found = open_run(str(tmp_path))
    assert any("entries" in flag.text for flag in found.flags)


def test_a_small_packed_file_of_gigabytes_is_refused_by_name(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(1 << 27), 9)
    (tmp_path / "rank_0.log.gz").write_bytes(bomb)
    (tmp_path / "rank_1.json.gz").write_bytes(bomb)
    (tmp_path / "rank_2.log").write_text(LOG)
    texts = {flag.source: flag.text for flag in open_run(str(tmp_path)).flags}
    assert all("unpacks from" in texts[name] for name in ("rank_0.log.gz", "rank_1.json.gz"))
    content = find_content(str(tmp_path))
    files = LogFiles(content.store, content.logs)
    try:
        problems = dict(load_logs(files).problems)
    finally:
        files.close()
    assert "unpacks from" in problems["rank_0.log.gz"]


def test_metrics_of_absurd_values_are_skipped_or_refused() -> None:
    lines = b'{"step": 1, "loss": 2}\n{"step": 1e999, "loss": ' + b"9" * 400 + b"}\n" + b"[" * 5000 + b"\n"
    assert parse_metric_lines(lines, "m").columns["loss"].tolist()[0] == 2
    with pytest.raises(DamagedError, match="different names"):
        parse_metric_lines(b"".join(b'{"k%d": 1}\n' % n for n in range(5000)), "m")
