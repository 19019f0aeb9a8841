"""Translate errors of botocore and S3 to ours: not found, denied, transient, or permanent, with what to do next."""

from __future__ import annotations

import re
from typing import Any

import botocore.exceptions as boto
import botocore.parsers
import urllib3.exceptions

from titan_ckpt.errors import (
    ConditionFailedError,
    ConfigError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TitanError,
    TransientStoreError,
)
from titan_ckpt.location import redact

_NOT_FOUND = {"404", "NoSuchKey", "NoSuchUpload", "NotFound"}
_DENIED = {
    "401", "403", "AccessDenied", "AccountProblem", "AllAccessDisabled", "ExpiredToken", "Forbidden", "InvalidAccessKeyId",
    "InvalidSecurity", "InvalidToken", "RequestExpired", "RequestTimeTooSkewed", "SignatureDoesNotMatch",
    "TokenRefreshRequired", "Unauthorized",
}  # fmt: skip
_TRANSIENT = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "InternalServerError", "OperationAborted",
    "RequestLimitExceeded", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
}  # fmt: skip
_ELSEWHERE = {
    "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect",
    "TooManyRedirects",
}  # fmt: skip
_REFUSALS = (301, 307, 400, 403)
_NO_CREDENTIALS = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.TokenRetrievalError,
    boto.NoAuthTokenError, boto.UnauthorizedSSOTokenError, boto.SSOError, boto.MetadataRetrievalError,
)  # fmt: skip
_CONNECTION = (
    boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError, boto.ChecksumError, urllib3.exceptions.HTTPError,
    OSError,
)  # fmt: skip
# botocore reads fields of an answer without checks.
_UNREADABLE = (botocore.parsers.ResponseParserError, ValueError, TypeError, LookupError, AttributeError)
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([^'\")]{1,80})|timed out|was not resolved within [0-9.]+ s")
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")  # it becomes part of a host's name
_REGION_IN_TEXT = re.compile(r"\.s3[.-]([a-z0-9-]+)\.amazonaws\.|The ([a-z0-9-]+) location constraint is incompatible")

SET_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (and AWS_ENDPOINT_URL where it is not AWS)"
)
_EXPIRED = "the credentials have expired: get new ones (AWS_SESSION_TOKEN belongs to temporary keys) and start again"
_FULL = "the store has no space left: delete old checkpoints (`prune`) or raise the quota"
_SLOW = "the server is overloaded or throttles these requests: try again later, or with fewer processes"
_ADVICE = {
    "ExpiredToken": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "AWS_SESSION_TOKEN does not belong to these keys: get new credentials",
    "InvalidAccessKeyId": "the server does not know this key: check AWS_ACCESS_KEY_ID, AWS_PROFILE and AWS_ENDPOINT_URL",
    "SignatureDoesNotMatch": "check the credentials (AWS_SECRET_ACCESS_KEY), and that no proxy changes the requests",
    "InvalidObjectState": "the object is in an archive: restore it first",
    "NoSuchUpload": "the upload is gone: another program or a lifecycle rule of the bucket aborted it",
    "QuotaExceeded": _FULL,
    "QuotaExceededException": _FULL,
    "XMinioAdminBucketQuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "SlowDown": _SLOW,
    "Throttling": _SLOW,
    "TooManyRequests": _SLOW,
}
_PERMISSION = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "GetObject": "s3:GetObject (without s3:ListBucket, S3 answers the same for an object that is not there)",
    "HeadBucket": "s3:ListBucket",
    "HeadObject": "s3:GetObject (without s3:ListBucket, S3 answers the same for an object that is not there)",
    "ListObjectsV2": "s3:ListBucket",
}


def translate(error: Exception, what: str, bucket: str = "") -> TitanError:
    """`error` as one of ours, without secrets; `what` describes the operation and its URL."""
    if isinstance(error, TitanError):
        return error
    if isinstance(error, boto.ClientError):
        return _translate_response(error, what, bucket)
    if isinstance(error, _NO_CREDENTIALS):
        return PermissionDeniedError(f"{what}: no usable credentials ({type(error).__name__}): {SET_CREDENTIALS}")
    if isinstance(error, boto.ProfileNotFound):
        return ConfigError(f"{what}: {error}; check AWS_PROFILE")
    if isinstance(error, boto.SSLError):
        hint = "check the endpoint's certificate or AWS_CA_BUNDLE"
        if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER" in str(error):
            hint = "the port does not speak TLS: use http:// in AWS_ENDPOINT_URL, or the port for https://"
        return StoreError(f"{what}: TLS failed: {redact(str(error))}; {hint}")
    if isinstance(error, _CONNECTION):
        return TransientStoreError(f"{what}: {_connection_text(error)}")
    if isinstance(error, _UNREADABLE) and not isinstance(error, boto.BotoCoreError):
        kind = type(error).__name__
        return TransientStoreError(f"{what}: the answer cannot be understood: {kind}: {redact(str(error))}")
    return StoreError(f"{what}: {type(error).__name__}: {redact(str(error))}")


def _connection_text(error: Exception) -> str:
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        endpoint = redact(str(error.kwargs.get("endpoint_url")))
        return f"no connection to {endpoint}{_reason(error)}; check that the server runs and AWS_ENDPOINT_URL"
    return f"{type(error).__name__}: {redact(str(error))}"


def _reason(error: Exception) -> str:
    """Why there is no connection, as the system says it: "Connection refused", "Name or service not known"."""
    found = _SYSTEM_ERROR.search(str(getattr(error, "kwargs", {}).get("error")))
    return "" if found is None else f" ({found[1] or found[0]})"


def is_read_timeout(error: Exception) -> bool:
    """Whether the client waited in vain for an answer."""
    return isinstance(error, boto.ReadTimeoutError)


class WebPageError(TransientStoreError):
    """A response to HEAD with the `status` of a refusal, and the type of a web page: of a proxy, or of a sloppy S3 server."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def mute_refusal(error: Exception) -> int | None:
    """The status of a response to HEAD, which has no body, that leaves open why it refuses; a GET is told. None for others."""
    if isinstance(error, WebPageError):
        return error.status
    return _status(error) if isinstance(error, boto.ClientError) and _is_mute(error) else None


def _is_mute(error: boto.ClientError) -> bool:
    return _status(error) in _REFUSALS and _code(error) in ("", str(_status(error)))


def refusal(error: Exception) -> int | None:
    """The status of a refusal that S3 explains; None for any other error."""
    return _status(error) if isinstance(error, boto.ClientError) else None


def region_elsewhere(error: Exception) -> str | None:
    """The region that a response names, if it says that the bucket is in another one than was asked."""
    if not isinstance(error, boto.ClientError) or not _is_elsewhere(error):
        return None
    details: Any = error.response.get("Error", {})
    header = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    in_text = _REGION_IN_TEXT.search(f"{details.get('Endpoint', '')} {details.get('Message', '')}")
    found = str(header or details.get("Region") or (in_text and (in_text[1] or in_text[2])) or "")
    return found if _REGION.fullmatch(found) else None


def _is_elsewhere(error: boto.ClientError) -> bool:
    status = _status(error)
    is_told = status == 400 and "x-amz-bucket-region" in error.response.get("ResponseMetadata", {}).get(
        "HTTPHeaders", {}
    )
    return status in (301, 307) or _code(error) in _ELSEWHERE or (is_told and _is_mute(error))


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _translate_response(error: boto.ClientError, what: str, bucket: str) -> TitanError:
    """Translate a server response by its error code, or by its HTTP status (responses to HEAD have no body)."""
    code, status, operation = _code(error), _status(error), str(error.operation_name)
    message = str(error.response.get("Error", {}).get("Message", ""))
    text = f"{what}: {code or status}: {redact(message)}".rstrip(": .")
    if code == "NoSuchBucket" or (code in _NOT_FOUND and operation == "HeadBucket"):
        return NotFoundError(
            f"{what}: bucket {bucket!r} does not exist here; create it, or check the name and the endpoint"
        )
    if status == 404 and operation in ("ListObjectsV2", "DeleteObjects"):
        return TransientStoreError(f"{text}; a bucket was asked, so this is not S3's answer")
    if code in _NOT_FOUND or status == 404:
        return NotFoundError(f"{what}: {_ADVICE.get(code, 'no such object')}")
    if code in ("412", "PreconditionFailed") or status == 412:
        if operation in ("PutObject", "CompleteMultipartUpload"):
            return ConditionFailedError(f"{what}: another writer was first")
        return TransientStoreError(f"{text}; no condition was asked, so this is not S3's answer")
    if _is_elsewhere(error):
        return StoreError(f"{text}; {_where_it_is(error)}")
    return error_of(code, status, text, operation, _clock(error))


def error_of(code: str, status: int, text: str, operation: str, clock: str = "") -> TitanError:
    """The error for a code of S3's (or a status, where there is none); `text` gets what to do next."""
    advice = f"; {_ADVICE[code]}" if code in _ADVICE else ""
    if code == "RequestTimeTooSkewed":
        return PermissionDeniedError(f"{text}; the clock of this machine is wrong{clock}: set it (NTP) and start again")
    if _ADVICE.get(code) == _FULL or status == 507:
        return StoreError(f"{text}; {_FULL}")
    if code in _DENIED or status in (401, 403):
        return PermissionDeniedError(f"{text}{advice or _denied(code, operation)}")
    if code in _TRANSIENT or (status >= 500 and status != 501) or status == 429:
        return TransientStoreError(f"{text}{advice}")
    return StoreError(f"{text}{advice}")


def _denied(code: str, operation: str) -> str:
    if code in ("AccessDenied", "403", "Forbidden"):
        needed = _PERMISSION.get(operation, "s3:PutObject")
        return f"; these credentials need {needed}, or are not the right ones: {SET_CREDENTIALS}"
    return f"; check the credentials and their permissions: {SET_CREDENTIALS}"


def _where_it_is(error: boto.ClientError) -> str:
    region, endpoint = region_elsewhere(error), str(error.response.get("Error", {}).get("Endpoint", ""))
    if region is not None:
        return f"the bucket is in another region: set AWS_REGION={region}, and check AWS_ENDPOINT_URL if it is set"
    at = f" (the server names {redact(endpoint)[:200]})" if endpoint else ""
    return f"the bucket is in another region or at another endpoint{at}: set AWS_REGION or AWS_ENDPOINT_URL"


def _clock(error: boto.ClientError) -> str:
    date = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return f" (the server's says {str(date)[:40]})" if date else ""
