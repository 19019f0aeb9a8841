"""Exports checked with transformers: it loads them, computes and generates; `--verify` detects broken exports."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import DENSE, config, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.export_plan import plan_export
from titan_ckpt.converters.hf.export_run import run_export
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.converters.hf.stream import tensor_digests
from titan_ckpt.converters.hf.verify import real_text, verify_export
from titan_ckpt.converters.models.families import FAMILIES
from titan_ckpt.converters.models.spec import spec_to_config
from titan_ckpt.converters.models.tensor_names import TITAN, TORCHTITAN, TORCHTITAN_FAMILIES
from titan_ckpt.errors import DamagedError
from titan_ckpt.saving.saver import Saver, save
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer
from titan_ckpt.trainer.model.decoder import Decoder
from tools.training.hf_shapes import from_hf

pytestmark = pytest.mark.hf
transformers = importlib.import_module("transformers")
safetensors_torch = importlib.import_module("safetensors.torch")
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def _load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def _logits(model: Any, vocab_size: int = 96) -> torch.Tensor:
    tokens = torch.tensor([byte % vocab_size for byte in real_text(512)])[None]
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize(
    ("layout", "family"),
    [*((TITAN, family) for family in FAMILIES), *((TORCHTITAN, family) for family in TORCHTITAN_FAMILIES)],
)
def test_logits_are_equal_after_the_way_there_and_back(tmp_path: Path, layout: str, family: str) -> None:
    of = config(family, rope_scaling=LLAMA3 if family == "llama" else None, tie_word_embeddings=family == "qwen3")
    model = write_model(tmp_path / "in", of, tensors(of))
    import_hf(str(model), str(tmp_path / "run"), layout=layout)
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert torch.equal(_logits(_load(model)), _logits(_load(tmp_path / "out")))


@pytest.mark.parametrize("family", DENSE)
def test_config_from_the_training_config_is_the_same_model(tmp_path: Path, family: str) -> None:
    of = config(family, rope_scaling=LLAMA3)
    model = write_model(tmp_path / "in", of, tensors(of))
    save(
        str(tmp_path / "run"),
        {"model": tensors(of)},
        step=1,
        config={"model": spec_to_config(spec_from_hf(of, "test"))},
    )
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    assert torch.equal(_logits(_load(model)), _logits(_load(tmp_path / "out")))


def test_trainers_own_decoder_agrees_with_the_export(tmp_path: Path) -> None:
    for family in DENSE:
        of = config(family, rope_scaling=LLAMA3)
        content = tensors(of)
        decoder = Decoder(from_hf(of))
        decoder.load_state_dict(content)
        write_model(tmp_path / family / "in", of, content)
        import_hf(str(tmp_path / family / "in"), str(tmp_path / family / "run"))
        export_hf(str(tmp_path / family / "run"), str(tmp_path / family / "out"))
        tokens = torch.tensor([byte % 96 for byte in real_text(512)])[None]
        with torch.no_grad():
            ours = decoder(tokens)
        assert (ours - _logits(_load(tmp_path / family / "out"))).abs().max() <= 1e-3


def _byte_run(folder: Path, vocab_size: int) -> Path:
    of = config(vocab_size=vocab_size)
    assets = {"tokenizer.json": ByteTokenizer().to_json()}
    with Saver(str(folder / "run")) as saver:
        run_config = {"model": spec_to_config(spec_from_hf(of, "test"))}
        saver.save({"model": tensors(of)}, step=1, config=run_config, assets=assets).wait()
    return folder / "run"


@pytest.mark.parametrize("vocab_size", [257, 320])
def test_run_on_bytes_exports_a_tokenizer_that_is_exact(tmp_path: Path, vocab_size: int) -> None:
    export_hf(str(_byte_run(tmp_path, vocab_size)), str(tmp_path / "out"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    text = real_text(2000).decode() + "héllo  \n\t wörld \U0001f600 don't \x00\x7f"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_exported_byte_model_generates(tmp_path: Path) -> None:
    export_hf(str(_byte_run(tmp_path, 257)), str(tmp_path / "out"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "out"))
    made = _load(tmp_path / "out").generate(**tokenizer("def main", return_tensors="pt"), max_new_tokens=8)
    assert tokenizer.decode(made[0][:8]) == "def main"
    assert made.shape[1] > 8
    assert tokenizer.eos_token_id == 256


def test_verify_finds_nothing_wrong_with_a_right_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _byte_run(tmp_path, 257)
    assert main(["convert", "to-hf", str(run), str(tmp_path / "out"), "--verify", "--json", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    assert "torchao" not in said.err  # what the libraries say is not for the user
    assert "Loading weights" not in said.err
    assert facts["verification"]["equal"]
    assert facts["verification"]["logits"]["tokens"] == 512
    assert facts["verification"]["logits"]["max_abs_difference"] == 0


def _verified(run: Path, out: Path) -> Any:
    checkpoint = open_checkpoint(str(run))
    plan = plan_export(checkpoint, dtype=None)
    return checkpoint, plan, run_export(checkpoint, plan, str(out))


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [("rms_norm_eps", 1e-2, "model.layers.0"), ("rope_theta", 100.0, "model.layers.0")],
)
def test_verify_sees_a_wrong_config(tmp_path: Path, key: str, value: float, first: str) -> None:
    checkpoint, plan, report = _verified(_byte_run(tmp_path, 257), tmp_path / "out")
    of = json.loads((tmp_path / "out" / "config.json").read_text()) | {key: value}
    (tmp_path / "out" / "config.json").write_text(json.dumps(of))
    result = verify_export(checkpoint, plan, report)
    assert not result.is_equal
    assert result.logits is not None
    assert result.logits.first_layer == first
    assert result.logits.kl > 0


def test_verify_reports_that_transformers_cannot_load_it(tmp_path: Path) -> None:
    checkpoint, plan, report = _verified(_byte_run(tmp_path, 257), tmp_path / "out")
    of = json.loads((tmp_path / "out" / "config.json").read_text()) | {"num_attention_heads": 5}
    (tmp_path / "out" / "config.json").write_text(json.dumps(of))
    with pytest.raises(
        DamagedError, match=rf"every byte is as it was written, but transformers {transformers.__version__}"
    ):
        verify_export(checkpoint, plan, report)


def test_verify_sees_a_flipped_bit_on_disk(tmp_path: Path) -> None:
    checkpoint, plan, report = _verified(_byte_run(tmp_path, 257), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedError, match=r"model\.norm\.weight"):
        verify_export(checkpoint, plan, report)


@pytest.mark.parametrize(("value", "first"), [(float("nan"), "model.layers.0"), (float("inf"), "model.layers.0")])
def test_verify_takes_nothing_that_is_not_a_number_for_equal(tmp_path: Path, value: float, first: str) -> None:
    checkpoint, plan, report = _verified(_byte_run(tmp_path, 257), tmp_path / "out")
    content = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    content["model.layers.0.input_layernorm.weight"][0] = value
    safetensors_torch.save_file(content, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    written = open_hf(str(tmp_path / "out"))
    digests = tensor_digests(written.source, written.store, written.tensors)
    result = verify_export(checkpoint, plan, dataclasses.replace(report, digests=digests))
    assert not result.is_equal
    assert result.logits is not None
    assert result.logits.first_layer == first


def test_verify_finds_a_model_of_nothing_but_nan_equal_to_itself(tmp_path: Path) -> None:
    of = config()
    content = tensors(of) | {"model.norm.weight": torch.full((32,), float("nan"))}
    import_hf(str(write_model(tmp_path / "in", of, content)), str(tmp_path / "run"))
    result = verify_export(*_verified(tmp_path / "run", tmp_path / "out"))
    assert result.logits is not None
    assert result.logits.first_layer is None
    assert result.is_equal


def test_verify_sees_which_layer_is_permuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = config()
    import_hf(str(write_model(tmp_path / "in", of, tensors(of))), str(tmp_path / "run"), layout="torchtitan")
    monkeypatch.setattr(
        "titan_ckpt.converters.models.transforms._permute", lambda *_, **__: lambda raw, _box: bytes(raw)
    )
    result = verify_export(*_verified(tmp_path / "run", tmp_path / "out"))
    assert result.logits is not None
    assert result.logits.first_layer == "model.layers.0"
