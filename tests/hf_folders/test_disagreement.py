"""Weights that disagree with their config, or mean other values than they hold, are refused by name; a mere dtype is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import config, raw, tensors, write_model, write_safetensors
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.errors import LoadContractError, TitanError
from titan_ckpt.saving.saver import Saver

UP = "model.layers.1.mlp.up_proj.weight"


def refused(model: Path) -> str:
    """The error of every way to use the model."""
    texts = []
    for use in (
        lambda: import_hf(str(model), str(model.parent / "run")),
        lambda: import_hf(str(model), str(model.parent / "run"), dtype="bfloat16"),
        lambda: open_checkpoint(str(model)),
        lambda: export_hf(str(model), str(model.parent / "out")),
    ):
        with pytest.raises(TitanError) as caught:
            use()
        texts.append(str(caught.value))
    assert not (model.parent / "out").exists()
    assert not any(path.is_file() for path in (model.parent / "run").rglob("*"))
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.uint16]
)
@pytest.mark.parametrize("names", [[UP], None])
def test_weights_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype, names: list[str] | None) -> None:
    content = tensors(config())
    content |= {name: (content[name] * 64).to(dtype) for name in names or content}
    text = refused(write_model(tmp_path / "in", config(), content))
    assert f"{(names or list(content))[0]} is {str(dtype)[6:]}, expected floating point" in text or not names
    assert "quantised" in text


def test_a_checkpoint_of_integers_is_not_exported(tmp_path: Path) -> None:
    import_hf(str(write_model(tmp_path / "in", config(), tensors(config()))), str(tmp_path / "run"))
    start = open_checkpoint(str(tmp_path / "run"))
    with Saver(str(tmp_path / "quantised")) as saver:
        weights = {fqn.removeprefix("model."): (start.read(fqn) * 64).to(torch.int8) for fqn in start.manifest.by_fqn}
        saver.save({"model": weights}, step=1, config=dict(start.manifest.config)).wait()
    with pytest.raises(LoadContractError, match=r"is int8.*expected floating point"):
        export_hf(str(tmp_path / "quantised"), str(tmp_path / "out"))


# As the libraries write them: transformers' quantizers, AutoGPTQ, AutoAWQ, ModelOpt, MLX, vLLM's llm-compressor.
CONFIGS: list[dict[str, Any]] = [
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    {"quantization_config": {"load_in_8bit": True}},
    {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}},
    {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
    {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}},
    {"quantization_config": {}},
    {"compression_config": {"quantization_config": {"format": "int-quantized"}}},
    {"quantization": {"group_size": 64, "bits": 4}},
    {"quant_config": {"zero_point": True}},
    {"load_in_8bit": True},
    {"_load_in_4bit": True},
    {"quant_method": "gptq"},
    {"torch_dtype": "int8"},
    {"torch_dtype": None, "dtype": "uint8"},
    {"dtype": "bfloat16"},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=lambda changes: json.dumps(changes)[:40])
def test_configs_of_quantised_models_are_refused_by_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    of = config(**changes)
    text = refused(write_model(tmp_path / "in", of, tensors(config())))
    assert "config.json" in text
    assert list(changes)[-1] in text


FILES = ["quantize_config.json", "quant_config.json", "hf_quant_config.json", "quantization_config.json"]


@pytest.mark.parametrize("name", FILES)
def test_files_of_quantised_models_are_refused(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()), extra={name: "{}"})
    assert name in refused(model)


@pytest.mark.parametrize(
    ("replaced", "method"),
    [
        ({".qweight": torch.int32, ".qzeros": torch.int32, ".scales": torch.float16, ".g_idx": torch.int32}, "GPTQ"),
        ({".weight": torch.int8, ".SCB": torch.float32}, "bitsandbytes"),
        ({".weight": torch.uint8, ".weight.quant_state.bitsandbytes__nf4": torch.uint8}, "bitsandbytes"),
        ({".weight": torch.float8_e4m3fn, ".weight_scale_inv": torch.float32}, "FP8"),
        ({".weight_packed": torch.int32, ".weight_scale": torch.float16, ".weight_shape": torch.int64}, "compressed"),
        ({"_blocks": torch.uint8, "_scales": torch.uint8}, "MXFP4"),
    ],
)
def test_quantised_tensors_are_recognised(tmp_path: Path, replaced: dict[str, torch.dtype], method: str) -> None:
    content = tensors(config())
    shape = content.pop(UP).shape
    content |= {UP.removesuffix(".weight") + end: torch.zeros(shape).to(dtype) for end, dtype in replaced.items()}
    text = refused(write_model(tmp_path / "in", config(), content))
    assert "quantised weights" in text
    assert method in text


def test_another_float_than_the_config_says_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = tensors(config(), dtype=torch.bfloat16)
    model = write_model(tmp_path / "in", config(), content)
    stored = import_hf(str(model), str(tmp_path / "run")).checkpoint
    assert "the config says float32, weights are bfloat16" in caplog.text
    assert {entry.dtype for entry in stored.manifest.tensors} == {"bfloat16"}
    assert raw(stored.read(f"model.{UP}")) == raw(content[UP])


def test_float8_without_scales_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = tensors(config())
    content[UP] = content[UP].to(torch.float8_e4m3fn)
    import_hf(str(write_model(tmp_path / "in", config(), content)), str(tmp_path / "run"))
    assert "weights are float8_e4m3fn" in caplog.text


def test_a_dtype_that_config_and_weights_agree_on_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        of = config(torch_dtype=None, dtype=f"torch.{dtype}")
        model = write_model(tmp_path / dtype, of, tensors(of, dtype=getattr(torch, dtype)))
        import_hf(str(model), str(tmp_path / f"run-{dtype}"))
    assert not caplog.text


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    content = tensors(config())
    model = write_model(tmp_path / "in", config(), content, num_files=2)
    shard = open_hf(str(model)).files[0]
    names = [name for name, n in open_hf(str(model)).file_of.items() if n == 0]
    write_safetensors(model / shard, {name: content[name] for name in [*names, UP]})
    assert UP in refused(model)


def test_an_adapter_beside_the_model_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()), extra={"adapter_config.json": "{}"})
    import_hf(str(model), str(tmp_path / "run"))
    assert "an adapter lies beside the model and is left out" in caplog.text
