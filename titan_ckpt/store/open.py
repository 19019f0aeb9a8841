"""Open the store of a URL: which client serves it, with which options."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from titan_ckpt.arguments import check_type, check_word
from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.location import StrPath, normalise, redact, scheme, url_text
from titan_ckpt.store.base import RetryPolicy, Store
from titan_ckpt.store.clients.fsspec_import import import_fsspec
from titan_ckpt.store.clients.options import CLIENTS, Options, StorageOptions, current_settings

log = logging.getLogger(__name__)
_CLOUD = ("gs", "gcs", "az", "abfs", "abfss")


def open_store(
    url: StrPath, *, storage_options: Options = None, filesystem: Any = None, client: str | None = None,
    retry_policy: RetryPolicy | None = None, **options: Any,
) -> Store:  # fmt: skip
    """The store for `url`. `storage_options` (or keyword arguments) are those of fsspec's file system for its scheme.

    They come before fsspec's own configuration (`~/.config/fsspec`, `FSSPEC_*`). `filesystem` is an fsspec file system to use
    as it is; `url` is then a path in it. `client` serves `s3://`: `botocore`, `s3fs`, or `auto`, which is botocore unless an
    option needs s3fs. ConfigError for an unknown option, MissingExtraError if a library is missing.
    """
    check_type(retry_policy, "retry_policy", RetryPolicy, or_none=True, hint="RetryPolicy(...)")
    check_type(storage_options, "storage_options", Mapping, or_none=True, hint="a mapping of options")
    policy, given = retry_policy or RetryPolicy(), {**(storage_options or {}), **options}
    if filesystem is not None:
        return _on_file_system(url_text(url), policy, filesystem, given)
    url, settings = normalise(url), current_settings()
    client = client or settings.client
    check_word(client, CLIENTS, "client")
    if scheme(url) == "file":
        from titan_ckpt.store.local import FileStore  # import only the backend that is needed

        if given:
            raise UsageError(f"{url}: a local folder has no storage options, but {', '.join(given)} was given")
        return FileStore(url)
    import_fsspec()
    asked = {**settings.options, **given}
    if scheme(url) in ("s3", "s3a"):
        return _open_s3(url, policy, asked, client)
    if scheme(url) in _CLOUD:
        return _open_cloud(url, policy, asked)
    from titan_ckpt.store.any_fsspec import FsspecStore  # importing fsspec takes 0.1 s

    return FsspecStore(url, policy, **asked)


def can_open(url: StrPath) -> bool:
    """Whether `url` is well formed and its scheme one that some client serves; nothing is opened."""
    try:
        kind = scheme(url_text(url))
    except UsageError:
        return False
    if kind in ("file", "s3", "s3a", *_CLOUD):
        return True
    from titan_ckpt.store.any_fsspec import schemes  # importing fsspec takes 0.1 s

    return kind in schemes()


def _open_cloud(url: str, policy: RetryPolicy, asked: StorageOptions) -> Store:
    from titan_ckpt.store.clients.extras import missing_library

    try:
        from titan_ckpt.store.clients.obstore_store import ObstoreStore  # obstore is an extra
    except ImportError as error:
        raise missing_library(scheme(url), redact(url), error) from error
    store = ObstoreStore(url, policy, asked)
    log.info("client: obstore for %s", store)
    return store


def _open_s3(url: str, policy: RetryPolicy, given: StorageOptions, client: str) -> Store:
    from titan_ckpt.store.clients.extras import missing_library
    from titan_ckpt.store.clients.fsspec_settings import configured
    from titan_ckpt.store.clients.s3_names import s3_request

    try:
        where = redact(url)
        configuration = {n: v for n, v in configured("s3", "s3a").items() if n not in given}
        s3_request(configuration, where, origin=" (in fsspec's configuration: ~/.config/fsspec or FSSPEC_S3_*)")
        request = s3_request({**configuration, **given}, where)
        chosen, why = _client_for(client, request.unmet, where)
        log.info("client: %s for %s (%s)", chosen, where, why)
        if chosen == "s3fs":
            from titan_ckpt.store.clients.s3fs_store import S3fsStore

            return S3fsStore(url, policy, request.options)
        from titan_ckpt.store.s3 import S3Store  # botocore is an extra and slow to import
        from titan_ckpt.store.s3_client import S3Options

        return S3Store(url, policy, S3Options(**request.options))
    except ImportError as error:
        raise missing_library(scheme(url), where, error) from error


def _client_for(client: str, unmet: tuple[str, ...], where: str) -> tuple[str, str]:
    """(The client for `s3://`, why). Only s3fs can honour the options `unmet`."""
    if client == "botocore" and unmet:
        raise ConfigError(
            f"{where}: the botocore client cannot honour {', '.join(unmet)}; leave that out, or choose s3fs"
        )
    chosen = "s3fs" if client == "s3fs" or unmet else "botocore"
    if client == chosen:
        return chosen, "as chosen"
    return chosen, f"only it honours {', '.join(unmet)}" if unmet else "it honours all that was asked, and is faster"


def _on_file_system(path: str, policy: RetryPolicy, filesystem: Any, options: StorageOptions) -> Store:
    from titan_ckpt.store.clients.instances import on_file_system

    if options:
        raise UsageError(f"a file system has its options already, but {', '.join(options)} was given as well")
    store = on_file_system(path, policy, filesystem)
    log.info("client: %s for %s (as given)", type(filesystem).__name__, store)
    return store
