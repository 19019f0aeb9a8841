"""Every call of `S3Store` against every shape of answer: the result is right or an error, in time and in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from titan_ckpt.errors import NotFoundError, TitanError
from titan_ckpt.store import s3, s3_answers, s3_parts
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.open import open_store
from titan_ckpt.store.s3 import S3Store
from tools.hostile.s3_server import HostileS3, Rule, honest
from tools.hostile.s3_shapes import Shape

PART_BYTES = 4096
DEADLINE_S = 0.5
# A call of the store may take several calls of S3, each with its own deadline: 10 for a listing, 4 for a read. And some time
# for busy processors.
LONGEST_S = 12 * DEADLINE_S + 24
MOST_BYTES = 200 << 20
POLICY = RetryPolicy(tries=3, first_wait_s=0.0001, longest_wait_s=0.001, deadline_s=DEADLINE_S)
ODD = "c %2B+&é/w"
SMALL, LARGE = bytes(range(256)), bytes(n % 251 for n in range(5 * PART_BYTES + 77))
OTHER, BOTH = bytes(reversed(SMALL)), LARGE + SMALL
# The length in the answer to a HEAD is all that S3 says of a size; every read that follows is compared with it.
UNSEEN_BY_STAT = {
    "one byte at a time, longer", "a body of 10 GiB", "a length one too short", "a length one too long",
    "a stat of a shorter object", "a stat of 10 GiB",
}  # fmt: skip
START = {
    "run/small": SMALL, "run/large": LARGE, "run/empty": b"", "run/a/x": b"x", "run/a/y": b"yy", "run/b/z": b"zzz",
    f"run/{ODD}": b"odd",
    "run2/other": OTHER,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A call; `expected` is its result, `after` what the objects must then be (None: unchanged)."""

    name: str
    run: Callable[[S3Store], object]
    expected: object
    after: Callable[[dict[str, bytes]], dict[str, bytes]] | None = None


def _read_into(store: S3Store, path: str, start: int, length: int) -> bytes:
    buffer = bytearray(b"\xee" * length)
    store.read_into(path, start, memoryview(buffer))
    return bytes(buffer)


def _read_scattered(store: S3Store, path: str, start: int, sizes: Sequence[int]) -> bytes:
    buffers = [bytearray(size) for size in sizes]
    store.read_scattered(path, start, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


def _opened(store: S3Store) -> list[bytes]:
    with store.opened("large") as read:
        return [read(0, 100), read(5000, 100)]


def _with(**changed: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda objects: objects | {f"run/{name}": data for name, data in changed.items()}


def _less(*paths: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda objects: {key: data for key, data in objects.items() if key not in {f"run/{path}" for path in paths}}


def _replace(store: S3Store) -> int:
    return store.write_if("small", b"replaced", version=store.stat("small").version).size_bytes


CALLS = [
    Call("read", lambda store: store.read("small"), SMALL),
    Call("read a range", lambda store: store.read("small", 10, 100), SMALL[10:110]),
    Call("read many parts", lambda store: store.read("large"), LARGE),
    Call("read an odd name", lambda store: store.read(ODD), b"odd"),
    Call("read nothing", lambda store: store.read("empty"), b""),
    Call("read into", lambda store: _read_into(store, "small", 3, 200), SMALL[3:203]),
    Call("read scattered", lambda store: _read_scattered(store, "large", 3, (5, 1, PART_BYTES - 9)), LARGE[3 : PART_BYTES]),
    Call("read many parts into", lambda store: _read_into(store, "large", 7, 5 * PART_BYTES), LARGE[7 : 7 + 5 * PART_BYTES]),
    Call("opened", _opened, [LARGE[:100], LARGE[5000:5100]]),
    Call("stat", lambda store: (store.stat("small").path, store.stat("small").size_bytes), ("small", len(SMALL))),
    Call("exists", lambda store: [store.exists("small"), store.exists("not/there")], [True, False]),
    Call("list", lambda store: [(e.path, e.size_bytes) for e in store.list("a")], [("a/x", 1), ("a/y", 2)]),
    Call("list all", lambda store: [entry.path for entry in store.list()], ["a/x", "a/y", "b/z", ODD, "empty", "large", "small"]),
    Call("folders", lambda store: store.folders(), ["a", "b", ODD[:-2]]),
    Call("write", lambda store: store.write("new", [b"new"]).size_bytes, 3, _with(new=b"new")),
    Call("write over", lambda store: store.write("small", [b"other"]).size_bytes, 5, _with(small=b"other")),
    Call("write parts", lambda store: store.write("new", [LARGE, SMALL]).size_bytes, len(BOTH), _with(new=BOTH)),
    Call("write if absent", lambda store: store.write_if("new", b"first", version=None).size_bytes, 5, _with(new=b"first")),
    Call("write if unchanged", _replace, 8, _with(small=b"replaced")),
    Call("delete", lambda store: store.delete(["small"]), None, _less("small")),
    Call("delete many", lambda store: store.delete(["small", "large", "a/x"]), None, _less("small", "large", "a/x")),
]  # fmt: skip


_NO_SHAPE = Shape(name="honest", make=lambda _, answer: answer)


@contextmanager
def small_parts() -> Iterator[None]:
    """Parts of PART_BYTES and listings of 300 names, so that a case costs milliseconds."""
    small = [(s3, "PART_BYTES", PART_BYTES), (s3_parts, "PART_BYTES", PART_BYTES), (s3_answers, "MAX_LISTED", 300)]
    with ExitStack() as stack:
        for module, name, value in small:
            stack.enter_context(patch.object(module, name, value))
        yield


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a case: "right", "error" or "not reached"; `problem` if it is not allowed."""

    outcome: str
    seconds: float
    problem: str = ""


def operations_of(server: HostileS3, call: Call) -> list[str]:
    """The operations of S3 that an honest run of `call` makes."""
    run_case(server, call, _NO_SHAPE, rule=honest)
    return sorted(server.operations)


def run_case(server: HostileS3, call: Call, shape: Shape, *, rule: Rule, policy: RetryPolicy = POLICY) -> Seen:
    """Run `call` on a server that answers in `shape` where `rule` says so."""
    server.start_over(START)
    store = open_store("s3://bucket/run", retry_policy=policy, read_timeout_s=20, **server.options)
    assert isinstance(store, S3Store)
    server.rule = rule
    started, found, error = time.monotonic(), None, None
    try:
        found = call.run(store)
    except TitanError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001  (an uncaught error is a finding)
        return Seen("uncaught", time.monotonic() - started, f"{type(caught).__name__}: {caught}")
    seconds = time.monotonic() - started
    problem = _problem(server, call, shape, found, error, seconds)
    if not server.num_shaped:
        return Seen("not reached", seconds, problem)
    return Seen("right" if error is None else "error", seconds, problem)


# An answer to HEAD has no body: a missing bucket and a missing object are one status there.
UNSEEN_BY_EXISTS = ("exists", "404 NoSuchBucket")


def _problem(
    server: HostileS3, call: Call, shape: Shape, found: object, error: TitanError | None, seconds: float
) -> str:
    objects = server.memory.objects
    wanted = call.after(START) if call.after else START
    may_differ = (call.name == "stat" and shape.name in UNSEEN_BY_STAT) or (call.name, shape.name) == UNSEEN_BY_EXISTS
    if error is None and found != call.expected and not may_differ:
        return f"returned {found!r:.200}"
    if isinstance(error, NotFoundError) and call.name != "write if unchanged" and "404" not in shape.name:
        return f"says that nothing is there: {error}"
    if error is None and objects != wanted:
        return f"succeeded, but the objects are not what they should be: {sorted(objects)}"
    if any(objects.get(key) not in (START.get(key), wanted.get(key)) for key in {*objects, *START}):
        return f"left objects that are neither old nor new: {sorted(objects)}"
    if seconds > LONGEST_S:
        return f"took {seconds:.1f} s"
    return f"took in {server.bytes_sent} bytes" if server.bytes_sent > MOST_BYTES else ""
