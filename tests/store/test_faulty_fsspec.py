"""An fsspec file system that fails: an error is never taken for "nothing there", whichever call it hits."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from titan_ckpt.errors import NotFoundError, StoreError, TransientStoreError
from titan_ckpt.store.any_fsspec import FsspecStore
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.fsspec_errors import translate

QUICK = RetryPolicy(tries=3, first_wait_s=0.0, longest_wait_s=0.0)


class FailingFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local file system; `fails[call]` errors are raised by that call, one each time, before it does anything."""

    protocol = "failing"
    fails: dict[str, list[Exception]]

    def _fail(self, call: str) -> None:
        if self.fails.get(call):
            raise self.fails[call].pop(0)

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        self._fail("ls")
        return super().ls(path, detail=detail, **kwargs)

    def info(self, path: Any, **kwargs: Any) -> Any:
        self._fail("info")
        return super().info(path, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self._fail("cat_file")
        data = super().cat_file(path, start=start, end=end, **kwargs)
        return data[: len(data) // 2] if self.fails.get("short") and self.fails["short"].pop() else data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FsspecStore]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    FailingFileSystem.fails = {}
    found = FsspecStore(f"failing://{tmp_path}/run", QUICK)
    found.write("a/b/x", [b"content"])
    found.write("a/y", [b"y"])
    yield found
    FailingFileSystem.fails = {}


def eio() -> Exception:
    return OSError(errno.EIO, "Input/output error")


READS: dict[str, Callable[[FsspecStore], object]] = {
    "list": lambda store: [entry.path for entry in store.list()],
    "list below": lambda store: [entry.path for entry in store.list("a")],
    "folders": lambda store: store.folders("a"),
    "stat": lambda store: store.stat("a/b/x").size_bytes,
    "exists": lambda store: store.exists("a/b/x"),
    "read": lambda store: store.read("a/b/x", 2, 3),
}
ANSWERS = {
    "list": ["a/b/x", "a/y"], "list below": ["a/b/x", "a/y"], "folders": ["b"], "stat": 7, "exists": True, "read": b"nte",
}  # fmt: skip
CALL = {"stat": "info", "exists": "info", "read": "cat_file"}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    "error", [eio(), TimeoutError("slow"), ConnectionResetError("reset"), FileNotFoundError("a false 404")]
)
def test_a_passing_failure_changes_no_answer(store: FsspecStore, read: str, number: int, error: Exception) -> None:
    FailingFileSystem.fails = {CALL.get(read, "ls"): [error] * (number + 1)}
    assert READS[read](store) == ANSWERS[read]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("error", [eio(), PermissionError("no"), TimeoutError("slow"), ValueError("what")])
def test_a_lasting_failure_is_an_error_not_an_absence(store: FsspecStore, read: str, error: Exception) -> None:
    FailingFileSystem.fails = {call: [error] * 99 for call in ("ls", "info", "cat_file")}
    with pytest.raises(StoreError) as caught:
        READS[read](store)
    assert not isinstance(caught.value, NotFoundError)


def test_a_store_that_contradicts_itself_is_an_error(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """`a/b` and `a/b/x` are said to be missing each time, but their folders list them."""

    def lying(answer: Any) -> Any:
        def call(self: FailingFileSystem, path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).endswith(("/b", "/x")):
                raise FileNotFoundError(path)
            return answer(self, path, *args, **kwargs)

        return call

    for name in ("ls", "cat_file", "info"):
        monkeypatch.setattr(FailingFileSystem, name, lying(getattr(LocalFileSystem, name)))
    for read in ("list", "list below", "stat", "exists", "read"):
        with pytest.raises(TransientStoreError, match="its folder lists it"):
            READS[read](store)


def test_what_is_not_there_is_not_there(store: FsspecStore) -> None:
    assert list(store.list("nowhere/at/all")) == []
    assert store.folders("a/b/c") == []
    assert not store.exists("a/b/z")
    with pytest.raises(NotFoundError):
        store.read("z/z", 0, 1)


def test_a_short_read_is_repeated_a_short_file_is_not(store: FsspecStore) -> None:
    FailingFileSystem.fails = {"short": [eio()]}
    assert store.read("a/b/x", 0, 7) == b"content"
    with pytest.raises(StoreError, match="ends at byte 7, but 8"):
        store.read("a/b/x", 0, 8)
    FailingFileSystem.fails = {"short": [eio()] * 99}
    with pytest.raises(TransientStoreError, match="sent 3 of 7 bytes"):
        store.read("a/b/x", 0, 7)


def test_links_are_listed_as_links_and_not_followed(store: FsspecStore, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "z").write_bytes(b"zz")
    (tmp_path / "run" / "a" / "folder").symlink_to(tmp_path / "other")
    (tmp_path / "run" / "a" / "file").symlink_to(tmp_path / "other" / "z")
    (tmp_path / "run" / "a" / "dangling").symlink_to(tmp_path / "nowhere")
    assert [(e.path, e.size_bytes, e.is_link) for e in store.list("a")] == [
        ("a/b/x", 7, False), ("a/file", 2, True), ("a/y", 1, False)
    ]  # fmt: skip
    assert store.folders("a") == ["b"]


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _not_found_because(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except Exception as inner:
            raise FileNotFoundError("https://host/x") from inner
    except FileNotFoundError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (KeyError("x"), NotFoundError),
        (StatusError(404), NotFoundError),
        (StatusError(503), TransientStoreError),
        (StatusError(403), TransientStoreError),
        (TimeoutError(), TransientStoreError),
        (asyncio.IncompleteReadError(b"", 1), TransientStoreError),
        (OSError(errno.ECONNREFUSED, "refused"), TransientStoreError),
        (OSError(errno.ENOENT, "none"), NotFoundError),
        (type("ResourceNotFoundError", (Exception,), {})("gone"), NotFoundError),
        (type("ServerDisconnectedError", (Exception,), {})(), TransientStoreError),
    ],
)
def test_a_not_found_is_judged_by_what_it_was_made_of(cause: Exception, kind: type[StoreError]) -> None:
    """As fsspec's HTTP file system does for any failed request."""
    assert type(translate(_not_found_because(cause), "https://host/x")) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StatusError(503), TransientStoreError),
        (StatusError(429), TransientStoreError),
        (StatusError(400), StoreError),
        (eio(), TransientStoreError),
        (OSError(errno.ENOSPC, "full"), StoreError),
        (type("ServerTimeoutError", (Exception,), {})(), TransientStoreError),
        (ValueError("x"), StoreError),
    ],
)
def test_errors_of_networks_are_transient(error: Exception, kind: type[StoreError]) -> None:
    assert type(translate(error, "gs://b/x")) is kind
