"""Find, list and open the checkpoints of a run. No torch.

The newest checkpoint is the newest one that is committed, resumable and whole: COMMIT agrees with the manifest, and every file
is there with its size. A damaged one is logged, then skipped or refused as the caller asks. Only proof makes one damaged: the
store answered, twice, and what it answered is wrong. An error of the store is raised, never taken for damage or absence.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass

from titan_ckpt.arguments import check_type
from titan_ckpt.checkpoint import foreign_formats
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.foreign_files import check_own_files
from titan_ckpt.checkpoint.kinds import CheckpointKind, CheckpointState, OnDamage
from titan_ckpt.checkpoint.nearby import nearby
from titan_ckpt.errors import (
    CheckpointError,
    DamagedError,
    NewerFormatError,
    NotCommittedError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from titan_ckpt.format.commit import Commit, read_commit
from titan_ckpt.format.dcp_read import read_dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import DIGEST_BYTES, FileEntry, Manifest
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.format.names import (
    DIGESTS,
    MANIFEST,
    METADATA,
    check_step,
    foreign_folders,
    is_attempt,
    parse_foreign_step,
    parse_step,
    step_folder,
)
from titan_ckpt.format.own_step import read_index
from titan_ckpt.location import Location, StrPath, join, local_path, parse_location, scheme
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import HungStoreError

log = logging.getLogger(__name__)
HUGGING_FACE = "config.json"
LOOKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A step of a run as `ls` shows it. `problem` is the reason for a `state` other than committed."""

    step: int
    state: CheckpointState
    problem: str = ""
    commit: Commit | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether training can resume from it: committed, and not a model-only export."""
        return (
            self.state == CheckpointState.COMMITTED
            and self.commit is not None
            and self.commit.kind == CheckpointKind.FULL
        )


def list_checkpoints(url: StrPath | Store, *, storage_options: Options = None) -> list[CheckpointInfo]:
    """Every step of a run, oldest first; empty if the run does not exist. Cheap: reads COMMIT files, no manifests.

    A COMMIT that the store refuses to read makes its step "unreadable". StoreError for a failure that may pass.
    """
    with using(storage_options, url):
        store = url if isinstance(url, Store) else open_store(url)
    return [_info(store, step) for step in _steps(store)]


def as_checkpoint(value: Checkpoint | StrPath | Store, storage_options: Options = None) -> Checkpoint:
    """`value`, or the checkpoint at the URL or in the store that it is. UsageError for another type."""
    if isinstance(value, Checkpoint):
        with using(storage_options, value):  # refuses options for what is open
            return value
    check_type(
        value,
        "checkpoint",
        str,
        os.PathLike,
        Store,
        hint="an open Checkpoint, or URL[@STEP] as text or as a pathlib.Path",
    )
    return open_checkpoint(value, storage_options=storage_options)


def open_checkpoint(
    url: StrPath | Store, *, step: int | None = None, store: Store | None = None, on_damage: OnDamage | str = OnDamage.FALL_BACK,
    storage_options: Options = None,
) -> Checkpoint:  # fmt: skip
    """Open `url[@STEP]`; without a step, the newest checkpoint that is committed, resumable and whole.

    `url` may be the run's store itself (`open_store`), or its URL with that `store` beside it. Also opens a foreign DCP
    checkpoint (a folder with `.metadata` and no COMMIT, or a run of such folders, `step-N` or `iter_N`) with kind `foreign`, and
    a Hugging Face model (a folder with config.json) as a model-only checkpoint of step 0.
    NotCommittedError if there is nothing to open. DamagedError if the step asked for is damaged, if no step is whole, or if the
    newest is damaged and `on_damage` is "error"; "fall_back" logs the damage and opens the one before. A checkpoint written by a
    later release is never skipped: NewerFormatError. StoreError if the store fails: an older checkpoint is never opened because
    of that.
    """
    on_damage = OnDamage.parse(on_damage, "on_damage")
    location = Location(url=url.url) if isinstance(url, Store) else parse_location(url)
    store = url if isinstance(url, Store) and store is None else store
    check_type(store, "store", Store, or_none=True, hint="what open_store(url) returns")
    if step is not None:
        step = check_step(step)
        if location.step not in (None, step):
            raise UsageError(f"{location}: names step {location.step}, but step={step} was given as well; give one")
    wanted = location.step if step is None else step
    with using(storage_options, url if store is None else store):
        return _open(store or open_store(location.url), location.url, wanted, on_damage)


def _open(store: Store, url: str, wanted: int | None, on_damage: OnDamage) -> Checkpoint:
    """Step `wanted`, or the newest whole checkpoint."""
    if wanted is not None:
        return _open_step(store, url, wanted)
    problems: list[str] = []
    for _ in range(LOOKS):
        steps, problems = _steps(store), []
        found = _newest_whole(store, url, steps, problems, on_damage)
        if found is not None and found.step == steps[-1]:
            return found
        if (
            _steps(store)[-1:] == steps[-1:]
        ):  # otherwise a save has committed, and retention may have deleted what was looked at
            return found or _last_resort(store, url, problems)
    raise NotCommittedError(f"{store}: new checkpoints appear faster than one can be opened; name a step: URL@STEP")


def _newest_whole(
    store: Store, url: str, steps: list[int], problems: list[str], on_damage: OnDamage
) -> Checkpoint | None:
    """The newest resumable checkpoint of `steps` that is whole; what is damaged is logged and added to `problems`."""
    for step in reversed(steps):
        try:
            found = _open_resumable(store, url, step)
        except NotCommittedError:
            continue
        except CheckpointError as error:
            if on_damage == OnDamage.ERROR or isinstance(error, NewerFormatError):
                raise
            log.error("%s@%d is damaged and was skipped: %s", store, step, error)
            problems.append(f"step {step}: {error}")
            continue
        if found is not None:
            return found
    return None


def _open_resumable(store: Store, url: str, step: int) -> Checkpoint | None:
    """Open a step, None if it is an export. Damage is believed when a second look finds it too.

    Meanwhile a writer may have replaced the commit and retention deleted what it named, or the network garbled an answer.
    """
    for is_last in (False, True):
        try:
            commit = read_commit(store, step)
            return _open_commit(store, url, commit) if commit.kind == CheckpointKind.FULL else None
        except (NotCommittedError, NewerFormatError):
            raise
        except CheckpointError:
            if is_last:
                raise
    raise AssertionError("unreachable: the last look returns or raises")


def _last_resort(store: Store, url: str, problems: list[str]) -> Checkpoint:
    """Without a resumable checkpoint: open a foreign or model-only one. DamagedError for `problems`, else NotCommittedError."""
    if store.exists(METADATA):
        return _open_foreign(store, url, folder="", step=_foreign_step(url))
    for info in reversed(list_checkpoints(store)):
        if info.state == CheckpointState.COMMITTED and info.commit is not None:
            return _open_commit(store, url, info.commit)
    if others := foreign_steps(store):
        return _open_foreign(store, url, folder=others[-1][1], step=others[-1][0])
    if store.exists(HUGGING_FACE) or store.folders("snapshots"):
        return _open_hugging_face(store, url)
    if problems:
        raise DamagedError(f"{store}: no whole checkpoint here: {'; '.join(problems)}; `titan-ckpt verify` says more")
    raise NotCommittedError(f"{store}: no committed checkpoint here ({_what_is_there(store)})")


def _what_is_there(store: Store) -> str:
    steps = _steps(store)
    if steps:
        return f"steps {', '.join(map(str, steps[-3:]))} were begun but not committed"
    if scheme(store.url) == "file" and os.path.isfile(local_path(store.url)):
        return "it is a file, not the folder of a run; `titan-ckpt convert from-torch` imports a torch file"
    has_something = bool(store.folders()) or next(store.list(), None) is not None
    what = "it has no step folder" if has_something else "the folder is empty or does not exist"
    return f"{what}{nearby(store.url)}"


def _steps(store: Store) -> list[int]:
    return sorted(step for name in store.folders() if (step := parse_step(name)) is not None)


def _info(store: Store, step: int) -> CheckpointInfo:
    try:
        return CheckpointInfo(step=step, state=CheckpointState.COMMITTED, commit=read_commit(store, step))
    except NotCommittedError as error:
        return CheckpointInfo(step=step, state=CheckpointState.PARTIAL, problem=str(error))
    except NewerFormatError as error:
        return CheckpointInfo(step=step, state=CheckpointState.NEWER, problem=str(error))
    except CheckpointError as error:
        return CheckpointInfo(step=step, state=CheckpointState.DAMAGED, problem=str(error))
    except (TransientStoreError, HungStoreError):
        raise
    except StoreError as error:
        return CheckpointInfo(step=step, state=CheckpointState.UNREADABLE, problem=str(error))


def bytes_there(store: Store, info: CheckpointInfo) -> tuple[int | None, float | None]:
    """Bytes in the folder of a step without a valid COMMIT, and when the newest of them was written, in seconds since the epoch;
    None if there is nothing, or where that may not be looked at."""
    try:
        entries = list(store.list(step_folder(info.step)))
    except PermissionDeniedError:
        if info.state != CheckpointState.UNREADABLE:
            raise
        return None, None
    return sum(entry.size_bytes for entry in entries), max((entry.modified_s for entry in entries), default=None)


def _open_step(store: Store, url: str, step: int) -> Checkpoint:
    try:
        return _open_commit(store, url, read_commit(store, step))
    except NotCommittedError:
        if store.exists(f"{step_folder(step)}/{METADATA}") and not _has_attempts(store, step_folder(step)):
            return _open_foreign(store, url, folder=step_folder(step), step=step)
        for folder in foreign_folders(step):
            if store.exists(f"{folder}/{METADATA}"):
                return _open_foreign(store, url, folder=folder, step=step)
        if _foreign_step(url) == step and store.exists(METADATA):
            return _open_foreign(store, url, folder="", step=step)
        if step == 0 and store.exists(HUGGING_FACE):
            return _open_hugging_face(store, url)
        good = [info.step for info in list_checkpoints(store) if info.state == CheckpointState.COMMITTED]
        none = f"no step of this run is committed{nearby(store.url)}"
        hint = f"committed steps: {', '.join(map(str, good[-5:]))}" if good else none
        raise NotCommittedError(f"{store}@{step} is not committed; {hint}") from None


def foreign_steps(store: Store) -> list[tuple[int, str]]:
    """(step, folder) of foreign checkpoints named by torchtitan (`step-N`) or Megatron (`iter_N`), oldest first; opens none."""
    named = sorted((step, name) for name in store.folders() if (step := parse_foreign_step(name)) is not None)
    return [(n, name) for n, name in named if store.exists(f"{name}/{METADATA}") and not _has_attempts(store, name)]


def _has_attempts(store: Store, folder: str) -> bool:
    return any(is_attempt(name) for name in store.folders(folder))


def _open_commit(store: Store, url: str, commit: Commit) -> Checkpoint:
    manifest, folder = open_manifest(store, commit), step_folder(commit.step)
    checkpoint = Checkpoint(store=store, url=url, step=commit.step, folder=folder, manifest=manifest)
    check_files(checkpoint)
    checkpoint.prove_coverage()
    return checkpoint


def open_manifest(store: Store, commit: Commit) -> Manifest:
    """The manifest that a COMMIT names by size and digest. DamagedError if it is missing or another one."""
    path = f"{step_folder(commit.step)}/{commit.attempt}/{MANIFEST}"
    try:
        data = read_index(store, path)
    except NotFoundError as error:
        raise DamagedError(f"{store.where(path)}: named by COMMIT but missing") from error
    if len(data) != commit.manifest_size or digest(data).hex() != commit.manifest_digest:
        raise DamagedError(f"{store.where(path)}: not the manifest that COMMIT names (digest differs)")
    return decode_manifest(data, where=store.where(path), num_digests=lambda: stored_digests(store, path))


def stored_digests(store: Store, manifest_path: str) -> int:
    """Number of digests stored beside a manifest."""
    path = f"{os.path.dirname(manifest_path)}/{DIGESTS}"
    return store.stat(path).size_bytes // DIGEST_BYTES if store.exists(path) else 0


def check_files(checkpoint: Checkpoint) -> frozenset[str]:
    """Check that every data file exists with its size, with one listing per folder. DamagedError if not.

    What a listing does not show is asked for by name as well, before it counts as missing. Returns the paths of those that are
    symbolic links.
    """
    folders = {os.path.dirname(checkpoint.path(file.path)) for file in checkpoint.manifest.files}
    entries = {entry.path: entry for folder in folders for entry in checkpoint.store.list(folder)}
    listed = {
        path: entry for file in checkpoint.manifest.files if (entry := entries.get(path := checkpoint.path(file.path)))
    }
    for file in checkpoint.manifest.files:
        entry = listed.get(checkpoint.path(file.path))
        found = _size_of(checkpoint, file.path) if entry is None else entry.size_bytes
        if found != file.size_bytes:
            _confirm(checkpoint, file, found)
            where = checkpoint.store.where(checkpoint.path(file.path))
            state = "it is missing" if found is None else f"found {found} bytes"
            raise DamagedError(f"{where}: expected {file.size_bytes} bytes, {state}")
    return frozenset(path for path, entry in listed.items() if entry.is_link)


def _confirm(checkpoint: Checkpoint, file: FileEntry, stated: int | None) -> None:
    """StoreError if a file that is smaller or larger than it was saved, as the store states, is not so when it is read."""
    if stated is None:
        return
    store, path = checkpoint.store, checkpoint.path(file.path)
    if stated > file.size_bytes:
        store.read(path, stated - 1, 1)
        return
    try:
        store.read(path, file.size_bytes - 1, 1)
    except (TransientStoreError, HungStoreError):
        raise
    except StoreError:
        return  # it does end before that byte
    raise StoreError(
        f"{store.where(path)}: has {stated} bytes by its details, but byte {file.size_bytes - 1} can be read. "
        f"The store contradicts itself; try again"
    )


def _size_of(checkpoint: Checkpoint, file: str) -> int | None:
    try:
        return checkpoint.store.stat(checkpoint.path(file)).size_bytes
    except NotFoundError:
        return None


def _open_foreign(store: Store, url: str, *, folder: str, step: int) -> Checkpoint:
    prefix = f"{folder}/" if folder else ""
    check_own_files(store, [METADATA], folder=folder)
    sizes = {entry.path.removeprefix(prefix): entry.size_bytes for entry in store.list(folder)}
    where = store.where(f"{prefix}{METADATA}")
    manifest = read_dcp_metadata(read_index(store, f"{prefix}{METADATA}"), sizes=sizes, step=step, where=where)
    check_own_files(store, [file.path for file in manifest.files], folder=folder)
    checkpoint = Checkpoint(store=store, url=join(url, folder), step=step, folder=folder, manifest=manifest)
    checkpoint.prove_coverage()
    return checkpoint


def _open_hugging_face(store: Store, url: str) -> Checkpoint:
    """Open a Hugging Face model (a folder, a prefix, a hub cache's `models--...`) as a model-only checkpoint of step 0."""
    checkpoint = foreign_formats.open_hugging_face(url)
    log.debug("%s is a Hugging Face model; reading it in place", store)
    return checkpoint


def _foreign_step(url: str) -> int:
    """The step at the end of a folder name (`step-1000`), 0 if there is none."""
    match = re.search(r"([0-9]{1,15})$", url)
    return int(match.group(1)) if match else 0
