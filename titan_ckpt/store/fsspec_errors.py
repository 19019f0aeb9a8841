"""Translate the errors of fsspec file systems to ours, by what their implementations really raise.

A FileNotFoundError is not always the store's word that nothing is there. fsspec's HTTP file system raises it for any failure of
a request, 503 and timeouts included (implementations/http.py, `_info`); its FTP file system for any FTP error
(implementations/ftp.py, `ls`); gcsfs for a bucket whose GET failed (gcsfs/core.py, `_info`). The error that it replaced is its
`__cause__` or `__context__`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from titan_ckpt.errors import (
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TitanError,
    TransientStoreError,
)
from titan_ckpt.location import redact

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
# What network file systems report when the network or the server is at fault.
_TRANSIENT = frozenset(
    {
        errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH,
        errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOBUFS,
    }
)  # fmt: skip
_GONE = frozenset({404, 410})
_SAYS_ABSENT = re.compile(r"not.?found|no.?such|does.?not.?exist", re.IGNORECASE)
_SAYS_TRANSIENT = re.compile(
    r"time.?out|timed.?out|temporar|unavailable|throttl|slow.?down|connection|disconnect", re.I
)


def translate(error: Exception, where: str) -> TitanError:
    """The StoreError for what an fsspec file system raised at `where`."""
    text = f"{where}: {type(error).__name__}: {redact(str(error))}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        hidden = hidden_failure(error)
        if hidden is None:
            return NotFoundError(f"{where}: no such file or folder")
        return TransientStoreError(f"{text}, because of {type(hidden).__name__}: {redact(str(hidden))}")
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(text)
    if isinstance(error, PermissionError):
        return PermissionDeniedError(text)
    return TransientStoreError(text) if _is_transient(error) else StoreError(text)


def hidden_failure(error: BaseException) -> BaseException | None:
    """The failure that a "not found" was made of, None if the store itself said that nothing is there."""
    return next((inner for inner in _chain(error) if not _is_absence(inner)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    while True:
        inner = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if inner is None or id(inner) in seen:
            return
        seen.add(id(inner))
        yield inner
        error = inner


def _is_absence(error: BaseException) -> bool:
    """Whether `error` is a store's, or an index's, way to say that there is no such object."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | LookupError | StopIteration):
        return True
    status = _status(error)
    if status is not None:
        return status in _GONE
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ABSENT
    return _SAYS_ABSENT.search(f"{type(error).__name__} {error}") is not None


def _is_transient(error: Exception) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | EOFError):
        return True
    status = _status(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT
    return _SAYS_TRANSIENT.search(type(error).__name__) is not None


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error of aiohttp, requests, azure, gcsfs or botocore; of FTP, 404 for "no such file" (550)."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
    for name in ("status", "status_code", "code"):
        found = getattr(error, name, None) if found is None else found
    if isinstance(found, str) and found.isdigit():
        found = int(found)
    if found is None and type(error).__module__ == "ftplib":
        return {"5": 404, "4": 503}.get(str(error)[:1], 503)
    return found if isinstance(found, int) and 100 <= found < 600 else None
