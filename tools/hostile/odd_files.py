"""Odd files in every place: each file of a run, an export, a torch file and an incident replaced, each command over it.

A case is one place, one kind of content or of thing (a folder, a pipe, a file that grows), and one command, in its own process.
It fails if the command ends in an unexpected error (exit code 70), by a signal, takes more than LONGEST_S seconds of the processor
or MOST_S of the clock, or holds more than MOST_BYTES.
"""

# ruff: noqa: E501  (tables of commands)
from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_ckpt.cli.main import main as titan_ckpt
from titan_ckpt.errors import INTERNAL
from tools.hostile.outcome import Outcome
from tools.paths import DATA, INCIDENTS

LONGEST_S, MOST_S = 20.0, 60.0
MOST_BYTES = 512 << 20
INCIDENT = "size"

Content = Callable[[bytes], bytes]
CONTENTS: dict[str, Content] = {
    "empty": lambda _: b"",
    "one NUL": lambda _: b"\0",
    "NULs": lambda data: bytes(len(data)),
    "not UTF-8": lambda data: b"\xff\xfe\xfd" + data,
    "BOM": lambda data: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda data: data.decode("latin1").encode("utf-16"),
    "CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "half": lambda data: data[: len(data) // 2],
    "twice": lambda data: data * 2,
    "deep lists": lambda _: b"[" * 100_000 + b"]" * 100_000,
    "deep objects": lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a number of 5,000 digits": lambda data: _numbers(data, b"9" * 5000),
    "1e400": lambda data: _numbers(data, b"1e400"),
    "1e300": lambda data: _numbers(data, b"1e300"),
    "NaN": lambda data: _numbers(data, b"NaN"),
    "negative": lambda data: _numbers(data, b"-1"),
    "huge": lambda data: _numbers(data, b"9223372036854775807"),
    "true": lambda data: _numbers(data, b"true"),
    "fractions": lambda data: _numbers(data, b"0.5"),
    "null": lambda data: _numbers(data, b"null"),
    "lists for objects": lambda data: data.replace(b"{", b"[[").replace(b"}", b"]]").replace(b":", b","),
    "objects for lists": lambda data: data.replace(b"[]", b"{}").replace(b"[", b'{"x":[').replace(b"]", b"]}"),
    "numbers for texts": lambda data: re.sub(rb':\s*"[^"]*"', b": 7", data),
    "a key of 10 MB": lambda _: b'{"' + b"k" * 10_000_000 + b'": 1}',
    "half a surrogate pair": lambda data: re.sub(rb':\s*"[^"]*"', rb': "\\ud800"', data),
    "escapes": lambda data: re.sub(rb':\s*"[^"]*"', rb': "\\u001b[2J\\u0000\\n../../x"', data),
    "long texts": lambda data: re.sub(rb':\s*"[^"]*"', b': "' + b"a" * 100_000 + b'"', data, count=3),
    "the year 9999": lambda data: re.sub(rb"20\d\d-\d\d-\d\d", b"9999-12-31", data),
    "the year 1": lambda data: re.sub(rb"20\d\d-\d\d-\d\d", b"0001-01-01", data),
    "a list": lambda _: b"[1, 2]",
    "a number": lambda _: b"3",
    "a text": lambda _: b'"x"',
    "an empty object": lambda _: b"{}",
    "a megabyte of spaces": lambda _: b" " * 1_000_000,
    "a megabyte of newlines": lambda _: b"\n" * 1_000_000,
}


def _numbers(data: bytes, new: bytes) -> bytes:
    """Every number of a JSON text but the format's version."""
    return re.sub(rb'(?<!"version":)(?<!"version": )(?<=[:\[,])\s*-?\d+(?:\.\d+)?(?=[,\]}\s])', b" " + new, data)


def _folder(path: Path, _: bytes) -> None:
    path.mkdir()


def _pipe(path: Path, _: bytes) -> None:
    os.mkfifo(path)


def _socket(path: Path, _: bytes) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name[:100])
    finally:
        os.chdir(here)


def _dangling(path: Path, _: bytes) -> None:
    path.symlink_to("not-there")


def _circle(path: Path, _: bytes) -> None:
    path.symlink_to(path.name)


def _device(path: Path, _: bytes) -> None:
    path.symlink_to("/dev/zero")


def _newline(path: Path, data: bytes) -> None:
    path.with_name(f"a\nb{path.name}").write_bytes(data)


THINGS: dict[str, Callable[[Path, bytes], None]] = {
    "a folder": _folder, "a pipe": _pipe, "a socket": _socket, "a dangling link": _dangling, "a link to itself": _circle,
    "a link to /dev/zero": _device, "a name with a newline": _newline, "grows": lambda path, data: _grow(path, data),
}  # fmt: skip


def _grow(path: Path, data: bytes) -> None:
    """A file to which another process goes on writing."""
    path.write_bytes(data)
    if os.fork() == 0:
        until = time.monotonic() + 2
        while time.monotonic() < until and path.parent.exists():
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(b" \n")
        os._exit(0)


@dataclass(frozen=True, slots=True)
class Case:
    """`place`: the file that is replaced, in the folder `kind`; `command`: with FOLDER and OUT."""

    kind: str
    place: str
    what: str
    command: tuple[str, ...]


_RUN = (
    ("ls", "FOLDER"), ("ls", "--check", "--json", "FOLDER"), ("verify", "FOLDER"), ("verify", "--data", "--json", "FOLDER@1"), ("inspect", "FOLDER@1"),
    ("diff", "FOLDER@1", "FOLDER@2"), ("cp", "FOLDER@1", "OUT"), ("prune", "--keep-last", "1", "FOLDER"), ("reshard", "--mesh", "tp=1", "FOLDER@1", "OUT"),
    ("convert", "to-torch", "FOLDER@1", "OUT.pt"), ("tui", "--screenshot", "OUT.svg", "--screen", "3", "FOLDER"), ("debug", "FOLDER"), ("plot", "FOLDER", "-o", "OUT.svg"),
)  # fmt: skip
_INCIDENT = (("debug", "FOLDER"), ("debug", "--json", "FOLDER"), ("debug", "--all", "FOLDER"), ("tui", "--screenshot", "OUT.svg", "FOLDER"))  # fmt: skip
_MODEL = (("convert", "from-hf", "FOLDER", "OUT"), ("verify", "FOLDER"), ("inspect", "FOLDER"))
_TORCH = (("convert", "from-torch", "FOLDER/state.pt", "OUT"),)
_RULES = (("reshard", "--mesh", "tp=1", "--placements", "FOLDER/rules.toml", str(DATA / "golden" / "v1@1"), "OUT"),)
COMMANDS: dict[str, Sequence[tuple[str, ...]]] = {
    "run": _RUN,
    "incident": _INCIDENT,
    "model": _MODEL,
    "torch": _TORCH,
    "rules": _RULES,
}


def sources(folder: Path) -> dict[str, Path]:
    """A whole folder of each kind."""
    run = folder / "run"
    shutil.copytree(DATA / "golden" / "v1", run)
    shutil.copytree(DATA / "run" / "debug", run / "debug")
    (run / "logs").mkdir()
    (run / "logs" / "rank_00000.log").write_text(
        "2026-01-01 00:00:00 step 3\nTraceback (most recent call last)\nValueError: x\n"
    )
    (run / "logs" / "metrics.jsonl").write_text(
        '{"event": "start", "time_s": 1, "step": 0}\n{"event": "step", "time_s": 2, "step": 1, "step_s": 1, "data_wait_s": 0, "loss": 2}\n'
    )
    (run / "OWNER.json").write_bytes((DATA / "run" / "OWNER.json").read_bytes())
    shutil.copytree(INCIDENTS / INCIDENT, folder / "incident")
    _model(folder / "model")
    (folder / "torch").mkdir()
    torch.save({"w": torch.arange(6.0), "n": 3}, folder / "torch" / "state.pt")
    (folder / "rules").mkdir()
    (folder / "rules" / "rules.toml").write_text('[placements]\n"*.weight" = ["tp:0"]\n')
    return {kind: folder / kind for kind in COMMANDS}


def _model(folder: Path) -> None:
    from tools.fuzz.models import _models, _tokenizers, _weights

    folder.mkdir()
    for name, content in json.loads(_models()[0]).items():
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(_weights())
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')


def cases(folders: dict[str, Path]) -> Iterator[Case]:
    """Every place, content and command."""
    for kind, folder in folders.items():
        places = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
        places = [place for place in places if not re.match(r"step-0000000[23]|debug/.*_0000[1-9]|rank_[1-9]", place)]
        for place, what, command in itertools.product(places, (*CONTENTS, *THINGS), COMMANDS[kind]):
            yield Case(kind, place, what, command)


def problem_of(case: Case, source: Path) -> str:
    """Run the command over the odd file in a process of its own; what is wrong with how that ended, or nothing."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name) / "odd"
        shutil.copytree(source, folder, symlinks=True)
        path = folder / case.place
        data = path.read_bytes()
        path.unlink()
        if case.what in CONTENTS:
            path.write_bytes(CONTENTS[case.what](data))
        else:
            THINGS[case.what](path, data)
        words = [word.replace("FOLDER", str(folder)).replace("OUT", f"{name}/out") for word in case.command]
        return _ended(words, Path(name) / "log")


def _ended(words: Sequence[str], log: Path) -> str:
    child = os.fork()
    if child == 0:
        os._exit(_command(words, log))
    started = time.monotonic()
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - started > MOST_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end after {MOST_S:.0f} s"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    said = log.read_text(errors="replace")[-300:] if log.exists() else ""
    if code == INTERNAL or code < 0 or "Traceback" in said:
        return f"exit code {code}: {said}"
    if (took_s := usage.ru_utime + usage.ru_stime) > LONGEST_S:
        return f"{took_s:.0f} s of the processor"
    held = (usage.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << 10
    return f"held {held >> 20} MB" if held > MOST_BYTES else ""


def _command(words: Sequence[str], log: Path) -> int:
    signal.alarm(int(MOST_S))
    out, said = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            return titan_ckpt(words)
    finally:
        log.write_text(said.getvalue())


def run_odd_files(seed: int, seconds: float) -> Outcome:
    """As many cases as there is time for, in an order that the seed gives."""
    outcome, until = Outcome("odd files"), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        folders = sources(Path(name))
        matrix = list(cases(folders))
        outcome.counts["in the matrix"] = len(matrix)
        random.Random(seed).shuffle(matrix)
        for case in matrix:
            if time.monotonic() > until:
                break
            outcome.cases += 1
            outcome.counts[case.kind] += 1
            if problem := problem_of(case, folders[case.kind]):
                outcome.failures.append(f"{case.place}, {case.what}, {' '.join(case.command)}: {problem}")
    return outcome
