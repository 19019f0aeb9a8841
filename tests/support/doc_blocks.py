"""Run a page's fenced blocks as a reader would, and compare their output with the page.

```bash     run as one script, in order, in one folder; `# exit code 1` on its last line is the expected exit code
```python   run as one program in the same folder
```text     what the block before it printed on stdout: word for word, figures that change excepted; a line of `...` stands
            for any number of lines
```shell    not run (it installs, needs a cluster or a terminal), but every titan-ckpt, pip and make command in it must exist
```toml     must be TOML
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.cli.main import build_parser
from titan_ckpt.debug.cli import verb_parsers
from tools.paths import ROOT

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXIT = re.compile(r"# exit code (\d+)\s*\Z")
GAP = "..."
SHELL = ("|", "&", "&&", ";", ">", "2>&1", "2>/dev/null")
LIMIT_S = 240
# Varies from run to run: measured figures and the path of the sources. Whole numbers (steps, ranks, counts) must agree.
MASKS = (
    (re.compile(r"(?<![\w/.])/\S+/(?=[\w-]+\.py)"), ".../"),
    (re.compile(r"\.py:\d+"), ".py:#"),
    (re.compile(r"\b\d+(\.\d+)?(e[-+]?\d+)? ?(B|kB|MB|GB|ns|us|ms|s|min|h|MB/s|GB/s|kB/s|%)(?!\w)"), "#"),
    (re.compile(r"\b\d+\.\d+(e[-+]?\d+)?|\b\d+e[-+]?\d+"), "#"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block; `printed` is the text block right after it."""

    kind: str
    text: str
    line: int
    printed: str | None = None


def blocks(page: Path) -> list[Block]:
    """The blocks of a Markdown page in order, each `text` block joined to the one before it."""
    found: list[Block] = []
    text = page.read_text()
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        if match[1] == "text":
            last = found.pop()
            assert last.kind in ("bash", "python"), f"{page.name}:{line}: a text block that nothing printed"
            found.append(Block(kind=last.kind, text=last.text, line=last.line, printed=match[2]))
        else:
            found.append(Block(kind=match[1], text=match[2], line=line))
    return found


def run(page: Path, folder: Path, environment: Mapping[str, str]) -> int:
    """Run a page's blocks in `folder`; AssertionError at the first wrong exit code or output. Returns how many ran."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    count = 0
    for block in blocks(page):
        if block.kind in ("bash", "python"):
            _run_one(block, f"{page.name}:{block.line}", folder, environment)
            count += 1
    return count


def _run_one(block: Block, where: str, folder: Path, environment: Mapping[str, str]) -> None:
    command = ["bash", "-e", "-o", "pipefail", "-c", block.text]
    if block.kind == "python":
        command = [sys.executable, "-c", block.text]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment, "PATH": path}, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    match = EXIT.search(block.text)
    expected = int(match[1]) if match else 0
    output = f"{where}\n{block.text}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr[-4000:]}"
    assert done.returncode == expected, f"exit code {done.returncode}, expected {expected}: {output}"
    if block.printed is not None:
        missing = first_difference(block.printed, done.stdout.replace(f"{folder.resolve()}/", ""))
        assert missing is None, f"the page says {missing!r}, which is not what follows there: {output}"


def words(text: str) -> list[str]:
    """The words to compare: varying figures masked, column widths and line breaks ignored."""
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text.split()


def first_difference(page: str, printed: str) -> str | None:
    """The first part of the page's text that is missing from the output at its position; None if they agree."""
    stretches = [words(part) for part in re.split(rf"^\s*{re.escape(GAP)}$", page, flags=re.MULTILINE)]
    rest = words(printed)
    for number, stretch in enumerate(stretches):
        is_last = number == len(stretches) - 1
        if number == 0:
            at: int | None = 0 if rest[: len(stretch)] == stretch else None
        elif is_last and stretch:
            at = len(rest) - len(stretch) if rest[-len(stretch) :] == stretch else None
        else:
            at = _find(rest, stretch)
        if at is None:
            return " ".join(stretch)
        rest = rest[at + len(stretch) :]
        if is_last and rest and stretch:
            return f"{' '.join(stretch[-6:])} (the end)"
    return None


def _find(words: Sequence[str], wanted: Sequence[str]) -> int | None:
    starts = range(len(words) - len(wanted) + 1)
    return next((at for at in starts if list(words[at : at + len(wanted)]) == list(wanted)), None)


STORY = re.compile(r"<!-- story -->\n(.*?)<!-- end story -->", re.DOTALL)
STORY_MASKS = (
    (re.compile(r"^\s*\$ .*$", re.MULTILINE), ""),
    (re.compile(r"(goes on after '.*?': ).*"), r"\1..."),
    (re.compile(r"\S*/(?=hf;|incident\.svg|facts\.json)"), ""),
    (re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?"), "#"),
)


def story_words(text: str) -> list[str]:
    """The part of the demo's output that must match the README: all but figures, paths and the commands between."""
    for pattern, mask in STORY_MASKS:
        text = pattern.sub(mask, text)
    return text.split()


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a bash or shell block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        split = shlex.split(line, comments=True)
        end = next((at for at, word in enumerate(split) if word in SHELL), len(split))
        if split[:end]:
            yield split[:end]


def check_command(argv: Sequence[str]) -> str | None:
    """The error in a command of a block that is not run; None if it is valid or not one of ours."""
    if argv[0] == "titan-ckpt":
        return _check_titan_ckpt(list(argv[1:]))
    if argv[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = re.fullmatch(r"titan-ckpt(?:\[([\w,]+)\])?", argv[-1])
        unknown = set((extras[1] or "").split(",")) - {"", *project["optional-dependencies"]} if extras else {argv[-1]}
        return f"unknown: {', '.join(sorted(unknown))}" if unknown else None
    if argv[0] == "make":
        return (
            None
            if re.search(rf"^{re.escape(argv[1])}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            else "no target"
        )
    return None


def _check_titan_ckpt(arguments: list[str]) -> str | None:
    parsers = {parser.prog.split()[-1]: parser for parser in verb_parsers()}
    try:
        if arguments[0] == "debug" and arguments[1] in parsers:
            parsers[arguments[1]].parse_args(arguments[2:])
        else:
            build_parser(only=arguments[0]).parse_args(arguments)
    except SystemExit:
        return "the parser refuses it"
    return None
