"""The guard in tests/conftest.py sees what a test leaves behind, and puts it back."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import process_state
from tests.support.process_state import ProcessState, threads_left, waiting_threads

LEFT: dict[str, Callable[[], object]] = {
    "environment: TITAN_LEFT None became '1'": lambda: os.environ.update(TITAN_LEFT="1"),
    "environment: PATH": lambda: os.environ.pop("PATH"),
    "folder": lambda: os.chdir("/"),
    "handlers: 12": lambda: signal.signal(signal.SIGUSR2, lambda *_: None),
    "handlers: 15": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "logging: (30": lambda: logging.getLogger().setLevel(logging.CRITICAL),
    "logging": lambda: logging.getLogger("titan_ckpt").setLevel(logging.INFO),
    "torch": lambda: torch.set_default_dtype(torch.float64),
    "torch: (": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch: ": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("named", LEFT)
def test_what_is_left_behind_is_named_and_put_back(named: str) -> None:
    before = ProcessState.now()
    LEFT[named]()
    changed = before.put_back()
    assert len(changed) == 1
    assert changed[0].startswith(named)
    assert ProcessState.now() == before
    assert before.put_back() == []


def test_a_thread_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "ENDING_S", 0.1)
    before, go_on = waiting_threads(), threading.Event()
    threads = [threading.Thread(target=go_on.wait, name=name, daemon=name == "b") for name in ("a", "b")]
    for thread in threads:
        thread.start()
    assert threads_left(before) == ["a"]
    go_on.set()
    monkeypatch.undo()
    assert threads_left(before) == []


def test_another_folder_of_the_test_itself_is_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ProcessState.now()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TITAN_LEFT", "1")
    monkeypatch.undo()
    assert before.put_back() == []
