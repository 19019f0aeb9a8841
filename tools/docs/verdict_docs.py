"""The reports in docs/verdicts/KIND.md: what `titan-ckpt debug` says of recorded incidents, written between markers.

`<!-- begin report NAME -->` and `<!-- end report -->` hold the report of one recording: a folder of tests/data, or one in
tests/data/incidents.tar.xz.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.report.text import report_text
from tools.paths import DATA, DOCS

PAGES = DOCS / "verdicts"
_BLOCK = re.compile(r"(<!-- begin report (\S+) -->\n).*?(<!-- end report -->)", re.DOTALL)


def recordings(page: str) -> list[str]:
    """The names of the recordings whose reports `page` shows."""
    return [name for _, name, _ in _BLOCK.findall(page)]


def with_reports(page: str) -> str:
    """`page` with today's reports between its markers."""
    return _BLOCK.sub(lambda markers: f"{markers[1]}```\n{report_of(markers[2])}```\n{markers[3]}", page)


def report_of(recording: str) -> str:
    """What `titan-ckpt debug` prints of `recording`, but for the age, which changes by the day."""
    with _folder(recording) as folder:
        evidence = open_run(str(folder))
        return report_text(evidence, diagnose(evidence))


@contextmanager
def _folder(recording: str) -> Iterator[Path]:
    """The recording's folder; unpacked for the time if it is in the archive."""
    if (DATA / recording).is_dir():
        yield DATA / recording
        return
    with TemporaryDirectory() as folder, tarfile.open(DATA / "incidents.tar.xz") as archive:
        members = [member for member in archive if member.name.startswith(f"{recording}/")]
        archive.extractall(folder, members, filter="data")
        yield Path(folder) / recording
