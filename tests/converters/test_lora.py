"""A PEFT adapter merged on export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.hf_models import config, raw, tensors, write_model, write_safetensors
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.errors import TitanError

Q = "model.layers.1.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def _adapter(folder: Path, factors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    of = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": ["q_proj", "down_proj"],
    } | changes
    (folder / "adapter_config.json").write_text(json.dumps(of))
    write_safetensors(folder / "adapter_model.safetensors", _factors() if factors is None else factors)
    return folder


def _factors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    sizes = {(Q, "A"): (4, 32), (Q, "B"): (32, 4), (DOWN, "A"): (4, 48), (DOWN, "B"): (32, 4)}
    return {
        f"base_model.model.{module}.lora_{side}.weight": torch.randn(shape, generator=generator)
        for (module, side), shape in sizes.items()
    }


def _expected(scale: float) -> dict[str, Tensor]:
    content, factors = tensors(config()), _factors()
    for module in (Q, DOWN):
        a, b = (factors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        content[f"{module}.weight"] = content[f"{module}.weight"] + scale * (b @ a)
    return content


@pytest.mark.parametrize("layout", ["titan", "torchtitan"])
@pytest.mark.parametrize(("changes", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0)])
def test_adapter_is_merged_into_its_weights_and_no_others(
    tmp_path: Path, layout: str, changes: dict[str, Any], scale: float
) -> None:
    import_hf(str(write_model(tmp_path / "in", config(), tensors(config()))), str(tmp_path / "run"), layout=layout)
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"), merge_lora=str(_adapter(tmp_path / "adapter", **changes)))
    found, plain, expected = open_checkpoint(str(tmp_path / "out")), tensors(config()), _expected(scale)
    for name, tensor in expected.items():
        merged = found.read("model." + name)
        if name in (f"{Q}.weight", f"{DOWN}.weight"):
            assert torch.allclose(merged, tensor, atol=1e-5)
            assert not torch.equal(merged, plain[name])
        else:
            assert raw(merged) == raw(tensor)


@pytest.mark.hf
def test_verify_knows_of_the_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    adapter = _adapter(tmp_path / "adapter")
    arguments = ["--merge-lora", str(adapter), "--verify", "--dtype", "bfloat16", "--json"]
    assert main(["convert", "to-hf", str(model), str(tmp_path / "out"), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["verification"]["equal"]


def test_update_that_the_dtype_cannot_hold_is_reported(tmp_path: Path) -> None:
    content = {name: tensor.half() for name, tensor in tensors(config()).items()}
    content[f"{DOWN}.weight"][:] = 65504.0
    model = write_model(tmp_path / "in", config(), content)
    report = export_hf(
        str(model), str(tmp_path / "out"), merge_lora=str(_adapter(tmp_path / "adapter", lora_alpha=1e5))
    )
    assert f"{DOWN}.weight" in report.overflowed
    assert set(report.overflowed) <= {f"{DOWN}.weight", f"{Q}.weight"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"a_setting_of_the_future": 1}, "a_setting_of_the_future"),
        ({"r": 8}, "of rank 8"),
        ({"r": 0}, "r = 0"),
    ],
)
def test_adapter_that_is_more_than_plain_lora_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    with pytest.raises(TitanError, match=message):
        export_hf(str(model), str(tmp_path / "out"), merge_lora=str(_adapter(tmp_path / "adapter", **changes)))
    assert not (tmp_path / "out").exists()


def test_settings_that_leave_the_merge_alone_are_taken(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    harmless: dict[str, Any] = {
        "init_lora_weights": "gaussian",
        "layers_to_transform": [0],
        "task_type": "CAUSAL_LM",
        "loftq_config": {},
    }
    adapter = _adapter(tmp_path / "adapter", **harmless, use_dora=None, trainable_token_indices=None, peft_version="9")
    export_hf(str(model), str(tmp_path / "out"), merge_lora=str(adapter))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("base_model.model.model.layers.9.mlp.up_proj", torch.ones(4, 32), "which this model does not have"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 96), "not a LoRA factor"),
        (f"base_model.model.{Q}", torch.ones(4, 32, dtype=torch.int8), "is int8, expected floating point"),
        (f"base_model.model.{Q}", torch.ones(4, 31), r"the update is \(32, 31\), the weight \(32, 32\)"),
    ],
)
def test_factor_that_does_not_fit_is_refused(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    factors = _factors()
    if "embedding" in name:
        factors[name] = tensor
    else:
        factors |= {f"{name}.lora_A.weight": tensor, f"{name}.lora_B.weight": torch.ones(32, 4)}
    with pytest.raises(TitanError, match=message):
        export_hf(str(model), str(tmp_path / "out"), merge_lora=str(_adapter(tmp_path / "adapter", factors)))
