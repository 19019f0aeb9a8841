"""Wrong command lines: each gives one line on stderr that names the mistake and the mend, and the documented exit code."""

from __future__ import annotations

import random
import shlex
import shutil
from pathlib import Path

import pytest

from titan_ckpt.cli.main import COMMANDS, main
from titan_ckpt.console.command import ParserExit
from tools.paths import DATA
from tools.wrong_inputs.campaign import Answer, all_lines, ask, faults, working_folder
from tools.wrong_inputs.lines import WrongLine, commands, lines_without_effect

RUN = "runs/tiny"
RULES = {name: parser for name, parser in commands().items() if parser.rules}
# The command line, its exit code, and words that the line must have: the mistake, then the mend.
WRONG: list[tuple[str, int, tuple[str, ...]]] = [
    ("lss runs", 2, ("'lss'", "did you mean 'ls'?")),
    ("ls", 2, ("URL", "--help")),
    ("ls runs/tny", 3, ("runs/tny", "did you mean 'tiny'?")),
    ("ls rus/tiny", 3, ("there is no folder", "rus")),
    ("ls s3//bucket/run", 2, ("s3//bucket/run", "did you mean s3://bucket/run?")),
    ("ls s3:/bucket/run", 2, ("did you mean s3://bucket/run?",)),
    ("ls s3:bucket/run", 2, ("did you mean s3://bucket/run?",)),
    ("ls file:/tmp/run", 2, ("did you mean file:///tmp/run?",)),
    ("ls htp://host/run", 2, ("htp",)),
    ("ls s3://", 2, ("names no bucket", "s3://bucket/folder")),
    ("ls runs/tiny@2", 2, ("without a step",)),
    ("ls empty", 3, ("empty", "check the URL")),
    ("ls @1", 2, ("'@1'", "before the @")),
    ("ls runs/tiny --chek", 2, ("--chek", "did you mean '--check'?")),
    ("ls runs/tiny --endpoint-url", 2, ("--endpoint-url", "--help")),
    ("ls runs/tiny --storage-option anon", 2, ("NAME=VALUE",)),
    ("inspect runs/tiny@abc", 3, ("'abc' is no step", "@1200")),
    ("inspect runs/tiny@99", 3, ("@99", "committed steps: 1, 2, 3")),
    ("inspect runs/tny@1", 3, ("did you mean 'tiny'?",)),
    ("inspect runs/tiny nope.*", 2, ("no tensor or value matches", "nope.*")),
    ("inspect runs/tiny@9999999999999999999", 2, ("no step is larger",)),
    ("inspect afile", 3, ("it is a file", "convert from-torch")),
    ("inspect runs/tiny --jsno", 2, ("did you mean '--json'?",)),
    ("verify runs/tiny --dta", 2, ("--dta", "did you mean '--data'?")),
    ("verify runs/tny", 3, ("did you mean 'tiny'?",)),
    ("verify empty", 3, ("empty or does not exist",)),
    ("diff runs/tiny@1", 2, ("required", "--help")),
    ("diff runs/tiny@1 runs/tny@1", 3, ("did you mean 'tiny'?",)),
    ("reshard runs/tiny@1 out", 2, ("--mesh",)),
    ("reshard runs/tiny@1 out --mesh dp_shar=2", 2, ("dp_shar", "the axes are")),
    ("reshard runs/tiny@1 out --mesh dp_shard=zero", 2, ("axis=degree", "for example")),
    ("reshard runs/tiny@1 out --mesh dp_shard=0", 2, ("dp_shard",)),
    ("reshard runs/tiny@1 runs/tiny --mesh dp_shard=2", 3, ("exists already", "give another URL")),
    ("reshard runs/tny@1 out --mesh dp_shard=2", 3, ("did you mean 'tiny'?",)),
    ("reshard runs/tiny@1 s3//bucket --mesh dp_shard=2", 2, ("did you mean s3://bucket?",)),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 --placements nope.toml", 2, ("nope.toml",)),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 -n --latency nan", 2, ("--latency", "nan", "from 0 on")),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 --memory -1GB", 2, ("'-1GB' is not a size", "512MB")),
    ("train debug --pretokenise runs/tiny", 3, ("runs/tiny holds checkpoints", "a folder of their own")),
    ("config mesh.tp", 2, ("mesh.tp", "did you mean --explain mesh.tp?")),
    ("eval runs/tiny --set save.url=x", 2, ("--set save.url=x has no effect", "leave it out")),
    ("reshard runs/tiny@1 out --mesh= -n", 2, ("--mesh is empty", "such as")),
    ("cp runs/tiny@1", 2, ("DST", "--help")),
    ("cp runs/tiny@1 runs/tiny", 2, ("source's own run", "another URL")),
    ("cp runs/tny@1 out", 3, ("did you mean 'tiny'?",)),
    ("cp runs/tiny@7 out", 3, ("@7", "committed steps: 1, 2, 3")),
    ("prune runs/tiny", 2, ("--keep-last", "--help")),
    ("prune runs/tiny --keep-last -3", 2, ("-3", "whole number from 1 on")),
    ("prune runs/tiny --keep-last two", 2, ("two", "--help")),
    ("prune runs/tiny --keep-last 1 --keep 100", 2, ("no step 100", "nearest steps")),
    ("prune runs/tiny --keep-last 1 --older-than 5x", 2, ("5x", "30m")),
    ("prune runs/tiny@1 --keep-last 1", 2, ("without a step",)),
    ("convert to-hff runs/tiny out", 2, ("to-hff", "to-hf")),
    ("convert to-hf runs/tny out", 3, ("did you mean 'tiny'?",)),
    ("convert to-hf runs/tiny out --dtype float17", 2, ("float17", "--help")),
    ("convert from-hf nope out", 3, ("expected a Hugging Face model", "config.json")),
    ("convert from-torch afile out", 3, ("afile",)),
    ("debug nope", 3, ("nope", "it does not exist")),
    ("debug empty", 3, ("empty", "Give a run's URL")),
    ("debug empty --jsn", 2, ("--jsn",)),
    ("debug empty --html nofolder/x.html", 2, ("nofolder", "make it first")),
    ("debug collect --pid 1 --out out --wait nan", 2, ("--wait", "nan")),
    ("debug inject nope", 2, ("'nope'", "there are")),
    ("debug inject skip --ranks x", 2, ("--ranks", "--help")),
    ("debug collect --pid abc", 2, ("--pid", "--help")),
    ("debug watch nope", 3, ("nope", "no black box")),
    ("tui runs/tiny", 2, ("needs a terminal", "--screenshot")),
    ("plot empty", 3, ("metrics.jsonl", "titan-ckpt train")),
    ("config --explain mesh.tq", 2, ("'mesh.tq'", "did you mean 'mesh.tp'?")),
    ("init --template huge", 2, ("'huge'", "there are")),
    ("init afile", 2, ("afile", "ends with .toml")),
    ("doctor s3//bucket", 2, ("did you mean s3://bucket?",)),
    ("completion tcsh", 2, ("tcsh", "bash")),
    ("train debug --set data.source=afile --set data.format=chat --pretokenise out", 2, ("--pretokenise", "'chat'")),
    ("train debug --restarts -3", 2, ("--restarts", "-3", "from 0 on")),
    ("train debug --plan --gpus 0", 2, ("--gpus", "from 1 to")),
    ("config --explain=", 2, ("no setting ''",)),
    ("train sft", 2, ("sft is a template", "init --template sft")),
    ("train nope.toml", 2, ("no such config file", "titan-ckpt init")),
    ("train debugg", 2, ("debugg", "debug")),
    ("train afile", 2, ("afile", "TOML")),
    ("train debug --set mesh.tp", 2, ("section.key=value",)),
    ("train debug --set mesh.tpp=2", 2, ("mesh.tpp", "did you mean 'mesh.tp'?")),
    ("train debug --set mesh.tp=two", 2, ("mesh.tp", "two")),
    ("train debug --set save.url=s3//bucket/run --print-config", 2, ("did you mean s3://bucket/run?",)),
    ("train debug --set mesh.tp=3 --print-config", 2, ("tp",)),
    ("train debug --plan --gpus 8 --set mesh.tp=3", 2, ("mesh.tp=3", "leave it out")),
    ("train runs/tiny@1 --export-adapter out --set train.steps=3", 2, ("--set", "records its settings")),
    ("train runs/tiny", 2, ("is a folder", "TOML file")),
    ("train s3://bucket/x.toml", 2, ("local TOML file",)),
    ("train debug mesh.tp=2", 2, ("did you mean --set mesh.tp=2?", "titan-ckpt train --help")),
    ("train debug --nproc 1.5", 2, ("--nproc", "'1.5' is not a whole number")),
    ("init tiny", 2, ("did you mean --template tiny?",)),
    ("init nofolder/x.toml", 2, ("no folder nofolder",)),
    ("init s3://bucket/x.toml", 2, ("local file",)),
    ("ls afile", 3, ("it is a file",)),
    ("prune runs/tny --keep-last 1", 3, ("did you mean 'tiny'?",)),
    ("prune runs/tiny --keep-last 1 -n --yes", 2, ("--dry-run has no effect with --yes",)),
    ("cp runs/tiny@1 afile -n", 2, ("afile is a file", "a folder")),
    ("cp runs/tiny@1 afile/below", 2, ("afile is a file", "a folder")),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 -n --placements binary", 2, ("binary", "not UTF-8")),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 -n --exclude zz.*", 2, ("--exclude 'zz.*'", "inspect")),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 -n --rename a=b", 2, ("--rename 'a'", "inspect")),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 -n --stages-per-rank 2", 2, ("stages_per_rank", "no pipeline")),
    ("convert from-hf empty out --verify", 2, ("--verify", "convert from-hf --help")),
    ("convert from-hf afile out", 3, ("it is a file",)),
    ("debug colect --pid 1", 2, ("did you mean 'collect'?",)),
    ("debug --all collect --pid 1 --out out", 2, ("--all has no effect before collect",)),
    ("debug empty --html empty", 2, ("empty is a folder",)),
    ("debug inject skip --out afile", 2, ("afile", "give a folder")),
    ("doctor htp://host", 2, ("htp", "s3://")),
    ("demo --dir afile", 2, ("afile is a file",)),
    ("--jsn", 2, ("no option '--jsn'", "a command comes first")),
    ("ls runs", 3, ("runs in this folder: tiny",)),
    ("verify runs", 3, ("no step folder", "runs in this folder: tiny")),
    ("prune runs --keep-last 1", 3, ("runs in this folder: tiny",)),
    ("ls 's3://a bucket/run'", 2, ("'a bucket' is no name of a bucket",)),
    ("ls s3://bucket/run --storage-option secret=@nope", 2, ("cannot read nope", "FileNotFoundError", "hold secret")),
    ("reshard runs/tiny@1 out --mesh dp_shard=2 --dtype bf16", 2, ("did you mean 'bfloat16'?",)),
    ("convert to-hf runs/tiny out --max-shard-size 0", 2, ("max_shard_bytes is 0", "from 1 on")),
    ("debug empty --html s3://bucket/x.html", 2, ("local file",)),
    ("tui runs/tiny --screenshot s3://bucket/x.svg", 2, ("local file",)),
    ("train debug --json", 2, ("--json has no effect without --print-config",)),
    ("train debug --set steps=3", 2, ("unknown key steps", "did you mean 'train.steps'?")),
    ("train debug --set mesh.tp=0", 2, ("mesh.tp = 0", "at least 1")),
    ("train debug --set mesh.cp=-1", 2, ("mesh.cp = -1", "at least 1")),
    ("convert to-torch runs/tiny afile/below", 2, ("afile/below", "is a file, not a folder")),
    ("convert from-torch htp://host/run out", 2, ("htp://host/run", "Protocol not known")),
    ("debug", 2, ("are required: PATH;",)),
    ("debug inject skpi", 2, ("did you mean 'skip'?",)),
    ("debug collect afile", 3, ("it is a file", "that the recorder writes to")),
    ("convert from-hf meta-llama/Llama-3.1-8B out", 3, ("hf download meta-llama/Llama-3.1-8B",)),
    ("init 8b", 2, ("did you mean --template 8b?",)),
    ("ls adapter", 3, ("it is a PEFT adapter", "--merge-lora")),
    ("eval adapter", 3, ("it is a PEFT adapter", "--merge-lora")),
    ("inspect tensors", 3, ("safetensors without the config.json",)),
    ("ls named", 3, ("checkpoints of torch in this folder", "checkpoint_1, checkpoint_2")),
    ("prune of-torch --keep-last 1", 3, ("checkpoints of torch or another library (step-1, step-2)", "by hand")),
    ("ls runs/tiny -v -q", 2, ("--verbose has no effect with --quiet",)),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, an empty folder, a file, and what other libraries write."""
    for name in ("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "tensors/model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{}")
    for name in ("named/checkpoint_1", "named/checkpoint_2", "of-torch/step-1", "of-torch/step-2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ".metadata").write_bytes(b"")
    shutil.copytree(DATA / "golden" / "v1", tmp_path / RUN)
    (tmp_path / "empty").mkdir()
    (tmp_path / "afile").write_text("hello\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except ParserExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize(("line", "code", "words"), WRONG, ids=[line for line, _, _ in WRONG])
def test_a_mistake_is_named_in_one_line_with_its_mend(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, code: int, words: tuple[str, ...]
) -> None:
    before = sorted(folder.rglob("*"))
    found, printed = _exit_code(shlex.split(line)), capsys.readouterr()
    assert found == code, printed.err
    assert printed.err.count("\n") == 1, printed.err
    assert all(word in printed.err for word in words), printed.err
    assert sorted(folder.rglob("*")) == before, "a wrong command line leaves nothing behind"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", sorted(RULES))
def test_options_without_effect_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each rule of a parser, by a line that breaks it alone: never a silent loss of what was asked for."""
    for line in lines_without_effect(name, RULES[name]):
        assert _exit_code([*line.words]) == 2, line.words
        printed = capsys.readouterr().err
        assert f"{line.wrong} has no effect with" in printed, (line.words, printed)


def test_a_link_to_itself_hides_no_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / RUN / "loop").symlink_to("loop")
    (folder / RUN / "step-00000001" / "loop").symlink_to("loop")
    assert main(["ls", RUN]) == 0
    assert main(["verify", RUN, "--data"]) == 0
    assert capsys.readouterr().err == ""


def test_torchrun_starts_the_ranks_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "debug", "--nproc", "2"]) == 2
    assert "--nproc has no effect under torchrun" in capsys.readouterr().err


def test_a_line_break_in_a_setting_sets_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "debug", "--set", "mesh.tp=1\nvalue = 2", "--print-config"]) == 2
    assert "give each setting its own --set" in capsys.readouterr().err


def test_a_quiet_command_prints_results_and_errors_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder / RUN), "--data", "-q"]) == 0
    printed = capsys.readouterr()
    assert printed.out
    assert printed.err == ""
    assert main(["--quiet", "ls", "nope"]) == 3
    assert "titan-ckpt: error:" in capsys.readouterr().err


def test_a_sample_of_wrong_lines_is_answered_in_one_line() -> None:
    """`make wrong-inputs` asks all of them; `train` and `eval` import torch for each, and are among WRONG above."""
    lines = [line for line in all_lines() if line.words[0] not in ("train", "eval", "doctor")]
    assert {name.split()[0] for name in commands()} == set(COMMANDS)
    assert len(lines) > 800
    with working_folder() as folder:
        answers = {line: faults(line, ask(line, folder)) for line in random.Random(23).sample(lines, 80)}
    assert {line.words: found for line, found in answers.items() if found} == {}


def test_the_judge_wants_the_error_as_json_where_that_is_asked() -> None:
    line, err = WrongLine(words=("ls", "x", "--json"), wrong="x"), "no 'x'\n"
    assert faults(line, Answer(exit_code=3, out='{"error": {}}\n', err=err, has_changed=False)) == []
    assert faults(line, Answer(exit_code=3, out="[]\n", err=err, has_changed=False)) == ["prints to stdout"]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Answer(exit_code=0, out="", err="no 'x'\n", has_changed=False), "exit code 0"),
        (Answer(exit_code=2, out="", err="no 'y'\n", has_changed=False), "does not name 'x'"),
        (Answer(exit_code=2, out="", err="no 'x'\nhelp\n", has_changed=False), "2 lines on stderr"),
        (Answer(exit_code=2, out="", err="internal error: 'x'\n", has_changed=False), "says that it is a bug"),
        (Answer(exit_code=3, out="1\n", err="no 'x'\n", has_changed=False), "prints to stdout"),
        (Answer(exit_code=3, out="", err="no 'x'\n", has_changed=True), "changes files"),
    ],
)
def test_the_judge_of_wrong_lines_sees_each_fault(answer: Answer, fault: str) -> None:
    assert faults(WrongLine(words=("ls", "x"), wrong="x"), answer) == [fault]
