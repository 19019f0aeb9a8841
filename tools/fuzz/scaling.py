"""How the time to read an input grows with its size: every family's reader and the redaction of text, each with dozens of shapes.

`python -m scripts.fuzz --scaling`. A finding is a shape whose time grows more than three times with each of two doublings, one
that takes more than 5 s per MB, or more memory than the reader states.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from titan_ckpt.converters.hf.safetensors_header import LENGTH_BYTES
from titan_ckpt.redaction import redact_text
from tools.fuzz.families import family
from tools.fuzz.family import Family
from tools.fuzz.hunt import measured
from tools.fuzz.shapes import Shape, archive_shapes, document_shapes, pickle_shapes, pickled, repeated, text_shapes

SIZES = (16_000, 32_000, 64_000)
MOST_GROWTH = 3.0
LEAST_S = 0.02
"""A shorter time says nothing about growth."""
REDACTION = "redaction"
_DOCUMENTS = ("manifest", "commit", "dump_json", "sidecar", "hugging_face", "tokenizer")


@dataclass(frozen=True, slots=True)
class Growth:
    """Processor seconds for each of SIZES, and what is wrong with them."""

    family: str
    shape: str
    seconds: tuple[float, ...]
    problem: str


def grow(name: str, shapes: Sequence[tuple[str, Shape]]) -> Iterator[Growth]:
    """The shapes of a family that are read too slowly, hold too much, or raise what no reader may raise."""
    fuzzed = reader(name)
    for shape, make in shapes:
        seconds, problem = [], None
        for size in SIZES:
            problem, took_s = _least(fuzzed, make(size))
            seconds.append(took_s)
            if problem is not None:
                break
        if problem is None and is_faster_than_linear(seconds):
            problem = "grows faster than linearly"
        if problem is not None:
            yield Growth(name, shape, tuple(seconds), problem)


def is_faster_than_linear(seconds: Sequence[float]) -> bool:
    """Whether each doubling takes more than MOST_GROWTH times as long, and the last long enough to be measured."""
    return seconds[-1] > LEAST_S and all(after > MOST_GROWTH * max(before, 1e-4) for before, after in pairwise(seconds))


def _least(fuzzed: Family, data: bytes) -> tuple[str | None, float]:
    found = measured(fuzzed, data)
    if found.problem is None and found.took_s > LEAST_S:
        return None, min(found.took_s, measured(fuzzed, data).took_s)
    return found.problem, found.took_s


def reader(name: str) -> Family:
    """The family, or the redaction of a text as one."""
    if name == REDACTION:
        return Family(
            name=name, seeds=list, mutate=lambda _r, data, _o: data, read=lambda data: redact_text(data.decode())
        )
    return family(name)


def shapes_of(name: str) -> Iterator[tuple[str, Shape]]:
    """Every shape of a family."""
    if name in _DOCUMENTS:
        seeds = [json.loads(seed) for seed in family(name).seeds()[:9]]
        yield from document_shapes(seeds, lambda value: json.dumps(value).encode())
    elif name == "safetensors":
        seed = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": {"format": "pt"}}
        yield from document_shapes([seed], _with_length)
    elif name == "dump":
        yield from document_shapes([json.loads(family("dump_json").seeds()[0])], pickled)
        yield from pickle_shapes()
    elif name in ("metadata", "torch_file"):
        yield from pickle_shapes()
        yield from archive_shapes() if name == "torch_file" else ()
    elif name == "blob":
        yield from archive_shapes()
    elif name == "box":
        yield from _box_shapes()
    elif name == "settings":
        yield from _settings_shapes()
    elif name in ("log", REDACTION):
        yield from text_shapes()


SCALED = (
    "manifest", "commit", "metadata", "blob", "dump", "dump_json", "box", "sidecar", "log", "safetensors", "torch_file",
    "hugging_face", "tokenizer", "settings", REDACTION,
)  # fmt: skip


def _with_length(value: object) -> bytes:
    text = json.dumps(value).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + bytes(4)


def _box_shapes() -> Iterator[tuple[str, Shape]]:
    from tools.fuzz.evidence import boxes, with_text

    box = boxes()[0][1]
    lines: dict[str, Callable[[int], str]] = {
        "operations": lambda i: f'["op",{i},"all_reduce{i}"]',
        "one operation": lambda _: '["op",0,"all_reduce"]',
        "groups": lambda i: f'["group",{i},["{i}","d",[{i}]]]',
        "groups of a range": lambda i: f'["group",{i},["{i}","d",{{"from":0,"to":1000,"by":1}}]]',
        "groups of a long range": lambda i: f'["group",{i},["{i}","d",{{"from":0,"to":1000000,"by":1}}]]',
        "groups of huge ranks": lambda i: f'["group",{i},["{i}","d",[{10**30 + i}]]]',
        "sites": lambda i: f'["site",{i},[["a.py",{i},"f"]]]',
        "far keys": lambda i: f'["op",{i * 1000},"x"]',
        "nothing": lambda _: "",
        "brackets": lambda _: "[[[[",
        "huge line numbers": lambda i: f'["site",{i},[["a.py",{10**30},"f"]]]',
    }
    for name, line in lines.items():
        yield name, _lines_in(box, line)
    yield "a group of many ranks", lambda n: with_text(box, f'["group",0,["0","d",{list(range(n // 7))}]]'.encode())
    yield (
        "a long call stack",
        lambda n: with_text(box, json.dumps(["site", 0, [["a", i, "f"] for i in range(n // 16)]]).encode()),
    )


def _lines_in(box: bytes, line: Callable[[int], str]) -> Shape:
    from tools.fuzz.evidence import with_text

    return lambda n: with_text(box, "\n".join(map(line, range(n // (len(line(1)) + 1)))).encode())


def _settings_shapes() -> Iterator[tuple[str, Shape]]:
    table = b'rules [placements]\n"a" = '
    yield "mesh: axes", lambda n: b"mesh " + b"tp=1," * (n // 5)
    yield "mesh: digits", lambda n: b"mesh tp=" + b"9" * n
    yield "mesh: spaces", lambda n: b"mesh tp=" + b" " * n
    for run in (b"/", b"@", b":", b"../", b"a/", b"step-", b"1", b"%41", b"?a=b&", b"://"):
        yield f"place: {run!r}", repeated(run, b"place ")
        yield f"place: s3 {run!r}", repeated(run, b"place s3://bucket/")
    yield (
        "rules: many",
        lambda n: b"rules [placements]\n" + b"".join(b'"*.w%d" = ["tp:1"]\n' % i for i in range(n // 20)),
    )
    yield "rules: axes", lambda n: table + b"[" + b'"tp:1",' * (n // 7) + b"]"
    yield "rules: brackets", lambda n: table + b"[" * n
    yield "rules: hex digits", lambda n: table + b"0x" + b"f" * n
    yield "rules: hex digits in a list", lambda n: table + b"[0x" + b"f" * n + b"]"
    yield "rules: decimal digits", lambda n: table + b"9" * n
    yield "rules: tables", lambda n: b"rules " + b"".join(b"[a%d]\n" % i for i in range(n // 8))
    yield "rules: dotted", lambda n: b"rules " + b"a." * (n // 2) + b"a = 1"
    yield "rules: stars", lambda n: b'rules [placements]\n"' + b"*a" * (n // 2) + b'" = []'
    yield "rules: inline tables", lambda n: table + b"{a=" * (n // 3)
    yield "lines: names", lambda n: b"lines " + b"".join(b'{"a%d":1}\n' % (i % 999) for i in range(n // 11))
    yield "lines: steps", lambda n: b"lines " + b"".join(b'{"step":%d,"loss":1}\n' % i for i in range(n // 24))
    yield "lines: names at once", lambda n: b"lines {" + b",".join(b'"a%d":1' % i for i in range(n // 9)) + b"}"
    yield "lines: empty", lambda n: b"lines " + b"\n" * n
    yield "lines: brackets", lambda n: b"lines " + b"[\n" * (n // 2)
    yield "lines: a long bracket", lambda n: b"lines " + b"[" * n


def run_scaling(names: Sequence[str]) -> Iterator[tuple[str, int, float, list[Growth]]]:
    """For each family: its name, shapes, processor seconds, and findings."""
    for name in names:
        started, shapes = time.process_time(), list(shapes_of(name))
        found = list(grow(name, shapes))
        yield name, len(shapes), time.process_time() - started, found
