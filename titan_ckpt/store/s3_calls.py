"""Requests to one bucket: retries until a deadline, time limits, errors as ours, and the region where the bucket is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from titan_ckpt.errors import TransientStoreError
from titan_ckpt.store.base import RetryPolicy, retry
from titan_ckpt.store.deadline import TimedCall, time_limits
from titan_ckpt.store.s3_client import S3Options, make_client
from titan_ckpt.store.s3_errors import region_elsewhere, translate

log = logging.getLogger(__name__)
T = TypeVar("T")
# They send and receive little, so a server that is there answers them soon.
SMALL_CALLS = ("stat", "list", "find")


class S3Calls:
    """Runs requests to `bucket`. `where` is the store's URL for messages. Thread-safe."""

    def __init__(self, options: S3Options, bucket: str, policy: RetryPolicy, where: str) -> None:
        self.policy = policy
        self._options, self._bucket, self._where = options, bucket, where
        self._client = make_client(options, where)
        self._moved_to: str | None = None
        self._lock = threading.Lock()
        self.is_answered = self.is_bucket_seen = False

    @property
    def client(self) -> Any:
        """The botocore client, of the bucket's region once that is known."""
        return self._client

    def run(self, where: str, verb: str, action: Callable[[], T]) -> T:
        """Run `action`, which uses `client`, with retries until the deadline, its errors translated to ours."""
        is_first = verb in SMALL_CALLS and not self.is_answered
        give_up_at, try_s = time_limits(self.policy.deadline_s, is_first=is_first)

        def attempt() -> T:
            nonlocal try_s
            begun, limit = time.monotonic(), min(give_up_at, time.monotonic() + try_s)
            try_s *= 2
            with TimedCall(limit) as call:
                try:
                    result = self._where_the_bucket_is(action)
                except Exception as error:
                    if call.is_over:
                        hint = "" if call.is_answered else "; check that the server runs and AWS_ENDPOINT_URL"
                        raise TransientStoreError(f"no whole answer within {limit - begun:.3g} s{hint}") from error
                    raise self.translate(where, verb, error) from error
                finally:
                    self.is_answered |= call.is_answered
            self.is_bucket_seen = True
            return result

        return retry(attempt, self.policy, what=f"{verb} {where}", give_up_at=give_up_at)

    def translate(self, where: str, verb: str, error: Exception) -> Exception:
        """`error` as one of ours."""
        return translate(error, f"{where}: cannot {verb}", self._bucket)

    def _where_the_bucket_is(self, action: Callable[[], T]) -> T:
        """`action()`, again if the answer names another region for the bucket."""
        asked = self._client
        try:
            return action()
        except Exception as error:
            region = region_elsewhere(error)
            if region is None or not self._move(asked, region):
                raise
        return action()

    def _move(self, asked: Any, region: str) -> bool:
        """Use `region` from now on. False if that was tried before: the server contradicts itself."""
        with self._lock:
            if self._client is not asked:
                return True  # another thread was faster
            if self._moved_to is not None:
                return False
            self._moved_to, before = region, asked.meta.region_name
            self._client = make_client(replace(self._options, region=region), self._where)
        log.warning("%s: the bucket is in region %s, not %s; set AWS_REGION=%s", self._where, region, before, region)
        return True
