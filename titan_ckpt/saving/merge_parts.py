"""The coordinator's merge: every rank's part list into one manifest, in the order that the share fixed."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from titan_ckpt.errors import TitanError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.format.manifest import ChunkTable, FileEntry, Manifest, ObjectEntry
from titan_ckpt.saving.upload import Part
from titan_ckpt.saving.writers import Share
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a manifest says that is not about bytes."""

    step: int
    attempt: str
    kind: str
    mesh: MeshSpec | None
    pipeline: Mapping[str, Any] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    assets: Mapping[str, str] = field(default_factory=dict)
    user: Mapping[str, Any] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Of what wrote a checkpoint."""
    return {
        "titan_ckpt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def created() -> str:
    """Now, in UTC, as manifests write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def merge(saved: Saved, parts: Sequence[Part], share: Share) -> Manifest:
    """The manifest of a save, `parts` in order of rank. TitanError where ranks hold different values of one name."""
    _check_objects(parts, saved.step)
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
        step=saved.step,
        attempt=saved.attempt,
        kind=saved.kind,
        created=created(),
        versions=versions(),
        mesh=saved.mesh,
        pipeline=saved.pipeline,
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
        training=saved.training,
        config=saved.config,
        assets=saved.assets,
        user=saved.user,
    )


def _global_columns(part: Part, number: Mapping[FileEntry, int]) -> Int64s:
    """The part's columns with its file numbers replaced by the manifest's."""
    columns = part.columns.copy()
    columns[:, 0] = np.array([number[file] for file in part.files] or [0], dtype=np.int64)[columns[:, 0]]
    return columns


def _check_objects(parts: Sequence[Part], step: int) -> None:
    """A value that several ranks hold must be one value; DCP would silently keep one of them."""
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, part in enumerate(parts):
        for fqn, found in part.all_object_digests.items():
            first_rank, expected = seen.setdefault(fqn, (rank, found))
            if found != expected:
                raise TitanError(
                    f"step {step}: {fqn}: the value on rank {rank} differs from the one on rank {first_rank}; "
                    f"put the rank into its name, or save one value"
                )
