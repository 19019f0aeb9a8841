"""Whose run it is: the job that claimed it last. A job that was taken over cannot commit any more.

A job that hung, was given up and woke again (a zombie) would otherwise add checkpoints to a run that its successor has already
taken further. The claim is one small file at the run's root, replaced by every job that starts to save there.
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
    """Another job has taken this run over; nothing more is committed by this one."""


def claim(store: Store) -> str:
    """Take the run over; the claim to check before each commit. Fails where the store cannot be written."""
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
    """FencedError if another job has claimed the run since."""
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
