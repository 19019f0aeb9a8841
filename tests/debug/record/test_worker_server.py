"""The worker server leaves no notices of torch's on stderr, and nothing else is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from titan_ckpt.debug.record.worker_server import WorkerServer, without_notices


def test_a_server_starts_and_stops_without_a_word(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = WorkerServer.start(tmp_path / "s.sock")
    assert server is not None
    server.stop()
    assert capfd.readouterr().err == ""


def test_what_others_write_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with without_notices():
        os.write(2, b"before\n[W1122 WorkerServer.cpp:144] [c10d] Server shutting down\nafter, without an end")
    assert capfd.readouterr().err == "before\nafter, without an end"
