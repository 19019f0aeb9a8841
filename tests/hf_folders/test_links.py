"""Nothing outside a model's folder is read through a link, and what is not a file is refused without waiting for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.hf_models import config, contents, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.peft_adapter import open_adapter
from titan_ckpt.converters.torch_file import import_torch
from titan_ckpt.errors import DamagedError, TitanError, UnsafeContentError

NAMES = ["LICENSE", "README.md", "config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model in a folder beside a secret."""
    (tmp_path / "secret").write_text("root:x:secret")
    return write_model(tmp_path / "in", config(), tensors(config()), extra={"LICENSE": "MIT", "tokenizer.json": "{}"})


def refused(model: Path) -> str:
    """The error of an import, which leaves nothing; reading the folder in place raises it too."""
    with pytest.raises(TitanError) as caught:
        import_hf(str(model), str(model.parent / "run"))
    with pytest.raises(TitanError):
        open_checkpoint(str(model))
    assert not any(path.is_file() for path in (model.parent / "run").rglob("*"))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["../secret", "absolute", ".git/config", "two steps", "folder"])
def test_a_link_out_of_the_folder_is_not_followed(model: Path, name: str, target: str) -> None:
    (model / name).unlink(missing_ok=True)
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("url = https://user:token@host")
    if target == "two steps":
        (model / "step").symlink_to("../secret")
    if target == "folder":
        (model / "sub").symlink_to("..")
    to = {"absolute": str(model.parent / "secret"), "two steps": "step", "folder": "sub/secret"}.get(target, target)
    (model / name).symlink_to(to)
    assert "UnsafeContentError" in (text := refused(model))
    assert name in text


def test_an_index_that_leads_out_through_a_folder(model: Path) -> None:
    other = write_model(model.parent / "other", config(), tensors(config()), num_files=2)
    model = write_model(model.parent / "index", config(), tensors(config()), num_files=2)
    (model / "sub").symlink_to(other)
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(SHARD, f"sub/{SHARD}"))
    assert "UnsafeContentError" in refused(model)


@pytest.mark.parametrize(
    "shard", ["https://host/x.safetensors", "file:///etc/passwd", "C:\\\\x", "a\\u001b[2Jb", "\\u0000", "~/x/../y"]
)
def test_shard_names_that_are_no_files_of_the_folder(model: Path, shard: str) -> None:
    model = write_model(model.parent / "index", config(), tensors(config()), num_files=2)
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(SHARD, shard))
    assert "UnsafeContentError" in (text := refused(model))
    assert text.isprintable()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_not_a_file_is_refused_at_once(model: Path, name: str, kind: str) -> None:
    (model / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(model / name)
    elif kind == "folder":
        (model / name).mkdir()
    else:
        (model / name).symlink_to("/dev/zero")
    assert name in refused(model)


def test_a_second_name_of_a_small_file_is_refused(model: Path) -> None:
    (model / "NOTICE").hardlink_to(model.parent / "secret")
    assert "hard link" in refused(model)


def test_weights_may_have_a_second_name(model: Path) -> None:
    (model.parent / "kept.safetensors").hardlink_to(model / "model.safetensors")
    import_hf(str(model), str(model.parent / "run"))


def hub_cache(model: Path) -> Path:
    """The model as huggingface_hub lays it out; returns the snapshot."""
    repository = model.parent / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        path.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    (repository / "blobs" / ("f" * 64)).write_text("{{ messages }}")
    (snapshot / "additional_chat_templates" / "tools.jinja").symlink_to(f"../../../blobs/{'f' * 64}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    return snapshot


def test_a_hub_cache_is_read_through_its_own_links(model: Path) -> None:
    snapshot = hub_cache(model)
    for number, place in enumerate([snapshot, snapshot.parent.parent]):
        import_hf(str(place), f"{model.parent}/run{number}")
        export_hf(f"{model.parent}/run{number}", f"{model.parent}/out{number}")
        written = contents(model.parent / f"out{number}")
        assert written["LICENSE"] == b"MIT"
        assert written["additional_chat_templates/tools.jinja"] == b"{{ messages }}"


@pytest.mark.parametrize(
    "to", ["../../../secret", "../../blobs/link", "../../../models--other--repo/blobs/{:040x}", "../../refs/main"]
)
def test_a_hub_cache_leads_to_its_own_blobs_only(model: Path, to: str) -> None:
    snapshot = hub_cache(model)
    (snapshot.parent.parent / "blobs" / "link").symlink_to(model.parent / "secret")
    other = model.parent / "models--other--repo" / "blobs"
    other.mkdir(parents=True)
    (other / f"{0:040x}").write_text("another repository's")
    (snapshot / "NOTICE").symlink_to(to.format(0))
    with pytest.raises(UnsafeContentError, match="NOTICE"):
        import_hf(str(snapshot.parent.parent), str(model.parent / "run"))


def test_a_snapshot_that_is_a_link_out_of_its_cache(model: Path) -> None:
    repository = model.parent / "models--org--name"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / "0123abc").symlink_to(model)
    with pytest.raises(UnsafeContentError, match="0123abc"):
        import_hf(str(repository), str(model.parent / "run"))


def test_a_foreign_checkpoint_reads_its_own_files_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dcp.save({"w": torch.full((4,), float(name == "a"))}, checkpoint_id=tmp_path / name)
    open_checkpoint(str(tmp_path / "a"))
    (tmp_path / "b" / "__0_0.distcp").unlink()
    (tmp_path / "b" / "__0_0.distcp").symlink_to(tmp_path / "a" / "__0_0.distcp")
    with pytest.raises(UnsafeContentError, match=r"__0_0\.distcp"):
        open_checkpoint(str(tmp_path / "b"))


def test_torch_files_and_adapters_are_their_own_files(model: Path) -> None:
    torch.save({"w": torch.zeros(2)}, model.parent / "secret.pt")
    (model / "linked.pt").symlink_to("../secret.pt")
    with pytest.raises(UnsafeContentError, match=r"linked\.pt"):
        import_torch(str(model / "linked.pt"), str(model.parent / "run"))
    os.mkfifo(model / "pipe.pt")
    with pytest.raises(DamagedError, match="named pipe"):
        import_torch(str(model / "pipe.pt"), str(model.parent / "run"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (model / name).symlink_to("../secret")
        with pytest.raises(UnsafeContentError, match=name):
            open_adapter(str(model))
        (model / name).unlink()
