"""A chat model is tuned without typing its shape; what comes out answers in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_runs import read_losses
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.model_from import fill_from, means_the_same
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig
from tools.chat.compare import write_tokenizer
from tools.chat.templates import CHATML, without_generation

ANSWERS = {"up": "The sky.", "down": "The floor 🙂.", "left": "West.", "right": "East, mostly."}
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 640, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "rms_norm_eps": 9.999999747378752e-06,
    "rope_theta": 10000, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in a Hugging Face folder, and conversations beside it."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("base")
    write_tokenizer(folder / "model", without_generation(CHATML))
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    draw = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (640, 64), "model.norm.weight": (64,)}
    for layer in (f"model.layers.{number}." for number in range(2)):
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (64, 64) for name in "qo"}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (32, 64) for name in "kv"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (128, 64) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (64, 128), f"{layer}input_layernorm.weight": (64,)}
        shapes[f"{layer}post_attention_layernorm.weight"] = (64,)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=draw)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    turns = [
        {"messages": [{"role": "user", "content": f"What is {word}?"}, {"role": "assistant", "content": answer}]}
        for word, answer in ANSWERS.items()
    ]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, turns)))
    return folder


def arguments(base: Path, url: Path, template: str, *more: str) -> list[str]:
    """`init --template`, then `train` of what it wrote, with a tiny model."""
    config = url.parent / f"{template}-{url.name}.toml"
    if not config.exists():
        assert main(["init", "--template", template, str(config)]) == 0
    sets = [
        f"model.from={base}/model", f"data.source={base}/chat.jsonl", f"data.cache={base}/cache", "data.seq_len=64",
        "validation.fraction=0", "validation.every=0", "train.global_batch_size=4", "train.microbatch_size=2",
        "save.every=0", "export.every=0", f"save.url={url}", "log.tensorboard=false", "train.device=cpu", *more,
    ]  # fmt: skip
    return ["train", str(config), *(part for text in sets for part in ("--set", text))]


@pytest.mark.dist
@pytest.mark.hf
def test_a_tuned_model_answers_with_its_template(base: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, out = tmp_path / "run", tmp_path / "out"
    sets = ("train.steps=50", "optimizer.lr=0.01", "mesh.dp_shard=2", "log.every=5")
    assert main(arguments(base, run, "sft", *sets)) == 0
    losses = read_losses(run)
    assert losses[50] < 0.05 < 3.0 < losses[5]
    assert main(["convert", "to-hf", str(run), str(out)]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    for word, answer in ANSWERS.items():
        asked = [{"role": "user", "content": f"What is {word}?"}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        said = model.generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=end, pad_token_id=0)
        assert tokenizer.decode(said[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) == answer


def _resolve(tmp_path: Path, text: str) -> TrainConfig:
    (tmp_path / "config.toml").write_text(text)
    return resolve(TrainConfig, str(tmp_path / "config.toml"), (), fill_from).config


def test_a_folder_gives_shape_weights_and_tokenizer(base: Path, tmp_path: Path) -> None:
    url = f"{base}/model"
    config = _resolve(tmp_path, f'[model]\nfrom = "{url}"\nnorm_eps = 1e-5\nrope_theta = 1e4\nmax_seq_len = 512\n')
    assert (config.model.dim, config.model.n_kv_heads, config.model.tied_embeddings) == (64, 2, True)
    assert (config.resume.from_, config.data.tokenizer, config.model.max_seq_len) == (url, url, 512)
    other = _resolve(tmp_path, f'[model]\nfrom = "{url}"\n[resume]\nfrom = ""\n[data]\ntokenizer = "bytes"\n')
    assert (other.resume.from_, other.data.tokenizer) == ("", "bytes")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "dim = 65\nn_heads = 4\nnorm_eps = 1e-6",
            r"dim = 65 is 64 there, norm_eps = 1e-06 is 9\.99.* leave these out",
        ),
        ("rope_scaling = {kind = 'linear', factor = 2.0}", "rope_scaling"),
    ],
)
def test_what_contradicts_the_folder_is_named(lines: str, message: str, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        _resolve(tmp_path, f'[model]\nfrom = "{base}/model"\n{lines}\n')


@pytest.mark.parametrize("url", ["nowhere", ""])
def test_a_folder_that_is_no_model_is_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.from"):
        _resolve(tmp_path, f'[model]\nfrom = "{url}"\n')


def test_numbers_mean_what_is_computed_with() -> None:
    assert means_the_same(1e-5, 9.999999747378752e-06)
    assert not means_the_same(1e-5, 1.001e-5)
    assert not means_the_same(1e39, 2e39)
    assert not means_the_same(True, 1.0)
    assert not means_the_same(None, 0.0)


def test_a_run_keeps_the_template_it_was_trained_with(base: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(CHATML + "{# own #}")
    sets = ("train.steps=1", 'resume.from=""', f"chat.template={tmp_path}/own.jinja")
    assert main(arguments(base, tmp_path / "run", "sft", *sets)) == 0
    checkpoint = open_checkpoint(str(tmp_path / "run"))
    assert checkpoint.asset("chat_template.jinja").decode().endswith("{# own #}")
    assert "tokenizer_config.json" in checkpoint.manifest.assets


def test_a_resume_with_other_conversations_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(base, tmp_path / "run", "sft", "train.steps=1")) == 0
    assert main(arguments(base, tmp_path / "run", "sft", "train.steps=2", "chat.train_on=last")) == 0  # the same here
    assert main(arguments(base, tmp_path / "run", "sft", "train.steps=3", "chat.pack=false")) == 3
    assert "was trained on other data" in capsys.readouterr().err
