"""Deletion over hostile trees: runs with foreign checkpoints, links, users' files and damage, under any policy.

`try_once` builds a tree from a run that was really saved, adds what a run can come to hold, deletes by retention or as `prune`
does, and lists what must not have happened: anything removed or changed that our own saves did not write, a link or its target
touched, a pinned step or the newest gone, a commit or a `.metadata` beside missing data.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.commit_proved import named_files
from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints, open_checkpoint
from titan_ckpt.errors import CheckpointError
from titan_ckpt.format.commit import commit_path
from titan_ckpt.format.dcp_read import data_paths
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.deletion import apply_retention, delete, plan_removal
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.hostile.outcome import Outcome

STEPS = range(1, 7)
OLD_S = 30 * 86400.0
Change = Callable[[random.Random, Path], None]


def make_template(folder: Path) -> Path:
    """A run of six incremental checkpoints with an asset; step 3 was saved twice, step 5 is an export."""
    with Saver(str(folder / "template"), SaveOptions(incremental=True)) as saver:
        for step in (*STEPS[:3], *STEPS[2:]):
            state = {
                "w": torch.full((20,), float(step)),
                "frozen": torch.arange(50.0),
                "half": torch.full((9,), step // 3),
            }
            saver.save(state, step=step, kind="model" if step == 5 else "full", assets={"t.json": b"{}"}).wait()
    dcp.save({"x": torch.ones(3)}, checkpoint_id=folder / "foreign", no_dist=True)
    return folder / "template"


def _foreign_index(run: Path) -> bytes:
    """The `.metadata` of a plain DCP checkpoint, which `make_template` put beside the template."""
    return (run.parent.parent / "foreign" / ".metadata").read_bytes()


def _step(rng: random.Random, run: Path) -> Path:
    return run / f"step-{rng.choice(STEPS):08d}"


def _attempt(rng: random.Random, step: Path) -> Path:
    return rng.choice(sorted(step.glob("a-*")) or [step])


def _foreign_step(rng: random.Random, run: Path) -> None:
    """A plain DCP checkpoint in a folder of its own, or over one of ours."""
    step = run / f"step-{rng.choice((*STEPS, 7, 8, 99)):08d}"
    step.mkdir(exist_ok=True)
    (step / "__0_0.distcp").write_bytes(b"foreign")
    if rng.random() < 0.7:
        (step / ".metadata").write_bytes(_foreign_index(run))


def _user_file(rng: random.Random, run: Path) -> None:
    step = _step(rng, run)
    folder = rng.choice((run, step, step / "plots", _attempt(rng, step), _attempt(rng, step) / "mine", step / "a-2026"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / rng.choice(("notes.txt", "loss.svg", "events.0", ".hidden", "weights.distcp"))).write_bytes(b"user's")


def _link_step(rng: random.Random, run: Path) -> None:
    _move_behind_link(rng, run, _step(rng, run))


def _link_attempt(rng: random.Random, run: Path) -> None:
    step = _step(rng, run)
    if (attempt := _attempt(rng, step)) != step and not step.is_symlink():
        _move_behind_link(rng, run, attempt)


def _link_file(rng: random.Random, run: Path) -> None:
    step = _step(rng, run)
    files = [path for path in step.rglob("*") if path.is_file() and not path.is_symlink()]
    if files and not step.is_symlink():
        _move_behind_link(rng, run, rng.choice(sorted(files)))


def _move_behind_link(rng: random.Random, run: Path, path: Path) -> None:
    if path.exists() and not path.is_symlink():
        target = run.parent / "elsewhere" / f"{path.name}-{rng.getrandbits(32)}"
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        path.symlink_to(target)


def _link_to_another_step(rng: random.Random, run: Path) -> None:
    target = run / f"step-{rng.choice((20, 21)):08d}"
    if not target.is_symlink():
        target.symlink_to(_step(rng, run))


def _half_save(rng: random.Random, run: Path) -> None:
    step = run / f"step-{rng.choice((*STEPS, 30, 31)):08d}"
    attempt = step / f"a-20{rng.randint(20, 25)}0101T000000Z-{rng.getrandbits(32):08x}"
    attempt.mkdir(parents=True, exist_ok=True)
    for rank in range(rng.randint(1, 3)):
        (attempt / f"__{rank}_0.distcp").write_bytes(b"half")


def _lose_commit(rng: random.Random, run: Path) -> None:
    (_step(rng, run) / "COMMIT.json").unlink(missing_ok=True)


def _break_commit(rng: random.Random, run: Path) -> None:
    path = _step(rng, run) / "COMMIT.json"
    if path.exists():
        path.write_bytes(rng.choice((b"", b"{}", b'{"step": Infinity}', path.read_bytes()[:-9], b"\xff\xfe", b"[1]")))


def _break_index(rng: random.Random, run: Path) -> None:
    path = _step(rng, run) / ".metadata"
    if path.exists():
        path.write_bytes(rng.choice((b"", b"\x80\x02N.", path.read_bytes()[:-9], _foreign_index(run))))


def _lose_data(rng: random.Random, run: Path) -> None:
    files = sorted(_step(rng, run).glob("a-*/*.distcp"))
    if files:
        rng.choice(files).unlink()


def _break_manifest(rng: random.Random, run: Path) -> None:
    for path in sorted(_step(rng, run).glob("a-*/manifest.json"))[:1]:
        path.write_bytes(rng.choice((b"", b"{}", b"null", path.read_bytes()[:-1])))


def _foreign_name(rng: random.Random, run: Path) -> None:
    """Names that only look like ours."""
    folder = run / rng.choice(("step-5", "step-00000001-keep", "best-step-00000002", "logs", "step-0000000x", "debug"))
    shutil.copytree(_step(rng, run), folder, symlinks=True, dirs_exist_ok=True)


CHANGES: tuple[Change, ...] = (
    _foreign_step, _user_file, _link_step, _link_attempt, _link_file, _link_to_another_step, _half_save, _lose_commit,
    _break_commit, _break_index, _lose_data, _break_manifest, _foreign_name,
)  # fmt: skip


def try_once(rng: random.Random, template: Path, folder: Path) -> tuple[list[str], int]:
    """What went wrong, and how many files were deleted."""
    run = folder / "run"
    shutil.copytree(template, run, symlinks=True)
    written = {str(path.relative_to(folder)) for path in run.rglob("*") if path.is_file()}
    names = []
    for change in rng.choices(CHANGES, k=rng.randint(0, 5)):
        change(rng, run)
        names.append(change.__name__)
        if change is _half_save:
            written |= {
                str(p.relative_to(folder)) for p in run.glob("step-*/a-*/*.distcp") if p.read_bytes() == b"half"
            }
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - OLD_S,) * 2, follow_symlinks=False)
    before, whole = _contents(folder), _whole(run)
    own = {step for step in whole if not _is_linked(run, step)}
    policy = RetentionPolicy(
        keep_last=rng.randint(1, 3), keep_every=rng.choice((None, None, 2, 3)), is_incomplete=rng.random() < 0.7,
        pins=frozenset(rng.sample(STEPS, rng.randint(0, 2))), older_than_s=rng.choice((0.0, 86400.0)),
    )  # fmt: skip
    is_refused = _delete(rng, run, policy)
    after = _contents(folder)
    wrong = [f"{path} is gone after a refusal" for path in sorted(before.keys() - after.keys()) if is_refused]
    wrong += [f"{path} was not ours, and is gone" for path in sorted(before.keys() - after.keys() - written)]
    wrong += [
        f"{path} is a link or behind one, and is gone"
        for path in sorted(before.keys() - after.keys())
        if _is_behind(path, before)
    ]
    wrong += [f"{path} changed" for path in sorted(before.keys() & after.keys()) if before[path] != after[path]]
    wrong += _lost(run, whole, own, policy) + _torn(folder, run, before)
    return [f"{', '.join(names)}; {policy}: {text}" for text in wrong], len(before) - len(after)


def _delete(rng: random.Random, run: Path, policy: RetentionPolicy) -> bool:
    """Whether the deletion refused because what a step needs is unknown."""
    store = FileStore(str(run))
    if rng.random() < 0.4:
        apply_retention(store, policy, now_s=time.time())
        return False
    try:
        delete(store, plan_removal(store, policy, now_s=time.time()))
    except CheckpointError as error:
        if not str(error).startswith("the deletion stops here: "):
            raise
        return True
    return False


def _contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link below `folder`: its bytes, or where it points to."""
    found: dict[str, bytes | str] = {}
    for top, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(top, name)))):
            path = os.path.join(top, name)
            is_link = os.path.islink(path)
            found[os.path.relpath(path, folder)] = os.readlink(path) if is_link else Path(path).read_bytes()
    return found


def _is_behind(path: str, before: dict[str, bytes | str]) -> bool:
    return isinstance(before[path], str) or path.startswith("elsewhere")


def _infos(run: Path) -> list[CheckpointInfo]:
    return list_checkpoints(str(run))


def _whole(run: Path) -> dict[int, str]:
    """Steps that open with every byte right, and their kind."""
    found = {}
    for info in _infos(run):
        if info.commit is not None and not _problems(run, info.step):
            found[info.step] = info.commit.kind
    return found


def _problems(run: Path, step: int) -> list[str]:
    try:
        return [str(p) for p in verify(f"{run}@{step}", read_data=True) if not p.path.endswith(".metadata")]
    except CheckpointError as error:
        return [str(error)]


def _is_linked(run: Path, step: int) -> bool:
    """Whether a symbolic link leads to the COMMIT of a step, or to data that it needs."""
    manifest = open_checkpoint(str(run), step=step).manifest
    store = FileStore(str(run))
    return any(store.is_link(path) for path in (commit_path(step), *named_files(manifest)))


def _lost(run: Path, whole: dict[int, str], own: set[int], policy: RetentionPolicy) -> list[str]:
    """Steps that must have stayed and did not, and what is left half."""
    committed = {info.step for info in _infos(run) if info.commit is not None}
    full = sorted(step for step, kind in whole.items() if kind == "full")
    due = {
        *full[-policy.keep_last :],
        *[step for step in full if step in own][-policy.keep_last :],
        *(policy.pins & set(full)),
        *(step for step in whole if whole[step] != "full"),
    }
    wrong = [f"step {step} had to stay, and is gone" for step in sorted(due - committed)]
    wrong += [
        f"step {step}: {_problems(run, step)[0]}" for step in sorted(committed & whole.keys()) if _problems(run, step)
    ]
    return wrong


def _torn(folder: Path, run: Path, before: dict[str, bytes | str]) -> list[str]:
    """Every `.metadata` that names a file which was there before."""
    wrong = []
    for path in sorted(run.glob("step-*/.metadata")):
        try:
            names = data_paths(path.read_bytes(), where=str(path))
        except CheckpointError:
            continue
        files = {os.path.normpath(f"{path.parent.relative_to(folder)}/{name}") for name in names}
        gone = [file for file in sorted(files & before.keys()) if not (folder / file).exists()]
        wrong += [f"{path.relative_to(folder)} names {file}, which is gone" for file in gone]
    return wrong


def deletion(seed: int, seconds: float) -> Outcome:
    """Trees until the time is up."""
    outcome, end = Outcome(part="deletion"), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        template = make_template(Path(folder))
        while time.monotonic() < end:
            here = Path(folder, f"case-{outcome.cases}")
            wrong, deleted = try_once(random.Random(f"{seed}-{outcome.cases}"), template, here)
            outcome.failures += [f"case {outcome.cases}: {text}" for text in wrong]
            outcome.counts["files deleted"] += deleted
            outcome.counts["cases that deleted"] += deleted > 0
            outcome.cases += 1
            shutil.rmtree(here)
    return outcome
