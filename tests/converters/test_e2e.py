"""Act 6: transformers loads an exported run, gives the same outputs and generates; the export imports back."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import raw
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf
from titan_ckpt.converters.hf.verify import real_text
from titan_ckpt.loading.load import load
from titan_ckpt.trainer.model.decoder import Decoder, ModelConfig
from tools.paths import DEBUG_CONFIG

pytestmark = [pytest.mark.e2e, pytest.mark.hf]
transformers = importlib.import_module("transformers")


def _train(folder: Path, **settings: Any) -> None:
    """A short one-rank run in its own process."""
    (folder / "corpus.txt").write_bytes(real_text(100_000))
    values = {
        "data.source": str(folder / "corpus.txt"), "data.cache": str(folder / "cache"), "train.steps": 2, "save.every": 0,
        "log.tensorboard": False, "debug.recorder": False,
    } | settings  # fmt: skip
    sets = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    command = [sys.executable, "-m", "titan_ckpt", "train", DEBUG_CONFIG, "--nproc", "1", *sets]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-step run and its export."""
    folder = tmp_path_factory.mktemp("e2e")
    _train(folder, **{"save.url": str(folder / "run")})
    assert main(["convert", "to-hf", str(folder / "run"), str(folder / "out"), "--verify"]) == 0
    return folder


def _decoder(run: Path) -> Any:
    checkpoint = open_checkpoint(str(run))
    section = {key: value for key, value in checkpoint.manifest.config["model"].items() if key != "rope_scaling"}
    decoder = Decoder(ModelConfig(**section))
    load(checkpoint, {"model": decoder.state_dict()})
    return decoder.eval()


def test_trainers_logits_are_the_exports(trained: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(trained / "out"))
    tokens = torch.tensor([tokenizer(real_text(2000).decode())["input_ids"][:512]])
    exported = transformers.AutoModelForCausalLM.from_pretrained(str(trained / "out"), dtype=torch.float32).eval()
    decoder = _decoder(trained / "run")
    context = open_checkpoint(str(trained / "run")).manifest.config["data"]["seq_len"]
    with torch.no_grad():
        for window in torch.split(tokens, context, dim=1):
            assert (decoder(window) - exported(window).logits).abs().max() <= 1e-3


def test_exported_run_generates_text(trained: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(trained / "out"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(trained / "out"))
    made = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=12)
    assert tokenizer.decode(made[0]).startswith("def ")


def test_training_goes_on_from_the_exported_folder(trained: Path) -> None:
    _train(
        trained,
        **{
            "save.url": str(trained / "more"),
            "resume.from": str(trained / "out"),
            "resume.model_only": True,
            "train.steps": 1,
        },
    )
    assert open_checkpoint(str(trained / "more")).step == 1
    export_hf(str(trained / "more"), str(trained / "out2"))
    assert (trained / "out2" / "config.json").read_bytes() == (trained / "out" / "config.json").read_bytes()


def test_exported_weights_are_the_checkpoints_bytes(trained: Path) -> None:
    run, out = open_checkpoint(str(trained / "run")), open_checkpoint(str(trained / "out"))
    names = [fqn for fqn in run.manifest.by_fqn if fqn.startswith("model.")]
    assert names == list(out.manifest.by_fqn)
    assert all(raw(run.read(fqn)) == raw(out.read(fqn)) for fqn in names)
