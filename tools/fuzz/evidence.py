"""Families of what a job leaves behind: Flight Recorder dumps, black boxes, sidecars, logs, compressed files, whole incidents."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import zstandard

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, MAGIC, RECORD, TEXT_USED, TEXT_USED_AT, read_heartbeat
from titan_ckpt.debug.read.black_boxes import BoxReader
from titan_ckpt.debug.read.discovery import EvidenceFile, read_evidence_file
from titan_ckpt.debug.read.flight_recorder import parse_dump
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.read.plain_pickle import plain_loads
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.record.hooks import BoxWriter
from titan_ckpt.debug.report.as_json import report_json
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.errors import TitanError
from titan_ckpt.tui.data.content import LogFile
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.index import load_logs
from titan_ckpt.tui.data.logs.lines import scan
from tools.fuzz.family import Family
from tools.fuzz.memory_store import MemoryStore
from tools.fuzz.mutate import mutate_bytes, mutate_json, mutate_pickle, mutate_text
from tools.paths import DATA, INCIDENTS

MAX_FILES = 12
SMALL = 1 << 16
MAX_REPEATED = 1 << 22  # of a packed file: each repetition may be repeated again


def _files(pattern: str, most: int = 24) -> list[bytes]:
    """Small recorded files, unpacked, spread over the incidents."""
    found = [path for path in sorted(DATA.rglob(pattern)) if path.stat().st_size < SMALL]
    content = [path.read_bytes() for path in found[:: max(1, len(found) // most)]]
    unpack = zstandard.ZstdDecompressor()
    return [unpack.stream_reader(data).read() if pattern.endswith(".zst") else data for data in content]


def _dumps() -> list[bytes]:
    bare = [path.read_bytes() for path in sorted(INCIDENTS.glob("*/rank_0"))]
    return [*_files("*.pickle.zst", 8), *(data for data in bare if len(data) < SMALL)]


def mutate_dump(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a pickled dump: as a pickle, or as the values in it."""
    if rng.random() < 0.5:
        return mutate_pickle(rng, data, others)
    try:
        changed = json.loads(mutate_json(rng, json.dumps(plain_loads(data)).encode(), ()))
        return pickle.dumps(_with_tuples(changed) if rng.random() < 0.3 else changed, protocol=rng.choice((2, 3, 4, 5)))
    # MemoryError: lists that hold one another by reference grow without end.
    except (ValueError, TypeError, TitanError, RecursionError, MemoryError):
        return mutate_pickle(rng, data, others)


def _with_tuples(value: Any) -> Any:
    """Lists as tuples, as torch writes shapes and names of groups."""
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _read_dump(data: bytes) -> None:
    parse_dump(data, 0, Interner())


@cache
def boxes() -> tuple[tuple[str, bytes], ...]:
    """Black boxes of four ranks; rank 2 lacks the last operation."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(4):
            box = BoxWriter(Path(folder) / f"rank_{rank:05d}.box", rank=rank, world_size=4, capacity=64)
            box.add_text("op", 0, "all_reduce")
            box.add_text("dtype", 0, "Float")
            box.add_text("group", 0, ["0", "default_pg", [0, 1, 2, 3]])
            box.add_text("group", 1, ["1", "dp", {"from": 0, "to": 3, "by": 1}])
            box.add_text("site", 1, [["/srv/train.py", 10, "step"], ["/srv/train.py", 99, "main"]])
            for number in range(1, 80 - (rank == 2)):
                slot = HEADER_BYTES + ((number - 1) % 64) * RECORD.size
                RECORD.pack_into(box.map, slot, number, number + 1, 8, number, 1, -1, 0, 0, 0, 0, 1, number)
            found.append((box.path.name, bytes(box.map)[: HEADER_BYTES + 64 * RECORD.size + 1024]))
            box.map.close()
    return tuple(found)


_TEXT_AT = HEADER_BYTES + 64 * RECORD.size


def mutate_box(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a black box: its header and ring as bytes, its text as JSON lines."""
    if rng.random() < 0.5 or len(data) <= _TEXT_AT:
        return mutate_bytes(rng, data, others)
    lines = [line for line in data[_TEXT_AT:].rstrip(b"\0").split(b"\n") if line] or [b'["op",0,"x"]']
    at = rng.randrange(len(lines))
    lines[at] = mutate_json(rng, lines[at], lines)
    return with_text(data, b"\n".join(lines) + b"\n")


def with_text(box: bytes, text: bytes) -> bytes:
    """A black box with other JSON lines after its ring."""
    head = bytearray(box[:_TEXT_AT])
    TEXT_USED.pack_into(head, TEXT_USED_AT, len(text))
    return bytes(head) + text


def _read_box(data: bytes) -> None:
    reader = BoxReader(Interner())
    if len(data) >= HEADER_BYTES and data.startswith(MAGIC):
        read_heartbeat(data[:HEADER_BYTES], "box")
    with suppress(ValueError, TitanError):
        reader.parse(data, "box")
    reader.finish([reader.read_tail(MemoryStore({"box": data}), "box", 32)], 32)


def _sidecars() -> list[bytes]:
    exits = {
        "titan_ckpt": "exits", "world_size": 2, "code": 1, "processes": [{"rank": 0, "state": "S"}],
        "exits": [{"rank": 1, "code": -9, "pid": 7, "was_told": False, "time_s": 1.5, "is_first": True}],
    }  # fmt: skip
    error = {
        "titan_ckpt": "error",
        "rank": 0,
        "type": "E",
        "message": "m",
        "time_s": 1.5,
        "frames": [["f", 1, "g", ""]],
    }
    return [json.dumps(exits).encode(), json.dumps(error).encode(), *_files("*.sidecar.json", 6)]


def _read_sidecar(data: bytes) -> None:
    log = b"2026-01-01 00:00:00 step 3\nTraceback (most recent call last)\nValueError: x\n"
    store = MemoryStore({"rank_00000.sidecar.json": data, "rank_00000.log": log, "exits.json": data})
    run = open_run("memory://fuzz", store=store)
    verdicts = diagnose(run)
    report_text(run, verdicts).encode()
    json.dumps(report_json(run, verdicts), allow_nan=False)


def _logs() -> list[bytes]:
    return [*_files("*.log", 20), *_files("*.stacks", 6)]


def _read_log(data: bytes) -> None:
    """As the log of a rank, as that of a launcher, as stacks, and as the log screen reads it."""
    parse_stacks(data.decode("utf-8", "replace"), "log", "")
    scan(data)
    for name in ("rank_00000.log", "launcher.log"):
        with suppress(TitanError):
            run = open_run("memory://fuzz", store=MemoryStore({name: data}))
            report_text(run, diagnose(run))


def _packed() -> list[bytes]:
    text = _logs()[0][:2000]
    return [b"g" + gzip.compress(text), b"z" + zstandard.compress(text), b"g" + gzip.compress(bytes(1 << 16)) * 2]


def mutate_packed(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Change a compressed file, or pack repetitions, many members, or packed data again."""
    kind = rng.randrange(5)
    if kind == 0:
        size = rng.choice((1 << 16, 1 << 22, 1 << 26))
        return rng.choice((b"g" + gzip.compress(bytes(size), 1), b"z" + zstandard.compress(bytes(size), 1)))
    if kind == 1 and len(data) <= MAX_REPEATED:
        return data[:1] + data[1:] * rng.choice((2, 50))
    if kind == 2 and len(data) <= MAX_REPEATED:
        return data[:1] + (gzip.compress(b"") if data[:1] == b"g" else zstandard.compress(b"")) * 3000 + data[1:]
    return data[:1] + mutate_bytes(rng, data[1:], [other[1:] for other in others])


def _read_packed(data: bytes) -> None:
    path = "rank_0.log" + (".gz" if data[:1] == b"g" else ".zst")
    store = MemoryStore({path: data[1:]})
    file = EvidenceFile(
        path=path, rank=0, reason="", stem="rank_0", suffix=".log", size_bytes=len(data) - 1, modified_s=0.0
    )
    for suffix in (".log", ".json"):
        with suppress(ValueError, TitanError):
            read_evidence_file(store, replace(file, suffix=suffix))
    files = LogFiles(store, (LogFile(path=path, rank=0, size_bytes=len(data) - 1),))
    try:
        load_logs(files)
    finally:
        files.close()


def _incidents() -> list[bytes]:
    _recorded()  # before reads are watched: it writes files
    return [number.to_bytes(8, "little") for number in range(8)]


@cache
def _recorded() -> list[list[tuple[str, bytes]]]:
    cases = [case for case in sorted(INCIDENTS.iterdir()) if case.is_dir()]
    return [[(path.name, path.read_bytes()) for path in sorted(case.iterdir())] for case in cases] + [list(boxes())]


def _next_incident(rng: random.Random, _data: bytes, _others: Sequence[bytes]) -> bytes:
    return rng.randbytes(8)


@lru_cache(maxsize=1)
def _incident(data: bytes) -> dict[str, bytes]:
    """Recorded files of one incident by name, some damaged, exchanged or packed as the seed in `data` says."""
    rng = random.Random(data)
    files = rng.choice(_recorded())
    return dict(
        _damaged(rng, name, original, files) for name, original in rng.sample(files, min(len(files), MAX_FILES))
    )


def _incident_bytes(data: bytes) -> int:
    return sum(map(len, _incident(data).values()))


def _read_incident(data: bytes) -> None:
    """Read and diagnose the files of the incident that `data` is the seed of."""
    run = open_run("memory://fuzz", store=MemoryStore(_incident(data)))
    verdicts = diagnose(run)
    assert verdicts, "no verdict"
    report_text(run, verdicts)
    report_json(run, verdicts)


def _damaged(rng: random.Random, name: str, data: bytes, files: Sequence[tuple[str, bytes]]) -> tuple[str, bytes]:
    if rng.random() < 0.6:
        mutate = rng.choice(
            (mutate_bytes, mutate_bytes, mutate_text, mutate_pickle if data[:1] == b"\x80" else mutate_json)
        )
        data = mutate(rng, data, ())
    if rng.random() < 0.05:
        data = rng.choice(files)[1]
    if rng.random() < 0.1:
        name, data = rng.choice(((f"{name}.gz", gzip.compress(data, 1)), (f"{name}.zst", zstandard.compress(data, 1))))
        data = mutate_bytes(rng, data, ()) if rng.random() < 0.5 else data
    return name, data


_DAMAGE = (TitanError, ValueError)
FAMILIES: dict[str, Family] = {
    found.name: found
    for found in (
        Family(name="dump", seeds=_dumps, mutate=mutate_dump, read=_read_dump, errors=_DAMAGE),
        Family(
            name="dump_json",
            seeds=lambda: _files("rank_*.json", 12),
            mutate=mutate_json,
            read=_read_dump,
            errors=_DAMAGE,
        ),
        Family(
            name="box", seeds=lambda: [data for _, data in boxes()], mutate=mutate_box, read=_read_box, errors=_DAMAGE
        ),
        Family(name="sidecar", seeds=_sidecars, mutate=mutate_json, read=_read_sidecar),
        Family(name="log", seeds=_logs, mutate=mutate_text, read=_read_log),
        Family(
            name="packed", seeds=_packed, mutate=mutate_packed, read=_read_packed, bound=lambda n: (64 << 20) + 400 * n
        ),
        Family(name="incident", seeds=_incidents, mutate=_next_incident, read=_read_incident, size=_incident_bytes),
    )
}
