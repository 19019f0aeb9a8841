"""Requests to one bucket: retries until a deadline, time limits, errors as ours, and the region where the bucket is."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from titan_ckpt.errors import TransientStoreError
from titan_ckpt.location import redact
from titan_ckpt.store import deadline
from titan_ckpt.store.base import RetryPolicy, retry
from titan_ckpt.store.deadline import SAID_AFTER_S, TimedCall, first_answer_limit_s, time_limit
from titan_ckpt.store.s3_client import S3Options, make_client
from titan_ckpt.store.s3_errors import is_read_timeout, region_elsewhere, translate

log = logging.getLogger(__name__)
T = TypeVar("T")
# They send and receive little, so a server that is there answers them soon.
SMALL_CALLS = ("stat", "list", "find")
SAY_EVERY_S = 30.0


@dataclass(slots=True)
class _Limits:
    """When one call and its tries end. An endpoint that has never answered is given up sooner."""

    deadline_s: float
    is_answered: bool
    is_small: bool
    give_up_at: float = field(init=False)
    first_answer_by: float = field(init=False)
    try_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.give_up_at, self.try_s = time_limit(self.deadline_s), deadline.FIRST_TRY_S
        self.first_answer_by = min(self.give_up_at, time.monotonic() + first_answer_limit_s(self.deadline_s))

    @property
    def ends_at(self) -> float:
        """The time after which there is no further try."""
        return self.give_up_at if self.is_answered else self.first_answer_by

    def next_try(self, *, say: Callable[[], None]) -> TimedCall:
        """The next try; those of small calls to an endpoint that has never answered are short, each twice as long as the last."""
        now, ends_at = time.monotonic(), self.ends_at
        if self.is_answered:
            return TimedCall(self.give_up_at, say=say)
        if not self.is_small:
            return TimedCall(self.give_up_at, silence_s=ends_at - now, say=say)
        limit, self.try_s = min(ends_at, now + self.try_s), 2 * self.try_s
        return TimedCall(limit, say=say)


class S3Calls:
    """Runs requests to `bucket`. `where` is the store's URL for messages. Thread-safe."""

    def __init__(self, options: S3Options, bucket: str, policy: RetryPolicy, where: str) -> None:
        self.policy = policy
        self._options, self._bucket, self._where = options, bucket, where
        self._client = make_client(options, where)
        self._moved_to: str | None = None
        self._lock = threading.Lock()
        self.is_answered = self.is_bucket_seen = False
        self._says_again_at = 0.0

    @property
    def client(self) -> Any:
        """The botocore client, of the bucket's region once that is known."""
        return self._client

    def run(self, where: str, verb: str, action: Callable[[], T]) -> T:
        """Run `action`, which uses `client`, with retries until the deadline, its errors translated to ours."""
        limits = _Limits(self.policy.deadline_s, is_answered=self.is_answered, is_small=verb in SMALL_CALLS)

        def attempt() -> T:
            call = limits.next_try(say=lambda: self._say_silent(f"{verb} {where}", limits.ends_at))
            begun = time.monotonic()
            with call:
                try:
                    result = self._where_the_bucket_is(action)
                except Exception as error:
                    if call.is_over or is_read_timeout(error):
                        hint = "" if call.is_answered else f"; {self._check_endpoint}"
                        raise TransientStoreError(
                            f"no whole answer within {time.monotonic() - begun:.1f} s{hint}"
                        ) from error
                    raise self.translate(where, verb, error) from error
                finally:
                    self.is_answered |= call.is_answered
                    limits.is_answered = self.is_answered
            self.is_bucket_seen = True
            return result

        return retry(attempt, self.policy, what=f"{verb} {where}", give_up_at=lambda: limits.ends_at)

    @property
    def _endpoint(self) -> str:
        return redact(str(self._client.meta.endpoint_url))

    @property
    def _check_endpoint(self) -> str:
        return f"check that the server at {self._endpoint} runs and AWS_ENDPOINT_URL"

    def _say_silent(self, what: str, ends_at: float) -> None:
        """Log that an answer is awaited; not for every thread that awaits one."""
        now = time.monotonic()
        if now < self._says_again_at:
            return
        self._says_again_at = now + SAY_EVERY_S
        log.warning(
            "%s: nothing from %s for %g s; given up in %.0f s",
            what,
            self._endpoint,
            SAID_AFTER_S,
            max(ends_at - now, 0),
        )

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
