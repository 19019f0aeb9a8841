"""S3 servers that deviate from S3 where it does no harm: they serve, and what only looks like them is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.test_s3 import clean_environment
from titan_ckpt.errors import ConfigError, TransientStoreError
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.open import open_store
from tools.hostile.memory_s3 import Answer, Request
from tools.hostile.s3_server import HostileS3, Rule, always
from tools.hostile.s3_shapes import Shape

QUICK = RetryPolicy(tries=2, first_wait_s=0.0001, longest_wait_s=0.001, deadline_s=5)


@pytest.fixture(scope="module")
def server() -> Iterator[HostileS3]:
    with HostileS3() as running:
        yield running


def _page_for_missing(_: Request, answer: Answer) -> Answer:
    """moto's answer to HEAD of what is not there."""
    return replace(answer, headers={**answer.headers, "Content-Type": "text/html; charset=utf-8"})


def _plain_prefix(_: Request, answer: Answer) -> Answer:
    """SeaweedFS's listing: names are encoded, the prefix is not."""
    plain = lambda match: b"<Prefix>a+b/c%2Fd/%20/x/</Prefix>" if b"x/</Prefix>" in match[0] else match[0]
    return replace(answer, body=re.sub(rb"<Prefix>[^<]*</Prefix>", plain, answer.body, count=1))


def _count_no_folders(_: Request, answer: Answer) -> Answer:
    """s3rver's listing."""
    return replace(answer, body=re.sub(rb"<KeyCount>\d+<", b"<KeyCount>1<", answer.body))


def _denied_page(_request: Request, _answer: Answer) -> Answer:
    return Answer(404, {"Content-Type": "text/html"}, b"<html>not found</html>")


MISSING = Shape(name="a page for what is missing", make=_page_for_missing, operations=frozenset({"HeadObject"}))
PREFIX = Shape(name="a prefix as it was asked", make=_plain_prefix, operations=frozenset({"ListObjectsV2"}))
COUNT = Shape(name="a count of objects alone", make=_count_no_folders, operations=frozenset({"ListObjectsV2"}))
PAGE = Shape(name="a page for everything", make=_denied_page, operations=frozenset({"HeadObject", "GetObject"}))


def _only_missing(server: HostileS3) -> Rule:
    return lambda request, _: None if request.key in server.memory.objects else MISSING


def test_a_page_for_a_missing_object_is_asked_for_its_reason(server: HostileS3) -> None:
    server.start_over({})
    server.rule = _only_missing(server)
    store = open_store("s3://bucket/run", retry_policy=QUICK, **server.options)
    assert not store.exists("a")
    store.write("a", [b"abc"])
    assert (store.exists("a"), store.exists("b")) == (True, False)


@pytest.mark.parametrize("shape", [PAGE, MISSING], ids=["a proxy's", "and a GET contradicts"])
def test_a_page_alone_is_no_proof_of_absence(server: HostileS3, shape: Shape) -> None:
    server.start_over({"run/a": b"abc"})
    store = open_store("s3://bucket/run", retry_policy=QUICK, **server.options)
    missing = replace(MISSING, make=lambda _request, _answer: Answer(404, {"Content-Type": "text/html"}))
    server.rule = always(missing if shape is MISSING else PAGE)
    with pytest.raises(TransientStoreError, match="web page"):
        store.exists("a")


def test_a_listing_may_name_its_prefix_as_it_was_asked(server: HostileS3) -> None:
    server.start_over({"a+b/c%2Fd/%20/x/one": b"1", "a b/c/d/ /x/two": b"2"})
    server.rule = always(PREFIX)
    store = open_store("s3://bucket/a+b/c%2Fd/%20", retry_policy=QUICK, **server.options)
    assert [entry.path for entry in store.list("x")] == ["x/one"]


def test_a_listing_may_count_objects_alone(server: HostileS3) -> None:
    server.start_over({"run/a": b"1", "run/b/c": b"2", "run/d/e": b"3"})
    server.rule = always(COUNT)
    store = open_store("s3://bucket/run", retry_policy=QUICK, **server.options)
    assert store.folders() == ["b", "d"]
    with pytest.raises(TransientStoreError, match="has 3 names, but says 1"):
        list(store.list())


def test_s3fs_takes_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "credentials"
    keys.write_text("[mine]\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.setattr("os.environ", {**clean_environment(), "AWS_SHARED_CREDENTIALS_FILE": str(keys)})
    for more in ({"client": "s3fs"}, {"max_concurrency": 2}):
        assert str(open_store("s3://bucket/run", profile="mine", **more)) == "s3://bucket/run"
    with pytest.raises(ConfigError, match="no-such-profile"):
        open_store("s3://bucket/run", profile="no-such-profile", client="s3fs").exists("a")
