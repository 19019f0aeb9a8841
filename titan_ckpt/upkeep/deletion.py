"""Plan and carry out the deletion of checkpoints, for retention and `prune` alike.

Nothing is deleted on the strength of "damaged", "partial" or an error. What is deleted is proved ours (`own_files`), is not
needed by any checkpoint that stays, and goes in an order that leaves every checkpoint whole or gone at every moment. If one
checkpoint of the run cannot be opened, what it refers to is unknown, so nothing is deleted at all.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from titan_ckpt.arguments import OnProgress, ignore_progress
from titan_ckpt.check.mend import mend_metadata
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.commit_proved import named_files
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.nearby import nearby
from titan_ckpt.checkpoint.open import CheckpointInfo, check_files, foreign_steps, list_checkpoints, open_manifest
from titan_ckpt.errors import CheckpointError, DamagedError, NotCommittedError, StoreError
from titan_ckpt.format.commit import commit_path, commit_version
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.names import COMMIT, MANIFEST, METADATA, UNMIRRORED, is_attempt, marks_folder, step_folder
from titan_ckpt.store.base import ObjectInfo, Store, read_if_any
from titan_ckpt.upkeep.own_files import StepFiles, files_of_step, start_of
from titan_ckpt.upkeep.references import Needs, needs
from titan_ckpt.upkeep.retention import PINS, RetentionPolicy, parse_pins, prune, why_it_stays

log = logging.getLogger(__name__)
SHOWN_NAMES = 4
MARK = b"A deletion takes files from this folder. While this file is here, saves that need one of them fail.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Objects of one step to delete, in order: COMMIT, `.metadata`, the rest. `what` describes them to the user.

    If the COMMIT is among them, `version` is the store's version of it.
    """

    what: str
    step: int
    entries: tuple[ObjectInfo, ...]
    version: str | None = None

    @property
    def size_bytes(self) -> int:
        """Total bytes."""
        return sum(entry.size_bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """What to delete, and what stays although the policy would let it go, with the reason.

    `is_blocked`: nothing may be deleted until a person has looked at the checkpoint that `kept` names. `seen` are the manifests
    whose files are not in `garbage`.
    """

    garbage: tuple[Garbage, ...] = ()
    kept: tuple[str, ...] = ()
    is_blocked: bool = False
    seen: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """A step and its manifest; `unknown` is why there is none although the step may have been committed.

    `is_linked`: a symbolic link leads to some of what it needs, which others may delete at any time.
    """

    info: CheckpointInfo
    manifest: Manifest | None = None
    unknown: str = ""
    is_linked: bool = False

    @property
    def manifest_path(self) -> str:
        assert self.manifest is not None
        return f"{step_folder(self.info.step)}/{self.manifest.attempt}/{MANIFEST}"

    def refers_to(self) -> Iterable[str]:
        return named_files(self.manifest) if self.manifest is not None else ()


def read_pins(store: Store) -> frozenset[int]:
    """The steps in the run's pins file; empty if there is no such file. StoreError if it is there but cannot be read."""
    return _read_steps(store, PINS) or frozenset()


def read_unmirrored(store: Store) -> frozenset[int]:
    """The steps whose copy to a second tier is still due; retention and `prune` keep them."""
    return find_unmirrored(store) or frozenset()


def find_unmirrored(store: Store) -> frozenset[int] | None:
    """The same; None if there is no such file."""
    return _read_steps(store, UNMIRRORED)


def _read_steps(store: Store, path: str) -> frozenset[int] | None:
    data = read_if_any(store, path)
    return None if data is None else parse_pins(data.decode(errors="replace"), where=store.where(path))


def check_whole(store: Store, url: str, info: CheckpointInfo) -> CheckpointInfo:
    """`info`, with state "damaged" if the manifest or any file of a committed checkpoint is not whole."""
    return _look(store, info, url=url).info


def _look(store: Store, info: CheckpointInfo, *, url: str = "") -> _Looked:
    if info.state == CheckpointState.PARTIAL:
        return _Looked(info=info)
    if info.commit is None:
        return _Looked(info=info, unknown=info.problem)
    try:
        manifest = open_manifest(store, info.commit)
    except CheckpointError as error:
        return _Looked(info=_damaged(info, error), unknown=str(error))
    checkpoint = _checkpoint(store, info, manifest, url=url)
    try:
        links = check_files(checkpoint)
        checkpoint.prove_coverage()
    except CheckpointError as error:
        return _Looked(info=_damaged(info, error), manifest=manifest)
    is_linked = bool(links) or any(store.is_link(path) for path in _places(info, manifest))
    return _Looked(info=info, manifest=manifest, is_linked=is_linked)


def _places(info: CheckpointInfo, manifest: Manifest) -> Iterable[str]:
    """The COMMIT of a step and the folders of its data."""
    return [commit_path(info.step), *sorted({os.path.dirname(path) for path in named_files(manifest)})]


def _with_index(store: Store, found: _Looked) -> _Looked:
    """`found`, damaged if plain DCP readers cannot open it: then it must not be the reason why one that they can open goes."""
    path = f"{step_folder(found.info.step)}/{METADATA}"
    if found.info.state != CheckpointState.COMMITTED or store.exists(path):
        return found
    problem = f"{store.where(path)}: missing; `titan-ckpt verify --fix` writes it again"
    return replace(found, info=replace(found.info, state=CheckpointState.DAMAGED, problem=problem))


def _damaged(info: CheckpointInfo, error: CheckpointError) -> CheckpointInfo:
    return replace(info, state=CheckpointState.DAMAGED, problem=str(error))


def _checkpoint(store: Store, info: CheckpointInfo, manifest: Manifest, *, url: str = "") -> Checkpoint:
    folder = step_folder(info.step)
    return Checkpoint(store=store, url=url or store.url, step=info.step, folder=folder, manifest=manifest)


def _what_else(store: Store) -> str:
    """What stands in a run that holds no checkpoint of ours."""
    names = ", ".join(name for _, name in foreign_steps(store)[-3:])
    if not names:
        return f"no checkpoint here{nearby(store.url) or '; check the URL'}"
    return f"only checkpoints of torch or another library ({names}), which titan-ckpt does not delete; do so by hand"


def plan_removal(
    store: Store, policy: RetentionPolicy, *, now_s: float, on_read: OnProgress = ignore_progress
) -> RemovalPlan:
    """What `policy` deletes from a run, at the time `now_s`; deletes nothing. `on_read` hears of each checkpoint that was opened.

    Every checkpoint is opened first: only a whole one counts as kept, and none to which symbolic links lead. NotCommittedError if
    the run has no step; StoreError if anything could not be listed or read.
    """
    if not (infos := list_checkpoints(store)):
        raise NotCommittedError(f"{store}: {_what_else(store)}")
    unmirrored = read_unmirrored(store)
    reasons = [_due(store, info.step) for info in prune(infos, policy) if info.step in unmirrored]
    policy = replace(policy, pins=policy.pins | unmirrored)
    if not policy.is_incomplete and not prune(infos, policy):
        refused = [f"{store}@{info.step}: {info.problem}" for info in infos if info.state == CheckpointState.UNREADABLE]
        return RemovalPlan(kept=(*reasons, *refused))
    due, looked = prune(infos, policy), dict[int, _Looked]()
    for info in infos:
        looked[info.step] = _with_index(store, _look(store, info))
        on_read(len(looked), len(infos))
    infos = [found.info for found in looked.values()]
    files, ages = _Files(store, looked), dict[int, float]()
    if policy.is_incomplete:
        ages = {info.step: files.age_s(info, now_s) for info in infos if info.state == CheckpointState.PARTIAL}
    own = [found.info for found in looked.values() if not found.is_linked]
    gone = {info.step for info in prune(own, policy, ages_s=ages)}
    stay = (looked[info.step] for info in due if info.step not in gone)
    reasons += [why_it_stays(store, found.info) for found in stay if not found.is_linked]
    reasons += _linked(store, files, policy, [looked[info.step] for info in prune(infos, policy) if info not in own])
    unknown = [found for found in looked.values() if found.unknown]
    if unknown and (gone or policy.is_incomplete):
        return RemovalPlan(kept=tuple(_unknown(store, found) for found in unknown), is_blocked=True)
    left = [found for step, found in looked.items() if step not in gone]
    kept = frozenset(path for found in left for path in found.refers_to()) | files.named_by_partial(left)
    garbage = []
    for step, found in looked.items():
        whole = step in gone
        if whole or (policy.is_incomplete and found.info.state in (CheckpointState.COMMITTED, CheckpointState.PARTIAL)):
            plan = _of_step(store, files.of(found.info), found.info, policy, kept, now_s=now_s, is_whole=whole)
            garbage += [item for item in plan.garbage if item.entries]
            reasons += plan.kept
    seen = frozenset(found.manifest_path for found in left if found.manifest is not None)
    return RemovalPlan(garbage=tuple(garbage), kept=tuple(reasons), seen=seen)


def _linked(store: Store, files: _Files, policy: RetentionPolicy, looked: Iterable[_Looked]) -> Iterator[str]:
    """Why each of these steps stays, to which symbolic links lead."""
    for found in looked:
        plan = _of_step(store, files.of(found.info), found.info, policy, frozenset(), now_s=0.0, is_whole=True)
        yield from plan.kept or [
            f"{store.where(step_folder(found.info.step))}: kept: some of its files are symbolic links"
        ]


class _Files:
    """The sorted files of the steps that are looked at, each step listed once."""

    def __init__(self, store: Store, looked: dict[int, _Looked]) -> None:
        self._store, self._looked, self._found = store, looked, dict[int, StepFiles]()

    def of(self, info: CheckpointInfo) -> StepFiles:
        if info.step not in self._found:
            self._found[info.step] = files_of_step(self._store, info, self._looked[info.step].manifest)
        return self._found[info.step]

    def age_s(self, info: CheckpointInfo, now_s: float) -> float:
        """Seconds since the newest object of an uncommitted step, or since the start of an attempt if that is later."""
        starts = [start_of(name) for name in self.of(info).attempts]
        entries = self._store.list(step_folder(info.step))
        return now_s - max([*starts, *(entry.modified_s for entry in entries)], default=now_s)

    def named_by_partial(self, stay: Iterable[_Looked]) -> frozenset[str]:
        """Files that the `.metadata` of an uncommitted step names: plain DCP readers open such a step."""
        partial = (found.info for found in stay if found.info.state == CheckpointState.PARTIAL)
        indices = (self.of(info).index for info in partial if self._store.folders(step_folder(info.step)))
        return frozenset(path for index in indices if index is not None for path in index.files)


def _of_step(
    store: Store, files: StepFiles, info: CheckpointInfo, policy: RetentionPolicy, kept: frozenset[str], *, now_s: float,
    is_whole: bool,
) -> RemovalPlan:  # fmt: skip
    """What goes from one step, and what of it stays. An attempt that began after the commit stays: it may still be written."""
    folder, commit = step_folder(info.step), info.commit
    began = 0.0 if commit is None else start_of(commit.attempt)
    dead = [
        name
        for name, entries in files.attempts.items()
        if (is_whole and (commit is None or start_of(name) < began))
        or (
            policy.is_incomplete
            and (is_whole or commit is not None)
            and now_s - max(start_of(name), *(e.modified_s for e in entries)) > policy.older_than_s
        )
    ]
    if is_whole:
        garbage = [
            Garbage(
                what=f"{folder} ({info.state})",
                step=info.step,
                entries=files.removal(dead, is_whole=True, kept=kept),
                version=None if commit is None else commit.version,
            )
        ]
    else:
        garbage = [
            Garbage(
                what=f"{folder}/{name} (attempt never committed)",
                step=info.step,
                entries=files.removal([name], is_whole=False, kept=kept),
            )
            for name in dead
        ]
    if policy.is_incomplete:
        old = tuple(entry for entry in files.leftovers if now_s - entry.modified_s > policy.older_than_s)
        garbage.append(Garbage(what=f"{folder} (temporary files of writes that died)", step=info.step, entries=old))
    reasons = []
    if files.refusal and (is_whole or dead):
        reasons.append(f"{store.where(folder)}: kept: {files.refusal}")
    elif is_whole and files.others:
        more = f" and {len(files.others) - SHOWN_NAMES} more" if len(files.others) > SHOWN_NAMES else ""
        names = ", ".join(path.removeprefix(f"{folder}/") for path in files.others[:SHOWN_NAMES])
        reasons.append(f"{store.where(folder)}: {names}{more} kept: not written by titan-ckpt, or not proved to be")
    return RemovalPlan(garbage=tuple(garbage), kept=tuple(reasons))


def _unknown(store: Store, found: _Looked) -> str:
    return (
        f"nothing is deleted: {store}@{found.info.step} cannot be opened, so which files of other steps it needs is unknown "
        f"({found.unknown}). Read it with a later release, mend it, or remove {step_folder(found.info.step)} yourself"
    )


def _due(store: Store, step: int) -> str:
    return f"{store}@{step}: kept: not yet copied to the second tier; to let it go, remove it from {store.where(UNMIRRORED)}"


def delete(store: Store, plan: RemovalPlan, *, on_delete: OnProgress = ignore_progress) -> list[str]:
    """Delete what `plan` names: every COMMIT, then every `.metadata`, then the rest, each in calls of their own.

    A checkpoint may refer to files of another one that goes as well. So no data file goes before all commits have gone. And
    nothing goes that a save has committed again or come to need since the plan was made (see `references`): it returns lines
    about that. `on_delete` hears of each object. StoreError, before anything is deleted, if a step of the plan is pinned now;
    CheckpointError if what a save needs cannot be read, before anything is deleted; or if a writer that does not look for marks
    committed in the midst of the deletion, so that its step is not whole.
    """
    still = [item for item in plan.garbage if item.version is None or item.version == commit_version(store, item.step)]
    reasons = [
        f"{store.where(step_folder(item.step))}: kept: saved again meanwhile"
        for item in plan.garbage
        if item not in still
    ]
    paths = [entry.path for item in still for entry in item.entries]
    if not paths:
        return reasons
    _check_unpinned(store, still)
    look = partial(needs, store, seen=plan.seen, going=frozenset(paths))
    look()
    marks = [f"{marks_folder(attempt)}/{secrets.token_hex(8)}.txt" for attempt in sorted(_attempts(paths))]
    try:
        for mark in marks:
            store.write(
                mark,
                [MARK],
            )
        return reasons + _delete_marked(store, paths, look, on_delete)
    finally:
        store.delete(marks)


def _check_unpinned(store: Store, garbage: Iterable[Garbage]) -> None:
    """The plan leaves pinned steps out: one that is pinned now was pinned since, or the store did not show the file then."""
    pinned = sorted(read_pins(store) & {item.step for item in garbage if item.version is not None})
    if pinned:
        raise StoreError(
            f"{store.where(PINS)}: pins step {pinned[0]}, which it did not when this deletion was planned; nothing was deleted. "
            "Start it again"
        )


def _attempts(paths: Iterable[str]) -> set[str]:
    """The attempts' folders that hold some of these paths."""
    found = ("/".join(path.split("/")[:2]) for path in paths)
    return {folder for folder in found if is_attempt(folder.rpartition("/")[2])}


def _delete_marked(store: Store, paths: list[str], look: Callable[[], Needs], on_delete: OnProgress) -> list[str]:
    number = count(1)

    def counted(paths: Iterable[str]) -> Iterator[str]:
        for path in paths:
            yield path
            on_delete(next(number), total)

    total, commits = len(paths), [path for path in paths if path.endswith(f"/{COMMIT}")]
    store.delete(counted(commits))
    now, again = look(), _committed_again(store, commits)
    rest = [path for path in paths if path not in commits]
    going = [path for path in rest if not now.holds(path) and path.partition("/")[0] not in again]
    indices = [path for path in going if path.endswith(f"/{METADATA}")]
    data = [path for path in going if path not in indices]
    store.delete(counted(indices))
    store.delete(counted(data))
    for folder in _committed_again(store, indices):
        mend_metadata(store, int(folder.removeprefix("step-")))  # committed just before its old `.metadata` was deleted
    if lost := sorted(look().files.intersection(data)):
        raise DamagedError(
            f"{store.where(lost[0])}: was deleted while another job committed a step that needs it; save that step again"
        )
    return [f"{store.where(path)}: kept: a save that began meanwhile needs it" for path in sorted({*rest} - {*going})]


def _committed_again(store: Store, paths: Iterable[str]) -> frozenset[str]:
    """Of the steps' folders that these paths are in, those that have a COMMIT now."""
    folders = {path.partition("/")[0] for path in paths}
    return frozenset(folder for folder in folders if store.exists(f"{folder}/{COMMIT}"))


def apply_retention(
    store: Store, policy: RetentionPolicy, *, now_s: float, keep: frozenset[int] = frozenset()
) -> list[int]:
    """Delete what `policy`, the run's pins and `keep` let go; returns the deleted steps. A failure is logged, never raised."""
    try:
        plan = plan_removal(store, replace(policy, pins=policy.pins | keep | read_pins(store)), now_s=now_s)
        for reason in plan.kept:
            log.warning("retention: %s", reason)
        for reason in delete(store, plan):
            log.warning("retention: %s", reason)
    except Exception as error:  # noqa: BLE001  (must not fail the save that triggered it)
        log.warning("old checkpoints of %s were not deleted: %s", store, error)
        return []
    for item in plan.garbage:
        log.info("deleted %s of %s: the policy keeps newer ones", item.what, store)
    return sorted({item.step for item in plan.garbage})
