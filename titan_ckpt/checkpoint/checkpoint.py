"""One opened checkpoint: its manifest, and where its files, chunks and digests are. No torch until a tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_ckpt.arguments import check_type
from titan_ckpt.checkpoint.foreign_files import Recorded
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.errors import DamagedError, NotFoundError
from titan_ckpt.format.coverage import coverage_problems, describe
from titan_ckpt.format.digest import digest
from titan_ckpt.format.foreign_blob import locate_payload
from titan_ckpt.format.manifest import DIGEST_BYTES, Chunk, Manifest, TensorEntry
from titan_ckpt.format.manifest_json import digests_beside
from titan_ckpt.format.names import ASSETS, DIGESTS, MANIFEST
from titan_ckpt.format.structure import MARK
from titan_ckpt.location import redact
from titan_ckpt.sharding.placement import Box
from titan_ckpt.store.base import Store

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One committed checkpoint of a run. `folder` is relative to `store`, paths in the manifest to `folder`."""

    store: Store
    url: str = field(repr=False)
    step: int
    folder: str
    manifest: Manifest

    def __str__(self) -> str:
        return f"{redact(self.url)}@{self.step}"

    @cached_property
    def coverage_problems(self) -> dict[str, str]:
        """What is wrong with the chunks of each tensor, by FQN; empty if every element is in exactly one chunk."""
        return coverage_problems(self.manifest)

    def prove_coverage(self) -> None:
        """DamagedError unless the chunks of every tensor cover it exactly once. Whoever reads calls it first."""
        if self.coverage_problems:
            raise DamagedError(
                f"{self}: the chunks do not cover their tensors exactly once, so nothing is read from it: "
                f"{describe(self.coverage_problems)}. `titan-ckpt verify` lists every problem; take another step"
            )

    def path(self, file: str) -> str:
        """Store path of a file that the manifest names; `../step-N/...` leads to another step of the run."""
        return os.path.normpath(f"{self.folder}/{file}") if self.folder else file

    def locate(self, chunk: Chunk, *, row_major: bool = True) -> Chunk:
        """`chunk` with its payload offset known; in foreign blobs this reads the blob's headers.

        DamagedError if the chunk is not row-major and the caller cannot handle strides (`row_major`).
        """
        if chunk.payload_offset >= 0:
            return chunk
        located = self._located(chunk)
        if row_major and located.strides is not None:
            raise DamagedError(
                f"{self}: {chunk.fqn}: stored with strides {located.strides}, which only `load` can read; "
                f"load it and save it again with titan-ckpt first"
            )
        return located

    def _located(self, chunk: Chunk) -> Chunk:
        """Find the payload by the headers of its blob; subclasses override this."""
        dtype = self.manifest.by_fqn[chunk.fqn].dtype
        return locate_payload(self.store, self.path(chunk.file), chunk, dtype)

    def asset(self, name: str) -> bytes:
        """A small file saved with the checkpoint (`tokenizer.json`, ...). NotFoundError if it does not exist."""
        if name not in self.manifest.assets:
            raise NotFoundError(f"{self}: no asset {name!r}; it has {sorted(self.manifest.assets) or 'none'}")
        data = self.store.read(self.path(f"{self.manifest.attempt}/{ASSETS}/{name}"))
        if digest(data).hex() != self.manifest.assets[name]:
            raise DamagedError(f"{self}: asset {name!r} is not what was saved (digest differs)")
        return data

    @cached_property
    def digests(self) -> bytes | None:
        """xxh3-128 of every chunk's raw payload, 16 bytes each in chunk order; None if the writer stored none."""
        if self.manifest.chunks.digests is not None or self.manifest.kind == CheckpointKind.FOREIGN:
            return self.manifest.chunks.digests
        attempt = f"{self.folder}/{self.manifest.attempt}"
        expected = digests_beside(self.store.read(f"{attempt}/{MANIFEST}"), self.store.where(f"{attempt}/{MANIFEST}"))
        if expected is None:
            return None
        data = self.store.read(f"{attempt}/{DIGESTS}")
        if digest(data).hex() != expected or len(data) != DIGEST_BYTES * len(self.manifest.chunks):
            raise DamagedError(f"{self}: {DIGESTS} is not what was saved (digest differs)")
        return data

    @property
    def files_read(self) -> tuple[str, ...]:
        """Store paths of all files that loading reads, data and small ones."""
        return tuple(self.path(file.path) for file in self.manifest.files)

    def recorded(self) -> list[Recorded]:
        """Digests recorded beside the files of a format that has none; DamagedError if the record is damaged."""
        return []

    def digest_of(self, entry: TensorEntry, chunk: Chunk) -> bytes | None:
        """The digest of one chunk's raw payload: xxh3-128, or the CRC-32 of a located foreign chunk; None if there is none."""
        if chunk.digest is not None or self.digests is None:
            return chunk.digest
        offsets = self.manifest.boxes(entry)[0].tolist()
        start = (entry.first_chunk + offsets.index(list(chunk.box.offsets))) * DIGEST_BYTES
        return self.digests[start : start + DIGEST_BYTES]

    def read_all(self, prefix: str = "", *, allow: Iterable[Any] = ()) -> Any:
        """The state that was saved, with its nesting, key types and containers: all, or what is below the name `prefix`.

        Tensors are whole, in CPU memory. Old checkpoints and those of DCP record keys as text. `allow` is as of `LoadPolicy`.
        NotFoundError if nothing is below `prefix`; DamagedError and UnsafeContentError as of `read` and `load`. Needs torch.
        """
        from titan_ckpt.checkpoint.everything import read_everything  # it imports this module

        return read_everything(self, prefix, allow)

    def read(self, fqn: str, box: Box | None = None) -> torch.Tensor:
        """Read a tensor, or `box` of it (in elements of the global shape), into CPU memory in its stored dtype.

        Reads every chunk it touches whole and verifies it: DamagedError names the chunk if the digest differs. NotFoundError for
        an unknown name. A wrapper subclass (torchao's) is read whole, as `read_all` does. Needs torch.
        """
        import torch  # everything else here runs without torch

        check_type(box, "box", Box, or_none=True, hint="Box(offsets, sizes)")
        from titan_ckpt.checkpoint.read import read_whole  # codecs are slow to import, and `ls` reads no tensor

        if box is None and fqn not in self.manifest.by_fqn and f"{fqn}.{MARK}" in self.manifest.objects_by_fqn:
            made: torch.Tensor = self.read_all(fqn)
            return made
        dtype, stored = read_whole(self, fqn, box)
        flat = torch.from_numpy(stored.reshape(-1).view(np.uint8))
        return flat.view(getattr(torch, dtype)).reshape(stored.shape)
