"""The runs of a folder, also of folders in it: the newest whole checkpoint, and the last record."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo
from titan_ckpt.debug.read.discovery import TEXT_ENDINGS, evidence_file
from titan_ckpt.errors import CheckpointError, NotCommittedError, TitanError
from titan_ckpt.format.commit import read_commit
from titan_ckpt.format.names import LOGS, parse_foreign_step
from titan_ckpt.location import join
from titan_ckpt.parsing.json_values import parse_json_line
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.data.runs import AT_ONCE, CONFIG_PATH, NO_RESUME
from titan_ckpt.tui.rows import counted
from titan_ckpt.upkeep.deletion import check_whole

EVIDENCE_ENDINGS = {".box", ".pickle", ".pkl", ".stacks", ".json", *TEXT_ENDINGS}
METRICS_PATHS = ("metrics.jsonl", "logs/metrics.jsonl")
DEPTH = 3  # of folders below one of runs: an experiment in a project of a team
_LOOKED_AT, _MOST_FOLDERS = 32, 256
_MOST_FILES = 64  # of a folder that is no run, in which evidence is looked for
_TAIL_BYTES = 32 << 10
RUNNING_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRecord:
    """The end of a run's metrics.jsonl: its last step, loss and time (in seconds; NaN: not there), and how it ended."""

    step: float = math.nan
    loss: float = math.nan
    time_s: float = math.nan
    reason: str = ""


def is_silent(last: LastRecord, now_s: float) -> bool:
    """Whether a run has recorded no end, and nothing in the last minutes (or ever)."""
    return not last.reason and not now_s - last.time_s < RUNNING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in a folder of runs: its newest whole checkpoint, what is damaged, its last record, and what is known of a job that
    is gone without an end of its own. `is_incident`: a folder with evidence of ranks alone."""

    name: str
    url: str
    newest: CheckpointInfo | None = None
    problem: str = ""
    last: LastRecord = LastRecord()
    verdict: str = ""
    is_incident: bool = False

    @property
    def key(self) -> str:
        """Names the run as of its last record."""
        return f"{self.url} {self.last.time_s}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of a folder, and the folders that were not looked at, as they are too deep or too many."""

    found: tuple[RunSummary, ...]
    unseen: tuple[str, ...] = ()

    @property
    def counts(self) -> str:
        """`3 runs`, and how many incidents are beside them."""
        incidents = sum(run.is_incident for run in self.found)
        runs = counted(len(self.found) - incidents, "run")
        return f"{runs} · {counted(incidents, 'incident')}" if incidents else runs

    def with_verdicts(self, judged: Mapping[str, str]) -> Runs:
        """The same runs with the verdicts on their jobs, by `RunSummary.key`."""
        return replace(self, found=tuple(replace(run, verdict=judged.get(run.key, "")) for run in self.found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Folder:
    """A folder below one of runs: whether it is a run or holds evidence; the folders in it; why it was not listed."""

    name: str
    is_run: bool = False
    is_incident: bool = False
    below: tuple[str, ...] = ()
    problem: str = ""


def holds_runs(store: Store, folders: Sequence[str], depth: int = 1) -> bool:
    """Whether one of `folders` is a run, or holds one `depth` deep. Checks the first 32 only, so that a wrong path fails fast."""
    return any(folder.is_run for level in _levels(store, folders[:_LOOKED_AT], _LOOKED_AT, depth) for folder in level)


def load_runs(store: Store) -> Runs:
    """Summaries of the runs in `store` and of incidents beside them, also in folders of folders; the newest checkpoint first."""
    folders = [folder for level in _levels(store, store.folders(), _MOST_FOLDERS, DEPTH) for folder in level]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="tui-runs") as pool:
        of_interest = (folder for folder in folders if folder.is_run or folder.is_incident or folder.problem)
        found = [*pool.map(lambda folder: _summary(store, folder), of_interest)]
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
        is_incident = not is_run and not below and _has_evidence(store, name)
    except (TitanError, OSError) as error:
        return _Folder(name=name, problem=str(error))
    return _Folder(name=name, is_run=is_run, is_incident=is_incident, below=below)


def _has_evidence(store: Store, name: str) -> bool:
    """Whether a dump, a stack or a log of a rank is among the first files of a folder."""
    entries = itertools.islice(store.list(name), _MOST_FILES)
    files = (evidence_file(entry.path, entry.size_bytes, entry.modified_s) for entry in entries)
    return any(file.rank is not None and file.suffix in EVIDENCE_ENDINGS for file in files)


def _summary(store: Store, folder: _Folder) -> RunSummary:
    url = join(store.url, folder.name) + "/" * ("@" in folder.name)  # else it would be a run and its step
    if folder.problem:
        return RunSummary(name=folder.name, url=url, problem=folder.problem)
    if folder.is_incident:
        return RunSummary(name=folder.name, url=url, is_incident=True)
    try:
        run = open_store(url)
        steps = sorted((step for name in folder.below if (step := parse_foreign_step(name)) is not None), reverse=True)
        newest, problem = _newest(run, steps)
        last = read_last_record(run)
        return RunSummary(name=folder.name, url=url, newest=newest, problem=problem.replace(f"{run}/", ""), last=last)
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
    """The newest step that is committed and whole; and what is wrong with the newer ones: the text of the newest damaged one."""
    damage: list[str] = []
    unfinished = ""
    for step in steps:
        try:
            listed = CheckpointInfo(step=step, state=CheckpointState.COMMITTED, commit=read_commit(run, step))
            found = check_whole(run, run.url, listed)
        except NotCommittedError as error:
            unfinished = unfinished or str(error)
        except CheckpointError as error:
            damage.append(str(error))
        else:
            if found.state == CheckpointState.COMMITTED:
                return found, _first_of(damage)
            damage.append(found.problem)
    reason = _first_of(damage) or unfinished
    return None, f"{reason}; {NO_RESUME}" if reason else ""


def _first_of(damage: Sequence[str]) -> str:
    more = len(damage) - 1
    return f"{damage[0]} (and {more} more damaged step{'s' * (more > 1)})" if more > 0 else "".join(damage)
