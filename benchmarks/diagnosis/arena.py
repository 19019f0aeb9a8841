"""Score tools that name the guilty rank on the same incidents, and write docs/arena.md: `python -m benchmarks.diagnosis.arena`.

A tool is a command that gets a folder of evidence as its last argument and prints, as JSON, `{"verdicts": [{"verdict": NAME,
"culprits": [RANKS]}]}`, the most likely first; `--tool NAME=COMMAND` adds one. `--folder` gives other incidents: folders and a
MANIFEST.json with, for each, `culprits` or `any_of`, `verdicts`, `innocent`, `undecided`, `healthy`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tools.paths import DATA, ROOT
from tools.report import machine

PAGE = ROOT / "docs" / "arena.md"
TIMEOUT_S = 300
HEAD = """\
# The arena

Tools that name the rank that hung or killed a job, on the same {count} incidents. `make arena` measures again and writes this
page ({machine}).

`right`: the guilty ranks and a right kind of verdict, or an honest "undecided" where nobody can know. `rank only`: the ranks,
another kind. `accused`: an innocent rank was named. `healthy`: a hang was called healthy. `refused`: no answer. `not run`: the
folder holds nothing that the tool reads (torchfrtrace reads `nccl_trace_rank_N` only; its kinds are not compared).
"""
FOOT = """\
## Add a tool or incidents

`python -m benchmarks.diagnosis.arena --tool NAME=COMMAND`: the command gets a folder as its last argument and prints
`{"verdicts": [{"verdict": NAME, "culprits": [RANKS]}]}`, the most likely first. `--folder` gives other incidents: folders, and a
MANIFEST.json that has for each its `culprits` (exactly these ranks) or `any_of` (one or more of these), `verdicts` that are right
(none: any), `innocent` ranks, `undecided` (an honest answer) and `healthy`.

NVRx (`nvidia-resiliency-ext`) is not compared: 0.4.1, the newest release that installs here, has no analyzer of dumps."""
OUTCOMES = ("right", "rank only", "undecided", "part", "accused", "healthy", "refused", "not run")
QUIET = ("HEALTHY", "STRAGGLER", "RUNNING")
OPEN = ("INSUFFICIENT_DATA", "RUNNING", "UNDECIDED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool said of one folder; `verdict` is "" if it refused it."""

    verdict: str
    culprits: frozenset[int] = frozenset()
    seconds: float = 0.0
    memory_mb: float = 0.0
    was_run: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A command, how its output is understood, and whether it reads a folder at all."""

    name: str
    command: tuple[str, ...]
    understand: Callable[[str], tuple[str, frozenset[int]]]
    reads: Callable[[Path], bool] = lambda _folder: True


def outcome(answer: Answer, truth: Mapping[str, Any]) -> str:
    """One of OUTCOMES. `accused`: an innocent rank; `healthy`: no fault seen where there is one; `part`: not all culprits."""
    if not answer.verdict:
        return "refused" if answer.was_run else "not run"
    culprits, any_of = set(truth.get("culprits", ())), set(truth.get("any_of", ()))
    right = truth.get("verdicts", ())
    if truth.get("healthy"):
        is_quiet = answer.verdict in QUIET
        return "accused" if answer.culprits and not is_quiet else "right" if is_quiet else "undecided"
    if answer.verdict == "HEALTHY":
        return "right" if "HEALTHY" in right else "healthy"
    if answer.culprits & set(truth.get("innocent", ())) or answer.verdict in truth.get("never", ()):
        return "accused"
    if not answer.culprits or answer.verdict in OPEN:
        is_honest = truth.get("undecided") or "INSUFFICIENT_DATA" in right or not (culprits or any_of)
        return "right" if is_honest or (not answer.culprits and answer.verdict in right) else "undecided"
    if answer.culprits == culprits or (any_of and answer.culprits <= any_of | culprits):
        return "right" if not right or answer.verdict in right or answer.verdict == "ANY" else "rank only"
    return "accused" if answer.culprits - culprits - any_of else "part"


def understand_json(text: str) -> tuple[str, frozenset[int]]:
    """The first verdict of the documented format."""
    top = json.loads(text)["verdicts"][0]
    return str(top["verdict"]), frozenset(int(rank) for rank in top.get("culprits") or ())


_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}|[Cc]ulprit rank:? (\d+)")


def understand_torchfrtrace(text: str) -> tuple[str, frozenset[int]]:
    """Ranks that it calls missing or culprits (its kinds are not compared: ANY); without them it decides nothing."""
    found = _MISSING.search(text)
    if found is None:
        return "UNDECIDED", frozenset()
    return "ANY", frozenset(int(rank) for rank in re.findall(r"\d+", found.group(1) or found.group(2)))


def ask(tool: Tool, folder: Path) -> Answer:
    """Run a tool on a folder: its answer, its time and its peak memory."""
    if not tool.reads(folder):
        return Answer(verdict="", was_run=False)
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*tool.command, str(folder)], stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)
        while True:
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if done or time.perf_counter() - began > TIMEOUT_S:
                break
            time.sleep(0.02)
        if not done:
            process.kill()
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    seconds = time.perf_counter() - began
    try:
        is_crash = "Traceback (most recent call last)" in text
        verdict, culprits = ("", frozenset[int]()) if is_crash else tool.understand(text)
    except (ValueError, KeyError, IndexError, TypeError):
        verdict, culprits = "", frozenset()
    return Answer(verdict=verdict, culprits=culprits, seconds=seconds, memory_mb=usage.ru_maxrss / 1024)


def tools(extra: Sequence[str]) -> list[Tool]:
    """titan-ckpt, torch's own analyzer where it is installed, and those given."""
    found = [
        Tool(
            name="titan-ckpt",
            command=(sys.executable, "-m", "titan_ckpt", "debug", "--json"),
            understand=understand_json,
        )
    ]
    beside = Path(sys.executable).parent / "torchfrtrace"
    program = str(beside) if beside.exists() else shutil.which("torchfrtrace")
    if program:
        command = (program, "--prefix", "nccl_trace_rank_")
        found.append(
            Tool(name="torchfrtrace", command=command, understand=understand_torchfrtrace, reads=_has_nccl_dumps)
        )
    for text in extra:
        name, _, command_text = text.partition("=")
        found.append(Tool(name=name, command=tuple(shlex.split(command_text)), understand=understand_json))
    return found


def _has_nccl_dumps(folder: Path) -> bool:
    return any(folder.glob("nccl_trace_rank_*"))


def kind_of(name: str) -> str:
    """The kind of evidence, by the folder's name."""
    parts = name.split("/")
    return parts[-1] if parts[0] == "job" else parts[0]


def write_page(answers: Mapping[str, Mapping[str, Answer]], truths: Mapping[str, Mapping[str, Any]]) -> None:
    """docs/arena.md: one table a tool, and time and memory of all."""
    lines = [HEAD.format(count=len(truths), machine=machine())]
    for tool, given in answers.items():
        table: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for name, answer in given.items():
            for kind in (kind_of(name), "all"):
                table[kind][outcome(answer, truths[name])] += 1
        rows = [
            [kind, counts.total(), *(counts[what] or "" for what in OUTCOMES)] for kind, counts in sorted(table.items())
        ]
        lines += [f"## {tool}", "", tabulate(rows, headers=["evidence", "incidents", *OUTCOMES], tablefmt="github"), ""]
        run = [answer for answer in given.values() if answer.was_run]
        if run:
            seconds = sorted(answer.seconds for answer in run)[len(run) // 2]
            lines += [f"Median {seconds:.1f} s an incident, at most {max(a.memory_mb for a in run):.0f} MB.", ""]
    lines.append(FOOT)
    PAGE.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Ask all tools about all incidents."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tool", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="incidents whose name matches; the page is not written"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        if given.folder is None:
            with tarfile.open(DATA / "incidents.tar.xz") as archive:
                archive.extractall(folder, filter="data")
        truths = json.loads((folder / "MANIFEST.json").read_text())
        truths = {name: truth for name, truth in sorted(truths.items()) if re.search(given.only, name)}
        answers = {tool.name: {name: ask(tool, folder / name) for name in truths} for tool in tools(given.tool)}
    for tool, of_tool in answers.items():
        counts = Counter(outcome(answer, truths[name]) for name, answer in of_tool.items())
        sys.stdout.write(f"{tool}: {dict(counts)}\n")
    if not given.only:
        write_page(answers, truths)
    return 0


if __name__ == "__main__":
    sys.exit(main())
