"""A paced upload: evenly at its rate, at full speed once somebody waits, within the time limit, ended by a stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import StoreError, UsageError
from titan_ckpt.saving.pace import Pace, fitting_pace
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.store.base import Buffer, ObjectInfo
from titan_ckpt.store.local import FileStore

STATE: dict[str, Any] = {"w": torch.arange(90_000.0), "more": torch.ones(90_000), "name": "x"}  # more than one buffer


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, paced: Pace) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("titan_ckpt.saving.pace.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr(paced._wake, "wait", self.wait)

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return False


def test_buffers_are_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Pace(10.0)
    clock, sent = Clock(monkeypatch, paced), []
    for size_bytes in (20, 20, 10):
        paced.before(size_bytes)
        sent.append(clock.now_s)
    assert sent == [100.0, 102.0, 104.0]


def test_time_that_the_store_lost_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Pace(10.0)
    clock = Clock(monkeypatch, paced)
    paced.before(10)
    clock.now_s += 50
    paced.before(10)
    paced.before(10)
    assert clock.now_s == 151.0


@pytest.mark.parametrize("end", [Pace.lift, Pace.stop])
def test_who_waits_is_woken_at_once(end: Callable[[Pace], None]) -> None:
    paced, ended = Pace(1e-6), []

    def upload() -> None:
        paced.before(1)
        try:
            paced.before(1)
            ended.append("sent")
        except SaveError:
            ended.append("stopped")

    thread = threading.Thread(target=upload, daemon=True)
    thread.start()
    end(paced)
    thread.join(60)
    assert ended == ["stopped" if end is Pace.stop else "sent"]


@pytest.mark.parametrize(("rate", "expected"), [(10.0, 10.0), (1.0, 4.0)])
def test_a_rate_that_misses_the_limit_is_raised(rate: float, expected: float, caplog: pytest.LogCaptureFixture) -> None:
    said = set[str]()
    for _ in range(2):
        assert fitting_pace(rate, _items(200), give_up_s=100.0, said=said).bytes_per_s == expected
    assert len(caplog.records) == (rate < expected)
    assert not caplog.records or "Raise timeout_s" in caplog.text


def _items(size_bytes: int) -> Any:
    return [ObjectInfo(path="", size_bytes=size_bytes, modified_s=0.0, version="")]


@pytest.mark.parametrize("end", ["wait", "handle.wait", "next save", "close", "error"])
def test_a_paced_save_is_over_soon_if_waited_for(tmp_path: Path, end: str) -> None:
    options = SaveOptions(upload_bytes_per_s=1e-3, timeout_s=1e9)
    with suppress(KeyError), Saver(str(tmp_path / "run"), options) as saver:
        handle = saver.save(STATE, step=1)
        if end == "error":
            raise KeyError
        actions: dict[str, Callable[[], object]] = {
            "wait": saver.wait, "handle.wait": handle.wait, "next save": lambda: saver.save(STATE, step=2), "close": saver.close,
        }  # fmt: skip
        actions[end]()
    assert torch.equal(open_checkpoint(f"{tmp_path}/run@1").read("w"), STATE["w"])
    assert verify(f"{tmp_path}/run", read_data=True) == []


def test_looking_at_a_handle_does_not_lift_its_pace(tmp_path: Path) -> None:
    with Saver(str(tmp_path), SaveOptions(upload_bytes_per_s=1e-3, timeout_s=1e9)) as saver:
        handle = saver.save(STATE, step=1)
        with pytest.raises(TimeoutError):
            handle.wait(0)
        assert saver.metrics().is_uploading


def test_a_synchronous_save_is_not_paced(tmp_path: Path) -> None:
    with Saver(str(tmp_path), SaveOptions(upload_bytes_per_s=1e-3, timeout_s=1e9)) as saver:
        saver.save_now(STATE, step=1)


@pytest.mark.parametrize("codec", ["raw", "planes-zstd"])
def test_a_paced_save_writes_the_same_file(tmp_path: Path, codec: str) -> None:
    files = []
    for rate in (None, 1e9):
        with Saver(str(tmp_path / str(rate)), SaveOptions(codec=codec, upload_bytes_per_s=rate)) as saver:
            saver.save(STATE, step=1)
        files.append(open_checkpoint(f"{tmp_path}/{rate}").manifest.files[0].digest)
    assert files[0] == files[1]


def test_a_mirror_keeps_the_pace_until_it_is_closed(tmp_path: Path) -> None:
    options = SaveOptions(upload_bytes_per_s=1e-3, timeout_s=1e9, mirror=str(tmp_path / "safe"), is_exclusive=False)
    with Saver(str(tmp_path / "fast"), options) as saver:
        for step in (1, 2, 3):
            saver.save(STATE, step=step)
    assert [open_checkpoint(f"{tmp_path}/safe@{step}").step for step in (1, 2, 3)] == [1, 2, 3]


class Hanging(FileStore):
    """Holds up an upload until it is told to go on."""

    is_held: threading.Event

    def write(self, path: str, parts: Iterable[Buffer]) -> ObjectInfo:
        return super().write(path, self._held(parts) if path.endswith(".distcp") else parts)

    def _held(self, parts: Iterable[Buffer]) -> Iterable[Buffer]:
        for part in parts:
            self.is_held.wait(60)
            yield part


def test_an_upload_that_was_given_up_writes_no_more(tmp_path: Path) -> None:
    store = Hanging(str(tmp_path))
    store.is_held = threading.Event()
    before = set(threading.enumerate())
    with Saver(store, SaveOptions(timeout_s=0.5)) as saver:
        handle = saver.save(STATE, step=1)
        with pytest.raises(StoreError, match="given up"):
            handle.wait()
    store.is_held.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert [path for path in tmp_path.rglob("*") if path.name.endswith(".distcp")] == []


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), True, "fast"])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with pytest.raises(UsageError, match="upload_bytes_per_s"):
        SaveOptions(upload_bytes_per_s=rate)
