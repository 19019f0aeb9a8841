"""Archives of evidence (.tar, also packed by gzip, zstd, xz or bzip2, and .zip), in a private folder while they are read.

Members are streamed there, so memory stays at a few MB; their number, their sizes and the ratio of compression are bounded. An
archive past a bound is dropped as a whole. Of one that is cut off or damaged, the members before that place are kept. Archives in
archives are unpacked too, DEPTH levels.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from shutil import rmtree

from titan_ckpt.debug.incident.kinds import FlagKind
from titan_ckpt.debug.incident.records import Flag
from titan_ckpt.debug.read.archives.members import Member, tar_members, zip_members
from titan_ckpt.debug.read.archives.overlay import Overlay, UnpackedFolder
from titan_ckpt.debug.read.discovery import CHUNK, MAX_FILE_BYTES, TEXT_ENDINGS, EvidenceFile
from titan_ckpt.errors import DamagedError, StoreError
from titan_ckpt.parsing.unpacking import MAX_RATIO, PACKED, UNPACKED_FREE, UnpacksTooLargeError, unpacked
from titan_ckpt.store.base import ObjectInfo, Store
from titan_ckpt.store.local import FileStore

ARCHIVES = (".tar.gz", ".tar.zst", ".tar.xz", ".tar.bz2", ".tar", ".tgz", ".zip")
MOST_MEMBERS = 100_000
MOST_BYTES = 4 << 30
DEPTH = 2
SNIFFED = 32  # members, one of which must look like evidence where other evidence is there: data come in archives, too
_OF_JOBS = re.compile(
    r"rank|(?<![a-z])logs?(?![a-z])|dump|trace|stack|stderr|stdout|console|slurm|dmesg|journal|messages|attempt_|incident"
    r"|\.(?:out|err|box|pickle|pkl)(?:\.|$)",
    re.IGNORECASE,
)


def is_archive(path: str) -> bool:
    """Whether a file's name is that of an archive."""
    return path.endswith(ARCHIVES)


def to_unpack(files: Sequence[EvidenceFile]) -> list[EvidenceFile]:
    """The archives among `files`. One that stands beside a folder of its name is taken for that folder's copy."""
    folders = {place for file in files for place in _places(file.path)}
    return [file for file in files if is_archive(file.path) and _bare(file.path) not in folders]


class _NoEvidenceError(Exception):
    """An archive holds no member that may be evidence."""


def _sniffed(members: Iterator[Member]) -> Iterator[Member]:
    """The members, if the first of them have names that evidence may have; captions and images of a data set have others."""
    is_of_job = False
    for number, member in enumerate(members):
        is_of_job = is_of_job or is_archive(member.path) or _OF_JOBS.search(member.path) is not None
        if not is_of_job and number >= SNIFFED:
            break
        yield member
    if not is_of_job:
        raise _NoEvidenceError


def _places(path: str) -> Iterator[str]:
    """The folders that a file is in."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def _bare(path: str) -> str:
    return path.removesuffix(_ending(path))


def _ending(path: str) -> str:
    return next(ending for ending in ARCHIVES if path.endswith(ending))


@contextmanager
def unpacked_archives(
    store: Store,
    archives: Sequence[EvidenceFile | ObjectInfo],
    flags: list[Flag],
    *,
    is_only: bool,
    has_others: bool = False,
) -> Iterator[Store]:
    """`store` with the members of its archives as files below the archives' names; if `is_only`, the members of one alone.
    `has_others`: there is other evidence, so an archive of data is left alone.

    What is wrong with an archive is added to `flags`. The private folder is removed at the end.
    """
    with tempfile.TemporaryDirectory(prefix="titan-ckpt-") as scratch:
        unpacking = _Unpacking(
            root=Path(scratch) / "files", spool=Path(scratch) / "spool", flags=flags, has_others=has_others
        )
        unpacking.root.mkdir()
        for archive in archives:
            unpacking.unpack(store, archive.path, archive.size_bytes, archive.path)
        unpacking.tell_left_alone()
        if is_only:
            yield UnpackedFolder(unpacking.root / archives[0].path, store.where(archives[0].path))
        else:
            yield Overlay(store, FileStore(str(unpacking.root)))


@dataclass(slots=True)
class _Unpacking:
    """Where the members of all archives go, and what these may still give."""

    root: Path
    spool: Path
    flags: list[Flag]
    has_others: bool
    left_alone: list[str] = field(default_factory=list)
    members: int = field(default_factory=lambda: MOST_MEMBERS)
    size_bytes: int = field(default_factory=lambda: MOST_BYTES)

    def unpack(self, store: Store, path: str, packed_bytes: int, shown: str, depth: int = 1) -> None:
        """The members of the archive at `path` become files in the folder `shown`."""
        left_out = Counter[str]()
        least = max(0, self.size_bytes - UNPACKED_FREE - MAX_RATIO * packed_bytes)
        before, members = self.size_bytes, self._members(store, path, packed_bytes, left_out)
        try:
            for member in _sniffed(members) if self.has_others and depth == 1 else members:
                self._take(member, shown, least, depth, left_out)
        except _NoEvidenceError:
            rmtree(self.root / shown, ignore_errors=True)
            self.size_bytes = before
            self.left_alone.append(shown)
        except (UnpacksTooLargeError, OSError) as error:
            rmtree(self.root / shown, ignore_errors=True)
            self._flag(f"not read: {error}"[:300], shown)
        except (DamagedError, StoreError) as error:
            self._flag(f"{error}"[:300], shown)
        if said := ", ".join(f"{count} {what}" for what, count in left_out.items() if count):
            self._flag(f"left out: {said}", shown)

    def tell_left_alone(self) -> None:
        """One flag for all archives of data."""
        if self.left_alone:
            more = f", as {len(self.left_alone) - 1} more are" if len(self.left_alone) > 1 else ""
            self._flag(f"left alone{more}: no member's name is one of evidence", self.left_alone[0])

    def _flag(self, text: str, shown: str) -> None:
        self.flags.append(Flag(flag=FlagKind.DUMP_CORRUPT, text=text, source=shown))

    def _members(self, store: Store, path: str, packed_bytes: int, left_out: Counter[str]) -> Iterator[Member]:
        if path.endswith(".zip"):
            return zip_members(partial(store.read, path), packed_bytes, left_out)
        ending = ".gz" if path.endswith(".tgz") else path.rpartition(".tar")[2]
        raw = (store.read(path, at, min(CHUNK, packed_bytes - at)) for at in range(0, packed_bytes, CHUNK))
        stream = unpacked(
            f"tar{ending}", raw, packed_bytes=packed_bytes, most_bytes=self.size_bytes, where="an archive"
        )
        return tar_members(stream, left_out)

    def _take(self, member: Member, shown: str, least: int, depth: int, left_out: Counter[str]) -> None:
        """Write a member, or unpack it. `least`: of `size_bytes`, what must remain."""
        self.members -= 1
        if self.members < 0:
            raise UnpacksTooLargeError(
                f"the archives hold more than {MOST_MEMBERS:,} members; unpack what you need by hand"
            )
        if member.size_bytes > MAX_FILE_BYTES and not member.path.endswith((*TEXT_ENDINGS, *PACKED, *ARCHIVES)):
            left_out["files larger than any evidence"] += 1
        elif is_archive(member.path) and depth < DEPTH:
            spool = self.spool.with_name("spool" + member.path[-len(_ending(member.path)) :])
            self._write(member, spool, least)
            within = FileStore(str(spool.parent))
            self.unpack(within, spool.name, spool.stat().st_size, f"{shown}/{member.path}", depth + 1)
            spool.unlink()
        else:
            try:
                self._write(member, self.root / shown / member.path, least)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                left_out["files where folders are"] += 1

    def _write(self, member: Member, target: Path, least: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            for piece in member.pieces:
                self.size_bytes -= len(piece)
                if self.size_bytes < least:
                    raise UnpacksTooLargeError(
                        "unpacks to more than a genuine archive would; unpack it by hand if it is one"
                    )
                file.write(piece)
        os.utime(target, (member.modified_s, member.modified_s))
