"""Merge every rank's part into one manifest, in the order that the share defines. Runs on the coordinator."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from titan_ckpt.errors import TitanError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import ChunkTable, FileEntry, Manifest, ObjectEntry
from titan_ckpt.saving.options import SaveAttempt
from titan_ckpt.saving.replicas import compare_copies
from titan_ckpt.saving.upload import RankPart
from titan_ckpt.saving.writers import Share
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.version import __version__


def versions() -> dict[str, str]:
    """Versions recorded in the manifest."""
    return {
        "titan_ckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def created() -> str:
    """The current UTC time in the manifest's format."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def merge_parts(attempt: SaveAttempt, parts: Sequence[RankPart], share: Share) -> Manifest:
    """The manifest of a save; `parts` in rank order. TitanError if ranks have different values under one name."""
    request = attempt.request
    _check_objects(parts, attempt.step)
    compare_copies(share.buckets, [part.copy_digests for part in parts], attempt.step)
    files = sorted(dict.fromkeys(file for part in parts for file in part.files), key=lambda file: file.path)
    number = {file: n for n, file in enumerate(files)}
    columns = np.concatenate([_global_columns(part, number) for part in parts])[share.rows].T
    digests = np.frombuffer(b"".join(part.digests for part in parts), dtype="V16")[share.rows].tobytes()
    objects = [
        ObjectEntry(fqn=o.fqn, file=part.files[0].path, offset=o.offset, length=o.length, digest=o.digest)
        for part in parts
        for o in part.objects
    ]
    return Manifest(
        step=attempt.step,
        attempt=attempt.name,
        kind=request.kind,
        created=created(),
        versions=versions(),
        mesh=attempt.mesh,
        pipeline=attempt.pipeline,
        tensors=share.tensors,
        chunks=ChunkTable(
            file=columns[0],
            offset=columns[1],
            length=columns[2],
            payload_offset=columns[3],
            payload_length=columns[4],
            codec=columns[5],
            box_offsets=share.box_offsets,
            box_sizes=share.box_sizes,
            digests=digests,
        ),
        codecs=CODECS,
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
        files=tuple(files),
        training=request.training or {},
        config=request.config or {},
        assets={name: digest(data).hex() for name, data in (request.assets or {}).items()},
        user=request.user or {},
        structure=share.structure,
    )


def _global_columns(part: RankPart, number: Mapping[FileEntry, int]) -> Int64s:
    """The part's columns with the manifest's file numbers in place of its own."""
    columns = part.columns.copy()
    columns[:, 0] = np.array([number[file] for file in part.files] or [0], dtype=np.int64)[columns[:, 0]]
    return columns


def _check_objects(parts: Sequence[RankPart], step: int) -> None:
    """A value that several ranks have must be the same on all of them; DCP would silently keep one."""
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, part in enumerate(parts):
        for fqn, found in part.all_object_digests.items():
            first_rank, expected = seen.setdefault(fqn, (rank, found))
            if found != expected:
                raise TitanError(
                    f"step {step}: {fqn}: the value on rank {rank} differs from the one on rank {first_rank}; "
                    f"put the rank into its name, or save one value"
                )
