"""What is no file where a file should be: a pipe, which would block whoever opens it, a socket, a folder."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import save
from titan_ckpt.store.base import Store
from titan_ckpt.store.local import FileStore

READS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("odd"),
    "a range": lambda store: store.read("odd", 2, 3),
    "read_into": lambda store: store.read_into("odd", 0, memoryview(bytearray(4))),
    "opened": lambda store: store.opened("odd").__enter__(),
}


@pytest.fixture(autouse=True)
def _no_wait() -> Iterator[None]:
    """End a read that blocks; a system call that a signal interrupts raises what the handler raises."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _place(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
@pytest.mark.parametrize("how", READS)
def test_no_read_waits_for_a_pipe(kind: str, how: str, tmp_path: Path) -> None:
    _place(tmp_path / "odd", kind)
    with pytest.raises(TitanError, match="odd"):
        READS[how](FileStore(str(tmp_path)))


def test_a_pipe_in_place_of_data_is_damage(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(1000)}, step=1)
    (data,) = tmp_path.glob("step-00000001/a-*/__0_0.distcp")
    data.unlink()
    os.mkfifo(data)
    assert verify(str(tmp_path), read_data=True)
    with pytest.raises(TitanError, match="__0_0"):
        load(open_checkpoint(tmp_path, on_damage="error"), {"w": torch.zeros(1000)})
