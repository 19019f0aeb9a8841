"""Text that is not UTF-8: what PowerShell's `>` writes."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def as_utf8(chunks: Iterable[tuple[bytes, bool]]) -> Iterator[tuple[bytes, bool]]:
    """The chunks in UTF-8, where a byte order mark shows that they are UTF-16; else as they are.

    >>> b"".join(chunk for chunk, _ in as_utf8([(codecs.BOM_UTF16_LE + b"o", False), (b"\\0k\\0", False)]))
    b'ok'
    """
    decoder: codecs.IncrementalDecoder | None = None
    for number, (chunk, is_middle) in enumerate(chunks):
        if number == 0 and (name := _MARKS.get(chunk[:2])) is not None:
            decoder, chunk = codecs.getincrementaldecoder(name)("replace"), chunk[2:]
        yield (chunk if decoder is None else decoder.decode(chunk).encode("utf-8", "replace")), is_middle
