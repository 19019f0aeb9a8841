"""One multipart upload: its requests and what their answers must say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import TitanError
from titan_ckpt.store.s3_answers import check_upload_id, check_written
from titan_ckpt.store.s3_calls import S3Calls
from titan_ckpt.store.s3_parts import crc32_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """A part that the server has."""

    number: int
    size_bytes: int
    etag: str
    crc32: str


class MultipartUpload:
    """An upload that was begun; `where` is the object's URL for messages."""

    def __init__(self, calls: S3Calls, bucket: str, key: str, where: str) -> None:
        self._calls, self._where = calls, where
        self._target = {"Bucket": bucket, "Key": key}
        self._target["UploadId"] = calls.run(where, "start a multipart upload of", self._begin)

    def _begin(self) -> str:
        return check_upload_id(self._calls.client.create_multipart_upload(**self._target, ChecksumAlgorithm="CRC32"))

    def send(self, number: int, view: memoryview) -> SentPart:
        """Upload part `number`, from 1."""
        crc = crc32_text(view)

        def send() -> str:
            return check_written(self.send_once(view, PartNumber=number, ChecksumCRC32=crc), crc)

        etag = self._calls.run(self._where, f"upload part {number} of", send)
        return SentPart(number=number, size_bytes=len(view), etag=etag, crc32=crc)

    def send_once(self, view: memoryview, **arguments: Any) -> Any:
        """One request with a part's bytes."""
        return self._calls.client.upload_part(**self._target, **arguments, Body=view)

    def complete_once(self, parts: Sequence[SentPart]) -> tuple[str, Any]:
        """(ETag of the object, the answer) of one request to complete the upload."""
        named = [{"PartNumber": part.number, "ETag": f'"{part.etag}"', "ChecksumCRC32": part.crc32} for part in parts]
        answer = self._calls.client.complete_multipart_upload(**self._target, MultipartUpload={"Parts": named})
        return check_written(answer), answer

    def abort(self) -> None:
        """Discard the parts; a failure is logged, since an error is on its way already."""
        abort = lambda: self._calls.client.abort_multipart_upload(**self._target)
        try:
            self._calls.run(self._where, "abort the upload of", abort)
        except TitanError as error:
            log.warning("an unfinished multipart upload is left behind and may be billed: %s", error)
