"""S3 errors, secrets and multipart uploads, on a real server except for responses that no real server gives."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import botocore.exceptions
import pytest

from tests.conftest import BUCKET
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import (
    ConfigError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TransientStoreError,
    UsageError,
)
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.open import open_store
from titan_ckpt.store.s3 import S3Store
from titan_ckpt.store.s3_errors import translate
from titan_ckpt.store.s3_multipart import MultipartUpload
from titan_ckpt.store.s3_parts import PART_BYTES, PartBuffers, upload_parts

QUICK = RetryPolicy(tries=3, first_wait_s=0.001, longest_wait_s=0.01, deadline_s=30)


def s3(url: str) -> S3Store:
    store = open_store(url, retry_policy=QUICK)
    assert isinstance(store, S3Store)
    return store


def clean_environment(server: Server | None = None) -> dict[str, str]:
    """Only the given AWS variables, no config files, no metadata service."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    nothing = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    return kept | nothing | ({"AWS_ENDPOINT_URL": server.endpoint} if server else {})


@pytest.mark.s3
def test_without_credentials_the_error_shows_what_to_set(s3_server: Server) -> None:
    command = [sys.executable, "-m", "titan_ckpt", "ls", f"s3://{BUCKET}/run"]
    done = subprocess.run(
        command, env=clean_environment(s3_server), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 3
    assert "no usable credentials" in done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.s3
def test_a_wrong_secret_is_denied_and_never_shown(
    s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng-s3cret")
    store = s3(f"s3://{BUCKET}/run")
    with pytest.raises(PermissionDeniedError, match="check the credentials") as caught:
        store.write("x", [b"x"])
    shown = f"{caught.value} {caught.value.__cause__} {store!r} {store}"
    assert "wr0ng-s3cret" not in shown
    assert s3_environment["AWS_SECRET_ACCESS_KEY"] not in shown


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_named_by_every_call(s3_environment: dict[str, str]) -> None:
    assert s3_environment
    store = s3("s3://no-such-bucket/run")
    calls: list[Callable[[], object]] = [
        lambda: store.write("x", [b"x"]),
        lambda: store.stat("x"),
        lambda: store.read("x", 0, 1),
        lambda: list(store.list()),
        lambda: store.folders(),
        lambda: store.write("x", [bytes(PART_BYTES + 1)]),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="bucket 'no-such-bucket' does not exist"):
            call()


def test_an_endpoint_where_nobody_listens_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        store = open_store(
            "s3://b/run", retry_policy=QUICK, endpoint_url=endpoint, access_key="k", secret_key="s", connect_timeout_s=1
        )
        with pytest.raises(TransientStoreError, match=f"given up after 3 tries.*no connection to {endpoint}"):
            store.stat("x")


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/run", "s3://bucket/run?aws_secret_access_key=secret"])
def test_credentials_in_a_url_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(UsageError, match="do not belong in a URL") as caught:
        open_store(url)
    assert "secret@" not in str(caught.value)
    assert "key=secret" not in str(caught.value)


def test_a_url_without_a_bucket_or_a_bad_option_is_refused() -> None:
    with pytest.raises(UsageError, match="names no bucket"):
        open_store("s3://")
    with pytest.raises(ConfigError, match="unknown option 'endpoint'; did you mean 'endpoint_url'"):
        open_store("s3://b/run", endpoint="x")
    with pytest.raises(ConfigError, match="no-such-profile"):
        open_store("s3://b/run", profile="no-such-profile")
    with pytest.raises(StoreError, match="cannot create an S3 client"):
        open_store("s3://b/run", endpoint_url="not a url")


@pytest.mark.s3
def test_a_failed_upload_leaves_no_parts_behind(s3_url: str) -> None:
    store = s3(s3_url)

    def parts() -> Iterator[bytes]:
        yield bytes(3 * PART_BYTES)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        store.write("big", parts())
    uploads = store._client.list_multipart_uploads(Bucket=BUCKET)
    assert [u["Key"] for u in uploads.get("Uploads", []) if u["Key"].startswith(s3_url.rpartition("/")[2])] == []


@pytest.mark.s3
def test_a_part_damaged_in_transit_is_refused_and_sent_again(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, honest = s3(s3_url), MultipartUpload.send_once
    damaged: list[int] = []

    def damage_once(self: MultipartUpload, view: memoryview, **rest: Any) -> Any:
        if not damaged:
            damaged.append(rest["PartNumber"])
            view = memoryview(bytes(len(view)))
        return honest(self, view, **rest)

    monkeypatch.setattr(MultipartUpload, "send_once", damage_once)
    data = os.urandom(2 * PART_BYTES)
    store.write("big", [data])
    assert damaged
    assert store.read("big") == data


@pytest.mark.s3
def test_a_conditional_write_whose_response_is_lost_is_ours(s3_url: str) -> None:
    store = s3(s3_url)
    lose_answer_once(store, "put_object")
    entry = store.write_if("COMMIT.json", b"ours", version=None)
    assert store.stat("COMMIT.json").version == entry.version


@pytest.mark.s3
def test_a_completed_upload_whose_response_is_lost_is_ours(s3_url: str) -> None:
    store = s3(s3_url)
    lose_answer_once(store, "complete_multipart_upload")
    data = os.urandom(PART_BYTES + 5)
    entry = store.write("big", [data])
    assert (entry.size_bytes, store.read("big")) == (len(data), data)


def lose_answer_once(store: S3Store, operation: str) -> None:
    """The call reaches the server, but its response is lost."""
    real = getattr(store._client, operation)
    lost: list[str] = []

    def call(**arguments: Any) -> Any:
        answer = real(**arguments)
        if not lost:
            lost.append(operation)
            raise botocore.exceptions.ConnectionClosedError(endpoint_url="http://x")
        return answer

    setattr(store._client, operation, call)


@pytest.mark.s3
def test_connections_are_reused_and_not_left_open(s3_url: str) -> None:
    store = s3(s3_url)
    store.write("x", [os.urandom(3 * PART_BYTES)])
    opened: list[Any] = []
    real = socket.socket.connect
    with pytest.MonkeyPatch.context() as patch:

        def connect(self: socket.socket, address: Any) -> None:
            opened.append(address)
            real(self, address)

        patch.setattr(socket.socket, "connect", connect)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: store.read("x", n, 1000), range(200)))
    assert len(opened) <= 8


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("SlowDown", 503, TransientStoreError),
        ("InternalError", 500, TransientStoreError),
        ("", 502, TransientStoreError),
        ("TooManyRequests", 429, TransientStoreError),
        ("RequestTimeout", 400, TransientStoreError),
        ("BadDigest", 400, TransientStoreError),
        ("ConditionalRequestConflict", 409, TransientStoreError),
        ("ExpiredToken", 400, PermissionDeniedError),
        ("AccessDenied", 403, PermissionDeniedError),
        ("NoSuchKey", 404, NotFoundError),
        ("EntityTooLarge", 400, StoreError),
        ("PermanentRedirect", 301, StoreError),
    ],
)
def test_each_answer_of_a_server_becomes_the_right_error(code: str, status: int, expected: type[StoreError]) -> None:
    answer = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = translate(botocore.exceptions.ClientError(answer, "PutObject"), "s3://b/x: cannot write", "b")
    assert type(error) is expected
    assert "s3://b/x" in str(error)


def test_parts_have_equal_size_and_slice_large_buffers() -> None:
    large = memoryview(bytearray(3 * PART_BYTES))
    parts = [part.view for part in upload_parts([b"abc", large, b"de"], PartBuffers())]
    assert [len(part) for part in parts] == [PART_BYTES, PART_BYTES, PART_BYTES, 5]
    assert parts[1].obj is large.obj
    assert parts[2].obj is large.obj
    assert bytes(parts[0][:3]) == b"abc"
    assert bytes(parts[3]) == bytes(3) + b"de"


def test_nothing_to_cut_gives_no_part() -> None:
    assert list(upload_parts([], PartBuffers())) == []
    assert list(upload_parts([b"", b""], PartBuffers())) == []


def test_the_buffer_of_a_sent_part_is_reused_by_any_file() -> None:
    pieces = [bytes([number]) * (PART_BYTES // 2) for number in range(6)]
    buffers, memory, found = PartBuffers(), [], []
    with buffers:
        for _ in range(2):
            for part in upload_parts(pieces, buffers):
                assert part.buffer is not None
                memory.append(part.buffer.ctypes.data)
                found.append(bytes(part.view))
                buffers.give_back(part)
    assert b"".join(found) == b"".join(pieces) * 2
    assert len(set(memory)) == 1


def test_part_buffers_are_freed_after_the_last_write() -> None:
    buffers = PartBuffers()
    with buffers:
        part = next(upload_parts([b"abc"], buffers))
        buffers.give_back(part)
        last_seen = weakref.ref(part.buffer)
        del part
        assert last_seen() is not None
    assert last_seen() is None


def test_retries_are_logged_with_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = open_store(
            "s3://b/run",
            retry_policy=RetryPolicy(tries=2, first_wait_s=0.001),
            endpoint_url=f"http://127.0.0.1:{unused.getsockname()[1]}",
            access_key="k",
            secret_key="very-secret",
        )
        with caplog.at_level(logging.WARNING), pytest.raises(TransientStoreError):
            store.stat("x")
    assert "stat s3://b/run/x" in caplog.text
    assert "very-secret" not in caplog.text


@pytest.mark.s3
def test_writing_holds_a_few_parts_whatever_the_size(s3_url: str) -> None:
    store, peaks = s3(s3_url), []
    for number_of_parts in (8, 16):
        tracemalloc.start()
        store.write("big", (bytes(PART_BYTES // 2) for _ in range(2 * number_of_parts)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 8 * PART_BYTES
    assert peaks[1] < peaks[0] + PART_BYTES
