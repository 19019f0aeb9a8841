"""Bytes that others wrote are parsed in one room, within bounds; every other call of a parser is listed here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.paths import ROOT

PARSERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "pickle": {"load", "loads", "Unpickler"},
    "tomllib": {"load", "loads"},
    "marshal": {"load", "loads"},
    "torch": {"load"},
    "zipfile": {"ZipFile"},
    "tarfile": {"open", "TarFile"},
    "gzip": {"open", "decompress", "GzipFile"},
    "bz2": {"open", "decompress"},
    "lzma": {"open", "decompress"},
    "zlib": {"decompress", "decompressobj"},
    "zstandard": {"ZstdDecompressor", "decompress", "open"},
    "ast": {"literal_eval"},
    "configparser": {"ConfigParser"},
    "csv": {"reader", "DictReader"},
    "yaml": {"load", "safe_load"},
    "ElementTree": {"parse", "fromstring", "XML"},
}
ALLOWED = {
    ("trainer/data/records.py", "tarfile.open"): "read as a stream, member by member; nothing is written to disk",
    ("titan_ckpt/store/clients/s3_names.py", "json.loads"): "an option that the user gave for this call or command",
    ("titan_ckpt/cli/examine/torch_runtime.py", "json.loads"): "what a child of this process printed",
    (
        "titan_ckpt/toml_text.py",
        "tomllib.loads",
    ): "within its bounds; below all rooms, since the trainer and rules read it",
    ("titan_ckpt/saving/apart/child.py", "pickle.loads"): "an error that this process pickled in the same line",
    ("titan_ckpt/dcp/storage.py", "pickle.loads"): "bytes that this process has just made from a checked manifest",
    ("titan_ckpt/format/dcp_read.py", "pickle.Unpickler"): "after check_pickle; accepts DCP's records alone",
    ("titan_ckpt/format/foreign_blob.py", "pickle.Unpickler"): "after check_pickle; accepts a tensor's records alone",
    (
        "titan_ckpt/format/foreign_blob.py",
        "zipfile.ZipFile",
    ): "of a blob; its directory, records and sizes are bounded there",
    (
        "titan_ckpt/format/codec.py",
        "zstandard.ZstdDecompressor",
    ): "the frame's size must be the one that the manifest gives",
    (
        "titan_ckpt/format/manifest_json.py",
        "zstandard.ZstdDecompressor",
    ): "the frame's size must be the one that tensors need",
    ("converters/torch_file.py", "torch.load"): "after check_torch_file, weights only",
    ("debug/read/archives/members.py", "zipfile.ZipFile"): "its directory is bounded; members are streamed and counted",
    ("debug/read/reports/exports.py", "csv.reader"): "of a file within the bound of evidence; a field within csv's own",
    ("debug/read/plain_pickle.py", "pickle.Unpickler"): "after check_pickle; refuses every class",
    ("debug/record/progress.py", "json.loads"): "torch's own answer in this process",
    (
        "trainer/launch/compile_cache.py",
        "tarfile.open",
    ): "names and types of members are checked, and their sum is bounded",
    ("trainer/launch/compile_cache.py", "zstandard.ZstdDecompressor"): "streamed; the default window is 128 MB",
    ("trainer/data/corpus.py", "gzip.GzipFile"): "a corpus, streamed",
    ("trainer/data/corpus.py", "zstandard.ZstdDecompressor"): "a corpus, streamed; the default window is 128 MB",
}


def _calls() -> Iterator[tuple[str, str]]:
    folders = [ROOT / name for name in ("titan_ckpt", "debug", "converters", "trainer", "tui")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        if where.startswith("titan_ckpt/parsing/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.attr in PARSERS.get(node.value.id, ()):
                    yield where, f"{node.value.id}.{node.attr}"
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = node.module.rpartition(".")[2]
                yield from ((where, f"{module}.{n.name}") for n in node.names if n.name in PARSERS.get(module, ()))


def test_every_parser_outside_the_room_has_a_reason() -> None:
    assert set(_calls()) == set(ALLOWED)
