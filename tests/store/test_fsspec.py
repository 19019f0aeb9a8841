"""Other fsspec schemes: no half-written object, warnings about missing guarantees, time limits."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from titan_ckpt.errors import NotFoundError, StoreError, UsageError
from titan_ckpt.store.any_fsspec import SINGLE_SHOT_BYTES, FsspecStore
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import HungStoreError


@pytest.fixture
def store(tmp_path: Path) -> FsspecStore:
    """fsspec's own local file system: unlike memory, it streams large objects."""
    return FsspecStore(f"local://{tmp_path}/run", RetryPolicy(), filesystem=LocalFileSystem(auto_mkdir=True))


def test_large_and_small_objects_come_back(store: FsspecStore) -> None:
    large = [bytes([n]) * (3 << 20) for n in range(5)]
    assert store.write("a/large", iter(large)).size_bytes == 15 << 20
    assert store.read("a/large") == b"".join(large)
    store.write("b/small", [b"small"])
    assert [(e.path, e.size_bytes) for e in store.list()] == [("a/large", 15 << 20), ("b/small", 5)]
    assert store.folders() == ["a", "b"]
    with pytest.raises(StoreError, match="ends at byte 5"):
        store.read("b/small", 0, 6)


@pytest.mark.parametrize("good_bytes", [3, SINGLE_SHOT_BYTES + 1, 3 * SINGLE_SHOT_BYTES])
def test_a_failed_write_leaves_nothing_even_after_gc(store: FsspecStore, good_bytes: int) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(good_bytes)
        yield bytes(7)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store.write("a/x", parts())
    gc.collect()
    assert not store.exists("a/x")
    store.write("a/x", [b"old"])
    with pytest.raises(RuntimeError, match="the source broke"):
        store.write("a/x", parts())
    gc.collect()
    assert store.read("a/x") == b"old"


def test_a_store_without_conditional_writes_logs_a_warning(
    store: FsspecStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert not store.honours_conditions()
    assert "no conditional writes" in caplog.text


def test_unknown_schemes_and_missing_libraries_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="fsspec knows"):
        open_store("nosuch://x/y")
    with pytest.raises(UsageError, match="pip install 'ossfs'"):
        open_store("oss://bucket/run")


def test_deleting_what_is_gone_is_fine(store: FsspecStore) -> None:
    store.delete(["never/was"])
    with pytest.raises(NotFoundError):
        store.stat("never/was")


class _Hangs(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A local file system in which calls of one name block until released."""

    protocol = ("hangs",)
    let_go = threading.Event()
    name = ""

    def _wait(self, name: str) -> int:
        if name == _Hangs.name:
            _Hangs.let_go.wait()
        return 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self._wait("cat_file")
        return super().cat_file(path, start=start, end=end, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        self._wait("pipe_file")
        return super().pipe_file(path, value, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._wait("info")
        return super().info(path, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self._wait("open")
        file = super().open(path, mode, **options)
        if "w" in mode and _Hangs.name == "write":
            file.write = lambda _data: self._wait("write")
        return file


@pytest.mark.parametrize("name", ["cat_file", "pipe_file", "info", "open", "write"])
def test_a_client_without_a_time_limit_is_abandoned_at_deadline(tmp_path: Path, name: str) -> None:
    fsspec.register_implementation("hangs", _Hangs, clobber=True)
    large = [bytes(SINGLE_SHOT_BYTES), b"more"]
    open_store(f"hangs://{tmp_path}/run").write("there", [b"abc"])
    store = open_store(f"hangs://{tmp_path}/run", retry_policy=RetryPolicy(deadline_s=0.05))
    calls: dict[str, Callable[[], object]] = {
        "cat_file": lambda: store.read("there", 0, 3),
        "pipe_file": lambda: store.write("small", [b"s"]),
        "info": lambda: store.stat("there"),
        "open": lambda: store.write("large", large),
        "write": lambda: store.write("large", large),
    }
    _Hangs.name = name
    try:
        with pytest.raises(HungStoreError, match=r"no answer within 0\.1 s; given up.*deadline_s"):
            calls[name]()
    finally:
        _Hangs.let_go.set()
    _Hangs.name, _Hangs.let_go = "", threading.Event()
    assert not (tmp_path / "run" / "large").exists()
    assert open_store(f"hangs://{tmp_path}/run").read("there", 0, 3) == b"abc"


def test_s3_inside_a_chain_leaves_retries_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": 7}})
    store = open_store("simplecache::s3://bucket/run", storage_options={"s3": {"anon": True}})
    inner = store._fs.fs  # type: ignore[attr-defined]
    assert inner.config_kwargs["retries"]["total_max_attempts"] == 1
    assert (inner.anon, inner.config_kwargs["read_timeout"]) == (True, 7)
    assert inner is not fsspec.filesystem("s3", anon=True, config_kwargs=inner.config_kwargs)
