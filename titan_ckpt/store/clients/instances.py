"""Stores on a file system that the caller has made."""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from titan_ckpt.arguments import check_type
from titan_ckpt.errors import UsageError
from titan_ckpt.store.any_fsspec import FsspecStore
from titan_ckpt.store.base import RetryPolicy, Store
from titan_ckpt.store.clients.fsspec_settings import check_no_ftp
from titan_ckpt.store.local import FileStore


def on_file_system(path: str, policy: RetryPolicy, filesystem: Any) -> Store:
    """The store at `path` (with or without its scheme) of an fsspec file system. Local disks get the store that syncs."""
    check_type(filesystem, "filesystem", AbstractFileSystem, hint="an fsspec file system")
    if getattr(filesystem, "asynchronous", False):
        raise UsageError("filesystem is asynchronous, which cannot be used here; make it without asynchronous=True")
    root = str(filesystem._strip_protocol(path)).rstrip("/")
    if isinstance(filesystem, LocalFileSystem):
        return FileStore(root)
    protocol = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    check_no_ftp([protocol], f"{protocol}://")
    url = f"{protocol}://{root.lstrip('/')}"
    if protocol in ("s3", "s3a"):
        from titan_ckpt.store.clients.s3fs_store import S3fsStore  # needs botocore

        return S3fsStore(url, policy, filesystem=filesystem)
    return FsspecStore(url, policy, filesystem=filesystem, root=root)  # a URL would lose the slash of an absolute path
