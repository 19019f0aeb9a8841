"""Input that cannot be converted raises one error naming the tensor or file; no output that looks finished remains."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf_models import config, tensors, write_model, write_safetensors
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.errors import DamagedError, TitanError
from titan_ckpt.store.local import FileStore

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


def _refused(folder: Path, model: Path) -> str:
    """The error that an import raises; asserts that it left no checkpoint and no data."""
    run = folder / "run"
    with pytest.raises(TitanError) as caught:
        import_hf(str(model), str(run))
    assert caught.value.exit_code in (2, 3)
    assert not [path for path in run.rglob("*") if path.is_file()]
    return str(caught.value)


def _without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda content: content.pop(name)


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda content: content.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(Q), f"missing {Q}"),
        (_without("lm_head.weight"), "missing lm_head.weight"),
        (_with("model.layers.2.mlp.up_proj.weight", torch.zeros(48, 32)), "model.layers.2.mlp.up_proj.weight"),
        (_with("visual.patch.weight", torch.zeros(3)), "not part of a llama model of this config: visual.patch.weight"),
        (_with(K, torch.zeros(32, 16)), r"k_proj.weight has shape (32, 16), the config wants (16, 32) (transposed?)"),
        (_with(Q, torch.zeros(31, 32)), "q_proj.weight has shape (31, 32), the config wants (32, 32)"),
        (_with("lm_head.weight", torch.zeros(128, 32)), "vocabulary padded?"),
        (_with("model.norm.weight", torch.zeros(())), "model.norm.weight has shape ()"),
    ],
)
def test_tensors_that_do_not_make_up_the_model(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    content = tensors(config())
    change(content)
    assert message in _refused(tmp_path, write_model(tmp_path / "in", config(), content))


def test_computed_buffers_of_old_files_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = tensors(config()) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    model = write_model(tmp_path / "in", config(), content)
    assert main(["convert", "from-hf", str(model), str(tmp_path / "run")]) == 0
    assert "every reader computes them: model.layers.0.self_attn.rotary_emb.inv_freq\n" in capsys.readouterr().out
    assert not any("rotary" in fqn for fqn in open_checkpoint(str(tmp_path / "run")).manifest.by_fqn)


def test_ignored_parts_of_a_folder_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of = config(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    model = write_model(tmp_path / "in", of, tensors(of), num_files=2)
    write_safetensors(model / WEIGHTS, {"stale": torch.zeros(3)})
    assert main(["convert", "from-hf", str(model), str(tmp_path / "run")]) == 0
    log_text = caplog.text
    assert f"has both {INDEX} and {WEIGHTS}; the index counts" in log_text
    assert "auto_map names code of the model's own, which is neither run nor copied" in log_text
    assert "stale" not in open_checkpoint(str(tmp_path / "run")).manifest.by_fqn


def test_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    of = config(tie_word_embeddings=True)
    content = tensors(of)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    content["lm_head.weight"][50, 3] += 1e-6
    assert "lm_head.weight and model.embed_tokens.weight differ" in _refused(
        tmp_path, write_model(tmp_path / "in", of, content)
    )


def test_more_layers_in_the_config_than_in_the_files(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / "config.json").write_text(json.dumps(config(num_hidden_layers=3)))
    assert "missing model.layers.2.input_layernorm.weight" in _refused(tmp_path, model)


def test_nothing_but_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert "empty or does not exist" in _refused(tmp_path, tmp_path / "in")
    assert "empty or does not exist" in _refused(tmp_path, tmp_path / "absent")


@pytest.mark.parametrize("text", ["", "{", "[]", "nul"])
def test_config_that_is_no_config(tmp_path: Path, text: str) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / "config.json").write_text(text)
    assert re.search(r"config\.json: (not JSON|expected an object)", _refused(tmp_path, model))


def test_unfinished_copy_without_config(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / "config.json").unlink()
    assert "no config.json" in _refused(tmp_path, model)


def test_torch_files_only(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    assert "pytorch_model.bin, no safetensors" in _refused(tmp_path, model)


def test_shards_without_an_index(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()), num_files=2)
    (model / INDEX).unlink()
    assert "the index is missing" in _refused(tmp_path, model)


def _edit_index(model: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((model / INDEX).read_text())
    edit(index["weight_map"])
    (model / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update({Q: "model-00009-of-00002.safetensors"}), "model-00009-of-00002.safetensors: missing"),
        (lambda m: m.update({Q: "../../etc/passwd"}), "outside the model's folder"),
        (lambda m: m.update({Q: "/etc/passwd"}), "outside the model's folder"),
        (lambda m: m.update({Q: 7}), "expected text"),
        (lambda m: m.pop(Q), f"holds {Q}, which {INDEX} lists in no file"),
        (lambda m: m.update({"model.x": m[Q]}), "model.x is missing"),
        (lambda m: m.clear(), "no weight_map"),
    ],
)
def test_index_that_lies(tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()), num_files=2)
    _edit_index(model, edit)
    assert message in _refused(tmp_path, model)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    content = tensors(config())
    model = write_model(tmp_path / "in", config(), content, num_files=2)
    index = json.loads((model / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(index.values())) if file != index[Q])
    write_safetensors(model / other, {n: content[n] for n in [*(n for n in index if index[n] == other), Q]})
    assert f"holds {Q}, which {INDEX} lists in {index[Q]}" in _refused(tmp_path, model)


def test_stale_files_beside_the_index_do_not_count(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()), num_files=2)
    write_safetensors(model / "model-00003-of-00003.safetensors", {"stale": torch.zeros(3)})
    assert import_hf(str(model), str(tmp_path / "run")).num_tensors == len(tensors(config()))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_link_to_nothing_in_a_hub_cache_is_named(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to("../../blobs/0123abc")
    with pytest.raises(DamagedError, match=rf"{name}: a link to ../../blobs/0123abc, which is not there"):
        import_hf(str(model), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", [WEIGHTS])
@pytest.mark.parametrize("data", [b"", b"version https://git-lfs.github.com/spec/v1\n", os.urandom(100)])
def test_weights_that_are_none(tmp_path: Path, file: str, data: bytes) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / file).write_bytes(data)
    assert WEIGHTS in _refused(tmp_path, model)


def test_file_that_shrinks_while_it_is_read_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    whole = FileStore.read_into

    def shrinking(self: FileStore, path: str, start: int, buffer: memoryview) -> None:
        if path == WEIGHTS and len(buffer) > 10_000:
            os.truncate(model / WEIGHTS, 20_000)
        whole(self, path, start, buffer)

    monkeypatch.setattr(FileStore, "read_into", shrinking)
    assert WEIGHTS in _refused(tmp_path, model)


def test_step_that_is_committed_is_not_touched(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    import_hf(str(model), str(tmp_path / "run"))
    with pytest.raises(TitanError, match="committed already"):
        import_hf(str(model), str(tmp_path / "run"))
    import_hf(str(model), str(tmp_path / "run@5"))
    assert open_checkpoint(str(tmp_path / "run")).step == 5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An imported model."""
    import_hf(str(write_model(tmp_path / "in", config(), tensors(config()))), str(tmp_path / "run"))
    return tmp_path / "run"


def _nothing_left(folder: Path) -> bool:
    return not [name for name in os.listdir(folder) if "out" in name]


def test_damaged_checkpoint_is_named_and_nothing_is_left(run: Path) -> None:
    checkpoint = open_checkpoint(str(run))
    chunk = checkpoint.manifest.chunk(checkpoint.manifest.by_fqn["model.model.norm.weight"], 0)
    path = run / "step-00000000" / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.offset + chunk.payload_offset + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(TitanError, match=r"model\.norm\.weight.*damaged"):
        export_hf(str(run), str(run.parent / "out"))
    assert _nothing_left(run.parent)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_destination_that_exists_is_not_touched(run: Path, kind: str) -> None:
    out = run.parent / "out"
    if kind == "folder":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    else:
        out.write_text("mine")
    with pytest.raises(TitanError, match="exists already"):
        export_hf(str(run), str(out))
    assert (out / "notes.txt" if kind == "folder" else out).read_text() == "mine"


def test_empty_folder_may_be_the_destination(run: Path) -> None:
    (run.parent / "out").mkdir()
    export_hf(str(run), str(run.parent / "out"))
    assert (run.parent / "out" / WEIGHTS).exists()


def test_prefix_that_holds_something_is_not_touched(run: Path) -> None:
    export_hf(str(run), "memory://bad-input/out")
    with pytest.raises(TitanError, match="already"):
        export_hf(str(run), "memory://bad-input/out")


def test_full_disk_is_reported_before_anything_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "free_bytes", lambda _: 100)
    with pytest.raises(TitanError, match="the disk has 100 B free"):
        export_hf(str(run), str(run.parent / "out"))
    assert _nothing_left(run.parent)


def test_disk_that_fills_up_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "writev", _failing_after(os.writev, 30_000))
    with pytest.raises(TitanError, match="No space left"):
        export_hf(str(run), str(run.parent / "out"))
    assert _nothing_left(run.parent)


def _failing_after(write: Callable[[int, list[memoryview]], int], limit: int) -> Callable[[int, list[memoryview]], int]:
    written = [0]

    def limited(descriptor: int, views: list[memoryview]) -> int:
        written[0] += sum(map(len, views))
        if written[0] > limit:
            raise OSError(28, "No space left on device")
        return write(descriptor, views)

    return limited


def test_failure_on_an_object_store_leaves_no_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_ckpt.store.any_fsspec import FsspecStore
    from titan_ckpt.store.open import open_store

    write = FsspecStore.write

    def failing(self: FsspecStore, path: str, parts: Any) -> Any:
        if path == "config.json":
            raise TitanError("the network went away")
        return write(self, path, parts)

    monkeypatch.setattr(FsspecStore, "write", failing)
    with pytest.raises(TitanError, match="went away"):
        export_hf(str(run), "memory://gone/out", max_shard_bytes=20_000)
    assert list(open_store("memory://gone/out").list()) == []


def test_optimizer_only_checkpoint_is_refused(tmp_path: Path) -> None:
    from titan_ckpt.saving.saver import save

    save(str(tmp_path / "run"), {"optimizer": {"a": torch.zeros(2)}}, step=1, config={"model": {}})
    with pytest.raises(TitanError):
        export_hf(str(tmp_path / "run"), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["from-hf", "{dir}/absent", "{dir}/r"], 3, "does not exist"),
        (["to-hf", "{dir}/absent", "{dir}/o"], 3, "no committed checkpoint"),
        (["to-hf", "{dir}/run", "{dir}/in"], 3, "exists already"),
        (["to-hf", "{dir}/run", "{dir}/in", "-n"], 3, "exists already"),
        (["from-hf", "{dir}/in", "{dir}/run", "-n"], 3, "committed already"),
        (["to-hf", "{dir}/run@9", "{dir}/o"], 3, "not committed"),
        (["to-hf", "{dir}/run", "{dir}/o", "--config", "{dir}"], 2, "no config.json there"),
        (["to-hf", "{dir}/run", "{dir}/o", "--max-shard-size", "lots"], 2, "not a size"),
    ],
)
def test_command_prints_the_error_without_a_traceback(
    run: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [argument.format(dir=run.parent) for argument in arguments]
    assert main(["convert", *filled]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (run.parent / "o").exists()


def test_dry_run_shows_and_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.parent.rglob("*"))
    assert main(["convert", "to-hf", str(run), str(run.parent / "out"), "-n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] is False
    assert main(["convert", "from-hf", str(run.parent / "in"), f"{run}@3", "-n"]) == 0
    assert "would write" in capsys.readouterr().out
    assert sorted(run.parent.rglob("*")) == before
