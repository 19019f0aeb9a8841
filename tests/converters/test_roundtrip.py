"""Hugging Face -> checkpoint -> Hugging Face: same bytes, names and dtypes for every checkpoint layout."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.support.hf_models import config, contents, raw, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf, open_hf
from titan_ckpt.converters.hf.stream import tensor_digests
from titan_ckpt.converters.models.families import FAMILIES
from titan_ckpt.errors import NotCommittedError
from titan_ckpt.sharding.placement import Box

pytestmark = pytest.mark.repeats

WEIGHTS = "model.safetensors"


def _there_and_back(folder: Path, model: Path, **options: Any) -> Path:
    import_hf(str(model), str(folder / "run"))
    export_hf(str(folder / "run"), str(folder / "out"), **options)
    return folder / "out"


def _digests(folder: Path) -> dict[str, bytes]:
    model = open_hf(str(folder))
    return tensor_digests(model.source, model.store, model.tensors)


def _read(folder: Path) -> dict[str, Tensor]:
    model, content = open_hf(str(folder)), {}
    for name, stored in model.tensors.items():
        data = bytearray(model.store.read(model.files[model.file_of[name]], stored.offset, stored.length))
        content[name] = torch.frombuffer(data, dtype=getattr(torch, stored.dtype)).reshape(stored.shape)
    return content


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {n: (t.dtype, t.shape) for n, t in expected.items()}
    assert [n for n, t in found.items() if raw(t) != raw(expected[n])] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_files", [1, 3])
def test_every_file_comes_back_as_it_went(tmp_path: Path, family: str, num_files: int) -> None:
    of = config(family)
    extra = {
        "tokenizer.json": '{"a": 1}',
        "generation_config.json": "{}",
        "chat_template.jinja": "{{ x }}",
        "LICENSE": "MIT",
    }
    model = write_model(tmp_path / "in", of, tensors(of), num_files=num_files, extra=extra)
    out = _there_and_back(tmp_path, model)
    _same(_read(out), tensors(of))
    assert json.loads((out / "config.json").read_text()) == of
    assert {name: (out / name).read_text() for name in extra} == extra


def test_single_file_model_comes_back_byte_for_byte(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    out = _there_and_back(tmp_path, model)
    assert (out / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()


def test_file_of_the_reference_library_comes_back_byte_for_byte(tmp_path: Path) -> None:
    safetensors = importlib.import_module("safetensors.torch")
    model = write_model(tmp_path / "in", config(), {})
    (model / WEIGHTS).write_bytes(safetensors.save(tensors(config("llama", num_hidden_layers=2)), {"format": "pt"}))
    out = _there_and_back(tmp_path, model)
    assert (out / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()


def test_bits_that_arithmetic_would_change_survive(tmp_path: Path) -> None:
    content = tensors(config())
    odd = [0x7FC00001, 0xFF800001, 0x7FA00000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFFFFFFFF]
    weight = content["model.layers.1.mlp.up_proj.weight"]
    weight.view(torch.int32).view(-1)[: len(odd)] = torch.tensor(
        [n - (1 << 32) if n >> 31 else n for n in odd], dtype=torch.int32
    )
    out = _there_and_back(tmp_path, write_model(tmp_path / "in", config(), content))
    _same(_read(out), content)


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"],
)
def test_every_dtype_is_kept(tmp_path: Path, dtype: str) -> None:
    content = tensors(config())
    name = "model.layers.0.mlp.gate_proj.weight"
    values = torch.arange(content[name].numel(), dtype=torch.int32).reshape(content[name].shape) % 2
    content[name] = values.to(getattr(torch, dtype))
    out = _there_and_back(tmp_path, write_model(tmp_path / "in", config(), content))
    _same(_read(out), content)


def test_mixed_dtypes_stay_aligned_to_their_elements(tmp_path: Path) -> None:
    content = tensors(config())
    content["model.norm.weight"] = content["model.norm.weight"].to(torch.float8_e5m2)
    content["model.layers.0.mlp.up_proj.weight"] = content["model.layers.0.mlp.up_proj.weight"].double()
    out = _there_and_back(tmp_path, write_model(tmp_path / "in", config(), content))
    for tensor in open_hf(str(out)).tensors.values():
        assert tensor.offset % getattr(torch, tensor.dtype).itemsize == 0


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_cast_is_torchs_own_bit_for_bit(tmp_path: Path, target: str) -> None:
    content = tensors(config())
    weight = content["model.layers.1.mlp.up_proj.weight"].view(-1)
    weight[:6] = torch.tensor([float("nan"), -0.0, 2e-42, float("inf"), 1e30, 65519.0])
    out = _there_and_back(tmp_path, write_model(tmp_path / "in", config(), content), dtype=target)
    _same(_read(out), {name: tensor.to(getattr(torch, target)) for name, tensor in content.items()})
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == target


UP, Q = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("dtype", "edge", "beyond"),
    [
        ("float16", 65519.0, 65520.0),  # the first rounds down to 65504
        ("bfloat16", 3.3961e38, 3.397e38),
        ("float8_e4m3fn", 463.0, 1e4),
        ("float8_e4m3fn", 448.0, float("inf")),
        ("float8_e5m2", 57344.0, 1e5),
        ("float32", 3.4e38, None),
    ],
)
def test_only_values_that_a_cast_cannot_hold_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, edge: float, beyond: float | None
) -> None:
    content = tensors(config())
    content[UP][3, 4:7] = torch.tensor([edge, -edge, float("nan")])
    if dtype != "float8_e4m3fn":  # float8_e4m3fn has no infinity
        content[UP][3, 7] = float("inf")
    model = str(write_model(tmp_path / "in", config(), content))
    assert import_hf(model, str(tmp_path / "kept"), dtype=dtype).overflowed == ()
    assert export_hf(model, str(tmp_path / "out"), dtype=dtype).overflowed == ()
    assert not caplog.text
    if beyond is None:
        return
    content[Q][31, 2] = content[UP][0, 0] = -beyond
    model = str(write_model(tmp_path / "wide", config(), content))
    report = import_hf(model, str(tmp_path / "run"), dtype=dtype, layout="torchtitan")
    assert report.overflowed == ("layers.0.attention.wq.weight", "layers.1.feed_forward.w3.weight")
    assert export_hf(model, str(tmp_path / "cast"), dtype=dtype).overflowed == (Q, UP)
    assert (
        caplog.text.count(
            f"the largest {dtype}, were lost in the cast; keep the dtype, or cast to one with a wider range"
        )
        == 4
    )


def test_command_lists_tensors_that_lose_values_in_a_cast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = tensors(config())
    content[UP][0, 0] = 1e5
    model = write_model(tmp_path / "in", config(), content)
    assert main(["convert", "to-hf", str(model), str(tmp_path / "out"), "--dtype", "float16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overflowed"] == [UP]


@pytest.mark.parametrize("is_stored", [False, True])
def test_tied_head_is_kept_once_and_comes_back_as_it_was(tmp_path: Path, is_stored: bool) -> None:
    of = config(tie_word_embeddings=True)
    content = tensors(of)
    if is_stored:
        content["lm_head.weight"] = content["model.embed_tokens.weight"].clone()
    out = _there_and_back(tmp_path, write_model(tmp_path / "in", of, content))
    assert "model.lm_head.weight" not in open_checkpoint(str(tmp_path / "run")).manifest.by_fqn
    _same(_read(out), content)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("layout", ["torchtitan", "torchtitan-qkv"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_torchtitans_names_and_back(tmp_path: Path, family: str, layout: str, is_tied: bool) -> None:
    of = config(family, tie_word_embeddings=is_tied)
    content = tensors(of)
    import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"), layout=layout)
    found = open_checkpoint(str(tmp_path / "run")).manifest.by_fqn
    assert "tok_embeddings.weight" in found
    assert ("lm_head.weight" if layout == "torchtitan-qkv" else "output.weight") in found
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    _same(_read(tmp_path / "out"), content)


def test_torchtitans_llama_has_its_rotary_pairs_side_by_side(tmp_path: Path) -> None:
    content = tensors(config())
    import_hf(str(write_model(tmp_path / "in", config(), content)), str(tmp_path / "run"), layout="torchtitan")
    ours = open_checkpoint(str(tmp_path / "run")).read("layers.0.attention.wq.weight")
    theirs = content["model.layers.0.self_attn.q_proj.weight"]
    for head in range(4):
        assert torch.equal(ours[head * 8 : head * 8 + 8 : 2], theirs[head * 8 : head * 8 + 4])
        assert torch.equal(ours[head * 8 + 1 : head * 8 + 8 : 2], theirs[head * 8 + 4 : head * 8 + 8])


def test_foreign_torchtitan_checkpoint_converts_with_a_config(tmp_path: Path) -> None:
    content = tensors(config())
    model = write_model(tmp_path / "in", config(), content)
    import_hf(str(model), str(tmp_path / "run"), layout="torchtitan")
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    state = {fqn: checkpoint.read(fqn) for fqn in checkpoint.manifest.by_fqn}
    with pytest.warns(UserWarning, match=r"torch.distributed"):
        dcp.save(state, checkpoint_id=str(tmp_path / "foreign"))
    with pytest.raises(Exception, match="--config"):
        export_hf(str(tmp_path / "foreign"), str(tmp_path / "out"))
    export_hf(str(tmp_path / "foreign"), str(tmp_path / "out"), config=config())
    _same(_read(tmp_path / "out"), content)


def test_plain_dcp_loads_what_was_imported(tmp_path: Path) -> None:
    content = tensors(config())
    import_hf(str(write_model(tmp_path / "in", config(), content)), str(tmp_path / "run"))
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in content.items()}}
    with pytest.warns(UserWarning, match=r"torch.distributed"):
        dcp.load(state, checkpoint_id=str(tmp_path / "run" / "step-00000000"))
    _same(state["model"], content)


def test_part_of_an_imported_tensor_is_read_alone(tmp_path: Path) -> None:
    content = tensors(config())
    report = import_hf(str(write_model(tmp_path / "in", config(), content)), str(tmp_path / "run@7"))
    assert report.checkpoint.step == 7
    part = report.checkpoint.read("model.lm_head.weight", Box((10, 3), (5, 7)))
    assert torch.equal(part, content["lm_head.weight"][10:15, 3:10])


def test_large_tensors_are_stored_in_bands_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_ckpt.converters.hf.import_plan.MAX_CHUNK_BYTES", 1000)
    monkeypatch.setattr("titan_ckpt.converters.hf.import_plan.MAX_DATA_FILE_BYTES", 20_000)
    content = tensors(config())
    model = write_model(tmp_path / "in", config(), content)
    out = _there_and_back(tmp_path, model)
    manifest = open_checkpoint(str(tmp_path / "run")).manifest
    assert manifest.by_fqn["model.lm_head.weight"].num_chunks == 14
    assert len(manifest.files) > 1
    _same(_read(out), content)


def test_shards_respect_the_size_limit_and_are_all_indexed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    out = _there_and_back(tmp_path, model, max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors(config()).values())
    files = sorted(out.glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values())
    assert all(path.stat().st_size < 20_000 + 4096 for path in files)
    assert _digests(out) == _digests(model)


def test_two_exports_are_identical_files(tmp_path: Path) -> None:
    import_hf(str(write_model(tmp_path / "in", config(), tensors(config()))), str(tmp_path / "run"))
    for name in ("one", "two"):
        export_hf(str(tmp_path / "run"), str(tmp_path / name), max_shard_bytes=20_000)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_checkpoint_and_export_on_any_store(store_url: str, tmp_path: Path) -> None:
    content = tensors(config())
    model = write_model(tmp_path / "in", config(), content, extra={"tokenizer.json": "{}"})
    import_hf(str(model), store_url + "/run")
    export_hf(store_url + "/run", store_url + "/hf", max_shard_bytes=20_000)
    import_hf(store_url + "/hf", str(tmp_path / "again"))
    export_hf(str(tmp_path / "again"), str(tmp_path / "out"))
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()


def test_hub_cache_is_read_through_its_links(tmp_path: Path) -> None:
    content = tensors(config())
    cache = tmp_path / "models--org--name"
    real = write_model(tmp_path / "real", config(), content)
    snapshot = cache / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc123")
    for number, path in enumerate(sorted(real.iterdir())):
        (cache / "blobs" / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    import_hf(str(cache), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    _same(_read(tmp_path / "out"), content)


@pytest.mark.parametrize("declared", ["bfloat16", None])
def test_config_dtype_that_differs_from_the_files_is_kept(tmp_path: Path, declared: str | None) -> None:
    of = config(torch_dtype=declared)
    import_hf(str(write_model(tmp_path / "in", of, tensors(of))), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "cast"), dtype="float16")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == of
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["torch_dtype"] == "float16"


def test_tokenizers_and_templates_of_every_kind_travel_along(tmp_path: Path) -> None:
    names = ["tekken.json", "tokenizer.model.v3", "spiece.model", "vocab.txt", "qwen.tiktoken", "chat_template.jinja"]
    model = write_model(tmp_path / "in", config(), tensors(config()), extra={name: f"the {name}" for name in names})
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    (model / "modeling_custom.py").write_text("raise SystemExit")
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    for name in (*names, "additional_chat_templates/rag.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert not (tmp_path / "out" / "modeling_custom.py").exists()


def test_optimizer_bytes_are_never_read(tmp_path: Path) -> None:
    from titan_ckpt.converters.models.spec import spec_to_config
    from titan_ckpt.saving.saver import Saver

    model = write_model(tmp_path / "in", config(), tensors(config()))
    state = {
        "model": tensors(config()),
        "optimizer": {f"state.{n}.exp_avg": t for n, t in tensors(config(), seed=1).items()},
    }
    with Saver(str(tmp_path / "run")) as saver:
        saver.save(state, step=3, config={"model": spec_to_config(open_hf(str(model)).spec)}).wait()
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    for chunk in [
        c
        for t in checkpoint.manifest.tensors
        if t.fqn.startswith("optimizer.")
        for c in checkpoint.manifest.chunks_of(t)
    ]:
        path = tmp_path / "run" / "step-00000003" / chunk.file
        data = bytearray(path.read_bytes())
        data[chunk.offset + chunk.payload_offset] ^= 1
        path.write_bytes(data)
    export_hf(checkpoint, str(tmp_path / "out"))
    _same(_read(tmp_path / "out"), tensors(config()))


def test_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError):
        export_hf(str(tmp_path / "nothing"), str(tmp_path / "out"))
