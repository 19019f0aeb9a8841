"""What a test should leave as it found it, since all later tests of the process inherit it."""

from __future__ import annotations

import concurrent.futures.thread
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NOT_OURS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
"""Beginnings of names: set by pytest before each phase of a test, and by torch when it compiles."""
ENDING_S = 60.0
"""A thread may take that long to end once its work is done; who leaves none behind waits for none."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The parts of a process that outlive a test; `torch` is None before its import."""

    environment: dict[str, str]
    folder: str
    handlers: dict[signal.Signals, Any]
    logging: tuple[int, ...]
    torch: tuple[Any, ...] | None

    @classmethod
    def now(cls) -> ProcessState:
        """The state of this process."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_OURS)}
        handlers = {number: signal.getsignal(number) for number in SIGNALS}
        levels = (logging.root.level, logging.root.manager.disable, logging.getLogger("titan_ckpt").level)
        return cls(environment, os.getcwd(), handlers, levels, _state_of_torch(sys.modules.get("torch")))

    def put_back(self) -> list[str]:
        """Restore this state; says what had changed."""
        now = ProcessState.now()
        changed = []
        for name in (field.name for field in fields(self)):
            before, after = getattr(self, name), getattr(now, name)
            if before != after and before is not None:
                changed.append(f"{name}: {_difference(before, after)}")
        if changed:
            self._restore(now)
        return changed

    def _restore(self, now: ProcessState) -> None:
        for name in now.environment.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.folder)
        for number, handler in self.handlers.items():
            if handler is not None:  # one that was not set from Python cannot be
                signal.signal(number, handler)
        logging.root.setLevel(self.logging[0])
        logging.disable(self.logging[1])
        logging.getLogger("titan_ckpt").setLevel(self.logging[2])
        if self.torch is not None:
            import torch

            threads, dtype, is_strict, has_grad, _ = self.torch
            torch.set_num_threads(threads)
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(is_strict)
            torch.set_grad_enabled(has_grad)


def _state_of_torch(torch: ModuleType | None) -> tuple[Any, ...] | None:
    """Threads, default dtype, whether algorithms must be deterministic, whether gradients are kept, whether a group is there."""
    if torch is None or not hasattr(torch, "distributed"):  # its import is under way, or failed
        return None
    return (
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.distributed.is_available() and torch.distributed.is_initialized(),
    )


def _difference(before: Any, after: Any) -> str:
    """The keys that changed, with their values; of anything but a dict both values."""
    if not isinstance(before, dict):
        return f"{before!r} became {after!r}"
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return ", ".join(f"{key} {before.get(key)!r} became {after.get(key)!r}" for key in keys)


def waiting_threads() -> set[threading.Thread]:
    """The threads for which the interpreter waits at its end, without those of pools, which it ends itself."""
    of_pools = concurrent.futures.thread._threads_queues
    return {thread for thread in threading.enumerate() if not thread.daemon and thread not in of_pools}


def threads_left(before: set[threading.Thread]) -> list[str]:
    """Names of the threads that were started after `before`, do not end and keep the interpreter from ending."""
    left = []
    for thread in waiting_threads() - before:
        thread.join(ENDING_S)
        if thread.is_alive():
            left.append(thread.name)
    return left
