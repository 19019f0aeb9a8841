"""Everything that waits for a GPU, on one GPU, within 40 minutes: the rows "not run here" of docs/performance.md, and more.

    python -m benchmarks.gpu [--titan titan/bin/python] [--minutes 40] [--out .bench/gpu]
    python -m benchmarks.gpu --tiny --out FOLDER        # the same paths on a CPU, in minutes

Runs the benchmarks that need a GPU, each with a limit of its own, and writes gpu.json and gpu.md: a row for everything asked,
which says "run", with the figure and torchtitan's in the same run, or why not. Without --tiny, trainer_gpu also writes its
section of docs/performance.md, from which the rows at its top are filled. Exit code 1 if a row was not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.bars import write_summary
from tools.paths import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A benchmark that takes --json FILE and --tiny; `promises` are the rows that it is to give, as their names begin."""

    module: str
    promises: tuple[str, ...]
    limit_s: float
    tiny: tuple[str, ...] = ()  # arguments that make it short
    takes_titan: bool = False


PARTS = (
    Part(
        module="training.trainer_gpu", limit_s=1800.0, takes_titan=True, tiny=("--rounds", "1"),
        promises=(
            "bf16", "bf16, compiled", "Float8 rowwise, compiled", "Float8 over bf16", "MXFP8", "a save keeps training for",
            "training rate while uploading", "copy to pinned memory",
        ),
    ),
    Part(module="diagnosis.nccl_hang", limit_s=420.0, promises=("a collective left out by one rank of two",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the report: `state` is "run", or "not run: " and why."""

    what: str
    state: str
    figure: str = ""
    bar: str = ""
    holds: bool | None = None
    peer: str = ""


def run(part: Part, *, is_tiny: bool, titan: str | None, limit_s: float) -> list[Row]:
    """The rows of a benchmark; those that it did not give, with why."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "rows.json")
        command = [sys.executable, "-m", f"benchmarks.{part.module}", "--json", str(file)]
        command += ["--tiny", *part.tiny] if is_tiny else []
        command += ["--titan", titan] if titan and part.takes_titan else []
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            why = f"took more than {limit_s:.0f} s"
        else:
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}, and no output"])[-1][:200]
        rows = [_row(record) for record in json.loads(file.read_text())] if file.exists() else []
    missing = [promise for promise in part.promises if not any(row.what.startswith(promise) for row in rows)]
    return rows + [Row(what=promise, state=f"not run: {why}") for promise in missing]


def _row(record: dict[str, object]) -> Row:
    """A row from what a benchmark wrote: a Measurement, or a name with why it was not run."""
    if "not run" in record:
        return Row(what=str(record["what"]), state=f"not run: {record['not run']}")
    fields = {name: str(record[name]) for name in ("what", "figure", "bar", "peer")}
    return Row(**fields, state="run", holds=bool(record["holds"]))


def write_report(folder: Path, rows: Sequence[Row], device: str) -> None:
    """gpu.json and gpu.md."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
    (folder / "gpu.json").write_text(json.dumps({"device": device, "rows": records}, indent=1))
    cells = [(r.what, r.state, r.figure, r.bar, {None: "", True: "yes", False: "NO"}[r.holds], r.peer) for r in rows]
    table = tabulate(cells, headers=["what", "state", "measured", "bar", "holds", "peer"], tablefmt="github")
    (folder / "gpu.md").write_text(f"{device}\n\n{table}\n")
    sys.stdout.write(f"{device}\n\n{table}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts in turn, the report written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", help="a python that has torchtitan 0.3.0")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=ROOT / ".bench" / "gpu")
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU: do all paths run?")
    asked = parser.parse_args(arguments)
    device = _device(is_tiny=asked.tiny)
    if not device:
        sys.stderr.write("no GPU here; --tiny runs the same paths on a CPU\n")
        return 2
    rows: list[Row] = []
    end = time.monotonic() + 60 * asked.minutes
    for part in PARTS:
        left = min(part.limit_s, max(end - time.monotonic(), 1.0))
        rows += run(part, is_tiny=asked.tiny, titan=asked.titan, limit_s=left)
        write_report(asked.out, rows, device)
    if not asked.tiny:
        write_summary()
    return int(any(row.state != "run" for row in rows))


def _device(*, is_tiny: bool) -> str:
    import torch

    if is_tiny:
        return "CPU (--tiny: figures mean nothing)"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


if __name__ == "__main__":
    sys.exit(main())
