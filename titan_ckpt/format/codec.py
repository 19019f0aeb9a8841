"""`planes-zstd`: a lossless codec for tensor bytes that supports ranged reads.

The raw payload is split into pieces of FRAME_BYTES. Each is reordered into byte planes (all first bytes of its elements, all
second bytes, ...), which groups the exponents, and compressed into one zstd frame. The frames are followed by their lengths, 4
bytes each. A blob is `header | prefix | suffix | frames | lengths`: prefix and suffix are the raw blob's, so that a DCP extension
can rebuild the blob that plain DCP expects.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import zstandard

from titan_ckpt.errors import DamagedError
from titan_ckpt.format.manifest import RAW
from titan_ckpt.format.torch_blob import Envelope
from titan_ckpt.store.base import Store

PLANES_ZSTD = "planes-zstd"
CODECS = (RAW, PLANES_ZSTD)
FRAME_BYTES = 1 << 20
LEVEL = 1
_HEADER = struct.Struct("<8sIIQI")
MAGIC = b"TCKPLZ1\0"
"""The first bytes of every encoded blob."""


def encode_head(envelope: Envelope, itemsize: int) -> bytes:
    """The bytes of a blob before its frames."""
    header = _HEADER.pack(MAGIC, len(envelope.prefix), len(envelope.suffix), envelope.payload_length, itemsize)
    return header + envelope.prefix + envelope.suffix


def encode(payload: memoryview, itemsize: int) -> Iterator[bytes]:
    """The frames, then their lengths."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    lengths = []
    for start in range(0, len(payload), FRAME_BYTES):
        raw = np.frombuffer(payload[start : start + FRAME_BYTES], dtype=np.uint8)
        packed = compressor.compress(np.ascontiguousarray(raw.reshape(-1, itemsize).T).data)
        lengths.append(len(packed))
        yield packed
    yield struct.pack(f"<{len(lengths)}I", *lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPayload:
    """Frames and their lengths: bytes `[start, start + length)` of an object, which decode to `raw_length` bytes."""

    path: str
    start: int
    length: int
    raw_length: int
    itemsize: int


def read_raw(store: Store, payload: EncodedPayload, first: int, out: memoryview) -> None:
    """Fill `out` with raw bytes of `payload` from byte `first` on; reads only the frames that it needs.

    DamagedError if the stored bytes are not frames of these lengths.
    """
    if len(out) == 0:
        return
    where = f"{store.where(payload.path)}: bytes {payload.start} to {payload.start + payload.length}"
    starts = _frame_starts(store, payload, where)
    low, high = first // FRAME_BYTES, -(-(first + len(out)) // FRAME_BYTES)
    stored = memoryview(store.read(payload.path, payload.start + starts[low], starts[high] - starts[low]))
    for number in range(low, high):
        frame = stored[starts[number] - starts[low] : starts[number + 1] - starts[low]]
        size = min(FRAME_BYTES, payload.raw_length - number * FRAME_BYTES)
        raw = _decode_frame(frame, size, payload.itemsize, where)
        begin = max(first, number * FRAME_BYTES)
        end = min(first + len(out), number * FRAME_BYTES + size)
        out[begin - first : end - first] = raw[begin - number * FRAME_BYTES : end - number * FRAME_BYTES]


def decode_blob(blob: bytes, where: str) -> bytes:
    """Decode an encoded blob to the raw one that plain torch reads."""
    try:
        magic, prefix_length, suffix_length, raw_length, itemsize = _HEADER.unpack_from(blob)
    except struct.error as error:
        raise DamagedError(f"{where}: too short for an encoded tensor") from error
    if magic != MAGIC:
        raise DamagedError(f"{where}: not a tensor encoded by {PLANES_ZSTD}")
    body = _HEADER.size + prefix_length
    count = -(-raw_length // FRAME_BYTES)
    payload = memoryview(blob)[body + suffix_length :]
    if not itemsize or raw_length % itemsize or 4 * count > len(payload):
        raise DamagedError(f"{where}: {len(payload)} bytes cannot hold {raw_length} raw bytes")
    starts = _accumulate(bytes(payload[len(payload) - 4 * count :]), len(payload), where)
    raw = b"".join(
        _decode_frame(
            payload[starts[n] : starts[n + 1]], min(FRAME_BYTES, raw_length - n * FRAME_BYTES), itemsize, where
        )
        for n in range(count)
    )
    return blob[_HEADER.size : body] + raw + blob[body : body + suffix_length]


def _frame_starts(store: Store, payload: EncodedPayload, where: str) -> list[int]:
    size = 4 * -(-payload.raw_length // FRAME_BYTES)
    if size > payload.length:
        raise DamagedError(f"{where}: {payload.length} bytes cannot hold {payload.raw_length} raw bytes")
    return _accumulate(store.read(payload.path, payload.start + payload.length - size, size), payload.length, where)


def _accumulate(lengths: bytes, payload_length: int, where: str) -> list[int]:
    starts = [0, *accumulate(struct.unpack(f"<{len(lengths) // 4}I", lengths))]
    if starts[-1] + len(lengths) != payload_length:
        raise DamagedError(f"{where}: not what was saved: the lengths of its frames do not add up")
    return starts


def _decode_frame(frame: memoryview, size: int, itemsize: int, where: str) -> memoryview:
    try:
        # zstandard allocates the size in the frame's header, whatever `max_output_size` is.
        found = zstandard.get_frame_parameters(frame).content_size
        planes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size) if found == size else b""
    except zstandard.ZstdError as error:
        raise DamagedError(f"{where}: not what was saved: {error}") from error
    if len(planes) != size:
        raise DamagedError(f"{where}: not what was saved: a frame has {found} bytes, expected {size}")
    shuffled = np.frombuffer(planes, dtype=np.uint8).reshape(itemsize, -1)
    return memoryview(np.ascontiguousarray(shuffled.T).reshape(-1).data)
