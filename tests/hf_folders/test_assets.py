"""Which small files are carried with a model, there and back: never weights or code, always the licence and the author's card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import config, contents, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf, import_hf
from titan_ckpt.converters.hf.assets import carry, is_carried
from titan_ckpt.saving.saver import Saver
from titan_ckpt.trainer.data.tokenizer import ByteTokenizer
from titan_ckpt.trainer.job.resume import Start, kept_assets

CARRIED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "qwen.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/rag.jinja",
    "README.md",
    "LICENSE",
    "LICENCE",
    "license.txt",
    "LICENSE-APACHE-2.0.txt",
    "LICENSE_MODEL",
    "NOTICE",
    "NOTICE.md",
    "USE_POLICY.md",
]
NOT_CARRIED = [
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
    "modeling_evil.py",
    "LICENSE.py",
    "LICENSE.pkl",
    "NOTICE.sh",
    "tokenizer.json.py",
    "train.ipynb",
    "optimizer.pt",
    "data.pkl",
    "adapter_config.json",
    "preprocessor_config.json",
    "quantize_config.json",
    "model.gguf",
    "../LICENSE",
    "/etc/passwd",
    "a/LICENSE",
    "additional_chat_templates/../x.jinja",
    "additional_chat_templates/.x.jinja",
    "additional_chat_templates/a/b.jinja",
    "..",
    ".",
    "",
    "LICENSE\n",
    "LICENSE\x1b[2J",
    "LICENSE\0.txt",
    "tokenizer\\config.json",
    "tokenizer.json ",
    "tokenizer.json.",
    "LICENSE\u202etxt",
    "nul.tiktoken",
    "AUX.tiktoken",
    "con.tiktoken",
    "additional_chat_templates/com1.jinja",
    ".env",
    ".gitattributes",
    "LICENSE" + "-" * 200,
    "titan_ckpt_digests.json",
    "tekken.json/x",
    "LIC\u0415NSE",
    "\uff2c\uff29\uff23\uff25\uff2e\uff33\uff25",
    "config.json\u200b",
]


def test_the_list_of_what_is_carried() -> None:
    assert [name for name in CARRIED if not is_carried(name)] == []
    assert [name for name in NOT_CARRIED if is_carried(name)] == []


def test_names_that_differ_in_case_only_are_one_file() -> None:
    carried = carry({"LICENSE": b"a", "license": b"b", "License": b"c"}, "here")
    assert carried.files == {"LICENSE": b"a"}
    assert carried.left_out["license"] == "differs from LICENSE in upper and lower case only"


SECRET = "Zx9Qw8Er7Ty6Ui5Op4Kd"


def test_tokens_in_settings_are_neither_stored_nor_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "image_token": "<image>", "token": SECRET,
        "init_kwargs": {"use_auth_token": SECRET, "hf_api_key": SECRET}, "mirrors": [f"s3://k:{SECRET}@b/m", "https://h/m"],
    }  # fmt: skip
    extra = {
        "tokenizer_config.json": json.dumps(settings),
        "generation_config.json": json.dumps({"do_sample": False, "note": f"hf_{SECRET}"}),
        "special_tokens_map.json": json.dumps({"pad_token": "<pad>", "auto_map": {"A": "b.C"}, "password": SECRET}),
    }
    of = config(use_auth_token=f"hf_{SECRET}", source=f"https://me:{SECRET}@host/x", signed=f"https://h/x?sig={SECRET}")
    model = write_model(tmp_path / "in", of, tensors(of), extra=extra)
    assert main(["convert", "from-hf", str(model), str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["not_carried"]["config.json: 'use_auth_token'"] == "a password or token"
    assert {name.partition(": ")[2].strip("'") for name in facts["not_carried"]} == {
        "use_auth_token", "source", "signed", "token", "hf_api_key", "an item of a list", "note", "auto_map", "password",
    }  # fmt: skip
    assert main(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert main(["convert", "to-hf", str(model), str(tmp_path / "out2")]) == 0
    for folder in ("run", "out", "out2"):
        for path in (tmp_path / folder).rglob("*"):
            assert path.is_dir() or SECRET[:4].encode() not in path.read_bytes(), path
    kept = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert kept == {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "image_token": "<image>", "init_kwargs": {},
        "mirrors": ["https://h/m"],
    }  # fmt: skip


def test_files_that_are_not_on_the_list_stay_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = {
        "modeling_evil.py": "boom",
        "pytorch_model.bin": "boom",
        "notes.txt": "",
        "LICENSE": "MIT",
        ".gitattributes": "",
    }
    model = write_model(tmp_path / "in", config(), tensors(config()), extra=extra)
    assert main(["convert", "from-hf", str(model), str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["not_carried"] == {
        "modeling_evil.py": "code",
        "pytorch_model.bin": "a torch file or pickle",
        "notes.txt": "not a file that models are loaded with",
    }
    assert set(open_checkpoint(str(tmp_path / "run")).manifest.assets) == {"config.json", "LICENSE"}
    assert main(["convert", "to-hf", str(model), str(tmp_path / "out")]) == 0
    assert "not carried: 'modeling_evil.py' (code)" in capsys.readouterr().out
    assert set(contents(tmp_path / "out")) & set(extra) == {"LICENSE"}


def test_assets_of_a_checkpoint_never_replace_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    import_hf(str(model), str(tmp_path / "plain"))
    weights = open_checkpoint(str(tmp_path / "plain"))
    evil = dict.fromkeys(
        ("model.safetensors", "modeling_evil.py", "pytorch_model.bin", "model.safetensors.index.json"), b"evil"
    )
    with Saver(str(tmp_path / "run")) as saver:
        state = {"model": {fqn.removeprefix("model."): weights.read(fqn) for fqn in weights.manifest.by_fqn}}
        saver.save(state, step=1, config=dict(weights.manifest.config), assets=evil | {"LICENSE": b"MIT"}).wait()
    assert main(["convert", "to-hf", f"{tmp_path}/run", f"{tmp_path}/out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_carried"].keys() == evil.keys()
    written = contents(tmp_path / "out")
    assert b"evil" not in written.values()
    assert written["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert written["LICENSE"] == b"MIT"


def test_settings_that_name_code_or_paths_are_removed(tmp_path: Path) -> None:
    code: dict[str, Any] = {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    of = config(
        **code, custom_pipelines={"p": {"impl": "evil.P"}}, _name_or_path="/home/me/secret", nested={"deep": code}
    )
    settings = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["evil.T", None]}, "name_or_path": "org/name"}
    generation = {"do_sample": False, "custom_generate": "org/evil", "eos_token_id": 2}
    model = write_model(
        tmp_path / "in", of, tensors(of),
        extra={"tokenizer_config.json": json.dumps(settings), "generation_config.json": json.dumps(generation)},
    )  # fmt: skip
    import_hf(str(model), str(tmp_path / "run"))
    for source, given in (("run", None), ("in", None), ("run", of)):
        export_hf(str(tmp_path / source), str(tmp_path / "out"), config=given)
        written = contents(tmp_path / "out")
        assert json.loads(written["config.json"]) == config(nested={"deep": {}})
        assert json.loads(written["tokenizer_config.json"]) == {"tokenizer_class": "X", "name_or_path": "org/name"}
        assert json.loads(written["generation_config.json"]) == {"do_sample": False, "eos_token_id": 2}
        (tmp_path / "out").rename(tmp_path / f"{source}-{given is None}")


CARD = b"---\nlicense: apache-2.0\nbase_model: org/base\n---\n# Ours\r\nText with \xff bytes."


def test_the_authors_card_and_licence_come_back(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()), extra={"LICENSE": "MIT", "NOTICE.txt": "by us"})
    (model / "README.md").write_bytes(CARD)
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    written = contents(tmp_path / "out")
    assert (written["README.md"], written["LICENSE"], written["NOTICE.txt"]) == (CARD, b"MIT", b"by us")


def test_training_adds_one_section_to_the_authors_card(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    (model / "README.md").write_bytes(CARD)
    source = str(model)
    for round_ in (1, 2):
        start = open_checkpoint(source)
        with Saver(str(tmp_path / f"run{round_}")) as saver:
            state = {"model": {fqn.removeprefix("model."): start.read(fqn) for fqn in start.manifest.by_fqn}}
            saver.save(
                state, step=round_, config=dict(start.manifest.config), training={"step": round_, "tokens_seen": 7},
                assets={name: start.asset(name) for name in start.manifest.assets},
            ).wait()  # fmt: skip
        source = str(tmp_path / f"out{round_}")
        export_hf(str(tmp_path / f"run{round_}"), source)
    card = (tmp_path / "out2" / "README.md").read_bytes()
    assert card.startswith(CARD)
    assert card.count(b"| Source |") == 1
    assert b"`run2@2`" in card
    assert b"run1" not in card


def test_a_new_card_names_the_run_without_its_path(tmp_path: Path) -> None:
    model = write_model(tmp_path / "in", config(), tensors(config()))
    import_hf(str(model), str(tmp_path / "run"))
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Source | `run@0` |" in card
    assert str(tmp_path) not in card
    assert not [name for name, data in contents(tmp_path / "out").items() if str(tmp_path).encode() in data]


def test_another_tokenizer_keeps_licence_and_card(tmp_path: Path) -> None:
    extra = {"LICENSE": "MIT", "NOTICE": "n", "README.md": "card", "tokenizer.json": "{}", "chat_template.jinja": "x"}
    model = write_model(tmp_path / "in", config(), tensors(config()), extra=extra)
    import_hf(str(model), str(tmp_path / "run"))
    start = Start(checkpoint=open_checkpoint(str(tmp_path / "run")))
    assert kept_assets(start, b"{}").keys() == {*extra, "config.json"}
    other = kept_assets(start, ByteTokenizer().to_json())
    assert other.keys() == {"config.json", "LICENSE", "NOTICE", "README.md", "tokenizer.json"}
