"""Run ownership: only the job that claimed a run last may commit to it.

This fences off zombies: a job that hung and was replaced could otherwise wake up and add checkpoints to a run that its successor
has already continued. The claim is one small file at the run's root, overwritten by every job that starts to save there.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time

from titan_ckpt.errors import CheckpointError, NotFoundError
from titan_ckpt.format.names import OWNER
from titan_ckpt.store.base import Store


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
        content = json.loads(store.read(OWNER))
        owner = content["owner"]
    except (NotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FencedError(
            f"{store.where(OWNER)}: the claim of this job is gone ({error}); nothing was committed"
        ) from error
    if owner != token:
        raise FencedError(
            f"{store}: the job on {content.get('host')} (pid {content.get('pid')}) took this run over at "
            f"{content.get('since')}; this job's save was not committed. Stop this job."
        )
