"""Endpoints behind which there is nobody: said soon, given up soon; and slow ones that live are not cut."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from titan_ckpt.errors import StoreError, TransientStoreError
from titan_ckpt.store import deadline, s3_wire, time_limit
from titan_ckpt.store.base import RetryPolicy, Store
from titan_ckpt.store.open import open_store
from titan_ckpt.store.time_limit import call_within
from tools.faults.dead_endpoints import ENDPOINTS
from tools.hostile.s3_server import HostileS3, always
from tools.hostile.s3_shapes import SHAPES

LONG_S = 100.0  # much longer than what is tested, on a loaded machine, too
PATIENT = RetryPolicy(tries=6, first_wait_s=0.001, longest_wait_s=0.01, deadline_s=600)
USES: dict[str, Callable[[Store], object]] = {
    "stat": lambda store: store.stat("x"),
    "read": lambda store: store.read("x", 0, 10),
    "list": lambda store: list(store.list()),
    "write": lambda store: store.write("x", [b"x"]),
    "write if": lambda store: store.write_if("x", b"x", version=None),
    "delete": lambda store: store.delete(["x"]),
}
WHY = {
    "connection refused": "Connection refused",
    "unknown host name": "s3.invalid",
    "TLS to a plain port": "the port does not speak TLS: use http://",
}


def store_at(endpoint: str, **options: Any) -> Store:
    keys: dict[str, Any] = {"access_key": "k", "secret_key": "s", "region": "us-east-1"}
    return open_store("s3://b/run", retry_policy=PATIENT, endpoint_url=endpoint, **keys, **options)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limits of an endpoint that never answered, many times shorter."""
    times = {"FIRST_TRY_S": 0.3, "FIRST_ANSWER_S": 1.0, "FIRST_ANSWER_SHARE": 0.0, "SAID_AFTER_S": 0.1}
    for name, value in times.items():
        monkeypatch.setattr(deadline, name, value)
    monkeypatch.setattr(time_limit, "SAID_AFTER_S", 0.1)


def given_up(endpoint: str, use: str) -> str:
    started = time.monotonic()
    with pytest.raises(StoreError) as caught:
        USES[use](store_at(endpoint, connect_timeout_s=0.3))
    assert time.monotonic() - started < LONG_S
    text = str(caught.value)
    assert "\n" not in text
    assert "s3://b/run" in text
    return text


@pytest.mark.parametrize("use", USES)
def test_what_can_be_known_at_once_is_said_at_once(use: str, caplog: pytest.LogCaptureFixture) -> None:
    for name, reason in WHY.items():
        caplog.clear()
        with ENDPOINTS[name]() as endpoint, caplog.at_level(logging.WARNING):
            assert reason in given_up(endpoint, use)
        if name != "TLS to a plain port":  # which no retry cures
            assert all(endpoint in record.getMessage() for record in caplog.records)
            assert caplog.records


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("use", ["stat", "write"])
def test_silence_is_said_and_given_up(use: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in sorted(set(ENDPOINTS) - set(WHY)):
        caplog.clear()
        with ENDPOINTS[name]() as endpoint, caplog.at_level(logging.WARNING):
            assert f"check that the server at {endpoint} runs and AWS_ENDPOINT_URL" in given_up(endpoint, use)
        assert any(endpoint in record.getMessage() for record in caplog.records)


def test_the_limits_are_those_that_the_documentation_says() -> None:
    assert deadline.SAID_AFTER_S < 5
    assert deadline.FIRST_TRY_S < 5
    assert deadline.first_answer_limit_s(RetryPolicy().deadline_s) < 30
    assert deadline.first_answer_limit_s(600) == 100
    assert deadline.first_answer_limit_s(7) == 7


@pytest.mark.usefixtures("soon")
def test_a_slow_first_upload_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body takes longer than a silent endpoint may; each slice of it is a sign of life."""
    monkeypatch.setattr(s3_wire, "SEND_SLICE_BYTES", 1000)
    monkeypatch.setattr(deadline, "FIRST_ANSWER_S", 1.0)
    real = deadline.heard

    def heard_later() -> None:
        threading.Event().wait(0.1)
        real()

    monkeypatch.setattr(s3_wire, "heard", heard_later)
    with HostileS3() as server:
        store = open_store("s3://bucket/run", retry_policy=PATIENT, **server.options)
        started = time.monotonic()
        assert store.write("x", [bytes(20_000)]).size_bytes == 20_000
        assert time.monotonic() - started > 1.5
        assert server.operations["PutObject"] == 1


@pytest.mark.usefixtures("soon")
def test_a_resolver_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, real = threading.Event(), socket.getaddrinfo

    def hang(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "slow.invalid":
            is_over.wait(60)
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    started = time.monotonic()
    with pytest.raises(
        TransientStoreError, match=r"http://slow.invalid:9000\S* \(was not resolved within 0.1 s\); check"
    ):
        store_at("http://slow.invalid:9000", connect_timeout_s=0.1).write("x", [b"x"])
    assert time.monotonic() - started < LONG_S
    is_over.set()


@pytest.mark.usefixtures("soon")
def test_a_server_that_falls_silent_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """It has answered before, so it has the whole deadline."""
    with HostileS3() as server:
        policy = RetryPolicy(tries=2, first_wait_s=0.001, longest_wait_s=0.01, deadline_s=1.0)
        store = open_store("s3://bucket/run", retry_policy=policy, **server.options)
        assert not store.exists("x")
        server.rule = always(SHAPES["no answer"])
        with caplog.at_level(logging.WARNING), pytest.raises(TransientStoreError, match="no whole answer within"):
            store.read("x", 0, 10)
    (line,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert line.startswith(f"read s3://bucket/run/x: nothing from {server.endpoint} for")


@pytest.mark.usefixtures("soon")
def test_another_client_that_hangs_is_said(caplog: pytest.LogCaptureFixture) -> None:
    is_over = threading.Event()
    with caplog.at_level(logging.WARNING), pytest.raises(StoreError, match="gs://b/x: no answer within"):
        call_within(0.2, lambda: is_over.wait(60), what="gs://b/x")
    is_over.set()
    assert [record.getMessage() for record in caplog.records] == ["gs://b/x: no answer for 0.1 s; given up in 0 s"]
