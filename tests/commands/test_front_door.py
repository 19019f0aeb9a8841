"""The first minutes of a user: recipes without a path, `init`, `config`, `doctor`, misspelt commands, errors as JSON."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

from tests.support.hf_models import config, tensors, write_model
from titan_ckpt.cli import main as command_line
from titan_ckpt.cli.examine import machine, torch_runtime
from titan_ckpt.cli.main import COMMANDS, build_parser, main
from titan_ckpt.debug.cli import verb_parsers
from titan_ckpt.saving.saver import save
from titan_ckpt.trainer.config.recipes import published, recipes
from titan_ckpt.trainer.config.settings import comments, schema, tables
from titan_ckpt.trainer.config.toml_records import resolve
from titan_ckpt.trainer.config.train_config import TrainConfig
from tools.docs.settings_docs import reference
from tools.paths import CONFIGS, DOCS, ROOT


def test_recipes_are_the_configs_of_the_repository() -> None:
    assert {name: path.read_text() for name, path in recipes().items()} == {
        path.stem: path.read_text() for path in CONFIGS.glob("*.toml")
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_init_writes_the_recipe_with_every_setting(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--template", name]) == 0
    assert f"titan-ckpt train {name}.toml" in capsys.readouterr().out
    written = resolve(TrainConfig, f"{name}.toml").config
    recipe = resolve(TrainConfig, str(recipes()[name])).config
    assert replace(written, save=recipe.save) == recipe
    assert written.save.url == f"runs/{name}"
    text = Path(f"{name}.toml").read_text()
    assert all(f"{field.name.rstrip('_')} =" in text for field in fields(recipe.save))


def test_each_line_that_init_comments_out_is_the_default(tmp_path: Path) -> None:
    target = tmp_path / "a.toml"
    assert main(["init", str(target)]) == 0
    shown = [
        line.removeprefix("# ") for line in target.read_text().splitlines() if line.startswith("# ") or "=" not in line
    ]
    without_value = [line for line in shown if line.split("=", 1)[-1].split("#")[0].strip()]
    kept = [line for line in without_value if line.startswith("[") or line.split(" ")[1:2] == ["="]]
    tree = tomllib.loads("\n".join(kept))
    assert tree["save"]["keep_last"] == 0
    defaults = resolve(TrainConfig, str(recipes()["debug"])).config
    mesh = {name: tuple(value) if isinstance(value, list) else value for name, value in tree["mesh"].items()}
    assert mesh | {"pp_layers_per_stage": ()} == {
        field.name: getattr(defaults.mesh, field.name) for field in fields(defaults.mesh)
    }


def test_init_leaves_a_file_that_exists_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.toml"
    target.write_text("# mine")
    assert main(["init", str(target)]) == 2
    assert "is left as it is" in capsys.readouterr().err
    assert target.read_text() == "# mine"


def test_init_lists_all_that_train_takes_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--list"]) == 0
    listed = capsys.readouterr().out
    assert [name for name in (*recipes(), *published()) if f"\n{name} " not in listed] == []
    assert main(["init", "--template", "torchtitan/8b_8/eager"]) == 0
    assert main(["train", "eager.toml", "--print-config"]) == 0
    assert "compile = false" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("tinny", "did you mean 'tiny'?"),
        ("configs/tiny.toml", "is named 'tiny' alone"),
        ("tiny.toml", "is named 'tiny' alone"),
        ("run.toml", "`titan-ckpt init` writes one"),
        ("llama3", "there are 135m, debug"),
        ("llama3", "published rows such as torchtitan/405b_512/1f1b (`titan-ckpt init --list`)"),
        ("torchtitan/70b_256/tpp", "did you mean 'torchtitan/70b_256/tp'?"),
        ("torchtitan/70b_256/tp.toml", "did you mean 'torchtitan/70b_256/tp'?"),
    ],
)
def test_a_config_that_is_not_there_names_the_way_out(
    given: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", given, "--print-config"]) == 2
    assert hint in capsys.readouterr().err


def test_a_recipe_needs_no_path_and_is_named_as_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "8b").mkdir()  # a folder of that name, such as debug/ in a clone, is no config
    assert main(["train", "8b", "--print-config"]) == 0
    assert "# recipe llama3_8b" in capsys.readouterr().out


def test_every_setting_and_table_has_a_meaning() -> None:
    for table in tables():
        assert table.meaning, table.name
        assert [setting.name for setting in table.settings if len(setting.meaning) < 5] == []
    assert (DOCS / "settings.md").read_text() == reference(), "run `make docs`"


def test_comments_are_found_wherever_the_formatter_puts_them() -> None:
    assert set(comments(TrainConfig)) == {field.name for field in fields(TrainConfig)}
    hints = get_type_hints(TrainConfig)
    assert comments(hints["resume"])["from_"] == "URL[@STEP], used while save.url has no checkpoint"


@pytest.mark.parametrize(
    ("name", "code", "shown"),
    [
        ("mesh.tp", 0, "default  1"),
        ("save", 0, "save.keep_last"),
        ("data.mixture.weight", 0, "share of the samples"),
        ("model.dim", 0, "must be set"),
        ("tp", 2, "did you mean 'mesh.tp'?"),
        ("mesh.ttp", 2, "did you mean 'mesh.tp'?"),
    ],
)
def test_explain_shows_one_setting_or_the_nearest(
    name: str, code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "--explain", name]) == code
    assert shown in "".join(capsys.readouterr())


def _names(part: dict[str, Any], prefix: str = "") -> set[str]:
    inner = part.get("properties") or part.get("items", {}).get("properties") or {}
    below = (_names(value, f"{prefix}{key}.") | {f"{prefix}{key}"} for key, value in inner.items())
    return set().union(*below)


def test_the_schema_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    settings = {setting.name for table in tables() for setting in table.settings}
    assert _names(schema()) - {table.name for table in tables()} - {"base"} == settings


def test_the_schema_has_the_ranges_of_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    properties = json.loads(capsys.readouterr().out)["properties"]
    assert properties["mesh"]["properties"]["tp"]["minimum"] == 1
    assert properties["train"]["properties"]["steps"]["minimum"] == 1
    assert properties["optimizer"]["properties"]["lr"]["maximum"] == 1e38


def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "tiny"]) == 2
    assert "no command 'trian'; did you mean 'train'?" in capsys.readouterr().err


def test_help_shows_how_a_secret_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["ls", "--help"])
    assert "secret=@FILE" in " ".join(capsys.readouterr().out.split())


def test_a_bug_is_told_to_the_quiet_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command_line, "build_parser", lambda **_: 1 / 0)
    assert main(["ls", "runs", "--quiet"]) == 70
    assert "internal error: ZeroDivisionError" in capsys.readouterr().err


def _choices(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """The parsers of a parser's sub-commands."""
    return {k: v for a in parser._actions if isinstance(a.choices, dict) for k, v in a.choices.items()}


def test_every_help_shows_examples() -> None:
    commands = [_choices(build_parser(only=name))[name] for name in COMMANDS]
    below = [each for command in commands for each in _choices(command).values()]
    epilogs = {parser.prog: parser.epilog or "" for parser in (*commands, *below, *verb_parsers())}
    assert {"titan-ckpt ls", "titan-ckpt convert to-hf", "titan-ckpt debug collect"} <= epilogs.keys()
    assert not [
        prog for prog, epilog in epilogs.items() if not re.search(rf"examples?:\n(.*\n)*?  {prog}[ \n]", epilog)
    ]


@pytest.mark.parametrize("words", [["--json", "ls"], ["ls", "--json"], ["ls", "-v", "--json", "--traceback"]])
def test_errors_are_json_too_and_flags_stand_anywhere(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, str(tmp_path)]) == 3
    printed = json.loads(capsys.readouterr().out)
    assert printed["error"]["kind"] == "NotCommittedError"
    assert printed["error"]["exit_code"] == 3
    assert "no checkpoint here" in printed["error"]["message"]


def test_a_missing_argument_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ls", "--json"])
    assert "URL" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_doctor_examines_machine_torch_and_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "run"
    store.mkdir()
    (store / "mine.txt").write_text("x")
    assert main(["doctor", str(store), "--json"]) == 0
    found = {item["subject"]: item["level"] for item in json.loads(capsys.readouterr().out)}
    assert {"Python", "torch", "gloo", "memory", "host name", "write", "read", "conditional writes"} <= set(found)
    assert found["gloo"] == found["read"] == "ok"
    assert [path.name for path in store.iterdir()] == ["mine.txt"]


def test_doctor_leaves_no_folder_that_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runtime, "FACTS", "import sys; sys.exit('left out: the test above has it')")
    (tmp_path / "mine").mkdir()
    assert main(["doctor", str(tmp_path / "mine" / "new" / "run")]) == 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    assert main(["doctor", str(tmp_path / "mine")]) == 1
    assert (tmp_path / "mine").is_dir()


def test_doctor_says_what_fails_and_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_runtime, "FACTS", "import sys; sys.exit('libcuda.so.1: cannot open')")
    monkeypatch.setattr(machine, "OLDEST_PYTHON", (9, 9))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    (tmp_path / "file").write_text("")
    assert main(["doctor", str(tmp_path / "file" / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[1] for line in lines if line.startswith("fail")]
    assert failed == ["Python", "GLOO_SOCKET_IFNAME", "torch", "store"]
    assert any("cannot open" in line for line in lines)
    assert lines[-1].startswith("4 of ")


def test_flags_after_two_dashes_are_left_to_the_command() -> None:
    assert command_line._in_order(["ls", "--", "-v"]) == ["ls", "--", "-v"]
    assert command_line._in_order(["--json", "ls", "x", "-v"]) == ["-v", "ls", "x", "--json"]


def test_a_copy_that_is_only_planned_is_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(str(tmp_path / "run"), {"w": torch.ones(4)}, step=3)
    words = ["cp", str(tmp_path / "run"), str(tmp_path / "copy"), "--json"]
    assert main([*words, "-n"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "copy").exists()
    assert main(words) == 0
    copied = json.loads(capsys.readouterr().out)
    assert (planned["is_copied"], copied["is_copied"]) == (False, True)
    assert planned["copied_bytes"] == copied["copied_bytes"]


def test_the_page_for_bots_names_every_command_that_only_reads() -> None:
    text = (DOCS / "bots.md").read_text()
    commands = {"ls", "inspect", "verify", "diff", "reshard", "cp", "prune", "debug", "doctor", "config"}
    assert all(f"`titan-ckpt {name} " in text for name in commands)
    for path in re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text()):
        assert (ROOT / path).exists(), path


def _completed(line: str, folder: Path) -> list[str]:
    """What the shell is told at a TAB behind `line`, as argcomplete's shell function asks for it."""
    answer = folder / "answer"
    environment = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    environment |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "IFS": "\v", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "titan_ckpt"]
    subprocess.run(command, env=environment, cwd=folder, check=False, timeout=240, capture_output=True)
    return sorted(word.strip() for word in answer.read_text().split("\v"))


def test_a_tab_completes_commands_options_files_and_steps(tmp_path: Path) -> None:
    for step in (5, 20):
        save(str(tmp_path / "runs"), {"w": torch.ones(1)}, step=step)
    assert _completed("titan-ckpt re", tmp_path) == ["reshard"]
    assert _completed("titan-ckpt verify --d", tmp_path) == ["--data"]
    assert _completed("titan-ckpt verify ru", tmp_path) == ["runs/"]
    assert _completed("titan-ckpt verify runs@", tmp_path) == ["runs@20", "runs@5"]
    assert _completed("titan-ckpt verify nowhere@", tmp_path) == [""]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_lines_for_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "titan-ckpt" in capsys.readouterr().out


_WITHOUT_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Missing())
from titan_ckpt.cli.main import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit as ended:
        assert not ended.code, command
sys.exit(main(["train", "tiny"]))
"""


def test_help_of_every_command_needs_no_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.strip().endswith(
        "`titan-ckpt train` needs torch, which is not installed: pip install 'titan-ckpt[train]'"
    )
    assert ended.stdout.count("usage: titan-ckpt") == 18


def test_the_next_command_of_init_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my run.toml"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next:"))
    assert shlex.split(line) == ["next:", "titan-ckpt", "train", "my run.toml"]


def test_a_hugging_face_folder_records_no_data_to_evaluate_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model", config(), tensors(config()))
    assert main(["eval", str(model)]) == 2
    assert "records no data to evaluate on" in capsys.readouterr().err


def test_init_leaves_nothing_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        code = main(["init"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 3
    assert capsys.readouterr().err == "titan-ckpt: error: tiny.toml: File too large\n"
    assert not list(tmp_path.iterdir())
