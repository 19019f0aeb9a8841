"""No command lets a name, a log line or an error text command the terminal; every end has its exit code."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from titan_ckpt.cli import main as main_module
from titan_ckpt.cli.examine import torch_runtime
from titan_ckpt.cli.main import COMMANDS, main
from titan_ckpt.console.command import Command
from titan_ckpt.console.escapes import escape_line, escape_text
from titan_ckpt.console.output import OutputClosedError, write_json
from titan_ckpt.errors import TitanError
from titan_ckpt.saving.saver import save
from tools.paths import DEBUG_CONFIG, ROOT

EVIL = "w\x1b]0;owned\x07\x9b31m\x7f\u202e\u2066x\r\x08"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose folder, tensors, values, metadata, logs, stacks and metrics are full of escapes; step 2 is damaged."""
    runs = tmp_path_factory.mktemp("runs")
    run = runs / "plain"
    for step in (1, 2):
        state = {f"{EVIL}.{name}": torch.full((4, 4), float(step)) for name in "ab"} | {f"{EVIL}.n": step}
        save(str(run), state, step=step, user={EVIL: EVIL}, training={"note": EVIL})
    run = run.rename(runs / f"run {EVIL}")
    (damaged,) = run.glob("step-00000002/a-*/*.distcp")
    damaged.write_bytes(damaged.read_bytes()[:-40])
    (run / "logs").mkdir(exist_ok=True)
    log = f'2026-11-21 10:00:00 ERROR [rank 0] {EVIL}\nTraceback (most recent call last):\n  File "/a/{EVIL}.py", line 3, in f\n'
    (run / "logs" / "rank_00000.log").write_text(f"{log}    {EVIL}()\nValueError: {EVIL}\n")
    incident = run / "debug" / f"2026 {EVIL}"
    incident.mkdir(parents=True)
    stack = f'Current thread 0x0000000000000001 [MainThread] (most recent call first):\n  File "/a/{EVIL}.py", line 3 in {EVIL}\n'
    (incident / "rank_00000.stall.stacks").write_text(stack)
    sidecar = {"titan_ckpt": "sidecar", "rank": 0, "world_size": 1, "host": EVIL, "pid": 1, "coordinates": {EVIL: 0}}
    (incident / "rank_00000.sidecar.json").write_text(json.dumps(sidecar))
    (run / "bad.toml").write_text(f'[model]\n"{EVIL.encode().hex()}" = 1\n')
    return run


WORDS: dict[str, list[list[str]]] = {
    "ls": [["RUN"], ["RUN", "--check"], ["RUN", "--json"], [EVIL]],
    "inspect": [["RUN@1"], ["RUN@1", "--files"], ["RUN@1", "--json"], ["RUN@1", EVIL], ["RUN@2"]],
    "verify": [["RUN@1"], ["RUN@2"], ["RUN@2", "--data"], ["RUN@2", "--json"]],
    "diff": [["RUN@1", "RUN@1"], ["RUN@1", "RUN@2"], ["RUN@1", "RUN@1", "--json"]],
    "reshard": [
        ["RUN@1", "OUT", "--mesh", "dp_shard=2", "-n", *more] for more in ([], ["--json"], ["--show", f"{EVIL}.a"])
    ],
    "cp": [["RUN@1", "OUT", "-n"], ["RUN@9", "OUT"]],
    "prune": [["RUN", "--keep-last", "1"], ["RUN", "--keep-last", "1", "--json"]],
    "convert": [["to-hf", "RUN@1", "OUT", "-n"], ["from-hf", "RUN", "OUT"], ["to-torch", "RUN@1", f"OUT{EVIL}.pt"],
                ["from-torch", EVIL, "OUT"]],
    "debug": [["RUN"], ["RUN", "--json"], ["collect", "RUN"], ["watch", "RUN", "--once"], ["inject", EVIL]],
    "plot": [["RUN"], ["RUN", "-o", EVIL]],
    "tui": [["RUN"]],
    "init": [["--template", EVIL], [f"/nowhere/{EVIL}/x.toml"], ["--list"]],
    "config": [["--explain", EVIL], ["--json"]],
    "completion": [["bash"], ["zsh"], ["fish"], [EVIL]],
    "demo": [["--dir", "RUN"], ["--steps", EVIL], ["--steps", "3"]],
    "doctor": [[f"RUN/bad.toml/{EVIL}"]],
    "eval": [["RUN@1"], ["RUN@1", "--set", f"train.{EVIL}=1"], [EVIL], ["RUN/bad.toml"]],
    "train": [["RUN/bad.toml"], [EVIL], ["RUN/bad.toml", "--print-config"]],
}  # fmt: skip


def test_the_table_has_every_command() -> None:
    assert set(WORDS) == set(COMMANDS)


NO_TORCH = "import sys; sys.exit('left out: doctor tries it for seconds')"


@pytest.mark.parametrize("name", WORDS)
def test_no_command_prints_what_a_terminal_obeys(
    name: str, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_runtime, "FACTS", NO_TORCH)
    for number, words in enumerate(WORDS[name]):
        given = [word.replace("RUN", str(run)).replace("OUT", str(tmp_path / f"out{number}")) for word in words]
        for more in ([], ["--traceback"]):
            try:
                code = main([*more, name, *given])
            except SystemExit as ended:
                code = int(str(ended.code))
            shown = capfd.readouterr()
            assert RAW.findall(shown.out + shown.err) == [], (words, shown)
            assert shown.out + shown.err, words
            assert code != 70, (words, shown)
            if "--json" in words and shown.out:
                json.loads(shown.out)


def test_nothing_prints_but_the_console() -> None:
    """`print` is refused by ruff (T20); here: no write to a standard stream, by any name, outside of console."""
    found = []
    for folder in ("titan_ckpt", "trainer", "debug", "tui", "converters"):
        for path in (ROOT / folder).rglob("*.py"):
            if "console" in path.parts or any(part.is_symlink() for part in (path, *path.parents) if part != ROOT):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                text = ast.unparse(node) if isinstance(node, ast.Call) else ""
                if re.match(
                    r"(?:sys\.(?:__)?std(?:out|err)(?:__)?\.write|print|traceback\.print_|json\.dump\(.*sys\.std)", text
                ):
                    found.append(f"{path}: {text[:60]}")
    assert found == []


def test_json_is_ascii_and_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"a": [EVIL, "\udc80", float("nan"), float("inf")], "b": {float("inf"): 1}})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"a": [EVIL, "\udc80", None, None], "b": {"inf": 1}}


def test_escapes_keep_what_is_harmless() -> None:
    assert escape_text("a\tb\nä 漢 \U0001f600") == "a\tb\nä 漢 \U0001f600"
    assert escape_line("a\tb\n\x1b\u202e\udc80") == r"a\tb\n\x1b\u202e\udc80"
    assert RAW.search(escape_text("".join(map(chr, range(0x110000))))) is None


# ----------------------------------------------------------------------------------------------------------- exit codes


def raising(error: BaseException) -> Callable[[Any], NoReturn]:
    def run(_: Any) -> NoReturn:
        raise error

    return run


def as_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], int]) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("url")

    command = Command(configure=configure, run=run)
    monkeypatch.setattr(main_module, "load_command", lambda _: command)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("HF_TOKEN=hunter2hunter2"), 70), (RecursionError("deep"), 70), (MemoryError(), 70), (SystemExit(0), 70),
        (SystemExit(1), 70), (KeyError("x\x1b[31m"), 70), (ModuleNotFoundError("no", name="x"), 70), (BrokenPipeError(), 70),
        (KeyboardInterrupt(), 130), (OutputClosedError(), 141), (TitanError("no"), 3), (PermissionError(13, "denied", "/x"), 3),
        (ModuleNotFoundError("no", name="botocore"), 2), (AssertionError(), 70),
    ],
)  # fmt: skip
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    as_command(monkeypatch, raising(error))
    assert main(["ls", "x"]) == code
    shown = capfd.readouterr().err
    kept = list(tmp_path.iterdir())
    assert len(kept) == (code == 70)
    if kept:
        assert stat.S_IMODE(kept[0].stat().st_mode) == 0o600
        assert str(kept[0]) in shown
        assert "Traceback" in kept[0].read_text()
        assert "hunter2" not in kept[0].read_text() + shown
        assert "Traceback" not in shown
    assert main(["--traceback", "ls", "x"]) == code
    assert ("Traceback" in capfd.readouterr().err) == (code in (2, 3, 70))


def test_an_error_in_a_thread_is_not_success(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(_: Any) -> int:
        thread = threading.Thread(target=raising(ValueError("in a thread")), args=(None,))
        thread.start()
        thread.join()
        return 0

    as_command(monkeypatch, run)
    assert main(["ls", "x"]) == 70
    assert "in a thread" in capfd.readouterr().err


@pytest.mark.parametrize(("target", "code"), [("closed", 141), ("/dev/full", 3)])
def test_output_that_cannot_be_written_is_not_success(target: str, code: int, tmp_path: Path) -> None:
    save(str(tmp_path / "run"), {"w": torch.zeros(2)}, step=1)
    reader, writer = os.pipe()
    os.close(reader)
    out = writer if target == "closed" else os.open(target, os.O_WRONLY)
    command = [sys.executable, "-m", "titan_ckpt", "ls", str(tmp_path / "run")]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=False, text=True)
    os.close(out)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_streams_do_not_change_the_exit_code(tmp_path: Path) -> None:
    """Closed (a daemon, cron) or full, in every combination: the code stands for what was found, and nobody finds a bug."""
    save(str(tmp_path / "run"), {"w": torch.zeros(64)}, step=1)
    save(str(tmp_path / "bad"), {"w": torch.zeros(64)}, step=1)
    (data,) = (tmp_path / "bad").glob("step-00000001/a-*/*.distcp")
    data.write_bytes(data.read_bytes()[:-40])
    ways = ["", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"]
    asked = {(given, way): code for given, code in (("verify bad", 1), ("ls nothing", 3)) for way in ways}
    asked |= {("verify run", way): 0 for way in (">&-", ">&- 2>&-", "<&- >&- 2>&-")}
    asked |= {("ls", "2>/dev/full"): 2, ("ls", "2>&-"): 2, ("ls run", ">/dev/full 2>&1"): 3}
    asked |= {("--help", ">/dev/full"): 3, ("--help", ">&-"): 0}
    command = f"TMPDIR={tmp_path} exec {sys.executable} -m titan_ckpt"
    lines = [f"({command} {given} {way})\necho $? >&9\n" for given, way in asked]
    subprocess.run(
        ["sh", "-c", "exec 9>codes\n" + "".join(lines)], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    found = dict(zip(asked, map(int, (tmp_path / "codes").read_text().split()), strict=True))
    assert {key: (code, asked[key]) for key, code in found.items() if code != asked[key]} == {}
    assert list(tmp_path.glob("*.traceback.txt")) == []


@pytest.mark.parametrize("is_at_work", [True, False])
def test_a_thread_at_work_aborts_no_end(is_at_work: bool) -> None:
    """Python would unwind the stack of the thread through C++ code of numpy, which calls std::terminate."""
    program = f"""
import threading
import numpy
from titan_ckpt.console import background

begun = threading.Event()

def work():
    begun.set()
    while {is_at_work}:
        numpy.unique(numpy.arange(100_000) % 1000)

background.start("numbers", work)
begun.wait()
while threading.active_count() > 1 and not {is_at_work}:
    pass
background.end_beside_threads(7)
print("no thread works")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == ((7, "", "") if is_at_work else (0, "no thread works\n", ""))


def test_a_removed_working_folder_is_said(tmp_path: Path) -> None:
    save(str(tmp_path / "run"), {"w": torch.zeros(2)}, step=1)
    for words, code in ((f"verify {tmp_path}/run", 0), ("ls x", 2), (f"cp {tmp_path}/run out", 2)):
        (tmp_path / "gone").mkdir()
        script = f"cd {tmp_path}/gone; rmdir ../gone; exec {sys.executable} -m titan_ckpt {words}"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == code, done
        assert ("the working folder is gone" in done.stderr) == (code == 2)


# ------------------------------------------------------------------------------------------------------- files of users


def test_plot_replaces_only_its_own_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_ckpt.console.picture import write_picture

    monkeypatch.chdir(tmp_path)
    Path("run.svg").write_text("<svg>mine</svg>")
    with pytest.raises(TitanError, match="--force"):
        write_picture("run.svg", "<svg><g/></svg>", is_forced=False)
    assert Path("run.svg").read_text() == "<svg>mine</svg>"
    write_picture("run.svg", "<svg><g/></svg>", is_forced=True)
    write_picture("run.svg", "<svg><a/></svg>", is_forced=False)
    assert "<a/>" in Path("run.svg").read_text()
    Path("link.svg").symlink_to("run.svg")
    with pytest.raises(TitanError, match="--force"):
        write_picture("link.svg", "<svg/>", is_forced=False)
    assert sorted(os.listdir()) == ["link.svg", "run.svg"]


def test_print_config_shows_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(f'base = "{DEBUG_CONFIG}"\n[save]\nurl = "s3://AKIAUSER:hunter2hunter2@bucket/run"\n')
    for more in ([], ["--json"]):
        assert main(["train", str(config), "--print-config", *more]) == 0
        shown = capsys.readouterr().out
        assert "hunter2" not in shown
        assert "@bucket/run" in shown
