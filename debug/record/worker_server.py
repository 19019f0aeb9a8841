"""Torch's worker server in this process: C++, so it answers `debug collect` while something holds the GIL."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.debug.record.private_socket import PrivateSocket, bind_privately
from titan_ckpt.debug.record.worker_endpoint import is_answering

log = logging.getLogger(__name__)
START_S = 5.0
_NOTICE = b" WorkerServer.cpp:"


@contextmanager
def without_notices() -> Iterator[None]:
    """Leave torch's notices of this server out of stderr: its C++ warns that it starts and that it ends.

    Other output of these moments is written afterwards. Seen in torch 2.13 (WorkerServer.cpp); TORCH_CPP_LOG_LEVEL would hide the
    warnings of all of torch, and is read before this code runs.
    """
    with ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile())
            real = stack.enter_context(os.fdopen(os.dup(2), "wb", buffering=0))
        except OSError:  # no stderr, or no place for a file
            held = None
        if held is None:
            yield
            return
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real.fileno(), 2)
            held.seek(0)
            with suppress(OSError):
                real.write(b"".join(line for line in held if _NOTICE not in line))


class WorkerServer:
    """A server that listens on the Unix socket `endpoint`, of this user alone."""

    def __init__(self, bound: PrivateSocket[Any]) -> None:
        self._bound, self._server, self.endpoint = bound, bound.listener, bound.path

    @staticmethod
    def start(path: Path) -> WorkerServer | None:
        """Listen at `path`, or in a temporary folder; None, and a warning, where torch cannot: all else works without it."""
        server = getattr(torch._C._distributed_c10d, "_WorkerServer", None)
        if server is None:
            return None
        try:
            with without_notices():
                return WorkerServer(bind_privately(path, server))
        except (OSError, RuntimeError) as error:
            log.warning("no worker server at %s: %s", path, error)
            return None

    def stop(self) -> None:
        """Shut it down once it answers: shutting down one that has not begun to listen waits for ever.

        Seen with torch 2.13 (its HTTP library ignores a stop that comes before the start). One that does not answer within
        START_S is left to the end of the process, its destructor, which would wait as well, kept from running.
        """
        deadline = time.monotonic() + START_S
        while not is_answering(self.endpoint) and time.monotonic() < deadline:
            time.sleep(0.02)
        if is_answering(self.endpoint):
            with without_notices():
                self._server.shutdown()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._server))
            log.warning("the worker server at %s does not answer and is left to the end of the process", self.endpoint)
        self._bound.remove()
