"""Say every wrong line to the program, and judge its answer: `make wrong-inputs`.

    python -m tools.wrong_inputs.campaign [--only COMMAND] [--count N --seed S]

An answer is right if the exit code is 2 or 3, stdout is empty (with `--json`: the error as JSON), stderr has one line
which names the wrong word and is not a bug's, and no file has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.cli.main import main as titan_ckpt
from titan_ckpt.console.command import ParserExit
from titan_ckpt.console.escapes import escape_line
from tools.paths import DATA
from tools.wrong_inputs.lines import WrongLine, commands, wrong_lines

EXIT_CODES = (2, 3)
MOST_CHARACTERS = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the program said to a line."""

    exit_code: int
    out: str
    err: str
    has_changed: bool


def make_folder(folder: Path) -> None:
    """A run, an incident, a file of text, one of bytes, an empty folder, and one that nobody may read."""
    shutil.copytree(DATA / "golden" / "v1", folder / "runs" / "tiny")
    (folder / "incident").mkdir()
    (folder / "incident" / "rank_00000.log").write_text("step 1\n")
    (folder / "empty").mkdir()
    (folder / "afile").write_text("hello\n")
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "noread").mkdir(mode=0o000)


def ask(line: WrongLine, folder: Path) -> Answer:
    """Run a line in `folder`, which is the working directory."""
    before, out, err = _listing(folder), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = titan_ckpt(list(line.words))
        except ParserExit as ended:
            code = int(ended.code or 0)
    return Answer(exit_code=code, out=out.getvalue(), err=err.getvalue(), has_changed=_listing(folder) != before)


def _listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*") if path.is_file())


def faults(line: WrongLine, answer: Answer) -> list[str]:
    """What is wrong with an answer; [] if nothing is."""
    names = (line.wrong, escape_line(line.wrong), line.option or line.wrong, line.wrong.partition("=")[0] or line.wrong)
    lines = answer.err.count("\n")
    checks = {
        f"exit code {answer.exit_code}": answer.exit_code in EXIT_CODES,
        f"{lines} lines on stderr": lines == 1,
        f"does not name {line.wrong!r}": any(name in answer.err for name in names),
        "says that it is a bug": "internal error" not in answer.err and "Traceback" not in answer.err,
        f"{len(answer.err)} characters": len(answer.err) <= MOST_CHARACTERS,
        "prints to stdout": _is_json_error(answer.out) if "--json" in line.words else not answer.out,
        "changes files": not answer.has_changed,
    }
    return [fault for fault, is_right in checks.items() if not is_right]


def _is_json_error(out: str) -> bool:
    """Whether a program that asked for JSON gets one line of it, with the error."""
    try:
        return out.count("\n") == 1 and set(json.loads(out)) == {"error"}
    except ValueError:
        return False


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """A folder as `make_folder` makes it, as the working directory, without a terminal and credentials."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            (folder / "noread").chmod(0o700)


def all_lines(only: str = "") -> list[WrongLine]:
    """Every wrong line of all commands, or of those whose name begins with `only`."""
    return [line for name, parser in commands().items() if name.startswith(only) for line in wrong_lines(name, parser)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print each line that is answered badly, and counts; 1 if there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="COMMAND", help="the lines of one command alone")
    parser.add_argument("--count", type=int, default=0, help="a sample of so many lines (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args(argv)
    lines = all_lines(options.only)
    if options.count:
        lines = random.Random(options.seed).sample(lines, options.count)
    bad, began = 0, time.monotonic()
    with working_folder() as folder:
        for line in lines:
            answer = ask(line, folder)
            if found := faults(line, answer):
                bad += 1
                sys.stdout.write(f"titan-ckpt {shlex.join(line.words)}\n    {'; '.join(found)}\n    {answer.err}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(lines)} wrong lines, {bad} answered badly, {time.monotonic() - began:.0f} s\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
