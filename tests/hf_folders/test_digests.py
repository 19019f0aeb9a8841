"""`verify` of formats without digests: it never says whole of what it could not check, and checks what `to-hf` records."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.hf_models import config, contents, tensors, write_model
from titan_ckpt.check.verify import examine, verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.digests import DIGESTS
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.errors import DamagedError
from titan_ckpt.saving.saver import Saver

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model as others write it, without digests."""
    return write_model(tmp_path / "in", config(), tensors(config()), extra={"tokenizer.json": "{}", "LICENSE": "MIT"})


@pytest.fixture
def exported(tmp_path: Path, model: Path) -> Path:
    """The model as `to-hf` writes it, in two shards."""
    export_hf(str(model), str(tmp_path / "out"), max_shard_bytes=40_000)
    return tmp_path / "out"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of `verify`."""
    code = main(["verify", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_folder_without_digests_is_never_called_whole(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for is_flipped in (False, True):
        if is_flipped:
            flip(model / WEIGHTS, -5)
        code, facts = call(capsys, str(model), "--data")
        assert (code, facts["is_ok"], facts["problems"]) == (1, None, [])
        by_file = {row["path"]: row for row in facts["files"]}
        assert {name: row["checked_by"] for name, row in by_file.items()} == dict.fromkeys(
            (WEIGHTS, "config.json", "tokenizer.json", "LICENSE")
        )
        assert len(by_file[WEIGHTS]["unchecked"]) == len(tensors(config()))
        assert main(["verify", str(model), "--data"]) == 1
        text = capsys.readouterr().out
        assert "whole" not in text
        assert f"{WEIGHTS}: no digest (21 tensors)" in text
        assert call(capsys, str(model))[1]["is_ok"] is None
        assert main(["verify", str(model)]) == 0
        assert "whole" not in capsys.readouterr().out


def test_an_export_is_whole(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = call(capsys, str(exported), "--data")
    assert (code, facts["is_ok"]) == (0, True)
    assert {row["checked_by"] for row in facts["files"]} == {"xxh3-128"}
    assert {row["path"] for row in facts["files"]} == {path.name for path in exported.iterdir()} - {
        DIGESTS,
        "README.md",
    }
    sizes = sum(path.stat().st_size for path in exported.iterdir() if path.name not in (DIGESTS, "README.md"))
    assert facts["read_bytes"] == sizes


def test_every_flipped_byte_of_an_export_is_found(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for path in sorted(exported.iterdir()):
        if path.name == "README.md":
            continue
        right = path.read_bytes()
        for at in sorted(
            {0, 5, 9, len(right) // 3, len(right) // 2, len(right) - 2, len(right) - 1} & set(range(len(right)))
        ):
            flip(path, at)
            found[path.name, at] = main(["verify", str(exported), "--data"])
            path.write_bytes(right)
    capsys.readouterr()
    assert len(found) >= 40
    assert [place for place, code in found.items() if code == 0] == []
    assert verify(str(exported), read_data=True) == []


def test_the_damaged_tensor_is_named(exported: Path) -> None:
    of = open_hf(str(exported))
    name, tensor = next((name, tensor) for name, tensor in of.tensors.items() if "layers.1.mlp" in name)
    file = of.files[of.file_of[name]]
    flip(exported / file, tensor.offset + 3)
    (problem,) = verify(str(exported), read_data=True)
    assert (problem.path, problem.fqn) == (file, name)
    assert (problem.start, problem.end) == (tensor.offset, tensor.offset + tensor.length)
    assert examine(str(exported), read_data=True).is_ok is False


def test_an_import_checks_the_recorded_digests(exported: Path, tmp_path: Path) -> None:
    import_hf(str(exported), str(tmp_path / "right"))
    file = sorted(exported.glob("*.safetensors"))[0]
    right = file.read_bytes()
    flip(file, -3)
    with pytest.raises(DamagedError, match=r"have digest .* remove it"):
        import_hf(str(exported), str(tmp_path / "run"))
    file.write_bytes(right.replace(b'"format":"pt"', b'"format":"PT"'))
    with pytest.raises(DamagedError, match="header is not the one that was exported"):
        import_hf(str(exported), str(tmp_path / "run"))
    assert not any(path.is_file() for path in (tmp_path / "run").rglob("*"))
    (exported / DIGESTS).unlink()
    import_hf(str(exported), str(tmp_path / "run"))


def test_edited_small_files_are_said_at_an_import(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (exported / "README.md").write_text("mine")
    (exported / "config.json").write_text((exported / "config.json").read_text() + " ")
    import_hf(str(exported), str(tmp_path / "run"))
    assert "config.json: is not the file that was exported" in caplog.text
    assert "README" not in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"digest": 1}', '{"version": "x"}', "[" * 100_000])
def test_a_damaged_record_is_a_problem(exported: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (exported / DIGESTS).write_text(text)
    code, facts = call(capsys, str(exported), "--data")
    assert (code, facts["is_ok"]) == (1, False)
    assert DIGESTS in facts["problems"][0]["message"]


def test_a_missing_or_longer_file_is_a_problem(exported: Path) -> None:
    (exported / "LICENSE").unlink()
    with (exported / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert {problem.path for problem in verify(str(exported), read_data=True)} == {"LICENSE", "tokenizer.json"}


def test_exports_stay_equal_and_the_record_is_not_carried(exported: Path, tmp_path: Path) -> None:
    import_hf(str(exported), str(tmp_path / "run"))
    assert DIGESTS not in open_checkpoint(str(tmp_path / "run")).manifest.assets
    export_hf(str(tmp_path / "run"), str(tmp_path / "again"), max_shard_bytes=40_000)
    assert contents(tmp_path / "again") == contents(exported)


def test_a_hub_cache_is_checked_by_the_names_of_its_blobs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = model.parent / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in model.iterdir():
        data = path.read_bytes()
        small = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        name = hashlib.sha256(data).hexdigest() if path.name == WEIGHTS else small
        shutil.move(path, repository / "blobs" / name)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    code, facts = call(capsys, str(repository), "--data")
    assert (code, facts["is_ok"]) == (0, True)
    assert {row["path"]: row["checked_by"] for row in facts["files"]} == {
        WEIGHTS: "sha-256", "config.json": "git-sha-1", "tokenizer.json": "git-sha-1", "LICENSE": "git-sha-1",
    }  # fmt: skip
    flip((snapshot / WEIGHTS).resolve(), -1)
    flip((snapshot / "LICENSE").resolve(), 0)
    code, facts = call(capsys, str(repository), "--data")
    assert (code, {problem["path"] for problem in facts["problems"]}) == (1, {WEIGHTS, "LICENSE"})


def test_a_plain_dcp_folder_says_what_has_no_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for has_crc in (True, False):
        folder = tmp_path / f"crc-{has_crc}"
        torch.serialization.set_crc32_options(has_crc)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save({"w": torch.arange(9.0), "n": 3}, checkpoint_id=folder)
        finally:
            torch.serialization.set_crc32_options(True)
        code, facts = call(capsys, str(folder), "--data")
        assert (code, facts["is_ok"], facts["problems"]) == (0 if has_crc else 1, None, [])
        rows = {row["path"]: (row["checked_by"], sorted(row["unchecked"])) for row in facts["files"]}
        data = ("crc-32", []) if has_crc else (None, ["n", "w"])
        assert rows == {"__0_0.distcp": data, ".metadata": (None, [])}
        main(["verify", str(folder), "--data"])
        text = capsys.readouterr().out
        assert "whole" not in text
        assert "  .metadata: no digest" in text


def test_our_own_checkpoint_is_whole_by_its_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Saver(str(tmp_path / "run")) as saver:
        saver.save({"model": {"w": torch.ones(4)}, "n": 3}, step=1).wait()
    code, facts = call(capsys, str(tmp_path / "run"), "--data")
    assert (code, facts["is_ok"], {row["checked_by"] for row in facts["files"]}) == (0, True, {"xxh3-128"})
