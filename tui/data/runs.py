"""The steps of a run in all of its tiers, and which are damaged. An unreadable tier is listed with its error."""

from __future__ import annotations

import itertools
import os
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeAlias

from titan_ckpt.checkpoint.open import CheckpointInfo, bytes_there, foreign_steps, list_checkpoints, open_checkpoint
from titan_ckpt.console.output import age_s
from titan_ckpt.errors import TitanError
from titan_ckpt.format.names import LOGS, METADATA
from titan_ckpt.location import local_path, normalise, scheme
from titan_ckpt.parsing.json_values import parse_json
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.deletion import check_whole

NO_RESUME = "no step can be resumed from"
CONFIG_PATH = f"{LOGS}/config.json"
SINGLE_CHECKPOINT = (METADATA, "model.safetensors.index.json", "model.safetensors")
AT_ONCE = 8
_MOST_CHECKED = 16
_LARGEST_CONFIG = 1 << 20


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
    """A step in one tier; `info` is None for checkpoints of other programs. `damage`: what a reading of all bytes found.
    `written_s`: when it was committed, or the newest file of one that is not was written; None if that is not known."""

    step: int
    tier: TierName
    store: Store
    info: CheckpointInfo | None
    size_bytes: int | None
    written_s: float | None = None
    damage: str = ""

    @property
    def state(self) -> StepState:
        """State of this copy."""
        if self.damage:
            return StepState.DAMAGED
        return StepState(self.info.state) if self.info is not None else StepState.FOREIGN

    @property
    def is_unfinished(self) -> bool:
        """Whether no COMMIT says when it was saved, and how large it is."""
        return self.info is not None and self.info.commit is None

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

    @property
    def has_none_to_resume(self) -> bool:
        """Whether steps are damaged and no other is committed."""
        states = {step.best.state for step in self.steps}
        return StepState.DAMAGED in states and states <= {StepState.DAMAGED, StepState.PARTIAL}

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


def find_damage(found: RunSteps, known: Container[CopyKey]) -> dict[CopyKey, str]:
    """What is wrong with each of the newest committed copies, "" if its index is whole and all files are there in their sizes,
    as `ls --check` looks. Copies that the store does not give are left out, and those whose key is `known`, but not the newest:
    a job goes on from that one, so that each look looks at it."""
    committed = (copy for step in found.steps for copy in step.copies if copy.state == StepState.COMMITTED)
    newest = itertools.islice(committed, _MOST_CHECKED)
    copies = [copy for place, copy in enumerate(newest) if place == 0 or copy.key not in known]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tui-steps") as pool:
        problems = [*pool.map(_damage_of, copies)]
    return {copy.key: problem for copy, problem in zip(copies, problems, strict=True) if problem is not None}


def _damage_of(copy: StepCopy) -> str | None:
    try:
        return check_whole(copy.store, copy.store.url, copy.info).problem if copy.info is not None else None
    except (TitanError, OSError):
        return None


def _by_step(copies: Sequence[StepCopy]) -> tuple[RunStep, ...]:
    found: dict[int, list[StepCopy]] = {}
    for each in copies:
        found.setdefault(each.step, []).append(each)
    return tuple(RunStep(step=step, copies=tuple(found[step])) for step in sorted(found, reverse=True))


def _copies(tier: TierName, store: Store, infos: Sequence[CheckpointInfo]) -> list[StepCopy]:
    def copy(info: CheckpointInfo) -> StepCopy:
        commit = info.commit
        size, written_s = bytes_there(store, info) if commit is None else (commit.size_bytes, time_of(commit.created))
        return StepCopy(step=info.step, tier=tier, store=store, info=info, size_bytes=size, written_s=written_s)

    return [copy(info) for info in infos]


def _foreign(tier: TierName, store: Store) -> list[StepCopy]:
    """Checkpoints of other programs: a DCP checkpoint or Hugging Face model in this folder, or a folder of DCP checkpoints."""
    if any(store.exists(name) for name in SINGLE_CHECKPOINT):
        checkpoint = open_checkpoint(store.url, store=store)
        size = sum(file.size_bytes for file in checkpoint.manifest.files)
        return [StepCopy(step=checkpoint.step, tier=tier, store=store, info=None, size_bytes=size)]
    return [_foreign_step(tier, store, step, folder) for step, folder in foreign_steps(store)]


def _foreign_step(tier: TierName, store: Store, step: int, folder: str) -> StepCopy:
    entries = list(store.list(folder))
    size, written_s = sum(entry.size_bytes for entry in entries), max(entry.modified_s for entry in entries)
    return StepCopy(step=step, tier=tier, store=store, info=None, size_bytes=size, written_s=written_s)


def time_of(created: str) -> float | None:
    """The time of a COMMIT, in seconds since the epoch; None if it is no time."""
    age = age_s(created, 0.0)
    return None if age is None else -age


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
