"""Other fsspec schemes: what is half written never appears, what cannot be promised is said."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_ckpt.errors import NotFoundError, StoreError, UsageError
from titan_ckpt.store import open_store
from titan_ckpt.store_fsspec import SINGLE_SHOT_BYTES, FsspecStore


@pytest.fixture
def store(tmp_path: Path) -> FsspecStore:
    """fsspec's own local file system: unlike memory, it streams what is large."""
    found = open_store(f"local://{tmp_path}/run")
    assert isinstance(found, FsspecStore)
    return found


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
def test_a_write_that_fails_leaves_nothing_even_after_garbage_collection(store: FsspecStore, good_bytes: int) -> None:
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


def test_a_store_without_conditional_writes_says_so(store: FsspecStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not store.honours_conditions()
    assert "no conditional writes" in caplog.text


def test_a_scheme_that_nobody_knows_and_one_whose_library_is_missing_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="fsspec knows"):
        open_store("nosuch://x/y")
    with pytest.raises(UsageError, match="gcsfs"):
        open_store("gs://bucket/run")


def test_deleting_what_is_gone_is_fine(store: FsspecStore) -> None:
    store.delete(["never/was"])
    with pytest.raises(NotFoundError):
        store.stat("never/was")
