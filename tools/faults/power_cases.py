"""Power cuts in the middle of saves, copies, prunes and second saves of a step, and what must hold after each.

Every step that the job was told is committed, and was not told to delete, is whole; the newest of them or a later one opens; what
opens has the right values; and a `.metadata`, which plain DCP readers open, names no data that is not there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import NotCommittedError, TitanError
from titan_ckpt.format.names import METADATA
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.faults.power import Recording, build_cut, recorded


@dataclass(slots=True)
class PowerOutcome:
    """Results; `problems` must be empty."""

    cuts: int = 0
    by_job: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def make_state(step: int) -> dict[str, Any]:
    """Tensors that encode the step, and one that never changes."""
    return {
        "model": {f"w{n}": torch.full((60 + n,), float(step)) for n in range(3)},
        "frozen": torch.arange(200.0),
        "step": step,
    }


Job = Callable[[Path, Recording], None]


def _save(saver: Saver, recording: Recording, step: int) -> None:
    saver.save(make_state(step), step=step, assets={"tokenizer.json": b"{}"}).wait()
    recording.mark(f"run {step}")


def _saves(root: Path, recording: Recording) -> None:
    """Into a folder that somebody else made, and did not sync."""
    os.makedirs(root / "deep" / "run" / "logs")
    with Saver(str(root / "deep" / "run")) as saver:
        for step in (1, 2, 3):
            _save(saver, recording, step)


def _incremental(root: Path, recording: Recording) -> None:
    options = SaveOptions(incremental=True, codec="planes-zstd", retention=RetentionPolicy(keep_last=2))
    with Saver(str(root / "deep" / "run"), options) as saver:
        for step in (1, 2, 3, 4):
            if step > 2:
                recording.mark(f"without run {step - 2}")
            _save(saver, recording, step)


def _mirror(root: Path, recording: Recording) -> None:
    with Saver(str(root / "deep" / "run"), SaveOptions(mirror=str(root / "safe" / "run"))) as saver:
        for step in (1, 2):
            _save(saver, recording, step)


def _prune(root: Path, recording: Recording) -> None:
    _saves(root, recording)
    for step in (1, 2):
        recording.mark(f"without run {step}")
    _command("prune", str(root / "deep" / "run"), "--keep-last", "1", "--yes")


def _copy(root: Path, recording: Recording) -> None:
    _saves(root, recording)
    _command("cp", f"{root}/deep/run@2", f"{root}/copy")
    recording.mark("copy 2")


def _again(root: Path, recording: Recording) -> None:
    """Save a step, damage it, save it again."""
    _saves(root, recording)
    recording.mark("without run 3")
    with contextlib.closing(Saver(str(root / "deep" / "run"))) as saver:
        (path,) = (root / "deep" / "run" / "step-00000003").glob("COMMIT.json")
        path.unlink()
        _save(saver, recording, 3)
        recording.mark("again run 3")


def _command(*arguments: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        code = main([*arguments])
    if code:
        raise AssertionError(f"{arguments}: exit code {code}")


JOBS: dict[str, Job] = {
    "saves": _saves, "incremental, retention": _incremental, "mirror": _mirror, "prune": _prune, "cp": _copy,
    "a step again": _again,
}  # fmt: skip


def run_cuts(folder: Path, cuts: int, *, seed: int, jobs: tuple[str, ...] = tuple(JOBS)) -> PowerOutcome:
    """Record each job once, then cut the power `cuts` times at random moments of random jobs."""
    outcome, rng = PowerOutcome(), random.Random(seed)
    recordings = {}
    for name in jobs:
        root = folder / "jobs" / name.replace(" ", "-")
        root.mkdir(parents=True)
        with recorded(root) as recording:
            JOBS[name](root, recording)
        recordings[name] = recording
    logging.disable(logging.CRITICAL)
    try:
        for number in range(cuts):
            name = jobs[number % len(jobs)]
            after = rng.randint(0, len(recordings[name].events))
            target = folder / "cut"
            notes = build_cut(recordings[name], after, target, rng)
            found = problems_after(target, notes)
            outcome.problems += [
                f"{name}, after {after} of {len(recordings[name].events)} events: {text}" for text in found
            ]
            outcome.cuts += 1
            outcome.by_job[name] = outcome.by_job.get(name, 0) + 1
            shutil.rmtree(target)
    finally:
        logging.disable(logging.NOTSET)
    return outcome


def problems_after(root: Path, notes: list[str]) -> list[str]:
    """What does not hold after a cut, given what the job had been promised before."""
    promised: dict[str, set[int]] = {"run": set(), "copy": set()}
    for note in notes:
        run, step = note.removeprefix("without ").removeprefix("again ").split()
        (promised[run].discard if note.startswith("without") else promised[run].add)(int(step))
    found = []
    for run, path in (("run", root / "deep" / "run"), ("copy", root / "copy"), ("mirror", root / "safe" / "run")):
        steps = promised.get(run, set())
        try:
            found += [f"{run}: {text}" for text in _problems(str(path), steps)]
        except TitanError as error:
            found.append(f"{run}: {error}")
        found += [f"{run}: {text}" for text in _dangling(path)]
    return found


def _problems(url: str, promised: set[int]) -> list[str]:
    found = [
        f"step {step} was promised, but is lost or damaged: {text}" for step in promised if (text := _look(url, step))
    ]
    try:
        newest = open_checkpoint(url).step
    except NotCommittedError:
        return [*found, *([f"nothing opens, though {sorted(promised)} were promised"] if promised else [])]
    if promised and newest < max(promised):
        found.append(f"step {newest} opens, though {max(promised)} was promised")
    if text := _look(url, newest):
        found.append(f"step {newest} opens, but {text}")
    return found


def _look(url: str, step: int) -> str:
    """What is wrong with a step; "" if nothing is."""
    state, expected = make_state(0), make_state(step)
    try:
        load(f"{url}@{step}", state)
        if problems := verify(f"{url}@{step}", read_data=True):
            return str(problems[0])
    except TitanError as error:
        return str(error)
    is_right = all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
    return (
        ""
        if is_right and state["step"] == step and torch.equal(state["frozen"], expected["frozen"])
        else "has wrong values"
    )


def _dangling(run: Path) -> list[str]:
    """Each `.metadata` of a step that is damaged or names data which is not there."""
    found = []
    for path in sorted(run.glob(f"step-*/{METADATA}")):
        try:
            index = pickle.loads(path.read_bytes())  # noqa: S301 - torch's own way, and written by this process
        except (pickle.UnpicklingError, EOFError) as error:
            found.append(f"{path.parent.name}/{METADATA}: {error}")
            continue
        names = {info.relative_path for info in index.storage_data.values()}
        gone = sorted(name for name in names if not (path.parent / name).exists())
        found += [f"{path.parent.name}/{METADATA} names {name}, which is not there" for name in gone]
    return found
