"""Open the store of a URL."""

from __future__ import annotations

from typing import Any

from titan_ckpt.arguments import check_type
from titan_ckpt.location import StrPath, normalise, scheme
from titan_ckpt.store.base import RetryPolicy, Store


def open_store(url: StrPath, *, retry_policy: RetryPolicy | None = None, **options: Any) -> Store:
    """The store for `url`. `options` are passed to the backend; secrets belong in its own configuration.

    Plain paths, `file`, `s3` and `s3a` have backends of their own; every other scheme goes to fsspec.
    """
    url = normalise(url)
    check_type(retry_policy, "retry_policy", RetryPolicy, or_none=True, hint="RetryPolicy(...)")
    policy = retry_policy or RetryPolicy()
    if scheme(url) == "file":
        from titan_ckpt.store.local import FileStore  # import only the backend that is needed

        return FileStore(url)
    if scheme(url) in ("s3", "s3a"):
        from titan_ckpt.store.s3 import S3Store  # botocore is an extra and slow to import

        return S3Store(url, policy, **options)
    from titan_ckpt.store.any_fsspec import FsspecStore  # importing fsspec takes 0.1 s

    return FsspecStore(url, policy, **options)
