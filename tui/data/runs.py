"""The steps of a run in all of its tiers, and the runs of a folder. An unreadable tier is listed with its error."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo, foreign_steps, list_checkpoints, open_checkpoint
from titan_ckpt.errors import CheckpointError, TitanError
from titan_ckpt.format.commit import read_commit
from titan_ckpt.format.names import LOGS, METADATA, parse_foreign_step
from titan_ckpt.location import join, local_path, normalise, scheme
from titan_ckpt.parsing.json_values import parse_json, parse_json_line
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store

CONFIG_PATH = f"{LOGS}/config.json"
SINGLE_CHECKPOINT = (METADATA, "model.safetensors.index.json", "model.safetensors")
AT_ONCE, _LOOKED_AT, _MOST_FOLDERS = 8, 32, 256
DEPTH = 3  # of folders below one of runs: an experiment in a project of a team
_LARGEST_CONFIG = 1 << 20
_TAIL_BYTES = 32 << 10
METRICS_PATHS = ("metrics.jsonl", "logs/metrics.jsonl")


class TierName(StrEnum):
    """Tiers of a run. ONLY is the single tier of a run without a mirror; the screen does not name it."""

    FAST = "fast"
    MIRROR = "mirror"
    ONLY = ""


class StepState(StrEnum):
    """States of a step: those of a CheckpointInfo, and FOREIGN for checkpoints of other programs."""

    COMMITTED = "committed"
    PARTIAL = "partial"
    DAMAGED = "damaged"
    NEWER = "newer"
    UNREADABLE = "unreadable"
    FOREIGN = "foreign"


UNUSABLE = (StepState.DAMAGED, StepState.NEWER, StepState.UNREADABLE)


_TIER_ORDER = tuple(TierName)
CopyKey: TypeAlias = tuple[str, int, str]
_BEST = (
    StepState.COMMITTED,
    StepState.FOREIGN,
    StepState.NEWER,
    StepState.DAMAGED,
    StepState.UNREADABLE,
    StepState.PARTIAL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A location of the run's steps. `problem` is the error if it could not be listed."""

    name: TierName
    url: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopy:
    """A step in one tier; `info` is None for checkpoints of other programs. `damage`: what a reading of all bytes found."""

    step: int
    tier: TierName
    store: Store
    info: CheckpointInfo | None
    size_bytes: int
    damage: str = ""

    @property
    def state(self) -> StepState:
        """State of this copy."""
        if self.damage:
            return StepState.DAMAGED
        return StepState(self.info.state) if self.info is not None else StepState.FOREIGN

    @property
    def problem(self) -> str:
        """Why it is not usable; "" if nothing is known against it."""
        return self.damage or (self.info.problem if self.info is not None else "")

    @property
    def key(self) -> CopyKey:
        """Names the save: the same step written again is another one."""
        commit = self.info.commit if self.info is not None else None
        return normalise(self.store.url), self.step, commit.attempt if commit is not None else str(self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step of a run, with its copies in all tiers."""

    step: int
    copies: tuple[StepCopy, ...]

    @property
    def best(self) -> StepCopy:
        """The copy in the best state; of equal ones the first tier's."""
        return min(self.copies, key=lambda copy: _BEST.index(copy.state))

    @property
    def tiers(self) -> str:
        """Tiers where it is committed: fast, mirror or both."""
        names = [copy.tier for copy in self.copies if copy.state == StepState.COMMITTED]
        return "both" if len(names) > 1 else names[0] if names else "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSteps:
    """All steps, newest first. `unread` lists (name, URL) of the tiers not listed yet."""

    tiers: tuple[Tier, ...]
    steps: tuple[RunStep, ...]
    unread: tuple[tuple[TierName, str], ...] = ()

    def find(self, step: int) -> RunStep | None:
        """The step of this number."""
        return next((found for found in self.steps if found.step == step), None)

    def with_damage(self, damage: Mapping[CopyKey, str]) -> RunSteps:
        """The same steps with what was found by reading them: the listing itself reads no tensor."""
        steps = (
            replace(step, copies=tuple(replace(copy, damage=damage.get(copy.key, "")) for copy in step.copies))
            for step in self.steps
        )
        return replace(self, steps=tuple(steps)) if damage else self

    @property
    def num_damaged(self) -> int:
        """How many steps have no copy that is not damaged."""
        return sum(step.best.state == StepState.DAMAGED for step in self.steps)

    def counts(self, joint: str) -> str:
        """Number of steps by state, such as `3 committed`; empty without steps."""
        states = [step.best.state for step in self.steps]
        return joint.join(f"{states.count(state)} {state}" for state in StepState if state in states)

    def newest(self, tier: TierName | None = None) -> int | None:
        """The newest committed step in `tier`, or in any tier."""
        return next(
            (s.step for s in self.steps for h in s.copies if h.state == StepState.COMMITTED and tier in (None, h.tier)),
            None,
        )


def load_steps(store: Store) -> RunSteps:
    """List the steps at `store`; the run's other tiers are in `unread`."""
    infos, here = list_checkpoints(store), normalise(store.url)
    tiers = tiers_of(store, infos)
    name = next((name for name, url in tiers if url == here), TierName.ONLY)
    others = tuple((name, url) for name, url in tiers if url != here)
    copies = _copies(name, store, infos) if infos else _foreign(name, store)
    is_tier = bool(copies) or any(url == here for _, url in tiers)
    return RunSteps(tiers=(Tier(name=name, url=here),) if is_tier else (), steps=_by_step(copies), unread=others)


def load_others(found: RunSteps) -> RunSteps:
    """List the unread tiers too."""
    tiers, copies = list(found.tiers), [each for step in found.steps for each in step.copies]
    for name, url in found.unread:
        try:
            store = open_store(url)
            copies += _copies(name, store, list_checkpoints(store))
        except (TitanError, OSError) as error:
            tiers.append(Tier(name=name, url=url, problem=str(error)))
        else:
            tiers.append(Tier(name=name, url=url))
    tiers.sort(key=lambda tier: _TIER_ORDER.index(tier.name))
    copies.sort(key=lambda each: _TIER_ORDER.index(each.tier))
    return RunSteps(tiers=tuple(tiers), steps=_by_step(copies))


def _by_step(copies: Sequence[StepCopy]) -> tuple[RunStep, ...]:
    found: dict[int, list[StepCopy]] = {}
    for each in copies:
        found.setdefault(each.step, []).append(each)
    return tuple(RunStep(step=step, copies=tuple(found[step])) for step in sorted(found, reverse=True))


def _copies(tier: TierName, store: Store, infos: Sequence[CheckpointInfo]) -> list[StepCopy]:
    sizes = [info.commit.size_bytes if info.commit is not None else 0 for info in infos]
    return [
        StepCopy(step=info.step, tier=tier, store=store, info=info, size_bytes=size)
        for info, size in zip(infos, sizes, strict=True)
    ]


def _foreign(tier: TierName, store: Store) -> list[StepCopy]:
    """Checkpoints of other programs: a DCP checkpoint or Hugging Face model in this folder, or a folder of DCP checkpoints."""
    if any(store.exists(name) for name in SINGLE_CHECKPOINT):
        checkpoint = open_checkpoint(store.url, store=store)
        sizes = {checkpoint.step: sum(file.size_bytes for file in checkpoint.manifest.files)}
    else:
        steps = foreign_steps(store)
        sizes = {step: sum(entry.size_bytes for entry in store.list(folder)) for step, folder in steps}
    return [StepCopy(step=step, tier=tier, store=store, info=None, size_bytes=size) for step, size in sizes.items()]


# -- tiers


def tiers_of(store: Store, infos: Sequence[CheckpointInfo]) -> list[tuple[TierName, str]]:
    """(name, URL) of the run's tiers from its config; `store` alone if the config is missing."""
    saved, here = _save_config(store, infos), normalise(store.url)
    base = _base(here, [saved["url"], saved["mirror"]])
    fast, mirror = (_absolute(saved[name], base) for name in ("url", "mirror"))
    if not fast or (infos and here != mirror):
        fast = here
    if not mirror:
        return [(TierName.ONLY, fast)]
    return [(TierName.FAST, fast), (TierName.MIRROR, mirror)]


def _save_config(store: Store, infos: Sequence[CheckpointInfo]) -> dict[str, str]:
    """`save.url` and `save.mirror` from logs/config.json, else from the newest checkpoint."""
    config: Any = {}
    try:
        if store.exists(CONFIG_PATH):
            size_bytes = min(store.stat(CONFIG_PATH).size_bytes, _LARGEST_CONFIG)
            config = parse_json(store.read(CONFIG_PATH, 0, size_bytes), CONFIG_PATH)
        elif (newest := max((i.step for i in infos if i.state == "committed"), default=None)) is not None:
            config = open_checkpoint(store.url, step=newest, store=store).manifest.config
    except (TitanError, OSError):
        config = {}  # the list of steps shows what is damaged
    save = config.get("save") if isinstance(config, Mapping) else None
    found = save if isinstance(save, Mapping) else {}
    return {name: value if isinstance(value := found.get(name), str) else "" for name in ("url", "mirror")}


def _base(here: str, named: Sequence[str]) -> str | None:
    """The folder that the job ran in, if one of its relative paths leads to `here`.

    >>> _base("/home/me/runs/tiny", ["runs/tiny", "runs/safe"])
    '/home/me'
    """
    for path in named:
        tail = os.path.normpath(local_path(path)) if path and scheme(path) == "file" else ""
        if tail and not os.path.isabs(tail) and here.endswith(f"/{tail}"):
            return here[: -len(tail) - 1]
    return None


def _absolute(url: str, base: str | None) -> str:
    """Resolve `url` against `base`; empty if that is not possible."""
    is_relative = scheme(url) == "file" and not os.path.isabs(os.path.expanduser(local_path(url)))
    if not url or (is_relative and base is None):
        return ""
    return normalise(f"{base}/{local_path(url)}" if is_relative else url)


# -- folders of runs


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRecord:
    """The end of a run's metrics.jsonl: its last step, loss and time (in seconds; NaN: not there), and how it ended."""

    step: float = math.nan
    loss: float = math.nan
    time_s: float = math.nan
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in a folder of runs: its newest committed checkpoint, and its last record."""

    name: str
    url: str
    newest: CheckpointInfo | None = None
    problem: str = ""
    last: LastRecord = LastRecord()


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of a folder, and the folders that were not looked at, as they are too deep or too many."""

    found: tuple[RunSummary, ...]
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """A folder below one of runs: whether it is a run, the folders in it, the error if it could not be listed."""

    name: str
    is_run: bool = False
    below: tuple[str, ...] = ()
    problem: str = ""


def holds_runs(store: Store, folders: Sequence[str], depth: int = 1) -> bool:
    """Whether one of `folders` is a run, or holds one `depth` deep. Checks the first 32 only, so that a wrong path fails fast."""
    return any(folder.is_run for level in _levels(store, folders[:_LOOKED_AT], _LOOKED_AT, depth) for folder in level)


def load_runs(store: Store) -> Runs:
    """Summaries of the runs in `store`, also of those in folders of folders; the one with the newest checkpoint first."""
    folders = [folder for level in _levels(store, store.folders(), _MOST_FOLDERS, DEPTH) for folder in level]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tui-runs") as pool:
        found = [*pool.map(lambda folder: _summary(store, folder), (f for f in folders if f.is_run or f.problem))]
    found.sort(key=lambda run: run.name)
    found.sort(key=lambda run: run.newest.commit.created if run.newest and run.newest.commit else "", reverse=True)
    below = (f"{folder.name}/{name}" for folder in folders if not folder.is_run for name in folder.below)
    return Runs(found=tuple(found), unseen=tuple(sorted({*below} - {folder.name for folder in folders})))


def _levels(store: Store, folders: Sequence[str], most: int, depth: int) -> Iterator[list[_Folder]]:
    """The folders, then the first `most` of the next depth, and so on; nothing below a run is looked at."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tui-runs") as pool:
        for _ in range(depth):
            level = [*pool.map(lambda name: _look(store, name), folders)]
            yield level
            below = (f"{folder.name}/{name}" for folder in level if not folder.is_run for name in folder.below)
            folders = [*itertools.islice(below, most)]


def _look(store: Store, name: str) -> _Folder:
    try:
        below = tuple(store.folders(name))
        has_steps = any(parse_foreign_step(folder) is not None for folder in below)
        is_run = has_steps or (LOGS in below and store.exists(f"{name}/{CONFIG_PATH}"))
    except (TitanError, OSError) as error:
        return _Folder(name=name, problem=str(error))
    return _Folder(name=name, is_run=is_run, below=below)


def _summary(store: Store, folder: _Folder) -> RunSummary:
    url = join(store.url, folder.name)
    if folder.problem:
        return RunSummary(name=folder.name, url=url, problem=folder.problem)
    try:
        run = open_store(url)
        steps = sorted((step for name in folder.below if (step := parse_foreign_step(name)) is not None), reverse=True)
        newest, problem = _newest(run, steps)
        last = read_last_record(run)
        return RunSummary(name=folder.name, url=url, newest=newest, problem=problem, last=last)
    except (TitanError, OSError) as error:
        return RunSummary(name=folder.name, url=url, problem=str(error))


def read_last_record(run: Store) -> LastRecord:
    """From the last 32 KB of metrics.jsonl; lines that are cut off or damaged are passed over."""
    path = next((path for path in METRICS_PATHS if run.exists(path)), "")
    if not path:
        return LastRecord()
    start = max(run.stat(path).size_bytes - _TAIL_BYTES, 0)
    found, reason = {"step": math.nan, "loss": math.nan, "time_s": math.nan}, ""
    for line in run.read(path, start).splitlines():
        try:
            value = parse_json_line(line)
        except ValueError:
            continue
        if isinstance(value, Mapping):
            found |= {name: float(value[name]) for name in found if type(value.get(name)) in (int, float)}
            reason = str(value.get("reason") or "ended") if value.get("event") == "end" else ""
    return LastRecord(**found, reason=reason)


def _newest(run: Store, steps: Sequence[int]) -> tuple[CheckpointInfo | None, str]:
    """The newest committed step; if there is none, the problem of the newest step."""
    problem = ""
    for step in steps:
        try:
            return CheckpointInfo(step=step, state=CheckpointState.COMMITTED, commit=read_commit(run, step)), ""
        except CheckpointError as error:
            problem = problem or str(error)
    return None, problem
