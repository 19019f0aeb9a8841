"""The options of `gs://` and `az://`, by gcsfs's and adlfs's names, and the clients that they make."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, cast

from obstore import exceptions as theirs
from obstore.store import AzureStore, GCSStore

from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.location import redact_text, scheme
from titan_ckpt.store.clients.fsspec_settings import configured
from titan_ckpt.store.clients.options import check_known
from titan_ckpt.store.clients.s3_names import typed_value

GS, AZ = ("gs", "gcs"), ("az", "abfs", "abfss", "azure")
_GS_NAMES = frozenset({"token", "anon", "endpoint_url", "project"})
# adlfs's name: obstore's.
_AZ_NAMES = {
    "account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key", "tenant_id": "tenant_id",
    "client_id": "client_id", "client_secret": "client_secret", "endpoint_url": "endpoint", "anon": "skip_signature",
    "connection_string": "",
}  # fmt: skip
_IN_CONNECTION = {
    "AccountName": "account_name", "AccountKey": "account_key", "BlobEndpoint": "endpoint", "SharedAccessSignature": "sas_key",
}  # fmt: skip


def make_store(url: str, options: Mapping[str, Any], where: str, *, client: Any, retries: Any) -> tuple[Any, str]:
    """(obstore's client of the bucket or container, the prefix in it). ConfigError for options that are wrong."""
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not bucket or "?" in url or ":" in bucket:
        raise UsageError(f"{where}: names no bucket, or has credentials or a query; use {scheme(url)}://bucket/folder")
    is_gs = scheme(url) in GS
    merged = {**configured(*(GS if is_gs else AZ)), **options}
    merged = {name: value for name, value in merged.items() if value is not None}
    check_known(merged, _GS_NAMES if is_gs else dict(_AZ_NAMES), where)
    for name in merged:
        if name == "anon":
            merged[name] = typed_value(merged[name], bool, f"{where}: option anon")
        elif name != "token":
            merged[name] = typed_value(merged[name], str, f"{where}: option {name}")
    try:
        settings = _gs_settings(merged, where) if is_gs else None
        if settings is not None:
            plain = _plain(client, settings.get("base_url"))
            return GCSStore(bucket, config=cast(Any, settings), client_options=plain, retry_config=retries), prefix
        container, settings = _az_settings(bucket, merged)
        plain = _plain(client, settings.get("endpoint") or _az_endpoint())
        return AzureStore(container, config=cast(Any, settings), client_options=plain, retry_config=retries), prefix
    except (theirs.BaseError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot make a client: {redact_text(str(error).partition(chr(10))[0])[:300]}"
        ) from error


def _plain(client: Mapping[str, Any], endpoint: str | None) -> Any:
    """`client`, allowed to do without TLS where the endpoint says http."""
    return {**client, **({"allow_http": True} if str(endpoint).startswith("http://") else {})}


def _az_endpoint() -> str | None:
    """The endpoint that obstore takes from the environment."""
    return os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT")


def _gs_settings(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    token, settings = options.get("token"), dict[str, Any]()
    endpoint = options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    if endpoint:
        settings["base_url"] = (endpoint if "://" in endpoint else f"http://{endpoint}").rstrip("/")
    if token == "anon" or options.get("anon") or (endpoint and token is None):
        settings["skip_signature"] = True
    elif isinstance(token, Mapping):
        settings["service_account_key"] = json.dumps(dict(token))
        if "gcs_base_url" in token:
            settings["base_url"] = str(token["gcs_base_url"])
    elif isinstance(token, str) and token not in ("google_default", "cloud", "cache"):
        if not os.path.isfile(os.path.expanduser(token)):
            raise ConfigError(
                f"{where}: option token is neither the path of a key file, a mapping, `anon` nor `google_default`"
            )
        settings["service_account"] = os.path.expanduser(token)
    return settings


def _az_settings(container: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(Container, settings); `container@account.dfs.core.windows.net` names the account as well."""
    container, at, host = container.partition("@")
    settings = {"account_name": host.partition(".")[0]} if at else dict[str, Any]()
    text = options.get("connection_string") or os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    for pair in text.split(";"):
        name, _, value = pair.partition("=")
        if name in _IN_CONNECTION and value:
            settings[_IN_CONNECTION[name]] = value
    settings |= {_AZ_NAMES[name]: value for name, value in options.items() if _AZ_NAMES[name]}
    return container, settings
