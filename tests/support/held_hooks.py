"""Hooks for `--module`: a rank whose environment has HOLD=RANKS:STEPS waits for a signal after so many steps on so many ranks."""

from __future__ import annotations

import os
import signal

from titan_ckpt.trainer import Hooks

HOLD = "TEST_HOLD"


class Held(Hooks):
    """Holds the rank where its test has something to do, however fast the machine is."""

    def __init__(self) -> None:
        ranks, _, steps = os.environ.get(HOLD, "").partition(":")
        self._steps_left = int(steps) if ranks == os.environ.get("WORLD_SIZE", "1") else -1

    def before_step(self, step: int) -> None:  # noqa: ARG002
        if self._steps_left == 0:
            _wait_for_a_signal()
        self._steps_left -= 1


def _wait_for_a_signal() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    os.read(read, 1)  # the signal's own handler runs, too
    signal.set_wakeup_fd(before)


hooks = Held()
