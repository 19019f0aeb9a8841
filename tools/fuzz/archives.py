"""The family of archives of evidence: tar, plain and packed, and zip, mutated in the fields of their headers."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
import zipfile
from collections.abc import Callable, Sequence

import zstandard

from titan_ckpt.debug import open_run
from titan_ckpt.debug.read.archives.unpack import ARCHIVES
from tools.fuzz.family import Family
from tools.fuzz.memory_store import MemoryStore
from tools.fuzz.mutate import mutate_bytes
from tools.paths import INCIDENTS

CASE = "skip"  # whose files the seeds hold
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.zst": zstandard.compress,
}
_BLOCK = tarfile.BLOCKSIZE
# The fields of a tar header: where each begins, and its length (POSIX ustar, GNU tar).
_FIELDS = ((0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (329, 8), (345, 155))
_VALUES = (
    b"\0", b"7" * 12, b"-1", b"\x80" + b"\xff" * 11, b"\x80" + bytes(7) + b"\x7f\xff\xff\xff", b"../../x", b"/etc/passwd",
    b"a/" * 50,
    b"x" * 100, b"K", b"L", b"x", b"g", b"S", b"1", b"2", b"3", b"5", b"\xff" * 8, b"rank_0.log", b"e.tar.gz", b"e.zip",
    b"00000000000\0",
)  # fmt: skip
_RECORDS = (
    b"size=99999999999", b"size=-5", b"size=1e308", b"size=nan", b"path=" + b"p/" * 500, b"path=../x", b"mtime=1e400",
    b"mtime=-1",
    b"path=\xff\xfe", b"size=" + b"9" * 4000, b"path=rank_0.log",
)  # fmt: skip


def _files() -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()[:2000]) for path in sorted((INCIDENTS / CASE).iterdir())[:4]]


def _tar(format: int, name: str = "") -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=format) as archive:
        for file, data in _files():
            info = tarfile.TarInfo(f"{name}{file}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def _zip(method: int, inner: bytes = b"") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for file, data in _files():
            archive.writestr(file, data)
        if inner:
            archive.writestr("inner.tar.gz", gzip.compress(inner))
    return target.getvalue()


def _seeds() -> list[bytes]:
    """An input is the number of its ending in ARCHIVES, then the archive before it is packed."""
    tars = [_tar(tarfile.USTAR_FORMAT), _tar(tarfile.GNU_FORMAT, "d/" * 80), _tar(tarfile.PAX_FORMAT, "ü" * 120)]
    zips = [_zip(zipfile.ZIP_STORED), _zip(zipfile.ZIP_DEFLATED), _zip(zipfile.ZIP_DEFLATED, tars[0])]
    plain, packed = ARCHIVES.index(".tar"), ARCHIVES.index(".tar.gz")
    return [
        *(bytes([plain]) + data for data in tars), bytes([packed]) + tars[0],
        *(bytes([ARCHIVES.index(".zip")]) + data for data in zips),
    ]  # fmt: skip


def _with_checksum(block: bytearray) -> bytes:
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _mutate_header(rng: random.Random, data: bytes) -> bytes:
    """Change fields of a header and mend its checksum, so that the change is read; or put a pax header before it."""
    at = _BLOCK * rng.randrange(max(1, len(data) // _BLOCK))
    block = bytearray(data[at : at + _BLOCK].ljust(_BLOCK, b"\0"))
    for _ in range(rng.choice((1, 1, 2, 4))):
        begin, length = rng.choice(_FIELDS)
        value = rng.choice(_VALUES)[:length]
        block[begin : begin + length] = value.ljust(length, b"\0")
    changed = _with_checksum(block)
    if rng.random() < 0.3:
        text = rng.choice(_RECORDS)
        record = b"%d %s\n" % (len(text) + 4, text)
        pax = tarfile.TarInfo("pax")
        pax.type, pax.size = rng.choice((tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE)), len(record)
        changed = pax.tobuf(tarfile.USTAR_FORMAT) + record.ljust(-(-len(record) // _BLOCK) * _BLOCK, b"\0") + changed
    return data[:at] + changed + data[at + _BLOCK :]


def _mutate(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change bytes, headers of tar, the ending, or what is at the end: a zip's directory is read from there."""
    kind = rng.randrange(6)
    if kind == 0:
        return bytes([rng.randrange(len(ARCHIVES))]) + data[1:]
    if kind <= 3 and not data[1:].startswith(b"PK"):
        return data[:1] + _mutate_header(rng, data[1:])
    if kind <= 3:
        cut = max(1, len(data) - 400)
        return data[:cut] + mutate_bytes(rng, data[cut:], ())
    return data[:1] + mutate_bytes(rng, data[1:], [other[1:] for other in others])


def _read(data: bytes) -> None:
    ending = ARCHIVES[data[0] % len(ARCHIVES)] if data else ".tar"
    packed = PACK.get(ending, bytes)(data[1:])
    open_run("memory://fuzz", store=MemoryStore({f"evidence{ending}": packed}))


FAMILIES = {
    "archive": Family(
        name="archive", seeds=_seeds, mutate=_mutate, read=_read, bound=lambda size: (64 << 20) + 400 * size
    )
}
