"""Run ownership: only the job that claimed a run last may commit to it.

This fences off zombies: a job that hung and was replaced could otherwise wake up and add checkpoints to a run that its successor
has already continued. The claim is one small file at the run's root, overwritten by every job that starts to save there.

The tiers of a run know each other by `run-id.txt`, which has the same line in all of them and outlives every job. So a job that
goes on with the run on another machine, whose fast tier is empty, may copy to the second tier, and another run may not.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo, list_checkpoints
from titan_ckpt.errors import (
    AlreadyExistsError,
    CheckpointError,
    ConditionFailedError,
    ConfigError,
    DamagedError,
    NotFoundError,
)
from titan_ckpt.format.commit import read_record
from titan_ckpt.format.names import OWNER, RUN_ID
from titan_ckpt.store.base import Store, read_if_any

log = logging.getLogger(__name__)
_ABOUT_ID = "# Names the run whose checkpoints are here; the same in all its tiers."


class FencedError(CheckpointError):
    """Another job has claimed this run; this job can no longer commit to it."""


def claim(store: Store) -> str:
    """Claim the run and return the token for `check_claim`. Also a first test that the store is writable."""
    token = secrets.token_hex(8)
    content = {
        "owner": token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    store.write(OWNER, [json.dumps(content).encode()])
    return token


def check_claim(store: Store, token: str) -> None:
    """FencedError if another job has claimed the run since, or if the claim is unreadable."""
    try:
        content = read_record(store, OWNER)
        owner = content["owner"].text()
    except (NotFoundError, DamagedError) as error:
        raise FencedError(
            f"{store.where(OWNER)}: the claim of this job is gone ({error}); nothing was committed"
        ) from error
    if owner != token:
        raise FencedError(
            f"{store}: the job on {_shown(content.table(), 'host')} (pid {_shown(content.table(), 'pid')}) took this run over at "
            f"{_shown(content.table(), 'since')}; this job's save was not committed. Stop this job."
        )


def join_tiers(first: Store, second: Store) -> None:
    """Make sure that both tiers belong to one run, and note it in both; to be called before anything is copied to `second`.

    AlreadyExistsError if `second` holds another run: their ids differ, or one has none yet and a checkpoint of `first` would
    replace, or come before, one that another save put into `second`. CheckpointError if `second` is empty and `first` has had a
    second tier: what is copied to a folder where no disk is mounted is hidden by the next mount, and gone from `first`.
    """
    here, there = read_run_id(first), read_run_id(second)
    if here is not None and here == there:
        return
    if here is not None and there is not None:
        raise _other_run(first, second, f"its {RUN_ID} names another run")
    if here is not None and not _attempts(second):
        raise CheckpointError(
            f"{second} is empty, but {first} has had a second tier ({first.where(RUN_ID)}); nothing is copied there. Perhaps its "
            f"disk is not mounted: mount it. To begin a new second tier there, copy {RUN_ID} into it first"
        )
    if strange := _steps_of_others(first, second):
        raise _other_run(first, second, f"step {strange[-1]} there is not the one that this run saved")
    name = there or here or secrets.token_hex(8)
    for store, found in ((second, there), (first, here)):
        if found is None:
            _write_run_id(store, name)
    if read_run_id(second) != name:
        raise _other_run(first, second, "another job has just begun to copy to it")


def read_run_id(store: Store) -> str | None:
    """The line in `run-id.txt`; None if there is no such file. ConfigError if it is not one line."""
    data = read_if_any(store, RUN_ID)
    if data is None:
        return None
    lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
    names = [line for line in lines if line and not line.startswith("#")]
    if len(names) != 1:
        raise ConfigError(f"{store.where(RUN_ID)}: expected one line that names the run, found {len(names)}")
    return names[0]


def _write_run_id(store: Store, name: str) -> None:
    with suppress(ConditionFailedError):  # another job was first; the caller looks again
        store.write_if(RUN_ID, f"{_ABOUT_ID}\n{name}\n".encode(), version=None)


def _steps_of_others(first: Store, second: Store) -> list[int]:
    """Steps of `second` that are in the way of those of `first`: the same or newer ones, of another save."""
    here, there = _attempts(first), _attempts(second)
    mine = {step for step, attempt in here.items() if there.get(step) != attempt}
    return sorted(step for step, attempt in there.items() if mine and step >= min(mine) and here.get(step) != attempt)


def _attempts(store: Store) -> dict[int, str]:
    """The attempt of each step that was committed; empty for a step that cannot be opened."""
    infos = (info for info in list_tier(store) if info.state != CheckpointState.PARTIAL)
    return {info.step: "" if info.commit is None else info.commit.attempt for info in infos}


def list_tier(store: Store) -> list[CheckpointInfo]:
    """The steps of a tier; those that the store refuses to read are also logged."""
    infos = list_checkpoints(store)
    for info in infos:
        if info.state == CheckpointState.UNREADABLE:
            log.warning("second tier: %s@%d is left for the next save: %s", store, info.step, info.problem)
    return infos


def _other_run(first: Store, second: Store, why: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        f"{second} holds checkpoints of another run than {first}: {why}. Nothing is copied there. Give this run a mirror of "
        f"its own. If both are one run, write the same line into {second.where(RUN_ID)} and {first.where(RUN_ID)}"
    )


def _shown(content: Mapping[str, Any], key: str) -> str:
    return f"{content.get(key)!s:.80}"
