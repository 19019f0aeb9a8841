"""`s3://` through s3fs, for what the botocore client does not do. Conditional writes are S3's own, as there.

s3fs's retries are off: `store.base.retry` alone decides what is transient. Its errors are translated from the answers of S3 that
caused them, since s3fs makes one OSError of many codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import botocore.exceptions

from titan_ckpt.errors import StoreError, TitanError
from titan_ckpt.store.any_fsspec import FsspecStore
from titan_ckpt.store.base import Buffer, ObjectInfo, RetryPolicy, conditionally, probe_conditions
from titan_ckpt.store.deadline import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from titan_ckpt.store.s3_answers import check_deleted
from titan_ckpt.store.s3_client import check_parameters
from titan_ckpt.store.s3_errors import translate
from titan_ckpt.store.s3_parts import split_url

DELETE_BATCH = 1000
_NO_RANGE = ("InvalidRange", "416")


class S3fsStore(FsspecStore):
    """Objects under `s3://bucket/prefix`. `asked` are options by s3fs's names, as `s3_names.s3_request` returns them."""

    def __init__(
        self, url: str, policy: RetryPolicy, asked: Mapping[str, Any] | None = None, *, filesystem: Any = None
    ) -> None:
        self._bucket, _ = split_url(url)
        if filesystem is not None:
            super().__init__(url, policy, filesystem=filesystem)
            return
        super().__init__(url, policy, **_arguments(asked or {}))
        self._fs.retries = 1

    def write_if(self, path: str, data: Buffer, *, version: str | None) -> ObjectInfo:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}
        body, key = bytes(data), self._full(path).partition("/")[2]

        def put() -> ObjectInfo:
            answer = self._fs.call_s3("put_object", Bucket=self._bucket, Key=key, Body=body, **condition)
            self._fs.invalidate_cache()
            written = str(answer["ETag"]).strip('"')
            return ObjectInfo(
                path=path, size_bytes=len(body), modified_s=self._stated(path).modified_s, version=written
            )

        return conditionally(
            put,
            run=lambda attempt: self._call(path, attempt),
            as_ours=lambda error: self._as_ours(error, self.where(path)),
            holds=lambda: self._holds(path, body),
            stat=lambda: self._stated(path),
            where=self.where(path),
            version=version,
        )

    def _cat(self, path: str, start: int, end: int) -> Buffer:
        try:
            return super()._cat(path, start, end)
        except OSError as error:
            cause = error.__cause__
            if isinstance(cause, botocore.exceptions.ClientError) and cause.response["Error"].get("Code") in _NO_RANGE:
                return b""  # from beyond the end, as of an empty object
            raise

    def _holds(self, path: str, body: bytes) -> bool:
        try:
            return bytes(self._fs.cat_file(self._full(path))) == body
        except FileNotFoundError:
            return False

    @cached_property
    def _honours_conditions(self) -> bool:
        endpoint = str(self._fs.s3.meta.endpoint_url)
        return endpoint.split("/")[2].partition(":")[0].endswith(".amazonaws.com") or probe_conditions(self)

    def is_link(self, path: str) -> bool:  # noqa: ARG002 - S3 has no links
        return False

    def delete(self, paths: Iterable[str]) -> None:
        keys = [self._full(path).partition("/")[2] for path in paths]
        for start in range(0, len(keys), DELETE_BATCH):
            self._call("", partial(self._delete_batch, keys[start : start + DELETE_BATCH]))

    def _delete_batch(self, keys: list[str]) -> None:
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": False}
        answer = self._fs.call_s3("delete_objects", Bucket=self._bucket, Delete=objects)
        check_deleted(answer, keys, self._bucket)

    def _as_ours(self, error: Exception, where: str) -> TitanError:
        cause: BaseException | None = error
        while cause is not None and not isinstance(
            cause, botocore.exceptions.BotoCoreError | botocore.exceptions.ClientError
        ):
            cause = cause.__cause__
        if isinstance(cause, botocore.exceptions.ClientError | botocore.exceptions.BotoCoreError):
            return translate(cause, where, self._bucket)
        if isinstance(error, StoreError):
            return error
        return super()._as_ours(error, where)


def _arguments(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `s3fs.S3FileSystem`."""
    asked = dict(asked)
    if asked.get("s3_additional_kwargs"):
        check_parameters(asked["s3_additional_kwargs"], "s3fs")
        if "RequestPayer" in asked["s3_additional_kwargs"]:
            asked["requester_pays"] = True  # s3fs leaves it out of the calls of a multipart upload otherwise
    client = {"region_name": asked.pop("region", None), "verify": asked.pop("verify", None)}
    config = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S, **asked.pop("config_kwargs", {})}
    asked["client_kwargs"] = {name: value for name, value in client.items() if value is not None}
    return {"skip_instance_cache": True, **asked, "config_kwargs": config}
