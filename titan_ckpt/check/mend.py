"""Mend what can be mended without guessing: a step's `.metadata` that is not the one that was committed. No torch.

A job that lost a race for a step may have left its own (see `format.commit`). The committed one follows from the manifest and
from the keys of the nested state dict, which a `.metadata` holds; COMMIT has its digest, so a right result proves itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from titan_ckpt.checkpoint.open import open_manifest
from titan_ckpt.errors import CheckpointError, DamagedError, NotFoundError
from titan_ckpt.format.commit import Commit, metadata_path, read_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.dcp_read import dcp_paths
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.own_step import check_index, check_place
from titan_ckpt.format.structure import Path
from titan_ckpt.store.base import Store

Paths = Mapping[str, Path] | None


def mend_metadata(store: Store, step: int) -> bool:
    """Write the committed `.metadata` of a step where another one is or none; False if it was right already.

    DamagedError if it cannot be derived, AlreadyExistsError if another program's checkpoint is there; nothing is changed then.
    CheckpointError if the step cannot be opened.
    """
    path = metadata_path(step)
    try:
        version, found = store.stat(path).version, store.read(path)
    except NotFoundError:
        version, found = None, b""
    commit = read_commit(store, step)  # after the version: if a save comes between, the write below fails
    if digest(found).hex() == commit.metadata_digest:
        return False
    check_place(store, step)
    check_index(store, step, commit.metadata_digest)
    store.write_if(path, derived(open_manifest(store, commit), found, commit, where=store.where(path)), version=version)
    return True


def derived(manifest: Manifest, found: bytes, commit: Commit, *, where: str) -> bytes:
    """The `.metadata` that was committed, given the one that is there. DamagedError if it does not follow from the manifest."""
    for paths in _candidates(manifest, found):
        data = dcp_metadata(manifest, paths=paths)
        if digest(data).hex() == commit.metadata_digest:
            return data
    raise DamagedError(
        f"{where}: is not the one that was committed, and that one cannot be derived from the manifest; "
        f"titan-ckpt reads this step without it. For plain DCP readers, load it and save it again"
    )


def _candidates(manifest: Manifest, found: bytes) -> Iterator[Paths]:
    """Keys in the nested state dict: the manifest's, those of the `.metadata` that is there, names taken apart at dots.

    Releases before structures wrote all keys as text.
    """
    yield None
    with suppress(CheckpointError):
        paths = dcp_paths(found, where="the .metadata that is there")
        yield paths
        yield {name: tuple(map(str, path)) for name, path in paths.items()}
    names = [*manifest.by_fqn, *manifest.objects_by_fqn]
    for depth in (-1, 0, 1, 2, 3):
        yield {name: tuple(name.split(".", depth)) for name in names}
