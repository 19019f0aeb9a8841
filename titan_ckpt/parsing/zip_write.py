"""Write ZIP archives of stored records, as `torch.save` does, without their CRCs: PKWARE APPNOTE 6.3 (ZIP, ZIP64)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_MAX_32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A record: its name, the offset of its header, and its length."""

    name: bytes
    offset: int
    size: int


def zip_archive(records: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A ZIP archive of stored records, (name, content) each."""
    found, members = bytearray(), []
    for name, content in records:
        members.append(ZipMember(name, len(found), len(content)))
        found += local_header(name, len(content), padding=0) + content
    return bytes(found) + directory(members, len(found))


def local_header(name: bytes, size: int, *, padding: int) -> bytes:
    """The header of a stored record, with `padding` bytes of an extra field (none, or at least its 4-byte header)."""
    zip64 = size >= _MAX_32
    extra = struct.pack("<HHQQ", 1, 16, size, size) if zip64 else b""
    if padding:
        extra += struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4)
    shown = _MAX_32 if zip64 else size
    fields = (b"PK\x03\x04", 45 if zip64 else 20, 0x0800, 0, 0, 0, 0, shown, shown, len(name), len(extra))
    return struct.pack("<4sHHHHHIIIHH", *fields) + name + extra


def directory(members: list[ZipMember], start: int) -> bytes:
    """The central directory, at byte `start` of the blob, and the end records."""
    entries = b"".join(_entry(member) for member in members)
    zip64 = b""
    if start >= _MAX_32:
        record = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, len(members), len(members), len(entries), start
        )
        zip64 = record + struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
    shown = min(start, _MAX_32)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(members), len(members), len(entries), shown, 0)
    return entries + zip64 + end


def _entry(member: ZipMember) -> bytes:
    zip64 = member.size >= _MAX_32
    extra = struct.pack("<HHQQ", 1, 16, member.size, member.size) if zip64 else b""
    shown = _MAX_32 if zip64 else member.size
    version = 45 if zip64 else 20
    head = struct.pack("<4sHHHHHHIII", b"PK\x01\x02", version, version, 0x0800, 0, 0, 0, 0, shown, shown)
    return head + struct.pack("<HHHHHII", len(member.name), len(extra), 0, 0, 0, 0, member.offset) + member.name + extra
