"""`titan-ckpt inspect`: the mesh, tensors, values and files of one checkpoint. No torch."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.command import Command, add_json_flag
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import format_table, write_json, write_text
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import UsageError
from titan_ckpt.format.manifest import TensorEntry
from titan_ckpt.sharding.placement import format_placements

EPILOG = """\
examples:
  titan-ckpt inspect runs/tiny
  titan-ckpt inspect s3://bucket/run@1200 'model.layers.0.*'
  titan-ckpt inspect runs/tiny@20 --files --json
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("url", metavar="URL[@STEP]", help="a checkpoint; without a step the newest resumable one")
    parser.add_argument("glob", nargs="?", default="*", help="show only tensors and values whose name matches")
    parser.add_argument("--files", action="store_true", help="list the data files too")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Show the checkpoint as text or JSON."""
    checkpoint = open_checkpoint(arguments.url)
    tensors = [t for t in checkpoint.manifest.tensors if fnmatchcase(t.fqn, arguments.glob)]
    objects = [o.fqn for o in checkpoint.manifest.objects if fnmatchcase(o.fqn, arguments.glob)]
    if arguments.glob != "*" and not tensors and not objects:
        raise UsageError(f"{checkpoint}: no tensor or value matches {arguments.glob!r}")
    if arguments.json:
        write_json(_facts(checkpoint, tensors, objects))
    else:
        write_text(_text(checkpoint, tensors, objects, has_files=arguments.files))
    return 0


def _facts(checkpoint: Checkpoint, tensors: Sequence[TensorEntry], objects: Sequence[str]) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "url": str(checkpoint),
        "step": manifest.step,
        "kind": manifest.kind,
        "attempt": manifest.attempt,
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "mesh": None if manifest.mesh is None else dict(manifest.mesh.items()),
        "world_size": None if manifest.mesh is None else manifest.mesh.world_size,
        "training": dict(manifest.training),
        "user": dict(manifest.user),
        "assets": sorted(manifest.assets),
        "tensors": [_tensor_facts(checkpoint, tensor) for tensor in tensors],
        "objects": list(objects),
        "files": [
            {"path": f.path, "size_bytes": f.size_bytes, "xxh3_128": f.digest.hex() if f.digest else None}
            for f in manifest.files
        ],
    }


def _tensor_facts(checkpoint: Checkpoint, tensor: TensorEntry) -> dict[str, Any]:
    rows = checkpoint.manifest.chunks.file[tensor.first_chunk : tensor.first_chunk + tensor.num_chunks]
    return {
        "fqn": tensor.fqn,
        "dtype": tensor.dtype,
        "global_shape": list(tensor.global_shape),
        "placements": None if tensor.placements is None else {a: s.dim for a, s in tensor.placements.items()},
        "stages": None if tensor.stages is None else list(tensor.stages),
        "size_bytes": tensor.size_bytes,
        "num_chunks": tensor.num_chunks,
        "files": [checkpoint.manifest.files[n].path for n in sorted(set(rows.tolist()))],
    }


def _text(checkpoint: Checkpoint, tensors: Sequence[TensorEntry], objects: Sequence[str], *, has_files: bool) -> str:
    manifest = checkpoint.manifest
    dtypes = Counter(tensor.dtype for tensor in manifest.tensors)
    mesh = "not recorded" if manifest.mesh is None else f"{manifest.mesh} ({manifest.mesh.world_size} ranks)"
    facts = [
        ("checkpoint", str(checkpoint)),
        ("kind", manifest.kind),
        ("created", manifest.created or "not recorded"),
        ("mesh", mesh),
        (
            "tensors",
            f"{len(manifest.tensors)}, {format_size(manifest.size_bytes)} ({', '.join(f'{n} {d}' for d, n in dtypes.items())})",
        ),
        ("values", str(len(manifest.objects))),
        ("files", f"{len(manifest.files)}, {format_size(sum(f.size_bytes for f in manifest.files))}"),
        *((f"training.{key}", str(value)) for key, value in manifest.training.items()),
        *((key, value) for key, value in manifest.versions.items()),
    ]
    lines = [format_table([], facts), "", _tensor_table(tensors)]
    if objects:
        lines += ["", "values: " + escape_line(", ".join(objects))]
    if has_files:
        rows = [[f.path, format_size(f.size_bytes), f.digest.hex() if f.digest else "-"] for f in manifest.files]
        lines += ["", format_table(["file", "size", "xxh3-128"], rows, right=["size"])]
    return "\n".join(lines)


def _tensor_table(tensors: Sequence[TensorEntry]) -> str:
    rows = [
        [
            tensor.fqn,
            tensor.dtype,
            "x".join(map(str, tensor.global_shape)) or "scalar",
            "not recorded" if tensor.placements is None else format_placements(tensor.placements),
            "-" if tensor.stages is None else ",".join(map(str, tensor.stages)),
            tensor.num_chunks,
            format_size(tensor.size_bytes),
        ]
        for tensor in tensors
    ]
    headers = ["tensor", "dtype", "shape", "placements", "stages", "chunks", "size"]
    return format_table(headers, rows, right=["chunks", "size"])


INSPECT = Command(configure=configure, run=run)
