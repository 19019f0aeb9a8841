"""The contract of a store: one suite over local disk, memory, and a real S3 server by both clients."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from titan_ckpt.errors import ConditionFailedError, NotFoundError, StoreError, UsageError
from titan_ckpt.store.base import LARGEST_CHANGING_PART, Steady, Store, probe_conditions
from titan_ckpt.store.open import open_store
from tools.gcs_server import running_gcs

MB = 1 << 20


@pytest.fixture(scope="module")
def gcs_token() -> Iterator[dict[str, str]]:
    with running_gcs() as token:
        yield token


# `make stores` starts emulators and runs this suite on them as well.
EMULATED = tuple(filter(None, os.environ.get("TITAN_CKPT_TEST_STORES", "").split(",")))
ON_S3 = tuple(pytest.param(name, marks=pytest.mark.s3) for name in ("botocore", "s3fs"))


@pytest.fixture(params=["file", "memory", "gs", *ON_S3, *EMULATED])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "gs":
        return open_store(f"gs://bucket/{tmp_path.name}", token=request.getfixturevalue("gcs_token"))
    if request.param in EMULATED:
        return open_store(f"{request.param}://titan-tests/{tmp_path.name}-{secrets.token_hex(4)}")
    if request.param in ("botocore", "s3fs"):
        return open_store(request.getfixturevalue("s3_url"), client=request.param)
    return open_store(tmp_path / "run" if request.param == "file" else f"memory://{tmp_path.name}")


def test_what_is_written_in_parts_reads_back_whole(store: Store) -> None:
    entry = store.write("step-00000001/data", [b"one", bytearray(b"two"), memoryview(b"three"), b""])
    assert store.read("step-00000001/data") == b"onetwothree"
    assert (entry.path, entry.size_bytes) == ("step-00000001/data", 11)
    assert store.stat("step-00000001/data").version == entry.version


def test_an_empty_object_is_an_object(store: Store) -> None:
    assert store.write("empty", []).size_bytes == 0
    assert store.read("empty") == b""
    store.read_into("empty", 0, memoryview(bytearray()))


def test_a_large_object_of_uneven_parts_reads_back_by_ranges(store: Store) -> None:
    content = os.urandom(5 * MB)
    sizes = [3, 700, 17 * MB - 5, 33 * MB + 1, 1, 6 * MB]
    parts = [memoryview(content * (size // len(content) + 1))[:size] for size in sizes]
    whole = b"".join(parts)
    assert store.write("big", iter(parts)).size_bytes == sum(sizes)
    for start, length in [(0, len(whole)), (16 * MB - 1, 2), (len(whole) - 3, 3), (12345, 40 * MB), (7, 0)]:
        buffer = memoryview(bytearray(length))
        store.read_into("big", start, buffer)
        assert buffer == whole[start : start + length]


def test_a_part_up_to_8_mib_may_change_after_the_next_request(store: Store) -> None:
    def parts() -> Iterator[memoryview]:
        buffer = bytearray(LARGEST_CHANGING_PART)
        for number, size in enumerate((5, 8 * MB, 3 * MB, 7 * MB, 8 * MB, 1)):
            buffer[:size] = bytes([number + 1]) * size
            yield memoryview(buffer)[:size]

    whole = b"".join(bytes(part) for part in parts())
    store.write("reused", parts())
    assert store.read("reused") == whole


def test_steady_parts_read_back_whole(store: Store) -> None:
    block = os.urandom(17 * MB)
    parts = [block[n : n + 9] for n in range(3000)] + [block, b"", block[:100], block[: 6 * MB], block[: 11 * MB]]
    assert store.write("steady", Steady(iter(parts))).size_bytes == sum(map(len, parts))
    assert store.read("steady") == b"".join(parts)


def test_the_rest_follows_when_a_disk_takes_part_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    writev = os.writev

    def short(descriptor: int, views: list[memoryview]) -> int:
        calls.append(sum(map(len, views)))
        return writev(descriptor, [views[0][: max(1, len(views[0]) // 2)]] if len(calls) % 2 else views)

    monkeypatch.setattr(os, "writev", short)
    parts = [os.urandom(size) for size in (3, 700_001, 17 * MB, 1, 40)]
    open_store(str(tmp_path)).write("x", Steady(parts))
    assert (tmp_path / "x").read_bytes() == b"".join(parts)
    assert max(calls) == 16 * MB
    assert len(calls) < 8


def test_a_read_fills_a_buffer_of_any_element_type(store: Store) -> None:
    store.write("x", [bytes(range(16))])
    buffer = bytearray(8)
    store.read_into("x", 4, memoryview(buffer).cast("I"))
    assert bytes(buffer) == bytes(range(4, 12))


def test_a_range_fills_several_buffers(store: Store) -> None:
    content = os.urandom(3 * MB)
    store.write("x", [content])
    buffers = [bytearray(size) for size in (1, 0, MB + 7, 12, 2 * MB - 100)]
    store.read_scattered("x", 5, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == content[5:][: sum(map(len, buffers))]
    with pytest.raises(StoreError, match="x"):
        store.read_scattered("x", 3 * MB - 20, [memoryview(bytearray(16)), memoryview(bytearray(5))])


def test_reading_past_the_end_reports_where_the_object_ends(store: Store) -> None:
    store.write("short", [b"12345"])
    for start, length in [(0, 6), (4, 2), (5, 1), (9, 1)]:
        with pytest.raises(StoreError, match="short"):
            store.read_into("short", start, memoryview(bytearray(length)))


def test_reading_what_is_not_there_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError, match="nothing/here"):
        store.read("nothing/here")
    with pytest.raises(NotFoundError, match="nothing/here"):
        store.read_into("nothing/here", 0, memoryview(bytearray(3)))
    with pytest.raises(NotFoundError):
        store.stat("nothing/here")
    assert not store.exists("nothing/here")


def test_a_folder_is_not_an_object(store: Store) -> None:
    store.write("folder/x", [b"x"])
    assert not store.exists("folder")


def test_writing_again_replaces_the_whole_object_and_its_version(store: Store) -> None:
    first = store.write("x", [b"a longer first text"])
    second = store.write("x", [b"second"])
    assert store.read("x") == b"second"
    assert first.version != second.version


@pytest.mark.parametrize("good_bytes", [0, 5, 40 * MB])
def test_an_error_in_the_parts_leaves_nothing(store: Store, good_bytes: int) -> None:
    def parts() -> Iterator[bytes]:
        for start in range(0, good_bytes, 10 * MB):
            yield bytes(min(10 * MB, good_bytes - start))
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store.write("folder/x", parts())
    assert not store.exists("folder/x")
    assert list(store.list()) == []


def test_an_error_in_the_parts_keeps_the_existing_object(store: Store) -> None:
    def parts() -> Iterator[bytes]:
        yield b"new"
        raise RuntimeError("the source broke")

    store.write("x", [b"old"])
    with pytest.raises(RuntimeError):
        store.write("x", parts())
    assert store.read("x") == b"old"


def test_listing_is_in_order_of_path_and_stays_below_the_folder(store: Store) -> None:
    for path in ["b/2", "a/x/1", "a-b", "a/0", "ab/1"]:
        store.write(path, [path.encode()])
    assert sorted(e.path for e in store.list()) == ["a-b", "a/0", "a/x/1", "ab/1", "b/2"]
    assert [(e.path, e.size_bytes) for e in store.list("a")] == [("a/0", 3), ("a/x/1", 5)]
    assert list(store.list("nothing")) == []
    assert store.folders() == ["a", "ab", "b"]
    assert store.folders("a") == ["x"]
    assert store.folders("nothing") == []
    assert {e.path: e.version for e in store.list()} == {e.path: store.stat(e.path).version for e in store.list()}


def test_deleting_is_idempotent_and_takes_empty_folders_along(store: Store) -> None:
    for path in ["a/x/1", "a/x/2", "b"]:
        store.write(path, [b"x"])
    store.delete(["a/x/1", "a/x/2", "a/x/3", "never/was"])
    assert [e.path for e in store.list()] == ["b"]
    if not store.url.startswith("s3:"):  # some servers, such as SeaweedFS, list an emptied folder for some minutes
        assert store.folders() == []
    store.delete(["b"])
    store.delete([])


def test_more_objects_than_a_page_holds_are_listed_and_deleted(store: Store) -> None:
    names = [f"many/{number:05d}" for number in range(1205)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(name, [b"x"]), names))
    assert [e.path for e in store.list("many")] == names
    store.delete(names)
    assert list(store.list()) == []


def test_a_conditional_create_has_one_winner_of_sixteen(store: Store) -> None:
    assert store.honours_conditions()
    start = threading.Barrier(16)

    def create(number: int) -> bool:
        start.wait()
        try:
            store.write_if("COMMIT.json", str(number).encode(), version=None)
        except ConditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(create, range(16)))
    assert sum(won) == 1
    assert store.read("COMMIT.json") == str(won.index(True)).encode()


def test_a_conditional_replace_needs_the_version_that_is_there(store: Store) -> None:
    first = store.write_if("COMMIT.json", b"first", version=None)
    second = store.write_if("COMMIT.json", b"second", version=first.version)
    with pytest.raises(ConditionFailedError, match=r"COMMIT\.json"):
        store.write_if("COMMIT.json", b"third", version=first.version)
    assert store.read("COMMIT.json") == b"second"
    assert store.stat("COMMIT.json").version == second.version
    with pytest.raises(ConditionFailedError):
        store.write_if("absent", b"x", version=first.version)
    assert not store.exists("absent")


def test_the_probe_leaves_nothing_behind(store: Store) -> None:
    assert probe_conditions(store)
    assert list(store.list()) == []


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "a/./b", "", "a\\b", "a\0b"])
def test_no_path_leaves_the_store(store: Store, path: str) -> None:
    with pytest.raises(UsageError, match="not a path inside"):
        store.write(path, [b"x"])
    with pytest.raises(UsageError, match="not a path inside"):
        store.read_into(path, 0, memoryview(bytearray(1)))
    with pytest.raises(UsageError, match="not a path inside"):
        store.delete([path])


def test_names_with_blanks_and_other_letters_are_kept(store: Store) -> None:
    for path in ["a b+c/ü=%20&?#.txt", ".metadata"]:
        store.write(path, [path.encode()])
        assert store.read(path) == path.encode()
    assert [e.path for e in store.list()] == [".metadata", "a b+c/ü=%20&?#.txt"]


def test_many_threads_read_and_write_at_once(store: Store) -> None:
    def round_trip(number: int) -> bool:
        data = bytes([number]) * (100_000 + number)
        store.write(f"t/{number}", [data])
        return store.read(f"t/{number}") == data

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(round_trip, range(64)))
