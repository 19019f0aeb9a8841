"""Malicious checkpoints: none executes code, touches files outside the run, or exhausts memory."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import CheckpointError, DamagedError, TitanError, UnsafeContentError
from titan_ckpt.format.codec import decode_blob
from titan_ckpt.format.dcp_read import read_dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.format.names import COMMIT
from titan_ckpt.loading.load import load
from titan_ckpt.parsing.pickle_check import check_pickle
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.copy import copy_checkpoint


class Canary:
    """A pickle that creates a file when executed."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._mark),))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint, next to files that must stay untouched."""
    (tmp_path / "outside").write_text("outside")
    with Saver(str(tmp_path / "run"), SaveOptions(is_exclusive=False)) as saver:
        saver.save({"w": torch.arange(100.0), "n": 3}, step=1, assets={"a.json": b"{}"})
    return tmp_path / "run"


def forge(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and update COMMIT to match, as an attacker with write access would."""
    (path,) = run.glob("step-00000001/a-*/manifest.json")
    content = json.loads(path.read_bytes())
    change(content)
    data = json.dumps(content).encode()
    path.write_bytes(data)
    forge_commit(run, lambda commit: commit.update(manifest={"size": len(data), "xxh3_128": digest(data).hex()}))


def forge_commit(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = run / "step-00000001" / COMMIT
    content = json.loads(path.read_bytes())
    change(content)
    content.pop("xxh3_128")
    body = json.dumps(content, indent=1).encode()
    path.write_bytes(json.dumps({**content, "xxh3_128": digest(body).hex()}, indent=1).encode())


def bomb(count: int, claimed: int) -> dict[str, Any]:
    """A packed column of `count` zeros that claims to have `claimed` values."""
    packer = zstandard.ZstdCompressor(level=3).compressobj(size=count * 8)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(count * 8 >> 20)) + packer.flush()
    return {"count": claimed, "zstd": base64.b64encode(packed).decode()}


HUGE = 1 << 62
MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "path outside": lambda m: m["files"][0].update(path="../../outside"),
    "absolute path": lambda m: m["files"][0].update(path="/etc/passwd"),
    "value in another file": lambda m: m["objects"][0].update(file="../step-00000001/../outside"),
    "value past the file": lambda m: m["objects"][0].update(offset=HUGE, length=HUGE),
    "negative value": lambda m: m["objects"][0].update(offset=-1),
    "asset outside": lambda m: m["assets"].update({"../../../../outside": "00"}),
    "absolute asset": lambda m: m["assets"].update({"/etc/passwd": "00"}),
    "attempt outside": lambda m: m.update(attempt="../../x"),
    "offsets that wrap": lambda m: m["chunks"].update(offset=[HUGE], length=[HUGE]),
    "payload that wraps": lambda m: m["chunks"].update(payload_offset=[HUGE], payload_length=[HUGE]),
    "box that wraps": lambda m: m["chunks"].update(box_offsets=[HUGE], box_sizes=[HUGE]),
    "number past 64 bits": lambda m: m["chunks"].update(offset=[1 << 70]),
    "shape of nothing stored": lambda m: m["tensors"][0].update(shape=[1 << 50]),
    "negative chunks": lambda m: m["tensors"][0].update(chunks=-1),
    "many chunks": lambda m: m["tensors"][0].update(chunks=1 << 40),
    "unknown codec": lambda m: m.update(codecs=["rot13", "planes-zstd"]),
    "wrong types": lambda m: m.update(tensors={"a": 1}, files=None),
    "assets as a list": lambda m: m.update(assets=[1]),
    "column bomb": lambda m: m["chunks"].update(offset=bomb(1 << 27, 1)),
    "honest column bomb": lambda m: m["chunks"].update(offset=bomb(1 << 28, 1 << 28)),
}  # fmt: skip


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_forged_manifest_is_refused_by_every_tool(run: Path, what: str, tmp_path: Path) -> None:
    forge(run, MANIFESTS[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        open_checkpoint(str(run), step=1)
    with pytest.raises(TitanError):
        load(f"{run}@1", {"w": torch.zeros(100), "n": 0})
    assert verify(f"{run}@1", read_data=True)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 256 << 10, f"{what} took {grown_kib} KiB"
    assert (tmp_path / "outside").read_text() == "outside"


def test_json_nested_without_end_is_damage(run: Path) -> None:
    nested = b"[" * 1_000_000
    with pytest.raises(DamagedError):
        decode_manifest(nested, where="m")
    (run / "step-00000001" / COMMIT).write_bytes(nested)
    with pytest.raises(CheckpointError):
        open_checkpoint(str(run), step=1)


@pytest.mark.parametrize("change", [{"attempt": "../../x"}, {"attempt": "/etc"}, {"step": 7}, {"step": "x" * 99}])
def test_a_forged_commit_is_refused(run: Path, change: dict[str, Any]) -> None:
    forge_commit(run, lambda commit: commit.update(change))
    with pytest.raises(CheckpointError):
        open_checkpoint(str(run), step=1)


@pytest.mark.parametrize("name", ["COMMIT.json", "a-*/manifest.json"])
def test_a_file_too_large_to_be_one_is_not_read(run: Path, name: str) -> None:
    (path,) = run.glob(f"step-00000001/{name}")
    os.truncate(path, 1 << 40)
    with pytest.raises(DamagedError):
        open_checkpoint(str(run), step=1)
    assert verify(f"{run}@1")


def test_a_foreign_index_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    os.truncate(tmp_path / ".metadata", 1 << 40)
    with pytest.raises(DamagedError, match="no index is larger"):
        open_checkpoint(str(tmp_path))


def test_a_value_whose_file_is_no_value_is_damage(run: Path) -> None:
    checkpoint = open_checkpoint(str(run))
    entry = checkpoint.manifest.objects[0]
    forge(run, lambda m: m["objects"][0].update(length=entry.length - 30, digest=None))
    with pytest.raises(DamagedError, match=r"not a (value that torch|whole torch file)"):
        read_object(open_checkpoint(str(run)), "n")


def test_a_copy_of_a_forged_checkpoint_writes_nothing_outside(run: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(run))
    forged = replace(
        checkpoint, manifest=replace(checkpoint.manifest, assets={"../../../../mark": digest(b"{}").hex()})
    )
    with pytest.raises(TitanError):
        copy_checkpoint(forged, FileStore(str(tmp_path / "copy")))
    assert not list(tmp_path.rglob("mark"))


@pytest.mark.parametrize("target", ["torch", "builtins", "os", "posix", "numpy", "titan_ckpt.format.dcp_read"])
@pytest.mark.parametrize("name", ["eval", "exec", "system", "load", "__import__", "os.system", "_ignore"])
def test_no_global_but_those_of_an_index_is_ever_found(target: str, name: str) -> None:
    data = f"c{target}\n{name}\n.".encode()
    with pytest.raises(UnsafeContentError):
        read_dcp_metadata(data, sizes={}, step=1, where="x")


def test_a_pickle_cannot_change_the_code_that_reads_it() -> None:
    with pytest.raises(UnsafeContentError, match="modify the code"):
        read_dcp_metadata(b"\x80\x02ctorch\nSize\nN}(X\x05\x00\x00\x00_callNu\x86b.", sizes={}, step=1, where="x")


PICKLES = {
    "memo index of 32 GiB": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo index as text": b"\x80\x02Np2147483647\n.",
    "bytearray of 1 TiB": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "text of 1 TiB": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
    "no opcode": b"\x80\x02\xff.",
    "cut off": b"\x80\x02X\x05\x00\x00\x00ab",
    "no end": b"\x80\x02N",
}


@pytest.mark.parametrize("what", PICKLES)
def test_a_small_pickle_cannot_ask_for_all_memory(what: str) -> None:
    with pytest.raises(DamagedError):
        read_dcp_metadata(PICKLES[what], sizes={}, step=1, where="x")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_harmless_pickle_passes_whatever_its_protocol(protocol: int) -> None:
    value = {"a": [1, 2.5, "x" * 300, b"y" * 70_000, (1 << 90), None, {"b", 3}], "c": torch.Size([1, 2])}
    check_pickle(pickle.dumps(value, protocol=protocol), where="x")


def foreign(folder: Path) -> bytes:
    dcp.save({"w": torch.arange(12.0).reshape(3, 4)}, checkpoint_id=folder)
    return (folder / "__0_0.distcp").read_bytes()


def rewrite_blob(data: bytes, change: Callable[[str, bytes], bytes], *, method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return out.getvalue()


def put_blob(folder: Path, blob: bytes) -> None:
    """Replace the only blob of a plain DCP checkpoint, and its length in the index."""
    (folder / "__0_0.distcp").write_bytes(blob)
    metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301  (written by this test)
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = replace(info, offset=0, length=len(blob))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_foreign_blob_that_is_a_canary_executes_nothing(tmp_path: Path) -> None:
    blob = foreign(tmp_path)
    evil = pickle.dumps(Canary(tmp_path / "mark"))
    put_blob(tmp_path, rewrite_blob(blob, lambda name, data: evil if name.endswith("data.pkl") else data))
    with pytest.raises(UnsafeContentError):
        open_checkpoint(str(tmp_path)).read("w")
    assert not (tmp_path / "mark").exists()


def test_a_packed_foreign_blob_is_not_unpacked(tmp_path: Path) -> None:
    blob = rewrite_blob(foreign(tmp_path), lambda _, data: data, method=zipfile.ZIP_DEFLATED)
    put_blob(tmp_path, blob)
    with pytest.raises(DamagedError, match="packed"):
        open_checkpoint(str(tmp_path)).read("w")


def test_a_foreign_index_cannot_point_past_its_files(tmp_path: Path) -> None:
    foreign(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())  # noqa: S301  (written by this test)
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = replace(info, length=HUGE)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="past the end of its file"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../outside"])
def test_a_foreign_index_cannot_name_files_outside(tmp_path: Path, path: str) -> None:
    foreign(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())  # noqa: S301  (written by this test)
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = replace(info, relative_path=path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(TitanError, match=r"not a path inside|missing"):
        open_checkpoint(str(tmp_path))


def test_an_encoded_blob_that_lies_about_its_size_is_damage(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.zeros(1 << 20)}, step=1, options=SaveOptions(codec="planes-zstd"))
    (path,) = tmp_path.glob("step-*/a-*/*.distcp")
    chunk = open_checkpoint(str(tmp_path)).manifest.chunk(open_checkpoint(str(tmp_path)).manifest.tensors[0], 0)
    blob = bytearray(path.read_bytes()[chunk.offset : chunk.offset + chunk.length])
    blob[16:24] = (1 << 50).to_bytes(8, "little")
    with pytest.raises(DamagedError, match="cannot hold"):
        decode_blob(bytes(blob), "x")


def test_the_worst_files_stay_in_bounded_memory() -> None:
    """With 512 MiB of headroom, each attack ends in a TitanError, none in MemoryError."""
    script = (
        "import resource, sys\n"
        "from tests.reliability.test_malice import PICKLES, bomb\n"
        "from titan_ckpt.errors import DamagedError\n"
        "from titan_ckpt.format.manifest_json import _decode_column\n"
        "from titan_ckpt.format.dcp_read import read_dcp_metadata\n"
        "from titan_ckpt.parsing.json_values import JsonValue\n"
        "column = JsonValue(bomb(1 << 27, 1), 'm')\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (512 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "for data in PICKLES.values():\n"
        "    try:\n        read_dcp_metadata(data, sizes={}, step=1, where='x')\n"
        "    except DamagedError:\n        continue\n"
        "    sys.exit(1)\n"
        "try:\n    _decode_column(column)\n"
        "except ValueError:\n    sys.exit(0)\n"
        "sys.exit(2)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
