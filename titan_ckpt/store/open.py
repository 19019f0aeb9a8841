"""The store behind a URL, chosen by its scheme."""

from __future__ import annotations

from typing import Any

from titan_ckpt.location import normalise, scheme
from titan_ckpt.store.base import RetryPolicy, Store


def open_store(url: str, *, retry_policy: RetryPolicy | None = None, **options: Any) -> Store:
    """The store for `url`, chosen by scheme; `options` go to the fsspec file system (secrets belong in its own config).

    `file` and plain paths, `s3` and `s3a` have backends of their own; every other scheme is what fsspec knows.
    """
    url = normalise(url)
    policy = retry_policy or RetryPolicy()
    if scheme(url) == "file":
        from titan_ckpt.store.local import FileStore  # every backend stands on this module

        return FileStore(url)
    if scheme(url) in ("s3", "s3a"):
        from titan_ckpt.store.s3 import S3Store  # botocore is an extra and slow to import

        return S3Store(url, policy, **options)
    from titan_ckpt.store.any_fsspec import FsspecStore  # fsspec costs 0.1 s, which `debug` on local files need not pay

    return FsspecStore(url, policy, **options)
