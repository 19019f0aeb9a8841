"""What S3 refuses, and why: one clear line that says what to do, without a storm of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from titan_ckpt.errors import NotFoundError, PermissionDeniedError, StoreError, TitanError, TransientStoreError
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.open import open_store
from titan_ckpt.store.s3 import S3Store
from tools.hostile.memory_s3 import Answer, Request, xml
from tools.hostile.s3_calls import CALLS, LARGE, START, Call, run_case, small_parts
from tools.hostile.s3_server import HostileS3, always, honest
from tools.hostile.s3_shapes import REFUSALS, SHAPES, Shape

POLICY = RetryPolicy(tries=3, first_wait_s=0.0001, longest_wait_s=0.001, deadline_s=60)
ADVICE = {
    "301 PermanentRedirect": "set AWS_REGION=eu-west-1",
    "307 TemporaryRedirect": "set AWS_REGION=eu-west-1",
    "400 AuthorizationHeaderMalformed": "set AWS_REGION=eu-west-1",
    "400 IllegalLocationConstraintException": "set AWS_REGION=eu-west-1",
    "400 ExpiredToken": "the credentials have expired: get new ones",
    "400 InvalidToken": "AWS_SESSION_TOKEN does not belong to these keys",
    "403 InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID",
    "403 SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY",
    "403 RequestTimeTooSkewed": "the clock of this machine is wrong (the server's says Thu, 01 Jan 2026 00:00:00 GMT)",
    "403 AllAccessDisabled": "check the credentials and their permissions",
    "403 InvalidObjectState": "restore it first",
    "403 QuotaExceeded": "no space left",
    "507 XMinioStorageFull": "no space left",
    "503 SlowDown": "overloaded or throttles",
    "501 NotImplemented": "NotImplemented",
    "404 NoSuchBucket": "bucket 'bucket' does not exist here",
}
TRIED_AGAIN = {"503 SlowDown", "400 RequestTimeout", "409 ConditionalRequestConflict", "412 PreconditionFailed"}
USES: dict[str, Callable[[S3Store], object]] = {
    "read": lambda store: store.read("small", 0, 10),
    "stat": lambda store: store.stat("small"),
    "exists": lambda store: store.exists("not/there"),
    "list": lambda store: list(store.list()),
    "write": lambda store: store.write("new", [b"new"]),
    "write parts": lambda store: store.write("new", [LARGE]),
    "write if": lambda store: store.write_if("new", b"new", version=None),
    "delete": lambda store: store.delete(["small"]),
    "delete many": lambda store: store.delete(["small", "large"]),
}


@pytest.fixture(scope="module")
def server() -> Iterator[HostileS3]:
    with small_parts(), HostileS3() as running:
        yield running


def store_of(server: HostileS3) -> S3Store:
    server.memory.replace_all(START)
    server.rule = honest
    store = open_store("s3://bucket/run", retry_policy=POLICY, **server.options)
    assert isinstance(store, S3Store)
    return store


@pytest.mark.parametrize("use", USES)
def test_a_refusal_says_what_to_do(server: HostileS3, use: str) -> None:
    for name, shape in REFUSALS.items():
        store = store_of(server)
        server.rule = always(shape)
        if (use, name) == ("exists", "404 NoSuchBucket"):
            assert USES[use](store) is False
            continue
        with pytest.raises(TitanError) as caught:
            USES[use](store)
        text = str(caught.value)
        is_head = use in ("stat", "exists")
        if not (is_head and name[:3] in ("404", "501", "503", "409", "412")):  # a HEAD has no body that names the error
            assert ADVICE.get(name, "") in text, name
        assert "s3://bucket/run" in text
        assert "\n" not in text
        assert server.memory.objects == START
        assert server.operations.total() <= (6 if name in TRIED_AGAIN else 4), name


def test_a_refusal_has_the_class_that_callers_act_on(server: HostileS3) -> None:
    store = store_of(server)
    classes = {
        "404 NoSuchBucket": NotFoundError,
        "503 SlowDown": TransientStoreError,
        "507 XMinioStorageFull": StoreError,
    }
    for name, expected in {**classes, "403 RequestTimeTooSkewed": PermissionDeniedError}.items():
        server.rule = always(SHAPES[name])
        for use in ("read", "stat", "list", "write", "write parts", "write if", "delete", "delete many"):
            with pytest.raises(expected):
                USES[use](store)


def elsewhere(name: str) -> Callable[[Request, int], Shape | None]:
    """Answers `name` unless a request is signed for the region where the bucket is."""
    return lambda request, _: None if "/eu-west-1/s3/" in request.headers.get("authorization", "") else SHAPES[name]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_bucket_in_another_region_is_found_there(server: HostileS3, call: Call) -> None:
    for name in ("301 PermanentRedirect", "400 AuthorizationHeaderMalformed"):
        seen = run_case(server, call, SHAPES[name], rule=elsewhere(name), policy=POLICY)
        assert (seen.outcome, seen.problem) == ("right", "")


def test_the_region_is_said_once(server: HostileS3, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(server)
    server.rule = elsewhere("301 PermanentRedirect")
    assert store.read("large") == LARGE
    assert list(store.list("a"))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["s3://bucket/run: the bucket is in region eu-west-1, not us-east-1; set AWS_REGION=eu-west-1"]


@pytest.mark.parametrize("region", ["", "eu-west-1.evil.example/", "a" * 64, "-", "eu\r\nwest"])
def test_a_region_that_is_none_is_not_followed(server: HostileS3, region: str) -> None:
    def redirect(_request: Request, _answer: Answer) -> Answer:
        answer = xml("Error", f"<Code>PermanentRedirect</Code><Message>m</Message><Region>{region}</Region>")
        return Answer(301, answer.headers, answer.body)

    store = store_of(server)
    server.rule = always(Shape(name="redirect", make=redirect))
    with pytest.raises(StoreError, match="in another region or at another endpoint"):
        store.read("small", 0, 10)
    assert server.operations.total() == 1


def test_keys_that_may_not_be_deleted_name_the_permission(server: HostileS3) -> None:
    def refuse(_request: Request, _answer: Answer) -> Answer:
        return xml("DeleteResult", "<Error><Key>run/small</Key><Code>AccessDenied</Code><Message>m</Message></Error>")

    store = store_of(server)
    server.rule = always(Shape(name="refused", make=refuse, has_effect=False))
    with pytest.raises(
        PermissionDeniedError, match=r"run/small: cannot delete: AccessDenied: m; .* need s3:DeleteObject"
    ):
        store.delete(["small", "large"])


def test_a_missing_object_is_missing_though_the_bucket_is_closed(server: HostileS3) -> None:
    """Credentials that may read objects, but not look at the bucket."""
    store = store_of(server)
    server.rule = always(SHAPES["403 AccessDenied"], "HeadBucket")
    assert not store.exists("not/there")


def test_only_a_refused_head_is_asked_for_its_reason(server: HostileS3) -> None:
    store = store_of(server)
    assert store.stat("small").size_bytes == len(START["run/small"])
    assert server.operations["GetObject"] == 0
    server.rule = always(SHAPES["403 AccessDenied"], "HeadObject")
    with pytest.raises(PermissionDeniedError, match="403: Forbidden; these credentials need s3:GetObject"):
        store.stat("small")
    assert server.operations["GetObject"] == 1
