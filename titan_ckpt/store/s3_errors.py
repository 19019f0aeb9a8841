"""Translate errors of botocore and S3 to ours: not found, denied, transient, or permanent, with what to do next."""

from __future__ import annotations

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
    "InvalidSecurity", "InvalidToken", "RequestTimeTooSkewed", "SignatureDoesNotMatch", "TokenRefreshRequired", "Unauthorized",
}  # fmt: skip
_TRANSIENT = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "InternalServerError", "OperationAborted",
    "RequestLimitExceeded", "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
}  # fmt: skip
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

SET_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (and AWS_ENDPOINT_URL where it is not AWS)"
)


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
        return StoreError(
            f"{what}: TLS failed: {redact(str(error))}; check the endpoint's certificate or AWS_CA_BUNDLE"
        )
    if isinstance(error, _CONNECTION):
        return TransientStoreError(f"{what}: {_connection_text(error)}")
    if isinstance(error, _UNREADABLE) and not isinstance(error, boto.BotoCoreError):
        kind = type(error).__name__
        return TransientStoreError(f"{what}: the answer cannot be understood: {kind}: {redact(str(error))}")
    return StoreError(f"{what}: {type(error).__name__}: {redact(str(error))}")


def _connection_text(error: Exception) -> str:
    if isinstance(error, boto.EndpointConnectionError):
        endpoint = redact(str(error.kwargs.get("endpoint_url")))
        return f"no connection to {endpoint}; check that the server runs and AWS_ENDPOINT_URL"
    return f"{type(error).__name__}: {redact(str(error))}"


def _translate_response(error: boto.ClientError, what: str, bucket: str) -> TitanError:
    """Translate a server response by its error code, or by its HTTP status (responses to HEAD have no body)."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    message = str(error.response.get("Error", {}).get("Message", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    text = f"{what}: {code or status}: {message}".rstrip(": ")
    if code == "NoSuchBucket" or (code in _NOT_FOUND and error.operation_name == "HeadBucket"):
        return NotFoundError(
            f"{what}: bucket {bucket!r} does not exist here; create it, or check the name and the endpoint"
        )
    if status == 404 and error.operation_name in ("ListObjectsV2", "DeleteObjects"):
        return TransientStoreError(f"{text}; a bucket was asked, so this is not S3's answer")
    if code in _NOT_FOUND or status == 404:
        return NotFoundError(f"{what}: no such object")
    if code in ("412", "PreconditionFailed") or status == 412:
        return ConditionFailedError(f"{what}: another writer was first")
    if code in _DENIED or status in (401, 403):
        return PermissionDeniedError(f"{text}; check the credentials and their permissions: {SET_CREDENTIALS}")
    if code in _TRANSIENT or status >= 500 or status == 429:
        return TransientStoreError(text)
    if status in (301, 307) or code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        return StoreError(f"{text}; the bucket is in another region: set AWS_REGION")
    return StoreError(text)
