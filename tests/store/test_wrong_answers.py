"""Stores that answer wrongly: a hostile S3 server, fsspec file systems that lie, and wrappers that must forward everything."""

from __future__ import annotations

import inspect
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from titan_ckpt.checkpoint.uncompressed import DecodedStore
from titan_ckpt.errors import StoreError, TitanError, TransientStoreError
from titan_ckpt.store import deadline
from titan_ckpt.store.base import RetryPolicy, Store
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store
from titan_ckpt.store.s3_answers import ReplacedError
from titan_ckpt.store.time_limit import HungStoreError, run_until
from tools.faults.store import FaultyStore
from tools.hostile.memory_s3 import Answer, Request
from tools.hostile.s3_calls import CALLS, POLICY, START, Call, operations_of, run_case, small_parts
from tools.hostile.s3_server import HostileS3, always, honest, once
from tools.hostile.s3_shapes import SHAPES, Shape

QUICK = RetryPolicy(tries=3, first_wait_s=0.0001, longest_wait_s=0.001, deadline_s=5)


@pytest.fixture(scope="module")
def server() -> Iterator[HostileS3]:
    with small_parts(), HostileS3() as running:
        yield running


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_every_call_is_right_against_an_honest_server(server: HostileS3, call: Call) -> None:
    seen = run_case(server, call, SHAPES["nothing"], rule=honest)
    assert (seen.outcome, seen.problem) == ("not reached", "")


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_wrong_answers_give_errors_or_right_results(server: HostileS3, call: Call) -> None:
    rng = random.Random(f"1-{call.name}")
    operations = operations_of(server, call)
    shapes = [shape for shape in SHAPES.values() if not shape.is_slow and shape.fits_any(operations)]
    reached = 0
    for shape in rng.sample(shapes, 12):
        operation = rng.choice([name for name in operations if shape.fits_any([name])])
        rule = always(shape, operation) if rng.random() < 0.7 else once(shape, rng.randint(1, 2))
        seen = run_case(server, call, shape, rule=rule)
        assert seen.problem == "", f"{shape.name}, {operation}"
        reached += seen.outcome in ("right", "error")
    assert reached >= 5


@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if shape.is_slow], ids=lambda shape: shape.name)
def test_a_slow_answer_ends_with_an_error_at_the_deadline(server: HostileS3, shape: Shape) -> None:
    call = next(call for call in CALLS if call.name == ("list" if shape.operations else "read many parts"))
    rule = always(shape, "ListObjectsV2" if shape.operations else "GetObject")
    seen = run_case(server, call, shape, rule=rule)
    for _ in range(4):
        if seen.outcome == "not reached":  # on a starved machine the deadline may pass before the server answers at all
            seen = run_case(server, call, shape, rule=rule)
    assert (seen.outcome, seen.problem) == ("error", "")


def store_of(server: HostileS3, **options: Any) -> Store:
    server.memory.replace_all(START)
    server.rule = honest
    return open_store("s3://bucket/run", retry_policy=POLICY, **server.options, **options)


def test_one_wrong_answer_costs_a_retry(server: HostileS3) -> None:
    store = store_of(server)
    server.rule = once(SHAPES["200 for a range"], 2)
    assert store.read("small") == START["run/small"]
    assert server.operations["GetObject"] == 2


def test_a_wrong_answer_is_named_in_the_error(server: HostileS3) -> None:
    store = store_of(server)
    for name, text in [
        ("200 for a range", "the answer 200 holds"),
        ("another range", "holds 7 to 263"),
        ("a web page, 404", "the answer 404 is a web page, not S3's"),
        ("compressed", "compressed .gzip."),
        ("no ETag", "no ETag"),
    ]:
        server.rule = always(SHAPES[name], "GetObject")
        with pytest.raises(TransientStoreError, match=f"read s3://bucket/run/small: given up after 3 tries: .*{text}"):
            store.read("small", 0, 256)


def test_a_whole_object_with_another_checksum_is_refused(server: HostileS3) -> None:
    flipped = Shape(
        name="flipped", make=lambda _, answer: Answer(answer.status, answer.headers, answer.body[:-1] + b"!")
    )
    store = store_of(server)
    server.rule = always(flipped, "GetObject")
    with pytest.raises(TransientStoreError, match="CRC-32"):
        store.read("small")


def test_an_object_replaced_between_reads_is_an_error(server: HostileS3) -> None:
    store = store_of(server)
    buffer = memoryview(bytearray(100))
    store.read_into("large", 0, buffer)
    server.memory.put("run/large", START["run/large"][::-1])
    with pytest.raises(ReplacedError, match="large: was replaced since it was first read"):
        store.read_into("large", 100, buffer)
    assert store.stat("large").size_bytes == len(START["run/large"])
    store.read_into("large", 100, buffer)
    assert buffer == START["run/large"][::-1][100:200]


@pytest.mark.parametrize("name", ["small", "empty"])
def test_a_whole_read_costs_two_requests(server: HostileS3, name: str) -> None:
    store = store_of(server)
    entry, data = store.read_whole(name, at_most=len(START["run/small"]))
    assert (entry.size_bytes, data) == (len(START[f"run/{name}"]), START[f"run/{name}"])
    assert (server.operations["HeadObject"], server.operations["GetObject"]) == (1, 1)
    assert store.read_whole("large", at_most=999)[1] is None


@pytest.mark.parametrize("length", [0, 5, len(START["run/small"]) + 1, 1 << 40])
def test_a_stat_that_is_always_wrong_is_an_error(server: HostileS3, length: int) -> None:
    def lie(_: Request, answer: Answer) -> Answer:
        return Answer(answer.status, {**answer.headers, "Content-Length": str(length)}, answer.body)

    store = store_of(server)
    server.rule = always(Shape(name="lies", make=lie), "HeadObject")
    with pytest.raises(StoreError, match="small"):
        store.read_whole("small", at_most=1 << 20)


def test_an_object_replaced_during_a_read_is_read_again(server: HostileS3) -> None:
    store = store_of(server)
    new = START["run/large"][::-1] + b"longer"

    def replace(_: Request, answer: Answer) -> Answer:
        server.memory.put("run/large", new)
        return answer

    server.rule = once(Shape(name="replaced", make=replace), 3)
    assert store.read("large") == new


def test_a_redirect_reads_nothing_from_another_server(server: HostileS3) -> None:
    store = store_of(server)
    server.rule = always(SHAPES["a redirect in a circle, 302"])
    with pytest.raises(StoreError, match="302 is a web page that leads to /"):
        store.stat("small") if store.read("small", 0, 9) else None
    assert server.operations.total() <= 3


def test_a_tls_error_keeps_its_reason() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            with suppress(OSError):  # the listener is closed when the test is over
                for _ in range(3):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        endpoint = f"https://127.0.0.1:{listener.getsockname()[1]}"
        store = open_store("s3://b/run", retry_policy=QUICK, endpoint_url=endpoint, access_key="k", secret_key="s")
        with pytest.raises(StoreError, match=r"TLS failed.*(WRONG_VERSION_NUMBER|wrong version number)"):
            store.stat("x")


def test_a_tls_handshake_ends_at_the_deadline() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"https://127.0.0.1:{listener.getsockname()[1]}"
        store = open_store("s3://b/run", retry_policy=POLICY, endpoint_url=endpoint, access_key="k", secret_key="s")
        started = time.monotonic()
        with pytest.raises(TransientStoreError):
            store.stat("x")
        assert time.monotonic() - started < 40


class _Lies(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Memory whose answers pass through `change` first."""

    protocol = ("lies",)
    change: Callable[[str, Any], Any] = staticmethod(lambda _call, answer: answer)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        return _Lies.change("cat_file", super().cat_file(path, start=start, end=end, **options))

    def info(self, path: str, **options: Any) -> Any:
        return _Lies.change("info", super().info(path, **options))

    def pipe_file(self, path: str, value: bytes, **options: Any) -> Any:
        return super().pipe_file(path, _Lies.change("pipe_file", value), **options)


LIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a short read": ("cat_file", lambda data: data[:-1]),
    "an empty read": ("cat_file", lambda _: b""),
    "a longer read": ("cat_file", lambda data: data + b"!"),
    "a doubled read": ("cat_file", lambda data: data * 2),
    "None": ("cat_file", lambda _: None),
    "text": ("cat_file", lambda data: data.decode("latin-1")),
    "a size too small": ("info", lambda info: {**info, "size": info["size"] - 1}),
    "a size too large": ("info", lambda info: {**info, "size": info["size"] + 1}),
    "no size": ("info", lambda info: {**info, "size": None}),
    "size as text": ("info", lambda info: {**info, "size": "10"}),
    "a negative size": ("info", lambda info: {**info, "size": -1}),
    "no record": ("info", lambda _: None),
    "a short write": ("pipe_file", lambda data: data[:-1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_system_that_lies_gives_an_error(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("lies", _Lies, clobber=True)
    store = open_store("lies://liar", retry_policy=QUICK)
    data = bytes(range(1, 101))
    store.write("x", [data])
    name, change = LIES[lie]
    monkeypatch.setattr(_Lies, "change", staticmethod(lambda call, answer: change(answer) if call == name else answer))
    buffer = bytearray(b"\xee" * 50)

    def use() -> None:
        assert store.read("x") == data
        store.read_into("x", 10, memoryview(buffer))
        store.write("x", [data])

    with pytest.raises(TitanError):
        use()
    assert bytes(buffer) in (b"\xee" * 50, data[10:60])


@pytest.mark.parametrize("lie", ["a short read", "a longer read", "None"])
def test_a_file_system_that_lies_once_is_asked_again(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("lies", _Lies, clobber=True)
    store = open_store("lies://liar", retry_policy=QUICK)
    store.write("x", [b"0123456789"])
    lies = [LIES[lie][1]]
    monkeypatch.setattr(
        _Lies,
        "change",
        staticmethod(lambda call, answer: lies.pop()(answer) if call == "cat_file" and lies else answer),
    )
    assert store.read("x", 2, 5) == b"23456"
    assert lies == []


def _protocol() -> list[str]:
    return [name for name, value in vars(Store).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", _protocol())
def test_a_wrapper_forwards_the_whole_protocol(name: str, tmp_path: Path) -> None:
    """Each method of a guarded store runs the inner store's own method, not the default that `Store` builds from others."""
    called: list[str] = []

    class Inner(FileStore):
        pass

    def spy(method: str) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            called.append(method)
            return getattr(FileStore, method)(*arguments, **options)

        return run

    for method in _protocol():
        setattr(Inner, method, spy(method))
    inner = Inner(str(tmp_path))
    entry = FileStore(str(tmp_path)).write("x", [b"0123"])
    arguments: dict[str, tuple[Any, ...]] = {
        "read_into": ("x", 0, memoryview(bytearray(4))), "read": ("x", 1, 2), "opened": ("x",), "write": ("y", [b"1"]),
        "stat": ("x",), "exists": ("x",), "delete": (["x"],), "held_by_writes": (3,), "where": ("x",), "folders": ("",),
        "list": ("",), "honours_conditions": (), "free_bytes": (), "is_link": ("x",), "is_taken": ("x",), "leftovers": ("",),
        "write_if": ("x", b"2"), "read_whole": ("x",), "read_scattered": ("x", 0, [memoryview(bytearray(2))]),
        "doing": ("work",),
    }  # fmt: skip
    named: dict[str, dict[str, Any]] = {"write_if": {"version": entry.version}, "read_whole": {"at_most": 9}}
    options = named.get(name, {})

    def use(store: Store) -> Any:
        called.clear()
        found = getattr(store, name)(*arguments[name], **options)
        if name == "opened":
            with found as read:
                return read(1, 2)
        return list(found) if name in ("list", "leftovers") else found

    run_until(20, use, inner, what="a test")
    assert name in called


@pytest.mark.parametrize("wrapper", [FaultyStore, lambda inner: DecodedStore(inner, {})])
def test_wrappers_know_the_memory_that_writes_hold(wrapper: Callable[[Store], Store], tmp_path: Path) -> None:
    assert wrapper(FileStore(str(tmp_path))).held_by_writes(7) == 0
    assert wrapper(FileStore(str(tmp_path))).free_bytes() is not None


def test_work_that_was_given_up_reads_no_more_from_an_open_file(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    store.write("x", [b"0123"])
    is_late, ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def work(guarded: Store) -> None:
        with guarded.opened("x") as read:
            is_late.wait(240)
            try:
                read(0, 4)
            except HungStoreError as error:
                errors.append(error)
            finally:
                ended.set()

    with pytest.raises(HungStoreError):
        run_until(0.05, work, store, what="a test")
    is_late.set()
    assert ended.wait(240)
    assert len(errors) == 1


def test_a_server_that_answered_once_and_died_is_reported(server: HostileS3, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(server)
    server.rule = always(SHAPES["a reset"])
    with caplog.at_level(logging.WARNING), pytest.raises(TransientStoreError, match="given up after 3 tries"):
        store.stat("small")
    assert "try 2 of 3" in caplog.text


def test_an_endpoint_that_never_answers_is_given_up_soon(
    server: HostileS3, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has answered once gets the whole deadline."""
    for name, value in (("FIRST_TRY_S", 0.05), ("FIRST_ANSWER_S", 0.2), ("FIRST_ANSWER_SHARE", 0.001)):
        monkeypatch.setattr(deadline, name, value)
    patient = RetryPolicy(tries=9, first_wait_s=0.0001, longest_wait_s=0.001, deadline_s=60)
    store = open_store("s3://bucket/run", retry_policy=patient, **server.options)
    server.memory.replace_all(START)
    server.rule = always(SHAPES["no answer"])
    started = time.monotonic()
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(TransientStoreError, match=r"given up.*check that the server at http://127.0.0.1:\d+ runs"),
    ):
        store.stat("small")
    assert time.monotonic() - started < 20
    assert "no whole answer within 0." in caplog.text
    server.rule = honest
    monkeypatch.setattr(deadline, "FIRST_TRY_S", 20)
    monkeypatch.setattr(deadline, "FIRST_ANSWER_S", 20)
    assert store.exists("small")
    monkeypatch.setattr(deadline, "FIRST_ANSWER_S", 0.0)
    assert store.exists("small")
