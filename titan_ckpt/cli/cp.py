"""`titan-ckpt cp`: copy a checkpoint to another store and verify the copy. No torch."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import Any

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.output import write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.location import run_location
from titan_ckpt.upkeep.copy import CopyReport, cp

EPILOG = """\
examples:
  titan-ckpt cp runs/tiny@20 s3://bucket/run
  titan-ckpt cp s3://bucket/run@1200 gs://other/run -n
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("source", metavar="SRC", help="URL[@STEP]; without a step the newest resumable checkpoint")
    parser.add_argument("destination", metavar="DST", help="URL of a run; the checkpoint keeps its step")
    parser.add_argument("-n", "--dry-run", action="store_true", help="print what would be copied, and stop")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Copy and verify, or show what would be copied."""
    source, target = open_checkpoint(arguments.source), run_location(arguments.destination)
    planned = cp(source, arguments.destination, dry_run=True)
    if arguments.dry_run:
        if arguments.json:
            write_json(_facts(planned) | {"is_copied": False})
        else:
            size = format_size(planned.copied_bytes)
            write_text(f"would copy {source} to {target}: {planned.num_files} files, {size}")
        return 0
    started = time.monotonic()
    with ProgressLine("cp", planned.copied_bytes) as progress:
        report = cp(source, arguments.destination, on_bytes=progress.add)
    seconds = time.monotonic() - started
    if arguments.json:
        write_json(_facts(report) | {"is_copied": True, "seconds": round(seconds, 3)})
    else:
        kept = f", {format_size(report.kept_bytes)} there already" if report.kept_bytes else ""
        write_text(
            f"{source} -> {target}@{report.step}: {format_size(report.copied_bytes)} copied and verified"
            f"{kept} in {format_duration(seconds)}"
        )
    return 0


def _facts(report: CopyReport) -> dict[str, Any]:
    names = ("step", "num_files", "copied_bytes", "kept_bytes", "was_committed")
    return {name: getattr(report, name) for name in names}


CP = Command(configure=configure, run=run)
