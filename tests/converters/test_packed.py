"""Weights in blocks with scales: block-FP8 and MXFP4 are read as the plain tensors that transformers makes of them."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.hf_models import config, raw, tensors, write_model
from titan_ckpt.check.diff import diff
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.converters.quantised import store
from titan_ckpt.converters.quantised.formats import ROUND, float4_columns, float8_rows
from titan_ckpt.errors import DamagedError, LoadContractError, PlanError
from titan_ckpt.store.local import FileStore

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
Content = dict[str, Tensor]


def made(values: np.ndarray[Any, Any], dtype: str) -> Tensor:
    return torch.from_numpy(ROUND[dtype](values).view(np.int16 if dtype != "float32" else np.float32)).view(
        getattr(torch, dtype)
    )


def all_bytes(*shape: int) -> Tensor:
    return torch.arange(int(np.prod(shape))).remainder(256).to(torch.uint8).view(shape)


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", ROUND)
def test_float8_blocks_are_transformers_own_bit_for_bit(dtype: str) -> None:
    module = importlib.import_module("transformers.integrations.finegrained_fp8")
    packed_RC = all_bytes(256, 384)
    scales = torch.randn(2, 3) * torch.tensor([[1e-38, 1.0, 1e-3], [1e30, 1e36, 1e-44]])
    expected = module.Fp8Dequantize(None)._dequantize_one(
        packed_RC.view(torch.float8_e4m3fn), scales, output_dtype=getattr(torch, dtype)
    )
    found = made(float8_rows(packed_RC.numpy(), scales.numpy(), first_row=0, block=(128, 128)), dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    numbers = ~expected.isnan()
    assert raw(found[numbers]) == raw(expected[numbers])


@pytest.mark.parametrize("dtype", ROUND)
@pytest.mark.parametrize(("first_row", "rows"), [(0, 40), (7, 1), (15, 18), (33, 7)])
def test_values_looked_up_are_products_rounded_once(dtype: str, first_row: int, rows: int) -> None:
    packed_RC = all_bytes(rows, 37).numpy()
    scales = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    scales[1, 2], scales[0, 0] = 3e38, 1e-40
    values = float8_rows(packed_RC, np.ones_like(scales), first_row=0, block=(128, 128))
    of_rows, of_columns = (first_row + np.arange(rows)) // 16, np.arange(37) // 16
    with np.errstate(over="ignore"):
        expected = ROUND[dtype](values * scales[of_rows[:, None], of_columns])
    found = float8_rows(packed_RC, scales, first_row=first_row, block=(16, 16), dtype=dtype)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_float4_groups_are_transformers_own_bit_for_bit() -> None:
    module = importlib.import_module("transformers.integrations.mxfp4")
    blocks, scales = all_bytes(2, 255, 2, 16), torch.arange(2 * 255 * 2).remainder(255).to(torch.uint8).view(2, 255, 2)
    expected = module.convert_moe_packed_tensors(blocks, scales)
    for expert in range(2):
        found = made(float4_columns(blocks[expert].numpy(), scales[expert].numpy()), "bfloat16")
        assert raw(found) == raw(expected[expert])


def packed_deepseek() -> tuple[dict[str, Any], Content, Content]:
    """Config, tensors of the files, and the plain ones; sizes that blocks of 16 x 16 do not divide."""
    of = config("deepseek_v3", torch_dtype="bfloat16", quantization_config=FP8)
    plain = {
        name: tensor if name.endswith("correction_bias") else tensor.bfloat16()
        for name, tensor in tensors(config("deepseek_v3")).items()
    }
    stored = dict(plain)
    for name, tensor in plain.items():
        if "proj" in name and name.endswith(".weight"):
            rows, columns = tensor.shape
            stored[name] = (tensor.float() * 16).to(torch.float8_e4m3fn)
            scales = torch.rand(-(-rows // 16), -(-columns // 16)) / 16
            stored[name + "_scale_inv"] = scales
            spread = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
            plain[name] = (stored[name].float() * spread).bfloat16()
    return of, stored, plain


def packed_gpt_oss() -> tuple[dict[str, Any], Content, Content]:
    """As `packed_deepseek`, in MXFP4: dim and width are multiples of 32."""
    changes = {"num_local_experts": 3, "intermediate_size": 32}
    of = config("gpt_oss", torch_dtype="bfloat16", quantization_config=MXFP4, **changes)
    plain = {name: tensor.bfloat16() for name, tensor in tensors(config("gpt_oss", **changes)).items()}
    stored = dict(plain)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = [float4_columns(b.numpy(), s.numpy()) for b, s in zip(blocks, scales, strict=True)]
        plain[name] = made(np.stack(values), "bfloat16")
    return of, stored, plain


MAKERS = {"deepseek_v3": packed_deepseek, "gpt_oss": packed_gpt_oss}


@pytest.mark.parametrize("family", MAKERS)
def test_packed_folder_is_imported_as_the_plain_model(tmp_path: Path, family: str) -> None:
    of, stored, plain = MAKERS[family]()
    packed = write_model(tmp_path / "packed", of, stored, num_files=3)
    import_hf(str(packed), str(tmp_path / "run"))
    plain_config = {key: value for key, value in of.items() if key != "quantization_config"}
    same = write_model(tmp_path / "plain", plain_config, plain)
    assert not diff(open_checkpoint(str(same)), open_checkpoint(str(tmp_path / "run")), values=True)
    assert not diff(open_checkpoint(str(same)), open_checkpoint(str(packed)), values=True)
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (same / "model.safetensors").read_bytes()
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("family", MAKERS)
def test_keys_that_are_not_carried_are_not_in_a_packed_import(tmp_path: Path, family: str) -> None:
    of, packed, _ = MAKERS[family]()
    token = "hf_" + "a1B2" * 8
    write_model(tmp_path / "model", of | {"auto_map": {"AutoModel": "own.Code"}, "token": token}, packed)
    model = open_hf(str(tmp_path / "model"))
    import_hf(model, str(tmp_path / "run"))
    kept = open_checkpoint(str(tmp_path / "run")).asset("config.json").decode()
    assert "config.json: auto_map" in model.left_out
    assert not any(text in kept for text in ("auto_map", token, "quantization_config"))


@pytest.mark.parametrize("family", MAKERS)
def test_any_range_of_a_packed_tensor_can_be_read(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, stored, plain = MAKERS[family]()
    monkeypatch.setattr(store, "AT_ONCE", 100)  # a few rows at a time
    model = open_hf(write_model(tmp_path / "packed", of, stored))
    chosen = random.Random(0)
    for name in [name for name in plain if name not in stored or stored[name].itemsize == 1]:
        tensor, content = model.tensors[name], raw(plain[name])
        for _ in range(5):
            start = chosen.randrange(len(content))
            length = chosen.randrange(len(content) - start + 1)
            found = model.store.read("model.safetensors", tensor.offset + start, length)
            assert found == content[start : start + length]


@pytest.mark.parametrize("family", MAKERS)
def test_packed_bytes_are_not_read_for_every_few_rows(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, stored, plain = MAKERS[family]()
    monkeypatch.setattr(store, "AT_ONCE", 1)
    model = open_hf(write_model(tmp_path / "packed", of, stored))
    counted = Counter[str]()
    real = FileStore.read_into

    def read_into(self: FileStore, path: str, start: int, buffer: memoryview) -> None:
        counted["bytes"] += len(buffer)
        real(self, path, start, buffer)

    monkeypatch.setattr(FileStore, "read_into", read_into)
    names = [name for name in plain if name not in stored or stored[name].itemsize == 1]
    for name in names:
        tensor = model.tensors[name]
        half = len(raw(plain[name])) // 2
        model.store.read("model.safetensors", tensor.offset, half)
        model.store.read("model.safetensors", tensor.offset + half, half)
    packed = sum(each.nbytes for name, each in stored.items() if name.endswith(("_scale_inv", "_blocks", "_scales")))
    packed += sum(stored[name].nbytes for name in names if name in stored)
    assert packed <= counted["bytes"] <= 1.5 * packed


def test_a_read_from_stored_bytes_into_plain_ones_is_whole(tmp_path: Path) -> None:
    of, stored, _ = packed_deepseek()
    folder = write_model(tmp_path / "packed", of, stored)
    model = open_hf(folder)
    real = (folder / "model.safetensors").read_bytes()
    whole = model.store.read("model.safetensors")
    assert whole[: len(real)] == real
    assert model.store.read("model.safetensors", len(real) - 7, 30) == whole[len(real) - 7 :][:30]


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
GROUPS = "model.layers.1.mlp.experts.down_proj"


def without(name: str) -> Callable[[Content], None]:
    return lambda content: content.__delitem__(name)


def with_(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Content], None]:
    return lambda content: content.__setitem__(name, change(content[name]))


@pytest.mark.parametrize(
    ("family", "damage", "message"),
    [
        ("deepseek_v3", without(EXPERT + "_scale_inv"), rf"{EXPERT}_scale_inv is missing"),
        ("deepseek_v3", without(EXPERT), rf"{EXPERT}_scale_inv has no weight {EXPERT}"),
        ("deepseek_v3", with_(EXPERT + "_scale_inv", Tensor.bfloat16), r"_scale_inv is bfloat16, expected float32"),
        ("deepseek_v3", with_(EXPERT + "_scale_inv", lambda s: s.T.contiguous().flatten()), r"expected \(2, 2\) for"),
        ("deepseek_v3", with_(EXPERT, lambda w: w.view(torch.uint8).view(torch.float8_e4m3fnuz)), r"e4m3fnuz of"),
        ("gpt_oss", without(GROUPS + "_scales"), rf"{GROUPS}_scales is missing"),
        ("gpt_oss", without(GROUPS + "_blocks"), rf"{GROUPS}_blocks is missing"),
        ("gpt_oss", with_(GROUPS + "_scales", lambda s: s[:, :-1].contiguous()), r"_scales has shape \(3, 31, 1\)"),
        ("gpt_oss", with_(GROUPS + "_blocks", lambda b: b[..., :8].contiguous()), r"expected \[experts, rows, groups, 16\]"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, family: str, damage: Callable[[Content], None], message: str
) -> None:
    of, stored, _ = MAKERS[family]()
    damage(stored)
    with pytest.raises(LoadContractError, match=message):
        import_hf(str(write_model(tmp_path / "packed", of, stored)), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("family", "name", "wrong"),
    [("deepseek_v3", EXPERT + "_scale_inv", torch.nan), ("deepseek_v3", EXPERT + "_scale_inv", torch.inf),
     ("gpt_oss", GROUPS + "_scales", 255)],
)  # fmt: skip
def test_scales_that_are_no_numbers_stop_the_import(tmp_path: Path, family: str, name: str, wrong: float) -> None:
    of, stored, _ = MAKERS[family]()
    stored[name].view(-1)[-1] = wrong
    with pytest.raises(
        DamagedError, match=rf"{name.removesuffix('_scale_inv').removesuffix('_scales')}: 1 of .* scales"
    ):
        import_hf(str(write_model(tmp_path / "packed", of, stored)), str(tmp_path / "run"))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        FP8 | {"weight_block_size": None},
        FP8 | {"weight_block_size": [0, 1]},
        FP8 | {"fmt": "e5m2"},
    ],
)
def test_other_ways_to_pack_are_refused_by_key(tmp_path: Path, settings: dict[str, Any]) -> None:
    of = config("deepseek_v3", quantization_config=settings)
    plain = config("deepseek_v3")
    with pytest.raises(PlanError, match="quantization_config"):
        import_hf(str(write_model(tmp_path / "in", of, tensors(plain))), str(tmp_path / "run"))


def test_a_correction_bias_keeps_its_dtype_in_a_cast(tmp_path: Path) -> None:
    of = config("deepseek_v3")
    import_hf(str(write_model(tmp_path / "in", of, tensors(of))), str(tmp_path / "run"), dtype="bfloat16")
    dtypes = {fqn: entry.dtype for fqn, entry in open_checkpoint(str(tmp_path / "run")).manifest.by_fqn.items()}
    assert dtypes.pop("model.model.layers.1.mlp.gate.e_score_correction_bias") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}
